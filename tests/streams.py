"""A model of CUDA streams that finds races, for tests of what is reused in stream order.

Every stream has a vector clock: which work of which stream is over before the next work on this
one can begin, as far as waits and the host's observations *force* it. Memory that is touched
while an earlier owner's work is not forced to be over is a race, whether or not a particular run
would show it.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

__all__ = ["LEGACY", "Extent", "ModelEvent", "RaceError", "StreamModel", "merge"]

LEGACY = "legacy stream"
"""The stream that cannot be used at all while another one is being captured."""

Clock: TypeAlias = dict[Hashable, int]


class RaceError(AssertionError):
    """Memory handed out that somebody may still use, or a call that capture forbids."""


class Extent(Protocol):
    """What is touched: a block of the pool."""

    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class ModelEvent:
    """What is over once the event is."""

    clock: Clock


def merge(into: Clock, other: Clock) -> None:
    """Both are over."""
    for stream, count in other.items():
        if count > into.get(stream, 0):
            into[stream] = count


class StreamModel:
    """Streams, captures and memory in cells: an ``EventSource`` that sees every hazard.

    Args:
        rng: Decides whether an event that is asked is over.
        start: Offset of the first cell.
        num_cells: How many there are.
        cell_bytes: Bytes of one.

    Attributes:
        host: What the host has seen to be over.
        captures: Stream → number of the capture it is in.
        sealed: While True, no call to CUDA is allowed.
        withheld: Cells in quarantine.
        graph_of: Cell → (capture, stream) it belongs to.
    """

    def __init__(self, rng: random.Random, start: int, num_cells: int, cell_bytes: int) -> None:
        self._rng = rng
        self._start, self._num_cells, self._cell_bytes = start, num_cells, cell_bytes
        self.serial = 0
        self.clocks: dict[Hashable, Clock] = {}
        self.host: Clock = {}
        self.captures: dict[Hashable, int] = {}
        self.sealed = False
        self.withheld: set[int] = set()
        self.graph_of: dict[int, tuple[int, Hashable]] = {}
        self._touches: list[list[tuple[Extent, Hashable, int]]] = []
        self.synchronize()

    # -- EventSource -----------------------------------------------------------------------

    def capture_id(self, stream: Hashable) -> int:
        """See ``EventSource``."""
        if stream == LEGACY:
            return -1 if self.captures else 0
        return self.captures.get(stream, 0)

    def record(self, stream: Hashable) -> ModelEvent:
        """See ``EventSource``."""
        self._check_call("record", stream)
        self.enqueue(stream)
        return ModelEvent(dict(self.clocks[stream]))

    def wait(self, stream: Hashable, event: ModelEvent) -> None:
        """See ``EventSource``."""
        self._check_call("wait", stream)
        merge(self.clocks.setdefault(stream, {}), event.clock)

    def query(self, event: ModelEvent) -> bool:
        """See ``EventSource``: chance decides how far the device has come."""
        if self.sealed:
            raise RaceError("query under capture")
        if self._rng.random() < 0.5:
            return False
        merge(self.host, event.clock)
        return True

    def _check_call(self, what: str, stream: Hashable) -> None:
        if self.sealed or self.capture_id(stream):
            raise RaceError(f"{what} on {stream} under capture")

    # -- what a program does ---------------------------------------------------------------

    def cells(self, extent: Extent, nbytes: int = 0) -> range:
        """Cells of ``extent``, or of its first ``nbytes``."""
        low = (extent.offset - self._start) // self._cell_bytes
        return range(low, low + (nbytes or extent.nbytes) // self._cell_bytes)

    def enqueue(self, stream: Hashable) -> None:
        """Give ``stream`` work."""
        clock = self.clocks.setdefault(stream, {})
        merge(clock, self.host)
        self.serial += 1
        clock[stream] = self.serial

    def follow(self, stream: Hashable, leader: Hashable) -> None:
        """``stream`` waits for all that ``leader`` has been given."""
        self.wait(stream, self.record(leader))

    def synchronize(self) -> None:
        """All that was queued is over: it can race with nothing any more."""
        self.clocks.clear()
        self.host.clear()
        self._touches = [[] for _ in range(self._num_cells)]

    def touch(self, stream: Hashable, extent: Extent, nbytes: int = 0) -> None:
        """Give ``stream`` work that touches ``extent``, or its first ``nbytes``.

        Raises:
            RaceError: Another owner's work on these bytes may not be over by then.
        """
        if stream in self.captures:
            self._touch_captured(stream, extent)
            return
        self.enqueue(stream)
        clock = self.clocks[stream]
        for cell in self.cells(extent, nbytes):
            self._check_withheld(cell, extent)
            if cell in self.graph_of:
                raise RaceError(f"{extent} belongs to graph {self.graph_of[cell]}")
            kept = []
            for owner, other, count in self._touches[cell]:
                if owner is extent:
                    kept.append((owner, other, count))
                elif count > clock.get(other, 0):
                    raise RaceError(f"{extent} on {stream}: work {count} of {other} may still run")
            self._touches[cell] = [*kept, (extent, stream, clock[stream])]

    def _touch_captured(self, stream: Hashable, extent: Extent) -> None:
        """The graph runs later, on any stream: only what the host has seen is surely over."""
        mine = (self.captures[stream], stream)
        for cell in self.cells(extent):
            self._check_withheld(cell, extent)
            if self.graph_of.setdefault(cell, mine) != mine:
                raise RaceError(f"{extent} in {mine} belongs to graph {self.graph_of[cell]}")
            for owner, other, count in self._touches[cell]:
                if owner is not extent and count > self.host.get(other, 0):
                    raise RaceError(f"{extent} in {mine}: work {count} of {other} may still run")

    def _check_withheld(self, cell: int, extent: Extent) -> None:
        if cell in self.withheld:
            raise RaceError(f"{extent} is in quarantine")
