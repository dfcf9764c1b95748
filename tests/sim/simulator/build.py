"""Compile kernel text and the engine with g++, once each: results are kept under their digest."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from deepep_cupy.jit.source import generate
from deepep_cupy.jit.spec import KernelSpec

SIM = Path(__file__).resolve().parent.parent
ENGINE = SIM / "engine"
STANDARD = "-std=c++20"
ENGINE_OPTIONS = (STANDARD, "-O2", "-g1", "-fPIC", "-fno-omit-frame-pointer", "-Wall", "-Wextra")
KERNEL_OPTIONS = (
    *(STANDARD, "-Og", "-g1", "-fPIC", "-fno-omit-frame-pointer", "-ffp-contract=off"),
    *("-fno-strict-aliasing", "-w", "-fsanitize=thread"),  # for its hooks: engine/shared.cpp
)
PTX_OPTIONS = (STANDARD, "-O0", "-g1", "-fPIC", "-fno-omit-frame-pointer", "-w")

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


def build_ptx(text: str) -> Path:
    """Compile a translated PTX module; all that it shares with others goes through the engine."""
    return _build(text.encode(), ["g++", *PTX_OPTIONS, f"-I{SIM}", "-shared"], [], ".so")


def build_engine() -> Path:
    """Compile the engine, all files as one text: reading the library's headers takes longest."""
    headers = b"".join(path.read_bytes() for path in sorted(ENGINE.glob("*.h")))
    parts = [f"// headers {hashlib.sha256(headers).hexdigest()}\n".encode()]
    for path in sorted(ENGINE.glob("*.cpp")):
        parts += [f'#line 1 "{path}"\n'.encode(), path.read_bytes()]
    compile_all = ["g++", *ENGINE_OPTIONS, f"-I{SIM}", "-shared"]
    return _build(b"".join(parts), compile_all, [], ".so")


def _build(content: bytes, command: list[str], inputs: list[str], suffix: str) -> Path:
    digest = hashlib.sha256(repr(command).encode() + content).hexdigest()[:24]
    result = cache_dir() / f"{digest}{suffix}"
    with (cache_dir() / f"{digest}.lock").open("w") as lock:  # other tests may want it, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            _compile(content, command, inputs, result)
    return result


def _compile(content: bytes, command: list[str], inputs: list[str], result: Path) -> None:
    unfinished = result.with_suffix(f".{os.getpid()}{result.suffix}")
    if not inputs:
        source = result.with_suffix(".cu")
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
