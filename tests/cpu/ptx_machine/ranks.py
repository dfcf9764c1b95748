"""Barriers on ranks: the hand-written module and its twin, launched with the same arguments."""

from __future__ import annotations

import functools
import struct

import pytest

from deepep_cupy.engines.gpu.kernels import get_kernel
from deepep_cupy.engines.gpu.ptx_barrier import ptx_barrier_values
from deepep_cupy.engines.gpu.ptx_modules import get_module
from deepep_cupy.jit.launch import Packed
from deepep_cupy.protocol.constants import KernelShape, kernel_constants
from deepep_cupy.protocol.control_block import RECORD_HEAD, ControlLayout, ReportLayout
from deepep_cupy.protocol.headers import WORDS, Kind
from ptx_machine.program import Program, load_bytes, store_bytes
from ptx_machine.world import BOARD, REGION, REPORTS, World

__all__ = ["DATA", "ENTRY", "STRIDE", "TEXT", "Node", "shape"]

MODULE = get_module("peer_barrier")
ENTRY = MODULE.entry("peer_barrier")
TEXT = MODULE.path.read_text(encoding="utf-8")
DATA = REGION // 2
"""Where ranks write what must have arrived when the barrier ends, one word a source."""
STRIDE = 16


@functools.cache
def shape(num_ranks):
    return KernelShape(num_ranks=num_ranks, num_threads=64, turns_per_check=4)


@functools.cache
def program(flavor, num_ranks, text=TEXT):
    if flavor == "ptx":
        return Program(text)
    pytest.importorskip("cupy", reason="the twin's PTX needs CuPy and NVRTC")
    from deepep_cupy.engines.gpu.kernels import kernel_ptx

    wanted = shape(num_ranks)
    return Program(
        kernel_ptx(
            "barrier",
            80,
            num_ranks=num_ranks,
            num_threads=wanted.num_threads,
            turns_per_check=wanted.turns_per_check,
        )
    )


class Node:
    """Ranks with their memory, ready to queue barriers on."""

    def __init__(self, num_ranks, flavor="ptx", seed=0, epoch=1, text=TEXT, timeout_ns=10**12):
        self.size, self.flavor, self.text, self.timeout_ns = num_ranks, flavor, text, timeout_ns
        self.ranks = range(num_ranks)
        self.constants = kernel_constants(shape(num_ranks))
        self.control, self.layout = ControlLayout(num_ranks), ReportLayout(num_ranks)
        self.world = World(num_ranks, seed)
        self.world.on_arrival, self.world.on_end = self._on_arrival, self._on_end
        self.calls = [0] * num_ranks
        self.entered = [epoch] * num_ranks
        self.faults = []
        for rank in self.ranks:
            self.write(rank, self.control.epoch, epoch)

    def queue(self, rank, **changes):
        """One barrier on one rank, after what an earlier kernel stored to all others."""
        flavor = self.flavor
        if flavor == "mixed":
            flavor = self.world.random.choice(("ptx", "cuda"))
        self.calls[rank] += 1
        call = self.calls[rank]
        comm = {
            "peer": [(r + 1) * REGION for r in self.ranks],
            "report": REPORTS + rank * REGION,
            "board": BOARD,
            "timeout_ns": self.timeout_ns,
            "board_stride": STRIDE,
            "serial": call,
            "rank": rank,
            "kind": Kind.BARRIER,
            "refusal": 0,
            "refusal_value": 0,
        } | changes
        if flavor == "ptx":
            layout, values = ENTRY.layout({}), ptx_barrier_values(ENTRY, self.constants, comm)
        else:
            layout, values = get_kernel("barrier").layout(self.constants), {"comm": comm}
        param = bytearray(Packed(layout, values, "test").tobytes())
        threads = ENTRY.max_threads if flavor == "ptx" else self.constants["kNumThreads"]
        run = (
            program(flavor, self.size, self.text) if flavor == "ptx" else program("cuda", self.size)
        )

        def before():
            self.entered[rank] = self.read(rank, self.control.epoch)
            for peer in self.ranks:
                place = (peer + 1) * REGION + DATA + 8 * rank
                self.world.earlier_store(rank, place, 8, call)

        self.world.queues[rank].append((run, param, threads, before))

    def run(self):
        self.world.run()
        assert self.faults == []
        return self

    # ------------------------------------------------------------------------ looking at memory

    def read(self, rank, offset, nbytes=4):
        return load_bytes(self.world.memory, (rank + 1) * REGION + offset, nbytes)

    def write(self, rank, offset, value, nbytes=4):
        store_bytes(self.world.memory, (rank + 1) * REGION + offset, nbytes, value)

    def epochs(self):
        return {self.read(rank, self.control.epoch) for rank in self.ranks}

    def report(self, rank):
        raw = self.world.memory[REPORTS + rank * REGION :][: 8 * self.layout.num_words]
        return list(struct.unpack(f"<{self.layout.num_words}Q", raw))

    def record(self, rank, number=0):
        """Head and headers of one record."""
        words = self.report(rank)[self.layout.records + number * self.layout.record_words :]
        width = len(WORDS) + self.size
        headers = [words[RECORD_HEAD + r * width :][:width] for r in self.ranks]
        return words[:RECORD_HEAD], headers

    def headers(self, rank, epoch):
        """What lies in the slots of an epoch: [source][word] of (epoch, value)."""
        width = len(WORDS) + self.size
        base = self.control.headers + (epoch & 1) * self.size * width * 8
        words = [self.read(rank, base + 8 * i, 8) for i in range(self.size * width)]
        pairs = [(word >> 32, word & 0xFFFFFFFF) for word in words]
        return [pairs[source * width :][:width] for source in self.ranks]

    def state(self):
        """All that a barrier may leave: control blocks and reports."""
        controls = [
            bytes(self.world.memory[(r + 1) * REGION :][: self.control.partials])
            for r in self.ranks
        ]
        return controls, [self.report(rank) for rank in self.ranks]

    # ------------------------------------------------------------------------- watching it run

    def _on_arrival(self, address):
        """The number of records may arrive at the host only behind the record."""
        rank, offset = divmod(address - REPORTS, REGION)
        if address >= REPORTS and offset == 8 * self.layout.num_failures:
            for item in self.world.travelling:
                if item.address // REGION == address // REGION:
                    self.faults.append(f"rank {rank}: the number overtook {item.address:#x}")

    def _on_end(self, rank):
        """A barrier that advanced the epoch proves that all peers' earlier stores are here."""
        done = self.calls[rank] - len(self.world.queues[rank])
        if self.read(rank, self.control.epoch) != self.entered[rank]:
            for source in self.ranks:
                seen = self.read(rank, DATA + 8 * source, 8)
                if seen < done:
                    self.faults.append(f"rank {rank}, call {done}: rank {source} is at {seen}")
