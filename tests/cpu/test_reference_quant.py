"""The cast to FP8 against exact fractions, number by number."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from deepep_cupy.engines.host.cast import cast
from deepep_cupy.reference import dequantize, quantize
from deepep_cupy.reference.quant import GROUP, QUANTIZABLE, num_groups

FP8 = ml_dtypes.float8_e4m3fn
CODES = np.arange(127, dtype=np.uint8)  # from +0 to 448
VALUES = [Fraction(float(value)) for value in CODES.view(FP8).astype(np.float64)]
KINDS = [{}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True}]


def nearest(value):
    """Code of a finite fraction: nearest, ties to the even code, 448 beyond 448."""
    size = min(abs(value), VALUES[-1])
    above = next(code for code, known in enumerate(VALUES) if known >= size)
    below = max(above - 1, 0)
    gaps = (size - VALUES[below], VALUES[above] - size)
    chosen = above if gaps[1] < gaps[0] else below
    if gaps[0] == gaps[1]:
        chosen = above if above % 2 == 0 else below
    return chosen


def float32(value):
    """A fraction rounded to float32, to nearest even; subnormals and overflow as IEEE has them."""
    if value == 0:
        return Fraction(0)
    exponent = max(-126, (abs(value).numerator.bit_length() - value.denominator.bit_length()) - 1)
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    return round(value / unit) * unit  # Python rounds halves to even


def by_hand(row, *, round_scale=False):
    """Codes and ``scale_inv`` of one group without NaN and infinities."""
    wide = [Fraction(float(value)) for value in row]
    floor = Fraction(float(np.float32(1e-4)))
    amax = max([floor, *(abs(value) for value in wide)])
    scale_inv = float32(amax * Fraction(float(np.uint32(0x3B124925).view(np.float32))))
    if round_scale:
        power = Fraction(2) ** -126
        while power < scale_inv:
            power *= 2
        scale_inv, scale = power, 1 / power
    else:
        scale = float32(448 / amax)
    codes = [nearest(float32(value * scale)) for value in wide]
    signs = np.signbit(row.astype(np.float64))
    return np.array(codes, np.uint8) | (signs.astype(np.uint8) << 7), scale_inv


def some_rows(dtype, seed=0):
    rng = np.random.default_rng(seed)
    info = ml_dtypes.finfo(dtype)
    top, least = float(info.max), float(info.smallest_subnormal)
    rows = rng.standard_normal((12, GROUP)) * 10.0 ** rng.uniform(-6, 3, (12, 1))
    rows[1] = 0
    rows[2, ::2] *= 0
    rows[3] = rng.choice([top, -top, 1.0, -0.0], GROUP)
    rows[4] = rng.choice([least, -least, 3 * least, 0.0], GROUP)
    rows[5] = 448 / rng.integers(1, 30, GROUP)
    rows[6, 0] = 448
    rows[7] = np.float32(1e-4) * rng.choice([1, -1, 0.999, 0.5], GROUP)
    rows[8] = rng.integers(-20, 20, GROUP) / 16
    with np.errstate(all="ignore"):
        return rows.astype(dtype)


@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_every_number_is_what_fractions_say(dtype, round_scale):
    rows = some_rows(dtype)
    codes, scales = quantize(rows, round_scale=round_scale)
    assert codes.dtype == FP8
    assert scales.dtype == np.float32
    for row, got, scale in zip(rows, codes.view(np.uint8), scales[:, 0], strict=True):
        want, scale_inv = by_hand(row, round_scale=round_scale)
        assert Fraction(float(scale)) == scale_inv
        assert got.tolist() == want.tolist()


def test_every_float16_is_cast_to_the_nearest_code():
    """All of them, each beside 448 so that the scale is 1."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = values[np.abs(values.astype(np.float32)) <= 448]
    rows = np.zeros((len(values), 2), np.float16)
    rows[:, 0], rows[:, 1] = values, 448
    codes, scales = quantize(rows)
    assert (scales == 1).all()
    table = np.array([float(value) for value in VALUES])
    edges = (table[1:] + table[:-1]) / 2  # exact: between two codes is one more bit
    size = np.abs(values.astype(np.float64))
    code = np.searchsorted(edges, size, side="left")
    at_edge = np.isin(size, edges)
    code[at_edge] += code[at_edge] % 2  # a tie below an odd code goes up to the even one
    want = code.astype(np.uint8) | (np.signbit(values).astype(np.uint8) << 7)
    assert np.array_equal(codes.view(np.uint8)[:, 0], want)


def test_odd_numbers():
    nan, inf = np.nan, np.inf
    x = np.array([[nan, -nan, 1, -2, 0, -0.0], [inf, -inf, 5, -5, nan, -0.0]], np.float32)
    x[0, 1] = np.uint32(0xFFC12345).view(np.float32)  # a negative NaN with a payload
    codes, scales = quantize(x)
    assert codes.view(np.uint8).tolist() == [
        [0x7F, 0x7F, 0x76, 0xFE, 0x00, 0x80],
        [0x7F, 0x7F, 0x00, 0x80, 0x7F, 0x80],
    ]
    assert scales.tolist() == [[float(np.float32(2) * np.float32(1 / 448))], [inf]]
    _, packed = quantize(x, round_scale=True, use_ue8m0=True)
    assert packed[1].tolist() == [255]
    assert np.isnan(dequantize(codes, scales)[1]).all()


def test_zeros_and_giants_make_no_nan():
    x = np.zeros((2, 300), np.float32)
    x[1] = 0.9 * np.finfo(np.float32).max  # the largest itself would be rounded up to infinity
    for kind in KINDS:
        codes, scales = quantize(x, **kind)
        back = dequantize(codes, scales)
        assert not codes[0].astype(np.float32).any()
        assert np.isfinite(back).all()
        assert (back[0] == 0).all()
        assert (np.abs(back[1] / x[1] - 1) < 2**-4).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [1, 127, 128, 129, 384, 640, 2688])
def test_groups_stand_alone(hidden, kind):
    """Each group is cast as if it were a row; the last one may be short."""
    rng = np.random.default_rng(hidden)
    x = (rng.standard_normal((3, hidden)) * 10.0 ** rng.integers(-3, 4, (3, 1))).astype("f4")
    codes, scales = quantize(x, **kind)
    groups = num_groups(hidden)
    parts = [quantize(x[:, at : at + GROUP], **kind) for at in range(0, hidden, GROUP)]
    assert len(parts) == groups
    assert np.concatenate([part[0] for part in parts], axis=1).tobytes() == codes.tobytes()
    if "use_ue8m0" in kind:
        assert scales.shape == (3, -(-groups // 4))
        assert scales.dtype == np.int32
        exponents = scales.astype("<i4").view(np.uint8)
        assert not exponents[:, groups:].any()
        for group, (_, single) in enumerate(parts):
            assert np.array_equal(exponents[:, group], single[:, 0])
    else:
        assert np.array_equal(scales, np.concatenate([part[1] for part in parts], axis=1))


def test_round_scale_never_overflows_a_code():
    """A power of two that is not below amax / 448 keeps every value within 448."""
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((200, 128)) * 10.0 ** rng.uniform(-30, 30, (200, 1))).astype("f4")
    codes, scales = quantize(x, round_scale=True)
    mantissa, _ = np.frexp(scales)
    assert (mantissa == 0.5).all()
    assert (np.abs(codes.astype("f4")) <= 448).all()
    assert (np.abs(x).max(axis=1) * (1 - 2**-20) <= 448 * scales[:, 0]).all()
    _, packed = quantize(x, round_scale=True, use_ue8m0=True)
    assert np.array_equal(dequantize(codes, scales), dequantize(codes, packed))


def test_what_comes_back_is_near():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((50, 1000)).astype(ml_dtypes.bfloat16)
    for kind in KINDS:
        back = dequantize(*quantize(x, **kind))
        assert back.shape == x.shape
        top = np.abs(x.astype("f4")).max(axis=1, keepdims=True)
        assert (np.abs(back - x.astype("f4")) <= 2**-4 * np.abs(x.astype("f4")) + top / 448).all()


@pytest.mark.parametrize(
    ("x", "kind", "words"),
    [
        (np.zeros((1, 4)), {}, "float64"),
        (np.zeros((1, 4), np.int8), {}, "int8"),
        (np.zeros(4, np.float32), {}, r"\[T, H\]"),
        (np.zeros((1, 4), np.float32), {"use_ue8m0": True}, "round_scale"),
    ],
)
def test_what_cannot_be_cast_is_refused(x, kind, words):
    with pytest.raises(ValueError, match=words):
        quantize(x, **kind)


@pytest.mark.parametrize("dtype", QUANTIZABLE, ids=str)
@pytest.mark.parametrize("hidden", [1, 130, 1000])
def test_the_host_engines_cast_has_the_same_bits(dtype, hidden):
    """Of numbers of all sizes, with their ties, and of bits at random, which hold NaN."""
    rng = np.random.default_rng(hidden)
    sizes = np.float32(2.0) ** rng.integers(-40, 15, (300, hidden))
    numbers = (sizes * rng.integers(-64, 65, sizes.shape) / 64).astype(dtype)
    bits = rng.integers(0, 256, (300, hidden * dtype.itemsize), np.uint8).view(dtype)
    for x in (numbers, bits, numbers[:0], np.zeros_like(numbers), -np.zeros_like(numbers)):
        for options in ((False, False), (True, False), (True, True)):
            named = dict(zip(("round_scale", "use_ue8m0"), options, strict=True))
            for got, wanted in zip(cast(x, **named), quantize(x, **named), strict=True):
                assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
                assert got.tobytes() == wanted.tobytes()


def test_no_rows():
    codes, scales = quantize(np.zeros((0, 300), np.float16))
    assert codes.shape == (0, 300)
    assert scales.shape == (0, 3)
