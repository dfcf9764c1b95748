"""Inputs that broke other libraries of this kind, each against the reference on GPUs.

mpirun -n 2 python tests/gpu/worker_cases.py [SCENARIO ...]

Asked for by name only: ``big`` (65,536 and 131,072 tokens of 7168 bfloat16; 20 GB of GPU memory
for two ranks), ``no_close`` (a Buffer that nobody closes) and ``one_trip`` (for runs with a cold
or an unwritable compile cache).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from common import RoundTrip, Seen, Worker, runtime, settle, small_case
from patterns import copies_of, fill, sources, wrong_rows, wrong_sums
from refusals import refuse_all

from deepep_cupy.errors import DeepEPCupyError
from deepep_cupy.testing.compare import assert_combine_equal, assert_dispatch_equal
from deepep_cupy.testing.data import Case, sequence

SCENARIOS: dict[str, Callable[[Worker], str]] = {}
BY_NAME: dict[str, Callable[[Worker], str]] = {}

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"layout": "topk"},
    {"layout": "cached"},
    {"layout": "mask"},
    {"layout": "cached_mask"},
)
MASK: dict[str, Any] = {"num_experts": None, "num_topk": 0, "index_dtype": None, "weights": False}


def scenario(function: Callable[[Worker], str]) -> Callable[[Worker], str]:
    """One that runs by default."""
    SCENARIOS[function.__name__] = function
    return function


def by_name(function: Callable[[Worker], str]) -> Callable[[Worker], str]:
    """One that runs when asked for."""
    BY_NAME[function.__name__] = function
    return function


def make(worker: Worker, *cases: Case, **changes: Any) -> Any:
    """A Buffer for these cases; rows of up to 14,336 bytes, so that few shapes are compiled."""
    sizes = {
        "num_max_tokens_per_rank": max(case.num_max_tokens for case in cases),
        "num_topk": max(case.num_topk for case in cases),
        "num_experts": max(case.num_experts or 0 for case in cases) or None,
    }
    return worker.buffer(**(sizes | changes))


def run(worker: Worker, buffer: Any, cases: list[Case]) -> str:
    """All on one Buffer."""
    for case in cases:
        RoundTrip(worker, case, seed=3).round(buffer)
    return f"{len(cases)} cases"


# ------------------------------------------------------------------------------- sizes and shapes


@scenario
def uneven_and_empty(worker: Worker) -> str:
    """T = [0, 128], [128, 0], [0, 0], from every kind of routing."""
    size, cases = worker.size, []
    for tokens in ((0, 128), (128, 0), (0, 0)):
        for layout in LAYOUTS:
            routing = layout | (MASK if "mask" in layout["layout"] else {})
            each = (tokens * size)[:size]
            cases.append(small_case(worker, num_tokens=each, dtype="bfloat16", **routing))
    with make(worker, *cases) as buffer:
        return run(worker, buffer, cases)


@scenario
def nothing_chosen(worker: Worker) -> str:
    """All of topk_idx -1; half of it -1; everything to one expert."""
    cases = [
        small_case(worker, routing=routing, layout=layout)
        for routing in ("nothing", "half", "one")
        for layout in ("topk", "cached")
    ]
    with make(worker, *cases) as buffer:
        return run(worker, buffer, cases)


@scenario
def odd_numbers_of_tokens(worker: Worker) -> str:
    """T in 1, 3, 127, 4095, 4097."""
    cases = [
        small_case(worker, num_tokens=(tokens,) * worker.size, hidden=64, dtype="bfloat16")
        for tokens in (1, 3, 127, 4095, 4097)
    ]
    with make(worker, *cases) as buffer:
        return run(worker, buffer, cases)


@scenario
def sizes_that_jump(worker: Worker) -> str:
    """T = [8, 512], [512, 8], [4096, 1] on one Buffer, twice."""
    cases = sequence(worker.size)
    with make(worker, *cases) as buffer:
        return run(worker, buffer, cases * 2)


@scenario
def shapes(worker: Worker) -> str:
    """Every hidden size and K of the list, and numbers of experts."""
    size, number = worker.size, 0
    hiddens = (64, 128, 200, 512, 1000, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 16384)
    topks = (1, 6, 8, 9, 16, 32)
    for experts in dict.fromkeys(-(-each // size) * size for each in (1, 64, 160, 256, 1024)):
        cases = [
            small_case(
                worker,
                num_tokens=(33, 5, 20, 0, 40, 1, 33, 7)[:size],
                hidden=hidden,
                num_experts=experts,
                num_topk=topks[i % len(topks)],
                dtype="bfloat16",
            )
            for i, hidden in enumerate(hiddens)
        ]
        with make(worker, *cases, hidden=32768) as buffer:
            run(worker, buffer, cases)
        number += len(cases)
    return f"{number} cases"


@scenario
def num_sms(worker: Worker) -> str:
    """0 and -2 are refused everywhere; 1, odd numbers and more than there are work."""
    last = worker.size - 1
    case = small_case(worker, num_tokens=(64,) * worker.size)
    for wrong in (0, -2):
        seen = seen_in_constructor(worker, case, num_sms=wrong if worker.rank == last else None)
        assert seen.kind == "ContractError", seen
        assert "num_sms" in seen.text, seen
        assert str(wrong) in seen.text, seen
    trip = RoundTrip(worker, case)
    for number in (1, 3, 7, 60_000):
        with make(worker, case, num_sms=number + worker.rank) as buffer:
            trip.round(buffer)
    return "2 refused, 4 work"


def seen_in_constructor(worker: Worker, case: Case, **changes: Any) -> Seen:
    """What making a Buffer raises."""
    try:
        with make(worker, case, **changes):
            return Seen("nothing", 0)
    except DeepEPCupyError as error:
        return Seen(type(error).__name__, 0, str(error))


@scenario
def constructors_that_differ(worker: Worker) -> str:
    """num_max_tokens_per_rank is 256 on the last rank, 128 on the others."""
    last = worker.size - 1
    if last == 0:
        return "needs two ranks"
    tokens = 256 if worker.rank == last else 128
    seen = seen_in_constructor(worker, small_case(worker), num_max_tokens_per_rank=tokens)
    worker.say(f"  {seen}")
    assert seen.kind == "ContractError", seen
    for word in ("num_max_tokens_per_rank", "rank 0: 128", f"rank {last}: 256"):
        assert word in seen.text, f"no {word!r} in: {seen}"
    return "raises everywhere"


# ---------------------------------------------------------------------------------- memory, order


@scenario
def poisoned_on_another_stream(worker: Worker) -> str:
    """Memory of dropped results is filled with NaN on a side stream right before the next call."""
    if not worker.gpu:
        return "needs a GPU"
    cupy = worker.xp
    trip = RoundTrip(worker, small_case(worker, num_tokens=(64,) * worker.size, dtype="bfloat16"))
    side = cupy.cuda.Stream(non_blocking=True)
    rank = worker.rank
    with make(worker, trip.case, pool_bytes=64 << 20) as buffer:

        def spoil(*arrays: Any) -> None:
            side.wait_event(cupy.cuda.get_current_stream().record())
            with side:
                for _ in range(20):  # long enough to be running during the next call
                    for array in arrays:
                        array.view(np.uint8).fill(255)
            for array in arrays:
                assert runtime(buffer).arrays.record_stream(array, side)

        for _ in range(20):
            spoil(buffer.empty((40 << 20,), np.uint8))
            got = buffer.dispatch(trip.x, topk_idx=trip.topk_idx, topk_weights=trip.weights)
            inside = worker.in_pool(buffer, trip.y)
            again = buffer.dispatch(trip.x, handle=got.handle)
            back = buffer.combine(inside, got.handle, topk_weights=trip.y_weights)
            assert_dispatch_equal(got, trip.want.dispatched[rank], rank=rank)
            assert_combine_equal(back, trip.want.combined[rank], rank=rank)
            assert bool((again.recv_x.view(np.uint8) == got.recv_x.view(np.uint8)).all())
            spoil(again.recv_x, got.recv_x, inside)
            del got, again, inside, back
            gc.collect()
        cupy.cuda.runtime.deviceSynchronize()
    return "20 rounds"


@scenario
def handles_in_reverse(worker: Worker) -> str:
    """Two live handles, the newer one first, 50 steps; then one combine 100 times, bit-equal."""
    trips = [
        RoundTrip(worker, small_case(worker, dtype="bfloat16", hidden=1000 + 8 * seed), seed)
        for seed in range(2)
    ]
    with make(worker, trips[0].case) as buffer:
        for _ in range(50):
            handles = [trip.dispatch(buffer) for trip in trips]
            for trip, handle in reversed(list(zip(trips, handles, strict=True))):
                buffer.dispatch(trip.x, handle=handle)
                trip.combine(buffer, handle)
        handle = trips[0].dispatch(buffer)
        for number in range(100):
            trips[0].combine(buffer, handle, in_pool=bool(number % 2))
    return "50 steps, 100 repeats"


@scenario
def refusals(worker: Worker) -> str:
    """Wrong values, ranks that differ, wrong arrays: every rank raises, nothing moves."""
    with worker.buffer() as buffer:
        return f"{refuse_all(worker, buffer)} refused"


@scenario
def closed_twice(worker: Worker) -> str:
    """destroy() after close(), and calls after it; several Buffers at a time."""
    trip = RoundTrip(worker, small_case(worker))
    with make(worker, trip.case) as outer:
        inner = make(worker, trip.case)
        trip.round(outer)
        trip.round(inner)
        inner.close()
        inner.destroy()
        seen = settle(worker, inner, inner.barrier)
        assert seen.kind == "StateError", seen
        trip.round(outer)
    return "ok"


# --------------------------------------------------------------------------- asked for by name


@by_name
def big(worker: Worker) -> str:
    """Offsets beyond 2^31 and 2^32 bytes, checked where the rows lie."""
    size, row_bytes, said = worker.size, worker.options.row_bytes, []
    for tokens in worker.options.big:
        rows = size * tokens
        with worker.buffer(
            num_max_tokens_per_rank=tokens,
            hidden=row_bytes,
            num_topk=2,
            num_experts=4 * size,
            pool_bytes=rows * (row_bytes + 64) + (rows // 2 + 4096) * row_bytes + (256 << 20),
        ) as buffer:
            said.append(big_trip(worker, buffer, tokens, row_bytes))
        gc.collect()
        if worker.gpu:
            worker.xp.get_default_memory_pool().free_all_blocks()
        worker.meet()
    return ", ".join(said)


def big_trip(worker: Worker, buffer: Any, tokens: int, row_bytes: int) -> str:
    """Most tokens go to all ranks, so that the last rows lie far out."""
    xp, rank, size = worker.xp, worker.rank, worker.size
    experts = np.arange(size) * 4
    topk_idx = np.full((tokens, 2), -1, np.int64)
    topk_idx[:, 0] = experts[(rank + 1) % size]  # all of rank r's tokens go to rank r + 1 …
    topk_idx[::2, 1] = experts[rank]  # … and every other one stays as well
    if size == 1:
        topk_idx[:, 1] = -1
    x = xp.empty((tokens, row_bytes), np.uint8)
    fill(xp, x, rank, tokens)
    got = buffer.dispatch(x, topk_idx=worker.up(topk_idx))
    number = len(got.recv_x)
    want = tokens if size == 1 else tokens + -(-tokens // 2)
    assert number == want, f"{number} rows were received, not {want}"
    wrong = wrong_rows(xp, got.recv_x, *sources(xp, got.handle), tokens)
    assert wrong == 0, f"dispatch of {tokens}: {wrong} of {number} rows are wrong"
    del x
    y = got.recv_x.view(np.int32)
    back = buffer.combine(y, got.handle)
    wrong = wrong_sums(xp, back.combined_x, rank, tokens, copies_of(got.handle))
    assert wrong == 0, f"combine of {tokens}: {wrong} rows are wrong"
    buffer.check()
    return f"T={tokens}: {number * row_bytes / 2**30:.2f} GiB received"


@by_name
def no_close(worker: Worker) -> str:
    """Work, and no close(): the program ends well all the same."""
    trip = RoundTrip(worker, small_case(worker))
    buffer = make(worker, trip.case)
    trip.round(buffer)
    KEPT.append(buffer)
    return "never closed"


KEPT: list[Any] = []


@by_name
def one_trip(worker: Worker) -> str:
    """There and back."""
    trip = RoundTrip(worker, small_case(worker))
    with make(worker, trip.case) as buffer:
        trip.round(buffer)
    return "ok"


def main() -> None:
    """Run the scenarios asked for, or all that run by default."""
    known = SCENARIOS | BY_NAME

    def arguments(parser: Any) -> None:
        parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(known))
        parser.add_argument("--big", type=int, nargs="+", default=[65536, 131072])
        parser.add_argument("--row-bytes", type=int, default=14336, help="of big")

    worker = Worker("CASES", __doc__, arguments)
    chosen = worker.options.scenarios or list(SCENARIOS)
    said = {}
    for name in chosen:
        said[name] = known[name](worker)
        worker.say(f"{name}: {said[name]}")
    figures = [f"{name} {text}" for name, text in said.items()] if len(said) < 4 else []
    worker.done(f"{len(chosen)} scenarios", *figures)


if __name__ == "__main__":
    sys.exit(main())
