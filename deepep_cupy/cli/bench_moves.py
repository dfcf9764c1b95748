"""``bench dispatch | combine | roundtrip``: one size, several numbers of SMs, several modes."""

from __future__ import annotations

import argparse
from typing import Any

from deepep_cupy.cli.bench_options import (
    add_common,
    check_common,
    modes_of_names,
    numbers,
    positive,
    world,
)
from deepep_cupy.cli.bench_output import Report, Steps
from deepep_cupy.errors import ContractError
from deepep_cupy.testing.baselines import NcclFailedError, connect, why_no_nccl
from deepep_cupy.testing.bench import Bench, Load, Ranks, Shape
from deepep_cupy.testing.bench_measure import (
    Meter,
    Rates,
    ceilings_of,
    count_ceilings,
    measure_load,
    measure_nccl,
)
from deepep_cupy.testing.bench_modes import DEFAULTS, Mode, available, parse
from deepep_cupy.testing.ceilings import CeilingKernel

__all__ = ["Moves", "Run", "shape_of"]


class Moves:
    """A sub-command of ``bench``, as a module would be one.

    Args:
        operation: ``dispatch``, ``combine`` or ``roundtrip``.
    """

    def __init__(self, operation: str) -> None:
        self._operation = operation

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add its arguments."""
        default = ",".join(DEFAULTS[self._operation])
        parser.add_argument(
            "--tokens", type=positive, default=4096, metavar="T", help="of each rank"
        )
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
        """Measure and print. Collective."""
        operation = self._operation
        check_common(operation, args)
        names = args.mode or ",".join(DEFAULTS[operation])
        modes = modes_of_names(operation, names, lambda name: parse(operation, name))
        run = Run(operation, world(operation), shape_of(args, args.tokens), args)
        steps = Steps(
            len(args.sms) * (len(modes) + count_ceilings(modes)) + 1, shown=run.ranks.rank == 0
        )
        seen: set[int | None] = set()
        for number, num_sms in enumerate(args.sms):
            with run.bench(modes, num_sms) as bench:
                modes = run.settle(bench, modes)
                if bench.num_sms not in seen:
                    seen.add(bench.num_sms)
                    last = number == len(args.sms) - 1 or not run.ranks.gpu
                    _measure(run, bench, modes, steps, with_nccl=last)
                if run.ranks.gpu and bench.num_sms != num_sms:
                    run.report.note(f"{num_sms} SMs: a rank gets no more than {bench.num_sms}")
            if not run.ranks.gpu:
                break
        steps.clear()
        run.close()
        run.report.publish(args.json, args.plot)
        return 0


def _measure(run: Run, bench: Bench, modes: list[Mode], steps: Steps, *, with_nccl: bool) -> None:
    """All that is measured on one Buffer."""
    load, rows = Load(bench, run.shape.num_tokens), run.report.rows
    rates: Rates = {}
    if run.kernel is not None:
        found, rates = ceilings_of(load, modes, run.kernel, run.meter, steps)
        rows += found
    rows += measure_load(load, modes, run.meter, rates, steps)
    if with_nccl and run.connection is not None:
        rows.append(measure_nccl(load, modes[0].operation, run.connection, run.meter, rates, steps))


def shape_of(args: argparse.Namespace, tokens: int) -> Shape:
    """Sizes from the options."""
    return Shape(
        num_tokens=tokens,
        hidden=args.hidden,
        num_topk=args.topk,
        num_experts=args.experts,
        dtype=args.dtype,
        routing=args.routing,
        exponent=args.exponent,
        num_hot=args.hot,
        seed=args.seed,
    )


class Run:
    """One run of a bench: what its Buffers share.

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
        self.report = Report(command, shape, self.ranks, args.repeats, tokens)
        self.kernel: CeilingKernel | None = None
        self.connection: Any = None
        self._command, self._args = command, args
        self._settled = False

    def bench(self, modes: list[Mode], num_sms: int | None) -> Bench:
        """A Buffer and what is around it. Collective."""
        return Bench(
            self.ranks, self.shape, num_sms=num_sms, modes=modes, timeout_s=self._args.timeout
        )

    def settle(self, bench: Bench, modes: list[Mode], *, ceilings: bool = True) -> list[Mode]:
        """What of ``modes`` this engine has; the first time, clocks and competitors too.
        Collective."""
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
            self.meter = Meter(self.ranks, self._args.repeats)
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
