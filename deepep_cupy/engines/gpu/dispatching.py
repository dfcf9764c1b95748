"""Dispatch on GPUs: blocks for what will come, one launch, arrays over what came.

What comes beside the rows lies in one block, the *meta* block, each part at a multiple of
``OFFSET_UNIT`` (C is the capacity, R * M tokens or ``num_worst_tokens``)::

    source indices [C] | weights [C, K] | topk_idx [C, K] | scales [C, S]

A cached call has neither indices. ``dispatch/deliver.cuh`` knows where the scales begin.
"""

from __future__ import annotations

from typing import Any

from deepep_cupy.engines.base import DispatchCall, DispatchOutput, Routing
from deepep_cupy.engines.gpu.core import Core, address, dtype_code_of
from deepep_cupy.engines.gpu.expanding import expand
from deepep_cupy.engines.gpu.quantizing import quantize
from deepep_cupy.engines.gpu.received import CudaRouting, Received, addresses_of
from deepep_cupy.engines.gpu.streams import Turn
from deepep_cupy.errors import ContractError
from deepep_cupy.plan.headers import OFFSET_UNIT, Kind, Layout, LayoutFlag
from deepep_cupy.plan.launch import access_bytes
from deepep_cupy.plan.layout import align
from deepep_cupy.plan.local import local_blocks
from deepep_cupy.transport.block import Block

__all__ = ["Dispatcher"]

_NARROW = (4, 1)
"""Access widths where rows or bases are no multiple of 16 bytes."""
_EXPANDED = int(LayoutFlag.EXPANDED)
_ACCESS = 27
"""Number of the field ``access_bytes`` of ``DispatchCommon``."""
_NOT_IN_GRAPHS = (
    "dispatch(): the host must wait for the counts, which is not possible while a graph is being "
    "captured; give num_worst_tokens or do_cpu_sync=False, or capture calls with a handle instead."
)


class _Meta:
    """Where the parts of a meta block begin, bytes."""

    __slots__ = ("index_at", "nbytes", "scales_at", "weights_at")

    def __init__(
        self, capacity: int, sources: int, topk: int, weights: bool, index_bytes: int, scales: int
    ) -> None:
        self.weights_at = align(4 * sources, OFFSET_UNIT)
        self.index_at = self.weights_at + align(4 * capacity * topk * weights, OFFSET_UNIT)
        self.scales_at = self.index_at + align(capacity * topk * index_bytes, OFFSET_UNIT)
        self.nbytes = self.scales_at + 4 * capacity * scales


class Dispatcher:
    """Runs dispatches on a ``Core``."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._experts = core.spec.num_experts or 0

    def run(self, call: DispatchCall) -> DispatchOutput:
        """See ``engines.base.Engine.dispatch``. On the engine's device, which is current."""
        core = self._core
        turn = core.begin(call.streams)
        try:
            if call.quantize is not None:
                if not turn.plain:
                    turn.keep(call)
                call = quantize(core, call, turn)
            if call.routing is not None:
                return self._cached(call, call.routing, turn)
            return self._new(call, turn)
        except BaseException:
            core.settle_failed(turn, call)
            raise
        finally:
            core.end(turn)

    # ------------------------------------------------------------------------------ new routes

    def _new(self, call: DispatchCall, turn: Turn) -> DispatchOutput:
        core, x, topk_idx, scales = self._core, call.x, call.topk_idx, call.scales
        ranks, capacity = core.spec.num_ranks, call.num_worst_tokens
        if capacity is None:
            if turn.capture != 0:
                raise ContractError(_NOT_IN_GRAPHS)
            capacity = core.spec.max_recv_tokens
        tokens, row_bytes = len(x), x.shape[1] * x.itemsize
        topk = index_bytes = experts = local = 0
        if topk_idx is not None:
            topk, index_bytes, experts = topk_idx.shape[1], topk_idx.itemsize, self._experts
            local = experts // ranks
        weights, num_scales = (
            call.topk_weights is not None,
            0 if scales is None else scales.shape[1],
        )
        parts = _Meta(capacity, capacity, topk, weights, index_bytes, num_scales)
        blocks = turn.alloc(
            (parts.nbytes, "indices of dispatch()"), (capacity * row_bytes, "recv_x of dispatch()")
        )
        meta, rows = (block.offset // OFFSET_UNIT for block in blocks)
        words = self._words(turn, tokens * ranks + 2 * (ranks + local) + 1)
        send_row = words.data.ptr
        counts = send_row + 4 * tokens * ranks
        per_expert = counts + 8 * ranks
        self._launch(
            turn,
            call,
            blocks,
            *_inputs(call),
            *(send_row, counts, counts + 4 * ranks),
            *(per_expert if local else 0, per_expert + 4 * local, address(call.recv_stats)),
            *(per_expert + 8 * local, 0, 0),
            *(tokens, topk, weights, index_bytes),
            *(experts, local or 1, local, core.control.experts, call.expert_alignment),
            *_row_fields(call, row_bytes, num_scales),
            Layout.MASK if topk_idx is None else Layout.TOPK,
            _EXPANDED if call.expand else 0,
            call.num_worst_tokens is not None,
            *(capacity, rows, meta),
            meta + parts.weights_at // OFFSET_UNIT,
            meta + parts.index_at // OFFSET_UNIT,
        )
        told = None
        if call.num_worst_tokens is None:
            told = core.wait_counts(ranks + local, turn.stream, (blocks[0], blocks[1]))
        else:
            core.news.at_risk(*blocks)
        return self._received(call, turn, words, blocks, parts, local, told)

    def _words(self, turn: Turn, number: int) -> Any:
        if turn.plain:
            return self._core.cupy.empty(number, self._core.cupy.int32)
        return turn.empty((number,), self._core.cupy.int32)

    def _received(
        self,
        call: DispatchCall,
        turn: Turn,
        words: Any,
        blocks: list[Block],
        parts: _Meta,
        local: int,
        told: list[int] | None,
    ) -> DispatchOutput:
        """The results: arrays over the blocks. ``told``: rows per rank and per expert."""
        core, x, topk_idx, scales = self._core, call.x, call.topk_idx, call.scales
        array, ranks, hidden = core.arrays.array, core.spec.num_ranks, x.shape[1]
        meta, rows = blocks
        if told is None:
            number = call.num_worst_tokens or 0
        else:
            number = sum(told[:ranks])
            core.pool.shrink(rows, number * hidden * x.itemsize)
            if scales is not None:
                core.pool.shrink(meta, parts.scales_at + 4 * number * scales.shape[1])
        at = core.arrays.own(meta)
        recv_x = array(core.arrays.own(rows), (number, hidden), x.dtype)
        recv_idx = recv_weights = recv_scales = None
        if topk_idx is not None:
            topk = topk_idx.shape[1]
            recv_idx = array(at, (number, topk), topk_idx.dtype, parts.index_at)
            if call.topk_weights is not None:
                recv_weights = array(at, (number, topk), core.cupy.float32, parts.weights_at)
        if scales is not None:
            shape = (number, scales.shape[1])
            recv_scales = array(at, shape, scales.dtype, parts.scales_at)
        routing = CudaRouting.made_of(
            num_tokens=len(x),
            num_recv_tokens=number,
            waited=told is not None,
            expert_alignment=call.expert_alignment,
            host_rows_per_rank=None if told is None else tuple(told[:ranks]),
            _words=words,
            _num_ranks=ranks,
            _num_experts=local,
            _source_indices=lambda: array(at, (number,), core.cupy.int32),
        )
        counts = None if told is None else told[ranks:]
        return self._output(
            call, turn, recv_x, recv_idx, recv_weights, recv_scales, routing, counts
        )

    # --------------------------------------------------------------------------- cached routes

    def _cached(self, call: DispatchCall, routing: Routing, turn: Turn) -> DispatchOutput:
        core, x, weights, scales = self._core, call.x, call.topk_weights, call.scales
        known, number = addresses_of(routing), routing.num_recv_tokens
        row_bytes, topk = x.shape[1] * x.itemsize, 0 if weights is None else weights.shape[1]
        num_scales = 0 if scales is None else scales.shape[1]
        parts = _Meta(number, 0, topk, weights is not None, 0, num_scales)
        wanted = [(number * row_bytes, "recv_x of dispatch()")]
        if weights is not None or scales is not None:
            wanted.append((parts.nbytes, "weights of dispatch()"))
        blocks = turn.alloc(*wanted)
        rows, meta = blocks[0], blocks[-1]
        self._launch(
            turn,
            call,
            blocks,
            *_inputs(call),
            *(known.send_row, 0, 0, 0, 0, 0, 0, known.birth, known.num_real),
            *(len(x), topk, weights is not None, 0),
            *(0, 1, 0, core.control.experts, 1),
            *_row_fields(call, row_bytes, num_scales),
            Layout.CACHED,
            _EXPANDED if call.expand else 0,
            not routing.waited,
            number,
            rows.offset // OFFSET_UNIT,
            meta.offset // OFFSET_UNIT,
            meta.offset // OFFSET_UNIT,
            (meta.offset + parts.index_at) // OFFSET_UNIT,
        )
        core.news.at_risk(*blocks)
        array, own = core.arrays.array, core.arrays.own
        recv_x = array(own(rows), (number, x.shape[1]), x.dtype)
        recv_weights = recv_scales = None
        if meta is not rows:
            at = own(meta)
            if weights is not None:
                recv_weights = array(at, (number, topk), core.cupy.float32)
            if scales is not None:
                recv_scales = array(at, (number, num_scales), scales.dtype, parts.scales_at)
        return self._output(call, turn, recv_x, None, recv_weights, recv_scales, routing, None)

    # ------------------------------------------------------------------------------ both kinds

    def _launch(self, turn: Turn, call: DispatchCall, blocks: list[Block], *fields: int) -> None:
        """Launch with the fields of ``DispatchCommon`` in their order."""
        core = self._core
        name = "dispatch_bulk" if fields[_ACCESS] == 16 and core.bulk else "dispatch"
        try:
            grid = core.grid_plan(call.num_sms).dispatch(len(call.x))
            launch = core.kernels.get(name, grid, Kind.DISPATCH)
            launch.operation(*fields)
            launch(core.serial, turn.stream.ptr)
        except BaseException:
            core.give_back(blocks)
            raise
        core.launched(turn)

    def _output(
        self,
        call: DispatchCall,
        turn: Turn,
        recv_x: Any,
        recv_idx: Any,
        recv_weights: Any,
        recv_scales: Any,
        routing: Routing,
        counts: list[int] | None,
    ) -> DispatchOutput:
        """Put what came into the form the call wants. ``counts``: rows of each local expert."""
        if call.expand:
            recv_x, recv_weights, recv_scales, routing = self._expanded(
                turn, call, recv_x, recv_scales, recv_idx, recv_weights, routing, counts
            )
            recv_idx = None
        if recv_scales is not None and call.scales_layout == "column":
            recv_scales = self._columns(recv_scales, routing, turn)
        if call.own:
            recv_x, recv_idx, recv_weights, recv_scales = map(
                turn.copy, (recv_x, recv_idx, recv_weights, recv_scales)
            )
        event = None
        if not turn.plain or self._core.foreign:
            event = self._core.settle(turn, call, call.streams)
        per_expert, unit = counts or [], call.expert_alignment
        if unit > 1:
            per_expert = [align(count, unit) for count in per_expert]
        return DispatchOutput(
            recv_x, recv_idx, recv_weights, per_expert, routing, recv_scales, event
        )

    def _expanded(
        self,
        turn: Turn,
        call: DispatchCall,
        rows: Any,
        scales: Any,
        topk_idx: Any,
        weights: Any,
        routing: Routing,
        counts: list[int] | None,
    ) -> tuple[Any, Any, Any, Routing]:
        """Rows, weights, scales and routing in the expanded layout."""
        known: Any = routing
        told = None if counts is None else tuple(counts)
        real = addresses_of(routing).num_real
        received = Received(call, rows, scales, topk_idx, weights, known, told, real)
        done = expand(self._core, received, turn)
        return done.rows, done.topk_weights, done.scales, done.routing

    def _columns(self, scales: Any, routing: Routing, turn: Turn) -> Any:
        """The same scales in column-major order: a copy in ordinary memory."""
        number, columns = scales.shape
        made = turn.empty((columns, number), scales.dtype)
        if scales.size:
            core = self._core
            real = 0 if routing.expanded else addresses_of(routing).num_real
            launch = core.kernels.local("columns", local_blocks(core.grids, -(-number // 32)))
            launch.operation(scales.data.ptr, made.data.ptr, real, number, columns)
            launch(turn.stream.ptr)
        return made.T


def _inputs(call: DispatchCall) -> tuple[int, ...]:
    """The first fields of ``DispatchCommon``: what is sent."""
    scales = call.scales
    if scales is None:
        where = (0, 0, 0)
    else:
        where = (scales.data.ptr, scales.strides[0] // 4, scales.strides[1] // 4)
    return (
        call.x.data.ptr,
        address(call.topk_idx),
        address(call.topk_weights),
        address(call.is_token_in_rank),
        *where,
    )


def _row_fields(call: DispatchCall, row_bytes: int, num_scales: int) -> tuple[int, ...]:
    x = call.x
    access = access_bytes(row_bytes, (x.data.ptr,), _NARROW)
    return row_bytes, num_scales, access, dtype_code_of(x.dtype, call.scales)
