"""The host engine's messages of rows: out to the ranks they are for, and back again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.engines.base import Routing
from deepep_cupy.engines.host_layout import HostRouting
from deepep_cupy.engines.host_sums import weighted
from deepep_cupy.plan.spec import BufferSpec
from deepep_cupy.transport.wire import Wire

__all__ = ["Mover", "gather", "others", "rows_of", "terms_of"]


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
