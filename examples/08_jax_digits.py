"""Train the classifier of example 03 in JAX: ``jax.jit`` and ``jax.grad`` through
dispatch and combine.

Eight experts are spread over the ranks. The loss of a step is compiled once; its gradient flows
through ``deepep_cupy.jax`` without a line of backward code. At the end the layer is compared with
the dense layer, which computes all experts for all tokens on every rank.

USAGE (1, 2, 4 or 8 ranks; needs the extra jax; without JAX_PLATFORMS=cpu on GPUs, if JAX has any):
    JAX_PLATFORMS=cpu mpirun -n 2 python -m mpi4py examples/08_jax_digits.py

Expected output: the engine, a progress bar with the loss, and
    OK: test accuracy 9x.x %; outputs and gradients are the dense layer's
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from support import load_digits, progress

import deepep_cupy.jax as ep
from deepep_cupy import Buffer

comm = MPI.COMM_WORLD
rank, num_ranks = comm.rank, comm.size
hidden, ffn, num_experts, num_topk, num_classes = 48, 64, 8, 2, 10
num_local = num_experts // num_ranks
num_train, batch_size, num_steps, rate = 1440, 240, 120, 0.5
mine = slice(rank * num_local, (rank + 1) * num_local)


def experts(x, idx, weights, w_in, w_out):
    """The weighted sum of the chosen experts' answers; -1 is no expert."""
    gates = (jax.nn.one_hot(idx, len(w_in)) * weights[..., None]).sum(1)
    h = jax.nn.relu(jnp.einsum("nh,ehf->nef", x, w_in))
    return (jnp.einsum("nef,efc->nec", h, w_out) * gates[..., None]).sum(1)


def route(p, x):
    """Embed and choose: rows, experts, weights."""
    h = jax.nn.relu(x @ p["embed"])
    scores, idx = jax.lax.top_k(h @ p["gate"], num_topk)
    return h, idx, jax.nn.softmax(scores)


def logits_of(buffer, p, x):
    """The layer over the ranks: ``p`` holds this rank's experts alone."""
    h, idx, weights = route(p, x)
    recv = ep.dispatch(buffer, h, idx, weights)
    y = experts(recv.x, recv.topk_idx, recv.topk_weights, p["w_in"], p["w_out"])
    return ep.combine(buffer, y, recv.handle).x


def loss_of(logits, y):
    """Cross-entropy, summed over this rank's tokens."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1).sum()


def train(buffer):
    """Gradient descent; this rank's parameters, the loss of every step."""
    (x, y), _ = load_digits(num_train)
    shapes = {
        "embed": (64, hidden),
        "gate": (hidden, num_experts),
        "w_in": (num_experts, hidden, ffn),
        "w_out": (num_experts, ffn, num_classes),
    }
    rng = np.random.default_rng(0)
    p = {name: rng.standard_normal(s) / s[-2] ** 0.5 for name, s in shapes.items()}
    p = {name: value.astype(np.float32) for name, value in p.items()}
    p |= {name: p[name][mine] for name in ("w_in", "w_out")}
    step = jax.jit(jax.value_and_grad(lambda p, x, y: loss_of(logits_of(buffer, p, x), y)))
    losses = []
    bar = progress(range(num_steps), "training", num_steps, shown=rank == 0)
    for number in bar:
        batch = np.random.default_rng(number).choice(num_train, batch_size, replace=False)
        here = np.array_split(batch, num_ranks)[rank]
        loss, grad = step(p, x[here].astype(np.float32), y[here])
        for name in ("embed", "gate"):  # replicated parameters: sum over the ranks
            grad[name] = comm.allreduce(np.asarray(grad[name]))
        p = {name: p[name] - rate / batch_size * np.asarray(grad[name]) for name in p}
        losses.append(comm.allreduce(float(loss)) / batch_size)
        bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
    return p, losses


def equals_dense(buffer, p, x, y):
    """Whether outputs and gradients are those of the dense layer."""
    own, everywhere = (x[rank::num_ranks], y[rank::num_ranks]), dict(p)
    for name in ("w_in", "w_out"):
        everywhere[name] = np.concatenate(comm.allgather(np.asarray(p[name])))

    def dense_logits(p, x):
        return experts(*route(p, x), p["w_in"], p["w_out"])

    out = jax.jit(lambda p, x: logits_of(buffer, p, x))(p, own[0])
    grad = jax.jit(jax.grad(lambda p: loss_of(logits_of(buffer, p, own[0]), own[1])))(p)
    dense = jax.jit(jax.grad(lambda p: loss_of(dense_logits(p, x), y)))(everywhere)
    same = [np.allclose(out, dense_logits(everywhere, own[0]), atol=1e-4)]
    for name in p:
        found, wanted = np.asarray(grad[name]), np.asarray(dense[name])
        if name in ("embed", "gate"):
            found = comm.allreduce(found)
        else:
            wanted = wanted[mine]
        same.append(np.allclose(found, wanted, rtol=1e-3, atol=1e-2))
    return out, comm.allreduce(all(same), MPI.LAND)


def main() -> int:
    """Train, compare, report; 0 when all is right."""
    if num_experts % num_ranks:
        sys.exit(f"{num_experts} experts are for 1, 2, 4 or 8 ranks, not {num_ranks}" * (rank == 0))
    sizes = {"num_max_tokens_per_rank": 400, "hidden": hidden, "num_topk": num_topk}
    engine = "host" if jax.default_backend() == "cpu" else "cuda"
    with Buffer(comm, **sizes, num_experts=num_experts, dtype="float32", engine=engine) as buffer:
        ep.attach(buffer)
        p, losses = train(buffer)
        _, (x, y) = load_digits(num_train)
        x = x.astype(np.float32)
        out, same = equals_dense(buffer, p, x, y)
    right = int((np.asarray(out).argmax(axis=1) == y[rank::num_ranks]).sum())
    accuracy = comm.allreduce(right) / len(y)
    good = accuracy >= 0.93 and losses[-1] < losses[0] and same
    if rank == 0:
        verdict = f"outputs and gradients {'are' if same else 'differ from'} the dense layer's"
        print(f"{'OK' if good else 'WRONG'}: test accuracy {100 * accuracy:.1f} %; {verdict}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
