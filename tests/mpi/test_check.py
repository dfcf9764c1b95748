"""``python -m deepep_cupy check``: right on any ranks, and wrong when something is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepep_cupy import env
from deepep_cupy.testing.data import cases, low_latency_cases, mode_cases
from ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
WITH_FAULT = Path(__file__).with_name("with_fault.py")
HEADING = re.compile(r"^case +engine +dispatch +combine +time$", re.MULTILINE)
ROW = re.compile(r"^(R\d\S+) +(host|cuda) +(ok|WRONG) +(ok|WRONG|-) +\d+\.\d\d ms$", re.MULTILINE)

SUMMARY = re.compile(r"^(\w[\w ]+\w) +(\d+) +(\d+) +(\d+) +(\d+)$", re.MULTILINE)


def words_of(chosen):
    """Words of the names of cases that stand there as they are."""
    words = {word for case in chosen for word in case.id.split("-")}
    return {word for word in words if re.fullmatch(r"[a-z]{3,}", word)}


def check(num_ranks, *arguments, fault="none"):
    return run_ranks(WITH_FAULT, num_ranks, fault, "deepep_cupy", "check", *arguments, limit_s=120)


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "deepep_cupy", "check", *arguments],
        cwd=ROOT,
        env=env.child_environment({}, ROOT),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_case_has_its_row(num_ranks):
    run = check(num_ranks, "--seed", "7")
    run.check()
    rows = ROW.findall(run.outputs[0])
    assert len(HEADING.findall(run.outputs[0])) == 1
    wanted = cases(num_ranks, small=True) + mode_cases(num_ranks, small=True)
    wanted += low_latency_cases(num_ranks, small=True)
    assert [row[0] for row in rows] == [case.id for case in wanted]
    assert all(row[2] == "ok" and row[3] in ("ok", "-") for row in rows), run
    # Rows that cannot be added have no combine, and most can.
    assert len(rows) / 2 < sum(row[3] == "ok" for row in rows) < len(rows)
    assert len({len(line) for line in run.outputs[0].splitlines() if ROW.match(line)}) == 1
    summary = {m[1]: [int(n) for n in m.groups()[1:]] for m in SUMMARY.finditer(run.outputs[0])}
    assert summary["cast to FP8"][0] == sum(
        case.fp8 in ("quantize", "round", "ue8m0") for case in wanted
    )
    assert summary["expanded layout"] == [sum(case.expand for case in wanted)] * 2 + [0, 0]
    assert sum(summary[name][0] for name in summary if name.startswith("by ")) == len(rows)
    legend = run.outputs[0].split("\ncase ")[0]
    assert all(re.search(rf"\b{word}\b", legend) for word in words_of(wanted)), run
    where = f"{num_ranks} rank" + "s" * (num_ranks > 1)
    last = run.outputs[0].splitlines()[-1]
    assert last == f"OK: {len(rows)} cases on {where} are bit for bit what the reference says"
    assert not any("case" in output or "OK" in output for output in run.outputs[1:])


@pytest.mark.parametrize(
    ("fault", "column", "said"),
    [
        ("bit", 3, "combined_x"),
        pytest.param("combine", 3, "combined_x", marks=pytest.mark.slow),  # a coarser "bit"
        ("dispatch", 2, "recv_x"),
    ],
)
def test_a_fault_on_one_rank_is_shown_and_changes_the_exit_code(fault, column, said):
    run = check(2, fault=fault)
    assert run.returncode == 1, run
    assert not run.timed_out, run
    rows = ROW.findall(run.outputs[0])
    wrong = [row for row in rows if "WRONG" in row]
    assert wrong, run
    assert all(row[column] == "WRONG" for row in wrong), run
    assert re.search(rf"^    {said} on rank 1: \d+ of \d+ elements differ", run.outputs[0], re.M), (
        run
    )
    last = run.outputs[0].splitlines()[-1]
    assert last.startswith(f"WRONG: {len(wrong)} of {len(rows)} cases differ"), run


def test_an_error_on_one_rank_ends_all():
    run = check(2, fault="raise")
    assert run.returncode != 0, run
    assert not run.timed_out, run
    assert not run.survivors, run
    assert "planted" in run.outputs[1], run


def test_one_rank_needs_no_mpirun():
    child = command()
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines()[-1].startswith("OK: "), child.stdout


def test_a_seed_below_zero_is_refused():
    child = command("--seed", "-1")
    assert child.returncode == 1
    assert child.stderr == "error: check: argument --seed must be 0 or more, got -1.\n"


def test_an_engine_that_is_asked_for_is_used_or_refused_with_a_reason():
    child = command("--engine", "cuda")
    if child.returncode == 0:
        assert {row[1] for row in ROW.findall(child.stdout)} == {"cuda"}
    else:
        assert re.search(r"^error: .*engine='cuda'.*rank 0: ", child.stderr, re.M), child.stderr
