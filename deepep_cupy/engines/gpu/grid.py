"""How many blocks an operation gets, and how wide its accesses may be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from deepep_cupy.engines.gpu.tuning import Tuning
from deepep_cupy.protocol.sizes import SCALE_GROUP

__all__ = ["GridPlan", "access_bytes", "cast_chunks", "local_blocks", "num_slices"]

DEFAULT_SHARE = 0.16
"""Part of a GPU's SMs an operation takes by default."""
COUNTED_BY_ONE_BLOCK = 8
"""So few tokens are counted sooner by one block than by blocks that wait for each other's counts:
8 tokens on one H200 took 11.0 µs with one block and 13.6 with eight."""
CAST_BLOCKS = 11
"""Fewer blocks of a dispatch of many tokens, and rows are cast by a kernel of its own on all SMs
before: 4096 tokens of 7168 bfloat16 on two H200 took 214 µs with the cast on the way and 192 µs
with it before at 8 SMs, 120 and 133 µs at 16. With 21 and 24 SMs the cast belongs on the way,
whatever the number of tokens."""
CAST_TOKENS_PER_BLOCK = 384
"""So few tokens for each block are cast on the way in any case. One rank alone, which sends nothing
over a link, casts more of them before: 8192 tokens took 123 µs so, and 139 on the way."""
_WARPS_PER_BLOCK = 4
"""Fewer warps with work for each block, and fewer blocks do as well."""
_BY_SHARE = Tuning()
_TOKENS_PER_SLICE = 16
_MOST_SLICES = 1024
_MOST_COUNTERS = 1 << 20
"""Words of the table of slices and experts; more only where one slice alone needs them."""


@dataclass(frozen=True)
class GridPlan:
    """Blocks per operation on one GPU.

    All blocks of a kernel wait for each other, so that all must be resident at once, together
    with those of the other ranks on the same GPU: each rank may use its part of the SMs, at one
    block a SM.

    Attributes:
        num_sms: SMs of the GPU.
        ranks_on_gpu: Ranks of the Buffer that share it.
        wanted: Blocks the caller asked for, ``None`` for the default.
        tuning: What was measured on such GPUs.
    """

    num_sms: int
    ranks_on_gpu: int
    wanted: int | None
    tuning: Tuning = _BY_SHARE

    @cached_property
    def most(self) -> int:
        """The most blocks any operation of this rank launches."""
        fair = max(1, self.num_sms // self.ranks_on_gpu)
        default = self.tuning.blocks or max(1, int(self.num_sms * DEFAULT_SHARE))
        return min(fair, default if self.wanted is None else self.wanted)

    def dispatch(self, num_tokens: int, *, counts: bool = True) -> int:
        """Blocks of a dispatch of ``num_tokens``; ``counts``: it counts where they go first, as no
        cached call does."""
        if counts and num_tokens <= COUNTED_BY_ONE_BLOCK:
            return 1
        return self._blocks(num_tokens, self.tuning.dispatch_tokens)

    def casts_on_the_way(self, num_tokens: int, num_ranks: int) -> bool:
        """Whether a dispatch that casts should do it in the kernel that sends the rows."""
        blocks = self.dispatch(num_tokens)
        many = num_ranks > 1 and blocks >= CAST_BLOCKS
        return many or num_tokens <= CAST_TOKENS_PER_BLOCK * blocks

    def combine(self, num_tokens: int) -> int:
        """Blocks of a combine of ``num_tokens``."""
        return self._blocks(num_tokens, self.tuning.combine_tokens)

    def _blocks(self, num_tokens: int, tokens_a_block: int) -> int:
        return max(1, min(self.most, -(-num_tokens // tokens_a_block)))


def access_bytes(row_bytes: int, addresses: tuple[int, ...], narrow: tuple[int, ...]) -> int:
    """The widest access that all rows allow: 16 bytes, else the first of ``narrow`` that divides.

    Args:
        row_bytes: Bytes of a row; row i starts at ``address + i * row_bytes``.
        addresses: Where the arrays start.
        narrow: Fallbacks, widest first; the last one always fits.
    """
    for width in (16, *narrow[:-1]):
        if row_bytes % width == 0 and all(address % width == 0 for address in addresses):
            return width
    return narrow[-1]


def local_blocks(grids: GridPlan, warps: int) -> int:
    """Blocks for so many warps with work.

    These kernels stand before and after the exchange, not in it, and want the whole bandwidth of
    the memory: they take all SMs that belong to the rank, also with a smaller ``num_sms``.
    """
    share = max(1, grids.num_sms // grids.ranks_on_gpu)
    return max(1, min(share, -(-warps // _WARPS_PER_BLOCK)))


def cast_chunks(hidden: int, itemsize: int, access_bytes: int) -> int:
    """Chunks of a row that ``quantize`` gives a warp each."""
    groups = 8 if access_bytes == 16 and itemsize == 2 else 4
    return -(-hidden // (groups * SCALE_GROUP))


def num_slices(num_tokens: int, num_local_experts: int) -> int:
    """Parts that received tokens are cut into for the sort by expert.

    A part is walked through by one warp, a few tokens at a time; each has a counter an expert.
    """
    wanted = min(_MOST_SLICES, -(-num_tokens // _TOKENS_PER_SLICE))
    return max(1, min(wanted, _MOST_COUNTERS // max(1, num_local_experts)))
