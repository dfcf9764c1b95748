"""Interrupts anywhere in the Python of an operation on the host engine.

mpirun -n 2 python tests/mpi/interrupt_worker.py [--seed 1] [--count 60]

Each round, one rank of two or more gets a KeyboardInterrupt at a call, a return or a line drawn
from the seed, within a dispatch, a combine, a barrier or a reset. Then all ranks reset, or are told
that this Buffer is lost and make a new one, and make a right round trip. Memory that is none of
the Buffer's keeps its bytes throughout: an interrupted receive must not land in it.
"""

import argparse
import collections
import contextlib
import gc
import random
import sys
import time
from functools import partial

import numpy as np
from mpi4py import MPI

from deepep_cupy import Buffer, ContractError, PeerAbortedError, PeerTimeoutError, StateError
from deepep_cupy.reference import combine, dispatch

TIMEOUT_S = 1.0
M, H, K = 40, 2048, 2
LOST = "cannot go on with this Buffer"
EXPECTED = (KeyboardInterrupt, PeerAbortedError, PeerTimeoutError, StateError, ContractError)
HERE = "deepep_cupy"
comm = MPI.COMM_WORLD
RANK, SIZE = comm.rank, comm.size


def meet():
    """A barrier that is not the Buffer's."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0005)


class Interrupt:
    """Raises in this thread at the n-th event within the package; ``number=None``: counts them."""

    def __init__(self, kind, number):
        self.kind, self.number, self.seen = kind, number, 0

    def __enter__(self):
        if self.kind == "line":
            sys.settrace(self._trace)
        else:
            sys.setprofile(self._profile)

    def __exit__(self, *_):
        sys.settrace(None)
        sys.setprofile(None)

    def _count(self):
        self.seen += 1
        if self.seen - 1 == self.number:
            sys.settrace(None)
            sys.setprofile(None)
            raise KeyboardInterrupt

    def _trace(self, frame, event, _):
        if HERE not in frame.f_code.co_filename:
            return None
        if event == "line":
            self._count()
        return self._trace

    def _profile(self, frame, event, _):
        if HERE in frame.f_code.co_filename:
            self._count()


class Trip:
    """Data of all ranks, and the right answers."""

    def __init__(self):
        rng, experts = np.random.default_rng(3), 2 * SIZE
        self.x = [rng.standard_normal((M - 3 * rank, H), np.float32) for rank in range(SIZE)]
        self.idx = [np.array([rng.permutation(experts)[:K] for _ in range(len(x))]) for x in self.x]
        sent = dispatch(self.x, topk_idx=self.idx, num_experts=experts)
        self.sent = sent[RANK].recv_x
        back = combine([each.recv_x for each in sent], [each.handle for each in sent])
        self.back = back[RANK].combined_x

    def there(self, buffer):
        return buffer.dispatch(self.x[RANK], topk_idx=self.idx[RANK])

    def whole(self, buffer):
        got = self.there(buffer)
        assert got.recv_x.tobytes() == self.sent.tobytes()
        out = buffer.combine(got.recv_x, got.handle).combined_x
        assert out.tobytes() == self.back.tobytes()
        return got.handle


def make():
    return Buffer(
        comm,
        num_max_tokens_per_rank=M,
        hidden=H,
        num_topk=K,
        num_experts=2 * SIZE,
        dtype="float32",
        engine="host",
        timeout_s=TIMEOUT_S,
    )


def recover(buffer, said):
    """Reset until it works on all ranks, or the Buffer is lost on all; the Buffer to go on with."""
    last = ""
    for _ in range(12):
        lost = False
        try:
            buffer.reset()
            mine = 0
        except EXPECTED as error:
            mine, lost = 1, LOST in str(error)
            last = f"{type(error).__name__}: {error}"
        bad = comm.allreduce(mine)
        if comm.allreduce(int(lost)):
            said["lost"] += 1
            with contextlib.suppress(*EXPECTED):
                buffer.close()
            return make()
        if not bad:
            return buffer
        said["resets again"] += 1
    raise AssertionError(f"reset() never passes: {last}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    args = parser.parse_args()
    rng, trip, buffer = random.Random(args.seed), Trip(), make()
    handle, said, most = trip.whole(buffer), collections.Counter(), {}
    begun = time.monotonic()
    for number_of_round in range(args.count):
        name = rng.choice(("dispatch", "combine", "barrier", "reset"))
        kind, victim, place = rng.choice(("line", "call")), rng.randrange(SIZE), rng.random()
        work = {
            "dispatch": partial(trip.there, buffer),
            "combine": partial(buffer.combine, trip.sent, handle),
            "barrier": buffer.barrier,
            "reset": buffer.reset,
        }[name]
        if (name, kind) not in most:
            counting = Interrupt(kind, None)
            with counting:
                work()
            most[name, kind] = max(comm.allgather(counting.seen))
        number = int(place * most[name, kind]) if victim == RANK else None
        canaries = [np.ones(rng.randrange(64, 1 << 16), np.uint8) for _ in range(40)]
        meet()
        start = time.monotonic()
        try:
            with Interrupt(kind, number):
                work()
            said["went well"] += 1
        except EXPECTED as error:
            said[type(error).__name__] += 1
        said["slowest ms"] = max(said["slowest ms"], int(1e3 * (time.monotonic() - start)))
        del canaries[::2]
        gc.collect()
        canaries += [np.ones(rng.randrange(64, 1 << 16), np.uint8) for _ in range(40)]
        meet()
        before = buffer
        try:
            buffer = recover(buffer, said)
        except AssertionError as error:
            place = f"{kind} {number} of {name}, seed {args.seed}, round {number_of_round}"
            raise AssertionError(f"interrupted at {place}: {error}") from None
        if buffer is not before:
            handle = trip.whole(buffer)
        trip.whole(buffer)
        trip_of_before = buffer.combine(trip.sent, handle).combined_x
        assert trip_of_before.tobytes() == trip.back.tobytes()
        assert all((each == 1).all() for each in canaries), "memory of somebody else was written to"
    buffer.close()
    every = comm.gather(said)
    if RANK == 0:
        total = sum(every, collections.Counter())
        total["slowest ms"] = max(each["slowest ms"] for each in every)
        told = ", ".join(f"{name} {number}" for name, number in sorted(total.items()))
        print(
            f"INTERRUPTS: ok, {args.count} in {time.monotonic() - begun:.0f} s: {told}", flush=True
        )


if __name__ == "__main__":
    main()
