"""The kernels of ``bench`` copy every byte of every segment once, and nothing else."""

import numpy as np
import pytest

from deepep_cupy.bench.ceilings import BoxLayout
from deepep_cupy.bench.traffic import Traffic
from deepep_cupy.engines.gpu.kernels import get_kernel
from deepep_cupy.jit.launch import Packed
from simulator.machine import Machine, Use, with_lines
from simulator.shapes import Shape, library

RANKS = 3
SHAPE = Shape(RANKS)
OP = 1
REGION_BYTES = 1 << 20


def copied(kernel, rows, row_bytes, grid, seed):
    """The inbox of one rank after a copy of its whole outbox, and that outbox."""
    machine = Machine(seed, 1, max_blocks=grid, num_threads=64)
    region = machine.region("memory", REGION_BYTES, 0)
    nbytes = sum(rows) * row_bytes
    outbox = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    at = -(-nbytes // 256) * 256
    machine.mark(0, OP, region, 0, nbytes, Use.INPUT, OP)
    machine.write(0, OP, region, 0, outbox.tobytes())
    machine.mark(0, OP, region, at, nbytes, Use.OUTPUT, OP)
    # Rank 0 sends to three ranks; here their inboxes lie behind each other in its own memory.
    boxes = BoxLayout(Traffic.of([rows, [0] * RANKS, [0] * RANKS], range(RANKS)), row_bytes)
    base = machine.address(0, region, 0)
    inboxes = [base + at + boxes.out_offset(0, other) for other in range(RANKS)]
    values = boxes.push(0, base, inboxes)
    spec = get_kernel(kernel)
    packed = Packed(spec.layout(SHAPE.constants), {"d": values}, kernel)
    path, threads = library(SHAPE, kernel), spec.num_threads(SHAPE.constants)
    shared = spec.num_shared_bytes(SHAPE.constants)
    machine.launch(0, OP, path, grid, threads, shared, packed.tobytes())
    read = machine.read(0, OP, region, at, nbytes)
    faults = machine.run()
    assert not faults, with_lines(faults[0].text)
    return np.frombuffer(read(), np.uint8), outbox


@pytest.mark.parametrize("kernel", ["ceiling", "ceiling_bulk"])
@pytest.mark.parametrize(
    ("rows", "row_bytes", "grid"),
    [
        ((5, 0, 8), 368, 2),  # pieces of different sizes, a segment without rows
        ((1, 1, 1), 16, 3),  # fewer rows than warps
        ((0, 29, 0), 64, 1),  # one segment, many turns of every stage
        ((11, 7, 3), 512, 2),
    ],
)
def test_every_row_arrives(kernel, rows, row_bytes, grid):
    for seed in range(4):
        got, want = copied(kernel, rows, row_bytes, grid, seed)
        wrong = np.flatnonzero((got != want).reshape(-1, row_bytes).any(axis=1))
        assert not len(wrong), f"seed {seed}: rows {wrong} are wrong"
