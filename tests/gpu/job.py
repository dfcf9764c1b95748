"""One command of ``.ci/gpu``: what it is, and how it is judged. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

Environment = tuple[tuple[str, str], ...]
WORKERS = "tests/gpu"


@dataclass(frozen=True)
class Plan:
    """For which machine, and how thoroughly.

    Attributes:
        gpus: How many there are.
        quick: Smaller counts and fewer cases.
        turns: Ranks that share a GPU take turns: every wait takes milliseconds.
    """

    gpus: int
    quick: bool = False
    turns: bool = False

    def all_ranks(self, *wanted: int) -> tuple[int, ...]:
        """These numbers of ranks, and as many as there are GPUs; each once."""
        return tuple(sorted({*wanted, min(self.gpus, 8)}))


@dataclass(frozen=True)
class Job:
    """One command.

    Attributes:
        name: Part, and what tells it from the others of its part.
        ranks: How many.
        argv: Behind ``python``.
        limit_s: Seconds it may take.
        gpus: Visible GPUs; 0: all.
        env: Variables to set.
        ok: A pattern that the last good line has.
        also: Patterns that the output must have too.
        never: A pattern that it must not have.
        fails: It must end with another exit code than 0.
        skips: A pattern whose line says why it could not be run.
        wrap: Put before ``python``.
        plain: Without ``mpirun``.
        seconds: About how many it takes on two H200: for plans, and to begin with the longest.
        beside: Jobs with the same word here may run at the same time; empty: it runs alone.
        sms: ``--num-sms`` of its Buffers when it runs beside others; 0: it takes no such option.
        blocks: The most blocks that a rank then has on its GPU that wait for other ranks.
        gib: GPU memory a rank then takes.
    """

    name: str
    ranks: int
    argv: tuple[str, ...]
    limit_s: float
    gpus: int = 0
    env: Environment = ()
    ok: str = r"\b[A-Z]+: ok\b"
    also: tuple[str, ...] = ()
    never: str = ""
    fails: bool = False
    skips: str = r"\b[A-Z]+: skipped\b"
    wrap: tuple[str, ...] = ()
    plain: bool = False
    seconds: float = 10.0
    beside: str = ""
    sms: int = 0
    blocks: int = 0
    gib: float = 0.0

    @property
    def title(self) -> str:
        """For people and for ``--match``: ``barrier R2``."""
        return f"{self.name} R{self.ranks}"

    @property
    def part(self) -> str:
        """Name of its part."""
        return self.name.split()[0]

    def shared(self, gpus: int) -> bool:
        """Whether ranks share GPUs where there are ``gpus``."""
        return self.ranks > min(self.gpus or gpus, gpus)

    def judge(self, code: int | None, output: str, limit_s: float) -> tuple[str, str]:
        """``ok``, ``skipped`` or ``FAILED``, and the line that says it; ``code`` None: killed."""
        if code is None:
            return "FAILED", f"killed at its limit of {limit_s:.0f} s"
        skipped = _last_line(self.skips, output) if self.skips else ""
        if skipped:
            return "skipped", skipped
        if self.fails != (code != 0):
            return "FAILED", f"exit code {code}; {_last_error(output)}"
        missing = [pattern for pattern in self.also if not re.search(pattern, output)]
        if missing:
            return "FAILED", f"no {missing[0]!r} in the output"
        if self.never and re.search(self.never, output):
            return "FAILED", _last_line(self.never, output)
        line = _last_line(self.ok, output)
        if line:
            return "ok", line
        return "FAILED", f"no {self.ok!r} in the output"


def _last_line(pattern: str, output: str) -> str:
    for line in reversed(output.splitlines()):
        found = re.search(pattern, line)
        if found:
            return re.sub(r"\s+", " ", line[found.start() :]).strip()[:200]
    return ""


def _last_error(output: str) -> str:
    return _last_line(r"\b\w*(Error|Exception|WRONG)\b.*", output) or "see the log"


def worker(name: str, *options: object) -> tuple[str, ...]:
    """``argv`` of a worker."""
    return (f"{WORKERS}/worker_{name}.py", *map(str, options))
