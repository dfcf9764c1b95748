"""A range of the region in use, and the object whose death gives it back."""

from __future__ import annotations

from collections import deque

from deepep_cupy.errors import ContractError
from deepep_cupy.memory.free_list import Stream
from deepep_cupy.protocol.control_block import ALIGNMENT, align

__all__ = ["Block", "BlockOwner", "round_up"]


class Block:
    """A range of the region, in use.

    Attributes:
        offset: From the base of the region.
        nbytes: Length, a multiple of ``ALIGNMENT``.
        stream: The stream it was made for.
        label: What it is for, shown when the pool is exhausted.
        capture: Number of the graph capture that owns it, 0 for none.
        born: The pool's clock when it was made.
        quarantined: True while a late peer may still write into it.
        gone: True once its last array has died.
        retired: True once the pool has taken it back.
        uses: Other streams that work on it.
        room: Bytes it occupies: more than ``nbytes`` while it has a tail, see ``SizeCache``.
        died: The pool's clock when it was cached.
    """

    __slots__ = (
        "born",
        "capture",
        "died",
        "gone",
        "label",
        "nbytes",
        "offset",
        "quarantined",
        "retired",
        "room",
        "stream",
        "uses",
    )

    def __init__(
        self, offset: int, nbytes: int, stream: Stream, label: str, capture: int, born: int
    ) -> None:
        self.offset = offset
        self.nbytes = self.room = nbytes
        self.stream = stream
        self.label = label
        self.capture = capture
        self.born = born
        self.quarantined = False
        self.gone = False
        self.retired = False
        self.died = 0
        self.uses: dict[Stream, None] = {}

    @property
    def end(self) -> int:
        """First byte behind the block."""
        return self.offset + self.nbytes

    def __repr__(self) -> str:
        return f"Block({self.label!r}, offset={self.offset}, nbytes={self.nbytes})"


class BlockOwner:
    """Dies with the last array over a block, and gives the block back.

    Attributes:
        block: What is given back in the end.
        keep: What must live as long as the arrays do (the region's memory).
    """

    __slots__ = ("_queue", "block", "keep")

    def __init__(self, block: Block, queue: deque[Block], keep: object) -> None:
        self.block = block
        self.keep = keep
        self._queue = queue

    def __del__(self) -> None:
        # Any thread, any lock, any capture: nothing but an append, which nothing can interrupt.
        self._queue.append(self.block)


def round_up(nbytes: int) -> int:
    """The size of the block that holds ``nbytes``; never 0, so that offsets tell blocks apart."""
    if nbytes < 0:
        raise ContractError(f"alloc(): a size cannot be negative, got {nbytes}.")
    return align(max(nbytes, 1), ALIGNMENT)
