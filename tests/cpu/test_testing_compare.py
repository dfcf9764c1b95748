"""Comparison: one flipped bit anywhere is found, and the error says where."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from deepep_cupy import reference
from deepep_cupy.testing import compare, data

DTYPES = [
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16, np.float32, np.float64),
    *(np.int8, np.uint8, np.int64, np.bool_, np.complex64, "V7", [("a", "u1"), ("b", "<f4")]),
]


def flipped(array, element, bit):
    """A copy with one bit of one element turned over."""
    copy = array.copy()
    nbytes = array.dtype.itemsize
    raw = copy.reshape(-1).view(np.uint8).reshape(-1, nbytes)
    raw[element, bit // 8] ^= 1 << bit % 8
    return copy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_is_found(dtype):
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(0)
    array = np.frombuffer(rng.bytes(35 * dtype.itemsize), dtype).reshape(5, 7)
    compare.assert_same_bits("x", array.copy(), array)
    for element in (0, 17, 34):
        for bit in range(8 * dtype.itemsize):
            row, column = divmod(element, 7)
            with pytest.raises(AssertionError) as caught:
                compare.assert_same_bits("x", flipped(array, element, bit), array, rank=3)
            assert "x on rank 3: 1 of 35 elements differ" in str(caught.value)
            assert f"row {row}, column {column}: got 0x" in str(caught.value)


def test_the_message_shows_bits_values_and_nan():
    want = np.array([[1, 2], [np.nan, 4]], np.float32)
    got = np.array([[1, 3], [np.nan, np.nan]], np.float32)
    with pytest.raises(AssertionError) as caught:
        compare.assert_same_bits("y", got, want)
    assert str(caught.value).splitlines() == [
        "y: 2 of 4 elements differ (float32 (2, 2); NaN: got 2, wanted 1)",
        "  row 0, column 1: got 0x40400000 (3.0), wanted 0x40000000 (2.0)",
        "  row 1, column 1: got 0x7fc00000 (nan), wanted 0x40800000 (4.0)",
    ]


def test_long_lists_are_cut():
    with pytest.raises(AssertionError) as caught:
        compare.assert_same_bits("y", np.ones((100, 3)), np.zeros((100, 3)))
    lines = str(caught.value).splitlines()
    assert len(lines) == 7
    assert "300 of 300" in lines[0]
    assert "100 rows, 0 to 99" in lines[-1]


def test_zero_signs_differ_and_nan_payloads_are_bits():
    zero = np.zeros((1, 1), ml_dtypes.bfloat16)
    with pytest.raises(AssertionError, match="0x8000"):
        compare.assert_equal_or_nan("y", -zero, zero)
    quiet = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    with pytest.raises(AssertionError, match="1 of 2"):
        compare.assert_same_bits("y", quiet[::-1][:1].repeat(2), quiet)
    compare.assert_equal_or_nan("y", quiet[::-1].copy(), quiet)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_nan_equals_only_nan(dtype):
    want = np.array([np.nan, 1.0]).astype(dtype)
    compare.assert_equal_or_nan("y", -want * np.array([1, -1]).astype(dtype), want)
    for wrong in ([np.nan, np.nan], [0.0, 1.0], [np.inf, 1.0]):
        with pytest.raises(AssertionError, match="1 of 2"):
            compare.assert_equal_or_nan("y", np.array(wrong).astype(dtype), want)


@pytest.mark.parametrize("number", [0x7F, 0xFF])
def test_bytes_that_would_be_nan_elsewhere_are_compared(number):
    want = np.full(3, number, np.uint8)
    with pytest.raises(AssertionError):
        compare.assert_equal_or_nan("y", np.full(3, number ^ 1, np.uint8), want)


def test_shape_dtype_and_none():
    one = np.zeros((2, 3), np.float32)
    for other in (np.zeros((3, 2), np.float32), np.zeros((2, 3), np.int32), np.zeros((0, 3))):
        with pytest.raises(AssertionError, match="wanted float32"):
            compare.assert_same_bits("x", other, one)
    compare.assert_same_bits("x", None, None)
    with pytest.raises(AssertionError, match="got None, wanted an array"):
        compare.assert_same_bits("x", None, one)
    with pytest.raises(AssertionError, match="got an array, wanted None"):
        compare.assert_same_bits("x", one, None)
    with pytest.raises(AssertionError, match="got list"):
        compare.assert_same_bits("x", [1], one)
    empty = np.zeros((0, 5), ml_dtypes.bfloat16)
    compare.assert_same_bits("x", empty.copy(), empty)


def test_device_arrays_come_through_get():
    class Device:
        def __init__(self, array):
            self.array = array

        def get(self):
            return self.array

    one = np.arange(6).reshape(2, 3)
    compare.assert_same_bits("x", Device(one), one)
    with pytest.raises(AssertionError):
        compare.assert_same_bits("x", Device(one + 1), one)


def test_arrays_need_not_be_contiguous():
    one = np.arange(12).reshape(3, 4)
    compare.assert_same_bits("x", one.T, one.T.copy())
    with pytest.raises(AssertionError, match="row 0, column 1"):
        compare.assert_same_bits("x", one.reshape(4, 3), one.T)


def results():
    case = data.Case(2, (5, 4), 3, 4, 2, "float32", num_biases=1, expert_alignment=2)
    return data.expected(case, 0)


def test_dispatch_results_are_compared_field_by_field():
    got, want = results().dispatched[1], results().dispatched[1]
    compare.assert_dispatch_equal(got, want, rank=1)
    for name in ("recv_x", "recv_topk_idx", "recv_topk_weights"):
        wrong = dataclasses.replace(got, **{name: flipped(getattr(got, name), 1, 3)})
        with pytest.raises(AssertionError, match=f"{name} on rank 1"):
            compare.assert_dispatch_equal(wrong, want, rank=1)
        with pytest.raises(AssertionError, match=name):
            compare.assert_dispatch_equal(dataclasses.replace(got, **{name: None}), want)
    wrong = dataclasses.replace(got, num_recv_tokens_per_expert_list=[2, 3])
    with pytest.raises(AssertionError, match="per_expert_list"):
        compare.assert_dispatch_equal(wrong, want)
    for name in ("recv_src_idx", "recv_rows_per_rank", "send_row"):
        handle = dataclasses.replace(got.handle, **{name: flipped(getattr(got.handle, name), 1, 0)})
        with pytest.raises(AssertionError, match=f"handle.{name}"):
            compare.assert_dispatch_equal(dataclasses.replace(got, handle=handle), want)
    for name in ("num_tokens", "num_recv_tokens"):
        handle = dataclasses.replace(got.handle, **{name: 99})
        with pytest.raises(AssertionError, match=f"handle.{name}: got 99"):
            compare.assert_dispatch_equal(dataclasses.replace(got, handle=handle), want)


def test_combine_results_are_compared_field_by_field():
    got, want = results().combined[0], results().combined[0]
    compare.assert_combine_equal(got, want, rank=0)
    x = np.full_like(got.combined_x, 1)
    one = reference.CombineResult(x, got.combined_topk_weights)
    compare.assert_combine_equal(one, one)
    with pytest.raises(AssertionError, match="combined_x on rank 0"):
        compare.assert_combine_equal(
            dataclasses.replace(one, combined_x=flipped(x, 2, 0)), one, rank=0
        )
    with pytest.raises(AssertionError, match="combined_topk_weights: got None"):
        compare.assert_combine_equal(dataclasses.replace(one, combined_topk_weights=None), one)
