"""Who sends what to whom: rows out to the ranks of their experts, and back again.

A rank's received tokens are numbered by source rank, so that what one peer sends is a contiguous
block of them. Each block travels as one message, straight into its final place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.engines.calls import Routing
from deepep_cupy.engines.host.wire import Wire
from deepep_cupy.protocol.nodes import NodeMap
from deepep_cupy.protocol.sizes import BufferSpec
from deepep_cupy.reference.combine import weighted
from deepep_cupy.reference.layout import Handle

__all__ = [
    "HostRouting",
    "Mover",
    "gather_weights",
    "masked_weights",
    "other_ranks",
    "rank_bounds",
    "rows_of",
    "terms_of",
    "whole_items",
]


@dataclass(frozen=True, eq=False)
class HostRouting:
    """The routing of one dispatch (``engines.calls.Routing``). All its arrays are read-only: a
    handle serves many calls.

    Attributes:
        sent_columns: Expanded layout: per rank ``[tokens sent there, K]`` bool, which choices of
            a token are experts of that rank; copies come back in the order of the true entries.
        relayed: Several nodes: per node ``[n, L]`` bool, which ranks of this node the tokens are
            for that came here from the rank of that node which this one speaks for.
    """

    num_tokens: int
    num_recv_tokens: int
    recv_src_idx: NDArray[np.int32]
    recv_rows_per_rank: NDArray[np.int32]
    send_row: NDArray[np.int32]
    birth: int
    waited: bool = True
    psum_recv_rows: NDArray[np.int32] | None = None
    expert_counts: NDArray[np.int32] | None = None
    psum_expert_rows: NDArray[np.int32] | None = None
    expanded_row: NDArray[np.int32] | None = None
    num_expanded_rows: int = 0
    expert_alignment: int = 1
    sent_columns: tuple[NDArray[np.bool_], ...] = ()
    relayed: tuple[NDArray[np.bool_], ...] = ()
    low_latency: bool = False
    expert_rows: int = 0
    recv_src_info: NDArray[np.int32] | None = None
    recv_layout_range: NDArray[np.int64] | None = None

    @property
    def expanded(self) -> bool:
        """See ``Routing``."""
        return self.expanded_row is not None

    @property
    def num_rows(self) -> int:
        """See ``Routing``."""
        return self.num_recv_tokens if self.expanded_row is None else self.num_expanded_rows

    def __post_init__(self) -> None:
        for value in (*vars(self).values(), *self.sent_columns, *self.relayed):
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    @classmethod
    def of(cls, handle: Handle, bounds: list[int], birth: int, *, waited: bool) -> HostRouting:
        """The routing that the reference's handle describes.

        Args:
            handle: Of this rank.
            bounds: Where each rank's received tokens begin, and where the last end.
            birth: The epoch of the dispatch.
            waited: Whether ``num_recv_tokens`` is the real number.
        """
        return cls(
            num_tokens=handle.num_tokens,
            num_recv_tokens=handle.num_recv_tokens,
            recv_src_idx=handle.recv_src_idx,
            recv_rows_per_rank=handle.recv_rows_per_rank,
            send_row=handle.send_row,
            birth=birth,
            waited=waited,
            psum_recv_rows=np.array(bounds[1:], np.int32),
            expert_counts=handle.num_unaligned_recv_tokens_per_expert,
            psum_expert_rows=handle.psum_num_recv_tokens_per_expert,
            expanded_row=handle.expanded_row,
            num_expanded_rows=handle.num_expanded_tokens,
            expert_alignment=handle.expert_alignment,
        )


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
        nodes = spec.nodes or NodeMap.one(spec.num_ranks)
        self._mates = nodes.mates_of(spec.rank)
        self._local = self._mates.index(spec.rank)
        self._others = other_ranks(self._local, len(self._mates))
        self._sources = [nodes.peers_of(mate) for mate in self._mates]

    def move(
        self, shares: list[list[NDArray[Any]]], bounds: list[int], num_rows: int
    ) -> NDArray[Any]:
        """Send rows to the ranks of this node, and receive every rank's rows for this one.

        Args:
            shares: For each rank that this one speaks for on its node (on one node: itself), what
                it has for each rank of the node.
            bounds: Where each rank's rows begin in the result, and where the last end.
            num_rows: Rows of the result; those behind the last part are undefined.
        """
        first = shares[0][self._local]
        out = np.empty((num_rows, *first.shape[1:]), first.dtype)
        for number in self._others:
            mate = self._mates[number]
            for source in self._sources[number]:
                self._wire.receive(mate, out[bounds[source] : bounds[source + 1]])
            for share in shares:
                self._wire.send(mate, share[number])
        for source, share in zip(self._sources[self._local], shares, strict=True):
            out[bounds[source] : bounds[source + 1]] = share[self._local]
        return out

    def bring_back(
        self, x: NDArray[Any], routing: Routing, bounds: list[int], *, copies: bool
    ) -> list[NDArray[Any]]:
        """Send each rank its tokens' rows of ``x``; receive what each rank has of this rank's.

        Args:
            x: One row per received token, or, with ``copies``, the expanded layout's.
            routing: Of the handle.
            bounds: Where each rank's received tokens begin, and where the last end.
            copies: All copies of a token, by token and then by column, instead of one row.

        Returns:
            One array a rank: rows of the tokens that were sent there, by ascending token.
        """
        parts = []
        for peer in range(self._size):
            number = int((routing.send_row[:, peer] >= 0).sum())
            if copies:
                number = int(_columns(routing)[peer].sum())
            parts.append(np.empty((number, *x.shape[1:]), x.dtype))
        for peer in other_ranks(self._rank, self._size):
            self._wire.receive(peer, parts[peer])
            self._wire.send(peer, _share(x, routing, bounds, peer, copies=copies))
        parts[self._rank] = _share(x, routing, bounds, self._rank, copies=copies)
        return parts


def other_ranks(rank: int, num_ranks: int) -> list[int]:
    """All ranks but ``rank``, from its successor on, so that not all begin with the same one."""
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def rank_bounds(rows_per_rank: NDArray[np.integer]) -> list[int]:
    """``R + 1`` bounds: rows of rank s are ``[bounds[s], bounds[s + 1])``."""
    return [0, *(int(bound) for bound in np.cumsum(rows_per_rank, dtype=np.int64))]


def rows_of(x: NDArray[Any], tokens: NDArray[np.intp]) -> NDArray[Any]:
    """Rows of the tokens (ascending numbers), without a copy where that is all of them."""
    if len(tokens) == len(x):
        return x
    taken: NDArray[Any] = x[tokens]
    return taken


def whole_items(x: NDArray[Any]) -> NDArray[Any]:
    """A view of rows whose items NumPy copies whole. Records it copies field by field, and between
    the fields of a copy would be left-over memory of somebody else."""
    return x if x.dtype.names is None else x.view(f"V{x.itemsize}")


def masked_weights(
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


def terms_of(
    routing: Routing,
    parts: list[NDArray[Any]],
    factors: list[NDArray[Any]] | None,
    *,
    copies: bool,
) -> Iterator[tuple[NDArray[np.intp], NDArray[Any]]]:
    """The terms of ``reference.combine.add``, from the arrays that ``Mover.bring_back`` returned.

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


def gather_weights(routing: Routing, weights: list[NDArray[Any]]) -> NDArray[np.float32]:
    """``[T, K]``: weights of copies, as ``Mover.bring_back`` returned them, each at its choice."""
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
