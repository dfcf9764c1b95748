#!/usr/bin/env python3
"""Plant small changes in the package, one at a time, and see whether its tests notice.

    scripts/mutate.py [FILE ...] [--number 20] [--seed 1] [--limit 120]

A change deletes a statement of one line, turns a comparison round, moves a whole number by one,
or swaps True and False, ``and`` and ``or``; it is drawn from a seed, in a copy of the tree. Then
the tests of that folder run (``TESTS``) until the first that fails. A change that none notices is
printed: a test is missing, or the line is, or it is of no consequence. Exit code 1 when more than
one in twenty was missed. By hand or nightly; a change takes from seconds to a minute or two.
Memory orders and fences of kernel text have planted faults of their own: ``tests/sim/campaign.py``.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "deepep_cupy"
TESTS = {
    "api": "tests/cpu/test_buffer.py tests/cpu/test_*contracts.py tests/cpu/test_forms.py "
    "tests/cpu/test_meetings.py tests/mpi/test_contract.py tests/mpi/test_modes.py",
    "engines/host": "tests/cpu/test_meetings.py tests/mpi/test_contract.py tests/mpi/test_table.py "
    "tests/mpi/test_modes.py tests/mpi/test_failures.py",
    "engines/gpu": "tests/cpu/test_gpu_*.py tests/cpu/test_expand_plan.py tests/cpu/test_policy.py "
    "tests/cpu/test_topology.py tests/sim/test_engine_parts.py tests/sim/test_host.py "
    "tests/sim/test_local_kernels.py tests/sim/test_combine_expanded.py",
    "cuda": "tests/sim/test_failing.py tests/sim/test_kernels.py tests/sim/test_dispatch_shapes.py "
    "tests/sim/test_local_kernels.py tests/sim/test_combine_expanded.py tests/sim/test_syntax.py",
    "jit": "tests/cpu/test_kernels_cache.py tests/cpu/test_kernels_compile.py "
    "tests/cpu/test_kernels_source.py tests/cpu/test_kernels_spec.py "
    "tests/cpu/test_kernels_launch.py",
    "memory": "tests/cpu/test_pool*.py tests/cpu/test_region.py",
    "ranks": "tests/cpu/test_buffer.py tests/cpu/test_meetings.py tests/mpi/test_contract.py "
    "tests/mpi/test_failures.py",
    "protocol": "tests/cpu/test_headers.py tests/cpu/test_routing.py tests/mpi/test_contract.py",
    "reference": "tests/cpu/test_reference_*.py",
}
"""Folder of the package -> the tests that are to notice a change there."""
FOLDERS = ("engines/host", "engines/gpu", "cuda", "memory", "ranks")
"""Where files are drawn from when none are named."""

_SWAPS = (
    (r" < ", " <= "),
    (r" <= ", " < "),
    (r" > ", " >= "),
    (r" >= ", " > "),
    (r" == ", " != "),
    (r" != ", " == "),
    (r"\bTrue\b", "False"),
    (r"\bFalse\b", "True"),
    (r" and ", " or "),
    (r" or ", " and "),
    (r" && ", " || "),
    (r" \|\| ", " && "),
    (r" \+ 1\b", " + 2"),
    (r" - 1\b", " - 2"),
)
_STATEMENT = re.compile(r"^\s+(?!return|raise|import|from|def|class|else|u32|u64|bool|using|const)"
                        r"[\w.\[\]>*-]+(?:\(| =| [+|]=).*(?:\)|;|[\w\]])$")  # fmt: skip
_COMMENT = re.compile(r"^\s*(#|//|\"|\*|/\*)")


@dataclass(frozen=True)
class Mutation:
    """One line of a file, and what it becomes."""

    file: str
    number: int
    before: str
    after: str

    def __str__(self) -> str:
        became = self.after.strip() or "(removed)"
        return f"{self.file}:{self.number + 1}: {self.before.strip()}  ->  {became}"


def mutations_of(file: str, text: str) -> Iterator[Mutation]:
    """All changes of a text. Comments, docstrings and the lines of declarations are left out."""
    inside = False
    for number, line in enumerate(text.splitlines()):
        quotes = line.count('"""')
        if inside or quotes or _COMMENT.match(line):
            inside ^= quotes % 2 == 1
            continue
        code = re.split(r"\s+(?:#|//)", line)[0]
        if _STATEMENT.match(code) and code.count("(") == code.count(")"):
            indent = code[: len(code) - len(code.lstrip())]
            yield Mutation(file, number, line, indent + ("pass" if file.endswith(".py") else ""))
        for old, new in _SWAPS:
            for match in re.finditer(old, code):
                after = code[: match.start()] + new + code[match.end() :]
                yield Mutation(file, number, line, after)


def tests_of(file: str, tree: Path) -> list[str]:
    """The tests that are to notice a change of a file."""
    inside = file.removeprefix(f"{PACKAGE}/")
    folder = next((each for each in TESTS if inside.startswith(f"{each}/")), "api")
    return [
        str(path.relative_to(tree))
        for pattern in TESTS[folder].split()
        for path in sorted(tree.glob(pattern))
    ]


def fail(tests: list[str], tree: Path, limit: float) -> bool:
    """Whether a test fails, or they do not end in time."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        run = subprocess.run(
            [*command, *tests],
            cwd=tree, env=environment, capture_output=True, timeout=limit, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    return run.returncode != 0


def noticed(mutation: Mutation, tree: Path, limit: float) -> bool:
    """Whether the tests fail with a change."""
    path = tree / mutation.file
    whole = path.read_text()
    lines = whole.splitlines()
    lines[mutation.number] = mutation.after
    path.write_text("\n".join(lines) + "\n")
    try:
        return fail(tests_of(mutation.file, tree), tree, limit)
    finally:
        path.write_text(whole)


def main() -> int:
    """Draw, plant, run, count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("files", nargs="*", help="of the package; none: engines, kernels and below")
    parser.add_argument("--number", type=int, default=20, help="changes to plant")
    parser.add_argument("--seed", type=int, default=None, help="of the draw; none: a new one")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the tests of one")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    files = args.files or [
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in sorted((ROOT / PACKAGE / folder).rglob("*"))
        if path.suffix in (".py", ".cu", ".cuh")
    ]
    known = [each for file in files for each in mutations_of(file, (ROOT / file).read_text())]
    drawn = random.Random(seed).sample(known, min(args.number, len(known)))
    print(f"{len(drawn)} of {len(known)} changes, seed {seed}", flush=True)
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        tree = Path(folder) / "tree"
        skip = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*cache", ".whl")
        shutil.copytree(ROOT, tree, ignore=skip)
        for tests in {tuple(tests_of(each.file, tree)) for each in drawn}:
            if fail(list(tests), tree, args.limit):
                print(f"these fail without any change: {' '.join(tests)}")
                return 2
        for mutation in drawn:
            seen = noticed(mutation, tree, args.limit)
            missed += not seen
            print(f"{'noticed' if seen else 'MISSED '}  {mutation}", flush=True)
    print(f"{missed} of {len(drawn)} missed")
    return 1 if 20 * missed > len(drawn) else 0


if __name__ == "__main__":
    sys.exit(main())
