"""The sizes a Buffer is built for, checked once, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_EXPERTS", "MAX_RANKS", "MAX_TOPK", "BufferSpec", "pool_bytes_hint"]

MAX_RANKS = 8
"""Ranks of one node."""
MAX_TOPK = 32
"""Choices per token: one lane of a warp each."""
MAX_EXPERTS = 1 << 20
"""Experts in all."""


@dataclass(frozen=True, kw_only=True)
class BufferSpec:
    """What the constructor was told; every size any plan is derived from.

    Attributes:
        num_ranks: Ranks R of the communicator, 1 to ``MAX_RANKS``.
        rank: This rank.
        num_max_tokens_per_rank: M, the most tokens one rank dispatches in one call.
        max_row_bytes: ``hidden * itemsize`` of the constructor: no row may be longer.
        num_topk: The most choices per token, 0 to ``MAX_TOPK``.
        num_experts: E in all (divisible by R), or ``None`` where only masks are dispatched.
        timeout_s: Seconds any wait may last.
        pool_bytes: Bytes of symmetric memory, ``None`` for the default.
        num_sms: Blocks per kernel, ``None`` for the default.
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

    @property
    def num_local_experts(self) -> int:
        """El = E / R, 0 without experts."""
        return 0 if self.num_experts is None else self.num_experts // self.num_ranks

    @property
    def max_recv_tokens(self) -> int:
        """R * M: the most rows one rank can receive in one call."""
        return self.num_ranks * self.num_max_tokens_per_rank


_BLOCK = 512
"""Alignment of blocks in the pool."""
_LIVE_DISPATCHES = 3
"""Worst-case receives that fit at once: two alive and one under way."""
_SLACK = 32 << 20


def pool_bytes_hint(spec: BufferSpec) -> int:
    """Bytes of symmetric memory a Buffer takes per rank when the caller names none.

    Three worst-case receives (``R * M`` rows, with their indices, weights and source tokens), one
    block of as many rows for expert outputs, and some slack.
    """
    rows = spec.max_recv_tokens
    parts = (spec.max_row_bytes, 8 * spec.num_topk, 4 * spec.num_topk, 4)
    receive = sum(-(-rows * part // _BLOCK) * _BLOCK for part in parts)
    outputs = -(-rows * spec.max_row_bytes // _BLOCK) * _BLOCK
    return _LIVE_DISPATCHES * receive + outputs + _SLACK
