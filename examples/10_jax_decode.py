"""Decode with one mixture-of-experts block in JAX: a compiled step, caches that are donated.

Every rank has sequences of its own and a part of the experts. A step takes the newest token of each
sequence through attention over a cache of keys and values, then through experts on all ranks, and
gives the next token. It is one program, whose caches stay where they are: on GPUs XLA records it
and replays it without calling Python. At the end the dense block, with all experts on every rank
and no cache, gets the sequences that were written, and must find the same scores.

USAGE (1, 2, 4 or 8 ranks; needs the extra jax; without JAX_PLATFORMS=cpu on GPUs, if JAX has any):
    JAX_PLATFORMS=cpu mpirun -n 2 python -m mpi4py examples/10_jax_decode.py

Expected output: the engine, a progress bar, time of a step, the first sequence, and
    OK: scores of all 48 steps are the dense block's
"""

import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from support import progress

import deepep_cupy.jax as ep
from deepep_cupy import Buffer

comm = MPI.COMM_WORLD
rank, num_ranks = comm.rank, comm.size
num_sequences, num_steps = 4, 48
hidden, ffn, num_experts, num_topk, num_words = 64, 128, 8, 2, 94
mine = slice(rank * num_experts // num_ranks, (rank + 1) * num_experts // num_ranks)


def make_block():
    """Random weights, the same on every rank."""
    rng = np.random.default_rng(5)
    shapes = {
        "embed": (num_words, hidden),
        "qkv": (hidden, 3 * hidden),
        "gate": (hidden, num_experts),
        "out": (hidden, num_words),
        "w_in": (num_experts, hidden, ffn),
        "w_out": (num_experts, ffn, hidden),
    }
    return {name: rng.standard_normal(s).astype("f") / s[-2] ** 0.5 for name, s in shapes.items()}


def attend(q, keys, values, seen):
    """Attention of one query a sequence, over the positions that it has seen."""
    scores = jnp.einsum("sh,sph->sp", q, keys) / hidden**0.5
    return jnp.einsum("sp,sph->sh", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), values)


def experts(x, idx, weights, w_in, w_out):
    """The weighted sum of the chosen experts' answers; -1 is no expert."""
    gates = (jax.nn.one_hot(idx, len(w_in)) * weights[..., None]).sum(1)
    h = jax.nn.gelu(jnp.einsum("nh,ehf->nef", x, w_in))
    return (jnp.einsum("nef,efh->neh", h, w_out) * gates[..., None]).sum(1)


def choose(p, x):
    """Experts and weights of each row."""
    scores, idx = jax.lax.top_k(x @ p["gate"], num_topk)
    return idx, jax.nn.softmax(scores)


def step(buffer, p, position, keys, values, words):
    """The newest token of every sequence in, scores of the next and the caches out."""
    x = p["embed"][words]
    q, k, v = jnp.split(x @ p["qkv"], 3, axis=1)
    keys, values = keys.at[:, position].set(k), values.at[:, position].set(v)
    x = x + attend(q, keys, values, jnp.arange(num_steps) <= position)
    recv = ep.dispatch(buffer, x, *choose(p, x))
    y = experts(recv.x, recv.topk_idx, recv.topk_weights, p["w_in"][mine], p["w_out"][mine])
    x = x + ep.combine(buffer, y, recv.handle).x
    return x @ p["out"], keys, values


@jax.jit
def dense(p, words):
    """Scores after every word of one sequence: all positions at once, all experts here."""
    x = p["embed"][words]
    q, k, v = jnp.split(x @ p["qkv"], 3, axis=1)
    seen = jnp.tril(jnp.ones((len(words), len(words)), bool))
    x = x + jax.vmap(lambda q, seen: attend(q[None], k[None], v[None], seen)[0])(q, seen)
    return (x + experts(x, *choose(p, x), p["w_in"], p["w_out"])) @ p["out"]


def decode(buffer, p):
    """Write ``num_steps`` words to each sequence; the words, their scores, us a step."""
    run = jax.jit(partial(step, buffer), donate_argnums=(2, 3))
    shape = (num_sequences, num_steps, hidden)
    keys, values = jnp.zeros(shape), jnp.zeros(shape)
    words = jnp.arange(num_sequences) + num_sequences * rank
    written, scores = [words], []
    for number in progress(range(num_steps), "words", num_steps, shown=rank == 0):
        found, keys, values = run(p, number, keys, values, words)
        words = found.argmax(axis=1)
        written.append(words)
        scores.append(found)
        if number == num_steps // 2:  # compiled and recorded by now
            jax.block_until_ready(words)
            begun = time.perf_counter()
    jax.block_until_ready(words)
    us = (time.perf_counter() - begun) / (num_steps - 1 - num_steps // 2) * 1e6
    return np.stack(written, axis=1), np.stack(scores, axis=1), us


def main():
    if num_experts % num_ranks:
        sys.exit(f"{num_experts} experts are for 1, 2, 4 or 8 ranks, not {num_ranks}")
    jax.config.update("jax_default_matmul_precision", "highest")
    sizes = {"num_max_tokens_per_rank": num_sequences, "hidden": hidden}
    sizes |= {"num_topk": num_topk, "num_experts": num_experts}
    engine = "host" if jax.default_backend() == "cpu" else "cuda"
    with Buffer(comm, **sizes, dtype="float32", engine=engine) as buffer:
        ep.attach(buffer)
        p = make_block()
        written, scores, us = decode(buffer, p)
        ep.check(buffer)
        wanted = np.stack([dense(p, words[:-1]) for words in written])
        right = np.allclose(scores, wanted, rtol=1e-3, atol=1e-3)
        if rank == 0:
            print(f"engine: {engine}, {num_ranks} ranks, {num_sequences} sequences each")
            print(f"{us:.0f} us a step: {''.join(chr(33 + word) for word in written[0])}")
        if not all(comm.allgather(right)):
            sys.exit("WRONG: the scores differ from the dense block's")
        if rank == 0:
            print(f"OK: scores of all {num_steps} steps are the dense block's")


if __name__ == "__main__":
    main()
