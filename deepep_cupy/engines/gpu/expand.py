"""The expanded layout on GPUs: received tokens to one row per (token, local expert)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from deepep_cupy.engines.gpu.arrays import address, dtype_code_of
from deepep_cupy.engines.gpu.cupy_types import DeviceArray, DType
from deepep_cupy.engines.gpu.grid import access_bytes, local_blocks, num_slices
from deepep_cupy.engines.gpu.operation import Operation
from deepep_cupy.engines.gpu.routing import FLOAT32, INT32, Received
from deepep_cupy.engines.gpu.runtime import Runtime
from deepep_cupy.jit.spec import Param, Struct
from deepep_cupy.memory.pool import PoolExhaustedError
from deepep_cupy.protocol.control_block import align
from deepep_cupy.protocol.sizes import worst_expanded_rows

__all__ = ["COPY", "EXPAND", "expand"]

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


_NARROW = (4, 1)
"""Access widths where rows or bases are no multiple of 16 bytes."""


def expand(runtime: Runtime, received: Received, op: Operation) -> Received:
    """Put received tokens into the expanded layout. Local; the host waits for nothing.

    A new routing takes three small kernels that find the rows (``expand/slices.cuh``), and each
    call one that copies. Where the dispatch was refused or has failed, and the host does not know
    it yet, there are no rows, and the results are poisoned.

    Args:
        runtime: The engine's parts.
        received: In the layout of tokens.
        op: The dispatch.
    """
    if received.topk_idx is not None:
        _find_rows(runtime, received, received.topk_idx, op)
    return _copy(runtime, received, op)


def _array(
    runtime: Runtime, op: Operation, shape: tuple[int, ...], dtype: DType, label: str
) -> DeviceArray:
    """An array in the pool, so that a combine need not copy it there. In ordinary memory where the
    pool is full: the rows have come, and a rank that gave up now would leave its peers alone."""
    nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    try:
        (block,) = op.alloc((nbytes, label))
    except PoolExhaustedError:
        return op.empty(shape, dtype)
    array: DeviceArray = runtime.arrays.array(runtime.arrays.own(block), shape, dtype)
    return array


# -------------------------------------------------------------------------------- which row


def _find_rows(runtime: Runtime, received: Received, topk_idx: DeviceArray, op: Operation) -> None:
    """Find the row of each copy, and let the routing know."""
    routing, known = received.routing, received.routing.addresses
    tokens, topk = topk_idx.shape
    local, alignment = runtime.spec.num_local_experts, routing.expert_alignment
    if received.counts is None:
        rows = worst_expanded_rows(tokens, topk, local, alignment)
    else:
        rows = sum(align(count, alignment) for count in received.counts)
    table = _array(runtime, op, (tokens, topk), INT32, "expanded_row of dispatch()")
    if table.nbytes:
        slices = num_slices(tokens, local)
        counters = op.empty((slices, local), INT32)
        fields = (
            topk_idx.data.ptr,
            known.num_real,
            known.birth,
            known.expert_counts,
            known.psum_expert_rows,
            table.data.ptr,
            counters.data.ptr,
            tokens,
            topk,
            topk_idx.itemsize,
            local,
            slices,
        )
        of_slices = local_blocks(runtime.grids, slices)
        of_experts = max(1, min(runtime.grids.num_sms, -(-local // 32)))
        for name, blocks in (
            ("expand_count", of_slices),
            ("expand_starts", of_experts),
            ("expand_rows", of_slices),
        ):
            launch = runtime.kernels.local(name, blocks)
            launch.operation(*fields)
            launch(op.stream.ptr)
    routing.expand(table, rows)


# ------------------------------------------------------------------------------------ copies


def _copy(runtime: Runtime, received: Received, op: Operation) -> Received:
    routing, rows, scales = received.routing, received.rows, received.scales
    weights, call = received.topk_weights, received.call
    table, known = routing.expanded_row, routing.addresses
    number, (tokens, hidden) = routing.num_expanded_rows, rows.shape
    row_bytes, columns = hidden * rows.itemsize, 0 if scales is None else scales.shape[1]
    out = _array(runtime, op, (number, hidden), rows.dtype, "expanded rows of dispatch()")
    out_weights = out_scales = None
    if weights is not None:
        out_weights = _array(runtime, op, (number,), FLOAT32, "expanded weights of dispatch()")
    if scales is not None:
        out_scales = _array(
            runtime, op, (number, columns), scales.dtype, "expanded scales of dispatch()"
        )
    if number and table is not None:
        launch = runtime.kernels.local(
            "expand_copy", local_blocks(runtime.grids, max(tokens, number))
        )
        launch.operation(
            rows.data.ptr,
            address(weights),
            address(scales),
            table.data.ptr,
            known.expert_counts,
            known.psum_expert_rows,
            known.birth,
            out.data.ptr,
            address(out_weights),
            address(out_scales),
            number,
            tokens,
            table.shape[1],
            row_bytes,
            access_bytes(row_bytes, (rows.data.ptr, out.data.ptr), _NARROW),
            columns,
            runtime.spec.num_local_experts,
            routing.expert_alignment,
            call.plan.zero_padding,
            dtype_code_of(rows.dtype, None if scales is None else scales.dtype),
        )
        launch(op.stream.ptr)
    return replace(received, rows=out, scales=out_scales, topk_idx=None, topk_weights=out_weights)
