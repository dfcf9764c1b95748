"""DeepEP V1's low-latency layout in the reference, against plain loops."""

import ml_dtypes
import numpy as np
import pytest

from deepep_cupy.reference import combine, dispatch, low_latency_combine, low_latency_dispatch

R, E, K, H, M = 3, 6, 4, 130, 5
LOCAL, ROWS = E // R, R * M


def inputs(tokens=(5, 0, 3)):
    rng = np.random.default_rng(4)
    idx = [np.argsort(rng.random((t, E)), axis=1)[:, :K].copy() for t in tokens]
    for each in idx:
        each[rng.random(each.shape) < 0.2] = -1
    x = [rng.standard_normal((t, H)).astype(ml_dtypes.bfloat16) for t in tokens]
    return x, idx, [rng.random((t, K), np.float32) for t in tokens]


def rows_of(idx, expert):
    """(source, token, column) of each row of an expert, in order."""
    return [
        (source, token, column)
        for source in range(R)
        for token in range(len(idx[source]))
        for column in range(K)
        if idx[source][token, column] == expert
    ]


@pytest.mark.parametrize("use_fp8", [False, True])
def test_every_row_lies_where_a_loop_puts_it(use_fp8):
    x, idx, weights = inputs()
    stats = [np.full(LOCAL, 7, np.int32) for _ in range(R)]
    done = low_latency_dispatch(
        x, idx, M, E, topk_weights=weights, use_fp8=use_fp8, recv_stats=stats
    )
    sent = dispatch(x, topk_idx=idx, num_experts=E, quantize=True)
    for rank, got in enumerate(done):
        rows, scales = got.recv_x if use_fp8 else (got.recv_x, None)
        assert rows.shape == (LOCAL, ROWS, H)
        if use_fp8:
            assert scales.shape == (LOCAL, ROWS, 2)
            assert scales.strides == (8 * ROWS, 4, 4 * ROWS)
        of_token = {}
        plain = sent[rank]
        for row in range(plain.handle.num_recv_tokens):
            source = np.searchsorted(np.cumsum(plain.recv_rows_per_rank), row, side="right")
            of_token[source, plain.recv_src_idx[row]] = [part[row] for part in plain.recv_x]
        for local in range(LOCAL):
            wanted = rows_of(idx, rank * LOCAL + local)
            assert got.recv_count[local] == len(wanted)
            assert stats[rank][local] == 7 + len(wanted)
            assert got.defined[local].tolist() == [n < len(wanted) for n in range(ROWS)]
            for source in range(R):
                first, number = divmod(int(got.recv_layout_range[local, source]), 1 << 32)
                mine = [n for n, each in enumerate(wanted) if each[0] == source]
                assert number == len(mine)
                assert not mine or first == mine[0]
            for row, (source, token, column) in enumerate(wanted):
                assert got.recv_src_info[local, row] == token
                assert got.weights[local, row] == weights[source][token, column]
                want = of_token[source, token] if use_fp8 else [x[source][token]]
                have = [rows[local, row]] + ([scales[local, row]] if use_fp8 else [])
                assert [each.tobytes() for each in have] == [each.tobytes() for each in want]


@pytest.mark.parametrize("reduce", ["exact", "per_rank"])
def test_sums_are_those_of_the_expanded_layout(reduce):
    x, idx, weights = inputs()
    packed = dispatch(x, topk_idx=idx, num_experts=E, topk_weights=weights, do_expand=True)
    spread = low_latency_dispatch(x, idx, M, E, topk_weights=weights, use_fp8=False)
    ys = [np.random.default_rng(rank).standard_normal(each.recv_x.shape).astype(np.float32)
          for rank, each in enumerate(packed)]  # fmt: skip
    want = combine(
        ys,
        [each.handle for each in packed],
        reduce=reduce,
        row_weights=[each.recv_topk_weights for each in packed],
    )
    gaps = []
    for y, each in zip(ys, spread, strict=True):
        out = np.full((LOCAL, ROWS, H), np.nan, np.float32)
        out[each.defined] = y
        gaps.append(out)
    for given in (None, weights):
        got = low_latency_combine(gaps, spread, topk_weights=given, reduce=reduce)
        for have, each in zip(got, want, strict=True):
            assert have.tobytes() == each.combined_x.tobytes()


def test_what_is_refused():
    x, idx, _ = inputs()
    with pytest.raises(ValueError, match="5 tokens on rank 0"):
        low_latency_dispatch(x, idx, 4, E)
    done = low_latency_dispatch(x, idx, M, E)
    with pytest.raises(ValueError, match="no weights"):
        low_latency_combine([np.zeros((LOCAL, ROWS, H), np.float32)] * R, done)
