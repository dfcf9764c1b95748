"""All kernels of this package, by name, and the structs they are launched with."""

from __future__ import annotations

from collections.abc import Iterable

from deepep_cupy.errors import ContractError
from deepep_cupy.kernels.bench_specs import BENCH_KERNELS
from deepep_cupy.kernels.local_specs import CAST, LOCAL_KERNELS
from deepep_cupy.kernels.spec import KernelSpec, Param, Struct
from deepep_cupy.kernels.staging_specs import STAGING_KERNELS

__all__ = ["KERNELS", "get_kernel", "list_kernels"]

COMM = Struct(
    "CommParams",
    (
        Param("peer", "u8*", "kNumRanks", "symmetric region of each rank, as mapped here"),
        Param("report", "u64*", doc="host memory: counts and failures (plan/layout.py)"),
        Param("board", "const u32*", doc="host memory: abort words of the node, or null"),
        Param("timeout_ns", "u64", doc="most nanoseconds any wait may last"),
        Param("board_stride", "u32", doc="words between the ranks' lines of the board"),
        Param("serial", "u32", doc="number of this launch on this rank, never 0"),
        Param("rank", "u32"),
        Param("kind", "u32", doc="kKind..., which operation this is"),
        Param("refusal", "u32", doc="kRefusal..., when the host refused the caller's arguments"),
        Param("refusal_value", "u32", doc="the token or size in question"),
    ),
    "What every kernel needs to talk to the other ranks.",
)

DISPATCH = Struct(
    "DispatchCommon",
    (
        Param("x", "const u8*", doc="[T] rows of row_bytes"),
        Param("topk_idx", "const u8*", doc="[T, K] of index_bytes each, or null"),
        Param("topk_weights", "const u32*", doc="[T, K] float32 bits, with has_weights"),
        Param("is_token_in_rank", "const u8*", doc="[T, R], or null"),
        Param("scales", "const u32*", doc="[T, S] of any strides, with num_scales"),
        Param("scales_token_stride", "i64", doc="words from a token's scales to the next one's"),
        Param("scales_stride", "i64", doc="words from a scale to the next one"),
        Param("send_row", "u32*", doc="[T, R] written; read with a cached handle"),
        Param("recv_rows_per_rank", "u32*", doc="[R] written, but with a cached handle"),
        Param("psum_recv_rows", "u32*", doc="[R] their inclusive sums, written, or null"),
        Param("expert_counts", "u32*", doc="[E / R] rows per local expert, written, or null"),
        Param("psum_expert_rows", "u32*", doc="[E / R] ends of their rows, with expert_counts"),
        Param("recv_stats", "u32*", doc="[E / R] to which expert_counts are added, or null"),
        Param("birth_out", "u32*", doc="epoch of this dispatch, for its handle"),
        Param("birth_in", "const u32*", doc="epoch of the handle's dispatch, or null"),
        Param("real_rows", "const u32*", doc="rows of a cached handle no host knows, or null"),
        Param("num_tokens", "u32", doc="T"),
        Param("num_topk", "u32", doc="K"),
        Param("has_weights", "u32", doc="1 when weights travel (an empty array may be null)"),
        Param("index_bytes", "u32", doc="4, 8, or 0 without topk_idx"),
        Param("num_experts", "u32", doc="E, 0 without topk_idx"),
        Param("experts_per_rank", "u32", doc="E / R, at least 1"),
        Param("num_reported_experts", "u32", doc="E / R with topk_idx, else 0"),
        Param("experts_offset", "u32", doc="of the experts inbox in the control block, bytes"),
        Param("expert_alignment", "u32", doc="at least 1: psum_expert_rows rounds counts up to it"),
        Param("row_bytes", "u32", doc="without scales"),
        Param("num_scales", "u32", doc="S, scales that travel with a row"),
        Param("access_bytes", "u32", doc="16, 4 or 1: what rows and bases are multiples of"),
        Param("dtype", "u32", doc="kDtype... (and kScales...), or 256 + itemsize"),
        Param("layout", "u32", doc="kLayoutTopk, kLayoutMask or kLayoutCached"),
        Param("layout_flags", "u32", doc="kFlagExpanded or 0"),
        Param("no_wait", "u32", doc="1: the host learns no count; the tail says so"),
        Param("capacity", "u32", doc="rows this rank's receive block holds"),
        Param("rows_offset", "u32", doc="of that block in the region, in kOffsetUnit"),
        Param("meta_offset", "u32", doc="of the received source indices, in kOffsetUnit"),
        Param("weights_offset", "u32", doc="of the received weights, in kOffsetUnit"),
        Param("index_offset", "u32", doc="of the received topk_idx, in kOffsetUnit"),
    ),
    "One rank's dispatch.",
)

DISPATCH_CAST = Struct(
    "DispatchCast",
    (
        Param("sent", DISPATCH, doc="as if x were cast already, but x: [T] rows to be cast; "
              "no scales are given"),
        Param("cast", CAST),
    ),
    "One rank's dispatch of rows that are cast on their way.",
)  # fmt: skip

COMBINE = Struct(
    "CombineCommon",
    (
        Param("x", "const u8*", doc="[N] rows of this rank, as it reads them itself"),
        Param("out", "u8*", doc="[T] rows"),
        Param("combined_weights", "u32*", doc="[T, K] float32 bits, with has_weights"),
        Param("bias", "const u8*", 2, "[T] rows each, or null"),
        Param("send_row", "const u32*", doc="[T, R] row of each token at each rank"),
        Param("birth", "const u32*", doc="epoch of the handle's dispatch"),
        Param("num_tokens", "u32", doc="T"),
        Param("num_rows", "u32", doc="N, rows this rank holds"),
        Param("num_topk", "u32", doc="K, 0 without weights"),
        Param("has_weights", "u32", doc="1 when weights travel (an empty array may be null)"),
        Param("row_bytes", "u32"),
        Param("access_bytes", "u32", doc="16, or the element size where rows are not aligned"),
        Param("dtype", "u32", doc="kDtype..."),
        Param("rows_offset", "u32", doc="of this rank's rows in its region, in kOffsetUnit"),
        Param("weights_offset", "u32", doc="of this rank's weights, in kOffsetUnit"),
        Param("layout", "u32", doc="header word: kFlagExpanded | ... for the expanded layout"),
    ),
    "One rank's combine.",
)

COMBINE_EXPANDED = Struct(
    "CombineExpanded",
    (
        Param("plain", COMBINE, doc="x: [rows]; weights: [rows]; num_topk: K, always"),
        Param("index_offset", "u32", doc="of this rank's expanded_row, in kOffsetUnit"),
        Param("row_weights_offset", "u32", doc="of this rank's row weights, in kOffsetUnit"),
        Param("weighted", "u32", doc="1 when rows are multiplied with weights"),
    ),
    "One rank's combine of the expanded layout.",
)

KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="barrier",
        source="barrier.cu",
        entry="barrier",
        params=(Param("comm", COMM),),
        doc="no rank leaves before all have come; also how a rank refuses a call",
        shared_bytes="kBarrierSharedBytes",
    ),
    KernelSpec(
        name="dispatch",
        source="dispatch.cu",
        entry="dispatch",
        params=(Param("comm", COMM), Param("d", DISPATCH)),
        doc="rows to the ranks of their experts, by loads and stores",
        shared_bytes="kDispatchSharedBytes",
    ),
    KernelSpec(
        name="dispatch_bulk",
        source="dispatch_bulk.cu",
        entry="dispatch_bulk",
        params=(Param("comm", COMM), Param("d", DISPATCH)),
        doc="rows to the ranks of their experts, by the bulk copy engine",
        shared_bytes="kDispatchBulkSharedBytes",
        min_arch=90,
    ),
    KernelSpec(
        name="dispatch_cast_bulk",
        source="dispatch_cast_bulk.cu",
        entry="dispatch_cast_bulk",
        params=(Param("comm", COMM), Param("d", DISPATCH_CAST)),
        doc="the same, cast to FP8 on their way",
        shared_bytes="kDispatchCastBulkSharedBytes",
        min_arch=90,
    ),
    KernelSpec(
        name="combine",
        source="combine.cu",
        entry="combine",
        params=(Param("comm", COMM), Param("d", COMBINE)),
        doc="rows back to their tokens, added up, by loads",
        shared_bytes="kCombineSharedBytes",
    ),
    KernelSpec(
        name="combine_bulk",
        source="combine_bulk.cu",
        entry="combine_bulk",
        params=(Param("comm", COMM), Param("d", COMBINE)),
        doc="rows back to their tokens, added up, by the bulk copy engine",
        shared_bytes="kCombineBulkSharedBytes",
        min_arch=90,
    ),
    KernelSpec(
        name="combine_expanded",
        source="combine_expanded.cu",
        entry="combine_expanded",
        params=(Param("comm", COMM), Param("d", COMBINE_EXPANDED)),
        doc="all copies of the expanded layout back to their tokens, added up, by loads",
        shared_bytes="kCombineSharedBytes",
    ),
    *LOCAL_KERNELS,
    *STAGING_KERNELS,
)
"""What a Buffer builds and launches, in the order ``kernels list`` prints them."""


def list_kernels() -> tuple[KernelSpec, ...]:
    """Return the specs of all kernels, those of ``bench`` too. Local; needs no CuPy, no MPI."""
    return (*KERNELS, *BENCH_KERNELS)


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
