"""``bench tune``: how many blocks, and how many tokens a block, are best on these GPUs.

Blocks are measured with many tokens, tokens a block with few, in graphs. The figures go into the
cache folder, where later Buffers of as many ranks and rows as long find them
(``engines.gpu.tuning``).
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from deepep_cupy.bench.measure import measure_workload
from deepep_cupy.bench.modes import Mode, parse
from deepep_cupy.bench.options import add_common, check_common, numbers, positive, shape_of
from deepep_cupy.bench.report import Steps
from deepep_cupy.bench.runs import Session
from deepep_cupy.bench.workload import Workload
from deepep_cupy.cli.ranks import world
from deepep_cupy.engines.gpu.tuning import Key, Tuning, best_blocks, best_tokens, save
from deepep_cupy.errors import PlatformError

__all__ = ["add_arguments", "run"]

_MODES = [parse("dispatch", "no_wait"), parse("dispatch", "cached"), parse("combine", "pool")]
_BLOCKS = [8, 12, 16, 20, 24, 32, 48, 64]
_TOKENS_A_BLOCK = (1, 2, 4, 8)
Times = dict[int, list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench tune``."""
    add = parser.add_argument
    add("--tokens", type=positive, default=4096, metavar="T", help="many (default: 4096)")
    add("--few", type=positive, default=64, metavar="T", help="few (default: 64)")
    add("--blocks", type=numbers, default=_BLOCKS, metavar="N,N",
        help=f"to choose among (default: {','.join(map(str, _BLOCKS))})")  # fmt: skip
    add("--dry-run", action="store_true", help="measure and print, write nothing")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. Collective over COMM_WORLD.

    Raises:
        PlatformError: On every rank: there are no GPUs.
    """
    check_common("tune", args)
    args.no_nccl = True
    comm = world("bench tune")
    session = Session("tune", comm, shape_of(args, [args.tokens]), args)
    few = Session("tune", comm, shape_of(args, [args.few]), args)
    total = len(_MODES) * (len(args.blocks) + len(_TOKENS_A_BLOCK))
    steps = Steps(total, shown=session.ranks.rank == 0)
    many: Times = {}
    for blocks in args.blocks:
        found = _measure(session, args.tokens, blocks, None, steps)
        many.setdefault(*found)
    chosen = Tuning(blocks=best_blocks(many))
    times: Times = {}
    for tokens in _TOKENS_A_BLOCK:
        tuning = Tuning(chosen.blocks, tokens, tokens)
        times[tokens] = _measure(few, args.few, chosen.blocks, tuning, steps)[1]
    chosen = Tuning(
        chosen.blocks,
        best_tokens({tokens: sum(row[:-1]) for tokens, row in times.items()}),
        best_tokens({tokens: row[-1] for tokens, row in times.items()}),
    )
    steps.clear()
    _tell(session, few, chosen, times, write=not args.dry_run)
    session.report.publish(args.json, args.plot)
    return 0


def _measure(
    session: Session, tokens: int, blocks: int, tuning: Tuning | None, steps: Steps
) -> tuple[int, list[float]]:
    """Times of all modes on a Buffer of its own: in graphs where there are few tokens. With a
    tuning they are not shown: their number of blocks is not that of the Buffer."""
    modes: list[Mode] = list(_MODES)
    with session.bench(modes, blocks) as bench:
        modes = session.settle(bench, modes, ceilings=False)
        if not session.ranks.gpu:
            raise PlatformError("bench tune: there is nothing to choose without GPUs.")
        runtime = bench.runtime
        if tuning is not None:
            runtime.grids = replace(runtime.grids, tuning=tuning)
        rows = measure_workload(Workload(bench, tokens), modes, session.meter, {}, steps)
        if tuning is None:
            session.report.rows += rows
            return int(runtime.grids.most), [row.us for row in rows]
        return blocks, [row.graph_us or row.us for row in rows]


def _tell(session: Session, few: Session, chosen: Tuning, times: Times, *, write: bool) -> None:
    """Add the choice to the report, and write it on rank 0."""
    note, ranks = session.report.note, session.ranks
    for tokens, row in times.items():
        each = ", ".join(
            f"{mode.operation} {mode.name} {time:.1f}"
            for mode, time in zip(_MODES, row, strict=True)
        )
        note(f"{few.shape.num_tokens} tokens, at least {tokens} a block, µs in a graph: {each}")
    note(
        f"best: {chosen.blocks} blocks, {chosen.dispatch_tokens} tokens a block of a dispatch, "
        f"{chosen.combine_tokens} of a combine"
    )
    if ranks.rank or not write:
        return
    properties = ranks.xp.cuda.runtime.getDeviceProperties(ranks.device)
    sharing = ranks.gpus.count(ranks.gpus[0])
    key = Key(properties["name"].decode(), ranks.size, sharing, session.shape.row_bytes())
    path = save(key, chosen)
    note("nothing was kept: the cache folder cannot be used" if path is None else f"kept: {path}")
