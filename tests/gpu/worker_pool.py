"""The symmetric region and its pool on real memory and streams.

    python tests/gpu/worker_pool.py                      # one rank
    mpirun -n 4 python tests/gpu/worker_pool.py --steps 10000
    mpirun -n 2 python tests/gpu/worker_pool.py --one-visible 2   # each rank sees one of 2 GPUs

Every block is filled with a number of its own, and looked at later, after a delay, on the stream
that filled it or on another one that was recorded. A block that is handed out too early is
overwritten before it has been looked at; the last part switches the waits off and wants to see it.
"""

from __future__ import annotations

import argparse
import gc
import os
import queue
import random
import sys
import threading
import time
import traceback

import numpy as np

KERNELS = r"""
extern "C" __global__ void fill(unsigned* x, long long n, unsigned value) {
    long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride)
        x[i] = value;
}
extern "C" __global__ void check(const unsigned* x, long long n, unsigned value,
                                 unsigned long long* bad) {
    long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride)
        if (x[i] != value) atomicAdd(bad, 1ull);
}
extern "C" __global__ void delay(long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < (unsigned long long)nanoseconds);
}
"""
CONTROL = 1 << 16
POOL = 32 << 20


class Work:
    """Launches on given streams, and counts what was found overwritten."""

    def __init__(self, cupy):
        module = cupy.RawModule(code=KERNELS)
        self._fill, self._check, self._delay = map(module.get_function, ("fill", "check", "delay"))
        self._bad = cupy.zeros(1, cupy.uint64)
        self._cupy = cupy

    def fill(self, stream, x, value):
        self._fill((8,), (256,), (x, np.int64(x.size), np.uint32(value)), stream=stream)

    def check(self, stream, x, value):
        arguments = (x, np.int64(x.size), np.uint32(value), self._bad)
        self._check((8,), (256,), arguments, stream=stream)

    def delay(self, stream, microseconds):
        self._delay((1,), (1,), (np.int64(microseconds * 1000),), stream=stream)

    def bad(self):
        """Words found overwritten since the last question. Waits for everything."""
        self._cupy.cuda.runtime.deviceSynchronize()
        count = int(self._bad.get()[0])
        self._bad.fill(0)
        self._cupy.cuda.runtime.deviceSynchronize()
        return count


class Program:
    """A user with many streams who follows the rules."""

    def __init__(self, cupy, pool, arrays, work, seed):
        self.cupy, self.pool, self.arrays, self.work = cupy, pool, arrays, work
        self.rng = random.Random(seed)
        stream = cupy.cuda.Stream
        self.streams = [stream.null, *(stream(non_blocking=True) for _ in range(4))]
        self.value = 0
        self.live = []
        self.graphs = []
        self.exhausted = 0
        self.mail = queue.SimpleQueue()
        self.reaper = threading.Thread(target=self._reap, daemon=True)
        self.reaper.start()

    def _reap(self):
        while (array := self.mail.get()) is not None:
            del array

    def run(self, steps):
        actions = (self.alloc, self.drop, self.side, self.shrinking, self.replay)
        for step in range(steps):
            self.rng.choices(actions, (40, 36, 14, 8, 2))[0]()
            if step % 2000 == 1000:
                self.capture()
            if step % 1000 == 999:
                self.expect_nothing_bad()
        self.live.clear()
        self.mail.put(None)
        self.reaper.join()
        self.expect_nothing_bad()

    def expect_nothing_bad(self):
        checkpoint = self.pool.checkpoint()
        bad = self.work.bad()  # waits for all streams
        self.pool.completed(checkpoint)
        assert bad == 0, f"{bad} words were overwritten while in use"

    def new(self, nbytes, stream):
        from deepep_cupy.memory.pool import PoolExhaustedError

        try:
            block = self.pool.alloc(nbytes, stream, "random")
        except PoolExhaustedError:
            self.exhausted += 1
            for _ in range(len(self.live) // 2):
                self.drop()
            return None
        self.value += 1
        return block

    def alloc(self):
        stream = self.rng.choice(self.streams)
        nbytes = 4 * self.rng.randint(1, self.rng.choice((100, 10_000, 500_000)))
        block = self.new(nbytes, stream)
        if block is not None:
            x = self.arrays.array(self.arrays.own(block), (nbytes // 4,), np.uint32)
            self.use(stream, x, self.value)
            self.live.append((x, stream, self.value))

    def use(self, stream, x, value):
        self.work.fill(stream, x, value)
        if self.rng.random() < 0.2:
            self.work.delay(stream, self.rng.randint(1, 200))
        self.work.check(stream, x, value)

    def drop(self):
        if self.live:
            at = self.rng.randrange(len(self.live))
            self.live[at], self.live[-1] = self.live[-1], self.live[at]
            x, stream, value = self.live.pop()
            self.work.check(stream, x, value)
            if self.rng.random() < 0.3:
                self.mail.put(x)  # the last reference dies in another thread

    def side(self):
        if self.live:
            x, stream, value = self.rng.choice(self.live)
            side = self.rng.choice(self.streams)
            side.wait_event(stream.record(self.cupy.cuda.Event(disable_timing=True)))
            assert self.arrays.record_stream(x, side)
            self.work.delay(side, self.rng.randint(1, 100))
            self.work.check(side, x, value)

    def shrinking(self):
        stream = self.rng.choice(self.streams)
        words = self.rng.randint(1, 200_000)
        block = self.new(8 << 20, stream)
        if block is not None:
            pointer = self.arrays.own(block)
            self.pool.shrink(block, 4 * words)
            x = self.arrays.array(pointer, (words,), np.uint32)
            self.use(stream, x, self.value)
            self.live.append((x, stream, self.value))

    def capture(self):
        """A graph of four uses of pool memory; the arrays die, the memory stays the graph's."""
        if len(self.graphs) >= 5:
            return
        stream = self.cupy.cuda.Stream(non_blocking=True)
        stream.begin_capture()
        try:
            for _ in range(4):
                block = self.new(4096 * self.rng.randint(1, 50), stream)
                if block is not None:
                    x = self.arrays.array(self.arrays.own(block), (block.nbytes // 4,), np.uint32)
                    self.work.fill(stream, x, self.value)
                    self.work.delay(stream, 50)
                    self.work.check(stream, x, self.value)
                    del x
        finally:
            graph = stream.end_capture()
        self.graphs.append((graph, stream))

    def replay(self):
        if self.graphs:
            graph, stream = self.rng.choice(self.graphs)
            graph.launch(stream)

    def end(self):
        """Graphs are gone for good."""
        self.cupy.cuda.runtime.deviceSynchronize()
        self.graphs.clear()
        self.pool.release_captured()
        numbers = self.pool.statistics()
        assert numbers.live == numbers.captured == numbers.quarantined == 0, numbers
        assert numbers.free == numbers.largest_free == numbers.nbytes, numbers
        return numbers


def part_random(parts, steps):
    program = Program(parts.cupy, parts.pool, parts.arrays, parts.work, parts.group.rank)
    program.run(steps)
    assert len(program.graphs) > 0
    numbers = program.end()
    return (
        f"{numbers.num_allocs} blocks, {numbers.num_waits} waits, {numbers.num_segments} free "
        f"ranges at the end, {program.exhausted} times exhausted"
    )


def part_teeth(parts, _steps):
    """Without the pool's waits the checks must fail, and with them not."""
    pool, arrays, work = parts.pool, parts.arrays, parts.work
    first, second = (parts.cupy.cuda.Stream(non_blocking=True) for _ in range(2))

    def once(value):
        x = arrays.empty((POOL // 5,), np.uint32, first)
        work.fill(first, x, value)
        work.delay(first, 20_000)
        work.check(first, x, value)
        del x
        y = arrays.empty((POOL // 5,), np.uint32, second)  # only the same memory is large enough
        work.fill(second, y, value + 1)
        del y
        return work.bad()

    assert once(10) == 0
    right, pool._clock.wait_for = pool._clock.wait_for, lambda stream, stamps: None
    try:
        # On a busy GPU the second stream may come too late to do harm.
        bad = next((bad for value in range(20, 60, 2) if (bad := once(value))), 0)
    finally:
        del pool._clock.wait_for
    assert pool._clock.wait_for == right
    assert bad > 0, "the waits were switched off, and nothing was overwritten"
    return f"without waits {bad} words were overwritten"


def part_peers(parts, _steps):
    """Every rank reads and writes every other rank's memory."""
    cupy, region, group = parts.cupy, parts.region, parts.group

    def at(rank, offset):
        memory = cupy.cuda.UnownedMemory(
            region.peer_base[rank] + offset, 8 * 256, region, parts.device
        )
        return cupy.ndarray((256,), np.int64, cupy.cuda.MemoryPointer(memory, 0))

    mine = range(CONTROL, CONTROL + 2048 * group.size, 2048)
    for offset in range(0, CONTROL, 2048):
        assert not at(group.rank, offset).any(), "the control part is not zero"
    for peer in range(group.size):
        at(peer, mine[group.rank])[:] = 1000 * group.rank + peer
    cupy.cuda.runtime.deviceSynchronize()
    parts.meet()
    for peer in range(group.size):
        assert (at(group.rank, mine[peer]) == 1000 * peer + group.rank).all(), f"from rank {peer}"
        assert (at(peer, mine[group.rank]) == 1000 * group.rank + peer).all(), f"at rank {peer}"
    cupy.cuda.runtime.deviceSynchronize()
    parts.meet()
    return f"{group.size} x {group.size} pairs"


def part_close(parts, _steps):
    """Arrays outlive the region; what they keep goes with the last of them."""
    x = parts.arrays.empty((1000,), np.float32, parts.cupy.cuda.Stream.null)
    x.fill(3)
    parts.pool.close()
    parts.region.close(parts.meet)
    assert float(x.sum()) == 3000
    before = parts.cupy.cuda.runtime.memGetInfo()[0]
    del x
    parts.arrays = None
    gc.collect()
    gained = parts.cupy.cuda.runtime.memGetInfo()[0] - before
    if parts.topology.max_ranks_per_gpu == 1:
        assert gained >= POOL, f"only {gained} bytes came back"
    return f"{gained >> 20} MiB came back"


class Parts:
    """What all parts work on."""

    def __init__(self):
        import cupy
        from mpi4py import MPI

        from deepep_cupy.engines.gpu.topology import survey
        from deepep_cupy.memory.cuda_ipc import CupyEvents, PoolArrays, open_region
        from deepep_cupy.memory.pool import Pool
        from deepep_cupy.ranks.mpi import MPIGroup

        self.cupy = cupy
        self.group = MPIGroup(MPI.COMM_WORLD)
        self.topology = survey(self.group)
        if self.topology.verdict():
            sys.exit(f"cannot run here: {self.topology.verdict()}")
        self.device = self.topology.gpus[self.group.rank].device
        cupy.cuda.Device(self.device).use()
        self.region = open_region(self.group, self.device, CONTROL + POOL, zero_bytes=CONTROL)
        self.pool = Pool(POOL, CupyEvents(), start=CONTROL, who=f"rank {self.group.rank}")
        self.arrays = PoolArrays(self.region, self.pool, self.device)
        self.work = Work(cupy)

    def meet(self):
        request = self.group.ibarrier()
        deadline = time.monotonic() + 120
        while not request.test():
            assert time.monotonic() < deadline, "a rank did not come"
            time.sleep(1e-4)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--one-visible", type=int, default=0, metavar="GPUS")
    arguments = parser.parse_args()
    if arguments.one_visible:
        from mpi4py import MPI

        os.environ["CUDA_VISIBLE_DEVICES"] = str(MPI.COMM_WORLD.rank % arguments.one_visible)
    parts = Parts()
    print(f"rank {parts.group.rank} of {parts.group.size}: {parts.topology.summary()}", flush=True)
    for part in (part_peers, part_teeth, part_random, part_close):
        begin = time.perf_counter()
        said = part(parts, arguments.steps)
        print(f"{part.__name__}: {said}, {time.perf_counter() - begin:.1f} s", flush=True)
    print("all parts passed", flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)  # the others wait for this rank
