"""Ranks with one Buffer: its memory, its calls as commands of each rank's stream, its verdicts.

This is the engine of the product without CuPy: the same specs pack the same parameter structs
from the same plan. Blocks of the pool are handed out in stream order, and whoever writes outside
of them, twice, or late is found by the machine.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepep_cupy.engines.gpu.kernels import get_kernel
from deepep_cupy.jit.launch import Packed
from deepep_cupy.protocol.control_block import (
    ABORT_LATE_SHIFT,
    MAX_BLOCKS,
    NUM_RECORDS,
    RECORD_WORDS,
    ControlLayout,
    Phase,
    ReportLayout,
    Verdict,
    align,
)
from deepep_cupy.protocol.headers import OFFSET_UNIT, Kind, Refusal, RefusalCode
from deepep_cupy.ranks.abort_board import LINE_BYTES
from simulator.machine import Fault, Machine, Use
from simulator.shapes import Edit, Shape, library

NUM_SLOTS = 14
LOCAL_BYTES = 256 * 1024
OK, REFUSED, FAILED, POISONED, STOPPED = "ok", "refused", "failed", "poisoned", "stopped"


def _phase_name(phase: int) -> str:
    return Phase(phase).name.lower() if phase in set(Phase) else str(phase)


@dataclass(frozen=True)
class Setting:
    """What one Buffer is built for.

    Attributes:
        shape: Of the kernels.
        num_experts: E.
        max_tokens: M.
        first_epoch: Where counting begins.
        timeout_ns: Virtual nanoseconds a wait may last.
        byte_wise: For row sizes that are no multiple of 4.
        edits: Kernel name -> planted fault.
        quarantine: Give no block out twice: an operation will fail, and late peers may write.
    """

    shape: Shape
    num_experts: int
    max_tokens: int = 8
    first_epoch: int = 1
    timeout_ns: int = 2_000_000
    byte_wise: bool = False
    edits: Mapping[str, Edit] = field(default_factory=dict)
    quarantine: bool = False


class Space:
    """A region in which memory is handed out once, never taken back."""

    def __init__(self, machine: Machine, region: int, observer: int, start: int = 0) -> None:
        self._machine, self.region, self._observer, self._next = machine, region, observer, start

    def take(self, nbytes: int, unit: int = 16) -> int:
        """Offset of fresh bytes."""
        offset = align(self._next, unit)
        self._next = offset + nbytes
        return offset

    def address(self, offset: int) -> int:
        """As this rank's kernels see it."""
        return self._machine.address(self._observer, self.region, offset)


class RankMemory:
    """One rank's memory: control block and pool, its own arrays, its report."""

    def __init__(self, machine: Machine, setting: Setting, rank: int) -> None:
        ranks = setting.shape.num_ranks
        self.control = ControlLayout(ranks, setting.num_experts)
        self.report_layout = ReportLayout(ranks, setting.num_experts)
        head = align(self.control.nbytes, OFFSET_UNIT)
        most = setting.max_tokens
        self.slot_bytes = max(20, 9 * ranks) * 1024 * align(most, 8) // 8
        self.device = machine.region(f"rank{rank}.pool", head + NUM_SLOTS * self.slot_bytes, rank)
        self.slots = [head + i * self.slot_bytes for i in range(NUM_SLOTS)]
        local = machine.region(f"rank{rank}.local", LOCAL_BYTES * align(most, 8) // 8, rank)
        self.local = Space(machine, local, rank)
        self.report = machine.region(f"rank{rank}.report", 8 * self.report_layout.num_words, -1)
        machine.poke(self.device, 0, bytes(self.control.nbytes))
        machine.poke(self.device, self.control.epoch, struct.pack("<I", setting.first_epoch))
        machine.poke(self.report, 0, bytes(8 * self.report_layout.num_words))
        self._label(machine, rank, ranks)

    def _label(self, machine: Machine, rank: int, ranks: int) -> None:
        def label(offset: int, nbytes: int, name: str) -> None:
            machine.label(self.device, offset, nbytes, f"rank{rank}.{name}")

        control = self.control
        for name in (
            "epoch",
            "poisoned",
            "arrivals",
            "busy",
            "tickets",
            "failures",
            "claimed",
            "abort",
        ):
            label(getattr(control, name), 4, name)
        for parity in range(2):
            for source in range(ranks):
                slot = parity * ranks + source
                width = control.header_bytes
                label(control.headers + slot * width, width, f"header[{parity}][{source}]")
                label(control.arrived + slot * 8, 8, f"arrived[{parity}][{source}]")
        for block in range(min(MAX_BLOCKS, 8)):
            width = 8 * (ranks + 1)
            label(control.partials + block * width, width, f"partials[{block}]")
        label(control.histogram, control.experts - control.histogram, "histogram")
        label(control.experts, control.nbytes - control.experts, "experts")
        for i, offset in enumerate(self.slots):
            label(offset, self.slot_bytes, f"block{i}")


@dataclass
class Call:
    """One operation on all ranks.

    Attributes:
        serial: Its number, the same on all ranks.
        name: For messages.
        checks: Per rank: compares what a later kernel read with what it had to be.
        poisoned: Per rank: the same for an operation that did not run.
        remains: Per rank: the same for one that failed: late rows may have come over the poison.
    """

    serial: int
    name: str
    checks: dict[int, Callable[[], None]] = field(default_factory=dict)
    poisoned: dict[int, Callable[[], None]] = field(default_factory=dict)
    remains: dict[int, Callable[[], None]] = field(default_factory=dict)


class World:
    """All ranks of one Buffer in one machine.

    Args:
        seed: Of the machine.
        setting: Of the Buffer.
        max_blocks: The largest grid.
    """

    def __init__(self, seed: int, setting: Setting, max_blocks: int = 3) -> None:
        self.setting = setting
        self.num_ranks = setting.shape.num_ranks
        self.machine = Machine(
            seed,
            self.num_ranks,
            byte_wise=setting.byte_wise,
            max_blocks=max_blocks,
            num_threads=setting.shape.num_threads,
        )
        self.machine.option("hang_after", 100 * setting.timeout_ns)
        ranks = range(self.num_ranks)
        self.memory = [RankMemory(self.machine, setting, rank) for rank in ranks]
        self.board = self.machine.region("board", LINE_BYTES * self.num_ranks, -1)
        self.machine.poke(self.board, 0, bytes(LINE_BYTES * self.num_ranks))
        for rank in ranks:
            self.machine.label(self.board, rank * LINE_BYTES, LINE_BYTES, f"board[{rank}]")
        self.calls: list[Call] = []
        self.frozen: set[int] = set()
        self._constants = setting.shape.constants
        self._free = [list(self.memory[rank].slots) for rank in ranks]

    # ---------------------------------------------------------------------------- pool

    def take_slot(self, rank: int, pick: int) -> int:
        """A free block of a rank's pool; its bytes are what the last owner left."""
        free = self._free[rank]
        return free.pop(pick % len(free))

    def free_slot(self, rank: int, offset: int) -> None:
        """Give a block back, in stream order: later calls may get it."""
        if self.setting.quarantine:
            return
        memory = self.memory[rank]
        nbytes = memory.slot_bytes
        self.machine.mark(rank, len(self.calls), memory.device, offset, nbytes, Use.DEAD)
        self._free[rank].append(offset)

    # ---------------------------------------------------------------------------- calls

    def begin_call(self, name: str) -> Call:
        """Number the next operation."""
        call = Call(len(self.calls) + 1, name)
        self.calls.append(call)
        return call

    def launch(
        self,
        rank: int,
        call: Call,
        kernel: str,
        kind: Kind,
        grid: int,
        operation: Mapping[str, Any] | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        """Append a kernel with the product's own parameter struct."""
        memory, machine = self.memory[rank], self.machine
        refusal = refusal or Refusal(RefusalCode.NONE)
        comm = {
            "peer": [machine.address(rank, other.device) for other in self.memory],
            "report": machine.address(rank, memory.report),
            "board": machine.address(rank, self.board),
            "timeout_ns": self.setting.timeout_ns,
            "board_stride": self._board_stride(),
            "serial": call.serial,
            "rank": rank,
            "kind": int(kind),
            "refusal": int(refusal.code),
            "refusal_value": refusal.value,
        }
        spec = get_kernel(kernel)
        layout = spec.layout(self._constants)
        values: dict[str, Any] = {f"comm.{name}": value for name, value in comm.items()}
        values |= {f"d.{name}": value for name, value in (operation or {}).items()}
        for name, field_ in layout.fields.items():  # 0 means "not used" in every field
            values.setdefault(name, 0 if field_.count is None else [0] * field_.count)
        values = {name: value for name, value in values.items() if name in layout.fields}
        params = Packed(layout, values, kernel).tobytes()
        path = library(self.setting.shape, kernel, self.setting.edits.get(kernel))
        threads = spec.num_threads(self._constants)
        shared = spec.num_shared_bytes(self._constants)
        machine.launch(rank, call.serial, path, grid, threads, shared, params)

    def _board_stride(self) -> int:
        field_type = get_kernel("barrier").layout(self._constants).fields["comm.board"].ctype
        return LINE_BYTES // (8 if "u64" in field_type else 4)

    def array(self, rank: int, call: Call, data: np.ndarray[Any, Any], shift: int = 0) -> int:
        """Let another kernel write an input array of this rank; returns its offset."""
        local = self.memory[rank].local
        raw = np.ascontiguousarray(data).tobytes()
        begin = local.take(align(len(raw) + 16, 16))
        offset = begin + shift
        nbytes = align(len(raw) + 16, 16)
        self.machine.mark(rank, call.serial, local.region, begin, nbytes, Use.INPUT)
        if raw:
            self.machine.write(rank, call.serial, local.region, offset, self._padded(raw))
        return offset

    def output(self, rank: int, call: Call, nbytes: int, use: Use = Use.OUTPUT) -> int:
        """Bytes in this rank's own memory that its kernel will write; returns their offset."""
        local = self.memory[rank].local
        offset = local.take(align(nbytes, 16))
        owner = call.serial
        self.machine.mark(rank, owner, local.region, offset, align(nbytes, 16), use, owner)
        return offset

    def changed(self, rank: int, call: Call, data: np.ndarray[Any, Any]) -> int:
        """An array of this rank that a kernel reads and writes; returns its offset."""
        local = self.memory[rank].local
        nbytes = align(data.nbytes, 16)
        offset = local.take(nbytes)
        self.machine.mark(rank, call.serial, local.region, offset, nbytes, Use.SCRATCH, call.serial)
        self.machine.write(rank, call.serial, local.region, offset, data.tobytes())
        return offset

    def block(self, rank: int, call: Call, pick: int) -> int:
        """A block of the pool for this operation's results."""
        offset = self.take_slot(rank, pick)
        memory = self.memory[rank]
        nbytes, owner = memory.slot_bytes, call.serial
        self.machine.mark(rank, owner, memory.device, offset, nbytes, Use.OUTPUT, owner)
        return offset

    def _padded(self, raw: bytes) -> bytes:
        return raw if self.setting.byte_wise else raw + bytes(-len(raw) % 4)

    def read(
        self, rank: int, call: Call, region: int, offset: int, nbytes: int
    ) -> Callable[[], bytes]:
        """Let a later kernel read results."""
        unit = 1 if self.setting.byte_wise else 4
        result = self.machine.read(rank, call.serial, region, offset, align(nbytes, unit))

        def get() -> bytes:
            data = result()
            if data is None:
                raise AssertionError("the stream did not get so far")
            return data[:nbytes]

        return get

    # ------------------------------------------------------------------------- afterwards

    def report_words(self, rank: int) -> list[int]:
        """The report of a rank, 8-byte words."""
        memory = self.memory[rank]
        count = memory.report_layout.num_words
        return list(struct.unpack(f"<{count}Q", self.machine.peek(memory.report, 0, 8 * count)))

    def control_word(self, rank: int, offset: int) -> int:
        """A 4-byte word of the control block."""
        raw = self.machine.peek(self.memory[rank].device, offset, 4)
        return int(struct.unpack("<I", raw)[0])

    def verdicts(self) -> dict[tuple[int, int], str]:
        """(rank, serial) -> how the operation ended there, as the host would learn it."""
        found: dict[tuple[int, int], str] = {}
        for rank in range(self.num_ranks):
            failed = False
            records = self._records(rank)
            for call in self.calls:
                said = records.get(call.serial)
                if rank in self.frozen:
                    verdict = STOPPED
                elif failed:
                    verdict = POISONED
                else:
                    verdict = {None: OK, Verdict.REFUSED: REFUSED}.get(said, FAILED)
                    failed = verdict == FAILED
                found[rank, call.serial] = verdict
        return found

    def _records(self, rank: int) -> dict[int, int]:
        """Serial -> verdict, of the records that are still there."""
        words = self.report_words(rank)
        layout = self.memory[rank].report_layout
        number = words[layout.num_failures]
        found = {}
        for i in range(max(0, number - NUM_RECORDS), number):
            begin = layout.records + i % NUM_RECORDS * layout.record_words
            record = dict(zip(RECORD_WORDS, words[begin:], strict=False))
            found[record["serial"]] = record["verdict"]
        return found

    def explain(self, rank: int) -> str:
        """Which wait of a rank gave up first, and the last operations on the words it polled."""
        layout = self.memory[rank].report_layout
        words = self.report_words(rank)
        record = dict(zip(RECORD_WORDS, words[layout.records :], strict=False))
        phase, peer, expected = record["phase"], record["peer"], record["expected"]
        if words[layout.num_failures] == 0 or phase == 0:
            return "it gave up because it was told to"
        control, parity = self.memory[rank].control, record["epoch"] & 1
        slot = parity * self.num_ranks + peer
        places = {
            Phase.HEADER: control.headers + slot * control.header_bytes,
            Phase.PARTIAL: control.partials + (expected & 0xFFFF) * 8 * (self.num_ranks + 1),
            Phase.ARRIVAL: control.arrived + 8 * slot,
        }
        text = (
            f"epoch {record['epoch']}, block {record['block']} waited in phase "
            f"{_phase_name(phase)} for rank {peer}: expected {expected:#x}, "
            f"saw {record['seen']:#x}"
        )
        if phase in places:
            text += "\n" + self.machine.history(self.memory[rank].device, places[phase], 8, 10)
        return text

    def late_ranks(self, rank: int) -> set[int]:
        """Whom a rank's abort word blames."""
        abort = self.control_word(rank, self.memory[rank].control.abort)
        return {other for other in range(self.num_ranks) if abort >> ABORT_LATE_SHIFT >> other & 1}


def harmful(faults: Sequence[Fault], verdicts: Mapping[tuple[int, int], str]) -> list[Fault]:
    """The faults that spoil an operation which its rank was told is well."""

    return [
        fault
        for fault in faults
        if any(
            victim is None or verdicts.get(victim, OK) in (OK, REFUSED) for victim in fault.victims
        )
    ]
