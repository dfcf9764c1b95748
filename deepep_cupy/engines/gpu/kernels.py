"""All kernels of this package, by name; the structs they take stand beside what fills them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from deepep_cupy.engines.gpu.combine import COMBINE, COMBINE_EXPANDED, REDUCE, STAGE
from deepep_cupy.engines.gpu.dispatch import COLUMNS, DISPATCH, DISPATCH_CAST
from deepep_cupy.engines.gpu.expand import COPY, EXPAND
from deepep_cupy.engines.gpu.launch import COMM
from deepep_cupy.engines.gpu.layout import LAYOUT
from deepep_cupy.engines.gpu.quantize import QUANTIZE
from deepep_cupy.errors import ContractError
from deepep_cupy.jit.build import Request, build, open_cache
from deepep_cupy.jit.compile import nvrtc_options, parse_arch, parse_target, rawmodule_options
from deepep_cupy.jit.source import generate, include_options
from deepep_cupy.jit.spec import KernelSpec, Param, Struct
from deepep_cupy.protocol.constants import KernelShape, kernel_constants, shared_memory_limit
from deepep_cupy.protocol.nodes import MAX_RANKS_PER_NODE
from deepep_cupy.protocol.sizes import MAX_ROW_BYTES

__all__ = [
    "KERNELS",
    "get_kernel",
    "kernel_options",
    "kernel_ptx",
    "kernel_source",
    "list_kernels",
    "shape_constants",
]

KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="barrier",
        source="barrier/barrier.cu",
        entry="barrier",
        params=(Param("comm", COMM),),
        doc="no rank leaves before all have come; also how a rank refuses a call",
        shared_bytes="kBarrierSharedBytes",
    ),
    KernelSpec(
        name="dispatch",
        source="dispatch/ldst.cu",
        entry="dispatch",
        params=(Param("comm", COMM), Param("d", DISPATCH)),
        doc="rows to the ranks of their experts, by loads and stores",
        shared_bytes="kDispatchSharedBytes",
    ),
    KernelSpec(
        name="dispatch_bulk",
        source="dispatch/bulk.cu",
        entry="dispatch_bulk",
        params=(Param("comm", COMM), Param("d", DISPATCH)),
        doc="rows to the ranks of their experts, by the bulk copy engine",
        shared_bytes="kDispatchBulkSharedBytes",
        min_arch=90,
    ),
    KernelSpec(
        name="dispatch_cast_bulk",
        source="dispatch/cast_bulk.cu",
        entry="dispatch_cast_bulk",
        params=(Param("comm", COMM), Param("d", DISPATCH_CAST)),
        doc="the same, cast to FP8 on their way",
        shared_bytes="kDispatchCastBulkSharedBytes",
        min_arch=90,
    ),
    KernelSpec(
        name="combine",
        source="combine/ldst.cu",
        entry="combine",
        params=(Param("comm", COMM), Param("d", COMBINE)),
        doc="rows back to their tokens, added up, by loads",
        shared_bytes="kCombineSharedBytes",
    ),
    KernelSpec(
        name="combine_bulk",
        source="combine/bulk.cu",
        entry="combine_bulk",
        params=(Param("comm", COMM), Param("d", COMBINE)),
        doc="rows back to their tokens, added up, by the bulk copy engine",
        shared_bytes="kCombineBulkSharedBytes",
        min_arch=90,
    ),
    KernelSpec(
        name="combine_expanded",
        source="combine/expanded.cu",
        entry="combine_expanded",
        params=(Param("comm", COMM), Param("d", COMBINE_EXPANDED)),
        doc="all copies of the expanded layout back to their tokens, added up, by loads",
        shared_bytes="kCombineSharedBytes",
    ),
    KernelSpec(
        name="quantize",
        source="quantize/quantize.cu",
        entry="quantize",
        params=(Param("d", QUANTIZE),),
        doc="rows to FP8 with scales, before they travel",
    ),
    KernelSpec(
        name="expand_count",
        source="expand/count.cu",
        entry="expand_count",
        params=(Param("d", EXPAND),),
        doc="expanded layout, 1: tokens per slice and local expert",
    ),
    KernelSpec(
        name="expand_starts",
        source="expand/starts.cu",
        entry="expand_starts",
        params=(Param("d", EXPAND),),
        doc="expanded layout, 2: tokens of an expert before each slice",
        shared_bytes="kExpandSharedBytes",
    ),
    KernelSpec(
        name="expand_rows",
        source="expand/rows.cu",
        entry="expand_rows",
        params=(Param("d", EXPAND),),
        doc="expanded layout, 3: the row of each copy",
    ),
    KernelSpec(
        name="expand_copy",
        source="expand/copy.cu",
        entry="expand_copy",
        params=(Param("d", COPY),),
        doc="expanded layout, 4: rows, weights and scales to their copies",
    ),
    KernelSpec(
        name="reduce_copies",
        source="combine/reduce_copies.cu",
        entry="reduce_copies",
        params=(Param("d", REDUCE),),
        doc="adds up the copies that each received token has in the expanded layout",
    ),
    KernelSpec(
        name="stage",
        source="combine/stage.cu",
        entry="stage",
        params=(Param("d", STAGE),),
        doc="rows to where the peers can read them, where no host knows how many",
    ),
    KernelSpec(
        name="columns",
        source="dispatch/columns.cu",
        entry="columns",
        params=(Param("d", COLUMNS),),
        doc="received scales to column-major order",
    ),
    KernelSpec(
        name="layout",
        source="dispatch/layout.cu",
        entry="layout",
        params=(Param("d", LAYOUT),),
        doc="how many tokens go to each rank and expert, and which; before a dispatch",
    ),
)
"""What a Buffer builds and launches, in the order ``kernels list`` prints them."""

CEILING = Struct(
    "CeilingCopy",
    (
        Param("source", "const u8*", "kNumRanks", "where each segment's rows lie"),
        Param("target", "u8*", "kNumRanks", "where they go"),
        Param("rows", "u32", "kNumRanks", "rows of each segment"),
        Param("num_rows", "u32", doc="of all segments together"),
        Param("stride", "u32", doc="from one row to the next, has no factor in common with them"),
        Param("row_bytes", "u32", doc="a multiple of 16, as all addresses are"),
    ),
    "Segments of rows, one for each rank, and the order of their rows.",
)
"""Of the kernels that ``bench`` measures links and memory with; ``bench/ceilings.py`` fills it."""

_BENCH_KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="ceiling",
        source="bench/ceiling.cu",
        entry="ceiling",
        params=(Param("d", CEILING),),
        doc="bench: rows between ranks with nothing around them, by loads and stores",
    ),
    KernelSpec(
        name="ceiling_bulk",
        source="bench/ceiling_bulk.cu",
        entry="ceiling_bulk",
        params=(Param("d", CEILING),),
        doc="bench: rows between ranks with nothing around them, by the bulk copy engine",
        shared_bytes="kDispatchBulkSharedBytes",
        min_arch=90,
    ),
)
"""Behind those of a Buffer; no Buffer builds or launches them."""


def list_kernels() -> tuple[KernelSpec, ...]:
    """Return the specs of all kernels, those of ``bench`` too. Local; needs no CuPy, no MPI."""
    return (*KERNELS, *_BENCH_KERNELS)


def get_kernel(name: str, kernels: Iterable[KernelSpec] | None = None) -> KernelSpec:
    """Return the spec of one kernel.

    Raises:
        ContractError: There is no such kernel; the message lists those there are.
    """
    known = list_kernels() if kernels is None else tuple(kernels)
    for spec in known:
        if spec.name == name:
            return spec
    names = ", ".join(spec.name for spec in known) or "none"
    raise ContractError(f"no kernel is named {name!r}; there are: {names}")


def shape_constants(arch: str | int, **shape: Any) -> dict[str, int]:
    """Return the constants of all kernels for one architecture.

    Args:
        arch: ``"sm_90"`` or ``90``; it decides how much shared memory a block has.
        shape: Fields of ``protocol.constants.KernelShape``: ``num_ranks``, ``max_row_bytes``, ….

    Raises:
        ContractError: ``KernelShape`` has no such field, or its value is out of range.
    """
    known = [field.name for field in dataclasses.fields(KernelShape)]
    unknown = [name for name in shape if name not in known]
    if unknown:
        raise ContractError(
            f"kernel shape: there is no field {unknown[0]!r}; there are {', '.join(known)}"
        )
    for name, value in shape.items():
        wanted = _complaint(name, value)
        if wanted:
            raise ContractError(f"kernel shape: {name} must be {wanted}, got {value!r}")
    shape.setdefault("shared_limit", shared_memory_limit(parse_arch(arch)))
    return dict(kernel_constants(KernelShape(**shape)))


def _complaint(name: str, value: object) -> str:
    """What a field of ``KernelShape`` must be, where it is not; else an empty text."""
    if name == "loads":
        return "" if value in ("coherent", "nc") else "'coherent' or 'nc'"
    high = {"num_ranks": MAX_RANKS_PER_NODE, "num_threads": 1024}.get(name, MAX_ROW_BYTES)
    step = 32 if name == "num_threads" else 1
    number = value if isinstance(value, int) and not isinstance(value, bool) else 0
    if step <= number <= high and number % step == 0:
        return ""
    return f"{'a multiple of 32' if step > 1 else 'a whole number'} from {step} to {high}"


def kernel_source(name: str, arch: str | int = "sm_90", **shape: Any) -> str:
    """Return the CUDA text of a kernel, the very string that is compiled.

    Local; needs neither CuPy nor MPI. ``cupy.RawModule(code=kernel_source(...),
    options=kernel_options(name))`` compiles it on any machine with a GPU.

    Args:
        name: A name from ``list_kernels()``.
        arch: The architecture it is for: some constants depend on it.
        shape: Fields of ``protocol.constants.KernelShape``, each with a default.

    Raises:
        ContractError: No such kernel, or a size that is out of range.
    """
    return generate(get_kernel(name), shape_constants(arch, **shape))


def kernel_options(name: str | None = None, arch: str | int | None = None) -> tuple[str, ...]:
    """Return the compiler options of a kernel, of this package or of your own.

    Args:
        name: A name from ``list_kernels()``. ``None`` for a kernel of your own that includes this
            package's building blocks (``#include "asm/memory.cuh"``): the options then name the
            folder of include files too, and a digest of them, so that a compiler's cache
            notices when they change.
        arch: For these options to NVRTC itself. ``None`` for the options to give to
            ``cupy.RawModule(code=..., options=...)``, which sets the architecture by itself and
            ``-ftz=true`` too: float32 subnormals are then flushed to zero, which ours never are.

    Raises:
        ContractError: There is no such kernel.
    """
    options = rawmodule_options() if arch is None else nvrtc_options(parse_target(arch))
    if name is None:
        return (*options, *include_options())
    get_kernel(name)
    return options


def kernel_ptx(name: str, arch: str | int, **shape: Any) -> str:
    """Return the PTX of a kernel; written to a file, ``cupy.RawModule(path=...)`` loads it.

    Local; needs CuPy and NVRTC, but neither a driver nor a GPU.

    Raises:
        ContractError: No such kernel, or a size that is out of range.
        CompileError: It does not compile.
        PlatformError: CuPy or NVRTC is not installed.
    """
    request = Request(get_kernel(name), shape_constants(arch, **shape), parse_target(arch))
    return build(request, open_cache()).compiled.ptx
