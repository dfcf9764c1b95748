"""The timers: what is counted, what is not, and in what order things are called."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

from deepep_cupy.bench.timing import CudaTimer, HostTimer, Timing, slowest


def test_median_best_and_slowest():
    timing = Timing((5.0, 1.0, 3.0))
    assert timing.median == 3.0
    assert timing.best == 1.0
    assert slowest(timing, lambda mine: [1.0, mine, 2.5]) == 3.0


def test_the_host_timer_counts_the_call_and_not_the_barrier():
    calls = []

    def call():
        calls.append("call")
        time.sleep(0.002)

    def barrier():
        calls.append("barrier")
        time.sleep(0.02)

    timing = HostTimer().measure(call, repeats=3, warmup=2, barrier=barrier)
    assert calls == ["barrier", "call"] * 5
    assert len(timing.microseconds) == 3
    assert 2000 <= timing.best < 20000


class Stream:
    """A stream with a clock: each call takes as long as it says."""

    def __init__(self, log):
        self.now, self.log = 0.0, log

    def __call__(self, non_blocking=True):
        return self

    __enter__ = __exit__ = lambda self, *error: None

    def synchronize(self):
        self.log.append("synchronize")

    def begin_capture(self):
        self.log.append("begin")

    def end_capture(self):
        self.log.append("end")
        return SimpleNamespace(launch=lambda stream: self.work("launch", 40))

    def work(self, what, microseconds):
        self.log.append(what)
        self.now += microseconds


class Event:
    def record(self, stream):
        self.at = stream.now


@pytest.fixture
def stream(monkeypatch):
    stream = Stream([])
    memory = SimpleNamespace(memset_async=lambda *arguments: stream.work("flush", 1000))
    cuda = SimpleNamespace(
        Event=Event,
        Stream=stream,
        get_current_stream=lambda: stream,
        get_elapsed_time=lambda begin, end: (end.at - begin.at) / 1e3,
    )
    array = SimpleNamespace(data=memory, nbytes=1)
    cupy = SimpleNamespace(cuda=cuda, uint8=None, empty=lambda *arguments: array)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return stream


def test_the_cuda_timer_flushes_meets_and_then_counts(stream):
    timing = CudaTimer().measure(
        lambda: stream.work("call", 7),
        repeats=2,
        warmup=1,
        barrier=lambda: stream.work("barrier", 100),
    )
    assert timing.microseconds == pytest.approx((7, 7))
    assert stream.log == ["flush", "barrier", "call"] * 3 + ["synchronize"]


def test_several_flushes_cover_a_slow_host(stream):
    CudaTimer(flushes=3).measure(lambda: stream.work("call", 7), repeats=1, warmup=0)
    assert stream.log == ["flush", "flush", "flush", "call", "synchronize"]


def test_without_flush(stream):
    CudaTimer(flushes=0).measure(lambda: stream.work("call", 7), repeats=1, warmup=0)
    assert stream.log == ["call", "synchronize"]


def test_a_graph_is_captured_once_and_divided(stream):
    timer = CudaTimer(flushes=0)
    captured = timer.capture(lambda: stream.work("call", 7), calls=4)
    timing = timer.replay(captured, repeats=3, warmup=0)
    assert timing.microseconds == pytest.approx((10, 10, 10))
    assert stream.log[1:] == [
        "begin", "call", "call", "call", "call", "end", "launch", "launch", "launch",
        "synchronize",
    ]  # fmt: skip


def test_the_ranks_meet_before_a_capture_and_before_each_launch(stream):
    captured = CudaTimer(flushes=0).capture(
        lambda: stream.work("call", 7), calls=2, barrier=lambda: stream.work("barrier", 100)
    )
    assert stream.log == ["synchronize", "barrier", "synchronize", "begin", "call", "call", "end"]
    stream.log.clear()
    timing = CudaTimer(flushes=0).replay(
        captured, repeats=2, warmup=0, barrier=lambda: stream.work("barrier", 100)
    )
    assert timing.microseconds == pytest.approx((20, 20))
    assert stream.log == ["barrier", "launch", "barrier", "launch", "synchronize"]
