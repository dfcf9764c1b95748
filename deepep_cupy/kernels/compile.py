"""Text to PTX and cubin with NVRTC, in one compile and without a driver.

CuPy's own ``RawModule(code=...)`` appends ``-ftz=true``, keeps no PTX and needs a GPU; so NVRTC is
driven here, through ``cupy.cuda.nvrtc``, and the cubin is loaded from a file of the cache.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepep_cupy.errors import CompileError, PlatformError
from deepep_cupy.kernels.source import locate

__all__ = [
    "Compiled",
    "Resources",
    "Target",
    "compile_text",
    "compiler_archs",
    "compiler_version",
    "digest_of",
    "nvrtc_options",
    "parse_arch",
    "target_for",
]

_COMMON_OPTIONS = ("-std=c++17", "-fmad=false")
_OWN_OPTIONS = ("-ftz=false", "-lineinfo", "--ptxas-options=-v")
_SCHEMA = "1"
"""Changes with anything that makes older cache entries wrong."""
_WINDOW = 4
"""Lines shown before and after the one an error was reported for."""


@dataclass(frozen=True)
class Target:
    """What the compiler is asked for.

    Attributes:
        arch: Compute capability as one number, 90 for sm_90.
        cubin: True for machine code of that architecture, False for PTX alone, which the driver
            of a GPU newer than the compiler translates.
    """

    arch: int
    cubin: bool = True

    @property
    def option(self) -> str:
        """The ``-arch`` option."""
        return f"-arch={self}"

    def __str__(self) -> str:
        return f"{'sm' if self.cubin else 'compute'}_{self.arch}"


@dataclass(frozen=True)
class Resources:
    """What one kernel takes, as ptxas reported it; ``-1`` for a number it did not print.

    Attributes:
        registers: Per thread.
        shared_bytes: Static shared memory a block.
        stack_bytes: Local memory frame a thread.
        spill_bytes: Bytes stored to and loaded from local memory because registers ran out.
    """

    registers: int = -1
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled.

    Attributes:
        name: Of the kernel, for messages and file names.
        entry: The function in it.
        target: What it was compiled for.
        options: What the compiler was given.
        text: The source.
        ptx: The PTX made of it.
        cubin: Machine code; empty where ``target.cubin`` is False.
        resources: Registers, shared memory, spills.
        log: What the compiler said.
    """

    name: str
    entry: str
    target: Target
    options: tuple[str, ...]
    text: str
    ptx: str
    cubin: bytes
    resources: Resources
    log: str


def parse_arch(arch: str | int) -> int:
    """Return 90 for ``"sm_90"``, ``"90"`` or ``90``.

    Raises:
        CompileError: It is none of these forms.
    """
    match = re.fullmatch(r"(?:sm_|compute_)?(\d{2,3})", str(arch))
    if match is None:
        raise CompileError(f"arch must look like 'sm_90', got {arch!r}")
    return int(match[1])


def nvrtc_options(target: Target) -> tuple[str, ...]:
    """Return the options every kernel is compiled with."""
    return (target.option, *_COMMON_OPTIONS, *_OWN_OPTIONS)


def rawmodule_options() -> tuple[str, ...]:
    """Return the options for plain ``cupy.RawModule(code=...)``, which adds its own arch and ftz."""
    return _COMMON_OPTIONS


def compiler_version() -> str:
    """Return the version of NVRTC, e.g. ``"13.5"``.

    Raises:
        PlatformError: CuPy or NVRTC is not installed.
    """
    major, minor = _nvrtc().getVersion()
    return f"{major}.{minor}"


def compiler_archs() -> tuple[int, ...]:
    """Return the architectures this NVRTC knows, ascending."""
    return tuple(sorted(int(arch) for arch in _nvrtc().getSupportedArchs()))


def target_for(device_arch: int, known: Sequence[int]) -> Target:
    """Return what to compile for a device of compute capability ``device_arch``.

    Machine code runs on later minor versions of the same major one; for a major version that the
    compiler does not know there is only PTX.
    """
    older = [arch for arch in known if arch <= device_arch]
    if not older:
        raise PlatformError(
            f"NVRTC {compiler_version()} cannot compile for sm_{device_arch}; the oldest it knows "
            f"is sm_{min(known)}: use a GPU of sm_80 or newer"
        )
    return Target(older[-1], cubin=older[-1] // 10 == device_arch // 10)


def digest_of(text: str, options: Sequence[str], version: str) -> str:
    """Return the key under which a compile is kept: everything its result depends on."""
    parts = (_SCHEMA, version, *options, text)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compile_text(
    text: str,
    *,
    name: str,
    entry: str,
    target: Target,
    options: Sequence[str] | None = None,
    reproduce: str = "",
) -> Compiled:
    """Compile one text; no cache, no driver, no GPU.

    Args:
        text: The whole source, with no include left in it.
        name: For messages.
        entry: The ``extern "C"`` kernel whose resources are wanted.
        target: Architecture, and whether machine code is wanted.
        options: In place of ``nvrtc_options(target)``.
        reproduce: A command that repeats this compile, for the error's last line.

    Raises:
        CompileError: With kernel, options, the compiler's words, and the numbered source round the
            first line it complained about.
        PlatformError: CuPy or NVRTC is not installed.
    """
    given = nvrtc_options(target) if options is None else tuple(options)
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, given)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program) or str(error)
            raise CompileError(_complaint(name, given, text, log, reproduce)) from None
        log = nvrtc.getProgramLog(program)
        ptx = _text(nvrtc.getPTX(program))
        cubin = bytes(nvrtc.getCUBIN(program)) if target.cubin else b""
    finally:
        nvrtc.destroyProgram(program)
    return Compiled(
        name, entry, target, given, text, ptx, cubin, parse_resources(log, entry), log
    )


def parse_resources(log: str, entry: str) -> Resources:
    """Read ptxas's ``-v`` lines about one kernel; all kernels' lines where it names none."""
    section = log
    start = re.search(rf"Compiling entry function '{re.escape(entry)}'", log)
    if start:
        rest = log[start.end() :]
        following = re.search(r"Compiling entry function", rest)
        section = rest[: following.start()] if following else rest

    def number(pattern: str, default: int) -> int:
        found = re.search(pattern, section)
        return int(found[1]) if found else default

    return Resources(
        registers=number(r"Used (\d+) registers", -1),
        shared_bytes=number(r"(\d+) bytes smem", 0),
        stack_bytes=number(r"(\d+) bytes stack frame", 0),
        spill_bytes=number(r"(\d+) bytes spill stores", 0)
        + number(r"(\d+) bytes spill loads", 0),
    )


def _complaint(name: str, options: Sequence[str], text: str, log: str, reproduce: str) -> str:
    parts = [f"kernel {name} does not compile with options {' '.join(options)}:", log.strip()]
    found = re.search(r"^(.+?)\((\d+)\): (?:catastrophic )?error", log, re.MULTILINE)
    if found:
        where = f"{found[1]}:{found[2]}"
        at = locate(text, found[1], int(found[2])) or (
            int(found[2]) if found[1] == f"{name}.cu" else None
        )
        if at is not None:
            parts += [f"source round {where}:", _window(text, at, int(found[2]))]
    if reproduce:
        parts.append(f"to see it again: {reproduce}")
    return "\n".join(parts)


def _window(text: str, at: int, shown: int) -> str:
    """Lines round line ``at`` of ``text``, numbered as in the file where it is line ``shown``."""
    lines = text.splitlines()
    first, last = at, at
    while first > 1 and at - first < _WINDOW and not lines[first - 2].startswith("#line"):
        first -= 1
    while last < len(lines) and last - at < _WINDOW and not lines[last].startswith("#line"):
        last += 1
    return "\n".join(
        f"{'>' if index == at else ' '} {shown + index - at:5d} | {lines[index - 1]}"
        for index in range(first, last + 1)
    )


def _text(product: str | bytes) -> str:
    """PTX as text; NVRTC ends it with a zero byte."""
    text = product.decode() if isinstance(product, bytes) else product
    return text.rstrip("\0")


def _nvrtc() -> Any:
    try:
        from cupy.cuda import nvrtc  # noqa: PLC0415 - only compiling needs it

        nvrtc.getVersion()
    except ImportError as error:
        raise PlatformError(
            f"compiling a kernel needs CuPy with NVRTC, which cannot be imported ({error}); "
            "install deepep_cupy[cuda13] or deepep_cupy[cuda12]"
        ) from error
    except Exception as error:
        raise PlatformError(
            f"compiling a kernel needs NVRTC, which CuPy could not load ({error}); install "
            "nvidia-cuda-nvrtc of the same CUDA major version as CuPy"
        ) from error
    return nvrtc
