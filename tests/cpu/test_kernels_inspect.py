"""Reading PTX: which memory instructions, how ordered, from which line."""

from __future__ import annotations

import pytest

from deepep_cupy.errors import CompileError, PlatformError
from deepep_cupy.jit import inspect as inspect_module
from deepep_cupy.jit.inspect import (
    count_instructions,
    disassemble,
    find_tool,
    memory_instructions,
    opcodes,
)

PTX = """
.version 9.5
.target sm_90
.global .align 4 .u32 st.global.u32_is_not_here;

.visible .entry probe(
	.param .align 8 .b8 probe_param_0[48]
)
.maxntid 64, 1, 1
{
	.reg .pred 	%p<3>;
	.shared .align 4 .b8 held[256];
	.loc	1 13 0
	ld.param.u64 	%rd3, [probe_param_0];
$L__BB0_1:
	.loc	1 8 5, function_name $L__info_string0, inlined_at 1 14 5
	.loc	2 30 5, function_name $L__info_string1, inlined_at 1 8 5
	// begin inline asm: st.global.u32 [%rd3], 1;
	ld.relaxed.sys.global.u64 %rd5, [%rd3];
	// end inline asm
	@%p1 bra 	$L__BB0_1;
	.loc	2 40 5, function_name $L__info_string2, inlined_at 1 10 5
	{ .reg .pred q; ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%r1, %r2, %r3, %r4}, [%rd9];
	selp.u32 %r1, 1, 0, q; }
	.loc	1 15 5
	@!%p2 st.global.u32 	[%rd10], %r1;
	@%p2 st.global.u32 	[%rd10], %r1;
	st.u8 [%rd1], %rs1; ld.shared.u32 %r3, [held];
	fence.proxy.async.shared::cta;
	fence.mbarrier_init.release.cluster;
	fence.acq_rel.sys;
	atom.acq_rel.gpu.global.add.u32 %r1, [%rd1], 1;
	red.global.add.f32 [%rd1], %f1;
	atom.shared.add.u32 %r1, [held], 1;
	cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%rd1], [%r1], %r2, %rd2;
	cp.async.bulk.wait_group 0;
	cp.async.cg.shared.global.L2::256B [%r1], [%rd1], 16;
	mbarrier.try_wait.parity.shared::cta.b64 complete, [%r1], %r2;
	membar.gl;
	ld.volatile.global.u32 %r1, [%rd1];
	bar.sync 	0;
	add.s32 %r1, %r2, %r3;
LABEL: st.release.sys.global.u64 [%rd1], %rd2;
	ret;
}
	.file	1 "deepep_cupy/cuda/barrier.cu"
	.file	2 "/somewhere/deepep_cupy/cuda/asm/memory.cuh"
	.section	.debug_str
	{
.b8 95,90,78,51,53
	}
"""


def found():
    return {one.opcode: one for one in memory_instructions(PTX)}


@pytest.mark.parametrize(
    ("opcode", "wanted"),
    [
        ("ld.relaxed.sys.global.u64", ("load", "global", "relaxed", "sys", "")),
        (
            "ld.global.nc.L1::no_allocate.L2::256B.v4.u32",
            ("load", "global", "weak", "", "nc L1::no_allocate L2::256B"),
        ),
        ("st.global.u32", ("store", "global", "weak", "", "")),
        ("st.u8", ("store", "generic", "weak", "", "")),
        ("ld.shared.u32", ("load", "shared", "weak", "", "")),
        ("ld.volatile.global.u32", ("load", "global", "volatile", "", "")),
        ("st.release.sys.global.u64", ("store", "global", "release", "sys", "")),
        ("fence.acq_rel.sys", ("fence", "", "acq_rel", "sys", "")),
        ("fence.proxy.async.shared::cta", ("fence", "shared::cta", "proxy", "", "")),
        ("fence.mbarrier_init.release.cluster", ("fence", "", "release", "cluster", "")),
        ("membar.gl", ("fence", "", "", "gl", "")),
        ("atom.acq_rel.gpu.global.add.u32", ("atomic", "global", "acq_rel", "gpu", "")),
        ("atom.shared.add.u32", ("atomic", "shared", "relaxed", "gpu", "")),
        ("red.global.add.f32", ("reduction", "global", "relaxed", "gpu", "")),
        (
            "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint",
            ("bulk copy", "global shared::cta", "", "", "L2::cache_hint"),
        ),
        ("cp.async.bulk.wait_group", ("bulk copy", "", "", "", "")),
        (
            "cp.async.cg.shared.global.L2::256B",
            ("async copy", "shared global", "", "", "cg L2::256B"),
        ),
        (
            "mbarrier.try_wait.parity.shared::cta.b64",
            ("mbarrier", "shared::cta", "", "", ""),
        ),
        ("bar.sync", ("barrier", "", "", "", "")),
    ],
)
def test_each_instruction_is_taken_apart(opcode, wanted):
    one = found()[opcode]
    assert (one.kind, one.space, one.order, one.scope, one.cache) == wanted


def test_comments_parameters_and_arithmetic_are_no_memory_instructions():
    listed = [one.opcode for one in memory_instructions(PTX)]
    assert len(listed) == 19
    assert not [name for name in listed if name.startswith(("ld.param", "add", "selp", "ret"))]
    assert "selp.u32" in [opcode for opcode, _, _ in opcodes(PTX)]


def test_the_line_and_the_caller():
    one = found()["ld.relaxed.sys.global.u64"]
    assert (one.source, one.caller) == ("asm/memory.cuh:30", "barrier.cu:8")
    assert (found()["st.u8"].source, found()["st.u8"].caller) == ("barrier.cu:15", "")


def test_equal_instructions_of_one_place_are_counted_together():
    assert found()["st.global.u32"].count == 2
    counts = count_instructions(memory_instructions(PTX + PTX.replace("probe(", "other(")))
    assert counts["st.global.u32"] == 4
    assert list(counts) == sorted(counts)


def test_sass_of_a_cubin():
    pytest.importorskip("cupy")
    if find_tool("nvdisasm") is None:
        pytest.skip("no nvdisasm here: pip install nvidia-cuda-nvdisasm")
    compiling = pytest.importorskip("deepep_cupy.jit.compile")
    text = 'extern "C" __global__ void k(int* p) { *p = 1; }'
    made = compiling.compile_text(text, name="k", entry="k", target=compiling.Target(90))
    assert "STG.E" in disassemble(made.cubin)
    with pytest.raises(CompileError, match="does not take the cubin"):
        disassemble(b"nothing")


def test_a_missing_nvdisasm_is_told(monkeypatch):
    monkeypatch.setattr(inspect_module, "find_tool", lambda name: None)
    with pytest.raises(PlatformError, match="pip install nvidia-cuda-nvdisasm"):
        disassemble(b"")


def test_a_tool_of_path_is_found_where_no_wheel_has_it(tmp_path, monkeypatch):
    tool = tmp_path / "ptxas-of-these-tests"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_tool(tool.name) == tool
    assert find_tool("no-such-tool") is None
