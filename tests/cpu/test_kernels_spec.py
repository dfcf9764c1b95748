"""Parameter structs: what Python packs is what compilers read."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from deepep_cupy._resources import kernel_dir
from deepep_cupy.engines.gpu.kernels import get_kernel, list_kernels, shape_constants
from deepep_cupy.errors import ContractError
from deepep_cupy.jit.source import prelude
from deepep_cupy.jit.spec import KernelSpec, Param, Struct

INNER = Struct("Inner", (Param("tag", "u8"), Param("where", "u64*"), Param("last", "i16")))
MIXED = KernelSpec(
    name="mixed_bag",
    source="mixed.cu",
    entry="mixed_bag",
    doc="every type, at offsets that need padding",
    threads=32,
    params=(
        Param("first", "u8"),
        Param("half", "u16"),
        Param("peers", "const u8*", "kNumRanks", doc="one a rank"),
        Param("small", "i8", 3),
        Param("ratio", "f64"),
        Param("inner", INNER, doc="by value"),
        Param("pair", INNER, 2),
        Param("count", "i32"),
        Param("big", "i64"),
        Param("scale", "f32"),
        Param("flags", "u32", "kNumRanks"),
        Param("any", "void*"),
        Param("tail", "u8"),
    ),
)
CONSTANTS = {"kNumRanks": 3, "kBig": 1 << 40, "kNegative": -7}
TYPES = """
using u8 = unsigned char; using u16 = unsigned short; using u32 = unsigned int;
using u64 = unsigned long long; using i8 = signed char; using i16 = short; using i32 = int;
using i64 = long long; using f32 = float; using f64 = double;
"""


def specs():
    return [MIXED, *list_kernels()]


def constants_of(spec):
    return CONSTANTS if spec is MIXED else shape_constants("sm_90", num_ranks=3)


def probe(spec):
    """A text that compiles only where the compiler agrees on every offset."""
    constants = constants_of(spec)
    return TYPES + prelude(spec, constants) + spec.struct.offset_asserts(constants)


def test_offsets_of_the_mixed_struct():
    fields = MIXED.layout(CONSTANTS).fields
    assert [(name, field.offset) for name, field in fields.items()] == [
        ("first", 0),
        ("half", 2),
        ("peers", 8),
        ("small", 32),
        ("ratio", 40),
        ("inner.tag", 48),
        ("inner.where", 56),
        ("inner.last", 64),
        ("pair[0].tag", 72),
        ("pair[0].where", 80),
        ("pair[0].last", 88),
        ("pair[1].tag", 96),
        ("pair[1].where", 104),
        ("pair[1].last", 112),
        ("count", 120),
        ("big", 128),
        ("scale", 136),
        ("flags", 140),
        ("any", 152),
        ("tail", 160),
    ]
    assert MIXED.layout(CONSTANTS).nbytes == 168
    assert MIXED.struct.name == "MixedBagParams"


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.name)
def test_the_cpp_compiler_agrees_on_every_offset(spec, tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    path = tmp_path / "probe.cpp"
    path.write_text(probe(spec))
    command = [compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.name)
def test_nvrtc_agrees_on_every_offset(spec):
    compile_module = pytest.importorskip("deepep_cupy.jit.compile")
    pytest.importorskip("cupy")
    if int(compile_module.compiler_version().split(".")[0]) < 13:
        pytest.skip("NVRTC 12 has no __builtin_offsetof; sizeof is asserted in every text")
    text = probe(spec) + f'extern "C" __global__ void probe({spec.struct.name} p) {{}}\n'
    compiled = compile_module.compile_text(
        text, name="probe", entry="probe", target=compile_module.Target(80)
    )
    assert f"[{spec.layout(constants_of(spec)).nbytes}]" in compiled.ptx


def test_the_probe_can_fail(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    path = tmp_path / "probe.cpp"
    path.write_text(probe(MIXED).replace("f32 scale;", "f64 scale;"))
    command = [compiler, "-std=c++17", "-fsyntax-only", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "offset of MixedBagParams.flags" in done.stderr


def test_constants_have_their_values_and_no_storage():
    text = prelude(MIXED, CONSTANTS)
    assert "    kNumRanks = 3,\n    kNegative = -7,\n" in text
    assert f"enum : long long {{\n    kBig = {1 << 40},\n}};" in text
    assert "constexpr" not in text
    assert "const u8* peers[kNumRanks];  // one a rank" in text
    assert text.index("struct Inner {") < text.index("struct MixedBagParams {")
    assert text.count("struct Inner {") == 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Param("x", "u128"), "unknown C type 'u128'"),
        (lambda: Param("x", "u8**"), "unknown C type 'u8**'"),
        (lambda: Param("2x", "u8"), "'2x' is not a C identifier"),
        (lambda: Param("x", "u8", 0), "count must be at least 1, got 0"),
        (lambda: Struct("S", ()), "at least one field"),
        (lambda: Struct("S", (Param("x", "u8"), Param("x", "u16"))), "'x' is declared twice"),
        (lambda: Struct("S", (Param("x", "u8", "kNone"),)).layout({"kA": 1}), "kNone"),
        (lambda: get_kernel("nothing"), "no kernel is named 'nothing'; there are: "),
        (lambda: shape_constants("sm_90", num_rank=2), "there is no field 'num_rank'"),
    ],
)
def test_mistakes_in_a_spec_are_told(make, said):
    with pytest.raises(ContractError) as raised:
        make()
    assert said in str(raised.value)


@pytest.mark.parametrize("spec", list_kernels(), ids=lambda spec: spec.name)
def test_every_kernel_has_threads_and_shared_memory(spec):
    constants = shape_constants("sm_90")
    assert spec.num_threads(constants) % 32 == 0
    assert 0 <= spec.num_shared_bytes(constants) <= 232_448
    assert spec.entry == spec.name
    text = (kernel_dir() / spec.source).read_text(encoding="utf-8")
    assert re.findall(r"^KERNEL (\w+)\(", text, re.MULTILINE) == [spec.name]
    assert spec.doc
