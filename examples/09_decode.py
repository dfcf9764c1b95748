"""Decode with a toy model whose experts are spread over the ranks: DeepEP V1's low-latency calls.

Every rank has a few sequences; a step takes each one's state and newest word to the next word. Rows
arrive with room for all that can come to each expert, so that shapes never change and nobody waits
for counts. At the end the dense model, with all experts on every rank, must find the same scores
for the same words. The cuda engine has no low-latency calls yet: this runs on the host engine.

USAGE (one process, or 2, 4 or 8 ranks):
    mpirun -n 2 python -m mpi4py examples/09_decode.py

Expected output: the engine, time of a step, one sequence, and
    OK: scores of all 40 steps are the dense model's
"""

import sys
import time

import numpy as np
from mpi4py import MPI

from deepep_cupy import Buffer

comm = MPI.COMM_WORLD
rank, num_ranks = comm.rank, comm.size
num_sequences, num_steps = 4, 40
hidden, ffn, num_experts, num_topk, num_words = 64, 128, 8, 2, 94
mine = slice(rank * num_experts // num_ranks, (rank + 1) * num_experts // num_ranks)


def make_model(xp):
    """Random weights, the same on every rank."""
    rng = np.random.default_rng(5)
    shapes = {"embed": (num_words, hidden), "mix": (hidden, hidden), "gate": (hidden, num_experts)}
    shapes |= {"w_in": (num_experts, hidden, ffn), "w_out": (num_experts, ffn, hidden)}
    shapes["out"] = hidden, num_words
    drawn = {name: rng.standard_normal(s) / s[-2] ** 0.5 for name, s in shapes.items()}
    return {name: xp.asarray(array.astype("f")) for name, array in drawn.items()}


def choose(xp, p, x):
    """The experts of each row, and their weights, which add up to 1."""
    scores = x @ p["gate"]
    idx = xp.ascontiguousarray(xp.argsort(-scores, axis=1)[:, :num_topk])
    chosen = xp.exp(xp.take_along_axis(scores, idx, axis=1))
    return idx, chosen / chosen.sum(axis=1, keepdims=True)


def experts(xp, p, x, which):
    """Answers to ``x [experts, rows, hidden]``; to rows that hold nothing too, which go nowhere."""
    return xp.maximum(x @ p["w_in"][which], 0) @ p["w_out"][which]


def step(xp, buffer, p, state, words):
    """States and words, to the next states and the scores of the next words."""
    x = xp.tanh(state @ p["mix"] + p["embed"][words])
    idx, weights = choose(xp, p, x)
    recv = buffer.low_latency_dispatch(
        x, idx, num_sequences, num_experts, use_fp8=False, topk_weights=weights
    )
    y = experts(xp, p, recv.recv_x, mine)
    moved = buffer.low_latency_combine(y, idx, None, recv.handle).combined_x  # weights came along
    return x + moved, (x + moved) @ p["out"]


def dense(xp, p, written):
    """The scores of all steps, from the words alone, with all experts on this rank."""
    state, found = xp.zeros((num_sequences, hidden), "f"), []
    for words in written:
        x = xp.tanh(state @ p["mix"] + p["embed"][words])
        idx, weights = choose(xp, p, x)
        every = experts(xp, p, xp.broadcast_to(x, (num_experts, *x.shape)), slice(None))
        rows = xp.arange(len(x))
        state = x + sum(weights[:, k, None] * every[idx[:, k], rows] for k in range(num_topk))
        found.append(state @ p["out"])
    return xp.stack(found)


def main():
    np.seterr(all="ignore")  # of rows that hold anything
    if num_experts % num_ranks:
        sys.exit(f"{num_experts} experts are for 1, 2, 4 or 8 ranks, not {num_ranks}")
    sizes = dict.fromkeys(("num_max_tokens_per_rank", "low_latency_tokens"), num_sequences)
    sizes |= {"hidden": hidden, "num_topk": num_topk, "num_experts": num_experts}
    with Buffer(comm, **sizes, dtype="float32", engine="host") as buffer:
        xp, p = buffer.xp, make_model(buffer.xp)
        state = xp.zeros((num_sequences, hidden), "f")
        words = xp.arange(num_sequences) + num_sequences * rank
        written, scores, begun = [], [], time.perf_counter()
        for _ in range(num_steps):
            written.append(words)
            state, found = step(xp, buffer, p, state, words)
            words = found.argmax(axis=1)
            scores.append(found)
        us = (time.perf_counter() - begun) / num_steps * 1e6
        right = bool(xp.allclose(xp.stack(scores), dense(xp, p, written), rtol=1e-3, atol=1e-3))
        if rank == 0:
            text = "".join(chr(33 + int(each[0])) for each in written)
            print(f"engine: {buffer.engine_name}, {num_ranks} ranks, {us:.0f} us a step")
            print(f"one of {num_sequences} sequences a rank: {text}")
        if not all(comm.allgather(right)):
            sys.exit("WRONG: the scores differ from the dense model's")
        if rank == 0:
            print(f"OK: scores of all {num_steps} steps are the dense model's")


if __name__ == "__main__":
    main()
