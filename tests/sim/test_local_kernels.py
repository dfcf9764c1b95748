"""Kernels around the exchange: the cast to FP8 and the expanded layout, equal to the reference."""

import functools

import ml_dtypes
import numpy as np
import pytest

from deepep_cupy.kernels.launch import Packed
from deepep_cupy.kernels.registry import get_kernel
from deepep_cupy.plan.headers import dtype_code
from deepep_cupy.plan.launch import access_bytes
from deepep_cupy.reference import combine, dispatch, quantize
from simulator.machine import Machine, Use, with_lines
from simulator.shapes import Shape, library

SHAPE = Shape(1)
REGION_BYTES = 512 * 1024
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
OP = 1


class Rank:
    """One rank's memory and stream: arrays in, kernels, arrays out."""

    def __init__(self, seed, grid, byte_wise=False, edits=None):
        self.machine = Machine(seed, 1, byte_wise=byte_wise, max_blocks=grid, num_threads=64)
        self.region = self.machine.region("memory", REGION_BYTES, 0)
        self.grid = grid
        self._end = 0
        self._unit = 1 if byte_wise else 4
        self._edits = edits or {}
        self._reads = []

    def _take(self, nbytes, use, shift=0):
        offset = self._end
        size = -(-(nbytes + shift + 4) // 16) * 16
        self._end += size
        assert self._end <= REGION_BYTES
        self.machine.mark(0, OP, self.region, offset, size, use, OP)
        return offset + shift

    def put(self, array, shift=0):
        """An array that kernels read; its address."""
        raw = np.ascontiguousarray(array).tobytes()
        offset = self._take(len(raw), Use.INPUT, shift)
        if raw:
            self.machine.write(0, OP, self.region, offset, raw + bytes(-len(raw) % self._unit))
        return self.machine.address(0, self.region, offset)

    def space(self, nbytes, use=Use.OUTPUT, shift=0):
        """Bytes that kernels write; their address."""
        return self.machine.address(0, self.region, self._take(nbytes, use, shift))

    def launch(self, kernel, grid=None, **fields):
        """A kernel with the product's own struct."""
        spec = get_kernel(kernel)
        packed = Packed(spec.layout(SHAPE.constants), {"d": fields}, kernel)
        path = library(SHAPE, kernel, self._edits.get(kernel))
        shared = spec.num_shared_bytes(SHAPE.constants)
        threads = spec.num_threads(SHAPE.constants)
        self.machine.launch(0, OP, path, grid or self.grid, threads, shared, packed.tobytes())

    def get(self, address, shape, dtype, rows=None):
        """What a later kernel reads (only ``rows`` of it, if given); call the result after run()."""
        base = address - self.machine.address(0, self.region, 0)
        dtype = np.dtype(dtype)
        row_bytes = int(np.prod(shape[1:], dtype=int)) * dtype.itemsize
        wanted = range(shape[0]) if rows is None else np.flatnonzero(rows)
        reads = {
            int(row): self.machine.read(0, OP, self.region, base + int(row) * row_bytes, row_bytes)
            for row in wanted
            if row_bytes
        }

        def result():
            out = np.zeros((shape[0], row_bytes), np.uint8)
            for row, read in reads.items():
                out[row] = np.frombuffer(read(), np.uint8)
            return out.reshape(-1).view(dtype).reshape(shape)

        return result

    def run(self):
        """Everything; no fault may come up."""
        faults = self.machine.run()
        assert not faults, with_lines(faults[0].text)


def same_bits(name, got, want):
    got, want = (np.ascontiguousarray(a).reshape(len(a), -1).view(np.uint8) for a in (got, want))
    assert got.shape == want.shape, f"{name}: {got.shape} is not {want.shape}"
    bad = np.argwhere(got != want)
    assert not len(bad), f"{name}: {len(bad)} bytes differ, first in row {bad[0][0]}, {bad[0]}"


# --------------------------------------------------------------------------------- quantize


def instruction(text):
    return text


def integers(text):
    return text.replace("kHasCvtE4m3 = true", "kHasCvtE4m3 = false")


def odd_rows(rng, shape, dtype):
    """Rows that hold everything a float can be."""
    bits = rng.integers(0, 1 << 8 * dtype.itemsize, shape, dtype=np.uint64)
    x = bits.astype(f"u{dtype.itemsize}").view(dtype).copy()
    ordinary = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, (shape[0], 1))).astype(dtype)
    keep = rng.random((shape[0], 1)) < 0.8
    x = np.where(keep, ordinary, x)
    special = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-30, 448.0], np.float32)
    x[rng.random(shape) < 0.004] = dtype.type(np.nan)
    spots = rng.random(shape) < 0.01
    x[spots] = special.astype(dtype)[rng.integers(0, 8, int(spots.sum()))]
    x[0] = special.astype(dtype)[rng.integers(0, 2, shape[1])]  # a row of zeros
    return x


@pytest.mark.parametrize("way", [instruction, integers])
@pytest.mark.parametrize("scales", ["plain", "round", "packed"])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize(("tokens", "hidden", "grid"), [(3, 1168, 2), (5, 130, 1), (2, 515, 3)])
def test_quantize(dtype, scales, way, tokens, hidden, grid):
    rng = np.random.default_rng(hidden)
    x = odd_rows(rng, (tokens, hidden), dtype)
    x.reshape(-1)[:2] = 0
    modes = {"round_scale": scales != "plain", "use_ue8m0": scales == "packed"}
    codes, inverse = quantize(x, **modes)
    shift = 0 if hidden % 16 == 0 else dtype.itemsize
    edits = {"quantize": integers} if way is integers else {}
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
        dtype=dtype_code(dtype.name, dtype.itemsize),
        round_scale=int(modes["round_scale"]),
        packed=int(modes["use_ue8m0"]),
    )
    got = rank.get(out, codes.shape, codes.dtype), rank.get(out_scales, inverse.shape, inverse.dtype)
    rank.run()
    same_bits("codes", got[0](), codes)
    same_bits("scales", got[1](), inverse)
