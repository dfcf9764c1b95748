"""The host engine's sums: terms added in their order, rounded once. NumPy only, local."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Terms", "add", "weighted"]

Terms = Iterable[tuple[NDArray[np.intp], NDArray[Any]]]
"""One after the other: tokens, each at most once, and their rows."""


def add(
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    biases: tuple[NDArray[Any], ...],
    terms: Terms,
) -> NDArray[Any]:
    """Add biases, then the terms, in this order, and round once.

    Args:
        shape: ``[T, H]`` of the result.
        dtype: Its dtype, that of biases and rows.
        biases: Arrays of that shape.
        terms: Rows of tokens, in the rows' dtype or in that of the sum.
    """
    total = np.zeros(shape, sum_dtype(dtype))
    begun = np.zeros(shape[0], np.bool_)
    with np.errstate(all="ignore"):
        for number, bias in enumerate(biases):
            total = total + bias.astype(total.dtype) if number else bias.astype(total.dtype)
            begun[:] = True
        for token, part in terms:
            rows = part.astype(total.dtype, copy=False)
            # The first term is taken as it is: 0 + -0 would lose a sign.
            more = begun[token]
            total[token[~more]] = rows[~more]
            total[token[more]] += rows[more]
            begun[token] = True
        return total.astype(dtype, copy=False)


def weighted(rows: NDArray[Any], weights: NDArray[np.float32] | None) -> NDArray[Any]:
    """Rows times their weights, in the type that sums are kept in."""
    if weights is None:
        return rows
    kept = sum_dtype(rows.dtype)
    with np.errstate(all="ignore"):
        product: NDArray[Any] = weights[:, None].astype(kept) * rows.astype(kept)
    return product


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Type to add in: the row's own for integers and float64, float32 for shorter floats."""
    own = dtype.kind in "iu" or dtype == np.float64
    return dtype if own else np.dtype(np.float32)
