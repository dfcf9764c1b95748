"""What the methods of ``Buffer`` return: named tuples that unpack as DeepEP's do."""

from __future__ import annotations

from typing import Any, NamedTuple

from deepep_cupy.api.events import EventOverlap
from deepep_cupy.api.handle import DispatchHandle, shape_of

__all__ = ["CombineResult", "DispatchResult", "LayoutResult", "describe", "shapes"]


def describe(result: type[tuple[Any, ...]], **texts: str) -> None:
    """Give the members of a named tuple the descriptions that ``help()`` shows."""
    for name, text in texts.items():
        getattr(result, name).__doc__ = text


def shapes(result: Any) -> str:
    """The ``repr`` of a result: dtypes and shapes of its arrays, not their elements."""
    members = (f"{name}={shape_of(value)}" for name, value in result._asdict().items())
    return f"{type(result).__name__}({', '.join(members)})"


_EVENT = "To wait for with ``async_finish``; else without effect: results are in stream order."


class DispatchResult(NamedTuple):
    """What ``Buffer.dispatch`` returns; N is the number of received rows, K that of choices."""

    recv_x: Any
    recv_topk_idx: Any
    recv_topk_weights: Any
    num_recv_tokens_per_expert_list: list[int]
    handle: DispatchHandle
    event: EventOverlap

    def __repr__(self) -> str:
        return shapes(self)


describe(
    DispatchResult,
    recv_x="""Received rows, ``[N, H]``, dtype of ``x``, in the order (source rank, source token).
    Expanded: a row per (token, local expert), by (expert, source rank, source token). A pair of
    these rows and their scales ``[N, S]`` where scales travelled or rows were cast: an element's
    value is the element *times* the scale of its 128 channels.""",
    recv_topk_idx="""Experts of the received rows, ``[N, K]``, dtype of ``topk_idx``: those of this
    rank numbered from 0, -1 elsewhere. None without ``topk_idx`` and in the expanded layout.""",
    recv_topk_weights="""Weights of the received rows, ``[N, K]`` float32: 0 where the index is -1.
    Expanded: ``[rows]``, the weight of the row's choice. None without ``topk_weights``.""",
    num_recv_tokens_per_expert_list="""One count for each local expert, rounded up to
    ``expert_alignment``; ``[]`` without choices, and where the host did not wait.""",
    handle="For ``combine``, and for a later ``dispatch`` that sends new rows the same ways.",
    event=_EVENT,
)


class CombineResult(NamedTuple):
    """What ``Buffer.combine`` returns; T is the number of tokens this rank had dispatched."""

    combined_x: Any
    combined_topk_weights: Any
    event: EventOverlap

    def __repr__(self) -> str:
        return shapes(self)


describe(
    CombineResult,
    combined_x="Sums of each token's rows, ``[T, H]``, dtype of ``x``.",
    combined_topk_weights="""Weights, ``[T, K]`` float32, summed over ranks; None without
    ``topk_weights``.""",
    event=_EVENT,
)


class LayoutResult(NamedTuple):
    """What ``Buffer.get_dispatch_layout`` returns."""

    num_tokens_per_rank: Any
    num_tokens_per_rdma_rank: Any
    num_tokens_per_expert: Any
    is_token_in_rank: Any
    event: EventOverlap

    def __repr__(self) -> str:
        return shapes(self)


describe(
    LayoutResult,
    num_tokens_per_rank="""Tokens that go to each rank, ``[R]`` int32: a token counts once a rank,
    however many of its choices are there.""",
    num_tokens_per_rdma_rank="""Tokens that go to any rank of each node, ``[nodes]`` int32; None
    on one node.""",
    num_tokens_per_expert="Choices of each expert, ``[E]`` int32.",
    is_token_in_rank="Whether a token goes to a rank, ``[T, R]`` bool.",
    event=_EVENT,
)
