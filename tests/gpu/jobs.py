"""What ``.ci/gpu`` runs: per part its commands. Standard library only.

A job is one ``mpirun``. Its arguments may hold ``{out}``, the folder for results, and its
environment ``{new}``, a new folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from job import Job, Plan, worker

KINDS = "bulk-nc,bulk-coherent,ldst-nc,ldst-coherent"
"""All copy paths with both kinds of loads: ``--kinds`` of the workers."""
DEFAULT_BLOCKS = 21
"""Blocks of an operation on an H200 where nobody says how many."""


def few_blocks(ranks: int) -> int:
    """Blocks of an operation that leave room for other jobs."""
    return 10 if ranks > 4 else 16


def beside(job: Job, seconds: float, gib: float, *, word: str = "work") -> Job:
    """A job that may run beside others. A process has one operation on a GPU at a time, however
    many Buffers it has (``engines/gpu/operation.py``)."""
    sms = few_blocks(job.ranks)
    return replace(job, seconds=seconds, beside=word, sms=sms, blocks=sms, gib=gib)


def beside_as_it_is(job: Job, seconds: float, gib: float = 2.0) -> Job:
    """The same, of a job that cannot be told how many blocks to take."""
    return replace(job, seconds=seconds, beside="work", blocks=DEFAULT_BLOCKS, gib=gib)


# ------------------------------------------------------------------------------------------ parts


def compile_all(plan: Plan) -> list[Job]:
    """All kernels that the other parts will need, on all cores: nobody waits for them later."""
    ranks = ",".join(map(str, plan.all_ranks(*((1, 2, 4) if plan.quick else (1, 2, 3, 4, 8)))))
    options = ["--ranks", ranks, *(["--quick"] if plan.quick else [])]
    return [Job("compile", 1, worker("compile", *options), 300, plain=True, seconds=25)]


def table(plan: Plan) -> list[Job]:
    """The table of cases, on both paths, with both kinds of loads."""
    jobs = []

    def add(name: str, ranks: int, options: list[object], gpus: int, cost: tuple[float, float]):
        limit = 120 if "--small" in options else 300
        jobs.append(beside(Job(name, ranks, worker("table", *options), limit, gpus), *cost))

    small = ["--kinds", KINDS, "--small"]
    for ranks in plan.all_ranks(1, 2, 3, 4, 8):
        if plan.quick or plan.turns or ranks > 2:
            add("table", ranks, [*small], 0, (20, 7))
        else:
            add("table", ranks, ["--kinds", KINDS], 0, (50, 25))
        if ranks > 2 and not plan.quick and not plan.turns:
            add("table full", ranks, ["--kinds", "bulk-nc"], 0, (25, 9))
    for ranks in (1, 2, 4) if plan.gpus > 1 else ():
        add("table one GPU", ranks, [*small], 1, (15, 7))
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
    for ranks in (1, 2, 3, 4, 8) if plan.gpus > 1 else ():
        jobs.append(Job("barrier one GPU", ranks, worker("barrier", *options), 180, gpus=1))
    return [replace(job, seconds=8 + 0.5 * job.ranks) for job in jobs]


def failures(plan: Plan) -> list[Job]:
    """Late, stopped, refusing, raising and dead ranks."""
    options = ["--timeout", "10", "--slack", "3"] if plan.turns else ["--timeout", "2"]
    jobs = [Job("failures", 2, worker("failures", *options), 300, seconds=30)]
    for ranks in () if plan.turns else (4,) if plan.quick else (4, 8):
        patient = worker("failures", *options, "--slack", "2")
        job = Job("failures", ranks, patient, 300)
        jobs.append(beside(job, 33 + ranks, 1.5, word="sleepers"))
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
        f"failures {name}", 2, worker("failures", "--timeout", "20", name), 90, seconds=2.5,
        ok=r"SAW rank 0.*|== killed\b", also=also, never="TOO LATE|did not fault", fails=True,
    )  # fmt: skip


def speed(plan: Plan) -> list[Job]:
    """One rank a GPU."""
    ranks = min(plan.gpus, 8)
    options = ["--sms", "8,16"] if plan.quick else []
    argv = worker("speed", *options, "--json", f"{{out}}/speed.R{ranks}.json")
    return [Job("speed", ranks, argv, 240, seconds=20)]


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


def flavors(plan: Plan) -> list[Job]:
    """``bench flavors``: kinds of loads over all numbers of SMs, and whole operations with each."""
    if plan.gpus < 2:
        return []
    argv = ("-m", "deepep_cupy", "bench", "flavors", *(["--quick"] if plan.quick else []))
    good, wrong = r"whole operations, .*", r"WRONG: .*"
    argv = (*argv, "--json", "{out}/flavors.json")
    return [Job("flavors", 2, argv, 240, ok=good, never=wrong, seconds=60)]


def cases(plan: Plan) -> list[Job]:
    """Inputs that broke others; large offsets; a Buffer nobody closes; compile caches."""
    slow = ["--timeout", "100"] if plan.turns else []
    ranks = min(2, plan.gpus) if plan.turns else 2
    names = ("uneven_and_empty", "handles_in_reverse", "refusals") if plan.turns else ()
    limit = 300
    jobs = [  # a scenario takes all SMs there are: nothing may run beside it
        Job("cases", each, worker("cases", *names, *slow), limit, seconds=7) for each in (1, 2, 4)
    ]
    tokens = ["--big", "65536"] if plan.quick else []
    big = Job("cases big", ranks, worker("cases", "big", *tokens, *slow), limit)
    jobs.append(beside(big, 30, 14))
    jobs.append(beside(Job("cases no_close", 2, worker("cases", "no_close", *slow), 150), 3, 1.5))
    for name, folder in (("cold cache", "{new}"), ("no cache", "/dev/null/cache")):
        environment = (("DEEPEP_CUPY_CACHE_DIR", folder),)
        argv = worker("cases", "one_trip", *slow)
        jobs.append(beside(Job(f"cases {name}", 8, argv, limit, env=environment), 5, 1.5))
    return jobs


def soak(plan: Plan) -> list[Job]:
    """Random calls: plain ones of large rows, and all modes, with graphs among them."""
    calls = 20 if plan.turns else 500 if plan.quick else 5000
    slow = ["--timeout", "100"] if plan.turns else []
    argv = worker("soak", "--seconds", 200, *slow)
    plain = min(calls, 1000)
    jobs = [
        beside(Job("soak", 2, (*argv, "--calls", str(plain)), 330), 40, 3),
        beside(Job("soak", 4, (*argv, "--calls", str(max(20, plain // 5))), 330), 8, 4),
    ]
    for ranks, number in ((2, calls), (4, max(20, calls // 4))):
        argv = worker("soak_modes", "--seconds", 150, "--calls", number, *slow)
        job = Job("soak modes", ranks, argv, 240)
        jobs.append(beside(job, 60 if ranks == 2 else 30, 5))
    return jobs


def litmus(plan: Plan) -> list[Job]:
    """What loads see of what was just written."""
    argv = worker("litmus", *(["--rounds", 50] if plan.quick else []))
    every = sorted({1, min(plan.gpus, 2)})
    return [Job("litmus", ranks, argv, 150, seconds=30) for ranks in every]


def modes(plan: Plan) -> list[Job]:
    """Every mode beyond the plain ones, and graphs, streams and threads."""
    jobs = []
    few = plan.quick or plan.turns
    kinds = ["--kinds", "bulk-nc" if few else KINDS]
    for ranks in (2, 4) if few else plan.all_ranks(2, 3, 4, 8):
        small = ["--small"] if few else []
        if few or ranks == 2:
            argv = worker("modes", "--modes", "table", *kinds, *small)
            jobs.append(beside(Job("modes table", ranks, argv, 240), 10 + 3 * ranks, 60))
        else:  # Buffers of all kinds at once would not fit into the memory of ranks that share
            for kind in KINDS.split(","):
                argv = worker("modes", "--modes", "table", "--kinds", kind)
                job = Job(f"modes table {kind}", ranks, argv, 240)
                jobs.append(beside(job, 10 + ranks, 20))
        argv = worker("modes", "--modes", MODES_REST, *kinds)
        job = Job("modes rest", ranks, argv, 240)
        jobs.append(beside(job, 25 + 3 * ranks, 4))
    return jobs


MODES_REST = "refused,graphs,buffers,streams,threads"


def expand(plan: Plan) -> list[Job]:
    """The cast to FP8 and the grouped-GEMM layout: right, and how fast."""
    jobs = [Job("expand speed", 2, worker("expand", "speed"), 120, seconds=8)]
    few = plan.quick or plan.turns
    kinds = ["--kinds", "bulk-nc" if few else KINDS]
    for ranks in (2, 4) if few else plan.all_ranks(2, 3, 4, 8):
        options = ["--pool-mib", 2048, *kinds]
        argv = worker("expand", "cases", "refused", "graphs", *options)
        jobs.append(beside(Job("expand", ranks, argv, 240), 20 + 4 * ranks, 10))
    return jobs


def rawmodule(_: Plan) -> list[Job]:
    """The kernels' public text and PTX in plain CuPy."""
    argv = worker("rawmodule", "--timeout", 100)
    return [beside_as_it_is(Job("rawmodule", ranks, argv, 300), 17) for ranks in (1, 2)]


def devices(plan: Plan) -> list[Job]:
    """Who sees which GPU."""
    modes = ("one", "all", "turned", "given") if plan.gpus > 1 else ("one",)
    every = (2,) if plan.turns or plan.quick else (2, 4)
    return [
        beside(Job(f"devices {mode}", ranks, worker("devices", mode, "--timeout", 60), 90), 3, 1.5)
        for ranks in every
        for mode in modes
    ]


def interop(_: Plan) -> list[Job]:
    """Arrays of other libraries."""
    return [beside(Job("interop", 2, worker("interop", "--timeout", 60), 180), 6, 3)]


def jax(_: Plan) -> list[Job]:
    """Programs compiled by JAX."""
    share = (("XLA_PYTHON_CLIENT_MEM_FRACTION", ".2"),)
    job = Job("jax", 2, ("tests/xla/jax_worker.py",), 240, ok=r"JAX: ok, .*", env=share)
    return [beside_as_it_is(job, 60, 60)]


def pool(plan: Plan) -> list[Job]:
    """The symmetric pool under random programs."""
    every = (1,) if plan.turns else (1, 2, 4)
    steps = {1: 20_000 if plan.quick else 100_000, 2: 10_000, 4: 5000}
    good = r"all parts passed"
    return [
        beside_as_it_is(Job("pool", n, worker("pool", "--steps", steps[n]), 280, ok=good), 25 / n)
        for n in every
    ]


def ptx_barrier(plan: Plan) -> list[Job]:
    """The hand-written barrier beside the compiled one, word for word."""
    every = (2,) if plan.turns or plan.quick else (1, 2, 3, 4, 8)
    jobs = [Job("ptx_barrier", ranks, worker("ptx_barrier"), 240) for ranks in every]
    return [replace(beside(job, 15, 1, word="sleepers"), sms=2, blocks=2) for job in jobs]


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
                        wrap=("compute-sanitizer", "--tool", tool, *options), seconds=2.6,
                    )
                )  # fmt: skip
    return jobs


def examples(_: Plan) -> list[Job]:
    """All examples, on GPUs; and the one that needs none."""
    names = (
        *("01_hello_roundtrip", "02_moe_layer", "03_train_digits", "04_particles", "06_overlap"),
        "07_own_kernel",
    )
    engine, good = (r"engine: cuda",), r"\bOK: .*"
    jobs = [
        Job(f"examples {name}", 2, (f"examples/{name}.py",), 120, ok=good, also=engine)
        for name in names
    ]
    path = ("examples/05_read_the_ptx.py",)
    jobs.append(Job("examples 05_read_the_ptx", 1, path, 120, ok=good, plain=True))
    return [beside_as_it_is(job, 8) for job in jobs]


def check(plan: Plan) -> list[Job]:
    """The command ``check``."""
    argv = ("-m", "deepep_cupy", "check", "--engine", "cuda", "--size", "small")
    every = (2,) if plan.turns else (1, 2)
    right = {"ok": r"\bOK: .*", "also": (r"\bcuda\b",)}
    return [beside_as_it_is(Job("check", n, argv, 280, **right), 40) for n in every]


PARTS: dict[str, Callable[[Plan], list[Job]]] = {
    "compile": compile_all,
    "barrier": barrier,
    "ptx_barrier": ptx_barrier,
    "table": table,
    "cases": cases,
    "failures": failures,
    "speed": speed,
    "speed_shared": speed_shared,
    "flavors": flavors,
    "litmus": litmus,
    "modes": modes,
    "expand": expand,
    "soak": soak,
    "pool": pool,
    "rawmodule": rawmodule,
    "devices": devices,
    "interop": interop,
    "jax": jax,
    "examples": examples,
    "check": check,
    "sanitizer": sanitizer,
}
"""Name → its jobs, in the order they run."""

DEFAULT = tuple(name for name in PARTS if name != "speed_shared")


def select(plan: Plan, parts: Iterable[str], ranks: Sequence[int] | None, match: str) -> list[Job]:
    """The jobs asked for."""
    chosen = set(parts)
    return [
        job
        for name, jobs_of in PARTS.items()
        if name in chosen
        for job in jobs_of(plan)
        if (ranks is None or job.ranks in ranks) and re.search(match, job.title)
    ]
