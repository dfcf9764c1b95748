"""The hand-written barrier on GPUs: loaded as a user would, and beside its twin."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepep_cupy.engines.gpu.ptx_modules import get_module
from ranks import run_ranks

WORKER = Path(__file__).with_name("worker_ptx_barrier.py")


def test_plain_cupy_loads_it():
    cupy = pytest.importorskip("cupy")
    module = get_module("peer_barrier")
    entry = module.entry("peer_barrier")
    kernel = cupy.RawModule(path=str(module.path)).get_function(entry.name)
    assert kernel.max_threads_per_block == entry.max_threads
    assert kernel.shared_size_bytes == entry.static_smem
    assert kernel.local_size_bytes == 0


@pytest.mark.mpi
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8], ids=lambda size: f"R{size}")
def test_the_same_words_as_the_cuda_kernel(size):
    run = run_ranks(WORKER, size, limit_s=240)
    run.check()
    assert "TWINS: ok" in run.outputs[0], run
