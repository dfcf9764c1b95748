"""Rows that say where they come from, so that large results are checked where they lie.

Every row is made from its (rank, token) and a number, the salt, that tells kinds of rows apart. A
receiver makes the row again and compares. All functions work on NumPy and on CuPy arrays: ``xp``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deepep_cupy.errors import DeepEPCupyError

__all__ = [
    "WrongResultError",
    "as_words",
    "copies_of",
    "fill",
    "pattern",
    "sources",
    "wrong_rows",
    "wrong_sums",
]

_CHUNK_WORDS = 1 << 24
"""Words of a row block that is made at a time."""


class WrongResultError(DeepEPCupyError):
    """What was to be timed gives wrong results: its time means nothing."""


def pattern(xp: Any, ranks: Any, tokens: Any, words: int, salt: int) -> Any:
    """``[N, words]`` uint32: the rows of (rank, token) pairs, both ``[N]``."""
    rows = ranks.astype(np.uint32) * np.uint32(0x9E3779B1)
    rows = rows + tokens.astype(np.uint32) * np.uint32(0x85EBCA77)
    rows = rows + np.uint32(salt * 0x27D4EB2F % (1 << 32))
    columns = xp.arange(words, dtype=np.uint32) * np.uint32(0xC2B2AE3D)
    value = rows[:, None] + columns[None, :]
    value ^= value >> np.uint32(15)
    value *= np.uint32(0x2C1B3C6D)
    value ^= value >> np.uint32(12)
    value &= np.uint32(0x80FF80FF)
    value |= np.uint32(0x3F003F00)
    return value


def as_words(array: Any) -> Any:
    """``[N, H]`` of any dtype as ``[N, words]`` uint32; rows are multiples of four bytes."""
    return array.view(np.uint8).view(np.uint32)


def _chunks(rows: int, words: int) -> list[slice]:
    step = max(1, _CHUNK_WORDS // max(1, words))
    return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]


def fill(xp: Any, x: Any, rank: int, salt: int) -> None:
    """Write the rows of ``rank``'s tokens 0, 1, …"""
    words = as_words(x)
    tokens = xp.arange(len(x), dtype=np.uint32)
    ranks = xp.full(len(x), rank, np.uint32)
    for part in _chunks(*words.shape):
        words[part] = pattern(xp, ranks[part], tokens[part], words.shape[1], salt)


def sources(xp: Any, handle: Any) -> tuple[Any, Any]:
    """(rank, token) of every row that the dispatch of ``handle`` received here."""
    counts = handle.recv_rows_per_rank
    counts = counts.get() if hasattr(counts, "get") else counts
    ranks = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
    return xp.asarray(ranks), handle.recv_src_idx


def wrong_rows(xp: Any, rows: Any, ranks: Any, tokens: Any, salt: int, at: Any = None) -> int:
    """How many rows are not those of their (rank, token).

    Args:
        xp: NumPy or CuPy.
        rows: One for each pair, in their order; with ``at`` any.
        ranks: Of each pair.
        tokens: Of each pair.
        salt: As for ``fill``.
        at: Which of ``rows`` belongs to each pair.
    """
    words, wrong = as_words(rows), 0
    for part in _chunks(len(words if at is None else at), words.shape[1]):
        want = pattern(xp, ranks[part], tokens[part], words.shape[1], salt)
        got = words[part] if at is None else words[at[part]]
        wrong += int((got != want).any(axis=1).sum())
    return wrong


def wrong_sums(
    xp: Any, sums: Any, rank: int, salt: int, copies: Any, bias_salt: int | None = None
) -> int:
    """How many rows are not the sum of ``copies[t]`` times the row of token t of ``rank``, behind
    that token's row of ``bias_salt`` where one is given.

    Integers wrap; floats are added one by one in float32 (float64: in float64) and rounded once.
    """
    words, wrong = as_words(sums), 0
    most = int(copies.max()) if len(sums) else 0
    tokens = xp.arange(len(sums), dtype=np.uint32)
    ranks = xp.full(len(sums), rank, np.uint32)
    wide = np.float64 if sums.dtype == np.float64 else np.float32
    for part in _chunks(*words.shape):
        row = pattern(xp, ranks[part], tokens[part], words.shape[1], salt).view(sums.dtype)
        times = copies[part][:, None]
        bias = None
        if bias_salt is not None:
            bias = pattern(xp, ranks[part], tokens[part], words.shape[1], bias_salt)
            bias = bias.view(sums.dtype)
        if sums.dtype.kind in "iu":
            want = row * times.astype(sums.dtype)
            want = want if bias is None else want + bias
        else:
            term = row.astype(wide)
            total = xp.where(times > 0, term, wide(0)) if bias is None else bias.astype(wide)
            for number in range(bias is None, most):
                total = xp.where(times > number, total + term, total)
            want = total.astype(sums.dtype)
        wrong += int((words[part] != as_words(xp.ascontiguousarray(want))).any(axis=1).sum())
    return wrong


def copies_of(handle: Any) -> Any:
    """``[T]``: to how many ranks each token of this rank went."""
    return (handle.send_row >= 0).sum(axis=1)
