"""Text to PTX and cubin with NVRTC, in one compile and without a driver.

CuPy's own ``RawModule(code=...)`` appends ``-ftz=true``, keeps no PTX and needs a GPU; so NVRTC is
driven here, through ``cupy.cuda.nvrtc``, and the driver is given the cubin itself.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepep_cupy.errors import CompileError, PlatformError
from deepep_cupy.jit.source import locate

__all__ = [
    "Compiled",
    "Resources",
    "Target",
    "compile_text",
    "compiler_archs",
    "compiler_version",
    "digest_of",
    "load",
    "nvrtc_options",
    "parse_arch",
    "parse_resources",
    "parse_target",
    "rawmodule_options",
    "target_for",
]

_COMMON_OPTIONS = ("-std=c++17", "-fmad=false")
_OWN_OPTIONS = ("-ftz=false", "-lineinfo", "--ptxas-options=-v")
_OLDEST = 80
"""Compute capability that every kernel here needs at least."""
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
        suffix: ``"a"`` or ``"f"`` for the features of this architecture or of its family alone.
    """

    arch: int
    cubin: bool = True
    suffix: str = ""

    @property
    def option(self) -> str:
        """The ``-arch`` option."""
        return f"-arch={self}"

    def __str__(self) -> str:
        return f"{'sm' if self.cubin else 'compute'}_{self.arch}{self.suffix}"


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
        log: What the compiler printed.
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
    """Return 90 for ``"sm_90"``, ``"sm_90a"``, ``"90"`` or ``90``.

    Raises:
        CompileError: As ``parse_target``.
    """
    return parse_target(arch).arch


def parse_target(arch: str | int) -> Target:
    """Return machine code for ``"sm_90"``, ``"sm_90a"``, ``"90"`` or ``90`` as a target.

    Raises:
        CompileError: It is none of these forms, or older than any kernel here runs on.
    """
    match = re.fullmatch(r"(?:sm_|compute_)?(\d{2,3})([af]?)", str(arch))
    if match is None:
        raise CompileError(f"arch must look like 'sm_90' or 'sm_90a', got {arch!r}")
    if int(match[1]) < _OLDEST:
        raise CompileError(f"arch must be sm_{_OLDEST} or newer, got {arch!r}")
    return Target(int(match[1]), suffix=match[2])


def nvrtc_options(target: Target) -> tuple[str, ...]:
    """Return the options every kernel is compiled with."""
    return (target.option, *_COMMON_OPTIONS, *_OWN_OPTIONS)


def rawmodule_options() -> tuple[str, ...]:
    """Return the options for plain ``cupy.RawModule(code=...)``; it adds its own arch and ftz."""
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
) -> Compiled:
    """Compile one text; no cache, no driver, no GPU.

    Args:
        text: The whole source, with no include left in it.
        name: For messages.
        entry: The ``extern "C"`` kernel whose resources are wanted.
        target: Architecture, and whether machine code is wanted.
        options: In place of ``nvrtc_options(target)``.

    Raises:
        CompileError: With kernel, options, the compiler's words, and the numbered source round the
            first line it complained about.
        PlatformError: CuPy or NVRTC is not installed, or NVRTC does not know the target.
    """
    given = nvrtc_options(target) if options is None else tuple(options)
    try:
        log, ptx, cubin = _run_nvrtc(text, name, given, target.cubin)
    except _NvrtcError as failure:
        log = str(failure)
        if "--gpu-architecture" in log:
            known = ", ".join(f"sm_{arch}" for arch in compiler_archs())
            raise PlatformError(
                f"NVRTC {compiler_version()} does not know {target}; it knows {known}"
            ) from None
        window = _source_window(log, text, name) or _ptx_window(log, text, name, given)
        parts = [f"kernel {name} does not compile with options {' '.join(given)}:", log.strip()]
        raise CompileError("\n".join([*parts, *window])) from None
    return Compiled(name, entry, target, given, text, ptx, cubin, parse_resources(log, entry), log)


@dataclass(frozen=True)
class Loaded:
    """A function of a module that the driver has loaded on the current device.

    Attributes:
        entry: Its name.
        function: The ``CUfunction``, as an integer.
        keep: The objects that keep the module loaded.
    """

    entry: str
    function: int
    keep: tuple[Any, ...]


def load(image: bytes, entry: str, name: str) -> Loaded:
    """Load machine code or PTX on the current device and find a kernel in it.

    Args:
        image: Content of a cubin, or PTX.
        entry: The kernel.
        name: Of the module, for messages.

    Raises:
        CompileError: The driver does not take it, or there is no such kernel in it.
        PlatformError: CuPy is not installed.
    """
    try:
        from cupy.cuda.function import Module
    except ImportError as error:
        raise PlatformError(
            f"loading {name} needs CuPy ({error}); install deepep_cupy[cuda13] or [cuda12]"
        ) from error
    try:
        module = Module()
        module.load(image)
        kernel = module.get_function(entry)
        return Loaded(entry, int(kernel.ptr), (module, kernel))
    except Exception as error:
        raise CompileError(
            f"the driver does not load kernel {entry} of {name}: {error}; if it is PTX that is "
            "newer than the driver, update the driver or install an NVRTC of the driver's version"
        ) from error


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
        spill_bytes=number(r"(\d+) bytes spill stores", 0) + number(r"(\d+) bytes spill loads", 0),
    )


class _NvrtcError(Exception):
    """NVRTC refused a text; the message is its log."""


def _run_nvrtc(text: str, name: str, options: Sequence[str], cubin: bool) -> tuple[str, str, bytes]:
    """The log, the PTX and the machine code."""
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, tuple(options))
        except nvrtc.NVRTCError as error:
            raise _NvrtcError(_text(nvrtc.getProgramLog(program)) or str(error)) from None
        code = _whole(bytes(nvrtc.getCUBIN(program))) if cubin else b""
        return _text(nvrtc.getProgramLog(program)), _portable(_text(nvrtc.getPTX(program))), code
    finally:
        nvrtc.destroyProgram(program)


def _source_window(log: str, text: str, name: str) -> list[str]:
    """The source round the first line that the compiler proper reported, if there is one."""
    found = re.search(r"^(.+?)\((\d+)\): (?:catastrophic )?error", log, re.MULTILINE)
    if found is None:
        return []
    file, line = found[1], int(found[2])
    at = line if file == f"{name}.cu" else locate(text, file, line)
    return [] if at is None else [f"source round {file}:{line}:", _window(text, at, line)]


def _ptx_window(log: str, text: str, name: str, options: Sequence[str]) -> list[str]:
    """The PTX round the first line that the assembler reported: inline ``asm`` gone wrong."""
    found = re.search(r"ptx input, line (\d+); error", log)
    if found is None:
        return []
    only_ptx = [option.replace("-arch=sm_", "-arch=compute_") for option in options]
    try:
        _, ptx, _ = _run_nvrtc(text, name, only_ptx, cubin=False)
    except _NvrtcError:
        return []
    line = int(found[1])
    return [f"PTX round line {line}:", _window(ptx, line, line)]


def _window(text: str, at: int, shown: int) -> str:
    """Lines round line ``at`` of ``text``, numbered as in the file where it is line ``shown``."""
    lines = text.splitlines()
    first = last = at = min(at, len(lines))
    while first > 1 and at - first < _WINDOW and not lines[first - 2].startswith("#line"):
        first -= 1
    while last < len(lines) and last - at < _WINDOW and not lines[last].startswith("#line"):
        last += 1
    return "\n".join(
        f"{'>' if index == at else ' '} {shown + index - at:5d} | {lines[index - 1]}"
        for index in range(first, last + 1)
    )


def _text(product: str | bytes) -> str:
    """PTX or a log as text; NVRTC ends both with a zero byte."""
    text = product.decode() if isinstance(product, bytes) else product
    return text.rstrip("\0")


def _whole(cubin: bytes) -> bytes:
    """The cubin with its last byte, which CuPy's ``getCUBIN`` takes for the end of a string.

    The file ends with a table of program headers, whose last byte is the top of an alignment: 0.
    Drivers do not miss it, ``nvdisasm`` does.
    """
    table, entry_size, entries = struct.unpack_from("<32xQ14xHH", cubin)
    return cubin + b"\0" if table + entry_size * entries == len(cubin) + 1 else cubin


def _portable(ptx: str) -> str:
    """PTX whose ``.file`` lines do not name the folder that this process happens to run in."""
    here = re.escape(Path.cwd().as_posix().rstrip("/"))
    return re.sub(rf'^(\s*\.file\s+\d+\s+"){here}/', r"\1", ptx, flags=re.MULTILINE)


def _nvrtc() -> Any:
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except ImportError as error:
        raise PlatformError(
            f"compiling a kernel needs CuPy with NVRTC, which cannot be imported ({error}); "
            "install deepep_cupy[cuda13] or deepep_cupy[cuda12]"
        ) from error
    except OSError as error:  # CuPy makes folders when it is imported
        raise PlatformError(
            f"compiling a kernel needs CuPy, which cannot be imported ({error}); if that is about "
            "a folder that cannot be written, set CUPY_CACHE_DIR (and TMPDIR) to one that can"
        ) from error
    except Exception as error:
        raise PlatformError(
            f"compiling a kernel needs NVRTC, which CuPy could not load ({error}); install "
            "nvidia-cuda-nvrtc of the same CUDA major version as CuPy"
        ) from error
    return nvrtc
