"""Kernels of ``bench``: copies with nothing around them. No Buffer builds or launches them."""

from __future__ import annotations

from deepep_cupy.kernels.spec import KernelSpec, Param, Struct

__all__ = ["BENCH_KERNELS"]

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

BENCH_KERNELS: tuple[KernelSpec, ...] = (
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
"""In the order ``kernels list`` prints them, behind those of a Buffer."""
