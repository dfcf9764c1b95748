"""The order of calls in a compiled program.

XLA runs independent parts of a program in any order, and another order on another rank. All ranks
must make the calls of a Buffer in one order, so each call takes a *token*, a float32 scalar, and
returns it: its value is never looked at, but what takes it comes after what returned it. Within one
trace the token is handed on from call to call by itself. Its cotangent chains the backward calls,
last call first, as gradients flow; the forward call's own token comes along, so that a backward
call comes after its forward one.
"""

from __future__ import annotations

import sys
import threading
import zlib
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from deepep_cupy.protocol.headers import MAX_TAG

__all__ = ["BACKWARD", "call_site", "token_for", "token_made", "varying_alike"]

BACKWARD = (MAX_TAG + 1) >> 1
"""Bit of a tag: the call is the backward one of its site."""
_SITE_BITS = BACKWARD - 1
_HERE = str(Path(__file__).parent)


class _Newest(threading.local):
    """The token of the newest call, the trace in which it was made, its number there."""

    trace: Any = None
    token: Any = None
    number = 0


_newest = _Newest()


def _number_before() -> int:
    """Number of the newest call of this trace; 0: there is none yet."""
    return _newest.number if _newest.trace == get_opaque_trace_state() else 0


def token_for(after: Any) -> Any:
    """The token that the next call takes.

    Args:
        after: A result of another call, or a token, to come behind it; None: behind the newest
            call of this trace.
    """
    if after is not None:
        return getattr(after, "token", after)
    return _newest.token if _number_before() else jnp.zeros((), jnp.float32)


def token_made(token: Any) -> Any:
    """Note the token that a call has returned; the token."""
    _newest.number = _number_before() + 1
    _newest.trace, _newest.token = get_opaque_trace_state(), token
    return token


def call_site(operation: str) -> tuple[str, int]:
    """Where the user's program calls, file and line, for messages; and its tag: the same on all
    ranks that run the same program, most likely another for another call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    place = "an unknown place"
    if frame is not None:
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    number = _number_before() + 1
    return place, zlib.crc32(f"{operation} {number} at {place}".encode()) & _SITE_BITS


# ------------------------------------------------------------------------------- shard_map


def _axes_of(leaf: Any) -> frozenset[Any]:
    """Mesh axes over which a value varies within ``shard_map``, as JAX keeps them: ``vma`` from
    0.7 on, within ``manual_axis_type`` from 0.10 on."""
    aval = jax.typeof(leaf)
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", None) or getattr(aval, "vma", None) or ())


def varying_alike(*values: Any) -> Any:
    """The values, each varying over all mesh axes that any of them varies over.

    Outside of ``shard_map`` these are the values themselves.
    """
    axes: frozenset[Any] = frozenset()
    for leaf in jax.tree.leaves(values):
        axes |= _axes_of(leaf)
    if not axes:
        return values

    def one(leaf: Any) -> Any:
        more = tuple(axes - _axes_of(leaf))
        return jax.lax.pcast(leaf, more, to="varying") if more else leaf

    return jax.tree.map(one, values)
