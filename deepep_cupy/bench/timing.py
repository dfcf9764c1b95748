"""How long a call takes: medians on each rank, then the slowest rank.

``CudaTimer`` puts CUDA events around each call, behind a write to more memory than the L2 cache
holds and, where one is given, a barrier of the ranks, so that all begin together with cold caches.
``capture`` and ``replay`` time a graph of many calls and divide: what Python and launches cost is
left out.
``HostTimer`` does the same with the host's clock, for the engine that has no GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["BUSY_FLUSHES", "Captured", "CudaTimer", "HostTimer", "Timer", "Timing", "slowest"]

Call = Callable[[], object]
BUSY_FLUSHES = 3
"""Writes before a call that keep the GPU busy longer than the Python of any operation takes."""
_FLUSH_BYTES = 256 << 20
"""One write; no L2 cache of today is larger."""


@dataclass(frozen=True)
class Timing:
    """Times of single calls on one rank.

    Attributes:
        microseconds: One entry a call, in order.
    """

    microseconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median, in microseconds."""
        return statistics.median(self.microseconds)

    @property
    def best(self) -> float:
        """Least, in microseconds."""
        return min(self.microseconds)


class Timer(Protocol):
    """Times a call on this rank; all ranks time the same call together."""

    def measure(
        self, call: Call, *, repeats: int = 20, warmup: int = 3, barrier: Call | None = None
    ) -> Timing:
        """Call ``warmup + repeats`` times, and time the last ``repeats``.

        Args:
            call: What is timed.
            repeats: Entries of the result.
            warmup: Calls that are not timed.
            barrier: Called before each call; brings the ranks together.
        """
        ...


class HostTimer:
    """The host's clock."""

    def measure(
        self, call: Call, *, repeats: int = 20, warmup: int = 3, barrier: Call | None = None
    ) -> Timing:
        """See ``Timer``."""
        times = []
        for _ in range(warmup + repeats):
            if barrier is not None:
                barrier()
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
        return Timing(tuple(times[warmup:]))


@dataclass(frozen=True)
class Captured:
    """A graph of some calls, and the stream it was captured on.

    Attributes:
        graph: CuPy's.
        stream: For its launches alone: memory of results that are gone is reused on it.
        calls: Calls in it.
    """

    graph: Any
    stream: Any
    calls: int


class CudaTimer:
    """CUDA events on the current stream of the current device.

    The first event is recorded right before the call. It says when the call began only where the
    GPU is still busy with what lies before when the kernel is launched; else the time of Python's
    part of the call is in it. Where the host waits in each call, nothing but the writes that empty
    the cache keeps the GPU busy meanwhile: ``BUSY_FLUSHES`` of them are enough.

    Args:
        flushes: How often 256 MB are written before each call to empty the L2 cache.
    """

    def __init__(self, flushes: int = 1) -> None:
        import cupy

        self._cuda: Any = cupy.cuda
        self._flushes = flushes
        self._flush: Any = cupy.empty(_FLUSH_BYTES, cupy.uint8)

    def measure(
        self, call: Call, *, repeats: int = 20, warmup: int = 3, barrier: Call | None = None
    ) -> Timing:
        """See ``Timer``. A barrier on the device belongs on the current stream too."""
        stream = self._cuda.get_current_stream()
        pairs = []
        for _ in range(warmup + repeats):
            begin, end = self._cuda.Event(), self._cuda.Event()
            for _ in range(self._flushes):
                self._flush.data.memset_async(0, self._flush.nbytes, stream)
            if barrier is not None:
                barrier()
            begin.record(stream)
            call()
            end.record(stream)
            pairs.append((begin, end))
        stream.synchronize()
        between = self._cuda.get_elapsed_time
        return Timing(tuple(1e3 * float(between(*pair)) for pair in pairs[warmup:]))

    def capture(self, call: Call, *, calls: int = 20, barrier: Call | None = None) -> Captured:
        """Capture ``calls`` calls in one graph.

        Args:
            call: Must be fit for capture, and have been called once before. What it returns is
                dropped at once.
            calls: How many.
            barrier: Called once before the capture, on its stream; not in the graph.
        """
        stream = self._cuda.Stream(non_blocking=True)
        self._cuda.get_current_stream().synchronize()
        with stream:
            if barrier is not None:  # from here on the last operation is on this stream
                barrier()
                stream.synchronize()
            stream.begin_capture()
            try:
                for _ in range(calls):
                    call()
            finally:
                graph = stream.end_capture()
        return Captured(graph, stream, calls)

    def replay(
        self,
        captured: Captured,
        *,
        repeats: int = 20,
        warmup: int = 3,
        barrier: Call | None = None,
    ) -> Timing:
        """Time launches of a graph; an entry is the time of one divided by its calls.

        Args:
            captured: The graph.
            repeats: Launches that are timed.
            warmup: Launches that are not.
            barrier: See ``measure``; not in the graph.
        """
        stream = captured.stream
        with stream:
            timing = self.measure(
                lambda: captured.graph.launch(stream),
                repeats=repeats,
                warmup=warmup,
                barrier=barrier,
            )
        return Timing(tuple(each / captured.calls for each in timing.microseconds))


def slowest(timing: Timing, allgather: Callable[[float], list[float]]) -> float:
    """Collective. The greatest median of all ranks, in microseconds."""
    return max(allgather(timing.median))
