"""What is known about streams: which queued work is over, and who has waited for it already.

Time is a clock that ticks at every event and checkpoint. Memory given back at tick t carries a
``Stamp(stream, t)`` for each stream that used it. No wait is needed for a stamp

* on its own stream,
* once the host has seen all work of its stream up to t end (``completed``),
* on a stream that has waited for an event of its stream recorded at t or later.

Only the stamps on free memory have to be kept. All else may be forgotten at any time: it saves
waits, and no result depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from deepep_cupy.memory.free_list import Segment, Stamp, Stream

__all__ = ["JOINED", "EventSource", "StreamClock"]

JOINED = 1 << 62
"""``EventSource.capture_id`` of all captures whose graphs run on one stream, one after the other:
memory that one of them has given back the next may use."""
MAX_FACTS = 64
"""Streams that are remembered: a program that makes a new stream for each call must not grow."""


class EventSource(Protocol):
    """What the pool needs to know about streams."""

    def record(self, stream: Stream) -> Any:
        """A new event behind all work queued on ``stream`` so far."""
        ...

    def query(self, event: Any) -> bool:
        """Whether the work before ``event`` is over."""
        ...

    def wait(self, stream: Stream, event: Any) -> None:
        """Let later work on ``stream`` wait, on the device, for ``event``."""
        ...

    def capture_id(self, stream: Stream) -> int:
        """0: not capturing. Above 0: a number of the capture, unique in the process, or ``JOINED``.
        Below 0: the stream cannot be used now, because another stream's capture forbids it."""
        ...


class StreamClock:
    """Events recorded and waits queued so far. The caller holds the pool's lock.

    Attributes:
        events: The streams' side.
        num_waits: Waits queued so far.
        tick: Now.
    """

    def __init__(self, events: EventSource) -> None:
        self.events = events
        self.num_waits = 0
        self.tick = 1
        self._stamps: dict[Stream, Stamp] = {}
        self._over_all = 0
        self._over: dict[Stream, int] = {}
        self._waited: dict[Stream, dict[Stream, int]] = {}

    def advance(self) -> int:
        """Return the present tick, and begin the next."""
        self.tick += 1
        return self.tick - 1

    def stamp(self, stream: Stream, tick: int | None = None) -> Stamp:
        """The stamp of memory given back now, or at ``tick``; equal ones are mostly one object."""
        tick = self.tick if tick is None else tick
        stamp = self._stamps.get(stream)
        if stamp is None or stamp.tick != tick:
            if len(self._stamps) >= MAX_FACTS:
                self._stamps.clear()
            stamp = self._stamps[stream] = Stamp(stream, tick)
        return stamp

    def record(self, stamp: Stamp) -> None:
        """Record the event of ``stamp``; its stream must not be capturing."""
        stamp.event = self.events.record(stamp.stream)
        stamp.covers = self.advance()

    def record_all(self, stamps: Iterable[Stamp]) -> None:
        """Record events for stamps that have none and whose streams allow it."""
        for stamp in stamps:
            if stamp.event is None and self.events.capture_id(stamp.stream) == 0:
                self.record(stamp)

    def completed(self, checkpoint: int, stream: Stream | None) -> None:
        """All work queued on ``stream`` (``None``: on all) up to ``checkpoint`` is over."""
        if stream is None:
            self._over_all = max(self._over_all, checkpoint)
        elif checkpoint > self._over.get(stream, 0):
            if len(self._over) >= MAX_FACTS:
                self._over.clear()
            self._over[stream] = checkpoint

    def is_over(self, stamp: Stamp) -> bool:
        """Whether the host knows that the work of ``stamp`` is over. Calls no CUDA."""
        return stamp.tick <= self._over_all or stamp.tick <= self._over.get(stamp.stream, 0)

    def is_clean(self, segment: Segment) -> bool:
        """Whether the host knows that nothing is pending on ``segment``. Calls no CUDA."""
        return all(self.is_over(stamp) for stamp in segment.pending.values())

    def ask(self, stamps: Iterable[Stamp]) -> set[Stamp]:
        """The stamps whose work is over. Those without an event get one for the next question."""
        over: set[Stamp] = set()
        recorded: dict[Stream, Stamp] = {}
        for stamp in stamps:
            if self.is_over(stamp):
                over.add(stamp)
            elif stamp.event is not None:
                if self.events.query(stamp.event):
                    over.add(stamp)
            elif (known := recorded.get(stamp.stream)) is not None:
                stamp.event, stamp.covers = known.event, known.covers
            elif self.events.capture_id(stamp.stream) == 0:
                self.record(stamp)
                recorded[stamp.stream] = stamp
        return over

    def needs_wait(self, stream: Stream) -> Callable[[Stamp], bool]:
        """A function that tells whether ``stream`` must wait for a stamp."""
        waited = self._waited.get(stream, {})
        over, over_all = self._over, self._over_all

        def needs(stamp: Stamp) -> bool:
            tick, other = stamp.tick, stamp.stream
            return (
                other != stream
                and tick > over_all
                and tick > over.get(other, 0)
                and tick > waited.get(other, 0)
            )

        return needs

    def usable(self, stream: Stream) -> Callable[[Segment], bool]:
        """A function that tells whether ``stream`` may use a segment without any wait."""
        needs = self.needs_wait(stream)

        def usable(segment: Segment) -> bool:
            pending = segment.pending
            if not pending or (len(pending) == 1 and stream in pending):
                return True
            return not any(map(needs, pending.values()))

        return usable

    def wait_cost(self, stream: Stream) -> Callable[[Segment], tuple[int, int] | None]:
        """A function that tells what waiting for a segment costs ``stream``: (number of waits,
        newest tick), or ``None`` where an event it needs cannot be recorded now."""
        needs = self.needs_wait(stream)
        recordable: dict[Stream, bool] = {}

        def wait_cost(segment: Segment) -> tuple[int, int] | None:
            open_stamps = [stamp for stamp in segment.pending.values() if needs(stamp)]
            for stamp in open_stamps:
                if stamp.event is None and stamp.stream not in recordable:
                    recordable[stamp.stream] = self.events.capture_id(stamp.stream) == 0
            if any(stamp.event is None and not recordable[stamp.stream] for stamp in open_stamps):
                return None
            return len(open_stamps), max((stamp.tick for stamp in open_stamps), default=0)

        return wait_cost

    def wait_for(self, stream: Stream, stamps: Iterable[Stamp]) -> None:
        """Make ``stream`` wait, on the device, for those stamps that need it."""
        needs = self.needs_wait(stream)
        for stamp in [stamp for stamp in stamps if needs(stamp)]:
            if stamp.event is None:
                self.record(stamp)
            self.events.wait(stream, stamp.event)
            self.num_waits += 1
            self._remember_wait(stream, stamp)

    def _remember_wait(self, stream: Stream, stamp: Stamp) -> None:
        waited = self._waited.get(stream)
        if waited is None or len(waited) >= MAX_FACTS:
            if len(self._waited) >= MAX_FACTS:
                self._waited.clear()
            waited = self._waited[stream] = {}
        waited[stamp.stream] = max(stamp.covers, waited.get(stamp.stream, 0))
