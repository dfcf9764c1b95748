"""Free memory as a sorted list of segments, each with the work that may still touch it.

A segment is free for the host but perhaps not for the device: kernels queued before its last
array died may still run. ``pending`` holds one ``Stamp`` for each stream where that may be so.
Neighbours become one segment only where the same streams are pending on both, so that a block that
a slow side stream has read does not make the whole pool wait for that stream. An allocation may
span neighbours that are still apart.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeAlias

__all__ = ["FreeList", "Segment", "Stamp", "Stream"]

Stream: TypeAlias = Hashable
"""A CUDA stream as the engine holds it; equal objects are one stream."""


class Stamp:
    """All work queued on ``stream`` up to ``tick`` of the pool's clock.

    Attributes:
        stream: Held, so that the stream outlives the work that is waited for.
        tick: The clock when the memory was given back.
        event: Recorded behind that work, or ``None`` while none was needed.
        covers: The clock when ``event`` was recorded: it stands for everything up to there.
    """

    __slots__ = ("covers", "event", "stream", "tick")

    def __init__(self, stream: Stream, tick: int) -> None:
        self.stream = stream
        self.tick = tick
        self.event: Any = None
        self.covers = tick


class Segment:
    """``[offset, end)`` is free once the work of all ``pending`` stamps is over."""

    __slots__ = ("end", "offset", "pending")

    def __init__(self, offset: int, end: int, pending: dict[Stream, Stamp]) -> None:
        self.offset = offset
        self.end = end
        self.pending = pending

    @property
    def nbytes(self) -> int:
        """Length of the segment."""
        return self.end - self.offset


class FreeList:
    """Segments in address order."""

    __slots__ = ("_offsets", "_segments", "nbytes")

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._offsets: list[int] = []
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def insert(self, segment: Segment) -> None:
        """Give a segment back; it is merged with neighbours on which the same streams are
        pending."""
        self.nbytes += segment.nbytes
        at = bisect_left(self._offsets, segment.offset)
        if at < len(self._segments):
            behind = self._segments[at]
            if behind.offset == segment.end and behind.pending.keys() == segment.pending.keys():
                segment.end = behind.end
                _take_newer(segment.pending, behind.pending)
                del self._segments[at], self._offsets[at]
        if at > 0:
            before = self._segments[at - 1]
            if before.end == segment.offset and before.pending.keys() == segment.pending.keys():
                before.end = segment.end
                _take_newer(before.pending, segment.pending)
                return
        self._segments.insert(at, segment)
        self._offsets.insert(at, segment.offset)

    def first_fit(self, nbytes: int, usable: Callable[[Segment], bool]) -> int | None:
        """Lowest place where usable neighbours hold ``nbytes``."""
        low = high = -1
        for segment in self._segments:
            if not usable(segment):
                continue  # the next one does not begin where the last usable one ended
            if segment.offset != high:
                low = segment.offset
            high = segment.end
            if high - low >= nbytes:
                return low
        return None

    def last_fit(self, nbytes: int, usable: Callable[[Segment], bool]) -> int | None:
        """Highest place where usable neighbours hold ``nbytes``."""
        low = high = -1
        for segment in reversed(self._segments):
            if not usable(segment):
                continue
            if segment.end != low:
                high = segment.end
            low = segment.offset
            if high - low >= nbytes:
                return high - nbytes
        return None

    def cheapest_fit(
        self, nbytes: int, cost: Callable[[Segment], tuple[int, int] | None]
    ) -> int | None:
        """The place, at the beginning of a segment, that costs the least waiting.

        Args:
            nbytes: Length wanted.
            cost: (streams to wait for, newest tick among them) of a segment; ``None``: unusable.
        """
        best: tuple[int, int, int] | None = None
        priced = [(segment, cost(segment)) for segment in self._segments]
        for first, (head, _) in enumerate(priced):
            waits, newest, end = 0, 0, head.offset
            for at in range(first, len(priced)):
                segment, price = priced[at]
                if segment.offset != end or price is None:
                    break
                waits, newest = max(waits, price[0]), max(newest, price[1])
                end = segment.end
                if end - head.offset >= nbytes:
                    found = (waits, newest, head.offset)
                    best = found if best is None or found < best else best
                    break
        return None if best is None else best[2]

    def take(self, offset: int, nbytes: int) -> dict[Stream, Stamp]:
        """Cut ``[offset, offset + nbytes)`` out and return what is pending on it.

        The range must be free: it comes from one of the searches. The result must not be changed.
        """
        end = offset + nbytes
        first = bisect_right(self._offsets, offset) - 1
        segment = self._segments[first]
        self.nbytes -= nbytes
        # The usual cases, without a new list.
        if segment.end > end and segment.offset == offset:
            segment.offset = self._offsets[first] = end
            return segment.pending
        if segment.end == end and segment.offset < offset:
            segment.end = offset
            return segment.pending
        last = first
        pending: dict[Stream, Stamp] = {}
        rest: list[Segment] = []
        while True:
            segment = self._segments[last]
            _take_newer(pending, segment.pending)
            if segment.offset < offset:
                rest.append(Segment(segment.offset, offset, dict(segment.pending)))
            if segment.end > end:
                rest.append(Segment(end, segment.end, dict(segment.pending)))
            last += 1
            if segment.end >= end:
                break
        self._segments[first:last] = rest
        self._offsets[first:last] = [segment.offset for segment in rest]
        return pending

    def take_overlap(self, offset: int, end: int) -> list[Segment]:
        """Cut out all that is free within ``[offset, end)``."""
        inside = [
            (max(segment.offset, offset), min(segment.end, end))
            for segment in self._segments
            if segment.offset < end and segment.end > offset
        ]
        return [Segment(low, high, dict(self.take(low, high - low))) for low, high in inside]

    def drain(self) -> list[Segment]:
        """Take everything."""
        segments, self._segments, self._offsets, self.nbytes = self._segments, [], [], 0
        return segments

    def largest(self) -> int:
        """Bytes of the longest run of neighbours, work that is pending on them or not."""
        best, low, high = 0, -1, -1
        for segment in self._segments:
            if segment.offset != high:
                low = segment.offset
            high = segment.end
            best = max(best, high - low)
        return best


def _take_newer(into: dict[Stream, Stamp], stamps: dict[Stream, Stamp]) -> None:
    for stream, stamp in stamps.items():
        known = into.get(stream)
        if known is None or known.tick < stamp.tick:
            into[stream] = stamp
