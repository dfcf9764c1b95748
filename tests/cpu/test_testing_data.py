"""The inputs: determined by (case, rank, seed), and able to show every wrong way to add."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from deepep_cupy.testing import compare, data

ORDER = data.Case(4, (40, 0, 64, 25), 96, 8, 8, "bfloat16", num_biases=2)


def arrays(inputs):
    named = dataclasses.asdict(inputs)
    named |= {f"bias_{n}": bias for n, bias in enumerate(named.pop("biases"))}
    return {name: value for name, value in named.items() if value is not None}


@pytest.mark.parametrize("case", data.cases(3, small=True), ids=lambda case: case.id)
def test_inputs_follow_case_rank_and_seed(case):
    everyone = data.make_inputs(case, 7)
    for rank, inputs in enumerate(everyone):
        again = arrays(data.make_rank_inputs(case, 7, rank))
        for name, value in arrays(inputs).items():
            compare.assert_same_bits(name, value, again[name])
            assert value.flags.c_contiguous
            assert value.flags.writeable
        assert inputs.x.shape == (case.num_tokens[rank], case.hidden)
        assert inputs.x.dtype == case.row_dtype
        assert len(inputs.biases) == case.num_biases
        assert (inputs.topk_weights is not None) == case.weights
        assert (inputs.first_x is not None) == case.cached
        assert (inputs.topk_idx is None) == (inputs.mask is not None)


def test_another_seed_or_rank_gives_other_data():
    case = data.Case(2, (16, 16), 32, 8, 4, "float32", num_biases=1)
    one, other = data.make_inputs(case, 0)
    later = data.make_inputs(case, 1)[0]
    for name, value in arrays(one).items():
        assert value.tobytes() != arrays(other)[name].tobytes()
        assert value.tobytes() != arrays(later)[name].tobytes()
    rows = [data.make_rows(case, seed, rank, 16) for seed, rank in ((0, 0), (0, 1), (1, 0))]
    assert len({row.y.tobytes() for row in rows}) == 3
    assert len({row.topk_weights.tobytes() for row in rows}) == 3


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_routing_is_what_its_name_says(ranks):
    for case in data.cases(ranks):
        hot = set()
        for rank in range(ranks):
            small = dataclasses.replace(case, hidden=1, num_biases=0, weights=False)
            inputs = data.make_rank_inputs(small, 0, rank)
            if inputs.mask is not None:
                mask = inputs.mask
                hot |= set(np.flatnonzero(mask.any(axis=0)).tolist())
                if case.routing == "nothing":
                    assert not mask.any()
                if case.routing == "half":
                    assert not mask[1::2].any()
                if case.routing == "one":
                    assert (mask.sum(axis=1) == 1).all()
                continue
            idx = inputs.topk_idx
            assert idx.dtype == case.index_dtype
            assert idx.shape == (case.num_tokens[rank], case.num_topk)
            assert (idx >= -1).all()
            assert (idx < case.num_experts).all()
            hot |= set(idx[idx >= 0].tolist())
            ordered = np.sort(idx, axis=1)
            assert not ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()
            full = min(case.num_topk, case.num_experts)
            used = (idx >= 0).sum(axis=1)
            wanted = {"nothing": 0, "one": 1, "half": (full + 1) // 2}.get(case.routing, full)
            assert (used == wanted).all()
        if case.routing == "one":
            assert len(hot) <= 1


def test_random_routing_reaches_all_experts_evenly():
    case = data.Case(1, (4096,), 1, 160, 8, "int8", weights=False)
    idx = data.make_rank_inputs(case, 0, 0).topk_idx
    counts = np.bincount(idx.ravel(), minlength=160)
    assert counts.min() > 0.6 * counts.mean()
    assert counts.max() < 1.5 * counts.mean()
    skewed = data.make_rank_inputs(dataclasses.replace(case, routing="skewed"), 0, 0).topk_idx
    counts = np.bincount(skewed.ravel(), minlength=160)
    assert counts[:40].sum() > 0.6 * counts.sum()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_floats_hold_every_kind_of_number(dtype):
    rng = np.random.default_rng(0)
    values = data._floats(rng, (200, 200), np.dtype(dtype))
    assert values.dtype == dtype
    assert (np.abs(values[:, 5::16].astype(np.float64)) < 1e-4).all()
    values = np.delete(values, np.s_[5::16], axis=1)
    wide = values.astype(np.float64)
    with np.errstate(all="ignore"):
        finite = np.isfinite(wide)
        low = float(ml_dtypes.finfo(dtype).smallest_normal)
        assert ((np.abs(wide) < low) & (wide != 0)).any()
    assert (np.isinf(wide) & (wide > 0)).any()
    assert np.isnan(wide).any()
    assert (~finite).mean() < 0.02
    assert (np.signbit(wide) & (wide == 0)).any()
    assert (~np.signbit(wide) & (wide == 0)).any()
    assert (wide < 0).mean() == pytest.approx(0.5, abs=0.05)
    exponents = np.frexp(wide[finite & (wide != 0)])[1]
    assert np.ptp(np.quantile(exponents, [0.05, 0.95])) > 6


# Wrong ways to combine. Each must differ from the reference on the data above in every dtype it
# can concern: else the tests that use this data could not tell it from the right way.

FLOATS = {
    "bfloat16": np.float32,
    "float16": np.float32,
    "float32": np.float32,
    "float64": np.float64,
}


def add(case, want, *, accumulator, order=None, biases_last=False, zero_first=False, flush=False):
    """Combine, token by token, with one thing wrong."""
    dtype = case.row_dtype
    order = order or list(range(case.num_ranks))
    results = []

    def flushed(array):
        tiny = ml_dtypes.finfo(array.dtype).smallest_normal
        return np.where(np.abs(array) < tiny, array * 0, array) if flush else array

    for rank, inputs in enumerate(want.inputs):
        out = np.zeros((case.num_tokens[rank], case.hidden), dtype)
        send_row = want.dispatched[rank].handle.send_row
        for t in range(len(out)):
            rows = [want.rows[r].y[send_row[t, r]] for r in order if send_row[t, r] >= 0]
            biases = [bias[t] for bias in inputs.biases]
            terms = rows + biases if biases_last else biases + rows
            total = np.zeros(case.hidden, accumulator) if zero_first or not terms else None
            for term in terms:
                wide = flushed(term.astype(accumulator))
                total = wide if total is None else flushed(total + wide)
            out[t] = total.astype(dtype)
        results.append(out)
    return results


def differs(case, want, results):
    found = 0
    for rank, out in enumerate(results):
        try:
            compare.assert_equal_or_nan("combined_x", out, want.combined[rank].combined_x)
        except AssertionError:
            found += 1
    return found


WRONG = {
    "descending ranks": {"order": [3, 2, 1, 0]},
    "own rank first": {"order": [2, 0, 1, 3]},
    "biases last": {"biases_last": True},
    "starts from +0": {"zero_first": True},
    "flushes subnormals": {"flush": True},
    "a wider sum": {"accumulator": np.float64},
    "a sum in the row's dtype": {"accumulator": "row"},
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wrong", ["nothing", *WRONG])
def test_wrong_ways_to_add_show(dtype, wrong):
    case = dataclasses.replace(ORDER, dtype=dtype, num_biases=0 if wrong == "starts from +0" else 2)
    want = data.expected(case, 1)
    settings = {"accumulator": FLOATS[dtype]} | WRONG.get(wrong, {})
    if settings["accumulator"] == "row":
        settings["accumulator"] = case.row_dtype
    same = np.dtype(settings["accumulator"]) == FLOATS[dtype]
    # float16's subnormals are normal in the float32 they are added in.
    harmless = (wrong == "flushes subnormals" and dtype == "float16") or (
        "accumulator" in WRONG.get(wrong, {}) and same
    )
    with np.errstate(all="ignore"):
        results = add(case, want, **settings)
    if wrong == "nothing" or harmless:
        assert differs(case, want, results) == 0
    else:
        assert differs(case, want, results) >= 2


def test_expected_runs_every_kind_of_case():
    for case in data.cases(2, small=True):
        want = data.expected(case, 0)
        assert (want.first is not None) == case.cached
        assert len(want.combined) == (case.num_ranks if case.addable else 0)
        for rank, result in enumerate(want.dispatched):
            assert result.recv_x.dtype == case.row_dtype
            assert (result.recv_topk_idx is not None) == (case.layout == "topk")
            assert (result.recv_topk_weights is not None) == case.weights
            if case.cached:
                assert result.handle is want.first[rank].handle
            if case.addable:
                assert want.combined[rank].combined_x.shape == want.inputs[rank].x.shape
                back = want.combined[rank].combined_topk_weights
                assert (back is not None) == case.weights


def test_rows_that_cannot_be_added_have_no_combine_input():
    with pytest.raises(ValueError, match="V7"):
        data.make_rows(data.Case(1, (1,), 1, 1, 1, "V7"), 0, 0, 1)
