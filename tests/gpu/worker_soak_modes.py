"""Thousands of random calls over all modes on one Buffer, graphs replayed among them.

mpirun -n 2 python tests/gpu/worker_soak_modes.py [--calls 5000] [--seconds 600] [--seed 0]

Cases with their right answers are made once; then they are called in random order, on random
streams, by fresh and by live handles, captured in graphs, and replayed with new data. Results are
compared bit by bit, some calls later, so that calls queue up. In the second half nothing may grow:
not the pool, not CuPy's memory, not the process.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from common import ROW_BYTES, Graph, Worker, settle
from worker_modes import up_of
from worker_soak import check_growth, memory

from deepep_cupy.reference import dispatch
from deepep_cupy.testing.compare import assert_dispatch_equal
from deepep_cupy.testing.data import Case, RankExpected, cases, expected, mode_cases
from deepep_cupy.testing.round_trip import RoundTrip

MOST_BYTES = 3 << 20
"""That a rank receives in one call."""
MOST_LIVE, MOST_PENDING, MOST_GRAPHS = 6, 5, 6
STREAMS: dict[str, tuple[str, ...]] = {
    "as the case says": (),
    "async": ("async_finish",),
    "after": ("previous_event",),
    "both": ("previous_event", "async_finish"),
    "allocated": ("previous_event", "async_finish", "allocate_on_comm_stream"),
}


def chosen_cases(size: int) -> list[Case]:
    """Cases of all modes and all dtypes that fit one Buffer."""
    several = [*mode_cases(size, small=True), *mode_cases(size), *cases(size, small=True)]
    fitting = [
        replace(case, num_experts=case.num_experts and 4 * size)
        for case in several
        if not case.dtype.startswith("V")
        and size * case.num_max_tokens * case.row_bytes * (case.num_topk if case.expand else 1)
        <= MOST_BYTES
    ]
    return list(dict.fromkeys(fitting))


@dataclass
class Scene:
    """A case, its right answers on this rank, and those of a cached call with other rows."""

    case: Case
    part: RankExpected
    other_x: Any
    other: Any


def scene_of(worker: Worker, case: Case, seed: int) -> Scene:
    """Ask the reference, once."""
    want, rank = expected(case, seed), worker.rank
    rng = np.random.default_rng([seed, 7])
    words = (1, 3, 32, 130)[seed % 4]
    rows = [
        rng.integers(-(1 << 31), 1 << 31, (each.handle.num_tokens, words), np.int32)
        for each in want.dispatched
    ]
    other = dispatch(rows, handles=[each.handle for each in want.dispatched])
    return Scene(case, want.of_rank(rank), rows[rank], other[rank])


class Drawn(RoundTrip):
    """The calls of a case, on streams that were drawn."""

    ARRAYS = ("_first_x", "_topk_idx", "_mask", "_weights", "_stats", "_y", "_y_weights")
    streams = "as the case says"

    def _streams(self) -> dict[str, Any]:
        names = STREAMS[self.streams]
        if not names:
            return super()._streams()
        given: dict[str, Any] = dict.fromkeys(names, True)
        if "previous_event" in names:
            given["previous_event"] = self._buffer.capture()
        return given

    def arrays(self) -> list[Any]:
        """All that the calls read."""
        x = self._x if isinstance(self._x, tuple) else (self._x,)
        named = [getattr(self, name) for name in (*self.ARRAYS, "_row_weights")]
        return [array for array in (*x, *self._biases, *named) if array is not None]

    def load(self, other: Drawn) -> None:
        """Take the data and the right answers of another trip of the same shapes."""
        self._part = other._part
        for mine, new in zip(self.arrays(), other.arrays(), strict=True):
            if mine.dtype.isbuiltin == 1:  # scales among them, in any order
                mine[...] = new
            elif mine.size:
                mine.view(np.uint8)[...] = new.view(np.uint8)


@dataclass
class Live:
    """A handle that is alive."""

    scene: Scene
    trip: Drawn
    handle: Any


@dataclass
class Captured:
    """A graph with the calls of a case.

    Attributes:
        trip: Whose arrays the graph reads.
        data: What they are filled with, by turns.
        graph: With what its calls returned.
        due: Compares what the last replay left; ``None``: nobody wants to know.
        forgotten: Its results were dropped.
    """

    trip: Drawn
    data: list[Drawn]
    graph: Graph
    due: Callable[[], None] | None = None
    forgotten: bool = False


@dataclass
class Soak:
    """The calls. All ranks draw the same."""

    worker: Worker
    buffer: Any
    scenes: list[Scene]
    seed: int
    calls: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    live: list[Live] = field(default_factory=list)
    pending: list[Callable[[], None]] = field(default_factory=list)
    captured: list[Captured] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plan = random.Random(self.seed)
        cuda = self.worker.xp.cuda if self.worker.gpu else None
        self.side = cuda.Stream(non_blocking=True) if cuda else None

    # ------------------------------------------------------------------------------------ steps

    def step(self) -> None:
        """One draw; then what is due is compared, and something dropped."""
        weights = {"fresh": 5, "cached": 3, "combine": 4, "refused": 0.1, "barrier": 0.3}
        weights["poison"] = 0.3
        if self.worker.gpu:
            weights["replay"] = 3 if self.captured else 0
            weights["forget"] = 0.1
        what = self.plan.choices(list(weights), list(weights.values()))[0]
        if not self.live and what in ("cached", "combine"):
            what = "fresh"
        self.counts[what] += 1
        if self.plan.random() < 0.05:
            self.buffer.set_num_sms(self.plan.choice((1, 3, self.worker.options.num_sms)))
        aside = self.plan.random() < 0.15 and what in ("fresh", "cached", "combine")
        with self.aside() if aside and self.side is not None else nullcontext():
            getattr(self, what)()
        while len(self.pending) > self.plan.randint(0, MOST_PENDING):
            self.pending.pop(self.plan.randrange(len(self.pending)))()
        while len(self.live) > self.plan.randint(1, MOST_LIVE):
            self.live.pop(self.plan.randrange(len(self.live)))

    def aside(self) -> Any:
        """On the side stream, behind and before what is on the current one."""
        soak, main = self, self.worker.xp.cuda.get_current_stream()

        class Aside:
            def __enter__(self) -> None:
                soak.side.wait_event(main.record())
                soak.side.__enter__()

            def __exit__(self, *error: object) -> None:
                soak.side.__exit__(*error)
                main.wait_event(soak.side.record())

        return Aside()

    def later(self, scene: Scene, what: str, compare: Callable[[], None]) -> None:
        """Compare in one of the next steps."""
        number = self.calls

        def judge() -> None:
            try:
                compare()
            except AssertionError as error:
                where = f"call {number}, {what} of {scene.case.id} (seed {self.seed})"
                raise AssertionError(f"{where}: {error}") from error

        self.pending.append(judge)

    def compare_all(self) -> None:
        """Compare what is due."""
        while self.pending:
            self.pending.pop()()
        for each in self.captured:
            self._compare(each)

    # ------------------------------------------------------------------------------------ calls

    def fresh(self) -> None:
        """A dispatch; in a cached case two."""
        scene = self.plan.choice(self.scenes)
        trip = Drawn(self.buffer, scene.case, scene.part, up_of(self.worker))
        trip.streams = self.plan.choice(list(STREAMS))
        got = trip.dispatch()
        self.calls += 1 + scene.case.cached
        self.live.append(Live(scene, trip, got.handle))
        self.later(scene, "dispatch", lambda: trip.compare_dispatch(got))

    def cached(self) -> None:
        """Other rows by a handle of any mode."""
        live = self.plan.choice(self.live)
        scene = live.scene
        x = self.worker.up(scene.other_x)
        got = self.buffer.dispatch(x, handle=live.handle, own=self.plan.random() < 0.2)
        self.calls += 1
        rank = self.worker.rank
        right = scene.other
        self.later(scene, "cached", lambda: assert_dispatch_equal(got, right, rank=rank))

    def combine(self) -> None:
        """The rows of the case, on GPUs in ordinary memory and in the pool."""
        live = self.plan.choice(self.live)
        if not live.scene.case.addable:
            self.cached()
            return
        live.trip.streams = self.plan.choice(list(STREAMS))
        got = live.trip.combine(live.handle)
        self.calls += len(got)
        self.later(live.scene, "combine", lambda: live.trip.compare_combine(got))

    def refused(self) -> None:
        """One rank makes a wrong call: all raise, nothing is moved."""
        bad, xp, size = self.plan.randrange(self.worker.size), self.worker.xp, self.worker.size
        wrong = {"quantize": "fp4"} if self.worker.rank == bad else {}
        x, mask = xp.zeros((1, 4), np.float32), xp.ones((1, size), np.bool_)
        call = self.buffer.dispatch
        seen = settle(self.worker, self.buffer, lambda: call(x, is_token_in_rank=mask, **wrong))
        assert seen.kind == "ContractError", f"call {self.calls}: {seen}"
        assert f"rank {bad}" in seen.text, seen
        self.calls += 1
        self.worker.meet()  # a rank that is late would see the refusal in its next call

    def barrier(self) -> None:
        """Nothing else."""
        self.buffer.barrier()
        self.calls += 1

    def poison(self) -> None:
        """Ones in memory that is free: NaN, and no legal index."""
        self.buffer.empty((self.plan.choice((1 << 12, 1 << 18, 1 << 24)),), np.uint8).fill(255)

    # ----------------------------------------------------------------------------------- graphs

    def capture(self) -> None:
        """A graph of the calls of a case, which no host waits for."""
        worker, buffer, scene = self.worker, self.buffer, self.plan.choice(self.scenes)
        case = replace(scene.case, wait="worst")
        parts = [expected(case, seed).of_rank(worker.rank) for seed in (1, 2)]
        self.compare_all()
        self.live.clear()
        trips = [Drawn(buffer, case, part, up_of(worker)) for part in (*parts, parts[0])]
        for trip in trips[:2]:  # eager calls: they compile, and the pool sees what is over
            got = trip.dispatch()
            trip.compare_dispatch(got)
            if case.addable:
                trip.compare_combine(trip.combine(got.handle))
        data = [Drawn(buffer, case, part, up_of(worker)) for part in parts]
        trip = trips[2]
        trip.streams = self.plan.choice(["as the case says", "async", "both"])

        def calls(_: int) -> Any:
            got = trip.dispatch()
            return got, trip.combine(got.handle) if case.addable else []

        graph = worker.capture(buffer, calls, 1)
        self.captured.append(Captured(trip, data, graph))
        self.counts["captures"] += 1
        self.counts["shapes in graphs"] = len({each.trip._case for each in self.captured})

    def replay(self) -> None:
        """A graph with data of one of two seeds, in stream order between eager calls."""
        each = self.plan.choice(self.captured)
        self._compare(each)
        main, stream = self.worker.xp.cuda.get_current_stream(), each.graph.stream
        data = self.plan.choice(each.data)
        stream.wait_event(main.record())
        with stream:
            each.trip.load(data)
            each.graph.captured.launch(stream)
        main.wait_event(stream.record())
        self.calls += 1 + each.trip._case.cached + 2 * each.trip._case.addable
        if not each.forgotten:
            got, back = each.graph.kept[0]
            trip, case = each.trip, each.trip._case

            def compare() -> None:
                trip.compare_dispatch(got)
                trip.compare_combine(back)

            each.due = compare
            if self.plan.random() < 0.5:
                self.later(
                    Scene(case, trip._part, None, None), "replay", lambda: self._compare(each)
                )

    def _compare(self, each: Captured) -> None:
        due, each.due = each.due, None
        if due is not None:
            due()

    def forget(self) -> None:
        """Drop the results of a graph that goes on being replayed."""
        kept = [each for each in self.captured if not each.forgotten]
        if len(kept) > 2:
            each = self.plan.choice(kept)
            self._compare(each)
            each.graph.kept.clear()
            each.trip._first = None
            each.forgotten = True


def run(worker: Worker, soak: Soak) -> dict[str, int] | None:
    """All calls; what memory was taken after half of them."""
    options, before = worker.options, None
    end, steps = time.monotonic() + options.seconds, 0
    graphs = MOST_GRAPHS if worker.gpu else 0
    while soak.calls < options.calls:
        # All graphs are made in the first half, that the second may be judged.
        if len(soak.captured) < graphs and soak.calls > len(soak.captured) * options.calls // 16:
            soak.capture()
        soak.step()
        steps += 1
        if steps % 100 == 0:
            soak.buffer.check()
            if worker.most(float(time.monotonic() > end)):
                worker.say("  the time was up")
                break
        if before is None and soak.calls >= options.calls // 2:
            soak.compare_all()
            soak.live.clear()
            before = memory_now(worker, soak.buffer)
    soak.compare_all()
    soak.live.clear()
    return before


def memory_now(worker: Worker, buffer: Any) -> dict[str, int]:
    """What is taken once the Buffer has seen that all is over."""
    for _ in range(3):
        buffer.barrier()
        worker.synchronize()
        buffer.empty((1,), np.uint8)
    return memory(worker, buffer)


def main() -> None:
    """Soak."""

    def arguments(parser: Any) -> None:
        parser.add_argument("--calls", type=int, default=5000)
        parser.add_argument("--seconds", type=float, default=600)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--pool-mib", type=int, default=3072)

    worker = Worker("SOAKMODES", __doc__, arguments)
    options = worker.options
    start = time.monotonic()
    chosen = chosen_cases(worker.size)
    scenes = [scene_of(worker, case, seed) for seed, case in enumerate(chosen)]
    worker.say(f"{len(scenes)} cases after {time.monotonic() - start:.1f} s")
    with worker.buffer(
        num_max_tokens_per_rank=max(case.num_max_tokens for case in chosen),
        hidden=max(ROW_BYTES, *(case.row_bytes for case in chosen)),
        num_topk=32,
        pool_bytes=options.pool_mib << 20 if worker.gpu else None,
    ) as buffer:
        soak = Soak(worker, buffer, scenes, options.seed)
        before = run(worker, soak)
        after = memory_now(worker, buffer)
        buffer.check()
        check_growth(worker, before, after, "half of the calls")
    counts = ", ".join(f"{number} {what}" for what, number in sorted(soak.counts.items()))
    worker.done(f"{soak.calls} calls of {len(scenes)} cases: {counts}")


if __name__ == "__main__":
    sys.exit(main())
