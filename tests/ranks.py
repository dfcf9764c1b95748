"""Runs a worker script on several ranks, and always comes back.

``run_ranks`` starts ``mpirun`` with each rank's output going to a file of its own, waits for no
longer than a limit, and ends every process it started, whatever state they are in. A worker is an
ordinary script: ``mpirun -n 2 python worker.py`` runs it by hand.

A rank that is still there shortly before the limit writes the stacks of its threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepep_cupy import env
from deepep_cupy.testing import cluster

__all__ = ["Run", "cluster_flags", "is_open_mpi", "mpirun", "run_ranks", "why_no_nodes"]

_DUMP_BEFORE_S = 3.0
"""Stacks are written this long before the limit."""


@dataclass(frozen=True)
class Run:
    """What came of it.

    Attributes:
        returncode: Of ``mpirun``; negative: the signal that ended it.
        timed_out: True when the limit passed and everything was killed.
        seconds: From start to end.
        outputs: Standard output and error of each rank, in the order they were written.
        launcher: Standard output and error of ``mpirun`` itself.
        survivors: Ranks whose process was still there after ``mpirun`` had ended.
    """

    returncode: int
    timed_out: bool
    seconds: float
    outputs: tuple[str, ...]
    launcher: str
    survivors: tuple[int, ...]

    def check(self) -> None:
        """Raise unless all ranks ended well.

        Raises:
            AssertionError: With the output of every rank.
        """
        if self.returncode != 0 or self.timed_out or self.survivors:
            raise AssertionError(f"the ranks did not end well\n{self}")

    def __str__(self) -> str:
        end = "was killed at its limit" if self.timed_out else f"returned {self.returncode}"
        lines = [f"mpirun {end} after {self.seconds:.1f} s; survivors: {self.survivors}"]
        for rank, output in enumerate(self.outputs):
            lines += [f"----- rank {rank}", output.rstrip()]
        return "\n".join([*lines, "----- mpirun", self.launcher.rstrip()])


def mpirun() -> str | None:
    """The ``mpirun`` beside this Python, else the one on PATH, else None."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.is_file() else shutil.which("mpirun")


@functools.cache
def is_open_mpi() -> bool:
    """Whether that ``mpirun`` is Open MPI's."""
    program = mpirun()
    if program is None:
        return False
    asked = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    return "Open MPI" in asked.stdout or "open-mpi" in asked.stdout


@functools.cache
def cluster_flags() -> tuple[str, ...]:
    """How ``deepep_cupy.testing.cluster`` makes nodes here: with namespaces where it can."""
    return ("--pretend",) if cluster.why_not() else ()


def why_no_nodes() -> str:
    """Why ranks cannot be started on several nodes here; empty where they can."""
    if is_open_mpi():
        return "needs MPICH: with Open MPI, of all this, the failure tests are run on three nodes"
    return ""


_OPEN_MPI_FLAGS = ("--oversubscribe",)
_OPEN_MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_osc": "^ucx",  # says on standard error that it is not there
}


def run_ranks(
    worker: Path | str,
    num_ranks: int,
    *arguments: object,
    limit_s: float = 60.0,
    environment: Mapping[str, str | None] | None = None,
    flags: Sequence[str] = (),
    nodes: int = 0,
) -> Run:
    """Run ``worker`` on ``num_ranks`` ranks.

    Args:
        worker: A Python script.
        num_ranks: Ranks to start.
        arguments: Its command line, as texts.
        limit_s: Seconds after which everything is killed.
        environment: Variables to set, or with None to unset.
        flags: More options for ``mpirun``.
        nodes: Nodes that share the ranks, made by ``deepep_cupy.testing.cluster``; 0: this machine
            as it is. Ask ``why_no_nodes`` first. Survivors are not looked for: there are none in a
            PID namespace that has ended.

    Raises:
        FileNotFoundError: There is no ``mpirun``.
    """
    program = mpirun()
    if program is None:
        raise FileNotFoundError(
            "run_ranks(): no mpirun beside this Python or on PATH; pip install mpich brings one"
        )
    if is_open_mpi():
        flags = (*_OPEN_MPI_FLAGS, *flags)
        environment = {**_OPEN_MPI_ENVIRONMENT, **(environment or {})}
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        ours = [sys.executable, __file__, name, str(limit_s), str(worker)]
        command = [program, *flags, "-n", str(num_ranks), *ours, *map(str, arguments)]
        if nodes:
            ours = [sys.executable, "-m", "deepep_cupy.testing.cluster", *cluster_flags()]
            sizes = ["--nodes", str(nodes), "--per-node", str(num_ranks // nodes)]
            command = [*ours, *sizes, "--limit", str(limit_s), "--", *command]
        start = time.monotonic()
        with (folder / "mpirun").open("wb") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=env.child_environment(environment or {}, Path(__file__).parents[1]),
            )
            try:
                child.wait(limit_s)
                timed_out = False
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                seconds = time.monotonic() - start
                if child.poll() is None:
                    _kill_tree(child.pid)
                    child.wait()
        survivors = () if nodes else _kill_survivors(folder, num_ranks)
        return Run(
            child.returncode,
            timed_out,
            seconds,
            tuple(_text(folder / f"rank.{rank}") for rank in range(num_ranks)),
            _text(folder / "mpirun"),
            () if timed_out else survivors,
        )


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _kill_tree(root: int) -> None:
    """Kill a process of ours and all that came from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "pid (name) state ppid …", and a name may hold anything.
            fields = entry.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    doomed = [root]
    for pid in doomed:
        doomed += children.get(pid, [])
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _kill_survivors(folder: Path, num_ranks: int) -> tuple[int, ...]:
    """Kill ranks that outlived ``mpirun``; which they were."""
    waiting = {rank: _text(folder / f"pid.{rank}") for rank in range(num_ranks)}
    deadline = time.monotonic() + 1.0
    while True:
        # The folder's name in the command line proves that the number is not someone else's now.
        alive = {
            rank: int(pid)
            for rank, pid in waiting.items()
            if pid and str(folder) in _text(Path("/proc") / pid / "cmdline")
        }
        if not alive or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for pid in alive.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return tuple(alive)


def _main(folder: Path, limit_s: float, worker: str, arguments: list[str]) -> None:
    """Run the worker in this process, as one rank."""
    rank = env.launcher_rank()
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    descriptor = os.open(folder / f"rank.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(limit_s - _DUMP_BEFORE_S, limit_s / 2))
    sys.argv = [worker, *arguments]
    sys.path[0] = str(Path(worker).parent)
    runpy.run_path(worker, run_name="__main__")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:])
