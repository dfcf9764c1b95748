"""How many rows and bytes an exchange moves, over links and in all. Integers, no GPU."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.reference.quant import num_groups

__all__ = ["Traffic", "choices_per_rank", "row_bytes", "rows_per_rank"]


def rows_per_rank(topk_idx: NDArray[Any], num_experts: int, num_ranks: int) -> list[int]:
    """Tokens that go to each rank: once, however many of its experts they choose."""
    owner = _owners(topk_idx, num_experts, num_ranks)
    return [int((owner == rank).any(axis=1).sum()) for rank in range(num_ranks)]


def choices_per_rank(topk_idx: NDArray[Any], num_experts: int, num_ranks: int) -> list[int]:
    """Choices that fall on experts of each rank: rows of the expanded layout."""
    owner = _owners(topk_idx, num_experts, num_ranks)
    return [int((owner == rank).sum()) for rank in range(num_ranks)]


def _owners(topk_idx: NDArray[Any], num_experts: int, num_ranks: int) -> NDArray[Any]:
    valid = (topk_idx >= 0) & (topk_idx < num_experts)
    owners: NDArray[Any] = np.where(valid, topk_idx // (num_experts // num_ranks), -1)
    return owners


def row_bytes(hidden: int, itemsize: int, *, fp8: bool = False) -> int:
    """Bytes of a row as it travels; ``fp8``: one byte an element, and its scales."""
    return hidden + 4 * num_groups(hidden) if fp8 else hidden * itemsize


@dataclass(frozen=True)
class Traffic:
    """Rows from rank to rank.

    Attributes:
        rows: ``rows[source][destination]``.
        gpus: Which GPU each rank is on; rows between ranks of one GPU cross no link.
    """

    rows: tuple[tuple[int, ...], ...]
    gpus: tuple[Hashable, ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], gpus: Sequence[Hashable]) -> Traffic:
        """Make one of sequences of any kind."""
        return cls(tuple(tuple(map(int, line)) for line in rows), tuple(gpus))

    @property
    def reversed(self) -> Traffic:
        """The rows of the way back: from each destination to its source."""
        return Traffic(tuple(zip(*self.rows, strict=True)), self.gpus)

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.gpus)

    def crosses(self, source: int, destination: int) -> bool:
        """Whether rows from one rank to the other cross a link."""
        return self.gpus[source] != self.gpus[destination]

    @property
    def wire_rows(self) -> int:
        """Rows over the busiest link in its busier direction: all ranks of a GPU share one."""
        out = dict.fromkeys(self.gpus, 0)
        into = dict.fromkeys(self.gpus, 0)
        for source, line in enumerate(self.rows):
            for destination, rows in enumerate(line):
                if self.crosses(source, destination):
                    out[self.gpus[source]] += rows
                    into[self.gpus[destination]] += rows
        return max(*out.values(), *into.values())

    @property
    def logical_rows(self) -> int:
        """Rows that the rank which receives most receives, its own included."""
        return max(map(sum, zip(*self.rows, strict=True)))

    def over_links(self) -> Traffic:
        """The rows that cross a link; 0 between ranks of one GPU."""
        return Traffic(
            tuple(
                tuple(
                    rows if self.crosses(source, destination) else 0
                    for destination, rows in enumerate(line)
                )
                for source, line in enumerate(self.rows)
            ),
            self.gpus,
        )
