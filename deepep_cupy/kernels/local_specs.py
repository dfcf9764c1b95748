"""Kernels that work on this rank's memory alone, around the operations that move rows.

Their blocks wait for nobody: they take no ``comm`` and may be of any number.
"""

from __future__ import annotations

from deepep_cupy.kernels.spec import KernelSpec, Param, Struct

__all__ = ["CAST", "LOCAL_KERNELS"]

CAST = Struct(
    "Cast",
    (
        Param("dtype", "u32", doc="kDtypeBfloat16, kDtypeFloat16 or kDtypeFloat32"),
        Param("round_scale", "u32", doc="1: scales are powers of two"),
        Param("packed", "u32", doc="1: scales are exponents; with round_scale"),
    ),
    "From what rows are cast to FP8, and how.",
)

QUANTIZE = Struct(
    "QuantizeCommon",
    (
        Param("x", "const u8*", doc="[T, H] elements"),
        Param("codes", "u8*", doc="[T] rows of H codes, written"),
        Param("scales", "u32*", doc="[T] rows of scales: float32 bits, or four exponents a word"),
        Param("num_tokens", "u32", doc="T"),
        Param("hidden", "u32", doc="H"),
        Param("code_stride", "u32", doc="bytes from one row of codes to the next"),
        Param("scale_stride", "u32", doc="words from one row of scales to the next"),
        Param("access_bytes", "u32", doc="16: rows and bases of x are multiples of it, those of "
              "codes of 8; else the element size"),
        Param("cast", CAST),
    ),
    "A cast to FP8.",
)  # fmt: skip

EXPAND = Struct(
    "ExpandCommon",
    (
        Param("topk_idx", "const u8*", doc="[N, K] of index_bytes each: local experts, or -1"),
        Param("num_received", "const u32*", doc="tokens really received, or null: N"),
        Param("birth", "const u32*", doc="0 there: the dispatch was refused or failed"),
        Param("expert_counts", "const u32*", doc="[El] tokens that chose each local expert"),
        Param("psum_expert_rows", "const u32*", doc="[El] the expert's first row plus its count"),
        Param("expanded_row", "u32*", doc="[N, K] written: row of each copy, or -1"),
        Param("table", "u32*", doc="[slices, El] scratch"),
        Param("num_tokens", "u32", doc="N, rows of the arrays"),
        Param("num_topk", "u32", doc="K, at least 1"),
        Param("index_bytes", "u32", doc="4 or 8"),
        Param("num_local_experts", "u32", doc="El"),
        Param("num_slices", "u32", doc="parts that the received tokens are dealt out in"),
    ),
    "Rows of the expanded layout: which copy lies where.",
)

COPY = Struct(
    "ExpandCopyCommon",
    (
        Param("rows", "const u8*", doc="[N] of row_bytes each"),
        Param("weights", "const u32*", doc="[N, K] float32 bits, or null"),
        Param("scales", "const u32*", doc="[N, S], with num_scales"),
        Param("expanded_row", "const u32*", doc="[N, K]"),
        Param("expert_counts", "const u32*", doc="[El]"),
        Param("psum_expert_rows", "const u32*", doc="[El] first row plus count"),
        Param("birth", "const u32*", doc="0 there: the dispatch was refused or failed"),
        Param("out", "u8*", doc="[rows] of row_bytes each, written"),
        Param("out_weights", "u32*", doc="[rows] written, with weights"),
        Param("out_scales", "u32*", doc="[rows, S] written, with scales"),
        Param("num_rows", "u64", doc="rows of out"),
        Param("num_tokens", "u32", doc="N"),
        Param("num_topk", "u32", doc="K, at least 1"),
        Param("row_bytes", "u32"),
        Param("access_bytes", "u32", doc="16, 4 or 1: what rows and bases are multiples of"),
        Param("num_scales", "u32", doc="S, 0 without scales"),
        Param("num_local_experts", "u32", doc="El"),
        Param("alignment", "u32", doc="an expert's first row is a multiple of it"),
        Param("zero_padding", "u32", doc="1: rows that fill up an expert's are zeroed"),
        Param("dtype", "u32", doc="of the rows and scales, as headers say it; for poison"),
    ),
    "Received rows to their copies.",
)

REDUCE = Struct(
    "ReduceCommon",
    (
        Param("x", "const u8*", doc="[rows] of the expanded layout"),
        Param("out", "u8*", doc="[N] rows, written where a token has copies"),
        Param("expanded_row", "const u32*", doc="[N, K]"),
        Param("row_weights", "const u32*", doc="[rows] float32 bits, or null"),
        Param("weights", "const u32*", doc="[rows] float32 bits, or null"),
        Param("out_weights", "u32*", doc="[N, K] written, with weights; 0 where no copy is"),
        Param("num_tokens", "u32", doc="N"),
        Param("num_topk", "u32", doc="K, at least 1"),
        Param("row_bytes", "u32"),
        Param("access_bytes", "u32", doc="16, or the element size where rows are not aligned"),
        Param("dtype", "u32", doc="kDtype..."),
    ),
    "Copies of each received token to one row.",
)

LOCAL_KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="quantize",
        source="quantize.cu",
        entry="quantize",
        params=(Param("d", QUANTIZE),),
        doc="rows to FP8 with scales, before they travel",
    ),
    KernelSpec(
        name="expand_count",
        source="expand_count.cu",
        entry="expand_count",
        params=(Param("d", EXPAND),),
        doc="expanded layout, 1: tokens per slice and local expert",
    ),
    KernelSpec(
        name="expand_starts",
        source="expand_starts.cu",
        entry="expand_starts",
        params=(Param("d", EXPAND),),
        doc="expanded layout, 2: tokens of an expert before each slice",
        shared_bytes="kExpandSharedBytes",
    ),
    KernelSpec(
        name="expand_rows",
        source="expand_rows.cu",
        entry="expand_rows",
        params=(Param("d", EXPAND),),
        doc="expanded layout, 3: the row of each copy",
    ),
    KernelSpec(
        name="expand_copy",
        source="expand_copy.cu",
        entry="expand_copy",
        params=(Param("d", COPY),),
        doc="expanded layout, 4: rows, weights and scales to their copies",
    ),
    KernelSpec(
        name="reduce_copies",
        source="reduce_copies.cu",
        entry="reduce_copies",
        params=(Param("d", REDUCE),),
        doc="adds up the copies that each received token has in the expanded layout",
    ),
)
"""In the order they come in."""
