"""The contract of ``Buffer`` on the host engine, scenario by scenario, on one set of ranks.

mpirun -n 2 python tests/mpi/contract_worker.py [NAME ...]

Every rank runs every scenario; each is given a communicator. The last rank is the one that
misbehaves.
"""

import os
import sys
import time
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from deepep_cupy import Buffer, ContractError, StateError
from deepep_cupy.engines.calls import CombineCall, DispatchCall
from deepep_cupy.engines.host.engine import HostEngine
from deepep_cupy.protocol.sizes import BufferSpec
from deepep_cupy.ranks.abort_board import AbortBoard
from deepep_cupy.ranks.mpi import MPIGroup
from deepep_cupy.reference import combine, dispatch, get_dispatch_layout
from deepep_cupy.testing.compare import (
    assert_combine_equal,
    assert_dispatch_equal,
    assert_same_bits,
)
from deepep_cupy.testing.data import expected, sequence

M, H, K = 64, 40, 4
SEVERAL_NODES = "," in os.environ.get("CLUSTER_NODES", "")
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def make(comm, **changes):
    arguments = {
        "num_max_tokens_per_rank": M,
        "hidden": H,
        "num_topk": K,
        "num_experts": 4 * comm.size,
        "dtype": "float32",
        "engine": "host",
        "timeout_s": 30,
    }
    return Buffer(comm, **(arguments | changes))


def choices(comm, rank, seed, num_tokens):
    """``[T, K]`` distinct experts, some -1."""
    rng = np.random.default_rng([seed, rank])
    order = np.argsort(rng.random((num_tokens, 4 * comm.size)), axis=1)
    topk_idx = np.ascontiguousarray(order[:, :K])
    topk_idx[rng.random(topk_idx.shape) < 0.2] = -1
    return topk_idx


class RoundTrip:
    """One dispatch of all ranks' data, made from a seed, and what the reference says of it."""

    def __init__(self, comm, seed, dtype=np.float32):
        self.rank, ranks = comm.rank, range(comm.size)
        rng = [np.random.default_rng([seed, rank, 1]) for rank in ranks]
        self.tokens = [int(each.integers(0, M)) for each in rng]
        self.idx = [choices(comm, rank, seed, self.tokens[rank]) for rank in ranks]
        self.x = [rng[r].standard_normal((self.tokens[r], H)).astype(dtype) for r in ranks]
        self.w = [rng[r].random((self.tokens[r], K), np.float32) for r in ranks]
        self.want = dispatch(
            self.x, topk_idx=self.idx, topk_weights=self.w, num_experts=4 * comm.size
        )
        handles = [each.handle for each in self.want]
        self.y = [3 * each.recv_x for each in self.want]
        self.back = combine(
            self.y, handles, topk_weights=[each.recv_topk_weights for each in self.want]
        )
        self.again = dispatch(self.y_like(2), handles=handles)

    def y_like(self, factor):
        return [factor * x for x in self.x]

    def dispatch(self, buffer):
        me = self.rank
        got = buffer.dispatch(self.x[me], topk_idx=self.idx[me], topk_weights=self.w[me])
        assert_dispatch_equal(got, self.want[me], rank=me)
        return got.handle

    def cached(self, buffer, handle):
        got = buffer.dispatch(self.y_like(2)[self.rank], handle=handle)
        assert_same_bits("recv_x", got.recv_x, self.again[self.rank].recv_x, rank=self.rank)
        assert got.handle is handle
        assert got.recv_topk_idx is None
        assert got.recv_topk_weights is None
        assert got.num_recv_tokens_per_expert_list is handle.num_recv_tokens_per_expert_list

    def combine(self, buffer, handle):
        me = self.rank
        got = buffer.combine(self.y[me], handle, topk_weights=self.want[me].recv_topk_weights)
        assert_combine_equal(got, self.back[me], rank=me)


def works(comm, buffer, seed=7):
    """A round trip, to show that the Buffer is still usable."""
    trip = RoundTrip(comm, seed)
    trip.combine(buffer, trip.dispatch(buffer))


@contextmanager
def raises(kind, *words):
    """Check that this is raised, and what it says."""
    with pytest.raises(kind) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def refused(*words):
    return raises(ContractError, *words)


# ------------------------------------------------------------------------------- normal work


@scenario
def sizes_that_jump(comm):
    todo = sequence(comm.size)
    most = max(case.num_max_tokens for case in todo)
    first = todo[0]
    with make(
        comm,
        num_max_tokens_per_rank=most,
        hidden=first.hidden,
        num_topk=first.num_topk,
        num_experts=first.num_experts,
    ) as buffer:
        for case in todo:
            want = expected(case, 1)
            mine = want.inputs[comm.rank]
            got = buffer.dispatch(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
            assert_dispatch_equal(got, want.dispatched[comm.rank], rank=comm.rank)


@scenario
def handles_in_any_order(comm):
    with make(comm) as buffer:
        trips = [RoundTrip(comm, seed) for seed in range(4)]
        handles = [trip.dispatch(buffer) for trip in trips]
        order = np.random.default_rng(5)
        for _ in range(12):
            number = int(order.integers(len(trips)))
            trips[number].combine(buffer, handles[number])
            number = int(order.integers(len(trips)))
            trips[number].cached(buffer, handles[number])
        for trip, handle in reversed(list(zip(trips, handles, strict=True))):
            trip.combine(buffer, handle)


@scenario
def a_hundred_times(comm):
    trip = RoundTrip(comm, 3, ml_dtypes.bfloat16)
    with make(comm) as buffer:
        for _ in range(100):
            trip.combine(buffer, trip.dispatch(buffer))


@scenario
def several_buffers(comm):
    with make(comm) as one, make(comm) as two:
        trip = RoundTrip(comm, 1)
        first, second = trip.dispatch(one), trip.dispatch(two)
        trip.combine(two, second)
        trip.combine(one, first)
        with refused("handle", "another Buffer"):
            two.combine(trip.y[comm.rank], first)


@scenario
def rows_of_records(comm):
    """Opaque rows: structured, of odd sizes, of foreign byte order."""
    record = np.dtype([("id", ">u2"), ("who", "S3"), ("far", np.float64)])
    with make(comm) as buffer:
        for dtype in (record, np.dtype("V3"), np.dtype(">f4"), np.dtype(np.complex64)):
            rng = np.random.default_rng(comm.rank)
            raw = rng.integers(0, 256, (9, 2 * dtype.itemsize), dtype=np.uint8)
            x = raw.view(dtype)
            mask = np.ones((9, comm.size), bool)
            got = buffer.dispatch(x, is_token_in_rank=mask)
            assert got.recv_x.dtype == dtype
            everyone = np.concatenate(comm.allgather(raw)).view(np.uint8)
            assert np.array_equal(got.recv_x.view(np.uint8), everyone)
            with refused("dtype", "added"):
                buffer.combine(got.recv_x, got.handle)


@scenario
def records_travel_with_what_lies_between_their_fields(comm):
    particle = np.dtype([("pos", "f8", 3), ("id", "i4")], align=True)  # 28 bytes used of 32
    raw = np.full((9, 2 * particle.itemsize), 0xA0 + comm.rank, np.uint8)
    everyone = 0xA0 + np.arange(comm.size)
    idx = np.full((9, 1), 4 * comm.rank)
    idx[::2] = -1
    with make(comm, num_topk=1) as buffer:
        for expand in (False, True):
            left_over = [np.full(n, 0x11, np.uint8) for n in (32, 64, 128, 256, 512, 1024) * 4]
            del left_over
            got = buffer.dispatch(
                raw.view(particle), topk_idx=idx, do_expand=expand, expert_alignment=3,
                do_zero_padding=expand,
            )  # fmt: skip
            assert got.recv_x.dtype == particle
            rows = got.recv_x.view(np.uint8)
            assert rows.shape == (6 if expand else 4, 64)
            assert np.all(rows[:4] == 0xA0 + comm.rank)
            assert not rows[4:].any()
        mask = np.ones((9, comm.size), bool)
        mask[::2] = False
        left_over = [np.full(n, 0x11, np.uint8) for n in (32, 64, 128, 256, 512, 1024) * 4]
        del left_over
        got = buffer.dispatch(raw.view(particle), is_token_in_rank=mask)
        assert np.array_equal(got.recv_x.view(np.uint8)[::4, 0], everyone)
        assert np.all(got.recv_x.view(np.uint8) == np.repeat(everyone, 4)[:, None])


def shifted(array):
    """A copy at an address that is no multiple of the item."""
    raw = np.empty(array.nbytes + 1, np.uint8)
    view = raw[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    assert not view.size or not view.flags.aligned
    return view


@scenario
def arrays_at_odd_addresses(comm):
    """NumPy and MPI take them: in the first call, and in later ones whose plan is known."""
    trip, me, experts = RoundTrip(comm, 17), comm.rank, 4
    x, idx, w = trip.x[me], trip.idx[me], trip.w[me]
    results = []
    with make(comm) as buffer:
        for put in (np.copy, shifted, np.copy, shifted):
            stats = put(np.zeros(experts, np.int32))
            got = buffer.dispatch(
                put(x), topk_idx=put(idx), topk_weights=put(w), do_expand=True,
                cumulative_local_expert_recv_stats=stats,
            )  # fmt: skip
            out = put(np.zeros_like(x))
            buffer.combine(
                put(got.recv_x), got.handle, bias=put(x), out=out,
                row_weights=put(got.recv_topk_weights),
            )  # fmt: skip
            codes = np.ones((len(x), H), np.int8)
            scales = put(np.full((len(x), -(-H // 128)), 1 + me, np.float32))
            scaled = buffer.dispatch((codes, scales), topk_idx=put(idx.astype(np.int32)))
            back = buffer.combine(
                put(trip.y[me]), trip.dispatch(buffer),
                topk_weights=put(trip.want[me].recv_topk_weights),
            )  # fmt: skip
            assert_combine_equal(back, trip.back[me], rank=me)
            results.append((got.recv_x, got.recv_topk_weights, stats, out, *scaled.recv_x))
    for later in results[1:]:
        for have, want in zip(later, results[0], strict=True):
            assert_same_bits("array at an odd address", have, want)


class Shown:
    """An array of another library, which shows it by ``__array__``; that may be a copy."""

    def __init__(self, array):
        self._array = array

    def __array__(self, dtype=None, copy=None):
        return self._array.copy()


class Lent:
    """One that lends it by DLPack."""

    def __init__(self, array, device=1):
        self._array, self._device = array, device

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._device, 0


@scenario
def arrays_of_other_libraries(comm):
    trip, rank = RoundTrip(comm, 5), comm.rank
    x, idx = trip.x[rank], trip.idx[rank]
    with make(comm) as buffer:
        for kind in (Shown, Lent):
            given = [kind(each) for each in (x, idx, trip.w[rank])]
            got = buffer.dispatch(given[0], topk_idx=given[1], topk_weights=given[2])
            assert_dispatch_equal(got, trip.want[rank], rank=rank)
            out = np.empty_like(x)
            taken = kind(out)
            if kind is Lent:
                back = buffer.combine(Lent(trip.y[rank]), got.handle, out=taken).combined_x
                assert back is taken
                assert_same_bits("out", out, trip.back[rank].combined_x, rank=rank)
            else:
                with refused("combine(): argument 'out' must be writable"):
                    buffer.combine(got.recv_x, got.handle, out=taken)
        with refused("in memory of a GPU"):
            buffer.dispatch(Lent(x, device=2), topk_idx=idx)


@scenario
def what_deepep_passes(comm):
    """DeepEP's own call: layout first, then everything by name, then six fields."""
    with make(comm) as buffer:
        trip = RoundTrip(comm, 4)
        me = comm.rank
        per_rank, per_rdma, per_expert, in_rank, event = buffer.get_dispatch_layout(
            trip.idx[me], 4 * comm.size
        )
        want = get_dispatch_layout(trip.idx[me], 4 * comm.size, comm.size)
        assert_same_bits("num_tokens_per_rank", per_rank, want.num_tokens_per_rank)
        assert_same_bits("num_tokens_per_expert", per_expert, want.num_tokens_per_expert)
        assert_same_bits("is_token_in_rank", in_rank, want.is_token_in_rank)
        assert (per_rdma is None) == (not SEVERAL_NODES)
        event.current_stream_wait()
        recv_x, _, weights, counts, handle, event = buffer.dispatch(
            x=trip.x[me],
            handle=None,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=trip.idx[me],
            topk_weights=trip.w[me],
            expert_alignment=16,
        )
        assert_same_bits("recv_x", recv_x, trip.want[me].recv_x)
        plain = trip.want[me].num_recv_tokens_per_expert_list
        assert counts == [-(-count // 16) * 16 for count in plain]
        combined, _, event = buffer.combine(
            x=trip.y[me], handle=handle, topk_weights=weights, bias=None
        )
        assert_same_bits("combined_x", combined, trip.back[me].combined_x)
        assert not handle.send_row.flags.writeable


@scenario
def barrier(comm):
    with make(comm) as buffer:
        for late in range(comm.size):
            if comm.rank == late:
                time.sleep(0.05)
            arrived = time.monotonic()  # one clock for all processes of a machine
            buffer.barrier()
            left = time.monotonic()
            last = max(comm.allgather(arrived))
            assert left >= last, f"left {last - left} s before the last came"


@scenario
def tags(comm):
    """Two calls of one form, made in opposite order on one rank: every rank raises."""
    last = comm.size - 1
    with make(comm) as buffer:
        x = np.ones((2, H), np.float32)
        idx = np.zeros((2, 1), np.int64)
        handle = buffer.dispatch(x, topk_idx=idx, tag=3).handle
        order = (4, 5) if comm.rank == last else (5, 4)
        received = np.ones((handle.num_recv_tokens, H), np.float32)
        for tag in order if comm.size > 1 else ():
            for call in (
                lambda tag=tag: buffer.dispatch(x, topk_idx=idx, tag=tag),
                lambda tag=tag: buffer.dispatch(x, handle=handle, tag=tag),
                lambda tag=tag: buffer.combine(received, handle, tag=tag),
                lambda tag=tag: buffer.barrier(tag=tag),
            ):
                with pytest.raises(
                    ContractError, match=r"different calls: rank 0 calls \w+ with tag"
                ):
                    call()
        with pytest.raises(ContractError, match="argument 'tag'"):
            buffer.barrier(tag=-1 if comm.rank == last else 1)
        assert len(buffer.dispatch(x, topk_idx=idx, tag=3).recv_x) == handle.num_recv_tokens


@scenario
def chunks(comm):
    """Messages longer than the longest that MPI takes: the same code with a shorter longest."""
    group = MPIGroup(comm)
    board = AbortBoard(group)
    spec = BufferSpec(
        num_ranks=comm.size,
        rank=comm.rank,
        num_max_tokens_per_rank=M,
        max_row_bytes=8 * H,
        num_topk=K,
        num_experts=4 * comm.size,
        timeout_s=30,
    )
    for chunk_bytes in (7, 97, 1000, 4 * H):
        engine = HostEngine(group, board, spec, chunk_bytes)
        trip, me = RoundTrip(comm, 11), comm.rank
        call = DispatchCall(trip.x[me], trip.idx[me], trip.w[me])
        got = engine.dispatch(call)
        assert_same_bits("recv_x", got.recv_x, trip.want[me].recv_x)
        assert_same_bits("weights", got.recv_topk_weights, trip.want[me].recv_topk_weights)
        back = engine.combine(CombineCall(trip.y[me], got.routing, got.recv_topk_weights, ()))
        assert_combine_equal(back, trip.back[me], rank=me)
        engine.close(collective=True)
    board.free()
    group.free()


# ------------------------------------------------------------------------------ wrong arguments


@scenario
def too_many_tokens(comm):
    last = comm.size - 1
    with make(comm) as buffer:
        num_tokens = M + 1 if comm.rank == last else 3
        x = np.zeros((num_tokens, H), np.float32)
        idx = np.zeros((num_tokens, K), np.int64) - 1
        for _ in range(2):
            with refused("dispatch()", f"rank {last} refused", str(M + 1), f"= {M}"):
                buffer.dispatch(x, topk_idx=idx)
            works(comm, buffer)


@scenario
def wrong_experts(comm):
    last, num_experts = comm.size - 1, 4 * comm.size
    with make(comm) as buffer:
        for row, why in (
            ([num_experts, 0, -1, -1], "outside"),
            ([0, -2, -1, -1], "outside"),
            ([3, -1, 2, 3], "twice"),
        ):
            idx = choices(comm, comm.rank, 1, 20)
            if comm.rank == last:
                idx[13] = row
            with refused(f"rank {last} refused", "token 13", why, "nothing was moved"):
                buffer.dispatch(np.zeros((20, H), np.int8), topk_idx=idx)
            works(comm, buffer)


@scenario
def ranks_that_differ(comm):
    last = comm.size - 1
    if last == 0:
        return
    odd = comm.rank == last
    with make(comm) as buffer:
        trip, me = RoundTrip(comm, 2), comm.rank
        x, idx, w = trip.x[me], trip.idx[me], trip.w[me]
        with refused("dtype of x", "rank 0: float32", f"rank {last}: float64"):
            buffer.dispatch(x[:, : H // 4].astype("f8") if odd else x, topk_idx=idx)
        with refused("bytes of a row", "rank 0: 160", f"rank {last}: 80"):
            buffer.dispatch(np.ascontiguousarray(x[:, : H // 2]) if odd else x, topk_idx=idx)
        with refused("num_topk", "rank 0: 4", f"rank {last}: 2"):
            buffer.dispatch(x, topk_idx=np.ascontiguousarray(idx[:, :2]) if odd else idx)
        with refused("entry of topk_idx", "rank 0: 8", f"rank {last}: 4"):
            buffer.dispatch(x, topk_idx=idx.astype(np.int32) if odd else idx)
        with refused("topk_weights", "rank 0: 1", f"rank {last}: 0"):
            buffer.dispatch(x, topk_idx=idx, topk_weights=None if odd else w)
        works(comm, buffer)
        first, second = trip.dispatch(buffer), trip.dispatch(buffer)
        with refused("made the handle", "rank 0: call", f"rank {last}: call"):
            buffer.dispatch(x, handle=second if odd else first)
        with refused("made the handle", "rank 0: call", f"rank {last}: call"):
            buffer.combine(trip.y[me], second if odd else first)
        with refused("rank 0 calls dispatch", f"rank {last} calls combine"):
            if odd:
                buffer.combine(trip.y[me], first)
            else:
                buffer.dispatch(x, topk_idx=idx)
        with refused("rank 0 calls barrier", f"rank {last} calls dispatch"):
            if odd:
                buffer.dispatch(x, handle=first)
            else:
                buffer.barrier()
        mask = np.ones((len(x), comm.size), bool)
        with refused("rank 0", "is_token_in_rank", f"rank {last}: handle"):
            buffer.dispatch(x, **({"handle": first} if odd else {"is_token_in_rank": mask}))
        trip.combine(buffer, second)
        trip.combine(buffer, first)
        works(comm, buffer)


def _wrong_dispatches(comm, trip, handle, mask_handle):
    me, size = comm.rank, comm.size
    x, idx, w = trip.x[me], trip.idx[me], trip.w[me]
    tokens = len(x)
    mask = np.ones((tokens, size), bool)
    wide = np.zeros((tokens, H * 8), np.float32)
    return [
        ("x", "list", {"x": x.tolist(), "topk_idx": idx}),
        ("x", "uint8 or int8 where scales", {"x": (x, w), "topk_idx": idx}),
        ("x", "C-contiguous", {"x": np.zeros((3, 2 * H), np.int8)[:, ::2], "topk_idx": idx[:3]}),
        ("x", "shape", {"x": x.reshape(-1), "topk_idx": idx}),
        ("x", "rows of 1 to 80 bytes", {"x": wide, "topk_idx": idx}),
        ("x", "plain bytes", {"x": x.astype(object), "topk_idx": idx}),
        ("topk_idx", "int64 or int32", {"x": x, "topk_idx": idx.astype(np.int16)}),
        ("topk_idx", "shape", {"x": x, "topk_idx": np.zeros((tokens + 1, K), np.int64)}),
        ("topk_idx", "1 to num_topk = 4", {"x": x, "topk_idx": np.zeros((tokens, 5), np.int64)}),
        ("topk_idx", "handle", {"x": x, "topk_idx": idx, "handle": handle}),
        ("topk_weights", "float32", {"x": x, "topk_idx": idx, "topk_weights": w.astype("f8")}),
        ("topk_weights", "shape", {"x": x, "topk_idx": idx, "topk_weights": w[:, :1].copy()}),
        ("topk_weights", "no choices", {"x": x, "is_token_in_rank": mask, "topk_weights": w}),
        ("topk_weights", "no choices", {"x": x, "handle": mask_handle, "topk_weights": w}),
        ("is_token_in_rank", "bool", {"x": x, "is_token_in_rank": mask.astype(np.uint8)}),
        ("is_token_in_rank", "shape", {"x": x, "topk_idx": idx, "is_token_in_rank": mask[:, :0]}),
        ("num_tokens_per_rank", "int32", {"x": x, "topk_idx": idx, "num_tokens_per_rank": w}),
        ("num_tokens_per_expert", "shape", {"x": x, "topk_idx": idx,
                                            "num_tokens_per_expert": np.zeros(1, np.int32)}),
        ("expert_alignment", "got 0", {"x": x, "topk_idx": idx, "expert_alignment": 0}),
        ("expert_alignment", "got 1.5", {"x": x, "topk_idx": idx, "expert_alignment": 1.5}),
        ("handle", "got tuple", {"x": x, "handle": (1, 2)}),
        ("x", "rows", {"x": np.zeros((tokens + 1, H), np.int8), "handle": handle}),
        ("", "one of topk_idx", {"x": x}),
    ]  # fmt: skip


def _wrong_combines(trip, handle, mask_handle):
    me = trip.rank
    y, w = trip.y[me], trip.want[me].recv_topk_weights
    bias = np.zeros((trip.tokens[me], H), np.float32)
    return [
        ("x", "one row per row", {"x": np.zeros((len(y) + 1, H), np.int8), "handle": handle}),
        ("x", "FP8", {"x": y.astype(ml_dtypes.float8_e4m3fn), "handle": handle}),
        ("x", "added", {"x": y.astype(np.complex64)[:, :8].copy(), "handle": handle}),
        ("handle", "got NoneType", {"x": y, "handle": None}),
        ("topk_weights", "shape", {"x": y, "handle": handle, "topk_weights": w[:, :2].copy()}),
        ("topk_weights", "no choices", {"x": y, "handle": mask_handle, "topk_weights": w}),
        ("bias", "at most two", {"x": y, "handle": handle, "bias": (bias, bias, bias)}),
        ("bias", "float32", {"x": y, "handle": handle, "bias": bias.astype(np.float64)}),
        ("bias", "shape", {"x": y, "handle": handle, "bias": (bias, bias[:, :3].copy())}),
    ]


@scenario
def wrong_arguments(comm):
    """One rank passes nonsense, the others do what is right: all raise, and go on."""
    last = comm.size - 1
    with make(comm) as buffer, make(comm, dtype="bfloat16") as short:
        trip, me = RoundTrip(comm, 6), comm.rank
        handle = trip.dispatch(buffer)
        mask_handle = buffer.dispatch(trip.x[me], is_token_in_rank=handle.send_row >= 0).handle
        right = {"x": trip.x[me], "topk_idx": trip.idx[me]}
        for argument, word, given in _wrong_dispatches(comm, trip, handle, mask_handle):
            # Rows of the second Buffer are bfloat16: shorter.
            target = short if word.startswith("rows of 1") else buffer
            with refused(*((argument, word, f"on rank {last}") if me == last else (
                f"rank {last} refused", "not allowed"))):  # fmt: skip
                target.dispatch(**(given if me == last else right | _short(target is short)))
        for argument, word, given in _wrong_combines(trip, handle, mask_handle):
            with refused(*((argument, word, f"on rank {last}") if me == last else (
                f"rank {last} refused", f"argument '{argument}'"))):  # fmt: skip
                buffer.combine(**(given if me == last else {"x": trip.y[me], "handle": handle}))
        trip.combine(buffer, handle)
        works(comm, buffer)
        if me == last:  # local: nobody else takes part
            with refused("get_dispatch_layout", "num_experts"):
                buffer.get_dispatch_layout(trip.idx[me], 4 * comm.size + 1 if last else 0)
            with refused("get_dispatch_layout", "int64 or int32"):
                buffer.get_dispatch_layout(trip.w[me])


def _short(yes):
    return {"x": np.zeros((1, 4), np.int8), "topk_idx": np.zeros((1, 1), np.int64)} if yes else {}


@scenario
def constructors_that_differ(comm):
    last = comm.size - 1
    odd = comm.rank == last
    for field, common, other in (
        ("num_max_tokens_per_rank", 128, 256),
        ("hidden", 64, 65),
        ("num_topk", 2, 3),
        ("num_experts", 8 * comm.size, None),
        ("dtype", "bfloat16", "float16"),
        ("engine", "host", "auto"),
        ("timeout_s", 10, 10.5),
        ("pool_bytes", None, 1 << 20),
        ("ranks_per_node", None, comm.size),
    ):
        if last:
            changes = {"num_topk": 0} if field == "num_experts" else {}
            with refused(f"'{field}'", f"rank 0: {common!r}", f"rank {last}: {other!r}"):
                make(comm, **changes, **{field: other if odd else common})
    for field, value in (
        ("num_max_tokens_per_rank", 0),
        ("hidden", -1),
        ("num_topk", 33),
        ("num_experts", 4 * comm.size + 1 if last else 0),
        ("num_sms", 0),
        ("num_sms", -2),
        ("num_sms", 1.5),
        ("dtype", "float17"),
        ("timeout_s", 0),
        ("engine", "gpu"),
        ("device", -1),
    ):
        with refused(f"'{field}'", f"{value!r}"):
            make(comm, **{field: value})
    # These two may differ: a wrong one is told to all, a right one is nobody's business.
    with refused("'num_sms'", "got 0", f"on rank {last}"):
        make(comm, num_sms=0 if odd else None)
    with make(comm, num_sms=3 if odd else 24, device=comm.rank) as buffer:
        works(comm, buffer)
    with refused("comm", "mpi4py"):
        Buffer(None, num_max_tokens_per_rank=1, hidden=1, num_topk=0)
    with make(comm, num_topk=0, num_experts=None) as buffer, refused("topk_idx", "num_experts"):
        buffer.dispatch(np.zeros((1, 1)), topk_idx=np.zeros((1, 1), np.int64))


# ----------------------------------------------------------------------------------------- life


@scenario
def life(comm):
    buffer = make(comm)
    assert buffer.engine_name == "host"
    assert buffer.xp is np
    assert buffer.state.value == "open"
    trip = RoundTrip(comm, 1)
    handle = trip.dispatch(buffer)
    buffer.check()
    buffer.reset()  # harmless
    trip.combine(buffer, handle)
    assert buffer.empty((2, 3), "f4").shape == (2, 3)
    assert buffer.peer_pointers() == ()  # no rank sees another's memory here
    buffer.close()
    buffer.close()
    buffer.destroy()
    for call in (
        lambda: trip.dispatch(buffer),
        lambda: trip.combine(buffer, handle),
        buffer.barrier,
        buffer.reset,
        buffer.check,
        lambda: buffer.empty((1,), "f4"),
        buffer.peer_pointers,
        lambda: buffer.get_dispatch_layout(trip.idx[comm.rank]),
    ):
        with raises(StateError, "closed"):
            call()


@scenario
def auto_says_why(comm):
    with make(comm, engine="auto") as buffer:
        if comm.rank == 0:
            print("ENGINE", buffer.engine_name)
        if buffer.engine_name == "host":
            works(comm, buffer)


@scenario
def destinations(comm):
    """``dest=`` is a mask of ranks in other words; a wrong one is refused on every rank."""
    rng = np.random.default_rng([5, comm.rank])
    x = rng.random((20, H)).astype(np.float32)
    many = rng.integers(-1, comm.size, (20, 3), dtype=np.int32)
    mask = np.array([[rank in row for rank in range(comm.size)] for row in many])
    with make(comm, num_topk=0, num_experts=None) as buffer:
        got, want = buffer.dispatch(x, dest=many), buffer.dispatch(x, is_token_in_rank=mask)
        assert_same_bits("dest", got.recv_x, want.recv_x)
        assert np.array_equal(got.handle.recv_src_idx, want.handle.recv_src_idx)
        one = np.full(20, comm.size - 1)
        recv = buffer.dispatch(x, dest=one)
        assert len(recv.recv_x) == (20 * comm.size if comm.rank == comm.size - 1 else 0)
        assert_same_bits("way back", buffer.combine(recv.recv_x, recv.handle).combined_x, x)
        assert len(buffer.dispatch(x[:0], dest=one[:0]).recv_x) == 0
        wrong = one.copy()
        if comm.rank == comm.size - 1:
            wrong[3] = comm.size
        with pytest.raises(ContractError, match="argument 'dest'"):
            buffer.dispatch(x, dest=wrong)
        with pytest.raises(ContractError, match="must not be given together with is_token_in_rank"):
            buffer.dispatch(x, dest=one, is_token_in_rank=mask)
        with pytest.raises(ContractError, match="argument 'dest' must"):
            buffer.dispatch(x, dest=one.astype(np.float32))


def main():
    comm = MPI.COMM_WORLD
    for name in sys.argv[1:] or SCENARIOS:
        start = time.monotonic()
        SCENARIOS[name](comm)
        if comm.rank == 0:
            print(f"{time.monotonic() - start:6.3f} s {name}")


if __name__ == "__main__":
    main()
