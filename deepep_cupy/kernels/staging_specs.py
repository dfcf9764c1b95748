"""Kernels that put one rank's arrays where they are wanted; they talk to nobody."""

from __future__ import annotations

from deepep_cupy.kernels.spec import KernelSpec, Param, Struct

__all__ = ["STAGING_KERNELS"]

STAGE = Struct(
    "StageCommon",
    (
        Param("x", "const u8*", doc="[N] rows of row_bytes each"),
        Param("out", "u8*", doc="[N] rows, written where they are not this rank's own"),
        Param("rows_per_rank", "const u32*", doc="[R] rows received from each rank"),
        Param("rank", "u32", doc="whose rows are left out; R: nobody's"),
        Param("row_bytes", "u32"),
        Param("access_bytes", "u32", doc="16, 4 or 1: what rows and bases are multiples of"),
    ),
    "Rows into the pool.",
)

COLUMNS = Struct(
    "ColumnsCommon",
    (
        Param("scales", "const u32*", doc="[N, S] row by row"),
        Param("out", "u32*", doc="[N, S] column by column, written"),
        Param("real_rows", "const u32*", doc="rows that have content, or null: N"),
        Param("num_rows", "u32", doc="N"),
        Param("num_scales", "u32", doc="S"),
    ),
    "Another order of scales.",
)

STAGING_KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="stage",
        source="stage.cu",
        entry="stage",
        params=(Param("d", STAGE),),
        doc="rows to where the peers can read them, where no host knows how many",
    ),
    KernelSpec(
        name="columns",
        source="columns.cu",
        entry="columns",
        params=(Param("d", COLUMNS),),
        doc="received scales to column-major order",
    ),
)
