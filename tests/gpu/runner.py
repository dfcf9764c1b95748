"""Starts jobs of ``.ci/gpu``, ends them, keeps what they say. Standard library only."""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import at_once
import last_run
import machine
from job import Job

ROOT = Path(__file__).resolve().parents[2]
RUN = "GPU_TESTS_RUN"


@dataclass
class Started:
    """A job that runs.

    Attributes:
        placed: The job, and on which GPUs.
        child: Its ``mpirun``.
        mark: In the environment of all its processes.
        said: File with its output.
        folder: ``{new}`` of its environment.
        begin: When it was started.
        limit: Seconds it may take.
    """

    placed: at_once.Placed
    child: subprocess.Popen[bytes]
    mark: str
    said: IO[bytes]
    folder: Path
    begin: float
    limit: float

    @property
    def job(self) -> Job:
        """What runs."""
        return self.placed.job

    @property
    def over(self) -> bool:
        """Whether it has ended, or must."""
        return self.child.poll() is not None or time.monotonic() > self.begin + self.limit


class Runner:
    """Runs jobs, keeps their rows, writes the log and LAST_RUN.md."""

    def __init__(self, options: argparse.Namespace, found: machine.Machine, mpirun: str) -> None:
        self.options, self.machine, self.mpirun = options, found, mpirun
        self.host = options.engine == "host"
        self.out = Path(options.out or tempfile.mkdtemp(prefix="gpu-tests-"))
        self.out.mkdir(parents=True, exist_ok=True)
        self.log = self.out / "log.txt"
        self.log.write_bytes(b"")
        self.end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
        self.text = last_run.short(last_run.digest(ROOT))
        self.rows: list[last_run.Row] = []
        self.running: list[Started] = []
        self.begun = 0
        self.facts = [*found.facts, *machine.versions(mpirun)]
        said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
        self.open_mpi = "Open MPI" in said.stdout or "open-mpi" in said.stdout
        self.room = at_once.Room(
            gpus=len(found.visible),
            jobs=max(1, options.at_once),
            cores=options.cores,
            sms=found.sms,
            gib=found.gib,
        )

    def command(self, job: Job, *, beside: bool = False) -> list[str]:
        """The command line of a job."""
        python = [*job.wrap, sys.executable, *job.argv]
        if beside and job.sms:
            python += ["--num-sms", str(job.sms)]
        if self.host:
            python += ["--engine", "host"] if "worker_" in job.argv[0] else []
        if job.plain:
            return python
        flags = ["-prepend-rank"]
        if self.open_mpi:
            flags = ["--oversubscribe", "--bind-to", "none", "--tag-output"]
        return [self.mpirun, *flags, "-n", str(job.ranks), *python]

    def environment(self, started: dict[str, str], placed: at_once.Placed) -> dict[str, str]:
        """What a job sees. ``started``: of this start alone."""
        job, visible = placed.job, self.machine.visible
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        set_here = {
            "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "MPLBACKEND": "Agg",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "GPU_TESTS_ALL": machine.TOKEN,
        }  # fmt: skip
        turned = [*visible[placed.first :], *visible[: placed.first]][: job.gpus or None]
        if not self.host:
            set_here["CUDA_VISIBLE_DEVICES"] = ",".join(turned)
        return {**os.environ, **set_here, **started, **dict(job.env)}

    # ------------------------------------------------------------------------------- one job

    def start(
        self, placed: at_once.Placed, mps: machine.Mps | None, *, beside: bool = False
    ) -> Started:
        """Start a job; its output goes to a file of its own."""
        job, self.begun = placed.job, self.begun + 1
        limit = min(job.limit_s, self.end - time.monotonic() - 5)
        if beside:  # one that hangs must not hold up all others for minutes
            limit = min(limit, max(90.0, 4 * job.seconds))
        print(f"… {job.title} (at most {limit:.0f} s)", flush=True)
        folder = Path(tempfile.mkdtemp(prefix="gpu-job-"))
        (self.out / "running").mkdir(exist_ok=True)
        name = f"{self.begun}-{job.title.replace(' ', '_')}.txt"
        said = (self.out / "running" / name).open("a+b")  # whoever writes, writes at the end
        argv = [each.replace("{out}", str(self.out)) for each in self.command(job, beside=beside)]
        started = {
            RUN: f"{machine.TOKEN}.{self.begun}",
            "GPU_TESTS_LIMIT_S": f"{max(1, limit - 6):.0f}",
        }
        environment = self.environment({**(mps.environment if mps else {}), **started}, placed)
        for name, value in environment.items():
            whole = value.replace("{out}", str(self.out)).replace("{new}", str(folder))
            environment[name] = whole
        said.write(f"\n===== {job.title}\n$ {' '.join(argv)}\n".encode())
        said.flush()
        child = subprocess.Popen(
            argv, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=said,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        mark = f"{RUN}={started[RUN]}"
        done = Started(placed, child, mark, said, folder, time.monotonic(), limit)
        self.running.append(done)
        return done

    def stop(self, started: Started) -> tuple[int | None, float, str]:
        """End what is left of a job, and move its output to the log: code, seconds, output."""
        code, child = started.child.poll(), started.child
        if not machine.gone(started.mark, 0 if code is None else 3):
            machine.end_all(started.mark)
        child.wait()
        seconds = time.monotonic() - started.begin
        started.said.seek(0)
        words = started.said.read()
        with self.log.open("ab") as log:
            log.write(words)
        started.said.close()
        Path(started.said.name).unlink()
        shutil.rmtree(started.folder, ignore_errors=True)
        self.running.remove(started)
        return code, seconds, words.decode(errors="replace").split("\n", 3)[-1]

    def judge(self, started: Started, sharing: str, note: str = "") -> bool:
        """Stop a job and keep its row; True unless it failed."""
        job = started.job
        code, seconds, output = self.stop(started)
        result, figure = job.judge(code, output, started.limit)
        if result == "FAILED":
            print(f"  the end of {job.title}:")
            for line in output.rstrip().splitlines()[-self.options.tail :]:
                print("    " + line[:300])
        return self.keep(job, sharing, seconds, result, figure + note)

    def why_not(self, job: Job) -> str:
        """Why a job cannot be started now; empty: it can."""
        if self.end - time.monotonic() < max(15, job.seconds):
            return "no time left"
        if job.wrap and not shutil.which(job.wrap[0]):
            return f"{job.wrap[0]} is not on PATH"
        return ""

    def run(self, job: Job, mps: machine.Mps | None, sharing: str) -> bool:
        """Run one job alone; True unless it failed."""
        why = self.why_not(job)
        if why:
            return self.keep(job, sharing, 0.0, "skipped", why)
        started = self.start(at_once.Placed(job), mps)
        while not started.over:
            time.sleep(0.05)
        return self.judge(started, sharing)

    def run_beside(self, jobs: Sequence[Job], mps: machine.Mps) -> str:
        """Run jobs beside each other. Why MPS is there no more; empty: it is.

        What a failure leaves in MPS can fail the others too: nothing is started until all have
        ended, MPS is started anew, and those that failed after the first one run once more.
        """
        waiting, again, broken, why = at_once.in_order(jobs), [], False, ""
        second: set[str] = set()
        while waiting or again or self.running:
            if not self.running and (again or broken):
                mps.stop()
                why = mps.start()
                if why:
                    for job in (*again, *waiting):
                        self.keep(job, "MPS", 0.0, "FAILED", f"MPS did not start again: {why}")
                    return why
                waiting, again, broken = [*again, *waiting], [], False
            while not broken:
                placed = at_once.pick(self.room, waiting, [each.placed for each in self.running])
                if placed is None:
                    break
                why_not = self.why_not(placed.job)
                if why_not:
                    self.keep(placed.job, "MPS", 0.0, "skipped", why_not)
                else:
                    self.start(placed, mps, beside=True)
            for started in [each for each in self.running if each.over]:
                job = started.job
                if broken and job.title not in second and self.failing(started):
                    print(f"  {job.title} failed after another one beside it: once more later")
                    self.stop(started)
                    again.append(job)
                    second.add(job.title)
                    continue
                note = " (second try)" if job.title in second else ""
                broken = not self.judge(started, "MPS", note) or broken
            time.sleep(0.05)
        return why

    def failing(self, started: Started) -> bool:
        """Whether a job that is over has failed."""
        started.said.seek(0)
        output = started.said.read().decode(errors="replace")
        return started.job.judge(started.child.poll(), output, started.limit)[0] == "FAILED"

    # ------------------------------------------------------------------------------- results

    def keep(self, job: Job, sharing: str, seconds: float, result: str, figure: str) -> bool:
        """Remember a result, and write it down at once."""
        gpus = min(job.gpus or len(self.machine.visible), len(self.machine.visible))
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
        where = f"{gpus}{f' {sharing}' if sharing else ''}"
        row = last_run.Row(
            job.name, str(job.ranks), where, f"{seconds:.1f}", result, figure, now, self.text
        )
        self.rows.append(row)
        print(f"  {job.title}: {result}, {seconds:.1f} s: {figure}", flush=True)
        if not self.host:
            old = last_run.rows_in(last_run.PATH.read_text()) if last_run.PATH.exists() else []
            done = [each for each in self.rows if each.result != "skipped"]
            merged = last_run.merge(old, done)
            page = last_run.page(self.facts, merged, self.text, now)
            for path in (last_run.PATH, self.out / last_run.PATH.name):
                path.write_text(page)
        return result != "FAILED"

    def table(self) -> None:
        """What was run, aligned."""
        lines = [("part", "ranks", "GPUs", "seconds", "result", "figures")]
        lines += [(r.part, r.ranks, r.gpus, r.seconds, r.result, r.figure) for r in self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        print()
        for line in lines:
            cells = [text.ljust(width) for text, width in zip(line, widths, strict=False)]
            print("  ".join([*cells, line[5]]).rstrip())
        print()
