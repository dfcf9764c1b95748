"""A mixture-of-experts layer across ranks, against the same layer in one process.

A gate scores the experts for each token and keeps the best two. ``dispatch`` brings each token to
the ranks of its experts, every local expert (a two-layer perceptron) works on the rows it was
sent, ``combine`` adds the weighted results where the token came from.

USAGE (one process, or any number of ranks up to eight):
    python examples/02_moe_layer.py
    mpirun -n 4 python -m mpi4py examples/02_moe_layer.py

Expected output: the engine, how busy the experts are, the largest difference from the dense layer
(about 1e-6 in float32), and
    OK: equal to the dense layer
"""

import sys

import numpy as np
from mpi4py import MPI

from deepep_cupy import Buffer

comm = MPI.COMM_WORLD
rank, num_ranks = comm.rank, comm.size
num_tokens, hidden, ffn, num_topk = 512, 64, 128, 2
num_local_experts = 4
num_experts = num_local_experts * num_ranks


def main() -> int:
    """Run the layer both ways; 0 when all ranks agree with the dense layer."""
    with Buffer(
        comm,
        num_max_tokens_per_rank=num_tokens,
        hidden=hidden,
        num_topk=num_topk,
        num_experts=num_experts,
        dtype="float32",
    ) as buffer:
        xp = buffer.xp  # NumPy or, on GPUs, CuPy
        weights = make_weights(xp)  # the same on every rank; each uses its own experts only
        x = xp.asarray(normal(100 + rank, num_tokens, hidden))
        out, counts = moe_layer(xp, buffer, x, *weights)
        want = dense_layer(xp, x, *weights)
        error = float(abs(out - want).max() / abs(want).max())

    counts = np.concatenate(comm.allgather(counts))
    errors = comm.allgather(error)
    good = all(e < 1e-5 for e in errors)
    if rank == 0:
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        print(f"engine: {buffer.engine_name}, {ranks}, {num_tokens} tokens each, ", end="")
        print(f"{num_experts} experts, top {num_topk}")
        print(f"tokens per expert: {min(counts)} to {max(counts)}")
        print(f"largest difference from the dense layer: {max(errors):.1e} of its largest value")
        print("OK: equal to the dense layer" if good else "WRONG: not the dense layer")
    return 0 if good else 1


def moe_layer(xp, buffer, x, gate, w_in, w_out):
    """The layer across ranks: only the experts of this rank are touched here."""
    topk_idx, topk_weights = choose(xp, x, gate)

    # The library: tokens to the ranks of their experts.
    recv = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=topk_weights)

    y = xp.zeros_like(recv.recv_x)
    for local in range(num_local_experts):
        rows, column = xp.nonzero(recv.recv_topk_idx == local)  # who chose this expert
        expert = rank * num_local_experts + local
        result = mlp(xp, recv.recv_x[rows], w_in[expert], w_out[expert])
        y[rows] += recv.recv_topk_weights[rows, column][:, None] * result

    # The library: results home, added over the ranks.
    out = buffer.combine(y, recv.handle).combined_x
    return out, recv.num_recv_tokens_per_expert_list


def dense_layer(xp, x, gate, w_in, w_out):
    """Compute the layer with all experts in this process and no communication."""
    topk_idx, topk_weights = choose(xp, x, gate)
    out = xp.zeros_like(x)
    for expert in range(num_experts):
        weight = (topk_weights * (topk_idx == expert)).sum(axis=1, keepdims=True)
        out += weight * mlp(xp, x, w_in[expert], w_out[expert])
    return out


def choose(xp, x, gate):
    """Softmax over the experts, then the best two of each token, weights summing to one."""
    scores = xp.exp(x @ gate)
    topk_idx = xp.argsort(-scores, axis=1)[:, :num_topk]
    kept = xp.take_along_axis(scores, topk_idx, axis=1)
    weights = kept / kept.sum(axis=1, keepdims=True)
    return xp.ascontiguousarray(topk_idx), xp.ascontiguousarray(weights)


def mlp(xp, x, w_in, w_out):
    """One expert."""
    return xp.maximum(x @ w_in, 0) @ w_out


def make_weights(xp):
    """Gate and experts from a seed."""
    gate = normal(1, hidden, num_experts) / np.float32(hidden**0.5)
    w_in = normal(2, num_experts, hidden, ffn) / np.float32(hidden**0.5)
    w_out = normal(3, num_experts, ffn, hidden) / np.float32(ffn**0.5)
    return xp.asarray(gate), xp.asarray(w_in), xp.asarray(w_out)


def normal(seed, *shape):
    """Gaussian float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


if __name__ == "__main__":
    sys.exit(main())
