"""Every case of the table on these ranks, bit by bit against the reference; then once more.

mpirun -n 4 python tests/mpi/table_worker.py [seed]

Rank i runs the reference of case i, i + R, … for all ranks and deals the answers out, so that the
ranks share the work of knowing what is right.
"""

import os
import sys
import time

from mpi4py import MPI

from deepep_cupy import Buffer
from deepep_cupy.testing.data import cases, expected, low_latency_cases, mode_cases
from deepep_cupy.testing.round_trip import RoundTrip, buffer_arguments


def main():
    comm = MPI.COMM_WORLD
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    chosen = cases(comm.size) + mode_cases(comm.size)
    if "," not in os.environ.get("CLUSTER_NODES", ""):
        chosen += low_latency_cases(comm.size)
    for first in range(0, len(chosen), comm.size):
        block = chosen[first : first + comm.size]
        mine = expected(block[comm.rank], seed) if comm.rank < len(block) else None
        for root, case in enumerate(block):
            start = time.monotonic()
            part = deal(comm, mine if root == comm.rank else None, root)
            meet(comm)
            run(comm, case, part)
            if comm.rank == 0:
                print(f"{time.monotonic() - start:6.3f} s {case.id}")
    if comm.rank == 0:
        print(f"{len(chosen)} cases right on {comm.size} ranks")


def deal(comm, whole, root):
    """Give each rank its own part of what ``root`` knows."""
    if whole is not None:
        parts = [whole.of_rank(rank) for rank in range(comm.size)]
        sends = [comm.isend(parts[rank], rank) for rank in range(comm.size) if rank != root]
        while not MPI.Request.Testall(sends):
            time.sleep(0.001)
        return parts[root]
    # Not comm.scatter: it spins, on cores that other ranks need to find out what is right.
    while (message := comm.improbe(root)) is None:
        time.sleep(0.001)
    return message.recv()


def meet(comm):
    """Wait for all ranks, asleep: a Buffer begins by waiting for them, and spins."""
    met = comm.Ibarrier()
    while not met.Test():
        time.sleep(0.0005)


def run(comm, case, part):
    with Buffer(comm, engine="host", timeout_s=60, **buffer_arguments(case)) as buffer:
        for _ in range(2):
            trip = RoundTrip(buffer, case, part)
            got = trip.dispatch()
            trip.compare_dispatch(got)
            if case.addable:
                trip.compare_combine(trip.combine(got.handle))


if __name__ == "__main__":
    main()
