"""The hand-written modules of the policy on GPUs: copies, flush, litmus, and both kinds of loads.

mpirun -n 2 python tests/gpu/worker_litmus.py [--rounds 200]      (or one process, without mpirun)

Every way to copy moves every byte; the flush writes all of its scratch; dispatch and combine give
the same bytes with `nc` and `coherent` on both paths; and the litmus test counts what it must: no
load is stale where PTX forbids it, and on compute capability 9.0 loads that fill L1 are stale
without an acquire while `no_allocate` never is.
"""

from __future__ import annotations

from typing import Any

from common import Worker

from deepep_cupy.bench.flavors import CLASSES, FLAVORS, Copies, Whole
from deepep_cupy.engines.gpu.loads import ACCESSES, Reading, Verdict
from deepep_cupy.engines.gpu.ptx_modules import get_module, load_entry
from deepep_cupy.engines.gpu.topology import survey
from deepep_cupy.jit.launch import Launch
from deepep_cupy.litmus import command
from deepep_cupy.litmus.runner import BULK_LOADS, LOADS, Words
from deepep_cupy.ranks.mpi import MPIGroup

FILLS_L1 = ("ld.global", "ld.global.ca", "ld.global.nc", "ld.global.nc.L1::evict_last")
LAWFUL = ("reader", "handed over", "boundary")
"""Protocols in which the rules of PTX make all but `nc` loads fresh."""


def copies(worker: Worker, group: Any, arch: int, num_sms: int) -> int:
    """Every class and flavor, on few, some and all SMs; how many were compared."""
    done = 0
    with worker.buffer() as buffer:
        for chunks in (1, 77, 700):
            area = Copies(group, worker.device, 4096 * chunks, buffer.barrier)
            for kind in CLASSES:
                for flavor in FLAVORS:
                    if flavor.bulk and not 90 <= arch < 120:
                        continue
                    for sms in (1, 3, num_sms):
                        right = area.check(kind, flavor, sms)
                        assert right, f"{kind}, {flavor.name}, {sms} SMs, {chunks} chunks"
                        done += 1
            area.close()
    return done


def flush(worker: Worker, num_sms: int) -> None:
    """``ptx/l2_flush`` writes all words of the scratch, as a memset would leave them."""
    cupy: Any = worker.xp
    scratch = cupy.full((1 << 20) + 16, 7, cupy.uint8)
    loaded, entry = load_entry(get_module("l2_flush"), "l2_flush")
    values = {"scratch": scratch.data.ptr, "num_words": scratch.nbytes // 16, "value": 0}
    Launch(loaded, entry, {}, grid=8 * num_sms, values=values)(cupy.cuda.get_current_stream().ptr)
    worker.synchronize()
    assert int(scratch.max()) == 0


def same_results(worker: Worker, group: Any, arch: int) -> str:
    """`nc` and `coherent` on each path."""
    paths = ("ldst", "bulk") if arch >= 90 else ("ldst",)
    for path in paths:
        whole = Whole(
            worker.comm,
            path=path,
            num_sms=8,
            tokens=257,
            hidden=7168,
            allgather=group.allgather,
        )
        taken = {loads: buffer._engine.loads for loads, buffer in whole.buffers.items()}
        assert taken == {"coherent": "coherent", "nc": "nc"}, taken
        assert whole.same_results(), f"path {path}: nc and coherent give other bytes"
        whole.close()
    return "/".join(paths)


def judge(readings: list[Reading], arch: int) -> tuple[int, int]:
    """Words that were checked, and words that were stale where they may be."""
    for reading in readings:
        assert not reading.error, reading
        lawful = reading.protocol in LAWFUL and ".nc" not in reading.load
        if reading.load == BULK_LOADS[1]:  # without a proxy fence
            lawful = reading.protocol == "boundary"
        assert not (lawful and reading.bad), f"against the rules of PTX: {reading}"
        if arch == 90 and reading.protocol == "relaxed" and reading.load in LOADS:
            filling = reading.load in FILLS_L1
            assert filling or not reading.bad, reading
            if filling and reading.pointer == "local":
                assert reading.stale > reading.checks // 2, f"no teeth: {reading}"
    return sum(reading.checks for reading in readings), sum(reading.bad for reading in readings)


def main() -> None:
    """All of it."""

    def arguments(parser: Any) -> None:
        parser.add_argument("--rounds", type=int, default=200)

    worker = Worker("LITMUS", __doc__, arguments)
    if not worker.gpu:
        worker.say("LITMUS: skipped, it needs GPUs")
        return
    group = MPIGroup(worker.comm)
    topology = survey(group)
    gpu = topology.gpus[worker.rank]
    arch = 10 * gpu.capability[0] + gpu.capability[1]
    done = copies(worker, group, arch, gpu.num_sms)
    worker.say(f"{done} copies are right")
    flush(worker, gpu.num_sms)
    paths = same_results(worker, group, arch)
    worker.say(f"nc and coherent give the same bytes on {paths}")

    producers, note = command._producers(topology)
    printer = command._Printer(None, shown=worker.rank == 0)
    words = Words(num_words=1024, num_rounds=worker.options.rounds)
    readings = command._run_tests(group, topology, producers, words, printer)
    assert readings is not None, "too many tests gave no count"
    worker.say(note)
    worker.say(command._tables(readings))
    checks, stale = judge(readings, arch)
    peers = "peer" in producers
    verdict = Verdict(gpu.name, arch, "", "", "", 2 if peers else 1, tuple(readings))
    planted = verdict.judge("coherent", (*ACCESSES, command._PLANTED))
    if arch == 90:
        assert planted.status == "contradicted", "the planted fault was not seen"
    worker.done(
        f"{checks / 1e6:.0f} million checks, {stale / 1e6:.0f} million stale, {done} copies"
    )


if __name__ == "__main__":
    main()
