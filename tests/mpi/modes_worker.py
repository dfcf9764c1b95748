"""The modes on the host engine, scenario by scenario, on one set of ranks.

mpirun -n 2 python tests/mpi/modes_worker.py [NAME ...]

Every rank runs every scenario; the last rank is the one that misbehaves. What single calls must
give is in the table of cases; here are sequences of calls, and what is refused.
"""

import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from deepep_cupy import Buffer, Config, ContractError, EventOverlap, StateError
from deepep_cupy.reference import dispatch, quantize
from deepep_cupy.testing.cases import Case
from deepep_cupy.testing.compare import assert_dispatch_equal, assert_same_bits
from deepep_cupy.testing.data import expected, mode_cases
from deepep_cupy.testing.round_trip import RoundTrip, buffer_arguments

SCENARIOS = {}
SEED = 3
FP8 = ml_dtypes.float8_e4m3fn


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def plain(comm, tokens=(9, 0, 33, 4), hidden=160):
    counts = tuple((tokens * comm.size)[: comm.size])
    return Case(comm.size, counts, hidden, 4 * comm.size, 3, "bfloat16", expert_alignment=4)


def variants(case):
    """One case in every mode."""
    return [
        case,
        replace(case, wait="worst"),
        replace(case, wait="tight", fp8="quantize", scales_layout="column"),
        replace(case, fp8="ue8m0", dtype="float32", expand=True, zero_padding=True),
        replace(case, expand=True, row_weights=True, reduce="per_rank", stats=True),
        replace(case, expand=True, wait="worst", out=True, num_biases=1),
        replace(case, expand=True, wait="tight", layout="cached", row_weights=True),
        replace(case, fp8="packed", dtype="float8_e4m3fn", wait="worst", background=True),
    ]


def make(comm, *cases, **changes):
    """A Buffer for all these cases."""
    sizes = [buffer_arguments(case) for case in cases]
    arguments = {
        name: max(size[name] or 0 for size in sizes) if name != "dtype" else "uint8"
        for name in sizes[0]
    }
    return Buffer(comm, engine="host", timeout_s=30, **(arguments | changes))


def there(comm, buffer, case):
    """Dispatch a case, and judge."""
    want = expected(case, SEED)
    trip = RoundTrip(buffer, case, want.of_rank(comm.rank))
    got = trip.dispatch()
    trip.compare_dispatch(got)
    return trip, got.handle, want


def back(trip, handle):
    trip.compare_combine(trip.combine(handle))


def works(comm, buffer, case):
    trip, handle, _ = there(comm, buffer, case)
    back(trip, handle)


@contextmanager
def raises(kind, *words):
    """Check that this is raised, and what it says."""
    with pytest.raises(kind) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def refused(*words):
    return raises(ContractError, *words)


# -------------------------------------------------------------------------------- many calls


@scenario
def sizes_that_jump(comm):
    """A big call, then a small one: no row, no index and no count of the big one stays."""
    few, many = (8, 200), (200, 8)
    most = (300, *[1] * (comm.size - 1))
    jumps = [tuple((each * comm.size)[: comm.size]) for each in (few, many)]
    todo = [
        replace(case, num_tokens=tokens)
        for tokens in (*jumps, most, jumps[0])
        for case in variants(plain(comm))
    ]
    with make(comm, *todo) as buffer:
        for case in todo:
            works(comm, buffer, case)


@scenario
def stale_tails(comm):
    """The worst case of the Buffer, not of the call: behind few rows lies much."""
    with make(comm, plain(comm, (64,))) as buffer:
        rng = np.random.default_rng(comm.rank)
        experts = 4 * comm.size
        for tokens in (64, 3, 0, 64, 1):
            x = rng.standard_normal((tokens, 8)).astype("f4")
            idx = np.argsort(rng.random((tokens, experts)), axis=1)[:, :3].copy()
            for expand in (False, True):
                got = buffer.dispatch(
                    x,
                    topk_idx=idx,
                    topk_weights=x[:, :3].copy(),
                    do_cpu_sync=False,
                    do_expand=expand,
                    expert_alignment=8,
                )
                handle = got.handle
                real = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
                assert handle.num_recv_tokens == 64 * comm.size
                assert (handle.recv_src_idx[:real] >= 0).all()
                assert (handle.recv_src_idx[real:] == -1).all()
                if expand:
                    assert len(got.recv_x) == 64 * comm.size * 3 + 4 * 7
                    assert (handle.expanded_row[real:] == -1).all()
                else:
                    assert (got.recv_topk_idx[real:] == -1).all()
                    assert not got.recv_topk_weights[real:].any()
                    assert (got.recv_topk_idx[:real] >= 0).any(axis=1).all()


@scenario
def handles_in_reverse(comm):
    """Two live handles, fifty steps, every combine the same bits."""
    cases = [
        replace(plain(comm), wait="worst"),
        replace(plain(comm, (33, 5)), expand=True, wait="worst", row_weights=True, dtype="float32"),
    ]
    with make(comm, *cases) as buffer:
        live = [there(comm, buffer, case) for case in cases]
        for _ in range(50):
            for trip, handle, want in reversed(live):
                rows = [np.ascontiguousarray(each.x[:, :7]) for each in want.inputs]
                again = dispatch(rows, handles=[each.handle for each in want.dispatched])
                got = buffer.dispatch(rows[comm.rank], handle=handle)
                assert_dispatch_equal(got, again[comm.rank], rank=comm.rank)
                back(trip, handle)


@scenario
def any_order(comm):
    """A random walk over all modes on one Buffer, with refused calls in between."""
    rng = np.random.default_rng(11)  # the same on all ranks
    pool = [
        replace(case, num_experts=case.num_experts and 4 * comm.size)
        for case in mode_cases(comm.size, small=True)
    ]
    live = []
    with make(comm, *pool) as buffer:
        for _ in range(60):
            step = int(rng.integers(5))
            if step <= 1 or not live:
                live.append(there(comm, buffer, pool[int(rng.integers(len(pool)))]))
            elif step == 2:
                trip, handle, want = live[int(rng.integers(len(live)))]
                rows = [np.full((each.handle.num_tokens, 3), r, "i4")
                        for r, each in enumerate(want.dispatched)]  # fmt: skip
                again = dispatch(rows, handles=[each.handle for each in want.dispatched])
                got = buffer.dispatch(rows[comm.rank], handle=handle)
                assert_dispatch_equal(got, again[comm.rank], rank=comm.rank)
            elif step == 3:
                trip, handle, want = live.pop(int(rng.integers(len(live))))
                if want.combined:
                    back(trip, handle)
            else:
                bad = int(rng.integers(comm.size))
                x = np.zeros((1, 4), np.float32)
                with refused(f"rank {bad}"):
                    mask = np.ones((1, comm.size), bool)
                    options = {"quantize": "fp4"} if comm.rank == bad else {}
                    buffer.dispatch(x, is_token_in_rank=mask, **options)


@scenario
def statistics(comm):
    case = replace(plain(comm), stats=True)
    want = expected(case, SEED)
    mine = want.inputs[comm.rank]
    counts = want.dispatched[comm.rank].handle.num_unaligned_recv_tokens_per_expert
    stats = np.zeros(4, np.int32)
    with make(comm, case) as buffer:
        given = {"topk_idx": mine.topk_idx, "cumulative_local_expert_recv_stats": stats}
        for times in range(1, 4):
            buffer.dispatch(mine.x, **given)
            assert np.array_equal(stats, times * counts)
        with refused("refused"):  # what did not happen is not counted
            wrong = np.full_like(mine.topk_idx, 4 * comm.size)
            buffer.dispatch(mine.x, **(given | {"topk_idx": wrong}))
        assert np.array_equal(stats, 3 * counts)


# ------------------------------------------------------------------------------ what is refused


@scenario
def too_little_room(comm):
    last = comm.size - 1
    case = plain(comm, (20,))
    want = expected(case, SEED)
    mine = want.inputs[comm.rank]
    real = [each.handle.num_recv_tokens for each in want.dispatched]
    with make(comm, case) as buffer:
        for expand in (False, True):
            room = real[comm.rank] - (comm.rank == last)
            said = (f"rank {last} would receive {real[last]} tokens", f"= {real[last] - 1};")
            with refused(*said, "nothing was moved"):
                buffer.dispatch(
                    mine.x, topk_idx=mine.topk_idx, num_worst_tokens=room, do_expand=expand
                )
            exact = real[comm.rank]
            got = buffer.dispatch(mine.x, topk_idx=mine.topk_idx, num_worst_tokens=exact)
            assert_same_bits("recv_x", got.recv_x, want.dispatched[comm.rank].recv_x)
            works(comm, buffer, case)


@scenario
def ranks_that_differ(comm):
    last = comm.size - 1
    if last == 0:
        return
    odd = comm.rank == last
    case = plain(comm)
    mine = expected(case, SEED).inputs[comm.rank]
    x, idx = mine.x, mine.topk_idx
    codes, scales = quantize(x)
    with make(comm, case) as buffer:
        with refused("layout", "rank 0: topk_idx,", f"rank {last}: topk_idx + expanded"):
            buffer.dispatch(x, topk_idx=idx, do_expand=odd)
        with refused("dtype", f"rank {last}: float8_e4m3fn with float32 scales"):
            buffer.dispatch((codes, scales) if odd else codes, topk_idx=idx)
        with refused("dtype", "with float32 scales", "with int32 scales"):
            options = {"round_scale": odd, "use_ue8m0": odd}
            buffer.dispatch(x, topk_idx=idx, quantize="fp8_e4m3", **options)
        # Who casts is a rank's own affair; and so are alignment, room, order and statistics.
        got = buffer.dispatch(
            (codes, scales) if odd else x,
            topk_idx=idx,
            quantize=None if odd else "fp8_e4m3",
            expert_alignment=1 + comm.rank,
            scales_layout="column" if odd else "row",
        )
        assert got.recv_x[0].dtype == FP8
        handle = buffer.dispatch(x, topk_idx=idx, do_expand=True).handle
        rows, weights = np.zeros((handle.num_rows, 4)), np.ones(handle.num_rows, np.float32)
        with refused(f"rank {last}: none + expanded + reduce='per_rank'"):
            buffer.combine(rows, handle, reduce="per_rank" if odd else "exact")
        with refused(f"rank {last}: none + expanded + row_weights"):
            buffer.combine(rows, handle, row_weights=weights if odd else None)
        works(comm, buffer, case)


@scenario
def wrong_arguments(comm):
    """One rank passes nonsense, the others do what is right: all raise, and go on."""
    last = comm.size - 1
    odd = comm.rank == last
    case = plain(comm, (9, 33, 5, 4))
    mine = expected(case, SEED).inputs[comm.rank]
    right = {"x": mine.x, "topk_idx": mine.topk_idx}
    with make(comm, case) as buffer:
        handle = buffer.dispatch(**right, do_expand=True).handle
        y = np.zeros((handle.num_rows, 40), np.float32)
        frozen = np.zeros((len(mine.x), 40), np.float32)
        frozen.flags.writeable = False
        space = np.zeros((max(len(y), len(mine.x)), 40), np.float32)
        for argument, word, given in (
            ("quantize", "'fp8_e4m3'", {"quantize": "fp8"}),
            ("num_worst_tokens", "from 0 to", {"num_worst_tokens": 10**6}),
            ("do_zero_padding", "do_expand", {"do_zero_padding": True}),
            ("scales", "num_scales", {"x": (mine.x.view(np.int8), np.zeros((1, 1), "f4"))}),
            ("dtype", "2 bytes", {"dtype": "float32"}),
        ):
            with refused(*((argument, word, f"on rank {last}") if odd else (
                f"rank {last} refused", f"argument '{argument}'"))):  # fmt: skip
                buffer.dispatch(**(right | (given if odd else {})))
        for argument, word, given in (
            ("out", "writable", {"out": frozen}),
            ("out", "no memory", {"x": space[: len(y)], "out": space[: len(mine.x)]}),
            ("reduce", "'exact' or 'per_rank'", {"reduce": "mean"}),
            ("row_weights", "num_rows", {"row_weights": np.ones(len(y) + 1, np.float32)}),
        ):
            with refused(*((argument, word, f"on rank {last}") if odd else (
                f"rank {last} refused", f"argument '{argument}'"))):  # fmt: skip
                buffer.combine(**({"x": y, "handle": handle} | (given if odd else {})))
        works(comm, buffer, case)


@scenario
def an_engine_without_modes(comm):
    """As the api sees one: refused on every rank, whoever asks."""
    last = comm.size - 1
    case = plain(comm)
    mine = expected(case, SEED).inputs[comm.rank]
    with make(comm, case) as buffer:
        if comm.rank == last:
            buffer._checker._modes = frozenset()
        words = ("no mode 'expand'",) if comm.rank == last else (f"rank {last} refused",)
        with refused("do_expand", *words):
            buffer.dispatch(mine.x, topk_idx=mine.topk_idx, do_expand=True)
        works(comm, buffer, case)


# --------------------------------------------------------------------------- events and threads


@scenario
def events(comm):
    case = plain(comm)
    mine = expected(case, SEED).inputs[comm.rank]
    with make(comm, case) as buffer:
        assert buffer.get_comm_stream() is None
        buffer.set_num_sms(24)
        layout = buffer.get_dispatch_layout(
            mine.topk_idx, previous_event=buffer.capture(), async_finish=True
        )
        layout.event.current_stream_wait()
        got = buffer.dispatch(
            mine.x,
            topk_idx=mine.topk_idx,
            config=Buffer.get_dispatch_config(comm.size),
            previous_event=layout.event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        assert isinstance(got.event, EventOverlap)
        assert got.event.event is not None
        with got.event:
            y = np.zeros((got.handle.num_rows, 3), np.float32)
        back = buffer.combine(y, got.handle, config=Config(num_sms=6), previous_event=got.event)
        assert back.event.event is None
        back.event.current_stream_wait()
        with refused("set_num_sms", "from 1"):
            buffer.set_num_sms(0)
        buffer.set_num_sms(None)
        works(comm, buffer, replace(case, background=True))
    for call in (buffer.capture, buffer.get_comm_stream):
        with raises(StateError, "closed"):
            call()


@scenario
def two_threads(comm):
    """A second thread's call is refused on its rank alone; the first one's is not disturbed."""
    if comm.size == 1:
        return
    last = comm.size - 1
    case = plain(comm)
    with make(comm, case) as buffer:
        if comm.rank == last:
            time.sleep(0.3)
            buffer.barrier()
        else:
            waiting = threading.Thread(target=buffer.barrier)
            waiting.start()
            time.sleep(0.1)
            for call in (buffer.barrier, buffer.reset, buffer.close):
                with raises(StateError, "another thread"):
                    call()
            waiting.join()
        works(comm, buffer, case)


def main():
    comm = MPI.COMM_WORLD
    for name in sys.argv[1:] or SCENARIOS:
        start = time.monotonic()
        SCENARIOS[name](comm)
        if comm.rank == 0:
            print(f"{time.monotonic() - start:6.3f} s {name}")


if __name__ == "__main__":
    main()
