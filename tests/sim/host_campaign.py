"""Seeds of the simulator's host half.

python tests/sim/host_campaign.py run [--fixed N] [--fresh N]   # seeds 0 to N - 1, and N new ones
python tests/sim/host_campaign.py replay SEED [--fault NAME] [--last N]
python tests/sim/host_campaign.py faults [NAME ...] [--seeds N]  # the first seed that finds each
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from host import stories  # noqa: E402
from host.faults import FAULTS, options_of, planted  # noqa: E402

MOST_SEEDS = 300


def try_seed(seed, fault=None):
    """What a seed finds: a line, or None."""
    story = stories.Story(seed, **options_of(fault))
    with planted(fault) if fault else contextlib.nullcontext():
        try:
            stories.tell(story)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return None


def _try(job):
    return job, try_seed(*job)


def first_seed(fault, most=MOST_SEEDS):
    """(seed, what it finds) of a planted fault; None: not within so many seeds."""
    for seed in range(most):
        found = try_seed(seed, fault)
        if found:
            return seed, found
    return None


def _first(job):
    return job[0], first_seed(*job)


def run(fixed, fresh):
    seeds = [*range(fixed), *(1_000_000 + secrets.randbelow(1 << 40) for _ in range(fresh))]
    begin, bad = time.monotonic(), 0
    with ProcessPoolExecutor(2) as workers:
        for (seed, _), found in workers.map(_try, [(seed, None) for seed in seeds], chunksize=5):
            if found:
                bad += 1
                print(f"seed {seed}: {found}")
                print(f"    python tests/sim/host_campaign.py replay {seed}")
    print(f"{len(seeds)} seeds in {time.monotonic() - begin:.0f} s, {bad} found something")
    return bad


def replay(seed, fault, last):
    story = stories.Story(seed, **options_of(fault))
    for number, section in enumerate(story.sections):
        calls = ", ".join(f"{call.kind} {call.number}" for call in section.calls)
        who = f" (rank {section.culprit})" if section.end not in ("fine", "graph") else ""
        print(f"{number}: {section.end}{who}: {calls}")
    kept = []
    with planted(fault) if fault else contextlib.nullcontext():
        try:
            stories.tell(story, kept.append)
        except BaseException as error:  # noqa: BLE001 - shown
            print("\n".join(kept[0].baton.last[-last:]))
            traceback.print_exception(error)
            return 1
    print("nothing was found")
    return 0


def table(names, most):
    missed = 0
    with ProcessPoolExecutor(2) as workers:
        jobs = [workers.submit(_first, (name, most)) for name in names]
        for done in as_completed(jobs):
            name, found = done.result()
            missed += found is None
            print(
                f"| {name} | {'-' if found is None else found[0]} | {found and found[1][:110]} |",
                flush=True,
            )
    return missed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("--fixed", type=int, default=200)
    one.add_argument("--fresh", type=int, default=50)
    two = commands.add_parser("replay")
    two.add_argument("seed", type=int)
    two.add_argument("--fault", choices=list(FAULTS))
    two.add_argument("--last", type=int, default=40)
    three = commands.add_parser("faults")
    three.add_argument("names", nargs="*")
    three.add_argument("--seeds", type=int, default=MOST_SEEDS)
    given = parser.parse_args()
    if given.command == "run":
        return bool(run(given.fixed, given.fresh))
    if given.command == "replay":
        return replay(given.seed, given.fault, given.last)
    return bool(table(given.names or list(FAULTS), given.seeds))


if __name__ == "__main__":
    sys.exit(main())
