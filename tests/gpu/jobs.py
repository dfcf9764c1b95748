"""What ``.ci/gpu`` runs: per part its commands. Standard library only.

A job is one ``mpirun``. Its arguments may hold ``{out}``, the folder for results, and its
environment ``{new}``, a new folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
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


# ------------------------------------------------------------------------------------------ parts


def compile_all(plan: Plan) -> list[Job]:
    """All kernels that the other parts will need, on all cores: nobody waits for them later."""
    ranks = ",".join(map(str, plan.all_ranks(*((1, 2, 4) if plan.quick else (1, 2, 3, 4, 8)))))
    options = ["--ranks", ranks, *(["--quick"] if plan.quick else [])]
    return [Job("compile", 1, worker("compile", *options), 300, plain=True)]


def table(plan: Plan) -> list[Job]:
    """The table of cases, on both paths, with both kinds of loads."""
    small = plan.quick or plan.turns
    options = ["--small"] if small else []
    kinds = [("bulk", "coherent"), ("ldst", "nc"), ("bulk", "nc"), ("ldst", "coherent")]
    places = [(ranks, 0) for ranks in plan.all_ranks(1, 2, 3, 4, 8)]
    places += [(ranks, 1) for ranks in (2, 4) if plan.gpus > 1]
    jobs = []
    for path, loads in kinds[: 2 if plan.quick else 4]:
        environment = (("DEEPEP_CUPY_PATH", path), ("DEEPEP_CUPY_LOADS", loads))
        for ranks, gpus in places:
            name = f"table {path} {loads}{' one GPU' if gpus else ''}"
            argv = worker("table", *options)
            jobs.append(Job(name, ranks, argv, 120 if small else 400, gpus, environment))
    return jobs


def barrier(plan: Plan) -> list[Job]:
    """Barriers from graphs, eager, of both makes."""
    count = 100_000 if plan.quick else 1_000_000
    options: list[object] = ["--count", count]
    if plan.turns:
        options = ["--count", 1000, "--in-graph", 100, "--eager", 40, "--timeout", 60]
    jobs = [
        Job("barrier", ranks, worker("barrier", *options), 180)
        for ranks in plan.all_ranks(1, 2, 3, 4, 8)
    ]
    if plan.gpus > 1:
        jobs.append(Job("barrier one GPU", 2, worker("barrier", *options), 180, gpus=1))
    return jobs


def failures(plan: Plan) -> list[Job]:
    """Late, stopped, refusing, raising and dead ranks."""
    options = ["--timeout", "2"]
    if plan.turns:
        options = ["--timeout", "10", "--slack", "3"]
    jobs = [
        Job("failures", ranks, worker("failures", *options), 300)
        for ranks in ((2,) if plan.turns else (2, 4) if plan.quick else (2, 4, 8))
    ]
    if plan.gpus < 2:
        return jobs
    saw = r"SAW rank 0: PeerAbortedError after .* rank 1 aborted \("
    return [
        *jobs,
        _ending("raises", (saw + r"ValueError: the batch is bad\)",)),
        _ending("dead_context", (saw + r"CUDARuntimeError: cudaErrorIllegalAddress",)),
        _ending("killed", ()),
    ]


def _ending(name: str, also: tuple[str, ...]) -> Job:
    """A scenario that ends the program badly; never under MPS."""
    return Job(
        f"failures {name}", 2, worker("failures", "--timeout", "20", name), 90,
        ok=r"SAW rank 0.*|== killed\b", also=also, never="TOO LATE|did not fault", fails=True,
    )  # fmt: skip


def speed(plan: Plan) -> list[Job]:
    """One rank a GPU."""
    ranks = min(plan.gpus, 8)
    options = ["--sms", "8,16"] if plan.quick else []
    argv = worker("speed", *options, "--json", f"{{out}}/speed.R{ranks}.json")
    return [Job("speed", ranks, argv, 240)]


def speed_shared(plan: Plan) -> list[Job]:
    """Several ranks a GPU: only under MPS does this mean anything."""
    if plan.turns:
        return []
    return [
        Job("speed_shared", ranks,
            worker("speed", "--sms", "8,16", "--small", "128",
                   "--json", f"{{out}}/speed.R{ranks}.json"), 240)
        for ranks in (4, 8)
    ]  # fmt: skip


def cases(plan: Plan) -> list[Job]:
    """Inputs that broke others; large offsets; a Buffer nobody closes; compile caches."""
    slow = ["--timeout", "100"] if plan.turns else []
    ranks = min(2, plan.gpus) if plan.turns else 2
    names = ("uneven_and_empty", "handles_in_reverse", "refusals") if plan.turns else ()
    limit = 300
    jobs = [Job("cases", each, worker("cases", *names, *slow), limit) for each in (1, 2, 4)]
    tokens = ["--big", "65536"] if plan.quick else []
    jobs.append(Job("cases big", ranks, worker("cases", "big", *tokens, *slow), limit))
    jobs.append(Job("cases no_close", 2, worker("cases", "no_close", *slow), 150))
    for name, folder in (("cold cache", "{new}"), ("no cache", "/dev/null/cache")):
        environment = (("DEEPEP_CUPY_CACHE_DIR", folder),)
        argv = worker("cases", "one_trip", *slow)
        jobs.append(Job(f"cases {name}", 8, argv, limit, env=environment))
    return jobs


def soak(plan: Plan) -> list[Job]:
    """Random calls."""
    calls = 20 if plan.turns else 500 if plan.quick else 5000
    slow = ["--timeout", "100"] if plan.turns else []
    argv = worker("soak", "--seconds", 240, *slow)
    jobs = [Job("soak", 2, (*argv, "--calls", str(calls)), 330)]
    return [*jobs, Job("soak", 4, (*argv, "--calls", str(max(20, calls // 5))), 330)]


def litmus(plan: Plan) -> list[Job]:
    """What loads see of what was just written."""
    argv = worker("litmus", *(["--rounds", 50] if plan.quick else []))
    return [Job("litmus", ranks, argv, 150) for ranks in sorted({1, min(plan.gpus, 2)})]


def modes(_: Plan) -> list[Job]:
    """Every mode beyond the plain ones, and graphs, streams and threads."""
    return [Job("modes", 2, worker("modes"), 300), Job("modes", 4, worker("modes"), 300)]


def expand(_: Plan) -> list[Job]:
    """The cast to FP8 and the grouped-GEMM layout."""
    return [Job("expand", 2, worker("expand"), 300), Job("expand", 4, worker("expand"), 300)]


def rawmodule(_: Plan) -> list[Job]:
    """The kernels' public text and PTX in plain CuPy."""
    return [Job("rawmodule", ranks, worker("rawmodule", "--timeout", 100), 300) for ranks in (1, 2)]


def devices(plan: Plan) -> list[Job]:
    """Who sees which GPU."""
    modes = ("one", "all", "turned", "given") if plan.gpus > 1 else ("one",)
    every = (2,) if plan.turns or plan.quick else (2, 4)
    return [
        Job(f"devices {mode}", ranks, worker("devices", mode, "--timeout", 60), 90)
        for ranks in every
        for mode in modes
    ]


def interop(_: Plan) -> list[Job]:
    """Arrays of other libraries."""
    return [Job("interop", 2, worker("interop", "--timeout", 60), 180)]


def pool(plan: Plan) -> list[Job]:
    """The symmetric pool under random programs."""
    every = (1,) if plan.turns else (1, 2, 4)
    steps = {1: 20_000 if plan.quick else 100_000, 2: 10_000, 4: 5000}
    good = r"all parts passed"
    return [Job("pool", n, worker("pool", "--steps", steps[n]), 280, ok=good) for n in every]


def ptx_barrier(plan: Plan) -> list[Job]:
    """The hand-written barrier beside the compiled one, word for word."""
    every = (2,) if plan.turns or plan.quick else (1, 2, 3, 4, 8)
    return [Job("ptx_barrier", ranks, worker("ptx_barrier"), 240) for ranks in every]


def sanitizer(_: Plan) -> list[Job]:
    """Each kernel under compute-sanitizer."""
    jobs = []
    for ranks in (1, 2):
        for tool in ("memcheck", "synccheck", "racecheck"):
            for path in ("bulk", "ldst"):
                options = ["--error-exitcode", "86", "--report-api-errors", "no"]
                options = options if tool == "memcheck" else options[:2]
                jobs.append(
                    Job(
                        f"sanitizer {tool} {path}", ranks, worker("small", "--timeout", 250), 280,
                        env=(("DEEPEP_CUPY_PATH", path),),
                        also=(r"(ERROR|RACECHECK) SUMMARY: 0 ",),
                        never=r"(ERROR|RACECHECK) SUMMARY: [1-9].*",
                        skips=r"(Device not supported|LibraryNotLoaded|failed to initialize).*",
                        wrap=("compute-sanitizer", "--tool", tool, *options),
                    )
                )  # fmt: skip
    return jobs


def examples(_: Plan) -> list[Job]:
    """All examples, on GPUs; and the one that needs none."""
    names = ("01_hello_roundtrip", "02_moe_layer", "03_train_digits", "04_particles")
    engine, good = (r"engine: cuda",), r"\bOK: .*"
    jobs = [
        Job(f"examples {name}", 2, (f"examples/{name}.py",), 120, ok=good, also=engine)
        for name in names
    ]
    path = ("examples/05_read_the_ptx.py",)
    return [*jobs, Job("examples 05_read_the_ptx", 1, path, 120, ok=good, plain=True)]


def check(plan: Plan) -> list[Job]:
    """The command ``check``."""
    argv = ("-m", "deepep_cupy", "check", "--engine", "cuda", "--size", "small")
    every = (2,) if plan.turns else (1, 2)
    return [Job("check", n, argv, 280, ok=r"\bOK: .*", also=(r"\bcuda\b",)) for n in every]


PARTS: dict[str, Callable[[Plan], list[Job]]] = {
    "compile": compile_all,
    "barrier": barrier,
    "ptx_barrier": ptx_barrier,
    "table": table,
    "cases": cases,
    "failures": failures,
    "speed": speed,
    "speed_shared": speed_shared,
    "litmus": litmus,
    "modes": modes,
    "expand": expand,
    "soak": soak,
    "pool": pool,
    "rawmodule": rawmodule,
    "devices": devices,
    "interop": interop,
    "examples": examples,
    "check": check,
    "sanitizer": sanitizer,
}
"""Name → its jobs, in the order they run."""

DEFAULT = tuple(name for name in PARTS if name != "speed_shared")


def select(
    plan: Plan,
    parts: Iterable[str],
    ranks: Sequence[int] | None,
    match: str,
    *,
    gpus: int,
    shared: bool,
) -> list[Job]:
    """The jobs asked for, of those whose ranks share GPUs, or of those whose ranks do not."""
    chosen = set(parts)
    return [
        job
        for name, jobs_of in PARTS.items()
        if name in chosen
        for job in jobs_of(plan)
        if job.shared(gpus) == shared
        and (ranks is None or job.ranks in ranks)
        and re.search(match, job.title)
    ]
