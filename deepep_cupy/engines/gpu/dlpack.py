"""DLPack, with the dtypes that CuPy does not know: FP8.

A capsule of FP8 is told to hold unsigned bytes, imported by CuPy, and viewed as what it is. The
capsule's owner is not deceived: it frees by its own means, and nobody else reads the capsule.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["FLOAT8", "take_dlpack"]

_UINT = 1
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


def take_dlpack(value: Any) -> Any:
    """A CuPy array over the memory of ``value``, ready on the current stream of the device."""
    import cupy

    current = cupy.cuda.get_current_stream()
    capturing = cupy.cuda.runtime.streamIsCapturing(current.ptr)
    # 1 is how DLPack calls the legacy default stream, -1 asks for no synchronization.
    stream = -1 if capturing else current.ptr or 1
    try:
        capsule = value.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # a producer from before the versions
        capsule = value.__dlpack__(stream=stream)
    name = _pose_as_bytes(capsule)
    array = cupy.from_dlpack(_Capsule(capsule, value.__dlpack_device__()))
    return array if name is None else array.view(_dtype(name))


def _pose_as_bytes(capsule: Any) -> str | None:
    """Let an FP8 capsule hold bytes; the name of its dtype, or None for any other."""
    name = _get_name(capsule)
    if name not in _CODE_AT:
        return None
    address = _get_pointer(capsule, name) + _CODE_AT[name]
    code = ctypes.c_uint8.from_address(address)
    bits = ctypes.c_uint8.from_address(address + 1)
    lanes = ctypes.c_uint16.from_address(address + 2)
    if code.value not in FLOAT8 or bits.value != 8 or lanes.value != 1:
        return None
    found = FLOAT8[code.value]
    code.value = _UINT
    return found


def _dtype(name: str) -> Any:
    import ml_dtypes

    return getattr(ml_dtypes, name)


class _Capsule:
    """Hands out a capsule once: what synchronization there was to do has been done."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device
