"""The cast, the expanded layout and its combines: the CUDA engine's Python over stand-ins."""

import contextlib
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gpu_stand_in import device as d
from gpu_stand_in.engine import run_ranks

from deepep_cupy import reference
from deepep_cupy.engines.calls import Quantization, Streams
from deepep_cupy.errors import ContractError
from deepep_cupy.memory.pool import PoolExhaustedError
from deepep_cupy.testing.compare import assert_same_bits
from flat_calls import combine_call, dispatch_call

EXPERTS, TOPK, ALIGNMENT = 8, 4, 4
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def up(array):
    return None if array is None else d.asarray(array)


def call_of(x, **more):
    return dispatch_call(x, **({"expert_alignment": ALIGNMENT} | more))


def inputs(num_ranks, seed, *, hidden=40, dtype=BFLOAT16):
    """Rows, choices and weights of all ranks."""
    rng = np.random.default_rng(seed)
    tokens = ((7, 0, 16, 3) * 2)[:num_ranks]
    xs = [rng.standard_normal((t, hidden)).astype(dtype) for t in tokens]
    idx = [np.argsort(rng.random((t, EXPERTS)), axis=1)[:, :TOPK].astype(np.int64) for t in tokens]
    for one in idx:
        one[rng.random(one.shape) < 0.3] = -1
    return xs, idx, [rng.random((t, TOPK)).astype(np.float32) for t in tokens]


def check(got, want, *, cached=False):
    """Every array of an expanded dispatch whose content is said."""
    rows, scales = want.recv_x if isinstance(want.recv_x, tuple) else (want.recv_x, None)
    for name, array, right in (
        ("recv_x", got.recv_x, rows),
        ("scales", got.recv_scales, scales),
        ("weights", got.recv_topk_weights, want.recv_topk_weights),
    ):
        assert (array is None) == (right is None), name
        if right is not None:
            array = array.get()
            assert array.shape == right.shape
            assert_same_bits(name, array[want.defined], right[want.defined])
    assert got.recv_topk_idx is None
    routing, handle = got.routing, want.handle
    assert_same_bits("expanded_row", routing.expanded_row.get(), handle.expanded_row)
    assert routing.num_expanded_rows == handle.num_expanded_tokens
    listed = [] if cached else want.num_recv_tokens_per_expert_list
    assert got.num_recv_tokens_per_expert == listed
    ends = handle.psum_num_recv_tokens_per_expert
    assert_same_bits("psum_expert_rows", routing.psum_expert_rows.get(), ends)


@pytest.mark.parametrize("worst", [None, 64])
@pytest.mark.parametrize("mode", ["plain", "no room", "own", "cast", "cast on the way"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_dispatch_and_cached(ranks, worst, mode):
    num_ranks = ranks  # not the fixture: eight experts divide by these alone
    fused = mode == "cast on the way"
    casts = fused or mode == "cast"
    xs, idx, weights = inputs(num_ranks, 1, hidden=48 if fused else 40)
    limits = None if worst is None else [worst] * num_ranks
    cast = {"round_scale": True, "use_ue8m0": True} if casts else {}
    common = {"quantize": casts, "topk_weights": weights, **cast}
    want = reference.dispatch(
        xs,
        topk_idx=idx,
        num_experts=EXPERTS,
        expert_alignment=ALIGNMENT,
        do_expand=True,
        do_zero_padding=True,
        num_worst_tokens=limits,
        **common,
    )
    again = reference.dispatch(xs, handles=[one.handle for one in want], **common)

    def work(rank):
        me = rank.spec.rank
        given = {"topk_weights": up(weights[me]), "expand": True, "own": mode == "own"}
        if casts:
            given["quantize"] = Quantization(round_scale=True, use_ue8m0=True)
        if mode == "no room":
            without_room(rank)
        apart = me > 1  # x begins elsewhere, and is cast by a kernel of its own
        x = shifted(xs[me]) if apart else up(xs[me])
        got = rank.dispatch(
            call_of(x, topk_idx=up(idx[me]), num_worst_tokens=worst, zero_padding=True, **given)
        )
        check(got, want[me])
        second = rank.dispatch(call_of(x, routing=got.routing, **given))
        check(second, again[me], cached=True)
        assert second.routing is got.routing
        names = [name for name, _ in rank.kernels.grids]
        assert names.count("dispatch_cast_bulk") == (2 if fused and not apart else 0)
        before = casts and x.size and not (fused and not apart)
        assert names.count("quantize") == (2 if before else 0)
        return True

    assert all(run_ranks(num_ranks, work, num_experts=EXPERTS, num_topk=TOPK))


def shifted(array):
    """On the device, at no multiple of 16 bytes."""
    skip = 8 // array.itemsize
    flat = up(np.concatenate([np.zeros(skip, array.dtype), array.reshape(-1)]))
    return flat[skip:].reshape(array.shape)


def without_room(rank):
    """The pool has room for what the exchange needs, and no more."""
    alloc = rank.runtime.pool.alloc

    def full(nbytes, stream, label=""):
        if label.startswith("expanded"):
            raise PoolExhaustedError("no room")
        return alloc(nbytes, stream, label)

    rank.runtime.pool.alloc = full


@pytest.mark.parametrize("reduce", ["exact", "per_rank"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("worst", "in_pool"), [(None, True), (None, False), (64, False)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_combine(ranks, reduce, weighted, worst, in_pool):
    num_ranks = ranks  # not the fixture: eight experts divide by these alone
    xs, idx, _ = inputs(num_ranks, 2)
    limits = None if worst is None else [worst] * num_ranks
    arrived = reference.dispatch(
        xs,
        topk_idx=idx,
        num_experts=EXPERTS,
        expert_alignment=ALIGNMENT,
        do_expand=True,
        num_worst_tokens=limits,
    )
    handles = [one.handle for one in arrived]
    rng = np.random.default_rng(3)
    ys = [rng.standard_normal((h.num_rows, 40)).astype(BFLOAT16) for h in handles]
    factors = [rng.standard_normal(h.num_rows).astype(np.float32) for h in handles]
    carried = [rng.standard_normal(h.num_rows).astype(np.float32) for h in handles]
    for one in carried:
        one[rng.random(one.shape) < 0.5] = -0.0
    biases = [[rng.standard_normal(x.shape).astype(BFLOAT16)] for x in xs]
    want = reference.combine(
        ys,
        handles,
        topk_weights=carried,
        biases=biases,
        reduce=reduce,
        row_weights=factors if weighted else None,
    )

    def work(rank):
        me = rank.spec.rank
        got = rank.dispatch(
            call_of(up(xs[me]), topk_idx=up(idx[me]), expand=True, num_worst_tokens=worst)
        )
        y = up(ys[me])
        if in_pool:
            y = rank.runtime.arrays.empty(y.shape, y.dtype, d.current_stream())
            y[...] = ys[me]
        back = rank.combine(
            combine_call(
                y,
                got.routing,
                up(carried[me]),
                (up(biases[me][0]),),
                reduce=reduce,
                row_weights=up(factors[me]) if weighted else None,
            )
        )
        assert_same_bits("combined_x", back.combined_x.get(), want[me].combined_x)
        gathered = back.combined_topk_weights.get()
        assert_same_bits("combined_topk_weights", gathered, want[me].combined_topk_weights)
        return True

    assert all(run_ranks(num_ranks, work, num_experts=EXPERTS, num_topk=TOPK))


@pytest.mark.parametrize("reduce", ["exact", "per_rank"])
def test_ranks_that_disagree_on_the_sums(reduce):
    xs, idx, _ = inputs(2, 4)

    def work(rank):
        me = rank.spec.rank
        got = rank.dispatch(call_of(up(xs[me]), topk_idx=up(idx[me]), expand=True))
        mine = reduce if me else "exact"
        refused = pytest.raises(ContractError, match="disagree") if reduce == "per_rank" else None
        with refused or contextlib.nullcontext():
            rank.combine(combine_call(got.recv_x, got.routing, None, (), reduce=mine))
        return int(rank.kernels.world.reports[me][0])

    said = run_ranks(2, work, num_experts=EXPERTS, num_topk=TOPK)
    assert said == [int(reduce == "per_rank")] * 2


def test_a_refused_dispatch_leaves_poison():
    xs, idx, weights = inputs(2, 5)

    def work(rank):
        me = rank.spec.rank
        call = call_of(
            up(xs[me]),
            topk_idx=up(idx[me]),
            topk_weights=up(weights[me]),
            expand=True,
            num_worst_tokens=1,
        )
        got = rank.dispatch(call)
        assert (got.routing.expanded_row.get() == -1).all()
        assert (got.recv_x.get().view(np.uint8) == 0xFF).all()
        assert np.isnan(got.recv_topk_weights.get()).all()
        with pytest.raises(ContractError, match="would receive"):
            rank.combine(combine_call(got.recv_x, got.routing, None, ()))
        return True

    assert all(run_ranks(2, work, num_experts=EXPERTS, num_topk=TOPK))


def touch(array, what):
    """Some kernel of the caller's that reads, on the current stream."""
    d.device().tracker.touch(d.current_stream(), what, (array.data.ptr, array.nbytes, False))


@pytest.mark.parametrize("worst", [None, 16])
@pytest.mark.parametrize("cast", [False, True, "on the way"])
def test_nothing_is_reused_before_its_time(worst, cast):
    xs, idx, weights = inputs(1, 6, hidden=48 if cast == "on the way" else 40)

    def work(rank):
        rank.events.patient = True
        runtime, here = rank.runtime, d.current_stream()
        for turn in range(24):
            given = {
                "x": up(xs[0]),
                "topk_idx": up(idx[0]),
                "topk_weights": up(weights[0]),
                "quantize": Quantization() if cast else None,
            }
            ready = runtime.point()
            streams = (
                Streams(ready, async_finish=True, allocate_on_comm_stream=True),
                Streams(ready, async_finish=True),
                Streams(),
            )[turn % 3]
            got = rank.dispatch(
                call_of(expand=True, num_worst_tokens=worst, streams=streams, **given)
            )
            given.clear()
            y = up(np.zeros(got.recv_x.shape, BFLOAT16))
            ready = runtime.point()
            done = rank.combine(
                combine_call(
                    y,
                    got.routing,
                    None,
                    (),
                    reduce=("exact", "per_rank")[turn // 3 % 2],
                    streams=Streams(ready, async_finish=True) if turn % 3 < 2 else Streams(),
                )
            )
            del y
            user = d.Stream(non_blocking=True) if turn % 2 and got.event else here
            with user:
                for event in (got.event, done.event):
                    if event is not None:
                        event.wait()
                for array in (got.recv_x, got.recv_topk_weights, done.combined_x):
                    touch(array, "reader")
            del got, done, array
        return True

    assert all(run_ranks(1, work, num_experts=EXPERTS, num_topk=TOPK))
