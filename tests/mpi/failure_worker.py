"""What happens when a rank is late, stopped, dead, or raises.

mpirun -n 3 python tests/mpi/failure_worker.py SCENARIO ...

Rank 1 is the one in trouble. Each rank prints what it saw; test_failures.py judges.
"""

import os
import signal
import sys
import time

import numpy as np
from mpi4py import MPI

from deepep_cupy import Buffer, ContractError, PeerAbortedError, PeerTimeoutError, StateError
from deepep_cupy.reference import combine, dispatch

TIMEOUT_S = 1.0
M, H, K = 200, 2048, 4  # over a MB of rows a peer: more than MPI sends without the receiver
BAD = 1
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def make(comm):
    return Buffer(
        comm,
        num_max_tokens_per_rank=M,
        hidden=H,
        num_topk=K,
        num_experts=2 * comm.size,
        dtype="float32",
        engine="host",
        timeout_s=TIMEOUT_S,
    )


class RoundTrip:
    """Data of all ranks from a seed, and the right answers."""

    def __init__(self, comm, seed):
        ranks, self.rank = range(comm.size), comm.rank
        rng = np.random.default_rng(seed)
        self.x = [rng.standard_normal((M, H), np.float32) for _ in ranks]
        experts = 2 * comm.size
        idx = np.argsort(rng.random((comm.size, M, experts)), axis=2)[..., :K]
        self.idx = np.ascontiguousarray(idx)
        self.sent = dispatch(self.x, topk_idx=list(self.idx), num_experts=experts)
        handles = [each.handle for each in self.sent]
        self.back = combine([each.recv_x for each in self.sent], handles)

    def there(self, buffer):
        got = buffer.dispatch(self.x[self.rank], topk_idx=self.idx[self.rank])
        assert np.array_equal(got.recv_x, self.sent[self.rank].recv_x)
        return got.handle

    def and_back(self, buffer, handle):
        got = buffer.combine(self.sent[self.rank].recv_x, handle)
        assert np.array_equal(got.combined_x, self.back[self.rank].combined_x)


def report(call):
    """Call, and print the class and text of what it raised, and when."""
    start = time.monotonic()
    try:
        call()
    except (ContractError, PeerAbortedError, PeerTimeoutError, StateError) as error:
        seconds = time.monotonic() - start
        print(f"SAW {type(error).__name__} {seconds:.2f} {error}")
    else:
        print(f"SAW nothing {time.monotonic() - start:.2f}")


def meet(comm):
    """A barrier that is ours, not the Buffer's, and does not spin."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


# ---------------------------------------------------------------------------- late, and reset


def late_in(comm, delayed, call_of):
    """Rank 1 is late in a call; then all poison, reset, and work, with the old handle too."""
    trip, other = RoundTrip(comm, 1), RoundTrip(comm, 2)
    with make(comm) as buffer:
        handle = trip.there(buffer)
        trip.and_back(buffer, handle)
        meet(comm)
        if comm.rank == BAD:
            delayed(buffer)
        report(lambda: call_of(buffer, trip, handle))
        report(buffer.barrier)  # StateError
        meet(comm)
        buffer.reset()
        for _ in range(3):
            other.and_back(buffer, other.there(buffer))
        trip.and_back(buffer, handle)
        buffer.barrier()
        print("WORKS again", buffer.state.value)


def before(buffer):
    time.sleep(2 * TIMEOUT_S)


def before_rows(name):
    """Delay rank 1 between headers and rows: the others' rows are on their way then."""

    def delayed(buffer):
        mover = buffer._engine._mover if name == "bring_back" else buffer._engine._rail
        real = getattr(mover, name)

        def slow(*arguments, **named):
            time.sleep(2 * TIMEOUT_S)
            setattr(mover, name, real)
            return real(*arguments, **named)

        setattr(mover, name, slow)

    return delayed


@scenario
def late(comm):
    late_in(comm, before, lambda buffer, trip, handle: trip.there(buffer))


@scenario
def late_rows(comm):
    late_in(comm, before_rows("spread"), lambda buffer, trip, handle: trip.there(buffer))


@scenario
def late_combine(comm):
    late_in(
        comm,
        before_rows("bring_back"),
        lambda buffer, trip, handle: trip.and_back(buffer, handle),
    )


@scenario
def late_sums(comm):
    """Several nodes: rank 1 is late with what it has for the sums of its node."""

    def sums(buffer, trip, handle):
        buffer.combine(trip.sent[comm.rank].recv_x, handle, reduce="per_node")

    late_in(comm, before_rows("bring_sums"), sums)


@scenario
def late_barrier(comm):
    late_in(comm, before, lambda buffer, trip, handle: buffer.barrier())


@scenario
def late_reset(comm):
    """Rank 1 is late for the reset as well; a second reset works."""
    trip = RoundTrip(comm, 1)
    with make(comm) as buffer:
        meet(comm)
        if comm.rank == BAD:
            time.sleep(2 * TIMEOUT_S)
        report(lambda: trip.there(buffer))
        if comm.rank == BAD:
            time.sleep(2 * TIMEOUT_S)
        else:
            report(buffer.reset)
            report(buffer.barrier)
        meet(comm)
        buffer.reset()
        trip.and_back(buffer, trip.there(buffer))
        print("WORKS again", buffer.state.value)


@scenario
def reset_ends_waits(comm):
    """Rank 1 leaves a call out and resets: the others, which wait for it there, learn it."""
    trip = RoundTrip(comm, 1)
    with make(comm) as buffer:
        trip.there(buffer)
        meet(comm)
        if comm.rank != BAD:
            report(lambda: trip.there(buffer))
        report(buffer.reset)
        trip.and_back(buffer, trip.there(buffer))
        print("WORKS again", buffer.state.value)


@scenario
def reset_fails_within(comm):
    """Rank 1 is interrupted between its first meeting and the end of the exchange of states, twice:
    by an exception of its own, and by a time limit. What that exchange has left, a receive and its
    memory among it, meets no message of the next one."""
    trip = RoundTrip(comm, 6)
    with make(comm) as buffer:
        handle = trip.there(buffer)
        rendezvous = buffer._engine._rendezvous
        wait, ones = rendezvous.wait, []

        def interrupted(pending, operation, phase, *more, **others):
            if phase == "their state" and comm.rank == BAD:
                raise errors.pop()
            return wait(pending, operation, phase, *more, **others)

        errors = [PeerTimeoutError("an early end", ()), KeyboardInterrupt()]
        rendezvous.wait = interrupted
        for _ in range(2):
            try:
                report(buffer.reset)
            except KeyboardInterrupt:
                print("SAW KeyboardInterrupt 0.0")
            ones.append(np.ones(1 << 16, np.int64))  # in the memory of what died
            meet(comm)
        rendezvous.wait = wait
        buffer.reset()
        meet(comm)
        buffer.reset()
        trip.and_back(buffer, handle)
        trip.and_back(buffer, trip.there(buffer))
        assert all((each == 1).all() for each in ones)
        print("WORKS again", buffer.state.value)


@scenario
def late_for_good(comm):
    """Nobody resets, and everybody ends as if nothing had happened."""
    trip = RoundTrip(comm, 1)
    buffer = make(comm)
    meet(comm)
    if comm.rank == BAD:
        time.sleep(2 * TIMEOUT_S)
    report(lambda: trip.there(buffer))
    print("END")


@scenario
def late_then_close(comm):
    """A poisoned Buffer is closed by all: an orderly end."""
    trip = RoundTrip(comm, 1)
    buffer = make(comm)
    meet(comm)
    if comm.rank == BAD:
        before_rows("spread")(buffer)
    report(lambda: trip.there(buffer))
    meet(comm)
    buffer.close()
    print("END", buffer.state.value)


@scenario
def close_alone(comm):
    """Rank 1 does not close."""
    buffer = make(comm)
    if comm.rank == BAD:
        time.sleep(3 * TIMEOUT_S)
        report(buffer.close)
    else:
        report(buffer.close)
        report(buffer.close)  # twice is fine
    print("END", buffer.state.value)


# --------------------------------------------------------------------------- stopped, and dead


@scenario
def stopped(comm):
    trip = RoundTrip(comm, 1)
    with make(comm) as buffer:
        trip.there(buffer)
        if comm.rank == BAD:
            os.kill(os.getpid(), signal.SIGSTOP)
        trip.there(buffer)


@scenario
def stopped_in_rows(comm):
    trip = RoundTrip(comm, 1)
    with make(comm) as buffer:
        if comm.rank == BAD:
            buffer._engine._rail.spread = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
        trip.there(buffer)


@scenario
def stopped_for_a_while(comm):
    """Rank 1 is stopped in its wait, and goes on when its limit has passed: what it waited for has
    come meanwhile, and it finds that out before it complains."""
    trip = RoundTrip(comm, 1)
    child = os.fork() if comm.rank == BAD else None
    if child == 0:
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(TIMEOUT_S + 0.5)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    with make(comm) as buffer:
        if comm.rank != BAD:
            time.sleep(TIMEOUT_S / 2)  # rank 1 is stopped in its wait for these ranks
        report(lambda: trip.there(buffer) if comm.rank == BAD else _patient(buffer, trip))
    if child:
        os.waitpid(child, 0)


def _patient(buffer, trip):
    buffer._engine._rendezvous.timeout_s = 20
    trip.there(buffer)


@scenario
def killed(comm):
    trip = RoundTrip(comm, 1)
    with make(comm) as buffer:
        trip.there(buffer)
        if comm.rank == BAD:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(1000):
            trip.there(buffer)


# ------------------------------------------------------------------------------------- raising


@scenario
def raises(comm):
    """An exception on rank 1 inside ``with``."""
    trip = RoundTrip(comm, 1)
    with make(comm) as buffer:
        handle = trip.there(buffer)
        if comm.rank == BAD:
            raise ValueError("the batch is bad")
        trip.and_back(buffer, handle)


@scenario
def raises_while_others_wait_elsewhere(comm):
    """The others never call the Buffer again: the end of rank 1 ends them."""
    with make(comm):
        if comm.rank == BAD:
            raise ValueError("the batch is bad")
        comm.Barrier()


@scenario
def raises_bare(comm):
    """An exception on rank 1, and no ``with``."""
    trip = RoundTrip(comm, 1)
    buffer = make(comm)
    handle = trip.there(buffer)
    if comm.rank == BAD:
        raise ValueError("the batch is bad")
    trip.and_back(buffer, handle)


@scenario
def raises_after_close(comm):
    """Rank 1 raises when no Buffer is open, and the others wait for it in MPI."""
    with make(comm) as buffer:
        buffer.barrier()
    if comm.rank == BAD:
        raise ValueError("the batch is bad")
    comm.Barrier()


@scenario
def refused(comm):
    """Rank 1 has a wrong argument, and nobody catches the error that all raise."""
    trip = RoundTrip(comm, 1)
    with make(comm) as buffer:
        tokens = M - 1 if comm.rank == BAD else M
        buffer.dispatch(trip.x[comm.rank][:tokens], topk_idx=trip.idx[comm.rank])


@scenario
def constructed(comm):
    """Nothing but a Buffer."""
    make(comm)


@scenario
def constructed_by_some(comm):
    """Rank 1 makes no Buffer; the others catch what that costs them, and end in order."""
    if comm.rank == BAD:
        time.sleep(60)
    report(lambda: make(comm))


@scenario
def interrupted_construction(comm):
    """Rank 1 makes no Buffer; rank 0 is interrupted while it waits for it."""
    if comm.rank == BAD:
        time.sleep(60)
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(1)
    Buffer(comm, num_max_tokens_per_rank=4, hidden=8, num_topk=0, engine="host", timeout_s=100)


@scenario
def raises_and_is_caught(comm):
    """An exception on every rank, caught outside: the next Buffer works, the end is good."""
    trip = RoundTrip(comm, 1)
    try:
        with make(comm) as buffer:
            buffer.dispatch(trip.x[comm.rank][:, ::2], topk_idx=trip.idx[comm.rank])
    except ContractError:
        print("SAW ContractError")
    with make(comm) as buffer:
        trip.and_back(buffer, trip.there(buffer))
    print("END")


@scenario
def raises_and_stays(comm):
    """Rank 1 raises, catches that outside, and goes on with something else for long."""
    trip = RoundTrip(comm, 1)
    meet(comm)
    try:
        with make(comm) as buffer:
            if comm.rank == BAD:
                np.ones(2).reshape(3)
            report(lambda: trip.there(buffer))
    except ValueError:
        time.sleep(5 * TIMEOUT_S)
    print("END")


@scenario
def out_of_memory(comm):
    """Rank 1 fails between headers and rows: the others hear of it at once."""
    trip = RoundTrip(comm, 1)

    def fail(*_):
        raise MemoryError("no room for recv_x")

    with make(comm) as buffer:
        if comm.rank == BAD:
            real, buffer._engine._rail.spread = buffer._engine._rail.spread, fail
            try:
                trip.there(buffer)
            except MemoryError:
                print("SAW MemoryError", buffer.state.value)
            buffer._engine._rail.spread = real
        else:
            report(lambda: trip.there(buffer))
        meet(comm)
        buffer.reset()
        trip.and_back(buffer, trip.there(buffer))
        print("WORKS again", buffer.state.value)


@scenario
def exits(comm):
    """``sys.exit(3)`` on rank 1."""
    trip = RoundTrip(comm, 1)
    with make(comm) as buffer:
        if comm.rank == BAD:
            sys.exit(3)
        trip.there(buffer)


@scenario
def no_close(comm):
    """A Buffer that is never closed."""
    trip = RoundTrip(comm, 1)
    buffer = make(comm)
    trip.and_back(buffer, trip.there(buffer))
    print("END")


@scenario
def dropped(comm):
    """A Buffer that is dropped while open warns, and moves nothing."""
    import gc
    import warnings

    buffer = make(comm)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        del buffer
        gc.collect()
    print("SAW", [each.category.__name__ for each in seen])


@scenario
def stays_open(comm):
    """A program that ends in order and never closes its Buffer."""
    make(comm).barrier()


def main():
    for name in sys.argv[1:]:
        print("=====", name)
        meet(MPI.COMM_WORLD)
        SCENARIOS[name](MPI.COMM_WORLD)


if __name__ == "__main__":
    main()
