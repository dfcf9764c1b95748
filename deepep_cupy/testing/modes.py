"""The table of cases for the modes: FP8, no wait, the expanded layout, events and the rest.

Like the table of ``cases``: pairs of settings meet, and a few rows are fixed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from deepep_cupy.testing.cases import Case
from deepep_cupy.testing.pairwise import covering_rows

__all__ = ["mode_cases", "mode_table"]

Levels = tuple[tuple[Any, ...], ...]

_MAX_BYTES = 24 << 20
"""Bytes of the largest array that a row of the table may receive on one rank."""
_FLOATS = ("bfloat16", "float16", "float32")
_BYTES = ("float8_e4m3fn", "uint8", "float8_e5m2")
_GIVEN, _CAST = ("scales", "packed"), ("quantize", "round", "ue8m0")
_SHARED: dict[str, Levels] = {
    "dtype": (*((dtype,) for dtype in _FLOATS), _BYTES, ("int32", "float64", "int16")),
    "fp8": (("",), *((kind,) for kind in (*_GIVEN, *_CAST))),
    "scales_layout": (("row",), ("column",)),
    "layout": (("topk",), ("mask",), ("cached",), ("cached_mask",)),
    "index_dtype": (("int64",), ("int32",), (None,)),
    "wait": (("host",), ("worst",), ("tight",)),
    "expand": ((False,), (True,)),
    "zero_padding": ((False,), (True,)),
    "reduce": (("exact",), ("per_rank",)),
    "row_weights": ((False,), (True,)),
    "weights": ((True,), (False,)),
    "num_biases": ((0,), (1, 2)),
    "stats": ((False,), (True,)),
    "out": ((False,), (True,)),
    "background": ((False,), (True,)),
    "routing": (("random",), ("half",), ("one", "skewed")),
}


def _factors(num_ranks: int, small: bool) -> dict[str, Levels]:
    def alternate(*tokens: int) -> tuple[int, ...]:
        return (tokens * num_ranks)[:num_ranks]

    def ramp(*tokens: int) -> tuple[tuple[int, ...], ...]:
        return tuple(((*tokens[at:], *tokens[:at]) * num_ranks)[:num_ranks] for at in range(3))

    def experts(*numbers: int) -> Levels:
        rounded = sorted({-(-number // num_ranks) * num_ranks for number in numbers})
        return (*((number,) for number in rounded), (None,))

    if small:
        return _SHARED | {
            "num_tokens": ((alternate(0, 8), alternate(8, 0)), (alternate(1, 3),), ramp(5, 2, 0)),
            "hidden": ((1, 40), (128,), (130, 384)),
            "num_experts": experts(1, 4 * num_ranks),
            "num_topk": ((1,), (3, 6), (0,)),
            "expert_alignment": ((1,), (4, 3)),
        }
    return _SHARED | {
        "num_tokens": (
            (alternate(0, 128), alternate(128, 0)),
            (alternate(1), alternate(3), alternate(127)),
            ramp(64, 5, 0, 17, 129, 33),
        ),
        "hidden": ((33, 200), (128, 384), (640, 1000, 2688), (7168, 2048, 16384)),
        "num_experts": experts(1, 64, 256),
        "num_topk": ((1,), (6, 8), (32, 9), (0,)),
        "expert_alignment": ((1,), (8, 3), (128,)),
    }


_FITTING = {
    "": (*_FLOATS, "int32"),
    **dict.fromkeys(_CAST, _FLOATS),
    **dict.fromkeys(_GIVEN, _BYTES[:1]),
}
"""FP8 mode → the first dtypes of the levels that it can have."""
_EXPANDED = ("expand", "zero_padding", "row_weights")
"""Settings that mean something in the expanded layout alone."""


class _Rules:
    """What may stand in one row. A part of a row that cannot be completed is refused at once:
    settings say what they imply for those still open."""

    def __init__(self, factors: Mapping[str, Levels], num_ranks: int) -> None:
        self._first = {name: [level[0] for level in levels] for name, levels in factors.items()}
        self._num_ranks = num_ranks
        measures: dict[str, Callable[[Any], int]] = {
            "num_topk": lambda k: max(1, k),
            "num_tokens": max,
            "hidden": int,
            "dtype": _itemsize,
        }
        self._least = {name: _least(factors[name], each) for name, each in measures.items()}

    def allowed(self, row: Mapping[str, int]) -> bool:
        """What the contract allows together, and nothing huge."""
        first = self._first
        value = {name: first[name][level] for name, level in row.items()}
        expanded = value.get("reduce") == "per_rank" or True in map(value.get, _EXPANDED)
        if expanded and not value.get("expand", True):
            return False
        return (
            self._routing_fits(value, expanded)
            and self._rows_fit(value)
            and self.worst_bytes(row, expanded) <= _MAX_BYTES
        )

    def _routing_fits(self, value: Mapping[str, Any], expanded: bool) -> bool:
        is_mask = set()  # what each setting says about the routing; they must agree
        if "layout" in value:
            is_mask.add(value["layout"] in ("mask", "cached_mask"))
        for name, none in (("num_topk", 0), ("num_experts", None), ("index_dtype", None)):
            if name in value:
                is_mask.add(value[name] == none)
        if expanded or value.get("expert_alignment", 1) > 1:
            is_mask.add(False)
        if value.get("weights", False) or value.get("stats", False):
            is_mask.add(False)
        fresh = value.get("layout", "topk") == "topk" or not value.get("stats", False)
        return len(is_mask) <= 1 and fresh

    def _rows_fit(self, value: Mapping[str, Any]) -> bool:
        dtype, fp8 = value.get("dtype"), value.get("fp8")
        if dtype is not None and fp8 is not None and dtype not in _FITTING[fp8]:
            return False
        if value.get("scales_layout") == "column" and (fp8 == "" or dtype == "int32"):
            return False
        return not (dtype == "int32" and value.get("row_weights", False))

    def worst_bytes(self, row: Mapping[str, int], expanded: bool) -> int:
        """Bytes one rank receives at most, with the smallest values of the levels."""
        least = self._least
        size = self._num_ranks * least["num_tokens"][row.get("num_tokens")]
        size *= least["hidden"][row.get("hidden")] * least["dtype"][row.get("dtype")]
        return size * least["num_topk"][row.get("num_topk")] if expanded else size

    def cost(self, row: Mapping[str, int]) -> float:
        """A MiB of rows weighs as much as one new pair."""
        expanded = row["expand"] > 0
        return self.worst_bytes(row, expanded) / (1 << 20)


def _least(levels: tuple[tuple[Any, ...], ...], measure: Callable[[Any], int]) -> dict[Any, int]:
    """The smallest measure of each level; under None, of all."""
    of_level = {level: min(map(measure, values)) for level, values in enumerate(levels)}
    return of_level | {None: min(of_level.values())}


def _itemsize(dtype: str) -> int:
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


@functools.lru_cache(maxsize=32)
def mode_table(
    num_ranks: int, small: bool = False
) -> tuple[list[tuple[dict[str, int], Case]], dict[str, Levels], set[Any]]:
    """Build the pairwise table.

    Returns:
        Per row its levels and its case; the factors; the pairs of levels that cannot meet.
    """
    factors = _factors(num_ranks, small)
    rules = _Rules(factors, num_ranks)
    levels = {name: len(values) for name, values in factors.items()}
    rows, impossible = covering_rows(levels, rules.allowed, rules.cost, seed=num_ranks)
    used: Counter[tuple[str, Any]] = Counter()
    return [(row, _concrete(num_ranks, row, factors, used)) for row in rows], factors, impossible


def _concrete(
    num_ranks: int,
    row: Mapping[str, int],
    factors: Mapping[str, Levels],
    used: Counter[tuple[str, Any]],
) -> Case:
    """Give each level the value it has used least; the smallest ones where the row is large."""
    values = {}
    for name, level in row.items():
        options = factors[name][level]
        values[name] = min(options, key=lambda option: used[name, option])
        used[name, values[name]] += 1
    case = Case(num_ranks=num_ranks, **values)
    copies = case.num_topk if case.expand else 1
    if num_ranks * case.num_max_tokens * copies * case.row_bytes > 2 * _MAX_BYTES:
        case = replace(
            case,
            hidden=min(factors["hidden"][row["hidden"]]),
            num_topk=min(factors["num_topk"][row["num_topk"]]),
            num_tokens=min(factors["num_tokens"][row["num_tokens"]], key=max),
        )
    return case


def _fixed(num_ranks: int, small: bool) -> list[Case]:
    """Each mode with nothing to send, with tokens that go nowhere, and with half the columns."""
    tokens, hidden = (3, 129) if small else (127, 1000)
    plain = Case(num_ranks, (tokens,) * num_ranks, hidden, 2 * num_ranks, 3, "bfloat16")
    some = [
        replace(plain, fp8="quantize", scales_layout="column"),
        replace(plain, fp8="ue8m0", dtype="float32", wait="worst"),
        replace(plain, fp8="scales", dtype="float8_e4m3fn", wait="tight"),
        replace(plain, fp8="packed", dtype="float8_e4m3fn", scales_layout="column"),
        replace(plain, wait="worst", stats=True),
        replace(plain, wait="tight", layout="cached", background=True),
        replace(plain, expand=True, expert_alignment=8, zero_padding=True, row_weights=True),
        replace(plain, expand=True, expert_alignment=4, wait="worst", fp8="quantize"),
        replace(plain, expand=True, layout="cached", reduce="per_rank", out=True, num_biases=1),
    ]
    # Several copies of a token on a rank, so that their order and every rounding shows.
    dense = Case(num_ranks, (33, *[16] * (num_ranks - 1)), 40, 8 * num_ranks, 8, "bfloat16")
    copies = [
        replace(dense, expand=True, reduce=reduce, dtype=dtype, row_weights=row_weights)
        for reduce in ("exact", "per_rank")
        for dtype, row_weights in (("bfloat16", True), ("float32", False), ("float16", True))
    ]
    return copies + [
        replace(case, **changes)
        for case in some
        for changes in (
            {"num_tokens": (0,) * num_ranks},
            {"routing": "nothing"},
            {"routing": "half"},
        )
    ]


@functools.lru_cache(maxsize=32)
def _mode_cases(num_ranks: int, small: bool) -> tuple[Case, ...]:
    chosen = [case for _, case in mode_table(num_ranks, small)[0]]
    return tuple(dict.fromkeys(chosen + _fixed(num_ranks, small)))


def mode_cases(num_ranks: int, small: bool = False) -> tuple[Case, ...]:
    """The cases of the modes for ``num_ranks`` ranks, 1 to 8; the same on every rank.

    Args:
        num_ranks: R.
        small: A few tokens of short rows with the same pairs.
    """
    if not 1 <= num_ranks <= 8:
        raise ValueError(f"mode_cases(): num_ranks must be 1 to 8, got {num_ranks}")
    return _mode_cases(num_ranks, small)
