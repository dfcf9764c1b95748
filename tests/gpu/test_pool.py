"""The symmetric region and its pool on real memory: see worker_pool.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ranks import run_ranks

WORKER = Path(__file__).with_name("worker_pool.py")

COUNT_GPUS = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
print(count.value)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("visible", ["all", "one"])
def test_pool_and_region(num_ranks, visible):
    steps = 100_000 if num_ranks == 1 else 20_000 // num_ranks
    arguments = ["--steps", steps]
    if visible == "one":
        counted = subprocess.check_output([sys.executable, "-c", COUNT_GPUS])
        arguments += ["--one-visible", int(counted)]
    run = run_ranks(WORKER, num_ranks, *arguments, limit_s=280)
    run.check()
    assert all("all parts passed" in output for output in run.outputs), run
