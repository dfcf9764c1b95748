"""Tiny programs for the simulator itself: a few threads, a few words, all outcomes of many seeds.

A role is the code of one thread: ``(rank, block, code)``. Code may use, of type ``u64*`` unless
said, ``x y`` (data), ``f g h`` (flags), ``rows`` (``u8*``, 256 bytes), all in the memory of the
rank given by ``at`` (default 0), ``out`` (results), ``stage`` (``u8*``, 256 bytes of shared memory)
and ``loaded`` (two mbarriers).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from deepep_cupy.jit.spec import KernelSpec, Param
from simulator.build import build_kernel, entry_text, kernel_text
from simulator.machine import Fault, Loads, Machine

SPEC = KernelSpec(
    name="litmus",
    source="litmus/litmus.cuh",
    entry="litmus",
    params=(
        *(Param(name, "u64*") for name in ("x", "y", "f", "g", "h")),
        Param("rows", "u8*"),
        Param("out", "u64*"),
        Param("rank", "u32"),
    ),
    doc="a litmus test",
    threads=32,
)
NUM_OUT = 8
_WORDS = {"x": 0, "y": 64, "f": 128, "g": 192, "h": 256, "rows": 512}
_NBYTES = 1024


@dataclass
class Outcomes:
    """What many seeds gave.

    Attributes:
        seen: How often each tuple of ``out`` words was seen.
        faults: How often each kind of fault was found.
        example: One fault of each kind.
        num_faulty: Seeds with a fault.
    """

    seen: Counter[tuple[int, ...]] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    example: dict[str, Fault] = field(default_factory=dict)
    num_faulty: int = 0


def litmus_text(roles: Sequence[tuple[int, int, str]], threads: int = 32) -> str:
    """The kernel text of some roles; every thread of a block runs its role."""
    body = "".join(
        f"    if (p.rank == {rank} && block_index() == {block}) {{ {code} return; }}\n"
        for rank, block, code in roles
    )
    text = kernel_text(SPEC, {"kNumThreads": threads})
    return text + f"{{\n    LITMUS_NAMES\n{body}}}\n" + entry_text(SPEC)


def run_litmus(
    roles: Sequence[tuple[int, int, str]],
    *,
    seeds: int = 300,
    num_out: int = 2,
    at: dict[str, int] | None = None,
    loads: Loads = Loads.PTX,
    launches: int = 1,
    blocks_per_sm: int = 1,
    threads: int = 32,
) -> Outcomes:
    """Run a litmus test for many seeds; ``launches`` > 1 repeats the kernel in stream order."""
    library = build_kernel(litmus_text(roles, threads))
    num_ranks = 1 + max(rank for rank, _, _ in roles)
    grids = [1 + max((b for r, b, _ in roles if r == rank), default=0) for rank in range(num_ranks)]
    outcomes = Outcomes()
    for seed in range(seeds):
        machine = Machine(seed, num_ranks, max_blocks=max(grids), num_threads=threads)
        machine.option("loads", loads)
        machine.option("blocks_per_sm", blocks_per_sm)
        regions = [machine.region(f"memory{r}", _NBYTES, r) for r in range(num_ranks)]
        host = machine.region("out", 8 * NUM_OUT, -1)
        for region in regions:
            machine.poke(region, 0, bytes(_NBYTES))
        machine.poke(host, 0, bytes(8 * NUM_OUT))
        for name, offset in _WORDS.items():
            machine.label(regions[(at or {}).get(name, 0)], offset, 64, name)
        for rank in range(num_ranks):
            addresses = [
                machine.address(rank, regions[(at or {}).get(name, 0)], offset)
                for name, offset in _WORDS.items()
            ]
            params = struct.pack("7QI4x", *addresses, machine.address(rank, host), rank)
            for op in range(launches):
                machine.launch(rank, op + 1, library, grids[rank], threads, 512, params)
        faults = machine.run()
        outcomes.seen[struct.unpack(f"{num_out}Q", machine.peek(host, 0, 8 * num_out))] += 1
        for kind in {fault.kind for fault in faults}:
            outcomes.faults[kind] += 1
        outcomes.num_faulty += bool(faults)
        for fault in faults:
            outcomes.example.setdefault(fault.kind, fault)
    return outcomes
