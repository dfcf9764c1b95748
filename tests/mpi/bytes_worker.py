"""Bytes that the nodes' cards send in a dispatch and in a combine, beside what the plan says.

Below ``python -m deepep_cupy.testing.cluster --nodes 2 --per-node 2``:
mpirun -n 4 python tests/mpi/bytes_worker.py
"""

import time
from pathlib import Path

import ml_dtypes
import numpy as np
from mpi4py import MPI

from deepep_cupy import Buffer
from deepep_cupy.protocol.nodes import NodeMap
from deepep_cupy.protocol.rail import plan_rail, record_bytes

COMM = MPI.COMM_WORLD
TOKENS, H, K, EXPERTS = 256, 2048, 8, 8 * COMM.size
ROW = 2 * H


def sent():
    """Bytes that this node's card has sent so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise SystemExit("this node has no card of its own")


def measured(first, call):
    """What the call returns, and the bytes of all cards meanwhile; ``first``: of its node."""
    COMM.Barrier()
    time.sleep(0.1)  # acknowledgements
    COMM.Barrier()
    before = sent()
    result = call()
    COMM.Barrier()
    return result, COMM.allreduce((sent() - before) if first else 0)


def main():
    rng = np.random.default_rng(COMM.rank)
    idx = np.array([rng.permutation(EXPERTS)[:K] for _ in range(TOKENS)], np.int32)
    weights = rng.random((TOKENS, K), np.float32)
    x = rng.standard_normal((TOKENS, H)).astype(ml_dtypes.bfloat16)
    with Buffer(
        COMM,
        num_max_tokens_per_rank=TOKENS,
        hidden=H,
        num_topk=K,
        num_experts=EXPERTS,
        engine="host",
    ) as buffer:
        nodes = NodeMap(buffer.nodes)
        first = nodes.mates_of(COMM.rank)[0] == COMM.rank
        here = nodes.node_of(COMM.rank)
        recv, there = measured(
            first, lambda: buffer.dispatch(x, topk_idx=idx, topk_weights=weights)
        )
        _, back = measured(
            first, lambda: buffer.combine(recv.recv_x, recv.handle, reduce="per_node")
        )
        parts = plan_rail(np.asarray(recv.handle.send_row) >= 0, nodes)
    far = [part for node, part in enumerate(parts) if node != here]
    records = COMM.allreduce(sum(len(part.token) for part in far))
    a_rank = COMM.allreduce(sum(int(part.goes.sum()) for part in far))
    for name, bytes_sent, of_plan in (
        ("dispatch", there, records * record_bytes(ROW, K, 4, weights=True)),
        ("combine", back, records * ROW),
    ):
        if COMM.rank == 0:
            print(
                f"{name}: the plan's {records} records (a row a rank would be {a_rank}) take "
                f"{of_plan} bytes, the cards sent {bytes_sent}: {bytes_sent / of_plan:.3f}"
            )
        assert of_plan <= bytes_sent <= 1.05 * of_plan


if __name__ == "__main__":
    main()
