"""Blocks and slices of the kernels that work on one rank's memory alone."""

from __future__ import annotations

from deepep_cupy.plan.launch import GridPlan

__all__ = ["cast_chunks", "local_blocks", "num_slices"]

_WARPS_PER_BLOCK = 4
"""Fewer warps with work for each block, and fewer blocks do as well."""
_TOKENS_PER_SLICE = 16
_MOST_SLICES = 1024
_MOST_COUNTERS = 1 << 20
"""Words of the table of slices and experts; more only where one slice alone needs them."""
_GROUP = 128


def local_blocks(grids: GridPlan, warps: int) -> int:
    """Blocks for so many warps with work.

    These kernels stand before and after the exchange, not in it, and want the whole bandwidth of
    the memory: they take all SMs that belong to the rank, whatever ``num_sms`` says.
    """
    share = max(1, grids.num_sms // grids.ranks_on_gpu)
    return max(1, min(share, -(-warps // _WARPS_PER_BLOCK)))


def cast_chunks(hidden: int, itemsize: int, access_bytes: int) -> int:
    """Chunks of a row that ``quantize`` gives a warp each."""
    groups = 8 if access_bytes == 16 and itemsize == 2 else 4
    return -(-hidden // (groups * _GROUP))


def num_slices(num_tokens: int, num_local_experts: int) -> int:
    """Parts that received tokens are cut into for the sort by expert.

    A part is walked through by one warp, a few tokens at a time; each has a counter an expert.
    """
    wanted = min(_MOST_SLICES, -(-num_tokens // _TOKENS_PER_SLICE))
    return max(1, min(wanted, _MOST_COUNTERS // max(1, num_local_experts)))
