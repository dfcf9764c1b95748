"""The engine of a machine with no GPU: NumPy arrays, and messages between the ranks' processes.

An operation has two phases. Every rank sends every other its header and its row counts, and all
reach the same verdict. Then rows travel as one message a peer (of at most ``chunk_bytes``), each
straight into its final place: ``recv_x`` is ordered by source rank, so that a peer's rows are one
contiguous block of it. All waits are bounded; see ``ranks/rendezvous.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.engines.calls import CombineCall, DispatchCall, Routing
from deepep_cupy.engines.host.layout import (
    HostRouting,
    expanded_rows,
    expanded_weights,
    frozen,
    with_experts,
)
from deepep_cupy.engines.host.sums import add, weighted
from deepep_cupy.engines.host.wire import CHUNK_BYTES, Wire
from deepep_cupy.engines.protocol import ALL_MODES, CombineOutput, DispatchLayout, DispatchOutput
from deepep_cupy.errors import ContractError
from deepep_cupy.protocol import routing as plan
from deepep_cupy.protocol.headers import (
    ARGUMENTS,
    WORDS,
    Kind,
    Layout,
    LayoutFlag,
    Refusal,
    RefusalCode,
    dtype_code,
    layout_word,
    verdict,
)
from deepep_cupy.protocol.sizes import BufferSpec
from deepep_cupy.ranks.abort_board import Abort, AbortBoard, AbortReason
from deepep_cupy.ranks.group import Group
from deepep_cupy.ranks.rendezvous import Rendezvous
from deepep_cupy.reference.quant import quantize

__all__ = ["HostEngine", "HostEvent", "Mover", "gather", "others", "rows_of", "terms_of"]


# ---------------- The host engine's messages of rows: out to the ranks they are for, and back agai


def others(rank: int, num_ranks: int) -> list[int]:
    """The other ranks, each rank beginning with its own successor."""
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def rows_of(x: NDArray[Any], tokens: NDArray[np.intp]) -> NDArray[Any]:
    """Rows of the tokens (ascending numbers), without a copy where that is all of them."""
    if len(tokens) == len(x):
        return x
    taken: NDArray[Any] = x[tokens]
    return taken


class Mover:
    """Moves arrays of rows between this rank and all others.

    Args:
        wire: Carries the messages; what is returned here is complete after its ``wait``.
        spec: Sizes of the Buffer.
    """

    def __init__(self, wire: Wire, spec: BufferSpec) -> None:
        self._wire = wire
        self._rank = spec.rank
        self._size = spec.num_ranks

    def move(self, parts: list[NDArray[Any]], bounds: list[int], num_rows: int) -> NDArray[Any]:
        """Send ``parts[r]`` to rank r, and receive everyone's part for this rank, in rank order.

        Args:
            parts: One array a rank.
            bounds: Where each rank's rows begin in the result, and where the last end.
            num_rows: Rows of the result; what lies behind the last part is anything.
        """
        rank = self._rank
        out = np.empty((num_rows, *parts[rank].shape[1:]), parts[rank].dtype)
        for peer in others(rank, self._size):
            self._wire.receive(peer, out[bounds[peer] : bounds[peer + 1]])
            self._wire.send(peer, parts[peer])
        out[bounds[rank] : bounds[rank + 1]] = parts[rank]
        return out

    def bring_back(
        self, x: NDArray[Any], routing: Routing, bounds: list[int], *, copies: bool
    ) -> list[NDArray[Any]]:
        """Send each rank its rows of ``x`` back; what each rank holds of this rank's tokens.

        Args:
            x: One row per received token, or, with ``copies``, the expanded layout's.
            routing: Of the handle.
            bounds: Where each rank's received tokens begin, and where the last end.
            copies: All copies of a token, by token and then by column, instead of one row.
        """
        parts = []
        for peer in range(self._size):
            number = int((routing.send_row[:, peer] >= 0).sum())
            if copies:
                number = int(_columns(routing)[peer].sum())
            parts.append(np.empty((number, *x.shape[1:]), x.dtype))
        for peer in others(self._rank, self._size):
            self._wire.receive(peer, parts[peer])
            self._wire.send(peer, _share(x, routing, bounds, peer, copies=copies))
        parts[self._rank] = _share(x, routing, bounds, self._rank, copies=copies)
        return parts


def terms_of(
    routing: Routing,
    parts: list[NDArray[Any]],
    factors: list[NDArray[Any]] | None,
    *,
    copies: bool,
) -> Iterator[tuple[NDArray[np.intp], NDArray[Any]]]:
    """What ``Mover.bring_back`` returned, term by term: rank by rank, then column by column.

    Args:
        routing: Of the handle.
        parts: The rows each rank gave back.
        factors: With ``copies``: a weight a row, or ``None``.
        copies: As for ``Mover.bring_back``.
    """
    for rank, part in enumerate(parts):
        token = np.flatnonzero(routing.send_row[:, rank] >= 0)
        if not copies:
            yield token, part
            continue
        owner, column = np.nonzero(_columns(routing)[rank])
        product = weighted(part, None if factors is None else factors[rank])
        for number in range(_columns(routing)[rank].shape[1]):
            here = column == number
            yield token[owner[here]], product[here]


def gather(routing: Routing, weights: list[NDArray[Any]]) -> NDArray[np.float32]:
    """Weights of copies, as ``Mover.bring_back`` returned them, each to its choice."""
    columns = _columns(routing)
    out = np.zeros((routing.num_tokens, columns[0].shape[1]), np.float32)
    for rank, part in enumerate(weights):
        token = np.flatnonzero(routing.send_row[:, rank] >= 0)
        owner, column = np.nonzero(columns[rank])
        out[token[owner], column] = part
    return out


def _share(
    x: NDArray[Any], routing: Routing, bounds: list[int], peer: int, *, copies: bool
) -> NDArray[Any]:
    """The rows of ``x`` that belong to tokens of ``peer``."""
    token = slice(bounds[peer], bounds[peer + 1])
    if not copies or routing.expanded_row is None:
        return x[token]
    row = routing.expanded_row[token]
    taken: NDArray[Any] = x[row[row >= 0]]
    return taken


def _columns(routing: Routing) -> tuple[NDArray[np.bool_], ...]:
    return routing.sent_columns if isinstance(routing, HostRouting) else ()


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
        self._group = group
        self._board = board
        self._spec = spec
        self._rendezvous = Rendezvous(group, board, spec.timeout_s)
        self._wire = Wire(self._rendezvous, chunk_bytes)
        mover = Mover(self._wire, spec)
        self._move, self._bring_back = mover.move, mover.bring_back
        self._epoch = _FIRST_EPOCH
        self._generation = 0

    # -------------------------------------------------------------------------------- local

    def import_array(self, operation: str, argument: str, value: object) -> NDArray[Any]:
        """See ``Engine.import_array``: NumPy arrays are taken as they are."""
        where = f"{operation}(): argument '{argument}' must be"
        if not isinstance(value, np.ndarray):
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            hint = "; cupy.asnumpy() makes one" if kind.startswith("cupy") else ""
            raise ContractError(
                f"{where} a NumPy array, because this Buffer runs on the host engine, got {kind} "
                f"on rank {self._group.rank}{hint}."
            )
        if value.dtype.hasobject:
            raise ContractError(
                f"{where} an array of plain bytes, got dtype {value.dtype} on rank "
                f"{self._group.rank}."
            )
        if not value.flags.c_contiguous:
            raise ContractError(
                f"{where} C-contiguous, got shape {value.shape} with strides {value.strides} on "
                f"rank {self._group.rank}; numpy.ascontiguousarray() makes it so."
            )
        return value.view(np.ndarray)

    def import_scales(self, operation: str, argument: str, value: object) -> NDArray[Any]:
        """See ``Engine.import_scales``."""
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return value.view(np.ndarray)
        return self.import_array(operation, argument, value)

    def array_key(self, value: object, strided: bool) -> tuple[Any, ...] | None:
        """See ``Engine.array_key``."""
        if type(value) is not np.ndarray or value.dtype.hasobject or not value.flags.writeable:
            return None
        return (value.shape, value.dtype) if strided or value.flags.c_contiguous else None

    def capture(self) -> HostEvent:
        """See ``Engine.capture``: all work is done when its call returns."""
        return HostEvent()

    def comm_stream(self) -> None:
        """See ``Engine.comm_stream``: the host has no streams."""

    def get_dispatch_layout(self, topk_idx: NDArray[Any], num_experts: int) -> DispatchLayout:
        """See ``Engine.get_dispatch_layout``."""
        mask = plan.mask_of_choices(topk_idx, num_experts, self._spec.num_ranks)
        return DispatchLayout(
            mask.sum(axis=0, dtype=np.int32), plan.count_per_expert(topk_idx, num_experts), mask
        )

    def empty(self, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
        """See ``Engine.empty``: any memory will do here."""
        return np.empty(tuple(shape), dtype)

    def check(self) -> None:
        """See ``Engine.check``: nothing is left over, but another rank may have given up."""
        self._rendezvous.watch("check")

    # --------------------------------------------------------------------------- operations

    def barrier(self) -> None:
        """See ``Engine.barrier``."""
        self._agree("barrier", {"kind": Kind.BARRIER}, self._no_rows())

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
            x, scales = quantize(x, round_scale=kind.round_scale, use_ue8m0=kind.use_ue8m0)
        if scales is not None:
            scales = np.ascontiguousarray(scales)
        words = self._describe(Kind.DISPATCH, x, call.topk_weights, scales)
        if call.plan.num_worst_tokens is not None:
            words["capacity"] = call.plan.num_worst_tokens
        mask, choices = self._ways(call, words)
        words["layout"] = layout_word(words["layout"], LayoutFlag.EXPANDED * call.plan.expand)
        birth = self._epoch
        counts = self._agree("dispatch", words, mask.sum(axis=0, dtype=np.int64))

        senders = [np.flatnonzero(column) for column in mask.T]
        bounds = plan.recv_offsets(counts[:, self._spec.rank])
        num_rows = bounds[-1] if call.plan.num_worst_tokens is None else call.plan.num_worst_tokens
        if call.routing is not None:
            num_rows = call.routing.num_recv_tokens

        def move(parts: list[NDArray[Any]]) -> NDArray[Any]:
            return self._move(parts, bounds, num_rows)

        local = move(choices) if choices is not None else None
        recv_x = move([rows_of(x, token) for token in senders])
        recv_scales = recv_weights = None
        src_idx = np.zeros(0, np.int32)
        if scales is not None:
            recv_scales = move([rows_of(scales, token) for token in senders])
        if call.topk_weights is not None:
            recv_weights = move(_weights(call.topk_weights, senders, choices))
        if call.routing is None:
            src_idx = move([token.astype(np.int32) for token in senders])
        self._wire.wait("dispatch", "rows")
        for array, nothing in ((src_idx, -1), (local, -1), (recv_weights, 0)):
            if array is not None:
                array[bounds[-1] :] = nothing
        routing = call.routing
        if routing is None:
            made = HostRouting(
                num_tokens=len(x),
                num_recv_tokens=num_rows,
                recv_src_idx=frozen(src_idx),
                recv_rows_per_rank=frozen(counts[:, self._spec.rank].astype(np.int32)),
                send_row=frozen(plan.send_rows(mask, counts, self._spec.rank)),
                birth=birth,
                waited=call.plan.num_worst_tokens is None,
                psum_recv_rows=frozen(np.array(bounds[1:], np.int32)),
            )
            routing = self._with_choices(call, made, choices, local)
        return self._laid_out(call, routing, recv_x, recv_scales, recv_weights, local)

    def _with_choices(
        self,
        call: DispatchCall,
        routing: HostRouting,
        choices: list[NDArray[Any]] | None,
        local: NDArray[Any] | None,
    ) -> HostRouting:
        if choices is None or local is None:
            return routing
        routing = with_experts(routing, local, self._spec.num_local_experts, call)
        if not call.plan.expand:
            return routing
        return replace(routing, sent_columns=tuple(frozen(chosen >= 0) for chosen in choices))

    def _ways(
        self, call: DispatchCall, words: dict[str, int]
    ) -> tuple[NDArray[np.bool_], list[NDArray[Any]] | None]:
        """Which token goes where, and what each rank gets to know of its choices."""
        spec, topk_idx = self._spec, call.topk_idx
        if call.routing is not None:
            words |= {"layout": Layout.CACHED, "birth": call.routing.birth}
            return call.routing.send_row >= 0, None
        if topk_idx is None:
            words["layout"] = Layout.MASK
            return np.ascontiguousarray(call.is_token_in_rank, np.bool_), None
        words |= {"layout": Layout.TOPK, "num_topk": topk_idx.shape[1]}
        words["index_bytes"] = topk_idx.itemsize
        num_experts = spec.num_experts or 0
        refusal = plan.check_experts(topk_idx, num_experts)
        if refusal is not None:
            words |= {"refusal": refusal.code, "refusal_value": refusal.value}
        mask = plan.mask_of_choices(topk_idx, num_experts, spec.num_ranks)
        choices = [
            plan.local_choices(topk_idx[column], rank, spec.num_local_experts)
            for rank, column in enumerate(mask.T)
        ]
        return mask, choices

    def _laid_out(
        self,
        call: DispatchCall,
        routing: Routing,
        rows: NDArray[Any],
        scales: NDArray[Any] | None,
        weights: NDArray[Any] | None,
        local: NDArray[Any] | None,
    ) -> DispatchOutput:
        """Turn what came of the received tokens into the layout of the call."""
        if routing.expanded:
            zero = call.plan.zero_padding
            rows = expanded_rows(routing, rows, zero_padding=zero)
            if scales is not None:
                scales = expanded_rows(routing, scales, zero_padding=zero)
            if weights is not None:
                weights = expanded_weights(routing, weights, zero_padding=zero)
        if scales is not None and call.plan.scales_layout == "column":
            scales = np.asfortranarray(scales)
        if call.recv_stats is not None:
            call.recv_stats[...] += routing.expert_counts
        per_expert: list[int] = []
        if call.routing is None and routing.waited and routing.expert_counts is not None:
            unit = call.plan.expert_alignment
            per_expert = [plan.round_up(int(count), unit) for count in routing.expert_counts]
        return DispatchOutput(
            recv_x=rows,
            recv_topk_idx=None if routing.expanded else local,
            recv_topk_weights=weights,
            num_recv_tokens_per_expert=per_expert,
            routing=routing,
            recv_scales=scales,
            event=HostEvent() if call.streams.async_finish else None,
        )

    def combine(self, call: CombineCall) -> CombineOutput:
        """See ``Engine.combine``."""
        self._check_out(call)
        routing, dtype = call.routing, call.x.dtype
        exact = routing.expanded and call.plan.reduce == "exact"
        words = self._describe(Kind.COMBINE, call.x, call.topk_weights, None)
        words["birth"] = routing.birth
        if routing.expanded and call.topk_weights is not None:
            words["num_topk"] = routing.expanded_row.shape[1]  # type: ignore[union-attr]
        words["layout"] = (
            LayoutFlag.EXPANDED * routing.expanded
            | LayoutFlag.PER_RANK * (routing.expanded and not exact)
            | LayoutFlag.ROW_WEIGHTS * (call.row_weights is not None)
        )
        bounds = plan.recv_offsets(routing.recv_rows_per_rank)
        self._agree("combine", words, np.diff(bounds))

        rows, row_weights = call.x, call.row_weights
        if routing.expanded and not exact:
            rows, row_weights = self._own_sums(call, bounds[-1]), None
        back = self._bring_back(rows, routing, bounds, copies=exact)
        factors = weights = None
        if row_weights is not None:
            factors = self._bring_back(row_weights, routing, bounds, copies=True)
        if call.topk_weights is not None:
            copies = routing.expanded
            weights = self._bring_back(call.topk_weights, routing, bounds, copies=copies)
        self._wire.wait("combine", "rows")
        shape = (routing.num_tokens, call.x.shape[1])
        combined_x = add(shape, dtype, call.biases, terms_of(routing, back, factors, copies=exact))
        if call.out is not None:
            call.out[...] = combined_x
            combined_x = call.out
        combined_weights = None
        if weights is not None and routing.expanded:
            combined_weights = gather(routing, weights)
        elif weights is not None and call.topk_weights is not None:
            shape = (routing.num_tokens, call.topk_weights.shape[1])
            terms = terms_of(routing, weights, None, copies=False)
            combined_weights = add(shape, np.dtype(np.float32), (), terms)
        event = HostEvent() if call.streams.async_finish else None
        return CombineOutput(combined_x, combined_weights, event)

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

    def _own_sums(self, call: CombineCall, num_real: int) -> NDArray[Any]:
        """The sum of this rank's copies of each received token, rounded."""
        terms = []
        for column in call.routing.expanded_row[:num_real].T:  # type: ignore[index]
            token = np.flatnonzero(column >= 0)
            row = column[token]
            factor = None if call.row_weights is None else call.row_weights[row]
            terms.append((token, weighted(call.x[row], factor)))
        return add((num_real, call.x.shape[1]), call.x.dtype, (), terms)

    # ------------------------------------------------------------------------------- headers

    def _describe(
        self,
        kind: Kind,
        x: NDArray[Any],
        topk_weights: NDArray[Any] | None,
        scales: NDArray[Any] | None,
    ) -> dict[str, int]:
        name = x.dtype.name if x.dtype.isnative else "swapped bytes"
        row_bytes = x.shape[1] * x.itemsize
        if scales is not None:
            row_bytes += scales.shape[1] * scales.itemsize
        return {
            "kind": kind,
            "dtype": dtype_code(
                name, x.itemsize, scales.dtype.name if scales is not None else None
            ),
            "row_bytes": row_bytes,
            "num_topk": 0 if topk_weights is None else topk_weights.shape[-1],
            "weights": int(topk_weights is not None),
            "num_rows": len(x),
        }

    def _no_rows(self) -> NDArray[np.int64]:
        return np.zeros(self._spec.num_ranks, np.int64)

    def _agree(
        self, operation: str, words: dict[str, int], counts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Exchange headers; the ``[R, R]`` row counts when all agree.

        Raises:
            ContractError: On every rank, when headers differ or a rank refused.
        """
        self._rendezvous.watch(operation)
        spec, num_words = self._spec, 1 + len(WORDS)
        words.setdefault("capacity", spec.max_recv_tokens)
        headers = np.zeros((spec.num_ranks, num_words + spec.num_ranks), np.int64)
        mine = headers[spec.rank]
        mine[0] = self._epoch
        mine[1:num_words] = [int(words.get(word, 0)) for word in WORDS]
        mine[num_words:] = counts
        for peer in self._peers():
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
            counts=headers[:, num_words:].tolist(),
        )
        if wrong is not None:
            raise ContractError(wrong)
        counts_of: NDArray[np.int64] = headers[:, num_words:]
        return counts_of

    def _peers(self) -> list[int]:
        """The other ranks, each rank beginning with its own successor."""
        return others(self._spec.rank, self._spec.num_ranks)

    # ------------------------------------------------------------------------------- the end

    def abort(self, reason: str) -> None:
        """See ``Engine.abort``."""
        self._board.abort(Abort(AbortReason.ERROR, self._spec.rank, (), reason))

    def reset(self) -> None:
        """See ``Engine.reset``."""
        self._settle("reset")
        self._board.clear()
        self._rendezvous.barrier("reset")

    def close(self, *, collective: bool) -> None:
        """See ``Engine.close``."""
        if collective:
            self._settle("close")
            # A second time: a rank that gave up in the first barrier is not in this one, so
            # that nobody goes on alone to what may block.
            self._rendezvous.barrier("close")
        else:
            self._wire.abandon()

    def _settle(self, operation: str) -> None:
        """Meet all ranks, agree on epoch and generation, and empty the wires."""
        self._rendezvous.barrier(operation)
        words = np.concatenate([[self._epoch, self._generation], self._wire.sent])
        everyone = self._rendezvous.exchange(operation, words)
        self._epoch = int(everyone[:, 0].max()) + 2
        self._generation = int(everyone[:, 1].max()) + 1
        self._wire.drain(operation, everyone[:, 2 + self._spec.rank], self._generation)


def _weights(
    topk_weights: NDArray[Any], senders: list[NDArray[Any]], choices: list[NDArray[Any]] | None
) -> list[NDArray[Any]]:
    """Weights for each rank: those of its experts, or all where no choices travel with them."""
    sent = [rows_of(topk_weights, token) for token in senders]
    if choices is None:
        return sent
    return [
        np.where(chosen >= 0, weights, np.float32(0))
        for chosen, weights in zip(choices, sent, strict=True)
    ]
