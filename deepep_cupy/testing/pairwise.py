"""Tables of cases in which every pair of settings meets at least once.

With a dozen settings of several levels each, all combinations are millions, but most faults show
when two levels meet: a table that covers all *pairs* needs about as many rows as the two longest
lists of levels multiplied.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping

__all__ = ["Pair", "Row", "covering_rows", "pairs_of"]

Row = dict[str, int]
"""factor → level number."""

Pair = tuple[str, int, str, int]
"""Two factors in the order of their names, each with its level."""

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
    search = _Search(levels, allowed, random.Random(seed))
    factors = sorted(levels)
    everything = [
        (f, i, g, j)
        for f, g in itertools.combinations(factors, 2)
        for i in range(levels[f])
        for j in range(levels[g])
    ]
    impossible = {pair for pair in everything if search.complete(_start(pair), factors) is None}
    missing = set(everything) - impossible
    search.want(missing)
    rows: list[Row] = []
    while missing:
        start = _start(min(missing))
        best: tuple[float, Row, set[Pair]] | None = None
        for _ in range(_CANDIDATES):
            row = search.complete(start, search.rng.sample(factors, len(factors)))
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
        search.found(best[2])
    return rows, impossible


def _start(pair: Pair) -> Row:
    return {pair[0]: pair[1], pair[2]: pair[3]}


class _Search:
    """Completes rows. A set of (factor, level) is an integer with one bit for each.

    Tables are built by every rank of every test of them, so this is written to be fast.
    """

    def __init__(
        self,
        levels: Mapping[str, int],
        allowed: Callable[[Mapping[str, int]], bool],
        rng: random.Random,
    ) -> None:
        self.rng = rng
        self._allowed = allowed
        places = [(factor, level) for factor, count in levels.items() for level in range(count)]
        self._bits = {
            factor: [1 << places.index((factor, level)) for level in range(count)]
            for factor, count in levels.items()
        }
        self._partners = {factor: [0] * count for factor, count in levels.items()}

    def want(self, pairs: set[Pair]) -> None:
        """Prefer levels that are in these pairs."""
        for f, i, g, j in pairs:
            self._partners[f][i] |= self._bits[g][j]
            self._partners[g][j] |= self._bits[f][i]

    def found(self, pairs: set[Pair]) -> None:
        """Prefer them no more."""
        for f, i, g, j in pairs:
            self._partners[f][i] &= ~self._bits[g][j]
            self._partners[g][j] &= ~self._bits[f][i]

    def complete(self, part: Row, order: list[str]) -> Row | None:
        """Fill in the other factors, each with the allowed level that covers most wanted pairs."""
        held = sum(self._bits[factor][level] for factor, level in part.items())
        return self._fill(part, held, [factor for factor in order if factor not in part])

    def _fill(self, part: Row, held: int, open_factors: list[str]) -> Row | None:
        if not self._allowed(part):
            return None
        if not open_factors:
            return part
        factor, *rest = open_factors
        bits, partners = self._bits[factor], self._partners[factor]
        gains = [
            (-(each & held).bit_count(), self.rng.random(), level)
            for level, each in enumerate(partners)
        ]
        for _, _, level in sorted(gains):
            row = self._fill({**part, factor: level}, held | bits[level], rest)
            if row is not None:
                return row
        return None
