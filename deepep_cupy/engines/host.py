"""The engine of a machine with no GPU: NumPy arrays, and messages between the ranks' processes.

An operation has two phases. Every rank sends every other its header and its row counts, and all
reach the same verdict. Then rows travel as one message a peer (of at most ``chunk_bytes``), each
straight into its final place: ``recv_x`` is ordered by source rank, so that a peer's rows are one
contiguous block of it. All waits are bounded; see ``transport/rendezvous.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.engines.base import (
    CombineCall,
    CombineOutput,
    DispatchCall,
    DispatchLayout,
    DispatchOutput,
    Routing,
)
from deepep_cupy.errors import ContractError
from deepep_cupy.plan import routing as plan
from deepep_cupy.plan.headers import (
    WORDS,
    Kind,
    Layout,
    Refusal,
    dtype_code,
    verdict,
)
from deepep_cupy.plan.spec import BufferSpec
from deepep_cupy.transport.board import Abort, AbortBoard, AbortReason
from deepep_cupy.transport.group import Group
from deepep_cupy.transport.rendezvous import Rendezvous
from deepep_cupy.transport.wire import CHUNK_BYTES, Wire

__all__ = ["HostEngine"]

_FIRST_EPOCH = 1


class HostEngine:
    """See ``engines.base.Engine``.

    Args:
        group: The ranks; their communicator is ours alone.
        board: Their abort board.
        spec: Sizes of the Buffer.
        chunk_bytes: Largest message.
    """

    name = "host"
    device: int | None = None

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
        self._epoch = _FIRST_EPOCH
        self._generation = 0

    # -------------------------------------------------------------------------------- local

    def intake(self, operation: str, argument: str, value: object) -> NDArray[Any]:
        """See ``Engine.intake``: NumPy arrays are taken as they are."""
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
        if call.routing is not None:
            return self._dispatch_again(call, call.routing)
        x, topk_idx, spec = call.x, call.topk_idx, self._spec
        words = self._describe(Kind.DISPATCH, x, call.topk_weights)
        num_experts = spec.num_experts or 0
        if topk_idx is None:
            mask = np.ascontiguousarray(call.is_token_in_rank, np.bool_)
            words["layout"] = Layout.MASK
        else:
            words |= {"layout": Layout.TOPK, "num_topk": topk_idx.shape[1]}
            words["index_bytes"] = topk_idx.itemsize
            refusal = plan.check_experts(topk_idx, num_experts)
            if refusal is not None:
                words |= {"refusal": refusal.code, "refusal_value": refusal.value}
            mask = plan.mask_of_choices(topk_idx, num_experts, spec.num_ranks)
        birth = self._epoch
        counts = self._agree("dispatch", words, mask.sum(axis=0, dtype=np.int64))
        send_row = plan.send_rows(mask, counts, spec.rank)
        bounds = plan.recv_offsets(counts[:, spec.rank])

        senders = [np.flatnonzero(mask[:, rank]) for rank in range(spec.num_ranks)]
        source = [token.astype(np.int32) for token in senders]
        recv_x = self._move([_rows(x, token) for token in senders], bounds)
        recv_src_idx = self._move(source, bounds)
        recv_topk_idx = recv_topk_weights = None
        if topk_idx is not None:
            choices = [
                plan.local_choices(topk_idx[token], rank, spec.num_local_experts)
                for rank, token in enumerate(senders)
            ]
            recv_topk_idx = self._move(choices, bounds)
            if call.topk_weights is not None:
                weights = [
                    np.where(chosen >= 0, call.topk_weights[token], np.float32(0))
                    for chosen, token in zip(choices, senders, strict=True)
                ]
                recv_topk_weights = self._move(weights, bounds)
        self._wire.wait("dispatch", "rows")
        routing = Routing(
            num_tokens=len(x),
            num_recv_tokens=bounds[-1],
            recv_src_idx=_frozen(recv_src_idx),
            recv_rows_per_rank=_frozen(counts[:, spec.rank].astype(np.int32)),
            send_row=_frozen(send_row),
            birth=birth,
        )
        per_expert = self._count(recv_topk_idx, call.expert_alignment)
        return DispatchOutput(recv_x, recv_topk_idx, recv_topk_weights, per_expert, routing)

    def _dispatch_again(self, call: DispatchCall, routing: Routing) -> DispatchOutput:
        """Dispatch other rows the way an earlier call went."""
        words = self._describe(Kind.DISPATCH, call.x, call.topk_weights)
        words |= {"layout": Layout.CACHED, "birth": routing.birth}
        mask = routing.send_row >= 0
        self._agree("dispatch", words, mask.sum(axis=0, dtype=np.int64))
        bounds = plan.recv_offsets(routing.recv_rows_per_rank)
        senders = [np.flatnonzero(mask[:, rank]) for rank in range(self._spec.num_ranks)]
        recv_x = self._move([_rows(call.x, token) for token in senders], bounds)
        weights = None
        if call.topk_weights is not None:
            weights = self._move([_rows(call.topk_weights, token) for token in senders], bounds)
        self._wire.wait("dispatch", "rows")
        return DispatchOutput(recv_x, None, weights, [], routing)

    def combine(self, call: CombineCall) -> CombineOutput:
        """See ``Engine.combine``."""
        routing = call.routing
        words = self._describe(Kind.COMBINE, call.x, call.topk_weights)
        words["birth"] = routing.birth
        bounds = plan.recv_offsets(routing.recv_rows_per_rank)
        self._agree("combine", words, np.diff(bounds))
        tokens = [np.flatnonzero(row >= 0) for row in routing.send_row.T]
        rows = self._bring_back(call.x, bounds, tokens)
        weights = None
        if call.topk_weights is not None:
            weights = self._bring_back(call.topk_weights, bounds, tokens)
        self._wire.wait("combine", "rows")
        shape = (routing.num_tokens, call.x.shape[1])
        combined_x = _add(shape, call.x.dtype, call.biases, tokens, rows)
        combined_weights = None
        if weights is not None and call.topk_weights is not None:
            shape = (routing.num_tokens, call.topk_weights.shape[1])
            combined_weights = _add(shape, np.dtype(np.float32), (), tokens, weights)
        return CombineOutput(combined_x, combined_weights)

    # ------------------------------------------------------------------------------- headers

    def _describe(
        self, kind: Kind, x: NDArray[Any], topk_weights: NDArray[Any] | None
    ) -> dict[str, int]:
        name = x.dtype.name if x.dtype.isnative else "swapped bytes"
        return {
            "kind": kind,
            "dtype": dtype_code(name, x.itemsize),
            "row_bytes": x.shape[1] * x.itemsize,
            "num_topk": 0 if topk_weights is None else topk_weights.shape[1],
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
        )
        if wrong is not None:
            raise ContractError(wrong)
        return headers[:, num_words:]

    # ---------------------------------------------------------------------------------- rows

    def _peers(self) -> list[int]:
        """The other ranks, each rank beginning with its own successor."""
        size = self._spec.num_ranks
        return [(self._spec.rank + step) % size for step in range(1, size)]

    def _move(self, parts: list[NDArray[Any]], bounds: list[int]) -> NDArray[Any]:
        """Send ``parts[r]`` to rank r, and receive everyone's part for this rank, in rank order.

        The result is complete after ``self._wire.wait``.
        """
        rank = self._spec.rank
        out = np.empty((bounds[-1], *parts[rank].shape[1:]), parts[rank].dtype)
        for peer in self._peers():
            self._wire.receive(peer, out[bounds[peer] : bounds[peer + 1]])
            self._wire.send(peer, parts[peer])
        out[bounds[rank] : bounds[rank + 1]] = parts[rank]
        return out

    def _bring_back(
        self, x: NDArray[Any], bounds: list[int], tokens: list[NDArray[np.intp]]
    ) -> list[NDArray[Any]]:
        """Send each rank its rows of ``x`` back; what each rank holds of this rank's tokens.

        The result is complete after ``self._wire.wait``.
        """
        rank = self._spec.rank
        parts = [np.empty((len(token), *x.shape[1:]), x.dtype) for token in tokens]
        for peer in self._peers():
            self._wire.receive(peer, parts[peer])
            self._wire.send(peer, x[bounds[peer] : bounds[peer + 1]])
        parts[rank] = x[bounds[rank] : bounds[rank + 1]]
        return parts

    def _count(self, recv_topk_idx: NDArray[Any] | None, alignment: int) -> list[int]:
        if recv_topk_idx is None:
            return []
        counts = plan.count_per_expert(recv_topk_idx, self._spec.num_local_experts)
        return [plan.round_up(int(count), alignment) for count in counts]

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


def _rows(x: NDArray[Any], tokens: NDArray[np.intp]) -> NDArray[Any]:
    """Rows of the tokens (ascending numbers), without a copy where that is all of them."""
    return x if len(tokens) == len(x) else x[tokens]


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def _sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Type to add in: the row's own for integers and float64, float32 for shorter floats."""
    own = dtype.kind in "iu" or dtype == np.float64
    return dtype if own else np.dtype(np.float32)


def _add(
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    biases: tuple[NDArray[Any], ...],
    tokens: list[NDArray[np.intp]],
    rows: list[NDArray[Any]],
) -> NDArray[Any]:
    """Add biases, then each rank's rows, in this order, and round once.

    Args:
        shape: ``[T, H]`` of the result.
        dtype: Its dtype.
        biases: Arrays of that shape.
        tokens: For each rank, the tokens it holds rows of.
        rows: For each rank, those rows.
    """
    total = np.zeros(shape, _sum_dtype(dtype))
    begun = np.zeros(shape[0], np.bool_)
    with np.errstate(all="ignore"):
        for number, bias in enumerate(biases):
            total = total + bias.astype(total.dtype) if number else bias.astype(total.dtype)
            begun[:] = True
        for token, part in zip(tokens, rows, strict=True):
            terms = part.astype(total.dtype)
            # The first term is taken as it is: 0 + -0 would lose a sign.
            more = begun[token]
            total[token[~more]] = terms[~more]
            total[token[more]] += terms[more]
            begun[token] = True
        return total.astype(dtype, copy=False)
