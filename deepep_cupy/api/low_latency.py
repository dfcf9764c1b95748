"""DeepEP V1's low-latency calls: arguments as given, the handle, results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepep_cupy.api.events import EventOverlap
from deepep_cupy.api.handle import DispatchHandle, shape_of
from deepep_cupy.api.results import describe, shapes
from deepep_cupy.engines.calls import CombineCall, CombinePlan, DispatchCall, DispatchPlan, Streams

__all__ = [
    "COMBINE",
    "DISPATCH",
    "LowLatencyCombineArguments",
    "LowLatencyCombineOptions",
    "LowLatencyCombineResult",
    "LowLatencyDispatchArguments",
    "LowLatencyDispatchOptions",
    "LowLatencyDispatchResult",
    "LowLatencyHandle",
    "combine_call",
    "dispatch_call",
]

DISPATCH, COMBINE = "low_latency_dispatch", "low_latency_combine"


class LowLatencyDispatchOptions(NamedTuple):
    """What the user passed to ``low_latency_dispatch`` beside arrays and event."""

    num_max_dispatch_tokens_per_rank: Any
    num_experts: Any
    use_fp8: Any = True
    round_scale: Any = False
    use_ue8m0: Any = False
    async_finish: Any = False
    return_recv_hook: Any = False
    own: Any = False
    config: Any = None
    num_sms: int | None = None


class LowLatencyDispatchArguments(NamedTuple):
    """What the user passed to ``low_latency_dispatch``, not checked."""

    x: Any
    topk_idx: Any
    topk_weights: Any
    cumulative_local_expert_recv_stats: Any
    dispatch_wait_recv_cost_stats: Any
    previous_event: Any
    options: LowLatencyDispatchOptions


class LowLatencyCombineOptions(NamedTuple):
    """What the user passed to ``low_latency_combine`` beside arrays, handle and event."""

    use_logfmt: Any = False
    zero_copy: Any = False
    async_finish: Any = False
    return_recv_hook: Any = False
    reduce: Any = "per_rank"
    own: Any = False
    config: Any = None
    num_sms: int | None = None


class LowLatencyCombineArguments(NamedTuple):
    """What the user passed to ``low_latency_combine``, not checked."""

    x: Any
    topk_idx: Any
    topk_weights: Any
    handle: Any
    out: Any
    combine_wait_recv_cost_stats: Any
    previous_event: Any
    options: LowLatencyCombineOptions


@dataclass(frozen=True, eq=False, repr=False)
class LowLatencyHandle:
    """Who sent what where in one ``low_latency_dispatch``, for ``low_latency_combine``.

    DeepEP V1's tuple, with names. Its arrays must not be written; defined once the dispatch's hook
    has been called, where there is one.

    Attributes:
        dispatched: The routing, of the expanded layout.
        recv_weights: ``[El * R * M]`` float32 weights that came with the rows, or None.
        num_max_dispatch_tokens_per_rank: M.
        hidden: H of the dispatch.
        num_experts: E.
    """

    dispatched: DispatchHandle
    recv_weights: Any
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int

    @property
    def recv_src_info(self) -> Any:
        """``[El, R * M]`` int32: token of each row on its source rank; anything behind the first
        ``recv_count[e]``."""
        return self.dispatched.routing.recv_src_info

    @property
    def recv_layout_range(self) -> Any:
        """``[El, R]`` int64: first row of each source rank among the expert's rows << 32 | how many
        they are."""
        return self.dispatched.routing.recv_layout_range

    def __repr__(self) -> str:
        words = [f"num_tokens={self.dispatched.num_tokens}"]
        names = "num_max_dispatch_tokens_per_rank", "hidden", "num_experts"
        words += [f"{name}={getattr(self, name)}" for name in names]
        names = "recv_src_info", "recv_layout_range", "recv_weights"
        words += [f"{name}={shape_of(getattr(self, name))}" for name in names]
        return f"LowLatencyHandle({', '.join(words)})"


class LowLatencyDispatchResult(NamedTuple):
    """What ``Buffer.low_latency_dispatch`` returns."""

    recv_x: Any
    recv_count: Any
    handle: LowLatencyHandle
    event: EventOverlap
    hook: Callable[[], None] | None

    def __repr__(self) -> str:
        return shapes(self)


_HOOK = "Queues the receiving half, with ``return_recv_hook=True``; else None."
_EVENT = "To wait for with ``async_finish``; else without effect: results are in stream order."

describe(
    LowLatencyDispatchResult,
    recv_x="""``[El, R * M, H]``: the rows of local expert e are the first ``recv_count[e]``, by
    (source rank, source token); behind them is anything. With FP8 a pair of these and the scales
    ``[El, R * M, S]``, whose memory is ``[El, S, R * M]``.""",
    recv_count="Rows of each local expert, ``[El]`` int32.",
    handle="For ``low_latency_combine``.",
    event=_EVENT,
    hook=_HOOK,
)


class LowLatencyCombineResult(NamedTuple):
    """What ``Buffer.low_latency_combine`` returns."""

    combined_x: Any
    event: EventOverlap
    hook: Callable[[], None] | None

    def __repr__(self) -> str:
        return shapes(self)


describe(
    LowLatencyCombineResult,
    combined_x="Weighted sums of each token's rows, ``[T, H]``, dtype of ``x``.",
    event=_EVENT,
    hook=_HOOK,
)


def dispatch_call(given: LowLatencyDispatchArguments, plan: DispatchPlan) -> DispatchCall:
    """The call for the engine. ``given``: arrays are the engine's."""
    return DispatchCall(
        given.x,
        given.topk_idx,
        given.topk_weights,
        recv_stats=given.cumulative_local_expert_recv_stats,
        streams=_streams(given.previous_event, plan.streams),
        plan=plan,
        wait_stats=given.dispatch_wait_recv_cost_stats,
    )


def combine_call(given: LowLatencyCombineArguments, plan: CombinePlan) -> CombineCall:
    """The call for the engine. ``given``: arrays are the engine's."""
    x, weights, handle = given.x, given.topk_weights, given.handle
    return CombineCall(
        x.reshape(-1, x.shape[2]),
        handle.dispatched.routing,
        row_weights=handle.recv_weights if weights is None else None,
        out=given.out,
        streams=_streams(given.previous_event, plan.streams),
        plan=plan,
        token_weights=weights,
        wait_stats=given.combine_wait_recv_cost_stats,
    )


def _streams(event: Any, streams: Streams) -> Streams:
    return streams if event is None else Streams(event.event, streams.async_finish)
