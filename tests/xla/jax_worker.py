"""``deepep_cupy.jax``, scenario by scenario, on one set of ranks.

JAX_PLATFORMS=cpu mpirun -n 2 python tests/xla/jax_worker.py [NAME ...]

Without JAX_PLATFORMS on GPUs: there what is wrong is found after a program has run, in other
scenarios.

The dense layer, computed by JAX on one rank from everybody's rows, is what results and gradients
are compared with; rows and sums of plain calls are compared with ``Buffer``'s own, bit by bit.
"""

import os
import sys
import time
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cuda")
if os.environ["JAX_PLATFORMS"] == "cuda":  # programs as short as these are recorded too
    wanted = "--xla_gpu_graph_min_graph_size=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {wanted}"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import deepep_cupy.jax as ep
from deepep_cupy import Buffer, ContractError, PeerTimeoutError, StateError

ON_CPU = os.environ["JAX_PLATFORMS"] == "cpu"
SCENARIOS = {}
TIMEOUT_S = 2.0
HIDDEN, TOPK, LOCAL, MOST = 32, 3, 4, 40
jax.config.update("jax_default_matmul_precision", "highest")
comm = MPI.COMM_WORLD
RANK, SIZE = comm.rank, comm.size
EXPERTS = SIZE * LOCAL
MINE = slice(RANK * LOCAL, (RANK + 1) * LOCAL)


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def on_cpu(function):
    return scenario(function) if ON_CPU else function


def on_gpu(function):
    return function if ON_CPU else scenario(function)


def down(array):
    """A NumPy array of a NumPy or CuPy array."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def make_buffer(**other):
    sizes = {
        "num_max_tokens_per_rank": MOST,
        "hidden": HIDDEN,
        "num_topk": TOPK,
        "num_experts": EXPERTS,
        "dtype": "float32",
        "engine": "host" if ON_CPU else "cuda",
        "timeout_s": 20.0,
    }
    made = Buffer(comm, **{**sizes, **other})
    ep.attach(made)
    return made


def tokens_of(rank):
    return 17 + 5 * (rank % 3)


def inputs(rank, seed=1, dtype=np.float32):
    """x, topk_idx with some -1, weights: numbers whose sums are exact."""
    rng = np.random.default_rng([seed, rank])
    tokens = tokens_of(rank)
    x = rng.integers(-8, 8, (tokens, HIDDEN)).astype(dtype)
    idx = np.array([rng.permutation(EXPERTS)[:TOPK] for _ in range(tokens)], np.int32)
    idx[rng.random(idx.shape) < 0.2] = -1
    weights = rng.choice([0.25, 0.5, 1.0], (tokens, TOPK)).astype(np.float32)
    return x, idx, weights


rng = np.random.default_rng(7)
W1 = rng.standard_normal((EXPERTS, HIDDEN, 16)).astype(np.float32) / 6
W2 = rng.standard_normal((EXPERTS, 16, HIDDEN)).astype(np.float32) / 4


def mixed(x, idx, weights, w1, w2):
    """Each expert's answer times its weight, for experts numbered from 0; -1: none."""
    gates = (jax.nn.one_hot(idx, w1.shape[0]) * weights[..., None]).sum(1)
    hidden = jnp.tanh(jnp.einsum("nh,ehf->nef", x, w1))
    return (jnp.einsum("nef,efh->neh", hidden, w2) * gates[..., None]).sum(1)


def layer(buffer, w1, w2, x, idx, weights):
    recv = ep.dispatch(buffer, x, idx, weights)
    y = mixed(recv.x, recv.topk_idx, recv.topk_weights, w1, w2)
    return ep.combine(buffer, y, recv.handle).x


def close(got, wanted, tolerance=2e-4):
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def dense_gradients():
    """Of the sum of squares of all ranks' outputs: for w1, w2, and each rank's x and weights."""
    given = [inputs(rank) for rank in range(SIZE)]

    def loss(w1, w2, xs, weights):
        outs = [mixed(x, g[1], w, w1, w2) for x, g, w in zip(xs, given, weights, strict=True)]
        return sum((out**2).sum() for out in outs)

    xs, weights = [g[0] for g in given], [g[2] for g in given]
    return jax.grad(loss, argnums=(0, 1, 2, 3))(W1, W2, xs, weights)


# ------------------------------------------------------------------------------- results


@scenario
def bits_of_plain_calls(buffer):
    """Inside jit the rows, choices, weights, counts and sums are those of the Buffer itself."""
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16, np.int32):
        x, idx, weights = inputs(RANK, dtype=dtype)
        bias = x + np.ones((), dtype)

        @jax.jit
        def both(x, idx, weights, bias):
            recv = ep.dispatch(buffer, x, idx, weights, expert_alignment=4)
            out = ep.combine(buffer, recv.x, recv.handle, recv.topk_weights, (bias, bias))
            again = ep.dispatch(buffer, x, None, weights, handle=recv.handle)
            return recv, out, again

        recv, out, again = both(x, idx, weights, bias)
        real = int(recv.handle.num_recv_tokens)
        up = buffer.xp.asarray
        x, idx, weights, bias = up(x), up(idx), up(weights), up(bias)
        wanted = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, expert_alignment=4)
        handle = wanted.handle
        assert real == handle.num_recv_tokens
        assert recv.x.shape == (SIZE * MOST, HIDDEN)
        assert np.asarray(recv.x[:real]).tobytes() == down(wanted.recv_x).tobytes()
        assert not np.asarray(recv.x[real:]).astype(np.float32).any()
        assert np.array_equal(recv.topk_idx[:real], down(wanted.recv_topk_idx))
        assert (np.asarray(recv.topk_idx[real:]) == -1).all()
        assert np.array_equal(recv.topk_weights[:real], down(wanted.recv_topk_weights))
        for name in ("send_row", "recv_rows_per_rank", "psum_num_recv_tokens_per_expert"):
            assert np.array_equal(getattr(recv.handle, name), down(getattr(handle, name))), name
        counts = down(handle.num_unaligned_recv_tokens_per_expert)
        assert np.array_equal(recv.handle.num_recv_tokens_per_expert, counts)
        assert np.array_equal(recv.handle.recv_src_idx[:real], down(handle.recv_src_idx))
        sums = buffer.combine(wanted.recv_x, handle, wanted.recv_topk_weights, (bias, bias))
        assert np.asarray(out.x).tobytes() == down(sums.combined_x).tobytes()
        assert np.array_equal(out.topk_weights, down(sums.combined_topk_weights))
        assert np.asarray(again.x[:real]).tobytes() == down(wanted.recv_x).tobytes()
        assert not np.asarray(again.topk_weights[real:]).any()


@on_cpu
def arrays_of_jax_in_plain_calls(buffer):
    """Of every dtype, those that NumPy's own DLPack does not know included."""
    x, idx, _ = inputs(RANK)
    for name in ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        with make_buffer(dtype=name) as other:
            rows = jnp.asarray(x, dtype=name)
            got = other.dispatch(rows, topk_idx=jnp.asarray(idx)).recv_x
            wanted = other.dispatch(np.array(rows), topk_idx=idx).recv_x
            assert got.dtype == wanted.dtype == rows.dtype
            assert got.tobytes() == wanted.tobytes()


@scenario
def expanded_rows_for_ragged_dot(buffer):
    x, idx, weights = inputs(RANK)
    for reduce in ("exact", "per_rank"):
        for alignment in (1, 4):

            @jax.jit
            def grouped(x, idx, weights, w1, w2, alignment=alignment, reduce=reduce):
                recv = ep.dispatch(
                    buffer, x, idx, weights, layout="expanded", expert_alignment=alignment
                )
                sizes = recv.handle.group_sizes
                hidden = jnp.tanh(jax.lax.ragged_dot(recv.x, w1, sizes))
                y = jax.lax.ragged_dot(hidden, w2, sizes) * recv.topk_weights[:, None]
                return ep.combine(buffer, y, recv.handle, reduce=reduce).x, recv.handle.group_sizes

            out, sizes = grouped(x, idx, weights, W1[MINE], W2[MINE])
            assert (np.asarray(sizes) % alignment == 0).all()
            close(out, mixed(x, idx, weights, W1, W2))

    def loss(w1, x, weights):
        recv = ep.dispatch(buffer, x, idx, weights, layout="expanded")
        hidden = jnp.tanh(jax.lax.ragged_dot(recv.x, w1, recv.handle.group_sizes))
        y = jax.lax.ragged_dot(hidden, W2[MINE], recv.handle.group_sizes)
        y = y * recv.topk_weights[:, None]
        return (ep.combine(buffer, y, recv.handle).x ** 2).sum()

    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(W1[MINE], x, weights)
    wanted = dense_gradients()
    close(got[0], wanted[0][MINE])
    close(got[1], wanted[2][RANK])
    close(got[2], wanted[3][RANK])


@scenario
def cast_to_fp8(buffer):
    x, idx, _ = inputs(RANK)

    @jax.jit
    def cast(x, idx):
        recv = ep.dispatch(buffer, x, idx, quantize="fp8_e4m3")
        return *recv.x, recv.handle

    codes, scales, handle = cast(x, idx)
    up = buffer.xp.asarray
    x, idx = up(x), up(idx)
    wanted, wanted_scales = buffer.dispatch(x, topk_idx=idx, quantize="fp8_e4m3").recv_x
    real = int(handle.num_recv_tokens)
    assert codes.dtype == ml_dtypes.float8_e4m3fn
    assert np.asarray(codes[:real]).tobytes() == down(wanted).tobytes()
    assert np.array_equal(scales[:real], down(wanted_scales))


@scenario
def eager_and_grad(buffer):
    x, idx, weights = inputs(RANK)
    given = (W1[MINE], W2[MINE], x, weights)
    close(layer(buffer, W1[MINE], W2[MINE], x, idx, weights), mixed(x, idx, weights, W1, W2))

    def loss(w1, w2, x, weights, wrap=lambda f: f):
        return (wrap(partial(layer, buffer))(w1, w2, x, idx, weights) ** 2).sum()

    wanted = dense_gradients()
    wanted = wanted[0][MINE], wanted[1][MINE], wanted[2][RANK], wanted[3][RANK]
    for name, function in (
        ("eager", jax.grad(loss, argnums=(0, 1, 2, 3))),
        ("jit", jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))),
        ("checkpoint", jax.jit(jax.grad(partial(loss, wrap=jax.checkpoint), argnums=(0, 1, 2, 3)))),
    ):
        for got, want in zip(function(*given), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=3e-4, atol=3e-4, err_msg=name)


@scenario
def scan_and_vmap(buffer):
    x, idx, weights = inputs(RANK)

    def deep(w1, w2, x):
        def body(x, w):
            return x + layer(buffer, *w, x, idx, weights), None

        return jax.lax.scan(body, x, (w1, w2))[0]

    def plain(w1, w2, x):
        for layer_w1, layer_w2 in zip(w1, w2, strict=True):
            x = x + layer(buffer, layer_w1, layer_w2, x, idx, weights)
        return x

    w1, w2 = (jnp.stack([w[MINE]] * 3) for w in (W1, W2))
    loss = lambda f: jax.jit(jax.grad(lambda *w: (f(*w) ** 2).sum(), argnums=(0, 2)))  # noqa: E731
    wanted = loss(plain)(w1, w2, x)
    for got in (loss(deep)(w1, w2, x), loss(jax.checkpoint(deep))(w1, w2, x)):
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
    batch = jnp.stack([x, 2 * x])
    rows = jax.jit(jax.vmap(partial(layer, buffer), in_axes=(None, None, 0, None, None)))
    out = rows(W1[MINE], W2[MINE], batch, idx, weights)
    close(out[1], mixed(2 * x, idx, weights, W1, W2))


@scenario
def donated_operands(buffer):
    x, idx, weights = inputs(RANK)
    step = jax.jit(partial(layer, buffer, W1[MINE], W2[MINE]), donate_argnums=(0,))
    wanted = mixed(x, idx, weights, W1, W2)
    for _ in range(3):
        close(step(jnp.array(x), idx, weights), wanted)


# --------------------------------------------------------------------------------- order


@scenario
def independent_calls_keep_their_order(buffer):
    """Six round trips that need nothing of each other, with unequal work before them on each rank:
    without tokens XLA lets them overtake each other, differently on each rank. Gradients too."""
    hidden, tokens = 512, 200 + 7 * RANK
    rng = np.random.default_rng(RANK)
    idx = np.array([rng.permutation(EXPERTS)[:TOPK] for _ in range(tokens)], np.int32)
    x = rng.integers(-8, 8, (tokens, hidden)).astype(np.float32)
    places = np.array([[len({e // LOCAL for e in row})] for row in idx], np.float32)

    with make_buffer(num_max_tokens_per_rank=400, hidden=hidden) as wide:

        def trips(x):
            found = []
            for number in range(6):
                z = jnp.round(4 * jnp.tanh(x * (number + 1)))
                if number % 2:
                    z = jnp.round(jnp.sin(z @ jnp.ones((hidden, hidden), z.dtype)))
                recv = ep.dispatch(wide, z, idx)
                found.append((z, ep.combine(wide, recv.x * 2, recv.handle).x))
            return found

        run = jax.jit(trips)
        back = jax.jit(jax.grad(lambda x: sum((out * z).sum() for z, out in trips(x))))
        for _ in range(5):
            for number, (z, out) in enumerate(run(x)):
                assert np.array_equal(out, 2 * np.asarray(z) * places), number
            assert not np.asarray(back(x)).any()  # of rounded numbers


@scenario
def programs_one_after_another(buffer):
    """Calls of two programs, none waited for."""
    x, idx, weights = inputs(RANK)
    one = jax.jit(partial(layer, buffer, W1[MINE], W2[MINE]))
    two = jax.jit(partial(layer, buffer, 2 * W1[MINE], W2[MINE]))
    outs = [(one if number % 2 else two)(x, idx, weights) for number in range(20)]
    close(outs[1], mixed(x, idx, weights, W1, W2))
    close(outs[18], mixed(x, idx, weights, 2 * W1, W2))


@scenario
def order_given_by_a_token(buffer):
    x, idx, _ = inputs(RANK)

    @jax.jit
    def carried(x):
        first = ep.dispatch(buffer, x, idx)

        def body(carry, _):
            x, token = carry
            recv = ep.dispatch(buffer, x, idx, after=token)
            out = ep.combine(buffer, recv.x, recv.handle)
            return (out.x, out.token), None

        (y, token), _ = jax.lax.scan(body, (x, first.token), None, length=2)
        return y, ep.combine(buffer, first.x, first.handle, after=token).x

    places = np.array([[len({e // LOCAL for e in row if e >= 0})] for row in idx], np.float32)
    y, last = carried(x)
    assert np.array_equal(y, x * places**2)
    assert np.array_equal(last, x * places)


# ------------------------------------------------------------------------------ what goes wrong


@scenario
def wrong_arguments_while_tracing(buffer):
    x, idx, weights = inputs(RANK)
    handle = ep.dispatch(buffer, x, idx).handle
    with make_buffer() as other:
        handle_of_other = ep.dispatch(other, x, idx).handle
        for words, call in (
            ("'x' must be an array", lambda: ep.dispatch(buffer, x[0], idx)),
            ("'topk_idx' must be an array", lambda: ep.dispatch(buffer, x, idx[:-1])),
            ("'topk_weights' must be float32", lambda: ep.dispatch(buffer, x, idx, weights[:, :1])),
            ("'num_worst_tokens' must be", lambda: ep.dispatch(buffer, x, idx, num_worst_tokens=0)),
            ("'expert_alignment' must", lambda: ep.dispatch(buffer, x, idx, expert_alignment=0)),
            ("'layout' must be", lambda: ep.dispatch(buffer, x, idx, layout="wide")),
            ("'quantize' must be", lambda: ep.dispatch(buffer, x, idx, quantize="fp4")),
            ("has 41 rows", lambda: ep.dispatch(buffer, np.zeros((41, 4), np.float32), idx)),
            ("not both", lambda: ep.dispatch(buffer, x, idx, handle=handle)),
            ("'y' must be", lambda: ep.combine(buffer, x[:3], handle)),
            (
                "'bias' must be",
                lambda: ep.combine(buffer, np.zeros((SIZE * MOST, 32)), handle, bias=x[:2]),
            ),
            ("must be the handle", lambda: ep.combine(buffer, x, None)),
            ("of another Buffer", lambda: ep.combine(buffer, x, handle_of_other)),
        ):
            with pytest.raises(ContractError) as caught:
                jax.jit(call)()
            assert words in str(caught.value), (words, str(caught.value))
    buffer.barrier()


@on_cpu
def refusals_on_every_rank(buffer):
    """What one rank's values break, every rank's program raises, and the Buffer goes on."""
    x, idx, weights = inputs(RANK)
    step = jax.jit(partial(layer, buffer, W1[MINE], W2[MINE]))
    twice = idx.copy()
    if RANK == SIZE - 1:
        twice[3] = 1
    small = jax.jit(lambda: ep.dispatch(buffer, x, idx, num_worst_tokens=1).x)
    for call in (lambda: step(x, twice, weights), small):
        with pytest.raises(jax.errors.JaxRuntimeError, match="ContractError"):
            jax.block_until_ready(call())
        with pytest.raises(ContractError):
            ep.check(buffer)
        ep.check(buffer)
    close(step(x, idx, weights), mixed(x, idx, weights, W1, W2))


@on_cpu
def swapped_calls(buffer):
    """One rank's program has two dispatches of one form in another order: every rank raises."""
    if SIZE == 1:
        return
    x, idx, _ = inputs(RANK)
    wide = np.ones((MOST, HIDDEN), np.float32)[: len(x)]

    @jax.jit
    def program(x, wide):
        if RANK == SIZE - 1:
            second = ep.dispatch(buffer, wide, idx)
            first = ep.dispatch(buffer, x, idx)
        else:
            first = ep.dispatch(buffer, x, idx)
            second = ep.dispatch(buffer, wide, idx)
        return first.x, second.x

    with pytest.raises(jax.errors.JaxRuntimeError, match="different calls"):
        jax.block_until_ready(program(x, wide))
    with pytest.raises(ContractError, match="dispatch with tag"):
        ep.check(buffer)
    buffer.barrier()


def refused_here_or_later(call):
    """Where the kernel is over when Python looks, its own call raises; else its counts are 0."""
    try:
        assert call() == 0
    except jax.errors.JaxRuntimeError as error:
        assert "same expert twice" in str(error)


@on_gpu
def found_after_the_program(buffer):
    """Kernels find what is wrong: the program ends, ``check`` raises on every rank, outputs are
    poisoned, and after a meeting the Buffer goes on."""
    x, idx, _ = inputs(RANK)
    step = jax.jit(lambda x, idx: ep.dispatch(buffer, x, idx).handle.num_recv_tokens)
    twice = idx.copy()
    if RANK == SIZE - 1:
        twice[3] = 1
    refused_here_or_later(lambda: int(step(x, twice)))
    with pytest.raises(ContractError, match="same expert twice"):
        ep.check(buffer)
    comm.barrier()
    assert int(step(x, idx)) > 0
    ep.check(buffer)


@on_gpu
def replays_call_no_python(buffer):
    """XLA records calls and replays them: fresh inputs each time, in memory that moves. What it
    records over and over takes the pool's memory once."""
    attached = ep.attached.attached(buffer, "test")
    ran, run = [], attached.run
    attached.run = lambda site, frame: (ran.append(site.operation), run(site, frame))
    pool = buffer._engine._runtime.pool
    step = jax.jit(partial(layer, buffer, W1[MINE], W2[MINE]))
    kept, captured, number = [], [], 0
    for _ in range(4):
        for _ in range(25):
            x, idx, weights = inputs(RANK, seed=number)
            out = step(jnp.array(x), jnp.array(idx), jnp.array(weights))
            close(out, mixed(x, idx, weights, W1, W2))
            kept = [*kept[-(number % 7) :], out]  # so that XLA's memory is not always the same
            number += 1
        captured.append(pool.statistics().captured)
    ep.check(buffer)
    if RANK == 0:
        print(f"{len(ran)} calls of Python for {2 * number}, {captured} bytes captured", flush=True)
    assert 0 < captured[1] == captured[-1]
    assert len(ran) < 2 * number, len(ran)
    given = jnp.array(x), jnp.array(idx), jnp.array(weights)
    for _ in range(10):
        jax.block_until_ready(step(*given))
    before = len(ran)
    for _ in range(50):
        jax.block_until_ready(step(*given))
    assert len(ran) - before < 10, len(ran) - before
    del attached.run


@on_gpu
def refused_in_a_replay(buffer):
    """What only values show, in a program that is replayed: every rank hears of it."""
    x, idx, _ = inputs(RANK)
    step = jax.jit(lambda x, idx: ep.dispatch(buffer, x, idx).handle.num_recv_tokens)
    for _ in range(5):
        assert int(step(x, idx)) > 0
    twice = idx.copy()
    if RANK == SIZE - 1:
        twice[3] = 1
    refused_here_or_later(lambda: int(step(x, twice)))
    with pytest.raises(ContractError, match="same expert twice"):
        ep.check(buffer)
    comm.barrier()
    assert int(step(x, idx)) > 0
    ep.check(buffer)


@on_gpu
def many_calls_keep_memory(buffer):
    """Nothing grows over calls that nobody waits for."""
    x, idx, weights = inputs(RANK)
    step = jax.jit(partial(layer, buffer, W1[MINE], W2[MINE]))
    wanted = mixed(x, idx, weights, W1, W2)
    device = jax.local_devices()[0]
    used = []
    for _ in range(3):
        for _ in range(300):
            out = step(x, idx, weights)
        close(out, wanted)
        used.append(device.memory_stats()["bytes_in_use"])
    assert used[2] < used[0] + (1 << 16), used  # a leak of one row a call would be twice that


@on_cpu
def closed_and_gone(buffer):
    x, idx, weights = inputs(RANK)
    other = make_buffer()
    step = jax.jit(partial(layer, other, W1[MINE], W2[MINE]))
    close(step(x, idx, weights), mixed(x, idx, weights, W1, W2))
    other.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"StateError.*closed"):
        jax.block_until_ready(step(x, idx, weights))
    with Buffer(comm, num_max_tokens_per_rank=4, hidden=4, num_topk=1, num_experts=SIZE) as fresh:
        with pytest.raises(StateError, match=r"attach\(buffer\)"):
            ep.dispatch(fresh, x, idx)
    buffer.barrier()


@on_cpu
def a_late_rank(buffer):
    x, idx, weights = inputs(RANK)
    with make_buffer(timeout_s=TIMEOUT_S) as other:
        step = jax.jit(partial(layer, other, W1[MINE], W2[MINE]))
        close(step(x, idx, weights), mixed(x, idx, weights, W1, W2))
        if SIZE > 1:
            if RANK == SIZE - 1:
                time.sleep(2 * TIMEOUT_S)
            begun = time.monotonic()
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"Peer|poisoned"):
                jax.block_until_ready(step(x, idx, weights))
            assert time.monotonic() - begun < 3 * TIMEOUT_S
            if RANK != SIZE - 1:
                with pytest.raises(PeerTimeoutError, match=f"rank {SIZE - 1}"):
                    ep.check(other)
            comm.barrier()
            other.reset()
        close(step(x, idx, weights), mixed(x, idx, weights, W1, W2))
    buffer.barrier()


def main():
    wanted = sys.argv[1:] or list(SCENARIOS)
    with make_buffer() as buffer:
        for name in wanted:
            begun = time.monotonic()
            SCENARIOS[name](buffer)
            if RANK == 0:
                print(f"{time.monotonic() - begun:6.2f} s {name}", flush=True)
    if RANK == 0:
        print(f"JAX: ok, {len(wanted)} scenarios ({SIZE} ranks)", flush=True)


if __name__ == "__main__":
    main()
