"""The Python side of the CUDA engine over stand-ins: parameters, arrays, streams, lifetimes."""

import gc
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gpu_stand_in import device as d
from gpu_stand_in.engine import run_ranks

from deepep_cupy import reference
from deepep_cupy.engines.calls import Quantization, Streams
from deepep_cupy.engines.gpu.engine import CudaEngine
from deepep_cupy.engines.gpu.failures import FailureMonitor, Record, Report
from deepep_cupy.engines.gpu.operation import _PER_THREAD
from deepep_cupy.errors import ContractError, PeerTimeoutError, StateError
from deepep_cupy.protocol.control_block import ReportLayout, Verdict
from flat_calls import combine_call, dispatch_call

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def test_the_array_module_makes_arrays_on_the_buffers_gpu():
    """``Buffer.xp`` is CuPy, whose current device is then this rank's."""
    made = object.__new__(CudaEngine)
    made._cupy, used = object(), []
    made._device = SimpleNamespace(use=lambda: used.append(1))
    assert made.array_module() is made._cupy
    assert used == [1]


def up(array):
    return None if array is None else d.asarray(array)


def inputs(num_ranks, seed, *, tokens=(7, 0, 16, 3), experts=8, topk=3, hidden=256, dtype=E4M3):
    """Rows, choices and weights of all ranks."""
    rng = np.random.default_rng(seed)
    xs, idx, weights, scales = [], [], [], []
    for rank in range(num_ranks):
        count = tokens[rank % len(tokens)]
        rows = rng.integers(0, 256, (count, hidden * dtype.itemsize), np.uint8).view(dtype)
        xs.append(rows if dtype == E4M3 else rng.random((count, hidden)).astype(dtype))
        chosen = np.array([rng.permutation(experts)[:topk] for _ in range(count)], np.int64)
        chosen = chosen.reshape(count, topk)
        chosen[rng.random(chosen.shape) < 0.3] = -1
        idx.append(chosen)
        weights.append(rng.random((count, topk)).astype(np.float32))
        scales.append(rng.random((count, -(-hidden // 128))).astype(np.float32))
    return xs, idx, weights, scales


def same(got, want, what):
    got = got.get() if hasattr(got, "get") else np.asarray(got)
    assert got.shape == want.shape, (what, got.shape, want.shape)
    assert got.dtype == want.dtype, (what, got.dtype, want.dtype)
    assert got.tobytes() == np.ascontiguousarray(want).tobytes(), what


def check_dispatch(got, want, *, real):
    """Compare what is defined."""
    rows, scales = want.recv_x if isinstance(want.recv_x, tuple) else (want.recv_x, None)
    assert got.recv_x.shape == rows.shape
    same(got.recv_x[:real], rows[:real], "recv_x")
    if scales is not None:
        assert got.recv_scales.shape == scales.shape
        assert got.recv_scales.flags.c_contiguous or got.recv_scales.flags.f_contiguous
        same(got.recv_scales[:real], scales[:real], "scales")
    for name in ("recv_topk_idx", "recv_topk_weights"):
        if getattr(want, name) is None:
            assert getattr(got, name) is None
        else:
            same(getattr(got, name), getattr(want, name), name)
    routing, handle = got.routing, want.handle
    for name in ("recv_src_idx", "recv_rows_per_rank", "send_row"):
        same(getattr(routing, name), getattr(handle, name), name)
    sums = np.cumsum(handle.recv_rows_per_rank).astype(np.int32)
    same(routing.psum_recv_rows, sums, "psum_recv_rows")
    if want.recv_topk_idx is not None:
        counts = handle.num_unaligned_recv_tokens_per_expert
        same(routing.expert_counts, counts, "expert_counts")
        same(routing.psum_expert_rows, handle.psum_num_recv_tokens_per_expert, "psum_expert_rows")
    assert got.num_recv_tokens_per_expert == want.num_recv_tokens_per_expert_list


@pytest.mark.parametrize("wait", ["host", "worst", "tight"])
@pytest.mark.parametrize("with_scales", ["", "row", "column"])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_dispatch_and_cached(ranks, wait, with_scales, own):
    num_ranks = ranks  # not the fixture: eight experts divide by these alone
    xs, idx, weights, scales = inputs(num_ranks, 1)
    pairs = list(zip(xs, scales, strict=True)) if with_scales else xs
    plain = reference.dispatch(pairs, topk_idx=idx, topk_weights=weights, num_experts=8)
    real = [result.handle.num_recv_tokens for result in plain]
    most, tight = [16 * num_ranks] * num_ranks, [max(1, number) for number in real]
    limits = {"host": None, "worst": most, "tight": tight}[wait]
    wanted = reference.dispatch(
        pairs,
        topk_idx=idx,
        topk_weights=weights,
        num_experts=8,
        expert_alignment=4,
        num_worst_tokens=limits,
    )
    handles = [result.handle for result in wanted]
    again = reference.dispatch(pairs, handles=handles, topk_weights=weights)

    def work(rank):
        me = rank.spec.rank
        scale = np.asfortranarray(scales[me]) if with_scales else None
        given = {"topk_weights": up(weights[me]), "own": own, "expert_alignment": 4}
        if scale is not None:
            given["scales"] = d.asarray(np.ascontiguousarray(scale.T)).T
            given["scales_layout"] = with_scales
        x = up(xs[me])
        limit = None if limits is None else limits[me]
        got = rank.dispatch(dispatch_call(x, topk_idx=up(idx[me]), num_worst_tokens=limit, **given))
        check_dispatch(got, wanted[me], real=real[me])
        second = rank.dispatch(dispatch_call(x, routing=got.routing, **given))
        want = again[me]
        rows = want.recv_x[0] if with_scales else want.recv_x
        same(second.recv_x[: real[me]], rows[: real[me]], "cached recv_x")
        if with_scales:
            same(second.recv_scales[: real[me]], want.recv_x[1][: real[me]], "cached scales")
        same(second.recv_topk_weights, want.recv_topk_weights, "cached weights")
        assert second.routing is got.routing
        return True

    assert all(run_ranks(num_ranks, work, num_experts=8))


@pytest.mark.parametrize("wait", [None, 48])
@pytest.mark.parametrize("in_pool", [False, True, "at an odd address"])
def test_combine(wait, in_pool):
    num_ranks = 2
    dtype = np.dtype(np.float32)
    xs, idx, weights, _ = inputs(num_ranks, 2, dtype=dtype, tokens=(7, 5))
    limits = None if wait is None else [wait] * num_ranks
    want = reference.dispatch(
        xs, topk_idx=idx, topk_weights=weights, num_experts=8, num_worst_tokens=limits
    )
    rng = np.random.default_rng(3)
    ys = [rng.random((r.handle.num_rows, 256)).astype(dtype) for r in want]
    back_weights = [rng.random((len(y), 3)).astype(np.float32) for y in ys]
    biases = [[rng.random((len(x), 256)).astype(dtype)] for x in xs]
    handles = [r.handle for r in want]
    back = reference.combine(ys, handles, topk_weights=back_weights, biases=biases)

    def work(rank):
        me = rank.spec.rank
        got = rank.dispatch(dispatch_call(up(xs[me]), topk_idx=up(idx[me]), num_worst_tokens=wait))
        y, weights_back = up(ys[me]), up(back_weights[me])
        if in_pool == "at an odd address":
            words = rank.runtime.arrays.empty((weights_back.size + 1,), dtype, d.current_stream())
            weights_back = words[1:].reshape(weights_back.shape)
            weights_back[...] = back_weights[me]
        if in_pool:
            skip = 0 if in_pool is True else 1  # elements: peers find rows at multiples of 16 bytes
            whole = rank.runtime.arrays.empty((y.size + skip,), y.dtype, d.current_stream())
            y = whole[skip:].reshape(y.shape)
            y[...] = ys[me]
            d.device().tracker.touch(d.current_stream(), "rows", (y.data.ptr, y.nbytes, True))
        out = d.empty((len(xs[me]), 256), dtype)
        call = combine_call(y, got.routing, weights_back, (up(biases[me][0]),), out=out)
        done = rank.combine(call)
        assert done.combined_x is out
        same(out, back[me].combined_x, "combined_x")
        same(done.combined_topk_weights, back[me].combined_topk_weights, "combined weights")
        with pytest.raises(ContractError, match="'out' must share no memory") as caught:
            rank.combine(combine_call(y, got.routing, None, (out,), out=out))
        assert caught.value.refusal is not None
        return True

    assert all(run_ranks(num_ranks, work, num_experts=8))


# ------------------------------------------------------------------------------ refusals, counts


def test_too_many_tokens_without_a_host_that_waits():
    xs, idx, _, _ = inputs(2, 4, tokens=(9, 9))

    def work(rank):
        me = rank.spec.rank
        x, chosen = up(xs[me]), up(idx[me])
        got = rank.dispatch(dispatch_call(x, topk_idx=chosen, num_worst_tokens=3))
        y = d.empty((3, 256), np.float32)
        with pytest.raises(ContractError, match=r"rank 0 would receive \d+ tokens, more than its"):
            rank.combine(combine_call(y, got.routing, None, ()))
        assert rank.kernels.world.reports[me][0] == 2  # launched, and refused on the device
        rank.combine(combine_call(y, got.routing, None, ()))
        waited = rank.dispatch(dispatch_call(x, topk_idx=chosen))
        return len(waited.recv_x)

    assert sum(run_ranks(2, work, num_experts=8)) > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_wait_keeps_what_peers_may_write_into(error):
    """Nobody knows whether that dispatch has ended, and the Buffer is poisoned."""
    xs, idx, _, _ = inputs(1, 4, tokens=(9,))

    def work(rank):
        pool, report = rank.runtime.pool, rank.runtime.failures.report
        x, chosen = up(xs[0]), up(idx[0])

        def stopped(serial, number):
            raise error

        kept = report.counts
        report.counts = stopped
        with pytest.raises(error):
            rank.dispatch(dispatch_call(x, topk_idx=chosen))
        numbers = pool.statistics()
        assert numbers.live == numbers.quarantined > 16 * x.nbytes // 9
        report.counts = kept
        pool.release_quarantine()
        assert pool.statistics().live == 0
        return len(rank.dispatch(dispatch_call(x, topk_idx=chosen)).recv_x)

    assert run_ranks(1, work, num_experts=8)[0] > 0


def test_a_handle_keeps_nothing_but_itself():
    """Results that are dropped are given back whole, whatever handles stay."""
    xs, idx, weights, scales = inputs(2, 4, tokens=(9, 16))

    def work(rank):
        me, pool = rank.spec.rank, rank.runtime.pool
        given = {"topk_idx": up(idx[me]), "topk_weights": up(weights[me])}
        given["scales"] = up(scales[me])
        most = rank.spec.max_recv_tokens
        for worst in (None, most):
            for expand in (False, True):
                call = dispatch_call(up(xs[me]), num_worst_tokens=worst, expand=expand, **given)
                handles = [rank.dispatch(call).routing for _ in range(3)]
                labels = ["handle of dispatch()"] + expand * ["expanded_row of dispatch()"]
                assert sorted(block.label for block in pool.live()) == sorted(3 * labels)
                words = most + 2 * (2 + 4) + 1 + most + expand * most * 3
                assert pool.statistics().live <= 3 * (4 * words + 2 * 512)
                again = rank.dispatch(dispatch_call(up(xs[me]), routing=handles[1], expand=expand))
                real = again.routing.psum_recv_rows[1]
                sources = again.routing.recv_src_idx[:real].get()
                assert sources[-1] < 16
                if not expand:
                    received = again.recv_x.get()[:real]
                    own = handles[1].recv_rows_per_rank.get()[: me + 1].sum()
                    first = own - handles[1].recv_rows_per_rank[me]
                    same(received[first:own], xs[me][sources[first:own]], "own rows")
                del handles, again
        assert pool.statistics().live == 0
        return True

    assert all(run_ranks(2, work, num_experts=8))


def test_statistics_add_up():
    xs, idx, _, _ = inputs(2, 5)

    def work(rank):
        me = rank.spec.rank
        stats = up(np.arange(4, dtype=np.int32))
        total = np.arange(4, dtype=np.int32)
        for worst in (None, 32, None):
            call = dispatch_call(
                up(xs[me]), topk_idx=up(idx[me]), recv_stats=stats, num_worst_tokens=worst
            )
            total += rank.dispatch(call).routing.expert_counts.get()
        same(stats, total, "recv_stats")
        return True

    assert all(run_ranks(2, work, num_experts=8))


# --------------------------------------------------------------------------------------- graphs


def test_graph_of_dispatch_and_combine():
    xs, idx, weights, _ = inputs(2, 6, dtype=np.dtype(np.float32))
    more = inputs(2, 7, dtype=np.dtype(np.float32))
    want = {}
    for name, (x, i, w) in {"old": (xs, idx, weights), "new": more[:3]}.items():
        moved = reference.dispatch(
            x, topk_idx=i, topk_weights=w, num_experts=8, num_worst_tokens=[32, 32]
        )
        rows = [result.recv_x for result in moved]
        want[name] = moved, reference.combine(rows, [result.handle for result in moved])

    def work(rank):
        me = rank.spec.rank
        x, chosen, weight = up(xs[me]), up(idx[me]), up(weights[me])
        stream = d.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            with pytest.raises(ContractError, match="the host must wait for the counts"):
                rank.dispatch(dispatch_call(x, topk_idx=chosen))
            call = dispatch_call(x, topk_idx=chosen, topk_weights=weight, num_worst_tokens=32)
            got = rank.dispatch(call)
            done = rank.combine(combine_call(got.recv_x, got.routing, None, ()))
            graph = stream.end_capture()
        eager = rank.dispatch(dispatch_call(x, topk_idx=chosen))  # blocks of the graph stay its own
        first, second = ("old", (xs, idx, weights)), ("new", more[:3])
        for name, given in (first, second, first):
            for array, values in zip((x, chosen, weight), given, strict=True):
                array[...] = values[me]
            graph.launch(d.current_stream())
            moved, back = want[name]
            check_dispatch(got, moved[me], real=int(moved[me].handle.recv_rows_per_rank.sum()))
            same(done.combined_x, back[me].combined_x, "combined_x")
            eager = rank.dispatch(dispatch_call(x, topk_idx=chosen))
        assert rank.runtime.queue.retention.captured
        # Other memory might become a part of the graph, as that of CuPy's MemoryAsyncPool does.
        assert rank.runtime.arrays.find(done.combined_x) is not None
        del got, done, eager
        assert rank.runtime.pool.statistics().captured > 0
        return True

    assert all(run_ranks(2, work, num_experts=8))


def captured(rank, stream, *calls):
    """A graph of the calls, all of them dispatches."""
    with stream:
        stream.begin_capture()
        kept = [rank.dispatch(call) for call in calls]
        return stream.end_capture(), kept


@pytest.mark.parametrize("other", ["eager", "graph"])
def test_a_replay_meets_another_call(other):
    """A replayed graph of ones meets another rank's call of twos: refused on both, no row moves.
    Calls with one tag are one call, in a graph or not."""
    _, idx, _, _ = inputs(2, 9)

    def work(rank):
        me = rank.spec.rank
        x, chosen = up(np.ones((len(idx[me]), 8), np.float32)), up(idx[me])
        ones = dispatch_call(x, topk_idx=chosen, num_worst_tokens=32)
        twos = dispatch_call(x + x, topk_idx=chosen, num_worst_tokens=32)
        stream = d.Stream(non_blocking=True)
        first, (got, *_) = captured(rank, stream, ones)
        second, (also, *_) = captured(rank, stream, twos)
        here = d.current_stream()
        calls = [lambda: first.launch(here), lambda: second.launch(here)]
        if other == "eager":
            calls[1] = lambda: rank.dispatch(twos)
        calls[me]()
        here.synchronize()
        with pytest.raises(ContractError, match=r"different calls.*captured call"):
            rank.runtime.failures.raise_pending()
        rank.runtime.failures.raise_pending()
        first.launch(here)
        here.synchronize()
        rank.runtime.failures.raise_pending()
        real = int(got.routing.psum_recv_rows.get()[-1])
        assert (got.recv_x.get()[:real] == 1).all()
        del also
        twos.plan.tag = 7
        tagged, (kept, *_) = captured(rank, stream, twos)
        if me == 0:
            tagged.launch(here)
        else:
            rank.dispatch(twos)
        here.synchronize()
        rank.runtime.failures.raise_pending()
        del kept
        return True

    assert all(run_ranks(2, work, num_experts=8))


def test_graph_on_the_communication_stream():
    xs, idx, _, _ = inputs(1, 8)

    def work(rank):
        x, chosen = up(xs[0]), up(idx[0])
        stream = d.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            call = dispatch_call(
                x, topk_idx=chosen, num_worst_tokens=16, streams=Streams(async_finish=True)
            )
            got = rank.dispatch(call)
            got.event.wait()
            second = rank.dispatch(dispatch_call(x, routing=got.routing))
            graph = stream.end_capture()
        d.current_stream().synchronize()
        graph.launch(stream)
        stale = d.Event()
        stale.record()
        with stream:
            stream.begin_capture()
            previous = rank.events.Recorded(stale)
            previous.wait = lambda: d.current_stream().wait_event(stale)
            with pytest.raises(ContractError, match="'previous_event' must have been made within"):
                rank.dispatch(dispatch_call(x, routing=got.routing, streams=Streams(previous)))
            stream.end_capture()
        return second.recv_x.get().tobytes() == xs[0][got.routing.recv_src_idx.get()].tobytes()

    assert run_ranks(1, work, num_experts=8)


# ------------------------------------------------------------------------------------- failures


def test_a_reset_of_a_gpu_gives_quarantined_memory_back_between_its_barriers():
    done = []

    def note(name, value=None):
        return lambda *_: (done.append(name), value)[1]

    class Device:
        __enter__ = __exit__ = note("device")

    engine = CudaEngine.__new__(CudaEngine)
    engine._device, engine._board = Device(), SimpleNamespace(clear=note("board"))
    engine._spec = SimpleNamespace(rank=0)
    epochs = np.array([[5, 3], [9, 4]])
    engine._rendezvous = SimpleNamespace(barrier=note("barrier"), exchange=note("exchange", epochs))
    engine._runtime = SimpleNamespace(
        queue=SimpleNamespace(drain=note("drain"), captured_calls=3),
        memory=SimpleNamespace(epoch=lambda: 5, start_over=note("memory")),
        failures=SimpleNamespace(clear=note("failures")),
        pool=SimpleNamespace(release_quarantine=note("quarantine")),
    )
    engine.reset()
    done = [name for name in done if name != "device"]
    assert done[:4] == ["drain", "barrier", "exchange", "memory"]
    assert sorted(done[4:-1]) == ["board", "failures", "quarantine"]
    assert done[-1] == "barrier"
    assert engine._runtime.queue.captured_calls == 4


@pytest.mark.parametrize(
    ("serial", "away", "told"), [(None, 6, True), (7, 6, False), (None, 1, False)]
)
def test_a_timeout_says_how_long_the_host_was_elsewhere(serial, away, told):
    """A host that a waiting kernel stops may be what the late rank waits for."""
    record = Record(
        verdict=Verdict.FAILED, serial=7, operation="dispatch", epoch=1, timed_out=True,
        late=(1,), reporters=(0,), phase="the header", block=0, headers=(), counts=(),
    )  # fmt: skip
    report = SimpleNamespace(
        view=[1, 0], seen=0, busy_at=1, has_news=True, take=lambda: ([record], 0)
    )
    board = SimpleNamespace(abort=lambda _: None)
    spec = SimpleNamespace(timeout_s=5.0, rank=0)
    monitor = FailureMonitor(report, SimpleNamespace(board=board), None, spec)
    monitor.left_at -= away
    with pytest.raises(PeerTimeoutError) as caught:
        monitor.raise_pending(serial)
    assert caught.value.late_ranks == (1,)
    assert ("outside of the Buffer's calls for 6.0 s" in str(caught.value)) == told


def test_records_that_kernels_overwrite_meanwhile_are_counted_as_lost(monkeypatch):
    """Six were written; the ring holds four, and while the first of them is read two more come,
    which take its place and the next one's."""
    monkeypatch.setattr("cupy.cuda.alloc_pinned_memory", bytearray)
    report = Report(ReportLayout(2, 0))
    report.view[0], report.seen = 6, 1
    read = Report._read

    def slowly(self, number):
        self.view[0] = 8
        return read(self, number)

    monkeypatch.setattr(Report, "_read", slowly)
    monitor = FailureMonitor(report, None, None, SimpleNamespace(rank=0))
    records, lost = report.take()
    assert (len(records), lost) == (1, 4)  # 1 was overwritten long ago; 2, 3 and 4 may be torn
    assert report.has_news
    report.seen = 3
    monkeypatch.setattr(
        Report, "_read", lambda *_: SimpleNamespace(verdict=1, serial=0, headers=())
    )
    with pytest.raises(ContractError, match="2 calls of this Buffer were refused earlier"):
        monitor.raise_pending()
    assert monitor._refused == []  # calls without headers follow from another
    monitor.raise_pending()


@pytest.mark.parametrize("ahead", [3, 40])
def test_a_failure_withholds_the_blocks_of_all_calls_that_may_be_under_way(ahead):
    """Rank 0 is calls ahead when it learns that the first of them has failed."""
    xs, idx, _, _ = inputs(1, 9)

    def work(rank):
        rank.events.patient = True
        call = dispatch_call(up(xs[0]), topk_idx=up(idx[0]), num_worst_tokens=16)
        runtime, first = rank.runtime, rank.dispatch(call)
        at_risk = [block for block in runtime.pool.live() if "dispatch" in block.label]
        assert at_risk
        for _ in range(ahead):
            rank.dispatch(call)
        report = runtime.failures.report
        report.words[0] += 1
        report.take = lambda: ([SimpleNamespace(verdict=Verdict.FAILED, serial=1)], 0)
        runtime.failures._listen(0.0)
        assert all(block.quarantined for block in at_risk)
        del first
        return True

    assert all(run_ranks(1, work, num_experts=8))


def test_blocks_of_calls_that_are_over_are_forgotten():
    xs, idx, _, _ = inputs(1, 9)

    def work(rank):
        call = dispatch_call(up(xs[0]), topk_idx=up(idx[0]), num_worst_tokens=16)
        for _ in range(200):
            rank.dispatch(call)
        monitor = rank.runtime.failures
        assert monitor.tracked >= 200
        return len(monitor._risky)

    assert run_ranks(1, work, num_experts=8)[0] < 150


# -------------------------------------------------------------------------------------- streams


def test_a_per_thread_stream_is_for_one_thread():
    """It has one name in all threads, and is another stream in each."""
    xs, idx, _, _ = inputs(1, 8)

    def work(rank):
        call = dispatch_call(up(xs[0]), topk_idx=up(idx[0]), num_worst_tokens=16)
        order, said = rank.runtime.queue.order, []
        rank.dispatch(call)

        def other():
            d.set_device(rank.device)
            try:
                rank.dispatch(call)
                said.append("fine")
            except StateError as error:
                said.append(str(error))

        def in_another_thread():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return said[-1]

        assert in_another_thread() == "fine"
        per_thread = d.Stream()
        per_thread.ptr, d._streams[_PER_THREAD] = _PER_THREAD, per_thread
        with per_thread:
            rank.dispatch(call)
        rank.dispatch(call)
        assert "on a stream of its own" in in_another_thread()
        assert not order.lock.locked()
        rank.dispatch(call)
        return True

    assert run_ranks(1, work, num_experts=8)


@pytest.mark.parametrize("operation", ["combine", "cached"])
@pytest.mark.parametrize("dropped", ["handle", "rows"])
def test_a_plain_call_on_another_stream_uses_what_it_reads_there(operation, dropped):
    """The caller has ordered the second stream behind the first one, drops what the call reads,
    and writes to new memory of the pool on the first stream."""
    xs, idx, _, _ = inputs(1, 9, tokens=(16,), dtype=np.dtype(np.float32))

    def work(rank):
        rank.events.patient = True
        runtime, main, side = rank.runtime, d.current_stream(), d.Stream(non_blocking=True)
        call = dispatch_call(up(xs[0]), topk_idx=up(idx[0]), num_worst_tokens=16)
        kept = {"handle": rank.dispatch(call)}
        kept["rows"] = kept["handle"].recv_x
        routing, label = kept["handle"].routing, {"handle": "handle", "rows": "recv_x"}[dropped]
        kept["handle"] = routing
        (nbytes,) = (each.nbytes for each in runtime.pool.live() if each.label.startswith(label))
        with side:
            side.wait_event(runtime.point()._event.event)
            if operation == "combine":
                done = rank.combine(combine_call(kept["rows"], routing))
            else:
                done = rank.dispatch(dispatch_call(kept["rows"], routing=routing))
        del routing, call
        del kept[dropped]
        gc.collect()
        fresh = runtime.arrays.empty((nbytes,), np.uint8, main)
        d.device().tracker.touch(main, "the next kernel", (fresh.data.ptr, fresh.nbytes, True))
        del done
        return True

    assert all(run_ranks(1, work, num_experts=8))


class Thing:
    """Stands for an array of another library."""


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("operation", ["dispatch", "cached", "cast", "combine", "keep"])
def test_what_a_call_keeps_lives_until_the_gpu_is_done(background, operation):
    xs, idx, _, _ = inputs(1, 3)
    rows = np.ones((len(xs[0]), 256), np.float32)

    def work(rank):
        rank.events.patient = True
        x, chosen, streams = up(xs[0]), up(idx[0]), Streams(async_finish=background)
        first = rank.dispatch(dispatch_call(x, topk_idx=chosen))
        call = {
            "dispatch": lambda: dispatch_call(x, topk_idx=chosen, streams=streams),
            "cached": lambda: dispatch_call(x, routing=first.routing, streams=streams),
            "cast": lambda: dispatch_call(
                up(rows), topk_idx=chosen, quantize=Quantization("float8_e4m3fn"), streams=streams
            ),
            "combine": lambda: combine_call(up(rows), first.routing, streams=streams),
            "keep": lambda: None,
        }[operation]()
        thing = Thing()
        alive, queue = weakref.ref(thing), rank.runtime.queue
        if call is None:
            queue.keep(thing)
        else:
            call.kept = (thing,)
            (rank.combine if operation == "combine" else rank.dispatch)(call)
        del thing, call
        gc.collect()
        queue.retention.reap()
        before = alive() is not None
        d.current_stream().synchronize()
        queue.comm.synchronize()
        queue.retention.reap()
        gc.collect()
        return before, alive() is None

    assert run_ranks(1, work, num_experts=8) == [(True, True)]


def touch(array, what, *, write=False):
    """Some kernel of the caller's, on the current stream."""
    d.device().tracker.touch(d.current_stream(), what, (array.data.ptr, array.nbytes, write))


def streams_of(ready, turn):
    """What a caller may ask for, in turn."""
    allocate = turn % 3 == 0
    both = Streams(ready, async_finish=True, allocate_on_comm_stream=allocate)
    return (both, Streams(ready, async_finish=True), Streams(ready), Streams())[turn % 4]


def background(rank, rounds=24, *, worst=None):
    """Dispatch and combine beside the caller's own work; the host waits for nothing it need not."""
    xs, idx, weights, _ = inputs(1, 9, tokens=(16,), dtype=np.dtype(np.float32))
    rank.events.patient = True
    runtime, here = rank.runtime, d.current_stream()

    def fresh():
        return {"x": up(xs[0]), "idx": up(idx[0]), "weights": up(weights[0]), "y": up(xs[0])}

    given = fresh()
    ready = runtime.point()
    for turn in range(rounds):
        streams = streams_of(ready, turn)
        call = dispatch_call(
            given["x"],
            topk_idx=given["idx"],
            topk_weights=given["weights"],
            num_worst_tokens=worst,
            streams=streams,
        )
        got = rank.dispatch(call)
        rows = given["y"][: len(got.recv_x)]
        done = rank.combine(combine_call(rows, got.routing, None, (), streams=streams))
        assert (got.event is not None) == (done.event is not None) == streams.async_finish
        del call, rows
        given.clear()
        # Memory of inputs that died is used again at once; the next inputs are ready before the
        # results are read, so that the next dispatch does not wait for the readers.
        given = fresh()
        ready = runtime.point()
        user = d.Stream(non_blocking=True) if turn % 2 and got.event else here
        with user:
            if got.event is not None:
                got.event.wait()
                done.event.wait()
            for array in (got.recv_x, got.recv_topk_weights, done.combined_x, got.routing.send_row):
                touch(array, "reader")
        del got, done, array
    return True


@pytest.mark.parametrize("worst", [None, 16])
def test_nothing_is_reused_before_its_time(worst):
    assert run_ranks(1, lambda rank: background(rank, worst=worst), num_experts=8)


@pytest.mark.parametrize("missing", ["kept inputs", "blocks' users", "lent memory", "lent users"])
def test_the_same_with_something_missing(missing):
    def work(rank):
        runtime, retention = rank.runtime, rank.runtime.queue.retention
        if missing == "kept inputs":
            retention.until = lambda event, objects: None
        if missing == "blocks' users":
            runtime.pool.record_stream = lambda block, stream: None
        if missing == "lent memory":
            retention.borrow = lambda nbytes, stream, user: (
                d.alloc(nbytes),
                threading.Event(),
            )
        if missing == "lent users":
            retention.reap = retention.returned.clear
        background(rank, worst=16)

    with pytest.raises(d.RaceError):
        run_ranks(1, work, num_experts=8)
