"""GPUs with SMs, caches and copy engines over one memory; blocks, threads and a scheduler."""

from __future__ import annotations

import random
from collections import deque

from ptx_grid.text import PtxError

__all__ = ["Gpu", "World"]

LINE = 128
FILLS_L1 = ("ld.global", "ld.global.ca", "ld.global.nc", "ld.global.nc.L1::evict_last")
LOOKS_INTO_L1 = (
    *FILLS_L1,
    "ld.global.L1::no_allocate",
    "ld.global.nc.L1::no_allocate",
    "ld.global.nc.L1::no_allocate.L2::256B",
)
TICK_NS = 20
"""What reading the clock adds to it."""


class World:
    """Memory of all GPUs at addresses from 0 on, and all that runs."""

    def __init__(self, nbytes, num_gpus=1, num_sms=2, seed=0):
        self.memory = bytearray(nbytes)
        self.gpus = [Gpu(self, num_sms) for _ in range(num_gpus)]
        self.random = random.Random(seed)
        self.haste = self.random.choice((0.02, 0.2, 1.0))  # of the copy engine
        self.clock = 0
        self.ready, self.engine, self.hints = [], [], []
        self.steps = 0

    # ------------------------------------------------------------------------------- running

    def run(self, max_steps=3_000_000):
        """Run until nothing is left to run."""
        if not self.run_some(max_steps):
            raise PtxError(f"more than {max_steps} steps")

    def run_some(self, max_steps):
        """Run at most so many steps; True when nothing is left to run."""
        end = self.steps + max_steps
        while self.steps < end:
            for gpu in self.gpus:
                gpu.start_launches()
            if self.engine and (not self.ready or self.random.random() < self.haste):
                self.engine.pop(self.random.randrange(len(self.engine)))()
            if not self.ready:
                if self.engine:
                    continue
                if any(gpu.running for gpu in self.gpus):
                    raise PtxError("all threads wait, and nobody comes")
                return True
            thread = self.random.choice(self.ready)
            self.steps += 1
            while not thread.program.code[thread.pc](thread):
                if thread.waits or thread.ended:
                    break
                self.steps += 1
        return False

    def end(self, thread):
        thread.ended = True
        self.ready.remove(thread)
        thread.block.thread_ended()

    def read_clock(self):
        self.clock += TICK_NS
        return self.clock

    # -------------------------------------------------------------------------------- memory

    def _check(self, address, nbytes, what):
        if address % nbytes or not LINE <= address <= len(self.memory) - nbytes:
            raise PtxError(f"{what} of {nbytes} bytes at {address:#x}")

    def load(self, t, how, address, nbytes):
        self._check(address, nbytes, how)
        l1, line = t.block.sm.l1, address // LINE
        if how in FILLS_L1 and line not in l1:
            l1[line] = bytes(self.memory[line * LINE : (line + 1) * LINE])
        if how in LOOKS_INTO_L1 and line in l1:
            return l1[line][address % LINE : address % LINE + nbytes]
        data = bytes(self.memory[address : address + nbytes])
        if ".acquire." in how:
            l1.clear()
        return data

    def store(self, t, address, data):
        self._check(address, len(data), "a store")
        t.block.sm.l1.pop(address // LINE, None)
        self.memory[address : address + len(data)] = data

    def atomic(self, t, kind, address, nbytes, values):
        self._check(address, nbytes, "an atomic")
        old = int.from_bytes(self.memory[address : address + nbytes], "little")
        if kind == "cas":
            new = values[1] if old == values[0] else old
        else:
            new = {"add": old + values[0], "max": max(old, values[0]), "or": old | values[0]}[kind]
        self.memory[address : address + nbytes] = new.to_bytes(nbytes, "little")
        return old


class Gpu:
    """SMs, and streams of launches that run side by side."""

    def __init__(self, world, num_sms):
        self.world = world
        self.sms = [Sm(index) for index in range(num_sms)]
        self.streams = {}
        self.running = {}

    def launch(self, program, grid, num_threads, params, stream=0, place=None):
        """Queue one. ``place``: block → SM; round and round if None."""
        place = place or (lambda block: block % len(self.sms))
        queued = (program, grid, num_threads, params, place)
        self.streams.setdefault(stream, deque()).append(queued)

    def start_launches(self):
        """Start the next launch of each stream whose last one has ended."""
        for stream, queue in self.streams.items():
            if not queue or stream in self.running:
                continue
            program, grid, num_threads, params, place = queue.popleft()
            for sm in self.sms:
                sm.l1.clear()
            self.running[stream] = grid
            for index in range(grid):
                Block(
                    self, stream, program, index, grid, num_threads, params, self.sms[place(index)]
                )

    def block_ended(self, stream):
        self.running[stream] -= 1
        if not self.running[stream]:
            del self.running[stream]


class Sm:
    """One multiprocessor."""

    def __init__(self, index):
        self.index = index
        self.l1 = {}


class Block:
    """One block, resident from the start of its launch."""

    def __init__(self, gpu, stream, program, index, grid, num_threads, params, sm):
        self.gpu, self.stream, self.index, self.grid = gpu, stream, index, grid
        self.num_threads, self.params, self.sm = num_threads, params, sm
        self.shared, self.mbarriers = bytearray(program.extern + (1 << 18)), {}
        self.threads = [Thread(self, number, program) for number in range(num_threads)]
        self.arrived = {}
        gpu.world.ready += self.threads

    def thread_ended(self):
        alive = [thread for thread in self.threads if not thread.ended]
        if any(thread.operations() for thread in self.threads) and not alive:
            raise PtxError("a block ended with bulk copies under way")
        if not alive:
            self.gpu.block_ended(self.stream)

    def arrive(self, thread, which, value=False, put=None):
        """A barrier of a warp, or of all (-1); all threads get whether any had ``value``."""
        there = self.arrived.setdefault(which, [])
        there.append((thread, value, put))
        thread.wait()
        wanted = [t for t in self.threads if which in (-1, t.index // 32)]
        if len(there) < len(wanted):
            return
        del self.arrived[which]
        if len({t.pc for t, _, _ in there}) > 1:
            raise PtxError("threads of a block are at different barriers")
        some = any(each for _, each, _ in there)
        for t, _, to in there:
            if to:
                to(t, some)
            t.go_on()

    def load_shared(self, address, nbytes):
        return int.from_bytes(self.shared[address : address + nbytes], "little")

    def store_shared(self, address, data):
        self.shared[address : address + len(data)] = data

    def init_mbarrier(self, address, arrivals):
        self.mbarriers[address] = Mbarrier(arrivals)


class Mbarrier:
    """Counts arrivals and bytes of one phase after the other."""

    def __init__(self, arrivals):
        self.arrivals = self.pending = arrivals
        self.bytes = self.phase = 0

    def arrive(self, expected):
        self.bytes += expected
        self.pending -= 1
        if self.pending < 0:
            raise PtxError("an mbarrier has more arrivals than it counts")
        self._check()

    def complete(self, nbytes):
        self.bytes -= nbytes
        self._check()

    def _check(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.arrivals

    def passed(self, parity):
        return self.phase % 2 != parity


class Thread:
    """One thread, and the groups of bulk stores it has started."""

    def __init__(self, block, index, program):
        self.block, self.index, self.program = block, index, program
        self.world = block.gpu.world
        self.r = dict.fromkeys(program.widths, 0)
        self.pc, self.waits, self.ended = 0, False, False
        self.loads, self.open_group, self.groups, self.waiting = 0, [], [], None

    def wait(self):
        self.waits = True
        self.world.ready.remove(self)

    def go_on(self):
        self.waits = False
        self.world.ready.append(self)

    # --------------------------------------------------------------------------- copy engine

    def operations(self):
        return self.loads + sum(op["state"] < 2 for group in self.groups for op in group)

    def start_load(self, to, source, nbytes, bar, hint):
        self._check(to, source, nbytes)
        self.loads += 1
        self.world.hints.append(("load", hint))
        # Until the load is complete, nobody may rely on what the stage holds.
        self.block.shared[to : to + nbytes] = b"\xee" * nbytes

        def complete():
            self.block.shared[to : to + nbytes] = self.world.memory[source : source + nbytes]
            self.block.mbarriers[bar].complete(nbytes)
            self.loads -= 1

        self.world.engine.append(complete)

    def start_store(self, to, source, nbytes, hint):
        self._check(source, to, nbytes)
        operation = {"state": 0}
        self.world.hints.append(("store", hint))

        def read():
            data = bytes(self.block.shared[source : source + nbytes])
            operation["state"] = 1

            def write():
                self.world.memory[to : to + nbytes] = data
                operation["state"] = 2
                self._look()

            self.world.engine.append(write)
            self._look()

        self.world.engine.append(read)
        self.open_group.append(operation)

    def _check(self, shared, address, nbytes):
        if shared % 16 or address % 16 or nbytes % 16 or not nbytes:
            raise PtxError(f"a bulk copy of {nbytes} bytes, {shared:#x} and {address:#x}")
        if not LINE <= address <= len(self.world.memory) - nbytes:
            raise PtxError(f"a bulk copy of {nbytes} bytes at {address:#x}")

    def commit_group(self):
        self.groups.append(self.open_group)
        self.open_group = []

    def wait_group(self, most, *, read):
        self.waiting = (most, 1 if read else 2)
        self.wait()
        self._look()

    def _look(self):
        """Go on if what this thread waits for has come."""
        if self.waiting is None:
            return
        most, state = self.waiting
        old = self.groups[: len(self.groups) - most] if most else self.groups
        if all(op["state"] >= state for group in old for op in group):
            self.waiting = None
            self.go_on()
