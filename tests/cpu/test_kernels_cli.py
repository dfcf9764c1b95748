"""The commands ``kernels`` and ``ptx``: what they print, what they refuse, what they need."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepep_cupy.cli import kernels, ptx
from deepep_cupy.engines.gpu.kernels import get_kernel, kernel_source, list_kernels, shape_constants
from deepep_cupy.errors import CompileError, ContractError, DeepEPCupyError, PlatformError
from deepep_cupy.jit.inspect import find_tool

ROOT = Path(__file__).resolve().parents[2]
NAME = "barrier"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPEP_CUPY_CACHE_DIR", str(tmp_path / "cache"))
    for variable in ("PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(variable, raising=False)


def call(command, *arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(argument) for argument in arguments]))


def needs_nvrtc():
    pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")


def test_list_names_every_kernel(capsys):
    assert call(kernels, "list") == 0
    said = capsys.readouterr().out
    for spec in list_kernels():
        assert f"\n{spec.name} " in said
        assert spec.doc in said


def test_show_prints_the_text_that_is_compiled(capsys):
    arguments = ("--ranks", 3, "--hidden", 100, "--itemsize", 4, "--loads", "nc", "--threads", 64)
    assert call(kernels, "show", NAME, "--arch", "sm_80", *arguments) == 0
    wanted = kernel_source(
        NAME, "sm_80", num_ranks=3, max_row_bytes=400, loads="nc", num_threads=64
    )
    assert capsys.readouterr().out == wanted


def test_show_ptx_and_instructions(capsys):
    needs_nvrtc()
    assert call(kernels, "show", NAME, "--format", "ptx", "--arch", "sm_90") == 0
    said = capsys.readouterr().out
    assert ".target sm_90" in said
    assert f".visible .entry {NAME}(" in said
    assert call(kernels, "show", NAME, "--instructions", "--arch", "sm_90") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == (
        ["n", "class", "space", "order", "scope", "cache", "instruction", "line", "called", "from"]
    )
    acquires = [line for line in lines if "ld.acquire.sys" in line]
    assert acquires
    assert "asm/memory.cuh:" in acquires[0]


def test_show_sass(capsys):
    needs_nvrtc()
    if find_tool("nvdisasm") is None:
        pytest.skip("no nvdisasm here: pip install nvidia-cuda-nvdisasm")
    assert call(kernels, "show", NAME, "--format", "sass") == 0
    said = capsys.readouterr().out
    assert "LDG.E.64.STRONG.SYS" in said
    assert re.search(
        r"^// asm/memory.cuh:\d+ ← comm/.*:\d+ ← .*barrier.cu:\d+$", said, re.MULTILINE
    )


def test_show_writes_a_page(tmp_path, capsys):
    needs_nvrtc()
    page = tmp_path / "new" / "page.html"
    assert call(kernels, "show", NAME, "--html", page) == 0
    assert capsys.readouterr().out == f"{page}: {page.stat().st_size:,} bytes\n"
    assert "sm_90, coherent loads, 2 ranks, rows up to 14,336 bytes" in page.read_text()


def test_show_writes_pages_of_all_kernels(tmp_path, capsys, monkeypatch):
    needs_nvrtc()
    few = [spec for spec in list_kernels() if spec.name in (NAME, "stage", "dispatch_bulk")]
    monkeypatch.setattr(kernels, "list_kernels", lambda: few)
    assert call(kernels, "show", "--html", tmp_path, "--arch", "sm_80") == 0
    assert "index.html: 2 pages, " in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.html")} == {
        "index.html",
        f"{NAME}.html",
        "stage.html",
    }
    index = (tmp_path / "index.html").read_text()
    assert "dispatch_bulk, which needs sm_90" in index
    for link in re.findall(r'href="([^"#]+)"', index + (tmp_path / "stage.html").read_text()):
        assert (tmp_path / link).is_file(), link


def test_a_page_without_nvdisasm_has_the_ptx_and_says_why(tmp_path, monkeypatch):
    needs_nvrtc()
    monkeypatch.setattr("deepep_cupy.jit.inspect.find_tool", lambda name: None)
    assert call(kernels, "show", NAME, "--html", tmp_path / "page.html") == 0
    said = (tmp_path / "page.html").read_text()
    assert "PTX alone: showing SASS needs nvdisasm" in said
    assert "fence.acq_rel.sys" in said
    assert "fence.acq_rel.sys" in around_text()
    with pytest.raises(PlatformError, match="needs nvdisasm, which is neither in this"):
        call(kernels, "show", NAME, "--format", "sass")


def around_text():
    from contextlib import redirect_stdout
    from io import StringIO

    with redirect_stdout(StringIO()) as said:
        assert call(kernels, "show", NAME, "--around", "fence.acq_rel", "--lines", 1) == 0
    return said.getvalue()


def test_around_is_plain_in_a_pipe():
    needs_nvrtc()
    said = around_text()
    assert "\x1b" not in said
    assert "here   Release" in said


def test_diff_of_two_and_its_page(tmp_path, capsys):
    needs_nvrtc()
    assert call(kernels, "diff", f"{NAME}:ranks=2", f"{NAME}:ranks=4,threads=256") == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].split()[:2] == ["PTX", "instruction"]
    page = tmp_path / "diff.html"
    assert call(kernels, "diff", "stage", "--html", page) == 0
    assert "Only load instructions differ" in page.read_text()
    assert "stage:nc" in page.read_text()
    assert call(kernels, "diff", f"{NAME}:coherent", f"{NAME}:nc") == 0
    assert "The two have the same PTX instructions" in capsys.readouterr().out


def test_compile_prints_what_a_kernel_takes_and_fills_the_cache(capsys):
    needs_nvrtc()
    arguments = ("compile", NAME, "--arch", "sm_80", "--arch", "sm_90", "--strict")
    assert call(kernels, *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["kernel", "arch", "loads", "registers", "shared", "stack", "spills"]
    assert [line.split()[:3] for line in lines[1:]] == [
        [NAME, "sm_80", "coherent"],
        [NAME, "sm_90", "coherent"],
    ]
    assert all(line.endswith("compiled") for line in lines[1:])
    spec = get_kernel(NAME)
    assert int(lines[1].split()[4]) == spec.num_shared_bytes(shape_constants("sm_80"))
    assert call(kernels, *arguments) == 0
    assert all(line.endswith("cached") for line in capsys.readouterr().out.splitlines()[1:])


def test_strict_fails_on_local_memory(tmp_path, capsys):
    needs_nvrtc()
    path = tmp_path / "stack.cu"
    path.write_text(
        'extern "C" __global__ void stack(int* x) { int v[64];\n'
        "for (int i = 0; i < 64; ++i) v[x[i]] = i;\n"
        "for (int i = 0; i < 64; ++i) x[i] = v[x[i + 64]]; }\n"
    )
    assert call(kernels, "compile", "--file", path, "--arch", "sm_90") == 0
    assert "256" in capsys.readouterr().out
    with pytest.raises(CompileError, match=r"local memory is used .* by stack for sm_90"):
        call(kernels, "compile", "--file", path, "--arch", "sm_90", "--strict")


def test_a_text_that_failed_can_be_compiled_again_from_its_file(tmp_path, capsys):
    needs_nvrtc()
    path = tmp_path / f"{NAME}.sm_90.cu"
    path.write_text(kernel_source(NAME))
    assert call(kernels, "compile", "--file", path) == 0
    registers = capsys.readouterr().out.splitlines()[1].split()
    assert registers[0] == NAME
    path.write_text(kernel_source(NAME) + "\nint oops\n")
    with pytest.raises(CompileError, match="does not compile"):
        call(kernels, "compile", "--file", path)


def test_diff_of_a_kernel_that_reads_no_rows(capsys):
    needs_nvrtc()
    assert call(kernels, "diff", NAME, "--loads", "nc", "coherent") == 0
    assert f"{NAME}: the same memory instructions with nc and coherent" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "nothing"), "no kernel is named 'nothing'; there are: barrier"),
        (("show", NAME, "--arch", "hopper"), "or 'sm_90a', got 'hopper'"),
        (("show", NAME, "--ranks", "0"), "--ranks must be a whole number from 1 to 8, got 0"),
        (("compile", NAME, "--ranks", "99"), "--ranks must be a whole number from 1 to 8, got 99"),
        (("compile", NAME, "--threads", "7"), "--threads must be a multiple of 32 from 32 to 1024"),
        (("compile", NAME, "--threads", "5000"), "from 32 to 1024, got 5000"),
        (("show", NAME, "--hidden", str(1 << 31)), "--hidden must be a whole number from 1 to"),
        (("show", NAME, "--itemsize", "-1"), "--itemsize must be a whole number from 1 to"),
        (("compile", "--arch", "sm_42"), "arch must be sm_80 or newer, got 'sm_42'"),
        (("show", NAME, "--arch", "sm_20"), "arch must be sm_80 or newer, got 'sm_20'"),
        (("compile", NAME, "--arch", "sm_799"), "does not know sm_799; it knows sm_"),
        (("compile", "dispatch_bulk", "--arch", "sm_80"), "dispatch_bulk needs sm_90 or newer"),
        (("show", NAME, "--format", "sass", "--instructions"), "goes without --format sass"),
        (("compile", NAME, "--file", "x.cu"), "--file goes without names of kernels"),
        (("show", "dispatch_bulk", "--format", "ptx", "--arch", "sm_80"), "needs sm_90 or newer"),
        (("compile", "--file", "/nowhere/x.cu"), "--file /nowhere/x.cu cannot be read"),
        (("show",), "give a NAME, or --html FOLDER"),
        (("diff", f"{NAME}:fast", NAME), "the word 'fast' must be coherent, nc, sm_90"),
        (("diff", NAME, "nothing"), "no kernel is named 'nothing'"),
    ],
)
def test_what_cannot_be_done_is_told(arguments, said):
    with pytest.raises(DeepEPCupyError) as raised:
        call(kernels, *arguments)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--around", "ld.foo"), "has no instruction ld.foo; of memory and order it has atom."),
        (("--around", "header.cuh:9999"), "comm/header.cuh has lines 1 to"),
        (("--around", "nothing.cuh:1"), "no file nothing.cuh"),
        (("--around", "fence.acq_rel", "--lines", "-1"), "--lines must be at least 0"),
        (("--html", "/proc/nothing/x.html"), "--html /proc/nothing/x.html cannot be written"),
    ],
)
def test_what_is_not_in_a_kernel_is_told(arguments, said):
    needs_nvrtc()
    with pytest.raises(ContractError) as raised:
        call(kernels, "show", NAME, *arguments)
    assert said in str(raised.value)


@pytest.mark.parametrize("command", [kernels, ptx])
def test_rank_0_alone_prints(command, monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", "1")
    assert call(command, "list") == 0
    assert capsys.readouterr().out == ""


def test_ptx_list_and_verify(capsys):
    assert call(ptx, "list") == 0
    assert capsys.readouterr().out.startswith("module")
    if find_tool("ptxas") is None:
        assert call(ptx, "verify", "--no-ptxas") == 0
    else:
        assert call(ptx, "verify") == 0
    assert "text and manifest agree" in capsys.readouterr().out


def test_ptx_show(capsys):
    for module in ptx.list_modules():
        assert call(ptx, "show", module.name) == 0
        assert capsys.readouterr().out == module.path.read_text()
    with pytest.raises(ContractError, match="no PTX module is named 'nothing'"):
        call(ptx, "show", "nothing")


def test_ptx_verify_fails_on_what_it_finds(monkeypatch):
    monkeypatch.setattr(ptx, "verify", lambda: ["x.ptx: not in the manifest"])
    with pytest.raises(CompileError, match=r"x\.ptx: not in the manifest"):
        call(ptx, "verify", "--no-ptxas")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("kernels", ["list"]),
        ("kernels", ["show", NAME]),
        ("ptx", ["list"]),
        ("ptx", ["verify", "--no-ptxas"]),
    ],
)
def test_what_needs_neither_cupy_nor_mpi(command, arguments):
    program = (
        "import sys, argparse\n"
        "for name in ('cupy', 'mpi4py', 'cuda', 'ml_dtypes'): sys.modules[name] = None\n"
        f"from deepep_cupy.cli import {command} as command\n"
        "parser = argparse.ArgumentParser()\n"
        "command.add_arguments(parser)\n"
        f"sys.exit(command.run(parser.parse_args({arguments!r})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
