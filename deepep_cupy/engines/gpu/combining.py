"""Combine on GPUs: rows where the peers can read them, one launch."""

from __future__ import annotations

from typing import Any

from deepep_cupy.engines.base import CombineCall, CombineOutput
from deepep_cupy.engines.gpu.combining_expanded import combine_expanded
from deepep_cupy.engines.gpu.core import Core, address, dtype_code_of
from deepep_cupy.engines.gpu.received import addresses_of
from deepep_cupy.engines.gpu.streams import Turn
from deepep_cupy.errors import ContractError
from deepep_cupy.plan.headers import ARGUMENTS, OFFSET_UNIT, Kind, Layout, Refusal, RefusalCode
from deepep_cupy.plan.launch import access_bytes
from deepep_cupy.plan.local import local_blocks

__all__ = ["Combiner"]


class Combiner:
    """Runs combines on a ``Core``."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def run(self, call: CombineCall) -> CombineOutput:
        """See ``engines.base.Engine.combine``. On the engine's device, which is current."""
        core, out, weights = self._core, call.out, call.topk_weights
        if out is not None:
            self._check_out(call)
        turn = core.begin(call.streams)
        try:
            routing, x = call.routing, call.x
            tokens, topk = routing.num_tokens, 0
            if out is None:
                out = self._empty(turn, (tokens, x.shape[1]), x.dtype)
            out_weights = None
            if weights is not None:
                table: Any = routing.expanded_row
                topk = weights.shape[1] if table is None else table.shape[1]
                out_weights = self._empty(turn, (tokens, topk), core.cupy.float32)
            if routing.expanded:
                combine_expanded(core, self.launch, call, turn, out, out_weights)
            else:
                self._plain(call, turn, out, out_weights, topk)
            event = None
            if not turn.plain or core.foreign:
                event = core.settle(turn, call, call.streams)
        except BaseException:
            core.settle_failed(turn, call)
            raise
        finally:
            core.end(turn)
        return CombineOutput(out, out_weights, event)

    def _plain(self, call: CombineCall, turn: Turn, out: Any, out_weights: Any, topk: int) -> None:
        rows_offset, own_rows = self._place_rows(call, turn)
        weights_offset = 0
        if call.topk_weights is not None:
            weights_offset = self._core.place(call.topk_weights, turn, "weights of combine()")
        self.launch(call, turn, out, out_weights, rows_offset, own_rows, weights_offset, topk)

    def launch(
        self,
        call: CombineCall,
        turn: Turn,
        out: Any,
        out_weights: Any,
        rows_offset: int,
        own_rows: int,
        weights_offset: int,
        topk: int,
        layout: int = Layout.NONE,
    ) -> None:
        """Launch the kernel over rows that are in place.

        Args:
            call: The call.
            turn: Its turn.
            out: ``[T, H]``.
            out_weights: ``[T, K]`` float32, or None.
            rows_offset: Where the peers find this rank's rows in the region.
            own_rows: Where this rank finds the rows of its own tokens; an address.
            weights_offset: Where the peers find this rank's weights ``[N, K]``.
            topk: K, 0 without weights.
            layout: Word of the header.
        """
        core, routing, x = self._core, call.routing, call.x
        row_bytes, tokens = x.shape[1] * x.itemsize, routing.num_tokens
        known = addresses_of(routing)
        biases = [bias.data.ptr for bias in call.biases]
        access = access_bytes(row_bytes, (own_rows, out.data.ptr, *biases), (x.itemsize,))
        biases += [0] * (2 - len(biases))
        name = "combine_bulk" if access == 16 and core.bulk else "combine"
        grid = core.grid_plan(call.num_sms).combine(tokens)
        launch = core.kernels.get(name, grid, Kind.COMBINE)
        launch.operation(
            own_rows,
            out.data.ptr,
            address(out_weights),
            *biases,
            known.send_row,
            known.birth,
            tokens,
            routing.num_recv_tokens,
            topk,
            out_weights is not None,
            row_bytes,
            access,
            dtype_code_of(x.dtype),
            rows_offset // OFFSET_UNIT,
            weights_offset // OFFSET_UNIT,
            layout,
        )
        launch(core.serial, turn.stream.ptr)
        core.launched(turn)
        if turn.staged:
            core.news.at_risk(*turn.staged)

    def _empty(self, turn: Turn, shape: tuple[int, int], dtype: Any) -> Any:
        return self._core.cupy.empty(shape, dtype) if turn.plain else turn.empty(shape, dtype)

    def _check_out(self, call: CombineCall) -> None:
        """The result must not be written over what is still to be read."""
        out: Any = call.out
        low, high = out.data.ptr, out.data.ptr + out.nbytes
        for other in (call.x, call.topk_weights, call.row_weights, *call.biases):
            if other is None or not other.nbytes:
                continue
            if other.data.ptr < high and low < other.data.ptr + other.nbytes:
                raise ContractError(
                    f"combine(): argument 'out' must share no memory with another argument, on "
                    f"rank {self._core.spec.rank}.",
                    Refusal(RefusalCode.ARGUMENT, ARGUMENTS.index("out")),
                )

    def _place_rows(self, call: CombineCall, turn: Turn) -> tuple[int, int]:
        """Where the peers find the rows (offset in the region), and where this rank does.

        Rows outside the pool are copied into it, but for those of this rank's own tokens; where
        no host knows how many rows there are, by a kernel that looks, so that nobody copies the
        worst case.
        """
        core, x = self._core, call.x
        offset = core.arrays.find(x) if x.nbytes else core.control.nbytes
        source = x.data.ptr
        if offset is not None and offset % OFFSET_UNIT == 0:
            return offset, source
        block = core.stage(x.nbytes, turn, "rows of combine()")
        to, row_bytes = core.memory.region.base + block.offset, x.shape[1] * x.itemsize
        counts = getattr(call.routing, "host_rows_per_rank", None)
        rank, stream = core.spec.rank, turn.stream
        if counts is None:
            return block.offset, self._stage_real(call, turn, to)
        if source % OFFSET_UNIT:
            core.copy_bytes(to, source, x.nbytes, stream)
            return block.offset, to
        before = sum(counts[:rank]) * row_bytes
        behind = before + counts[rank] * row_bytes
        core.copy_bytes(to, source, before, stream)
        core.copy_bytes(to + behind, source + behind, x.nbytes - behind, stream)
        return block.offset, source

    def _stage_real(self, call: CombineCall, turn: Turn, to: int) -> int:
        """Copy the rows that were really received; where this rank finds its own."""
        core, x = self._core, call.x
        source: int = x.data.ptr
        rank, own = core.spec.rank, source
        if source % OFFSET_UNIT:
            rank, own = core.spec.num_ranks, to  # the fast path reads whole words
        if x.nbytes:
            row_bytes = x.shape[1] * x.itemsize
            access = access_bytes(row_bytes, (source, to), (4, 1))
            counts = addresses_of(call.routing).rows_per_rank
            launch = core.kernels.local("stage", local_blocks(core.grids, len(x)))
            launch.operation(source, to, counts, rank, row_bytes, access)
            launch(turn.stream.ptr)
        return own
