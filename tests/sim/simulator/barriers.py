"""Barriers on simulated ranks: the hand-written module and its twin, launched with the same values.

Before each barrier an earlier kernel of its rank writes a word to every rank; behind it, a later
kernel reads what all ranks wrote. So a barrier that lets a rank through too early is a race, or a
word that is not there.
"""

from __future__ import annotations

import random
import struct
from typing import Any

from deepep_cupy.engines.gpu.kernels import get_kernel
from deepep_cupy.engines.gpu.ptx_barrier import ptx_barrier_values
from deepep_cupy.engines.gpu.ptx_modules import get_module
from deepep_cupy.jit.launch import Packed
from deepep_cupy.protocol.control_block import RECORD_HEAD, ControlLayout, ReportLayout
from deepep_cupy.protocol.headers import WORDS, Kind
from simulator.machine import Fault, Machine, Use
from simulator.ptx import ptx_kernel, text_of
from simulator.shapes import Shape, library

__all__ = ["ENTRY", "STRIDE", "TEXT", "Node"]

ENTRY = get_module("peer_barrier").entry("peer_barrier")
TEXT = text_of("peer_barrier")
STRIDE = 16
"""Words between two lines of the board."""
MOST_CALLS = 8
WATCHER_THREADS = 32

_WATCHER = """
.visible .entry watch(.param .u64 report, .param .u64 out, .param .u32 number, .param .u32 count)
{
    .reg .pred %p_is;
    .reg .b32  %r_thread, %r_count;
    .reg .b64  %rd_report, %rd_out, %rd_word, %rd_seen, %rd_wanted, %rd_now;
    mov.u32 %r_thread, %tid.x;
    setp.ne.u32 %p_is, %r_thread, 0;
    @%p_is bra OUT;
    ld.param.u64 %rd_report, [report];
    ld.param.u64 %rd_out, [out];
    ld.param.u32 %rd_word, [number];
    add.u64 %rd_word, %rd_report, %rd_word;
    ld.param.u32 %r_count, [count];
WAIT:
    mov.u64 %rd_now, %globaltimer;
    ld.acquire.sys.global.u64 %rd_seen, [%rd_word];
    setp.eq.u64 %p_is, %rd_seen, 0;
    @%p_is bra WAIT;
COPY:
    ld.relaxed.sys.global.u64 %rd_seen, [%rd_report];
    st.global.u64 [%rd_out], %rd_seen;
    add.u64 %rd_report, %rd_report, 8;
    add.u64 %rd_out, %rd_out, 8;
    sub.u32 %r_count, %r_count, 1;
    setp.ne.u32 %p_is, %r_count, 0;
    @%p_is bra COPY;
OUT:
    ret;
}
"""
"""The host's part: who sees that there is a record sees the record."""


class Node:
    """Ranks with their memory, ready to queue barriers on.

    Args:
        num_ranks: R.
        flavor: ``"ptx"``, ``"cuda"`` (the twin), or ``"mixed"``: either, launch by launch.
        seed: Of the machine.
        epoch: Where counting begins.
        text: Of the module.
        timeout_ns: Virtual nanoseconds a wait may last.
    """

    def __init__(
        self,
        num_ranks: int,
        flavor: str = "ptx",
        seed: int = 0,
        epoch: int = 1,
        text: str = TEXT,
        timeout_ns: int = 10**12,
    ) -> None:
        self.size, self.flavor, self.text, self.timeout_ns = num_ranks, flavor, text, timeout_ns
        self.ranks = range(num_ranks)
        self.shape = Shape(num_ranks)
        self.control, self.layout = ControlLayout(num_ranks), ReportLayout(num_ranks)
        self.machine = Machine(seed, num_ranks + 1, max_blocks=1, num_threads=ENTRY.max_threads)
        self.machine.option("hang_after", 2 * timeout_ns)  # and time passes in small steps
        self.machine.option("remote_loads", 0)
        # Lanes without a header word load one all the same, and drop it.
        self.machine.option("shared_rubbish", 1)
        self._random = random.Random(seed)
        self._regions = [
            self._region(f"rank{r}.control", self.control.nbytes, r) for r in self.ranks
        ]
        words = 8 * MOST_CALLS * num_ranks
        scratch = Use.SCRATCH
        self._data = [self._region(f"rank{r}.data", words, r, scratch) for r in self.ranks]
        words = 8 * self.layout.num_words
        self._reports = [self._region(f"rank{r}.report", words, -1) for r in self.ranks]
        self._seen = [self._region(f"rank{r}.seen", words, num_ranks) for r in self.ranks]
        self.board = self._region("board", 4 * STRIDE * num_ranks, -1)
        self._calls = [0] * num_ranks
        self._first_epoch = epoch
        self._reads: list[tuple[int, int, Any]] = []
        for rank in self.ranks:
            self.write(rank, self.control.epoch, epoch)

    def _region(self, name: str, nbytes: int, owner: int, use: Use = Use.CONTROL) -> int:
        region = self.machine.region(name, nbytes, owner)
        self.machine.poke(region, 0, bytes(nbytes), use)
        return region

    def queue(self, rank: int, **changes: int) -> None:
        """One barrier on one rank, after what an earlier kernel stored to all ranks."""
        flavor = self.flavor
        if flavor == "mixed":
            flavor = self._random.choice(("ptx", "cuda"))
        self._calls[rank] += 1
        call = self._calls[rank]
        address = self.machine.address
        comm: dict[str, Any] = {
            "peer": [address(rank, region) for region in self._regions],
            "report": address(rank, self._reports[rank]),
            "board": address(rank, self.board),
            "timeout_ns": self.timeout_ns,
            "board_stride": STRIDE,
            "serial": call,
            "rank": rank,
            "kind": Kind.BARRIER,
            "refusal": 0,
            "refusal_value": 0,
        } | changes
        place = 8 * (self.size * (call - 1) + rank)
        for region in self._data:
            self.machine.write(rank, call, region, place, struct.pack("<Q", call))
        self._launch(rank, call, flavor, comm)
        row = 8 * self.size
        read = self.machine.read(rank, call, self._data[rank], row * (call - 1), row)
        self._reads.append((rank, call, read))

    def _launch(self, rank: int, call: int, flavor: str, comm: dict[str, Any]) -> None:
        constants = self.shape.constants
        if flavor == "ptx":
            kernel = ptx_kernel("peer_barrier", self.text)
            params = Packed(ENTRY.layout({}), ptx_barrier_values(ENTRY, constants, comm), "test")
            path, threads, shared = kernel.library, ENTRY.max_threads, kernel.num_shared
        else:
            spec = get_kernel("barrier")
            params = Packed(spec.layout(constants), {"comm": comm}, "test")
            path, threads = library(self.shape, "barrier"), spec.num_threads(constants)
            shared = spec.num_shared_bytes(constants)
        self.machine.launch(rank, call, path, 1, threads, shared, params.tobytes())

    def watch_reports(self) -> None:
        """Let the host copy each rank's report as soon as it has its first record."""
        kernel = ptx_kernel("peer_barrier", _WATCHER)
        for rank in self.ranks:
            report = self.machine.address(self.size, self._reports[rank])
            out = self.machine.address(self.size, self._seen[rank])
            number = 8 * self.layout.num_failures
            params = struct.pack("<QQII", report, out, number, self.layout.num_words)
            self.machine.launch(self.size, 1, kernel.library, 1, WATCHER_THREADS, 128, params)

    def run(self) -> None:
        """Run all that is queued; raises AssertionError for what a barrier must not let happen."""
        faults = [fault for fault in self.machine.run() if self._spoils_a_barrier(fault)]
        assert not faults, faults[0].text
        for rank, call, read in self._reads:
            if call <= self._passed(rank):
                assert read() == struct.pack("<Q", call) * self.size

    def _passed(self, rank: int) -> int:
        """Barriers that advanced this rank's epoch."""
        epoch, end = self._first_epoch, self.read(rank, self.control.epoch)
        for number in range(MOST_CALLS + 1):
            if epoch == end:
                return number
            epoch = 2 if epoch == 0xFFFFFFFF else epoch + 1
        raise AssertionError(f"rank {rank} has epoch {end:#x}")

    def _spoils_a_barrier(self, fault: Fault) -> bool:
        """Whether one that let its rank through is concerned."""
        return any(
            victim is None or victim[0] == self.size or victim[1] <= self._passed(victim[0])
            for victim in fault.victims
        )

    # ------------------------------------------------------------------------ looking at memory

    def read(self, rank: int, offset: int, nbytes: int = 4) -> int:
        """A word of a control block."""
        return int.from_bytes(self.machine.peek(self._regions[rank], offset, nbytes), "little")

    def write(self, rank: int, offset: int, value: int, nbytes: int = 4) -> None:
        """Set a word of a control block before the run."""
        self.machine.poke(self._regions[rank], offset, value.to_bytes(nbytes, "little"))

    def wrote(self, source: int, call: int) -> None:
        """Set what a rank writes before its barrier, where the rank itself does not run."""
        for region in self._data:
            place = 8 * (self.size * (call - 1) + source)
            self.machine.poke(region, place, struct.pack("<Q", call), Use.SCRATCH)

    def epochs(self) -> set[int]:
        """Those of all ranks."""
        return {self.read(rank, self.control.epoch) for rank in self.ranks}

    def report(self, rank: int, *, seen: bool = False) -> list[int]:
        """A rank's report, or what ``watch_reports`` saw of it."""
        region, count = (self._seen if seen else self._reports)[rank], self.layout.num_words
        return list(struct.unpack(f"<{count}Q", self.machine.peek(region, 0, 8 * count)))

    def record(self, rank: int, number: int = 0) -> tuple[list[int], list[list[int]]]:
        """Head and headers of one record."""
        words = self.report(rank)[self.layout.records + number * self.layout.record_words :]
        width = len(WORDS) + self.size
        headers = [words[RECORD_HEAD + r * width :][:width] for r in self.ranks]
        return words[:RECORD_HEAD], headers

    def headers(self, rank: int, epoch: int) -> list[list[tuple[int, int]]]:
        """What lies in the slots of an epoch: [source][word] of (epoch, value)."""
        width = len(WORDS) + self.size
        base = self.control.headers + (epoch & 1) * self.size * width * 8
        words = [self.read(rank, base + 8 * i, 8) for i in range(self.size * width)]
        pairs = [(word >> 32, word & 0xFFFFFFFF) for word in words]
        return [pairs[source * width :][:width] for source in self.ranks]

    def state(self) -> tuple[list[bytes], list[list[int]]]:
        """All that a barrier may leave: control blocks and reports."""
        controls = [self.machine.peek(region, 0, self.control.partials) for region in self._regions]
        return controls, [self.report(rank) for rank in self.ranks]
