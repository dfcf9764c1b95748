"""Blocks that were given back whole and wait for their like: no search, no cutting, no melting.

Programs ask for the same sizes on the same streams again and again. A block that only its own
stream has used is therefore left as it is when its last array dies, and the next block of its
size on its stream takes its place: for all other memory it is as if the first one lived on. Tails
that ``Pool.shrink`` gave back are left alone too while nobody asks for them, so that a block that
is made for the worst case again finds room for it again.

Whoever looks for memory in any other way first wakes what rests: of small or of large blocks
alone, which lie apart (``Pool``), unless that does not help.
"""

from __future__ import annotations

from deepep_cupy.transport.block import Block
from deepep_cupy.transport.segments import Stream

__all__ = ["Resting"]


class Resting:
    """Blocks that rest, and tails. Its caller holds the pool's lock.

    Attributes:
        blocks: (Size, stream) → those that rest, the last one last.
        loose: Blocks in use whose tail was given back, and nobody has asked for it.
    """

    __slots__ = ("blocks", "loose")

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, Stream], list[Block]] = {}
        self.loose: set[Block] = set()

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

    def wake(self, low: int, high: int) -> tuple[list[Block], list[Block]]:
        """Take out blocks that rest, in the order in which they came within each size, and blocks
        with tails, of sizes ``low <= size < high``."""
        keys = [key for key in self.blocks if low <= key[0] < high]
        blocks = [block for key in keys for block in self.blocks.pop(key)]
        loose = [block for block in self.loose if low <= block.room < high]
        self.loose.difference_update(loose)
        return blocks, loose
