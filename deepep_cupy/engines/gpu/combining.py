"""Combine on GPUs: rows where the peers can read them, one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepep_cupy.engines.base import CombineCall, CombineOutput
from deepep_cupy.engines.gpu.combining_expanded import combine_expanded
from deepep_cupy.engines.gpu.core import Core, address, dtype_code_of
from deepep_cupy.engines.gpu.received import FLOAT32, addresses_of
from deepep_cupy.engines.gpu.streams import Turn
from deepep_cupy.errors import ContractError
from deepep_cupy.plan.headers import ARGUMENTS, OFFSET_UNIT, Kind, Refusal, RefusalCode
from deepep_cupy.plan.launch import GridPlan, access_bytes
from deepep_cupy.plan.local import local_blocks

__all__ = ["Combiner"]

_COMBINE = Kind.COMBINE


@dataclass(frozen=True, slots=True)
class _Plan:
    """What combines of one form have in common.

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
    """Runs combines on a ``Core``."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._new: Any = core.cupy.empty

    def run(self, call: CombineCall) -> CombineOutput:
        """See ``engines.base.Engine.combine``. On the engine's device, which is current."""
        core, out, weights = self._core, call.out, call.topk_weights
        if out is not None:
            self._check_out(call)
        turn = core.begin(call.streams)
        try:
            routing, x = call.routing, call.x
            table: Any = routing.expanded_row
            tokens, topk = routing.num_tokens, 0
            if out is None:
                out = self._empty(turn, (tokens, x.shape[1]), x.dtype)
            out_weights = None
            if weights is not None:
                topk = weights.shape[1] if table is None else table.shape[1]
                out_weights = self._empty(turn, (tokens, topk), FLOAT32)
            if table is not None:
                combine_expanded(core, self.launch, call, turn, out, out_weights)
            else:
                rows_offset, own_rows = self._place_rows(call, turn)
                weights_offset = 0
                if weights is not None:
                    weights_offset = core.place(weights, turn, "weights of combine()")
                self.launch(
                    call, turn, out, out_weights, rows_offset, own_rows, weights_offset, topk
                )
            event = None
            if not turn.plain or core.foreign:
                event = core.settle(turn, call, call.streams)
        except BaseException:
            core.settle_failed(turn, call)
            raise
        finally:
            core.end(turn)
        return CombineOutput(out, out_weights, event)

    def _plan(self, call: CombineCall) -> _Plan:
        """Make the plan of a form."""
        x = call.x
        row_bytes, narrow = x.shape[1] * x.itemsize, x.itemsize
        grids = self._core.grid_plan(call.num_sms)
        access = access_bytes(row_bytes, (), (narrow,))
        plan = _Plan(row_bytes, access, narrow, dtype_code_of(x.dtype), grids)
        call.form.plan = plan
        return plan

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
        layout: int = 0,
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
        core, routing, biases = self._core, call.routing, call.biases
        plan: _Plan = call.form.plan or self._plan(call)
        tokens, known, result = routing.num_tokens, addresses_of(routing), out.data.ptr
        first = biases[0].data.ptr if biases else 0
        second = biases[1].data.ptr if len(biases) > 1 else 0
        access = plan.access
        if (own_rows | result | first | second) % access:
            addresses = (own_rows, result, first, second)
            access = access_bytes(plan.row_bytes, addresses, (plan.narrow,))
        name = "combine_bulk" if access == 16 and core.bulk else "combine"
        launch = core.kernels.get(name, plan.grids.combine(tokens), _COMBINE)
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
            plan.row_bytes,
            access,
            plan.dtype,
            rows_offset // OFFSET_UNIT,
            weights_offset // OFFSET_UNIT,
            layout,
        )
        launch(core.serial, turn.stream.ptr)
        core.launched(turn)
        if turn.staged:
            core.news.at_risk(turn.staged)

    def _empty(self, turn: Turn, shape: tuple[int, int], dtype: Any) -> Any:
        return self._new(shape, dtype) if turn.plain else turn.empty(shape, dtype)

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
