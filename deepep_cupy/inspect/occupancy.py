"""How many blocks of a kernel an SM holds at once, by arithmetic.

The limits are those of the table "Technical Specifications per Compute Capability" of NVIDIA's
CUDA C++ Programming Guide (section "Compute Capabilities"): resident threads and blocks an SM,
32-bit registers an SM, shared memory an SM. The units in which registers and shared memory are
given out are those of ``cuda_occupancy.h`` of the CUDA toolkit: registers 256 at a time to a warp,
from the quarter of the SM that runs it; shared memory 128 bytes at a time, and 1 KiB a block for
the system.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIMITS", "Occupancy", "SmLimits", "occupancy"]

_REGISTERS = 65_536
_QUARTERS = 4
_REGISTER_UNIT = 256
_SHARED_UNIT = 128
_SHARED_OF_SYSTEM = 1024
_WARP = 32


@dataclass(frozen=True)
class SmLimits:
    """What an SM of one compute capability holds at once.

    Attributes:
        threads: Resident threads.
        blocks: Resident blocks.
        shared_bytes: Shared memory of all resident blocks.
    """

    threads: int
    blocks: int
    shared_bytes: int


LIMITS = {
    80: SmLimits(2048, 32, 164 << 10),
    86: SmLimits(1536, 16, 100 << 10),
    87: SmLimits(1536, 16, 164 << 10),
    89: SmLimits(1536, 24, 100 << 10),
    90: SmLimits(2048, 32, 228 << 10),
    100: SmLimits(2048, 32, 228 << 10),
    103: SmLimits(2048, 32, 228 << 10),
    120: SmLimits(1536, 24, 100 << 10),
    121: SmLimits(1536, 24, 100 << 10),
}
"""Compute capability → limits. One that is not here is not guessed at."""


@dataclass(frozen=True)
class Occupancy:
    """Blocks an SM holds.

    Attributes:
        blocks: The least of what follows.
        by: Limit → the blocks it allows: threads, blocks, registers, shared memory.
    """

    blocks: int
    by: dict[str, int]

    @property
    def limited_by(self) -> str:
        """The limits that are reached first."""
        return " and ".join(name for name, blocks in self.by.items() if blocks == self.blocks)


def occupancy(arch: int, *, threads: int, registers: int, shared_bytes: int) -> Occupancy | None:
    """Return how many blocks an SM holds; None for an architecture that the table does not have.

    Args:
        arch: Compute capability as one number, 90 for sm_90.
        threads: Of a block.
        registers: Of a thread.
        shared_bytes: Of a block, static and dynamic.
    """
    limits = LIMITS.get(arch)
    if limits is None or threads < 1 or registers < 0:
        return None
    warps = -(-threads // _WARP)
    warp_registers = _round_up(max(registers, 1) * _WARP, _REGISTER_UNIT)
    resident_warps = _REGISTERS // _QUARTERS // warp_registers * _QUARTERS
    shared = _round_up(shared_bytes + _SHARED_OF_SYSTEM, _SHARED_UNIT)
    by = {
        "threads": limits.threads // (warps * _WARP),
        "blocks": limits.blocks,
        "registers": resident_warps // warps,
        "shared memory": limits.shared_bytes // shared,
    }
    return Occupancy(min(by.values()), by)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
