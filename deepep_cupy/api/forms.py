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

Glance: TypeAlias = Callable[[object, bool], tuple[tuple[int, ...], Any] | None]
"""``Engine.glance``."""
Key: TypeAlias = tuple[object, ...]
F = TypeVar("F", bound=Form)

_MASK = Layout.MASK
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
    x, scales, handle = given.x, None, given.handle
    if type(x) is tuple and len(x) == 2:
        x, scales = x
        if scales is None:
            return None
    seen = glance(x, False)
    if seen is None or len(seen[0]) != 2:
        return None
    (tokens, hidden), dtype = seen
    if tokens > most_tokens:
        return None
    kind: Key | None = None
    if handle is not None:
        if type(handle) is not DispatchHandle or handle.routing.num_tokens != tokens:
            return None
        worst = given.num_worst_tokens
        if type(worst) is not int or (worst != 0 and worst != handle.num_recv_tokens):
            return None
        kind = _kind(handle)
    parts: list[object] = [hidden, dtype, kind, type(given.previous_event)]
    for array in (scales, given.topk_idx, given.topk_weights, given.is_token_in_rank):
        if array is None:
            parts.append(None)
            continue
        seen = glance(array, array is scales)
        if seen is None or seen[0][:1] != (tokens,):
            return None
        parts.append((seen[0][1:], seen[1]))
    for array in given[5:9]:  # counts and statistics
        seen = None if array is None else glance(array, False)
        if seen is None and array is not None:
            return None
        parts.append(seen)
    options = given[10:]
    return (*parts, options, *map(type, options))


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
    handle = given.handle
    if type(handle) is not DispatchHandle:
        return None
    seen = glance(given.x, False)
    rows = handle.routing.num_rows
    if seen is None or len(seen[0]) != 2 or seen[0][0] != rows:
        return None
    parts: list[object] = [seen[0][1], seen[1], type(given.previous_event), _kind(handle)]
    number = (rows,)
    for array in (given.topk_weights, given.row_weights):
        if array is None:
            parts.append(None)
            continue
        seen = glance(array, False)
        if seen is None or seen[0][:1] != number:
            return None
        parts.append((seen[0][1:], seen[1]))
    bias, out = given.bias, given.out
    if bias is not None or out is not None:
        number = (handle.num_tokens,)
        for array in (out, *listed(bias)):
            seen = None if array is None else glance(array, False)
            if array is not None and (seen is None or seen[0][:1] != number):
                return None
            parts.append(None if seen is None else (seen[0][1:], seen[1]))
    options = given[7:]
    return (*parts, options, *map(type, options))


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
