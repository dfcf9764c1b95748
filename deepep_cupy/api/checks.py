"""Checks of a whole call: every one that one rank can make alone.

A check that fails raises ``ContractError`` with a refusal, which the Buffer sends to the other
ranks in this rank's place, so that all raise. Engines check the types of arrays
(``import_array``); this file checks shapes, dtypes, and which arguments go together.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from deepep_cupy.api import low_latency_checks, routes
from deepep_cupy.api.arguments import ArgumentChecker, Shape
from deepep_cupy.api.handle import DispatchHandle
from deepep_cupy.api.values import is_int, resolve_dtype
from deepep_cupy.engines.calls import (
    FORMATS,
    CombineArguments,
    CombinePlan,
    DispatchArguments,
    DispatchOptions,
    DispatchPlan,
    Quantization,
    Reduce,
    ScalesLayout,
    Signature,
    listed,
)
from deepep_cupy.errors import ContractError, shown
from deepep_cupy.protocol.headers import (
    DTYPE_CODES,
    Layout,
    Refusal,
    RefusalCode,
    describe_refusal,
)
from deepep_cupy.protocol.sizes import MAX_EXPERTS, num_scales
from deepep_cupy.reference.quant import QUANTIZABLE

__all__ = ["Checker"]

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_SCALES = tuple(np.dtype(kind) for kind in (np.float32, np.int32, np.uint32))
_QUANTIZABLE = tuple(dtype.name for dtype in QUANTIZABLE)
_SCALES_LAYOUTS: tuple[ScalesLayout, ...] = ("row", "column")
_REDUCES: tuple[Reduce, ...] = ("exact", "per_rank", "per_node")
_INT32 = (np.dtype(np.int32),)
_INDEX = (np.dtype(np.int64), np.dtype(np.int32))


class Checker(ArgumentChecker):
    """Checks whole calls of one Buffer; its arguments are those of ``ArgumentChecker``."""

    # ------------------------------------------------------------------------------- dispatch

    def dispatch(self, given: DispatchArguments) -> tuple[DispatchArguments, DispatchPlan]:
        """Check a dispatch; the arguments with the engine's arrays, and the plan of such calls."""
        options = given.options
        quantize = self._quantization(options)
        x, scales, view = self._rows_and_scales(given, quantize)
        num_tokens, spec = len(x), self._spec
        low_latency = low_latency_checks.is_one(self, spec, given, num_tokens)
        if num_tokens > spec.num_max_tokens_per_rank:
            refusal = Refusal(RefusalCode.TOO_MANY_TOKENS, num_tokens)
            limit = spec.num_max_tokens_per_rank
            raise ContractError(describe_refusal("dispatch", spec.rank, refusal, limit), refusal)
        known = None if given.handle is None else self.handle("dispatch", given.handle)
        routes.check_companions(self, spec, given, num_tokens)
        topk_idx = mask = handle = made = None
        if known is not None:
            handle = self._cached(known, given, num_tokens)
            signature = handle.signature
        elif given.topk_idx is not None:
            topk_idx = routes.choices(self, spec, given.topk_idx, num_tokens)
            signature = made = self.signature(num_tokens, topk_idx.shape[1], Layout.TOPK)
        elif given.dest is not None:
            mask = routes.mask_of_ranks(self, spec, given.dest, num_tokens)
            signature = made = self.signature(num_tokens, 0, Layout.MASK)
        elif given.is_token_in_rank is not None:
            mask = self.take("dispatch", "is_token_in_rank", given.is_token_in_rank)
            signature = made = self.signature(num_tokens, 0, Layout.MASK)
        else:
            self._wrong("", "needs one of topk_idx, is_token_in_rank, dest or handle, got none")
        weights = None
        if given.topk_weights is not None:
            shape = {"num_tokens": num_tokens, "num_topk": signature.num_topk}
            weights = self.weights("dispatch", "topk_weights", given.topk_weights, shape, signature)
        expand = self._expansion(given, handle)
        layout = self.one_of("dispatch", "scales_layout", options.scales_layout, _SCALES_LAYOUTS)
        alignment = self._alignment(options, handle)
        worst = self._worst(options, handle)
        zero_padding = self._zero_padding(options, expand)
        taken = given._replace(
            x=x if scales is None else (x, scales),
            topk_idx=topk_idx,
            topk_weights=weights,
            is_token_in_rank=mask,
            cumulative_local_expert_recv_stats=self._stats(given),
        )
        return taken, DispatchPlan(
            view=view,
            signature=made,
            expert_alignment=alignment,
            own=self.flag("dispatch", "own", options.own),
            scales_layout=layout,
            quantize=quantize,
            num_worst_tokens=worst,
            expand=expand,
            zero_padding=zero_padding,
            num_sms=self.num_sms("dispatch", options.config) or options.num_sms,
            streams=self.streams_of_plan("dispatch", given.previous_event, options),
            tag=self.tag("dispatch", options.tag),
            low_latency=low_latency,
        )

    def _wrong(self, argument: str, complaint: str) -> NoReturn:
        """Refuse a dispatch."""
        self.refuse("dispatch", argument, complaint)

    def signature(self, num_tokens: int, num_topk: int, layout: Layout) -> Signature:
        """The signature of a dispatch of this Buffer."""
        spec = self._spec
        return Signature(
            self._buffer, spec.num_ranks, num_tokens, num_topk, spec.num_experts, layout
        )

    def _rows_and_scales(
        self, given: DispatchArguments, quantize: Quantization | None
    ) -> tuple[Any, Any, np.dtype[Any] | None]:
        """Rows, their scales or None, and the dtype they are to be taken for or None."""
        rows, scales = given.x, None
        if isinstance(rows, tuple | list):
            if quantize is not None:
                self._wrong("quantize", "casts rows, but x has scales already")
            if len(rows) != 2:
                self._wrong(
                    "x",
                    f"must be one array, or a pair of rows and scales, got a "
                    f"{type(rows).__name__} of {len(rows)}",
                )
            self.need("dispatch", "x", "scales")
            rows, scales = rows
            if scales is None:
                self._wrong("scales", "must be an array, got None; pass x alone")
        x = self.rows("dispatch", rows, 1 if quantize is not None else None)
        view = None if given.options.dtype is None else self._view(x, given.options.dtype)
        dtype = np.dtype(x.dtype) if view is None else view
        if quantize is not None and dtype.name not in _QUANTIZABLE:
            self._wrong("x", f"must be of {' or '.join(_QUANTIZABLE)} to be cast, got {dtype}")
        if scales is None:
            return x, None, view
        if dtype.itemsize != 1 or dtype.name not in DTYPE_CODES:
            self._wrong(
                "x",
                f"must have rows of float8_e4m3fn, float8_e5m2, uint8 or int8 where scales come "
                f"with it, got {dtype}",
            )
        array = self.take("dispatch", "scales", scales, strided=True)
        packed = np.dtype(array.dtype) != np.float32
        shape = {"num_tokens": len(x), "num_scales": num_scales(x.shape[1], packed=packed)}
        self.expect("dispatch", "scales", array, shape, _SCALES)
        return x, array, view

    def _view(self, x: Any, dtype: object) -> np.dtype[Any]:
        try:
            wanted = resolve_dtype(dtype)
        except TypeError:
            self._wrong("dtype", f"must be a dtype of NumPy or ml_dtypes, got {shown(dtype)}")
        if wanted.itemsize != x.dtype.itemsize:
            self._wrong(
                "dtype",
                f"must have the {x.dtype.itemsize} bytes of an element of x ({x.dtype}), got "
                f"{wanted}",
            )
        return wanted

    def _quantization(self, options: DispatchOptions) -> Quantization | None:
        round_scale = self.flag("dispatch", "round_scale", options.round_scale)
        use_ue8m0 = self.flag("dispatch", "use_ue8m0", options.use_ue8m0)
        if options.quantize is None:
            for argument, value in (("round_scale", round_scale), ("use_ue8m0", use_ue8m0)):
                if value:
                    self._wrong(argument, "needs quantize='fp8_e4m3'")
            return None
        name = self.one_of("dispatch", "quantize", options.quantize, tuple(FORMATS))
        self.need("dispatch", "quantize", "quantize")
        if use_ue8m0 and not round_scale:
            self._wrong("use_ue8m0", "needs round_scale=True: only powers of two are exponents")
        return Quantization(FORMATS[name], round_scale, use_ue8m0)

    def _cached(
        self, handle: DispatchHandle, given: DispatchArguments, num_tokens: int
    ) -> DispatchHandle:
        if given.topk_idx is not None:
            self._wrong("topk_idx", "must not be given together with a handle, which fixes it")
        if handle.low_latency:
            self._wrong(
                "handle",
                "must not be of a low-latency dispatch, whose ways are not kept for other rows",
            )
        if handle.num_tokens != num_tokens:
            self._wrong(
                "x",
                f"must have as many rows as the dispatch that made the handle, "
                f"{handle.num_tokens}, got {num_tokens}",
            )
        return handle

    def _alignment(self, options: DispatchOptions, handle: DispatchHandle | None) -> int:
        most = self._spec.max_alignment
        value = self.number("dispatch", "expert_alignment", options.expert_alignment, 1, most)
        if handle is None:
            return value
        fixed = handle.expert_alignment
        if handle.do_expand and value not in (1, fixed):
            self._wrong(
                "expert_alignment",
                f"must be that of the dispatch that made the handle, {fixed}, or left out, got "
                f"{value}",
            )
        return fixed

    def _expansion(self, given: DispatchArguments, handle: DispatchHandle | None) -> bool:
        fixed = None if handle is None else handle.do_expand
        if given.options.do_expand is None:
            return bool(fixed)
        expand = self.flag("dispatch", "do_expand", given.options.do_expand)
        if fixed is not None and expand != fixed:
            self._wrong(
                "do_expand",
                f"must be {fixed}, as in the dispatch that made the handle, or left out, got "
                f"{expand}",
            )
        if expand and handle is None:
            self.need("dispatch", "do_expand", "expand")
            if given.topk_idx is None:
                self._wrong("do_expand", "needs topk_idx")
        return expand

    def _zero_padding(self, options: DispatchOptions, expand: bool) -> bool:
        zero_padding = self.flag("dispatch", "do_zero_padding", options.do_zero_padding)
        if zero_padding and not expand:
            self._wrong("do_zero_padding", "needs do_expand=True")
        return zero_padding

    def _worst(self, options: DispatchOptions, handle: DispatchHandle | None) -> int | None:
        """``num_worst_tokens``, or None where the host waits; ``do_cpu_sync`` says it too."""
        spec, never_waits = self._spec, bool(options.low_latency)
        most = spec.max_low_latency_recv_tokens if never_waits else spec.max_recv_tokens
        worst = self.number("dispatch", "num_worst_tokens", options.num_worst_tokens, 0, most)
        sync = options.do_cpu_sync
        sync = None if sync is None else self.flag("dispatch", "do_cpu_sync", sync)
        if handle is not None:
            if sync:
                self._wrong("do_cpu_sync", "must not be True with a handle")
            if worst not in (0, handle.num_recv_tokens):
                self._wrong(
                    "num_worst_tokens",
                    f"must be the {handle.num_recv_tokens} tokens of the handle, or left out, "
                    f"got {worst}",
                )
            return None
        if worst and sync:
            self._wrong("do_cpu_sync", "must not be True with num_worst_tokens")
        if sync and never_waits:
            self._wrong("do_cpu_sync", "must not be True with low_latency=True, which never waits")
        if not worst and sync is not False and not never_waits:
            return None
        self.need("dispatch", "num_worst_tokens" if worst else "do_cpu_sync", "no_wait")
        return worst or most

    def _stats(self, given: DispatchArguments) -> Any:
        name = "cumulative_local_expert_recv_stats"
        value = given.cumulative_local_expert_recv_stats
        if value is None:
            return None
        self.need("dispatch", name, "stats")
        if given.topk_idx is None:
            self._wrong(name, "needs topk_idx: the call has no choices to count")
        shape = {"num_local_experts": self._spec.num_local_experts}
        stats = self.array("dispatch", name, value, shape, _INT32)
        self.writable("dispatch", name, stats)
        return stats

    # -------------------------------------------------------------------------------- combine

    def combine(self, given: CombineArguments) -> tuple[CombineArguments, CombinePlan]:
        """Check a combine; the arguments with the engine's arrays, and the plan of such calls."""
        options = given.options
        known = self.handle("combine", given.handle)
        rows = self.rows("combine", given.x)
        if len(rows) != known.num_rows:
            self.refuse(
                "combine",
                "x",
                f"must have one row per row that the dispatch returned, {known.num_rows}, got "
                f"{len(rows)}",
            )
        dtype = self.addable("combine", rows)
        shape = {"num_rows": len(rows)}
        if not known.do_expand:
            shape = {"num_recv_tokens": len(rows), "num_topk": known.signature.num_topk}
        weights = None
        if given.topk_weights is not None:
            if known.low_latency:
                self.refuse(
                    "combine",
                    "topk_weights",
                    "must not be given with a handle of a low-latency dispatch, where no weights "
                    "go back (row_weights are multiplied into the rows)",
                )
            weights = self.weights(
                "combine", "topk_weights", given.topk_weights, shape, known.signature
            )
        result = {"num_tokens": known.num_tokens, "hidden": rows.shape[1]}
        out = None
        if given.out is not None:
            self.need("combine", "out", "out")
            out = self.array("combine", "out", given.out, result, (dtype,))
            self.writable("combine", "out", out)
        biases = self._biases(given.bias, result, dtype)
        reduce = self.one_of("combine", "reduce", options.reduce, _REDUCES)
        if reduce == "per_node" and self._spec.num_nodes == 1:
            reduce = "per_rank"  # which is "exact" where no rank has several copies of a token
        row_weights = self._row_weights(given, known, dtype)
        taken = given._replace(
            x=rows, topk_weights=weights, bias=biases, out=out, row_weights=row_weights
        )
        return taken, CombinePlan(
            own=self.flag("combine", "own", options.own),
            reduce=reduce,
            num_sms=self.num_sms("combine", options.config) or options.num_sms,
            streams=self.streams_of_plan("combine", given.previous_event, options),
            tag=self.tag("combine", options.tag),
        )

    def _biases(self, bias: object, shape: Shape, dtype: np.dtype[Any]) -> tuple[Any, ...]:
        given = listed(bias)
        if len(given) > 2:
            self.refuse("combine", "bias", f"must be at most two arrays, got {len(given)}")
        return tuple(self.array("combine", "bias", each, shape, (dtype,)) for each in given)

    def _row_weights(
        self, given: CombineArguments, known: DispatchHandle, dtype: np.dtype[Any]
    ) -> Any:
        if given.row_weights is None:
            return None
        if not known.do_expand:
            self.refuse(
                "combine",
                "row_weights",
                "needs a handle of a dispatch with do_expand=True: other rows are sums over "
                "experts already",
            )
        if dtype.kind in "iu":
            self.refuse("combine", "row_weights", f"needs rows of floating point, got {dtype}")
        shape = {"num_rows": known.num_rows}
        return self.weights("combine", "row_weights", given.row_weights, shape, known.signature)

    # ------------------------------------------------------------------------------ the layout

    def layout(self, topk_idx: object, num_experts: object) -> tuple[Any, int]:
        """Check the arguments of ``get_dispatch_layout``; a failure concerns this rank alone."""
        operation, spec = "get_dispatch_layout", self._spec
        number = spec.num_experts if num_experts is None else num_experts
        right = is_int(number) and 1 <= number <= MAX_EXPERTS
        if not is_int(number) or not right or number % spec.num_ranks:
            self.refuse(
                operation,
                "num_experts",
                f"must be a positive multiple of the {spec.num_ranks} ranks up to {MAX_EXPERTS}, "
                f"got {shown(number)}",
            )
        shape = {"num_tokens": None, "num_topk": None}
        return self.array(operation, "topk_idx", topk_idx, shape, _INDEX), int(number)
