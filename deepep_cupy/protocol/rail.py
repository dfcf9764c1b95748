"""What crosses from node to node: integers that a rank works out from its own mask alone.

A token that any rank of another node wants crosses once, as one *record*, to the rank there that
has the same number on its node as the sender. That rank hands it to those of its node that want it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.protocol.nodes import NodeMap

__all__ = ["RailPart", "plan_rail", "record_bytes"]


@dataclass(frozen=True, eq=False)
class RailPart:
    """One rank's tokens for one node.

    Attributes:
        token: ``[n]`` ascending: the token of each record.
        goes: ``[n, L]`` bool: which of the node's ranks it is for; at least one.
    """

    token: NDArray[np.intp]
    goes: NDArray[np.bool_]


def plan_rail(mask: NDArray[Any], nodes: NodeMap) -> list[RailPart]:
    """Records for each node, the sender's own included, where nothing has to cross.

    Args:
        mask: ``[T, R]`` bool, which token goes to which rank.
        nodes: Where the ranks are.
    """
    parts = []
    for ranks in nodes.ranks_of:
        goes = mask[:, list(ranks)]
        token = np.flatnonzero(goes.any(axis=1))
        parts.append(RailPart(token, goes[token]))
    return parts


def record_bytes(row_bytes: int, num_topk: int, index_bytes: int, *, weights: bool) -> int:
    """Bytes of a record of a dispatch from ``topk_idx``: the row (its scales included), its
    choices, its weights, the number of its token, and a bit for each rank of the node.

    Args:
        row_bytes: Of the row as it travels.
        num_topk: K.
        index_bytes: Of a choice.
        weights: Whether weights travel.
    """
    return row_bytes + num_topk * (index_bytes + 4 * weights) + 4 + 1
