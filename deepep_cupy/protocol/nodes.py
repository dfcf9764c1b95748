"""Which rank is on which node: the same map on every rank, made from what all said of themselves.

Nodes are sets of ranks of equal size, in the order of their lowest rank. Any map works: ranks may
have been dealt out in blocks or one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MAX_NODES", "MAX_RANKS", "MAX_RANKS_PER_NODE", "NodeMap", "Place", "map_nodes"]

MAX_RANKS_PER_NODE = 8
"""Ranks of one node."""
MAX_NODES = 8
"""Nodes of one Buffer."""
MAX_RANKS = MAX_NODES * MAX_RANKS_PER_NODE
"""Ranks of one Buffer."""


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        leader: The lowest rank with which it can share memory: the machine, as MPI knows it.
        host: Name of the machine, for messages.
    """

    leader: int
    host: str


@dataclass(frozen=True)
class NodeMap:
    """Ranks by node.

    Attributes:
        ranks_of: ``[N][L]``, the ranks of each node, ascending.
    """

    ranks_of: tuple[tuple[int, ...], ...]

    @classmethod
    def one(cls, num_ranks: int) -> NodeMap:
        """All ranks on one node."""
        return cls((tuple(range(num_ranks)),))

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.ranks_of)

    def node_of(self, rank: int) -> int:
        """Number of a rank's node."""
        return next(node for node, ranks in enumerate(self.ranks_of) if rank in ranks)

    def mates_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's node, itself included."""
        return self.ranks_of[self.node_of(rank)]

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """``[N]``, the rank of each node that has the same number there as this one on its own."""
        local = self.mates_of(rank).index(rank)
        return tuple(ranks[local] for ranks in self.ranks_of)


def map_nodes(places: Sequence[Place], ranks_per_node: int | None) -> NodeMap | str:
    """The map, or why these ranks cannot share a Buffer.

    Args:
        places: Of all ranks.
        ranks_per_node: L where nodes are pretended: each L ranks in a row are taken for a node,
            and must lie on one machine. ``None``: nodes are machines.
    """
    size = len(places)
    if size > MAX_RANKS:
        return (
            f"the communicator has {size} ranks ({_on_hosts(places)}), more than the {MAX_RANKS} a "
            f"Buffer can join; split it into groups with comm.Split()"
        )
    if ranks_per_node is None:
        leaders = sorted({place.leader for place in places})
        ranks_of = [tuple(r for r in range(size) if places[r].leader == one) for one in leaders]
    elif size % ranks_per_node:
        return (
            f"argument 'ranks_per_node' must divide the number of ranks, got {ranks_per_node} for "
            f"{size} ranks ({_on_hosts(places)})"
        )
    else:
        starts = range(0, size, ranks_per_node)
        ranks_of = [tuple(range(start, start + ranks_per_node)) for start in starts]
    for ranks in ranks_of:
        away = [rank for rank in ranks if places[rank].leader != places[ranks[0]].leader]
        if away:
            return (
                f"argument 'ranks_per_node' = {ranks_per_node} takes ranks {ranks[0]} and "
                f"{away[0]} for ranks of one node, but they share no machine "
                f"({_on_hosts(places)}); leave it out, or give at most what one machine has"
            )
    counts = {len(ranks) for ranks in ranks_of}
    if len(counts) > 1:
        return (
            f"every node must have the same number of ranks, got {_on_hosts(places)}; start as "
            f"many on each, or split the communicator with comm.Split()"
        )
    if max(counts) > MAX_RANKS_PER_NODE or len(ranks_of) > MAX_NODES:
        return (
            f"a Buffer can join up to {MAX_NODES} nodes of up to {MAX_RANKS_PER_NODE} ranks, got "
            f"{len(ranks_of)} of {max(counts)} ({_on_hosts(places)}); split the communicator into "
            f"groups with comm.Split()"
        )
    return NodeMap(tuple(ranks_of))


def _on_hosts(places: Sequence[Place]) -> str:
    """``3 on node0, 1 on node1``."""
    counts: dict[int, int] = {}
    for place in places:
        counts[place.leader] = counts.get(place.leader, 0) + 1
    return ", ".join(f"{number} on {places[one].host}" for one, number in counts.items())
