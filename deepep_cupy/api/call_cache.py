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
from typing import Any, Generic, TypeAlias, TypeVar

from deepep_cupy.api.handle import DispatchHandle
from deepep_cupy.engines.calls import (
    CombineArguments,
    DispatchArguments,
    Form,
    listed,
)
from deepep_cupy.protocol.headers import Layout

__all__ = ["ArrayKey", "Key", "PlanCache", "combine_key", "dispatch_key"]

Seen: TypeAlias = tuple[Any, ...]
ArrayKey: TypeAlias = Callable[[object, bool], Seen | None]
"""``Engine.glance``."""
Key: TypeAlias = tuple[Any, ...]
F = TypeVar("F", bound=Form)

_MASK = Layout.MASK
_NOTHING = (type(None),) * 5
_MOST_FORMS = 64


def dispatch_key(given: DispatchArguments, array_key: ArrayKey, most_tokens: int) -> Key | None:
    """The key of the form of a dispatch."""
    x, scales, handle, weights = given.x, None, given.handle, given.topk_weights
    types = tuple(map(type, given))
    if types[0] is tuple:
        if len(x) != 2:
            return None
        x, scales = x
    seen = array_key(x, False)
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
        of_scales = _by_row(array_key(scales, True), tokens)
        if of_scales is None:
            return None
    if given.topk_idx is not None:
        of_choices = _by_row(array_key(given.topk_idx, False), tokens)
        if of_choices is None:
            return None
    if weights is not None:
        of_weights = _by_row(array_key(weights, False), tokens)
        if of_weights is None:
            return None
    if types[4:9] != _NOTHING:
        of_others = _others(given, array_key, tokens)
        if of_others is None:
            return None
    return types, hidden, seen[1], kind, of_scales, of_choices, of_weights, of_others, given[10:]


def _by_row(seen: Seen | None, rows: int) -> Key | None:
    """What counts of an array that must have so many rows: all but these."""
    if seen is None:
        return None
    shape = seen[0]
    return (shape[1:], seen[1]) if shape[:1] == (rows,) else None


def _others(given: DispatchArguments, array_key: ArrayKey, tokens: int) -> Key | None:
    """What counts of mask, counts and statistics."""
    parts: list[object] = []
    for array in given[4:9]:
        part: object = None
        if array is not None:
            seen = array_key(array, False)
            part = _by_row(seen, tokens) if array is given.is_token_in_rank else seen and seen[:2]
            if part is None:
                return None
        parts.append(part)
    return tuple(parts)


def combine_key(given: CombineArguments, array_key: ArrayKey) -> Key | None:
    """The key of the form of a combine."""
    handle, weights, types = given.handle, given.topk_weights, tuple(map(type, given))
    if types[1] is not DispatchHandle:
        return None
    rows = handle.routing.num_rows
    of_x = _by_row(array_key(given.x, False), rows)
    if of_x is None or len(of_x[0]) != 1:
        return None
    of_weights = of_others = None
    if weights is not None:
        of_weights = _by_row(array_key(weights, False), rows)
        if of_weights is None:
            return None
    if types[3:6] != _NOTHING[:3]:
        parts = []
        tokens = handle.num_tokens
        wanted = (rows, given.row_weights), (tokens, given.out)
        for number, array in (*wanted, *((tokens, each) for each in listed(given.bias))):
            part = None if array is None else _by_row(array_key(array, False), number)
            if part is None and array is not None:
                return None
            parts.append(part)
        of_others = tuple(parts)
    return types, of_x, _kind(handle), of_weights, of_others, given[7:]


class PlanCache(Generic[F]):
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
