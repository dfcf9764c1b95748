"""Dispatch on GPUs: blocks for what will come, one launch, arrays over what came."""

from __future__ import annotations

from typing import Any

from deepep_cupy.engines.base import DispatchCall, DispatchOutput, Routing
from deepep_cupy.engines.gpu.core import Core, address, copy_of, dtype_code_of
from deepep_cupy.errors import ContractError
from deepep_cupy.plan.headers import OFFSET_UNIT, Kind, Layout
from deepep_cupy.plan.launch import access_bytes
from deepep_cupy.plan.layout import align
from deepep_cupy.transport.block import Block

__all__ = ["CudaRouting", "Dispatcher"]

_NARROW = (4, 1)
"""Access widths where rows or bases are no multiple of 16 bytes."""


class CudaRouting(Routing):
    """A routing whose row counts the host knows too.

    Attributes:
        host_rows_per_rank: Rows received from each rank.
    """

    host_rows_per_rank: tuple[int, ...]


class Dispatcher:
    """Runs dispatches on a ``Core``."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._experts = core.spec.num_experts or 0

    def run(self, call: DispatchCall) -> DispatchOutput:
        """See ``engines.base.Engine.dispatch``. On the engine's device, which is current."""
        stream, capturing = self._core.begin()
        if call.routing is not None:
            return self._cached(call, call.routing, stream)
        if capturing:
            raise ContractError(
                "dispatch(): the host must wait for the counts, which is not possible while a "
                "graph is being captured; capture calls with a handle instead."
            )
        return self._new(call, stream)

    def _new(self, call: DispatchCall, stream: Any) -> DispatchOutput:
        core, x, topk_idx = self._core, call.x, call.topk_idx
        cupy, ranks, capacity = core.cupy, core.spec.num_ranks, core.spec.max_recv_tokens
        tokens, hidden = x.shape
        topk, index_bytes, experts = 0, 0, 0
        if topk_idx is not None:
            topk, index_bytes, experts = topk_idx.shape[1], topk_idx.itemsize, self._experts
        row_bytes, has_weights = hidden * x.itemsize, call.topk_weights is not None
        weights_at = align(4 * capacity, OFFSET_UNIT)
        index_at = weights_at + align(4 * capacity * topk * has_weights, OFFSET_UNIT)
        meta_bytes = index_at + capacity * topk * index_bytes
        words = cupy.empty(tokens * ranks + ranks + 1, cupy.int32)
        blocks = core.alloc(
            stream,
            (meta_bytes, "indices of dispatch()"),
            (capacity * row_bytes, "recv_x of dispatch()"),
        )
        meta, rows = blocks
        send_row = words.data.ptr
        per_rank = send_row + 4 * tokens * ranks
        self._launch(
            stream,
            blocks,
            x.data.ptr,
            address(topk_idx),
            address(call.topk_weights),
            address(call.is_token_in_rank),
            *(0, 0, 0),
            send_row,
            per_rank,
            *(0, 0, 0, 0),
            per_rank + 4 * ranks,
            *(0, 0),
            tokens,
            topk,
            has_weights,
            index_bytes,
            experts,
            max(1, experts // ranks),
            experts // ranks,
            core.control.experts,
            1,
            row_bytes,
            0,
            access_bytes(row_bytes, (x.data.ptr,), _NARROW),
            dtype_code_of(x.dtype),
            Layout.MASK if topk_idx is None else Layout.TOPK,
            *(0, 0),
            capacity,
            rows.offset // OFFSET_UNIT,
            meta.offset // OFFSET_UNIT,
            (meta.offset + weights_at) // OFFSET_UNIT,
            (meta.offset + index_at) // OFFSET_UNIT,
        )
        counts = core.wait_counts(ranks + experts // ranks, stream, (meta, rows))
        number = sum(counts[:ranks])
        core.pool.shrink(rows, number * row_bytes)
        array, meta_at = core.arrays.array, core.arrays.own(meta)
        recv_x = array(core.arrays.own(rows), (number, hidden), x.dtype)
        recv_idx = recv_weights = None
        if topk_idx is not None:
            recv_idx = array(meta_at, (number, topk), topk_idx.dtype, index_at)
        if has_weights:
            recv_weights = array(meta_at, (number, topk), cupy.float32, weights_at)
        routing = CudaRouting(
            num_tokens=tokens,
            num_recv_tokens=number,
            recv_src_idx=array(meta_at, (number,), cupy.int32),
            recv_rows_per_rank=words[tokens * ranks : -1],
            send_row=words[: tokens * ranks].reshape(tokens, ranks),
            birth=words[-1:],
        )
        object.__setattr__(routing, "host_rows_per_rank", tuple(counts[:ranks]))
        unit, per_expert = call.expert_alignment, counts[ranks:]
        if unit > 1:
            per_expert = [align(count, unit) for count in per_expert]
        if call.own:
            recv_x, recv_idx, recv_weights = map(copy_of, (recv_x, recv_idx, recv_weights))
        return DispatchOutput(recv_x, recv_idx, recv_weights, per_expert, routing)

    def _cached(self, call: DispatchCall, routing: Routing, stream: Any) -> DispatchOutput:
        core, x, weights = self._core, call.x, call.topk_weights
        row_bytes, number = x.shape[1] * x.itemsize, routing.num_recv_tokens
        topk = 0 if weights is None else weights.shape[1]
        wanted = [(number * row_bytes, "recv_x of dispatch()")]
        if weights is not None:
            wanted.append((4 * number * topk, "weights of dispatch()"))
        blocks = core.alloc(stream, *wanted)
        rows, meta = blocks[0], blocks[-1]
        self._launch(
            stream,
            blocks,
            x.data.ptr,
            0,
            address(weights),
            *(0, 0, 0, 0),
            routing.send_row.data.ptr,
            *(0, 0, 0, 0, 0, 0),
            routing.birth.data.ptr,
            0,
            len(x),
            topk,
            weights is not None,
            0,
            0,
            1,
            0,
            core.control.experts,
            1,
            row_bytes,
            0,
            access_bytes(row_bytes, (x.data.ptr,), _NARROW),
            dtype_code_of(x.dtype),
            Layout.CACHED,
            *(0, 0),
            number,
            rows.offset // OFFSET_UNIT,
            meta.offset // OFFSET_UNIT,
            meta.offset // OFFSET_UNIT,
            0,
        )
        core.news.at_risk(*blocks)
        recv_x = core.arrays.array(core.arrays.own(rows), (number, x.shape[1]), x.dtype)
        recv_weights = None
        if weights is not None:
            recv_weights = core.arrays.array(
                core.arrays.own(meta), (number, topk), core.cupy.float32
            )
        if call.own:
            recv_x, recv_weights = copy_of(recv_x), copy_of(recv_weights)
        return DispatchOutput(recv_x, None, recv_weights, [], routing)

    def _launch(self, stream: Any, blocks: list[Block], *fields: int) -> None:
        """Launch with the fields of ``DispatchCommon`` in their order."""
        core, tokens, access = self._core, fields[16], fields[27]
        name = "dispatch_bulk" if access == 16 and core.bulk else "dispatch"
        try:
            launch = core.kernels.get(name, core.grids.dispatch(tokens), Kind.DISPATCH)
            launch.operation(*fields)
            launch(core.serial, stream.ptr)
        except BaseException:
            core.give_back(blocks)
            raise
