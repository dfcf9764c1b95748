"""GPUs with several streams, driven from Python launch by launch: for hand-written modules.

Launches wait until somebody asks for their results; then all that is queued runs at once, so that
a writer and its reader meet whoever was launched first. L1 keeps lines as it does on Hopper.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from deepep_cupy.engines.gpu.ptx_modules import get_module
from deepep_cupy.jit.launch import Packed
from deepep_cupy.litmus.runner import Litmus, RankMemory, Words
from simulator.machine import Fault, Loads, Machine
from simulator.ptx import PtxError, ptx_kernel

__all__ = ["NUM_SMS", "WORDS", "Gpus", "LitmusGpu", "one_rank", "two_ranks"]

NUM_SMS = 2
NUM_THREADS = 4
NUM_STREAMS = 2
MEMORY_BYTES = 0x3000
WORDS = Words(num_words=8, num_rounds=4, limit_s=0.5)


class Gpus:
    """Some GPUs and their memory.

    Args:
        num_gpus: Each has one region of memory and ``NUM_STREAMS`` streams.
        seed: Of the machine.
        nbytes: Memory of each GPU.
        max_blocks: The largest grid.
        num_threads: The largest block.
        num_sms: Of each GPU; 0: every block is alone on one.
        has_l1: Whether lines stay in L1.

    Attributes:
        machine: The simulator.
        faults: What was found so far.
    """

    def __init__(
        self,
        num_gpus: int = 1,
        *,
        seed: int = 0,
        nbytes: int = MEMORY_BYTES,
        max_blocks: int = 8,
        num_threads: int = NUM_THREADS,
        num_sms: int = NUM_SMS,
        has_l1: bool = True,
    ) -> None:
        self.machine = machine = Machine(
            seed, NUM_STREAMS * num_gpus, max_blocks=max_blocks, num_threads=num_threads
        )
        self._num_gpus = num_gpus
        for rank in range(num_gpus, NUM_STREAMS * num_gpus):
            machine.share_gpu(rank, rank % num_gpus)
        machine.option("loads", Loads.HOPPER)
        machine.option("l1_misses", 0 if has_l1 else 1)
        machine.option("num_sms", num_sms)
        machine.option("hang_after", 2e9)
        machine.option("max_steps", 2e7)
        machine.option("start_at_once", 1)  # for a kernel that starts empties L1
        self._regions = [machine.region(f"gpu{i}", nbytes, i) for i in range(num_gpus)]
        for region in self._regions:
            machine.poke(region, 0, bytes(nbytes))
        self._launches = 0
        self.faults: list[Fault] = []

    def base(self, gpu: int, owner: int) -> int:
        """Where a GPU sees the memory of another one, or its own."""
        return self.machine.address(gpu, self._regions[owner])

    def launch(
        self,
        gpu: int,
        stream: int,
        module: str,
        grid: int,
        threads: int,
        params: bytes,
        *,
        text: str | None = None,
        dynamic: int = 0,
    ) -> None:
        """Queue a module, or another text in its place."""
        kernel = ptx_kernel(module, text)
        shared = kernel.num_shared + dynamic
        rank = stream * self._num_gpus + gpu
        self._launches += 1
        self.machine.launch(rank, self._launches, kernel.library, grid, threads, shared, params)

    def run(self) -> None:
        """Run all that is queued; a fatal fault is an exception."""
        self.faults = self.machine.run()
        for fault in self.faults:
            if fault.kind in ("fatal", "hang"):
                raise PtxError(fault.text)

    def poke(self, address: int, data: bytes) -> None:
        """Write memory while nothing runs."""
        self.machine.poke(address >> 32 & 0xFF, address & 0xFFFFFFFF, data)

    def peek(self, address: int, nbytes: int) -> bytes:
        """Read memory while nothing runs."""
        return self.machine.peek(address >> 32 & 0xFF, address & 0xFFFFFFFF, nbytes)

    def view(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        """Memory itself, to be touched while nothing runs and while this machine lives."""
        return self.machine.view(address >> 32 & 0xFF, address & 0xFFFFFFFF, nbytes)


class Meeting:
    """Ranks in threads: who waits for launches lets them run as soon as everybody waits."""

    def __init__(self, gpus: Gpus, num_ranks: int) -> None:
        self._gpus, self._changed = gpus, threading.Condition()
        self._waits: list[str] = [""] * num_ranks
        self._told: list[Any] = [None] * num_ranks
        self._heard: list[Any] = []

    def allgather(self, rank: int, value: Any) -> list[Any]:
        """What each rank told."""
        self._told[rank] = value
        self._wait(rank, "others")
        return list(self._heard)

    def finish(self, rank: int) -> None:
        """Wait until all launches have ended."""
        self._wait(rank, "launches")

    def leave(self, rank: int) -> None:
        """This rank comes no more."""
        with self._changed:
            self._waits[rank] = "gone"
            self._go_on()

    def _wait(self, rank: int, what: str) -> None:
        with self._changed:
            self._waits[rank] = what
            self._go_on()
            if not self._changed.wait_for(lambda: self._waits[rank] in ("", "alone"), timeout=60):
                raise TimeoutError(f"rank {rank} waits for {what}")
            if self._waits[rank] == "alone":
                raise RuntimeError(f"rank {rank}: the other one came no more")

    def _go_on(self) -> None:
        if "" in self._waits:
            return
        if "launches" in self._waits:
            self._gpus.run()
            self._waits = ["" if what == "launches" else what for what in self._waits]
        elif "gone" in self._waits:
            self._waits = ["alone" if what == "others" else what for what in self._waits]
        else:
            self._heard = list(self._told)
            self._waits = [""] * len(self._waits)
        self._changed.notify_all()


class LitmusGpu:
    """``litmus.runner.Machine`` on one of the GPUs.

    Attributes:
        launched: (name, grid, stream, values) of every launch.
    """

    num_sms = NUM_SMS

    def __init__(
        self, gpus: Gpus, gpu: int, finish: Callable[[], None], texts: Mapping[str, str]
    ) -> None:
        self.gpus, self._gpu, self._finish, self._texts = gpus, gpu, finish, texts
        self.launched: list[tuple[str, int, int, dict[str, int]]] = []

    def write(self, address: int, values: np.ndarray[Any, Any]) -> None:
        """See ``Machine``."""
        self.gpus.poke(address, values.tobytes())

    def read(self, address: int, values: np.ndarray[Any, Any]) -> None:
        """See ``Machine``."""
        self.finish()
        values.view("u1").reshape(-1)[:] = list(self.gpus.peek(address, values.nbytes))

    def launch(self, name: str, grid: int, stream: int, **values: int) -> None:
        """See ``Machine``."""
        layout = get_module(name).entry(name).layout({})
        params = Packed(layout, values, name).tobytes()
        text = self._texts.get(name)
        self.gpus.launch(self._gpu, stream, name, grid, NUM_THREADS, params, text=text)
        self.launched.append((name, grid, stream, values))

    def finish(self) -> None:
        """See ``Machine``."""
        self._finish()


def one_rank(
    words: Words = WORDS, *, seed: int = 0, num_sms: int = NUM_SMS, **texts: str
) -> tuple[Litmus, LitmusGpu]:
    """The litmus test of one GPU, with other texts for some modules, and its machine."""
    gpus = Gpus(seed=seed, num_sms=num_sms)
    machine = LitmusGpu(gpus, 0, gpus.run, texts)
    return Litmus(machine, RankMemory(0, gpus.base(0, 0), 0, lambda value: [value]), words), machine


def two_ranks(
    work: Callable[[Litmus, LitmusGpu, int], Any],
    words: Words = WORDS,
    *,
    seed: int = 0,
    **texts: str,
) -> list[Any]:
    """Run ``work(litmus, machine, rank)`` on two ranks with a GPU each; their results."""
    gpus = Gpus(2, seed=seed)
    meeting, results = Meeting(gpus, 2), [None, None]

    def rank_main(rank: int) -> None:
        tell = functools.partial(meeting.allgather, rank)
        memory = RankMemory(rank, gpus.base(rank, rank), gpus.base(rank, 1 - rank), tell)
        machine = LitmusGpu(gpus, rank, functools.partial(meeting.finish, rank), texts)
        try:
            results[rank] = work(Litmus(machine, memory, words), machine, rank)
        except Exception as error:  # noqa: BLE001 - raised again by the thread that asks
            results[rank] = error
        finally:
            meeting.leave(rank)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
