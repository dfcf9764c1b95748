"""How long a call takes: medians on each rank, then the slowest rank.

``CudaTimer`` puts CUDA events around each call, behind a write to more memory than the L2 cache
holds and, where one is given, a barrier of the ranks, so that all begin together with cold caches.
``graph`` captures many calls in one graph and divides: what Python and launches cost is left out.
``HostTimer`` does the same with the host's clock, for the engine that has no GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["CudaTimer", "HostTimer", "Timer", "Timing", "slowest"]

Call = Callable[[], object]
FLUSH_BYTES = 256 << 20
"""Written before each call; no L2 cache of today is larger."""


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


class CudaTimer:
    """CUDA events on the current stream of the current device.

    Args:
        flush_bytes: Written before each call to empty the L2 cache; 0: not at all.
    """

    def __init__(self, flush_bytes: int = FLUSH_BYTES) -> None:
        import cupy

        self._cuda: Any = cupy.cuda
        self._flush: Any = cupy.empty(flush_bytes, cupy.uint8) if flush_bytes else None

    def measure(
        self, call: Call, *, repeats: int = 20, warmup: int = 3, barrier: Call | None = None
    ) -> Timing:
        """See ``Timer``. A barrier on the device belongs on the current stream too."""
        stream = self._cuda.get_current_stream()
        pairs = []
        for _ in range(warmup + repeats):
            begin, end = self._cuda.Event(), self._cuda.Event()
            if self._flush is not None:
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

    def graph(
        self,
        call: Call,
        *,
        calls: int = 20,
        repeats: int = 20,
        warmup: int = 3,
        barrier: Call | None = None,
    ) -> Timing:
        """Capture ``calls`` calls in one graph; a time is that of a launch divided by ``calls``.

        Args:
            call: Must be fit for capture, and have been called once before.
            calls: Calls in the graph.
            repeats: Launches that are timed.
            warmup: Launches that are not.
            barrier: See ``measure``; not in the graph.
        """
        stream = self._cuda.Stream(non_blocking=True)
        self._cuda.get_current_stream().synchronize()
        with stream:
            kept: list[object] = []  # results live as long as the graph
            stream.begin_capture()
            try:
                kept.extend(call() for _ in range(calls))
            finally:
                graph = stream.end_capture()
            timing = self.measure(
                lambda: graph.launch(stream), repeats=repeats, warmup=warmup, barrier=barrier
            )
            stream.synchronize()
        kept.clear()
        return Timing(tuple(each / calls for each in timing.microseconds))


def slowest(timing: Timing, allgather: Callable[[float], list[float]]) -> float:
    """Collective. The greatest median of all ranks, in microseconds."""
    return max(allgather(timing.median))
