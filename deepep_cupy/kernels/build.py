"""From a spec and a shape to a compiled kernel, through the cache, once a node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepep_cupy import env
from deepep_cupy.errors import CompileError, ContractError
from deepep_cupy.kernels.cache import KernelCache, Stored
from deepep_cupy.kernels.compile import (
    Compiled,
    Resources,
    Target,
    compile_text,
    compiler_version,
    digest_of,
    nvrtc_options,
    parse_arch,
    rawmodule_options,
)
from deepep_cupy.kernels.registry import get_kernel
from deepep_cupy.kernels.source import generate
from deepep_cupy.kernels.spec import KernelSpec
from deepep_cupy.plan.constants import KernelShape, kernel_constants, shared_memory_limit

__all__ = [
    "Built",
    "Request",
    "build",
    "build_all",
    "kernel_options",
    "kernel_ptx",
    "kernel_source",
    "open_cache",
    "shape_constants",
]


@dataclass(frozen=True)
class Request:
    """One kernel to be compiled.

    Attributes:
        spec: The kernel.
        constants: Name -> value, as ``shape_constants`` makes them.
        target: What to compile for.
    """

    spec: KernelSpec
    constants: Mapping[str, int]
    target: Target

    @property
    def label(self) -> str:
        """``barrier.sm_90``: the stem of its file names."""
        return f"{self.spec.name}.{self.target}"


@dataclass(frozen=True)
class Built:
    """A compiled kernel and the file to load it from.

    Attributes:
        request: What was asked for.
        compiled: Text, PTX, machine code, resources.
        folder: The cache's folder, which holds the ``.cu``, ``.ptx`` and ``.cubin``.
        cached: True when nothing was compiled.
    """

    request: Request
    compiled: Compiled
    folder: Path
    cached: bool

    @property
    def path(self) -> Path:
        """The file for ``cupy.RawModule(path=...)``."""
        suffix = "cubin" if self.request.target.cubin else "ptx"
        return self.folder / f"{self.request.spec.name}.{suffix}"


def shape_constants(arch: str | int, **shape: Any) -> dict[str, int]:
    """Return the constants of all kernels for one architecture.

    Args:
        arch: ``"sm_90"`` or ``90``; it decides how much shared memory a block has.
        shape: Fields of ``plan.constants.KernelShape``: ``num_ranks``, ``max_row_bytes``, ….

    Raises:
        ContractError: ``KernelShape`` has no such field.
    """
    known = [field.name for field in dataclasses.fields(KernelShape)]
    unknown = [name for name in shape if name not in known]
    if unknown:
        raise ContractError(
            f"kernel shape: there is no field {unknown[0]!r}; there are {', '.join(known)}"
        )
    shape.setdefault("shared_limit", shared_memory_limit(parse_arch(arch)))
    return dict(kernel_constants(KernelShape(**shape)))


def kernel_source(name: str, arch: str | int = "sm_90", **shape: Any) -> str:
    """Return the CUDA text of a kernel, the very string that is compiled.

    Local; needs neither CuPy nor MPI. ``cupy.RawModule(code=kernel_source(...),
    options=kernel_options(name))`` compiles it on any machine with a GPU.

    Args:
        name: A name from ``list_kernels()``.
        arch: The architecture it is for: some constants depend on it.
        shape: Fields of ``plan.constants.KernelShape``, each with a default.

    Raises:
        ContractError: No such kernel, or a size that is out of range.
    """
    return generate(get_kernel(name), shape_constants(arch, **shape))


def kernel_options(name: str, arch: str | int | None = None) -> tuple[str, ...]:
    """Return the compiler options of a kernel.

    Args:
        name: A name from ``list_kernels()``.
        arch: For these options to NVRTC itself. ``None`` for the options to give to
            ``cupy.RawModule(code=..., options=...)``, which sets the architecture by itself and
            ``-ftz=true`` too: float32 subnormals are then flushed to zero, which ours never are.

    Raises:
        ContractError: There is no such kernel.
    """
    get_kernel(name)
    return rawmodule_options() if arch is None else nvrtc_options(Target(parse_arch(arch)))


def kernel_ptx(name: str, arch: str | int, **shape: Any) -> str:
    """Return the PTX of a kernel; written to a file, ``cupy.RawModule(path=...)`` loads it.

    Local; needs CuPy and NVRTC, but neither a driver nor a GPU.

    Raises:
        ContractError: No such kernel, or a size that is out of range.
        CompileError: It does not compile.
        PlatformError: CuPy or NVRTC is not installed.
    """
    request = Request(get_kernel(name), shape_constants(arch, **shape), Target(parse_arch(arch)))
    return build(request, open_cache()).compiled.ptx


def open_cache() -> KernelCache:
    """Return the cache in the user's folder, ``DEEPEP_CUPY_CACHE_DIR``."""
    return KernelCache(env.cache_dir())


def build(request: Request, cache: KernelCache) -> Built:
    """Return a compiled kernel, from the cache if it is there.

    Args:
        request: What to compile.
        cache: Where it is looked for and kept.

    Raises:
        CompileError: It does not compile, or it is not in the cache and
            ``DEEPEP_CUPY_ASSERT_CACHED`` says that this deployment never compiles.
        PlatformError: CuPy or NVRTC is not installed.
    """
    text = generate(request.spec, request.constants)
    options = nvrtc_options(request.target)
    digest = digest_of(text, options, compiler_version())
    stored = cache.load(request.label, digest)
    if stored is not None:
        compiled = _from_stored(request, text, options, stored)
        if compiled is not None:
            return Built(request, compiled, stored.folder, cached=True)
    if env.assert_cached():
        raise CompileError(
            f"kernel {request.label} (digest {digest[:32]}) is not in the cache "
            f"{cache.folder}, and DEEPEP_CUPY_ASSERT_CACHED is set: construct the Buffer once "
            "without it, or unset it"
        )
    name = request.spec.name
    try:
        compiled = compile_text(
            text, name=name, entry=request.spec.entry, target=request.target, options=options
        )
    except CompileError as error:
        kept = cache.keep_failed(f"{request.label}.cu", text)
        again = f"python -m deepep_cupy kernels compile --file {kept} --arch {request.target}"
        raise CompileError(f"{error}\nto see it again: {again}") from None
    files = {f"{name}.cu": text.encode(), f"{name}.ptx": compiled.ptx.encode()}
    if compiled.cubin:
        files[f"{name}.cubin"] = compiled.cubin
    meta = {"resources": dataclasses.asdict(compiled.resources), "log": compiled.log}
    return Built(request, compiled, cache.store(request.label, digest, files, meta).folder, False)


def build_all(
    requests: Sequence[Request],
    cache: KernelCache,
    *,
    compiles: bool = True,
    barrier: Callable[[], None] | None = None,
) -> list[Built]:
    """Return all of ``requests``; one rank a node compiles, the others load what it wrote.

    Collective over the node where ``barrier`` is given. A rank whose cache is not the compiling
    rank's (another home, nothing writable) compiles for itself after the barrier.

    Args:
        requests: The same on all ranks of the node.
        cache: This rank's.
        compiles: True on the one rank that compiles.
        barrier: Called once, between the compiling rank's work and the others'; called too when
            the compile has failed, so that no rank is left waiting.

    Raises:
        CompileError: As ``build``; a text that does not compile fails on every rank.
    """
    built: list[Built] = []
    try:
        if compiles:
            built = [build(request, cache) for request in requests]
    finally:
        if barrier is not None:
            barrier()
    if not compiles:
        built = [build(request, cache) for request in requests]
    return built


def _from_stored(
    request: Request, text: str, options: tuple[str, ...], stored: Stored
) -> Compiled | None:
    """The compile that an entry holds; ``None`` where it lacks what is needed."""
    name = request.spec.name
    try:
        return Compiled(
            name,
            request.spec.entry,
            request.target,
            options,
            text,
            stored.files[f"{name}.ptx"].decode(),
            stored.files[f"{name}.cubin"] if request.target.cubin else b"",
            Resources(**stored.meta["resources"]),
            str(stored.meta["log"]),
        )
    except (KeyError, TypeError, UnicodeDecodeError):
        return None
