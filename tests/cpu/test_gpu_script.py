"""``.ci/gpu`` itself, where there is no GPU: its jobs, its judgement, and that nothing survives it.

A stand-in for ``nvidia-cuda-mps-control`` notes what it is told; its daemon is a sleeping shell.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "gpu"

CONTROL = """#!/bin/sh
echo "$1" >> {log}
if [ "$1" = -d ]; then
    sleep 300 > /dev/null 2>&1 &
    echo $! > {pid}
else
    read words
    echo "$words" >> {log}
    case "$words" in quit*) [ -e {deaf} ] || kill $(cat {pid}) ;; esac
fi
"""


@pytest.fixture(scope="module")
def jobs():
    """The lists of jobs, from their file."""
    path = ROOT / "tests" / "gpu" / "jobs.py"
    spec = importlib.util.spec_from_file_location("jobs_of_gpu_tests", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("turns", [False, True])
def test_every_job_names_a_file_and_a_limit(jobs, gpus, quick, turns):
    plan = jobs.Plan(gpus=gpus, quick=quick, turns=turns)
    for part, jobs_of in jobs.PARTS.items():
        for job in jobs_of(plan):
            assert job.part == part
            assert job.argv[0] == "-m" or (ROOT / job.argv[0]).is_file(), job
            assert 0 < job.limit_s <= 400
            assert 1 <= job.ranks <= 8
            if "--timeout" in job.argv:
                patience = float(job.argv[job.argv.index("--timeout") + 1])
                assert patience < job.limit_s, job


def test_every_title_is_used_once(jobs):
    for gpus in (1, 2, 8):
        titles = [job.title for of in jobs.PARTS.values() for job in of(jobs.Plan(gpus=gpus))]
        assert len(titles) == len(set(titles))


def test_all_worker_files_are_in_some_job(jobs):
    plan = jobs.Plan(gpus=2)
    used = {Path(job.argv[0]).name for of in jobs.PARTS.values() for job in of(plan)}
    there = {path.name for path in (ROOT / "tests" / "gpu").glob("worker_*.py")}
    assert there <= used


def test_faults_and_kills_are_never_under_mps(jobs):
    """Ranks that share a GPU go on together or not at all."""
    for gpus in (1, 2):
        for turns in (False, True):
            for job in jobs.failures(jobs.Plan(gpus=gpus, turns=turns)):
                if job.fails:
                    assert not job.shared(gpus), job


@pytest.mark.parametrize(
    ("code", "output", "result"),
    [
        (0, "words\nTABLE: ok, 3 cases", "ok"),
        (0, "TABLE: ok\nlast words of MPI", "ok"),
        (0, "no last line", "FAILED"),
        (1, "TABLE: ok", "FAILED"),
        (None, "TABLE: ok", "FAILED"),
        (0, "TABLE: skipped, no GPU", "skipped"),
    ],
)
def test_judgement(jobs, code, output, result):
    job = jobs.Job("table", 2, ("worker.py",), 10)
    assert job.judge(code, output, 10)[0] == result


def test_judgement_of_a_run_that_must_end_badly(jobs):
    job = next(job for job in jobs.failures(jobs.Plan(gpus=2)) if job.name.endswith("raises"))
    right = (
        "[0] SAW rank 0: PeerAbortedError after 0.01 s: combine(): rank 1 aborted (ValueError: the "
        "batch is bad), so rank 0 cannot go on"
    )
    assert job.judge(1, right, 10)[0] == "ok"
    assert job.judge(0, right, 10)[0] == "FAILED"
    assert job.judge(1, "Traceback", 10)[0] == "FAILED"
    assert job.judge(1, right + "\nTOO LATE", 10)[0] == "FAILED"


# -------------------------------------------------------------------------------- the script runs


def run_script(*arguments, **settings):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60, **settings
    )


def test_list():
    done = run_script("--list", "--pretend", "2", "--parts", "barrier,soak")
    assert done.returncode == 0, done.stderr
    titles = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert titles[:2] == ["barrier R1", "barrier R2"]
    assert titles[-1] == "soak R4"


def test_wrong_part():
    done = run_script("--parts", "nonsense", "--list", "--pretend", "1")
    assert done.returncode == 2
    assert "no part 'nonsense'" in done.stderr


@pytest.fixture
def place(tmp_path):
    """A folder with the stand-in for MPS, and a driver that runs the script with it."""
    control = tmp_path / "nvidia-cuda-mps-control"
    files = {name: tmp_path / name for name in ("log", "pid", "deaf")}
    control.write_text(CONTROL.format(**files))
    control.chmod(0o755)
    (tmp_path / "driver.py").write_text(
        textwrap.dedent(f"""\
            import importlib.util, sys
            from importlib.machinery import SourceFileLoader
            loader = SourceFileLoader("gpu_script", {str(SCRIPT)!r})
            spec = importlib.util.spec_from_loader("gpu_script", loader)
            module = importlib.util.module_from_spec(spec)
            sys.modules["gpu_script"] = module
            loader.exec_module(module)
            module.PROBE = "pass"
            sys.exit(module.main())
            """)
    )
    return tmp_path


def start(place, *arguments):
    command = [sys.executable, place / "driver.py", "--pretend", "1", "--engine", "host"]
    search = f"{place}{os.pathsep}{os.environ['PATH']}"
    with (place / "said").open("w") as said:
        return subprocess.Popen(
            [*command, "--out", place / "out", *arguments],
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": search},
        )


def daemon_is_gone(place):
    pid = int((place / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or " Z " in state.read_text()


@pytest.mark.mpi
def test_mps_is_started_for_sharing_ranks_and_stopped(place):
    child = start(place, "--parts", "barrier", "--match", "R2")
    assert child.wait(60) == 0, (place / "said").read_text()
    said = (place / "said").read_text()
    assert "1 ok, 0 FAILED, 0 skipped" in said
    assert "MPS" in said
    assert "BARRIER: ok" in (place / "out" / "log.txt").read_text()
    assert "quit" in (place / "log").read_text()
    assert daemon_is_gone(place)


@pytest.mark.slow
@pytest.mark.mpi
def test_sigterm_ends_ranks_and_mps_even_if_it_is_deaf(place):
    (place / "deaf").touch()
    child = start(place, "--parts", "failures", "--ranks", "2")
    log = place / "out" / "log.txt"
    deadline = time.monotonic() + 90
    while not (log.exists() and "late dispatch" in log.read_text()):
        assert time.monotonic() < deadline, (place / "said").read_text()
        time.sleep(0.1)
    child.send_signal(signal.SIGTERM)
    assert child.wait(90) != 0
    assert "SIGTERM" in (place / "said").read_text()
    assert daemon_is_gone(place)
    assert not left_over(str(place))


def left_over(words):
    """Command lines of processes that name ``words``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if words.encode() in path.read_bytes() and b"GPU_TESTS_RUN" in path.read_bytes():
                found.append((path.parent / "cmdline").read_bytes())
        except OSError:
            continue
    return found


@pytest.fixture
def script(monkeypatch):
    """The script as a module."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    loader = SourceFileLoader("gpu_script_of_tests", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    monkeypatch.setitem(sys.modules, loader.name, module)
    loader.exec_module(module)
    return module


def test_a_stopped_rank_is_ended_too(script):
    """A process that is stopped, and a child of it that has left its parent's group."""
    mark = f"GPU_TESTS_RUN=test-{os.getpid()}"
    name, _, value = mark.partition("=")
    inner = "setsid sleep 300 & kill -STOP $$; wait"
    child = subprocess.Popen(["sh", "-c", inner], env={**os.environ, name: value})
    deadline = time.monotonic() + 10
    while len(script.ours(mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(script.ours(mark)) >= 2
    script.end_all(mark)
    child.wait(5)
    assert not script.ours(mark)
