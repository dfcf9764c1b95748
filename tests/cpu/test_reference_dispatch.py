"""The reference dispatch against loops that follow the contract word by word."""

import ml_dtypes
import numpy as np
import pytest

from deepep_cupy import reference

RECORD = np.dtype([("flag", "u1"), ("value", "<f4")], align=True)  # three bytes of padding
DTYPES = [
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16, np.float32, np.float64),
    *(np.int8, np.uint8, np.int16, np.int32, np.int64, np.bool_, np.complex64, "V7", RECORD),
]


def rows_of_bytes(rng, shape, dtype):
    dtype = np.dtype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def choices(rng, tokens, topk, experts, dtype=np.int64, empty=0.3):
    table = np.full((tokens, topk), -1, dtype)
    for t in range(tokens):
        count = min(topk, experts)
        columns = rng.permutation(topk)[:count]
        table[t, columns] = rng.permutation(experts)[:count]
    table[rng.random(table.shape) < empty] = -1
    return table


def goes_to(topk_row, rank, local):
    return any(rank * local <= e < (rank + 1) * local for e in topk_row)


def same_bytes(got, want):
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


def make(num_ranks, tokens, hidden, topk, experts, dtype=np.float32, index=np.int64, seed=0):
    rng = np.random.default_rng(seed)
    xs = [rows_of_bytes(rng, (t, hidden), dtype) for t in tokens]
    idx = [choices(rng, t, topk, experts, index) for t in tokens]
    weights = [rng.standard_normal((t, topk)).astype(np.float32) for t in tokens]
    assert len(tokens) == num_ranks
    return xs, idx, weights


SHAPES = [
    # ranks, tokens, K, E
    (1, (5,), 3, 4),
    (2, (0, 7), 1, 2),
    (2, (6, 0), 4, 2),
    (3, (0, 0, 0), 2, 6),
    (3, (4, 1, 9), 6, 9),
    (5, (3, 0, 8, 1, 2), 8, 10),
    (8, (2, 5, 0, 9, 1, 7, 3, 4), 4, 32),
]


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_topk_against_loops(shape, index):
    num_ranks, tokens, topk, experts = shape
    local = experts // num_ranks
    xs, idx, weights = make(num_ranks, tokens, 3, topk, experts, index=index)
    results = reference.dispatch(
        xs, topk_idx=idx, topk_weights=weights, num_experts=experts, expert_alignment=4
    )
    next_row = [0] * num_ranks
    send_row = [np.full((t, num_ranks), -1, np.int32) for t in tokens]
    for dest, result in enumerate(results):
        x, local_idx, masked, source_token = [], [], [], []
        per_rank = np.zeros(num_ranks, np.int32)
        counts = [0] * local
        for source in range(num_ranks):
            for t in range(tokens[source]):
                if not goes_to(idx[source][t], dest, local):
                    continue
                send_row[source][t, dest] = next_row[dest]
                next_row[dest] += 1
                per_rank[source] += 1
                source_token.append(t)
                x.append(xs[source][t])
                row, row_weights = [], []
                for k in range(topk):
                    e = int(idx[source][t, k]) - dest * local
                    inside = idx[source][t, k] >= 0 and 0 <= e < local
                    row.append(e if inside else -1)
                    row_weights.append(weights[source][t, k] if inside else np.float32(0))
                    if inside:
                        counts[e] += 1
                local_idx.append(row)
                masked.append(row_weights)
        n = len(x)
        assert same_bytes(result.recv_x, np.array(x, np.float32).reshape(n, 3))
        assert same_bytes(result.recv_topk_idx, np.array(local_idx, index).reshape(n, topk))
        assert same_bytes(result.recv_topk_weights, np.array(masked, np.float32).reshape(n, topk))
        assert result.num_recv_tokens_per_expert_list == [(c + 3) // 4 * 4 for c in counts]
        assert all(type(c) is int for c in result.num_recv_tokens_per_expert_list)
        assert same_bytes(result.recv_src_idx, np.array(source_token, np.int32))
        assert same_bytes(result.recv_rows_per_rank, per_rank)
        assert result.handle.num_recv_tokens == n
        assert result.handle.num_tokens == tokens[dest]
        listed = result.handle.num_recv_tokens_per_expert_list
        assert listed == result.num_recv_tokens_per_expert_list
    for rank, result in enumerate(results):
        assert same_bytes(result.send_row, send_row[rank])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["topk", "mask", "cached"])
def test_every_byte_of_any_dtype(dtype, kind):
    num_ranks, tokens, experts = 3, (4, 0, 6), 6
    xs, idx, _ = make(num_ranks, tokens, 5, 3, experts, dtype=dtype, seed=3)
    masks = [np.array([[goes_to(row, r, 2) for r in range(3)] for row in table]).reshape(-1, 3)
             for table in idx]  # fmt: skip
    masks = [mask.astype(np.bool_) for mask in masks]
    if kind == "topk":
        results = reference.dispatch(xs, topk_idx=idx, num_experts=experts)
    elif kind == "mask":
        results = reference.dispatch(xs, is_token_in_rank=masks)
    else:
        first = reference.dispatch(
            [np.zeros((t, 1), np.int8) for t in tokens], topk_idx=idx, num_experts=experts
        )
        results = reference.dispatch(xs, handles=[r.handle for r in first])
    for dest, result in enumerate(results):
        want = b"".join(
            xs[s][t].tobytes() for s in range(3) for t in range(tokens[s]) if masks[s][t, dest]
        )
        assert result.recv_x.dtype == np.dtype(dtype)
        assert result.recv_x.tobytes() == want


def test_rows_need_not_be_contiguous():
    wide = np.arange(24, dtype=np.int16).reshape(4, 6)
    masks = [np.ones((4, 1), np.bool_)]
    (result,) = reference.dispatch([wide[:, ::2]], is_token_in_rank=masks)
    assert np.array_equal(result.recv_x, wide[:, ::2])


def test_mask_gives_no_choices():
    masks = [np.array([[True, False], [True, True]]), np.array([[False, True]])]
    xs = [np.array([[1], [2]]), np.array([[3]])]
    low, high = reference.dispatch(xs, is_token_in_rank=masks)
    assert low.recv_x.tolist() == [[1], [2]]
    assert high.recv_x.tolist() == [[2], [3]]
    assert high.recv_src_idx.tolist() == [1, 0]
    assert high.recv_rows_per_rank.tolist() == [1, 1]
    assert low.send_row.tolist() == [[0, -1], [1, 0]]
    assert high.send_row.tolist() == [[-1, 1]]
    for result in (low, high):
        assert result.recv_topk_idx is None
        assert result.recv_topk_weights is None
        assert result.num_recv_tokens_per_expert_list == []


def test_topk_decides_where_both_are_given():
    xs, idx, _ = make(2, (3, 2), 4, 2, 4)
    wrong = [np.zeros((t, 2), np.bool_) for t in (3, 2)]
    both = reference.dispatch(xs, topk_idx=idx, is_token_in_rank=wrong, num_experts=4)
    alone = reference.dispatch(xs, topk_idx=idx, num_experts=4)
    for one, other in zip(both, alone, strict=True):
        assert same_bytes(one.recv_x, other.recv_x)
        assert same_bytes(one.send_row, other.send_row)


def test_cached_call_repeats_the_rows_and_keeps_the_handle():
    xs, idx, weights = make(3, (4, 5, 2), 3, 2, 6)
    first = reference.dispatch(
        xs, topk_idx=idx, topk_weights=weights, num_experts=6, expert_alignment=8
    )
    new = [np.arange(t * 2, dtype=np.float64).reshape(t, 2) + 100 * r
           for r, t in enumerate((4, 5, 2))]  # fmt: skip
    again = reference.dispatch(new, handles=[f.handle for f in first], topk_weights=weights)
    plain = reference.dispatch(new, handles=[f.handle for f in first])
    for dest, (one, cached, bare) in enumerate(zip(first, again, plain, strict=True)):
        assert cached.handle is one.handle
        listed = cached.num_recv_tokens_per_expert_list
        assert listed is one.num_recv_tokens_per_expert_list
        assert cached.recv_topk_idx is None
        assert bare.recv_topk_weights is None
        sources = [(s, t) for s in range(3) for t in range(len(new[s]))
                   if goes_to(idx[s][t], dest, 2)]  # fmt: skip
        assert [new[s][t].tolist() for s, t in sources] == cached.recv_x.tolist()
        # All columns arrive, those of other ranks' experts too.
        assert [weights[s][t].tolist() for s, t in sources] == cached.recv_topk_weights.tolist()


def test_weights_are_selected_not_multiplied():
    idx = [np.array([[0, 1]]), np.array([[-1, 0]])]
    weights = [np.array([[np.inf, np.nan]], np.float32), np.array([[np.nan, -0.0]], np.float32)]
    xs = [np.zeros((1, 1)), np.zeros((1, 1))]
    low, high = reference.dispatch(xs, topk_idx=idx, topk_weights=weights, num_experts=2)
    assert low.recv_topk_weights.view(np.uint32).tolist() == [[0x7F800000, 0], [0, 0x80000000]]
    assert high.recv_topk_weights[0, 0] == 0
    assert np.isnan(high.recv_topk_weights[0, 1])


@pytest.mark.parametrize("alignment", [1, 3, 128])
def test_counts_are_rounded_up_and_zero_stays_zero(alignment):
    idx = [np.array([[0, 1], [0, -1], [0, 1], [0, -1]])]
    (result,) = reference.dispatch(
        [np.zeros((4, 1))], topk_idx=idx, num_experts=3, expert_alignment=alignment
    )
    want = [-(-count // alignment) * alignment for count in (4, 2, 0)]
    assert result.num_recv_tokens_per_expert_list == want
    assert result.recv_x.shape == (4, 1)


def test_layout_counts_tokens_once_a_rank_and_ignores_what_is_outside():
    idx = np.array([[0, 1, 4], [-1, 99, 5], [-7, -1, -1]], np.int32)
    layout = reference.get_dispatch_layout(idx, 6, 3)
    assert layout.num_tokens_per_rank.tolist() == [1, 0, 2]
    assert layout.num_tokens_per_expert.tolist() == [1, 1, 0, 0, 1, 1]
    assert layout.is_token_in_rank.tolist() == [
        [True, False, True],
        [False, False, True],
        [False] * 3,
    ]
    assert layout.num_tokens_per_rank.dtype == layout.num_tokens_per_expert.dtype == np.int32
    empty = reference.get_dispatch_layout(idx[:0], 6, 3)
    assert empty.num_tokens_per_rank.tolist() == [0, 0, 0]
    assert empty.num_tokens_per_expert.tolist() == [0] * 6
    assert empty.is_token_in_rank.shape == (0, 3)


def bad(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_experts_out_of_range_and_named_twice_are_refused():
    xs = [np.zeros((2, 1)), np.zeros((2, 1))]
    good = np.array([[0, 1], [2, 3]])

    def run(table):
        return lambda: reference.dispatch(xs, topk_idx=[good, np.array(table)], num_experts=4)

    bad(run([[0, 1], [4, -1]]), r"token 1 on rank 1 .* outside -1\.\.3")
    bad(run([[-2, 1], [0, 1]]), r"token 0 on rank 1 .* outside -1\.\.3")
    bad(run([[0, 1], [3, 3]]), "token 1 on rank 1 names an expert twice")
    run([[-1, -1], [-1, 3]])()


def test_arguments_that_do_not_go_together_are_refused():
    xs, idx, weights = make(2, (3, 2), 4, 2, 4)
    masks = [np.ones((t, 2), np.bool_) for t in (3, 2)]
    dispatch = reference.dispatch
    handles = [r.handle for r in dispatch(xs, topk_idx=idx, num_experts=4)]
    bad(lambda: dispatch(xs), "give topk_idx")
    bad(lambda: dispatch([]), "got none")
    bad(lambda: dispatch(xs, topk_idx=idx), "needs num_experts")
    bad(lambda: dispatch(xs, topk_idx=idx, num_experts=5), "multiple")
    bad(lambda: dispatch(xs, topk_idx=idx, num_experts=4, expert_alignment=0), "1 or more")
    bad(lambda: dispatch(xs, topk_idx=idx, num_experts=4, handles=handles), "with a handle")
    bad(lambda: dispatch(xs, is_token_in_rank=masks, handles=handles), "with a handle")
    bad(lambda: dispatch(xs, is_token_in_rank=masks, topk_weights=weights), "topk_weights needs")
    bad(lambda: dispatch(xs, is_token_in_rank=masks[::-1]), "rank 0")
    bad(lambda: dispatch(xs, is_token_in_rank=[m.astype(int) for m in masks]), "must be bool")
    bad(lambda: dispatch(xs, is_token_in_rank=masks[:1]), "one a rank")
    bad(lambda: dispatch(xs, topk_idx=idx, is_token_in_rank=masks[::-1], num_experts=4), "rank 0")
    bad(lambda: dispatch(xs, handles=handles[::-1]), "on rank 0")
    bad(lambda: dispatch(xs, handles=handles[:1]), "one a rank")
    bad(lambda: dispatch([xs[0], xs[1][:, :2]], topk_idx=idx, num_experts=4), "on rank 1")
    bad(lambda: dispatch([xs[0], xs[1].astype("f8")], topk_idx=idx, num_experts=4), "on rank 1")
    bad(lambda: dispatch([x.astype(object) for x in xs], topk_idx=idx, num_experts=4), "plain")
    bad(lambda: dispatch(xs, topk_idx=idx[:1], num_experts=4), "one a rank")
    bad(lambda: dispatch(xs, topk_idx=[idx[0], idx[1][:, :1]], num_experts=4), "on rank 1")
    mixed = [idx[0], idx[1].astype(np.int32)]
    bad(lambda: dispatch(xs, topk_idx=mixed, num_experts=4), "int32 or int64")
    short = [i.astype(np.int16) for i in idx]
    bad(lambda: dispatch(xs, topk_idx=short, num_experts=4), "int32 or int64")
    double = [w.astype(np.float64) for w in weights]
    bad(lambda: dispatch(xs, topk_idx=idx, num_experts=4, topk_weights=double), "float32")
    bad(lambda: dispatch(xs, topk_idx=idx, num_experts=4, topk_weights=weights[:1]), "one a rank")
