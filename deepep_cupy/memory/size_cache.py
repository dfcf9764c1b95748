"""Blocks that were given back whole, kept for the next request of their size and stream.

Programs ask for the same sizes on the same streams again and again. A block that only its own
stream has used is therefore cached as it is when its last array dies, and the next block of its
size on its stream takes its place, without a search: in stream order that is as if the first one
lived on. A request for a large block also takes a cached one of up to twice its size, so that two
kinds of calls in turn do not evict each other's blocks. The unused end of such a block, and of one
that ``Pool.shrink`` has shortened, is its *tail*. Tails stay with their blocks while no other
request needs them, so that a block that is made for the worst case again finds room for it again.

Before the pool looks for memory in any other way, it evicts cached blocks and cuts off tails:
only of small or only of large blocks, which lie apart (``Pool``), where that is enough. Small ones
may stay where there is room beside them.
"""

from __future__ import annotations

from deepep_cupy.memory.block import Block
from deepep_cupy.memory.free_list import Stream
from deepep_cupy.memory.stream_clock import MAX_FACTS

__all__ = ["SizeCache"]


class SizeCache:
    """Cached blocks, and blocks with a tail. The caller holds the pool's lock.

    Attributes:
        cached: (Size, stream) → blocks, the last one given back last.
        tailed: Blocks, cached or in use, with a tail that no other request has needed.
    """

    __slots__ = ("_larger", "cached", "tailed")

    def __init__(self) -> None:
        self.cached: dict[tuple[int, Stream], list[Block]] = {}
        self.tailed: set[Block] = set()
        self._larger: dict[tuple[int, Stream], int] = {}

    def put(self, block: Block, tick: int) -> None:
        """Cache a block that only its own stream has used, given back at ``tick``."""
        block.died = tick
        if block.room != block.nbytes:
            self.tailed.discard(block)
        key = block.room, block.stream
        try:
            self.cached[key].append(block)
        except KeyError:
            self.cached[key] = [block]

    def best_fit(self, nbytes: int, stream: Stream) -> tuple[list[Block] | None, int]:
        """Cached blocks of the stream of the smallest size from ``nbytes`` to twice that.

        Returns:
            The list of them, empty or ``None`` where there are none, and their size.
        """
        key = nbytes, stream
        room = self._larger.get(key, nbytes)
        found = self.cached.get((room, stream))
        if not found:
            sizes = [
                size for (size, other), blocks in self.cached.items() if blocks and other == stream
            ]
            room = min((size for size in sizes if nbytes <= size <= 2 * nbytes), default=nbytes)
            found = self.cached.get((room, stream))
            if len(self._larger) >= MAX_FACTS:
                self._larger.clear()
            self._larger[key] = room
        return found, room

    def evict(self, low: int, high: int) -> tuple[list[Block], list[Block]]:
        """Take out what has a size of ``low <= size < high``, its tail included.

        Returns:
            The cached blocks, within each size in the order in which they were given back, and
            the blocks with a tail.
        """
        self._larger.clear()
        keys = [key for key in self.cached if low <= key[0] < high]
        blocks = [block for key in keys for block in self.cached.pop(key)]
        tailed = [block for block in self.tailed if low <= block.room < high]
        self.tailed.difference_update(tailed)
        return blocks, tailed
