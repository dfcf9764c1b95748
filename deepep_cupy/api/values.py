"""Numbers, flags, shapes and dtypes that a user passes, checked one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from deepep_cupy.errors import ContractError, described, shown

__all__ = [
    "is_int",
    "is_true",
    "misfit",
    "new_array",
    "resolve_dtype",
    "stream_address",
    "wrong_flag",
    "wrong_number",
]

_MOST_BYTES = 1 << 50


def is_int(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, of Python or of NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_true(value: object) -> bool:
    """Whether it is True, of Python or of NumPy; all else, whatever its truth, is not."""
    return isinstance(value, bool | np.bool_) and bool(value)


def wrong_number(name: str, value: object, low: int, high: int) -> str | None:
    """What to say of an argument that must be a whole number in these bounds; None: it is."""
    if is_int(value) and low <= value <= high:
        return None
    return f"argument '{name}' must be a whole number from {low} to {high}, got {shown(value)}"


def wrong_flag(name: str, value: object) -> str | None:
    """What to say of an argument that must be True or False, not 0 or 1; None: it is."""
    if isinstance(value, bool | np.bool_):
        return None
    return f"argument '{name}' must be True or False, got {shown(value)}"


def stream_address(stream: object) -> int:
    """The ``cudaStream_t`` of a stream of any library.

    Raises:
        ContractError: It is no stream.
    """
    found: object = stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:  # a method that returns (version, address); once an attribute
        found = (protocol() if callable(protocol) else protocol)[1]
    else:
        for name in ("cuda_stream", "ptr", "handle"):  # PyTorch; CuPy; Numba
            if hasattr(stream, name):
                found = getattr(stream, name)
                break
    if hasattr(found, "value"):  # ctypes; a null pointer's value is None
        found = found.value or 0
    if not is_int(found) or not 0 <= found < 1 << 64:
        raise ContractError(
            f"on(): argument 'stream' must be a CUDA stream or the address of one, got "
            f"{shown(stream)}."
        )
    return int(found)


def resolve_dtype(dtype: Any) -> np.dtype[Any]:
    """A NumPy dtype from what a user writes: ``"bfloat16"``, ``np.float32``, a dtype, …

    Raises:
        TypeError: It names no dtype of NumPy or ml_dtypes, or one with references.
    """
    known = getattr(ml_dtypes, dtype, None) if isinstance(dtype, str) else dtype
    if isinstance(dtype, str) and not isinstance(known, type):  # ml_dtypes has other names too
        known = dtype
    try:
        resolved = np.dtype(known)
    except Exception as error:
        raise TypeError(f"{shown(dtype)} is no dtype: {described(error)}") from error
    plain = not resolved.hasobject and resolved.subdtype is None and resolved.itemsize > 0
    if dtype is None or not plain:
        raise TypeError(f"{shown(dtype)} is no dtype of plain bytes")
    return resolved


def misfit(
    array: Any, shape: Mapping[str, int | None], dtypes: tuple[np.dtype[Any], ...] | None
) -> str | None:
    """What to say of an array that must have this shape (None: any) and one of these dtypes."""
    got = tuple(array.shape)
    sizes = tuple(shape.values())
    fits = len(got) == len(sizes) and all(
        want in (None, have) for want, have in zip(sizes, got, strict=True)
    )
    if fits and (dtypes is None or np.dtype(array.dtype) in dtypes):
        return None
    names = ", ".join(shape)
    numbers = ", ".join("any" if size is None else str(size) for size in sizes)
    wanted = f"shape [{names}] = [{numbers}]"
    if dtypes is not None:
        wanted += f" and dtype {' or '.join(str(dtype) for dtype in dtypes)}"
    return f"must have {wanted}, got shape {got}, {array.dtype}"


def new_array(operation: str, shape: object, dtype: object) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of an array that is to be made.

    Raises:
        ContractError: On this rank, when they are wrong.
    """
    wanted = f"{operation}(): argument 'shape' must be a tuple of whole numbers from 0 on"
    whole = isinstance(shape, Sequence) and all(is_int(extent) and extent >= 0 for extent in shape)
    if not isinstance(shape, Sequence) or not whole:
        raise ContractError(f"{wanted}, got {shown(shape)}.")
    sizes = tuple(int(extent) for extent in shape)
    try:
        kind = resolve_dtype(dtype)
    except TypeError as error:
        raise ContractError(
            f"{operation}(): argument 'dtype' must be a dtype of NumPy or ml_dtypes, got "
            f"{shown(dtype)}."
        ) from error
    if math.prod(sizes) * kind.itemsize > _MOST_BYTES:
        raise ContractError(f"{wanted} for at most 1 PiB, got {sizes}.")
    return sizes, kind
