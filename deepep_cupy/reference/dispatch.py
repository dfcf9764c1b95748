"""Dispatch: every token to every rank that owns one of its experts, once.

The letters R, T, H, K, E, El and N are those of the package's docstring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["DispatchLayout", "DispatchResult", "Handle", "dispatch", "get_dispatch_layout"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Handle:
    """Who sent what where in one dispatch: what combine and a cached dispatch need. Frozen.

    It knows nothing of the row: one handle serves rows of any H and dtype, any number of times,
    in any order with other handles. It is not DeepEP V1's tuple of layout arrays. The library's
    handle also holds its signature (the Buffer, R, T, K, E and where the routing came from; not
    the row dtype) and the epoch of the dispatch that made it: a handle of another Buffer, or
    handles of different dispatches on different ranks, are refused on every rank.

    Attributes:
        num_tokens: T, tokens this rank sent from.
        num_recv_tokens: N, rows this rank received.
        recv_src_idx: ``[N]`` int32, number of the row's token on its source rank.
        recv_rows_per_rank: ``[R]`` int32, rows received from each rank; they add up to N.
        send_row: ``[T, R]`` int32, absolute row of token t in rank r's ``recv_x`` (the rows that
            rank r got from lower ranks, plus the slot among this rank's); -1: not sent to r.
        num_recv_tokens_per_expert_list: As in ``DispatchResult``.
    """

    num_tokens: int
    num_recv_tokens: int
    recv_src_idx: Array
    recv_rows_per_rank: Array
    send_row: Array
    num_recv_tokens_per_expert_list: list[int]


@dataclass(frozen=True, eq=False)
class DispatchResult:
    """What one rank receives.

    Attributes:
        recv_x: ``[N, H]``, dtype of ``x``. Rows in the order (source rank, token number on the
            source rank), always. Bytes are moved and never touched: exact for any dtype, NaN
            payloads, padding and opaque records included.
        recv_topk_idx: ``[N, K]``, dtype of ``topk_idx``; local expert numbers 0..El-1 for the
            experts of this rank, in their own columns; -1 in all other columns. ``None`` when
            the routing came from ``is_token_in_rank`` or a handle.
        recv_topk_weights: ``[N, K]`` float32; the weight where ``recv_topk_idx`` holds an
            expert, +0 where it is -1. In a cached call: the weights as passed, all K columns,
            unmasked. ``None`` when no weights were passed.
        num_recv_tokens_per_expert_list: El ints: rows with that local expert, rounded up to a
            multiple of ``expert_alignment`` (0 stays 0). Only these counts are rounded; rows are
            not padded. ``[]`` without ``topk_idx`` (and, in the library, when the host does not
            wait for the counts). In a cached call: the given handle's list.
        handle: The routing. In a cached call: the given handle itself.
    """

    recv_x: Array
    recv_topk_idx: Array | None
    recv_topk_weights: Array | None
    num_recv_tokens_per_expert_list: list[int]
    handle: Handle

    @property
    def recv_src_idx(self) -> Array:
        """``handle.recv_src_idx``."""
        return self.handle.recv_src_idx

    @property
    def recv_rows_per_rank(self) -> Array:
        """``handle.recv_rows_per_rank``."""
        return self.handle.recv_rows_per_rank

    @property
    def send_row(self) -> Array:
        """``handle.send_row``."""
        return self.handle.send_row


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
    _check_experts(num_experts, num_ranks)
    _check_topk_shape(topk_idx, topk_idx.shape[0], topk_idx.shape, topk_idx.dtype, rank=0)
    token, column = np.nonzero((topk_idx >= 0) & (topk_idx < num_experts))
    expert = topk_idx[token, column]
    in_rank = np.zeros((topk_idx.shape[0], num_ranks), np.bool_)
    in_rank[token, expert // (num_experts // num_ranks)] = True
    return DispatchLayout(
        num_tokens_per_rank=in_rank.sum(axis=0, dtype=np.int32),
        num_tokens_per_expert=np.bincount(expert, minlength=num_experts).astype(np.int32),
        is_token_in_rank=in_rank,
    )


def dispatch(
    xs: Sequence[Array],
    *,
    topk_idx: Sequence[Array] | None = None,
    topk_weights: Sequence[Array] | None = None,
    is_token_in_rank: Sequence[Array] | None = None,
    handles: Sequence[Handle] | None = None,
    num_experts: int | None = None,
    expert_alignment: int = 1,
) -> list[DispatchResult]:
    """Send each token's row to every rank it is routed to, once a rank.

    The routing comes from one of three places, the same one on all ranks:

    * ``topk_idx``: token t goes to rank r if a column names an expert of r. -1 names nothing; a
      token of which all columns are -1 goes nowhere. Several experts on one rank make one row.
    * ``is_token_in_rank`` without ``topk_idx``: token t goes to rank r where it is true. There
      are no choices then: indices and weights of the result are ``None``, the list is ``[]``,
      and ``topk_weights`` is an error. (Beside ``topk_idx`` the mask is shape-checked and
      otherwise ignored: ``topk_idx`` alone decides.) A Buffer of ``num_topk=0`` knows only this.
    * ``handles`` (a cached call): every row goes where it went in the dispatch that made the
      handle, so that row n of the new ``recv_x`` is the same token as row n of the old one.
      ``recv_topk_idx`` is ``None``; weights travel only if passed, and then as passed, all K
      columns, unmasked; list and handle of the result are the given ones. ``topk_idx`` and
      ``is_token_in_rank`` beside a handle are errors.

    A rank with T = 0 takes part like any other; a rank that receives nothing gets arrays of
    0 rows and the right number of columns and dtype.

    Args:
        xs: Per rank ``[T, H]``, any dtype but Python objects; H and dtype equal on all ranks.
        topk_idx: Per rank ``[T, K]`` int32 or int64 (one of the two on all ranks), global expert
            numbers 0..E-1 or -1. Within a token no expert may stand twice.
        topk_weights: Per rank ``[T, K]`` float32; on all ranks or on none.
        is_token_in_rank: Per rank ``[T, R]`` bool.
        handles: Per rank the handle of one earlier dispatch.
        num_experts: E, a multiple of R; needed with ``topk_idx``.
        expert_alignment: Counts per expert are rounded up to a multiple of this, 1 or more.

    Returns:
        One ``DispatchResult`` a rank.

    Raises:
        ValueError: An argument breaks one of the rules above; an expert outside -1..E-1; an
            expert twice in one token. The sentence names the rank, and the token if there is one.
    """
    _check_rows(xs)
    if expert_alignment < 1:
        raise ValueError(f"dispatch(): expert_alignment must be 1 or more, got {expert_alignment}")
    if handles is not None:
        if topk_idx is not None or is_token_in_rank is not None:
            raise ValueError("dispatch(): topk_idx and is_token_in_rank do not go with a handle")
        return _dispatch_cached(xs, handles, topk_weights)
    if topk_idx is None:
        if is_token_in_rank is None:
            raise ValueError("dispatch(): give topk_idx, is_token_in_rank or handles")
        if topk_weights is not None:
            raise ValueError("dispatch(): topk_weights need topk_idx or handles")
        masks = _check_masks(xs, is_token_in_rank)
        routes = _route(masks)
        return [
            DispatchResult(recv_x, None, None, [], handle)
            for recv_x, handle in zip(_move(xs, routes), routes, strict=True)
        ]
    if is_token_in_rank is not None:
        _check_masks(xs, is_token_in_rank)
    return _dispatch_topk(xs, topk_idx, topk_weights, num_experts, expert_alignment)


def _dispatch_topk(
    xs: Sequence[Array],
    topk_idx: Sequence[Array],
    topk_weights: Sequence[Array] | None,
    num_experts: int | None,
    expert_alignment: int,
) -> list[DispatchResult]:
    num_ranks = len(xs)
    if num_experts is None:
        raise ValueError("dispatch(): topk_idx needs num_experts")
    _check_experts(num_experts, num_ranks)
    _check_topk(xs, topk_idx, num_experts)
    num_local = num_experts // num_ranks
    masks = [get_dispatch_layout(idx, num_experts, num_ranks).is_token_in_rank for idx in topk_idx]
    routes = _route(masks)
    recv_x = _move(xs, routes)
    recv_idx = _move(topk_idx, routes)
    recv_weights: Sequence[Array | None] = [None] * num_ranks
    if topk_weights is not None:
        _check_weights("dispatch", topk_weights, [len(x) for x in xs], topk_idx[0].shape[1])
        recv_weights = _move(topk_weights, routes)
    results = []
    for rank, handle in enumerate(routes):
        local = recv_idx[rank] - num_local * rank
        here = (recv_idx[rank] >= 0) & (local >= 0) & (local < num_local)
        counts = np.bincount(local[here], minlength=num_local)
        rounded = [-(-int(count) // expert_alignment) * expert_alignment for count in counts]
        weights = recv_weights[rank]
        results.append(
            DispatchResult(
                recv_x=recv_x[rank],
                recv_topk_idx=np.where(here, local, -1).astype(topk_idx[0].dtype),
                recv_topk_weights=(
                    None if weights is None else np.where(here, weights, np.float32(0))
                ),
                num_recv_tokens_per_expert_list=rounded,
                handle=replace(handle, num_recv_tokens_per_expert_list=rounded),
            )
        )
    return results


def _dispatch_cached(
    xs: Sequence[Array], handles: Sequence[Handle], topk_weights: Sequence[Array] | None
) -> list[DispatchResult]:
    if len(handles) != len(xs):
        raise ValueError(f"dispatch(): wanted {len(xs)} handles, one a rank, got {len(handles)}")
    for rank, (x, handle) in enumerate(zip(xs, handles, strict=True)):
        if len(x) != handle.num_tokens:
            raise ValueError(
                f"dispatch(): x has {len(x)} tokens, its handle was made for "
                f"{handle.num_tokens}, on rank {rank}"
            )
    recv_weights: Sequence[Array | None] = [None] * len(xs)
    if topk_weights is not None:
        columns = topk_weights[0].shape[-1]
        _check_weights("dispatch", topk_weights, [len(x) for x in xs], columns)
        recv_weights = _move(topk_weights, handles)
    return [
        DispatchResult(
            recv_x=recv_x,
            recv_topk_idx=None,
            recv_topk_weights=weights,
            num_recv_tokens_per_expert_list=handle.num_recv_tokens_per_expert_list,
            handle=handle,
        )
        for recv_x, weights, handle in zip(_move(xs, handles), recv_weights, handles, strict=True)
    ]


def _route(masks: Sequence[Array]) -> list[Handle]:
    """Number the rows: on each receiver by (source rank, token)."""
    num_ranks = len(masks)
    rows = np.array([mask.sum(axis=0) for mask in masks]).reshape(num_ranks, num_ranks)
    first_row = np.cumsum(rows, axis=0) - rows  # [source, destination]
    handles = []
    for rank, mask in enumerate(masks):
        slot = np.cumsum(mask, axis=0) - 1
        handles.append(
            Handle(
                num_tokens=len(mask),
                num_recv_tokens=int(rows[:, rank].sum()),
                recv_src_idx=np.concatenate(
                    [np.flatnonzero(source[:, rank]) for source in masks]
                ).astype(np.int32),
                recv_rows_per_rank=rows[:, rank].astype(np.int32),
                send_row=np.where(mask, first_row[rank] + slot, -1).astype(np.int32),
                num_recv_tokens_per_expert_list=[],
            )
        )
    return handles


def _move(arrays: Sequence[Array], handles: Sequence[Handle]) -> list[Array]:
    """Carry one row per token to wherever the handles say, as bytes."""
    dtype, width = arrays[0].dtype, arrays[0].shape[1]
    sent = [np.ascontiguousarray(array).view(np.uint8) for array in arrays]
    received = []
    for handle in handles:
        out = np.empty((handle.num_recv_tokens, width * dtype.itemsize), np.uint8)
        ends = np.cumsum(handle.recv_rows_per_rank)
        for source, end in enumerate(ends):
            begin = end - handle.recv_rows_per_rank[source]
            out[begin:end] = sent[source][handle.recv_src_idx[begin:end]]
        received.append(out.view(dtype))
    return received


def _check_rows(xs: Sequence[Array]) -> None:
    if not xs:
        raise ValueError("dispatch(): wanted one x a rank, got none")
    for rank, x in enumerate(xs):
        if x.ndim != 2 or x.dtype.hasobject or x.dtype.itemsize == 0:
            raise ValueError(
                f"dispatch(): x must be [T, H] of plain bytes, got {x.dtype} {x.shape} "
                f"on rank {rank}"
            )
        if x.dtype != xs[0].dtype or x.shape[1] != xs[0].shape[1]:
            raise ValueError(
                f"dispatch(): rows of x are {x.dtype}[{x.shape[1]}] on rank {rank}, "
                f"{xs[0].dtype}[{xs[0].shape[1]}] on rank 0"
            )


def _check_experts(num_experts: int, num_ranks: int) -> None:
    if num_experts < 1 or num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a positive multiple of the {num_ranks} ranks, got {num_experts}"
        )


def _check_masks(xs: Sequence[Array], masks: Sequence[Array]) -> Sequence[Array]:
    if len(masks) != len(xs):
        raise ValueError(f"dispatch(): wanted {len(xs)} masks, one a rank, got {len(masks)}")
    for rank, (x, mask) in enumerate(zip(xs, masks, strict=True)):
        if mask.shape != (len(x), len(xs)) or mask.dtype != np.bool_:
            raise ValueError(
                f"dispatch(): is_token_in_rank must be bool {(len(x), len(xs))}, "
                f"got {mask.dtype} {mask.shape} on rank {rank}"
            )
    return masks


def _check_topk(xs: Sequence[Array], topk_idx: Sequence[Array], num_experts: int) -> None:
    if len(topk_idx) != len(xs):
        raise ValueError(f"dispatch(): wanted {len(xs)} topk_idx, one a rank, got {len(topk_idx)}")
    for rank, (x, idx) in enumerate(zip(xs, topk_idx, strict=True)):
        _check_topk_shape(idx, len(x), topk_idx[0].shape, topk_idx[0].dtype, rank)
        bad = np.flatnonzero(((idx < -1) | (idx >= num_experts)).any(axis=1))
        if bad.size:
            raise ValueError(
                f"dispatch(): topk_idx of token {bad[0]} on rank {rank} holds an expert outside "
                f"-1..{num_experts - 1}"
            )
        ordered = np.sort(idx, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        bad = np.flatnonzero(twice.any(axis=1))
        if bad.size:
            raise ValueError(
                f"dispatch(): topk_idx of token {bad[0]} on rank {rank} names an expert twice"
            )


def _check_topk_shape(
    idx: Array, num_tokens: int, shape: tuple[int, ...], dtype: np.dtype[Any], rank: int
) -> None:
    if idx.dtype not in (np.int32, np.int64) or idx.dtype != dtype:
        raise ValueError(
            "topk_idx must be int32 or int64, the same on all ranks, "
            f"got {idx.dtype} on rank {rank}"
        )
    if idx.ndim != 2 or idx.shape != (num_tokens, *shape[1:]):
        raise ValueError(
            f"topk_idx must be [T, K] = {(num_tokens, *shape[1:])}, got {idx.shape} on rank {rank}"
        )


def _check_weights(
    operation: str, weights: Sequence[Array], num_rows: Sequence[int], num_topk: int
) -> None:
    if len(weights) != len(num_rows):
        raise ValueError(
            f"{operation}(): wanted {len(num_rows)} topk_weights, one a rank, got {len(weights)}"
        )
    for rank, (weight, rows) in enumerate(zip(weights, num_rows, strict=True)):
        if weight.shape != (rows, num_topk) or weight.dtype != np.float32:
            raise ValueError(
                f"{operation}(): topk_weights must be float32 {(rows, num_topk)}, "
                f"got {weight.dtype} {weight.shape} on rank {rank}"
            )
