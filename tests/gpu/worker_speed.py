"""How long dispatch and combine take, beside what the links carry in the same run.

mpirun -n 2 python tests/gpu/worker_speed.py [--sms 8,16,24,64] [--json FILE]

The machinery is that of ``python -m deepep_cupy bench``, which says more. Large: T=4096, H=7168,
top-8 of 256, bfloat16. Small: T=1 and T=128, by events and from CUDA graphs. *of ceiling* is the
time of bare copies of the same rows by as many SMs over that of the call.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from common import Worker

from deepep_cupy.bench.ceilings import CeilingKernel
from deepep_cupy.bench.measure import Measurement, Meter, ceilings_of, measure_workload
from deepep_cupy.bench.modes import available, parse
from deepep_cupy.bench.report import table
from deepep_cupy.bench.workload import Bench, Ranks, Shape, Workload

LARGE = [
    *(parse("dispatch", name) for name in ("no_wait", "uncached", "cached")),
    *(parse("combine", name) for name in ("pool", "outside")),
]
SMALL = LARGE[:-1]


class Speed:
    """What all measurements share."""

    def __init__(self, worker: Worker) -> None:
        options = worker.options
        self.worker, self.repeats = worker, options.repeats
        self.ranks = Ranks(worker.comm, options.engine)
        self.meter: Any = None
        self.kernel: Any = None

    def measure(
        self, tokens: int, num_sms: int | None, wanted: list[Any], *, ceilings: bool
    ) -> list[Measurement]:
        """One Buffer's figures."""
        worker, ranks = self.worker, self.ranks
        shape = Shape(num_tokens=tokens, hidden=worker.options.hidden)
        timeout_s = worker.options.timeout
        with Bench(ranks, shape, num_sms=num_sms, modes=wanted, timeout_s=timeout_s) as bench:
            if self.meter is None:
                self.meter = Meter(ranks, self.repeats)
                self.kernel = CeilingKernel(ranks.comm, ranks.device) if ranks.gpu else None
            modes, _ = available(wanted, bench.engine_modes, shape.dtype)
            workload, rows, rates = Workload(bench, tokens), [], {}
            if ceilings and self.kernel is not None:
                rows, rates = ceilings_of(workload, modes, self.kernel, self.meter, _quietly)
            rows += measure_workload(workload, modes, self.meter, rates, _quietly)
            del workload  # its rows lie in the Buffer's memory
        return rows


def _part(row: Measurement) -> str:
    """The part of the ceiling that is reached, or why there is none."""
    if row.above_ceiling:
        return "faster than the copy"
    return "no ceiling" if row.ratio is None else f"{row.ratio:.2f}"


def _quietly(what: str) -> None:
    """No bar."""


def main() -> None:
    """Measure, print, write."""

    def arguments(parser: Any) -> None:
        parser.add_argument("--sms", default="8,16,24,64")
        parser.add_argument("--tokens", type=int, default=4096)
        parser.add_argument("--hidden", type=int, default=7168)
        parser.add_argument("--repeats", type=int, default=30)
        parser.add_argument("--small", default="1,128", help="tokens of the small batches")
        parser.add_argument("--json", type=Path)

    worker = Worker("SPEED", __doc__, arguments)
    options, speed = worker.options, Speed(worker)
    sms: list[int | None] = [int(each) for each in options.sms.split(",")] if worker.gpu else [None]
    large = []
    for number in sms:
        large += speed.measure(options.tokens, number, LARGE, ceilings=True)
    worker.say(f"T={options.tokens}, H={options.hidden}, bfloat16, top-8, {worker.size} ranks")
    worker.say(table(large))
    small = []
    for tokens in (int(each) for each in options.small.split(",") if each):
        small += speed.measure(tokens, None, SMALL, ceilings=False)
    if small:
        worker.say(table(small))
    if options.json and worker.rank == 0:
        figures = {"large": large, "small": small}
        written = {name: [row.as_dict() for row in rows] for name, rows in figures.items()}
        options.json.write_text(json.dumps(written, indent=1))
    middle = 16 if 16 in sms else sms[0]
    best = [
        f"{row.operation} {row.what} at {row.num_sms} SMs {row.us:.0f} us ({_part(row)})"
        for row in large
        if row.kind == "call" and row.num_sms in (middle, None) and row.what != "cached"
    ]
    worker.done(*best)


if __name__ == "__main__":
    sys.exit(main())
