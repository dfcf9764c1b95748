"""The text of the hand-written barrier, its parameters, and how they are packed and launched."""

from __future__ import annotations

import ctypes
import re
from itertools import takewhile

import pytest

from deepep_cupy.engines.gpu.kernels import get_kernel
from deepep_cupy.engines.gpu.ptx_barrier import PtxBarrier, ptx_barrier_values
from deepep_cupy.engines.gpu.ptx_modules import get_module
from deepep_cupy.errors import ContractError
from deepep_cupy.jit.compile import Loaded
from deepep_cupy.protocol.constants import KernelShape, kernel_constants
from deepep_cupy.protocol.headers import Kind, RefusalCode
from deepep_cupy.protocol.nodes import MAX_RANKS_PER_NODE
from simulator.ptx import params_of

ENTRY = get_module("peer_barrier").entry("peer_barrier")
TEXT = get_module("peer_barrier").path.read_text(encoding="utf-8")
STRONG = ("ld.relaxed", "ld.acquire", "st.relaxed", "st.release", "atom", "red", "fence", "bar.")
BODY = TEXT[TEXT.index("\n{\n") : TEXT.rindex("}")]


def shape(num_ranks):
    return KernelShape(num_ranks=num_ranks, num_threads=64, turns_per_check=4)


def comm_of(num_ranks):
    return {
        "peer": [0x7F00_0000_0000 + rank for rank in range(num_ranks)],
        "report": 0x1000,
        "board": 0x2000,
        "timeout_ns": 10**11,
        "board_stride": 16,
        "serial": 1,
        "rank": num_ranks - 1,
        "kind": Kind.BARRIER,
        "refusal": 0,
        "refusal_value": 0,
    }


# ------------------------------------------------------------------------------------- parameters


def test_parameters_lie_where_they_are_packed():
    found = params_of(TEXT)
    layout = ENTRY.layout({})
    assert found == {name: field.offset for name, field in layout.fields.items()}
    assert tuple(found.values()) == ENTRY.param_offsets({})


def test_every_parameter_is_read_at_its_width():
    """But for peer, which is indexed by rank."""
    reads = re.findall(r"ld\.param\.u(\d+)\s+%\w+, \[(\w+)\];", BODY)
    widths = {name: 8 * field.nbytes for name, field in ENTRY.layout({}).fields.items()}
    assert {name for _, name in reads} == set(widths) - {"peer"}
    assert all(int(bits) == widths[name] for bits, name in reads)


@pytest.mark.parametrize("size", range(1, MAX_RANKS_PER_NODE + 1))
def test_values_are_fields_of_the_twins_struct_or_its_constants(size):
    constants = kernel_constants(shape(size))
    values = ptx_barrier_values(ENTRY, constants, comm_of(size))
    comm = {name.split(".")[1] for name in get_kernel("barrier").layout(constants).fields}
    assert list(values) == [param.name for param in ENTRY.params]
    assert comm < set(values)
    assert values["peer"] == comm_of(size)["peer"] + [0] * (MAX_RANKS_PER_NODE - size)
    assert values["word_kind"] == constants["kWordKind"]
    assert values["report_record_head"] == constants["kReportRecordHead"]
    assert values["num_ranks"] == size


@pytest.mark.parametrize("changed", [{"kNumRanks": 9}, {"kHeaderWords": 33}])
def test_what_it_cannot_serve_is_refused(changed):
    constants = kernel_constants(shape(8)) | changed
    with pytest.raises(ContractError, match="at most 8 ranks and headers of 32 words"):
        ptx_barrier_values(ENTRY, constants, comm_of(8))


class FakeDriver:
    """Keeps what it is given at a launch."""

    def prepare(self, function, grid, threads, shared_bytes, params):
        self.shape = (function, grid, threads, shared_bytes)
        addresses = (ctypes.c_void_p * len(ENTRY.params)).from_address(params)
        sizes = [ENTRY.param_bytes(param) for param in ENTRY.params]

        def call(stream):
            self.stream = stream
            self.arguments = {
                param.name: int.from_bytes(ctypes.string_at(address, size), "little")
                for param, address, size in zip(ENTRY.params, addresses, sizes, strict=True)
            }

        return call

    def allow_shared(self, function, nbytes):
        raise AssertionError("its shared memory is static")

    def blocks_per_sm(self, function, threads, shared_bytes):
        return 1

    def num_sms(self):
        return 1


def test_what_the_driver_gets():
    driver = FakeDriver()
    constants = kernel_constants(shape(3))
    barrier = PtxBarrier(
        constants, comm_of(3), loaded=Loaded("peer_barrier", 77, ()), driver=driver
    )
    assert driver.shape == (77, 1, 256, 0)
    barrier.refusal(Kind.DISPATCH, RefusalCode.EXPERT_OUT_OF_RANGE, -1)
    barrier(0xFFFFFFFF, 4242)
    got = driver.arguments
    assert driver.stream == 4242
    assert (got["serial"], got["kind"], got["refusal"]) == (0xFFFFFFFF, Kind.DISPATCH, 3)
    assert (got["refusal_value"], got["timeout_ns"], got["rank"]) == (0xFFFFFFFF, 10**11, 2)
    assert got["peer"].to_bytes(64, "little")[16:24] == (0x7F00_0000_0002).to_bytes(8, "little")
    assert got["control_headers"] == constants["kControlHeaders"]


# -------------------------------------------------------------------------------------- the text


def strong_instructions():
    """Label -> what follows it and concerns others: its opcodes up to the scope."""
    found, label = {}, "START"
    for line in BODY.splitlines():
        code = line.split("//")[0].strip()
        named = re.fullmatch(r"(\w+):", code)
        label = named[1] if named else label
        op = re.sub(r"^@!?%\w+ ", "", code).split(" ")[0].rstrip(";")
        if op.startswith(STRONG):
            parts = list(takewhile(lambda part: part != "global", op.split(".")))
            found.setdefault(label, []).append(".".join(parts))
    return found


def test_every_strong_instruction_is_where_the_argument_has_it():
    """So that none can be weakened unnoticed where the simulator's seeds would not show it."""
    relaxed_gpu, relaxed_sys = "ld.relaxed.gpu", "ld.relaxed.sys"
    assert strong_instructions() == {
        "ENTER": [relaxed_gpu, relaxed_gpu, relaxed_sys, "atom.relaxed.gpu", "st.relaxed.sys"],
        "ENTERED": ["bar.warp.sync", "bar.sync"],
        "SEND": ["fence.acq_rel.sys", "st.relaxed.sys"],
        "WAIT_HEADER": [relaxed_sys],
        "CHECK_CLOCK": [relaxed_sys],
        "BOARD_LINE": [relaxed_sys],
        "RAISED": ["red.relaxed.sys"],
        "TIME_IS_UP": ["atom.relaxed.gpu", *["st.relaxed.gpu"] * 5],
        "BLAME": ["red.relaxed.sys"],
        "HEADER_CAME": ["ld.acquire.sys"],
        "RECEIVED": ["bar.warp.sync", "bar.red.or.pred"],
        "JUDGED": ["bar.warp.sync", "bar.red.or.pred"],
        "TELL_PEERS": [relaxed_sys, "red.relaxed.sys"],
        "RECORD": [relaxed_gpu, "st.relaxed.sys"],
        "RECORD_HEAD": [
            *["st.relaxed.sys"] * 4,
            *[relaxed_sys, "st.relaxed.sys"],
            *[relaxed_gpu, "st.relaxed.sys"] * 5,
        ],
        "RECORDED": [
            *["bar.warp.sync", "bar.sync"],
            *["st.relaxed.gpu", "st.release.sys", "st.relaxed.gpu"],
        ],
        "NEXT_EPOCH": ["st.relaxed.gpu"],
        "SETTLED": ["st.relaxed.gpu"],
    }


def test_no_access_to_global_memory_is_weak():
    ops = re.findall(r"^\s+(?:@!?%\w+ )?((?:ld|st)\.\S+)", BODY, re.MULTILINE)
    assert ops
    for op in ops:
        assert re.search(r"\.(relaxed|acquire|release|param|shared)\b", op), op


def test_numbers_of_the_cuda_text_are_those_of_this_one():
    """Verdicts, phases and bits of abort words are constants there, and literals here."""
    known = kernel_constants(KernelShape())
    written = {
        "kFailed : kGo": r"selp.b32 +%r_verdict, (\d+), \d+",
        "kPoisoned": r"selp.b32 +%r_verdict, (\d+), %r_verdict",
        "kBusy": r"mov.b32 +%r_verdict, (\d+);",
        "kRefused : kGo": r"selp.b32 +%r_verdict, (\d+), \d+",
        "kFailed": r"mov.b32 +%r_verdict, (\d+);",
        "kPhaseHeader": r"st.relaxed.gpu.global.u64 +\[%rd_details\], (\d+);",
        "kAbortTimeout": r"or.b32 +%r_left, %r_left, (\d+);",
        "kAbortRaised, by source": r"or.b32 +%r_left, %r_left, (\d+);",
    }
    for comment, pattern in written.items():
        found = re.search(rf"{pattern}.*// {comment}$", BODY, re.MULTILINE)
        assert found, comment
        assert int(found[1]) == known[re.match(r"\w+", comment)[0]], comment
    assert (known["kGo"], known["kRefused"], known["kFailed"]) == (0, 1, 2)


def test_operands_and_comments_stand_in_columns():
    for number, line in enumerate(BODY.splitlines(), 1):
        code = line.split("//")[0].rstrip()
        if not code.startswith("    ") or code.strip().startswith(".") or not code.strip():
            continue
        found = re.match(r"    (?:@!?%\w+ )?[a-z][\w.]*", code)
        assert found, f"line {number} of the body: {line}"
        operands = code[found.end() :]
        if operands != ";":
            assert len(found[0]) + len(operands) - len(operands.lstrip()) == 37, line
        if "//" in line:
            assert line.index("//") == 74, line
