"""The cable of the last node is pulled in the middle of a run, and plugged in again.

Below ``python -m deepep_cupy.testing.cluster --nodes 2 --per-node 2``:
mpirun -n 4 python tests/mpi/cut_worker.py
"""

import subprocess
import time

import numpy as np
import pytest
from mpi4py import MPI

from deepep_cupy import Buffer, PeerTimeoutError

COMM = MPI.COMM_WORLD
PULLS = COMM.rank == COMM.size - 1
TIMEOUT_S = 1.0


def cable(state):
    if PULLS:
        subprocess.run(["ip", "link", "set", "eth0", state], check=True, timeout=10)


def main():
    me, experts = COMM.rank, 4 * COMM.size
    x = np.full((64, 256), me, np.float32)
    idx = np.array([np.random.default_rng([me, t]).permutation(experts)[:4] for t in range(64)])
    half = COMM.size // 2
    others = tuple(range(half, COMM.size)) if me < half else tuple(range(half))
    with Buffer(
        COMM,
        num_max_tokens_per_rank=64,
        hidden=256,
        num_topk=4,
        num_experts=experts,
        dtype="float32",
        engine="host",
        timeout_s=TIMEOUT_S,
    ) as buffer:
        recv = buffer.dispatch(x, topk_idx=idx)
        want = buffer.combine(recv.recv_x, recv.handle).combined_x
        COMM.Barrier()
        cable("down")
        time.sleep(0.3)
        start = time.monotonic()
        with pytest.raises(PeerTimeoutError) as caught:
            buffer.combine(recv.recv_x, recv.handle)
        assert time.monotonic() - start < TIMEOUT_S + 1.0
        assert caught.value.late_ranks == others, caught.value
        cable("up")
        for _ in range(20):
            try:
                buffer.reset()
                break
            except PeerTimeoutError:
                continue
        again = buffer.dispatch(x, topk_idx=idx)
        assert np.array_equal(again.recv_x, recv.recv_x)
        for handle in (recv.handle, again.handle):
            assert np.array_equal(buffer.combine(again.recv_x, handle).combined_x, want)
    print("WORKS again")


if __name__ == "__main__":
    main()
