"""Many seeds at once, one seed again, or the table of planted faults.

python tests/sim/campaign.py run --fixed 300 --fresh 100    # exit code 1 on any fault
python tests/sim/campaign.py replay 4711 [--last 20]         # one seed, with its whole story
python tests/sim/campaign.py faults [--write]                # every planted fault; README table
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

from simulator import faults  # noqa: E402
from simulator.scenario import (  # noqa: E402
    SHAPES,
    Focus,
    Story,
    Verdict,
    last_operations,
    run_story,
)
from simulator.shapes import build_all  # noqa: E402

HERE = "tests/sim/campaign.py"
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


def describe(seed: int, verdict: Verdict, focus: str = "", fault: str = "") -> str:
    """A failed seed in full."""
    again = f"python {HERE} replay {seed}"
    again += f" --fault '{fault}'" if fault else f" --focus '{focus}'" if focus else ""
    lines = [f"seed {seed}: {len(verdict.problems)} problems; to see it again: {again}"]
    lines += [verdict.tale, *verdict.problems]
    return "\n".join(lines)


def run_seed(seed: int) -> tuple[int, int, str]:
    """Seed, steps, and what was wrong."""
    verdict = run_story(seed)
    return seed, verdict.steps, describe(seed, verdict) if verdict.problems else ""


def chunks(seeds: list[int], size: int) -> Iterator[list[int]]:
    """Pieces of a list."""
    for begin in range(0, len(seeds), size):
        yield seeds[begin : begin + size]


def run_many(seeds: list[int], jobs: int) -> int:
    """Run seeds in ``jobs`` processes; returns how many failed."""
    begin, steps, failed = time.monotonic(), 0, 0
    for chunk in chunks(seeds, 100):
        with ProcessPoolExecutor(jobs) as workers:
            try:
                for _, taken, complaint in workers.map(run_seed, chunk, chunksize=5):
                    steps += taken
                    failed += bool(complaint)
                    if complaint and failed <= 5:
                        print(complaint, "\n", flush=True)
            except BrokenProcessPool:
                failed += 1
                print(f"a process died in seeds {chunk}; replay them one by one", flush=True)
    seconds = time.monotonic() - begin
    print(f"{len(seeds)} seeds, {steps:,} steps, {seconds:.0f} s; {failed} failed", flush=True)
    return failed


def command_run(args: argparse.Namespace) -> int:
    """The fixed seeds, the fresh ones, and each planted fault at the seed of its table."""
    build_all(list(SHAPES))
    start = secrets.randbelow(1 << 40) if args.start is None else args.start
    print(f"fixed seeds 0..{args.fixed - 1}; fresh seeds {start}..{start + args.fresh - 1}")
    seeds = [*range(args.fixed), *range(start, start + args.fresh)]
    failed = run_many(seeds, args.jobs)
    if args.faults:
        failed += command_faults(argparse.Namespace(write=False, jobs=args.jobs))
    return 1 if failed else 0


def find_fault(name: str) -> tuple[int | None, str]:
    """First seed that finds a planted fault (or None), and the first line of what it said."""
    planted = next(p for p in faults.PLANTED if p.name == name)
    said = ""

    def found(seed: int, focus: Focus) -> bool:
        nonlocal said
        problems = run_story(seed, focus).problems
        said = problems[0].splitlines()[0] if problems else ""
        return bool(problems)

    return faults.seeds_needed(planted, found), said


def command_faults(args: argparse.Namespace) -> int:
    """Find every planted fault; optionally write the table into the README."""
    names = [planted.name for planted in faults.PLANTED]
    rows, missed = [], 0
    with ProcessPoolExecutor(args.jobs) as workers:
        for planted, (seed, said) in zip(
            faults.PLANTED, workers.map(find_fault, names), strict=True
        ):
            missed += seed is None
            needed = "not found" if seed is None else str(seed + 1)
            print(f"{needed:>9}  {planted.name}: {said}", flush=True)
            found_as = re.sub(r"[:,(].*", "", re.sub(r"\d+ on rank \d+ ", "", said)).strip()
            rows.append(f"| {planted.name} | {planted.story} | {needed} | {found_as} |")
    print(f"{len(names) - missed} of {len(names)} planted faults found")
    if args.write:
        table = "| fault | story | seeds needed | first reported as |\n|---|---|---|---|\n"
        text = README.read_text()
        head, rest = text.split(BEGIN)
        body = f"{BEGIN}\n{table}" + "\n".join(rows) + f"\n{END}"
        README.write_text(head + body + rest.split(END)[1])
    return missed


def command_replay(args: argparse.Namespace) -> int:
    """One seed, told in full."""
    focus = Focus.from_json(args.focus) if args.focus else Focus()
    if args.fault:
        focus = faults.focus_of(next(p for p in faults.PLANTED if p.name == args.fault))
    story = Story(args.seed, focus)
    if args.stop:
        story.world.machine.option("stop_at", args.stop)
    verdict = story.run()
    if args.stop:
        print(f"stopped at step {story.world.machine.steps}")
    else:
        print(describe(args.seed, verdict, args.focus, args.fault))
    if args.last:
        print(f"\nthe last {args.last} operations of each rank, loads and barriers left out")
        print(last_operations(story, args.last))
    return 1 if verdict.problems else 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="many seeds")
    run.add_argument("--fixed", type=int, default=300)
    run.add_argument("--fresh", type=int, default=100)
    run.add_argument("--start", type=int, help="first of the fresh seeds; default: random")
    run.add_argument("--faults", action="store_true", help="the planted faults too")
    run.set_defaults(command=command_run)
    replay = commands.add_parser("replay", help="one seed")
    replay.add_argument("seed", type=int)
    replay.add_argument("--focus", default="", help="as a failing test printed it")
    replay.add_argument("--last", type=int, default=0, help="show so many last operations too")
    replay.add_argument("--stop", type=int, default=0, help="end the run at this step")
    replay.add_argument("--fault", default="", help="name of a planted fault")
    replay.set_defaults(command=command_replay)
    table = commands.add_parser("faults", help="the planted faults")
    table.add_argument("--write", action="store_true", help="write the README's table")
    table.set_defaults(command=command_faults)
    for one in (run, table):
        one.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    args = parser.parse_args()
    return int(args.command(args))


if __name__ == "__main__":
    sys.exit(main())
