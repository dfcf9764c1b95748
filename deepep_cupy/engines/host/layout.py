"""The host engine's layouts: where the rows of received tokens stand. NumPy only, local."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.engines.calls import DispatchCall, Routing
from deepep_cupy.protocol import routing as plan

__all__ = ["HostRouting", "expanded_rows", "expanded_weights", "frozen", "with_experts"]


@dataclass(frozen=True, eq=False)
class HostRouting(Routing):
    """A routing that also remembers what was chosen where, as copies come back one by one.

    Attributes:
        sent_columns: Expanded layout: per rank ``[tokens sent there, K]`` bool, which choices of
            a token are experts of that rank.
    """

    sent_columns: tuple[NDArray[np.bool_], ...] = ()


def with_experts(
    routing: HostRouting, local: NDArray[Any], num_local_experts: int, call: DispatchCall
) -> HostRouting:
    """Add the counts per expert and, in the expanded layout, the table of rows.

    Args:
        routing: As yet without them.
        local: ``[N, K]`` local choices of all received tokens, -1 elsewhere and in the tail.
        num_local_experts: El.
        call: The dispatch.
    """
    unit = call.plan.expert_alignment
    counts = plan.count_per_expert(local, num_local_experts)
    ends = np.cumsum([plan.round_up(int(count), unit) for count in counts], dtype=np.int64)
    routing = replace(routing, expert_counts=frozen(counts), expert_alignment=unit)
    if not call.plan.expand:
        return replace(routing, psum_expert_rows=frozen(ends.astype(np.int32)))
    first = np.concatenate([[0], ends[:-1]])
    token, column = np.nonzero(local >= 0)
    expert = local[token, column]
    order = np.argsort(expert, kind="stable")  # of one expert's tokens the order stays
    before = np.cumsum(counts) - counts
    row = np.empty(len(token), np.int64)
    row[order] = np.arange(len(token)) + np.repeat(first - before, counts)
    table = np.full(local.shape, -1, np.int32)
    table[token, column] = row
    total = int(ends[-1])
    if call.plan.num_worst_tokens is not None:
        total = plan.worst_expanded_rows(len(local), local.shape[1], num_local_experts, unit)
    return replace(
        routing,
        psum_expert_rows=frozen((first + counts).astype(np.int32)),
        expanded_row=frozen(table),
        num_expanded_rows=total,
    )


def expanded_rows(routing: Routing, received: NDArray[Any], *, zero_padding: bool) -> NDArray[Any]:
    """Copies of the received tokens' rows, each at its place; the others are anything or 0."""
    table = _table(routing)
    token, column = np.nonzero(table >= 0)
    out = np.empty((routing.num_rows, *received.shape[1:]), received.dtype)
    out[table[token, column]] = received[token]
    if zero_padding:
        out[_padding(routing)] = np.zeros((), received.dtype)
    return out


def expanded_weights(
    routing: Routing, received: NDArray[Any], *, zero_padding: bool
) -> NDArray[Any]:
    """Of the weights ``[N, K]`` that of each copy's choice, ``[rows]``."""
    table = _table(routing)
    out = np.empty(routing.num_rows, received.dtype)
    out[table[table >= 0]] = received[table >= 0]
    if zero_padding:
        out[_padding(routing)] = 0
    return out


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """Forbid writing: arrays of a handle serve many calls."""
    array.flags.writeable = False
    return array


def _table(routing: Routing) -> NDArray[np.int32]:
    if routing.expanded_row is None:
        raise ValueError("the layout is not expanded")
    table: NDArray[np.int32] = routing.expanded_row
    return table


def _padding(routing: Routing) -> NDArray[np.intp]:
    """Rows that only fill up an expert's group."""
    unit, ends, counts = routing.expert_alignment, routing.psum_expert_rows, routing.expert_counts
    gaps = [
        np.arange(end, end + -count % unit)
        for end, count in zip(ends.tolist(), counts.tolist(), strict=True)  # type: ignore[union-attr]
    ]
    return np.concatenate(gaps).astype(np.intp)
