"""Blocks that were given back whole and wait for their like: no search, no cutting, no melting.

Programs ask for the same sizes on the same streams again and again. A block that only its own
stream has used is therefore left as it is when its last array dies, and the next block of its
size on its stream takes its place: for all other memory it is as if the first one lived on. So
does a large one that needs at least half as much: calls of two kinds in turn wake nobody. Tails,
those that ``Pool.shrink`` gave back too, are left alone while nobody asks for them, so that a block
that is made for the worst case again finds room for it again.

Whoever looks for memory in any other way first wakes what rests: of small or of large blocks
alone, which lie apart (``Pool``), unless that does not help. Small ones may rest on where there is
room beside them.
"""

from __future__ import annotations

from deepep_cupy.memory.block import Block
from deepep_cupy.memory.free_list import Stream
from deepep_cupy.memory.stream_clock import MAX_FACTS

__all__ = ["SizeCache"]


class SizeCache:
    """Blocks that rest, and tails. Its caller holds the pool's lock.

    Attributes:
        blocks: (Size, stream) → those that rest, the last one last.
        loose: Blocks in use with a tail that they do not need, and nobody has asked for it.
    """

    __slots__ = ("_larger", "blocks", "loose")

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, Stream], list[Block]] = {}
        self.loose: set[Block] = set()
        self._larger: dict[tuple[int, Stream], int] = {}

    def put(self, block: Block, tick: int) -> None:
        """Let a block rest that nobody but its own stream has used."""
        block.died = tick
        if block.room != block.nbytes:
            self.loose.discard(block)
        key = block.room, block.stream
        try:
            self.blocks[key].append(block)
        except KeyError:
            self.blocks[key] = [block]

    def roomy(self, nbytes: int, stream: Stream) -> tuple[list[Block] | None, int]:
        """Those that rest on the stream and are larger by the least, at most twice as large."""
        key = nbytes, stream
        room = self._larger.get(key, nbytes)
        found = self.blocks.get((room, stream))
        if not found:
            sizes = [
                size for (size, other), rest in self.blocks.items() if rest and other == stream
            ]
            room = min((size for size in sizes if nbytes <= size <= 2 * nbytes), default=nbytes)
            found = self.blocks.get((room, stream))
            if len(self._larger) >= MAX_FACTS:
                self._larger.clear()
            self._larger[key] = room
        return found, room

    def wake(self, low: int, high: int) -> tuple[list[Block], list[Block]]:
        """Take out blocks that rest, in the order in which they came within each size, and blocks
        with tails, of sizes ``low <= size < high``."""
        self._larger.clear()
        keys = [key for key in self.blocks if low <= key[0] < high]
        blocks = [block for key in keys for block in self.blocks.pop(key)]
        loose = [block for block in self.loose if low <= block.room < high]
        self.loose.difference_update(loose)
        return blocks, loose
