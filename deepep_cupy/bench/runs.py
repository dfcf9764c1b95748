"""``bench dispatch | combine | roundtrip``: one size, several numbers of SMs, several modes."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
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
from deepep_cupy.bench.modes import DEFAULTS, Mode, available, parse
from deepep_cupy.bench.nccl import NcclFailedError, connect, why_no_nccl
from deepep_cupy.bench.report import Report, Steps
from deepep_cupy.bench.routing import ROUTINGS
from deepep_cupy.bench.workload import Bench, Ranks, Shape, Workload
from deepep_cupy.cli.ranks import world
from deepep_cupy.errors import ContractError, PlatformError
from deepep_cupy.protocol.sizes import MAX_TOPK

__all__ = [
    "OperationBench",
    "Run",
    "add_common",
    "add_latency_arguments",
    "check_common",
    "modes_of_names",
    "numbers",
    "parse_any",
    "positive",
    "run_latency",
    "shape_of",
]


class OperationBench:
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
        run = Run(operation, world(f"bench {operation}"), shape_of(args, args.tokens), args)
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
    load, rows = Workload(bench, run.shape.num_tokens), run.report.rows
    rates: Rates = {}
    if run.kernel is not None:
        found, rates = ceilings_of(load, modes, run.kernel, run.meter, steps)
        rows += found
    rows += measure_workload(load, modes, run.meter, rates, steps)
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


# ---------------- ``bench latency``: few tokens; from Python, from graphs, and what Python itself


_TOKENS = [1 << exponent for exponent in range(9)]
_MODES = "no_wait,uncached,cached,pool"


def add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    parser.add_argument(
        "--tokens", type=numbers, default=_TOKENS, metavar="T,T",
        help="of each rank (default: powers of two from 1 to 256)",
    )  # fmt: skip
    parser.add_argument(
        "--sms", type=positive, metavar="N", help="GPU blocks per operation (default: the Buffer's)"
    )
    parser.add_argument(
        "--mode", default=_MODES, metavar="NAME,NAME",
        help=f"of dispatch and combine, as `bench dispatch` and `bench combine` name them "
        f"(default, as far as the engine has it: {_MODES})",
    )  # fmt: skip
    add_common(parser)


def parse_any(name: str) -> Mode:
    """A mode of dispatch or of combine: their bases differ."""
    operation = "combine" if name.partition("+")[0] in ("pool", "outside") else "dispatch"
    return parse(operation, name)


def run_latency(args: argparse.Namespace) -> int:
    """Measure and print. Collective."""
    check_common("latency", args)
    modes = modes_of_names("latency", args.mode, parse_any)
    shape = shape_of(args, max(args.tokens))
    bench_run = Run("latency", world("bench latency"), shape, args, ",".join(map(str, args.tokens)))
    steps = Steps(len(args.tokens) * (len(modes) + 2), shown=bench_run.ranks.rank == 0)
    # Every size has its graphs, which keep what they write; together not twice the largest's.
    with bench_run.bench(modes * 2, args.sms) as bench:
        modes = bench_run.settle(bench, modes, ceilings=False)
        for tokens in args.tokens:
            _measure_latency(bench_run, bench, tokens, modes, steps)
    steps.clear()
    bench_run.close()
    bench_run.report.publish(args.json, args.plot)
    return 0


def _measure_latency(
    run_latency: Run, bench: Bench, tokens: int, modes: list[Mode], steps: Steps
) -> None:
    """All that is measured for one number of tokens."""
    load, rows = Workload(bench, tokens), run_latency.report.rows
    rows += measure_workload(load, modes, run_latency.meter, {}, steps)
    if run_latency.connection is not None:
        for operation in dict.fromkeys(mode.operation for mode in modes):
            rows.append(
                measure_nccl(load, operation, run_latency.connection, run_latency.meter, {}, steps)
            )


# ---------------------------------------- Options that the benches share, and what is made of them


_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "uint8", "int32")


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def numbers(text: str) -> list[int]:
    """``8,16,24`` as numbers; each once, in this order."""
    return list(dict.fromkeys(positive(part) for part in text.split(",")))


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    add = parser.add_argument
    add("--hidden", type=positive, default=7168, metavar="H", help="elements of a row")
    add("--topk", type=positive, default=8, metavar="K", help="choices of a token")
    add("--experts", type=positive, default=256, metavar="E",
        help="of all ranks; rounded up to a multiple of the ranks")  # fmt: skip
    add("--dtype", choices=_DTYPES, default="bfloat16", help="of rows (default: bfloat16)")
    add("--routing", choices=ROUTINGS, default="uniform",
        help="choices of experts; zipf: more of the low ones, k-hot: a few on rank 0")  # fmt: skip
    add("--exponent", type=float, default=1.0, help="of zipf (default: 1)")
    add("--hot", type=positive, metavar="N", help="experts of k-hot (default: K)")
    add("--seed", type=int, default=0, help="of choices (default: 0)")
    add("--repeats", type=positive, default=20, help="calls a median is taken of (default: 20)")
    add("--engine", choices=("auto", "cuda", "host"), default="auto",
        help="as the Buffer's argument; host: times only")  # fmt: skip
    add("--timeout", type=float, default=60.0, metavar="S", help="timeout_s of the Buffers")
    add("--no-nccl", action="store_true", help="do not compare with NCCL")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--plot", type=Path, metavar="FILE.png", help="draw the times; needs matplotlib")


def check_common(operation: str, args: argparse.Namespace) -> None:
    """What argparse does not know. Raises on every rank, before anything is measured."""

    def refuse(option: str, complaint: str) -> None:
        raise ContractError(f"bench {operation}: argument --{option} {complaint}.")

    if args.topk > min(MAX_TOPK, args.experts):
        refuse("topk", f"must be at most {min(MAX_TOPK, args.experts)}, got {args.topk}")
    if args.hot is not None and not args.topk <= args.hot <= args.experts:
        refuse("hot", f"must be {args.topk} to {args.experts}, got {args.hot}")
    if args.seed < 0:
        refuse("seed", f"must be 0 or more, got {args.seed}")
    for option in ("json", "plot"):
        path = getattr(args, option)
        if path is not None and not path.absolute().parent.is_dir():
            refuse(option, f"must name a file in a folder that exists, got {path}")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise PlatformError(
            f"bench {operation}: --plot needs matplotlib; pip install 'deepep_cupy[examples]'."
        )


def modes_of_names(operation: str, text: str, parse: Callable[[str], Mode]) -> list[Mode]:
    """Modes by their names, separated by commas; each once."""
    try:
        return list(dict.fromkeys(parse(name) for name in text.split(",")))
    except ValueError as error:
        raise ContractError(f"bench {operation}: argument --mode: {error}.") from error
