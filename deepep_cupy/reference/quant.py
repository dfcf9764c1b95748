"""The cast to FP8: one scale per token and 128 channels, specified to the bit.

All arithmetic is float32 with round-to-nearest-even, no fused multiply-add, and subnormals kept;
the one division is IEEE's. So any machine that follows these steps gets these bits.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = [
    "FP8",
    "GROUP",
    "QUANTIZABLE",
    "SMALLEST_AMAX",
    "dequantize",
    "num_groups",
    "pack_exponents",
    "quantize",
    "scales_of",
]

Array: TypeAlias = npt.NDArray[Any]

GROUP = 128
"""Channels that share a scale; the last group of a row may be shorter."""
FP8: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)
QUANTIZABLE = tuple(np.dtype(kind) for kind in (ml_dtypes.bfloat16, np.float16, np.float32))
"""Row dtypes that can be cast; each is exact in float32."""

_LARGEST = np.float32(448)
_INVERSE = np.float32(1 / 448)  # 0x3B124925
SMALLEST_AMAX = np.float32(1e-4)  # 0x38D1B717
"""What a group counts as its largest magnitude at least."""
_NAN_CODE = 0x7F


def num_groups(hidden: int) -> int:
    """Groups of a row: ``ceil(H / 128)``."""
    return -(-hidden // GROUP)


def quantize(
    x: Array, *, round_scale: bool = False, use_ue8m0: bool = False
) -> tuple[Array, Array]:
    """Cast rows to float8_e4m3fn with a scale per group of 128 channels.

    For each token and group, with ``f(v)`` the exact float32 of an element v:

    1. ``amax`` is the largest of 1e-4 (as float32) and all ``|f(v)|``; NaN is passed over.
    2. ``r = amax * c`` with ``c = 0x3B124925``, the float32 next to 1/448.
    3. Plain: ``scale_inv = r`` and ``scale = 448 / amax``, one IEEE division.
       ``round_scale``: ``b`` is the biased exponent of r, plus 1 where its fraction is not 0;
       ``scale_inv`` is the float32 of the bits ``b << 23`` (a power of two, not below r) and
       ``scale`` that of the bits ``(254 - b) << 23``, or 0 where b is 255.
    4. The code of an element is ``f(v) * scale``, rounded to float32, then rounded to
       float8_e4m3fn, to nearest even, where what lies beyond 448 becomes 448 with its sign. NaN
       of either sign becomes the code 0x7F.
    5. The scale that travels is ``scale_inv``: element ≈ code * scale_inv. With ``use_ue8m0`` it
       is the byte b, four to an int32, the first group in the lowest byte; missing groups of the
       last word are 0.

    What follows for odd rows: a row of zeros has codes 0 and ``scale_inv`` 1e-4 * c. Values far
    below 1e-4 become 0 or subnormal codes. An infinity makes ``amax`` and ``scale_inv`` infinite
    (byte 255) and ``scale`` 0: its own code is NaN, the other elements of its group get zeros
    with their sign. Signs of zeros are kept throughout.

    Args:
        x: ``[T, H]`` bfloat16, float16 or float32.
        round_scale: Scales are powers of two.
        use_ue8m0: Pack the scales as exponents; needs ``round_scale``.

    Returns:
        The codes ``[T, H]`` float8_e4m3fn, and the scales: ``[T, ceil(H / 128)]`` float32, or
        ``[T, ceil(ceil(H / 128) / 4)]`` int32.

    Raises:
        ValueError: Another dtype, or ``use_ue8m0`` without ``round_scale``.
    """
    if x.ndim != 2 or x.dtype not in QUANTIZABLE:
        known = ", ".join(dtype.name for dtype in QUANTIZABLE)
        raise ValueError(f"quantize(): x must be [T, H] of {known}, got {x.dtype} {x.shape}")
    if use_ue8m0 and not round_scale:
        raise ValueError("quantize(): use_ue8m0 needs round_scale")
    num_tokens, hidden = x.shape
    groups = num_groups(hidden)
    wide = np.zeros((num_tokens, groups * GROUP), np.float32)  # a zero more changes no group
    with np.errstate(all="ignore"):
        wide[:, :hidden] = x
        grouped = wide.reshape(num_tokens, groups, GROUP)
        amax = np.fmax.reduce(np.abs(grouped), axis=2, initial=SMALLEST_AMAX)
        scale, scale_inv, exponent = scales_of(amax, round_scale=round_scale)
        scaled = (grouped * scale[:, :, None]).reshape(wide.shape)[:, :hidden]
        codes = np.clip(scaled, -_LARGEST, _LARGEST).astype(FP8)
    codes.view(np.uint8)[np.isnan(scaled)] = _NAN_CODE
    return codes, pack_exponents(exponent) if use_ue8m0 else scale_inv


def dequantize(codes: Array, scales: Array) -> Array:
    """What the codes stand for: ``float32(code) * scale``, one rounding.

    Args:
        codes: ``[N, H]`` float8_e4m3fn.
        scales: ``[N, S]`` float32, or int32 as ``quantize`` packs them.

    Returns:
        ``[N, H]`` float32.
    """
    groups = num_groups(codes.shape[1])
    if scales.dtype != np.float32:
        packed = np.ascontiguousarray(scales).astype("<i4")
        exponent = packed.view(np.uint8).reshape(len(codes), -1)[:, :groups].astype(np.uint32)
        bits = np.where(exponent == 255, np.uint32(0x7FC00000), exponent << 23)
        scales = np.where(exponent == 0, np.uint32(1 << 22), bits).view(np.float32)
    per_channel = np.repeat(scales, GROUP, axis=1)[:, : codes.shape[1]]
    with np.errstate(all="ignore"):
        product: Array = codes.astype(np.float32) * per_channel
    return product


def scales_of(amax: Array, *, round_scale: bool) -> tuple[Array, Array, npt.NDArray[np.uint32]]:
    """Steps 2 and 3 of ``quantize``: ``scale``, ``scale_inv`` and, where it is rounded, its biased
    exponent."""
    scale_inv = amax * _INVERSE
    exponent = _exponent_up(scale_inv)
    if not round_scale:
        return _LARGEST / amax, scale_inv, exponent
    down = np.where(exponent < 255, 254 - exponent, 0).astype(np.uint32)
    return (down << 23).view(np.float32), (exponent << 23).view(np.float32), exponent


def _exponent_up(value: Array) -> npt.NDArray[np.uint32]:
    """Biased exponent of the smallest power of two not below a positive normal float32."""
    bits = value.view(np.uint32)
    up: npt.NDArray[np.uint32] = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return up.astype(np.uint32)


def pack_exponents(exponent: npt.NDArray[np.uint32]) -> Array:
    """``[T, groups]`` biased exponents as ``use_ue8m0`` packs them."""
    tokens, groups = exponent.shape
    out = np.zeros((tokens, -(-groups // 4) * 4), np.uint8)
    out[:, :groups] = exponent
    return out.view("<i4").astype(np.int32, copy=False)
