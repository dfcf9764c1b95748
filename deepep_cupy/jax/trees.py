"""What calls inside a compiled program return: pytrees, which JAX takes anywhere an array goes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

__all__ = ["Combined", "Handle", "Received"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["words", "recv_src_idx", "expanded_row", "topk_idx"],
    meta_fields=[
        "buffer",
        "num_tokens",
        "num_ranks",
        "num_local_experts",
        "num_topk",
        "capacity",
        "expert_alignment",
        "num_rows",
    ],
)
@dataclass(frozen=True)
class Handle:
    """Who sent what where in one dispatch; ``DispatchHandle`` inside a compiled program.

    All counts are arrays: no host knows them. W is ``capacity``, El experts are local. Entries
    behind the real tokens are -1.

    Attributes:
        words: int32: send_row, counts and sums behind each other; the properties cut it up.
        recv_src_idx: ``[W]`` int32: number of each received token on its source rank.
        expanded_row: ``[W, K]`` int32 in the expanded layout: row of the copy for choice k of
            received token n; -1 where that is no expert of this rank. Else None.
        topk_idx: ``[T, K]``, the choices that were dispatched, in the expanded layout. Else None.
        buffer: Number of the Buffer, in the order of ``attach``.
        num_tokens: T, tokens this rank dispatched, and rows ``combine`` returns.
        num_ranks: R.
        num_local_experts: El.
        num_topk: K.
        capacity: W, tokens there is room for.
        expert_alignment: Of the dispatch.
        num_rows: Rows of ``recv.x``, and rows ``combine`` takes.
    """

    words: Any
    recv_src_idx: Any
    expanded_row: Any
    topk_idx: Any
    buffer: int
    num_tokens: int
    num_ranks: int
    num_local_experts: int
    num_topk: int
    capacity: int
    expert_alignment: int
    num_rows: int

    @property
    def expanded(self) -> bool:
        """Whether ``recv.x`` has a row per (token, local expert)."""
        return self.expanded_row is not None

    def _part(self, begin: int, length: int) -> Any:
        return self.words[self.num_tokens * self.num_ranks + begin :][:length]

    @property
    def send_row(self) -> Any:
        """``[T, R]`` int32: number of token t among rank r's received tokens; -1: not sent."""
        shape = self.num_tokens, self.num_ranks
        return self.words[: self.num_tokens * self.num_ranks].reshape(shape)

    @property
    def recv_rows_per_rank(self) -> Any:
        """``[R]`` int32: tokens received from each rank."""
        return self._part(0, self.num_ranks)

    @property
    def num_recv_tokens(self) -> Any:
        """Int32 scalar: how many of the W tokens are real."""
        return self._part(2 * self.num_ranks - 1, 1)[0]

    @property
    def num_recv_tokens_per_expert(self) -> Any:
        """``[El]`` int32: received tokens that chose each local expert."""
        return self._part(2 * self.num_ranks, self.num_local_experts)

    @property
    def psum_num_recv_tokens_per_expert(self) -> Any:
        """``[El]`` int32. Expanded: where each local expert's rows end. Else: inclusive sums of
        the counts, each rounded up to ``expert_alignment``."""
        begin = 2 * self.num_ranks + self.num_local_experts
        return self._part(begin, self.num_local_experts)

    @property
    def group_sizes(self) -> Any:
        """``[El]`` int32: rows of each local expert in the expanded layout, those that only fill
        up to ``expert_alignment`` included: the groups of ``jax.lax.ragged_dot``."""
        unit = self.expert_alignment
        return -(-self.num_recv_tokens_per_expert // unit) * unit


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "topk_idx", "topk_weights", "handle", "token"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Received:
    """What ``dispatch`` returns.

    Attributes:
        x: ``[W, H]`` rows in the order (source rank, source token), the tail zero. With
            ``quantize`` a pair of codes and scales ``[W, S]``. Expanded: ``[rows, H]`` by (local
            expert, source rank, source token), all other rows zero.
        topk_idx: ``[W, K]``, this rank's experts numbered from 0, -1 elsewhere and in the tail.
            None with ``handle`` and in the expanded layout.
        topk_weights: ``[W, K]`` float32, 0 where the index is -1; expanded ``[rows]``. None where
            none were given.
        handle: For ``combine`` and later dispatches.
        token: Order; see ``after``.
    """

    x: Any
    topk_idx: Any
    topk_weights: Any
    handle: Handle
    token: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["x", "topk_weights", "token"], meta_fields=[]
)
@dataclass(frozen=True)
class Combined:
    """What ``combine`` returns. ``x, topk_weights = combined`` unpacks it.

    Attributes:
        x: ``[T, H]``, 0 for a token that went nowhere.
        topk_weights: ``[T, K]`` float32, or None where none were given.
        token: Order; see ``after``.
    """

    x: Any
    topk_weights: Any
    token: Any

    def __iter__(self) -> Iterator[Any]:
        return iter((self.x, self.topk_weights))
