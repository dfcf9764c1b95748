"""Dispatch on GPUs: blocks for what will come, one launch, arrays over what came.

What comes beside the rows lies in two blocks, each part at a multiple of ``OFFSET_UNIT`` (C is the
capacity, R * M tokens or ``num_worst_tokens``)::

    handle block    words | source indices [C]
    meta block      weights [C, K] | topk_idx [C, K] | scales [C, S]

The words are the handle's (``routing.Addresses``), and written by this rank alone. Handles may
outlive all else that came with them, which is why they have a block of their own. A cached call
has no handle block and no indices. ``dispatch/move.cuh`` knows where the scales begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from deepep_cupy.engines.calls import DispatchCall
from deepep_cupy.engines.gpu.arrays import address, dtype_code_of
from deepep_cupy.engines.gpu.cupy_types import DeviceArray, DType, Pointer
from deepep_cupy.engines.gpu.expand import expand
from deepep_cupy.engines.gpu.grid import GridPlan, access_bytes, local_blocks
from deepep_cupy.engines.gpu.operation import Operation
from deepep_cupy.engines.gpu.quantize import CAST, cast_on_the_way, quantize, travelling
from deepep_cupy.engines.gpu.routing import (
    FLOAT32,
    Addresses,
    GpuRouting,
    Received,
    own_routing,
    words_bytes,
)
from deepep_cupy.engines.gpu.runtime import Runtime
from deepep_cupy.engines.protocol import DispatchOutput
from deepep_cupy.errors import ContractError
from deepep_cupy.jit.spec import Param, Struct
from deepep_cupy.memory.block import Block, round_up
from deepep_cupy.protocol.control_block import align
from deepep_cupy.protocol.headers import OFFSET_UNIT, Kind, Layout, LayoutFlag

__all__ = ["COLUMNS", "DISPATCH", "DISPATCH_CAST", "Dispatcher"]

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


_ROWS = (
    Param("x", "const u8*", doc="[T] rows of row_bytes"),
    Param("topk_idx", "const u8*", doc="[T, K] of index_bytes each, or null"),
    Param("topk_weights", "const u32*", doc="[T, K] float32 bits, with has_weights"),
    Param("is_token_in_rank", "const u8*", doc="[T, R], or null"),
    Param("scales", "const u32*", doc="[T, S] of any strides, with num_scales"),
    Param("scales_token_stride", "i64", doc="words from a token's scales to the next one's"),
    Param("scales_stride", "i64", doc="words from a scale to the next one"),
)
"""What is sent: addresses, and how scales lie."""


_WORDS = (
    Param("send_row", "u32*", doc="[T, R] written; read with a cached handle"),
    Param("recv_rows_per_rank", "u32*", doc="[R] written, but with a cached handle"),
    Param("psum_recv_rows", "u32*", doc="[R] their inclusive sums, written, or null"),
    Param("expert_counts", "u32*", doc="[E / R] rows per local expert, written, or null"),
    Param("psum_expert_rows", "u32*", doc="[E / R] ends of their rows, with expert_counts"),
    Param("recv_stats", "u32*", doc="[E / R] to which expert_counts are added, or null"),
    Param("birth_out", "u32*", doc="epoch of this dispatch, for its handle"),
    Param("birth_in", "const u32*", doc="epoch of the handle's dispatch, or null"),
    Param("real_rows", "const u32*", doc="rows of a cached handle no host knows, or null"),
)
"""Addresses of the words of a handle: written, or of the handle that is given."""


_SIZES = (
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
)
"""Sizes that are the same in all calls of a plan."""


_KINDS = (
    Param("dtype", "u32", doc="kDtype... (and kScales...), or 256 + itemsize"),
    Param("layout", "u32", doc="kLayoutTopk, kLayoutMask or kLayoutCached"),
    Param("layout_flags", "u32", doc="kFlagExpanded or 0"),
)
"""Dtype and layout, the same in all calls of a plan."""


_PLACES = (
    Param("no_wait", "u32", doc="1: the host learns no count; the tail says so"),
    Param("capacity", "u32", doc="rows this rank's receive block holds"),
    Param("rows_offset", "u32", doc="of that block in the region, in kOffsetUnit"),
    Param("meta_offset", "u32", doc="of the received source indices, in kOffsetUnit"),
    Param("weights_offset", "u32", doc="of the received weights, in kOffsetUnit"),
    Param("index_offset", "u32", doc="of the received topk_idx, in kOffsetUnit"),
)
"""Where what comes is put."""


DISPATCH = Struct(
    "DispatchCommon",
    (
        *_ROWS,
        *_WORDS,
        Param("num_tokens", "u32", doc="T"),
        *_SIZES,
        Param("access_bytes", "u32", doc="16, 4 or 1: what rows and bases are multiples of"),
        *_KINDS,
        *_PLACES,
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


_NARROW = (4, 1)
"""Access widths where rows or bases are no multiple of 16 bytes."""
_DISPATCH = Kind.DISPATCH
_NOT_IN_GRAPHS = (
    "dispatch(): the host must wait for the counts, which is not possible while a graph is being "
    "captured; give num_worst_tokens or do_cpu_sync=False, or capture calls with a handle instead."
)


class _Meta:
    """Where the parts of a meta block begin, bytes; weights at its beginning."""

    __slots__ = ("index_at", "nbytes", "scales_at")

    def __init__(
        self, capacity: int, topk: int, weights: bool, index_bytes: int, scales: int
    ) -> None:
        self.index_at = align(4 * capacity * topk * weights, OFFSET_UNIT)
        self.scales_at = self.index_at + align(capacity * topk * index_bytes, OFFSET_UNIT)
        self.nbytes = self.scales_at + 4 * capacity * scales


_meta_of = lru_cache(maxsize=256)(_Meta)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What dispatches of one plan have in common on this GPU.

    Attributes:
        hidden: Of ``x``.
        dtype: Of rows as they travel.
        scales: Dtype of their scales; None: there are none.
        row_bytes: Without scales.
        topk: K of the arrays that are given.
        num_scales: S.
        local: El with choices, else 0.
        capacity: C of a new route; of a cached one its handle knows.
        sources_at: Where the source indices begin in the handle block of a new route.
        parts: Of the meta block of a new route.
        wanted: Blocks of a new route: for the handle, for rows, and between them the meta block
            where anything lies in it.
        access: The widest access that ``row_bytes`` allows.
        sizes: Fields ``_SIZES`` of ``DispatchCommon``.
        kinds: Fields ``_KINDS`` of ``DispatchCommon``.
        cast: Fields of ``Cast``, where the kernel itself can cast.
        grids: Blocks.
    """

    hidden: int
    dtype: DType
    scales: DType | None
    row_bytes: int
    topk: int
    num_scales: int
    local: int
    capacity: int
    sources_at: int
    parts: _Meta
    wanted: tuple[tuple[int, str], ...]
    access: int
    sizes: tuple[int, ...]
    kinds: tuple[int, ...]
    cast: tuple[int, ...] | None
    grids: GridPlan


def _casts_on_the_way(call: DispatchCall, ready: _Prepared, num_ranks: int) -> bool:
    fits = ready.cast is not None and call.x.data.ptr % 16 == 0
    return fits and ready.grids.casts_on_the_way(len(call.x), num_ranks)


class Dispatcher:
    """Runs dispatches on a ``Runtime``."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ranks = runtime.spec.num_ranks

    def run(self, call: DispatchCall) -> DispatchOutput:
        """See ``engines.protocol.Engine.dispatch``. On the engine's device, which is current."""
        runtime = self._runtime
        with runtime.operation(call) as op:
            ready: _Prepared = call.plan.prepared or self._prepare(call)
            if call.plan.quantize is not None and not _casts_on_the_way(call, ready, self._ranks):
                if not op.plain:
                    op.keep(call)
                op.call = call = quantize(runtime, call, op)
            if call.routing is not None:
                return self._cached(call, ready, own_routing(call.routing), op)
            return self._new(call, ready, op)

    def _prepare(self, call: DispatchCall) -> _Prepared:
        """Work out what all calls of the plan have in common."""
        runtime, x, topk_idx, plan = self._runtime, call.x, call.topk_idx, call.plan
        spec, weights = runtime.spec, call.topk_weights
        topk = index_bytes = experts = local = 0
        if topk_idx is not None:
            topk, index_bytes = topk_idx.shape[1], topk_idx.itemsize
            experts, local = spec.num_experts or 0, spec.num_local_experts
        elif weights is not None:
            topk = weights.shape[1]
        layout, capacity, alignment = Layout.CACHED, 0, 1
        if call.routing is None:
            layout = Layout.MASK if topk_idx is None else Layout.TOPK
            worst, alignment = plan.num_worst_tokens, plan.expert_alignment
            capacity = spec.max_recv_tokens if worst is None else worst
        dtype, scales, num_scales = travelling(call)
        row_bytes = x.shape[1] * dtype.itemsize
        has_weights = weights is not None
        fixed = {
            "num_topk": topk,
            "has_weights": has_weights,
            "index_bytes": index_bytes,
            "num_experts": experts,
            "experts_per_rank": local or 1,
            "num_reported_experts": local,
            "experts_offset": runtime.memory.control.experts,
            "expert_alignment": alignment,
            "row_bytes": row_bytes,
            "num_scales": num_scales,
            "dtype": dtype_code_of(dtype, scales),
            "layout": layout,
            "layout_flags": LayoutFlag.EXPANDED if plan.expand else 0,
        }
        sources_at = align(
            words_bytes(spec.num_max_tokens_per_rank, spec.num_ranks, local), OFFSET_UNIT
        )
        parts = _Meta(capacity, topk, has_weights, index_bytes, num_scales)
        wanted = [
            (round_up(sources_at + 4 * capacity), "handle of dispatch()"),
            (round_up(parts.nbytes), "indices of dispatch()"),
            (round_up(capacity * row_bytes), "recv_x of dispatch()"),
        ]
        if not parts.nbytes:
            del wanted[1]
        ready = _Prepared(
            hidden=x.shape[1],
            dtype=dtype,
            scales=scales,
            row_bytes=row_bytes,
            topk=topk,
            num_scales=num_scales,
            local=local,
            capacity=capacity,
            sources_at=sources_at,
            parts=parts,
            wanted=tuple(wanted),
            access=access_bytes(row_bytes, (), _NARROW),
            sizes=tuple(int(fixed[field.name]) for field in _SIZES),
            kinds=tuple(int(fixed[field.name]) for field in _KINDS),
            cast=cast_on_the_way(runtime, call),
            grids=runtime.grid_plan(plan.num_sms),
        )
        plan.prepared = ready
        return ready

    # ------------------------------------------------------------------------------ new routes

    def _new(self, call: DispatchCall, ready: _Prepared, op: Operation) -> DispatchOutput:
        runtime, ranks, local, parts = self._runtime, self._ranks, ready.local, ready.parts
        sources_at, waits = ready.sources_at, call.plan.num_worst_tokens is None
        if waits and op.capture != 0:
            raise ContractError(_NOT_IN_GRAPHS)
        blocks = op.alloc(*ready.wanted)
        kept, meta, rows = blocks[0], blocks[-2], blocks[-1]
        words = Addresses(
            runtime.arrays.base + kept.offset, len(call.x), ranks, local, waited=waits
        )
        self._launch(
            op,
            call,
            ready,
            blocks,
            (
                words.send_row,
                words.rows_per_rank,
                words.psum_recv_rows,
                words.expert_counts if local else 0,
                words.psum_expert_rows,
                address(call.recv_stats),
                words.birth,
                0,
                0,
            ),
            (
                not waits,
                ready.capacity,
                rows.offset // OFFSET_UNIT,
                (kept.offset + sources_at) // OFFSET_UNIT,
                meta.offset // OFFSET_UNIT,
                (meta.offset + parts.index_at) // OFFSET_UNIT,
            ),
        )
        runtime.failures.track(blocks)
        # Before the host waits for the counts, it does all that does not need them.
        arrays, pool = runtime.arrays, runtime.pool
        pointers = arrays.own(meta) if meta is not kept else None, arrays.own(rows)
        routing = GpuRouting(
            words,
            arrays,
            pool.own(kept, arrays.allocation),
            sources_at,
            num_tokens=len(call.x),
            num_recv_tokens=ready.capacity,
            waited=waits,
            expert_alignment=call.plan.expert_alignment,
        )
        counts = None
        if waits:
            received = op.wait_counts(ranks + local, blocks)
            number, counts = routing.learn(received[:ranks]), received[ranks:]
            pool.shrink(rows, number * ready.row_bytes)
            if ready.num_scales:
                pool.shrink(meta, parts.scales_at + 4 * number * ready.num_scales)
        return self._received(call, ready, op, routing, pointers, counts)

    def _received(
        self,
        call: DispatchCall,
        ready: _Prepared,
        op: Operation,
        routing: GpuRouting,
        pointers: tuple[Pointer | None, Pointer],
        counts: list[int] | None,
    ) -> DispatchOutput:
        """The results: arrays over the blocks. ``counts``: rows of each local expert."""
        topk_idx, scales, array = call.topk_idx, ready.scales, self._runtime.arrays.array
        (at, at_rows), number, topk = pointers, routing.num_recv_tokens, ready.topk
        recv_x = array(at_rows, (number, ready.hidden), ready.dtype)
        recv_idx = recv_weights = recv_scales = None
        if topk_idx is not None:
            recv_idx = array(at, (number, topk), topk_idx.dtype, ready.parts.index_at)
            if call.topk_weights is not None:
                recv_weights = array(at, (number, topk), FLOAT32)
        if scales is not None:
            shape = number, ready.num_scales
            recv_scales = array(at, shape, scales, ready.parts.scales_at)
        return self._output(call, op, recv_x, recv_idx, recv_weights, recv_scales, routing, counts)

    # --------------------------------------------------------------------------- cached routes

    def _cached(
        self, call: DispatchCall, ready: _Prepared, routing: GpuRouting, op: Operation
    ) -> DispatchOutput:
        runtime, weights, scales = self._runtime, call.topk_weights, ready.scales
        known, number, arrays = routing.addresses, routing.num_recv_tokens, runtime.arrays
        row_bytes, label = number * ready.row_bytes, "recv_x of dispatch()"
        if weights is None and scales is None:
            blocks = op.alloc((row_bytes, label))
            scales_at = 0
        else:
            parts = _meta_of(number, ready.topk, weights is not None, 0, ready.num_scales)
            blocks = op.alloc((row_bytes, label), (parts.nbytes, "weights of dispatch()"))
            scales_at = parts.scales_at
        at = blocks[-1].offset
        meta = at // OFFSET_UNIT
        self._launch(
            op,
            call,
            ready,
            blocks,
            (known.send_row, 0, 0, 0, 0, 0, 0, known.birth, known.num_real),
            (
                not routing.waited,
                number,
                blocks[0].offset // OFFSET_UNIT,
                meta,
                meta,
                (at + scales_at) // OFFSET_UNIT,
            ),
        )
        runtime.failures.track(blocks)
        recv_x = arrays.array(arrays.own(blocks[0]), (number, ready.hidden), ready.dtype)
        recv_weights = recv_scales = None
        if len(blocks) > 1:
            at = arrays.own(blocks[1])
            if weights is not None:
                recv_weights = arrays.array(at, (number, ready.topk), FLOAT32)
            if scales is not None:
                shape = number, ready.num_scales
                recv_scales = arrays.array(at, shape, scales, scales_at)
        return self._output(call, op, recv_x, None, recv_weights, recv_scales, routing, None)

    # ------------------------------------------------------------------------------ both kinds

    def _launch(
        self,
        op: Operation,
        call: DispatchCall,
        ready: _Prepared,
        blocks: list[Block],
        words: tuple[int, ...],
        places: tuple[int, ...],
    ) -> None:
        """Launch. The fields of the kernel's struct are written in their order.

        Args:
            op: The operation.
            call: The call.
            ready: What it has in common with alike calls.
            blocks: Given back if the launch fails.
            words: Fields ``_WORDS``.
            places: Fields ``_PLACES``.
        """
        runtime, x, scales, mask = self._runtime, call.x, call.scales, call.is_token_in_rank
        topk_idx, weights = call.topk_idx, call.topk_weights
        source, tokens, access = x.data.ptr, len(x), ready.access
        scales_at = token_stride = scale_stride = 0
        if scales is not None:
            scales_at, (token_stride, scale_stride) = scales.data.ptr, scales.strides
        if source % access:
            access = access_bytes(ready.row_bytes, (source,), _NARROW)
        name = "dispatch_bulk" if access == 16 and runtime.bulk else "dispatch"
        cast: tuple[int, ...] = ()
        if scales is None and ready.cast is not None:  # with scales, quantize() has cast already
            name, cast = "dispatch_cast_bulk", ready.cast
        try:
            grid = ready.grids.dispatch(tokens, counts=call.routing is None)
            launch = runtime.kernels.get(name, grid, _DISPATCH)
            launch.operation(
                source,
                0 if topk_idx is None else topk_idx.data.ptr,
                0 if weights is None else weights.data.ptr,
                0 if mask is None else mask.data.ptr,
                scales_at,
                token_stride // 4,
                scale_stride // 4,
                *words,
                tokens,
                *ready.sizes,
                access,
                *ready.kinds,
                *places,
                *cast,
            )
            op.launch(launch, call.plan.tag)
        except BaseException:
            op.give_back(blocks)
            raise

    def _output(
        self,
        call: DispatchCall,
        op: Operation,
        recv_x: DeviceArray,
        recv_idx: DeviceArray | None,
        recv_weights: DeviceArray | None,
        recv_scales: DeviceArray | None,
        routing: GpuRouting,
        counts: list[int] | None,
    ) -> DispatchOutput:
        """Put what came into the layout that is wanted. ``counts``: rows of each local expert."""
        if call.plan.expand:
            known = None if counts is None else tuple(counts)
            done = expand(
                self._runtime,
                Received(call, recv_x, recv_scales, recv_idx, recv_weights, routing, known),
                op,
            )
            recv_x, recv_weights, recv_scales = done.rows, done.topk_weights, done.scales
            recv_idx = None
        if recv_scales is not None and call.plan.scales_layout == "column":
            recv_scales = self._columns(recv_scales, routing, op)
        if call.plan.own:
            recv_x, recv_idx = op.copy(recv_x), op.copy(recv_idx)
            recv_weights, recv_scales = op.copy(recv_weights), op.copy(recv_scales)
        event = op.finish()
        per_expert, unit = counts or [], call.plan.expert_alignment
        if unit > 1:
            per_expert = [align(count, unit) for count in per_expert]
        return DispatchOutput(
            recv_x, recv_idx, recv_weights, per_expert, routing, recv_scales, event
        )

    def _columns(self, scales: DeviceArray, routing: GpuRouting, op: Operation) -> DeviceArray:
        """A copy of scales in column-major order, in ordinary memory."""
        number, columns = scales.shape
        made = op.empty((columns, number), scales.dtype)
        if scales.size:
            runtime = self._runtime
            real = 0 if routing.expanded else routing.addresses.num_real
            launch = runtime.kernels.local("columns", local_blocks(runtime.grids, -(-number // 32)))
            launch.operation(scales.data.ptr, made.data.ptr, real, number, columns)
            launch(op.stream.ptr)
        return made.T
