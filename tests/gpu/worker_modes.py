"""Every mode on GPUs, bit by bit against the reference; graphs, streams, Buffers and threads.

mpirun -n 2 python tests/gpu/worker_modes.py [--modes table,graphs,...] [--seconds N] [--kinds ...]

``table`` runs the cases of ``testing.mode_cases`` until they are done or the time is up, and says
how many it did; the other parts are short. All are done with every kind of Buffer asked for.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
from common import ROW_BYTES, Worker, add_kinds, kinds_of, must_be, settle, small_case

from deepep_cupy import ContractError, StateError, env, reference
from deepep_cupy.testing.compare import assert_equal_or_nan, to_host
from deepep_cupy.testing.data import Case, RankExpected, expected, mode_cases
from deepep_cupy.testing.round_trip import RoundTrip

PARTS = ("table", "refused", "graphs", "buffers", "streams", "threads")
POOL_BYTES = 3 << 30


def main() -> None:
    """The chosen parts; rank 0 prints a line for each and a last line."""

    def options(parser: Any) -> None:
        parser.add_argument("--modes", default=",".join(PARTS), help="parts, by commas")
        parser.add_argument("--seconds", type=float, default=150.0, help="most for the table")
        parser.add_argument("--small", action="store_true", help="the small table")
        add_kinds(parser)

    worker = Worker("MODES", __doc__, options)
    said = []
    for name in worker.options.modes.split(","):
        if name not in PARTS:
            raise SystemExit(f"no part {name!r}; there are {', '.join(PARTS)}")
        start = time.monotonic()
        if name == "table":
            said.append(f"table {table(worker)}")
        else:
            for kind, variables in kinds_of(worker).items():
                with env.setting(**variables):
                    result = globals()[name](worker)
                worker.say(f"  {kind} {name} {result}")
            said.append(f"{name} {result}")
        worker.meet()
        worker.say(f"{time.monotonic() - start:7.2f} s {said[-1]}")
    worker.done(*filter(None, [worker.options.kinds]), *said)


def up_of(worker: Worker) -> Any:
    """Upload in the order the array has: scales may lie column by column."""

    def up(array: Any) -> Any:
        if array.ndim == 2 and array.flags.f_contiguous and not array.flags.c_contiguous:
            return worker.up(np.ascontiguousarray(array.T)).T
        return worker.up(array)

    return up


def trip_of(worker: Worker, buffer: Any, case: Case, seed: int = 0) -> RoundTrip:
    """The calls of a case on this rank."""
    return RoundTrip(buffer, case, expected(case, seed).of_rank(worker.rank), up_of(worker))


def there_and_back(
    worker: Worker, buffer: Any, case: Case, seed: int = 0, part: RankExpected | None = None
) -> None:
    """Dispatch, and combine where that can be done. ``part``: what is expected, if it is known."""
    part = expected(case, seed).of_rank(worker.rank) if part is None else part
    trip = RoundTrip(buffer, case, part, up_of(worker))
    got = trip.dispatch()
    worker.synchronize()
    buffer.check()
    trip.compare_dispatch(got)
    if not case.addable:
        return
    back = trip.combine(got.handle)
    worker.synchronize()
    buffer.check()
    trip.compare_combine(back)


def buffer_for(worker: Worker, cases: list[Case], experts: int | None) -> Any:
    """One Buffer for those of the cases with this number of experts; its rows are as long as any
    case's, so that few kernels are compiled."""
    return worker.buffer(
        num_max_tokens_per_rank=max(c.num_max_tokens for c in cases if c.num_experts == experts),
        hidden=max(ROW_BYTES, *(case.row_bytes for case in cases)),
        num_topk=32 if experts else 0,
        num_experts=experts,
        pool_bytes=POOL_BYTES if worker.gpu else None,
    )


# ------------------------------------------------------------------------------------- the table


def table(worker: Worker) -> str:
    """The cases of all modes, free memory full of ones before each."""
    chosen = mode_cases(worker.size, small=worker.options.small)
    chosen = sorted(chosen, key=lambda case: case.num_experts or 0)
    kinds = kinds_of(worker)
    end, done = time.monotonic() + worker.options.seconds, 0
    for experts, group in groupby(chosen, key=lambda case: case.num_experts):
        cases = list(group)
        if not worker.comm.bcast(time.monotonic() < end):
            break
        with ExitStack() as stack:
            buffers = {}
            for kind, variables in kinds.items():
                with env.setting(**variables):
                    buffers[kind] = stack.enter_context(buffer_for(worker, chosen, experts))
                must_be(buffers[kind], kind)
            for case in cases:
                if not worker.comm.bcast(time.monotonic() < end):
                    break
                part = expected(case, done).of_rank(worker.rank)
                for kind, buffer in buffers.items():
                    poison(worker, buffer)
                    try:
                        there_and_back(worker, buffer, case, part=part)
                    except AssertionError as error:
                        where = f"{case.id} on rank {worker.rank} {kind}"
                        raise AssertionError(f"{where}: {error}") from error
                done += 1
    if done < len(chosen):
        worker.say("  the time was up before the table was done")
    return f"{done} of {len(chosen)} cases" + f" of {len(kinds)} kinds" * (len(kinds) > 1)


def poison(worker: Worker, buffer: Any) -> None:
    """Fill much of the pool's free memory with ones: NaN, and no legal index."""
    if worker.gpu:
        buffer.empty((256 << 20,), np.uint8).fill(255)
        buffer.empty((1 << 20,), np.uint8).fill(255)


# ------------------------------------------------------------------------------------- refusals


def refused(worker: Worker) -> str:
    """Too little room, which only the kernels find out, and what was queued on it meanwhile."""
    case = small_case(worker, num_tokens=(24,) * worker.size)
    want = expected(case, 1)
    mine, last = want.inputs[worker.rank], worker.size - 1
    real = [each.handle.num_recv_tokens for each in want.dispatched]
    x, topk_idx = worker.up(mine.x), worker.up(mine.topk_idx)
    room = real[worker.rank] - (worker.rank == last)
    text = f"rank {last} would receive {real[last]} tokens, more than its"

    def call(_: int = 0) -> Any:
        return buffer.dispatch(x, topk_idx=topk_idx, num_worst_tokens=room)

    def both(_: int) -> Any:
        got = call()
        return buffer.combine(got.recv_x, got.handle)

    with worker.buffer(pool_bytes=1 << 30 if worker.gpu else None) as buffer:
        for _ in range(3):
            seen = settle(worker, buffer, call)
            assert seen.kind == "ContractError", seen
            assert text in seen.text, seen
            worker.meet()  # a rank that is late would see the refusal in its next call
            there_and_back(worker, buffer, replace(case, wait="worst"))
        if not worker.gpu:
            return "ok"
        graph = worker.capture(buffer, both, 1)  # the combine is queued before anybody knows
        for _ in range(3):
            seen = settle(worker, buffer, lambda: graph.replay(1))
            assert seen.kind == "ContractError", seen
            assert text in seen.text, seen
            assert settle(worker, buffer, lambda: None).kind == "nothing"
            back: Any = graph.kept[0]
            assert np.isnan(to_host(back.combined_x)).all(), "a refused combine left no poison"
            worker.meet()
            there_and_back(worker, buffer, case)
    return "ok, in graphs too"


# --------------------------------------------------------------------------------------- graphs


class Captured:
    """No-wait dispatch, cached dispatch and combine of one case, captured, with fixed inputs."""

    def __init__(self, worker: Worker, buffer: Any, case: Case, *, background: bool) -> None:
        self.worker, self.case = worker, case
        self.worst = worker.size * buffer.num_max_tokens_per_rank
        self.answers = [self._answers(seed) for seed in range(2)]
        self.given = [worker.up(array) for array in self._inputs(0)]
        x, topk_idx, weights = self.given
        streams: dict[str, Any] = {"async_finish": True} if background else {}
        self.host_wait = ""

        def calls(_: int) -> Any:
            try:
                buffer.dispatch(x, topk_idx=topk_idx)
            except ContractError as error:
                self.host_wait = str(error)
            got = buffer.dispatch(
                x, topk_idx=topk_idx, topk_weights=weights, do_cpu_sync=False, **streams
            )
            got.event.current_stream_wait()
            again = buffer.dispatch(x, handle=got.handle, topk_weights=weights, **streams)
            again.event.current_stream_wait()
            back = buffer.combine(again.recv_x, got.handle, **streams)
            back.event.current_stream_wait()
            return got, again, back

        self.graph = worker.capture(buffer, calls, 1)
        assert "the host must wait for the counts" in self.host_wait, self.host_wait

    def _inputs(self, seed: int) -> tuple[Any, Any, Any]:
        mine = expected(self.case, seed).inputs[self.worker.rank]
        return mine.x, mine.topk_idx, mine.topk_weights

    def _answers(self, seed: int) -> tuple[Any, Any]:
        inputs = expected(self.case, seed).inputs
        moved = reference.dispatch(
            [each.x for each in inputs],
            topk_idx=[each.topk_idx for each in inputs],
            topk_weights=[each.topk_weights for each in inputs],
            num_experts=self.case.num_experts,
            num_worst_tokens=[self.worst] * self.worker.size,
        )
        back = reference.combine([each.recv_x for each in moved], [each.handle for each in moved])
        rank = self.worker.rank
        return moved[rank], back[rank]

    def replay(self, seed: int, *, look: bool) -> None:
        """Launch with other inputs; ``look``: compare the results, which must still be there."""
        with self.graph.stream:
            for array, values in zip(self.given, self._inputs(seed), strict=True):
                array[...] = self.worker.xp.asarray(values)
        self.graph.replay(1)
        if not look:
            return
        got, again, back = self.graph.kept[0]
        moved, combined = self.answers[seed]
        real = int(moved.handle.recv_rows_per_rank.sum())
        for name, have, want in (
            ("recv_x", got.recv_x[:real], moved.recv_x[:real]),
            ("cached recv_x", again.recv_x[:real], moved.recv_x[:real]),
            ("recv_topk_idx", got.recv_topk_idx, moved.recv_topk_idx),
            ("recv_topk_weights", got.recv_topk_weights, moved.recv_topk_weights),
            ("recv_src_idx", got.handle.recv_src_idx, moved.handle.recv_src_idx),
            ("combined_x", back.combined_x, combined.combined_x),
        ):
            if name == "combined_x":  # sums: any NaN equals any NaN
                assert_equal_or_nan(name, have, want, rank=self.worker.rank)
            else:
                assert to_host(have).tobytes() == want.tobytes(), f"{name} of a replay is wrong"


def graphs(worker: Worker) -> str:
    """Two graphs in turn, eager calls between them, results dropped in the end."""
    if not worker.gpu:
        return "none without a GPU"
    case = small_case(worker)
    replays = 0
    with worker.buffer(pool_bytes=1 << 30) as buffer:
        there_and_back(worker, buffer, case)
        made = [Captured(worker, buffer, case, background=number == 1) for number in range(2)]
        for number in range(30):
            made[number % 2].replay(number // 2 % 2, look=True)
            replays += 1
            if number % 3 == 0:
                with made[number % 2].graph.stream:
                    there_and_back(worker, buffer, replace(case, wait="worst"), seed=number)
        for each in made:
            each.graph.kept.clear()
        for number in range(20):  # whose results are nobody's any more
            made[number % 2].replay(number % 2, look=False)
            with made[number % 2].graph.stream:
                there_and_back(worker, buffer, case, seed=number)
        worker.synchronize()
        buffer.check()
        told = refused_meetings(worker, buffer, made) if worker.size > 1 else 0
    return f"{replays + 20} replays, {told} meetings refused"


def refused_meetings(worker: Worker, buffer: Any, made: list[Captured]) -> int:
    """Rank 0 replays one graph, the others the other one: refused on every rank, no row moves.

    Of the three calls of a replay the second and third use the first one's handle, which has no
    birth then: they are refused without a report of their own.
    """
    made[min(worker.rank, 1)].replay(0, look=False)
    worker.synchronize()
    told = 0
    while True:
        try:
            buffer.check()
        except ContractError as error:
            assert "different calls: rank 0 calls dispatch in a graph" in str(error), error
            told += 1
        else:
            break
    assert told > 0
    made[0].replay(1, look=False)
    worker.synchronize()
    buffer.check()
    return told


# --------------------------------------------------------------------------- more than one of it


def buffers(worker: Worker) -> str:
    """Two Buffers in turn, on the same stream and on two."""
    case = small_case(worker)
    rounds = 10
    with worker.buffer(pool_bytes=1 << 30) as one, worker.buffer(pool_bytes=1 << 30) as two:
        for number in range(rounds):
            wait = ("host", "worst")[number % 2]
            background = number % 4 > 1
            some = replace(case, wait=wait, background=background)
            trips = [trip_of(worker, buffer, some, seed=number) for buffer in (one, two)]
            got = [trip.dispatch() for trip in trips]
            back = [trip.combine(each.handle) for trip, each in zip(trips, got, strict=True)]
            worker.synchronize()
            for trip, each, sums in zip(trips, got, back, strict=True):
                trip.compare_dispatch(each)
                trip.compare_combine(sums)
        one.check()
        two.check()
    return f"{rounds} rounds"


def streams(worker: Worker) -> str:
    """One Buffer, whose calls go to one stream and to another."""
    if not worker.gpu:
        return "none without a GPU"
    cuda, case = worker.xp.cuda, small_case(worker)
    sides = [cuda.Stream(non_blocking=True) for _ in range(2)]
    slow = worker.xp.zeros(1 << 26, np.uint8)
    rounds = 12
    with worker.buffer(pool_bytes=1 << 30) as buffer:
        for number in range(rounds):
            some = replace(case, wait=("host", "worst")[number % 2], background=number % 3 == 0)
            trip = trip_of(worker, buffer, some, seed=number)
            here, there = sides[number % 2], sides[1 - number % 2]
            here.wait_event(cuda.get_current_stream().record())
            with here:
                for _ in range(5):
                    slow += 1  # keeps the stream busy
                got = trip.dispatch()
            there.wait_event(here.record())
            with there:
                back = trip.combine(got.handle)
            there.synchronize()
            here.synchronize()
            buffer.check()
            trip.compare_dispatch(got)
            trip.compare_combine(back)
    return f"{rounds} rounds"


def threads(worker: Worker) -> str:
    """Two threads that take turns; and one that does not wait for its turn."""
    case, rounds = small_case(worker), 6
    turn, failed = threading.Barrier(2), []
    with worker.buffer(pool_bytes=1 << 30) as buffer:

        def run(first: int) -> None:
            try:
                if worker.gpu:
                    worker.xp.cuda.Device(worker.device).use()
                for number in range(rounds):
                    if number % 2 == first:
                        there_and_back(worker, buffer, case, seed=number)
                    turn.wait(60)
            except BaseException as error:  # noqa: BLE001 - told below
                failed.append(error)
                turn.abort()

        both = [threading.Thread(target=run, args=(first,)) for first in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        if failed:
            raise failed[0]
        refusals = _at_once(buffer)
        worker.meet()
        there_and_back(worker, buffer, case)
    return f"{rounds} turns, {refusals} calls at once refused"


def _at_once(buffer: Any) -> int:
    """Calls of a thread while another one is in a call: refused, or they come after it."""
    inside, refusals = threading.Event(), 0
    alone = buffer._life.inside
    assert alone.acquire(blocking=False)
    try:

        def intrude() -> None:
            nonlocal refusals
            try:
                buffer.barrier()
            except StateError:
                refusals += 1
            inside.set()

        threading.Thread(target=intrude).start()
        assert inside.wait(20)
    finally:
        alone.release()
    assert refusals == 1, "a second thread came into a call"
    return refusals


if __name__ == "__main__":
    sys.exit(main())
