"""The checks of dispatch: a broken rule is an error before anything has moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from deepep_cupy.reference.quant import num_groups

__all__ = [
    "check_experts",
    "check_masks",
    "check_rows",
    "check_scales",
    "check_topk",
    "check_weights",
    "check_worst",
    "names_an_expert_twice",
    "names_no_expert",
]

Array: TypeAlias = npt.NDArray[Any]


def check_rows(xs: Sequence[Array]) -> None:
    if not xs:
        raise ValueError("dispatch(): wanted one x a rank, got none")
    for rank, x in enumerate(xs):
        if x.ndim != 2 or x.dtype.hasobject or x.dtype.itemsize == 0:
            raise ValueError(
                f"dispatch(): x must be [T, H] of plain bytes, got {x.dtype} {x.shape} "
                f"on rank {rank}"
            )
        if x.dtype != xs[0].dtype or x.shape[1] != xs[0].shape[1]:
            raise ValueError(
                f"dispatch(): rows of x are {x.dtype}[{x.shape[1]}] on rank {rank}, "
                f"{xs[0].dtype}[{xs[0].shape[1]}] on rank 0"
            )


def check_experts(num_experts: int, num_ranks: int) -> None:
    if num_experts < 1 or num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a positive multiple of the {num_ranks} ranks, got {num_experts}"
        )


def check_masks(xs: Sequence[Array], masks: Sequence[Array]) -> Sequence[Array]:
    if len(masks) != len(xs):
        raise ValueError(f"dispatch(): wanted {len(xs)} masks, one a rank, got {len(masks)}")
    for rank, (x, mask) in enumerate(zip(xs, masks, strict=True)):
        if mask.shape != (len(x), len(xs)) or mask.dtype != np.bool_:
            raise ValueError(
                f"dispatch(): is_token_in_rank must be bool {(len(x), len(xs))}, "
                f"got {mask.dtype} {mask.shape} on rank {rank}"
            )
    return masks


def check_topk(xs: Sequence[Array], topk_idx: Sequence[Array], num_experts: int) -> None:
    if len(topk_idx) != len(xs):
        raise ValueError(f"dispatch(): wanted {len(xs)} topk_idx, one a rank, got {len(topk_idx)}")
    for rank, (x, idx) in enumerate(zip(xs, topk_idx, strict=True)):
        _check_topk_shape(idx, len(x), topk_idx[0].shape, topk_idx[0].dtype, rank)
        bad = np.flatnonzero(names_no_expert(idx, num_experts))
        if bad.size:
            raise ValueError(
                f"dispatch(): topk_idx of token {bad[0]} on rank {rank} holds an expert outside "
                f"-1..{num_experts - 1}"
            )
        bad = np.flatnonzero(names_an_expert_twice(idx))
        if bad.size:
            raise ValueError(
                f"dispatch(): topk_idx of token {bad[0]} on rank {rank} names an expert twice"
            )


def names_no_expert(topk_idx: Array, num_experts: int) -> Array:
    """``[T]`` bool: tokens with an entry outside -1..E-1."""
    outside = (topk_idx < -1) | (topk_idx >= num_experts)
    return np.asarray(outside.any(axis=1))


def names_an_expert_twice(topk_idx: Array) -> Array:
    """``[T]`` bool: tokens of which two entries are the same expert."""
    ordered = np.sort(topk_idx, axis=1)
    equal = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    return np.asarray(equal.any(axis=1))


def _check_topk_shape(
    idx: Array, num_tokens: int, shape: tuple[int, ...], dtype: np.dtype[Any], rank: int
) -> None:
    if idx.dtype not in (np.int32, np.int64) or idx.dtype != dtype:
        raise ValueError(
            "topk_idx must be int32 or int64, the same on all ranks, "
            f"got {idx.dtype} on rank {rank}"
        )
    if idx.ndim != 2 or idx.shape != (num_tokens, *shape[1:]):
        raise ValueError(
            f"topk_idx must be [T, K] = {(num_tokens, *shape[1:])}, got {idx.shape} on rank {rank}"
        )


def check_weights(
    operation: str, weights: Sequence[Array], num_rows: Sequence[int], num_topk: int
) -> None:
    if len(weights) != len(num_rows):
        raise ValueError(
            f"{operation}(): wanted {len(num_rows)} topk_weights, one a rank, got {len(weights)}"
        )
    for rank, (weight, rows) in enumerate(zip(weights, num_rows, strict=True)):
        if weight.shape != (rows, num_topk) or weight.dtype != np.float32:
            raise ValueError(
                f"{operation}(): topk_weights must be float32 {(rows, num_topk)}, "
                f"got {weight.dtype} {weight.shape} on rank {rank}"
            )


def check_scales(xs: Sequence[Array], scales: Sequence[Array]) -> None:
    """One-byte rows, and as many scales of four bytes as they have groups."""
    for rank, (x, scale) in enumerate(zip(xs, scales, strict=True)):
        groups = num_groups(x.shape[1])
        columns = groups if scale.dtype == np.float32 else -(-groups // 4)
        if x.dtype.itemsize != 1 or scale.dtype not in (np.float32, np.int32, np.uint32):
            raise ValueError(
                f"dispatch(): scales are float32, or int32 or uint32 for packed ones, of one-byte "
                f"rows, got {scale.dtype} for {x.dtype} on rank {rank}"
            )
        if scale.shape != (len(x), columns) or scale.dtype != scales[0].dtype:
            raise ValueError(
                f"dispatch(): scales must be {scales[0].dtype} {(len(x), columns)}, got "
                f"{scale.dtype} {scale.shape} on rank {rank}"
            )


def check_worst(num_recv: Sequence[int], worst: Sequence[int]) -> None:
    """No rank receives more tokens than it made room for."""
    if len(worst) != len(num_recv):
        raise ValueError(
            f"dispatch(): wanted {len(num_recv)} num_worst_tokens, one a rank, got {len(worst)}"
        )
    for rank, (real, most) in enumerate(zip(num_recv, worst, strict=True)):
        if real > most:
            raise ValueError(
                f"dispatch(): rank {rank} would receive {real} tokens, more than its "
                f"num_worst_tokens = {most}"
            )
