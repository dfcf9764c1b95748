"""What crosses between nodes: each token once a node, and all that was to arrive arrives."""

import numpy as np
import pytest

from deepep_cupy.protocol.nodes import NodeMap
from deepep_cupy.protocol.rail import plan_rail, record_bytes

BLOCKS = NodeMap(((0, 1, 2), (3, 4, 5)))
DEALT = NodeMap(((0, 3), (1, 4), (2, 5)))
ALONE = NodeMap(tuple((rank,) for rank in range(6)))


@pytest.mark.parametrize("nodes", [BLOCKS, DEALT, ALONE, NodeMap.one(6)])
@pytest.mark.parametrize("seed", range(20))
def test_records_and_ranks_give_the_mask_again(nodes, seed):
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(0, 40))
    mask = rng.random((tokens, 6)) < rng.choice([0.0, 0.1, 0.5, 1.0])
    parts = plan_rail(mask, nodes)
    assert len(parts) == nodes.num_nodes
    again = np.zeros_like(mask)
    for ranks, part in zip(nodes.ranks_of, parts, strict=True):
        assert part.goes.shape == (len(part.token), len(ranks))
        assert part.goes.any(axis=1).all()  # no record for nobody
        assert (np.diff(part.token) > 0).all()  # each token once, ascending
        for number, rank in enumerate(ranks):
            again[part.token[part.goes[:, number]], rank] = True
    assert (again == mask).all()
    # A record per token and node, where a row a rank would be a record per token and rank.
    by_node = [{nodes.node_of(int(rank)) for rank in np.flatnonzero(row)} for row in mask]
    assert sum(len(part.token) for part in parts) == sum(map(len, by_node))


@pytest.mark.parametrize("nodes", [BLOCKS, DEALT, ALONE])
def test_peers_speak_for_each_other(nodes):
    for rank in range(6):
        assert nodes.peers_of(rank)[nodes.node_of(rank)] == rank
        for peer in nodes.peers_of(rank):
            assert nodes.peers_of(peer) == nodes.peers_of(rank)
    # On every node every rank has one that speaks for it.
    for ranks in nodes.ranks_of:
        assert sorted(source for rank in ranks for source in nodes.peers_of(rank)) == list(range(6))


def test_bytes_of_a_record():
    assert record_bytes(14336, 8, 4, weights=True) == 14336 + 32 + 32 + 5
    assert record_bytes(100, 8, 8, weights=False) == 100 + 64 + 5
