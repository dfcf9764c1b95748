"""The machine that ``.ci/gpu`` runs on: GPUs, MPS, processes. Standard library only."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

TOKEN = f"gpu-tests-{os.getpid()}-{time.time_ns()}"
ALL = f"GPU_TESTS_ALL={TOKEN}"
"""In the environment of all that is started here."""
PACKAGES = ("numpy", "ml_dtypes", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "mpi4py")
PACKAGES += ("mpich", "openmpi", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "jax", "torch")


# ----------------------------------------------------------------------------------- the machine


@dataclass
class Machine:
    """GPUs, and what lies between them and us.

    Attributes:
        visible: What to write into CUDA_VISIBLE_DEVICES, one entry a GPU.
        facts: (name, value) for people.
        gib: Memory of the smallest GPU.
        sms: Of the GPU with the fewest.
    """

    visible: list[str]
    facts: list[tuple[str, str]] = field(default_factory=list)
    gib: float = 139.0
    sms: int = 132


def look(pretend: int) -> Machine:
    """Ask nvidia-smi; or pretend."""
    if pretend:
        return Machine([str(number) for number in range(pretend)], [("GPUs", "pretended")])
    query = "--query-gpu=index,uuid,name,memory.total,driver_version,compute_cap"
    try:
        asked = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f".ci/gpu: no GPU was found: {error}")
    gpus = [[cell.strip() for cell in line.split(",")] for line in asked.stdout.splitlines()]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = [gpu[0] for gpu in gpus] if chosen is None else [v for v in chosen.split(",") if v]
    if not visible:
        sys.exit(".ci/gpu: no GPU was found")
    used = [gpu for gpu in gpus if gpu[0] in visible or gpu[1] in visible] or gpus
    names = sorted({f"{gpu[2]}, {gpu[3]}, compute capability {gpu[5]}" for gpu in used})
    found = [("GPUs", f"{len(visible)} × {'; '.join(names)}"), ("driver", used[0][4])]
    gib = min(float(gpu[3].split()[0]) for gpu in used) / 1024
    return Machine(visible, found, gib, _sms())


def _sms() -> int:
    """SMs of the GPU with the fewest, asked in a process of its own; 1 where nobody says."""
    asked = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=60, check=False
    )
    return int(asked.stdout) if asked.returncode == 0 else 1


def versions(mpirun: str) -> list[tuple[str, str]]:
    """Of all that matters."""
    found = []
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    lines = [line.strip() for line in said.stdout.splitlines() if "ersion" in line or "MPI" in line]
    python = f"Python {platform.python_version()} on {platform.platform()}"
    return [("system", python), ("packages", ", ".join(found)), ("MPI", "; ".join(lines[:2]))]


# ------------------------------------------------------------------------------------------- MPS


class Mps:
    """The Multi-Process Service, with folders of its own."""

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self._control = shutil.which("nvidia-cuda-mps-control")
        self._folder: Path | None = None

    def start(self) -> str:
        """Start it; empty, or why it cannot be started."""
        if self._control is None:
            return "nvidia-cuda-mps-control is not on PATH"
        self._folder = Path(tempfile.mkdtemp(prefix="mps-"))
        names = {"CUDA_MPS_PIPE_DIRECTORY": "pipe", "CUDA_MPS_LOG_DIRECTORY": "log"}
        for name in names.values():
            (self._folder / name).mkdir()
        self.environment = {name: str(self._folder / path) for name, path in names.items()}
        why = self._command([self._control, "-d"], "")
        why = why or self._command([self._control], "get_default_active_thread_percentage\n")
        why = why or self._command([sys.executable, "-c", PROBE], "")
        if why:
            self.stop()
        return why

    def _command(self, command: list[str], text: str) -> str:
        environment = {**os.environ, **self.environment, "GPU_TESTS_MPS": TOKEN}
        with tempfile.TemporaryFile() as said:  # no pipe: a daemon would keep it open
            try:
                code = subprocess.run(
                    command, input=text, env=environment, stdout=said, stderr=said, text=True,
                    timeout=60, check=False,
                ).returncode  # fmt: skip
            except (OSError, subprocess.SubprocessError) as error:
                return str(error)
            said.seek(0)
            words = said.read().decode(errors="replace").strip().splitlines()
        return "" if code == 0 else f"exit code {code}: {' '.join(words[-1:])}"

    def stop(self) -> None:
        """Stop it, whatever state it is in."""
        if self._folder is None:
            return
        if self._control is not None:
            self._command([self._control], "quit -t 5\n")
        if not gone(f"GPU_TESTS_MPS={TOKEN}", 10):
            end_all(f"GPU_TESTS_MPS={TOKEN}")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self.environment = None, {}


COUNT = """
import ctypes
cuda, number, sms, every = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int(), []
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGetCount(ctypes.byref(number)) == 0
for device in range(number.value):
    assert cuda.cuDeviceGetAttribute(ctypes.byref(sms), 16, device) == 0
    every.append(sms.value)
print(min(every))
"""
PROBE = """
import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuDevicePrimaryCtxRelease(0) == 0
"""


# -------------------------------------------------------------------------------------- processes


def ours(mark: str) -> list[int]:
    """Processes that have ``NAME=value`` in their environment: ours, and all they started."""
    wanted, found = mark.encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def gone(mark: str, seconds: float) -> bool:
    """Wait until there are none."""
    end = time.monotonic() + seconds
    while ours(mark):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def end_all(mark: str) -> None:
    """End them: stopped ones go on first, then all are asked to end, then they are killed."""
    for number, seconds in ((signal.SIGCONT, 0.2), (signal.SIGTERM, 5.0), (signal.SIGKILL, 10.0)):
        for pid in ours(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if gone(mark, seconds):
            return
