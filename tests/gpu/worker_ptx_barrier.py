"""The barrier kernel and its twin in PTX: the same words in every control block and every report.

mpirun -n 2 python tests/gpu/worker_ptx_barrier.py [--wait 1.0] [SCENARIO ...]

Every scenario runs from the same state with the CUDA kernel on all ranks, with the twin on all
ranks, and with either on every other rank; what it leaves is compared word for word. Where ranks
fail, who noticed first depends on time, and those words are left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import Worker

from deepep_cupy.engines.gpu.ptx_barrier import PtxBarrier
from deepep_cupy.protocol.control_block import DETAIL_WORDS, NUM_RECORDS, RECORD_HEAD, RECORD_WORDS
from deepep_cupy.protocol.headers import Kind, RefusalCode

START = 5
"""Epoch from which every run starts."""
MAKES: dict[str, Callable[[int], str]] = {
    "cuda": lambda rank: "cuda",
    "ptx": lambda rank: "ptx",
    "mixed": lambda rank: ("cuda", "ptx")[rank % 2],
    "other": lambda rank: ("ptx", "cuda")[rank % 2],
}


class Bench:
    """One rank's Buffer, taken apart. The constructor is collective."""

    def __init__(self, worker: Worker, buffer: Any) -> None:
        engine = buffer._engine
        self.worker, self.engine, self.runtime = worker, engine, engine._runtime
        self.control = self.runtime.memory.control
        kernels, comm = self.runtime.kernels, self.runtime.kernels._comm
        self.makes = {
            "cuda": kernels.get("barrier", 1, Kind.BARRIER),
            "ptx": PtxBarrier(kernels.constants, comm),
        }
        # The same patience for both: a late rank is waited for only as long as the test lasts.
        wait_ns = int(worker.options.wait * 1e9)
        self.makes["ptx"]._launch.set(timeout_ns=wait_ns)
        self.makes["cuda"]._launch.set(**{"comm.timeout_ns": wait_ns})
        self.last = worker.rank == worker.size - 1
        self.serial = 0
        self.make = "cuda"

    def begin(self, make: str) -> None:
        """The same state on all ranks, whatever was before. Collective."""
        engine = self.engine
        self.worker.synchronize()
        self.worker.meet()
        self.runtime.memory.start_over(np.array([START - 2], np.int64))
        self.runtime.failures.clear()
        engine._board.clear()
        self.serial, self.make = 0, MAKES[make](self.worker.rank)
        self.worker.meet()

    def barrier(self, kind: Kind = Kind.BARRIER, code: int = 0, value: int = 0) -> None:
        """Queue one."""
        self.serial += 1
        launch = self.makes[self.make]
        launch.refusal(kind, code, value)
        launch(self.serial, self.worker.xp.cuda.get_current_stream().ptr)

    def poke(self, offset: int, value: int) -> None:
        """Write a word of this rank's control block."""
        word = np.array([value], np.uint32)
        runtime = self.worker.xp.cuda.runtime
        base = self.runtime.memory.region.base
        runtime.memcpy(base + offset, word.ctypes.data, 4, runtime.memcpyHostToDevice)

    def state(self, exact: bool) -> dict[str, Any]:
        """Control block and report, once all ranks are done. Collective."""
        self.worker.synchronize()
        self.worker.meet()
        runtime = self.worker.xp.cuda.runtime
        words = np.zeros(self.control.partials // 4, np.uint32)
        base = self.runtime.memory.region.base
        runtime.memcpy(words.ctypes.data, base, words.nbytes, runtime.memcpyDeviceToHost)
        report = self.runtime.failures.report.words.copy()
        if not exact:
            self._leave_out(words, report)
        return {"control": words, "report": report}

    def _leave_out(self, words: Any, report: Any) -> None:
        """What depends on time, and headers that never came."""
        control, layout = self.control, self.runtime.failures.report._layout
        words[control.claimed // 4] = 0
        words[control.details // 4 : control.details // 4 + 16] = 0
        words[control.abort // 4] &= np.uint32(0xFFFF)
        for number in range(NUM_RECORDS):
            record = report[layout.records + number * layout.record_words :][: layout.record_words]
            record[RECORD_WORDS.index("abort")] &= np.uint64(0xFFFF)
            record[[RECORD_WORDS.index(word) for word in DETAIL_WORDS]] = 0
            record[RECORD_HEAD:] = 0


# --------------------------------------------------------------------------------------- scenarios
# Each queues what one rank does. Collective.


def three_barriers(bench: Bench) -> None:
    """Nothing but barriers."""
    for _ in range(3):
        bench.barrier()


def refusal(bench: Bench) -> None:
    """The last rank refuses a dispatch; then a barrier."""
    refused = (RefusalCode.TOO_MANY_TOKENS, 4711) if bench.last else (0, 0)
    bench.barrier(Kind.DISPATCH, *refused)
    bench.barrier()


def another_call(bench: Bench) -> None:
    """Rank 0 is in another call, six times."""
    for _ in range(NUM_RECORDS + 2):
        bench.barrier(Kind.COMBINE if bench.worker.rank == 0 else Kind.BARRIER)


def busy(bench: Bench) -> None:
    """Another operation is inside on every rank: nobody takes part."""
    bench.poke(bench.control.busy, 99)
    bench.barrier()


def poisoned(bench: Bench) -> None:
    """Nobody waits for anybody."""
    bench.poke(bench.control.poisoned, 1)
    bench.barrier()


def aborted_before(bench: Bench) -> None:
    """All are told to stop before they begin, by the last rank."""
    bench.poke(bench.control.abort, 2 | 1 << 16 + bench.worker.size - 1)
    bench.worker.meet()
    bench.barrier()


def board(bench: Bench) -> None:
    """The last rank never comes, but says on the board that it gave up."""
    if bench.last:
        time.sleep(bench.worker.options.wait / 2)  # all others have come by then
        bench.engine._board.array[bench.worker.rank, 0] = 1
        return
    bench.barrier()
    bench.barrier()


def late(bench: Bench) -> None:
    """The last rank never comes."""
    if not bench.last:
        bench.barrier()
        bench.barrier()


EXACT = {each.__name__: each for each in (three_barriers, refusal, another_call, busy, poisoned)}
FAILING = {each.__name__: each for each in (aborted_before, board, late)}


def differences(name: str, make: str, wanted: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Words in which two states differ."""
    return [
        f"{name}, {make}: {part} word {i} is {int(got[part][i]):#x}, "
        f"with the CUDA kernel {int(wanted[part][i]):#x}"
        for part in wanted
        for i in np.flatnonzero(wanted[part] != got[part])
    ]


def main() -> None:
    """Run all scenarios with all makes."""

    def arguments(parser: Any) -> None:
        parser.add_argument("--wait", type=float, default=2.0, help="seconds a late rank is given")
        parser.add_argument("scenarios", nargs="*", metavar="SCENARIO")

    worker = Worker("TWINS", __doc__, arguments)
    if not worker.gpu:
        raise SystemExit("worker_ptx_barrier.py: the twins are kernels; --engine host has none")
    chosen = worker.options.scenarios or [*EXACT, *FAILING]
    found: list[str] = []
    with worker.buffer() as buffer:
        bench = Bench(worker, buffer)
        for name in chosen:
            if worker.size == 1 and name in ("board", "late"):
                continue
            if name == "board" and not all(worker.comm.allgather(bench.engine._board_address)):
                worker.say("board: left out, the driver cannot map it")
                continue
            exact = name in EXACT
            states = {}
            for make in MAKES:
                bench.begin(make)
                (EXACT | FAILING)[name](bench)
                states[make] = bench.state(exact)
                found += differences(name, make, states["cuda"], states[make])
            told = int(states["cuda"]["report"][0])
            worker.say(f"{name}: {told} records on rank 0")
        bench.begin("cuda")
        buffer.barrier()
        worker.synchronize()
        buffer.check()
    everywhere = [line for lines in worker.comm.allgather(found) for line in lines]
    if everywhere:
        worker.say("\n".join(everywhere[:40]))
        raise SystemExit(f"{len(everywhere)} words differ")
    worker.done(f"{len(chosen)} scenarios, {len(MAKES)} mixtures")


if __name__ == "__main__":
    sys.exit(main())
