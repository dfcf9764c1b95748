"""NVRTC without a driver: PTX, cubin, resources, errors that show the source."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")

from deepep_cupy.engines.gpu.kernels import kernel_options, kernel_ptx, kernel_source, list_kernels
from deepep_cupy.errors import CompileError, ContractError, PlatformError
from deepep_cupy.jit import compile as compile_module
from deepep_cupy.jit import source
from deepep_cupy.jit.compile import (
    Target,
    compile_text,
    compiler_archs,
    nvrtc_options,
    parse_arch,
    parse_resources,
    parse_target,
    target_for,
)

GOOD = """#line 1 "some/file.cu"
struct P { float* x; unsigned long long* flag; };
extern "C" __global__ void __launch_bounds__(64) add(const __grid_constant__ P p) {
    __shared__ float held[64];
    held[threadIdx.x] = p.x[threadIdx.x];
    __syncthreads();
    unsigned long long seen;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(p.flag) : "memory");
    p.x[threadIdx.x] = held[63 - threadIdx.x] * p.x[64] + float(seen);
}
"""
SPILLS = """
extern "C" __global__ void __launch_bounds__(1024) spill(float* x) {
    float v[90];
    _Pragma("unroll") for (int i = 0; i < 90; ++i) v[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    _Pragma("unroll") for (int i = 0; i < 90; ++i) x[i * 1024 + threadIdx.x] = v[89 - i];
}
"""
ARCHES = (80, 90, 100, 120)


def compiled(text=GOOD, arch=90, entry="add", **options):
    return compile_text(text, name=entry, entry=entry, target=Target(arch), **options)


@pytest.mark.parametrize("arch", ARCHES)
def test_one_compile_yields_ptx_cubin_and_resources(arch):
    result = compiled(arch=arch)
    assert f".target sm_{arch}" in result.ptx
    assert ".visible .entry add(" in result.ptx
    assert result.resources.registers in range(8, 64)
    assert result.resources.shared_bytes == 256
    assert (result.resources.spill_bytes, result.resources.stack_bytes) == (0, 0)
    assert result.cubin.startswith(b"\x7fELF")


def test_the_cubin_is_whole():
    cubin = compiled().cubin
    programs, sections = struct.unpack_from("<32xQQ", cubin)
    size, count = struct.unpack_from("<54xHH", cubin)
    section_size, section_count = struct.unpack_from("<58xHH", cubin)
    assert len(cubin) >= max(programs + size * count, sections + section_size * section_count)


def test_no_contraction_and_no_flush_to_zero():
    assert "mul.f32" in compiled().ptx or "mul.rn.f32" in compiled().ptx
    assert not re.search(r"\bfma\b|\.ftz", compiled().ptx)
    contracted = compiled(options=("-arch=sm_90", "-std=c++17", "-ftz=true")).ptx
    assert re.search(r"fma\.rn\.ftz", contracted), "the test must be able to fail"


def test_spills_are_seen():
    result = compiled(SPILLS, entry="spill")
    assert result.resources.spill_bytes > 0
    assert result.resources.registers == 64


def test_the_resources_of_one_of_several_kernels():
    log = (
        "ptxas info    : Compiling entry function 'a' for 'sm_90'\n"
        "ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 512 bytes smem\n"
        "ptxas info    : Compiling entry function 'b' for 'sm_90'\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 16 registers\n"
    )
    a, b = parse_resources(log, "a"), parse_resources(log, "b")
    assert (a.registers, a.shared_bytes, a.stack_bytes, a.spill_bytes) == (255, 512, 8, 16)
    assert (b.registers, b.shared_bytes, b.stack_bytes, b.spill_bytes) == (16, 0, 0, 0)


def test_an_error_shows_the_numbered_source():
    with pytest.raises(CompileError) as raised:
        compiled(GOOD.replace("= p.x[threadIdx.x];", "= p.y[threadIdx.x];"))
    message = str(raised.value)
    assert "kernel add does not compile with options -arch=sm_90 -std=c++17 -fmad=false" in message
    assert 'some/file.cu(4): error: class "P" has no member "y"' in message
    assert "source round some/file.cu:4:" in message
    assert ">     4 |     held[threadIdx.x] = p.y[threadIdx.x];" in message
    assert "      3 |     __shared__ float held[64];" in message


def test_an_error_of_the_assembler_shows_the_ptx():
    with pytest.raises(CompileError) as raised:
        compiled(GOOD.replace("ld.acquire", "ld.aquire"))
    message = str(raised.value)
    assert "Unknown modifier '.aquire'" in message
    assert re.search(r">\s+\d+ \| \s*ld\.aquire\.sys\.global\.u64", message)


def test_an_error_without_line_directives():
    with pytest.raises(CompileError, match=r"source round add.cu:2:\n.*\n>     2 \| int b"):
        compiled("struct A {};\nint b\nstruct C {};\n")


def test_ptx_names_no_folder_of_this_machine():
    assert '.file\t1 "some/file.cu"' in compiled().ptx


@pytest.mark.parametrize(
    ("device", "known", "wanted"),
    [
        (90, (80, 90, 100), "sm_90"),
        (89, (80, 90, 100), "sm_80"),
        (103, (80, 90, 100), "sm_100"),
        (121, (80, 90, 100, 120), "sm_120"),
        (130, (80, 90, 100, 120), "compute_120"),
        (120, (80, 90, 100), "compute_100"),
    ],
)
def test_the_target_for_a_device(device, known, wanted):
    assert str(target_for(device, known)) == wanted
    assert target_for(device, known).option == f"-arch={wanted}"


def test_a_device_older_than_the_compiler_is_refused():
    with pytest.raises(PlatformError, match="cannot compile for sm_70; the oldest it knows is sm"):
        target_for(70, (75, 80))


def test_this_compiler_knows_all_architectures_we_promise():
    assert set(ARCHES) <= set(compiler_archs())


def test_ptx_alone_for_a_gpu_newer_than_the_compiler():
    result = compile_text(GOOD, name="add", entry="add", target=Target(90, cubin=False))
    assert result.cubin == b""
    assert ".visible .entry add(" in result.ptx


@pytest.mark.parametrize("text", ["sm_90", "90", 90, "compute_90", "sm_90a"])
def test_forms_of_an_architecture(text):
    assert parse_arch(text) == 90


@pytest.mark.parametrize("text", ["sm_90x", "hopper", "", 9])
def test_other_forms_are_refused(text):
    with pytest.raises(CompileError, match="arch must look like 'sm_90'"):
        parse_arch(text)


@pytest.mark.parametrize("text", ["sm_20", "sm_42", 75])
def test_architectures_older_than_any_kernel_are_refused(text):
    with pytest.raises(CompileError, match="arch must be sm_80 or newer"):
        parse_arch(text)


def test_an_architecture_keeps_its_suffix():
    assert str(parse_target("sm_100a")) == "sm_100a"
    assert kernel_options(list_kernels()[0].name, "sm_90a")[0] == "-arch=sm_90a"
    assert ".target sm_90a" in kernel_ptx(list_kernels()[0].name, "sm_90a")


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"num_ranks": 9}, "num_ranks must be a whole number from 1 to 8, got 9"),
        ({"num_ranks": True}, "num_ranks must be a whole number from 1 to 8, got True"),
        ({"num_threads": 7}, "num_threads must be a multiple of 32 from 32 to 1024, got 7"),
        ({"num_threads": 5024}, "num_threads must be a multiple of 32 from 32 to 1024, got 5024"),
        ({"max_row_bytes": 0}, "max_row_bytes must be a whole number from 1"),
        ({"loads": "cached"}, "loads must be 'coherent' or 'nc', got 'cached'"),
    ],
)
@pytest.mark.parametrize("function", [kernel_source, kernel_ptx])
def test_sizes_out_of_range_are_refused(function, shape, said):
    with pytest.raises(ContractError, match=said):
        function("barrier", "sm_90", **shape)


def test_a_missing_compiler_is_told(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupy.cuda", None)
    with pytest.raises(PlatformError, match="needs CuPy with NVRTC"):
        compile_module.compiler_version()


# -------------------------------------------------------------------------- the public functions


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPEP_CUPY_CACHE_DIR", str(tmp_path / "cache"))


def test_options_for_nvrtc_and_for_rawmodule():
    name = list_kernels()[0].name
    assert kernel_options(name, "sm_90") == nvrtc_options(Target(90))
    assert "-arch=sm_90" in kernel_options(name, 90)
    plain = kernel_options(name)
    assert not [option for option in plain if "arch" in option or "ftz" in option]


def test_options_for_a_kernel_of_your_own_find_the_wrappers():
    for arch in (None, "sm_90"):
        include, digest = kernel_options(arch=arch)[-2:]
        assert (*kernel_options(list_kernels()[0].name, arch), include, digest) == (
            kernel_options(arch=arch)
        )
        assert Path(include.removeprefix("-I"), "asm", "memory.cuh").is_file()
        assert re.fullmatch(r"-DDEEPEP_CUPY_ASM=0x[0-9a-f]{8}", digest)
    text = '#include "asm/memory.cuh"\nextern "C" __global__ void own(u32* p) { st_u32(p, 1u); }'
    options = kernel_options(arch="sm_80")
    made = compile_text(text, name="own", entry="own", target=Target(80), options=options)
    assert "st.global.u32" in made.ptx
    with pytest.raises(CompileError, match="open source file"):
        compile_text(text, name="own", entry="own", target=Target(80), options=options[:-2])


def test_the_digest_of_the_wrappers_changes_with_them(tmp_path, monkeypatch):
    (tmp_path / "asm").mkdir()
    monkeypatch.setattr(source, "kernel_dir", lambda: tmp_path)
    digests = set()
    for text in ("a", "b"):
        (tmp_path / "asm" / "memory.cuh").write_text(text)
        digests.add(source.include_options()[1])
    assert len(digests) == 2


@pytest.mark.slow
def test_the_text_compiles_as_cupys_rawmodule_compiles_it():
    """CuPy adds its own architecture and ``-ftz=true`` after the options it is given."""
    for spec in list_kernels():
        arch = max(90, spec.min_arch)
        options = (*kernel_options(spec.name), "-ftz=true", f"-arch=sm_{arch}")
        text = kernel_source(spec.name, arch)
        result = compile_text(
            text,
            name=spec.name,
            entry=spec.entry,
            target=Target(arch),
            options=(*options, "--device-as-default-execution-space"),
        )
        assert f".visible .entry {spec.entry}(" in result.ptx


def test_kernel_ptx_is_what_nvrtc_made():
    spec = list_kernels()[0]
    text = kernel_source(spec.name, "sm_90", num_ranks=3)
    made = compile_text(text, name=spec.name, entry=spec.entry, target=Target(90))
    assert kernel_ptx(spec.name, "sm_90", num_ranks=3) == made.ptx
