"""Kernels read line by line: chains, purposes, notes, occupancy, extracts, comparisons, pages."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from deepep_cupy._resources import kernel_dir
from deepep_cupy.errors import ContractError
from deepep_cupy.inspect.difference import compare, difference_page
from deepep_cupy.inspect.extract import around, sass_with_lines
from deepep_cupy.inspect.listing import (
    Listing,
    functions_of,
    group_by_site,
    read_ptx,
    read_sass,
    site,
    source_lines,
)
from deepep_cupy.inspect.notes import KINDS, NOTES, kind_of, kind_of_sass, note_of, reason, stem
from deepep_cupy.inspect.occupancy import LIMITS, occupancy
from deepep_cupy.inspect.page import index_page, kernel_page
from deepep_cupy.inspect.purpose import FILES, FUNCTIONS, PURPOSES, count_purposes, purpose_of
from deepep_cupy.inspect.style import MARKS
from deepep_cupy.jit.compile import Compiled, Resources, Target
from deepep_cupy.protocol.constants import shared_memory_limit

TEXT = """\
// deepep_cupy 9, kernel probe, entry probe
#line 1 "deepep_cupy/cuda/probe.cu"
#include "asm/memory.cuh"

// Tells everybody.
DEVICE void tell(u64* word) {
    // Release: all <rows> before the word.
    // PLANT(no_such)
    fence();
    store(word,
          1);
    store(word, 2);
}
KERNEL probe(u64* word) {
    tell(word);
    tell(word + 1);
}
#line 1 "deepep_cupy/cuda/asm/memory.cuh"
DEVICE void fence() { asm("fence.acq_rel.sys;"); }
DEVICE void store(u64* p, u64 v) { asm("st.relaxed.sys.global.u64"); }
"""
PTX = """
.version 9.5
.target sm_90
.visible .entry probe(
	.param .u64 probe_param_0
)
{
	.loc	1 12 0
	ld.param.u64 	%rd1, [probe_param_0];
	.loc	1 13 5
	.loc	1 7 5, function_name $L__info_string0, inlined_at 1 13 5
	.loc	2 1 25, function_name $L__info_string1, inlined_at 1 7 5
	fence.acq_rel.sys;
	.loc	1 8 5, function_name $L__info_string0, inlined_at 1 13 5
	.loc	2 2 40, function_name $L__info_string2, inlined_at 1 8 5
	st.relaxed.sys.global.u64 [%rd1], 1;
	.loc	1 14 5
	.loc	1 8 5, function_name $L__info_string0, inlined_at 1 14 5
	.loc	2 2 40, function_name $L__info_string2, inlined_at 1 8 5
	st.relaxed.sys.global.u64 [%rd1+8], 1;
	ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];
	.loc	1 0 0, function_name $L__info_string0, inlined_at 1 14 5
	add.s32 %r1, %r1, 1;
	ret;
}
	.file	1 "deepep_cupy/cuda/probe.cu"
	.file	2 "/home/a/deepep_cupy/cuda/asm/memory.cuh"
	.section	.debug_str
	{
$L__info_string0:
.b8 95,90,78,51,97,98,99,52,116,101,108,108,69,80,121,0
$L__info_string1:
.b8 95,90,53,102,101,110,99,101,118,0
$L__info_string2:
.b8 95,90,53,115,116,111,114,101
.b8 80,121,0
	}
"""
PLACE = "deepep_cupy/cuda/probe.cu"
SASS = f"""
.text.probe:
	//## File "/home/a/{PLACE}", line 12
        /*0000*/                   LDC R1, c[0x0][0x28] ;
	//## File "/home/a/deepep_cupy/cuda/asm/memory.cuh", line 1 inlined at "/home/a/{PLACE}", line 7
	//## File "/home/a/{PLACE}", line 7 inlined at "/home/a/{PLACE}", line 13
	//## File "/home/a/{PLACE}", line 13
        /*0010*/                   MEMBAR.ALL.SYS ;
        /*0020*/              @!P0 CCTL.IVALL ;
.L_x_1:
	//## File "/home/a/deepep_cupy/cuda/asm/memory.cuh", line 2 inlined at "/home/a/{PLACE}", line 8
	//## File "/home/a/{PLACE}", line 8 inlined at "/home/a/{PLACE}", line 13
	//## File "/home/a/{PLACE}", line 13
        /*0030*/                   STG.E.64.STRONG.SYS desc[UR4][R2.64], R4 ;
"""
FENCE = (("asm/memory.cuh", 1), ("probe.cu", 7), ("probe.cu", 13))


def listing(ptx=PTX, text=TEXT, sass=SASS):
    compiled = Compiled(
        "probe", "probe", Target(90), (), text, ptx, b"", Resources(registers=40), ""
    )
    return Listing(
        compiled,
        512,
        1024,
        source_lines(text, "probe.cu"),
        functions_of(ptx),
        read_ptx(ptx),
        read_sass(sass),
        "" if sass else "no tool & no <SASS>.",
    )


# ---------------------------------------------------------------------------------------- reading


def test_ptx_has_its_whole_chain_of_callers():
    ops = read_ptx(PTX)
    assert ops[1].chain == FENCE
    # The line 8 is inlined at two places: the last one said counts.
    assert [op.chain[-1] for op in ops if op.opcode.startswith("st.")] == [
        ("probe.cu", 13),
        ("probe.cu", 14),
    ]
    assert ops[4].text == "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1]"
    assert ops[5].chain == (("probe.cu", 14),)


def test_machine_code_has_the_same_chains():
    ops = read_sass(SASS)
    assert [op.opcode for op in ops] == [
        "LDC",
        "MEMBAR.ALL.SYS",
        "CCTL.IVALL",
        "STG.E.64.STRONG.SYS",
    ]
    assert ops[1].chain == ops[2].chain == FENCE
    assert ops[2].text == "0020  @!P0 CCTL.IVALL"


def test_functions_and_lines_of_the_text():
    functions = functions_of(PTX)
    assert functions["probe.cu", 7] == "tell"
    assert functions["asm/memory.cuh", 1] == "fence"
    assert functions["asm/memory.cuh", 2] == "store"
    lines = source_lines(TEXT, "probe.cu")
    assert list(lines) == ["probe.cu", "asm/memory.cuh"]
    assert lines["probe.cu"][12] == "KERNEL probe(u64* word) {"
    assert source_lines("int a;\nint b;", "own.cu") == {"own.cu": {1: "int a;", 2: "int b;"}}


def test_ptx_and_machine_code_meet_at_the_line_that_asks():
    groups = group_by_site(listing())
    both = groups["probe.cu", 7][FENCE[1:]]
    assert [op.opcode for op in both.ptx] == ["fence.acq_rel.sys"]
    assert [op.opcode for op in both.sass] == ["MEMBAR.ALL.SYS", "CCTL.IVALL"]
    assert len(groups["probe.cu", 8]) == 2
    assert not [place for place in groups if place[0].startswith("asm/")]
    assert site((("asm/x.cuh", 1),)) == (("asm/x.cuh", 1),)


# ------------------------------------------------------------------------------------------ notes


def test_every_note_is_one_sentence_of_a_known_kind():
    assert set(MARKS) == set(KINDS)
    for name, note in NOTES.items():
        assert note.kind in KINDS
        assert note.text.endswith("."), name
        assert ". " not in note.text, name


@pytest.mark.parametrize(
    ("opcode", "key", "kind"),
    [
        ("ld.relaxed.sys.global.v4.u32", "ld.relaxed.sys.global.v4", "rows"),
        ("ld.relaxed.sys.global.u64", "ld.relaxed.sys.global", "headers"),
        ("st.global.v4.u32", "st.global", "rows"),
        ("fence.proxy.async.shared::cta", "fence.proxy.async.shared::cta", "fences"),
        ("mbarrier.init.shared::cta.b64", "mbarrier.init.shared::cta", "engine"),
        ("atom.relaxed.gpu.global.cas.b32", "atom.relaxed.gpu.global.cas", "atomics"),
        ("bar.red.or.pred", "bar.red.or.pred", "block"),
    ],
)
def test_the_note_of_an_instruction(opcode, key, kind):
    assert stem(opcode) == key
    note = note_of(opcode)
    assert note is NOTES[key]
    assert note.kind == kind


def test_an_instruction_without_a_note_is_noticed():
    with pytest.raises(KeyError, match=r"ld\.global\.nc\.L1::evict_last"):
        note_of("ld.global.nc.L1::evict_last.u32")
    assert note_of("ld.param.u64") is None
    assert note_of("add.s32") is None


def test_what_the_access_classes_reach_is_row_data():
    narrow = read_ptx(PTX.replace("asm/memory.cuh", "common/access.cuh"))
    assert {kind_of(op) for op in narrow if "st.relaxed" in op.opcode} == {"rows"}
    assert {kind_of(op) for op in read_ptx(PTX) if "st.relaxed" in op.opcode} == {"headers"}


def test_kinds_of_machine_code():
    assert [kind_of_sass(op) for op in read_sass(SASS)] == ["", "fences", "fences", "headers"]
    for opcode, kind in {
        "UBLKCP.S.G": "engine",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT": "engine",
        "LDG.E.NA.128": "rows",
        "LDG.E.128.STRONG.SYS": "rows",
        "LDG.E.U16.CONSTANT": "rows",
        "ATOMG.E.ADD.STRONG.GPU": "atomics",
        "RED.E.OR.STRONG.SYS": "atomics",
        "REDUX.OR": "",
        "ATOMS.ADD": "block",
        "BAR.SYNC.DEFER_BLOCKING": "block",
        "IMAD": "",
        "STRANGE": "",
    }.items():
        op = read_sass(f"  /*0000*/  {opcode} R1, R2 ;")[0]
        assert kind_of_sass(op) == kind, opcode


def test_the_reason_is_the_comment_above_the_line_else_above_the_function():
    assert reason(listing(), ("probe.cu", 7)) == "Release: all <rows> before the word."
    assert reason(listing(), ("probe.cu", 10)) == "Tells everybody."
    assert reason(listing(), ("probe.cu", 13)) == ""


# --------------------------------------------------------------------------------------- purposes


def test_the_tables_of_purposes_name_what_there_is():
    text = "\n".join(path.read_text() for path in kernel_dir().rglob("*.cu*"))
    missing = [name for name in FUNCTIONS if not re.search(rf"\b{name}\(", text)]
    assert not missing, f"no kernel has a function {missing}"
    files = [path.relative_to(kernel_dir()).as_posix() for path in kernel_dir().rglob("*.cu*")]
    lost = [begin for begin, _ in FILES if not any(file.startswith(begin) for file in files)]
    assert not lost, f"no file begins with {lost}"
    assert {*FUNCTIONS.values(), *dict(FILES).values()} <= set(PURPOSES)


def test_the_innermost_name_in_a_table_decides():
    functions = {
        ("common/fill.cuh", 3): "fill_bytes",
        ("dispatch/finish.cuh", 9): "poison_received",
    }
    chain = (("common/fill.cuh", 3), ("dispatch/finish.cuh", 9), ("dispatch/bulk.cu", 29))
    assert purpose_of(chain, functions) == "failures"
    assert purpose_of(chain, {}) == "rows"
    assert purpose_of((("comm/wait.cuh", 4), *chain), functions) == "waits"
    assert purpose_of((), functions) == "other"
    assert count_purposes(listing(), listing().sass) == {"other": 4}


# -------------------------------------------------------------------------------------- occupancy


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks", "by"),
    [
        (90, 512, 70, 232_448, 1, "registers and shared memory"),
        (90, 512, 32, 0, 4, "threads and registers"),
        (90, 1024, 64, 0, 1, "registers"),
        (80, 32, 16, 0, 32, "blocks"),
        (80, 128, 40, 20_000, 7, "shared memory"),
        (86, 256, 32, 0, 6, "threads"),
        (120, 512, 48, 101_376, 1, "shared memory"),
    ],
)
def test_blocks_an_sm(arch, threads, registers, shared, blocks, by):
    found = occupancy(arch, threads=threads, registers=registers, shared_bytes=shared)
    assert (found.blocks, found.limited_by) == (blocks, by)


def test_an_architecture_that_nobody_has_described_is_not_guessed_at():
    assert occupancy(75, threads=32, registers=16, shared_bytes=0) is None


def test_the_largest_block_fits_its_sm_exactly_once():
    for arch in LIMITS:
        most = shared_memory_limit(arch)
        assert occupancy(arch, threads=32, registers=16, shared_bytes=most).by["shared memory"] == 1


# --------------------------------------------------------------------------------------- extracts


def test_around_an_instruction_shows_the_three_texts_and_why():
    said = around(listing(), "fence.acq_rel", 1)
    assert said.splitlines()[0] == "probe.cu:7 ← probe.cu:13"
    assert "CUDA >      7 |     fence();" in said
    assert "CUDA        8 |     store(word," in said
    assert "PTX  > F fence.acq_rel.sys" in said
    assert "PTX    H st.relaxed.sys.global.u64 [%rd1], 1" in said
    assert "SASS > F 0010  MEMBAR.ALL.SYS" in said
    assert f"note   fence.acq_rel.sys: {NOTES['fence.acq_rel.sys'].text[:40]}" in said
    assert "here   Release: all <rows> before the word." in said
    assert "\x1b[" not in said
    assert "\x1b[31mfence.acq_rel.sys\x1b[0m" in around(listing(), "MEMBAR", 0, colour=True)


def test_around_a_line_by_its_file_its_short_name_or_what_was_inlined_there():
    assert around(listing(), "probe.cu:8", 0) == around(listing(), "memory.cuh:2", 0)
    assert "also at probe.cu:14" in around(listing(), "probe.cu:8", 0)
    assert around(listing(), "probe.cu:13", 0).startswith("probe.cu:7 ← probe.cu:13")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("ld.foo", "probe for sm_90 has no instruction ld.foo; of memory and order it has fence"),
        ("fence.acq", "has no instruction fence.acq;"),
        ("nowhere.cuh:3", "made of no file nowhere.cuh; there are probe.cu, asm/memory.cuh"),
        ("probe.cu:99", "probe.cu has lines 1 to 15, got 99"),
        ("probe.cu:0", "probe.cu has lines 1 to 15, got 0"),
        ("probe.cu:3", "comes from probe.cu:3; the nearest lines that do are 7, 8"),
    ],
)
def test_what_is_not_there_is_told(what, said):
    with pytest.raises(ContractError) as raised:
        around(listing(), what, 3)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_machine_code_with_source_lines():
    rows = sass_with_lines(listing()).splitlines()
    assert rows[2] == "    /*0000*/  LDC R1, c[0x0][0x28] ;"
    assert rows[3] == "// asm/memory.cuh:1 ← probe.cu:7 ← probe.cu:13"
    assert rows[4].strip().startswith("//     DEVICE void fence()")
    assert rows[5:7] == ["    /*0010*/  MEMBAR.ALL.SYS ;", "    /*0020*/  @!P0 CCTL.IVALL ;"]


# ------------------------------------------------------------------------------------ comparisons


def test_only_loads_differ():
    nc = PTX.replace("ld.global.v4", "ld.global.nc.L1::no_allocate.v4")
    found = compare(listing(), listing(nc, TEXT.replace("word + 1", "word + 2")))
    assert [(change.opcode, change.first, change.second) for change in found.ptx] == [
        ("ld.global.nc.L1::no_allocate.v4.u32", 0, 1),
        ("ld.global.v4.u32", 1, 0),
    ]
    assert found.only_loads
    assert found.verdict.startswith("Only load instructions differ")
    assert compare(listing(), listing()).verdict.startswith("The two have the same PTX")


def test_the_lines_of_an_access_class_are_one():
    ptx = PTX.replace("asm/memory.cuh", "common/access.cuh")
    text = TEXT.replace("asm/memory.cuh", "common/access.cuh")
    other = ptx.replace("2 2 40", "2 1 40").replace("ld.global.v4", "ld.global.nc.v4")
    found = compare(listing(ptx, text), listing(other, text))
    assert found.only_loads
    assert list(found.lines) == [("probe.cu", 8)]


def test_something_else_differs_too():
    fewer = PTX.replace("fence.acq_rel.sys;\n\t.loc	1 8", ".loc	1 8")
    found = compare(listing(), listing(fewer))
    assert not found.only_loads
    assert found.verdict.startswith("Not loads alone differ")
    moved = PTX.replace("add.s32", "@%p1 bra $L;\n\tadd.s32").replace("	.loc	1 13 5\n", "", 1)
    assert not compare(listing(), listing(moved)).only_loads
    page = difference_page(("a<b", listing()), ("c", listing(fewer)))
    assert "a&lt;b" in page
    assert "1 × fence.acq_rel.sys" in page
    Reader.of(page)


def test_an_instruction_on_another_line_is_a_difference():
    other = PTX.replace("add.s32", "st.relaxed.sys.global.u64 [%rd1], 3;\n\tadd.s32", 1)
    other = other.replace("st.relaxed.sys.global.u64 [%rd1], 1;", "", 1)
    found = compare(listing(), listing(other))
    assert found.ptx == ()
    assert not found.only_loads


# ------------------------------------------------------------------------------------------ pages


class Reader(HTMLParser):
    """Elements opened and closed in order, ids and links."""

    VOID = ("meta", "input", "br")

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.tags = [], [], [], set()

    @classmethod
    def of(cls, page):
        reader = cls()
        reader.feed(page)
        assert reader.open == []
        return reader

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs["href"]] if "href" in attrs else []
        assert "src" not in attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_is_whole_and_asks_nobody():
    page = kernel_page(listing(), "2 ranks & <nc>", [("all kernels", "index.html")])
    reader = Reader.of(page)
    assert len(reader.ids) == len(set(reader.ids))
    inside = {link[1:] for link in reader.links if link.startswith("#")}
    assert inside <= set(reader.ids)
    assert [link for link in reader.links if not link.startswith("#")] == ["index.html"]
    assert not {"script", "link", "img", "iframe"} & reader.tags
    assert "url(" not in page
    assert "2 ranks &amp; &lt;nc&gt;" in page
    assert "Release: all &lt;rows&gt; before the word." in page
    assert "<dd>3, limited by registers</dd>" in page
    assert "64 bytes" in page  # four instructions


def test_the_page_shows_the_three_texts_and_the_chain_of_one_line():
    page = kernel_page(listing(), "")
    line = page[page.index('id="probe.cu:7"') : page.index('id="probe.cu:8"')]
    for wanted in (
        "fence();",
        '<b class="fences">fence.acq_rel.sys</b>',
        '<b class="fences">0010  MEMBAR.ALL.SYS</b>',
        'href="#probe.cu:13"',
        NOTES["fence.acq_rel.sys"].text[:30],
    ):
        assert wanted in line
    assert 'class="line m k-fences" id="probe.cu:7"' in page
    caller = page[page.index('id="probe.cu:13"') : page.index('id="probe.cu:14"')]
    assert 'href="#probe.cu:7"' in caller


def test_a_page_without_machine_code_says_so():
    page = kernel_page(listing(sass=""), "")
    assert "PTX alone: no tool &amp; no &lt;SASS&gt;." in page
    assert "PTX instructions by purpose" in page
    assert "MEMBAR" not in page
    Reader.of(page)


def test_the_index_leads_to_the_pages():
    page = index_page("All & more", [(listing(), "probe.html")], ["other, which needs sm_100"])
    reader = Reader.of(page)
    assert reader.links == ["probe.html"]
    assert "other, which needs sm_100" in page
    assert "All &amp; more" in page
