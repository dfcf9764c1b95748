"""Low-latency calls on the host engine, scenario by scenario, on one set of ranks.

mpirun -n 2 python tests/mpi/low_latency_worker.py [NAME ...]

Every rank runs every scenario; the last rank is the one that misbehaves.
"""

import sys
import time
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from deepep_cupy import Buffer, ContractError, EventOverlap, StateError
from deepep_cupy.engines.host.engine import HostEvent
from deepep_cupy.reference import low_latency_combine, low_latency_dispatch
from deepep_cupy.testing.compare import assert_same_bits

SCENARIOS = {}
M, H, K, LOW = 16, 256, 3, 8


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
        "low_latency_tokens": LOW,
    }
    return Buffer(comm, **(arguments | changes))


def inputs(comm, tokens, seed=1, rank=None, hidden=H):
    """x, topk_idx and topk_weights of a rank, this one where none is named."""
    rng = np.random.default_rng([seed, comm.rank if rank is None else rank])
    order = np.argsort(rng.random((tokens, 4 * comm.size)), axis=1)
    idx = np.ascontiguousarray(order[:, :K])
    idx[rng.random(idx.shape) < 0.2] = -1
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    return x, idx, rng.random((tokens, K), np.float32)


def tokens_of(rank):
    return (5, 0, LOW, 1)[rank % 4]


@contextmanager
def refused(*words, kind=ContractError):
    """Check that the call is refused, and what is said."""
    with pytest.raises(kind) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def works(comm, buffer):
    """A round trip, to show that the Buffer is still usable."""
    x, idx, weights = inputs(comm, tokens_of(comm.rank))
    got = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, low_latency=True)
    want = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_worst_tokens=LOW * comm.size)
    number = int(want.handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    assert_same_bits("recv_x", got.recv_x[:number], want.recv_x[:number], rank=comm.rank)
    y = np.where(np.arange(len(want.recv_x))[:, None] < number, want.recv_x, np.nan)
    back, wanted = (buffer.combine(y, each.handle).combined_x for each in (got, want))
    assert_same_bits("combined_x", back, wanted, rank=comm.rank)


@scenario
def wrong_dispatches(comm):
    last, me = comm.size - 1, comm.rank
    x, idx, _ = inputs(comm, tokens_of(me))
    with make(comm) as buffer:
        low = {"topk_idx": idx, "low_latency": True}
        handle = buffer.dispatch(x, **low).handle
        mask = np.zeros((len(x), comm.size), bool)
        for words, bad in (
            (("do_cpu_sync", "never waits"), {"do_cpu_sync": True}),
            (("is_token_in_rank", "topk_idx alone"), {"is_token_in_rank": mask}),
            (("num_worst_tokens", f"{LOW * comm.size}"), {"num_worst_tokens": LOW * comm.size + 1}),
            (("handle", "each anew"), {"handle": handle, "topk_idx": None}),
            (("handle", "not kept"), {"handle": handle, "topk_idx": None, "low_latency": False}),
            (("low_latency", "True or False"), {"low_latency": 1}),
        ):
            with refused(*words if me == last else ("refused", f"rank {last}", words[0])):
                buffer.dispatch(x, **(low | bad if me == last else low))
        many = LOW + 1 if me == last else 1
        with refused(f"rank {last}" if last != me else f"low_latency_tokens = {LOW}", f"{LOW + 1}"):
            buffer.dispatch(np.zeros((many, H), "f4"), topk_idx=np.full((many, K), -1),
                            low_latency=True)  # fmt: skip
        if last:
            with refused("disagree on the routing", "low latency"):
                buffer.dispatch(x, topk_idx=idx, low_latency=me == last)
        with refused("topk_weights", "no weights go back" if me == last else f"rank {last}"):
            y = np.zeros((handle.num_rows, H), np.float32)
            given = np.zeros((handle.num_rows, K), np.float32) if me == last else None
            buffer.combine(y, handle, given)
        works(comm, buffer)
    with make(comm, low_latency_tokens=0) as buffer, refused("low_latency_tokens", "0 here"):
        buffer.dispatch(x, **low)


class Trip:
    """One round trip of DeepEP V1's calls, and what the reference says of it."""

    def __init__(self, comm, seed=1, most=LOW, hidden=H, **options):
        self.me, self.most, self.experts, self.options = comm.rank, most, 4 * comm.size, options
        tokens = [min(most, tokens_of(rank + seed)) for rank in range(comm.size)]
        every = [inputs(comm, tokens[r], seed, r, hidden) for r in range(comm.size)]
        x, idx, weights = zip(*every, strict=True)
        if not options.get("use_fp8", True):
            x = [each.astype(ml_dtypes.bfloat16) for each in x]
        self.x, self.idx, self.weights = x[self.me], idx[self.me], weights[self.me]
        self.stats = np.arange(4, dtype=np.int32)
        stats = [self.stats.copy() for _ in x]
        self.want = low_latency_dispatch(
            x, idx, most, self.experts, topk_weights=weights, recv_stats=stats, **options
        )
        self.want_stats = stats[self.me]
        self.y = [
            np.where(each.defined[..., None], each.handle.num_rows + 0.7, np.nan)
            * np.linspace(1, 2, 40, dtype=np.float32)
            for each in self.want
        ]
        self.y = [each.astype(ml_dtypes.bfloat16) for each in self.y]
        self.back = {
            (given, reduce): low_latency_combine(
                self.y, self.want, topk_weights=weights if given else None, reduce=reduce
            )[self.me]
            for given in (False, True)
            for reduce in ("exact", "per_rank")
        }

    def dispatch(self, buffer, *, weights=True, hook=False):
        more = {"topk_weights": self.weights} if weights else {}
        return buffer.low_latency_dispatch(
            self.x, self.idx, self.most, self.experts, self.stats, return_recv_hook=hook,
            **more, **self.options,
        )  # fmt: skip

    def compare(self, got):
        want, rank = self.want[self.me], self.me
        real = want.defined
        parts = got.recv_x if isinstance(got.recv_x, tuple) else (got.recv_x,)
        wanted = want.recv_x if isinstance(want.recv_x, tuple) else (want.recv_x,)
        for part, each in zip(parts, wanted, strict=True):
            assert (part.shape, part.strides) == (each.shape, each.strides)
            assert_same_bits("recv_x", part[real], each[real], rank=rank)
        handle = got.handle
        assert_same_bits("recv_count", got.recv_count, want.recv_count, rank=rank)
        assert_same_bits("ranges", handle.recv_layout_range, want.recv_layout_range, rank=rank)
        src_info = handle.recv_src_info[real]
        assert_same_bits("recv_src_info", src_info, want.recv_src_info[real], rank=rank)
        if handle.recv_weights is not None:
            weights = handle.recv_weights.reshape(real.shape)[real]
            assert_same_bits("weights", weights, want.weights[real], rank=rank)
        assert_same_bits("statistics", self.stats, self.want_stats, rank=rank)

    def combine(self, buffer, handle, *, given=False, reduce="per_rank", **options):
        weights = self.weights if given else None
        return buffer.low_latency_combine(
            self.y[self.me], self.idx, weights, handle, reduce=reduce, **options
        )

    def compare_back(self, got, *, given=False, reduce="per_rank"):
        assert_same_bits("combined_x", got.combined_x, self.back[given, reduce], rank=self.me)


@scenario
def names_of_v1(comm):
    """Every layout on one Buffer, M and H that change from call to call."""
    fp8 = ({}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True})
    with make(comm) as buffer:
        waited = np.full(comm.size, 5)
        for number, most in enumerate((1, LOW, 3, LOW)):
            for options in (*fp8, {"use_fp8": False}):
                trip = Trip(comm, number, most, (H, 130, H, 1)[number], **options)
                got = trip.dispatch(buffer)
                trip.compare(got)
                out = np.zeros_like(trip.back[True, "exact"])
                given = {"given": True, "reduce": "exact"}
                more = {"out": out, "combine_wait_recv_cost_stats": waited, "zero_copy": True}
                back = trip.combine(buffer, got.handle, **given, **more)
                assert back.combined_x is out
                trip.compare_back(back, **given)
                for ways in ({"reduce": "exact"}, {"given": True}, {}):
                    trip.compare_back(trip.combine(buffer, got.handle, **ways), **ways)
        assert got.hook is None
        assert (waited == 5).all()
        assert buffer.clean_low_latency_buffer(LOW, H, trip.experts) is None
        x, idx, weights = inputs(comm, 2)
        lone = buffer.low_latency_dispatch(x, idx, 2, trip.experts)
        y = np.ones((4, 2 * comm.size, 8), np.float32)
        with refused("topk_weights", "must be given"):
            buffer.low_latency_combine(y, idx, None, lone.handle)
        back = buffer.low_latency_combine(y, idx, weights, lone.handle).combined_x
        sums = np.where(idx >= 0, weights, 0).sum(axis=1, keepdims=True)
        assert np.allclose(back, sums, rtol=1e-5)


@scenario
def hooks(comm):
    """Two calls open, received in another order than they were sent; what is refused meanwhile."""
    last, me = comm.size - 1, comm.rank
    trips = [Trip(comm, seed) for seed in (3, 4)]
    with make(comm, low_latency_in_flight=2) as buffer:
        for order in ((0, 1), (1, 0)):
            got = [trip.dispatch(buffer, hook=True) for trip in trips]
            for number in order:
                got[number].hook()
            back = [
                trip.combine(buffer, each.handle, return_recv_hook=True)
                for trip, each in zip(trips, got, strict=True)
            ]
            for trip, each, combined in zip(trips, got, back, strict=True):
                combined.hook()
                trip.stats[...] = trip.want_stats
                trip.compare(each)
                trip.compare_back(combined)
            with refused("called before", f"rank {me}", kind=StateError):
                back[0].hook()
        x, idx, _ = inputs(comm, 1)
        given = x, idx, LOW, 4 * comm.size
        calls = [
            buffer.barrier,
            lambda: buffer.dispatch(x, topk_idx=idx),
            lambda: buffer.low_latency_dispatch(*given),
            lambda: trips[0].combine(buffer, got[0].handle),
        ]
        for call in calls:  # open on one rank, received on the others
            sent = buffer.low_latency_dispatch(*given, return_recv_hook=True)
            if me != last:
                sent.hook()
            kind = StateError if me == last else ContractError
            with (
                refused(f"rank {last}", "hooks", kind=kind)
                if me != last
                else refused("1 sent and not yet received", "call the hooks first", kind=kind)
            ):
                call()
            if me == last:
                sent.hook()
        sent = [buffer.low_latency_dispatch(*given, return_recv_hook=True) for _ in range(2)]
        with refused("low_latency_in_flight = 2", kind=StateError):
            buffer.low_latency_dispatch(*given, return_recv_hook=True)
        buffer.reset()
        with refused("reset() has dropped the call", kind=StateError):
            sent[0].hook()
        works(comm, buffer)
        sent = buffer.low_latency_dispatch(*given, return_recv_hook=True)
    with refused("close() has dropped the call", kind=StateError):
        sent.hook()


@scenario
def wrong_names_of_v1(comm):
    """Each argument wrong on the last rank: all raise, with one sentence."""
    last, me, size = comm.size - 1, comm.rank, comm.size
    trip, other = Trip(comm, 5), Trip(comm, 6)
    tokens, experts, bf16 = len(trip.x), 4 * size, ml_dtypes.bfloat16
    right = {
        "x": trip.x,
        "topk_idx": trip.idx,
        "num_max_dispatch_tokens_per_rank": LOW,
        "num_experts": experts,
    }
    outside, twice = (inputs(comm, 2)[1] for _ in range(2))
    outside[1, 0], twice[1] = experts, 1
    two = inputs(comm, 2)[0]
    many = {"x": np.zeros((LOW, H), "f4"), "topk_idx": np.full((LOW, K), -1)}
    past = EventOverlap(HostEvent())
    alone = (
        ("num_max_dispatch_tokens_per_rank", {"num_max_dispatch_tokens_per_rank": LOW + 1}),
        ("num_max_dispatch_tokens_per_rank", {"num_max_dispatch_tokens_per_rank": 0}),
        ("num_experts", {"num_experts": experts + size}),
        ("num_experts", {"num_experts": None}),
        ("x", {"x": trip.x.astype(np.float64)}),
        ("x", {"x": (trip.x, trip.x)}),
        ("x", {"x": np.zeros((tokens, 4 * H + 1), np.float32)}),
        ("topk_idx", {"topk_idx": trip.idx[:, :, None]}),
        ("topk_idx", {"topk_idx": None}),
        ("topk_weights", {"topk_weights": np.zeros((tokens, K + 1), np.float32)}),
        ("use_fp8", {"use_fp8": 1}),
        ("round_scale", {"use_fp8": False, "round_scale": True}),
        ("use_ue8m0", {"use_ue8m0": True}),
        ("return_recv_hook", {"return_recv_hook": True, "async_finish": True}),
        ("return_recv_hook", {"return_recv_hook": 1}),
        ("return_recv_hook", {"return_recv_hook": True, "previous_event": past}),
        ("config", {"config": 3}),
        ("previous_event", {"previous_event": 3}),
        ("cumulative_local_expert_recv_stats",
         {"cumulative_local_expert_recv_stats": np.zeros(5, np.int32)}),
        ("dispatch_wait_recv_cost_stats", {"dispatch_wait_recv_cost_stats": np.zeros(size, "i4")}),
    )  # fmt: skip
    by_data = (
        ("its token 1 holds an expert outside", {"x": two, "topk_idx": outside}),
        ("its token 1 names the same expert twice", {"x": two, "topk_idx": twice}),
    )
    differ = (
        (
            f"num_max_dispatch_tokens_per_rank={LOW}",
            {"x": two, "topk_idx": inputs(comm, 2)[1], "num_max_dispatch_tokens_per_rank": LOW - 1},
        ),
        ("dtype of x", {"use_fp8": False}),
        ("dtype of x", {"round_scale": True, "use_ue8m0": True}),
        ("bytes of a row", {"x": np.zeros((tokens, H // 2), np.float32)}),
        ("num_topk", {"topk_idx": np.ascontiguousarray(trip.idx[:, :2])}),
        ("topk_weights", {"topk_weights": trip.weights}),
    )
    with make(comm, low_latency_in_flight=2) as buffer:
        for argument, bad in alone:
            words = (f"'{argument}'", f"rank {last}")
            with refused(f"rank {last} refused", argument) if me != last else refused(*words):
                buffer.low_latency_dispatch(**(right | bad if me == last else right))
        for words, bad in by_data:
            with refused(words, f"rank {last}"):
                buffer.low_latency_dispatch(**(right | bad if me == last else right))
        few = {"x": two, "topk_idx": inputs(comm, 2)[1], "num_max_dispatch_tokens_per_rank": 2}
        few = right | few
        with refused(f"{LOW}", f"rank {last}", "more than" if me != last else "= 2 rows"):
            buffer.low_latency_dispatch(**(few | many if me == last else few))
        for words, bad in differ if last else ():
            with refused(words, "rank 0", f"rank {last}"):
                buffer.low_latency_dispatch(**(right | bad if me == last else right))
        handles = [each.dispatch(buffer).handle for each in (trip, other)]
        plain = buffer.dispatch(trip.x, topk_idx=trip.idx, low_latency=True).handle
        y = trip.y[me]
        right = {"x": y, "topk_idx": trip.idx, "topk_weights": None, "handle": handles[0]}
        for argument, bad in (
            ("handle", {"handle": plain}),
            ("use_logfmt", {"use_logfmt": True}),
            ("zero_copy", {"zero_copy": None}),
            ("x", {"x": y[:-1]}),
            ("x", {"x": np.zeros(y.shape, np.int32)}),
            ("x", {"x": y.astype(ml_dtypes.float8_e4m3fn)}),
            ("topk_idx", {"topk_idx": trip.idx[:, :2]}),
            ("topk_weights", {"topk_weights": trip.weights.astype(np.float64)}),
            ("out", {"out": np.zeros((tokens, 41), bf16)}),
            ("out", {"out": np.zeros((tokens, 40), np.float32)}),
            ("combine_wait_recv_cost_stats", {"combine_wait_recv_cost_stats": np.zeros(size + 1)}),
            ("reduce", {"reduce": "per_node"}),
            ("return_recv_hook", {"return_recv_hook": True, "async_finish": True}),
        ):
            words = (f"'{argument}'", f"rank {last}")
            with refused(f"rank {last} refused", argument) if me != last else refused(*words):
                buffer.low_latency_combine(**(right | bad if me == last else right))
        for words, bad in (
            (
                (
                    "the dispatch call",
                    {"handle": handles[1], "x": other.y[me], "topk_idx": other.idx},
                ),
                ("dtype of x", {"x": y.astype(np.float32)}),
                ("bytes of a row", {"x": np.ascontiguousarray(y[..., :20])}),
                ("reduce='per_rank'", {"reduce": "exact"}),
                ("topk_weights", {"topk_weights": trip.weights}),
            )
            if last
            else ()
        ):
            with refused("disagree", words, "rank 0", f"rank {last}"):
                buffer.low_latency_combine(**(right | bad if me == last else right))
        if last:
            with refused("low latency", f"num_max_dispatch_tokens_per_rank={LOW}"):
                if me == last:
                    buffer.dispatch(trip.x, topk_idx=trip.idx)
                else:
                    buffer.low_latency_dispatch(trip.x, trip.idx, LOW, experts, use_fp8=False)
            with refused("different calls", f"rank {last} calls barrier"):
                if me == last:
                    buffer.barrier()
                else:
                    trip.dispatch(buffer)
        with make(comm) as second, refused("handle", "another Buffer"):
            second.low_latency_combine(**right)
        works(comm, buffer)
        trip.stats[...] = np.arange(4)
        trip.compare(trip.dispatch(buffer))


@scenario
def constructors(comm):
    for changes in ({"low_latency_tokens": M + 1}, {"low_latency_in_flight": 5}):
        with refused(*changes):
            make(comm, **changes)
    if comm.size > 1:
        with refused("'low_latency_tokens' must be the same"):
            make(comm, low_latency_tokens=1 + comm.rank)
        with refused("must be 0 on several nodes"):
            make(comm, ranks_per_node=1)
    size = {"num_max_tokens_per_rank": M, "hidden": H, "num_topk": K, "num_experts": 8 * comm.size}
    hints = [
        Buffer.size_hint(num_ranks=comm.size, **size, low_latency_tokens=low) for low in (0, LOW)
    ]
    assert hints[1] - hints[0] >= 2 * 8 * comm.size * LOW * H * 2


def main():
    comm = MPI.COMM_WORLD
    for name in sys.argv[1:] or SCENARIOS:
        start = time.monotonic()
        SCENARIOS[name](comm)
        if comm.rank == 0:
            print(f"{time.monotonic() - start:6.3f} s {name}")


if __name__ == "__main__":
    main()
