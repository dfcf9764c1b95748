"""The cast to FP8 and the grouped-GEMM layout on GPUs: right to the last bit, and how fast.

mpirun -n 2 python tests/gpu/worker_expand.py [cases|refused|graphs|speed ...] [--kinds ...]

``speed`` times cached calls, so that the host waits for nothing, and gives the local kernels the
difference to the plain call: bytes they read and write, over that time.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import ml_dtypes
import numpy as np
from common import ROW_BYTES, Worker, add_kinds, kinds_of, must_be, settle

from deepep_cupy import env
from deepep_cupy.testing.cases import Case
from deepep_cupy.testing.compare import assert_combine_equal, assert_dispatch_equal, to_host
from deepep_cupy.testing.data import RankExpected, expected
from deepep_cupy.testing.round_trip import RoundTrip

FLOATS = ("bfloat16", "float16", "float32", "float64")


# ------------------------------------------------------------------------------------- right


def expanded_cases(size: int) -> Iterator[Case]:
    """Sizes of rows and choices, and what combine may be asked for."""
    tokens = (64, 5, 0, 17, 129, 33, 1, 64)[:size]
    shapes = itertools.cycle(((7168, 8, 8), (33, 6, 4), (2048, 9, 32), (200, 32, 32), (640, 1, 1)))
    waits = itertools.cycle(("host", "worst", "tight"))
    for number, (dtype, reduce, weighted) in enumerate(
        itertools.product((*FLOATS, "int16"), ("exact", "per_rank"), (True, False))
    ):
        hidden, topk, local = next(shapes)
        yield Case(
            size,
            tokens,
            hidden if dtype != "float64" else hidden // 2 + 1,
            local * size,
            min(topk, local * size),
            dtype,
            layout="cached" if number % 3 == 1 else "topk",
            index_dtype=("int64", "int32")[number % 2],
            weights=number % 4 != 3,
            num_biases=number % 3,
            expert_alignment=(1, 128, 3)[number % 3],
            routing=("random", "half", "skewed")[number % 3],
            wait=next(waits),
            expand=True,
            zero_padding=number % 2 == 0,
            reduce=reduce,
            row_weights=weighted and dtype in FLOATS,
        )


def cast_cases(size: int) -> Iterator[Case]:
    """Every kind of scale from every kind of row, aligned and not, expanded and not; the second
    half, where rows are multiples of 16 bytes, is cast on the way by bulk copies."""
    tokens = (33, 128, 1, 0, 64, 7, 100, 5)[:size]
    some = itertools.cycle((7168, 130, 2688, 1, 1024, 517))
    aligned = itertools.cycle((7168, 2000, 144, 4096, 16))
    kinds = list(itertools.product(FLOATS[:3], ("quantize", "round", "ue8m0")))
    for number, (dtype, fp8) in enumerate(kinds * 2):
        yield Case(
            size,
            tokens,
            next(some if number < len(kinds) else aligned),
            8 * size,
            min(8, 8 * size),
            dtype,
            layout="cached" if number % 4 == 3 else "topk",
            expert_alignment=4,
            fp8=fp8,
            scales_layout=("row", "column")[number // 3 % 2],
            wait=("host", "worst")[number // 2 % 2],
            expand=number % 2 == 1,
            zero_padding=number % 2 == 1,
        )


def cases(worker: Worker) -> str:
    """All of them, twice on one Buffer for each number of experts."""
    chosen = [*expanded_cases(worker.size), *cast_cases(worker.size)]
    chosen.sort(key=lambda case: case.num_experts or 0)
    kinds = kinds_of(worker)
    for experts, group in itertools.groupby(chosen, key=lambda case: case.num_experts):
        some = list(group)
        with ExitStack() as stack:
            buffers = []
            for kind, variables in kinds.items():
                with env.setting(**variables):
                    buffers.append(stack.enter_context(buffer_for(worker, chosen, experts)))
                must_be(buffers[-1], kind)
            for case in some:
                part = expected(case, 5).of_rank(worker.rank)
                for buffer in buffers:
                    twice(worker, buffer, case, part)
    return f"{len(chosen)} cases" + f" of {len(kinds)} kinds" * (len(kinds) > 1)


def buffer_for(worker: Worker, chosen: list[Case], experts: int | None) -> Any:
    """A Buffer for those with this number of experts; for rows of all, so that kernels are alike"""
    some = [case for case in chosen if case.num_experts == experts]
    return worker.buffer(
        num_max_tokens_per_rank=max(case.num_max_tokens for case in some),
        hidden=max(ROW_BYTES, *(case.row_bytes for case in chosen)),
        num_topk=max(case.num_topk for case in some),
        num_experts=experts,
        pool_bytes=worker.options.pool_mib << 20,
    )


def twice(worker: Worker, buffer: Any, case: Case, part: RankExpected) -> None:
    """There and back, two times."""
    for _ in range(2):
        trip = RoundTrip(buffer, case, part, worker.up)
        got = trip.dispatch()
        trip.compare_dispatch(got)
        if part.combined is not None:
            back = trip.combine(got.handle)
            worker.synchronize()
            buffer.check()
            trip.compare_combine(back)


def sizes(worker: Worker) -> dict[str, Any]:
    """Of a Buffer for the scenarios below."""
    return {
        "num_max_tokens_per_rank": 64,
        "hidden": ROW_BYTES,
        "num_topk": 4,
        "num_experts": 4 * worker.size,
        "pool_bytes": worker.options.pool_mib << 20,
    }


def small(worker: Worker, **changes: Any) -> Case:
    """An expanded case that fits."""
    size = worker.size
    settings: dict[str, Any] = {"wait": "worst", "expand": True, "expert_alignment": 4}
    tokens = (40, 7, 64, 1, 0, 33, 12, 64)[:size]
    return Case(size, tokens, 512, 4 * size, 4, "bfloat16", **(settings | changes))


def refused(worker: Worker) -> str:
    """A bad choice on rank 0, and no host waits: poison everywhere, then all is well."""
    case = small(worker)
    part = expected(case, 1).of_rank(worker.rank)
    with worker.buffer(**sizes(worker)) as buffer:
        trip = RoundTrip(buffer, case, part, worker.up)
        idx = part.inputs.topk_idx.copy()
        if worker.rank == 0:
            idx[0, 0] = 4 * worker.size
        results: list[Any] = []

        def call() -> None:
            x, weights = worker.up(part.inputs.x), worker.up(part.inputs.topk_weights)
            results.append(
                buffer.dispatch(
                    x,
                    topk_idx=worker.up(idx),
                    topk_weights=weights,
                    do_expand=True,
                    do_cpu_sync=False,
                    expert_alignment=4,
                )
            )

        seen = settle(worker, buffer, call)
        assert seen.kind == "ContractError", seen
        assert "outside" in seen.text, seen
        if worker.gpu:
            got = results[0]
            assert (to_host(got.handle.expanded_row) == -1).all()
            assert (to_host(got.handle.num_unaligned_recv_tokens_per_expert) == 0).all()
            assert (to_host(got.recv_x.view(np.uint8)) == 0xFF).all(), "recv_x is not poisoned"
            assert np.isnan(to_host(got.recv_topk_weights)).all(), "weights are not poisoned"
        got = trip.dispatch()
        trip.compare_dispatch(got)
        trip.compare_combine(trip.combine(got.handle))
        buffer.check()
    return "poisoned, then right"


def graphs(worker: Worker) -> str:
    """No-wait dispatch, cached dispatch and both combines in one graph, replayed."""
    if not worker.gpu:
        return "need a GPU"
    rank, said = worker.rank, 0
    for fp8, reduce in (("", "exact"), ("", "per_rank"), ("ue8m0", "exact")):
        case = small(worker, fp8=fp8, reduce=reduce, row_weights=True, zero_padding=True)
        want = expected(case, 2)
        part = want.of_rank(rank)
        with worker.buffer(**sizes(worker)) as buffer:
            trip = RoundTrip(buffer, case, part, worker.up)
            got = trip.dispatch()  # everything is compiled and allocated once before
            trip.combine(got.handle)
            results: list[Any] = []

            def call(number: int, trip: Any = trip, results: list[Any] = results) -> object:
                got = trip.dispatch()
                back = trip.combine(got.handle)
                results.append((got, back))
                return results[number]

            graph = worker.capture(buffer, call, 2)
            for _ in range(10):
                graph.replay(3)
                buffer.check()
                for got, back in results:
                    assert_dispatch_equal(got, part.dispatched, rank=rank)
                    for each in back:
                        assert_combine_equal(each, part.combined, rank=rank)
            said += 30
    return f"{said} replays"


# -------------------------------------------------------------------------------------- fast


def timed(worker: Worker, call: Callable[[], object], times: int = 20) -> float:
    """Collective. Microseconds of one call, the slowest rank's."""
    cuda = worker.xp.cuda
    for _ in range(3):
        call()
    worker.synchronize()
    worker.meet()
    begin, end = cuda.Event(), cuda.Event()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return worker.most(1e3 * cuda.get_elapsed_time(begin, end) / times)


def speed(worker: Worker) -> str:
    """Cast, copies and sums of 7168 channels: what they add to the plain calls."""
    if not worker.gpu:
        return "needs a GPU"
    xp, tokens, hidden, topk = worker.xp, worker.options.tokens, 7168, 8
    experts, row_bytes = 8 * worker.size, 2 * hidden
    order = np.argsort(np.random.default_rng(worker.rank).random((tokens, experts)), axis=1)
    topk_idx = xp.asarray(np.ascontiguousarray(order[:, :topk]).astype(np.int64))
    x = xp.full((tokens, hidden), 0x3F80, np.uint16).view(ml_dtypes.bfloat16)
    codes = xp.zeros((tokens, hidden), np.uint8).view(ml_dtypes.float8_e4m3fn)
    pair = (codes, xp.ones((tokens, hidden // 128), np.float32))
    lines = []

    def report(name: str, base: float, more: float, nbytes: int) -> None:
        rate = nbytes / max(more - base, 1e-3) * 1e-3
        line = f"{name} {more:.0f} us, {more - base:.0f} more than {base:.0f}"
        lines.append(line + f" ({rate:.0f} GB/s)" * (nbytes > 0))
        worker.say(f"  {lines[-1]}")

    with worker.buffer(
        num_max_tokens_per_rank=tokens,
        hidden=row_bytes,
        num_topk=topk,
        num_experts=experts,
        pool_bytes=worker.options.pool_mib << 20,
    ) as buffer:
        plain = buffer.dispatch(x, topk_idx=topk_idx)
        wide = buffer.dispatch(x, topk_idx=topk_idx, do_expand=True)
        rows, copies = len(plain.recv_x), len(wide.recv_x)
        moved = (rows + copies) * row_bytes
        worker.say(f"  T={tokens}: rank 0 receives {rows} tokens, {copies} copies")

        def cached(rows: Any, handle: Any, **mode: Any) -> float:
            return timed(worker, lambda: buffer.dispatch(rows, handle=handle, **mode))

        def fresh(**mode: Any) -> float:
            mode |= {"topk_idx": topk_idx, "do_cpu_sync": False}
            return timed(worker, lambda: buffer.dispatch(x, **mode))

        def combined(rows: Any, handle: Any, **mode: Any) -> float:
            return timed(worker, lambda: buffer.combine(rows, handle, **mode))

        base = cached(x, plain.handle)
        report("copies", base, cached(x, wide.handle), moved)
        base = cached(pair, plain.handle)
        more = cached(x, plain.handle, quantize="fp8_e4m3")
        report("cast", base, more, 3 * tokens * hidden)
        report("new and expanded", fresh(), fresh(do_expand=True), moved)
        y, z = buffer.empty(plain.recv_x.shape, x.dtype), buffer.empty(wide.recv_x.shape, x.dtype)
        base = combined(y, plain.handle)
        report("sums per rank", base, combined(z, wide.handle, reduce="per_rank"), moved)
        report("exact sums", base, combined(z, wide.handle, reduce="exact"), 0)
    return "; ".join(lines)


def main() -> None:
    """Run the scenarios asked for, or all."""
    known = {"cases": cases, "refused": refused, "graphs": graphs, "speed": speed}

    def arguments(parser: Any) -> None:
        parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(known))
        parser.add_argument("--tokens", type=int, default=2048, help="of speed")
        parser.add_argument("--pool-mib", type=int, default=6144)
        add_kinds(parser)

    worker = Worker("EXPAND", __doc__, arguments)
    said = []
    for name in worker.options.scenarios or known:
        if name in ("cases", "speed"):
            said.append(f"{name}: {known[name](worker)}")
        else:
            for kind, variables in kinds_of(worker).items():
                with env.setting(**variables):
                    result = known[name](worker)
                worker.say(f"  {kind} {name}: {result}")
            said.append(f"{name}: {result}")
        worker.say(said[-1])
    worker.done(*filter(None, [worker.options.kinds]), *said)


if __name__ == "__main__":
    sys.exit(main())
