"""Plans of calls that were checked before, found again by a key of all that their checks look at.

Alike calls differ in nothing but the contents of their arrays and how many rows these have. They
are checked once; the plan that came of it is found again by its key: shapes without the number of
rows, dtypes, and all other arguments with their types (``True`` is not 1). Arrays of other
libraries are taken as the engine's first, and then looked at like these. Calls without a key are
checked each time: those that fail, and those with ``dest``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeAlias, TypeVar

from deepep_cupy.api.arguments import ImportArray
from deepep_cupy.api.checks import Checker
from deepep_cupy.api.handle import DispatchHandle
from deepep_cupy.engines.calls import (
    CallPlan,
    CombineArguments,
    CombineCall,
    CombinePlan,
    DispatchArguments,
    DispatchCall,
    DispatchPlan,
    Signature,
    imported,
    listed,
)
from deepep_cupy.errors import ContractError
from deepep_cupy.protocol.headers import Layout

__all__ = [
    "ArrayKey",
    "CallCache",
    "ForeignArrays",
    "Key",
    "PlanCache",
    "by_row",
    "combine_key",
    "dispatch_key",
    "kind_of",
    "whole",
]

Seen: TypeAlias = tuple[Any, ...]
ArrayKey: TypeAlias = Callable[[object, bool], Seen | None]
"""``Engine.array_key``."""
Key: TypeAlias = tuple[Any, ...]
P = TypeVar("P", bound=CallPlan)
A = TypeVar("A", DispatchArguments, CombineArguments)

_MASK = Layout.MASK
_NO_ARRAYS = "handle", "previous_event", "options", "dest"
_DISPATCHED, _COMBINED = (
    tuple((at, name) for at, name in enumerate(kind._fields) if name not in _NO_ARRAYS)
    for kind in (DispatchArguments, CombineArguments)
)
"""Numbers and names of arguments that may be arrays."""
_MOST_PLANS = 160


def dispatch_key(
    given: DispatchArguments, array_key: ArrayKey, most_tokens: int, most_low_latency: int = 0
) -> Key | None:
    """The key of a dispatch's plan; None: only the checks can tell what this call is."""
    x, scales, handle, options = given.x, None, given.handle, given.options
    topk_idx, weights = given.topk_idx, given.topk_weights
    if given.dest is not None:  # its values are looked at
        return None
    if type(x) is tuple:
        if len(x) != 2 or x[1] is None:
            return None
        x, scales = x
    seen = array_key(x, False)
    if seen is None or len(seen[0]) != 2:
        return None
    tokens, hidden = seen[0]
    if tokens > most_tokens or (options.low_latency and tokens > most_low_latency):
        return None
    kind = of_scales = of_choices = of_weights = of_others = None
    if handle is not None:
        worst = options.num_worst_tokens
        if type(handle) is not DispatchHandle or handle.routing.num_tokens != tokens:
            return None
        if type(worst) is not int or (worst != 0 and worst != handle.num_recv_tokens):
            return None
        kind = kind_of(handle)
    if scales is not None:
        of_scales = by_row(array_key(scales, True), tokens)
        if of_scales is None:
            return None
    if topk_idx is not None:
        of_choices = by_row(array_key(topk_idx, False), tokens)
        if of_choices is None:
            return None
    if weights is not None:
        of_weights = by_row(array_key(weights, False), tokens)
        if of_weights is None:
            return None
    if (
        given.is_token_in_rank is not None
        or given.num_tokens_per_rank is not None
        or given.num_tokens_per_rdma_rank is not None
        or given.num_tokens_per_expert is not None
        or given.cumulative_local_expert_recv_stats is not None
    ):
        of_others = _others(given, array_key, tokens)
        if of_others is None:
            return None
    types = type(given.previous_event), *map(type, options)
    return types, options, hidden, seen[1], kind, of_scales, of_choices, of_weights, of_others


def by_row(seen: Seen | None, rows: int) -> Key | None:
    """The part of the key for an array that must have so many rows: all but their number."""
    if seen is None:
        return None
    shape = seen[0]
    return (shape[1:], seen[1]) if shape[:1] == (rows,) else None


def _others(given: DispatchArguments, array_key: ArrayKey, tokens: int) -> Key | None:
    """The part of the key for mask, counts and statistics; None: there is none."""
    mask, of_mask = given.is_token_in_rank, None
    if mask is not None:
        of_mask = by_row(array_key(mask, False), tokens)
        if of_mask is None:
            return None
    others = (
        given.num_tokens_per_rank,
        given.num_tokens_per_rdma_rank,
        given.num_tokens_per_expert,
        given.cumulative_local_expert_recv_stats,
    )
    parts = whole(others, array_key)
    return None if parts is None else (of_mask, parts)


def combine_key(given: CombineArguments, array_key: ArrayKey) -> Key | None:
    """The key of a combine's plan; None: only the checks can tell what this call is."""
    handle, weights, options = given.handle, given.topk_weights, given.options
    row_weights, bias, out = given.row_weights, given.bias, given.out
    if type(handle) is not DispatchHandle:
        return None
    rows = handle.routing.num_rows
    of_x = by_row(array_key(given.x, False), rows)
    if of_x is None or len(of_x[0]) != 1:
        return None
    of_weights = of_others = None
    if weights is not None:
        of_weights = by_row(array_key(weights, False), rows)
        if of_weights is None:
            return None
    if row_weights is not None or bias is not None or out is not None:
        parts = []
        tokens = handle.num_tokens
        wanted = (rows, row_weights), (tokens, out)
        for number, array in (*wanted, *((tokens, each) for each in listed(bias))):
            part = None if array is None else by_row(array_key(array, False), number)
            if part is None and array is not None:
                return None
            parts.append(part)
        of_others = type(bias), tuple(parts)
    types = type(given.previous_event), *map(type, options)
    return types, options, of_x, kind_of(handle), of_weights, of_others


def whole(arrays: tuple[object, ...], array_key: ArrayKey) -> Key | None:
    """The part of the key for arrays whose whole shape counts; None: there is none."""
    parts = []
    for array in arrays:
        seen = None if array is None else array_key(array, False)
        if seen is None and array is not None:
            return None
        parts.append(None if seen is None else seen[:2])
    return tuple(parts)


class ForeignArrays:
    """Takes arrays of other libraries as the engine's, before anything is asked of them.

    Args:
        array_key: ``Engine.array_key``.
        import_array: ``Engine.import_array``.
        import_scales: ``Engine.import_scales``.
    """

    def __init__(
        self, array_key: ArrayKey, import_array: ImportArray, import_scales: ImportArray
    ) -> None:
        self._array_key = array_key
        self._import_array, self._import_scales = import_array, import_scales

    def taken(self, operation: str, given: A, fields: tuple[tuple[int, str], ...]) -> A:
        """The arguments with arrays of the engine, as far as these can be had; ``given`` itself
        where nothing changes. What cannot be taken stays: the checks say why.

        Args:
            operation: ``dispatch`` or ``combine``.
            given: The arguments.
            fields: Numbers and names of those that may be arrays.
        """
        arguments: list[Any] | None = None
        for at, name in fields:
            value = given[at]
            if value is None:
                continue
            took: object
            if type(value) is tuple or type(value) is list:
                pair = name == "x"  # rows and their scales
                each = [self._one(operation, name, v, pair and n == 1) for n, v in enumerate(value)]
                same = all(one is other for one, other in zip(each, value, strict=True))
                took = value if same else type(value)(each)
            else:
                took = self._one(operation, name, value, False)
            if took is not value:
                arguments = arguments or list(given)
                arguments[at] = took
        return given if arguments is None else type(given)(*arguments)

    def _one(self, operation: str, name: str, value: object, strided: bool) -> object:
        kind = type(value)
        if not (hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__")):
            return value
        if self._array_key(value, strided) is not None:
            return value
        try:
            return (self._import_scales if strided else self._import_array)(operation, name, value)
        except ContractError:
            return value


class PlanCache(Generic[P]):
    """Plans of calls that were found to be right."""

    __slots__ = ("_plans",)

    def __init__(self) -> None:
        self._plans: dict[Key, P] = {}

    def find(self, key: Key | None) -> P | None:
        """The plan with that key, where there is one."""
        if key is None:
            return None
        try:
            return self._plans.get(key)
        except TypeError:  # some argument is nothing that could be right
            return None

    def keep(self, key: Key | None, plan: P) -> None:
        """Remember a plan. A program has a few; one that makes ever new ones stays bounded."""
        if key is not None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            with suppress(TypeError):
                self._plans[key] = plan


def kind_of(handle: DispatchHandle) -> tuple[object, ...]:
    """All that checks ask of a handle but its numbers of rows."""
    signature, routing = handle.signature, handle.routing
    return (
        signature.buffer,
        signature.num_topk,
        signature.layout is _MASK,
        routing.expanded,
        routing.expert_alignment,
        routing.low_latency,
    )


class CallCache:
    """Makes calls of arguments: with the plan of an earlier call like it, else by all checks.

    Args:
        checker: The Buffer's checks.
        array_key: ``Engine.array_key``.
        most_tokens: M of the Buffer.
        most_low_latency: M' of the Buffer.
        foreign: Takes arrays of other libraries.
    """

    def __init__(
        self,
        checker: Checker,
        array_key: ArrayKey,
        most_tokens: int,
        most_low_latency: int = 0,
        foreign: ForeignArrays | None = None,
    ) -> None:
        self._foreign = foreign
        self._checker = checker
        self._array_key = array_key
        self._most_tokens = most_tokens
        self._most_low_latency = most_low_latency
        self._dispatches: PlanCache[DispatchPlan] = PlanCache()
        self._combines: PlanCache[CombinePlan] = PlanCache()

    def dispatch(self, given: DispatchArguments) -> tuple[DispatchCall, Signature]:
        """The call for the engine, and the signature of the handle to make.

        Raises:
            ContractError: An argument is wrong. Carries a refusal.
        """
        key = dispatch_key(given, self._array_key, self._most_tokens, self._most_low_latency)
        taken = given
        if key is None and self._foreign is not None and given.dest is None:
            taken = self._foreign.taken("dispatch", given, _DISPATCHED)
            if taken is not given:
                sizes = self._most_tokens, self._most_low_latency
                key = dispatch_key(taken, self._array_key, *sizes)
        plan = self._dispatches.find(key)
        checked = taken
        if plan is None:
            checked, plan = self._checker.dispatch(taken)
            self._dispatches.keep(key, plan)
        call = plan.call(checked)
        if checked is not given:
            call.kept = imported(given, checked)
        return call, plan.signed(given.handle, len(call.x))

    def combine(self, given: CombineArguments) -> CombineCall:
        """The call for the engine.

        Raises:
            ContractError: An argument is wrong. Carries a refusal.
        """
        key = combine_key(given, self._array_key)
        taken = given
        if key is None and self._foreign is not None:
            taken = self._foreign.taken("combine", given, _COMBINED)
            if taken is not given:
                key = combine_key(taken, self._array_key)
        plan = self._combines.find(key)
        checked = taken
        if plan is None:
            checked, plan = self._checker.combine(taken)
            self._combines.keep(key, plan)
        call = plan.call(checked)
        if checked is not given:
            call.kept = imported(given, checked)
        return call
