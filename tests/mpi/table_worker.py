"""Every case of the table on these ranks, bit by bit against the reference; then once more.

mpirun -n 4 python tests/mpi/table_worker.py [seed]

Rank i runs the reference of case i, i + R, … for all ranks and deals the answers out, so that the
ranks share the work of knowing what is right.
"""

import sys
import time

from mpi4py import MPI

from deepep_cupy import Buffer
from deepep_cupy.testing.compare import assert_combine_equal, assert_dispatch_equal
from deepep_cupy.testing.data import cases, expected


def main():
    comm = MPI.COMM_WORLD
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    chosen = cases(comm.size)
    for first in range(0, len(chosen), comm.size):
        block = chosen[first : first + comm.size]
        mine = expected(block[comm.rank], seed) if comm.rank < len(block) else None
        for root, case in enumerate(block):
            start = time.monotonic()
            run(comm, case, deal(comm, mine if root == comm.rank else None, root))
            if comm.rank == 0:
                print(f"{time.monotonic() - start:6.3f} s {case.id}")
    if comm.rank == 0:
        print(f"{len(chosen)} cases right on {comm.size} ranks")


def deal(comm, whole, root):
    """Give each rank its own part of what ``root`` knows."""
    if whole is not None:
        parts = [
            (
                whole.inputs[rank],
                whole.first[rank] if whole.first else None,
                whole.dispatched[rank],
                whole.rows[rank] if whole.rows else None,
                whole.combined[rank] if whole.combined else None,
            )
            for rank in range(comm.size)
        ]
        sends = [comm.isend(parts[rank], rank) for rank in range(comm.size) if rank != root]
        while not MPI.Request.Testall(sends):
            time.sleep(0.001)
        return parts[root]
    # Not comm.scatter: it spins, on cores that other ranks need to find out what is right.
    while (message := comm.improbe(root)) is None:
        time.sleep(0.001)
    return message.recv()


def run(comm, case, want):
    inputs, first, dispatched, rows, combined = want
    with Buffer(
        comm,
        num_max_tokens_per_rank=case.num_max_tokens,
        hidden=case.row_bytes,
        num_topk=case.num_topk,
        num_experts=case.num_experts,
        dtype="uint8",
        engine="host",
        timeout_s=60,
    ) as buffer:
        routing = {"topk_idx": inputs.topk_idx, "is_token_in_rank": inputs.mask}
        routing["expert_alignment"] = case.expert_alignment
        if case.cached:
            made = buffer.dispatch(inputs.first_x, **routing)
            assert_dispatch_equal(made, first, rank=comm.rank)
            routing = {"handle": made.handle}
        for _ in range(2):
            got = buffer.dispatch(inputs.x, topk_weights=inputs.topk_weights, **routing)
            assert_dispatch_equal(got, dispatched, rank=comm.rank)
            if case.cached:
                assert got.handle is made.handle
            if rows is None:
                continue
            back = buffer.combine(
                rows.y, got.handle, topk_weights=rows.topk_weights, bias=inputs.biases
            )
            assert_combine_equal(back, combined, rank=comm.rank)


if __name__ == "__main__":
    main()
