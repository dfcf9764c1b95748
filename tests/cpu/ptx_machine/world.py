"""Ranks, their memory, and a seeded scheduler of all their threads."""

from __future__ import annotations

import dataclasses
import random

from ptx_machine.program import PtxError, load_bytes, store_bytes

__all__ = ["BOARD", "REGION", "REPORTS", "World"]

REGION = 1 << 16
REPORTS = 1 << 20
BOARD = 1 << 21
"""Rank r's region lies at (r + 1) * REGION, its report at REPORTS + r * REGION."""


class Block:
    """One block of threads of one rank; its shared memory begins as rubbish."""

    def __init__(self, rank, program, param, num_threads, rubbish) -> None:
        self.rank, self.program, self.param, self.shared = rank, program, param, rubbish
        self.meetings: dict[int, list] = {}
        self.threads = [Thread(self, index) for index in range(num_threads)]
        self.running = num_threads


class Thread:
    """One thread: its registers, and where it is."""

    def __init__(self, block, index) -> None:
        self.block, self.index, self.pc, self.ready = block, index, 0, True
        self.registers = [0] * block.program.num_registers


@dataclasses.dataclass(eq=False)
class Travelling:
    """A store on its way to another rank or the host; its owner is a thread, or a rank when the
    rank's whole block, or a later kernel, has observed it."""

    owner: Thread | int
    address: int
    nbytes: int
    value: int
    due: float
    adds_bits: bool


class World:
    """The memory of all ranks, and what runs on them.

    Attributes:
        memory: Regions, reports and the board; address 0 is in nobody's memory.
        queues: Launches of each rank, (program, parameters, threads, what to call before); one
            runs at a time.
        on_arrival: Called with the address of each store that arrives from afar.
        on_end: Called with the rank when a launch has ended.
    """

    def __init__(self, num_ranks: int, seed: int, tick_ns: int = 100) -> None:
        self.random = random.Random(seed)
        self.memory = bytearray(BOARD + (1 << 12))
        self.queues: list[list] = [[] for _ in range(num_ranks)]
        self.busy = [False] * num_ranks
        self.travelling: list[Travelling] = []
        self.step = 0
        self.ready: list[Thread] = []
        self.clock, self.tick = 10**18, tick_ns
        self.on_arrival = self.on_end = lambda _: None

    def run(self, most_steps: int = 3_000_000) -> None:
        """Run all that is queued; then nothing travels any more."""
        draw = self.random.random
        for _ in range(most_steps):
            self.step += 1
            if self.travelling:
                number = int(draw() * len(self.travelling))
                if self.travelling[number].due < self.step or not self.ready:
                    self._deliver(number)
            if not self.ready or draw() < 0.002:
                idle = [r for r, queue in enumerate(self.queues) if queue and not self.busy[r]]
                if idle:
                    self._start(self.random.choice(idle))
                elif not self.ready and not self.travelling:
                    break
                continue
            number = int(draw() * len(self.ready))
            thread = self.ready[number]
            thread.block.program.blocks[thread.pc](thread, thread.registers, self)
            if not thread.ready:
                self.ready[number] = self.ready[-1]
                self.ready.pop()
        if any(self.busy):
            raise PtxError(f"ranks that do not come to an end: {self.busy}")

    def _start(self, rank):
        program, param, num_threads, before = self.queues[rank].pop(0)
        before()
        rubbish = bytearray(self.random.randbytes(max(program.num_shared, 4096)))
        self.busy[rank] = True
        self.ready += Block(rank, program, param, num_threads, rubbish).threads

    def exit(self, thread):
        thread.ready = False
        block = thread.block
        block.running -= 1
        if not block.running:
            self._pass_on(block)
            self.busy[block.rank] = False
            self.on_end(block.rank)

    def arrive(self, thread, group, value, register):
        """A barrier of the block (-1) or of one warp."""
        block = thread.block
        meeting = block.meetings.setdefault(group, [])
        meeting.append((thread, value, register))
        thread.ready = False
        if len(meeting) < (len(block.threads) if group < 0 else 32):
            return
        del block.meetings[group]
        result = any(value for _, value, _ in meeting)
        for each, _, register in meeting:
            each.ready = True
            if register is not None:
                each.registers[register] = result
        self.ready += [each for each, _, _ in meeting if each is not thread]
        if group < 0:
            self._pass_on(block)

    def read_clock(self):
        self.clock += self.tick
        return self.clock

    # -------------------------------------------------------------------------------- memory

    def load(self, thread, address, order, scope, nbytes):
        rank = thread.block.rank
        if order == "weak" or (address < BOARD and address // REGION != rank + 1):
            raise PtxError(f"rank {rank} loads ({order}) from {address:#x}")
        return load_bytes(self.memory, address, nbytes)

    def store(self, thread, address, order, scope, nbytes, value):
        rank = thread.block.rank
        if order == "release":
            self.release(thread, scope)
        if order == "weak":
            raise PtxError(f"rank {rank} stores ({order}) to {address:#x}")
        if address // REGION == rank + 1:
            store_bytes(self.memory, address, nbytes, value)
        elif scope != "sys" or address >= BOARD:
            raise PtxError(f"rank {rank} stores (scope {scope}) to {address:#x}")
        else:
            self._send(thread, address, nbytes, value)

    def atomic(self, thread, address, order, scope, nbytes, how, value, desired=0):
        rank = thread.block.rank
        if address // REGION != rank + 1:
            if (scope, how) != ("sys", "or") or address >= REPORTS:
                raise PtxError(f"rank {rank} has an atomic {how} (scope {scope}) on {address:#x}")
            self._send(thread, address, nbytes, value, adds_bits=True)
            return None
        before = load_bytes(self.memory, address, nbytes)
        after = {"add": before + value, "or": before | value, "cas": desired}[how]
        if how != "cas" or before == value:
            store_bytes(self.memory, address, nbytes, after)
        return before

    def release(self, thread, scope):
        """What this thread has observed arrives before what it stores from now on."""
        if scope == "sys":
            mine = (thread, thread.block.rank)
            for item in [item for item in self.travelling if item.owner in mine]:
                self._deliver(self.travelling.index(item))

    def earlier_store(self, rank, address, nbytes, value):
        """A store by a kernel that has ended on ``rank``, still on its way, and in no hurry."""
        self._send(rank, address, nbytes, value, latest=10_000)

    def _send(self, owner, address, nbytes, value, latest=1000, adds_bits=False):
        due = self.step + self.random.expovariate(1) * self.random.choice((1, 100, latest))
        self.travelling.append(Travelling(owner, address, nbytes, value, due, adds_bits))

    def _deliver(self, number):
        address = self.travelling[number].address
        first = next(i for i, item in enumerate(self.travelling) if item.address == address)
        item = self.travelling.pop(first)
        before = load_bytes(self.memory, address, item.nbytes) if item.adds_bits else 0
        store_bytes(self.memory, address, item.nbytes, before | item.value)
        self.on_arrival(address)

    def _pass_on(self, block):
        """All threads of the block have observed each other's stores."""
        for item in self.travelling:
            if item.owner in block.threads:
                item.owner = block.rank
