"""Checks of the arguments of low-latency calls that one rank can make alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from deepep_cupy.api import routes
from deepep_cupy.api.arguments import ArgumentChecker
from deepep_cupy.api.low_latency import (
    COMBINE,
    DISPATCH,
    LowLatencyCombineArguments,
    LowLatencyDispatchArguments,
    LowLatencyDispatchOptions,
    LowLatencyHandle,
)
from deepep_cupy.engines.calls import (
    FORMATS,
    CombinePlan,
    DispatchArguments,
    DispatchPlan,
    Quantization,
    Reduce,
    Signature,
)
from deepep_cupy.errors import ContractError
from deepep_cupy.protocol.headers import Layout, Refusal, RefusalCode
from deepep_cupy.protocol.sizes import BufferSpec
from deepep_cupy.reference.quant import QUANTIZABLE

__all__ = ["LowLatencyChecker", "is_one"]

_CAN_BE_CAST = tuple(dtype.name for dtype in QUANTIZABLE)
_FP8 = FORMATS["fp8_e4m3"]
_REDUCES: tuple[Reduce, ...] = ("exact", "per_rank")
_INT32, _INT64 = (np.dtype(np.int32),), (np.dtype(np.int64),)
_INDEX, _FLOAT32 = _INT64 + _INT32, (np.dtype(np.float32),)


def is_one(
    checker: ArgumentChecker, spec: BufferSpec, given: DispatchArguments, num_tokens: int
) -> bool:
    """Whether a ``dispatch`` is a low-latency call, which only some can be."""
    if not checker.flag("dispatch", "low_latency", given.options.low_latency):
        return False
    _need_room(checker, spec, "dispatch", "low_latency")
    for other in ("handle", "is_token_in_rank", "dest"):
        if getattr(given, other) is not None:
            checker.refuse(
                "dispatch",
                other,
                "must not be given with low_latency=True: such calls are routed by topk_idx "
                "alone, each anew",
            )
    most = spec.low_latency_tokens
    if num_tokens > most:
        _too_many("dispatch", spec, num_tokens, f"low_latency_tokens = {most}")
    return True


def _need_room(checker: ArgumentChecker, spec: BufferSpec, operation: str, argument: str) -> None:
    """Refuse the call where the Buffer has nothing for such calls."""
    checker.need(operation, argument, "low_latency")
    if not spec.low_latency_tokens:
        checker.refuse(
            operation,
            argument,
            "needs a Buffer made with low_latency_tokens, the most tokens of a rank in such a "
            "call, which is 0 here",
        )


def _too_many(operation: str, spec: BufferSpec, num_tokens: int, limit: str) -> None:
    raise ContractError(
        f"{operation}(): argument 'x' must have at most {limit} rows, got {num_tokens}, on rank "
        f"{spec.rank}.",
        Refusal(RefusalCode.MORE_THAN_CALL_TAKES, num_tokens),
    )


class LowLatencyChecker(ArgumentChecker):
    """Checks the arguments of one Buffer's ``low_latency_dispatch`` and ``low_latency_combine``."""

    def dispatch(
        self, given: LowLatencyDispatchArguments
    ) -> tuple[LowLatencyDispatchArguments, DispatchPlan]:
        """Check a dispatch; the arguments with the engine's arrays, and the plan of such calls."""
        spec, options = self._spec, given.options
        name = "num_max_dispatch_tokens_per_rank"
        _need_room(self, spec, DISPATCH, name)
        most = options.num_max_dispatch_tokens_per_rank
        most = self.number(DISPATCH, name, most, 1, spec.low_latency_tokens)
        experts = spec.num_experts or 0
        if options.num_experts is None or options.num_experts != experts:
            self.number(DISPATCH, "num_experts", options.num_experts, experts, experts)
        quantize = self._quantization(options)
        x = self.rows(DISPATCH, given.x, None if quantize is None else 1)
        if quantize is not None and np.dtype(x.dtype).name not in _CAN_BE_CAST:
            kinds = " or ".join(_CAN_BE_CAST)
            self.refuse(DISPATCH, "x", f"must be of {kinds} with use_fp8=True, got {x.dtype}")
        if len(x) > most:
            _too_many(DISPATCH, spec, len(x), f"{name} = {most}")
        topk_idx = routes.choices(self, spec, given.topk_idx, len(x), DISPATCH)
        shape = {"num_tokens": len(x), "num_topk": topk_idx.shape[1]}
        weights, stats = given.topk_weights, given.cumulative_local_expert_recv_stats
        if weights is not None:
            weights = self.array(DISPATCH, "topk_weights", weights, shape, _FLOAT32)
        if stats is not None:
            argument = "cumulative_local_expert_recv_stats"
            shape = {"num_local_experts": spec.num_local_experts}
            stats = self.array(DISPATCH, argument, stats, shape, _INT32)
            self.writable(DISPATCH, argument, stats)
        wait_stats = self._wait_stats(
            DISPATCH, "dispatch_wait_recv_cost_stats", given.dispatch_wait_recv_cost_stats
        )
        taken = given._replace(
            x=x,
            topk_idx=topk_idx,
            topk_weights=weights,
            cumulative_local_expert_recv_stats=stats,
            dispatch_wait_recv_cost_stats=wait_stats,
        )
        return taken, DispatchPlan(
            signature=Signature(
                self._buffer, spec.num_ranks, len(x), topk_idx.shape[1], experts, Layout.TOPK
            ),
            own=self.flag(DISPATCH, "own", options.own),
            quantize=quantize,
            num_worst_tokens=spec.num_ranks * most,
            expand=True,
            num_sms=self.num_sms(DISPATCH, options.config) or options.num_sms,
            low_latency=True,
            expert_rows=spec.num_ranks * most,
            **self._when(DISPATCH, given.previous_event, options),
        )

    def _quantization(self, options: LowLatencyDispatchOptions) -> Quantization | None:
        wanted = {
            name: self.flag(DISPATCH, name, getattr(options, name))
            for name in ("use_fp8", "round_scale", "use_ue8m0")
        }
        use_fp8, round_scale, use_ue8m0 = wanted.values()
        if round_scale and not use_fp8:
            self.refuse(DISPATCH, "round_scale", "needs use_fp8=True")
        if use_ue8m0 and not round_scale:
            self.refuse(
                DISPATCH,
                "use_ue8m0",
                "needs round_scale=True: only powers of two are exponents",
            )
        return Quantization(_FP8, round_scale, use_ue8m0) if use_fp8 else None

    def combine(
        self, given: LowLatencyCombineArguments
    ) -> tuple[LowLatencyCombineArguments, CombinePlan]:
        """Check a combine; the arguments with the engine's arrays, and the plan of such calls."""
        spec, options = self._spec, given.options
        _need_room(self, spec, COMBINE, "handle")
        known = self._handle(given.handle)
        if self.flag(COMBINE, "use_logfmt", options.use_logfmt):
            self.refuse(COMBINE, "use_logfmt", "must not be True: rows travel as they are")
        self.flag(COMBINE, "zero_copy", options.zero_copy)
        rows = spec.num_ranks * known.num_max_dispatch_tokens_per_rank
        shape = {"num_local_experts": spec.num_local_experts, "num_rows": rows, "hidden": None}
        x = self.array(COMBINE, "x", given.x, shape, None)
        self.row_length(COMBINE, x, x.dtype.itemsize)
        dtype = self.addable(COMBINE, x)
        if dtype.kind in "iu":
            self.refuse(COMBINE, "x", f"must be of a floating dtype, got {dtype}")
        tokens = known.dispatched.num_tokens
        shape = {"num_tokens": tokens, "num_topk": known.dispatched.signature.num_topk}
        topk_idx = self.array(COMBINE, "topk_idx", given.topk_idx, shape, _INDEX)
        weights, out = given.topk_weights, given.out
        if weights is not None:
            weights = self.array(COMBINE, "topk_weights", weights, shape, _FLOAT32)
        elif known.recv_weights is None:
            self.refuse(
                COMBINE, "topk_weights", "must be given where the dispatch was given none, got None"
            )
        if out is not None:
            self.need(COMBINE, "out", "out")
            shape = {"num_tokens": tokens, "hidden": x.shape[2]}
            out = self.array(COMBINE, "out", out, shape, (dtype,))
            self.writable(COMBINE, "out", out)
        wait_stats = self._wait_stats(
            COMBINE, "combine_wait_recv_cost_stats", given.combine_wait_recv_cost_stats
        )
        taken = given._replace(
            x=x,
            topk_idx=topk_idx,
            topk_weights=weights,
            out=out,
            combine_wait_recv_cost_stats=wait_stats,
        )
        return taken, CombinePlan(
            own=self.flag(COMBINE, "own", options.own),
            reduce=self.one_of(COMBINE, "reduce", options.reduce, _REDUCES),
            num_sms=self.num_sms(COMBINE, options.config) or options.num_sms,
            expert_major=True,
            **self._when(COMBINE, given.previous_event, options),
        )

    def _handle(self, value: object) -> LowLatencyHandle:
        if not isinstance(value, LowLatencyHandle):
            kind = type(value).__name__
            self.refuse(
                COMBINE, "handle", f"must be one that low_latency_dispatch() returned, got {kind}"
            )
        self.handle(COMBINE, value.dispatched)
        return value

    def _wait_stats(self, operation: str, argument: str, value: object) -> Any:
        if value is None:
            return None
        shape = {"num_ranks": self._spec.num_ranks}
        stats = self.array(operation, argument, value, shape, _INT64)
        self.writable(operation, argument, stats)
        return stats

    def _when(self, operation: str, event: object, options: Any) -> dict[str, Any]:
        """Where alike calls run, and whether they are received later."""
        hook = self.flag(operation, "return_recv_hook", options.return_recv_hook)
        streams = self.streams(operation, event, options.async_finish, allocate=False)
        if hook and (event is not None or streams.async_finish):
            other = "previous_event" if event is not None else "async_finish=True"
            self.refuse(
                operation, "return_recv_hook", f"must not be True with {other}: the hook says when"
            )
        if event is not None:  # each call's own, and not kept
            streams = replace(streams, previous_event=None)
        return {"hook": hook, "streams": streams}
