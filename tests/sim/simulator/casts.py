"""Rows that are cast to FP8 on their way: on each rank by one kernel, or before it by another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from deepep_cupy.protocol.headers import dtype_code
from deepep_cupy.reference import quantize

Array = np.ndarray[Any, Any]
Rng = np.random.Generator

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (BFLOAT16, np.dtype(np.float16), np.dtype(np.float32))
HIDDEN = (16, 48, 128, 144, 272, 528, 1040)
"""Rows of a part of a group, of several groups with and without such a part; the longest two are
cut into two pieces and more."""
_SPECIAL = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-30, 448.0], np.float32)


@dataclass(frozen=True)
class Cast:
    """A cast of all ranks' rows.

    Attributes:
        rows: Per rank ``[T, H]``.
        round_scale: Scales are powers of two.
        packed: They are packed exponents.
        fused: Per rank: where bulk copies may be used, the dispatch itself casts.
    """

    rows: list[Array]
    round_scale: bool
    packed: bool
    fused: list[bool]

    def results(self) -> tuple[list[Array], list[Array]]:
        """Per rank: codes as uint8, and scales."""
        modes = {"round_scale": self.round_scale, "use_ue8m0": self.packed}
        pairs = [quantize(rows, **modes) for rows in self.rows]
        return [codes.view(np.uint8) for codes, _ in pairs], [scales for _, scales in pairs]

    def fields(self) -> dict[str, int]:
        """Of the parameter struct ``Cast``."""
        dtype = self.rows[0].dtype
        return {
            "dtype": dtype_code(dtype.name, dtype.itemsize),
            "round_scale": int(self.round_scale),
            "packed": int(self.packed),
        }

    def __str__(self) -> str:
        kind = "packed" if self.packed else "rounded" if self.round_scale else "plain"
        rows = self.rows[0]
        return f"cast {rows.dtype} H={rows.shape[1]} {kind} fused {self.fused}"


def random_cast(rng: Rng, tokens: list[int], hidden: tuple[int, ...] = HIDDEN) -> Cast:
    """Some cast of some rows."""
    dtype = DTYPES[int(rng.integers(3))]
    width = int(rng.choice(hidden))
    kind = int(rng.integers(3))
    rows = [odd_rows(rng, (number, width), dtype) for number in tokens]
    return Cast(rows, kind > 0, kind > 1, [bool(rng.random() < 0.75) for _ in tokens])


def odd_rows(rng: Rng, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
    """Rows that hold everything a float can be; the first one nothing but zeros."""
    bits = rng.integers(0, 1 << 8 * dtype.itemsize, shape, dtype=np.uint64)
    x = bits.astype(f"u{dtype.itemsize}").view(dtype).copy()
    powers = 10.0 ** rng.integers(-6, 4, (shape[0], 1))
    ordinary = (rng.standard_normal(shape) * powers).astype(dtype)
    x = np.where(rng.random((shape[0], 1)) < 0.8, ordinary, x)
    x[rng.random(shape) < 0.004] = dtype.type(np.nan)
    spots = rng.random(shape) < 0.01
    x[spots] = _SPECIAL.astype(dtype)[rng.integers(0, 8, int(spots.sum()))]
    x[:1] = _SPECIAL.astype(dtype)[rng.integers(0, 2, shape[1])]
    return x
