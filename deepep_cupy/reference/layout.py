"""Where every row goes: the handle, and the three layouts of what a rank receives.

The letters R, T, H, K, E, El and N are those of the package's docstring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "DispatchLayout",
    "Handle",
    "count_experts",
    "defined_rows",
    "expand",
    "get_dispatch_layout",
    "local_choices",
    "move",
    "pad",
    "padding_rows",
    "place",
    "place_weights",
    "route",
    "send_rows",
]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Handle:
    """Who sent what where in one dispatch: what combine and a cached dispatch need. Frozen.

    It knows nothing of the row: one handle serves rows of any H and dtype, any number of times,
    in any order with other handles. It is not DeepEP V1's tuple of layout arrays. The library's
    handle also holds its signature (the Buffer, R, T, K, E and where the routing came from; not
    the row dtype) and the epoch of the dispatch that made it: a handle of another Buffer, or
    handles of different dispatches on different ranks, are refused on every rank.

    In a dispatch that does not wait for the counts, N below stands for ``num_worst_tokens`` in
    every shape, and the entries behind the real ones are -1.

    Attributes:
        num_tokens: T, tokens this rank sent from.
        num_recv_tokens: N, tokens this rank received, numbered by (source rank, source token).
        recv_src_idx: ``[N]`` int32, number of the row's token on its source rank.
        recv_rows_per_rank: ``[R]`` int32, tokens received from each rank; they add up to the
            real number of received tokens.
        send_row: ``[T, R]`` int32, number of token t among the received tokens of rank r (those
            that rank r got from lower ranks, plus the slot among this rank's); -1: not sent to r.
        num_recv_tokens_per_expert_list: As in ``DispatchResult``.
        num_unaligned_recv_tokens_per_expert: ``[El]`` int32, received tokens that chose each
            local expert; ``None`` without choices (DeepEP V2's name).
        psum_num_recv_tokens_per_expert: ``[El]`` int32; ``None`` without choices. Expanded: the
            first row of the expert plus its number of tokens. Else: inclusive sums of the counts
            rounded up to ``expert_alignment`` (so V2).
        expanded_row: ``[N, K]`` int32, row of ``recv_x`` that holds the copy for choice k of
            received token n; -1 where that is no expert of this rank. ``None`` unless expanded.
        num_expanded_tokens: Rows of ``recv_x`` in the expanded layout, else 0 (so V2).
        expert_alignment: Of the dispatch.
        counts_known: False where the host did not wait.
    """

    num_tokens: int
    num_recv_tokens: int
    recv_src_idx: Array
    recv_rows_per_rank: Array
    send_row: Array
    num_recv_tokens_per_expert_list: list[int]
    num_unaligned_recv_tokens_per_expert: Array | None = None
    psum_num_recv_tokens_per_expert: Array | None = None
    expanded_row: Array | None = None
    num_expanded_tokens: int = 0
    expert_alignment: int = 1
    counts_known: bool = True

    @property
    def num_rows(self) -> int:
        """Rows of ``recv_x``, and of the ``y`` that combine takes."""
        return self.num_recv_tokens if self.expanded_row is None else self.num_expanded_tokens

    @property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Array:
        """``[R]`` int32, inclusive sums of ``recv_rows_per_rank`` (V2's name)."""
        sums: Array = np.cumsum(self.recv_rows_per_rank).astype(np.int32)
        return sums

    @property
    def num_real_tokens(self) -> int:
        """Tokens really received."""
        return int(self.recv_rows_per_rank.sum())


@dataclass(frozen=True, eq=False)
class DispatchLayout:
    """Counts of one rank's own tokens.

    Attributes:
        num_tokens_per_rank: ``[R]`` int32, tokens that go to each rank; a token counts once a
            rank, however many of its experts live there.
        num_tokens_per_expert: ``[E]`` int32, entries of ``topk_idx`` that name each expert.
        is_token_in_rank: ``[T, R]`` bool.
    """

    num_tokens_per_rank: Array
    num_tokens_per_expert: Array
    is_token_in_rank: Array


def get_dispatch_layout(topk_idx: Array, num_experts: int, num_ranks: int) -> DispatchLayout:
    """Count where one rank's tokens go. Local: needs no other rank.

    Args:
        topk_idx: ``[T, K]`` int32 or int64, global expert numbers. Entries outside 0..E-1 are
            ignored, and an expert named twice by a token is counted twice: this function counts,
            it does not check.
        num_experts: E, a multiple of R.
        num_ranks: R.

    Raises:
        ValueError: E is not a multiple of R, or ``topk_idx`` is not a table of integers.
    """
    if num_experts < 1 or num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a positive multiple of the {num_ranks} ranks, got {num_experts}"
        )
    if topk_idx.ndim != 2 or topk_idx.dtype not in (np.int32, np.int64):
        raise ValueError(
            f"topk_idx must be [T, K] of int32 or int64, got {topk_idx.dtype} {topk_idx.shape}"
        )
    token, column = np.nonzero((topk_idx >= 0) & (topk_idx < num_experts))
    expert = topk_idx[token, column]
    in_rank = np.zeros((topk_idx.shape[0], num_ranks), np.bool_)
    in_rank[token, expert // (num_experts // num_ranks)] = True
    return DispatchLayout(
        num_tokens_per_rank=in_rank.sum(axis=0, dtype=np.int32),
        num_tokens_per_expert=np.bincount(expert, minlength=num_experts).astype(np.int32),
        is_token_in_rank=in_rank,
    )


def local_choices(topk_idx: Array, rank: int, num_local: int) -> Array:
    """``topk_idx`` as rank ``rank`` receives it: its experts numbered from 0, -1 elsewhere.

    Args:
        topk_idx: ``[tokens, K]`` global expert numbers.
        rank: The receiver.
        num_local: El.
    """
    first = rank * num_local
    here = (topk_idx >= first) & (topk_idx < first + num_local)
    return np.where(here, topk_idx - first, -1).astype(topk_idx.dtype)


def send_rows(mask: Array, counts: Array, rank: int) -> Array:
    """``[T, R]`` int32: number of each of a rank's tokens among a receiver's; -1: not sent.

    Args:
        mask: ``[T, R]`` bool, which token goes where.
        counts: ``[R, R]``, tokens from each rank to each rank.
        rank: The sender.
    """
    first_row = counts[:rank].sum(axis=0, dtype=np.int64)
    slot = np.cumsum(mask, axis=0, dtype=np.int32) - 1
    return np.where(mask, first_row + slot, -1).astype(np.int32)


def route(masks: Sequence[Array]) -> list[Handle]:
    """Number the received tokens: on each receiver by (source rank, token)."""
    num_ranks = len(masks)
    counts = np.array([mask.sum(axis=0) for mask in masks]).reshape(num_ranks, num_ranks)
    return [
        Handle(
            num_tokens=len(mask),
            num_recv_tokens=int(counts[:, rank].sum()),
            recv_src_idx=np.concatenate(
                [np.flatnonzero(source[:, rank]) for source in masks]
            ).astype(np.int32),
            recv_rows_per_rank=counts[:, rank].astype(np.int32),
            send_row=send_rows(mask, counts, rank),
            num_recv_tokens_per_expert_list=[],
        )
        for rank, mask in enumerate(masks)
    ]


def count_experts(handle: Handle, local: Array, num_local: int, alignment: int) -> Handle:
    """Add the counts per local expert.

    Args:
        handle: Of ``route``.
        local: ``[N, K]`` local expert numbers, -1 elsewhere.
        num_local: El.
        alignment: Counts are rounded up to a multiple of this.
    """
    counts = np.bincount(local[local >= 0], minlength=num_local)
    rounded = -(-counts // alignment) * alignment
    return replace(
        handle,
        num_recv_tokens_per_expert_list=[int(count) for count in rounded],
        num_unaligned_recv_tokens_per_expert=counts.astype(np.int32),
        psum_num_recv_tokens_per_expert=np.cumsum(rounded).astype(np.int32),
        expert_alignment=alignment,
    )


def expand(handle: Handle, local: Array, expert_rows: int = 0) -> Handle:
    """Turn to the expanded layout: a row per (received token, local expert it chose).

    Rows are sorted by local expert, then by received token, that is by source rank and source
    token; the rows of expert e begin at the sum of the rounded counts of the experts before it,
    or, with ``expert_rows``, at e times that number.

    Args:
        handle: Of ``count_experts``.
        local: ``[N, K]`` local expert numbers, -1 elsewhere.
        expert_rows: Rows for each expert, at least as many as any can get; 0: packed.
    """
    counts = handle.num_unaligned_recv_tokens_per_expert
    inclusive = handle.psum_num_recv_tokens_per_expert
    if counts is None or inclusive is None:
        raise ValueError("expand(): there are no choices to expand by")
    first_row = np.concatenate([[0], inclusive[:-1]])
    if expert_rows:
        first_row = np.arange(len(counts), dtype=np.int64) * expert_rows
    table = np.full(local.shape, -1, np.int32)
    token, column = np.nonzero(local >= 0)
    by_expert = np.argsort(local[token, column], kind="stable")  # and by token: they are ascending
    gaps = np.repeat(first_row - (np.cumsum(counts) - counts), counts)
    table[token[by_expert], column[by_expert]] = np.arange(len(token)) + gaps
    return replace(
        handle,
        psum_num_recv_tokens_per_expert=(first_row + counts).astype(np.int32),
        expanded_row=table,
        num_expanded_tokens=len(counts) * expert_rows or int(inclusive[-1]),
    )


def pad(handle: Handle, num_worst_tokens: int, num_topk: int, num_local: int) -> Handle:
    """Give a handle the shapes of the worst case, for a host that does not wait for counts."""
    tail = num_worst_tokens - handle.num_recv_tokens
    table, rows = handle.expanded_row, 0
    if table is not None:
        table = np.pad(table, ((0, tail), (0, 0)), constant_values=-1)
        rows = num_worst_tokens * min(num_topk, num_local)
        rows += num_local * (handle.expert_alignment - 1)
    return replace(
        handle,
        num_recv_tokens=num_worst_tokens,
        recv_src_idx=np.pad(handle.recv_src_idx, (0, tail), constant_values=-1),
        num_recv_tokens_per_expert_list=[],
        expanded_row=table,
        num_expanded_tokens=rows,
        counts_known=False,
    )


def move(arrays: Sequence[Array], handles: Sequence[Handle]) -> list[Array]:
    """Carry one row per token to its receivers by the handles, as bytes; real rows alone."""
    dtype, width = arrays[0].dtype, arrays[0].shape[1]
    sent = [np.ascontiguousarray(array).view(np.uint8) for array in arrays]
    received = []
    for handle in handles:
        out = np.empty((handle.num_real_tokens, width * dtype.itemsize), np.uint8)
        ends = np.cumsum(handle.recv_rows_per_rank)
        for source, end in enumerate(ends):
            begin = end - handle.recv_rows_per_rank[source]
            out[begin:end] = sent[source][handle.recv_src_idx[begin:end]]
        received.append(out.view(dtype))
    return received


def place(rows: Array, expanded_row: Array, out: Array) -> None:
    """Copy the row of each received token to its places in the expanded layout, as bytes.

    Args:
        rows: ``[tokens, H]``, C-contiguous, of all received tokens or of the real ones alone.
        expanded_row: Of the handle.
        out: ``[num_rows, H]``, C-contiguous; rows that hold no copy are left as they are.
    """
    if not rows.size:
        return
    source = np.full(len(out), -1, np.intp)
    token, column = np.nonzero(expanded_row >= 0)
    source[expanded_row[token, column]] = token
    item = np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))
    sent, placed = rows.view(item)[:, 0], out.view(item)[:, 0]
    # Each run of rows without a gap is gathered straight into its place, with no array between.
    edges = np.flatnonzero(np.diff(source >= 0, prepend=False, append=False))
    for begin, end in edges.reshape(-1, 2).tolist():
        np.take(sent, source[begin:end], out=placed[begin:end], mode="clip")


def place_weights(weights: Array, expanded_row: Array, out: Array) -> None:
    """Copy the weight of each choice to its place in the expanded layout.

    Args:
        weights: ``[tokens, K]``, of all received tokens or of the real ones alone.
        expanded_row: Of the handle.
        out: ``[num_rows]``; elements of rows that hold no copy are left as they are.
    """
    token, column = np.nonzero(expanded_row >= 0)
    out[expanded_row[token, column]] = weights[token, column]


def padding_rows(ends: Array, counts: Array, alignment: int) -> Array:
    """Numbers of the rows that only fill up an expert's rows to a multiple of ``alignment``.

    Args:
        ends: ``[El]``, where the real rows of each expert end.
        counts: ``[El]``, how many they are.
        alignment: Of the dispatch.
    """
    gaps = [
        np.arange(end, end + -count % alignment)
        for end, count in zip(ends.tolist(), counts.tolist(), strict=True)
    ]
    return np.concatenate(gaps).astype(np.intp)


def defined_rows(handle: Handle, *, zero_padding: bool) -> Array:
    """``[num_rows]`` bool: rows of ``recv_x`` whose content is specified."""
    out = np.zeros(handle.num_rows, np.bool_)
    if handle.expanded_row is None:
        out[: handle.num_real_tokens] = True
        return out
    out[handle.expanded_row[handle.expanded_row >= 0]] = True
    ends = handle.psum_num_recv_tokens_per_expert
    counts = handle.num_unaligned_recv_tokens_per_expert
    if zero_padding and ends is not None and counts is not None:
        out[padding_rows(ends, counts, handle.expert_alignment)] = True
    return out
