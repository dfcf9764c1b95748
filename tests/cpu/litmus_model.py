"""The litmus test's machine on an interpreter of PTX, and two ranks in two threads."""

from __future__ import annotations

import functools
import sys
import threading
from pathlib import Path

from deepep_cupy.engines.gpu.ptx_modules import get_module
from deepep_cupy.jit.launch import Packed
from deepep_cupy.litmus.runner import Litmus, RankMemory, Words

sys.path.insert(0, str(Path(__file__).parent))
from ptx_grid.text import Program
from ptx_grid.world import World

__all__ = ["BASES", "NUM_SMS", "TEXT", "TEXTS", "Model", "one_rank", "programs_of", "two_ranks"]

TEXTS = {
    name: get_module(name).path.read_text(encoding="utf-8") for name in ("litmus", "litmus_bulk")
}
TEXT = TEXTS["litmus"]
ENTRIES = {name: get_module(name).entry(name) for name in TEXTS}
NUM_SMS = 2
NUM_THREADS = 4
BASES = (0x4000, 0xC000)
SIZE = 0x14000
WORDS = Words(num_words=8, num_rounds=4, limit_s=0.5)


class Model:
    """``testing.litmus.Machine`` on one GPU of a world that several threads run.

    Attributes:
        launched: (name, grid, stream, values) of every launch.
        place: Block → SM, or None for the usual.
    """

    num_sms = NUM_SMS

    def __init__(self, world, gpu, programs, lock):
        self.world, self.gpu, self.programs, self.lock = world, world.gpus[gpu], programs, lock
        self.launched, self.place = [], None

    def write(self, address, values):
        with self.lock:
            self.world.memory[address : address + values.nbytes] = values.tobytes()

    def read(self, address, values):
        self.finish()
        with self.lock:
            data = self.world.memory[address : address + values.nbytes]
        values.view("u1").reshape(-1)[:] = list(data)

    def launch(self, name, grid, stream, **values):
        params = Packed(ENTRIES[name].layout({}), values, name).tobytes()
        with self.lock:
            program = self.programs[name]
            self.gpu.launch(program, grid, NUM_THREADS, params, stream, self.place)
        self.launched.append((name, grid, stream, values))

    def finish(self):
        while self.gpu.running or any(self.gpu.streams.values()):
            with self.lock:
                self.world.run_some(500)


def programs_of(**changed):
    """Both modules, some with another text."""
    return {name: read(text) for name, text in (TEXTS | changed).items()}


read = functools.lru_cache(maxsize=16)(Program)
"""A program does not change when it runs."""


def one_rank(words=WORDS, text=TEXT, seed=0, bulk_text=TEXTS["litmus_bulk"]):
    """The litmus test of one GPU, and its model."""
    programs = programs_of(litmus=text, litmus_bulk=bulk_text)
    machine = Model(World(SIZE, num_sms=NUM_SMS, seed=seed), 0, programs, threading.Lock())
    return Litmus(machine, RankMemory(0, BASES[0], 0, lambda value: [value]), words), machine


class Pair:
    """Two threads that tell each other things."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=60)
        self.told = [None, None]

    def allgather(self, rank, value):
        self.told[rank] = value
        self.barrier.wait()
        told = list(self.told)
        self.barrier.wait()
        return told


def two_ranks(work, words=WORDS, text=TEXT, seed=0):
    """Run ``work(litmus, machine, rank)`` on two ranks with a GPU each; their results."""
    world, pair, programs = World(SIZE, 2, NUM_SMS, seed), Pair(), programs_of(litmus=text)
    lock, results = threading.Lock(), [None, None]

    def rank_main(rank):
        memory = RankMemory(
            rank, BASES[rank], BASES[1 - rank], lambda told: pair.allgather(rank, told)
        )
        machine = Model(world, rank, programs, lock)
        try:
            results[rank] = work(Litmus(machine, memory, words), machine, rank)
        except Exception as error:  # noqa: BLE001 - raised again by the thread that asks
            results[rank] = error
            pair.barrier.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
