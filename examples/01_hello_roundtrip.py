"""Send every token to its experts and bring it back: the whole library in three calls.

Each rank has eight tokens. A token names two of the experts, which are spread over the ranks:
expert e lives on rank ``e // experts_per_rank``. ``dispatch`` copies each token to the ranks of its
experts, each expert multiplies by its number plus one, ``combine`` adds what comes back.

USAGE (one process, or any number of ranks up to eight):
    python examples/01_hello_roundtrip.py
    mpirun -n 4 python -m mpi4py examples/01_hello_roundtrip.py

Expected output: the engine, a table of how many rows went from rank to rank, one token's way, and
    OK: all 32 tokens came back as expected
"""

import sys

import numpy as np
from mpi4py import MPI

from deepep_cupy import Buffer

comm = MPI.COMM_WORLD
rank, num_ranks = comm.rank, comm.size
num_tokens, hidden, num_topk = 8, 16, 2
experts_per_rank = 2
num_experts = experts_per_rank * num_ranks


def main() -> int:
    """Run the round trip and check it; 0 when every rank has the right answer."""
    rng = np.random.default_rng(rank)
    x = rng.integers(-8, 9, (num_tokens, hidden)).astype(np.float32)
    topk_idx = np.stack([rng.permutation(num_experts)[:num_topk] for _ in range(num_tokens)])
    topk_weights = np.tile(np.array([0.75, 0.25], np.float32), (num_tokens, 1))

    # The library, call 1 of 3: a Buffer for the sizes of the job. Every rank makes the same one.
    with Buffer(
        comm,
        num_max_tokens_per_rank=num_tokens,
        hidden=hidden,
        num_topk=num_topk,
        num_experts=num_experts,
        dtype="float32",
    ) as buffer:
        xp = buffer.xp  # arrays in and out are NumPy's or CuPy's, on the GPU of this rank's Buffer

        # The library, call 2: rows to the ranks of their experts.
        recv = buffer.dispatch(
            xp.asarray(x), topk_idx=xp.asarray(topk_idx), topk_weights=xp.asarray(topk_weights)
        )
        # This rank's experts: one row out per row in, weighted sum over the local experts.
        # recv_topk_idx holds local expert numbers, -1 (and weight 0) for experts elsewhere.
        factor = rank * experts_per_rank + recv.recv_topk_idx + 1
        scale = (recv.recv_topk_weights * factor).sum(axis=1, keepdims=True)
        y = (recv.recv_x * scale).astype(xp.float32)

        # The library, call 3: the rows go home and are added there.
        out = buffer.combine(y, recv.handle).combined_x

        expected = x * (topk_weights * (topk_idx + 1)).sum(axis=1, keepdims=True)
        right = int((to_host(out) == expected).all(axis=1).sum())
        report(buffer, recv, topk_idx, x, to_host(out))
    total_right = comm.allreduce(right)
    total = num_tokens * num_ranks
    if rank == 0:
        good = f"OK: all {total} tokens came back as expected"
        bad = f"WRONG: {total - total_right} of {total} tokens"
        print(good if total_right == total else bad)
    return 0 if total_right == total else 1


def to_host(array):
    """A NumPy copy of an array of either engine."""
    return array.get() if hasattr(array, "get") else array


def report(buffer, recv, topk_idx, x, out):
    """Rank 0 prints who sent how many rows to whom, and follows one of its tokens."""
    received = comm.gather(to_host(recv.handle.recv_rows_per_rank))
    if rank != 0:
        return
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    print(f"engine: {buffer.engine_name}, {ranks}, ", end="")
    print(f"{num_tokens} tokens each, {num_experts} experts, top {num_topk}")
    print("rows sent  " + "".join(f"   to {r}" for r in range(num_ranks)))
    for source in range(num_ranks):
        print(f"  from {source}   " + "".join(f"{row[source]:7d}" for row in received))
    e0, e1 = topk_idx[0]
    print(f"token 0 of rank 0: experts {e0} and {e1}, on ranks ", end="")
    print(f"{e0 // experts_per_rank} and {e1 // experts_per_rank}; ", end="")
    print(f"(0.75 * {e0 + 1} + 0.25 * {e1 + 1}) times {x[0, 0]:g} came back as {out[0, 0]:g}")


if __name__ == "__main__":
    sys.exit(main())
