"""The table of the modes: every pair of settings meets, and what users' reports name is in it."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from deepep_cupy.engines.protocol import ALL_MODES
from deepep_cupy.reference import low_latency
from deepep_cupy.testing import cases as modes
from deepep_cupy.testing import compare, data, pairwise, round_trip

RANKS = (1, 2, 3, 8)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_every_pair_of_levels_meets(ranks, small):
    rows, factors, impossible = modes.mode_table(ranks, small)
    covered = set()
    for row, case in rows:
        covered |= pairwise.pairs_of(row)
        for name, level in row.items():
            assert getattr(case, name) in factors[name][level]
    wanted = {
        (f, i, g, j)
        for f, g in itertools.combinations(sorted(factors), 2)
        for i in range(len(factors[f]))
        for j in range(len(factors[g]))
    }
    assert covered == wanted - impossible
    # What cannot meet: masks with choices, plain layouts with what is the expanded one's, dtypes
    # with scales that are not theirs, statistics in cached calls, and what is too large.
    for f, i, g, j in impossible:
        pair = {f: factors[f][i][0], g: factors[g][j][0]}
        mask = "mask" in str(pair.get("layout", "")) or pair.get("num_topk") == 0
        mask |= any(name in pair and pair[name] is None for name in ("num_experts", "index_dtype"))
        plain = pair.get("expand") is False
        rows_differ = {"dtype", "fp8"} <= set(pair) or {"fp8", "scales_layout"} <= set(pair)
        integers = pair.get("dtype") == "int32" and {"row_weights", "scales_layout"} & set(pair)
        cached = pair.get("layout") == "cached" and "stats" in pair
        large = {f, g} <= {"num_tokens", "hidden", "num_topk", *modes._EXPANDED, "reduce"}
        assert mask or plain or rows_differ or integers or cached or large, pair


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_cases_are_sound(ranks, small):
    found = modes.mode_cases(ranks, small)
    assert len({case.id for case in found}) == len(found)
    for case in found:
        assert len(case.num_tokens) == ranks
        assert case.from_topk or not (case.weights or case.expand or case.stats)
        assert case.expand or not (case.zero_padding or case.row_weights)
        assert case.fp8 or case.scales_layout == "row"
        assert case.addable
        assert round_trip.modes_needed(case) <= ALL_MODES
        rows = case.num_max_tokens * ranks * (case.num_topk if case.expand else 1)
        assert rows * case.row_bytes < ((1 << 20) if small else (64 << 20))
    needed = set().union(*(round_trip.modes_needed(case) for case in found))
    # Counts come with the others; low-latency calls have cases of their own.
    assert needed == ALL_MODES - {"expert_counts", "low_latency"}
    tokens = {case.num_tokens for case in found}
    assert (0,) * ranks in tokens
    for wait in ("worst", "tight"):
        for expand in (False, True):
            assert any(case.wait == wait and case.expand == expand for case in found)
    if not small:
        assert {1, 3, 5, 21} <= {case.hidden / 128 for case in found}
        assert any(set(case.num_tokens) == {127} for case in found)
        if ranks == 2:
            assert {(0, 128), (128, 0)} <= tokens


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_low_latency_cases_are_sound(ranks, small):
    found = modes.low_latency_cases(ranks, small)
    assert len({case.id for case in found}) == len(found)
    for case in found:
        assert {"low_latency"} <= round_trip.modes_needed(case) <= ALL_MODES
        assert case.layout == "topk"
        assert (case.wait == "host") == case.by_expert
        assert not case.by_expert or not (case.expand or case.num_biases)
        rows = case.num_max_tokens * ranks * (case.num_topk if case.expand else 4)
        assert rows * case.row_bytes < ((1 << 20) if small else (64 << 20))
    for name in ("low", "v1"):
        of_name = [case for case in found if case.low_latency == name]
        for field in ("out", "stats", "background", "weights", "reduce", "fp8", "dtype"):
            assert len({getattr(case, field) for case in of_name}) > 1, field
    want = data.expected(found[-3], 0).dispatched[0]
    compare.assert_low_latency_equal(judged(want), want)
    other = judged(want)
    rows = other.recv_x[0] if isinstance(other.recv_x, tuple) else other.recv_x
    if want.defined.any():
        rows[np.nonzero(want.defined)] = 1
        with pytest.raises(AssertionError, match="recv_x: "):
            compare.assert_low_latency_equal(other, want)


def judged(result):
    """The reference's result with the names of the Buffer's; what is undefined is other."""
    copies = [each.copy() for each in result.recv_x]
    for each in copies:
        each[~result.defined] = 9
    scales = low_latency.transposed(copies[1])
    handle = SimpleNamespace(
        recv_layout_range=result.recv_layout_range,
        recv_src_info=np.where(result.defined, result.recv_src_info, 77).astype(np.int32),
        recv_weights=None if result.weights is None else result.weights.reshape(-1),
    )
    return SimpleNamespace(recv_x=(copies[0], scales), recv_count=result.recv_count, handle=handle)


def test_other_numbers_of_ranks_are_refused():
    with pytest.raises(ValueError, match="1 to 64"):
        modes.mode_cases(65)


def test_rows_to_cast_hold_every_kind():
    case = data.Case(1, (200,), 256, 4, 2, "bfloat16", fp8="quantize")
    x = data.make_rank_inputs(case, 0, 0).x.astype(np.float32)
    assert (x == 0).all(axis=1).any()
    assert ((np.abs(x) > 1e36).mean(axis=1) > 0.5).any()
    assert ((np.abs(x) < 1e-3).all(axis=1) & (x != 0).all(axis=1)).any()
    assert np.isnan(x).any()
    assert np.isinf(x).any()
    want = data.expected(case, 0).dispatched[0]
    codes = want.recv_x[0].view(np.uint8)
    assert len(np.unique(codes)) > 200


def test_undefined_rows_are_passed_over_and_others_are_not():
    case = data.Case(2, (9, 5), 8, 4, 2, "float32", expand=True, expert_alignment=8, wait="worst")
    want = data.expected(case, 0).dispatched[1]
    assert not want.defined.all()
    got = replace(want, recv_x=want.recv_x.copy())
    got.recv_x[~want.defined] = 7
    compare.assert_dispatch_equal(got, want)
    got.recv_x[np.flatnonzero(want.defined)[0], 3] += 1
    with pytest.raises(AssertionError, match=r"recv_x: 1 of \d+ elements differ"):
        compare.assert_dispatch_equal(got, want)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_unaligned_recv_tokens_per_expert": None}, "got None, wanted an array"),
        ({"psum_num_recv_tokens_per_expert": np.zeros(2, np.int32)}, "psum_num_recv"),
        ({"expanded_row": None}, "got None, wanted an array|num_rows"),
        ({"num_expanded_tokens": 3}, "num_rows|num_expanded"),
    ],
)
def test_handles_are_compared(changes, words):
    case = data.Case(2, (9, 5), 8, 4, 2, "float32", expand=True)
    want = data.expected(case, 0).dispatched[1].handle
    compare.assert_handle_equal(want, want)
    with pytest.raises(AssertionError, match=words):
        compare.assert_handle_equal(replace(want, **changes), want)


def test_scales_are_compared_with_their_order():
    case = data.Case(2, (9, 5), 600, 4, 2, "float8_e4m3fn", fp8="scales", scales_layout="column")
    want = data.expected(case, 0).dispatched[1]
    rows, scales = want.recv_x
    compare.assert_dispatch_equal(want, want)
    with pytest.raises(AssertionError, match="wanted f_contiguous"):
        compare.assert_dispatch_equal(
            replace(want, recv_x=(rows, np.ascontiguousarray(scales))), want
        )
    with pytest.raises(AssertionError, match="got an array, wanted a pair"):
        compare.assert_dispatch_equal(replace(want, recv_x=rows), want)
    other = scales.copy(order="F")
    other.view(np.uint32)[0, 1] ^= 1
    with pytest.raises(AssertionError, match="scales: 1 of"):
        compare.assert_dispatch_equal(replace(want, recv_x=(rows, other)), want)
