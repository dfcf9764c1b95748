"""From a spec and a shape to a compiled kernel, through the cache, once a node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepep_cupy import env
from deepep_cupy.errors import CompileError
from deepep_cupy.jit.cache import KernelCache, Stored
from deepep_cupy.jit.compile import (
    Compiled,
    Resources,
    Target,
    compile_text,
    compiler_version,
    digest_of,
    nvrtc_options,
)
from deepep_cupy.jit.source import generate
from deepep_cupy.jit.spec import KernelSpec

__all__ = ["Built", "Request", "build", "build_all", "open_cache"]


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
        folder: The cache's folder, which holds the ``.cu``, ``.ptx`` and ``.cubin``; None: nothing
            could be written.
        cached: True when nothing was compiled.
    """

    request: Request
    compiled: Compiled
    folder: Path | None
    cached: bool

    @property
    def image(self) -> bytes:
        """What the driver loads: machine code, or PTX where there is none for the target."""
        compiled = self.compiled
        return compiled.cubin if self.request.target.cubin else compiled.ptx.encode()


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
        cache.discard(request.label, digest)
    if env.assert_cached():
        raise CompileError(
            f"kernel {request.label} (digest {digest[:32]}) is not in the cache "
            f"{cache.folder or 'of this process'}, and DEEPEP_CUPY_ASSERT_CACHED is set: construct "
            "the Buffer once without it, or unset it"
        )
    name = request.spec.name
    try:
        compiled = compile_text(
            text, name=name, entry=request.spec.entry, target=request.target, options=options
        )
    except CompileError as error:
        kept = cache.keep_failed(f"{request.label}.cu", text)
        if kept is None:
            raise
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
        requests: Equal on all ranks of the node.
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
