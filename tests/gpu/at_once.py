"""Which jobs of ``.ci/gpu`` run at the same time. Standard library only.

Ranks wait for each other inside kernels, so that all blocks that wait must be on a GPU at once,
one to a SM: the blocks of all jobs together must not be more than the SMs. Kernels that wait for
nobody end by themselves, and are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from job import Job

MARGIN_BLOCKS = 4
MARGIN_GIB = 10.0


@dataclass(frozen=True)
class Room:
    """What a machine has.

    Attributes:
        gpus: How many GPUs.
        jobs: The most jobs at once.
        cores: Of the CPU: the most ranks at once.
        sms: Of a GPU.
        gib: Memory of a GPU.
    """

    gpus: int
    jobs: int
    cores: int
    sms: int = 132
    gib: float = 139.0


@dataclass(frozen=True)
class Placed:
    """A job, and the first of the GPUs it is shown; the others follow in a circle."""

    job: Job
    first: int = 0

    def ranks_on(self, gpu: int, gpus: int) -> int:
        """How many of its ranks use this GPU."""
        shown = min(self.job.gpus or gpus, gpus)
        place = (gpu - self.first) % gpus
        return len(range(place, self.job.ranks, shown)) if place < shown else 0


def place(room: Room, job: Job, running: Sequence[Placed]) -> Placed | None:
    """Where ``job`` may run beside these; ``None``: it must wait. Alone it always may."""
    choices = [Placed(job, first) for first in range(room.gpus)]
    if not running:
        return choices[0]
    if not job.beside or any(each.job.beside != job.beside for each in running):
        return None
    if len(running) >= room.jobs:
        return None
    if sum(each.job.ranks for each in running) + job.ranks > room.cores:
        return None
    fitting = [choice for choice in choices if _fits(room, [*running, choice])]
    return min(fitting, key=lambda choice: _fullest(room, [*running, choice]), default=None)


def _blocks(room: Room, placed: Iterable[Placed]) -> list[int]:
    return [
        sum(each.job.blocks * each.ranks_on(gpu, room.gpus) for each in placed)
        for gpu in range(room.gpus)
    ]


def _fullest(room: Room, placed: Sequence[Placed]) -> int:
    return max(_blocks(room, placed))


def _fits(room: Room, placed: Sequence[Placed]) -> bool:
    most_gib = max(
        sum(each.job.gib * each.ranks_on(gpu, room.gpus) for each in placed)
        for gpu in range(room.gpus)
    )
    return _fullest(room, placed) <= room.sms - MARGIN_BLOCKS and most_gib <= room.gib - MARGIN_GIB


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """Those first that take long or much room, those that run beside each other together."""
    chosen = list(jobs)
    seconds: Counter[str] = Counter()  # what is most comes first
    for job in chosen:
        seconds[job.beside] += job.seconds
    words = [word for word, _ in seconds.most_common()]

    def size(job: Job) -> float:
        return job.seconds * (1 + job.blocks * job.ranks / (40 * (1 if job.gpus == 1 else 2)))

    return sorted(chosen, key=lambda job: (words.index(job.beside), -size(job)))


def pick(room: Room, waiting: list[Job], running: Sequence[Placed]) -> Placed | None:
    """Take the next job that may start out of ``waiting``; ``None``: none may."""
    for job in waiting:
        placed = place(room, job, running)
        if placed is not None:
            waiting.remove(job)
            return placed
    return None


def timetable(room: Room, jobs: Iterable[Job]) -> list[tuple[float, float, Placed]]:
    """(begin, end, job) of all, if they take the seconds that they say."""
    waiting, now = in_order(jobs), 0.0
    running: list[tuple[float, float, Placed]] = []
    done: list[tuple[float, float, Placed]] = []
    while waiting or running:
        placed = pick(room, waiting, [entry[2] for entry in running])
        if placed is not None:
            running.append((now, now + placed.job.seconds, placed))
            continue
        first = min(running, key=lambda entry: entry[1])
        running.remove(first)
        done.append(first)
        now = first[1]
    return sorted(done, key=lambda entry: entry[:2])
