"""Runs the litmus module on one or two GPUs: which loads see what was just written.

A test is one load in one situation: who writes, through which pointer the reader reads, and how it
learns that there is something new. ``Litmus`` is one rank; rank 0 reads, rank 1 writes where the
writer is on another GPU. What the blocks do is in ``ptx/litmus.sm_80.ptx``; here its launches are
set up, one after the other, and its counts become ``engines.gpu.loads.Reading``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.engines.gpu.loads import PROTOCOLS, Reading
from deepep_cupy.engines.gpu.ptx_modules import PtxEntry, get_module, load_entry
from deepep_cupy.jit.compile import Loaded
from deepep_cupy.jit.launch import Launch

__all__ = [
    "BULK_LOADS",
    "LOADS",
    "WIDTHS",
    "CupyMachine",
    "Litmus",
    "Machine",
    "RankMemory",
    "Test",
    "Words",
    "every_test",
    "region_bytes",
]

LOADS = (
    "ld.global",
    "ld.global.ca",
    "ld.global.cg",
    "ld.global.L1::no_allocate",
    "ld.volatile.global",
    "ld.relaxed.sys.global",
    "ld.global.nc",
    "ld.global.nc.L1::evict_last",
    "ld.global.nc.L1::no_allocate",
    "ld.global.nc.L1::no_allocate.L2::256B",
)
"""Kinds of loads, in the order in which the module numbers them."""
WIDTHS = (16, 8, 4)
"""Bytes of one load, in the module's order."""
BULK_LOADS = ("fence.proxy.async + cp.async.bulk", "cp.async.bulk")
"""Loads of the copy engine, as ``ptx/litmus_bulk.sm_90.ptx`` numbers them."""
MAX_ROUND = 65535
MAX_WORDS = 1024
"""Shared memory of the module for bulk loads holds no more."""

_READER, _WATCHER, _WRITER = 1, 2, 4
_WATCHED, _SAME_SM, _ACQUIRE, _ALONE, _APART = 1, 2, 4, 8, 16
_HOW = {
    "reader": _ACQUIRE,
    "same SM": _WATCHED | _SAME_SM,
    "other SM": _WATCHED,
    "handed over": _WATCHED | _ACQUIRE,
    "relaxed": 0,
    "boundary": _ALONE,
}
_PHASES = {  # bits of the fourth word of the board
    1: "the reader's block to start",
    2: "the writer's or the watcher's round",
    4: "the writer's round, in the watcher",
    8: "the reader to be ready, in the writer",
    16: "a bulk load",
}

# Where things lie in each rank's memory; what different sides write is on lines of its own.
_FLAG, _ACK, _BOARD, _COUNTS, _DATA = 0, 256, 512, 1024, 4096
_BLOCKS_PER_SM = 4
"""Of a launch with a watcher: one of them is beside the reader."""
_WRITER_BLOCKS = 32
"""Of a writer's launch beside the reader's: one of them is on another SM."""


@dataclass(frozen=True)
class Test:
    """One load in one situation; see ``engines.gpu.loads.Reading`` for the words."""

    producer: str
    pointer: str
    protocol: str
    load: str
    nbytes: int

    __test__ = False  # no test of pytest's


def every_test(producers: Sequence[str], *, bulk: bool = False) -> Iterator[Test]:
    """All tests for some of ``"peer"``, ``"kernel"`` and ``"block"``.

    Args:
        producers: Who can write.
        bulk: Whether the GPU has bulk loads; no other block of the same kernel writes for them.
    """
    for producer in producers:
        for pointer in ("local", "peer") if producer == "peer" else ("local",):
            for protocol in PROTOCOLS:
                if (producer, protocol) == ("block", "boundary"):
                    continue  # within one kernel no kernel ends
                for load in LOADS:
                    for nbytes in WIDTHS:
                        yield Test(producer, pointer, protocol, load, nbytes)
                if bulk and producer != "block" and not _HOW[protocol] & _WATCHED:
                    for load in BULK_LOADS:
                        yield Test(producer, pointer, protocol, load, 16)


@dataclass(frozen=True)
class Words:
    """How many words each test checks, and how often.

    Attributes:
        num_words: Words of 16 bytes under test, at most 1024.
        num_rounds: How often they are rewritten, at most 65534.
        limit_s: Most seconds a launch may last.
    """

    num_words: int = 1024
    num_rounds: int = 1000
    limit_s: float = 5.0

    def rounds(self, protocol: str) -> int:
        """Rounds of a test. With kernel boundaries all SMs read, in fewer rounds."""
        return max(10, self.num_rounds // 25) if protocol == "boundary" else self.num_rounds


def region_bytes(words: Words) -> int:
    """Bytes of symmetric memory that each rank needs."""
    return _DATA + 16 * words.num_words


def pattern(num_words: int, number: int) -> NDArray[np.uint32]:
    """The words as round ``number`` leaves them."""
    lanes = np.arange(4 * num_words, dtype=np.uint32) << np.uint32(16)
    return lanes + np.uint32(number)


class Machine(Protocol):
    """This rank's GPU."""

    num_sms: int

    def write(self, address: int, values: NDArray[Any]) -> None:
        """Write device memory; complete on return."""
        ...

    def read(self, address: int, values: NDArray[Any]) -> None:
        """Read device memory into an array, behind all launches."""
        ...

    def launch(self, name: str, grid: int, stream: int, **values: int) -> None:
        """Launch ``"litmus"`` or ``"litmus_bulk"`` on stream 0 or 1 and return; all parameters
        are given."""
        ...

    def finish(self) -> None:
        """Wait until all launches have ended."""
        ...


class CupyMachine:
    """The current device."""

    def __init__(self, num_sms: int) -> None:
        import cupy

        self.num_sms = num_sms
        self._runtime: Any = cupy.cuda.runtime
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        self._loaded: dict[str, tuple[Loaded, PtxEntry]] = {}
        self._ready: dict[tuple[str, int], Launch] = {}
        # Nothing is loaded or prepared while a kernel waits for the one that needs it.
        for grid in {1, num_sms, _BLOCKS_PER_SM * num_sms, min(_WRITER_BLOCKS, num_sms)}:
            self._prepare("litmus", grid)

    def write(self, address: int, values: NDArray[Any]) -> None:
        """See ``Machine``."""
        runtime = self._runtime
        runtime.memcpy(address, values.ctypes.data, values.nbytes, runtime.memcpyHostToDevice)
        runtime.deviceSynchronize()  # a copy from ordinary memory may still be under way

    def read(self, address: int, values: NDArray[Any]) -> None:
        """See ``Machine``."""
        self.finish()
        runtime = self._runtime
        runtime.memcpy(values.ctypes.data, address, values.nbytes, runtime.memcpyDeviceToHost)

    def launch(self, name: str, grid: int, stream: int, **values: int) -> None:
        """See ``Machine``."""
        ready = self._ready.get((name, grid)) or self._prepare(name, grid)
        ready.set(**values)
        ready(self._streams[stream].ptr)

    def _prepare(self, name: str, grid: int) -> Launch:
        if name not in self._loaded:
            self._loaded[name] = load_entry(get_module(name), name)
        loaded, entry = self._loaded[name]
        values = dict.fromkeys((param.name for param in entry.params), 0)
        self._ready[name, grid] = Launch(loaded, entry, {}, grid=grid, values=values)
        return self._ready[name, grid]

    def finish(self) -> None:
        """See ``Machine``."""
        for stream in self._streams:
            stream.synchronize()


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank, and the way to its peers.

    Attributes:
        rank: 0 reads, 1 writes as a peer, others only listen.
        base: Address of the rank's own memory.
        peer: Address here of the other's memory, 0 without one.
        allgather: Collective; returns one object from every rank.
    """

    rank: int
    base: int
    peer: int
    allgather: Callable[[Any], list[Any]]


class Litmus:
    """One rank of the test.

    Args:
        machine: Its GPU.
        memory: Its memory, and how it reaches the others.
        words: How much each test does.
    """

    def __init__(self, machine: Machine, memory: RankMemory, words: Words) -> None:
        self._machine, self._memory, self._words = machine, memory, words
        self._error = ""

    def run(self, test: Test) -> Reading:
        """Run one test. Collective; all ranks get the same answer. Never raises."""
        self._error = ""
        reading: Reading | None = None
        if test.producer == "peer":
            reading = self._with_peer(test)
        elif self._memory.rank == 0:
            reading = self._alone(test)
        error: str
        for error, answer in self._memory.allgather((self._error, reading)):
            if error:
                return _reading(test, error=error)
            reading = answer or reading
        assert reading is not None  # rank 0 has one, or an error
        return reading

    # ------------------------------------------------------------------------------ who writes

    def _alone(self, test: Test) -> Reading | None:
        """Reader and writer are on this GPU."""
        sms = self._machine.num_sms
        self._do(self._reset)
        if test.protocol == "boundary":
            self._do(lambda: self._read(test, 0))
            for number in range(1, self._words.rounds(test.protocol) + 1):
                self._do(partial(self._write, test, number))
                self._do(partial(self._read, test, number))
        elif test.producer == "kernel":
            self._do(lambda: self._read(test, 1))
            self._do(lambda: self._write(test, 1, grid=min(_WRITER_BLOCKS, sms), stream=1))
        else:
            self._do(lambda: self._read(test, 1, also=_WRITER))
        return self._result(test)

    def _with_peer(self, test: Test) -> Reading | None:
        """Rank 0 reads, rank 1 writes. Every rank meets the others equally often."""
        rank, meet = self._memory.rank, self._meet
        if rank < 2:
            self._do(self._reset)
        meet()
        if test.protocol != "boundary":
            if rank == 0:
                self._do(lambda: self._read(test, 1))
            elif rank == 1:
                self._do(lambda: self._write(test, 1))
        else:
            for number in range(self._words.rounds(test.protocol) + 1):
                if rank == 1 and number > 0:
                    self._do(partial(self._write, test, number))
                    self._do(self._machine.finish)
                meet()
                if rank == 0:
                    self._do(partial(self._read, test, number))
                    self._do(self._machine.finish)
                meet()
        if rank == 1:
            self._do(self._check_writer)
        return self._result(test) if rank == 0 else None

    def _do(self, action: Callable[[], None]) -> None:
        """Run an action, unless an earlier one of this test failed; keep its error."""
        if not self._error:
            try:
                action()
            except Exception as failure:  # noqa: BLE001 - the peers wait to hear of it
                rank = self._memory.rank
                self._error = f"rank {rank}: {type(failure).__name__}: {failure}"

    def _meet(self) -> None:
        self._memory.allgather(None)

    # ---------------------------------------------------------------------------- the launches

    def _reset(self) -> None:
        base, machine = self._memory.base, self._machine
        machine.write(base, np.zeros(_DATA, np.uint8))
        machine.write(base + _DATA, pattern(self._words.num_words, 0))

    def _read(self, test: Test, first: int, also: int = 0) -> None:
        """Launch the reader, with the watcher and the writer where they share its launch."""
        base, sms = self._memory.base, self._machine.num_sms
        there = self._memory.peer if test.producer == "peer" else base
        how = _HOW[test.protocol]
        roles = _READER | also | (_WATCHER if how & _WATCHED else 0)
        grid = 1
        if how & _ALONE:
            grid = sms
        elif roles != _READER:
            grid = _BLOCKS_PER_SM * sms
        self._launch(
            test,
            first,
            grid=grid,
            stream=0,
            data=(there if test.pointer == "peer" else base) + _DATA,
            flag=base + _FLAG,
            ack=there + _ACK,
            roles=roles,
            how=how | (_APART if also else 0),
        )

    def _write(self, test: Test, first: int, grid: int = 1, stream: int = 0) -> None:
        """Launch the writer in a launch of its own."""
        base = self._memory.base
        there = self._memory.peer if test.producer == "peer" else base
        self._launch(
            test,
            first,
            grid=grid,
            stream=stream,
            data=(base if test.pointer == "peer" else there) + _DATA,
            flag=there + _FLAG,
            ack=base + _ACK,
            roles=_WRITER,
            how=(_HOW[test.protocol] & _ALONE) | (_APART if grid > 1 else 0),
        )

    def _launch(self, test: Test, first: int, *, grid: int, stream: int, **values: int) -> None:
        base, words = self._memory.base, self._words
        rounds = 1 if test.protocol == "boundary" else words.rounds(test.protocol)
        bulk = test.load in BULK_LOADS
        load = 0
        if values["roles"] != _WRITER:
            load = (BULK_LOADS if bulk else LOADS).index(test.load)
            load = load if bulk else len(WIDTHS) * load + WIDTHS.index(test.nbytes)
        self._machine.launch(
            "litmus_bulk" if bulk and values["roles"] == _READER else "litmus",
            grid,
            stream,
            board=base + _BOARD,
            counts=base + _COUNTS,
            limit_ns=int(words.limit_s * 1e9),
            num_words=words.num_words,
            first_round=first,
            num_rounds=rounds,
            load=load,
            **values,
        )

    # --------------------------------------------------------------------------------- results

    def _check_writer(self) -> None:
        board = np.zeros(4, np.uint32)
        self._machine.read(self._memory.base + _BOARD, board)
        if board[3]:
            self._error = f"rank 1 {_gave_up(int(board[3]))}"

    def _result(self, test: Test) -> Reading | None:
        board, counts = np.zeros(4, np.uint32), np.zeros(5, np.uint64)
        self._do(lambda: self._machine.read(self._memory.base + _BOARD, board))
        self._do(lambda: self._machine.read(self._memory.base + _COUNTS, counts))
        if self._error:
            return None
        checks, stale, torn, wrong, oldest = (int(count) for count in counts)
        error = self._why_void(test, [int(word) for word in board], checks)
        return _reading(
            test, error, checks=checks, stale=stale, torn=torn, wrong=wrong, oldest=oldest
        )

    def _why_void(self, test: Test, board: list[int], checks: int) -> str:
        """Why the counts do not count, empty where they do."""
        reader, writer, watcher, phase = board
        if phase:
            return _gave_up(phase)
        expected = self._words.num_words * self._words.rounds(test.protocol)
        if test.protocol == "boundary":
            expected += self._words.num_words
            expected *= self._machine.num_sms
        if checks != expected:
            return f"{checks:,} words were checked instead of {expected:,}"
        if _HOW[test.protocol] & _WATCHED:
            same = bool(_HOW[test.protocol] & _SAME_SM)
            if not watcher or (watcher == reader) != same:
                return f"the watcher was on SM {watcher - 1}, the reader on {reader - 1}"
        if test.producer != "peer" and test.protocol != "boundary" and writer in (0, reader):
            return f"the writer was on SM {writer - 1}, the reader on {reader - 1}"
        return ""


def _gave_up(bits: int) -> str:
    return "gave up waiting for " + "; for ".join(
        what for bit, what in _PHASES.items() if bits & bit
    )


def _reading(test: Test, error: str = "", **counts: int) -> Reading:
    return Reading(
        test.producer, test.pointer, test.protocol, test.load, test.nbytes, error=error, **counts
    )
