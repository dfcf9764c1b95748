"""The reference combine against scalar loops with its own rounding, and against dense products."""

import math
import struct

import ml_dtypes
import numpy as np
import pytest

from deepep_cupy import reference
from deepep_cupy.testing import compare, data

FLOATS = ["bfloat16", "float16", "float32", "float64"]
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


# Rounding of Python floats, in integers and struct only: no NumPy arithmetic.


def to_float32(value):
    """Round a Python float to binary32, ties to even, overflow to infinity."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def float32_bits(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def bits_of(value, dtype):
    """The bits of an accumulator value (a Python float or int) rounded to ``dtype``."""
    if dtype == "float64":
        return struct.unpack("<Q", struct.pack("<d", value))[0]
    if dtype == "float32":
        return float32_bits(value)
    if dtype == "float16":
        try:
            return struct.unpack("<H", struct.pack("<e", value))[0]
        except OverflowError:
            return 0xFC00 if value < 0 else 0x7C00
    if dtype == "bfloat16":
        bits = float32_bits(value)
        return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return value % (1 << np.dtype(dtype).itemsize * 8)


def value_of(bits, dtype):
    if dtype == "float64":
        return struct.unpack("<d", struct.pack("<Q", bits))[0]
    if dtype == "float32":
        return struct.unpack("<f", struct.pack("<I", bits))[0]
    if dtype == "float16":
        return struct.unpack("<e", struct.pack("<H", bits))[0]
    if dtype == "bfloat16":
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return bits  # integers add alike modulo 2^n, signed or not


def as_words(array):
    return array.view(f"u{array.dtype.itemsize}")


def scalar_sum(terms, dtype):
    """Add bit patterns in their order; ``None`` for NaN."""
    if not terms:
        return 0
    total = value_of(terms[0], dtype)
    for term in terms[1:]:
        total += value_of(term, dtype)
        if dtype in ("bfloat16", "float16", "float32") and not math.isnan(total):
            # binary64 holds more than twice the digits: rounding its sum again is exact rounding.
            total = to_float32(total)
    if isinstance(total, float) and math.isnan(total):
        return None
    return bits_of(total, dtype)


def check_against_scalars(ys, handles, biases, combined, dtype):
    words = [as_words(y) for y in ys]
    bias_words = [[as_words(b) for b in pair] for pair in biases]
    for rank, out in enumerate(combined):
        assert out.dtype == ys[0].dtype
        got = as_words(out)
        nan = np.isnan(out) if dtype in FLOATS else np.zeros(out.shape, bool)
        for t in range(out.shape[0]):
            for h in range(out.shape[1]):
                terms = [int(b[t, h]) for b in bias_words[rank]]
                for source, y in enumerate(words):
                    row = handles[rank].send_row[t, source]
                    if row >= 0:
                        terms.append(int(y[row, h]))
                want = scalar_sum(terms, dtype)
                if want is None:
                    assert nan[t, h]
                else:
                    assert int(got[t, h]) == want, (rank, t, h, hex(int(got[t, h])), hex(want))


@pytest.mark.parametrize("num_biases", [0, 1, 2])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_against_scalar_loops(dtype, num_biases):
    case = data.Case(4, (9, 0, 14, 3), 24, 8, 8, dtype, num_biases=num_biases, routing="random")
    want = data.expected(case, seed=num_biases)
    handles = [d.handle for d in want.dispatched]
    check_against_scalars(
        [r.y for r in want.rows],
        handles,
        [i.biases for i in want.inputs],
        [c.combined_x for c in want.combined],
        dtype,
    )
    check_against_scalars(
        [r.topk_weights for r in want.rows],
        handles,
        [() for _ in want.inputs],
        [c.combined_topk_weights for c in want.combined],
        "float32",
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_random_bits_against_scalar_loops(dtype):
    """Every exponent, NaN payloads and subnormals; terms that are often alone."""
    rng = np.random.default_rng(1)
    mask = [rng.random((6, 3)) < 0.5 for _ in range(3)]
    handles = [d.handle for d in reference.dispatch([np.zeros((6, 1))] * 3, is_token_in_rank=mask)]
    size = np.dtype(dtype).itemsize
    ys = [
        np.frombuffer(rng.bytes(h.num_recv_tokens * 200 * size), dtype).reshape(-1, 200)
        for h in handles
    ]
    combined = [c.combined_x for c in reference.combine(ys, handles)]
    check_against_scalars(ys, handles, [()] * 3, combined, dtype)


def handle_of(send_row, num_recv_tokens):
    send_row = np.array(send_row, np.int32)
    return reference.Handle(
        num_tokens=len(send_row),
        num_recv_tokens=num_recv_tokens,
        recv_src_idx=np.zeros(num_recv_tokens, np.int32),
        recv_rows_per_rank=np.zeros(send_row.shape[1], np.int32),
        send_row=send_row,
        num_recv_tokens_per_expert_list=[],
    )


def one_token(values, dtype, biases=()):
    """Combine one token of rank 0 that every rank sends ``values[rank]`` back for."""
    ranks = len(values)
    handles = [handle_of([[0] * ranks], 1)]
    handles += [handle_of(np.zeros((0, ranks)), 1) for _ in range(ranks - 1)]
    ys = [np.array([[v]], dtype) for v in values]
    given = [[np.array([[b]], dtype) for b in biases]] + [[]] * (ranks - 1)
    return reference.combine(ys, handles, biases=given)[0].combined_x[0, 0]


def test_order_is_biases_then_ranks():
    big = np.float32(2**30)
    assert one_token([big, 1, -big], np.float32) == 0
    assert one_token([big, -big, 1], np.float32) == 1
    assert one_token([-big, 1], np.float32, biases=[big]) == 1
    assert one_token([1, -big], np.float32, biases=[big]) == 0
    assert one_token([-big], np.float32, biases=[1, big]) == 0
    assert one_token([1], np.float32, biases=[big, -big]) == 1


def test_rounds_once():
    # 1 + 2^-8 is a tie that would round to 1; with another 2^-8 the sum is a bfloat16.
    assert float(one_token([1, 2**-8, 2**-8], ml_dtypes.bfloat16)) == 1 + 2**-7
    assert float(one_token([1, 2**-11, 2**-11], np.float16)) == 1 + 2**-10
    assert one_token([1, 2**-24, 2**-24], np.float32) == 1
    assert one_token([1, 2**-53, 2**-53], np.float64) == 1
    assert one_token([1, 2**-40], np.float64) == 1 + 2**-40


def test_zero_keeps_its_sign_only_alone_or_among_its_like():
    for dtype in FLOATS:
        assert np.signbit(np.float64(one_token([-0.0], dtype)))
        assert np.signbit(np.float64(one_token([-0.0, -0.0], dtype)))
        assert not np.signbit(np.float64(one_token([-0.0, 0.0], dtype)))
        assert not np.signbit(np.float64(one_token([1.0, -1.0], dtype)))


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_a_token_sent_nowhere_is_plus_zero_or_its_bias(dtype):
    handle = handle_of([[-1]], 0)
    y = np.zeros((0, 3), dtype)
    (result,) = reference.combine([y], [handle])
    assert result.combined_x.tobytes() == bytes(result.combined_x.nbytes)
    bias = data._values(np.random.default_rng(2), (1, 3), np.dtype(dtype))
    (result,) = reference.combine([y], [handle], biases=[[bias]])
    assert result.combined_x.tobytes() == bias.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_subnormals_are_numbers(dtype):
    least = {
        "bfloat16": 2.0**-133,
        "float16": 2.0**-24,
        "float32": 2.0**-149,
        "float64": 2.0**-1074,
    }
    value = np.array(least[dtype]).astype(dtype)
    assert float(one_token([value, value, value], dtype)) == 3 * least[dtype]


def test_integers_wrap():
    assert one_token([127, 1], np.int8) == -128
    assert one_token([255, 2], np.uint8) == 1
    assert one_token([2**63 - 1, 1], np.int64) == -(2**63)
    assert one_token([2**32 - 1, 2], np.uint32) == 1


def test_overflow_is_infinite_without_a_warning():
    assert one_token([65504, 65504], np.float16) == np.inf
    assert one_token([3e38, 3e38], np.float32) == np.inf
    assert np.isnan(one_token([np.inf, -np.inf], np.float32))


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64"])
def test_against_a_dense_product(dtype):
    """One-hot matrices instead of routing: combine(w · A_e(x)) is a sum over all experts."""
    num_ranks, experts, topk, hidden = 3, 12, 4, 16
    rng = np.random.default_rng(5)
    tokens = (7, 0, 11)
    xs = [rng.integers(-8, 8, (t, hidden)).astype(dtype) for t in tokens]
    idx = [np.argsort(rng.random((t, experts)))[:, :topk] for t in tokens]
    idx[0][2, 1] = -1
    idx[2][5] = -1
    weights = [rng.integers(-4, 4, (t, topk)).astype(np.float32) for t in tokens]
    matrices = rng.integers(-3, 4, (experts, hidden, hidden)).astype(dtype)
    local = experts // num_ranks
    received = reference.dispatch(xs, topk_idx=idx, topk_weights=weights, num_experts=experts)
    ys = []
    for rank, got in enumerate(received):
        one_hot = got.recv_topk_idx[:, :, None] == np.arange(local)  # [N, K, El]
        gate = np.einsum("nke,nk->ne", one_hot, got.recv_topk_weights).astype(dtype)
        own = matrices[rank * local : (rank + 1) * local]
        ys.append(np.einsum("ne,nh,ehg->ng", gate, got.recv_x, own))
    back = reference.combine(
        ys, [r.handle for r in received], topk_weights=[r.recv_topk_weights for r in received]
    )
    for x, table, weight, result in zip(xs, idx, weights, back, strict=True):
        one_hot = table[:, :, None] == np.arange(experts)
        gate = np.einsum("tke,tk->te", one_hot, weight).astype(dtype)
        dense = np.einsum("te,th,ehg->tg", gate, x, matrices)
        assert np.array_equal(result.combined_x, dense)
        assert np.array_equal(result.combined_topk_weights, np.where(table >= 0, weight, 0))


def test_blocks_do_not_show():
    """More rows than one block holds give what each row alone gives."""
    case = data.Case(2, (700, 900), 512, 8, 4, "bfloat16", num_biases=1)
    want = data.expected(case, 0)
    handles = [d.handle for d in want.dispatched]
    for begin in (0, 510, 511, 512, 513, 699):  # a block of rows of 512 ends before token 512
        part = reference.Handle(
            1,
            handles[0].num_recv_tokens,
            handles[0].recv_src_idx,
            handles[0].recv_rows_per_rank,
            handles[0].send_row[begin : begin + 1],
            [],
        )
        bias = [[want.inputs[0].biases[0][begin : begin + 1]], []]
        alone = reference.combine([r.y for r in want.rows], [part, handles[1]], biases=bias)
        whole = want.combined[0].combined_x[begin : begin + 1]
        compare.assert_equal_or_nan("row", alone[0].combined_x, whole)


def bad(match, *args, **kwargs):
    with pytest.raises(ValueError, match=match):
        reference.combine(*args, **kwargs)


@pytest.mark.parametrize(
    "dtype",
    [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.bool_, np.complex64, "V4", ">f4"],
    ids=str,
)
def test_rows_without_a_sum_are_refused(dtype):
    bad("cannot be added", [np.zeros((1, 2), dtype)], [handle_of([[0]], 1)])


def test_arguments_that_do_not_fit_are_refused():
    handles = [handle_of([[0, -1]], 2), handle_of([[1, -1]], 0)]
    y = [np.zeros((2, 3), np.float32), np.zeros((0, 3), np.float32)]
    bias = np.zeros((1, 3), np.float32)
    weights = [np.zeros((2, 2), np.float32), np.zeros((0, 2), np.float32)]
    reference.combine(y, handles, biases=[[bias], []], topk_weights=weights)
    bad("a rank, got", [], [])
    bad("a rank, got", y, handles[:1])
    bad("a rank, got", y, handles, biases=[[]])
    bad("on rank 0", y[::-1], handles)
    bad("on rank 1", [y[0], y[1].astype(np.float64)], handles)
    bad("on rank 1", [y[0], y[1][:, :2]], handles)
    bad("0 to 2 biases", y, handles, biases=[[bias] * 3, []])
    bad("bias_1 .* on rank 0", y, handles, biases=[[bias, bias[:0]], []])
    bad("bias_0 .* on rank 1", y, handles, biases=[[], [bias.astype(np.float64)]])
    bad("wanted 2 topk_weights", y, handles, topk_weights=weights[:1])
    bad("topk_weights .* on rank 0", y, handles, topk_weights=weights[::-1])
    bad("topk_weights .* on rank 1", y, handles, topk_weights=[weights[0], weights[1][:, :1]])


def by_loops(ys, handles, biases, nodes):
    """``reduce="per_node"`` of bfloat16 rows, element by element."""
    bf16, f32 = ml_dtypes.bfloat16, np.float32

    def total(terms):
        value = None
        for term in terms:
            value = f32(term) if value is None else f32(value + f32(term))
        return bf16(f32(0) if value is None else value)

    results = []
    for handle, given in zip(handles, biases, strict=True):
        out = np.empty((handle.num_tokens, ys[0].shape[1]), bf16)
        for token, row in enumerate(handle.send_row):
            for column in range(out.shape[1]):
                terms = [bias[token, column] for bias in given]
                for ranks in nodes:
                    here = [ys[rank][row[rank], column] for rank in ranks if row[rank] >= 0]
                    terms += [total(here)] if here else []
                out[token, column] = total(terms)
        results.append(out)
    return results


@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0,), (1,), (2,), (3,))])
def test_per_node_adds_ranks_of_a_node_first(nodes):
    rng = np.random.default_rng(4)
    masks = [rng.random((9, 4)) < 0.7 for _ in range(4)]
    masks[2][:] = False
    sent = reference.dispatch([np.zeros((9, 5), ml_dtypes.bfloat16)] * 4, is_token_in_rank=masks)
    handles = [each.handle for each in sent]
    ys = [rng.standard_normal((each.num_rows, 5)).astype(ml_dtypes.bfloat16) for each in handles]
    biases = [[rng.standard_normal((9, 5)).astype(ml_dtypes.bfloat16)] * n for n in (0, 1, 2, 1)]
    got = reference.combine(ys, handles, biases=biases, reduce="per_node", nodes=nodes)
    for result, want in zip(got, by_loops(ys, handles, biases, nodes), strict=True):
        assert result.combined_x.tobytes() == want.tobytes()
    exact = reference.combine(ys, handles, biases=biases)
    differs = any((a.combined_x != b.combined_x).any() for a, b in zip(got, exact, strict=True))
    assert differs == (len(nodes) == 2)  # a node of one rank adds nothing, and rounds nothing
    one = reference.combine(ys, handles, biases=biases, reduce="per_node", nodes=[range(4)])
    for a, b in zip(one, exact, strict=True):
        assert a.combined_x.tobytes() == b.combined_x.tobytes()
