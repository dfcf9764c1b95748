"""Four ranks on one machine or on two: which nodes they can form, and what is refused.

mpirun -n 4 python tests/mpi/nodes_worker.py [pretended]
"""

import sys

import numpy as np
import pytest
from mpi4py import MPI

from deepep_cupy import Buffer, ContractError, PlatformError, env
from deepep_cupy.reference import combine, dispatch
from deepep_cupy.testing.data import expected, node_cases
from deepep_cupy.testing.round_trip import RoundTrip, buffer_arguments

COMM = MPI.COMM_WORLD
TOKENS, EXPERTS, K = 20, 8, 3
SIZES = {
    "num_max_tokens_per_rank": 32,
    "hidden": 8,
    "num_topk": K,
    "num_experts": EXPERTS,
    "dtype": "float32",
    "engine": "host",
}


def works(num_nodes, **arguments):
    """A round trip, and how many nodes there are: from a layout that counts a token once a node."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((COMM.size, TOKENS, 8), np.float32)
    idx = np.argsort(rng.random((COMM.size, TOKENS, EXPERTS)), axis=2)[..., :K].copy()
    there = dispatch(list(x), topk_idx=list(idx), num_experts=EXPERTS)
    back = combine([each.recv_x for each in there], [each.handle for each in there])
    me = COMM.rank
    with Buffer(COMM, **SIZES, **arguments) as buffer:
        got = buffer.dispatch(x[me], topk_idx=idx[me])
        assert np.array_equal(got.recv_x, there[me].recv_x)
        out = buffer.combine(got.recv_x, got.handle)
        assert np.array_equal(out.combined_x, back[me].combined_x)
        layout = buffer.get_dispatch_layout(idx[me])
        by_node = layout.num_tokens_per_rdma_rank
        if num_nodes == 1:
            assert by_node is None
        else:
            node = idx[me] // (EXPERTS // num_nodes)
            assert list(by_node) == [(node == n).any(1).sum() for n in range(num_nodes)]
            buffer.dispatch(x[me], topk_idx=idx[me], num_tokens_per_rdma_rank=by_node)


def sums_by_node(ranks_per_node):
    """The cases of ``reduce="per_node"``, bit by bit against the reference."""
    for case in node_cases(COMM.size):
        arguments = buffer_arguments(case) | {"engine": "host", "ranks_per_node": ranks_per_node}
        with Buffer(COMM, **arguments) as buffer:
            part = expected(case, 0, buffer.nodes).of_rank(COMM.rank)
            trip = RoundTrip(buffer, case, part)
            got = trip.dispatch()
            trip.compare_dispatch(got)
            trip.compare_combine(trip.combine(got.handle))


def one_rank_adds_otherwise():
    """All must want the same sums."""
    with Buffer(COMM, **SIZES, ranks_per_node=1) as buffer:
        recv = buffer.dispatch(np.ones((1, 8), np.float32), topk_idx=np.zeros((1, 1), np.int64))
        reduce = "per_node" if COMM.rank == 1 else "exact"
        with pytest.raises(ContractError, match=r"rank 1: none [+] reduce='per_node'"):
            buffer.combine(recv.recv_x, recv.handle, reduce=reduce)


def refused(kind, match, comm=COMM, **arguments):
    """The constructor raises one sentence, the same on every rank."""
    with pytest.raises(kind, match=match) as caught:
        Buffer(comm, **SIZES, **arguments)
    assert len(set(comm.allgather(str(caught.value)))) == 1
    assert caught.value.printed_elsewhere == (comm.rank > 0)


def main():
    pretended = "pretended" in sys.argv
    works(1 if pretended else 2)
    works(4, ranks_per_node=1)
    sums_by_node(1 if pretended else None)
    sums_by_node(2)
    one_rank_adds_otherwise()
    works(2, ranks_per_node=2)
    hosts = r"\(4 on \S+\)" if pretended else r"\(2 on \S+, 2 on \S+\)"
    refused(ContractError, f"must divide the number of ranks, got 3 .* {hosts}", ranks_per_node=3)
    with env.setting(DEEPEP_CUPY_RANKS_PER_NODE="1"):
        works(4)
        works(2, ranks_per_node=2)
    with env.setting(DEEPEP_CUPY_RANKS_PER_NODE="two"):
        refused(ContractError, "'ranks_per_node' must be .* got 'two'")
    with pytest.raises(PlatformError, match="the ranks are on 4 nodes, and GPUs work together"):
        Buffer(COMM, ranks_per_node=1, **SIZES | {"engine": "cuda"})
    if pretended:
        return
    refused(
        ContractError, f"takes ranks 0 and 2 for ranks of one node, .* {hosts}", ranks_per_node=4
    )
    part = COMM.Split(int(COMM.rank == 3), COMM.rank)
    if COMM.rank != 3:
        sizes = r"same number of ranks, got 2 on \S+, 1 on \S+; start as many"
        SIZES["num_experts"] = 9
        refused(PlatformError, sizes, comm=part)


if __name__ == "__main__":
    main()
