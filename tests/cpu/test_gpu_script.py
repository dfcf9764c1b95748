"""``.ci/gpu`` itself, where there is no GPU: its jobs, its judgement, and that nothing survives it.

A stand-in for ``nvidia-cuda-mps-control`` notes what it is told; its daemon is a sleeping shell.
"""

from __future__ import annotations

import importlib.util
import itertools
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
    return from_file("jobs")


@pytest.fixture(scope="module")
def at_once():
    """Which of them may run together, from its file."""
    return from_file("at_once")


def from_file(name):
    """A module of tests/gpu, which imports others that lie beside it."""
    folder = ROOT / "tests" / "gpu"
    spec = importlib.util.spec_from_file_location(f"{name}_of_gpu_tests", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def test_every_job_has_a_title_of_its_own_a_file_and_a_limit(jobs):
    for gpus, quick, turns in itertools.product((1, 2, 8), (False, True), (False, True)):
        plan = jobs.Plan(gpus=gpus, quick=quick, turns=turns)
        listed = [(part, job) for part, jobs_of in jobs.PARTS.items() for job in jobs_of(plan)]
        assert len({job.title for _, job in listed}) == len(listed)
        for part, job in listed:
            assert job.part == part
            assert job.argv[0] == "-m" or (ROOT / job.argv[0]).is_file(), job
            assert 0 < job.limit_s <= 400
            assert 1 <= job.ranks <= 8
            if "--timeout" in job.argv:
                patience = float(job.argv[job.argv.index("--timeout") + 1])
                assert patience < job.limit_s, job


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


# ---------------------------------------------------------------------------- jobs at the same time


def all_jobs(jobs, gpus):
    plan = jobs.Plan(gpus=gpus)
    return [job for name in jobs.PARTS for job in jobs.PARTS[name](plan)]


def test_what_runs_beside_others_can_be_and_says_what_it_takes(jobs):
    for gpus in (1, 2, 8):
        for job in all_jobs(jobs, gpus):
            if job.beside:
                assert not job.fails, "it would take the others with it"
                assert not job.wrap, "no tool runs under MPS"
                assert job.blocks > 0
                assert job.gib > 0
                assert job.blocks >= job.sms
            assert job.seconds < job.limit_s, job


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_timetable_never_takes_more_than_there_is(jobs, at_once, gpus):
    """At every moment all blocks that wait for other ranks fit on each GPU."""
    room = at_once.Room(gpus=gpus, jobs=6, cores=32)
    chosen = [job for job in all_jobs(jobs, gpus) if job.beside]
    entries = at_once.timetable(room, chosen)
    assert sorted(placed.job.title for _, _, placed in entries) == sorted(j.title for j in chosen)
    several = 0
    for begin, _, _ in entries:
        now = [placed for start, end, placed in entries if start <= begin < end]
        several += len(now) > 1
        assert len(now) <= room.jobs
        assert len({placed.job.beside for placed in now}) == 1
        assert sum(placed.job.ranks for placed in now) <= room.cores
        for gpu in range(gpus):
            on_gpu = [(placed.job, placed.ranks_on(gpu, gpus)) for placed in now]
            if len(now) > 1:
                assert sum(job.blocks * ranks for job, ranks in on_gpu) < room.sms
                assert sum(job.gib * ranks for job, ranks in on_gpu) < room.gib
    assert several > len(entries) // 2


def test_every_rank_of_a_job_is_on_some_gpu(jobs, at_once):
    for job in all_jobs(jobs, 2):
        for first in range(2):
            placed = at_once.Placed(job, first)
            ranks = [placed.ranks_on(gpu, 2) for gpu in range(2)]
            assert sum(ranks) == job.ranks
            if job.gpus == 1:
                assert ranks[first] == job.ranks


def test_a_job_alone_has_nothing_beside_it(jobs, at_once):
    room = at_once.Room(gpus=2, jobs=8, cores=64)
    alone, other = (at_once.Job(name, 2, ("x.py",), 10) for name in ("speed", "barrier"))
    beside = at_once.Job("table", 2, ("x.py",), 10, beside="work", blocks=1, gib=1)
    running = [at_once.Placed(alone)]
    assert at_once.place(room, other, running) is None
    assert at_once.place(room, beside, running) is None
    assert at_once.place(room, beside, [at_once.Placed(beside)]) is not None


# -------------------------------------------------------------------------------- the script runs


def run_script(*arguments, **settings):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60, **settings
    )


def test_list():
    done = run_script("--list", "--pretend", "2", "--parts", "barrier,soak")
    assert done.returncode == 0, done.stderr
    titles = [line for line in done.stdout.splitlines() if line[0] not in " =a"]
    assert titles[:2] == ["barrier R1", "barrier R2"]
    assert titles[-1] == "soak modes R4"
    assert "s in all" in done.stdout.splitlines()[-1]


def test_list_of_jobs_at_once():
    options = ("--at-once", "8", "--cores", "32", "--phases", "beside")
    done = run_script("--list", "--pretend", "2", "--parts", "barrier,soak,modes", *options)
    assert done.returncode == 0, done.stderr
    assert "barrier" not in done.stdout
    assert "worker_modes.py --modes table" in done.stdout
    assert "--num-sms" in done.stdout


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
            module.machine.PROBE = "pass"
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


@pytest.mark.slow
@pytest.mark.mpi
def test_jobs_run_beside_each_other_and_one_log_has_each_in_one_piece(place):
    child = start(place, "--parts", "expand,soak", "--match", "soak modes R2|expand R2",
                  "--quick", "--at-once", "2", "--cores", "4", "--minutes", "2")  # fmt: skip
    assert child.wait(110) == 0, (place / "said").read_text()
    said = (place / "said").read_text()
    assert "2 ok, 0 FAILED, 0 skipped" in said
    begun = [said.index(f"… {title}") for title in ("soak modes R2", "expand R2")]
    ended = [said.index(f"{title}: ok") for title in ("soak modes R2", "expand R2")]
    assert max(begun) < min(ended), said
    log = (place / "out" / "log.txt").read_text()
    first, second = log.split("\n===== ")[1:]
    for piece in (first, second):
        name = "EXPAND" if piece.startswith("expand") else "SOAKMODES"
        assert f"{name}: ok" in piece
        assert piece.count(": ok,") == 1
    assert daemon_is_gone(place)


FAILING = """
import job, jobs, sys
from pathlib import Path
sys.argv[0] = {script!r}
def lists(plan):
    wait = "import time; time.sleep({seconds}); print('DONE: ok')"
    made = []
    for name, text in {texts!r}.items():
        made.append(job.Job("barrier " + name, 1, ("-c", text), 20, plain=True, beside="work",
                            blocks=1, gib=1))
    return made
jobs.PARTS["barrier"] = lists
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_what_fails_after_another_one_runs_once_more(place, tmp_path):
    """The second failure may be the first one's doing: MPS is started anew before it is judged."""
    mark = tmp_path / "was here"
    texts = {
        "first": "import time; time.sleep(0.5); raise SystemExit(3)",
        "victim": (
            f"import time, pathlib; mark = pathlib.Path({str(mark)!r}); again = mark.exists(); "
            "mark.touch(); time.sleep(0 if again else 1.5); print('DONE: ok'); "
            "raise SystemExit(0 if again else 4)"
        ),
        "other": "print('DONE: ok')",
    }
    driver = (place / "driver.py").read_text()
    more = FAILING.format(script=str(SCRIPT), seconds=0, texts=texts)
    (place / "driver.py").write_text(driver.replace("sys.exit(module", more + "sys.exit(module"))
    child = start(place, "--parts", "barrier", "--at-once", "2", "--cores", "4")
    assert child.wait(60) == 1, (place / "said").read_text()
    said = (place / "said").read_text()
    assert "2 ok, 1 FAILED, 0 skipped" in said
    assert "barrier victim R1: ok" in said
    assert "(second try)" in said
    assert "barrier first R1: FAILED" in said
    assert (place / "log").read_text().count("-d") == 2, "MPS was not started anew"


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
    deadline = time.monotonic() + 90
    logs = place / "out" / "running"
    while not any("late dispatch" in path.read_text() for path in logs.glob("*.txt")):
        assert time.monotonic() < deadline, (place / "said").read_text()
        time.sleep(0.1)
    child.send_signal(signal.SIGTERM)
    assert child.wait(90) != 0
    assert "SIGTERM" in (place / "said").read_text()
    assert "late dispatch" in (place / "out" / "log.txt").read_text()
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
    while len(script.machine.ours(mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(script.machine.ours(mark)) >= 2
    script.machine.end_all(mark)
    child.wait(5)
    assert not script.machine.ours(mark)
