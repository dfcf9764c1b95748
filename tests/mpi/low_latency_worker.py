"""Low-latency calls on the host engine, scenario by scenario, on one set of ranks.

mpirun -n 2 python tests/mpi/low_latency_worker.py [NAME ...]

Every rank runs every scenario; the last rank is the one that misbehaves.
"""

import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
from mpi4py import MPI

from deepep_cupy import Buffer, ContractError
from deepep_cupy.testing.compare import assert_same_bits

SCENARIOS = {}
M, H, K, LOW = 16, 256, 3, 8


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def make(comm, **changes):
    arguments = {
        "num_max_tokens_per_rank": M,
        "hidden": H,
        "num_topk": K,
        "num_experts": 4 * comm.size,
        "dtype": "float32",
        "engine": "host",
        "timeout_s": 30,
        "low_latency_tokens": LOW,
    }
    return Buffer(comm, **(arguments | changes))


def inputs(comm, tokens, seed=1, rank=None):
    """x, topk_idx and topk_weights of a rank, this one where none is named."""
    rng = np.random.default_rng([seed, comm.rank if rank is None else rank])
    order = np.argsort(rng.random((tokens, 4 * comm.size)), axis=1)
    idx = np.ascontiguousarray(order[:, :K])
    idx[rng.random(idx.shape) < 0.2] = -1
    x = rng.standard_normal((tokens, H)).astype(np.float32)
    return x, idx, rng.random((tokens, K), np.float32)


def tokens_of(rank):
    return (5, 0, LOW, 1)[rank % 4]


@contextmanager
def refused(*words):
    """Check that the call is refused, and what is said."""
    with pytest.raises(ContractError) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def works(comm, buffer):
    """A round trip, to show that the Buffer is still usable."""
    x, idx, weights = inputs(comm, tokens_of(comm.rank))
    got = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, low_latency=True)
    want = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_worst_tokens=LOW * comm.size)
    number = int(want.handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    assert_same_bits("recv_x", got.recv_x[:number], want.recv_x[:number], rank=comm.rank)
    y = np.where(np.arange(len(want.recv_x))[:, None] < number, want.recv_x, np.nan)
    back, wanted = (buffer.combine(y, each.handle).combined_x for each in (got, want))
    assert_same_bits("combined_x", back, wanted, rank=comm.rank)


@scenario
def wrong_dispatches(comm):
    last, me = comm.size - 1, comm.rank
    x, idx, _ = inputs(comm, tokens_of(me))
    with make(comm) as buffer:
        low = {"topk_idx": idx, "low_latency": True}
        handle = buffer.dispatch(x, **low).handle
        mask = np.zeros((len(x), comm.size), bool)
        for words, bad in (
            (("do_cpu_sync", "never waits"), {"do_cpu_sync": True}),
            (("is_token_in_rank", "topk_idx alone"), {"is_token_in_rank": mask}),
            (("num_worst_tokens", f"{LOW * comm.size}"), {"num_worst_tokens": LOW * comm.size + 1}),
            (("handle", "each anew"), {"handle": handle, "topk_idx": None}),
            (("handle", "not kept"), {"handle": handle, "topk_idx": None, "low_latency": False}),
            (("low_latency", "True or False"), {"low_latency": 1}),
        ):
            with refused(*words if me == last else ("refused", f"rank {last}", words[0])):
                buffer.dispatch(x, **(low | bad if me == last else low))
        many = LOW + 1 if me == last else 1
        with refused(f"rank {last}" if last != me else f"low_latency_tokens = {LOW}", f"{LOW + 1}"):
            buffer.dispatch(np.zeros((many, H), "f4"), topk_idx=np.full((many, K), -1),
                            low_latency=True)  # fmt: skip
        if last:
            with refused("disagree on the routing", "low latency"):
                buffer.dispatch(x, topk_idx=idx, low_latency=me == last)
        with refused("topk_weights", "no weights go back" if me == last else f"rank {last}"):
            y = np.zeros((handle.num_rows, H), np.float32)
            given = np.zeros((handle.num_rows, K), np.float32) if me == last else None
            buffer.combine(y, handle, given)
        works(comm, buffer)
    with make(comm, low_latency_tokens=0) as buffer, refused("low_latency_tokens", "0 here"):
        buffer.dispatch(x, **low)


@scenario
def constructors(comm):
    for changes in ({"low_latency_tokens": M + 1}, {"low_latency_in_flight": 5}):
        with refused(*changes):
            make(comm, **changes)
    if comm.size > 1:
        with refused("'low_latency_tokens' must be the same"):
            make(comm, low_latency_tokens=1 + comm.rank)
        with refused("must be 0 on several nodes"):
            make(comm, ranks_per_node=1)
    size = {"num_max_tokens_per_rank": M, "hidden": H, "num_topk": K, "num_experts": 8 * comm.size}
    hints = [
        Buffer.size_hint(num_ranks=comm.size, **size, low_latency_tokens=low) for low in (0, LOW)
    ]
    assert hints[1] - hints[0] >= 2 * 8 * comm.size * LOW * H * 2


def main():
    comm = MPI.COMM_WORLD
    for name in sys.argv[1:] or SCENARIOS:
        start = time.monotonic()
        SCENARIOS[name](comm)
        if comm.rank == 0:
            print(f"{time.monotonic() - start:6.3f} s {name}")


if __name__ == "__main__":
    main()
