"""Who owns which bytes of the symmetric region: an allocator of integers, on the host.

``Pool`` hands out blocks of an address range. It touches no memory and knows no CUDA: what it
needs from streams is the ``EventSource`` protocol, so that it is tested without a GPU.

Life of a block::

    alloc ──▶ live ──(last array dies: queued)──▶ free, with the work pending on it ──▶ alloc
                │                                    ▲
                ├── quarantine ── release_quarantine ┤   a failed operation's block
                └── graph capture ── release_captured┘   the graph's until then

* Giving back never waits and never calls CUDA, because a finalizer may run in any thread, inside
  any lock, and under capture: it appends to a queue, which the next ``alloc`` reads.
* A free block is reused in stream order. On the stream it was made for that costs nothing; any
  other stream is first made to wait, on the device, for an event recorded behind the work that
  may still touch the block. Memory that needs no wait is preferred.
* A block of the size and stream of one that was given back takes its place, without a search
  (``SizeCache``). Where other requests need the room, cached memory is free like all other.
* Under capture only memory is handed out of which the host knows that all work on it is over: a
  graph cannot contain a wait for work queued before its capture, and no event may be touched
  meanwhile. What was made in a capture is reused in that capture alone, on the same stream;
  what was made in captures that are ``JOINED``, in all of them.
* Blocks of a 64th of the pool and more are stacked from the low end, the others from the high
  end. A worst-case block that is shrunk as soon as its size is known leaves its tail next
  to the free memory behind it, so that the next worst-case block fits; no small block lies between.
  Of several blocks for one operation, allocate the one that will be shrunk last.

``own``, ``free`` and ``record_stream`` take no lock. The others may be called from any thread
too, but not from a finalizer.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepep_cupy.errors import ContractError, StateError
from deepep_cupy.memory.block import Block, BlockOwner, round_up
from deepep_cupy.memory.free_list import FreeList, Segment, Stamp, Stream
from deepep_cupy.memory.size_cache import SizeCache
from deepep_cupy.memory.stream_clock import JOINED, MAX_FACTS, EventSource, StreamClock
from deepep_cupy.protocol.control_block import ALIGNMENT
from deepep_cupy.protocol.headers import Refusal, RefusalCode

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Pool", "PoolExhaustedError", "PoolStatistics"]

_MIB = 1 << 20
_SMALL_ZONE = 16 << 20
"""Bytes at the high end in which small blocks may be placed beside cached ones: half of what the
default size has to spare."""


class PoolExhaustedError(ContractError):
    """No room for a block. Carries a refusal, so that the other ranks raise too."""


@dataclass(frozen=True)
class PoolStatistics:
    """Where a pool's bytes are, and what it has done so far.

    Attributes:
        nbytes: Size of the pool.
        live: Bytes in blocks, the quarantined and the graphs' included.
        peak: The most ``live`` has been.
        free: Bytes in no block, no graph and no quarantine.
        largest_free: The longest free range.
        quarantined: Bytes withheld until ``release_quarantine``.
        captured: Bytes that belong to graphs, their free ones included.
        num_blocks: Live blocks.
        num_segments: Free ranges the allocator looks at.
        num_allocs: Blocks handed out so far.
        num_again: Those of them that took the place of a cached block.
        num_waits: Device-side waits queued so far to make reuse safe.
    """

    nbytes: int
    live: int
    peak: int
    free: int
    largest_free: int
    quarantined: int
    captured: int
    num_blocks: int
    num_segments: int
    num_allocs: int
    num_again: int
    num_waits: int


class Pool:
    """Allocator over ``[start, start + nbytes)``.

    Args:
        nbytes: Size; rounded down to ``ALIGNMENT``.
        events: The streams' side.
        start: First offset handed out, a multiple of ``ALIGNMENT``.
        who: Put before messages: ``"rank 3"``.

    Attributes:
        given_back: Blocks whose arrays have died, for ``BlockOwner``.
        only_stream: The one stream that blocks were made for so far; None: there were several, or
            none yet.
    """

    def __init__(self, nbytes: int, events: EventSource, *, start: int = 0, who: str = "") -> None:
        nbytes = nbytes // ALIGNMENT * ALIGNMENT
        if nbytes <= 0 or start < 0 or start % ALIGNMENT:
            raise ContractError(
                f"Pool(): a pool needs at least {ALIGNMENT} bytes from a multiple of {ALIGNMENT} "
                f"on, got nbytes={nbytes}, start={start}."
            )
        self._nbytes = nbytes
        self._who = f"{who}: " if who else ""
        self._large = nbytes // 64
        zone = max(nbytes // 128, min(nbytes // 8, _SMALL_ZONE))
        self._small_zone = start + nbytes - zone
        self._guard = _Guard()
        self.given_back: deque[Block] = deque()
        self.only_stream: Stream | None = None
        self._clock = StreamClock(events)
        self._free = FreeList()
        self._free.insert(Segment(start, start + nbytes, {}))
        self._compact_at = MAX_FACTS
        self._graphs: dict[int, FreeList] = {}
        self._held: list[tuple[int, Segment]] = []
        self._live: dict[int, Block] = {}
        self._cache = SizeCache()
        self._live_bytes = self._peak = self._num_allocs = self._num_found = 0
        self._closed = False

    # -- handing out, and giving back ------------------------------------------------------

    def alloc(self, nbytes: int, stream: Stream, label: str = "") -> Block:
        """Hand out a block for use on ``stream``. May queue device-side waits on ``stream``.

        Args:
            nbytes: Bytes wanted, 0 included; rounded up to ``ALIGNMENT``.
            stream: The stream that will use it first.
            label: What it is for.

        Raises:
            PoolExhaustedError: No room; the message lists who holds what.
            StateError: The pool is closed, or the stream cannot be used at present.
        """
        return self.alloc_all(((nbytes, label),), stream)[0]

    def alloc_all(
        self, wanted: Sequence[tuple[int, str]], stream: Stream, capture: int | None = None
    ) -> list[Block]:
        """Hand out all blocks of one operation, or none; see ``alloc``.

        Args:
            wanted: (bytes, label) of each; the one that will be shrunk comes last.
            stream: The stream that will use them first.
            capture: ``EventSource.capture_id`` of the stream, where the caller has asked already.
        """
        blocks: list[Block] = []
        try:
            with self._guard:
                if capture is None or self._closed:
                    capture = self._capture_of(stream)
                if self.given_back:
                    self._drain(may_record=not capture)
                if self._place(wanted, stream, capture, blocks):
                    return blocks
            self._squeeze(wanted, stream, capture, blocks)
        except BaseException:
            self.given_back.extend(blocks)
            raise
        return blocks

    def _squeeze(
        self, wanted: Sequence[tuple[int, str]], stream: Stream, capture: int, blocks: list[Block]
    ) -> None:
        """Find room for the missing blocks after a collection of garbage, or raise."""
        if not capture:
            # Arrays in reference cycles hold blocks too. Not under the lock: user finalizers run.
            gc.collect()
            with self._guard:
                self._drain(may_record=True)
                if self._place(wanted[len(blocks) :], stream, capture, blocks):
                    return
        nbytes, label = wanted[len(blocks)]
        alive, numbers = self.live(), self.statistics()
        raise _exhausted(self._who, nbytes, label, alive, numbers, captured=capture != 0)

    def own(self, block: Block, keep: object = None) -> BlockOwner:
        """Make the object whose death gives ``block`` back; ``keep`` lives as long as it does."""
        return BlockOwner(block, self.given_back, keep)

    def free(self, block: Block) -> None:
        """Give back a block that has no owner. Any thread."""
        self.given_back.append(block)

    def record_stream(self, block: Block, stream: Stream) -> None:
        """Record that ``stream`` works on ``block`` too, before the last array over it dies.

        Where the stream is being captured, the block becomes the graph's.
        """
        capture = self._clock.events.capture_id(stream)
        if capture > 0 and not block.capture:
            block.capture = capture
        if stream != block.stream:
            block.uses[stream] = None

    def shrink(self, block: Block, nbytes: int) -> None:
        """Give back all but the first ``nbytes``, which nothing queued since ``alloc`` touches."""
        with self._guard:
            if block.retired or block.gone or block.quarantined:
                raise StateError(f"{self._who}shrink(): {block!r} is not in use any more.")
            kept = round_up(nbytes)
            if kept >= block.nbytes:
                return
            self._live_bytes -= block.nbytes - kept
            block.nbytes = kept
            if block.uses or block.capture:
                users = {stream: self._clock.stamp(stream) for stream in block.uses}
                self._cut(block, self._home(block.capture), users)
            else:
                self._cache.tailed.add(block)

    # -- what else can become of a block ---------------------------------------------------

    def quarantine(self, block: Block) -> None:
        """Withhold the bytes of ``block`` until ``release_quarantine``, reused already or not."""
        with self._guard:
            self._evict()
            if not block.retired:
                block.quarantined = True
                return
            for number, home in ((0, self._free), *self._graphs.items()):
                held = home.take_overlap(block.offset, block.end)
                self._held += [(number, segment) for segment in held]
            for other in self._live.values():
                if other.offset < block.end and block.offset < other.end:
                    other.quarantined = True

    def release_quarantine(self) -> None:
        """End the quarantine of all blocks: no peer writes into them any more."""
        with self._guard:
            for number, segment in self._held:
                self._home(number).insert(segment)
            self._held.clear()
            for block in list(self._live.values()):
                if block.quarantined:
                    block.quarantined = False
                    if block.gone:
                        self._retire(block)

    def release_captured(self, capture: int = 0) -> None:
        """Take back what graphs own. None may be launched again, and no launch be running.

        Args:
            capture: Number of one capture, or 0 for all.
        """
        with self._guard:
            self._drain(may_record=False)
            self._evict()
            for block in self._live.values():
                if block.capture and capture in (0, block.capture):
                    block.capture = 0
            for number in [n for n in self._graphs if capture in (0, n)]:
                for segment in self._graphs.pop(number).drain():
                    self._free.insert(segment)
            self._held = [(0 if capture in (0, n) else n, segment) for n, segment in self._held]

    def checkpoint(self) -> int:
        """A point in time for ``completed``, taken before the operation is queued whose start or
        end the host will see."""
        with self._guard:
            self._drain(may_record=False)
            return self._clock.advance()

    def completed(self, checkpoint: int, stream: Stream | None = None) -> None:
        """The host has seen that all work queued on ``stream`` before ``checkpoint`` is over.

        Calls no CUDA, and makes memory fit for graph capture. ``None``: on every stream.
        """
        with self._guard:
            self._clock.completed(checkpoint, stream)

    def close(self) -> None:
        """Refuse all further requests. Arrays may die later."""
        with self._guard:
            self._closed = True

    # -- looking ---------------------------------------------------------------------------

    def block_at(self, offset: int) -> Block | None:
        """The live block that holds the byte at ``offset``."""
        with self._guard:
            block = self._live.get(offset)
            if block is not None:
                return block
            holders = (each for each in self._live.values() if each.offset < offset < each.end)
            return next(holders, None)

    def live(self) -> tuple[Block, ...]:
        """All live blocks in address order; those whose arrays died are swept out first."""
        with self._guard:
            self._drain(may_record=False)
            self._evict()
            return tuple(self._live[offset] for offset in sorted(self._live))

    def statistics(self) -> PoolStatistics:
        """Where the bytes are."""
        with self._guard:
            self._drain(may_record=False)
            self._evict()
            blocks = self._live.values()
            return PoolStatistics(
                nbytes=self._nbytes,
                live=self._live_bytes,
                peak=self._peak,
                free=self._free.nbytes,
                largest_free=self._free.largest(),
                quarantined=sum(segment.nbytes for _, segment in self._held)
                + sum(block.nbytes for block in blocks if block.quarantined),
                captured=sum(graph.nbytes for graph in self._graphs.values())
                + sum(block.nbytes for block in blocks if block.capture),
                num_blocks=len(self._live),
                num_segments=len(self._free),
                num_allocs=self._num_allocs,
                num_again=self._num_allocs - self._num_found,
                num_waits=self._clock.num_waits,
            )

    # -- inside, under the lock ------------------------------------------------------------

    def _capture_of(self, stream: Stream) -> int:
        if self._closed:
            raise StateError(f"{self._who}alloc(): the pool is closed.")
        capture = self._clock.events.capture_id(stream)
        if capture < 0:
            raise StateError(
                f"{self._who}alloc(): this stream cannot be used while another stream is being "
                "captured; use a stream made with non_blocking=True."
            )
        return capture

    def _place(
        self, wanted: Sequence[tuple[int, str]], stream: Stream, capture: int, blocks: list[Block]
    ) -> bool:
        """Append blocks to ``blocks``, each in the place of a cached one or else where there is
        room, up to the first that finds none; True where all found room."""
        live, cache, clock = self._live, self._cache, self._clock
        if stream is not self.only_stream:
            self.only_stream = None if self._num_allocs else stream
        alike = cache.cached.get
        for nbytes, label in wanted:
            if nbytes <= 0 or nbytes % ALIGNMENT:
                nbytes = round_up(nbytes)
            cached, room = alike((nbytes, stream)), nbytes
            if not cached and nbytes >= self._large:
                cached, room = cache.best_fit(nbytes, stream)
            if cached and not capture:
                offset = cached.pop().offset
            else:
                found = self._search(nbytes, stream, capture)
                if found is None:
                    return False
                offset, room = found, nbytes
                self._num_found += 1
            block = live[offset] = Block(offset, nbytes, stream, label, capture, clock.tick)
            if room != nbytes:
                block.room = room
                cache.tailed.add(block)
            blocks.append(block)
            self._num_allocs += 1
            self._live_bytes += nbytes
            if self._live_bytes > self._peak:
                self._peak = self._live_bytes
        return True

    def _search(self, nbytes: int, stream: Stream, capture: int) -> int | None:
        """Cut a place out of what is free."""
        home = self._free
        if capture:
            self._evict()
            home, offset = self._find_captured(nbytes, stream, capture)
        else:
            if nbytes >= self._large:
                self._evict(self._large)
                offset = self._find(nbytes, stream)
            else:
                offset = self._find(nbytes, stream)
                many = len(self._cache.cached) > MAX_FACTS
                if many or offset is None or offset < self._small_zone:
                    self._evict(0, self._large)
                    offset = self._find(nbytes, stream)
            if offset is None and self._evict():
                offset = self._find(nbytes, stream)
            if offset is None:
                offset = home.cheapest_fit(nbytes, self._clock.wait_cost(stream))
        if offset is None:
            return None
        pending = home.take(offset, nbytes)
        if pending and not capture:
            try:
                self._clock.wait_for(stream, pending.values())
            except BaseException:
                home.insert(Segment(offset, offset + nbytes, dict(pending)))
                raise
        return offset

    def _find(self, nbytes: int, stream: Stream) -> int | None:
        """Offset of memory that needs no wait."""
        fit = self._free.first_fit if nbytes >= self._large else self._free.last_fit
        return fit(nbytes, self._clock.usable(stream))

    def _find_captured(
        self, nbytes: int, stream: Stream, capture: int
    ) -> tuple[FreeList, int | None]:
        def in_order(segment: Segment) -> bool:
            return capture == JOINED or all(other == stream for other in segment.pending)

        graph = self._graphs.get(capture)
        if graph is not None:
            offset = graph.first_fit(nbytes, in_order)
            if offset is not None:
                return graph, offset
        return self._free, self._free.last_fit(nbytes, self._clock.is_clean)

    def _drain(self, *, may_record: bool) -> None:
        """Take back what finalizers have queued. Calls no CUDA unless ``may_record``."""
        queue = self.given_back
        foreign: dict[Stream, Stamp] = {}
        tick, live, put = self._clock.tick, self._live, self._cache.put
        while queue:
            block = queue.popleft()
            if block.retired:
                continue
            block.gone = True
            if block.quarantined:
                continue
            if block.uses or block.capture:
                self._retire(block)
                if not block.capture:
                    foreign.update((stream, self._clock.stamp(stream)) for stream in block.uses)
            else:
                block.retired = True
                del live[block.offset]
                self._live_bytes -= block.nbytes
                put(block, tick)
        if may_record and foreign:
            # Another stream than the block's own will be waited for sooner or later; an event
            # recorded now leaves out the work that it is given next.
            self._clock.record_all(foreign.values())
        if may_record and len(self._free) > self._compact_at:
            self._compact()

    def _retire(self, block: Block) -> None:
        block.retired = True
        del self._live[block.offset]
        self._live_bytes -= block.nbytes
        self._cache.tailed.discard(block)
        self._cut(block, self._free)
        stamp = self._clock.stamp
        pending = {block.stream: stamp(block.stream)}
        for stream in block.uses:
            pending[stream] = stamp(stream)
        self._home(block.capture).insert(Segment(block.offset, block.end, pending))

    def _cut(self, block: Block, home: FreeList, users: dict[Stream, Stamp] | None = None) -> None:
        """Make the tail of ``block`` free.

        Args:
            block: With or without a tail.
            home: Where the tail goes.
            users: The other streams that worked on the block before it was shrunk.
        """
        if block.room > block.nbytes:
            pending = {**(users or {}), block.stream: Stamp(block.stream, block.born)}
            home.insert(Segment(block.end, block.offset + block.room, pending))
            block.room = block.nbytes

    def _evict(self, low: int = 0, high: int = sys.maxsize) -> bool:
        """Make cached blocks and tails of these sizes free; True where there were any."""
        blocks, tailed = self._cache.evict(low, high)
        for block in (*tailed, *blocks):
            self._cut(block, self._free)
        for block in blocks:
            pending = {block.stream: self._clock.stamp(block.stream, block.died)}
            self._free.insert(Segment(block.offset, block.end, pending))
        return bool(blocks or tailed)

    def _home(self, capture: int) -> FreeList:
        return self._graphs.setdefault(capture, FreeList()) if capture else self._free

    def _compact(self) -> None:
        """Ask which pending work is over, so that segments merge and streams are forgotten."""
        stamps = [stamp for segment in self._free for stamp in segment.pending.values()]
        over = self._clock.ask(dict.fromkeys(stamps))
        for segment in self._free.drain():
            left = {s: stamp for s, stamp in segment.pending.items() if stamp not in over}
            self._free.insert(Segment(segment.offset, segment.end, left))
        self._compact_at = len(self._free) + MAX_FACTS


class _Guard:
    """A lock that raises where a finalizer calls into the pool call that it has interrupted."""

    __slots__ = ("_busy", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._busy = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._busy:  # by this very thread
            self._lock.release()
            raise StateError(
                "the pool was called from a finalizer that interrupted it; a __del__ method must "
                "not use the Buffer."
            )
        self._busy = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._busy = False
        self._lock.release()


def _exhausted(
    who: str,
    nbytes: int,
    label: str,
    live: Sequence[Block],
    numbers: PoolStatistics,
    *,
    captured: bool,
) -> PoolExhaustedError:
    """The error for ``nbytes`` that are not there.

    Args:
        who: Put before the message.
        nbytes: Bytes wanted.
        label: What for.
        live: All blocks in use.
        numbers: Where the bytes are.
        captured: Whether a graph wants them.
    """
    blocks = sorted(live, key=lambda block: -block.nbytes)
    held = ", ".join(_describe(block) for block in blocks[:8]) or "nothing"
    if len(blocks) > 8:
        held += f" and {len(blocks) - 8} smaller blocks"
    advice = "drop results that are no longer needed, ask for own=True where they must live "
    advice += "long, or enlarge pool_bytes (size_hint() gives the least)"
    if captured:
        advice = "a graph gets only memory on which no earlier work can be pending: drop old "
        advice += "results and make one eager call before the capture, or enlarge pool_bytes"
    message = (
        f"{who}alloc(): the pool of {_size(numbers.nbytes)} has no room for "
        f"{_size(nbytes)}{f' for {label}' if label else ''} ({_size(numbers.free)} free, "
        f"{_size(numbers.largest_free)} in one piece, {_size(numbers.quarantined)} in "
        f"quarantine, {_size(numbers.captured)} owned by graphs; live: {held}): {advice}."
    )
    return PoolExhaustedError(message, Refusal(RefusalCode.POOL_EXHAUSTED, -(-nbytes // _MIB)))


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:.1f} MiB" if nbytes >= _MIB // 10 else f"{nbytes} bytes"


def _describe(block: Block) -> str:
    state = " (quarantined)" if block.quarantined else " (a graph's)" if block.capture else ""
    return f"{block.label or 'unnamed'} {_size(block.nbytes)}{state}"
