"""Combine on GPUs: rows where the peers can read them, one launch."""

from __future__ import annotations

from typing import Any

from deepep_cupy.engines.base import CombineCall, CombineOutput, Routing
from deepep_cupy.engines.gpu.core import Core, address, dtype_code_of
from deepep_cupy.plan.headers import OFFSET_UNIT, Kind, Layout
from deepep_cupy.plan.launch import access_bytes
from deepep_cupy.transport.block import Block

__all__ = ["Combiner"]


class Combiner:
    """Runs combines on a ``Core``."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._runtime: Any = core.cupy.cuda.runtime

    def run(self, call: CombineCall) -> CombineOutput:
        """See ``engines.base.Engine.combine``. On the engine's device, which is current."""
        core, routing, weights, x = self._core, call.routing, call.topk_weights, call.x
        cupy = core.cupy
        stream, _ = core.begin()
        tokens, hidden = routing.num_tokens, x.shape[1]
        row_bytes, topk = hidden * x.itemsize, 0 if weights is None else weights.shape[1]
        out = cupy.empty((tokens, hidden), x.dtype)
        out_weights = None if weights is None else cupy.empty((tokens, topk), cupy.float32)
        staged: list[Block] = []
        try:
            rows_offset, own_rows = self._place_rows(x, routing, stream, staged)
            weights_offset = 0 if weights is None else self._place(weights, stream, staged)
            biases = [bias.data.ptr for bias in call.biases]
            access = access_bytes(row_bytes, (own_rows, out.data.ptr, *biases), (x.itemsize,))
            biases += [0] * (2 - len(biases))
            name = "combine_bulk" if access == 16 and core.bulk else "combine"
            launch = core.kernels.get(name, core.grids.combine(tokens), Kind.COMBINE)
            launch.operation(
                own_rows,
                out.data.ptr,
                address(out_weights),
                *biases,
                routing.send_row.data.ptr,
                routing.birth.data.ptr,
                tokens,
                routing.num_recv_tokens,
                topk,
                weights is not None,
                row_bytes,
                access,
                dtype_code_of(x.dtype),
                rows_offset // OFFSET_UNIT,
                weights_offset // OFFSET_UNIT,
                Layout.NONE,
            )
            launch(core.serial, stream.ptr)
            core.news.at_risk(*staged)
        finally:
            core.give_back(staged)  # in stream order: behind the kernel, and so behind all readers
        return CombineOutput(out, out_weights)

    def _place_rows(
        self, x: Any, routing: Routing, stream: Any, staged: list[Block]
    ) -> tuple[int, int]:
        """Where the peers find the rows (offset in the region), and where this rank does.

        Rows outside the pool are copied into it, but for those of this rank's own tokens.
        """
        core = self._core
        offset = core.arrays.find(x) if x.nbytes else core.control.nbytes
        if offset is not None and offset % OFFSET_UNIT == 0:
            return offset, x.data.ptr
        block = core.pool.alloc(x.nbytes, stream, "rows of combine()")
        staged.append(block)
        to, row_bytes = core.memory.region.base + block.offset, x.shape[1] * x.itemsize
        counts = getattr(routing, "host_rows_per_rank", None)
        rank = core.spec.rank
        if counts is None or x.data.ptr % OFFSET_UNIT:
            self._copy(to, x.data.ptr, x.nbytes, stream)
            return block.offset, to
        before = sum(counts[:rank]) * row_bytes
        behind = before + counts[rank] * row_bytes
        self._copy(to, x.data.ptr, before, stream)
        self._copy(to + behind, x.data.ptr + behind, x.nbytes - behind, stream)
        return block.offset, x.data.ptr

    def _place(self, array: Any, stream: Any, staged: list[Block]) -> int:
        core = self._core
        offset = core.arrays.find(array) if array.nbytes else core.control.nbytes
        if offset is not None and offset % OFFSET_UNIT == 0:
            return offset
        block = core.pool.alloc(array.nbytes, stream, "weights of combine()")
        staged.append(block)
        self._copy(core.memory.region.base + block.offset, array.data.ptr, array.nbytes, stream)
        return block.offset

    def _copy(self, to: int, source: int, nbytes: int, stream: Any) -> None:
        if nbytes:
            runtime = self._runtime
            runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)
