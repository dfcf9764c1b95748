"""What a call is given, and its *form*: all that its checks and its plan depend on.

Calls of one form differ in nothing but the contents of their arrays and how many rows these have:
in nothing that a check of ``contracts`` looks at, but for what is compared here. So a form is
checked once, and found again by its key: shapes without the number of rows, dtypes, and all other
arguments with their types (``True`` is not 1). ``None`` in a key's place: only the checks can say
what such a call is; they do so in every call that fails, and in those with arrays of other
libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from deepep_cupy.api.handle import DispatchHandle, Signature
from deepep_cupy.engines.base import (
    CombineCall,
    DispatchCall,
    Form,
    Quantization,
    Reduce,
    ScalesLayout,
    Streams,
)
from deepep_cupy.plan.headers import Layout

__all__ = [
    "CombineArguments",
    "CombineForm",
    "DispatchArguments",
    "DispatchForm",
    "Glance",
    "Key",
    "Memo",
    "combine_key",
    "dispatch_key",
    "listed",
]

Seen: TypeAlias = tuple[Any, ...]
Glance: TypeAlias = Callable[[object, bool], Seen | None]
"""``Engine.glance``."""
Key: TypeAlias = tuple[Any, ...]
F = TypeVar("F", bound=Form)

_MASK = Layout.MASK
_NOTHING = (type(None),) * 5
_MOST_FORMS = 64


class DispatchArguments(NamedTuple):
    """What the user passed to ``dispatch``; see there. ``num_sms`` is the Buffer's."""

    x: Any
    handle: Any = None
    topk_idx: Any = None
    topk_weights: Any = None
    is_token_in_rank: Any = None
    num_tokens_per_rank: Any = None
    num_tokens_per_rdma_rank: Any = None
    num_tokens_per_expert: Any = None
    cumulative_local_expert_recv_stats: Any = None
    previous_event: Any = None
    expert_alignment: Any = 1
    own: bool = False
    num_worst_tokens: Any = 0
    config: Any = None
    num_sms: int | None = None
    async_finish: Any = False
    allocate_on_comm_stream: Any = False
    dtype: Any = None
    scales_layout: Any = "row"
    quantize: Any = None
    round_scale: Any = False
    use_ue8m0: Any = False
    do_cpu_sync: Any = None
    do_expand: Any = None
    do_zero_padding: Any = False


def dispatch_key(given: DispatchArguments, glance: Glance, most_tokens: int) -> Key | None:
    """The key of the form of a dispatch."""
    x, scales, handle, weights = given.x, None, given.handle, given.topk_weights
    types = tuple(map(type, given))
    if types[0] is tuple:
        if len(x) != 2:
            return None
        x, scales = x
    seen = glance(x, False)
    if seen is None or len(seen[0]) != 2:
        return None
    tokens, hidden = seen[0]
    if tokens > most_tokens:
        return None
    kind = of_scales = of_choices = of_weights = of_others = None
    if handle is not None:
        worst = given.num_worst_tokens
        if types[1] is not DispatchHandle or handle.routing.num_tokens != tokens:
            return None
        if type(worst) is not int or (worst != 0 and worst != handle.num_recv_tokens):
            return None
        kind = _kind(handle)
    if scales is not None:
        of_scales = _by_row(glance(scales, True), tokens)
        if of_scales is None:
            return None
    if given.topk_idx is not None:
        of_choices = _by_row(glance(given.topk_idx, False), tokens)
        if of_choices is None:
            return None
    if weights is not None:
        of_weights = _by_row(glance(weights, False), tokens)
        if of_weights is None:
            return None
    if types[4:9] != _NOTHING:
        of_others = _others(given, glance, tokens)
        if of_others is None:
            return None
    return types, hidden, seen[1], kind, of_scales, of_choices, of_weights, of_others, given[10:]


def _by_row(seen: Seen | None, rows: int) -> Key | None:
    """What counts of an array that must have so many rows: all but these."""
    if seen is None:
        return None
    shape = seen[0]
    return (shape[1:], seen[1]) if shape[:1] == (rows,) else None


def _others(given: DispatchArguments, glance: Glance, tokens: int) -> Key | None:
    """What counts of mask, counts and statistics."""
    parts: list[object] = []
    for array in given[4:9]:
        part: object = None
        if array is not None:
            seen = glance(array, False)
            part = _by_row(seen, tokens) if array is given.is_token_in_rank else seen and seen[:2]
            if part is None:
                return None
        parts.append(part)
    return tuple(parts)


@dataclass(eq=False, slots=True, kw_only=True)
class DispatchForm(Form):
    """What checks found out about dispatches of one form.

    Attributes:
        view: Dtype that the bytes of ``x`` are taken for; None: its own.
        signature: Of the newest handle; None where one is given.
        expert_alignment: As the others, see ``DispatchCall``.
        streams: Without the event to begin after.
    """

    view: np.dtype[Any] | None
    signature: Signature | None
    expert_alignment: int
    own: bool
    scales_layout: ScalesLayout
    quantize: Quantization | None
    num_worst_tokens: int | None
    expand: bool
    zero_padding: bool
    num_sms: int | None
    streams: Streams

    def call(self, given: DispatchArguments) -> DispatchCall:
        """The call for the engine. ``given``: arrays are the engine's."""
        x, scales, handle, topk_idx = given.x, None, given.handle, given.topk_idx
        event = given.previous_event
        if type(x) is tuple:
            x, scales = x
        if self.view is not None:
            x = x.view(self.view)
        routed = handle is not None or topk_idx is not None
        return DispatchCall(
            x,
            topk_idx,
            given.topk_weights,
            None if routed else given.is_token_in_rank,
            None if handle is None else handle.routing,
            self.expert_alignment,
            self.own,
            scales,
            self.scales_layout,
            self.quantize,
            self.num_worst_tokens,
            self.expand,
            self.zero_padding,
            given.cumulative_local_expert_recv_stats,
            self.num_sms,
            self.streams if event is None else _begun_after(event, self.streams),
            self,
        )

    def signed(self, given: DispatchArguments, num_tokens: int) -> Signature:
        """The signature of a call's handle."""
        signature = self.signature
        if signature is None:
            known: Signature = given.handle.signature
            return known
        if signature.num_tokens != num_tokens:
            self.signature = signature = replace(signature, num_tokens=num_tokens)
        return signature


class CombineArguments(NamedTuple):
    """What the user passed to ``combine``; see there. ``num_sms`` is the Buffer's."""

    x: Any
    handle: Any
    topk_weights: Any = None
    row_weights: Any = None
    bias: Any = None
    out: Any = None
    previous_event: Any = None
    own: bool = False
    config: Any = None
    num_sms: int | None = None
    async_finish: Any = False
    allocate_on_comm_stream: Any = False
    reduce: Any = "exact"


def combine_key(given: CombineArguments, glance: Glance) -> Key | None:
    """The key of the form of a combine."""
    handle, weights, types = given.handle, given.topk_weights, tuple(map(type, given))
    if types[1] is not DispatchHandle:
        return None
    rows = handle.routing.num_rows
    of_x = _by_row(glance(given.x, False), rows)
    if of_x is None or len(of_x[0]) != 1:
        return None
    of_weights = of_others = None
    if weights is not None:
        of_weights = _by_row(glance(weights, False), rows)
        if of_weights is None:
            return None
    if types[3:6] != _NOTHING[:3]:
        parts = []
        tokens = handle.num_tokens
        wanted = (rows, given.row_weights), (tokens, given.out)
        for number, array in (*wanted, *((tokens, each) for each in listed(given.bias))):
            part = None if array is None else _by_row(glance(array, False), number)
            if part is None and array is not None:
                return None
            parts.append(part)
        of_others = tuple(parts)
    return types, of_x, _kind(handle), of_weights, of_others, given[7:]


@dataclass(eq=False, slots=True, kw_only=True)
class CombineForm(Form):
    """What checks found out about combines of one form.

    Attributes:
        own: As the others, see ``CombineCall``.
        streams: Without the event to begin after.
    """

    own: bool
    reduce: Reduce
    num_sms: int | None
    streams: Streams

    def call(self, given: CombineArguments) -> CombineCall:
        """The call for the engine. ``given``: arrays are the engine's."""
        bias, event = given.bias, given.previous_event
        return CombineCall(
            given.x,
            given.handle.routing,
            given.topk_weights,
            () if bias is None else listed(bias),
            self.own,
            self.reduce,
            given.row_weights,
            given.out,
            self.num_sms,
            self.streams if event is None else _begun_after(event, self.streams),
            self,
        )


class Memo(Generic[F]):
    """Forms that were found to be right."""

    __slots__ = ("_forms",)

    def __init__(self) -> None:
        self._forms: dict[Key, F] = {}

    def find(self, key: Key | None) -> F | None:
        """The form with that key, where there is one."""
        if key is None:
            return None
        try:
            return self._forms.get(key)
        except TypeError:  # some argument is nothing that could be right
            return None

    def keep(self, key: Key | None, form: F) -> None:
        """Remember a form. A program has a few; one that makes ever new ones stays bounded."""
        if key is not None:
            if len(self._forms) >= _MOST_FORMS:
                self._forms.clear()
            with suppress(TypeError):
                self._forms[key] = form


def listed(bias: Any) -> tuple[Any, ...]:
    """The biases that one argument gives."""
    if bias is None:
        return ()
    return tuple(bias) if isinstance(bias, tuple | list) else (bias,)


def _kind(handle: DispatchHandle) -> tuple[object, ...]:
    """All that checks ask of a handle but its numbers of rows."""
    signature, routing = handle.signature, handle.routing
    return (
        signature.buffer,
        signature.num_topk,
        signature.layout is _MASK,
        routing.expanded,
        routing.expert_alignment,
    )


def _begun_after(event: Any, streams: Streams) -> Streams:
    return Streams(event.event, streams.async_finish, streams.allocate_on_comm_stream)
