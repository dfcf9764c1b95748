"""``env``: what this machine has, for a person who asks for help or wonders what is missing.

Nothing here fails: what cannot be found out is shown with the reason. CuPy and MPI are looked at
only if they are installed, and MPI in a process of its own, since some MPI libraries end a
process that was not started by their ``mpirun``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from deepep_cupy import _resources, env
from deepep_cupy._version import __version__
from deepep_cupy.engines.gpu import loads as policy
from deepep_cupy.errors import DeepEPCupyError
from deepep_cupy.protocol.sizes import BufferSpec

__all__ = ["add_arguments", "run"]

Rows: TypeAlias = list[tuple[str, str]]

_CHILD_SECONDS = 30
_GIB = 1 << 30
_KERNEL_DRIVER = Path("/proc/driver/nvidia/version")

_MPI_LIBRARY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().splitlines()[0])
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``env`` takes no arguments."""
    del parser


def run(args: argparse.Namespace) -> int:
    """Print one table; under ``mpirun`` rank 0 alone prints."""
    del args
    if env.launcher_rank() != 0:
        return 0
    cupy, missing = _import("cupy")
    gpus = _gpus(cupy) if cupy is not None else missing
    sections = {
        "versions": _versions(cupy, missing),
        "GPUs": _gpu_rows(gpus),
        "environment variables": _variables(),
        "files": _files(),
        "engine": _engine(gpus),
    }
    print(_table(sections))
    return 0


def _table(sections: dict[str, Rows]) -> str:
    """Lay out titles and rows; the first column is as wide as its widest entry."""
    width = max(len(name) for rows in sections.values() for name, _ in rows)
    lines: list[str] = []
    for title, rows in sections.items():
        lines += ["", title, *(f"  {name:<{width}}  {value}".rstrip() for name, value in rows)]
    return "\n".join(lines[1:])


# -------------------------------------------------------------------------------------- versions


def _versions(cupy: Any, missing: str) -> Rows:
    return [
        ("deepep_cupy", f"{__version__} in {Path(__file__).resolve().parents[1]}"),
        ("Python", f"{platform.python_version()} {sys.executable}"),
        ("system", f"{platform.platform()}, {os.cpu_count()} processors"),
        ("numpy", _distribution("numpy")),
        ("ml_dtypes", _distribution("ml_dtypes")),
        ("cupy", missing if cupy is None else str(cupy.__version__)),
        ("NVRTC", _asked(_compiler_version)),
        ("cuda-bindings", _distribution("cuda-bindings")),
        ("CUDA driver", "unknown: CuPy is missing" if cupy is None else _driver(cupy)),
        ("mpi4py", _distribution("mpi4py")),
        ("MPI library", _mpi_library()),
        ("mpirun", _mpirun()),
    ]


def _distribution(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _compiler_version() -> str:
    return str(importlib.import_module("deepep_cupy.jit.compile").compiler_version())


def _driver(cupy: Any) -> str:
    """Return the CUDA version that the driver speaks, and the kernel module's line if there."""
    number = int(_asked(cupy.cuda.runtime.driverGetVersion, "0"))
    known = f"CUDA {number // 1000}.{number % 1000 // 10}" if number else "no driver"
    try:
        module = _KERNEL_DRIVER.read_text().splitlines()[0].removeprefix("NVRM version: ")
    except (OSError, IndexError):
        return known
    return f"{known}, {' '.join(module.split())}"


def _mpi_library() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        return "unknown: mpi4py is not installed"
    try:
        child = subprocess.run(
            [sys.executable, "-c", _MPI_LIBRARY],
            capture_output=True,
            text=True,
            timeout=_CHILD_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    lines = (child.stdout if child.returncode == 0 else child.stderr).split("\n")
    answers = [line.strip(" \t\0") for line in lines if line.strip(" \t\0")]
    word = answers[-1] if answers else f"no answer, exit code {child.returncode}"
    return " ".join(word.split()) if child.returncode == 0 else f"cannot be loaded: {word}"


def _mpirun() -> str:
    """Return the ``mpirun`` of this Python's environment, which matches its MPI wheel if any."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.is_file() else "none beside this Python"


# ------------------------------------------------------------------------------------------ GPUs


def _gpus(cupy: Any) -> list[dict[str, Any]] | str:
    """Return what is known of each visible GPU, or why there is none."""
    runtime = cupy.cuda.runtime
    try:
        if runtime.driverGetVersion() == 0:
            return "this machine has no CUDA driver"
        count = int(runtime.getDeviceCount())
        gpus = [_gpu(runtime, device) for device in range(count)]
        for gpu in gpus:
            gpu["peers"] = [
                other
                for other in range(count)
                if other != gpu["device"] and runtime.deviceCanAccessPeer(gpu["device"], other)
            ]
    except Exception as error:  # noqa: BLE001 - a broken driver is what this command is for
        return _reason(error)
    return gpus or "the driver sees none"


def _gpu(runtime: Any, device: int) -> dict[str, Any]:
    properties = runtime.getDeviceProperties(device)
    return {
        "device": device,
        "name": properties["name"].decode(),
        "uuid": _uuid(properties.get("uuid")),
        "arch": 10 * properties["major"] + properties["minor"],
        "sms": properties["multiProcessorCount"],
        "bytes": properties["totalGlobalMem"],
        "bus": runtime.deviceGetPCIBusId(device),
    }


def _uuid(raw: bytes | None) -> str:
    """Write a UUID as ``nvidia-smi`` does."""
    if not raw:
        return "UUID unknown"
    digits = bytes(raw[:16]).hex()
    ends = (8, 12, 16, 20, 32)
    return "GPU-" + "-".join(digits[a:b] for a, b in zip((0, *ends), ends, strict=False))


def _gpu_rows(gpus: list[dict[str, Any]] | str) -> Rows:
    if isinstance(gpus, str):
        return [("none", gpus)]
    return [
        (
            f"GPU {gpu['device']}",
            f"{gpu['name']}, sm_{gpu['arch']}, {gpu['sms']} SMs, {gpu['bytes'] / _GIB:.0f} GiB, "
            f"{gpu['uuid']}, PCI {gpu['bus']}, {_peers(gpu, len(gpus))}",
        )
        for gpu in gpus
    ]


def _peers(gpu: dict[str, Any], count: int) -> str:
    if count == 1:
        return "no other GPU is visible"
    if len(gpu["peers"]) == count - 1:
        return "peer access to all others"
    return f"peer access to {', '.join(map(str, gpu['peers'])) or 'none'}"


# ----------------------------------------------------------------- variables, files, and the choice


def _variables() -> Rows:
    return [(variable.name, _asked(partial(_value, variable))) for variable in env.VARIABLES]


def _value(variable: env.Variable) -> str:
    value = env.read(variable.name)
    return f"{value or 'unset'}{' (default)' if value == variable.default else ''}"


def _files() -> Rows:
    return [
        ("kernel cache", _asked(lambda: str(env.cache_dir()))),
        ("CUDA text", _asked(lambda: str(_resources.kernel_dir()))),
        ("PTX modules", _asked(lambda: str(_resources.ptx_dir()))),
    ]


def _engine(gpus: list[dict[str, Any]] | str) -> Rows:
    problem = _why_not_cuda(gpus)
    if not problem:
        loads = _asked(lambda: _loads(gpus)) if isinstance(gpus, list) else ""
        return [("auto", "cuda, if every rank can"), ("loads", loads)]
    return [("auto", "host"), ("why not cuda", problem)]


def _loads(gpus: list[dict[str, Any]]) -> str:
    """Which loads of row data a Buffer on these GPUs would take, and why."""
    import cupy

    driver = policy.driver_name(cupy.cuda.runtime.driverGetVersion())
    first = gpus[0]
    choice = policy.resolve(
        env.loads(), first["arch"], gpu=first["name"], driver=driver, across_gpus=len(gpus) > 1
    )
    return f"{choice.loads}: {choice.reason}"


def _why_not_cuda(gpus: list[dict[str, Any]] | str) -> str:
    """Return this process's vote against ``engine="cuda"``, or an empty text."""
    if isinstance(gpus, str):
        return gpus
    return _asked(_vote)


def _vote() -> str:
    """Ask what the smallest Buffer would ask."""
    select = importlib.import_module("deepep_cupy.engines.select")
    spec = BufferSpec(
        num_ranks=1,
        rank=0,
        num_max_tokens_per_rank=1,
        max_row_bytes=1,
        num_topk=0,
        num_experts=None,
        timeout_s=1.0,
    )
    return select.why_not_cuda(spec, None) or ""


# --------------------------------------------------------------------------------------- asking


def _import(name: str) -> tuple[Any, str]:
    """Import an optional module; return it, or ``None`` and why not."""
    if importlib.util.find_spec(name) is None:
        return None, f"{name} is not installed"
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # noqa: BLE001 - a broken installation is what this command is for
        return None, f"{name} cannot be imported: {_reason(error)}"


def _asked(question: Callable[[], Any], unknown: str | None = None) -> str:
    """Return the answer as text, or why there is none."""
    try:
        return str(question())
    except DeepEPCupyError as error:
        return unknown if unknown is not None else str(error)
    except Exception as error:  # noqa: BLE001 - nothing may stop the table
        return unknown if unknown is not None else f"unknown: {_reason(error)}"


def _reason(error: Exception) -> str:
    """Return the first line of an error's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
