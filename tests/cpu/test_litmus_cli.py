"""The command ``litmus`` on a simulated GPU: tables, verdicts, exit codes."""

from __future__ import annotations

import contextlib
import json
import sys
import types

import pytest

from deepep_cupy import env
from deepep_cupy.cli import main
from deepep_cupy.engines.gpu import loads as policy
from deepep_cupy.engines.gpu.topology import Gpu, Topology
from deepep_cupy.errors import PlatformError
from deepep_cupy.litmus import command
from deepep_cupy.litmus import runner as litmus
from simulator.gpus import NUM_SMS, Gpus, LitmusGpu
from simulator.ptx import text_of

pytestmark = pytest.mark.sim
TEXT = text_of("litmus")
GPU = Gpu(0, "here", 0, "GPU-1", "Test GPU", NUM_SMS, (8, 9), 1 << 30)


class Region:
    closed = False

    def __init__(self, base):
        self.base, self.peer_base = base, [base]

    def close(self, meet):
        meet()
        Region.closed = True


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """One simulated GPU, a cache folder, and fewer tests that count sooner."""
    text = {"ptx": TEXT, "has_l1": True}
    device = types.SimpleNamespace(
        Device=lambda number: contextlib.nullcontext(),
        runtime=types.SimpleNamespace(driverGetVersion=lambda: 13000),
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=device))
    monkeypatch.setattr(policy, "_KERNEL_DRIVER", tmp_path / "none")
    monkeypatch.setattr(policy, "LEAST_CHECKS", 16)
    monkeypatch.setattr(litmus.Words, "rounds", lambda words, protocol: 2)
    monkeypatch.setitem(main.COMMANDS, "litmus", "")
    monkeypatch.setattr(command, "survey", lambda group: Topology((GPU,)))
    monkeypatch.setattr(command, "open_region", lambda group, device, nbytes: Region(base))
    monkeypatch.setenv("DEEPEP_CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("DEEPEP_CUPY_LOADS", raising=False)
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)

    base = Gpus().base(0, 0)  # the same of each

    def machine(num_sms):
        assert num_sms == NUM_SMS
        gpus = Gpus(has_l1=text["has_l1"])
        return LitmusGpu(gpus, 0, gpus.run, {"litmus": text["ptx"]})

    def some_tests(producers, *, bulk):
        wanted = {access.load(loads) for access in policy.ACCESSES for loads in ("nc", "coherent")}
        for test in litmus.every_test(producers, bulk=bulk):
            in_force = test.protocol in ("reader", "boundary") and test.load in wanted
            teeth = test.protocol == "relaxed" and test.nbytes == 16
            if in_force or teeth:
                yield test

    monkeypatch.setattr(command, "CupyMachine", machine)
    monkeypatch.setattr(command, "every_test", some_tests)
    return text


def run(*arguments):
    return main.main(["litmus", "--words", "8", "--rounds", "4", *arguments])


def verdict():
    return policy.find_verdicts("Test GPU", "CUDA 13.0")


def test_a_gpu_that_behaves(gpu, capsys):
    assert run() == 0
    said = capsys.readouterr().out
    assert "rank 0 on Test GPU" in said
    assert "another kernel writes, the reader's pointer is local" in said
    assert "nc: passed" in said
    assert "coherent: passed" in said
    assert "in force: coherent (sm_89 is not in the policy table" in said
    (found,) = verdict()
    assert (found.arch, found.num_gpus) == (89, 1)
    assert f"kept in {env.cache_dir() / 'v2' / 'litmus'}" in said
    assert Region.closed
    # From now on `auto` takes nc where ranks share this GPU, and says why.
    assert run() == 0
    assert "in force: nc (the litmus test of" in capsys.readouterr().out


def test_the_table_shows_what_is_stale(gpu, capsys):
    run()
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if line.startswith("load "))
    assert head.split()[:3] == ["load", "bytes", "reader"]
    column = head.index("relaxed")
    plain = next(line for line in lines if line.startswith("ld.global.nc  "))
    assert plain[column:].startswith("100.0 %")
    bypassing = next(line for line in lines if line.startswith("ld.volatile.global "))
    assert bypassing[column:].split()[0] == "0"


def test_a_planted_fault_is_caught_and_nothing_is_kept(gpu, capsys):
    assert run("--plant") == 1
    said = capsys.readouterr()
    assert "CONTRADICTED: coherent is in force, and planted read" in said.err
    assert "16 stale, 0 torn, 0 wrong of 16" in said.err
    assert not verdict()


def test_a_planted_fault_on_a_gpu_without_l1_is_not_seen(gpu, capsys):
    gpu["has_l1"] = False
    assert run("--plant") == 0
    assert "was not seen" in capsys.readouterr().err
    assert run() == 0
    assert "nc: inconclusive" in capsys.readouterr().out
    assert run() == 0
    assert "in force: coherent" in capsys.readouterr().out


def no_acquire(text):
    """A GPU on which the acquire does nothing and no_allocate is not heeded."""
    wait = "@!%p_watched ld.acquire.sys.global.u32 %r_seen, [%rd_poll];"
    assert text.count(wait) == 1
    text = text.replace(wait, wait.replace("acquire", "relaxed"))
    return text.replace("ld.global.nc.L1::no_allocate.L2::256B.", "ld.global.nc.")


def test_the_loads_in_force_are_contradicted(gpu, capsys, monkeypatch):
    gpu["ptx"] = no_acquire(TEXT)
    assert run() == 0  # coherent is in force, and holds
    assert "nc: contradicted" in capsys.readouterr().out
    monkeypatch.setenv("DEEPEP_CUPY_LOADS", "nc")
    assert run() == 1
    said = capsys.readouterr().err
    assert "CONTRADICTED: nc is in force, and peer read: ld.global.nc.L1::no_allocate.L2" in said
    # The verdict on disk keeps `auto` away from nc even where the table would allow it.
    monkeypatch.setattr(policy, "NC_ARCHITECTURES", {89: "seen"})
    monkeypatch.delenv("DEEPEP_CUPY_LOADS")
    assert run() == 0
    assert "in force: coherent (the litmus test of" in capsys.readouterr().out


def test_json_holds_everything(gpu, capsys, tmp_path):
    assert run("--json", "--no-save") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["judgements"]["nc"]["status"] == "passed"
    assert printed["in_force"]["loads"] == "coherent"
    assert printed["gpu"] == "Test GPU"
    assert {"producer", "load", "checks", "stale"} <= set(printed["readings"][0])
    path = tmp_path / "out.json"
    assert run("--json", str(path), "--no-save") == 0
    assert "nc: passed" in capsys.readouterr().out
    assert json.loads(path.read_text())["readings"] == printed["readings"]
    assert not verdict()


def test_tests_without_a_count_end_the_run(gpu, capsys):
    gpu["ptx"] = TEXT.replace("[%rd_flag], %r_round", "[%rd_flag], %r_end")
    assert run("--limit", "0.0002") == 1
    said = capsys.readouterr().err
    assert said.count("gave up waiting for") == 3
    assert "too many tests gave no count" in said
    assert not verdict()


def test_quick_runs_are_not_kept(gpu, monkeypatch):
    monkeypatch.setattr(command, "_QUICK_ROUNDS", 2)
    assert run("--quick") == 0
    assert not verdict()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "0"], "--rounds must be in 1..65534, got 0"),
        (["--rounds", "65535"], "--rounds must be in 1..65534"),
        (["--words", "1025"], "--words must be in 1..1024"),
        (["--limit", "0"], "--limit must be more than 0"),
        (["--json", "/nowhere/x"], "--json must name a file in a folder that exists"),
        (["--limit", "nan"], "--limit must be more than 0"),
    ],
)
def test_bad_arguments(gpu, capsys, arguments, said):
    assert run(*arguments) == 1
    assert said in capsys.readouterr().err


def test_no_gpu_is_told(monkeypatch, capsys, gpu):
    poor = Gpu(0, "here", objection="no GPU is visible")
    monkeypatch.setattr(command, "survey", lambda group: Topology((poor,)))
    assert run() == 1
    assert "no usable GPU: rank 0: no GPU is visible" in capsys.readouterr().err


def test_who_writes_depends_on_who_is_there():
    def producers(*uuids):
        gpus = tuple(
            Gpu(rank, "here", rank, uuid, "Test GPU", 2, (9, 0)) for rank, uuid in enumerate(uuids)
        )
        return command._producers(Topology(gpus))

    assert producers("a")[0] == ("kernel", "block")
    assert producers("a", "b")[0] == ("peer", "kernel", "block")
    assert producers("a", "a")[0] == ("kernel", "block")
    assert "ranks from 2 to 2 only listen" in producers("a", "b", "c")[1]


def test_without_mpirun_no_mpi_is_needed(monkeypatch):
    monkeypatch.setattr(env, "launcher_size", lambda: 1)
    assert command._group().allgather(3) == [3]
    monkeypatch.setattr(env, "launcher_size", lambda: 2)
    monkeypatch.setitem(sys.modules, "deepep_cupy.ranks.mpi", None)
    with pytest.raises(PlatformError, match="cannot be imported"):
        command._group()
