"""The PTX modules: manifest and text agree, ptxas takes them, and the lint sees every fault."""

from __future__ import annotations

import pytest

from deepep_cupy.engines.gpu import ptx_modules as ptx_module
from deepep_cupy.engines.gpu.kernels import get_kernel
from deepep_cupy.engines.gpu.ptx_modules import (
    assemble,
    get_module,
    list_modules,
    load_entry,
    parse_ptx,
    verify,
)
from deepep_cupy.errors import ContractError, PlatformError
from deepep_cupy.jit.inspect import find_tool
from deepep_cupy.jit.launch import Packed

TEXT = """// purpose: adds one word; there to be broken by these tests
// signature: add_word(u64* words [n], u32 count, u8* peers [8])
//     count is the number of words
// launch: any grid, at most 64 threads
// registers: %rd1 words
// ordering: none
// twin: barrier
.version 7.0
.target sm_80
.address_size 64

.visible .entry add_word(
    .param .u64 words,
    .param .u32 count,  // a comment, with a comma
    .param .align 8 .b64 peers[8]
)
.maxntid 32, 2, 1
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<3>;
    .shared .align 8 .b64 held[4];
    ld.param.u64  %rd1, [words];
    ld.global.u32 %r1, [%rd1];      // ld.global.nc would be wrong
    st.global.u32 [%rd1+4], %r1;
    st.shared.u32 [held], %r1;
    ret;
}
"""
MANIFEST = """
[[module]]
file = "add_word.sm_80.ptx"
target = "sm_80"
ptx_version = "7.0"
min_cc = 80
twin = "barrier"
doc = "adds one word"

[[module.entry]]
name = "add_word"
max_threads = 64
static_smem = 32
params = [
  { name = "words", type = "u64*", shape = "[n]", unit = "words" },
  { name = "count", type = "u32", shape = "", unit = "words" },
  { name = "peers", type = "u8*[8]", shape = "", unit = "addresses" },
]
"""


def folder_of(tmp_path, text=TEXT, manifest=MANIFEST, name="add_word.sm_80.ptx"):
    (tmp_path / "manifest.toml").write_text(manifest)
    (tmp_path / name).write_text(text)
    return tmp_path


def swap(text, old, new):
    assert old in text, f"{old!r} is not there to be changed"
    return text.replace(old, new)


# ---------------------------------------------------------------------------------- what is there


def test_manifest_and_text_agree():
    assert verify() == []


@pytest.mark.parametrize("module", list_modules(), ids=lambda module: module.name)
def test_ptxas_takes_it_for_its_target_and_newer_ones(module):
    if find_tool("ptxas") is None:
        pytest.skip("no ptxas here: pip install nvidia-cuda-nvcc")
    assert assemble(module.path, module.target) == []


@pytest.mark.parametrize("module", list_modules(), ids=lambda module: module.name)
def test_an_entry_can_be_packed(module):
    for entry in module.entries:
        layout = entry.layout({})
        zeros = {
            name: 0 if field.count is None else [0] * field.count
            for name, field in layout.fields.items()
        }
        assert Packed(layout, zeros, entry.name).tobytes() == bytes(layout.nbytes)
        assert len(entry.param_offsets({})) == len(entry.params)


# --------------------------------------------------------------------------------- the lint itself


def test_a_good_module_passes(tmp_path):
    assert verify(folder_of(tmp_path)) == []


def test_what_is_read_from_a_text():
    read = parse_ptx(TEXT)
    assert (read.version, read.target, read.address_size) == ("7.0", "sm_80", "64")
    assert read.entries == {"add_word": (("words", 8), ("count", 4), ("peers", 64))}
    assert read.max_threads == {"add_word": 64}
    assert read.static_smem == {"add_word": 32}
    assert read.header.splitlines()[-1] == "// twin: barrier"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (".version 7.0", ".version 8.0", ".version is 8.0, the manifest says 7.0"),
        (".target sm_80", ".target sm_90", ".target is sm_90, the manifest says sm_80"),
        (".address_size 64\n", "", ".address_size is missing, the manifest says 64"),
        (".param .u32 count", ".param .u64 count", "count (8 bytes), peers (64 bytes), the manif"),
        (".param .u32 count,", "", "parameters are words (8 bytes), peers (64 bytes), the"),
        ("peers[8]", "peers[4]", "peers (32 bytes), the manifest says"),
        ("    .param .u64 words,\n", "    .param .u64 rows,\n", "parameters are rows (8 bytes)"),
        (".maxntid 32, 2, 1\n", "", ".maxntid or .reqntid is missing, the manifest says 64"),
        (".maxntid 32, 2, 1", ".reqntid 128", ".maxntid or .reqntid is 128"),
        ("held[4]", "held[5]", "40 bytes of .shared variables, the manifest says 32"),
        ("// ordering: none\n", "", "the header block lacks // ordering:"),
        ("// ordering: none", "// ordering: n\u00f6ne", "which older drivers refuse"),
        ("// twin: barrier", "// twin: none", "twin is 'none', the manifest says 'barrier'"),
        ("peers [8])", "[8])", "the header block does not mention peers"),
        (".entry add_word(", ".entry add_words(", "entry add_words is not in the manifest"),
        (".entry add_word(", ".entry add_words(", "entry add_word is in the manifest, not in"),
    ],
)
def test_every_fault_of_a_text_is_told(old, new, said, tmp_path):
    problems = verify(folder_of(tmp_path, text=swap(TEXT, old, new)))
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"add_word.sm_80.ptx"', '"other.sm_80.ptx"', "add_word.sm_80.ptx: not in the manifest"),
        ('"add_word.sm_80.ptx"', '"other.sm_80.ptx"', "other.sm_80.ptx: in the manifest, but"),
        ("min_cc = 80", "min_cc = 70", "min_cc 70 is older than its target sm_80"),
        ('twin = "barrier"', 'twin = "nobody"', "its twin 'nobody' is no kernel"),
    ],
)
def test_every_fault_of_a_manifest_is_told(old, new, said, tmp_path):
    problems = verify(folder_of(tmp_path, manifest=swap(MANIFEST, old, new)))
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("min_cc = 80\n", "", "module 0 lacks min_cc"),
        ("max_threads", "max_thread", "entry add_word lacks max_threads and has the unknown"),
        (', unit = "addresses"', "", "param peers lacks unit"),
        ("[[module]]", "[[modules]]", "has the unknown modules"),
        ("[[module]]", "[[module", "manifest.toml: "),
        ('type = "u32"', 'type = "uint32"', "unknown C type 'uint32'"),
    ],
)
def test_a_malformed_manifest_is_an_error(old, new, said, tmp_path):
    with pytest.raises(ContractError) as raised:
        verify(folder_of(tmp_path, manifest=swap(MANIFEST, old, new)))
    assert said in str(raised.value)


def test_a_file_listed_twice_is_told(tmp_path):
    assert "add_word.sm_80.ptx: listed twice" in verify(
        folder_of(tmp_path, manifest=MANIFEST + MANIFEST)
    )


def test_a_name_must_carry_the_target(tmp_path):
    manifest = swap(MANIFEST, '"add_word.sm_80.ptx"', '"add_word.ptx"')
    problems = verify(folder_of(tmp_path, manifest=manifest, name="add_word.ptx"))
    assert "add_word.ptx: the name must end in .sm_80.ptx" in problems


def test_the_twins_struct_as_a_parameter(tmp_path):
    nbytes = get_kernel("barrier").layout({"kNumRanks": 8}).nbytes
    text = swap(TEXT, ".param .u64 words", f".param .align 8 .b8 words[{nbytes}]")
    manifest = swap(MANIFEST, 'type = "u64*"', 'type = "BarrierParams"')
    manifest = swap(manifest, "static_smem = 32", "static_smem = 32\nconstants = { kNumRanks = 8 }")
    folder = folder_of(tmp_path, text=text, manifest=manifest)
    assert verify(folder) == []
    entry = list_modules(folder)[0].entry("add_word")
    layout = entry.layout({})
    assert "words.comm.peer" in layout.fields
    assert entry.param_offsets({}) == (0, nbytes, layout.fields["peers"].offset)
    wrong = swap(manifest, "kNumRanks = 8", "kNumRanks = 7")
    (folder / "manifest.toml").write_text(wrong)
    assert any("the manifest says words" in problem for problem in verify(folder))


# ------------------------------------------------------------------------------------------ ptxas


def needs_ptxas():
    if find_tool("ptxas") is None:
        pytest.skip("no ptxas here: pip install nvidia-cuda-nvcc")


def test_ptxas_is_asked_for_the_target_and_what_may_run_it(tmp_path):
    needs_ptxas()
    path = folder_of(tmp_path) / "add_word.sm_80.ptx"
    assert assemble(path, "sm_80") == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ld.global.u32", "ld.gobal.u32", "gobal"),
        ("ld.global.u32", "ld.global.L2::512B.u32", "512B"),
        ("    ret;\n", "    fence.proxy.async;\n    ret;\n", "sm_90"),
    ],
)
def test_what_ptxas_refuses_is_told(old, new, said, tmp_path):
    needs_ptxas()
    path = folder_of(tmp_path, text=swap(TEXT, old, new)) / "add_word.sm_80.ptx"
    problems = assemble(path, "sm_80")
    assert problems[0].startswith("ptxas -arch=sm_80: ")
    assert said in problems[0]


def test_a_target_with_a_suffix_is_assembled_for_itself_alone(tmp_path):
    needs_ptxas()
    text = swap(swap(TEXT, ".target sm_80", ".target sm_90a"), ".version 7.0", ".version 8.0")
    text = swap(text, "    ret;\n", "    setmaxnreg.inc.sync.aligned.u32 64;\n    ret;\n")
    path = folder_of(tmp_path, text=text) / "add_word.sm_80.ptx"
    assert assemble(path, "sm_90a") == []
    assert "ptxas -arch=sm_90: " in assemble(path, "sm_90")[0]


def test_a_missing_ptxas_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(ptx_module, "find_tool", lambda name: None)
    with pytest.raises(PlatformError, match=r"needs ptxas.*pip install nvidia-cuda-nvcc"):
        assemble(tmp_path / "x.ptx", "sm_80")


# ---------------------------------------------------------------------------------------- loading


def test_unknown_names_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(ptx_module, "ptx_dir", lambda: folder_of(tmp_path))
    with pytest.raises(ContractError, match="no PTX module is named 'x'; there are: add_word"):
        get_module("x")
    module = get_module("add_word.sm_80.ptx")
    assert module == get_module("add_word")
    with pytest.raises(ContractError, match="has no entry 'x'; there are: add_word"):
        load_entry(module, "x")
