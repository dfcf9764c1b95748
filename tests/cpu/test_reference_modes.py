"""No wait, scales and the expanded layout against loops that follow the contract word by word."""

import tracemalloc
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from deepep_cupy import reference
from deepep_cupy.reference import layout
from deepep_cupy.testing import compare, data

SHAPES = [
    # tokens of each rank, H, K, El, expert_alignment
    ((5,), 3, 3, 4, 1),
    ((0, 7), 4, 1, 1, 4),
    ((6, 0), 2, 4, 2, 3),
    ((0, 0, 0), 5, 2, 2, 8),
    ((4, 1, 9), 3, 6, 3, 2),
    ((3, 0, 8, 1, 2), 2, 8, 5, 16),
]


def make(tokens, hidden, topk, local, seed=0):
    rng = np.random.default_rng(seed)
    experts = local * len(tokens)
    xs = [rng.standard_normal((t, hidden)).astype(np.float32) for t in tokens]
    idx = []
    for t in tokens:
        order = np.argsort(rng.random((t, max(experts, topk))), axis=1)[:, :topk]
        idx.append(np.where((order < experts) & (rng.random(order.shape) < 0.8), order, -1))
    weights = [rng.standard_normal((t, topk)).astype(np.float32) for t in tokens]
    return xs, idx, weights, experts


def copies(idx, rank, local):
    """(expert, source rank, source token, column) of every copy, in the order of the layout."""
    found = [
        (int(expert) - rank * local, source, token, column)
        for source, table in enumerate(idx)
        for token, row in enumerate(table)
        for column, expert in enumerate(row)
        if rank * local <= expert < (rank + 1) * local
    ]
    return sorted(found)


@pytest.mark.parametrize("worst", [False, True])
@pytest.mark.parametrize(("tokens", "hidden", "topk", "local", "alignment"), SHAPES)
def test_expanded_rows_are_where_the_contract_says(tokens, hidden, topk, local, alignment, worst):
    xs, idx, weights, experts = make(tokens, hidden, topk, local)
    room = [len(tokens) * max(1, *tokens)] * len(tokens)
    results = reference.dispatch(
        xs,
        topk_idx=idx,
        topk_weights=weights,
        num_experts=experts,
        expert_alignment=alignment,
        do_expand=True,
        do_zero_padding=True,
        num_worst_tokens=room if worst else None,
    )
    for rank, result in enumerate(results):
        handle = result.handle
        want, starts, ends = {}, [], []
        row = 0
        for expert in range(local):
            starts.append(row)
            for _, source, token, column in [
                copy for copy in copies(idx, rank, local) if copy[0] == expert
            ]:
                want[row] = (source, token, column)
                row += 1
            ends.append(row)
            row = -(-row // alignment) * alignment
        total = row
        if worst:
            total = room[rank] * min(topk, local) + local * (alignment - 1)
        assert result.recv_x.shape == (total, hidden)
        assert handle.num_rows == handle.num_expanded_tokens == total
        assert result.recv_topk_idx is None
        assert result.recv_topk_weights.shape == (total,)
        assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
        rounded = [-(-count // alignment) * alignment for count in counts]
        assert result.num_recv_tokens_per_expert_list == ([] if worst else rounded)
        assert result.defined.tolist() == [place < row for place in range(total)]
        source_of = received(idx, rank, local)
        for place in range(row):
            if place not in want:
                assert not result.recv_x[place].any()
                assert result.recv_topk_weights[place] == 0
                continue
            source, token, column = want[place]
            assert np.array_equal(result.recv_x[place], xs[source][token])
            assert result.recv_topk_weights[place] == weights[source][token, column]
            number = source_of.index((source, token))
            assert handle.expanded_row[number, column] == place
            assert handle.send_row.dtype == handle.expanded_row.dtype == np.int32
        assert (handle.expanded_row >= 0).sum() == len(want)
        assert handle.num_recv_tokens == (room[rank] if worst else len(source_of))
        tail = handle.expanded_row[len(source_of) :]
        assert (tail == -1).all()


def received(idx, rank, local):
    """(source rank, token) of each received token."""
    return [
        (source, token)
        for source, table in enumerate(idx)
        for token, row in enumerate(table)
        if any(rank * local <= expert < (rank + 1) * local for expert in row)
    ]


@pytest.mark.parametrize(("tokens", "hidden", "topk", "local", "alignment"), SHAPES)
def test_without_a_wait_the_real_rows_come_first(tokens, hidden, topk, local, alignment):
    xs, idx, weights, experts = make(tokens, hidden, topk, local)
    given = {"topk_idx": idx, "topk_weights": weights, "num_experts": experts}
    given["expert_alignment"] = alignment
    waited = reference.dispatch(xs, **given)
    room = [result.handle.num_recv_tokens + rank for rank, result in enumerate(waited)]
    results = reference.dispatch(xs, num_worst_tokens=room, **given)
    again = reference.dispatch(
        xs, handles=[result.handle for result in results], topk_weights=weights
    )
    for rank, (got, want) in enumerate(zip(results, waited, strict=True)):
        real = want.handle.num_recv_tokens
        handle = got.handle
        assert handle.num_recv_tokens == len(got.recv_x) == room[rank]
        assert np.array_equal(got.recv_x[:real], want.recv_x)
        for name, nothing in (("recv_topk_idx", -1), ("recv_topk_weights", 0)):
            array = getattr(got, name)
            assert np.array_equal(array[:real], getattr(want, name))
            assert (array[real:] == nothing).all()
        assert np.array_equal(handle.recv_src_idx[:real], want.handle.recv_src_idx)
        assert (handle.recv_src_idx[real:] == -1).all()
        assert handle.psum_num_recv_tokens_per_scaleup_rank[-1] == real
        assert got.num_recv_tokens_per_expert_list == []
        aligned = np.cumsum(want.num_recv_tokens_per_expert_list)
        assert handle.psum_num_recv_tokens_per_expert.tolist() == aligned.tolist()
        assert not handle.counts_known
        assert got.defined.tolist() == [row < real for row in range(room[rank])]
        assert again[rank].recv_topk_weights.shape == (room[rank], topk)
        assert (again[rank].recv_topk_weights[real:] == 0).all()
        assert again[rank].handle is handle
    if room[0] > 1:
        short = [room[0] - 1, *room[1:]]
        words = (
            f"rank 0 would receive {room[0]} tokens, more than its num_worst_tokens = {short[0]}"
        )
        with pytest.raises(ValueError, match=words):
            reference.dispatch(xs, num_worst_tokens=short, **given)


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32])
def test_scales_travel_with_their_rows(dtype, layout):
    xs, idx, _, experts = make((4, 0, 6), 300, 3, 2)
    rng = np.random.default_rng(3)
    columns = 3 if dtype == np.float32 else 1
    codes = [rng.integers(0, 256, x.shape, np.uint8).view(ml_dtypes.float8_e4m3fn) for x in xs]
    scales = [rng.integers(0, 2**32, (len(x), columns), np.uint32).view(dtype) for x in xs]
    results = reference.dispatch(
        list(zip(codes, scales, strict=True)),
        topk_idx=idx,
        num_experts=experts,
        scales_layout=layout,
    )
    for rank, result in enumerate(results):
        rows, got = result.recv_x
        assert rows.dtype == ml_dtypes.float8_e4m3fn
        assert got.dtype == dtype
        assert got.flags.c_contiguous if layout == "row" else got.flags.f_contiguous
        for n, (source, token) in enumerate(received(idx, rank, 2)):
            assert rows[n].tobytes() == codes[source][token].tobytes()
            assert got[n].tobytes() == scales[source][token].tobytes()


@pytest.mark.parametrize(
    "kind", [{}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True}]
)
def test_a_cast_on_the_way_is_a_cast_before(kind):
    xs, idx, weights, experts = make((4, 9), 300, 3, 2)
    given = {"topk_idx": idx, "topk_weights": weights, "num_experts": experts, "do_expand": True}
    cast = reference.dispatch(xs, quantize=True, **kind, **given)
    pairs = reference.dispatch([reference.quantize(x, **kind) for x in xs], **given)
    for got, want in zip(cast, pairs, strict=True):
        compare.assert_dispatch_equal(got, want)
        assert got.recv_x[0].dtype == ml_dtypes.float8_e4m3fn


def test_statistics_add_up():
    xs, idx, _, experts = make((4, 9), 3, 3, 2)
    stats = [np.array([1, 2], np.int32), np.array([10, 20], np.int32)]
    for _ in range(2):
        results = reference.dispatch(xs, topk_idx=idx, num_experts=experts, recv_stats=stats)
    for rank, result in enumerate(results):
        counts = result.handle.num_unaligned_recv_tokens_per_expert
        start = np.array([[1, 2], [10, 20]][rank])
        assert np.array_equal(stats[rank], start + 2 * counts)


# ------------------------------------------------------------------------------------- combine

FLOATS = {
    "bfloat16": np.float32,
    "float16": np.float32,
    "float32": np.float32,
    "float64": np.float64,
}
CASE = data.Case(
    4, (40, 0, 64, 25), 96, 16, 8, "bfloat16", num_biases=2, expand=True, expert_alignment=4
)


def add(terms, accumulator, shape):
    """Add in order; float64 terms, which nothing but a fused product makes, are rounded last."""
    total = None
    for term in terms:
        wide = term if term.dtype == np.float64 else term.astype(accumulator)
        total = (wide if total is None else total + wide).astype(accumulator)
    return np.zeros(shape, accumulator) if total is None else total


def combine(case, want, *, wrong=""):
    """Token by token, with one thing wrong."""
    dtype, kept = case.row_dtype, FLOATS[case.dtype]
    results = []
    for rank, inputs in enumerate(want.inputs):
        out = np.zeros((case.num_tokens[rank], case.hidden), dtype)
        send_row = want.dispatched[rank].handle.send_row
        for t in range(len(out)):
            terms = [bias[t] for bias in inputs.biases]
            for r in range(case.num_ranks):
                if send_row[t, r] < 0:
                    continue
                handle, rows = want.dispatched[r].handle, want.rows[r]
                mine = [row for row in handle.expanded_row[send_row[t, r]] if row >= 0]
                if wrong == "by expert":
                    mine = sorted(mine)
                if wrong == "descending columns":
                    mine = mine[::-1]
                parts = []
                for row in mine:
                    part = rows.y[row]
                    if rows.row_weights is not None and wrong != "no weights":
                        exact = np.float64 if wrong == "fused" else kept
                        part = part.astype(exact) * exact(rows.row_weights[row])
                        if wrong == "weights rounded early":
                            part = part.astype(dtype)
                    parts.append(part)
                if case.reduce == "per_rank":
                    total = add(parts, kept, case.hidden)
                    parts = [total if wrong == "one rounding" else total.astype(dtype)]
                terms += parts
            out[t] = add(terms, kept, case.hidden).astype(dtype)
        results.append(out)
    return results


def differs(want, results):
    found = 0
    for rank, out in enumerate(results):
        try:
            compare.assert_equal_or_nan("combined_x", out, want.combined[rank].combined_x)
        except AssertionError:
            found += 1
    return found


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("row_weights", [False, True])
@pytest.mark.parametrize("reduce", ["exact", "per_rank"])
def test_expanded_combine_is_what_the_contract_says(reduce, row_weights, dtype):
    """And every wrong way shows on this data."""
    case = replace(CASE, dtype=dtype, reduce=reduce, row_weights=row_weights, wait="worst")
    want = data.expected(case, 1)
    with np.errstate(all="ignore"):
        assert differs(want, combine(case, want)) == 0
        wrong = ["by expert", "descending columns"]
        wrong += ["one rounding"] * (reduce == "per_rank" and FLOATS[dtype] != case.row_dtype)
        wrong += ["no weights"] * row_weights
        wrong += ["fused"] * (row_weights and dtype != "float64")
        wrong += ["weights rounded early"] * (row_weights and FLOATS[dtype] != case.row_dtype)
        for each in wrong:
            assert differs(want, combine(case, want, wrong=each)) >= 1, each


def test_weights_come_back_to_their_choices():
    xs, idx, weights, experts = make((7, 0, 9), 2, 4, 3)
    results = reference.dispatch(
        xs, topk_idx=idx, topk_weights=weights, num_experts=experts, do_expand=True
    )
    back = reference.combine(
        [result.recv_x for result in results],
        [result.handle for result in results],
        topk_weights=[result.recv_topk_weights for result in results],
    )
    for rank, result in enumerate(back):
        want = np.where(idx[rank] >= 0, weights[rank], np.float32(0))
        assert result.combined_topk_weights.tobytes() == want.tobytes()


def test_integers_wrap_and_are_not_weighed():
    xs, idx, _, experts = make((7, 9), 3, 4, 3)
    results = reference.dispatch(xs, topk_idx=idx, num_experts=experts, do_expand=True)
    handles = [result.handle for result in results]
    rng = np.random.default_rng(0)
    ys = [rng.integers(-128, 128, (h.num_rows, 3), np.int8) for h in handles]
    exact = reference.combine(ys, handles)
    per_rank = reference.combine(ys, handles, reduce="per_rank")
    for one, other in zip(exact, per_rank, strict=True):
        assert np.array_equal(one.combined_x, other.combined_x)
    with pytest.raises(ValueError, match="floating rows"):
        reference.combine(ys, handles, row_weights=[np.ones(len(y), np.float32) for y in ys])


def test_one_expert_a_rank_makes_both_ways_equal():
    """Without weights a lone copy is the row itself, and the plain layout's sum is the same."""
    xs, idx, _, experts = make((7, 0, 9), 5, 3, 1)
    plain = reference.dispatch(xs, topk_idx=idx, num_experts=experts)
    expanded = reference.dispatch(xs, topk_idx=idx, num_experts=experts, do_expand=True)
    want = reference.combine([r.recv_x for r in plain], [r.handle for r in plain])
    for reduce in ("exact", "per_rank"):
        got = reference.combine(
            [r.recv_x for r in expanded], [r.handle for r in expanded], reduce=reduce
        )
        for one, other in zip(got, want, strict=True):
            assert one.combined_x.tobytes() == other.combined_x.tobytes()


def test_what_does_not_go_together_is_refused():
    xs, idx, _, experts = make((4, 9), 3, 3, 2)
    masks = [np.ones((len(x), 2), bool) for x in xs]
    given = {"topk_idx": idx, "num_experts": experts}
    first = reference.dispatch(xs, **given)
    handles = [result.handle for result in first]
    codes = [np.zeros(x.shape, np.uint8) for x in xs]

    def bad(match, *args, **kwargs):
        with pytest.raises(ValueError, match=match):
            reference.dispatch(*args, **kwargs)

    bad("do_expand needs topk_idx", xs, is_token_in_rank=masks, do_expand=True)
    bad("recv_stats needs topk_idx", xs, is_token_in_rank=masks, recv_stats=[0, 0])
    bad("num_worst_tokens and recv_stats", xs, handles=handles, num_worst_tokens=[9, 9])
    bad("one a rank, got 1", xs, num_worst_tokens=[9], **given)
    pairs = [(code, np.zeros((len(code), 1), np.float32)) for code in codes]
    bad("quantize does not go with scales", pairs, quantize=True, **given)
    bad("with all ranks' rows or with none", [pairs[0], codes[1]], **given)
    bad("scales must be float32", [(c, np.zeros((len(c), 2), np.float32)) for c in codes], **given)
    bad("one-byte rows", [(x, np.zeros((len(x), 1), np.float32)) for x in xs], **given)
    bad("for packed ones", [(c, np.zeros((len(c), 1), np.int16)) for c in codes], **given)
    expanded = reference.dispatch(xs, do_expand=True, **given)
    rows = [result.recv_x for result in first]
    with pytest.raises(ValueError, match="two layouts"):
        reference.combine(rows, [handles[0], expanded[1].handle])
    with pytest.raises(ValueError, match="need an expanded layout"):
        reference.combine(rows, handles, row_weights=[np.ones(len(r), np.float32) for r in rows])
    more = [result.recv_x for result in expanded]
    with pytest.raises(ValueError, match="row_weights must be float32"):
        reference.combine(
            more,
            [result.handle for result in expanded],
            row_weights=[np.ones((len(y), 1), np.float32) for y in more],
        )


def test_rows_are_placed_with_no_array_between():
    rng = np.random.default_rng(3)
    tokens, columns, width = 64, 4, 4096
    rows = rng.integers(0, 99, (tokens, width)).astype(np.int32)
    table = rng.permutation(tokens * columns + 40)[: tokens * columns].astype(np.int32)
    table = table.reshape(tokens, columns)
    table[::5, 1] = -1  # rows of no copy stay as they are
    want = np.full((tokens * columns + 40, width), -7, np.int32)
    for token, column in np.argwhere(table >= 0):
        want[table[token, column]] = rows[token]
    out = np.full_like(want, -7)
    tracemalloc.start()
    layout.place(rows, table, out)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(out, want)
    assert most < out.nbytes / 8
