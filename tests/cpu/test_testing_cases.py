"""The table of cases: every pair of settings meets, and what users' reports name is in it."""

import itertools
import math

import numpy as np
import pytest

from deepep_cupy.reference.combine import ADDABLE
from deepep_cupy.testing import cases as table_module
from deepep_cupy.testing import pairwise

RANKS = range(1, 9)


def test_covering_rows_covers_and_says_what_it_cannot():
    levels = {"a": 3, "b": 4, "c": 2, "d": 3}

    def allowed(row):  # a = 0 excludes b = 1 and d = 2; c = 1 needs d = 0 or 1
        return not (row.get("a") == 0 and (row.get("b") == 1 or row.get("d") == 2)) and not (
            row.get("c") == 1 and row.get("d") == 2
        )

    rows, impossible = pairwise.covering_rows(levels, allowed, lambda row: 0.0, seed=1)
    assert impossible == {("a", 0, "b", 1), ("a", 0, "d", 2), ("c", 1, "d", 2)}
    seen = set().union(*(pairwise.pairs_of(row) for row in rows))
    everything = {
        (f, i, g, j)
        for f, g in itertools.combinations(levels, 2)
        for i in range(levels[f])
        for j in range(levels[g])
    }
    assert seen == everything - impossible
    assert all(allowed(row) for row in rows)
    assert 12 <= len(rows) <= 16
    assert rows == pairwise.covering_rows(levels, allowed, lambda row: 0.0, seed=1)[0]


def test_covering_rows_prefers_cheap_rows():
    levels = {"a": 4, "b": 4, "c": 4}
    rows, _ = pairwise.covering_rows(levels, lambda row: True, lambda row: 0.0, seed=3)
    cheap, _ = pairwise.covering_rows(
        levels, lambda row: True, lambda row: 100.0 * (row["a"] == row["b"] == 3), seed=3
    )
    dear = [sum(r["a"] == r["b"] == 3 for r in found) for found in (rows, cheap)]
    assert dear[1] == 1  # the pair itself must stand somewhere
    assert dear[0] >= dear[1]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_every_pair_of_levels_meets(ranks, small):
    rows, factors, impossible = table_module.table(ranks, small)
    covered = set()
    for row, case in rows:
        covered |= pairwise.pairs_of(row)
        for name, level in row.items():  # the case holds one of the values of its level
            assert getattr(case, name) in factors[name][level]
    names = sorted(factors)
    wanted = {
        (f, i, g, j)
        for f, g in itertools.combinations(names, 2)
        for i in range(len(factors[f]))
        for j in range(len(factors[g]))
    }
    assert covered == wanted - impossible
    # What cannot meet: masks with choices (K, E, index, weights, alignment), and biases where
    # nothing can be added. Nothing else.
    for f, i, g, j in impossible:
        pair = {f: factors[f][i][0], g: factors[g][j][0]}
        masks = ["layout" in pair and "mask" in pair["layout"]]
        masks += [name in pair and pair[name] == 0 for name in ("num_topk",)]
        masks += [name in pair and pair[name] is None for name in ("num_experts", "index_dtype")]
        unaddable = "dtype" in pair and pair["dtype"] not in ADDABLE
        assert any(masks) or (unaddable and pair.get("num_biases", 0) > 0), pair
    assert len(rows) <= 75


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_cases_are_sound(ranks, small):
    found = table_module.cases(ranks, small)
    assert len({case.id for case in found}) == len(found)
    assert found == table_module.cases(ranks, small)
    for case in found:
        assert len(case.num_tokens) == case.num_ranks == ranks
        assert case.hidden >= 1
        assert case.from_topk == (case.num_experts is not None) == (case.num_topk > 0)
        assert case.from_topk == (case.index_dtype is not None)
        assert case.from_topk or (not case.weights and case.expert_alignment == 1)
        assert case.num_experts is None or case.num_experts % ranks == 0
        assert case.addable or case.num_biases == 0
        assert case.row_bytes == case.hidden * case.row_dtype.itemsize


@pytest.mark.parametrize("ranks", RANKS)
def test_what_reports_name_is_in_the_table(ranks):
    found = table_module.cases(ranks)
    tokens = {case.num_tokens for case in found}
    if ranks == 2:
        assert {(0, 128), (128, 0), (0, 0), (8, 512), (512, 8), (4096, 1)} <= tokens
    for count in (1, 3, 127, 4095, 4097):
        assert any(count in case.num_tokens for case in found)
        assert any(set(case.num_tokens) == {count} for case in found)
    for routing in ("nothing", "half", "one", "skewed"):
        for layout in ("topk", "mask", "cached", "cached_mask"):
            assert any(c.routing == routing and c.layout == layout for c in found)
    dtypes = {case.dtype for case in found}
    assert {"bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "V7"} <= dtypes
    assert {"int8", "uint8", "int16", "int32", "int64"} <= dtypes
    rounded = {math.ceil(e / ranks) * ranks for e in (ranks, 64, 160, 256, 1024)}
    assert rounded <= {case.num_experts for case in found}
    assert {0, 1, 6, 8, 9, 16, 32} <= {case.num_topk for case in found}
    assert any(case.row_bytes % 2 for case in found)
    assert any(case.hidden == 7168 and 4097 in case.num_tokens for case in found)


def test_all_row_lengths_occur():
    wanted = {64, 128, 200, 512, 1000, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 16384}
    for num_ranks in RANKS:
        assert wanted <= {case.hidden for case in table_module.cases(num_ranks)}, num_ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_the_table_is_quick_to_run(ranks):
    sizes = [sum(c.num_tokens) * c.row_bytes for c in table_module.cases(ranks)]
    assert max(sizes) < 64 << 20
    assert np.median(sizes) < 4 << 20
    assert sum(sizes) < 600 << 20
    small = [sum(c.num_tokens) * c.row_bytes for c in table_module.cases(ranks, small=True)]
    assert max(small) < 64 << 10


def test_sequence_fits_one_buffer():
    for num_ranks in RANKS:
        steps = table_module.sequence(num_ranks)
        assert len({(s.num_experts, s.num_topk, s.row_bytes) for s in steps}) == 1
        assert max(s.num_max_tokens for s in steps) == 4096


@pytest.mark.parametrize("ranks", [0, 65])
def test_other_numbers_of_ranks_are_refused(ranks):
    with pytest.raises(ValueError, match="1 to 64"):
        table_module.cases(ranks)


@pytest.mark.parametrize("ranks", [9, 16])
def test_more_ranks_than_a_node_has(ranks):
    chosen = (
        *table_module.cases(ranks, small=True),
        *table_module.mode_cases(ranks, small=True),
        *table_module.node_cases(ranks),
    )
    assert {len(case.num_tokens) for case in chosen} == {ranks}
