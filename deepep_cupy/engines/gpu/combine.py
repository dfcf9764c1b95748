"""Combine on GPUs: rows where the peers can read them, one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deepep_cupy.engines.calls import CombineCall
from deepep_cupy.engines.gpu.arrays import address, dtype_code_of
from deepep_cupy.engines.gpu.cupy_types import DeviceArray, DType
from deepep_cupy.engines.gpu.grid import GridPlan, access_bytes, local_blocks
from deepep_cupy.engines.gpu.operation import Operation
from deepep_cupy.engines.gpu.routing import FLOAT32, own_routing
from deepep_cupy.engines.gpu.runtime import Runtime
from deepep_cupy.engines.protocol import CombineOutput
from deepep_cupy.errors import ContractError
from deepep_cupy.jit.spec import Param, Struct
from deepep_cupy.protocol.headers import (
    ARGUMENTS,
    OFFSET_UNIT,
    Kind,
    Layout,
    LayoutFlag,
    Refusal,
    RefusalCode,
    layout_word,
)

__all__ = [
    "COMBINE",
    "COMBINE_EXPANDED",
    "REDUCE",
    "STAGE",
    "Combiner",
    "PlainCombine",
    "combine_expanded",
]

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


_REDUCED_AT_ONCE = 1536
"""Bytes of a row that a warp of ``reduce_copies`` adds up at once."""

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


# ----------------------------------------------------------------------- the expanded layout


class PlainCombine(Protocol):
    """``Combiner.launch``: the combine of rows ``[N, H]`` that are in place."""

    def __call__(
        self,
        call: CombineCall,
        op: Operation,
        out: DeviceArray,
        out_weights: DeviceArray | None,
        rows_offset: int,
        own_rows: int,
        weights_offset: int,
        topk: int,
        layout: int,
        /,
    ) -> None: ...


def combine_expanded(
    runtime: Runtime,
    plain: PlainCombine,
    call: CombineCall,
    table: DeviceArray,
    op: Operation,
    out: DeviceArray,
    out_weights: DeviceArray | None,
) -> None:
    """Launch the combine of a call whose routing is expanded.

    Args:
        runtime: The engine's parts.
        plain: Launches an ordinary combine.
        call: The call.
        table: ``[N, K]``, ``expanded_row`` of its routing.
        op: The operation.
        out: ``[T, H]``.
        out_weights: ``[T, K]`` float32, or None.
    """
    if call.plan.reduce == "per_rank":
        _per_rank(runtime, plain, call, table, op, out, out_weights)
    else:
        _exact(runtime, call, table, op, out, out_weights)


def _layout(call: CombineCall, flags: LayoutFlag) -> int:
    if call.row_weights is not None:
        flags |= LayoutFlag.ROW_WEIGHTS
    return layout_word(Layout.NONE, LayoutFlag.EXPANDED | flags)


def _per_rank(
    runtime: Runtime,
    plain: PlainCombine,
    call: CombineCall,
    table: DeviceArray,
    op: Operation,
    out: DeviceArray,
    out_weights: DeviceArray | None,
) -> None:
    """A pass over this rank's copies makes one row of each received token; those are combined."""
    x, weights, base = call.x, call.topk_weights, runtime.memory.region.base
    tokens, topk = table.shape
    row_bytes = x.shape[1] * x.itemsize
    sums = op.stage(tokens * row_bytes, "sums of combine()").offset
    carried = 0
    if weights is not None:
        carried = op.stage(4 * tokens * topk, "weights of combine()").offset
    if tokens:
        pieces = max(1, -(-row_bytes // _REDUCED_AT_ONCE))
        blocks = local_blocks(runtime.grids, tokens * pieces)
        launch = runtime.kernels.local("reduce_copies", blocks)
        launch.operation(
            x.data.ptr,
            base + sums,
            table.data.ptr,
            address(call.row_weights),
            address(weights),
            base + carried if weights is not None else 0,
            tokens,
            topk,
            row_bytes,
            access_bytes(row_bytes, (x.data.ptr,), (x.itemsize,)),
            dtype_code_of(x.dtype),
        )
        launch(op.stream.ptr)
    plain(
        call,
        op,
        out,
        out_weights,
        sums,
        base + sums,
        carried,
        topk if weights is not None else 0,
        _layout(call, LayoutFlag.PER_RANK),
    )


def _exact(
    runtime: Runtime,
    call: CombineCall,
    table: DeviceArray,
    op: Operation,
    out: DeviceArray,
    out_weights: DeviceArray | None,
) -> None:
    """The tokens' ranks fetch the copies one by one, by way of the peers' tables."""
    x, routing, weights = call.x, own_routing(call.routing), call.topk_weights
    row_bytes, tokens, known = x.shape[1] * x.itemsize, routing.num_tokens, routing.addresses
    factors = weights_offset = 0
    rows_offset = op.place(x, "rows of combine()")
    index_offset = op.place(table, "expanded_row of combine()")
    if weights is not None:
        weights_offset = op.place(weights, "weights of combine()")
    if call.row_weights is not None:
        factors = op.place(call.row_weights, "row_weights of combine()")
    biases = [bias.data.ptr for bias in call.biases]
    access = access_bytes(row_bytes, (x.data.ptr, out.data.ptr, *biases), (x.itemsize,))
    biases += [0] * (2 - len(biases))
    grid = runtime.grid_plan(call.plan.num_sms).combine(tokens)
    launch = runtime.kernels.get("combine_expanded", grid, Kind.COMBINE)
    launch.operation(
        x.data.ptr,
        out.data.ptr,
        address(out_weights),
        *biases,
        known.send_row,
        known.birth,
        tokens,
        len(x),
        table.shape[1],
        weights is not None,
        row_bytes,
        access,
        dtype_code_of(x.dtype),
        rows_offset // OFFSET_UNIT,
        weights_offset // OFFSET_UNIT,
        _layout(call, LayoutFlag(0)),
        index_offset // OFFSET_UNIT,
        factors // OFFSET_UNIT,
        call.row_weights is not None,
    )
    op.launch(launch, call.plan.tag)
    if op.staged:
        runtime.failures.track(op.staged)


_COMBINE = Kind.COMBINE


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What combines of one plan have in common on this GPU.

    Attributes:
        row_bytes: Of ``x``.
        access: The widest access that ``row_bytes`` allows.
        narrow: The access where addresses allow no wider one.
        dtype: Code of the dtype of ``x``.
        grids: Blocks.
    """

    row_bytes: int
    access: int
    narrow: int
    dtype: int
    grids: GridPlan


class Combiner:
    """Runs combines on a ``Runtime``."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._new: Callable[[tuple[int, int], DType], DeviceArray] = runtime.queue.cupy.empty

    def run(self, call: CombineCall) -> CombineOutput:
        """See ``engines.protocol.Engine.combine``. On the engine's device, which is current."""
        runtime, out, weights = self._runtime, call.out, call.topk_weights
        if out is not None:
            self._check_out(call, out)
        with runtime.operation(call) as op:
            routing, x = call.routing, call.x
            table: DeviceArray | None = routing.expanded_row
            tokens, topk = routing.num_tokens, 0
            if out is None:
                out = self._empty(op, (tokens, x.shape[1]), x.dtype)
            out_weights = None
            if weights is not None:
                topk = weights.shape[1] if table is None else table.shape[1]
                out_weights = self._empty(op, (tokens, topk), FLOAT32)
            if table is not None:
                combine_expanded(runtime, self.launch, call, table, op, out, out_weights)
            else:
                rows_offset, own_rows = self._place_rows(call, op)
                weights_offset = 0
                if weights is not None:
                    weights_offset = op.place(weights, "weights of combine()")
                self.launch(call, op, out, out_weights, rows_offset, own_rows, weights_offset, topk)
            return CombineOutput(out, out_weights, op.finish())

    def _prepare(self, call: CombineCall) -> _Prepared:
        """Work out what all calls of the plan have in common."""
        x = call.x
        row_bytes, narrow = x.shape[1] * x.itemsize, x.itemsize
        grids = self._runtime.grid_plan(call.plan.num_sms)
        access = access_bytes(row_bytes, (), (narrow,))
        ready = _Prepared(row_bytes, access, narrow, dtype_code_of(x.dtype), grids)
        call.plan.prepared = ready
        return ready

    def launch(
        self,
        call: CombineCall,
        op: Operation,
        out: DeviceArray,
        out_weights: DeviceArray | None,
        rows_offset: int,
        own_rows: int,
        weights_offset: int,
        topk: int,
        layout: int = 0,
    ) -> None:
        """Launch the kernel over rows that are in place.

        Args:
            call: The call.
            op: The operation.
            out: ``[T, H]``.
            out_weights: ``[T, K]`` float32, or None.
            rows_offset: Where the peers find this rank's rows in the region.
            own_rows: Where this rank finds the rows of its own tokens; an address.
            weights_offset: Where the peers find this rank's weights ``[N, K]``.
            topk: K, 0 without weights.
            layout: Word of the header.
        """
        runtime, routing, biases = self._runtime, own_routing(call.routing), call.biases
        ready: _Prepared = call.plan.prepared or self._prepare(call)
        tokens, known, result = routing.num_tokens, routing.addresses, out.data.ptr
        first = biases[0].data.ptr if biases else 0
        second = biases[1].data.ptr if len(biases) > 1 else 0
        access = ready.access
        if (own_rows | result | first | second) % access:
            addresses = (own_rows, result, first, second)
            access = access_bytes(ready.row_bytes, addresses, (ready.narrow,))
        name = "combine_bulk" if access == 16 and runtime.bulk else "combine"
        launch = runtime.kernels.get(name, ready.grids.combine(tokens), _COMBINE)
        launch.operation(
            own_rows,
            result,
            address(out_weights),
            first,
            second,
            known.send_row,
            known.birth,
            tokens,
            routing.num_recv_tokens,
            topk,
            out_weights is not None,
            ready.row_bytes,
            access,
            ready.dtype,
            rows_offset // OFFSET_UNIT,
            weights_offset // OFFSET_UNIT,
            layout,
        )
        op.launch(launch, call.plan.tag)
        if op.staged:
            runtime.failures.track(op.staged)

    def _empty(self, op: Operation, shape: tuple[int, int], dtype: DType) -> DeviceArray:
        return self._new(shape, dtype) if op.plain else op.empty(shape, dtype)

    def _check_out(self, call: CombineCall, out: DeviceArray) -> None:
        """Refuse an ``out`` that overlaps an array which is still to be read."""
        low, high = out.data.ptr, out.data.ptr + out.nbytes
        for other in (call.x, call.topk_weights, call.row_weights, *call.biases):
            if other is None or not other.nbytes:
                continue
            if other.data.ptr < high and low < other.data.ptr + other.nbytes:
                raise ContractError(
                    f"combine(): argument 'out' must share no memory with another argument, on "
                    f"rank {self._runtime.spec.rank}.",
                    Refusal(RefusalCode.ARGUMENT, ARGUMENTS.index("out")),
                )

    def _place_rows(self, call: CombineCall, op: Operation) -> tuple[int, int]:
        """Where the peers find the rows (offset in the region), and where this rank does.

        Rows outside the pool are copied into it, but for those of this rank's own tokens; where
        the host does not know how many rows there are, a kernel that reads their number on the
        device copies them, so that the worst case need not be copied.
        """
        runtime, x = self._runtime, call.x
        offset = runtime.arrays.find(x) if x.nbytes else runtime.memory.control.nbytes
        source = x.data.ptr
        if offset is not None and offset % OFFSET_UNIT == 0:
            return offset, source
        block = op.stage(x.nbytes, "rows of combine()")
        to, row_bytes = runtime.memory.region.base + block.offset, x.shape[1] * x.itemsize
        counts = own_routing(call.routing).host_rows_per_rank
        rank = runtime.spec.rank
        if counts is None:
            return block.offset, self._stage_real(call, op, to)
        if source % OFFSET_UNIT:
            op.copy_bytes(to, source, x.nbytes)
            return block.offset, to
        before = sum(counts[:rank]) * row_bytes
        behind = before + counts[rank] * row_bytes
        op.copy_bytes(to, source, before)
        op.copy_bytes(to + behind, source + behind, x.nbytes - behind)
        return block.offset, source

    def _stage_real(self, call: CombineCall, op: Operation, to: int) -> int:
        """Copy the rows that were really received; where this rank finds its own."""
        runtime, x = self._runtime, call.x
        source: int = x.data.ptr
        rank, own = runtime.spec.rank, source
        if source % OFFSET_UNIT:
            rank, own = runtime.spec.num_ranks, to  # the fast path reads whole words
        if x.nbytes:
            row_bytes = x.shape[1] * x.itemsize
            access = access_bytes(row_bytes, (source, to), (4, 1))
            counts = own_routing(call.routing).addresses.rows_per_rank
            launch = runtime.kernels.local("stage", local_blocks(runtime.grids, len(x)))
            launch.operation(source, to, counts, rank, row_bytes, access)
            launch(op.stream.ptr)
        return own
