"""``check``: every case of the table on these ranks, bit by bit against the reference.

Each rank builds the inputs of all ranks from the seed and runs the reference on them, so that
nothing but the calls under test crosses between the ranks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from deepep_cupy import Buffer
from deepep_cupy.cli.progress import Progress
from deepep_cupy.cli.ranks import world
from deepep_cupy.cli.table import columns
from deepep_cupy.errors import ContractError
from deepep_cupy.testing.data import (
    Case,
    cases,
    expected,
    low_latency_cases,
    mode_cases,
    node_cases,
)
from deepep_cupy.testing.round_trip import RoundTrip, buffer_arguments, modes_needed

__all__ = ["add_arguments", "run"]

_RIGHT, _WRONG, _NONE = "ok", "WRONG", "-"
_LEGEND = """\
The words of a case, in this order:
  R, T, H, E, K      ranks, tokens of each rank, elements of a row, experts, choices of a token
  bf16, f32, V7, …   dtype of the rows (V7: opaque items of 7 bytes)
  topk, mask         where rows go: by topk_idx, by is_token_in_rank
  cached             as an earlier dispatch's handle says (cached_mask: one made by a mask)
  int64, noidx       dtype of topk_idx; w, now: with and without topk_weights
  b2, a8             biases of combine, expert_alignment
  random, one, …     choices: random, all one expert, skewed to the low ones, half or nothing chosen
  scales, packed     FP8 rows come with scales; quantize, round, ue8m0: rows are cast to FP8
  colscales          scales_layout="column"
  worst, tight       the host does not wait for the counts
  expand, zeros      the expanded layout, do_zero_padding; perrank, rowweights: of its combine
  stats, out, async  statistics; combine into a given array; async_finish on both calls
  low, v1, hook      low_latency=True; DeepEP V1's low-latency calls, without and with hooks
dispatch, combine: ok, WRONG, or - (rows that cannot be added; a mode the engine does not have)
"""
_Nodes: TypeAlias = tuple[tuple[int, ...], ...]
_BY_NODE = "sums by node"

_MODES: dict[str, Callable[[Case], bool]] = {
    "by topk_idx": lambda case: case.layout == "topk",
    "by is_token_in_rank": lambda case: case.layout == "mask",
    "by a handle": lambda case: case.layout.startswith("cached"),
    "rows with scales": lambda case: case.fp8 in ("scales", "packed"),
    "cast to FP8": lambda case: case.fp8 in ("quantize", "round", "ue8m0"),
    "no wait": lambda case: case.wait != "host",
    "expanded layout": lambda case: case.expand,
    "statistics": lambda case: case.stats,
    "combine into out": lambda case: case.out,
    "events": lambda case: case.background,
    "low latency": lambda case: bool(case.low_latency),
    _BY_NODE: lambda case: case.reduce == "per_node",
}
"""Line of the summary → which cases it counts; a case may be in several."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``check``."""
    parser.add_argument(
        "--size",
        choices=("small", "full"),
        default="small",
        help="small: rows of a few elements, seconds; full: rows and tokens of models",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: 0)")
    parser.add_argument(
        "--engine",
        choices=("auto", "cuda", "host"),
        default="auto",
        help="as the Buffer's argument (default: auto)",
    )


def run(args: argparse.Namespace) -> int:
    """Run all cases; 0 when every rank got every bit right. Collective over COMM_WORLD."""
    comm = world("check")
    if args.seed < 0:
        raise ContractError(f"check: argument --seed must be 0 or more, got {args.seed}.")
    small = args.size == "small"
    chosen = cases(comm.size, small=small) + mode_cases(comm.size, small=small)
    engine, nodes = _vote(comm, args.engine)
    if len(nodes) > 1:
        chosen += node_cases(comm.size)
    else:
        chosen += low_latency_cases(comm.size, small=small)
    table = _Table(chosen, shown=comm.rank == 0)
    wrong = missing = 0
    for number, case in enumerate(chosen):
        table.begin(number, case)
        mine = _try(comm, case, args.seed, engine, nodes)
        every: list[_Outcome] = comm.allgather(mine)
        wrong += any(outcome.failed for outcome in every)
        table.row(case, every)
        missing += every[0].dispatch == _NONE
    table.verdict(len(chosen), wrong, missing, comm.size)
    return 1 if wrong else 0


def _vote(comm: Any, engine: str) -> tuple[str, _Nodes]:
    """Let the ranks choose an engine once, so that the reason is logged once; where they are."""
    with Buffer(comm, num_max_tokens_per_rank=1, hidden=1, num_topk=0, engine=engine) as buffer:
        return buffer.engine_name, buffer.nodes


# --------------------------------------------------------------------------------------- one case


@dataclass
class _Outcome:
    """What one rank found in one case."""

    engine: str
    dispatch: str = _RIGHT
    combine: str = _NONE
    seconds: float = 0.0
    message: str = ""

    @property
    def failed(self) -> bool:
        return _WRONG in (self.dispatch, self.combine)


def _try(comm: Any, case: Case, seed: int, engine: str, nodes: _Nodes) -> _Outcome:
    """Run one case on a Buffer of its own. Collective."""
    part = expected(case, seed, nodes).of_rank(comm.rank)
    with Buffer(comm, engine=engine, **buffer_arguments(case)) as buffer:
        outcome = _Outcome(buffer.engine_name)
        if not modes_needed(case) <= buffer.modes:
            outcome.dispatch = _NONE
            return outcome
        arrays = _Arrays(buffer)
        trip = RoundTrip(buffer, case, part, arrays.up)
        arrays.wait()  # they are ready before the clock starts
        buffer.barrier()
        start = time.perf_counter()
        dispatched = trip.dispatch()
        combined = trip.combine(dispatched.handle) if case.addable else []
        arrays.wait()
        outcome.seconds = time.perf_counter() - start
        message = _judge(lambda: trip.compare_dispatch(dispatched))
        if message:
            outcome.dispatch, outcome.message = _WRONG, message
        if case.addable:
            message = _judge(lambda: trip.compare_combine(combined))
            outcome.combine = _WRONG if message else _RIGHT
            outcome.message = outcome.message or message
    return outcome


def _judge(comparison: Callable[[], None]) -> str:
    """Return what differs, or an empty text."""
    try:
        comparison()
    except AssertionError as error:
        return str(error)
    return ""


class _Arrays:
    """Moves arrays to the memory that the engine works on."""

    def __init__(self, buffer: Buffer) -> None:
        self._cupy: Any = buffer.xp if buffer.engine_name == "cuda" else None

    def up(self, array: np.ndarray[Any, Any]) -> Any:
        """Put an array where the engine wants it; opaque items, which CuPy has not, as bytes."""
        if self._cupy is None:
            return array
        if not array.flags.c_contiguous:
            return self._cupy.asarray(array)  # scales, of ordinary dtypes: strides are kept
        raw = self._cupy.asarray(array.view(np.uint8))
        return raw if array.dtype.name.startswith("void") else raw.view(array.dtype)

    def wait(self) -> None:
        """Wait for the GPU, if there is one."""
        if self._cupy is not None:
            self._cupy.cuda.get_current_stream().synchronize()


# --------------------------------------------------------------------------------------- printing


class _Table:
    """Rows as they come, and a bar below them while someone watches."""

    def __init__(self, chosen: tuple[Case, ...], *, shown: bool) -> None:
        self._shown = shown
        self._bar = Progress(len(chosen), shown=shown)
        self._width = max(len(case.id) for case in chosen)
        self._found: list[tuple[Case, bool, bool]] = []
        self._print(_LEGEND)
        self._print(
            f"{'case':<{self._width}}  {'engine':<6}  {'dispatch':<8}  {'combine':<7}  {'time':>10}"
        )

    def begin(self, number: int, case: Case) -> None:
        """Show on the bar which case runs now."""
        self._bar.update(number, case.id)

    def row(self, case: Case, every: list[_Outcome]) -> None:
        """Print one case; ``time`` is that of the slowest rank."""
        dispatch = _worst([outcome.dispatch for outcome in every])
        combine = _worst([outcome.combine for outcome in every])
        slowest = max(outcome.seconds for outcome in every)
        self._found.append((case, _WRONG in (dispatch, combine), dispatch == _NONE))
        self._print(
            f"{case.id:<{self._width}}  {every[0].engine:<6}  {dispatch:<8}  {combine:<7}  "
            f"{1e3 * slowest:>7.2f} ms"
        )
        for outcome in every:
            if outcome.message:
                self._print("    " + outcome.message.replace("\n", "\n    "))

    def verdict(self, count: int, wrong: int, missing: int, ranks: int) -> None:
        """Print the summary by mode, and the last line."""
        rows = []
        for name, counts in _MODES.items():
            found = [(bad, absent) for case, bad, absent in self._found if counts(case)]
            if name == _BY_NODE and not found:
                continue  # on one node
            bad, absent = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0)
            rows.append((name, len(found), len(found) - bad - absent, bad, absent))
        self._print("\n" + columns(("mode", "cases", "right", "wrong", "not here"), rows) + "\n")
        where = f"{ranks} rank{'s' if ranks > 1 else ''}"
        if wrong:
            self._print(f"WRONG: {wrong} of {count} cases differ from the reference on {where}")
            return
        if missing:
            self._print(f"{missing} of {count} cases need a mode that this engine does not have")
        right = count - missing
        self._print(f"OK: {right} cases on {where} are bit for bit what the reference says")

    def _print(self, line: str) -> None:
        if self._shown:
            self._bar.clear()
            print(line, flush=True)


def _worst(words: list[str]) -> str:
    return _WRONG if _WRONG in words else words[0]
