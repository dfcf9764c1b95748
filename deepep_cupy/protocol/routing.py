"""Integers of a dispatch: who gets which token, at which row. NumPy only, no communication."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.protocol.headers import Refusal, RefusalCode

__all__ = [
    "SCALE_GROUP",
    "Bools",
    "Ints",
    "check_experts",
    "count_per_expert",
    "local_choices",
    "mask_of_choices",
    "num_scales",
    "recv_offsets",
    "round_up",
    "send_rows",
    "worst_expanded_rows",
]

SCALE_GROUP = 128
"""Channels of a row that share a scale."""

Ints = NDArray[np.integer]
Bools = NDArray[np.bool_]


def check_experts(topk_idx: Ints, num_experts: int) -> Refusal | None:
    """Find the first token whose choices are not allowed.

    Args:
        topk_idx: ``[T, K]``; -1 stands for no choice.
        num_experts: E.

    Returns:
        ``EXPERT_OUT_OF_RANGE`` (outside -1..E-1) before ``DUPLICATE_EXPERT``, with the token.
    """
    outside = ((topk_idx < -1) | (topk_idx >= num_experts)).any(axis=1)
    if outside.any():
        return Refusal(RefusalCode.EXPERT_OUT_OF_RANGE, int(np.argmax(outside)))
    ordered = np.sort(topk_idx, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    if twice.any():
        return Refusal(RefusalCode.DUPLICATE_EXPERT, int(np.argmax(twice)))
    return None


def mask_of_choices(topk_idx: Ints, num_experts: int, num_ranks: int) -> Bools:
    """``[T, R]``: token t has a choice on rank r. Entries outside 0..E-1 count for nothing."""
    mask = np.zeros((len(topk_idx), num_ranks), np.bool_)
    token, column = np.nonzero((topk_idx >= 0) & (topk_idx < num_experts))
    mask[token, topk_idx[token, column] // (num_experts // num_ranks)] = True
    return mask


def count_per_expert(topk_idx: Ints, num_experts: int) -> NDArray[np.int32]:
    """``[E]`` int32: choices of each expert. Entries outside 0..E-1 count for nothing."""
    chosen = topk_idx[(topk_idx >= 0) & (topk_idx < num_experts)]
    return np.bincount(chosen, minlength=num_experts).astype(np.int32)


def local_choices(topk_idx: Ints, rank: int, num_local_experts: int) -> Ints:
    """``topk_idx`` as rank ``rank`` gets it: its own experts numbered from 0, -1 elsewhere."""
    first = rank * num_local_experts
    here = (topk_idx >= first) & (topk_idx < first + num_local_experts)
    return np.where(here, topk_idx - first, -1).astype(topk_idx.dtype)


def send_rows(mask: Bools, counts: Ints, rank: int) -> NDArray[np.int32]:
    """Absolute row of each of this rank's tokens in each rank's ``recv_x``; -1: not sent.

    Args:
        mask: ``[T, R]`` which token goes where.
        counts: ``[R, R]`` rows from rank i to rank j.
        rank: This rank.
    """
    base = counts[:rank].sum(axis=0, dtype=np.int64)
    slot = np.cumsum(mask, axis=0, dtype=np.int32) - 1
    return np.where(mask, slot + base, -1).astype(np.int32)


def recv_offsets(rows_per_rank: Ints) -> list[int]:
    """``R + 1`` bounds: rows of rank s are ``[bounds[s], bounds[s + 1])``."""
    return [0, *(int(bound) for bound in np.cumsum(rows_per_rank, dtype=np.int64))]


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def num_scales(hidden: int, *, packed: bool) -> int:
    """S, scales of a row of ``hidden`` one-byte elements: one per ``SCALE_GROUP`` channels.

    Args:
        hidden: H; the last group may be shorter.
        packed: Four one-byte exponents (UE8M0) to a scale word.
    """
    groups = -(-hidden // SCALE_GROUP)
    return -(-groups // 4) if packed else groups


def worst_expanded_rows(
    num_tokens: int, num_topk: int, num_local_experts: int, alignment: int
) -> int:
    """Rows that the expanded layout of so many received tokens can take at most."""
    choices = num_tokens * min(num_topk, num_local_experts)
    return choices + num_local_experts * (alignment - 1)
