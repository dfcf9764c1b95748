"""``bench latency``: few tokens; from Python, from graphs, and what Python itself takes."""

from __future__ import annotations

import argparse

from deepep_cupy.cli.bench_moves import Run, shape_of
from deepep_cupy.cli.bench_options import (
    add_common,
    check_common,
    modes_of_names,
    numbers,
    positive,
    world,
)
from deepep_cupy.cli.bench_output import Steps
from deepep_cupy.testing.bench import Bench, Load
from deepep_cupy.testing.bench_measure import measure_load, measure_nccl
from deepep_cupy.testing.bench_modes import Mode, parse

__all__ = ["add_arguments", "parse_any", "run"]

_TOKENS = [1 << exponent for exponent in range(9)]
_MODES = "no_wait,uncached,cached,pool"


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
    """Measure and print. Collective."""
    check_common("latency", args)
    modes = modes_of_names("latency", args.mode, parse_any)
    shape = shape_of(args, max(args.tokens))
    bench_run = Run("latency", world("latency"), shape, args, ",".join(map(str, args.tokens)))
    steps = Steps(len(args.tokens) * (len(modes) + 2), shown=bench_run.ranks.rank == 0)
    # Every size has its graphs, which keep what they write; together not twice the largest's.
    with bench_run.bench(modes * 2, args.sms) as bench:
        modes = bench_run.settle(bench, modes, ceilings=False)
        for tokens in args.tokens:
            _measure(bench_run, bench, tokens, modes, steps)
    steps.clear()
    bench_run.close()
    bench_run.report.publish(args.json, args.plot)
    return 0


def _measure(run: Run, bench: Bench, tokens: int, modes: list[Mode], steps: Steps) -> None:
    """All that is measured for one number of tokens."""
    load, rows = Load(bench, tokens), run.report.rows
    rows += measure_load(load, modes, run.meter, {}, steps)
    if run.connection is not None:
        for operation in dict.fromkeys(mode.operation for mode in modes):
            rows.append(measure_nccl(load, operation, run.connection, run.meter, {}, steps))
