"""The contract of ``Buffer`` on the host engine: what works, what is refused and how."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepep_cupy import env
from ranks import run_ranks

WORKER = Path(__file__).with_name("contract_worker.py")


def test_contract(num_ranks):
    run = run_ranks(WORKER, num_ranks, limit_s=120)
    run.check()
    done = re.findall(r"s (\w+)$", run.outputs[0], re.MULTILINE)
    assert len(done) == len(set(done)) == WORKER.read_text().count("\n@scenario\n")
    # One rank says which engine runs, and why, once.
    said = "".join(run.outputs).count("running on the host engine: ")
    assert said == ("ENGINE host" in run.outputs[0]), run


@pytest.mark.slow
def test_messages_above_two_gib():
    run_ranks(Path(__file__).with_name("big_worker.py"), 2, limit_s=280).check()


def test_nine_ranks_are_refused():
    run = run_ranks(WORKER, 9, "life", limit_s=60)
    assert run.returncode != 0, run
    assert not run.timed_out, run
    assert "has 9 ranks, more than the 8" in run.outputs[8], run
    assert "comm.Split()" in run.outputs[0], run


def test_pretended_nodes():
    run_ranks(Path(__file__).with_name("nodes_worker.py"), 4, "pretended", limit_s=60).check()


def test_ranks_of_a_wrong_mpirun_are_refused():
    """Each process of an mpirun of another MPI is alone in its world."""
    child = subprocess.run(
        [sys.executable, str(WORKER), "life"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env.child_environment({"OMPI_COMM_WORLD_SIZE": "2"}, WORKER.parents[2]),
    )
    assert child.returncode != 0
    assert "PlatformError: Buffer(): mpirun started 2 processes" in child.stderr
    assert "the mpirun beside this Python" in child.stderr


def test_errors_of_mpi_are_returned_whatever_mpi4py_is_told():
    """Ranks must hear of a broken link; by default mpi4py sees to that itself."""
    code = (
        "import mpi4py; mpi4py.rc.errors = 'fatal'\n"
        "from mpi4py import MPI\n"
        "from deepep_cupy.ranks.mpi import MPIGroup\n"
        "group = MPIGroup(MPI.COMM_SELF)\n"
        "assert group._comm.Get_errhandler() == MPI.ERRORS_RETURN\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=60,
        env=env.child_environment({}, WORKER.parents[2]),
    )


def test_before_and_after_mpi_there_is_one_sentence():
    """MPICH would end the process without a traceback."""
    code = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI\n"
        "from deepep_cupy import Buffer\n"
        "def make():\n"
        "    return Buffer(MPI.COMM_WORLD, num_max_tokens_per_rank=4, hidden=8, num_topk=0)\n"
        "def said(call):\n"
        "    try: call()\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
        "said(make); MPI.Init(); buffer = make(); MPI.Finalize(); said(make)\n"
        "said(buffer.reset); said(buffer.close); buffer.close()\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=env.child_environment({}, WORKER.parents[2]),
    )
    before, after, reset, close = child.stdout.splitlines()
    assert before.startswith("PlatformError Buffer(): MPI is not initialised in this process")
    assert after.startswith("PlatformError Buffer(): MPI has been finalised in this process")
    assert reset.startswith("StateError reset(): MPI has been finalised on rank 0")
    assert close.startswith("StateError close(): MPI has been finalised on rank 0")


def test_shared_memory_that_cannot_be_had_is_one_sentence():
    """Because it is full, which would end the process by a bus error later, or MPI says no."""
    code = (
        "from types import SimpleNamespace\n"
        "from deepep_cupy.ranks import mpi\n"
        "from deepep_cupy.errors import PlatformError\n"
        "group, statvfs = mpi.MPIGroup(mpi.MPI.COMM_SELF), mpi.os.statvfs\n"
        "def say():\n"
        "    try: group.shared_window(64)\n"
        "    except PlatformError as error: print(error)\n"
        "mpi.os.statvfs = lambda path: SimpleNamespace(f_bavail=7, f_frsize=1024)\n"
        "say()\n"
        "mpi.os.statvfs = statvfs\n"
        "def refuse(*_): raise mpi.MPI.Exception(mpi.MPI.ERR_OTHER)\n"
        "mpi.MPIWindow = refuse\n"
        "say()\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=env.child_environment({}, WORKER.parents[2]),
    )
    full, refused = child.stdout.splitlines()
    assert re.match(r"Buffer\(\): /dev/shm of \S+ has 7 KiB left, wanted at least 1024", full)
    assert refused.startswith("Buffer(): MPI could not share memory between these ranks")


def test_one_rank_needs_no_mpirun():
    child = subprocess.run(
        [sys.executable, str(WORKER)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env.child_environment({}, WORKER.parents[2]),
    )
    assert child.returncode == 0, child.stderr
