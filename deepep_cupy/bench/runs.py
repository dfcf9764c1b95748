"""The sub-commands ``bench dispatch``, ``combine``, ``roundtrip`` and ``latency``."""

from __future__ import annotations

import argparse
from typing import Any

from deepep_cupy.bench.ceilings import CeilingKernel
from deepep_cupy.bench.measure import (
    Meter,
    Rates,
    ceilings_of,
    count_ceilings,
    measure_nccl,
    measure_workload,
)
from deepep_cupy.bench.modes import DEFAULTS, Mode, available, parse, parse_any
from deepep_cupy.bench.nccl import NcclFailedError, connect, why_no_nccl
from deepep_cupy.bench.options import (
    add_common,
    check_common,
    counts,
    modes_of_names,
    numbers,
    positive,
    shape_of,
    tokens_of,
)
from deepep_cupy.bench.report import BenchReport, Steps
from deepep_cupy.bench.workload import Bench, Ranks, Shape, Workload
from deepep_cupy.cli.ranks import world
from deepep_cupy.errors import ContractError

__all__ = ["LatencyBench", "OperationBench", "Session"]

_MANY_TOKENS = 4096
_FEW_TOKENS = [1 << exponent for exponent in range(9)]
_LATENCY_MODES = (
    "no_wait,uncached,cached,no_wait+expand,outside,pool,pool+weights,pool+bias,pool+per_rank"
)


class Session:
    """What the Buffers of one bench share: ranks, clocks, the ceiling kernel, NCCL, the report.

    Args:
        command: Its name.
        comm: mpi4py communicator.
        shape: Sizes.
        args: The common options.
        tokens: T, in words.

    Attributes:
        kernel: Of the ceilings; None on the host engine.
        connection: NCCL's, or None.
        meter: The clocks.
    """

    meter: Meter

    def __init__(
        self, command: str, comm: Any, shape: Shape, args: argparse.Namespace, tokens: str = ""
    ) -> None:
        if shape.row_bytes() % 4:
            raise ContractError(
                f"bench {command}: rows must be of a multiple of 4 bytes, got {shape.row_bytes()}; "
                f"change --hidden."
            )
        self.shape = shape
        self.ranks = Ranks(comm, args.engine)
        self.report = BenchReport(command, shape, self.ranks, args.repeats, tokens)
        self.kernel: CeilingKernel | None = None
        self.connection: Any = None
        self._command, self._args = command, args
        self._settled = False

    def bench(self, modes: list[Mode], num_sms: int | None) -> Bench:
        """Make a Buffer for these modes. Collective."""
        return Bench(
            self.ranks, self.shape, num_sms=num_sms, modes=modes, timeout_s=self._args.timeout
        )

    def settle(self, bench: Bench, modes: list[Mode], *, ceilings: bool = True) -> list[Mode]:
        """Return those of ``modes`` that this engine has. Collective.

        The first call also makes the clocks, the ceiling kernel and the connection of NCCL.

        Raises:
            ContractError: The engine has none of them.
        """
        taken, left = available(modes, bench.engine_modes, self.shape.dtype)
        for name, why in left.items():
            self.report.note(f"not measured: {name}: {why}")
        if not taken:
            raise ContractError(
                f"bench {self._command}: nothing can be measured: "
                f"{'; '.join(f'{name}: {why}' for name, why in left.items())}."
            )
        if not self._settled:
            self._settled = True
            self.meter = Meter(self.ranks, self._args.repeats, self._args.busy)
            if self.ranks.gpu and any(not mode.capturable for mode in taken):
                self.report.note(
                    f"calls in which the host waits: behind {self._args.busy} x 256 MB (--busy)"
                )
            if self.ranks.gpu and ceilings and bench.ranks.device is not None:
                self.kernel = CeilingKernel(self.ranks.comm, bench.ranks.device)
            if self.ranks.gpu and not self._args.no_nccl:
                self._connect()
        return taken

    def _connect(self) -> None:
        why = why_no_nccl(self.ranks.comm, self.ranks.gpus, self.shape.dtype)
        if not why:
            try:
                self.connection = connect(self.ranks.comm)
            except NcclFailedError as error:
                why = str(error)
        if why:
            self.report.note(why)

    def close(self) -> None:
        """Give NCCL's memory back. Collective."""
        if self.connection is not None:
            self.ranks.synchronize()
            self.connection.destroy()
            self.connection = None


class OperationBench:
    """``bench dispatch``, ``combine`` or ``roundtrip``: one size, several numbers of SMs.

    Args:
        operation: ``dispatch``, ``combine`` or ``roundtrip``.
    """

    def __init__(self, operation: str) -> None:
        self._operation = operation

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the sub-command."""
        default = ",".join(DEFAULTS[self._operation])
        parser.add_argument(
            "--tokens", type=counts, metavar="T,T",
            help="of every rank, or of each (default: 4096, or what a file of --routing has)",
        )  # fmt: skip
        parser.add_argument(
            "--sms", type=numbers, default=[8, 16, 24, 64], metavar="N,N",
            help="GPU blocks per operation, one Buffer each (default: 8,16,24,64)",
        )  # fmt: skip
        parser.add_argument(
            "--mode", metavar="NAME,NAME",
            help=f"what to measure (default, as far as the engine has it: {default})",
        )  # fmt: skip
        add_common(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Measure, print and write; the exit code. Collective over COMM_WORLD."""
        operation = self._operation
        check_common(operation, args)
        names = args.mode or ",".join(DEFAULTS[operation])
        modes = modes_of_names(operation, names, lambda name: parse(operation, name))
        comm = world(f"bench {operation}")
        tokens = tokens_of(operation, args, [_MANY_TOKENS], comm.size)
        if len(tokens) not in (1, comm.size):
            raise ContractError(
                f"bench {operation}: argument --tokens must be one number or {comm.size}, one a "
                f"rank, got {len(tokens)}."
            )
        in_words = ",".join(map(str, tokens))
        session = Session(operation, comm, shape_of(args, tokens), args, in_words)
        mine = tokens[comm.rank % len(tokens)]
        steps = Steps(
            len(args.sms) * (len(modes) + count_ceilings(modes)) + 1, shown=session.ranks.rank == 0
        )
        seen: set[int | None] = set()
        for number, num_sms in enumerate(args.sms):
            with session.bench(modes, num_sms) as bench:
                modes = session.settle(bench, modes)
                if bench.num_sms not in seen:
                    seen.add(bench.num_sms)
                    last = number == len(args.sms) - 1 or not session.ranks.gpu
                    self._measure(session, Workload(bench, mine), modes, steps, with_nccl=last)
                if session.ranks.gpu and bench.num_sms != num_sms:
                    session.report.note(f"{num_sms} SMs: a rank gets no more than {bench.num_sms}")
            if not session.ranks.gpu:
                break
        steps.clear()
        session.close()
        session.report.publish(args.json, args.plot)
        return 0

    @staticmethod
    def _measure(
        session: Session, workload: Workload, modes: list[Mode], steps: Steps, *, with_nccl: bool
    ) -> None:
        """Measure everything on one Buffer: ceilings, calls and, once, NCCL."""
        rows = session.report.rows
        rates: Rates = {}
        if session.kernel is not None:
            found, rates = ceilings_of(workload, modes, session.kernel, session.meter, steps)
            rows += found
        rows += measure_workload(workload, modes, session.meter, rates, steps)
        if with_nccl and session.connection is not None:
            operation, connection = modes[0].operation, session.connection
            rows.append(measure_nccl(workload, operation, connection, session.meter, rates, steps))


class LatencyBench:
    """``bench latency``: few tokens; from Python, from graphs, and what Python itself takes."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the sub-command."""
        parser.add_argument(
            "--tokens", type=numbers, metavar="T,T",
            help="sizes, alike on all ranks (default: powers of two from 1 to 256)",
        )  # fmt: skip
        parser.add_argument(
            "--sms",
            type=positive,
            metavar="N",
            help="GPU blocks per operation (default: the Buffer's)",
        )
        parser.add_argument(
            "--mode", default=_LATENCY_MODES, metavar="NAME,NAME",
            help="of dispatch and combine, as `bench dispatch` and `bench combine` name them "
            f"(default, as far as the engine has it: {_LATENCY_MODES})",
        )  # fmt: skip
        add_common(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Measure, print and write; the exit code. Collective over COMM_WORLD."""
        check_common("latency", args)
        modes = modes_of_names("latency", args.mode, parse_any)
        comm = world("bench latency")
        sizes = tokens_of("latency", args, _FEW_TOKENS, comm.size)
        in_words = ",".join(map(str, sizes))
        session = Session("latency", comm, shape_of(args, sizes), args, in_words)
        steps = Steps(len(sizes) * (len(modes) + 2), shown=session.ranks.rank == 0)
        # Every size has its graphs, which keep what they write; together not twice the largest's.
        with session.bench(modes * 2, args.sms) as bench:
            modes = session.settle(bench, modes, ceilings=False)
            for tokens in sizes:
                self._measure(session, bench, tokens, modes, steps)
        steps.clear()
        session.close()
        session.report.publish(args.json, args.plot)
        return 0

    @staticmethod
    def _measure(
        session: Session, bench: Bench, tokens: int, modes: list[Mode], steps: Steps
    ) -> None:
        """Measure everything for one number of tokens: calls and NCCL."""
        workload, rows = Workload(bench, tokens), session.report.rows
        rows += measure_workload(workload, modes, session.meter, {}, steps)
        if session.connection is None:
            return
        for operation in dict.fromkeys(mode.operation for mode in modes):
            connection = session.connection
            rows.append(measure_nccl(workload, operation, connection, session.meter, {}, steps))
