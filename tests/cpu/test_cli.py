"""The command line: help, exit codes, and ``env`` on machines that lack this and that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepep_cupy import env as variables
from deepep_cupy.cli import env, main
from deepep_cupy.engines import select
from deepep_cupy.errors import PlatformError

ROOT = Path(__file__).resolve().parents[2]

# Imports of these raise ImportError, as where they are not installed.
ABSENT = "import sys\nfor name in {absent!r}:\n    sys.modules[name] = None\n"
CALL = "from deepep_cupy.cli.main import main\nsys.exit(main({arguments!r}))\n"


def command(*arguments, absent=(), **environment):
    """Run one command in a fresh process that cannot import ``absent``."""
    program = ABSENT.format(absent=absent) + CALL.format(arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# ------------------------------------------------------------------------------------ dispatcher


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
def test_every_command_has_its_module_and_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main([name, "--help"])
    assert ended.value.code == 0
    assert f"python -m deepep_cupy {name}" in capsys.readouterr().out


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(f"    {name} " in said for name in main.COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["env", "--nonsense"]])
def test_wrong_arguments_end_with_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m deepep_cupy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (PlatformError("no GPU here"), 1, "error: no GPU here\n"),
        (KeyboardInterrupt(), 130, ""),
        (None, 3, ""),
    ],
)
def test_exit_codes(raised, code, said, monkeypatch, capsys):
    def run(args):
        if raised is not None:
            raise raised
        return 3

    monkeypatch.setattr(env, "run", run)
    assert main.main(["env"]) == code
    assert capsys.readouterr().err == said


def test_a_reader_that_stops_early_is_no_error():
    """As in ``python -m deepep_cupy env | head -1``."""
    child = subprocess.Popen(
        [sys.executable, "-m", "deepep_cupy", "env"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    child.stdout.close()  # before anything was written
    with child.stderr:
        said = child.stderr.read()
    child.wait(timeout=120)
    assert said == ""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["env"], ["kernels", "list"]])
def test_works_without_cupy_and_mpi(arguments):
    child = command(*arguments, absent=("cupy", "cuda", "mpi4py"))
    assert child.returncode == 0, child.stderr
    assert child.stdout


# ------------------------------------------------------------------------------------------- env


def test_env_works_with_numpy_alone():
    child = command("env", absent=("cupy", "cuda", "mpi4py", "ml_dtypes"))
    assert child.returncode == 0, child.stderr
    assert child.stderr == ""
    assert "auto" in child.stdout
    assert "host" in child.stdout


def test_env_shows_every_variable_with_its_value():
    child = command("env", DEEPEP_CUPY_LOADS="coherent", DEEPEP_CUPY_CACHE_DIR="/somewhere")
    assert child.returncode == 0, child.stderr
    table = [line.split() for line in child.stdout.splitlines() if line.strip()]
    assert ["DEEPEP_CUPY_LOADS", "coherent"] in table
    assert ["DEEPEP_CUPY_CACHE_DIR", "/somewhere"] in table
    assert ["kernel", "cache", "/somewhere"] in table
    shown = {words[0] for words in table}
    assert {variable.name for variable in variables.VARIABLES} <= shown


def test_env_shows_a_wrong_value_and_goes_on():
    child = command("env", DEEPEP_CUPY_LOADS="sometimes")
    assert child.returncode == 0, child.stderr
    assert "'sometimes'" in child.stdout
    assert "engine" in child.stdout


def test_env_speaks_once_under_mpirun():
    child = command("env", PMI_RANK="1", PMI_SIZE="2")
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")


def test_env_aligns_its_columns():
    text = env._table({"one": [("a", "x")], "two": [("longer", "y"), ("b", "")]})
    assert text == "one\n  a       x\n\ntwo\n  longer  y\n  b"


class Runtime:
    """What ``cupy.cuda.runtime`` says of two GPUs."""

    def __init__(self, *, peers=True):
        self.peers = peers

    def driverGetVersion(self):
        return 13000

    def getDeviceCount(self):
        return 2

    def getDeviceProperties(self, device):
        return {
            "name": b"Test GPU",
            "uuid": bytes(range(16)),
            "major": 9,
            "minor": 0,
            "multiProcessorCount": 132,
            "totalGlobalMem": 141 << 30,
        }

    def deviceGetPCIBusId(self, device):
        return f"0000:0{device}:00.0"

    def deviceCanAccessPeer(self, device, other):
        return int(self.peers)


class CuPy:
    """Stands for the module ``cupy``."""

    def __init__(self, runtime):
        self.cuda = self
        self.runtime = runtime


def test_env_describes_gpus():
    gpus = env._gpus(CuPy(Runtime()))
    assert env._gpu_rows(gpus)[1] == (
        "GPU 1",
        "Test GPU, sm_90, 132 SMs, 141 GiB, GPU-00010203-0405-0607-0809-0a0b0c0d0e0f, "
        "PCI 0000:01:00.0, peer access to all others",
    )
    assert env._driver(CuPy(Runtime())).startswith("CUDA 13.0")


@pytest.mark.parametrize(
    ("vote", "rows"),
    [
        (None, [("auto", "cuda, if every rank can")]),
        ("it is too old", [("auto", "host"), ("why not cuda", "it is too old")]),
    ],
)
def test_env_shows_the_vote_of_the_engine(vote, rows, monkeypatch):
    monkeypatch.setattr(select, "why_not_cuda", lambda spec, device: vote)
    assert env._engine(env._gpus(CuPy(Runtime())))[: len(rows)] == rows


def test_env_shows_which_loads_a_buffer_would_take(monkeypatch, tmp_path):
    monkeypatch.setattr(select, "why_not_cuda", lambda spec, device: None)
    monkeypatch.setenv("DEEPEP_CUPY_CACHE_DIR", str(tmp_path))  # no verdict there
    for given, said in {"auto": "coherent: ", "nc": "nc: ", "coherent": "coherent: "}.items():
        monkeypatch.setenv("DEEPEP_CUPY_LOADS", given)
        rows = dict(env._engine(env._gpus(CuPy(Runtime()))))
        assert rows["loads"].startswith(said), rows


def test_env_shows_which_gpus_reach_each_other():
    assert "peer access to none" in env._gpu_rows(env._gpus(CuPy(Runtime(peers=False))))[0][1]


def test_env_says_that_a_driver_is_broken(monkeypatch):
    def broken(self):
        message = "cudaErrorUnknown: unknown error\nmore"
        raise RuntimeError(message)

    monkeypatch.setattr(Runtime, "getDeviceCount", broken)
    assert env._gpus(CuPy(Runtime())) == "cudaErrorUnknown: unknown error"
