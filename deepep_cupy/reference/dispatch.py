"""Dispatch: every token to every rank that owns one of its experts, once.

The letters R, T, H, K, E, El and N are those of the package's docstring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from deepep_cupy.reference import checks
from deepep_cupy.reference.layout import (
    Handle,
    count_experts,
    defined_rows,
    expand,
    get_dispatch_layout,
    local_choices,
    move,
    pad,
    place,
    place_weights,
    route,
)
from deepep_cupy.reference.quant import quantize as cast

__all__ = ["DispatchResult", "dispatch"]

Array: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = Array | tuple[Array, Array]


@dataclass(frozen=True, eq=False)
class DispatchResult:
    """What one rank receives.

    Attributes:
        recv_x: ``[rows, H]``, dtype of ``x``; rows = N, or those of the expanded layout. A pair
            ``(rows, scales [rows, S])`` where scales travel. Rows in the order (source rank,
            token number on the source rank), always; expanded: (local expert, source rank,
            token). Bytes are moved and never touched: exact for any dtype, NaN payloads, padding
            and opaque records included. Rows that are not ``defined`` may hold anything.
        recv_topk_idx: ``[N, K]``, dtype of ``topk_idx``; local expert numbers 0..El-1 for the
            experts of this rank, in their own columns; -1 in all other columns, and behind the
            real tokens. ``None`` when the routing came from ``is_token_in_rank`` or a handle,
            and in the expanded layout.
        recv_topk_weights: ``[N, K]`` float32; the weight where ``recv_topk_idx`` holds an
            expert, +0 where it is -1. In a cached call: the weights as passed, all K columns,
            unmasked, and +0 behind the real tokens. Expanded, cached or not: ``[rows]``, the
            weight of the choice whose copy the row is. ``None`` when no weights were passed.
        num_recv_tokens_per_expert_list: El ints: tokens with that local expert, rounded up to a
            multiple of ``expert_alignment`` (0 stays 0). Only in the expanded layout are rows
            padded accordingly. ``[]`` without ``topk_idx``, and where the host does not wait for
            the counts. In a cached call: the given handle's list.
        handle: The routing. In a cached call: the given handle itself.
        defined: ``[rows]`` bool: rows of ``recv_x`` (and of expanded weights) whose content is
            specified. The others lie behind the real ones, or fill up an expert's rows.
    """

    recv_x: Rows
    recv_topk_idx: Array | None
    recv_topk_weights: Array | None
    num_recv_tokens_per_expert_list: list[int]
    handle: Handle
    defined: Array

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


def dispatch(
    xs: Sequence[Rows],
    *,
    topk_idx: Sequence[Array] | None = None,
    topk_weights: Sequence[Array] | None = None,
    is_token_in_rank: Sequence[Array] | None = None,
    handles: Sequence[Handle] | None = None,
    num_experts: int | None = None,
    expert_alignment: int = 1,
    num_worst_tokens: Sequence[int] | None = None,
    do_expand: bool = False,
    do_zero_padding: bool = False,
    quantize: bool = False,
    round_scale: bool = False,
    use_ue8m0: bool = False,
    scales_layout: Literal["row", "column"] = "row",
    recv_stats: Sequence[Array] | None = None,
    expert_rows: int = 0,
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
      columns, unmasked; list and handle of the result are the given ones; layout and worst case
      are the handle's. ``topk_idx`` and ``is_token_in_rank`` beside a handle are errors.

    A rank with T = 0 takes part like any other; a rank that receives nothing gets arrays of
    0 rows and the right number of columns and dtype.

    The modes, which go with each other and, but for the expanded layout, with any routing:

    * **Scales.** A row may come with scales, one per 128 channels (``(x, scales)``): they travel
      with it, bit for bit, and arrive beside it. ``quantize`` casts rows on their way
      (``reference.quantize``); the result is that of passing the pair it makes.
    * **No wait** (``num_worst_tokens``): shapes are those of the worst case, so that the host
      need not know the counts. The real tokens come first; ``recv_src_idx``,
      ``recv_topk_idx`` and ``expanded_row`` are -1 behind them, weights +0, rows anything. Where
      some rank would receive more tokens than it made room for, every rank raises.
    * **Expanded** (``do_expand``, with ``topk_idx``): a row per (received token, local expert it
      chose), grouped by expert, where each expert's rows begin at a multiple of
      ``expert_alignment``: a grouped matrix product's input. On the wire a token travels once a
      rank all the same. Rows that fill up a group hold anything, or, with ``do_zero_padding``,
      zeros (rows, scales and weights). With ``num_worst_tokens`` W there are
      ``W * min(K, El) + El * (expert_alignment - 1)`` rows.

    Args:
        xs: Per rank ``[T, H]``, any dtype but Python objects; H and dtype equal on all ranks. Or
            per rank a pair of ``[T, H]`` of a one-byte dtype and scales: float32
            ``[T, ceil(H / 128)]``, or int32 or uint32 ``[T, ceil(ceil(H / 128) / 4)]``.
        topk_idx: Per rank ``[T, K]`` int32 or int64 (one of the two on all ranks), global expert
            numbers 0..E-1 or -1. Within a token no expert may stand twice.
        topk_weights: Per rank ``[T, K]`` float32; on all ranks or on none.
        is_token_in_rank: Per rank ``[T, R]`` bool.
        handles: Per rank the handle of one earlier dispatch.
        num_experts: E, a multiple of R; needed with ``topk_idx``.
        expert_alignment: Counts per expert are rounded up to a multiple of this, 1 or more. In a
            cached call that of the handle is used.
        num_worst_tokens: Per rank the most tokens it can receive. Not in a cached call.
        do_expand: The expanded layout. In a cached call the handle decides.
        do_zero_padding: Fill the expanded layout's padding with zeros.
        quantize: Cast rows of bfloat16, float16 or float32 to FP8.
        round_scale: Of ``reference.quantize``.
        use_ue8m0: Of ``reference.quantize``.
        scales_layout: ``"row"``: received scales are C-ordered, ``"column"``: Fortran-ordered.
        recv_stats: Per rank ``[El]`` int32, to which the counts are added. Not in a cached call.
        expert_rows: Expanded layout: so many rows for each expert, in place of as many as it gets
            (``reference.low_latency``); 0: packed. Not with ``num_worst_tokens``.

    Returns:
        One ``DispatchResult`` a rank.

    Raises:
        ValueError: An argument breaks one of the rules above; an expert outside -1..E-1; an
            expert twice in one token. The sentence names the rank, and the token if there is one.
    """
    rows, scales = _split(xs)
    if quantize:
        if scales is not None:
            raise ValueError("dispatch(): quantize does not go with scales")
        made = [cast(x, round_scale=round_scale, use_ue8m0=use_ue8m0) for x in rows]
        rows, scales = [pair[0] for pair in made], [pair[1] for pair in made]
    checks.check_rows(rows)
    if scales is not None:
        checks.check_scales(rows, scales)
    if expert_alignment < 1:
        raise ValueError(f"dispatch(): expert_alignment must be 1 or more, got {expert_alignment}")
    local: Sequence[Array | None] = [None] * len(rows)
    if handles is not None:
        if topk_idx is not None or is_token_in_rank is not None:
            raise ValueError("dispatch(): topk_idx and is_token_in_rank do not go with a handle")
        if num_worst_tokens is not None or recv_stats is not None:
            raise ValueError("dispatch(): num_worst_tokens and recv_stats need topk_idx or a mask")
        routes = _check_handles(rows, handles)
    elif topk_idx is None:
        if is_token_in_rank is None:
            raise ValueError("dispatch(): give topk_idx, is_token_in_rank or handles")
        for name, value in (
            ("topk_weights", topk_weights),
            ("do_expand", do_expand or None),
            ("recv_stats", recv_stats),
        ):
            if value is not None:
                raise ValueError(f"dispatch(): {name} needs topk_idx")
        routes = route(checks.check_masks(rows, is_token_in_rank))
    else:
        if is_token_in_rank is not None:
            checks.check_masks(rows, is_token_in_rank)
        routes, local = _choose(rows, topk_idx, num_experts, expert_alignment)
        if do_expand:
            pairs = zip(routes, local, strict=True)
            routes = [expand(handle, own, expert_rows) for handle, own in pairs]
    if num_worst_tokens is not None:
        checks.check_worst([handle.num_recv_tokens for handle in routes], num_worst_tokens)
        topk = 0 if topk_idx is None else topk_idx[0].shape[1]
        num_local = (num_experts or 0) // len(rows)
        routes = [
            pad(handle, worst, topk, num_local)
            for handle, worst in zip(routes, num_worst_tokens, strict=True)
        ]
    for handle, stats in zip(routes, recv_stats or (), strict=recv_stats is not None):
        stats += handle.num_unaligned_recv_tokens_per_expert
    recv_x = move(rows, routes)
    recv_scales = None if scales is None else move(scales, routes)
    weights = _weights(rows, topk_idx, topk_weights, routes, local)
    results = []
    for rank, handle in enumerate(routes):
        placed = _placed(recv_x[rank], handle)
        taken: Rows = placed
        if recv_scales is not None:
            order = _placed(recv_scales[rank], handle)
            taken = (placed, order if scales_layout == "row" else np.asfortranarray(order))
        results.append(
            DispatchResult(
                recv_x=taken,
                recv_topk_idx=_indices(local[rank], topk_idx, handle),
                recv_topk_weights=weights[rank],
                num_recv_tokens_per_expert_list=handle.num_recv_tokens_per_expert_list,
                handle=handle,
                defined=defined_rows(handle, zero_padding=do_zero_padding),
            )
        )
    return results


def _split(xs: Sequence[Rows]) -> tuple[list[Array], list[Array] | None]:
    pairs = [x for x in xs if isinstance(x, tuple)]
    if not pairs:
        return [x for x in xs if not isinstance(x, tuple)], None
    if len(pairs) < len(xs):
        raise ValueError("dispatch(): scales come with all ranks' rows or with none")
    return [x for x, _ in pairs], [scales for _, scales in pairs]


def _choose(
    rows: Sequence[Array],
    topk_idx: Sequence[Array],
    num_experts: int | None,
    alignment: int,
) -> tuple[list[Handle], list[Array]]:
    """The routing by ``topk_idx``, and the received choices in local numbers."""
    num_ranks = len(rows)
    if num_experts is None:
        raise ValueError("dispatch(): topk_idx needs num_experts")
    checks.check_experts(num_experts, num_ranks)
    checks.check_topk(rows, topk_idx, num_experts)
    num_local = num_experts // num_ranks
    routes = route(
        [get_dispatch_layout(idx, num_experts, num_ranks).is_token_in_rank for idx in topk_idx]
    )
    local = [local_choices(idx, rank, num_local) for rank, idx in enumerate(move(topk_idx, routes))]
    routes = [
        count_experts(handle, own, num_local, alignment)
        for handle, own in zip(routes, local, strict=True)
    ]
    return routes, local


def _indices(local: Array | None, topk_idx: Sequence[Array] | None, handle: Handle) -> Array | None:
    if local is None or topk_idx is None or handle.expanded_row is not None:
        return None
    out = np.full((handle.num_rows, local.shape[1]), -1, topk_idx[0].dtype)
    out[: len(local)] = local
    return out


def _weights(
    rows: Sequence[Array],
    topk_idx: Sequence[Array] | None,
    topk_weights: Sequence[Array] | None,
    routes: Sequence[Handle],
    local: Sequence[Array | None],
) -> Sequence[Array | None]:
    """Received weights: masked by the choices received with them, in the handle's layout."""
    if topk_weights is None:
        return [None] * len(rows)
    columns = (topk_idx or topk_weights)[0].shape[-1]
    checks.check_weights("dispatch", topk_weights, [len(x) for x in rows], columns)
    received = move(topk_weights, routes)
    return [
        _placed_weights(
            weight if own is None else np.where(own >= 0, weight, np.float32(0)), handle
        )
        for weight, own, handle in zip(received, local, routes, strict=True)
    ]


def _placed(rows: Array, handle: Handle) -> Array:
    """Rows of the real received tokens in the handle's layout; 0 elsewhere."""
    out = np.zeros((handle.num_rows, rows.shape[1]), rows.dtype)
    if handle.expanded_row is None:
        out.view(np.uint8)[: len(rows)] = rows.view(np.uint8)
    else:
        place(rows, handle.expanded_row, out)
    return out


def _placed_weights(weights: Array, handle: Handle) -> Array:
    """Weights ``[N, K]`` in the handle's layout, expanded ``[rows]``; 0 elsewhere."""
    if handle.expanded_row is None:
        return _placed(weights, handle)
    out = np.zeros(handle.num_rows, weights.dtype)
    place_weights(weights, handle.expanded_row, out)
    return out


def _check_handles(rows: Sequence[Array], handles: Sequence[Handle]) -> Sequence[Handle]:
    if len(handles) != len(rows):
        raise ValueError(f"dispatch(): wanted {len(rows)} handles, one a rank, got {len(handles)}")
    for rank, (x, handle) in enumerate(zip(rows, handles, strict=True)):
        if len(x) != handle.num_tokens:
            raise ValueError(
                f"dispatch(): x has {len(x)} tokens, its handle was made for "
                f"{handle.num_tokens}, on rank {rank}"
            )
    return handles
