"""What the methods of ``Buffer`` return: named tuples that unpack as DeepEP's do."""

from __future__ import annotations

from typing import Any, NamedTuple

from deepep_cupy.api.events import EventOverlap
from deepep_cupy.api.handle import DispatchHandle

__all__ = ["CombineResult", "DispatchResult", "LayoutResult"]


class DispatchResult(NamedTuple):
    """What ``Buffer.dispatch`` returns; N is the number of received rows, K that of choices."""

    recv_x: Any
    """``[N, H]``, dtype of ``x``: rows in the order (source rank, source token); expanded: a row
    per (token, local expert), by (expert, source rank, source token). A pair of these rows and
    their scales ``[N, S]`` where scales travelled or rows were cast."""
    recv_topk_idx: Any
    """``[N, K]``, dtype of ``topk_idx``: experts of this rank numbered from 0, -1 elsewhere; None
    without ``topk_idx`` and in the expanded layout."""
    recv_topk_weights: Any
    """``[N, K]`` float32: 0 where the index is -1; expanded: ``[rows]``, the weight of the row's
    choice; None without ``topk_weights``."""
    num_recv_tokens_per_expert_list: list[int]
    """One count a local expert, rounded up to ``expert_alignment``; ``[]`` without choices, and
    where the host did not wait."""
    handle: DispatchHandle
    """For ``combine``, and for a later ``dispatch`` along the same ways."""
    event: EventOverlap
    """To wait for with ``async_finish``; else without effect: the results are in stream order."""


class CombineResult(NamedTuple):
    """What ``Buffer.combine`` returns; T is the number of tokens this rank had dispatched."""

    combined_x: Any
    """``[T, H]``, dtype of ``x``."""
    combined_topk_weights: Any
    """``[T, K]`` float32, summed over ranks; None without ``topk_weights``."""
    event: EventOverlap
    """To wait for with ``async_finish``; else without effect: the results are in stream order."""


class LayoutResult(NamedTuple):
    """What ``Buffer.get_dispatch_layout`` returns."""

    num_tokens_per_rank: Any
    """``[R]`` int32: a token counts once a rank, whatever its choices there."""
    num_tokens_per_rdma_rank: None
    """None: all ranks are on one node."""
    num_tokens_per_expert: Any
    """``[E]`` int32."""
    is_token_in_rank: Any
    """``[T, R]`` bool."""
    event: EventOverlap
    """To wait for with ``async_finish``; else without effect: the results are in stream order."""
