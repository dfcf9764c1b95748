"""Barriers: many, from graphs and eager, of both makes in any mixture, and what one costs.

mpirun -n 2 python tests/gpu/worker_barrier.py [--count 1000000] [--in-graph 1000]

Ranks may use different makes of the barrier at the same time: the CUDA kernel and its twin in
PTX. That a barrier is one is seen by *marks*: before each, every rank writes the number of the
step into the memory of all ranks; behind it, nobody may find an older number.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import Worker, runtime

from deepep_cupy.protocol.headers import Kind

MARKS = r"""
extern "C" __global__ void mark(unsigned long long* step, const unsigned long long* slots_of,
                                int rank, int ranks) {
    unsigned long long value = *step + 1;
    __syncthreads();
    if (threadIdx.x < ranks)
        reinterpret_cast<volatile unsigned long long*>(slots_of[threadIdx.x])[rank] = value;
    if (threadIdx.x == 0) *step = value;
}
// A rank that is one step ahead may have written its next mark already.
extern "C" __global__ void look(const unsigned long long* step,
                                const volatile unsigned long long* slots, int ranks,
                                unsigned long long* bad) {
    if (threadIdx.x >= ranks) return;
    unsigned long long seen = slots[threadIdx.x];
    if (seen != *step && seen != *step + 1) atomicAdd(bad, 1ull);
}
"""


class Marks:
    """Marks in the symmetric memory of all ranks. The constructor is collective."""

    def __init__(self, worker: Worker, buffer: Any) -> None:
        cupy, region = worker.xp, runtime(buffer).memory.region
        module = cupy.RawModule(code=MARKS)
        self._mark, self._look = module.get_function("mark"), module.get_function("look")
        self._slots = buffer.empty((worker.size,), np.uint64)
        self._slots.fill(0)
        offsets = worker.comm.allgather(self._slots.data.ptr - region.base)
        addresses = [region.peer_base[rank] + offset for rank, offset in enumerate(offsets)]
        self._slots_of = cupy.asarray(np.array(addresses, np.uint64))
        self._step, self._bad = cupy.zeros(1, cupy.uint64), cupy.zeros(1, cupy.uint64)
        self._rank, self._ranks = np.int32(worker.rank), np.int32(worker.size)
        worker.synchronize()
        worker.meet()

    def around(self, barrier: Callable[[], None]) -> None:
        """Mark, wait for all, look."""
        self._mark((1,), (32,), (self._step, self._slots_of, self._rank, self._ranks))
        barrier()
        self._look((1,), (32,), (self._step, self._slots, self._ranks, self._bad))

    def check(self, steps: int) -> None:
        """All ``steps`` were made, and no older mark was seen."""
        made, bad = int(self._step.get()[0]), int(self._bad.get()[0])
        assert made == steps, f"{made} steps were made, not {steps}"
        assert bad == 0, f"{bad} marks were older than the barrier before them"


def main() -> None:
    """Run all parts."""

    def arguments(parser: Any) -> None:
        parser.add_argument("--count", type=int, default=1_000_000, help="barriers from graphs")
        parser.add_argument("--in-graph", type=int, default=1000)
        parser.add_argument("--eager", type=int, default=1000)

    worker = Worker("BARRIER", __doc__, arguments)
    options = worker.options
    with worker.buffer() as buffer:
        makes = all_makes(worker, buffer)
        worker.say("makes:", ", ".join(makes))
        figures = [eager(worker, buffer, list(makes.values()), options.eager)]
        if worker.gpu:
            figures += graphs(worker, buffer, makes, options.count, options.in_graph)
            figures.append(checked(worker, buffer, list(makes.values()), options.eager))
        buffer.check()
    worker.done(*figures)


def all_makes(worker: Worker, buffer: Any) -> dict[str, Callable[[], None]]:
    """The barriers there are, by name."""
    if not worker.gpu:
        return {"host": buffer.barrier}
    from deepep_cupy.engines.gpu.ptx_barrier import PtxBarrier

    inside = runtime(buffer)
    twin = PtxBarrier(inside.kernels.constants, inside.kernels._comm)
    twin.refusal(Kind.BARRIER, 0, 0)

    def by_hand() -> None:
        """As the engine launches its own."""
        inside.failures.raise_pending()
        with inside.operation() as op:
            op.launch(twin)

    return {"cuda": buffer.barrier, "ptx": by_hand}


def eager(worker: Worker, buffer: Any, makes: list[Callable[[], None]], count: int) -> str:
    """One call after the other, the ranks out of step in time and in make."""
    luck = random.Random(worker.rank)
    begin = time.perf_counter()
    for number in range(count):
        makes[(number + worker.rank) % len(makes)]()
        if luck.random() < 0.02:
            time.sleep(0.001)
        if number % 100 == 99:
            worker.synchronize()
    worker.synchronize()
    buffer.check()
    return f"{count} eager at {1e6 * (time.perf_counter() - begin) / count:.0f} us with sleeps"


def epoch(buffer: Any) -> int:
    """Operations this Buffer has seen, give or take a constant."""
    number: int = runtime(buffer).memory.epoch()
    return number


def graphs(
    worker: Worker, buffer: Any, makes: dict[str, Callable[[], None]], count: int, in_graph: int
) -> list[str]:
    """Graphs of one make each, then one in which the makes alternate, differently per rank."""
    both = list(makes.values())
    plans: dict[str, Callable[[int], None]] = {
        name: lambda _, make=make: make() for name, make in makes.items()
    }
    if len(both) > 1:
        plans["mixed"] = lambda number: both[(number + worker.rank) % len(both)]()
    figures = []
    times = max(1, count // in_graph // len(plans))
    for name, plan in plans.items():
        graph = worker.capture(buffer, plan, in_graph)
        before = epoch(buffer)
        worker.meet()
        graph.replay(1)
        cost = worker.most(graph.replay(times))
        buffer.check()
        made = (epoch(buffer) - before) % (1 << 32)
        wanted = (times + 1) * in_graph
        assert made == wanted, f"{made} barriers were made, not {wanted}"
        figures.append(f"{name} {cost:.2f} us in a graph ({made})")
        worker.say(f"{name}: {made} barriers from a graph, {cost:.2f} us each")
    return figures


def checked(worker: Worker, buffer: Any, makes: list[Callable[[], None]], count: int) -> str:
    """Barriers between marks: eager ones with sleeping ranks, then from a graph."""
    luck = random.Random(worker.rank)
    marks = Marks(worker, buffer)
    for number in range(count // 4):
        marks.around(makes[(number + worker.rank) % len(makes)])
        if luck.random() < 0.05:
            time.sleep(0.001 * luck.random())
    worker.synchronize()
    buffer.check()
    marks.check(count // 4)
    in_graph, times = 20, max(1, count // 20)
    graph = worker.capture(
        buffer, lambda number: marks.around(makes[(number + worker.rank) % len(makes)]), in_graph
    )
    graph.replay(times)
    buffer.check()
    steps = count // 4 + in_graph * times
    marks.check(steps)
    return f"{steps} between marks"


if __name__ == "__main__":
    sys.exit(main())
