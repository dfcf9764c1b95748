"""Every check of a call's arguments that one rank can make alone.

A check that fails raises ``ContractError`` with a refusal, which the Buffer sends to the other
ranks in this rank's place, so that all raise. Array types are the engine's business
(``import_array``); here are shapes, dtypes and what goes with what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from deepep_cupy.api.call_cache import ArrayKey, PlanCache, combine_key, dispatch_key
from deepep_cupy.api.config import Config, resolve_dtype
from deepep_cupy.api.events import EventOverlap
from deepep_cupy.api.handle import DispatchHandle
from deepep_cupy.engines.calls import (
    HERE,
    CombineArguments,
    CombineCall,
    CombineForm,
    DispatchArguments,
    DispatchCall,
    DispatchForm,
    Quantization,
    Reduce,
    ScalesLayout,
    Signature,
    Streams,
    listed,
)
from deepep_cupy.engines.protocol import ALL_MODES
from deepep_cupy.errors import ContractError
from deepep_cupy.protocol.headers import (
    ARGUMENTS,
    DTYPE_CODES,
    Layout,
    Refusal,
    RefusalCode,
    describe_refusal,
)
from deepep_cupy.protocol.routing import num_scales
from deepep_cupy.protocol.sizes import BufferSpec

__all__ = ["ArrayImporter", "Checker", "Checks", "is_int"]


# ---------------- The parts that checks of arguments are made of: shapes, dtypes, numbers, and how


ArrayImporter = Callable[[str, str, object], Any]


def is_int(value: object) -> bool:
    """Whether it is a whole number, of Python or of NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class Checks:
    """Checks of one argument each, for one Buffer.

    Args:
        spec: Sizes of the Buffer.
        buffer: Serial number of the Buffer, for handles.
        intake: ``Engine.intake``.
        modes: ``Engine.modes``.
        intake_scales: ``ModalEngine.intake_scales``.
        glance: ``Engine.glance``; without, every call is checked anew.
    """

    def __init__(
        self,
        spec: BufferSpec,
        buffer: int,
        import_array: ArrayImporter,
        modes: frozenset[str] = ALL_MODES,
        import_scales: ArrayImporter | None = None,
        array_key: ArrayKey | None = None,
    ) -> None:
        self._spec = spec
        self._buffer = buffer
        self._intake = import_array
        self._modes = modes
        self._intake_scales = import_scales or import_array
        self._glance = array_key
        self._dispatches: PlanCache[DispatchForm] = PlanCache()
        self._combines: PlanCache[CombineForm] = PlanCache()

    def rows(self, operation: str, value: object, wire_itemsize: int | None = None) -> Any:
        """``[rows, H]`` of a length that the Buffer was made for.

        Args:
            operation: Method name, for messages.
            value: What the user passed.
            wire_itemsize: Bytes of an element as it travels, where that is not its own.
        """
        if isinstance(value, tuple | list):
            self.refuse(
                operation,
                "x",
                f"must be one array [rows, hidden], got a {type(value).__name__} of {len(value)}",
            )
        x = self.take(operation, "x", value)
        self.expect(operation, "x", x, {"rows": None, "hidden": None}, None)
        itemsize = x.dtype.itemsize if wire_itemsize is None else wire_itemsize
        row_bytes, most = x.shape[1] * itemsize, self._spec.max_row_bytes
        if not 1 <= row_bytes <= most:
            self.refuse(
                operation,
                "x",
                f"must have rows of 1 to {most} bytes (hidden × itemsize of the Buffer's "
                f"constructor), got {row_bytes} (shape {tuple(x.shape)}, {x.dtype})",
            )
        return x

    def handle(self, operation: str, value: object) -> DispatchHandle:
        """A handle of this Buffer."""
        if not isinstance(value, DispatchHandle):
            self.refuse(
                operation,
                "handle",
                f"must be a handle that dispatch() returned, got {type(value).__name__}",
            )
        if value.signature.buffer != self._buffer:
            self.refuse(operation, "handle", "must be of this Buffer, got one of another Buffer")
        return value

    def weights(
        self,
        operation: str,
        argument: str,
        value: object,
        shape: dict[str, int],
        signature: Signature,
    ) -> Any:
        """float32 weights of that shape, where there are choices to weigh."""
        if signature.layout == Layout.MASK:
            self.refuse(
                operation,
                argument,
                "must not be given where the routing came from is_token_in_rank: there are no "
                "choices to weigh",
            )
        weights = self.take(operation, argument, value)
        self.expect(operation, argument, weights, shape, (np.dtype(np.float32),))
        return weights

    def streams(
        self,
        operation: str,
        previous_event: object,
        async_finish: object,
        allocate_on_comm_stream: object,
    ) -> Streams:
        """Where the operation runs, as DeepEP says it."""
        background = self.flag(operation, "async_finish", async_finish)
        allocate = self.flag(operation, "allocate_on_comm_stream", allocate_on_comm_stream)
        if previous_event is None and not background and not allocate:
            return HERE
        self.need(operation, "async_finish" if background else "previous_event", "events")
        if previous_event is not None and not isinstance(previous_event, EventOverlap):
            self.refuse(
                operation,
                "previous_event",
                f"must be an EventOverlap, as capture() and other calls return it, got "
                f"{type(previous_event).__name__}",
            )
        if allocate and (previous_event is None or not background):
            self.refuse(
                operation,
                "allocate_on_comm_stream",
                "must come with previous_event and async_finish=True",
            )
        event = None if previous_event is None else previous_event.event
        return Streams(event, background, allocate)

    def num_sms(self, operation: str, config: object) -> int | None:
        """Blocks that a ``Config`` asks for."""
        if config is None:
            return None
        if not isinstance(config, Config):
            self.refuse(operation, "config", f"must be a Config, got {type(config).__name__}")
        return config.num_sms

    def flag(self, operation: str, argument: str, value: object) -> bool:
        """True or False, and nothing that only looks so."""
        if isinstance(value, bool | np.bool_):
            return bool(value)
        return self.refuse(operation, argument, f"must be True or False, got {value!r}")

    def number(self, operation: str, argument: str, value: object, low: int, high: int) -> int:
        """A whole number in these bounds."""
        if isinstance(value, int | np.integer) and is_int(value) and low <= value <= high:
            return int(value)
        return self.refuse(
            operation, argument, f"must be a whole number from {low} to {high}, got {value!r}"
        )

    def need(self, operation: str, argument: str, mode: str) -> None:
        """Refuse what the engine of this Buffer cannot do."""
        if mode not in self._modes:
            self.refuse(
                operation,
                argument,
                f"is not possible on this Buffer's engine, which has no mode '{mode}'; "
                f"engine='host' has all",
            )

    def expect(
        self,
        operation: str,
        argument: str,
        array: Any,
        shape: dict[str, Any],
        dtypes: tuple[np.dtype[Any], ...] | None,
    ) -> None:
        """Compare shape (None: any length) and dtype (None: any) with what is wanted."""
        got = tuple(array.shape)
        sizes = tuple(shape.values())
        fits = len(got) == len(sizes) and all(
            want in (None, have) for want, have in zip(sizes, got, strict=True)
        )
        if fits and (dtypes is None or np.dtype(array.dtype) in dtypes):
            return
        names = ", ".join(shape)
        numbers = ", ".join("any" if size is None else str(size) for size in sizes)
        wanted = f"shape [{names}] = [{numbers}]"
        if dtypes is not None:
            wanted += f" and dtype {' or '.join(str(dtype) for dtype in dtypes)}"
        self.refuse(operation, argument, f"must have {wanted}, got shape {got}, {array.dtype}")

    def writable(self, operation: str, argument: str, array: Any) -> None:
        """An array that may be written into; CuPy's always may."""
        if not getattr(array.flags, "writeable", True):
            self.refuse(operation, argument, "must be writable, got a read-only array")

    def take(self, operation: str, argument: str, value: object, *, strided: bool = False) -> Any:
        """The engine's array; whatever it complains about is refused on every rank."""
        try:
            import_array = self._intake_scales if strided else self._intake
            return import_array(operation, argument, value)
        except ContractError as error:
            if error.refusal is None:
                error.refusal = Refusal(RefusalCode.ARGUMENT, ARGUMENTS.index(argument))
            raise

    def refuse(self, operation: str, argument: str, complaint: str) -> NoReturn:
        """Raise the error that makes every rank raise."""
        subject = f"argument '{argument}' " if argument else ""
        number = ARGUMENTS.index(argument) if argument in ARGUMENTS else 0
        raise ContractError(
            f"{operation}(): {subject}{complaint}, on rank {self._spec.rank}.",
            Refusal(RefusalCode.ARGUMENT, number),
        )


_FP8 = ("float8_e4m3fn", "float8_e5m2")
_SUMMABLE = tuple(name for name in DTYPE_CODES if name not in _FP8)
_SCALES = tuple(np.dtype(kind) for kind in (np.float32, np.int32, np.uint32))
_QUANTIZABLE = ("bfloat16", "float16", "float32")
_FORMATS = {"fp8_e4m3": "float8_e4m3fn"}
_SCALES_LAYOUTS: tuple[ScalesLayout, ...] = ("row", "column")
_REDUCES: tuple[Reduce, ...] = ("exact", "per_rank")
_INT32 = (np.dtype(np.int32),)


class Checker(Checks):
    """Checks the arguments of one Buffer's calls: once for all calls of a form."""

    # ------------------------------------------------------------------------------- dispatch

    def dispatch(self, given: DispatchArguments) -> tuple[DispatchCall, Signature]:
        """Check a dispatch; the call for the engine, and the signature of the handle to make."""
        array_key, most = self._glance, self._spec.num_max_tokens_per_rank
        key = None if array_key is None else dispatch_key(given, array_key, most)
        form = self._dispatches.find(key)
        if form is None:
            given, form = self._dispatch(given)
            self._dispatches.keep(key, form)
        call = form.call(given)
        return call, form.signed(given, len(call.x))

    def _dispatch(self, given: DispatchArguments) -> tuple[DispatchArguments, DispatchForm]:
        """All checks; the arguments with the engine's arrays, and what was found out."""
        quantize = self._quantization(given)
        x, scales, view = self._rows_and_scales(given, quantize)
        num_tokens, spec = len(x), self._spec
        if num_tokens > spec.num_max_tokens_per_rank:
            refusal = Refusal(RefusalCode.TOO_MANY_TOKENS, num_tokens)
            limit = spec.num_max_tokens_per_rank
            raise ContractError(describe_refusal("dispatch", spec.rank, refusal, limit), refusal)
        self._layout_arrays(given, num_tokens)
        topk_idx = mask = handle = made = None
        if given.handle is not None:
            handle = self._cached(given, num_tokens)
            signature = handle.signature
        elif given.topk_idx is not None:
            topk_idx = self._choices("dispatch", given.topk_idx, num_tokens)
            signature = made = self._signature(num_tokens, topk_idx.shape[1], Layout.TOPK)
        elif given.is_token_in_rank is not None:
            mask = self.take("dispatch", "is_token_in_rank", given.is_token_in_rank)
            signature = made = self._signature(num_tokens, 0, Layout.MASK)
        else:
            self.refuse(
                "dispatch", "", "needs one of topk_idx, is_token_in_rank or handle, got none"
            )
        weights = None
        if given.topk_weights is not None:
            shape = {"num_tokens": num_tokens, "num_topk": signature.num_topk}
            weights = self.weights("dispatch", "topk_weights", given.topk_weights, shape, signature)
        expand = self._expansion(given, handle)
        layout = self._one_of("dispatch", "scales_layout", given.scales_layout, _SCALES_LAYOUTS)
        alignment = self._alignment(given, handle)
        worst = self._worst(given, handle)
        zero_padding = self._zero_padding(given, expand)
        taken = given._replace(
            x=x if scales is None else (x, scales),
            topk_idx=topk_idx,
            topk_weights=weights,
            is_token_in_rank=mask,
            cumulative_local_expert_recv_stats=self._stats(given),
        )
        return taken, DispatchForm(
            view=view,
            signature=made,
            expert_alignment=alignment,
            own=given.own,
            scales_layout=layout,
            quantize=quantize,
            num_worst_tokens=worst,
            expand=expand,
            zero_padding=zero_padding,
            num_sms=self.num_sms("dispatch", given.config) or given.num_sms,
            streams=self._streams("dispatch", given),
        )

    def _signature(self, num_tokens: int, num_topk: int, layout: Layout) -> Signature:
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
                self.refuse("dispatch", "quantize", "casts rows, but x has scales already")
            if len(rows) != 2:
                self.refuse(
                    "dispatch",
                    "x",
                    f"must be one array, or a pair of rows and scales, got a "
                    f"{type(rows).__name__} of {len(rows)}",
                )
            self.need("dispatch", "x", "scales")
            rows, scales = rows
            if scales is None:
                self.refuse("dispatch", "scales", "must be an array, got None; pass x alone")
        x = self.rows("dispatch", rows, 1 if quantize is not None else None)
        view = None if given.dtype is None else self._view(x, given.dtype)
        dtype = np.dtype(x.dtype) if view is None else view
        if quantize is not None and dtype.name not in _QUANTIZABLE:
            self.refuse(
                "dispatch",
                "x",
                f"must be of {' or '.join(_QUANTIZABLE)} to be cast, got {dtype}",
            )
        if scales is None:
            return x, None, view
        if dtype.itemsize != 1 or dtype.name not in DTYPE_CODES:
            self.refuse(
                "dispatch",
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
        except (TypeError, ValueError):
            self.refuse(
                "dispatch", "dtype", f"must be a dtype of NumPy or ml_dtypes, got {dtype!r}"
            )
        if wanted.itemsize != x.dtype.itemsize:
            self.refuse(
                "dispatch",
                "dtype",
                f"must have the {x.dtype.itemsize} bytes of an element of x ({x.dtype}), got "
                f"{wanted}",
            )
        return wanted

    def _quantization(self, given: DispatchArguments) -> Quantization | None:
        round_scale = self.flag("dispatch", "round_scale", given.round_scale)
        use_ue8m0 = self.flag("dispatch", "use_ue8m0", given.use_ue8m0)
        if given.quantize is None:
            for argument, value in (("round_scale", round_scale), ("use_ue8m0", use_ue8m0)):
                if value:
                    self.refuse("dispatch", argument, "needs quantize='fp8_e4m3'")
            return None
        name = self._one_of("dispatch", "quantize", given.quantize, tuple(_FORMATS))
        self.need("dispatch", "quantize", "quantize")
        if use_ue8m0 and not round_scale:
            self.refuse(
                "dispatch", "use_ue8m0", "needs round_scale=True: only powers of two are exponents"
            )
        return Quantization(_FORMATS[name], round_scale, use_ue8m0)

    def _cached(self, given: DispatchArguments, num_tokens: int) -> DispatchHandle:
        handle = self.handle("dispatch", given.handle)
        if given.topk_idx is not None:
            self.refuse(
                "dispatch", "topk_idx", "must not be given together with a handle, which fixes it"
            )
        if handle.num_tokens != num_tokens:
            self.refuse(
                "dispatch",
                "x",
                f"must have as many rows as the dispatch that made the handle, "
                f"{handle.num_tokens}, got {num_tokens}",
            )
        return handle

    def _layout_arrays(self, given: DispatchArguments, num_tokens: int) -> None:
        """Shapes and dtypes of what DeepEP needs and we do not."""
        spec = self._spec
        ranks = spec.num_ranks
        wanted: dict[str, tuple[dict[str, int | None], tuple[np.dtype[Any], ...]]] = {
            "is_token_in_rank": (
                {"num_tokens": num_tokens, "num_ranks": ranks},
                (np.dtype(np.bool_),),
            ),
            "num_tokens_per_rank": ({"num_ranks": ranks}, _INT32),
            "num_tokens_per_rdma_rank": ({"num_nodes": 1}, _INT32),
            "num_tokens_per_expert": ({"num_experts": spec.num_experts}, _INT32),
        }
        for argument, (shape, dtypes) in wanted.items():
            value = getattr(given, argument)
            if value is not None:
                array = self.take("dispatch", argument, value)
                self.expect("dispatch", argument, array, shape, dtypes)

    def _choices(self, operation: str, value: object, num_tokens: int | None) -> Any:
        topk_idx = self.take(operation, "topk_idx", value)
        spec = self._spec
        if spec.num_experts is None:
            self.refuse(operation, "topk_idx", "needs num_experts in the Buffer's constructor")
        dtypes = (np.dtype(np.int64), np.dtype(np.int32))
        shape = {"num_tokens": num_tokens, "num_topk": None}
        self.expect(operation, "topk_idx", topk_idx, shape, dtypes)
        if not 1 <= topk_idx.shape[1] <= spec.num_topk:
            self.refuse(
                operation,
                "topk_idx",
                f"must have 1 to num_topk = {spec.num_topk} columns, as the Buffer's constructor "
                f"was told, got {topk_idx.shape[1]}",
            )
        return topk_idx

    def _alignment(self, given: DispatchArguments, handle: DispatchHandle | None) -> int:
        value = self.number("dispatch", "expert_alignment", given.expert_alignment, 1, 1 << 30)
        if handle is None:
            return value
        fixed = handle.expert_alignment
        if handle.do_expand and value not in (1, fixed):
            self.refuse(
                "dispatch",
                "expert_alignment",
                f"must be that of the dispatch that made the handle, {fixed}, or left out, got "
                f"{value}",
            )
        return fixed

    def _expansion(self, given: DispatchArguments, handle: DispatchHandle | None) -> bool:
        fixed = None if handle is None else handle.do_expand
        if given.do_expand is None:
            return bool(fixed)
        expand = self.flag("dispatch", "do_expand", given.do_expand)
        if fixed is not None and expand != fixed:
            self.refuse(
                "dispatch",
                "do_expand",
                f"must be {fixed}, as in the dispatch that made the handle, or left out, got "
                f"{expand}",
            )
        if expand and handle is None:
            self.need("dispatch", "do_expand", "expand")
            if given.topk_idx is None:
                self.refuse("dispatch", "do_expand", "needs topk_idx")
        return expand

    def _zero_padding(self, given: DispatchArguments, expand: bool) -> bool:
        zero_padding = self.flag("dispatch", "do_zero_padding", given.do_zero_padding)
        if zero_padding and not expand:
            self.refuse("dispatch", "do_zero_padding", "needs do_expand=True")
        return zero_padding

    def _worst(self, given: DispatchArguments, handle: DispatchHandle | None) -> int | None:
        """``num_worst_tokens``, or None where the host waits; ``do_cpu_sync`` says it too."""
        most = self._spec.max_recv_tokens
        worst = self.number("dispatch", "num_worst_tokens", given.num_worst_tokens, 0, most)
        sync = given.do_cpu_sync
        sync = None if sync is None else self.flag("dispatch", "do_cpu_sync", sync)
        if handle is not None:
            if sync:
                self.refuse("dispatch", "do_cpu_sync", "must not be True with a handle")
            if worst not in (0, handle.num_recv_tokens):
                self.refuse(
                    "dispatch",
                    "num_worst_tokens",
                    f"must be the {handle.num_recv_tokens} tokens of the handle, or left out, "
                    f"got {worst}",
                )
            return None
        if worst and sync:
            self.refuse("dispatch", "do_cpu_sync", "must not be True with num_worst_tokens")
        if not worst and sync is not False:
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
            self.refuse("dispatch", name, "needs topk_idx: the call has no choices to count")
        stats = self.take("dispatch", name, value)
        shape = {"num_local_experts": self._spec.num_local_experts}
        self.expect("dispatch", name, stats, shape, _INT32)
        self.writable("dispatch", name, stats)
        return stats

    # -------------------------------------------------------------------------------- combine

    def combine(self, given: CombineArguments) -> CombineCall:
        """Check a combine; the call for the engine."""
        array_key = self._glance
        key = None if array_key is None else combine_key(given, array_key)
        form = self._combines.find(key)
        if form is None:
            given, form = self._combine(given)
            self._combines.keep(key, form)
        return form.call(given)

    def _combine(self, given: CombineArguments) -> tuple[CombineArguments, CombineForm]:
        """All checks; the arguments with the engine's arrays, and what was found out."""
        known = self.handle("combine", given.handle)
        rows = self.rows("combine", given.x)
        if len(rows) != known.num_rows:
            self.refuse(
                "combine",
                "x",
                f"must have one row per row that the dispatch returned, {known.num_rows}, got "
                f"{len(rows)}",
            )
        dtype = np.dtype(rows.dtype)
        if not (dtype.isnative and dtype.name in _SUMMABLE):
            why = " (FP8 rows cannot be added exactly: combine a wider type)"
            self.refuse(
                "combine",
                "x",
                f"must have a dtype that can be added ({', '.join(_SUMMABLE)}), got {dtype}"
                f"{why if dtype.name in _FP8 else ''}",
            )
        shape = {"num_rows": len(rows)}
        if not known.do_expand:
            shape = {"num_recv_tokens": len(rows), "num_topk": known.signature.num_topk}
        weights = None
        if given.topk_weights is not None:
            weights = self.weights(
                "combine", "topk_weights", given.topk_weights, shape, known.signature
            )
        result = {"num_tokens": known.num_tokens, "hidden": rows.shape[1]}
        out = None
        if given.out is not None:
            self.need("combine", "out", "out")
            out = self.take("combine", "out", given.out)
            self.expect("combine", "out", out, result, (dtype,))
            self.writable("combine", "out", out)
        taken = given._replace(
            x=rows,
            topk_weights=weights,
            bias=self._biases(given.bias, result, dtype),
            out=out,
        )
        reduce = self._one_of("combine", "reduce", given.reduce, _REDUCES)
        taken = taken._replace(row_weights=self._row_weights(given, known, dtype))
        return taken, CombineForm(
            own=given.own,
            reduce=reduce,
            num_sms=self.num_sms("combine", given.config) or given.num_sms,
            streams=self._streams("combine", given),
        )

    def _biases(self, bias: object, shape: dict[str, int], dtype: np.dtype[Any]) -> tuple[Any, ...]:
        given = listed(bias)
        if len(given) > 2:
            self.refuse("combine", "bias", f"must be at most two arrays, got {len(given)}")
        biases = tuple(self.take("combine", "bias", each) for each in given)
        for each in biases:
            self.expect("combine", "bias", each, shape, (dtype,))
        return biases

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

    def _streams(self, operation: str, given: DispatchArguments | CombineArguments) -> Streams:
        """Where calls of a form run; the event is each call's own, and not kept."""
        event, allocate = given.previous_event, given.allocate_on_comm_stream
        found = self.streams(operation, event, given.async_finish, allocate)
        return found if event is None else replace(found, previous_event=None)

    # ------------------------------------------------------------------------------ the layout

    def layout(self, topk_idx: object, num_experts: object) -> tuple[Any, int]:
        """Check the arguments of ``get_dispatch_layout``; a failure concerns this rank alone."""
        operation, spec = "get_dispatch_layout", self._spec
        number = spec.num_experts if num_experts is None else num_experts
        if not is_int(number) or int(number) < 1 or int(number) % spec.num_ranks:  # type: ignore[call-overload]
            self.refuse(
                operation,
                "num_experts",
                f"must be a positive multiple of the {spec.num_ranks} ranks, got {number!r}",
            )
        array = self.take(operation, "topk_idx", topk_idx)
        dtypes = (np.dtype(np.int64), np.dtype(np.int32))
        self.expect(operation, "topk_idx", array, {"num_tokens": None, "num_topk": None}, dtypes)
        return array, int(number)  # type: ignore[call-overload]

    def _one_of(self, operation: str, argument: str, value: object, known: tuple[Any, ...]) -> Any:
        for each in known:
            if isinstance(value, str) and value == each:
                return each
        said = " or ".join(repr(each) for each in known)
        return self.refuse(operation, argument, f"must be {said}, got {value!r}")
