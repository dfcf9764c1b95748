"""The engine of a machine with no GPU: NumPy arrays, and messages between the ranks' processes.

An operation has two phases. Every rank sends every other its header and its row counts, and all
reach the same verdict. Then the rows travel (``moves.py``, ``wire.py``). What a rank does with its
own arrays is the reference's arithmetic. All waits are bounded; see ``ranks/rendezvous.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.engines.calls import CombineCall, DispatchCall, Routing
from deepep_cupy.engines.host.arrays import ArrayImporter
from deepep_cupy.engines.host.cast import cast
from deepep_cupy.engines.host.moves import (
    HostRouting,
    Mover,
    gather_weights,
    masked_weights,
    other_ranks,
    rank_bounds,
    rows_of,
    terms_of,
    whole_items,
)
from deepep_cupy.engines.host.rail import PATIENCE_S, Batch, Rail
from deepep_cupy.engines.host.wire import CHUNK_BYTES, Wire
from deepep_cupy.engines.protocol import ALL_MODES, CombineOutput, DispatchLayout, DispatchOutput
from deepep_cupy.errors import ContractError
from deepep_cupy.protocol.headers import (
    ARGUMENTS,
    WORDS,
    Kind,
    Layout,
    LayoutFlag,
    Refusal,
    RefusalCode,
    call_word,
    dtype_code,
    dtype_label,
    layout_word,
    refused_elsewhere,
    tagged,
    verdict,
)
from deepep_cupy.protocol.nodes import NodeMap
from deepep_cupy.protocol.rail import RailPart, plan_rail
from deepep_cupy.protocol.sizes import BufferSpec, worst_expanded_rows
from deepep_cupy.ranks.abort_board import Abort, AbortBoard, AbortReason
from deepep_cupy.ranks.group import Group
from deepep_cupy.ranks.rendezvous import Hurry, Rendezvous
from deepep_cupy.reference import get_dispatch_layout
from deepep_cupy.reference.checks import names_an_expert_twice, names_no_expert
from deepep_cupy.reference.combine import Terms, add, sum_copies
from deepep_cupy.reference.layout import (
    Handle,
    count_experts,
    expand,
    local_choices,
    padding_rows,
    place,
    place_weights,
    send_rows,
)
from deepep_cupy.reference.low_latency import source_info, transposed

__all__ = ["HostEngine", "HostEvent", "check_experts"]

_FIRST_EPOCH = 1


class HostEvent:
    """The end of an operation that is over when its call returns."""

    def wait(self) -> None:
        """See ``engines.protocol.Event``: nothing is left to wait for."""


class HostEngine:
    """See ``engines.protocol.Engine``.

    Args:
        group: The ranks; their communicator is ours alone.
        board: Their abort board.
        spec: Sizes of the Buffer.
        chunk_bytes: Largest message.
    """

    name = "host"
    device: int | None = None
    modes = ALL_MODES

    def __init__(
        self,
        group: Group,
        board: AbortBoard,
        spec: BufferSpec,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._intake = ArrayImporter(group.rank)
        self._board = board
        self._spec = spec
        self._rendezvous = Rendezvous(group, board, spec.timeout_s)
        self._wire = Wire(self._rendezvous, chunk_bytes)
        self._nodes = spec.nodes or NodeMap.one(spec.num_ranks)
        self._rail = Rail(self._wire, self._nodes, spec.rank)
        self._mover = Mover(self._wire, spec)
        self._epoch = _FIRST_EPOCH
        self._generation = 0

    # -------------------------------------------------------------------------------- local

    def array_module(self) -> ModuleType:
        """See ``Engine.array_module``."""
        return np

    def import_array(self, operation: str, argument: str, value: object) -> NDArray[Any]:
        """See ``Engine.import_array``."""
        return self._intake(operation, argument, value)

    def import_scales(self, operation: str, argument: str, value: object) -> NDArray[Any]:
        """See ``Engine.import_scales``."""
        return self._intake(operation, argument, value, strided=True)

    def array_key(self, value: object, strided: bool) -> tuple[Any, ...] | None:
        """See ``Engine.array_key``."""
        if type(value) is not np.ndarray or value.dtype.hasobject or not value.flags.writeable:
            return None
        return (value.shape, value.dtype) if strided or value.flags.c_contiguous else None

    def capture(self) -> HostEvent:
        """See ``Engine.capture``: all work is done when its call returns."""
        return HostEvent()

    def on(self, stream: int) -> AbstractContextManager[None]:
        """See ``Engine.on``: all work is done when its call returns."""
        del stream
        return nullcontext()

    def comm_stream(self) -> None:
        """See ``Engine.comm_stream``: the host has no streams."""

    def get_dispatch_layout(
        self, topk_idx: NDArray[Any], num_experts: int, kept: tuple[object, ...] = ()
    ) -> DispatchLayout:
        """See ``Engine.get_dispatch_layout``: it reads at once."""
        del kept
        counted = get_dispatch_layout(topk_idx, num_experts, self._spec.num_ranks)
        return DispatchLayout(
            counted.num_tokens_per_rank, counted.num_tokens_per_expert, counted.is_token_in_rank
        )

    def empty(self, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
        """See ``Engine.empty``: any memory will do here."""
        return np.empty(tuple(shape), dtype)

    def peer_pointers(self) -> tuple[int, ...]:
        """See ``Engine.peer_pointers``: rows travel in messages, no rank sees another's memory."""
        return ()

    def check(self) -> None:
        """See ``Engine.check``: nothing is left over, but another rank may have given up."""
        self._rendezvous.watch("check")

    # --------------------------------------------------------------------------- operations

    def barrier(self, tag: int | None = None) -> None:
        """See ``Engine.barrier``."""
        self._agree("barrier", {"kind": call_word(Kind.BARRIER, tagged(tag))}, self._no_rows())

    def refuse(self, kind: Kind, refusal: Refusal) -> None:
        """See ``Engine.refuse``."""
        words = {"kind": kind, "refusal": refusal.code, "refusal_value": refusal.value}
        try:
            self._agree(kind.name.lower(), words, self._no_rows())
        except ContractError:
            return

    def dispatch(self, call: DispatchCall) -> DispatchOutput:
        """See ``Engine.dispatch``."""
        x, scales = call.x, call.scales
        if call.plan.quantize is not None:
            kind = call.plan.quantize
            x, scales = cast(x, round_scale=kind.round_scale, use_ue8m0=kind.use_ue8m0)
        if scales is not None:
            scales = np.ascontiguousarray(scales)
        words = self._describe(Kind.DISPATCH, call.plan.tag, x, call.topk_weights, scales)
        if call.plan.num_worst_tokens is not None:
            words["capacity"] = call.plan.num_worst_tokens
        mask = self._route(call, words)
        flags = LayoutFlag.EXPANDED * call.plan.expand
        flags |= LayoutFlag.LOW_LATENCY * call.plan.low_latency
        most_tokens = call.plan.expert_rows // self._spec.num_ranks
        words["layout"] = layout_word(words["layout"], flags, most_tokens)
        dtype, x = x.dtype, whole_items(x)
        birth = self._epoch
        parts = self._rail_parts(mask)
        operation = call.plan.operation
        counts, records = self._agree(operation, words, mask.sum(axis=0, dtype=np.int64), parts)

        token = None
        if call.routing is None:
            token = np.arange(len(x), dtype=np.int32)
        own = Batch(None, x, scales, call.topk_idx, call.topk_weights, token)
        batches = self._rail.spread(own, parts, records)
        here = mask[:, list(self._rail.mates)] if parts else mask
        goes = [here if batch.flags is None else self._rail.goes(batch) for batch in batches]
        senders = [[np.flatnonzero(column) for column in each.T] for each in goes]
        choices = [self._choices(*each) for each in zip(batches, goes, strict=True)]
        bounds = rank_bounds(counts[:, self._spec.rank])
        num_rows = bounds[-1] if call.plan.num_worst_tokens is None else call.plan.num_worst_tokens
        if call.routing is not None:
            num_rows = call.routing.num_recv_tokens

        def move(arrays: list[NDArray[Any]]) -> NDArray[Any]:
            shares = [
                [rows_of(array, token) for token in tokens]
                for array, tokens in zip(arrays, senders, strict=True)
            ]
            return self._mover.move(shares, bounds, num_rows)

        local = None
        if choices[0] is not None:
            local = self._mover.move([each or [] for each in choices], bounds, num_rows)
        recv_x = move([batch.x for batch in batches])
        recv_scales = recv_weights = None
        src_idx = np.zeros(0, np.int32)
        if scales is not None:
            recv_scales = move([batch.scales for batch in batches])  # type: ignore[misc]
        if call.topk_weights is not None:
            weights = [
                masked_weights(batch.topk_weights, tokens, chosen)  # type: ignore[arg-type]
                for batch, tokens, chosen in zip(batches, senders, choices, strict=True)
            ]
            recv_weights = self._mover.move(weights, bounds, num_rows)
        if call.routing is None:
            src_idx = move([batch.token for batch in batches])  # type: ignore[misc]
        self._wire.wait(operation, "rows", PATIENCE_S * (len(batches) > 1))
        recv_x = recv_x.view(dtype)
        for array, nothing in ((src_idx, -1), (local, -1), (recv_weights, 0)):
            if array is not None:
                array[bounds[-1] :] = nothing
        if call.routing is not None:
            return self._output(call, call.routing, recv_x, recv_scales, recv_weights)
        handle = Handle(
            num_tokens=len(x),
            num_recv_tokens=num_rows,
            recv_src_idx=src_idx,
            recv_rows_per_rank=counts[:, self._spec.rank].astype(np.int32),
            send_row=send_rows(mask, counts, self._spec.rank),
            num_recv_tokens_per_expert_list=[],
        )
        if local is not None:
            handle = self._count(call, handle, local)
        routing = HostRouting.of(handle, bounds, birth, waited=call.plan.num_worst_tokens is None)
        if call.plan.low_latency:
            routing = replace(routing, low_latency=True, expert_rows=call.plan.expert_rows)
        if call.plan.expert_rows:
            info, ranges = source_info(handle, call.plan.expert_rows)
            routing = replace(routing, recv_src_info=info, recv_layout_range=ranges)
        if call.topk_idx is not None and call.plan.expand:
            chosen = choices[0] if len(batches) == 1 else self._choices(own, mask, every=True)
            routing = replace(routing, sent_columns=tuple(each >= 0 for each in chosen or ()))
        if len(batches) > 1:
            routing = replace(routing, relayed=tuple(goes))
        output = self._output(call, routing, recv_x, recv_scales, recv_weights)
        if not call.plan.expand:
            output.recv_topk_idx = local
        if routing.waited:
            output.num_recv_tokens_per_expert = handle.num_recv_tokens_per_expert_list
        return output

    def _route(self, call: DispatchCall, words: dict[str, int]) -> NDArray[np.bool_]:
        """Which token goes where."""
        spec, topk_idx = self._spec, call.topk_idx
        if call.routing is not None:
            words |= {"layout": Layout.CACHED, "birth": call.routing.birth}
            mask: NDArray[np.bool_] = call.routing.send_row >= 0
            return mask
        if topk_idx is None:
            words["layout"] = Layout.MASK
            return np.ascontiguousarray(call.is_token_in_rank, np.bool_)
        words |= {"layout": Layout.TOPK, "num_topk": topk_idx.shape[1]}
        words["index_bytes"] = topk_idx.itemsize
        num_experts = spec.num_experts or 0
        refusal = check_experts(topk_idx, num_experts)
        if refusal is not None:
            words |= {"refusal": refusal.code, "refusal_value": refusal.value}
        return get_dispatch_layout(topk_idx, num_experts, spec.num_ranks).is_token_in_rank

    def _choices(
        self, batch: Batch, goes: NDArray[np.bool_], *, every: bool = False
    ) -> list[NDArray[Any]] | None:
        """The choices that each rank of this node, or every rank, receives with its tokens."""
        if batch.topk_idx is None:
            return None
        ranks = range(self._spec.num_ranks) if every else self._rail.mates
        return [
            local_choices(batch.topk_idx[column], rank, self._spec.num_local_experts)
            for rank, column in zip(ranks, goes.T, strict=True)
        ]

    def _rail_parts(self, mask: NDArray[np.bool_]) -> list[RailPart]:
        """What goes to each node; empty on one node."""
        return [] if self._nodes.num_nodes == 1 else plan_rail(mask, self._nodes)

    def _count(self, call: DispatchCall, handle: Handle, local: NDArray[Any]) -> Handle:
        """Add the counts per expert and, in the expanded layout, the rows of the copies."""
        num_local, unit = self._spec.num_local_experts, call.plan.expert_alignment
        handle = count_experts(handle, local, num_local, unit)
        if not call.plan.expand:
            return handle
        handle = expand(handle, local, call.plan.expert_rows)
        if call.plan.num_worst_tokens is None or call.plan.expert_rows:
            return handle
        most = worst_expanded_rows(len(local), local.shape[1], num_local, unit)
        return replace(handle, num_expanded_tokens=most)

    def _output(
        self,
        call: DispatchCall,
        routing: Routing,
        rows: NDArray[Any],
        scales: NDArray[Any] | None,
        weights: NDArray[Any] | None,
    ) -> DispatchOutput:
        """The result, from what came with the received tokens, in the layout of the call."""
        if routing.expanded:
            zero = call.plan.zero_padding
            rows = _expanded(rows, routing, place, zero_padding=zero)
            if scales is not None:
                scales = _expanded(scales, routing, place, zero_padding=zero)
            if weights is not None:
                weights = _expanded(weights, routing, place_weights, zero_padding=zero)
        if scales is not None and call.plan.expert_rows:
            scales = transposed(scales.reshape(-1, call.plan.expert_rows, scales.shape[1]))
        elif scales is not None and call.plan.scales_layout == "column":
            scales = np.asfortranarray(scales)
        if call.recv_stats is not None:
            call.recv_stats[...] += routing.expert_counts
        return DispatchOutput(
            recv_x=rows,
            recv_topk_idx=None,
            recv_topk_weights=weights,
            num_recv_tokens_per_expert=[],
            routing=routing,
            recv_scales=scales,
            event=HostEvent() if call.streams.async_finish else None,
            receive=_receive_nothing if call.plan.hook else None,
        )

    def combine(self, call: CombineCall) -> CombineOutput:
        """See ``Engine.combine``."""
        self._check_out(call)
        routing, dtype = call.routing, call.x.dtype
        exact = routing.expanded and call.plan.reduce == "exact"
        by_node = call.plan.reduce == "per_node"
        words = self._describe(Kind.COMBINE, call.plan.tag, call.x, call.topk_weights, None)
        words["birth"] = routing.birth
        if routing.expanded and call.topk_weights is not None:
            words["num_topk"] = routing.expanded_row.shape[1]  # type: ignore[union-attr]
        words["layout"] = (
            LayoutFlag.EXPANDED * routing.expanded
            | LayoutFlag.PER_RANK * (routing.expanded and call.plan.reduce == "per_rank")
            | LayoutFlag.PER_NODE * by_node
            | LayoutFlag.ROW_WEIGHTS * (call.row_weights is not None)
            | LayoutFlag.LOW_LATENCY * routing.low_latency
            | LayoutFlag.TOKEN_WEIGHTS * (call.token_weights is not None)
        )
        operation = call.plan.operation
        bounds = rank_bounds(routing.recv_rows_per_rank)
        self._agree(operation, words, np.diff(bounds))

        rows, row_weights = call.x, call.row_weights
        if call.token_weights is not None:
            row_weights = self._weights_of_rows(call.token_weights, routing, bounds)
        if routing.expanded and not exact:
            real = routing.expanded_row[: bounds[-1]]  # type: ignore[index]
            rows, row_weights = sum_copies(rows, real, row_weights), None
        weights = None
        if call.topk_weights is not None and (routing.expanded or not by_node):
            copies = routing.expanded
            weights = self._mover.bring_back(call.topk_weights, routing, bounds, copies=copies)
        weight_terms: Terms = ()
        if by_node:
            terms, weight_terms = self._node_sums(call, rows, bounds)
        else:
            back = self._mover.bring_back(rows, routing, bounds, copies=exact)
            factors = None
            if row_weights is not None:
                factors = self._mover.bring_back(row_weights, routing, bounds, copies=True)
            self._wire.wait(operation, "rows")
            terms = terms_of(routing, back, factors, copies=exact)
            if weights is not None:
                weight_terms = terms_of(routing, weights, None, copies=False)
        combined_x = add((routing.num_tokens, call.x.shape[1]), dtype, call.biases, terms)
        if call.out is not None:
            call.out[...] = combined_x
            combined_x = call.out
        combined_weights = None
        if weights is not None and routing.expanded:
            combined_weights = gather_weights(routing, weights)
        elif call.topk_weights is not None:
            shape = (routing.num_tokens, call.topk_weights.shape[1])
            combined_weights = add(shape, np.dtype(np.float32), (), weight_terms)
        event = HostEvent() if call.streams.async_finish else None
        receive = _receive_nothing if call.plan.hook else None
        return CombineOutput(combined_x, combined_weights, event, receive)

    def _weights_of_rows(
        self, token_weights: NDArray[Any], routing: Routing, bounds: list[int]
    ) -> NDArray[Any]:
        """``[num_rows]``: the weight of each row, which its token's rank gave."""
        table = routing.expanded_row
        assert table is not None
        senders = [np.flatnonzero(column >= 0) for column in routing.send_row.T]
        shares = [rows_of(token_weights, token) for token in senders]
        received = self._mover.move([shares], bounds, bounds[-1])
        self._wire.wait("low_latency_combine", "weights")
        out = np.zeros(routing.num_rows, np.float32)
        place_weights(received, table[: bounds[-1]], out)
        return out

    def _node_sums(
        self, call: CombineCall, rows: NDArray[Any], bounds: list[int]
    ) -> tuple[Terms, Terms]:
        """What each node gives back, added up there: of the rows, and of plain weights."""
        routing = call.routing
        parts = self._rail_parts(routing.send_row >= 0)
        arrays = [rows]
        if call.topk_weights is not None and not routing.expanded:
            arrays.append(call.topk_weights)
        relayed = routing.relayed if isinstance(routing, HostRouting) else ()
        sums = self._rail.bring_sums(arrays, relayed, bounds, parts)
        tokens = [part.token for part in parts]
        terms = [list(zip(tokens, each, strict=True)) for each in sums]
        return terms[0], terms[-1] if len(terms) > 1 else ()

    def _check_out(self, call: CombineCall) -> None:
        if call.out is None:
            return
        others = (call.x, call.topk_weights, call.row_weights, *call.biases)
        shared = any(np.may_share_memory(call.out, each) for each in others if each is not None)
        if shared or not call.out.flags.writeable:
            why = "share no memory with another argument" if shared else "be writable"
            raise ContractError(
                f"combine(): argument 'out' must {why}, on rank {self._spec.rank}.",
                Refusal(RefusalCode.ARGUMENT, ARGUMENTS.index("out")),
            )

    # ------------------------------------------------------------------------------- headers

    def _describe(
        self,
        kind: Kind,
        tag: int | None,
        x: NDArray[Any],
        topk_weights: NDArray[Any] | None,
        scales: NDArray[Any] | None,
    ) -> dict[str, int]:
        row_bytes = x.shape[1] * x.itemsize
        if scales is not None:
            row_bytes += scales.shape[1] * scales.itemsize
        return {
            "kind": call_word(kind, tagged(tag)),
            "dtype": dtype_code(
                dtype_label(x.dtype), x.itemsize, scales.dtype.name if scales is not None else None
            ),
            "row_bytes": row_bytes,
            "num_topk": 0 if topk_weights is None else topk_weights.shape[-1],
            "weights": int(topk_weights is not None),
            "num_rows": len(x),
        }

    def _no_rows(self) -> NDArray[np.int64]:
        return np.zeros(self._spec.num_ranks, np.int64)

    def _agree(
        self,
        operation: str,
        words: dict[str, int],
        counts: NDArray[np.int64],
        parts: Sequence[RailPart] = (),
    ) -> tuple[NDArray[np.int64], list[int]]:
        """Exchange headers: on several nodes a record count a node stands behind them.

        Returns:
            The ``[R, R]`` row counts when all agree, and how many records come from each rank that
            this one speaks for.

        Raises:
            ContractError: On every rank, when headers differ or a rank refused.
        """
        self._rendezvous.watch(operation)
        spec, num_words = self._spec, 1 + len(WORDS)
        words.setdefault("capacity", spec.max_recv_tokens)
        behind, several = num_words + spec.num_ranks, self._nodes.num_nodes > 1
        headers = np.zeros((spec.num_ranks, behind + several * self._nodes.num_nodes), np.int64)
        mine = headers[spec.rank]
        mine[0] = self._epoch
        mine[1:num_words] = [int(words.get(word, 0)) for word in WORDS]
        mine[num_words:behind] = counts
        mine[behind : behind + len(parts)] = [len(part.token) for part in parts]
        for peer in other_ranks(spec.rank, spec.num_ranks):
            self._wire.receive(peer, headers[peer])
            self._wire.send(peer, mine)
        self._wire.wait(operation, "the header")
        self._epoch += 1
        texts = [dict(zip(WORDS, map(int, header[1:num_words]), strict=True)) for header in headers]
        wrong = verdict(
            operation,
            texts,
            num_max_tokens_per_rank=spec.num_max_tokens_per_rank,
            num_experts=spec.num_experts,
            counts=headers[:, num_words:behind].tolist(),
        )
        if wrong is not None:
            error = ContractError(wrong)
            error.printed_elsewhere = refused_elsewhere(texts, spec.rank)
            raise error
        records: list[int] = []
        if several:
            records = headers[list(self._rail.sources), behind + self._rail.node].tolist()
        return headers[:, num_words:behind], records

    # ------------------------------------------------------------------------------- the end

    def abort(self, reason: str) -> None:
        """See ``Engine.abort``."""
        self._board.abort(Abort(AbortReason.ERROR, self._spec.rank, (), reason))

    def reset(self) -> None:
        """See ``Engine.reset``."""
        self._settle("reset", Hurry(self._board, self._spec.rank))
        self._board.clear()
        self._rendezvous.barrier("reset")

    def close(self, *, collective: bool) -> None:
        """See ``Engine.close``."""
        if collective:
            self._settle("close")
            # A second time: a rank that gave up in the first barrier is not in this one, so
            # that no rank goes on alone to what may block.
            self._rendezvous.barrier("close")
        else:
            self._wire.abandon()

    def _settle(self, operation: str, hurry: Hurry | None = None) -> None:
        """Meet all ranks, agree on epoch and generation, and empty the wires."""
        self._rendezvous.barrier(operation, hurry)
        words = np.concatenate([[self._epoch, self._generation], self._wire.sent])
        everyone = self._rendezvous.exchange(operation, words)
        self._epoch = int(everyone[:, 0].max()) + 2
        self._generation = int(everyone[:, 1].max()) + 1
        self._wire.drain(operation, everyone[:, 2 + self._spec.rank], self._generation)


def _receive_nothing() -> None:
    """The receiving half of a call that was over when it had sent."""


def _expanded(
    received: NDArray[Any],
    routing: Routing,
    put: Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], None],
    *,
    zero_padding: bool,
) -> NDArray[Any]:
    """What came with the received tokens, in the expanded layout.

    Args:
        received: Rows ``[N, H]``, or weights ``[N, K]``.
        routing: Of the call.
        put: ``place`` for rows, ``place_weights`` for weights.
        zero_padding: Whether rows that fill up an expert's rows are 0; else they are undefined.
    """
    table, ends, counts = routing.expanded_row, routing.psum_expert_rows, routing.expert_counts
    assert table is not None and ends is not None and counts is not None  # noqa: PT018
    width = received.shape[1:] if put is place else ()
    out = np.empty((routing.num_rows, *width), received.dtype)
    put(received, table, out)
    if zero_padding:
        padding = padding_rows(ends, counts, routing.expert_alignment)
        whole_items(out)[padding] = np.zeros((), whole_items(out).dtype)
    return out


def check_experts(topk_idx: NDArray[np.integer], num_experts: int) -> Refusal | None:
    """The refusal of a dispatch with such choices.

    Args:
        topk_idx: ``[T, K]``; -1 stands for no choice.
        num_experts: E.

    Returns:
        ``EXPERT_OUT_OF_RANGE`` (outside -1..E-1) before ``DUPLICATE_EXPERT``, each with the first
        such token; ``None`` where all is well.
    """
    wrong = names_no_expert(topk_idx, num_experts)
    if wrong.any():
        return Refusal(RefusalCode.EXPERT_OUT_OF_RANGE, int(np.argmax(wrong)))
    wrong = names_an_expert_twice(topk_idx)
    if wrong.any():
        return Refusal(RefusalCode.DUPLICATE_EXPERT, int(np.argmax(wrong)))
    return None
