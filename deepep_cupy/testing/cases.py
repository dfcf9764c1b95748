"""The cases that every engine is held to, per number of ranks.

Two pairwise tables, in each of which every pair of settings meets (``pairwise``): the plain calls,
with all dtypes, sizes and kinds of routing, and the modes: FP8, no wait, the expanded layout,
statistics, ``out`` and events. Beside them stand fixed cases: the shapes of real models, and those
that users' bug reports came with.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np

from deepep_cupy.protocol.control_block import align
from deepep_cupy.protocol.nodes import MAX_RANKS
from deepep_cupy.reference.combine import ADDABLE
from deepep_cupy.testing.pairwise import Pair, Row, covering_rows

__all__ = [
    "Case",
    "cases",
    "low_latency_cases",
    "mode_cases",
    "mode_table",
    "node_cases",
    "sequence",
    "table",
]

Levels: TypeAlias = tuple[tuple[Any, ...], ...]
"""Per level of a factor the values it stands for."""

_SHORT = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


@dataclass(frozen=True)
class Case:
    """One dispatch, and one combine where rows of this dtype can be added.

    Attributes:
        num_ranks: R.
        num_tokens: T of each rank.
        hidden: H, elements of a row.
        num_experts: E; ``None`` where masks are dispatched.
        num_topk: K; 0 where masks are dispatched.
        dtype: Name of the row dtype; ``"V7"`` for opaque items of 7 bytes.
        layout: Where the routing comes from: ``"topk"``, ``"mask"``, or a handle made by one of
            these: ``"cached"``, ``"cached_mask"``.
        index_dtype: ``"int32"`` or ``"int64"``; ``None`` where masks are dispatched.
        weights: Whether weights travel, in dispatch and in combine.
        num_biases: 0, 1 or 2 biases for combine.
        expert_alignment: Of the dispatch from ``topk_idx``.
        routing: ``"random"``; ``"half"``: half of the columns (or tokens of a mask) are empty;
            ``"nothing"``; ``"one"``: every token to one and the same expert (rank);
            ``"skewed"``: mostly to the low ones.
        fp8: ``""``; ``"scales"``, ``"packed"``: rows come with float32 or packed int32 scales;
            ``"quantize"``, ``"round"``, ``"ue8m0"``: rows of ``dtype`` are cast on their way,
            with scales of these kinds.
        scales_layout: ``"row"`` or ``"column"``, of received scales.
        wait: ``"host"``; ``"worst"``: no wait, R * M tokens; ``"tight"``: no wait, and as many
            tokens as really come (at least 1). In a cached case of the dispatch that makes the
            handle; so too with ``expand``.
        expand: The expanded layout.
        zero_padding: Of the expanded layout.
        reduce: Of its combine.
        row_weights: Whether its combine multiplies rows.
        stats: Whether counts are added to statistics.
        out: Whether combine writes into a given array.
        background: Whether both calls have ``previous_event`` and ``async_finish``.
        low_latency: ``""``; ``"low"``: ``dispatch(low_latency=True)``, with the ``wait`` of a call
            that does not wait; ``"v1"``, ``"hook"``: DeepEP V1's calls, without and with hooks.
            ``weights`` go along in the dispatch then, and are given to the combine where they do
            not; M is ``num_max_tokens``.
    """

    num_ranks: int
    num_tokens: tuple[int, ...]
    hidden: int
    num_experts: int | None
    num_topk: int
    dtype: str
    layout: str = "topk"
    index_dtype: str | None = "int64"
    weights: bool = True
    num_biases: int = 0
    expert_alignment: int = 1
    routing: str = "random"
    fp8: str = ""
    scales_layout: Literal["row", "column"] = "row"
    wait: str = "host"
    expand: bool = False
    zero_padding: bool = False
    reduce: Literal["exact", "per_rank", "per_node"] = "exact"
    row_weights: bool = False
    stats: bool = False
    out: bool = False
    background: bool = False
    low_latency: str = ""

    @property
    def id(self) -> str:
        """All settings in a readable word: names a test, and seeds its data."""
        parts = [
            f"R{self.num_ranks}",
            "T" + ".".join(map(str, self.num_tokens)),
            f"H{self.hidden}",
            f"E{self.num_experts or 0}",
            f"K{self.num_topk}",
            _SHORT.get(self.dtype, self.dtype),
            self.layout,
            self.index_dtype or "noidx",
            "w" if self.weights else "now",
            f"b{self.num_biases}",
            f"a{self.expert_alignment}",
            self.routing,
            self.fp8,
            "colscales" if self.scales_layout == "column" else "",
            self.wait if self.wait != "host" else "",
            "expand" if self.expand else "",
            "zeros" if self.zero_padding else "",
            self.reduce.replace("_", "") if self.reduce != "exact" else "",
            "rowweights" if self.row_weights else "",
            "stats" if self.stats else "",
            "out" if self.out else "",
            "async" if self.background else "",
            self.low_latency,
        ]
        return "-".join(filter(None, parts))

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """The row dtype itself."""
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    @property
    def sum_dtype(self) -> np.dtype[Any]:
        """The dtype of the rows that are combined: bfloat16 after an FP8 dispatch."""
        return np.dtype(ml_dtypes.bfloat16) if self.fp8 else self.row_dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of the longest row."""
        return self.hidden * max(self.row_dtype.itemsize, self.sum_dtype.itemsize)

    @property
    def num_max_tokens(self) -> int:
        """The largest T of any rank, at least 1: what a Buffer must be made for."""
        return max(1, *self.num_tokens)

    @property
    def cached(self) -> bool:
        """Whether the dispatch under test runs on the handle of an earlier one."""
        return self.layout.startswith("cached")

    @property
    def by_expert(self) -> bool:
        """Whether the calls are DeepEP V1's low-latency ones."""
        return self.low_latency in ("v1", "hook")

    @property
    def from_topk(self) -> bool:
        """Whether the routing comes, in the end, from ``topk_idx`` rather than a mask."""
        return self.layout in ("topk", "cached")

    @property
    def addable(self) -> bool:
        """Whether rows of ``sum_dtype`` can be combined."""
        return bool(self.fp8) or self.dtype in ADDABLE

    @property
    def quantized(self) -> bool:
        """Whether rows are cast on their way."""
        return self.fp8 in ("quantize", "round", "ue8m0")


# ----------------------------------------------------------------------------------- the factors
#
# Per factor its levels, per level the values it stands for. The values of a level take turns from
# row to row; the pairs are pairs of levels. What leaves nothing to move (no tokens, no choices) is
# no level: a pair that meets only there would not be tested.

_CAN_BE_CAST = ("bfloat16", "float16", "float32")
_ONE_BYTE = ("float8_e4m3fn", "uint8", "float8_e5m2")
_GIVEN, _CAST = ("scales", "packed"), ("quantize", "round", "ue8m0")

_BOTH: dict[str, Levels] = {
    "layout": (("topk",), ("mask",), ("cached",), ("cached_mask",)),
    "index_dtype": (("int64",), ("int32",), (None,)),
    "weights": ((True,), (False,)),
}
"""Factors of both tables, for any number of ranks."""
_PLAIN: dict[str, Levels] = _BOTH | {
    "dtype": (
        ("bfloat16",),
        ("float16",),
        ("float32",),
        ("float64",),
        ("int8", "uint8", "int16", "uint16"),
        ("int32", "int64", "uint64", "uint32"),
        ("V7", "V5", "V13"),
        ("float8_e4m3fn", "float8_e5m2"),
    ),
    "num_biases": ((0,), (1,), (2,)),
    "routing": (("random",), ("half",), ("one",), ("skewed",)),
}
_MODES: dict[str, Levels] = _BOTH | {
    "dtype": (*((dtype,) for dtype in _CAN_BE_CAST), _ONE_BYTE, ("int32", "float64", "int16")),
    "num_biases": ((0,), (1, 2)),
    "routing": (("random",), ("half",), ("one", "skewed")),
    "fp8": (("",), *((kind,) for kind in (*_GIVEN, *_CAST))),
    "scales_layout": (("row",), ("column",)),
    "wait": (("host",), ("worst",), ("tight",)),
    "expand": ((False,), (True,)),
    "zero_padding": ((False,), (True,)),
    "reduce": (("exact",), ("per_rank",)),
    "row_weights": ((False,), (True,)),
    "stats": ((False,), (True,)),
    "out": ((False,), (True,)),
    "background": ((False,), (True,)),
}


def _alternate(num_ranks: int, *tokens: int) -> tuple[int, ...]:
    """T of each rank: these numbers in turn."""
    return (tokens * num_ranks)[:num_ranks]


def _ramps(num_ranks: int, count: int, *tokens: int) -> tuple[tuple[int, ...], ...]:
    """T of each rank: these numbers in turn, from each of the first ``count`` on."""
    return tuple(_alternate(num_ranks, *tokens[at:], *tokens[:at]) for at in range(count))


def _one_big(num_ranks: int, big: int, *others: int) -> tuple[tuple[int, ...], ...]:
    """T of each rank: one has many, each rank once."""
    others = _alternate(num_ranks - 1, *others)
    return tuple((*others[:at], big, *others[at:]) for at in range(num_ranks))


def _experts(num_ranks: int, *numbers: int) -> Levels:
    """E, multiples of R, and ``None`` for masks."""
    return (*((each,) for each in sorted({align(n, num_ranks) for n in numbers})), (None,))


def _plain_factors(num_ranks: int, small: bool) -> dict[str, Levels]:
    alternate = functools.partial(_alternate, num_ranks)
    if small:
        return _PLAIN | {
            "num_tokens": (
                (alternate(0, 8) if num_ranks > 1 else (2,), alternate(6, 0)),
                (alternate(1), alternate(3)),
                _ramps(num_ranks, 8, 2, 5, 0, 9, 1, 7, 3, 4),
                _one_big(num_ranks, 21, 1, 3, 2, 0, 5, 4, 7),
            ),
            "hidden": ((1, 3), (8, 16), (33, 40), (64, 72)),
            "num_experts": _experts(num_ranks, 1, 2 * num_ranks, 64),
            "num_topk": ((1,), (3,), (8,), (32,), (0,)),
            "expert_alignment": ((1,), (8,)),
        }
    return _PLAIN | {
        "num_tokens": (
            (alternate(0, 128) if num_ranks > 1 else (2,),),
            (alternate(128, 0),),
            (alternate(1), alternate(3), alternate(127)),
            _ramps(num_ranks, 8, 5, 64, 0, 300, 17, 129, 1, 33),
            _one_big(num_ranks, 4095, 1, 127, 3, 0, 128, 31, 2),
            _one_big(num_ranks, 4097, 1, 127, 3, 0, 128, 31, 2),
        ),
        "hidden": (
            (33, 1, 3, 1001),
            (64, 128, 200, 1000),
            (512, 2048),
            (2560, 3072, 4096),
            (5120, 6144, 7168),
            (8192, 16384),
        ),
        "num_experts": _experts(num_ranks, 1, 64, 160, 256, 1024),
        "num_topk": ((1,), (6, 8), (9, 16), (32,), (0,)),
        "expert_alignment": ((1,), (8,), (128,)),
    }


def _mode_factors(num_ranks: int, small: bool) -> dict[str, Levels]:
    alternate = functools.partial(_alternate, num_ranks)
    if small:
        return _MODES | {
            "num_tokens": (
                (alternate(0, 8), alternate(8, 0)),
                (alternate(1, 3),),
                _ramps(num_ranks, 3, 5, 2, 0),
            ),
            "hidden": ((1, 40), (128,), (130, 384)),
            "num_experts": _experts(num_ranks, 1, 4 * num_ranks),
            "num_topk": ((1,), (3, 6), (0,)),
            "expert_alignment": ((1,), (4, 3)),
        }
    return _MODES | {
        "num_tokens": (
            (alternate(0, 128), alternate(128, 0)),
            (alternate(1), alternate(3), alternate(127)),
            _ramps(num_ranks, 3, 64, 5, 0, 17, 129, 33),
        ),
        "hidden": ((33, 200), (128, 384), (640, 1000, 2688), (7168, 2048, 16384)),
        "num_experts": _experts(num_ranks, 1, 64, 256),
        "num_topk": ((1,), (6, 8), (32, 9), (0,)),
        "expert_alignment": ((1,), (8, 3), (128,)),
    }


# ------------------------------------------------------------------------------------- the rules

_DTYPES_OF_FP8 = {
    "": (*_CAN_BE_CAST, "int32"),
    **dict.fromkeys(_CAST, _CAN_BE_CAST),
    **dict.fromkeys(_GIVEN, _ONE_BYTE[:1]),
}
"""FP8 mode → the first dtypes of the levels that it can have, in a table that has FP8 modes."""
_EXPANDED = ("expand", "zero_padding", "row_weights")
"""Settings that mean something in the expanded layout alone."""


class _Rules:
    """What may stand in one row of a table.

    Parts of a row are judged too: each setting counts with what it implies for those still open,
    so that a part that cannot be completed is refused at once.

    Args:
        factors: Of the table.
        max_bytes: The most that ``least_bytes`` of a row may be.
        tokens: T of all ranks → the number of tokens that counts for its bytes.
        bytes_per_pair: So many bytes cost as much as one newly covered pair is worth.
    """

    def __init__(
        self,
        factors: Mapping[str, Levels],
        *,
        max_bytes: int,
        tokens: Callable[[tuple[int, ...]], int],
        bytes_per_pair: int,
    ) -> None:
        self._first = {name: [level[0] for level in levels] for name, levels in factors.items()}
        self._max_bytes, self._bytes_per_pair = max_bytes, bytes_per_pair
        measures: dict[str, Callable[[Any], int]] = {
            "num_tokens": tokens,
            "hidden": int,
            "dtype": _itemsize,
        }
        self._least = {name: _least(factors[name], each) for name, each in measures.items()}
        self._least_topk = _least(factors["num_topk"], lambda topk: max(1, topk))

    def allowed(self, row: Mapping[str, int]) -> bool:
        """Whether the contract allows these settings together, and nothing is huge."""
        value = {name: self._first[name][level] for name, level in row.items()}
        return (
            self._layout_fits(value)
            and self._routing_fits(value)
            and self._rows_fit(value)
            and self.least_bytes(row) <= self._max_bytes
        )

    def _layout_fits(self, value: Mapping[str, Any]) -> bool:
        return bool(value.get("expand", True)) or not _is_expanded(value)

    def _routing_fits(self, value: Mapping[str, Any]) -> bool:
        """Masks have no choices and what belongs to them; statistics belong to fresh calls."""
        is_mask = set()  # what each setting needs of the routing; they must agree
        if "layout" in value:
            is_mask.add(value["layout"] in ("mask", "cached_mask"))
        for name, none in (("num_topk", 0), ("num_experts", None), ("index_dtype", None)):
            if name in value:
                is_mask.add(value[name] == none)
        stats = value.get("stats", False)
        if (
            stats
            or value.get("weights", False)
            or value.get("expert_alignment", 1) > 1
            or _is_expanded(value)
        ):
            is_mask.add(False)
        return len(is_mask) <= 1 and not (stats and value.get("layout", "topk") != "topk")

    def _rows_fit(self, value: Mapping[str, Any]) -> bool:
        """FP8 modes have their dtypes, scales their layout; what cannot be added has no biases."""
        dtype, fp8 = value.get("dtype"), value.get("fp8")
        if "fp8" not in self._first:
            return dtype is None or dtype in ADDABLE or not value.get("num_biases", 0)
        if dtype is not None and fp8 is not None and dtype not in _DTYPES_OF_FP8[fp8]:
            return False
        if value.get("scales_layout") == "column" and (fp8 == "" or dtype == "int32"):
            return False
        return not (dtype == "int32" and value.get("row_weights", False))

    def least_bytes(self, row: Mapping[str, int]) -> int:
        """Bytes of rows with the smallest values of the levels, and of all levels where a factor
        is open; in the expanded layout every choice is a row."""
        size = math.prod(least[row.get(name)] for name, least in self._least.items())
        value = {name: self._first[name][level] for name, level in row.items()}
        return size * self._least_topk[row.get("num_topk")] if _is_expanded(value) else size

    def cost(self, row: Mapping[str, int]) -> float:
        """What a whole row costs, in pairs."""
        return self.least_bytes(row) / self._bytes_per_pair


def _is_expanded(value: Mapping[str, Any]) -> bool:
    """Whether some setting needs the expanded layout."""
    return value.get("reduce") == "per_rank" or True in map(value.get, _EXPANDED)


def _itemsize(dtype: str) -> int:
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


def _least(levels: Levels, measure: Callable[[Any], int]) -> dict[int | None, int]:
    """The smallest measure of each level; under ``None``, of all."""
    of_level: dict[int | None, int] = {
        level: min(map(measure, values)) for level, values in enumerate(levels)
    }
    return of_level | {None: min(of_level.values())}


# ------------------------------------------------------------------------------------ the tables

Table: TypeAlias = tuple[list[tuple[Row, Case]], dict[str, Levels], set[Pair]]
"""Per row its levels and its case; the factors; the pairs of levels that cannot meet."""

Choose: TypeAlias = Callable[[Row, Mapping[str, Levels], "Counter[tuple[str, Any]]"], Case]
"""Makes the case of a row, given the factors and how often each value has been used."""

_MAX_SENT = 36 << 20
"""Bytes of x on all ranks together that a row of the plain table may have."""
_FAIR_SENT = 10 << 20
"""Above this a row of the plain table takes the smallest values that its levels stand for."""
_MAX_RECEIVED = 24 << 20
"""Bytes of the largest array that a row of the modes' table may receive on one rank."""


def _build(num_ranks: int, factors: dict[str, Levels], rules: _Rules, choose: Choose) -> Table:
    levels = {name: len(values) for name, values in factors.items()}
    rows, impossible = covering_rows(levels, rules.allowed, rules.cost, seed=num_ranks)
    used: Counter[tuple[str, Any]] = Counter()
    return [(row, choose(row, factors, used)) for row in rows], factors, impossible


@functools.lru_cache(maxsize=32)
def table(num_ranks: int, small: bool = False) -> Table:
    """Build the pairwise table of the plain calls."""
    factors = _plain_factors(num_ranks, small)
    rules = _Rules(factors, max_bytes=_MAX_SENT, tokens=sum, bytes_per_pair=2 << 20)
    return _build(num_ranks, factors, rules, functools.partial(_plain_case, num_ranks))


@functools.lru_cache(maxsize=32)
def mode_table(num_ranks: int, small: bool = False) -> Table:
    """Build the pairwise table of the modes."""
    factors = _mode_factors(num_ranks, small)

    def most_received(num_tokens: tuple[int, ...]) -> int:
        return num_ranks * max(num_tokens)

    rules = _Rules(factors, max_bytes=_MAX_RECEIVED, tokens=most_received, bytes_per_pair=1 << 20)
    return _build(num_ranks, factors, rules, functools.partial(_mode_case, num_ranks))


def _plain_case(
    num_ranks: int, row: Row, factors: Mapping[str, Levels], used: Counter[tuple[str, Any]]
) -> Case:
    """Give each level the value it has used least among those that leave the case small."""
    values = {name: factors[name][level][0] for name, level in row.items()}

    def size_with(name: str, option: Any) -> int:
        chosen = values | {name: option}
        return int(sum(chosen["num_tokens"]) * chosen["hidden"] * _itemsize(chosen["dtype"]))

    for name, level in row.items():
        options = factors[name][level]
        fair = [option for option in options if size_with(name, option) <= _FAIR_SENT]
        smallest = min(options, key=lambda option: size_with(name, option))
        values[name] = min(fair or [smallest], key=lambda option: used[name, option])
        used[name, values[name]] += 1
    return Case(num_ranks=num_ranks, **values)


def _mode_case(
    num_ranks: int, row: Row, factors: Mapping[str, Levels], used: Counter[tuple[str, Any]]
) -> Case:
    """Give each level the value it has used least; the smallest ones where the case is large."""
    values = {}
    for name, level in row.items():
        values[name] = min(factors[name][level], key=lambda option: used[name, option])
        used[name, values[name]] += 1
    case = Case(num_ranks=num_ranks, **values)
    copies = case.num_topk if case.expand else 1
    if num_ranks * case.num_max_tokens * copies * case.row_bytes <= 2 * _MAX_RECEIVED:
        return case
    return replace(
        case,
        hidden=min(factors["hidden"][row["hidden"]]),
        num_topk=min(factors["num_topk"][row["num_topk"]]),
        num_tokens=min(factors["num_tokens"][row["num_tokens"]], key=max),
    )


# ------------------------------------------------------------------------------- the fixed cases


def sequence(num_ranks: int) -> list[Case]:
    """Cases that fit one Buffer, to be run on it in this order: sizes that jump up and down."""
    few, many = (8, 512), (512, 8)
    experts = align(64, num_ranks)
    return [
        Case(num_ranks, (tokens * num_ranks)[:num_ranks], 200, experts, 8, "bfloat16")
        for tokens in (few, many, (4096, *[1] * (num_ranks - 1)))
    ]


def _nothing_to_send(num_ranks: int, small: bool) -> list[Case]:
    """Nothing to send at all, and tokens that go nowhere, from every kind of routing."""
    hidden, some = (8, 5) if small else (1000, 127)
    choices: dict[str, Any] = {"num_experts": 2 * num_ranks, "num_topk": 3}
    no_choices: dict[str, Any] = {
        "num_experts": None,
        "num_topk": 0,
        "index_dtype": None,
        "weights": False,
    }
    kinds: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("topk", "bfloat16", choices | {"num_biases": 2, "expert_alignment": 8}),
        ("topk", "float8_e4m3fn", choices | {"index_dtype": "int32"}),
        ("cached", "float32", choices | {"weights": False}),
        ("mask", "float64", no_choices | {"num_biases": 1}),
        ("cached_mask", "int16", no_choices),
    )
    return [
        Case(num_ranks, (tokens,) * num_ranks, hidden, dtype=dtype, layout=layout,
             routing="nothing", **settings)
        for layout, dtype, settings in kinds
        for tokens in (0, some)
    ]  # fmt: skip


def _models(num_ranks: int) -> list[Case]:
    """Shapes of models: equal odd numbers of tokens, and rows of 7168 bfloat16."""

    equal = functools.partial(Case, num_ranks, dtype="bfloat16", num_topk=8)
    return [
        equal((4095,) * num_ranks, 64, align(64, num_ranks)),
        equal((4097,) * num_ranks, 64, align(160, num_ranks), index_dtype="int32"),
        equal((128,) * num_ranks, 7168, align(256, num_ranks), routing="skewed", num_biases=2),
        # One prefill batch, whole; the other ranks send one token and receive.
        Case(
            num_ranks,
            (*[1] * (num_ranks - 1), 4097),
            7168,
            align(256, num_ranks),
            num_topk=2,
            dtype="bfloat16",
            num_biases=1,
        ),
    ]


def _fixed_modes(num_ranks: int, small: bool) -> list[Case]:
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


# ----------------------------------------------------------------------------------- all of them


def cases(num_ranks: int, small: bool = False) -> tuple[Case, ...]:
    """The cases of the plain calls, alike on every rank and in every run.

    Args:
        num_ranks: R, 1 to 64.
        small: A few tokens of a few elements with the same pairs: for a simulator.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"cases(): num_ranks must be 1 to {MAX_RANKS}, got {num_ranks}")
    chosen = [case for _, case in table(num_ranks, small)[0]] + _nothing_to_send(num_ranks, small)
    if not small:
        chosen += sequence(num_ranks) + _models(num_ranks)
    return tuple(dict.fromkeys(chosen))


def mode_cases(num_ranks: int, small: bool = False) -> tuple[Case, ...]:
    """The cases of the modes, alike on every rank and in every run.

    Args:
        num_ranks: R, 1 to 64.
        small: A few tokens of short rows with the same pairs.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"mode_cases(): num_ranks must be 1 to {MAX_RANKS}, got {num_ranks}")
    chosen = [case for _, case in mode_table(num_ranks, small)[0]]
    return tuple(dict.fromkeys(chosen + _fixed_modes(num_ranks, small)))


def node_cases(num_ranks: int) -> tuple[Case, ...]:
    """The cases of ``reduce="per_node"``, for ranks of several nodes.

    Args:
        num_ranks: R.
    """
    tokens = _alternate(num_ranks, 33, 0, 16, 7)
    plain = Case(num_ranks, tokens, 40, 4 * num_ranks, 8, "bfloat16", reduce="per_node")
    few = replace(plain, num_topk=3, num_experts=2 * num_ranks)
    return (
        *(replace(plain, dtype=dtype) for dtype in ("bfloat16", "float16", "float32", "int16")),
        *(replace(plain, num_biases=number, dtype="float64") for number in (1, 2)),
        replace(plain, weights=True, num_biases=2),
        replace(few, weights=True, layout="cached", routing="half"),
        replace(few, num_tokens=(0,) * num_ranks),
        replace(few, routing="nothing", num_biases=1),
        replace(few, routing="one", out=True),
        replace(few, layout="mask", num_topk=0, num_experts=None, weights=False),
        replace(few, wait="worst", weights=True),
        replace(few, fp8="quantize", weights=True),
        replace(plain, expand=True, row_weights=True, num_biases=1),
        replace(plain, expand=True, weights=True, dtype="float32", wait="worst"),
        replace(plain, expand=True, dtype="int32", layout="cached"),
    )


def low_latency_cases(num_ranks: int, small: bool = False) -> tuple[Case, ...]:
    """The cases of low-latency calls, for the ranks of one node.

    Args:
        num_ranks: R.
        small: A few tokens of short rows.
    """
    tokens = _alternate(num_ranks, *((3, 0, 5, 1) if small else (128, 0, 64, 1)))
    one, hidden = (1,) * num_ranks, 130 if small else 1000
    experts = 4 * num_ranks
    low = Case(num_ranks, tokens, hidden, experts, 3, "bfloat16", low_latency="low", wait="worst")
    many = replace(low, num_topk=min(8, experts), expand=True)
    v1 = replace(low, wait="host", low_latency="v1", weights=False, reduce="per_rank")
    return (
        *(replace(low, num_tokens=each) for each in (tokens, one, (0,) * num_ranks)),
        replace(low, wait="tight", fp8="quantize", scales_layout="column", stats=True),
        replace(low, fp8="packed", dtype="float8_e4m3fn", background=True, out=True),
        replace(low, dtype="int32", weights=False, num_biases=2, index_dtype="int32"),
        replace(low, routing="half", fp8="ue8m0", dtype="float32"),
        replace(low, routing="nothing", num_biases=1),
        replace(many, expert_alignment=4, zero_padding=True, row_weights=True),
        replace(many, fp8="quantize", reduce="per_rank", row_weights=True, stats=True, out=True),
        replace(many, dtype="float16", reduce="per_rank", routing="one", wait="tight"),
        *(replace(v1, num_tokens=each, fp8="quantize") for each in (tokens, one, (0,) * num_ranks)),
        replace(v1, dtype="float32", hidden=hidden + 1, weights=True, reduce="exact", stats=True),
        replace(v1, fp8="round", dtype="float16", num_topk=min(8, experts), out=True),
        replace(v1, fp8="ue8m0", index_dtype="int32", weights=True, background=True),
        replace(v1, dtype="float64", routing="one", weights=True),
        replace(v1, routing="skewed", fp8="quantize", num_topk=min(8, experts), reduce="exact"),
        replace(v1, routing="half", low_latency="hook", fp8="quantize", stats=True),
        replace(v1, routing="nothing", low_latency="hook", weights=True),
    )
