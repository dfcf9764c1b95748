"""What every test folder shares: rank counts, marks by folder, skips with a reason, and their sum.

``num_ranks``
    A test that takes this argument runs for 1 and 3 ranks, or those of its mark ``ranks``, and
    with ``-m slow`` for 1 and 3 where its mark leaves them out.
    ``pytest --ranks 2,8`` runs these tests alone, for the counts given, as ``.ci/run`` does; by
    hand ``--ranks 4,5,6,7``.

Tests of ``tests/gpu``, ``tests/mpi`` and ``tests/sim`` are marked by their folder, and skipped
where this machine lacks what they need. If every selected test of ``tests/cpu``, ``tests/mpi`` or
``tests/sim`` was skipped, the run fails: a green run has tested something.

``pytest -n 3`` (pytest-xdist) runs three files at a time, the long ones first.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import ranks

TESTS = Path(__file__).parent
MUST_RUN = ("cpu", "mpi", "sim")
"""Folders of which at least one selected test must not be skipped."""
MARKED_BY_FOLDER = ("gpu", "mpi", "sim")
RANKS = (1, 3)
"""Three finds what two and four find, and takes half the processes: it divides little."""
LONG = ("mpi", "sim")
"""Folders whose files take longest."""

FOR_CHILDREN = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
}
"""Ranks and other children are started by the hundred, more at a time than there are cores: one
thread each for linear algebra, and sleep where MPICH would spin. What is set already stays."""

_outcomes: dict[str, Counter[str]] = {}
_reasons: dict[str, Counter[str]] = {}


def pytest_configure():
    for name, value in FOR_CHILDREN.items():
        os.environ.setdefault(name, value)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or every child compiles the package again


# ------------------------------------------------------------------------------------ rank counts


def pytest_addoption(parser):
    parser.addoption(
        "--ranks",
        type=lambda text: [int(word) for word in text.split(",")],
        metavar="N,N",
        help="only tests that take num_ranks, with these rank counts",
    )


def pytest_generate_tests(metafunc):
    if "num_ranks" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--ranks")
        mark = metafunc.definition.get_closest_marker("ranks")
        usual = mark.args if mark else RANKS
        slow = [n for n in RANKS if n not in usual]
        values = asked or [*usual, *(pytest.param(n, marks=pytest.mark.slow) for n in slow)]
        metafunc.parametrize("num_ranks", values, ids=lambda n: f"R{n}")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--ranks"):
        other = [item for item in items if "num_ranks" not in item.fixturenames]
        items[:] = [item for item in items if "num_ranks" in item.fixturenames]
        config.hook.pytest_deselected(items=other)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _folder(item.path) not in LONG)  # what is long, first


# -------------------------------------------------------------------------- several at a time (-n)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep the tests of a file on one worker, which makes their fixtures once, where it has any.

    Alone: tests of the simulator, for what it compiles is on disk, and tests of one rank count.
    Tests of GPUs are all on one worker.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            folder = _folder(TESTS.parent / file)
            alone = folder == "sim" or (folder == "mpi" and re.search(r"\[R\d", nodeid))
            return nodeid if alone else "gpu" if folder == "gpu" else file

    config.option.loadscopereorder = False
    return ByFile(config, log)


# ------------------------------------------------------------------------------- marks and skips


def pytest_itemcollected(item):
    folder = _folder(item.path)
    if folder in MARKED_BY_FOLDER:
        item.add_marker(folder)


def pytest_runtest_setup(item):
    """Skip what this machine cannot run, and say what it lacks."""
    if item.get_closest_marker("mpi") and (reason := _no_mpi()):
        pytest.skip(reason)
    if item.get_closest_marker("openmpi") and not ranks.is_open_mpi():
        pytest.skip("needs Open MPI, and the mpirun of this environment is another")
    if item.get_closest_marker("sim") and not shutil.which("g++"):
        pytest.skip("needs a C++ compiler: g++ is not on PATH")
    if mark := item.get_closest_marker("gpu"):
        _skip_without_gpus(wanted=mark.args[0] if mark.args else 1)
    if item.get_closest_marker("sm90") and min(_capabilities(), default=0) < 90:
        pytest.skip(f"needs compute capability 9.0, got {_capabilities()}")


def _skip_without_gpus(wanted):
    found = len(_capabilities())
    if found < wanted:
        pytest.skip(f"needs {wanted} GPU(s), {found} found")


@functools.cache
def _no_mpi():
    """Return why no ranks can be started here, or an empty text."""
    if importlib.util.find_spec("mpi4py") is None:
        return "needs MPI: mpi4py is not installed (pip install -e '.[mpich]')"
    if ranks.mpirun() is None:
        return "needs MPI: no mpirun beside this Python or on PATH (pip install -e '.[mpich]')"
    return ""


_LIST_GPUS = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
count = ctypes.c_int()
assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for device in range(count.value):
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device) == 0
    assert cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device) == 0
    print(10 * major.value + minor.value)
"""


@functools.cache
def _capabilities():
    """Return the compute capability of each visible GPU, asked for in another process."""
    child = subprocess.run(
        [sys.executable, "-c", _LIST_GPUS], capture_output=True, text=True, timeout=120, check=False
    )
    return tuple(int(line) for line in child.stdout.split()) if child.returncode == 0 else ()


# --------------------------------------------------------------------- a folder that ran nothing


def pytest_runtest_logreport(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        _count_skip(report)
    elif report.when == "call":
        _outcomes.setdefault(_folder_of(report), Counter())["ran"] += 1


def pytest_collectreport(report):
    if report.skipped:  # a whole file: pytest.importorskip at its top
        _count_skip(report)


def _count_skip(report):
    folder = _folder_of(report)
    _outcomes.setdefault(folder, Counter())["skipped"] += 1
    _reasons.setdefault(folder, Counter())[report.longrepr[2].removeprefix("Skipped: ")] += 1


def pytest_sessionfinish(session, exitstatus):
    if hasattr(session.config, "workerinput"):
        return  # a worker of -n has seen a part of the tests only
    if exitstatus == pytest.ExitCode.OK and _folders_that_ran_nothing():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    for folder in _folders_that_ran_nothing():
        reasons = "; ".join(_reasons[folder])
        count = _outcomes[folder]["skipped"]
        terminalreporter.write_line(
            f"FAILED tests/{folder}: all {count} tests were skipped: {reasons}", red=True
        )


def _folders_that_ran_nothing():
    return [f for f in MUST_RUN if f in _outcomes and not _outcomes[f]["ran"]]


def _folder_of(report):
    return _folder(TESTS.parent / report.nodeid.split("::")[0])


def _folder(path):
    """Return the first folder of a path below ``tests``, or an empty text."""
    parts = path.relative_to(TESTS).parts if path.is_relative_to(TESTS) else ()
    return parts[0] if len(parts) > 1 else ""
