"""Kernels around the exchange: the cast to FP8 and the expanded layout, equal to the reference."""

import ctypes
import subprocess

import ml_dtypes
import numpy as np
import pytest

from deepep_cupy.engines.gpu.grid import access_bytes
from deepep_cupy.jit.source import flatten
from deepep_cupy.protocol.headers import dtype_code
from deepep_cupy.reference import get_dispatch_layout, quantize
from deepep_cupy.reference.combine import sum_copies
from local_ranks import Rank, Received, same_bits
from simulator.build import SIM
from simulator.casts import BFLOAT16, Cast, odd_rows
from simulator.machine import Use

# --------------------------------------------------------------------------------- quantize


def without_instruction(text):
    """As before SM 89."""
    return text.replace("kHasCvtE4m3 = true", "kHasCvtE4m3 = false")


def casts(folder):
    """The integer form and the instruction's twin, as a function of arrays."""
    text = (
        flatten("common/float8.cuh", search=(SIM,))
        + """
        extern "C" void cast(const f32* x, u8* integers, u8* instruction, u64 number) {
            for (u64 i = 0; i < number; ++i) {
                integers[i] = e4m3_by_integers(x[i]);
                instruction[i] = cvt_rn_satfinite_e4m3x2_f32(x[i], 0.0f) >> 8;
            }
        }"""
    )
    source, result = folder / "cast.cpp", folder / "cast.so"
    source.write_text(text)
    options = ["-std=c++20", "-O2", "-w", "-fPIC", "-shared", "-ffp-contract=off"]
    subprocess.run(["g++", *options, str(source), "-o", str(result)], check=True)
    return ctypes.CDLL(str(result)).cast


def near_the_edges():
    """All codes' values and the middles between them, the floats around, and random ones."""
    values = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = (values[1:] + values[:-1]) / 2
    edges = np.concatenate([values, middles, [464, 2.0**-10, 2.0**-126, 2.0**-149, 1e38]])
    bits = edges.astype(np.float32).view(np.uint32)
    around = np.concatenate([bits + np.uint32(step) for step in (0, 1, 2, -1 % 2**32, -2 % 2**32)])
    anything = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    halves = np.arange(1 << 16, dtype=np.uint32) << 16
    both = np.concatenate([around, around | np.uint32(1 << 31), anything, halves])
    return both.view(np.float32)


def test_both_casts_of_a_float(tmp_path):
    x = near_the_edges()
    integers, instruction = np.zeros(len(x), np.uint8), np.zeros(len(x), np.uint8)
    pointer = ctypes.c_void_p
    casts(tmp_path)(
        *(pointer(a.ctypes.data) for a in (x, integers, instruction)), ctypes.c_uint64(len(x))
    )
    with np.errstate(all="ignore"):
        want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    want[np.isnan(x)] = 0x7F
    same_bits("by integers", integers, want)
    same_bits("by the instruction's twin", instruction, want)


@pytest.mark.parametrize("edits", [{}, {"quantize": without_instruction}], ids=["sm90", "sm80"])
@pytest.mark.parametrize("scales", ["plain", "round", "packed"])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize(("tokens", "hidden", "grid"), [(3, 1168, 2), (5, 130, 1), (2, 515, 3)])
def test_quantize(dtype, scales, edits, tokens, hidden, grid):
    rng = np.random.default_rng(hidden)
    x = odd_rows(rng, (tokens, hidden), dtype)
    x.reshape(-1)[:2] = 0
    modes = {"round_scale": scales != "plain", "use_ue8m0": scales == "packed"}
    codes, inverse = quantize(x, **modes)
    shift = 0 if hidden % 16 == 0 else dtype.itemsize
    rank = Rank(seed=hidden, grid=grid, byte_wise=True, edits=edits)
    x_at = rank.put(x, shift)
    out, out_scales = rank.space(codes.nbytes), rank.space(inverse.nbytes)
    rank.launch(
        "quantize",
        x=x_at,
        codes=out,
        scales=out_scales,
        num_tokens=tokens,
        hidden=hidden,
        code_stride=hidden,
        scale_stride=inverse.shape[1],
        access_bytes=access_bytes(hidden * dtype.itemsize, (x_at,), (dtype.itemsize,)),
        cast=Cast([x], modes["round_scale"], modes["use_ue8m0"], [False]).fields(),
    )
    got = (
        rank.get(out, codes.shape, codes.dtype),
        rank.get(out_scales, inverse.shape, inverse.dtype),
    )
    rank.run()
    same_bits("codes", got[0](), codes)
    same_bits("scales", got[1](), inverse)


# ----------------------------------------------------------------------------------- expand


def assign(rank, received, slices, birth=1, real=True):
    """The three kernels that find the rows; the table's address."""
    got = received.plain[0]
    tokens, topk = got.recv_topk_idx.shape
    expanded_row = rank.space(4 * tokens * topk)
    fields = {
        "topk_idx": rank.put(got.recv_topk_idx),
        "num_received": rank.put(np.array([received.real], np.uint32)) if real else 0,
        "birth": rank.put(np.array([birth], np.uint32)),
        **received.counts(rank),
        "expanded_row": expanded_row,
        "table": rank.space(4 * slices * received.local, Use.SCRATCH),
        "num_tokens": tokens,
        "num_topk": topk,
        "index_bytes": got.recv_topk_idx.itemsize,
        "num_local_experts": received.local,
        "num_slices": slices,
    }
    rank.launch("expand_count", **fields)
    rank.launch("expand_starts", **fields)
    rank.launch("expand_rows", **fields)
    return expanded_row


SORTS = {
    "one": {"tokens": 1, "topk": 1, "local": 1, "index": np.int64},
    "common": {"tokens": 23, "topk": 5, "local": 4, "index": np.int64, "alignment": 4},
    "many experts": {"tokens": 9, "topk": 6, "local": 70, "index": np.int32, "alignment": 3},
    "most choices": {"tokens": 5, "topk": 32, "local": 32, "index": np.int32},
    "worst case": {"tokens": 11, "topk": 3, "local": 5, "index": np.int64, "worst": 30},
}


@pytest.mark.parametrize("name", SORTS)
@pytest.mark.parametrize(("grid", "slices"), [(1, 1), (2, 3), (3, 9)])
def test_rows_of_the_expanded_layout(name, grid, slices):
    received = Received(7, **SORTS[name])
    want = received.expanded[0].handle.expanded_row
    rank = Rank(seed=slices, grid=grid)
    got = rank.get(assign(rank, received, slices, real=name != "one"), want.shape, np.int32)
    rank.run()
    same_bits("expanded_row", got(), want)


def test_no_rows_of_a_dispatch_that_failed():
    received = Received(7, **SORTS["worst case"])
    shape = received.expanded[0].handle.expanded_row.shape
    rank = Rank(seed=1, grid=2)
    got = rank.get(assign(rank, received, 4, birth=0), shape, np.int32)
    rank.run()
    assert (got() == -1).all()


COPIES = {
    "wide": {"hidden": 28, "topk": 5, "local": 4},
    "words": {"hidden": 27, "topk": 3, "local": 8, "weights": False},
    "bytes": {"hidden": 13, "topk": 4, "local": 4, "dtype": np.uint8},
    "fp8": {"hidden": 160, "topk": 4, "local": 4, "scales": 2, "dtype": np.uint8},
    "worst case": {"hidden": 8, "topk": 4, "local": 3, "worst": 40},
    "long": {"hidden": 1100, "topk": 2, "local": 2},
}


def copy_fields(rank, received, expanded_row, outs, birth):
    plain, expanded = received.plain[0], received.expanded[0]
    rows, scales = plain.recv_x if isinstance(plain.recv_x, tuple) else (plain.recv_x, None)
    rows_at, row_bytes = rank.put(rows), rows.shape[1] * rows.itemsize
    weights = plain.recv_topk_weights
    return {
        "rows": rows_at,
        "weights": 0 if weights is None else rank.put(weights),
        "scales": 0 if scales is None else rank.put(scales),
        "expanded_row": expanded_row,
        **received.counts(rank),
        "birth": rank.put(np.array([birth], np.uint32)),
        "out": outs[0],
        "out_weights": outs[1],
        "out_scales": outs[2],
        "num_rows": expanded.handle.num_rows,
        "num_tokens": len(rows),
        "num_topk": received.topk,
        "row_bytes": row_bytes,
        "access_bytes": access_bytes(row_bytes, (rows_at,), (4, 1)),
        "num_scales": 0 if scales is None else scales.shape[1],
        "num_local_experts": received.local,
        "alignment": received.alignment,
        "zero_padding": int(received.zero),
        "dtype": dtype_code("float8_e4m3fn", 1, "float32") if scales is not None else
                 dtype_code(rows.dtype.name, rows.itemsize),
    }  # fmt: skip


def run_copy(received, seed, grid, birth=1):
    """What comes out: rows, weights, scales; only rows of which the content is said."""
    expanded = received.expanded[0]
    handle = expanded.handle
    rows, scales = (
        expanded.recv_x if isinstance(expanded.recv_x, tuple) else (expanded.recv_x, None)
    )
    wanted = [rows, expanded.recv_topk_weights, scales]
    rank = Rank(seed, grid, byte_wise=rows.shape[1] * rows.itemsize % 4 != 0)
    outs = [0 if one is None else rank.space(one.nbytes) for one in wanted]
    table = rank.put(handle.expanded_row)
    rank.launch("expand_copy", **copy_fields(rank, received, table, outs, birth))
    defined = expanded.defined if birth else None
    got = [
        None if one is None else rank.get(at, one.shape, one.dtype, defined)
        for at, one in zip(outs, wanted, strict=True)
    ]
    rank.run()
    return [(one(), want) for one, want in zip(got, wanted, strict=True) if one is not None]


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize(("alignment", "zero"), [(1, False), (4, False), (4, True)])
def test_copies(name, alignment, zero):
    case = {"tokens": 8, "index": np.int64, "alignment": alignment, "zero": zero}
    received = Received(3, **case, **COPIES[name])
    defined = received.expanded[0].defined
    for got, want in run_copy(received, seed=alignment, grid=2):
        same_bits(name, got[defined], want[defined])


@pytest.mark.parametrize("name", ["fp8", "wide"])
def test_copies_of_a_dispatch_that_failed_are_poisoned(name):
    received = Received(3, tokens=4, index=np.int64, **COPIES[name])
    for got, _ in run_copy(received, seed=1, grid=2, birth=0):
        assert (got.view(np.uint8) == 0xFF).all()


# ----------------------------------------------------------------------------------- reduce

SUMS = {
    "bfloat16": (BFLOAT16, 24, True),
    "bfloat16, odd": (BFLOAT16, 9, True),
    "float16": (np.dtype(np.float16), 40, False),
    "float32": (np.dtype(np.float32), 520, True),
    "float64": (np.dtype(np.float64), 6, True),
    "float64, odd": (np.dtype(np.float64), 7, False),
    "int8": (np.dtype(np.int8), 32, False),
    "uint16": (np.dtype(np.uint16), 5, False),
    "int64": (np.dtype(np.int64), 4, False),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize(("topk", "local", "worst"), [(3, 2, None), (8, 8, 14)])
def test_sums_of_copies(name, topk, local, worst):
    dtype, hidden, weighted = SUMS[name]
    case = {"tokens": 6, "topk": topk, "local": local, "index": np.int32, "worst": worst}
    handle = Received(5, alignment=2, **case).expanded[0].handle
    rng = np.random.default_rng(hidden)
    y = (rng.standard_normal((handle.num_rows, hidden)) * 100).astype(dtype)
    if dtype.kind not in "iu":
        y.reshape(-1)[rng.integers(0, y.size, y.size // 4)] = -0.0
    weights = rng.standard_normal(handle.num_rows).astype(np.float32)
    want = sum_copies(y, handle.expanded_row, weights if weighted else None)
    table = handle.expanded_row
    real = (table >= 0).any(axis=1)
    carried = np.where(table >= 0, weights[table], np.float32(0))

    rank = Rank(seed=topk, grid=2, byte_wise=hidden * dtype.itemsize % 4 != 0)
    x, row_bytes = rank.put(y), hidden * dtype.itemsize
    out, out_weights = rank.space(want.nbytes), rank.space(carried.nbytes)
    rank.launch(
        "reduce_copies",
        x=x,
        out=out,
        expanded_row=rank.put(table),
        row_weights=rank.put(weights) if weighted else 0,
        weights=rank.put(weights),
        out_weights=out_weights,
        num_tokens=len(table),
        num_topk=topk,
        row_bytes=row_bytes,
        access_bytes=access_bytes(row_bytes, (x, out), (dtype.itemsize,)),
        dtype=dtype_code(dtype.name, dtype.itemsize),
    )
    got = rank.get(out, want.shape, dtype, real), rank.get(out_weights, table.shape, "f4", real)
    rank.run()
    same_bits("sums", got[0]()[real], want[real])
    same_bits("weights", got[1]()[real], carried[real])


# ----------------------------------------------------------------------------------- layout


@pytest.mark.parametrize("index", [np.int64, np.int32])
@pytest.mark.parametrize(("tokens", "topk", "experts"), [(1, 1, 1), (70, 3, 5), (33, 11, 40)])
def test_layout(tokens, topk, experts, index):
    rng = np.random.default_rng(tokens)
    idx = rng.integers(-1, experts + 1, (tokens, topk)).astype(index)  # one beyond: none, too
    idx[0] = -7 if topk > 1 else 0
    want = get_dispatch_layout(np.where(idx < experts, idx, -1), experts, 1)
    rank = Rank(seed=tokens, grid=2, byte_wise=True)
    counts = [rank.zeros(length) for length in (1, experts)]
    mask = rank.space(tokens)
    rank.launch(
        "layout",
        topk_idx=rank.put(idx),
        is_token_in_rank=mask,
        rank_counts=counts[0],
        expert_counts=counts[1],
        num_tokens=tokens,
        num_topk=topk,
        index_bytes=idx.itemsize,
        num_experts=experts,
        experts_per_rank=experts,
    )
    got = [
        rank.get(counts[0], (1, 1), np.int32),
        rank.get(counts[1], (experts, 1), np.int32),
        rank.get(mask, (tokens, 1), np.bool_),
    ]
    rank.run()
    same_bits("tokens of ranks", got[0](), want.num_tokens_per_rank[:, None])
    same_bits("choices of experts", got[1](), want.num_tokens_per_expert[:, None])
    same_bits("mask", got[2](), want.is_token_in_rank)
