"""``litmus``: which loads see what was just written on this GPU, and whether the policy holds.

One process tests what one GPU allows; under ``mpirun -n 2`` rank 0 reads what rank 1, on another
GPU, writes. The verdict is kept in the cache folder, where ``DEEPEP_CUPY_LOADS=auto`` looks.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepep_cupy import env
from deepep_cupy._version import __version__
from deepep_cupy.cli.progress import Progress
from deepep_cupy.cli.ranks import mpi
from deepep_cupy.cli.table import columns
from deepep_cupy.engines.gpu import loads as policy
from deepep_cupy.engines.gpu.loads import ACCESSES, PROTOCOLS, Access, Reading, Verdict
from deepep_cupy.engines.gpu.topology import Topology, survey
from deepep_cupy.errors import ContractError, PlatformError
from deepep_cupy.litmus.runner import (
    MAX_ROUND,
    MAX_WORDS,
    CupyMachine,
    Litmus,
    RankMemory,
    Words,
    every_test,
    region_bytes,
)
from deepep_cupy.memory.cuda_ipc import open_region

__all__ = ["add_arguments", "run"]

_QUICK_ROUNDS = 100
_MOST_ERRORS = 3
_PLANTED = Access(
    "planted read behind a flag that nobody acquires",
    "",
    16,
    "relaxed",
    "ld.global.nc",
    "ld.global.nc",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``litmus``."""
    parser.add_argument("--rounds", type=int, default=1000, help="a test (default: 1000)")
    parser.add_argument(
        "--words", type=int, default=1024, help="of 16 bytes, rewritten in each (default: 1024)"
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{_QUICK_ROUNDS} rounds: too few for a verdict"
    )
    parser.add_argument(
        "--plant",
        action="store_true",
        help="count plain ld.global.nc without an acquire as part of the policy: must fail",
    )
    parser.add_argument(
        "--limit", type=float, default=5.0, metavar="S", help="seconds a launch may last"
    )
    parser.add_argument("--no-save", action="store_true", help="leave the cache folder alone")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write everything to FILE; without FILE to standard output, in place of tables",
    )


def run(args: argparse.Namespace) -> int:
    """Run all tests; 1 when the loads in force are contradicted. Collective."""
    words = _words(args)
    group = _group()
    topology = survey(group)
    if topology.verdict():
        raise PlatformError(f"litmus: no usable GPU: {topology.verdict()}.")
    producers, note = _producers(topology)
    printer = _Printer(args.json, shown=group.rank == 0)
    printer.say(f"{topology.summary()}; {note}")
    chosen = _in_force(topology, producers)
    readings = _run_tests(group, topology, producers, words, printer)
    if readings is None:
        return 1
    gpu = topology.gpus[0]
    verdict = Verdict(
        gpu=gpu.name,
        arch=10 * gpu.capability[0] + gpu.capability[1],
        driver=_driver(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        package=__version__,
        num_gpus=2 if "peer" in producers else 1,
        readings=tuple(readings),
    )
    saved = None
    if group.rank == 0 and not (args.no_save or args.plant or args.quick):
        saved = verdict.save()
    return printer.report(verdict, chosen, planted=args.plant, saved=saved)


def _words(args: argparse.Namespace) -> Words:
    rounds = _QUICK_ROUNDS if args.quick else args.rounds
    for name, value, most in (("rounds", rounds, MAX_ROUND - 1), ("words", args.words, MAX_WORDS)):
        if not 1 <= value <= most:
            raise ContractError(f"litmus: argument --{name} must be in 1..{most}, got {value}.")
    if not 0 < args.limit <= 60:
        raise ContractError(
            f"litmus: argument --limit must be more than 0 and at most 60 seconds, "
            f"got {args.limit}."
        )
    if args.json not in (None, "-"):
        path = Path(args.json)
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ContractError(
                f"litmus: argument --json must name a file in a folder that exists, got {path}."
            )
    return Words(args.words, rounds, args.limit)


# --------------------------------------------------------------------------------- this machine


class _Alone:
    """A group of one rank, for a process that ``mpirun`` did not start: it needs no MPI."""

    rank, size, host = 0, 1, "this node"

    def allgather(self, value: Any) -> list[Any]:
        return [value]


def _group() -> Any:
    if env.launcher_size() == 1:
        return _Alone()
    ranks = mpi("litmus")
    return ranks.MPIGroup(ranks.world())


def _driver() -> str:
    cupy = importlib.import_module("cupy")
    return policy.driver_name(int(cupy.cuda.runtime.driverGetVersion()))


def _producers(topology: Topology) -> tuple[tuple[str, ...], str]:
    """Which writers can be tested on these ranks, and a line about it."""
    ranks = len(topology.gpus)
    if ranks == 1:
        return ("kernel", "block"), "no other GPU is tested (mpirun -n 2 brings one in)"
    if topology.gpus[0].uuid == topology.gpus[1].uuid:
        return ("kernel", "block"), "ranks 0 and 1 are on one GPU: no other GPU is tested"
    rest = f", ranks from 2 to {ranks - 1} only listen" if ranks > 2 else ""
    return ("peer", "kernel", "block"), f"rank 0 reads, rank 1 writes{rest}"


def _in_force(topology: Topology, producers: Sequence[str]) -> policy.Choice:
    """The loads that a Buffer of these ranks would use before this test has run."""
    gpu = topology.gpus[0]
    return policy.resolve(
        env.loads(),
        10 * gpu.capability[0] + gpu.capability[1],
        gpu=gpu.name,
        driver=_driver(),
        across_gpus="peer" in producers,
    )


def _run_tests(
    group: Any, topology: Topology, producers: Sequence[str], words: Words, printer: _Printer
) -> list[Reading] | None:
    """All readings; ``None`` when too many tests gave none."""
    cupy = importlib.import_module("cupy")
    gpu = topology.gpus[group.rank]
    readings: list[Reading] = []
    with cupy.cuda.Device(gpu.device):
        region = open_region(group, gpu.device, region_bytes(words))
        peer = region.peer_base[1 - group.rank] if group.size > 1 and group.rank < 2 else 0
        memory = RankMemory(group.rank, region.base, peer, group.allgather)
        one = Litmus(CupyMachine(gpu.num_sms), memory, words)
        todo = list(every_test(producers, bulk=topology.gpus[0].capability >= (9, 0)))
        bar = Progress(len(todo), shown=group.rank == 0)
        for number, test in enumerate(todo):
            bar.update(number, f"{test.producer}, {test.protocol}, {test.load}")
            reading = one.run(test)
            readings.append(reading)
            if reading.error:
                bar.clear()
                printer.complain(str(reading))
            if sum(bool(each.error) for each in readings) >= _MOST_ERRORS:
                printer.complain("too many tests gave no count: there is no verdict")
                return None
        bar.clear()
        region.close(lambda: group.allgather(None))
    return readings


# -------------------------------------------------------------------------------------- printing


class _Printer:
    """Tables for people, or JSON; on rank 0."""

    def __init__(self, json_to: str | None, *, shown: bool) -> None:
        self._json_to = json_to
        self._shown = shown
        self._text = shown and json_to != "-"

    def say(self, line: str) -> None:
        """Print a line, unless JSON goes to the same place."""
        if self._text:
            print(line, flush=True)

    def complain(self, line: str) -> None:
        """Print a line on standard error."""
        if self._shown:
            print(line, file=sys.stderr, flush=True)

    def report(
        self, verdict: Verdict, chosen: policy.Choice, *, planted: bool, saved: Path | None
    ) -> int:
        """Print everything; the exit code."""
        accesses = (*ACCESSES, _PLANTED) if planted else ACCESSES
        judged = {loads: verdict.judge(loads, accesses) for loads in ("nc", "coherent")}
        self.say(_tables(verdict.readings))
        for loads, each in judged.items():
            self.say(f"{loads}: {each.status}, {each.checks:,} words checked")
            for reason in each.because[:8]:
                self.say(f"  {reason}")
            if len(each.because) > 8:
                self.say(f"  and {len(each.because) - 8} more")
        self.say(f"in force: {chosen.loads} ({chosen.reason})")
        if saved is not None:
            self.say(f"kept in {saved}")
        in_force = judged[chosen.loads]
        self._write_json(verdict, chosen, judged, planted=planted)
        if in_force.status == "contradicted":
            self.complain(
                f"CONTRADICTED: {chosen.loads} is in force, and {in_force.because[0]}"
                + ("; this is the planted fault" * planted)
            )
            return 1
        if planted:
            self.complain("the planted fault was not seen: this test shows nothing on this GPU")
        return 0

    def _write_json(
        self,
        verdict: Verdict,
        chosen: policy.Choice,
        judged: dict[str, policy.Judgement],
        *,
        planted: bool,
    ) -> None:
        if not self._shown or self._json_to is None:
            return
        everything = {
            **verdict.as_json(),
            "judgements": {loads: vars(each) for loads, each in judged.items()},
            "in_force": vars(chosen),
            "planted": planted,
        }
        text = json.dumps(everything, indent=1)
        if self._json_to == "-":
            print(text)
        else:
            Path(self._json_to).write_text(text + "\n", encoding="utf-8")


def _tables(readings: Sequence[Reading]) -> str:
    """One table for each writer and pointer: what part of the words was not fresh."""
    parts = ["part of the words that was stale or torn, by how the reader learnt of them:"]
    parts += [f"  {name}: {meaning}" for name, meaning in PROTOCOLS.items()]
    for producer, pointer in dict.fromkeys((r.producer, r.pointer) for r in readings):
        title = {"peer": "another GPU", "kernel": "another kernel", "block": "another block"}
        parts.append(f"\n{title[producer]} writes, the reader's pointer is {pointer}")
        chosen = [r for r in readings if (r.producer, r.pointer) == (producer, pointer)]
        protocols = [name for name in PROTOCOLS if name in {r.protocol for r in chosen}]
        rows: list[tuple[str, ...]] = []
        for load in dict.fromkeys(r.load for r in chosen):
            rows += _rows([r for r in chosen if r.load == load], protocols)
        parts.append(columns(("load", "bytes", *protocols), rows))
    return "\n".join(parts) + "\n"


def _rows(readings: Sequence[Reading], protocols: Sequence[str]) -> list[tuple[str, ...]]:
    """One row for a load, or one a width where they differ."""
    by_width: dict[str, tuple[str, ...]] = {}
    for nbytes in dict.fromkeys(r.nbytes for r in readings):
        cells = {r.protocol: _cell(r) for r in readings if r.nbytes == nbytes}
        by_width[str(nbytes)] = tuple(cells.get(name, "-") for name in protocols)
    load = readings[0].load
    if len(set(by_width.values())) == 1:
        cells_of_all = next(iter(by_width.values()))
        return [(load, " ".join(by_width), *cells_of_all)]
    return [(load, nbytes, *row) for nbytes, row in by_width.items()]


def _cell(reading: Reading) -> str:
    if reading.error:
        return "no count"
    if not reading.bad:
        return "0"
    part = 100.0 * reading.bad / max(1, reading.checks)
    kinds = [kind for kind in ("torn", "wrong") if getattr(reading, kind)]
    return " ".join([f"{part:.1f} %" if part >= 0.05 else "< 0.1 %", *kinds])
