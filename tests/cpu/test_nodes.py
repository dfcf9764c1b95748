"""Which rank is on which node, and which sets of ranks are refused."""

import pytest

from deepep_cupy.protocol.nodes import NodeMap, Place, map_nodes


def places(*hosts):
    """A place for each rank, by the name of its host."""
    return [Place(hosts.index(host), host) for host in hosts]


def test_nodes_are_in_the_order_of_their_lowest_rank():
    dealt = map_nodes(places("b", "a", "b", "a"), None)
    assert dealt == NodeMap(((0, 2), (1, 3)))
    assert [dealt.node_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert dealt.mates_of(2) == (0, 2)
    assert dealt.peers_of(2) == (2, 3)
    assert map_nodes(places(*"aaaa"), None).num_nodes == 1
    # Two machines may have one name.
    assert map_nodes([Place(0, "a"), Place(1, "a")], None).num_nodes == 2


def test_pretended_nodes_lie_within_machines():
    assert map_nodes(places(*"aaaa"), 2) == NodeMap(((0, 1), (2, 3)))
    assert map_nodes(places(*"aabb"), 1).num_nodes == 4
    assert map_nodes(places(*"aaabbb"), 3) == NodeMap(((0, 1, 2), (3, 4, 5)))
    # What would be too many for one node are not too many for two.
    assert map_nodes(places(*"a" * 16), 8).num_nodes == 2


@pytest.mark.parametrize(
    ("hosts", "ranks_per_node", "words"),
    [
        ("aaab", None, ("same number of ranks, got 3 on a, 1 on b;",)),
        ("aabb", 3, ("'ranks_per_node' must divide", "got 3 for 4 ranks (2 on a, 2 on b)")),
        ("aabb", 4, ("'ranks_per_node' = 4", "ranks 0 and 2", "(2 on a, 2 on b)")),
        ("abab", 2, ("'ranks_per_node' = 2", "ranks 0 and 1", "(2 on a, 2 on b)")),
        ("a" * 9 + "b" * 9, None, ("of up to 8 ranks, got 2 of 9 (9 on a, 9 on b)",)),
        ("abcdefghi", None, ("up to 8 nodes", "got 9 of 1 (1 on a, 1 on b,")),
        ("a" * 33 + "b" * 32, None, ("has 65 ranks (33 on a, 32 on b), more than the 64",)),
    ],
)
def test_refusals_name_hosts_and_counts(hosts, ranks_per_node, words):
    sentence = map_nodes(places(*hosts), ranks_per_node)
    assert [word for word in words if word not in sentence] == []
