"""Every example gives the right answer on any number of ranks, and notices a wrong one."""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepep_cupy import env
from ranks import is_open_mpi, mpirun, run_ranks

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples"
HELLO = FOLDER / "01_hello_roundtrip.py"
LAYER = FOLDER / "02_moe_layer.py"
DIGITS = FOLDER / "03_train_digits.py"
PARTICLES = FOLDER / "04_particles.py"
PTX = FOLDER / "05_read_the_ptx.py"
OVERLAP = FOLDER / "06_overlap.py"
ALL = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
WITH_FAULT = Path(__file__).with_name("with_fault.py")
NUM_EXPERTS_OF_DIGITS = 8
STEPS_OF_DIGITS = 150

MISSING = [n for n in ("matplotlib", "sklearn", "tqdm") if importlib.util.find_spec(n) is None]
needs_extra = pytest.mark.skipif(
    bool(MISSING), reason=f"needs the extra 'examples': no {', '.join(MISSING)}"
)


def assert_says_ok(run):
    run.check()
    assert re.search(r"^OK: ", run.outputs[0], re.MULTILINE), run
    assert re.search(r"^engine: (host|cuda), ", run.outputs[0], re.MULTILINE), run


def assert_png(path):
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 20_000


# ------------------------------------------------------------------------------ the right answer


@pytest.mark.parametrize("example", [HELLO, LAYER], ids=lambda path: path.stem)
def test_round_trips(example, num_ranks):
    assert_says_ok(run_ranks(example, num_ranks))


@needs_extra
def test_particles(num_ranks, tmp_path):
    picture = tmp_path / "particles.png"
    assert_says_ok(run_ranks(PARTICLES, num_ranks, "--plot", picture))
    assert_png(picture)


def train(num_ranks, folder, *options):
    losses = folder / f"losses.{num_ranks}"
    run = run_ranks(DIGITS, num_ranks, "--losses", losses, *options)
    if run.returncode == 0:
        assert_says_ok(run)
    return run, losses


@pytest.fixture(scope="module")
def losses_alone(tmp_path_factory):
    """Losses of one process in float64."""
    run, losses = train(1, tmp_path_factory.mktemp("alone"), "--dtype", "float64")
    run.check()
    return np.loadtxt(losses)


@needs_extra
def test_training_does_not_depend_on_the_number_of_ranks(num_ranks, losses_alone, tmp_path):
    picture = tmp_path / "digits.png"
    run, losses = train(num_ranks, tmp_path, "--dtype", "float64", "--plot", picture)
    if NUM_EXPERTS_OF_DIGITS % num_ranks:
        assert run.returncode != 0
        assert not run.timed_out, run
        assert "num_experts" in run.outputs[0], run
        return
    run.check()
    assert_png(picture)
    assert losses_alone.shape == (STEPS_OF_DIGITS,)
    np.testing.assert_allclose(np.loadtxt(losses), losses_alone, rtol=1e-6, atol=0)
    accuracy = float(re.search(r"test accuracy ([0-9.]+) %", run.outputs[0])[1])
    assert accuracy >= 95, run


@needs_extra
def test_training_in_float32(tmp_path):
    run, losses = train(2, tmp_path)
    run.check()
    values = np.loadtxt(losses)
    assert values[-20:].mean() < values[0] / 50


@needs_extra
def test_overlap(tmp_path):
    folder = tmp_path / "new"
    run = run_ranks(OVERLAP, 2, "--runs", "2", "--out", folder)
    assert_says_ok(run)
    assert_png(folder / "overlap.png")
    for piece in itertools.product(("dispatch", "experts", "combine"), "AB"):
        assert re.search(rf"^{' '.join(piece)} +[\d,]+ to +[\d,]+", run.outputs[0], re.MULTILINE), (
            run
        )
    if "engine: host" in run.outputs[0]:
        assert "nothing is saved" in run.outputs[0], run


# ------------------------------------------------------------------------------ the wrong answer


@pytest.mark.parametrize(
    ("example", "fault"),
    [
        (HELLO, "dispatch"),
        (HELLO, "combine"),
        (HELLO, "bit"),
        (LAYER, "dispatch"),
        (LAYER, "combine"),
        (OVERLAP, "dispatch"),
        (OVERLAP, "bit"),
        pytest.param(DIGITS, "combine", marks=needs_extra),
        pytest.param(PARTICLES, "combine", marks=needs_extra),
    ],
    ids=lambda value: getattr(value, "stem", value),
)
def test_a_wrong_result_is_noticed(example, fault):
    short = ("--runs", "1") if example == OVERLAP else ()
    run = run_ranks(WITH_FAULT, 2, fault, example, *short)
    assert run.returncode != 0, run
    assert not run.timed_out, run
    assert re.search(r"^WRONG: ", run.outputs[0], re.MULTILINE), run
    assert "Traceback" not in "".join(run.outputs), run


@needs_extra
def test_an_error_on_one_rank_ends_all():
    run = run_ranks(WITH_FAULT, 2, "raise", PARTICLES, limit_s=40)
    assert run.returncode != 0, run
    assert not run.timed_out, run
    assert not run.survivors, run
    assert "planted" in run.outputs[1], run


# ------------------------------------------------------------------------------------ without MPI

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="needs NVRTC through CuPy: no cupy"
)
DELETE_A_WAIT = """
import re, runpy, sys
import deepep_cupy
real = deepep_cupy.kernel_ptx
deepep_cupy.kernel_ptx = lambda *a, **k: re.sub(r"cp.async.bulk.wait_group +0;", "", real(*a, **k))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_alone(*words):
    return run_program([sys.executable, *map(str, words)])


def run_program(words):
    return subprocess.run(
        words,
        cwd=ROOT,
        env=env.child_environment({}, ROOT),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_ptx_is_shown_and_explained(arch):
    child = run_alone(PTX, "--arch", arch, "--ranks", "4")
    assert child.returncode == 0, child.stdout + child.stderr
    kernel = "dispatch" if arch == "sm_80" else "dispatch_bulk"
    assert child.stdout.splitlines()[-1] == f"OK: the rows of {kernel} move as part 3 says"
    assert f"KERNEL {kernel}(" in child.stdout
    assert f".visible .entry {kernel}(" in child.stdout


@needs_compiler
def test_all_of_the_text_and_the_ptx():
    child = run_alone(PTX, "--full")
    assert child.returncode == 0, child.stderr
    assert "#line" in child.stdout
    assert ".target sm_90" in child.stdout


@needs_compiler
def test_a_missing_instruction_is_noticed():
    child = run_alone("-c", DELETE_A_WAIT, PTX)
    assert child.returncode == 1, child.stderr
    assert child.stdout.splitlines()[-1].startswith("WRONG: "), child.stdout


# ----------------------------------------------------------------------------- what a reader sees


@functools.cache
def docstring(example):
    return ast.get_docstring(ast.parse(example.read_text()))


@pytest.mark.parametrize("example", ALL, ids=lambda path: path.stem)
def test_the_docstring_says_how_to_run_it_and_what_to_expect(example):
    text = docstring(example)
    assert "USAGE" in text
    assert f"examples/{example.name}" in text
    assert "Expected output" in text
    assert len(example.read_text().splitlines()) <= 135


@pytest.mark.parametrize("example", [HELLO, LAYER], ids=lambda path: path.stem)
def test_the_usage_lines_work_as_they_stand(example):
    lines = [line.strip() for line in docstring(example).splitlines()]
    usage = [line for line in lines if re.match(r"(mpirun .*)?python .*examples/", line)]
    assert len(usage) == 2
    for line in usage:
        words = shlex.split(line)
        words = [{"mpirun": mpirun(), "python": sys.executable}.get(word, word) for word in words]
        if is_open_mpi() and words[0] == mpirun():
            words.insert(1, "--oversubscribe")
        child = run_program(words)
        assert child.returncode == 0, child.stdout + child.stderr
        # The last line of the docstring is what the last line of the output looks like.
        assert child.stdout.splitlines()[-1].startswith(lines[-1][:8]), child.stdout
