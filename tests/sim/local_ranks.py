"""One simulated rank for kernels that work on its memory alone, and data for them."""

import ml_dtypes
import numpy as np

from deepep_cupy.engines.gpu.kernels import get_kernel
from deepep_cupy.jit.launch import Packed
from deepep_cupy.reference import dispatch
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

    def zeros(self, length):
        """Counters of four bytes that kernels add to; their address."""
        offset = self._take(4 * length, Use.SCRATCH)
        self.machine.write(0, OP, self.region, offset, bytes(4 * length))
        return self.machine.address(0, self.region, offset)

    def launch(self, kernel, grid=None, **fields):
        """A kernel with the product's own struct."""
        spec = get_kernel(kernel)
        packed = Packed(spec.layout(SHAPE.constants), {"d": fields}, kernel)
        path = library(SHAPE, kernel, self._edits.get(kernel))
        shared = spec.num_shared_bytes(SHAPE.constants)
        threads = spec.num_threads(SHAPE.constants)
        self.machine.launch(0, OP, path, grid or self.grid, threads, shared, packed.tobytes())

    def get(self, address, shape, dtype, rows=None):
        """What a later kernel reads (``rows`` of it, if given); call the result after run()."""
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
    """Shape and every bit."""
    assert got.shape == want.shape, f"{name}: {got.shape} is not {want.shape}"
    if not want.size:
        return
    got, want = (np.ascontiguousarray(a).reshape(len(a), -1).view(np.uint8) for a in (got, want))
    bad = np.argwhere(got != want)
    assert not len(bad), f"{name}: {len(bad)} bytes differ, first in row {bad[0][0]}, {bad[0]}"


class Received:
    """What rank 0 of two received, in the layout of tokens and in the expanded one."""

    def __init__(
        self,
        seed,
        *,
        tokens,
        topk,
        local,
        index,
        alignment=1,
        worst=None,
        hidden=8,
        scales=0,
        dtype=np.float32,
        weights=True,
        zero=False,
    ):
        rng = np.random.default_rng(seed)
        experts = 2 * local
        counts = [tokens, tokens // 2 + 1]
        idx = [
            np.array([rng.permutation(experts)[:topk] for _ in range(t)], index).reshape(t, topk)
            for t in counts
        ]
        for one in idx:
            one[rng.random(one.shape) < 0.3] = -1
        xs = [rng.standard_normal((t, hidden)).astype(dtype) for t in counts]
        if scales:
            rows = [rng.integers(0, 256, (t, hidden), dtype=np.uint8) for t in counts]
            xs = [
                (x, rng.random((t, scales), np.float32)) for x, t in zip(rows, counts, strict=True)
            ]
        w = [rng.standard_normal((t, topk)).astype(np.float32) for t in counts] if weights else None
        arguments = {"topk_idx": idx, "topk_weights": w, "num_experts": experts}
        arguments |= {"num_worst_tokens": [worst, worst] if worst else None}
        self.plain = dispatch(xs, **arguments)
        self.expanded = dispatch(
            xs, do_expand=True, expert_alignment=alignment, do_zero_padding=zero, **arguments
        )
        self.local, self.topk, self.alignment, self.zero = local, topk, alignment, zero
        self.real = int(self.plain[0].handle.recv_rows_per_rank.sum())

    def counts(self, rank):
        """Addresses of the arrays that the dispatch leaves."""
        handle = self.expanded[0].handle
        return {
            "expert_counts": rank.put(handle.num_unaligned_recv_tokens_per_expert),
            "psum_expert_rows": rank.put(handle.psum_num_recv_tokens_per_expert),
        }
