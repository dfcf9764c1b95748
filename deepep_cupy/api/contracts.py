"""Every check of a call's arguments that one rank can make alone.

A check that fails raises ``ContractError`` with a refusal, which the Buffer sends to the other
ranks in this rank's place, so that all raise. Array types are the engine's business (``intake``);
here are shapes, dtypes and what goes with what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from deepep_cupy.api.handle import DispatchHandle, Signature
from deepep_cupy.engines.base import CombineCall, DispatchCall
from deepep_cupy.errors import ContractError
from deepep_cupy.plan.headers import (
    ARGUMENTS,
    DTYPE_CODES,
    Layout,
    Refusal,
    RefusalCode,
    describe_refusal,
)
from deepep_cupy.plan.spec import BufferSpec

__all__ = ["Checker", "DispatchArguments"]

Intake = Callable[[str, str, object], Any]

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_SUMMABLE = tuple(name for name in DTYPE_CODES if name not in _FP8)


@dataclass(frozen=True, eq=False, kw_only=True)
class DispatchArguments:
    """What the user passed to ``dispatch``; see there."""

    x: object
    handle: object
    topk_idx: object
    topk_weights: object
    is_token_in_rank: object
    num_tokens_per_rank: object
    num_tokens_per_rdma_rank: object
    num_tokens_per_expert: object
    expert_alignment: object
    own: bool


class Checker:
    """Checks the arguments of one Buffer's calls.

    Args:
        spec: Sizes of the Buffer.
        buffer: Serial number of the Buffer, for handles.
        intake: ``Engine.intake``.
    """

    def __init__(self, spec: BufferSpec, buffer: int, intake: Intake) -> None:
        self._spec = spec
        self._buffer = buffer
        self._intake = intake

    # ------------------------------------------------------------------------------- dispatch

    def dispatch(self, given: DispatchArguments) -> tuple[DispatchCall, Signature]:
        """Check a dispatch; the call for the engine, and the signature of the handle to make."""
        x = self._rows("dispatch", given.x)
        num_tokens, spec = len(x), self._spec
        if num_tokens > spec.num_max_tokens_per_rank:
            refusal = Refusal(RefusalCode.TOO_MANY_TOKENS, num_tokens)
            limit = spec.num_max_tokens_per_rank
            raise ContractError(describe_refusal("dispatch", spec.rank, refusal, limit), refusal)
        self._layout_arrays(given, num_tokens)
        topk_idx = mask = handle = None
        if given.handle is not None:
            handle = self._cached(given, num_tokens)
            signature = handle.signature
        elif given.topk_idx is not None:
            topk_idx = self._choices("dispatch", given.topk_idx, num_tokens)
            signature = self._signature(num_tokens, topk_idx.shape[1], Layout.TOPK)
        elif given.is_token_in_rank is not None:
            mask = self._take("dispatch", "is_token_in_rank", given.is_token_in_rank)
            signature = self._signature(num_tokens, 0, Layout.MASK)
        else:
            self._refuse(
                "dispatch", "", "needs one of topk_idx, is_token_in_rank or handle, got none"
            )
        weights = None
        if given.topk_weights is not None:
            shape = {"num_tokens": num_tokens, "num_topk": signature.num_topk}
            weights = self._weights("dispatch", given.topk_weights, shape, signature)
        call = DispatchCall(
            x=x,
            topk_idx=topk_idx,
            topk_weights=weights,
            is_token_in_rank=mask,
            routing=None if handle is None else handle.routing,
            expert_alignment=self._alignment(given.expert_alignment),
            own=given.own,
        )
        return call, signature

    def _signature(self, num_tokens: int, num_topk: int, layout: Layout) -> Signature:
        spec = self._spec
        return Signature(
            self._buffer, spec.num_ranks, num_tokens, num_topk, spec.num_experts, layout
        )

    def _cached(self, given: DispatchArguments, num_tokens: int) -> DispatchHandle:
        handle = self._handle("dispatch", given.handle)
        if given.topk_idx is not None:
            self._refuse(
                "dispatch", "topk_idx", "must not be given together with a handle, which fixes it"
            )
        if handle.num_tokens != num_tokens:
            self._refuse(
                "dispatch",
                "x",
                f"must have as many rows as the dispatch that made the handle, "
                f"{handle.num_tokens}, got {num_tokens}",
            )
        return handle

    def _layout_arrays(self, given: DispatchArguments, num_tokens: int) -> None:
        """Shapes and dtypes of what DeepEP needs and we do not."""
        spec = self._spec
        ranks, int32 = spec.num_ranks, (np.dtype(np.int32),)
        wanted: dict[str, tuple[dict[str, int | None], tuple[np.dtype[Any], ...]]] = {
            "is_token_in_rank": (
                {"num_tokens": num_tokens, "num_ranks": ranks},
                (np.dtype(np.bool_),),
            ),
            "num_tokens_per_rank": ({"num_ranks": ranks}, int32),
            "num_tokens_per_rdma_rank": ({"num_nodes": 1}, int32),
            "num_tokens_per_expert": ({"num_experts": spec.num_experts}, int32),
        }
        for argument, (shape, dtypes) in wanted.items():
            value = getattr(given, argument)
            if value is not None:
                array = self._take("dispatch", argument, value)
                self._expect("dispatch", argument, array, shape, dtypes)

    def _choices(self, operation: str, value: object, num_tokens: int | None) -> Any:
        topk_idx = self._take(operation, "topk_idx", value)
        spec = self._spec
        if spec.num_experts is None:
            self._refuse(operation, "topk_idx", "needs num_experts in the Buffer's constructor")
        dtypes = (np.dtype(np.int64), np.dtype(np.int32))
        shape = {"num_tokens": num_tokens, "num_topk": None}
        self._expect(operation, "topk_idx", topk_idx, shape, dtypes)
        if not 1 <= topk_idx.shape[1] <= spec.num_topk:
            self._refuse(
                operation,
                "topk_idx",
                f"must have 1 to num_topk = {spec.num_topk} columns, as the Buffer's constructor "
                f"was told, got {topk_idx.shape[1]}",
            )
        return topk_idx

    def _alignment(self, value: object) -> int:
        if not _is_int(value) or int(value) < 1:  # type: ignore[call-overload]
            self._refuse(
                "dispatch", "expert_alignment", f"must be a whole number from 1 on, got {value!r}"
            )
        return int(value)  # type: ignore[call-overload, no-any-return]

    # -------------------------------------------------------------------------------- combine

    def combine(
        self, x: object, handle: object, topk_weights: object, bias: object, *, own: bool
    ) -> CombineCall:
        """Check a combine."""
        known = self._handle("combine", handle)
        rows = self._rows("combine", x)
        if len(rows) != known.num_recv_tokens:
            self._refuse(
                "combine",
                "x",
                f"must have one row per row the dispatch received, {known.num_recv_tokens}, got "
                f"{len(rows)}",
            )
        dtype = np.dtype(rows.dtype)
        if not (dtype.isnative and dtype.name in _SUMMABLE):
            why = " (FP8 rows cannot be added exactly: combine a wider type)"
            self._refuse(
                "combine",
                "x",
                f"must have a dtype that can be added ({', '.join(_SUMMABLE)}), got {dtype}"
                f"{why if dtype.name in _FP8 else ''}",
            )
        weights = None
        if topk_weights is not None:
            shape = {"num_recv_tokens": len(rows), "num_topk": known.signature.num_topk}
            weights = self._weights("combine", topk_weights, shape, known.signature)
        given = bias if isinstance(bias, tuple | list) else () if bias is None else (bias,)
        if len(given) > 2:
            self._refuse("combine", "bias", f"must be at most two arrays, got {len(given)}")
        shape = {"num_tokens": known.num_tokens, "hidden": rows.shape[1]}
        biases = tuple(self._take("combine", "bias", each) for each in given)
        for each in biases:
            self._expect("combine", "bias", each, shape, (dtype,))
        return CombineCall(
            x=rows, routing=known.routing, topk_weights=weights, biases=biases, own=own
        )

    # ------------------------------------------------------------------------------ the layout

    def layout(self, topk_idx: object, num_experts: object) -> tuple[Any, int]:
        """Check the arguments of ``get_dispatch_layout``; a failure concerns this rank alone."""
        operation, spec = "get_dispatch_layout", self._spec
        number = spec.num_experts if num_experts is None else num_experts
        if not _is_int(number) or int(number) < 1 or int(number) % spec.num_ranks:  # type: ignore[call-overload]
            self._refuse(
                operation,
                "num_experts",
                f"must be a positive multiple of the {spec.num_ranks} ranks, got {number!r}",
            )
        array = self._take(operation, "topk_idx", topk_idx)
        dtypes = (np.dtype(np.int64), np.dtype(np.int32))
        self._expect(operation, "topk_idx", array, {"num_tokens": None, "num_topk": None}, dtypes)
        return array, int(number)  # type: ignore[call-overload]

    # ----------------------------------------------------------------------------------- parts

    def _rows(self, operation: str, value: object) -> Any:
        if isinstance(value, tuple | list):
            self._refuse(
                operation,
                "x",
                f"must be one array [rows, hidden], got a {type(value).__name__} of {len(value)}; "
                f"(x, scales) pairs are not supported",
            )
        x = self._take(operation, "x", value)
        self._expect(operation, "x", x, {"rows": None, "hidden": None}, None)
        row_bytes, most = x.shape[1] * x.dtype.itemsize, self._spec.max_row_bytes
        if not 1 <= row_bytes <= most:
            self._refuse(
                operation,
                "x",
                f"must have rows of 1 to {most} bytes (hidden × itemsize of the Buffer's "
                f"constructor), got {row_bytes} (shape {tuple(x.shape)}, {x.dtype})",
            )
        return x

    def _handle(self, operation: str, value: object) -> DispatchHandle:
        if not isinstance(value, DispatchHandle):
            self._refuse(
                operation,
                "handle",
                f"must be a handle that dispatch() returned, got {type(value).__name__}",
            )
        if value.signature.buffer != self._buffer:
            self._refuse(operation, "handle", "must be of this Buffer, got one of another Buffer")
        return value

    def _weights(
        self, operation: str, value: object, shape: dict[str, int], signature: Signature
    ) -> Any:
        if signature.layout == Layout.MASK:
            self._refuse(
                operation,
                "topk_weights",
                "must not be given where the routing came from is_token_in_rank: there are no "
                "choices to weigh",
            )
        weights = self._take(operation, "topk_weights", value)
        self._expect(operation, "topk_weights", weights, shape, (np.dtype(np.float32),))
        return weights

    def _expect(
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
        self._refuse(operation, argument, f"must have {wanted}, got shape {got}, {array.dtype}")

    def _take(self, operation: str, argument: str, value: object) -> Any:
        """The engine's array; whatever it complains about is refused on every rank."""
        try:
            return self._intake(operation, argument, value)
        except ContractError as error:
            if error.refusal is None:
                error.refusal = Refusal(RefusalCode.ARGUMENT, ARGUMENTS.index(argument))
            raise

    def _refuse(self, operation: str, argument: str, complaint: str) -> NoReturn:
        subject = f"argument '{argument}' " if argument else ""
        number = ARGUMENTS.index(argument) if argument in ARGUMENTS else 0
        raise ContractError(
            f"{operation}(): {subject}{complaint}, on rank {self._spec.rank}.",
            Refusal(RefusalCode.ARGUMENT, number),
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
