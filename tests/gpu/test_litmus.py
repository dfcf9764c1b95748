"""The policy's modules and the commands ``litmus`` and ``bench flavors`` on GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker_litmus.py")


def command(*arguments, **environment):
    import os

    return subprocess.run(
        [sys.executable, "-m", "deepep_cupy", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.mpi
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
def test_modules_and_readings(size):
    run = run_ranks(WORKER, size, limit_s=280)
    run.check()
    assert "LITMUS: ok" in run.outputs[0], run


def test_litmus_keeps_its_verdict(tmp_path):
    done = command("litmus", "--rounds", "1000", DEEPEP_CUPY_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (verdict,) = (tmp_path / "litmus").glob("*.1gpu.json")
    assert json.loads(verdict.read_text())["readings"]


@pytest.mark.sm90
def test_a_planted_fault_makes_litmus_fail():
    done = command("litmus", "--quick", "--plant")
    assert done.returncode == 1
    assert "CONTRADICTED" in done.stderr


@pytest.mark.mpi
def test_bench_flavors_measures_copies_and_whole_operations(tmp_path):
    path = tmp_path / "flavors.json"
    done = command("bench", "flavors", "--quick", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    stored = json.loads(path.read_text())
    assert stored["points"]
    assert stored["pairs"]
    assert not stored["wrong"]
