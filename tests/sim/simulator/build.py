"""Compile kernel text and the engine with g++, once each: results are kept under their digest."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deepep_cupy.kernels.source import generate
from deepep_cupy.kernels.spec import KernelSpec

SIM = Path(__file__).resolve().parent.parent
ENGINE = SIM / "engine"
STANDARD = "-std=c++20"
ENGINE_OPTIONS = (STANDARD, "-O2", "-g1", "-fPIC", "-fno-omit-frame-pointer", "-Wall", "-Wextra")
KERNEL_OPTIONS = (
    *(STANDARD, "-Og", "-g", "-fPIC", "-fno-omit-frame-pointer", "-ffp-contract=off"),
    *("-fno-strict-aliasing", "-w", "-fsanitize=thread"),  # for its hooks: engine/shared.cpp
)


KEEP_SECONDS = 7 * 24 * 3600


@functools.cache
def cache_dir() -> Path:
    """Where compiled libraries are kept for a week: this user's folder in the temporary one."""
    folder = Path(tempfile.gettempdir()) / f"deepep_cupy_sim_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > KEEP_SECONDS:
                path.unlink()
    return folder


def kernel_text(spec: KernelSpec, constants: Mapping[str, int]) -> str:
    """The text that NVRTC compiles, with the host form of the wrappers in place of PTX."""
    return generate(spec, constants, search=(SIM,))


def entry_text(spec: KernelSpec) -> str:
    """A way in for the engine, which does not know the parameter struct."""
    name = spec.struct.name
    return (
        f'\nextern "C" void sim_enter(const void* p) '
        f"{{ {spec.entry}(*static_cast<const {name}*>(p)); }}\n"
    )


def check_syntax(text: str) -> str:
    """What g++ has to say against a flattened kernel text as C++17; empty when it is well."""
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wno-unknown-pragmas"]
    command += ["-Wno-sign-compare", "-x", "c++", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return done.stderr


def build_kernel(text: str) -> Path:
    """Compile a flattened text with its entry to a library that the engine loads."""
    compiled = _build(text.encode(), ["g++", *KERNEL_OPTIONS, "-c"], [], ".o")
    return _build(compiled.name.encode(), ["g++", "-shared"], [str(compiled)], ".so")


def build_engine() -> Path:
    """Compile the engine: one object a file, each under its own digest."""
    headers = b"".join(path.read_bytes() for path in sorted(ENGINE.glob("*.h")))
    sources = sorted(ENGINE.glob("*.cpp"))
    compile_one = ["g++", *ENGINE_OPTIONS, f"-I{SIM}", "-c"]
    with ThreadPoolExecutor(2) as workers:
        objects = workers.map(
            lambda path: _build(headers + path.read_bytes(), compile_one, [str(path)], ".o"),
            sources,
        )
        inputs = [str(path) for path in objects]
    return _build(repr(inputs).encode(), ["g++", "-shared"], inputs, ".so")


def _build(content: bytes, command: list[str], inputs: list[str], suffix: str) -> Path:
    digest = hashlib.sha256(repr(command).encode() + content).hexdigest()[:24]
    result = cache_dir() / f"{digest}{suffix}"
    if result.exists():
        return result
    unfinished = cache_dir() / f"{digest}.{os.getpid()}{suffix}"
    if not inputs:
        source = cache_dir() / f"{digest}.cu"
        source.write_bytes(content)
        inputs = ["-x", "c++", str(source)]
    done = subprocess.run(
        [*command, *inputs, "-o", str(unfinished), "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"g++ failed:\n{done.stderr[:8000]}")
    unfinished.rename(result)
    return result
