"""What was probably meant, for the messages about wrong arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from deepep_cupy.protocol.sizes import BufferSpec

__all__ = ["of_handle", "of_row_bytes", "suggest_keywords"]

P = ParamSpec("P")
T = TypeVar("T")


def suggest_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` with the nearest name in the ``TypeError`` of an unknown keyword."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> T:
        try:
            return function(*given, **named)
        except TypeError:
            unknown = next((name for name in named if name not in known), None)
            if unknown is None:
                raise
        name = function.__qualname__.removesuffix(".__init__").removeprefix("Buffer.")
        near = difflib.get_close_matches(unknown, known, n=1, cutoff=0.5)
        meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
        raise TypeError(f"{name}(): there is no argument {unknown!r}; {meant}")

    return call


def of_handle(operation: str, value: object) -> str:
    """The end of a message about a ``handle`` that is none; empty where nothing is known."""
    if hasattr(value, "handle"):
        return "; give its member: handle=recv.handle"
    if not hasattr(value, "shape"):
        return ""
    if operation == "combine":
        return "; the rows come first: combine(y, handle)"
    return "; topk_idx and topk_weights are keywords: dispatch(x, topk_idx=..., topk_weights=...)"


def of_row_bytes(operation: str, x: Any, row_bytes: int, spec: BufferSpec) -> str:
    """What to say of rows of this length, which the Buffer was not made for."""
    text = (
        f"must have rows of 1 to {spec.max_row_bytes} bytes (hidden × itemsize of the Buffer's "
        f"constructor), got {row_bytes} (shape {tuple(x.shape)}, {x.dtype})"
    )
    if x.dtype.itemsize <= spec.itemsize or x.shape[1] * spec.itemsize > spec.max_row_bytes:
        return text
    default = " (the default)" if spec.dtype == "bfloat16" else ""
    other = ", or pass y.astype(recv_x.dtype)" if operation == "combine" else ""
    text += f"; the Buffer was made for {spec.dtype} rows{default}: give it dtype='{x.dtype}'"
    return text + other
