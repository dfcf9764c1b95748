"""Tables of cases in which every pair of settings meets at least once.

With a dozen settings of several levels each, all combinations are millions, but most faults show
when two levels meet: a table that covers all *pairs* needs about as many rows as the two longest
lists of levels multiplied.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping

__all__ = ["Row", "covering_rows", "pairs_of"]

Row = dict[str, int]
"""factor → level number."""

Pair = tuple[str, int, str, int]

_CANDIDATES = 6
"""Rows tried for each row taken."""


def pairs_of(row: Mapping[str, int]) -> set[Pair]:
    """The pairs of levels that a row covers; factors in the order of their names."""
    items = sorted(row.items())
    return {(f, i, g, j) for (f, i), (g, j) in itertools.combinations(items, 2)}


def covering_rows(
    levels: Mapping[str, int],
    allowed: Callable[[Mapping[str, int]], bool],
    cost: Callable[[Mapping[str, int]], float],
    seed: int,
) -> tuple[list[Row], set[Pair]]:
    """Choose rows, greedily, until every possible pair of levels stands in one of them.

    Args:
        levels: factor → number of its levels.
        allowed: Whether a row, or a part of one, breaks no rule. A part that is refused must be
            refused in every row that holds it.
        cost: What a full row costs, in units of "pairs newly covered".
        seed: Same seed, same rows.

    Returns:
        The rows, and the pairs that no allowed row can hold.
    """
    rng = random.Random(seed)
    factors = sorted(levels)
    everything = [
        (f, i, g, j)
        for f, g in itertools.combinations(factors, 2)
        for i in range(levels[f])
        for j in range(levels[g])
    ]
    nothing: set[Pair] = set()
    impossible = {
        pair
        for pair in everything
        if _complete(_start(pair), factors, levels, allowed, nothing, rng) is None
    }
    missing = set(everything) - impossible
    rows: list[Row] = []
    while missing:
        start = _start(min(missing))
        best: tuple[float, Row, set[Pair]] | None = None
        for _ in range(_CANDIDATES):
            order = rng.sample(factors, len(factors))
            row = _complete(start, order, levels, allowed, missing, rng)
            if row is None:
                continue
            new = pairs_of(row) & missing
            score = len(new) - cost(row)
            if best is None or score > best[0]:
                best = (score, row, new)
        if best is None:
            raise RuntimeError(f"no row holds {start}: allowed() contradicts itself")
        rows.append(best[1])
        missing -= best[2]
    return rows, impossible


def _start(pair: Pair) -> Row:
    return {pair[0]: pair[1], pair[2]: pair[3]}


def _complete(
    part: Row,
    order: list[str],
    levels: Mapping[str, int],
    allowed: Callable[[Mapping[str, int]], bool],
    missing: set[Pair],
    rng: random.Random,
) -> Row | None:
    """Fill in the other factors, each with the allowed level that covers most missing pairs."""
    if not allowed(part):
        return None
    factor = next((name for name in order if name not in part), None)
    if factor is None:
        return part
    choice = range(levels[factor])
    gains = [(-_gain(part, factor, level, missing), rng.random(), level) for level in choice]
    for _, _, level in sorted(gains):
        row = _complete({**part, factor: level}, order, levels, allowed, missing, rng)
        if row is not None:
            return row
    return None


def _gain(part: Row, factor: str, level: int, missing: set[Pair]) -> int:
    count = 0
    for other, other_level in part.items():
        pair = (
            (factor, level, other, other_level)
            if factor < other
            else (other, other_level, factor, level)
        )
        count += pair in missing
    return count
