"""The cast to FP8 of ``reference.quant``, a few rows at a time, in integers.

NumPy converts to float8 one element after the other. Here every step is one operation on an array
that stays in the cache, and the bits are those of the reference.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from deepep_cupy.reference.quant import (
    FP8,
    GROUP,
    SMALLEST_AMAX,
    num_groups,
    pack_exponents,
    quantize,
    scales_of,
)

__all__ = ["cast"]

_ELEMENTS = 1 << 16
"""Elements cast at a time: their float32 and three arrays of that size fit a core's L2 cache."""
_MAGNITUDE, _SIGN_OF_CODE = 0x7FFFFFFF, 0x80
_INFINITY = int(np.float32(np.inf).view(np.int32))
_LARGEST = int(np.float32(448).view(np.int32))
_LEAST_NORMAL = int(np.float32(2**-6).view(np.int32))
_MANTISSA = 23 - 3
"""Bits of a float32's fraction that a code has no room for."""
_BIAS = (127 - 7) << 3
"""The exponents' biases differ by that, in units of the last bit of a code."""
_UNIT = np.float32(2**9)
"""Codes below the least normal one count 1/512."""


def cast(x: NDArray[Any], *, round_scale: bool, use_ue8m0: bool) -> tuple[NDArray[Any], ...]:
    """See ``reference.quant.quantize``."""
    num_tokens, hidden = x.shape
    groups = num_groups(hidden)
    most = max(1, min(num_tokens, _ELEMENTS // (groups * GROUP)))
    codes = np.empty((num_tokens, hidden), np.uint8)
    scales: NDArray[Any] = np.empty((num_tokens, groups), np.uint32 if use_ue8m0 else np.float32)
    space = [np.zeros((most, groups * GROUP), np.int32) for _ in range(3)]
    for first in range(0, num_tokens, most):
        rows = x[first : first + most]
        found = _cast_rows(rows, [each[: len(rows)] for each in space], round_scale, use_ue8m0)
        if found is None:
            return quantize(x, round_scale=round_scale, use_ue8m0=use_ue8m0)
        codes[first : first + most], scales[first : first + most] = found[0][:, :hidden], found[1]
    return codes.view(FP8), pack_exponents(scales) if use_ue8m0 else scales


def _cast_rows(
    rows: NDArray[Any], space: list[NDArray[np.int32]], round_scale: bool, use_ue8m0: bool
) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Codes, one an int32, and scales or exponents; None where a number is not finite."""
    bits, magnitude, code = space
    grouped = (len(rows), -1, GROUP)
    value = bits.view(np.float32)
    if rows.dtype == ml_dtypes.bfloat16:  # the upper half of a float32
        upper = np.ascontiguousarray(rows).view(np.uint16)
        bits.view(np.uint32)[:, : rows.shape[1]] = upper
        bits <<= 16
    else:
        value[:, : rows.shape[1]] = rows
    value[:, rows.shape[1] :] = 0  # a zero more changes no group

    # Magnitudes of floats are in the order of their bits.
    np.bitwise_and(bits, _MAGNITUDE, out=magnitude)
    largest = magnitude.reshape(grouped).max(axis=2)
    if largest.size and largest.max() >= _INFINITY:
        return None
    amax = np.maximum(largest.view(np.float32), SMALLEST_AMAX)
    scale, scale_inv, exponent = scales_of(amax, round_scale=round_scale)
    value.reshape(grouped)[...] *= scale[:, :, None]

    # To nearest even at the last bit of a code; what rounds up into the exponent is right too.
    np.bitwise_and(bits, _MAGNITUDE, out=magnitude)
    np.minimum(magnitude, _LARGEST, out=magnitude)
    np.right_shift(magnitude, _MANTISSA, out=code)
    code &= 1
    code += magnitude
    code += (1 << (_MANTISSA - 1)) - 1 - (_BIAS << _MANTISSA)
    code >>= _MANTISSA
    small = np.flatnonzero(magnitude < _LEAST_NORMAL)
    if small.size:
        below = magnitude.reshape(-1)[small].view(np.float32)
        code.reshape(-1)[small] = np.rint(below * _UNIT)
    bits >>= 24
    bits &= _SIGN_OF_CODE
    code |= bits
    return code, exponent if use_ue8m0 else scale_inv
