"""DLPack capsules whose dtypes NumPy and CuPy do not know: they pose as integers.

A capsule is handed out once, and says of its items what code of a kind, and how many bits, they
have. Where the kind is FP8 (or bfloat16, for NumPy), the code is changed to that of unsigned
integers of as many bits, and the array that is made of it viewed as what it is.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

__all__ = ["FLOAT8", "OneCapsule", "pose_as_integers"]

_UINT, _BFLOAT = 1, 4
FLOAT8 = {
    7: "float8_e3m4",
    8: "float8_e4m3",
    9: "float8_e4m3b11fnuz",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
}
"""DLPack type code → name of the dtype in ml_dtypes."""
_CODE_AT = {b"dltensor": 20, b"dltensor_versioned": 52}
"""Name of a capsule → where the type code is in what it points to (data pointer, device of two
ints, number of dimensions, code; before them, in the versioned form, version, context, deleter and
flags)."""

_api = ctypes.pythonapi
_get_name = _api.PyCapsule_GetName
_get_name.restype, _get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_get_pointer = _api.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def pose_as_integers(capsule: object, *, bfloat16: bool) -> np.dtype[Any] | None:
    """Change an FP8 capsule to bytes and, where ``bfloat16`` says so, one of that dtype to 16-bit
    words; return its dtype, or None for any other."""
    name = _get_name(capsule)
    if name not in _CODE_AT:
        return None
    address = _get_pointer(capsule, name) + _CODE_AT[name]
    found = None
    kind = ctypes.c_uint32.from_address(address).value  # a byte of code, one of bits, two of lanes
    if kind >> 8 == 1 << 8 | 8:
        found = FLOAT8.get(kind & 0xFF)
    elif bfloat16 and kind == 1 << 16 | 16 << 8 | _BFLOAT:
        found = "bfloat16"
    if found is None:
        return None
    import ml_dtypes

    ctypes.c_uint8.from_address(address).value = _UINT
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, found))
    return dtype


class OneCapsule:
    """Hands out a capsule once: what synchronization there was to do has been done.

    Args:
        capsule: Of ``__dlpack__``.
        device: Of ``__dlpack_device__``.
    """

    def __init__(self, capsule: object, device: tuple[int, int]) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **_: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device
