"""``shard_map`` of ``jax.distributed`` around dispatch and combine, with a ``psum`` beside them.

mpirun -n 2 python tests/xla/shard_worker.py
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import socket

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from mpi4py import MPI

import deepep_cupy.jax as ep
from deepep_cupy import Buffer

comm = MPI.COMM_WORLD
RANK, SIZE = comm.rank, comm.size
TOKENS, HIDDEN, TOPK, LOCAL = 24, 32, 3, 4


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main():
    port = comm.bcast(free_port() if RANK == 0 else None)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", SIZE, RANK)
    mesh = jax.make_mesh((SIZE,), ("ranks",), axis_types=(jax.sharding.AxisType.Auto,))
    split = PartitionSpec("ranks")
    rng = np.random.default_rng(RANK)
    rows = rng.integers(-8, 8, (TOKENS, HIDDEN)).astype(np.float32)
    chosen = [rng.permutation(SIZE * LOCAL)[:TOPK] for _ in range(TOKENS)]
    choices = np.array(chosen, np.int32)
    places = np.array([[len({e // LOCAL for e in row})] for row in chosen], np.float32)
    x, idx = (
        jax.make_array_from_process_local_data(NamedSharding(mesh, split), each)
        for each in (rows, choices)
    )
    total = comm.allreduce(float(rows.sum()))
    sizes = {"num_max_tokens_per_rank": TOKENS, "hidden": HIDDEN, "num_topk": TOPK}
    with Buffer(
        comm, **sizes, num_experts=SIZE * LOCAL, dtype="float32", engine="host", timeout_s=20
    ) as buffer:
        ep.attach(buffer)

        def local(x, idx):
            recv = ep.dispatch(buffer, x, idx)
            everywhere = jax.lax.psum(x.sum(), "ranks")  # needs nothing of the dispatch
            return ep.combine(buffer, recv.x * 2, recv.handle).x + everywhere

        for checked in (True, False):
            mapped = jax.shard_map(
                local, mesh=mesh, in_specs=(split, split), out_specs=split, check_vma=checked
            )
            for _ in range(5):
                out = jax.jit(mapped)(x, idx)
            mine = out.addressable_data(0)
            assert np.array_equal(mine, 2 * places * rows + total), checked
            back = jax.jit(jax.grad(lambda x, idx, f=mapped: f(x, idx).sum()))
            slope = back(x, idx).addressable_data(0)
            wanted = 2 * places + SIZE * TOKENS * HIDDEN  # each row is in all ranks' psum
            assert np.array_equal(slope, np.broadcast_to(wanted, rows.shape)), checked
            if RANK == 0:
                print(f"check_vma={checked}: ok", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
