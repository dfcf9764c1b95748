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
OWN = FOLDER / "07_own_kernel.py"
DECODE = FOLDER / "09_decode.py"
ALL = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
WITH_FAULT = Path(__file__).with_name("with_fault.py")
NUM_EXPERTS_OF_DIGITS = 8
STEPS_OF_DIGITS = 150

MISSING = [n for n in ("matplotlib", "tqdm") if importlib.util.find_spec(n) is None]
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


@pytest.mark.ranks(2)
def test_decoding(num_ranks):
    if 8 % num_ranks:
        pytest.skip("8 experts are for 1, 2, 4 or 8 ranks")
    assert_says_ok(run_ranks(DECODE, num_ranks))


@pytest.mark.parametrize("example", [HELLO, LAYER], ids=lambda path: path.stem)
def test_round_trips(example, num_ranks):
    assert_says_ok(run_ranks(example, num_ranks))


@needs_extra
@pytest.mark.ranks(3)
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
    """Losses of one process in float64; ``test_training…`` compares others with these."""
    run, losses = train(1, tmp_path_factory.mktemp("alone"), "--dtype", "float64")
    run.check()
    return np.loadtxt(losses)


@needs_extra
@pytest.mark.ranks(2)
def test_training_does_not_depend_on_the_number_of_ranks(num_ranks, losses_alone, tmp_path):
    picture = tmp_path / "digits.png"
    run, losses = train(num_ranks, tmp_path, "--dtype", "float64", "--plot", picture)
    if NUM_EXPERTS_OF_DIGITS % num_ranks:
        assert run.returncode != 0
        assert not run.timed_out, run
        assert run.outputs[0].strip() == (
            f"{NUM_EXPERTS_OF_DIGITS} experts are for 1, 2, 4 or 8 ranks, not {num_ranks}"
        ), run
        assert not "".join(run.outputs[1:]).strip(), run
        return
    run.check()
    assert_png(picture)
    assert losses_alone.shape == (STEPS_OF_DIGITS,)
    np.testing.assert_allclose(np.loadtxt(losses), losses_alone, rtol=1e-6, atol=0)
    accuracy = float(re.search(r"test accuracy ([0-9.]+) %", run.outputs[0])[1])
    assert accuracy >= 95, run


NO_EXTRA = """
import runpy, sys
for name in ("matplotlib", "tqdm", "sklearn", "cupy", "cuda"):
    sys.modules[name] = None  # as where they are not installed
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("example", [LAYER, DIGITS, PARTICLES, OVERLAP], ids=lambda path: path.stem)
def test_examples_need_no_more_than_the_first_command_installs(example, tmp_path):
    script, losses = tmp_path / "no_extra.py", tmp_path / "losses"
    script.write_text(NO_EXTRA)
    assert_says_ok(run_ranks(script, 2, example, *(("--losses", losses) * (example == DIGITS))))
    if example == DIGITS:  # in float32, as everywhere by default
        values = np.loadtxt(losses)
        assert len(values) == STEPS_OF_DIGITS
        assert values[-20:].mean() < values[0] / 50


@pytest.mark.parametrize("example", [DIGITS, PARTICLES], ids=lambda path: path.stem)
def test_a_picture_without_matplotlib_is_refused_before_the_work(example, tmp_path):
    script = tmp_path / "no_extra.py"
    hidden = "import importlib.util\nimportlib.util.find_spec = lambda name: None\n"
    script.write_text(NO_EXTRA.replace("sys.argv = sys", hidden + "sys.argv = sys"))
    run = run_ranks(script, 2, example, "--plot", "x.png")
    assert run.returncode != 0, run
    assert run.outputs[0].strip() == "--plot needs matplotlib: pip install matplotlib", run
    assert not run.outputs[1].strip(), run


def test_three_ranks_for_eight_experts_are_one_sentence():
    run = run_ranks(DIGITS, 3)
    assert run.returncode != 0, run
    assert "".join(run.outputs).strip() == "8 experts are for 1, 2, 4 or 8 ranks, not 3", run


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
CHANGE_THE_PTX = """
import dataclasses, re, runpy, sys
import deepep_cupy
from deepep_cupy.jit import compile as compiling
wrong, right, where = sys.argv[1:4]
sys.argv = sys.argv[4:]
change = lambda ptx: re.sub(wrong, right, ptx)
ptx, text = deepep_cupy.kernel_ptx, compiling.compile_text
if where == "kernels":
    deepep_cupy.kernel_ptx = lambda *a, **k: change(ptx(*a, **k))
else:
    made = lambda *a, **k: (one := text(*a, **k), dataclasses.replace(one, ptx=change(one.ptx)))[1]
    compiling.compile_text = made
sys.path.insert(0, re.sub("/[^/]*$", "", sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_alone(*words, **variables):
    return run_program([sys.executable, *map(str, words)], **variables)


def run_program(words, **variables):
    return subprocess.run(
        words,
        cwd=ROOT,
        env=env.child_environment(variables, ROOT),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@needs_compiler
@pytest.mark.parametrize(
    ("arch", "loads", "variable"),
    [("sm_80", "coherent", None), ("sm_90", "nc", "coherent"), ("sm_90", None, "nc")],
)
def test_the_ptx_is_shown_and_explained(arch, loads, variable):
    chosen = ("--loads", loads) if loads else ()
    child = run_alone(PTX, "--arch", arch, "--ranks", "4", *chosen, DEEPEP_CUPY_LOADS=variable)
    said = child.stdout
    assert child.returncode == 0, said + child.stderr
    kernel = "dispatch" if arch == "sm_80" else "dispatch_bulk"
    assert said.splitlines()[-1] == (
        f"OK: the three lessons, combine and {kernel} have the instructions they are said to have"
    )
    for shown in ("ld_relaxed_sys_v4(row", "ld.relaxed.sys.global.v4.u32 {", "Strong load at"):
        assert shown in said
    assert ("Lesson 3 is left out" in said) == (arch == "sm_80")
    assert ("fence.proxy.async.global\n" in said) == (arch == "sm_90")
    nc = "nc" in (loads or variable)
    assert f"The real combine, {'nc' if nc else 'coherent'} loads" in said
    assert ("non-coherent loads: none" in said) != nc
    assert ("non-coherent loads: ld.global.nc.L1::no_allocate" in said) == nc


@needs_compiler
def test_all_of_the_text_and_the_ptx():
    child = run_alone(PTX, "--full", "--ranks", "4")
    assert child.returncode == 0, child.stderr
    for shown in ("#line", ".target sm_90", "KERNEL combine(", ".visible .entry dispatch_bulk("):
        assert shown in child.stdout


@needs_compiler
@pytest.mark.parametrize(
    ("where", "wrong", "right", "said"),
    [
        ("kernels", "cp.async.bulk.wait_group +0;", "", "dispatch_bulk lacks cp.async.bulk.wait"),
        ("kernels", r"ld\.acquire\.sys", "ld.relaxed.sys", "combine lacks ld.acquire.sys.global"),
        ("kernels", r"ld\.global\.u32", "ld.global.nc.u32", "combine has ld.global.nc.u32"),
        ("lessons", r"fence\.proxy\.async\.global;", "", "3_bulk_copy lacks fence.proxy.async"),
        (
            "lessons",
            "nc.L1::no_allocate",
            "nc",
            "2_non_coherent lacks ld.global.nc.L1::no_allocate",
        ),
    ],
)
def test_a_missing_or_a_wrong_instruction_is_noticed(where, wrong, right, said):
    child = run_alone("-c", CHANGE_THE_PTX, wrong, right, where, PTX, "--ranks", "4")
    assert child.returncode == 1, child.stderr
    last = child.stdout.splitlines()[-1]
    assert last.startswith("WRONG: "), child.stdout
    assert said in last


@needs_compiler
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ranks", "0"), "--ranks must be 1 to 8, got 0"),
        (("--ranks", "9"), "--ranks must be 1 to 8, got 9"),
        (("--hidden", "0"), "--hidden must be 1 to 1048576, got 0"),
        (("--arch", "hopper"), "arch must look like 'sm_90'"),
    ],
)
def test_a_bad_option_is_told_in_a_sentence(options, said):
    child = run_alone(PTX, *options)
    assert child.returncode != 0
    assert child.stderr.startswith("error: ")
    assert said in child.stderr
    assert len(child.stderr.splitlines()) == 1


def test_lessons_are_short():
    lessons = sorted((FOLDER / "lessons").glob("*.cu"))
    assert len(lessons) == 3
    for text in (*lessons, FOLDER / "own_kernel.cu"):
        assert len(text.read_text().splitlines()) <= 60


@needs_compiler
def test_own_kernel():
    run = run_ranks(OWN, 2)
    assert_says_ok(run)
    if "engine: host" in run.outputs[0]:
        assert "so own_kernel.cu was compiled for sm_90" in run.outputs[0]


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_texts_of_the_examples_compile_with_the_options_for_own_kernels(arch):
    from deepep_cupy import kernel_options
    from deepep_cupy.jit.compile import compile_text, parse_target

    for path in (FOLDER / "own_kernel.cu", *sorted((FOLDER / "lessons").glob("*.cu"))):
        if "bulk" in path.name and arch == "sm_80":
            continue
        made = compile_text(
            path.read_text(),
            name=path.stem,
            entry="take_rows" if path.stem == "own_kernel" else "lesson",
            target=parse_target(arch),
            options=kernel_options(arch=arch),
        )
        assert made.resources.spill_bytes == 0
        assert made.resources.registers > 0


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
