"""The sizes a Buffer is built for, checked once, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from deepep_cupy.protocol.control_block import ALIGNMENT, align
from deepep_cupy.protocol.nodes import NodeMap

__all__ = [
    "MAX_BLOCKS_WANTED",
    "MAX_EXPERTS",
    "MAX_LOW_LATENCY_EXPERTS",
    "MAX_LOW_LATENCY_IN_FLIGHT",
    "MAX_LOW_LATENCY_TOKENS",
    "MAX_ROWS",
    "MAX_ROW_BYTES",
    "MAX_TIMEOUT_S",
    "MAX_TOPK",
    "SCALE_GROUP",
    "BufferSpec",
    "num_scales",
    "pool_bytes_hint",
    "worst_expanded_rows",
]

MAX_TOPK = 32
"""Choices per token: one lane of a warp each."""
MAX_EXPERTS = 1 << 20
"""Experts in all."""
MAX_LOW_LATENCY_EXPERTS = 8192
"""Experts in all where low-latency calls are possible."""
MAX_LOW_LATENCY_TOKENS = 4096
"""``low_latency_tokens``."""
MAX_LOW_LATENCY_IN_FLIGHT = 4
"""``low_latency_in_flight``."""
MAX_BLOCKS_WANTED = 1 << 16
"""``num_sms``; a kernel takes fewer where the GPU has fewer."""
MAX_ROWS = (1 << 31) - 1
"""Rows of one array: their numbers, counts and sums of counts are int32."""
MAX_ROW_BYTES = 1 << 30
"""Bytes of one row: with its scales they are a 32-bit word."""
MAX_TIMEOUT_S = 1e9
"""Kernels count nanoseconds in 64 bits from the time of day on."""
SCALE_GROUP = 128
"""Channels of a row that share a scale."""


@dataclass(frozen=True, kw_only=True)
class BufferSpec:
    """Sizes that the constructor was given; every other size is derived from them.

    Attributes:
        num_ranks: Ranks R of the communicator, 1 to ``MAX_RANKS``.
        nodes: Where they are; ``None``: all on one node.
        rank: This rank.
        num_max_tokens_per_rank: M, the most tokens one rank dispatches in one call.
        max_row_bytes: ``hidden * itemsize`` of the constructor: no row may be longer.
        num_topk: The most choices per token, 0 to ``MAX_TOPK``.
        num_experts: E in all (divisible by R), or ``None`` where only masks are dispatched.
        timeout_s: Seconds any wait may last.
        pool_bytes: Bytes of symmetric memory, ``None`` for the default.
        num_sms: Blocks per kernel, ``None`` for the default.
        dtype: Name of the constructor's dtype, for messages.
        itemsize: Bytes of its items. Where that is one byte, scales, 1/32 more, come on top of
            the longest row.
        low_latency_tokens: The most tokens one rank dispatches in a low-latency call, at most
            ``num_max_tokens_per_rank``; 0: there are no such calls.
        low_latency_in_flight: How many low-latency calls may be sent and not yet received.
    """

    num_ranks: int
    rank: int
    num_max_tokens_per_rank: int
    max_row_bytes: int
    num_topk: int
    num_experts: int | None
    timeout_s: float
    pool_bytes: int | None = None
    num_sms: int | None = None
    dtype: str = "bfloat16"
    itemsize: int = 2
    nodes: NodeMap | None = None
    low_latency_tokens: int = 0
    low_latency_in_flight: int = 1

    @property
    def num_nodes(self) -> int:
        """N, nodes that the ranks are on."""
        return 1 if self.nodes is None else self.nodes.num_nodes

    @property
    def num_local_experts(self) -> int:
        """El = E / R, 0 without experts."""
        return 0 if self.num_experts is None else self.num_experts // self.num_ranks

    @property
    def max_recv_tokens(self) -> int:
        """R * M: the most rows one rank can receive in one call."""
        return self.num_ranks * self.num_max_tokens_per_rank

    @property
    def max_low_latency_recv_tokens(self) -> int:
        """R * M': the most rows one rank can receive in one low-latency call."""
        return self.num_ranks * self.low_latency_tokens

    @property
    def max_copies(self) -> int:
        """The most rows of the expanded layout that real tokens of one call can fill."""
        return self.max_recv_tokens * max(1, min(self.num_topk, self.num_local_experts))

    @property
    def max_alignment(self) -> int:
        """The largest ``expert_alignment``: each local expert's rows are rounded up to it, and the
        sum must stay an int32."""
        return (MAX_ROWS - self.max_copies) // max(1, self.num_local_experts) + 1


_LIVE_DISPATCHES = 3
"""Worst-case receives that fit at once: two alive and one under way."""
_LIVE_EXPANDED = 2
"""Worst-case receives of the expanded layout that fit at once: one alive, one under way."""
_LIVE_LOW_LATENCY = 2
"""Results of DeepEP V1's layout that fit at once: one alive, one under way."""
_LIVE_HANDLES = 64
"""Handles that outlive their receives, one a layer."""
_SLACK = 32 << 20


def pool_bytes_hint(spec: BufferSpec, expand_to: int | None = None) -> int:
    """Bytes of symmetric memory a Buffer takes per rank when the caller names none.

    Three worst-case receives (``R * M`` rows, with their scales, indices, weights and handle), one
    block of as many rows for expert outputs, 64 more handles (where rows are short: as many as
    take the room of a receive), and some slack. For low-latency calls two results of DeepEP V1's
    layout, ``R * M'`` rows for every local expert.

    Args:
        spec: Sizes of the Buffer.
        expand_to: Make room for the expanded layout with this ``expert_alignment`` as well: two
            of its worst-case receives, and one block of as many rows for expert outputs.
    """
    tokens, row = spec.max_recv_tokens, spec.max_row_bytes
    scales = 4 * num_scales(row, packed=False) if spec.itemsize == 1 else 0
    handle = _blocks(tokens, 4, 4) + _blocks(spec.num_ranks + spec.num_local_experts, 8)
    receive = _blocks(tokens, row, scales, 8 * spec.num_topk, 4 * spec.num_topk) + handle
    total = _LIVE_DISPATCHES * receive + _blocks(tokens, row)
    total += min(_LIVE_HANDLES * handle, receive)
    if expand_to is not None:
        rows = worst_expanded_rows(tokens, spec.num_topk, spec.num_local_experts, expand_to)
        expanded = _blocks(rows, row, scales, 4) + _blocks(tokens, 4 * spec.num_topk)
        total += _LIVE_EXPANDED * expanded + _blocks(rows, row)
    if spec.low_latency_tokens:
        rows = spec.num_local_experts * spec.max_low_latency_recv_tokens
        handle = _blocks(tokens, 4 * spec.num_topk) + _blocks(rows, 4)
        total += _LIVE_LOW_LATENCY * (_blocks(rows, row, scales, 4) + handle)
    return total + _SLACK


def _blocks(rows: int, *parts: int) -> int:
    """Bytes of one array of ``rows`` items for each part, each in a block of its own."""
    return sum(align(rows * part, ALIGNMENT) for part in parts)


def num_scales(hidden: int, *, packed: bool) -> int:
    """S, scales of a row of ``hidden`` one-byte elements: one per ``SCALE_GROUP`` channels.

    Args:
        hidden: H; the last group may be shorter.
        packed: Four one-byte exponents (UE8M0) to a scale word.
    """
    groups = -(-hidden // SCALE_GROUP)
    return -(-groups // 4) if packed else groups


def worst_expanded_rows(
    num_tokens: int, num_topk: int, num_local_experts: int, alignment: int
) -> int:
    """Rows that the expanded layout of so many received tokens can take at most."""
    choices = num_tokens * min(num_topk, num_local_experts)
    return choices + num_local_experts * (alignment - 1)
