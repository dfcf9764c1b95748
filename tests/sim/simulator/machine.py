"""The engine as a Python object: regions, commands of each rank's stream, one run, its faults."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from simulator.build import build_engine


class Use(IntEnum):
    """What kernels may do with bytes."""

    DEAD = 0
    CONTROL = 1
    INPUT = 2
    OUTPUT = 3
    SCRATCH = 4


class Loads(IntEnum):
    """How loads may go wrong: by the PTX model, or (for litmus tests) by L1 alone."""

    PTX = 0
    STRICT = 1
    HOPPER = 2


@dataclass(frozen=True)
class Fault:
    """Something a run must not do.

    Attributes:
        kind: A few words, equal for equal faults.
        text: What happened, with the last operations on the bytes.
        victims: (rank, op) whose success it spoils; ``None``: whatever happened.
    """

    kind: str
    text: str
    victims: tuple[tuple[int, int] | None, ...]


_u32, _u64, _int, _p, _text = (
    ctypes.c_uint32,
    ctypes.c_uint64,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
)
_SIGNATURES: dict[str, tuple[object, Sequence[object]]] = {
    "sim_new": (None, (_u64, _u32, _u32, _u32, _u32)),
    "sim_set_option": (None, (_text, ctypes.c_double)),
    "sim_add_region": (_u32, (_text, _u64, _int)),
    "sim_address": (_u64, (_u32, _u32, _u64)),
    "sim_label": (None, (_u32, _u64, _u64, _text)),
    "sim_share_gpu": (None, (_u32, _u32)),
    "sim_poke": (None, (_u32, _u64, _u64, _text, _int)),
    "sim_bytes": (_p, (_u32,)),
    "sim_peek": (None, (_u32, _u64, _u64, _p)),
    "sim_load_kernel": (_p, (_text,)),
    "sim_launch": (None, (_u32, _u32, _p, _u32, _u32, _u32, _text, _u64)),
    "sim_access": (_u32, (_u32, _u32, _u32, _u64, _u64, _text, _u64)),
    "sim_mark": (None, (_u32, _u32, _u32, _u64, _u64, _int, _u32)),
    "sim_event": (None, (_int, _u64, _u32, _u32, _u64, _u32, _u64)),
    "sim_run": (_u32, ()),
    "sim_steps": (_u64, ()),
    "sim_now": (_u64, ()),
    "sim_fault_kind": (_text, (_u32,)),
    "sim_fault_text": (_text, (_u32,)),
    "sim_fault_victim": (_int, (_u32, _u32)),
    "sim_read_result": (_u64, (_u32, _u32, _p)),
    "sim_history": (_text, (_u32, _u64, _u64, _u32)),
    "sim_last_of": (_text, (_u32, _u32)),
    "sim_profile": (_text, ()),
    "sim_error": (_text, ()),
}


@functools.cache
def _engine() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_engine()), mode=ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = list(arguments)
    return library


@functools.cache
def _load(path: Path) -> int:
    entry = _engine().sim_load_kernel(str(path).encode())
    if not entry:
        raise RuntimeError(_engine().sim_error().decode())
    return int(entry)


class Machine:
    """One run. Only the newest Machine is alive: the engine has one state.

    Args:
        seed: All the run decides follows from it.
        num_ranks: GPUs, each with its own memory and one stream.
        byte_wise: Track single bytes instead of 4-byte words; for odd row sizes.
        max_blocks: The largest grid.
        num_threads: The largest block.
    """

    def __init__(
        self,
        seed: int,
        num_ranks: int,
        *,
        byte_wise: bool = False,
        max_blocks: int = 8,
        num_threads: int = 64,
    ) -> None:
        self._do = _engine()
        self.num_ranks = num_ranks
        self._do.sim_new(seed, num_ranks, 0 if byte_wise else 2, max_blocks, num_threads)

    def option(self, name: str, value: float) -> None:
        """Set one part of what the seed would choose."""
        self._do.sim_set_option(name.encode(), float(value))

    def region(self, name: str, nbytes: int, owner: int) -> int:
        """Memory of a rank; owner -1: of the host."""
        return int(self._do.sim_add_region(name.encode(), nbytes, owner))

    def address(self, observer: int, region: int, offset: int = 0) -> int:
        """Where ``observer`` sees a byte: no real address, so that nothing can be touched in
        passing; only the wrappers know what to do with it."""
        return int(self._do.sim_address(observer, region, offset))

    def share_gpu(self, rank: int, gpu: int) -> None:
        """Let ``rank`` be another stream of rank ``gpu``'s GPU; addresses are that rank's."""
        self._do.sim_share_gpu(rank, gpu)

    def label(self, region: int, offset: int, nbytes: int, name: str) -> None:
        """Name bytes for reports."""
        self._do.sim_label(region, offset, nbytes, name.encode())

    def poke(self, region: int, offset: int, data: bytes, use: Use = Use.CONTROL) -> None:
        """Set bytes before the run."""
        self._do.sim_poke(region, offset, len(data), bytes(data), int(use))

    def peek(self, region: int, offset: int, nbytes: int) -> bytes:
        """Bytes after the run."""
        buffer = ctypes.create_string_buffer(nbytes)
        self._do.sim_peek(region, offset, nbytes, buffer)
        return buffer.raw

    def view(self, region: int, offset: int, nbytes: int) -> np.ndarray[Any, Any]:
        """The bytes themselves; they are gone with the next Machine."""
        place = self._do.sim_bytes(region) + offset
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(place))

    def launch(
        self, rank: int, op: int, library: Path, grid: int, threads: int, shared: int, params: bytes
    ) -> None:
        """Append a kernel to a rank's stream."""
        entry = _load(library)
        self._do.sim_launch(rank, op, entry, grid, threads, shared, params, len(params))

    def write(
        self,
        rank: int,
        op: int,
        region: int,
        offset: int,
        data: bytes,
        *,
        unless: tuple[int, int] | None = None,
    ) -> None:
        """Append another kernel that writes bytes, unless a word (region, offset) is not 0 then."""
        word = (1 << 64) - 1 if unless is None else unless[0] << 32 | unless[1]
        self._do.sim_access(rank, op, region, offset, len(data), bytes(data), word)

    def read(
        self, rank: int, op: int, region: int, offset: int, nbytes: int
    ) -> Callable[[], bytes | None]:
        """Append another kernel that reads bytes; call the result after the run."""
        index = int(self._do.sim_access(rank, op, region, offset, nbytes, None, 0))

        def result() -> bytes | None:
            buffer = ctypes.create_string_buffer(nbytes)
            got = self._do.sim_read_result(rank, index, buffer)
            return buffer.raw if got == nbytes else None

        return result

    def mark(
        self, rank: int, op: int, region: int, offset: int, nbytes: int, use: Use, owner_op: int = 0
    ) -> None:
        """Append a change of what bytes are for (the pool's work)."""
        self._do.sim_mark(rank, op, region, offset, nbytes, int(use), owner_op)

    def freeze(self, rank: int, step: int) -> None:
        """Stop a rank for ever."""
        self._do.sim_event(0, step, rank, 0, 0, 0, 0)

    def skew(self, rank: int, block: int, step: int, nanoseconds: int) -> None:
        """Let the clock of one block jump, so that its waits alone expire."""
        self._do.sim_event(1, step, rank, block, nanoseconds, 0, 0)

    def host_store(self, rank: int, step: int, region: int, offset: int, value: int) -> None:
        """Let a host thread store a 4-byte word at some step."""
        self._do.sim_event(2, step, rank, 0, value, region, offset)

    def run(self) -> list[Fault]:
        """Run all streams to their end; more may be appended, and run, afterwards."""
        count = self._do.sim_run()
        return [self._fault(i) for i in range(count)]

    def _fault(self, i: int) -> Fault:
        victims: list[tuple[int, int] | None] = []
        for j in range(1000):
            code = self._do.sim_fault_victim(i, j)
            if code == -2:
                break
            victims.append(None if code == -1 else (code >> 16, code & 0xFFFF))
        kind = self._do.sim_fault_kind(i).decode()
        return Fault(kind, self._do.sim_fault_text(i).decode(), tuple(victims))

    @property
    def steps(self) -> int:
        """Wrapper calls so far."""
        return int(self._do.sim_steps())

    @property
    def now(self) -> int:
        """Virtual nanoseconds."""
        return int(self._do.sim_now())

    @property
    def profile(self) -> str:
        """What the seed chose."""
        return self._do.sim_profile().decode()

    def history(self, region: int, offset: int, nbytes: int, most: int = 12) -> str:
        """The last operations on bytes."""
        return self._do.sim_history(region, offset, nbytes, most).decode()

    def last_of(self, rank: int, most: int) -> str:
        """The last things a rank did, but for loads and barriers."""
        return self._do.sim_last_of(rank, most).decode()


def with_lines(text: str) -> str:
    """Replace ``<library+0x123>`` in a report by functions and lines (addr2line)."""

    def lines(match: re.Match[str]) -> str:
        command = ["addr2line", "-ifCse", match[1], match[2]]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return match[0]
        rows = done.stdout.splitlines()
        named = [f"{name} {where}" for name, where in zip(rows[::2], rows[1::2], strict=False)]
        kept = [row for row in named if ".cu" in row]
        return "\n            " + "\n            ".join(kept) if kept else ""

    return re.sub(r"<([^<>+]+)\+(0x[0-9a-f]+)>", lines, text)
