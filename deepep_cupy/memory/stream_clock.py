"""What is known about streams: which queued work is over, and who has waited for it already.

Time is a clock that ticks at every event and checkpoint. Memory given back at tick t carries a
``Mark(stream, t)`` for each stream that used it. A mark needs no wait

* on its own stream,
* once the host has seen all work of its stream up to t end (``completed``),
* on a stream that has waited for an event of its stream recorded at t or later.

Everything but the marks themselves may be forgotten at any time: knowledge only saves waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from deepep_cupy.memory.free_list import Segment, Stamp, Stream

__all__ = ["EventSource", "StreamClock"]

MAX_FACTS = 64
"""Streams that are remembered; a program that makes a stream a call must not grow without end."""


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
        """0: not capturing. Above 0: a number of the capture, unique in the process. Below 0: the
        stream cannot be used now, because another stream's capture forbids it."""
        ...


class StreamClock:
    """The pool's memory of events and waits. Its caller holds the pool's lock.

    Attributes:
        events: The streams' side.
        num_waits: Waits queued so far.
        tick: Now.
    """

    def __init__(self, events: EventSource) -> None:
        self.events = events
        self.num_waits = 0
        self.tick = 1
        self._marks: dict[Stream, Stamp] = {}
        self._over_all = 0
        self._over: dict[Stream, int] = {}
        self._waited: dict[Stream, dict[Stream, int]] = {}

    def advance(self) -> int:
        """Return the present tick, and begin the next."""
        self.tick += 1
        return self.tick - 1

    def mark(self, stream: Stream, tick: int | None = None) -> Stamp:
        """The mark for what is given back now, or was at a tick; mostly one per stream and tick."""
        tick = self.tick if tick is None else tick
        mark = self._marks.get(stream)
        if mark is None or mark.tick != tick:
            if len(self._marks) >= MAX_FACTS:
                self._marks.clear()
            mark = self._marks[stream] = Stamp(stream, tick)
        return mark

    def record(self, mark: Stamp) -> None:
        """Record the event of ``mark``; its stream must not be capturing."""
        mark.event = self.events.record(mark.stream)
        mark.covers = self.advance()

    def record_all(self, marks: Iterable[Stamp]) -> None:
        """Record events for marks that have none and whose streams allow it."""
        for mark in marks:
            if mark.event is None and self.events.capture_id(mark.stream) == 0:
                self.record(mark)

    def completed(self, checkpoint: int, stream: Stream | None) -> None:
        """All work queued on ``stream`` (``None``: on all) up to ``checkpoint`` is over."""
        if stream is None:
            self._over_all = max(self._over_all, checkpoint)
        elif checkpoint > self._over.get(stream, 0):
            if len(self._over) >= MAX_FACTS:
                self._over.clear()
            self._over[stream] = checkpoint

    def is_over(self, mark: Stamp) -> bool:
        """Whether the host knows that the work of ``mark`` is over. Calls no CUDA."""
        return mark.tick <= self._over_all or mark.tick <= self._over.get(mark.stream, 0)

    def is_clean(self, segment: Segment) -> bool:
        """Whether the host knows that nothing is pending on ``segment``. Calls no CUDA."""
        return all(self.is_over(mark) for mark in segment.pending.values())

    def ask(self, marks: Iterable[Stamp]) -> set[Stamp]:
        """Which marks' work is over. Those without an event get one, to be asked the next time."""
        over: set[Stamp] = set()
        recorded: dict[Stream, Stamp] = {}
        for mark in marks:
            if self.is_over(mark):
                over.add(mark)
            elif mark.event is not None:
                if self.events.query(mark.event):
                    over.add(mark)
            elif (known := recorded.get(mark.stream)) is not None:
                mark.event, mark.covers = known.event, known.covers
            elif self.events.capture_id(mark.stream) == 0:
                self.record(mark)
                recorded[mark.stream] = mark
        return over

    def needs_wait(self, stream: Stream) -> Callable[[Stamp], bool]:
        """The question whether ``stream`` must wait for a mark."""
        waited = self._waited.get(stream, {})
        over, over_all = self._over, self._over_all

        def needs(mark: Stamp) -> bool:
            tick, other = mark.tick, mark.stream
            return (
                other != stream
                and tick > over_all
                and tick > over.get(other, 0)
                and tick > waited.get(other, 0)
            )

        return needs

    def ready(self, stream: Stream) -> Callable[[Segment], bool]:
        """The question whether ``stream`` may use a segment without any wait."""
        needs = self.needs_wait(stream)

        def ready(segment: Segment) -> bool:
            pending = segment.pending
            if not pending or (len(pending) == 1 and stream in pending):
                return True
            return not any(map(needs, pending.values()))

        return ready

    def wait_cost(self, stream: Stream) -> Callable[[Segment], tuple[int, int] | None]:
        """What waiting costs ``stream`` on a segment: (number of waits, newest tick), or ``None``
        where no event can be recorded now."""
        needs = self.needs_wait(stream)
        usable: dict[Stream, bool] = {}

        def wait_cost(segment: Segment) -> tuple[int, int] | None:
            open_marks = [mark for mark in segment.pending.values() if needs(mark)]
            for mark in open_marks:
                if mark.event is None and mark.stream not in usable:
                    usable[mark.stream] = self.events.capture_id(mark.stream) == 0
            if any(mark.event is None and not usable[mark.stream] for mark in open_marks):
                return None
            return len(open_marks), max((mark.tick for mark in open_marks), default=0)

        return wait_cost

    def wait_for(self, stream: Stream, marks: Iterable[Stamp]) -> None:
        """Make ``stream`` wait for what it must wait for."""
        needs = self.needs_wait(stream)
        for mark in [mark for mark in marks if needs(mark)]:
            if mark.event is None:
                self.record(mark)
            self.events.wait(stream, mark.event)
            self.num_waits += 1
            self._remember_wait(stream, mark)

    def _remember_wait(self, stream: Stream, mark: Stamp) -> None:
        waited = self._waited.get(stream)
        if waited is None or len(waited) >= MAX_FACTS:
            if len(self._waited) >= MAX_FACTS:
                self._waited.clear()
            waited = self._waited[stream] = {}
        waited[mark.stream] = max(mark.covers, waited.get(mark.stream, 0))
