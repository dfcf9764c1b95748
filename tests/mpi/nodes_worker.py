"""Ranks that are told to be on several nodes: refused everywhere.

mpirun -n 4 python tests/mpi/nodes_worker.py
"""

import pytest
from mpi4py import MPI

from deepep_cupy import Buffer, PlatformError


def main():
    sizes = {"num_max_tokens_per_rank": 8, "hidden": 8, "num_topk": 0, "engine": "host"}
    with pytest.raises(PlatformError, match=r"several nodes \(2 of its 4 ranks"):
        Buffer(MPI.COMM_WORLD, ranks_per_node=2, **sizes)
    with Buffer(MPI.COMM_WORLD, ranks_per_node=4, **sizes) as buffer:
        buffer.barrier()


if __name__ == "__main__":
    main()
