"""Combine of the expanded layout on GPUs: every copy travels, or one sum a rank."""

from __future__ import annotations

from typing import Any, Protocol

from deepep_cupy.engines.base import CombineCall
from deepep_cupy.engines.gpu.core import Core, address, dtype_code_of
from deepep_cupy.engines.gpu.received import addresses_of
from deepep_cupy.engines.gpu.streams import Turn
from deepep_cupy.plan.headers import OFFSET_UNIT, Kind, Layout, LayoutFlag, layout_word
from deepep_cupy.plan.launch import access_bytes
from deepep_cupy.plan.local import local_blocks

__all__ = ["PlainCombine", "combine_expanded"]


class PlainCombine(Protocol):
    """``Combiner.launch``: the combine of rows ``[N, H]`` that are in place."""

    def __call__(
        self,
        call: CombineCall,
        turn: Turn,
        out: Any,
        out_weights: Any,
        rows_offset: int,
        own_rows: int,
        weights_offset: int,
        topk: int,
        layout: int,
        /,
    ) -> None: ...


def combine_expanded(
    core: Core, plain: PlainCombine, call: CombineCall, turn: Turn, out: Any, out_weights: Any
) -> None:
    """Launch the combine of a call whose routing is expanded.

    Args:
        core: The engine's parts.
        plain: Launches an ordinary combine.
        call: The call.
        turn: Its turn.
        out: ``[T, H]``.
        out_weights: ``[T, K]`` float32, or None.
    """
    if call.reduce == "per_rank":
        _per_rank(core, plain, call, turn, out, out_weights)
    else:
        _exact(core, call, turn, out, out_weights)


def _layout(call: CombineCall, flags: LayoutFlag) -> int:
    if call.row_weights is not None:
        flags |= LayoutFlag.ROW_WEIGHTS
    return layout_word(Layout.NONE, LayoutFlag.EXPANDED | flags)


def _per_rank(
    core: Core, plain: PlainCombine, call: CombineCall, turn: Turn, out: Any, out_weights: Any
) -> None:
    """A pass over this rank's copies makes one row of each received token; those are combined."""
    x, routing, weights, base = call.x, call.routing, call.topk_weights, core.memory.region.base
    table: Any = routing.expanded_row
    tokens, topk = table.shape
    row_bytes = x.shape[1] * x.itemsize
    sums = core.stage(tokens * row_bytes, turn, "sums of combine()").offset
    carried = 0
    if weights is not None:
        carried = core.stage(4 * tokens * topk, turn, "weights of combine()").offset
    if tokens:
        launch = core.kernels.local("reduce_copies", local_blocks(core.grids, tokens))
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
        launch(turn.stream.ptr)
    plain(
        call,
        turn,
        out,
        out_weights,
        sums,
        base + sums,
        carried,
        topk if weights is not None else 0,
        _layout(call, LayoutFlag.PER_RANK),
    )


def _exact(core: Core, call: CombineCall, turn: Turn, out: Any, out_weights: Any) -> None:
    """The tokens' ranks fetch the copies one by one, by way of the peers' tables."""
    x, routing, weights = call.x, call.routing, call.topk_weights
    table: Any = routing.expanded_row
    row_bytes, tokens, known = x.shape[1] * x.itemsize, routing.num_tokens, addresses_of(routing)
    factors = weights_offset = 0
    rows_offset = core.place(x, turn, "rows of combine()")
    index_offset = core.place(table, turn, "expanded_row of combine()")
    if weights is not None:
        weights_offset = core.place(weights, turn, "weights of combine()")
    if call.row_weights is not None:
        factors = core.place(call.row_weights, turn, "row_weights of combine()")
    biases = [bias.data.ptr for bias in call.biases]
    access = access_bytes(row_bytes, (x.data.ptr, out.data.ptr, *biases), (x.itemsize,))
    biases += [0] * (2 - len(biases))
    grid = core.grid_plan(call.num_sms).combine(tokens)
    launch = core.kernels.get("combine_expanded", grid, Kind.COMBINE)
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
    launch(core.serial, turn.stream.ptr)
    core.launched(turn)
    if turn.staged:
        core.news.at_risk(turn.staged)
