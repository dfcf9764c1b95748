"""The litmus modules and what drives them, on simulated GPUs whose SMs have L1 caches."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import types

import numpy as np
import pytest

from deepep_cupy.engines.gpu.loads import PROTOCOLS
from deepep_cupy.engines.gpu.ptx_modules import get_module
from deepep_cupy.jit.compile import Loaded
from deepep_cupy.jit.inspect import find_tool
from deepep_cupy.litmus import runner as litmus
from deepep_cupy.litmus.runner import BULK_LOADS, LOADS, WIDTHS, Test, Words
from simulator.gpus import NUM_SMS, NUM_THREADS, Gpus, one_rank, two_ranks
from simulator.ptx import ptx_kernel, text_of

TEXT, BULK_TEXT = text_of("litmus"), text_of("litmus_bulk")
NO_PROXY_FENCE = "no proxy fence between a write and a bulk copy's read"
FILLS_L1 = {"ld.global", "ld.global.ca", "ld.global.nc", "ld.global.nc.L1::evict_last"}
STALE_IN = {"other SM", "relaxed"}
"""Protocols in which nothing empties the reader's L1."""


def swap(text, old, new):
    assert text.count(old) == 1, (text.count(old), old)
    return text.replace(old, new)


def assert_ordered(machine, *, but=()):
    """Nothing is a race but what is meant to be one."""
    assert {fault.kind for fault in machine.gpus.faults} <= set(but), machine.gpus.faults


def assert_as_modelled(reading):
    """Where L1 is filled and nothing empties it, all words are stale; else none is."""
    assert not reading.error, reading
    assert reading.checks > 0
    stale = reading.checks if reading.load in FILLS_L1 and reading.protocol in STALE_IN else 0
    assert (reading.stale, reading.torn, reading.wrong) == (stale, 0, 0), reading
    assert reading.oldest == (4 if stale else 0), reading


# -------------------------------------------------------------------------------- every situation


@pytest.mark.parametrize("producer", ["kernel", "block"])
def test_one_gpu(producer):
    for number, test in enumerate(litmus.every_test([producer], bulk=True)):
        if test.nbytes < 16 and test.protocol not in ("reader", "relaxed"):
            continue
        one, machine = one_rank(seed=number)
        assert_as_modelled(one.run(test))
        unfenced = test.load == BULK_LOADS[1] and test.protocol != "boundary"
        assert_ordered(machine, but=[NO_PROXY_FENCE] if unfenced else [])
        assert bool(machine.gpus.faults) == unfenced


@pytest.mark.slow
def test_two_gpus():
    chosen = [
        test
        for test in litmus.every_test(["peer"], bulk=True)
        if test.nbytes == 16 or test.load in ("ld.global", "ld.global.nc")
    ]

    def work(one, machine, rank):
        return [one.run(test) for test in chosen]

    first, second = two_ranks(work)
    assert first == second  # all ranks get the same answers
    assert len(first) == len(chosen)
    for reading in first:
        assert_as_modelled(reading)


def test_the_rank_that_only_listens_gets_the_answers_too():
    chosen = Test("kernel", "local", "relaxed", "ld.global.nc", 16)
    first, second = two_ranks(lambda one, machine, rank: (one.run(chosen), machine.launched))
    assert first[0] == second[0]
    assert first[1]
    assert not second[1]
    assert_as_modelled(first[0])


def test_all_situations_are_there_once():
    both = list(litmus.every_test(["peer", "kernel", "block"], bulk=True))
    assert len(both) == len(set(both))
    loads = len(LOADS) * len(WIDTHS)
    assert len(both) == loads * (len(PROTOCOLS) * 4 - 1) + len(BULK_LOADS) * 3 * 3
    assert set(litmus.every_test(["kernel"])) == {
        test for test in both if test.producer == "kernel" and test.load not in BULK_LOADS
    }
    assert set(litmus._HOW) == set(PROTOCOLS)


class FakeCuda:
    """What ``CupyMachine`` needs of CuPy and the driver, on a simulated GPU."""

    def __init__(self, monkeypatch):
        vars(self).update(memcpyHostToDevice=1, memcpyDeviceToHost=2)
        self.gpus = Gpus()
        self.programs, self.prepared, fake = [], [], self

        class Stream:
            made = 0

            def __init__(self, non_blocking):
                assert non_blocking
                Stream.made += 1
                self.ptr = Stream.made

            def synchronize(self):
                fake.gpus.run()

        cuda = types.SimpleNamespace(runtime=self, Stream=Stream)
        monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(litmus, "load_entry", self.load)
        launch = litmus.Launch
        monkeypatch.setattr(litmus, "Launch", lambda *a, **k: launch(*a, **k, driver=self))

    def load(self, module, name):
        self.programs.append(module.name)
        return Loaded(name, len(self.programs) - 1, ()), module.entry(name)

    def memcpy(self, to, source, nbytes, kind):
        if kind == self.memcpyHostToDevice:
            self.gpus.poke(to, ctypes.string_at(source, nbytes))
        else:
            ctypes.memmove(to, self.gpus.peek(source, nbytes), nbytes)

    def deviceSynchronize(self):
        self.gpus.run()

    def prepare(self, function, grid, threads, shared_bytes, params):
        assert (threads, shared_bytes) == (128, 0)
        self.prepared.append(grid)
        name = self.programs[function]
        entry = get_module(name).entry(name)
        pointers = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))

        def call(stream):
            packed = bytearray(96)
            for number, (param, offset) in enumerate(ptx_kernel(name).params.items()):
                nbytes = entry.layout({}).fields[param].nbytes
                packed[offset : offset + nbytes] = ctypes.string_at(pointers[number], nbytes)
            self.gpus.launch(0, stream - 1, name, grid, NUM_THREADS, bytes(packed))

        return call

    def blocks_per_sm(self, function, threads, shared_bytes):
        return 16

    def num_sms(self):
        return NUM_SMS


def test_launches_on_a_real_machine_are_packed_as_the_module_reads_them(monkeypatch):
    fake = FakeCuda(monkeypatch)
    machine = litmus.CupyMachine(NUM_SMS)
    assert set(fake.prepared) == {1, 2, 8}  # before anything runs
    memory = litmus.RankMemory(0, fake.gpus.base(0, 0), 0, lambda value: [value])
    one = litmus.Litmus(machine, memory, Words(8, 4, 0.5))
    for producer, protocol, load in (
        ("kernel", "relaxed", "ld.global.nc"),
        ("kernel", "boundary", "ld.global.nc"),
        ("kernel", "same SM", "ld.global"),
        ("block", "other SM", "ld.global"),
        ("kernel", "reader", BULK_LOADS[1]),
    ):
        assert_as_modelled(one.run(Test(producer, "local", protocol, load, 16)))


# ---------------------------------------------------------------------------------- who is where


@pytest.mark.parametrize("producer", ["peer", "kernel", "block"])
@pytest.mark.parametrize("protocol", ["same SM", "other SM"])
def test_roles_are_on_the_sms_they_must_be_on(producer, protocol):
    test = Test(producer, "local", protocol, "ld.volatile.global", 16)

    def board(one, machine, rank=0):
        one.run(test)
        words = np.zeros(4, np.uint32)
        machine.read(machine.gpus.base(rank, rank) + litmus._BOARD, words)
        return [int(word) for word in words]

    if producer == "peer":
        reader, _, watcher, gave_up = two_ranks(board)[0]
    else:
        reader, writer, watcher, gave_up = board(*one_rank())
        assert writer not in (0, reader)
    assert gave_up == 0
    assert watcher
    assert (watcher == reader) == (protocol == "same SM")


def test_a_watcher_that_finds_no_place_is_told():
    one, _ = one_rank(Words(8, 4, 0.0002), num_sms=0)  # nobody is beside the reader
    reading = one.run(Test("block", "local", "same SM", "ld.global", 16))
    assert re.search("gave up waiting for", reading.error)


def test_words_are_rewritten_where_the_pointer_leads():
    for pointer, home in (("local", 0), ("peer", 1)):
        test = Test("peer", pointer, "reader", "ld.global.nc", 4)

        def memory(one, machine, rank, test=test):
            one.run(test)
            words = np.zeros(4 * 8, np.uint32)
            machine.read(machine.gpus.base(rank, rank) + litmus._DATA, words)
            return words

        rounds = [words & 0xFFFF for words in two_ranks(memory)]
        assert (rounds[home] == 4).all()
        assert (rounds[1 - home] == 0).all()


# --------------------------------------------------------------------------- what is counted how

STORE = "st.global.v4.u32                 [%rd_at], {%r_w0, %r_w1, %r_w2, %r_w3};"


@pytest.mark.parametrize(
    ("store", "nbytes", "stale", "torn"),
    [
        ("st.global.v2.u32 [%rd_at], {%r_w0, %r_w1};", 16, 0, 32),
        ("st.global.v2.u32 [%rd_at], {%r_w0, %r_w1};", 8, 32, 0),
        ("st.global.u32 [%rd_at+4], %r_w1;", 16, 0, 32),
        ("st.global.u32 [%rd_at+4], %r_w1;", 8, 0, 32),
        ("st.global.u32 [%rd_at+4], %r_w1;", 4, 32, 0),
    ],
)
def test_half_a_word_of_this_round_is_torn_within_a_load_else_stale(store, nbytes, stale, torn):
    one, _ = one_rank(litmus=swap(TEXT, STORE, store))
    reading = one.run(Test("kernel", "local", "reader", "ld.volatile.global", nbytes))
    assert (reading.stale, reading.torn, reading.wrong) == (stale, torn, 0)
    assert reading.oldest == 4


@pytest.mark.parametrize("change", ["add.u32 %r_w0, %r_w0, 65536;", "add.u32 %r_w0, %r_w0, 1;"])
def test_what_no_round_ever_wrote_is_wrong(change):
    """Another word's value, or that of a round to come."""
    one, _ = one_rank(litmus=swap(TEXT, STORE, f"{change} {STORE}"))
    reading = one.run(Test("kernel", "local", "reader", "ld.volatile.global", 16))
    assert (reading.stale, reading.torn, reading.wrong) == (0, 0, 32)


# ------------------------------------------------------------------------------- planted mistakes

MISTAKES = {
    "the reader does not acquire": ("@%p_watched ld.acquire.gpu", "@%p_watched ld.relaxed.gpu"),
    "the watcher does not acquire": (
        "ld.acquire.sys.global.u32        %r_seen, [%rd_flag];",
        "ld.relaxed.sys.global.u32        %r_seen, [%rd_flag];",
    ),
}


def test_a_reader_that_does_not_acquire_is_stale():
    text = swap(TEXT, *MISTAKES["the reader does not acquire"])
    reading = one_rank(litmus=text)[0].run(Test("kernel", "local", "handed over", "ld.global", 16))
    assert reading.stale == reading.checks


def test_a_watcher_that_does_not_acquire_leaves_l1_as_it_is():
    text = swap(TEXT, *MISTAKES["the watcher does not acquire"])
    reading = one_rank(litmus=text)[0].run(Test("kernel", "local", "same SM", "ld.global", 16))
    assert reading.stale == reading.checks


# ------------------------------------------------------------------------------------ time limits

WAITS = {
    "the reader never starts": (
        "@%p_is st.relaxed.sys.global.u32 [%rd_board], %r_sm;",
        "@%p_is mov.b32 %r_sm, %r_sm;",
        "the reader's block to start",
    ),
    "the writer never publishes": (
        "st.relaxed.sys.global.u32        [%rd_flag], %r_round;",
        "mov.b32 %r_seen, 0;",
        "the writer's or the watcher's round; for the writer's round, in the watcher",
    ),
    "the watcher hands nothing over": (
        "st.release.gpu.global.u32        [%rd_board+128], %r_round;",
        "mov.b32 %r_seen, 0;",
        "the writer's or the watcher's round; for the writer's round",
    ),
    "the reader never hands back": (
        "@!%p_alone st.release.sys.global.u32 [%rd_ack], %r_round;",
        "@!%p_alone mov.b32 %r_seen, 0;",
        "the .*; for the reader to be ready, in the writer",
    ),
}


@pytest.mark.parametrize("fault", WAITS)
def test_every_wait_ends(fault):
    old, new, said = WAITS[fault]
    one, _ = one_rank(Words(8, 4, 0.0003), litmus=swap(TEXT, old, new))
    reading = one.run(Test("kernel", "local", "other SM", "ld.volatile.global", 16))
    assert re.search(f"gave up waiting for {said}", reading.error), reading.error
    assert reading.checks == 0 or not reading.bad


def test_two_ranks_hear_of_a_peer_that_gave_up():
    hands_back = "st.release.sys.global.u32 [%rd_ack], %r_round;"
    text = swap(TEXT, f"@!%p_alone {hands_back}", f"@!%p_first {hands_back}")
    test = Test("peer", "local", "reader", "ld.volatile.global", 16)
    readings = two_ranks(lambda one, machine, rank: one.run(test), Words(8, 4, 0.0005), litmus=text)
    assert readings[0] == readings[1]
    assert "gave up" in readings[0].error


@pytest.mark.parametrize("broken", [0, 1])
def test_an_exception_on_one_rank_is_an_error_on_both(broken):
    test = Test("peer", "local", "boundary", "ld.volatile.global", 16)

    def work(one, machine, rank):
        if rank == broken:
            machine.launch = None
        return one.run(test)

    first, second = two_ranks(work)
    assert first == second
    assert re.match(f"rank {broken}: TypeError", first.error)


def test_every_loop_of_the_text_looks_at_the_clock():
    body = re.sub(r"//[^\n]*", "", TEXT)
    for label in ("AWAIT_READER", "LINGER", "WAIT_ROUND", "WATCH_ROUND", "WAIT_READER"):
        start = body.index(f"{label}:")
        end = re.compile(rf"bra\s+{label};").search(body, start).end()
        loop = body[start:end]
        assert "%globaltimer" in loop, label
        assert re.search(r"setp\.lt\.u64\s+%p_is, %rd_now, %rd_deadline;", loop), label


# ------------------------------------------------------------------------------------ bulk loads


@pytest.mark.parametrize("load", BULK_LOADS)
def test_bulk_loads_are_made_by_their_own_module(load):
    one, machine = one_rank()
    reading = one.run(Test("kernel", "local", "reader", load, 16))
    assert (reading.checks, reading.bad, reading.error) == (32, 0, "")
    readers = [(name, values) for name, _, _, values in machine.launched if values["roles"] == 1]
    writers = [(name, values) for name, _, _, values in machine.launched if values["roles"] == 4]
    assert [(name, values["load"]) for name, values in readers] == [
        ("litmus_bulk", BULK_LOADS.index(load))
    ]
    assert [name for name, _ in writers] == ["litmus"]


def test_what_bulk_loads_bring_is_judged_as_other_words():
    """The writer leaves half of each word as it was."""
    half = swap(TEXT, STORE, "st.global.v2.u32 [%rd_at], {%r_w0, %r_w1};")
    reading = one_rank(litmus=half)[0].run(Test("kernel", "local", "reader", BULK_LOADS[0], 16))
    assert (reading.stale, reading.torn, reading.wrong, reading.oldest) == (0, 32, 0, 4)
    other = swap(TEXT, STORE, f"add.u32 %r_w0, %r_w0, 65536; {STORE}")
    reading = one_rank(litmus=other)[0].run(Test("kernel", "local", "reader", BULK_LOADS[0], 16))
    assert (reading.stale, reading.torn, reading.wrong) == (0, 0, 32)


def test_a_bulk_reader_that_does_not_load_again_is_stale():
    old = "@%p_fence fence.proxy.async.global;"
    text = swap(BULK_TEXT, old, f"@%p_counted bra ROUND_CAME; {old}")
    reading = one_rank(litmus_bulk=text)[0].run(
        Test("kernel", "local", "reader", BULK_LOADS[0], 16)
    )
    assert (reading.stale, reading.torn, reading.wrong, reading.oldest) == (32, 0, 0, 4)


def test_the_proxy_fence_is_there_or_not():
    code = re.sub(r"//[^\n]*", "", BULK_TEXT)
    between = code[code.index("LOAD_WORDS:") : code.index("WAIT_LOADED:")]
    fences = re.findall(r"^\s*(\S+ )?(fence\S*);", between, re.MULTILINE)
    assert fences == [("@%p_fence ", "fence.proxy.async.global")]
    assert re.search(
        r"ld\.param\.u32\s+%r_is, \[load\];\s+setp\.eq\.u32\s+%p_fence, %r_is, 0;", code
    )
    waiting = code[code.index("READ_ROUND:") : code.index("ALL_READ:")]
    assert not re.findall(r"fence\.(?!proxy)|membar", waiting)


@pytest.mark.parametrize("label", ["WAIT_ROUND", "WAIT_LOADED"])
def test_a_bulk_reader_gives_up(label):
    poll = {
        "WAIT_ROUND": "setp.eq.u32                      %p_is, %r_seen, %r_round;",
        "WAIT_LOADED": "mbarrier.try_wait.parity.shared::cta.b64 %p_is, [%r_loaded], %r_parity;",
    }[label]
    text = swap(BULK_TEXT, poll, "mov.pred %p_is, 0;")
    one, _ = one_rank(Words(8, 4, 0.0003), litmus_bulk=text)
    reading = one.run(Test("kernel", "local", "reader", BULK_LOADS[0], 16))
    said = {"WAIT_ROUND": "the writer's or the watcher's round", "WAIT_LOADED": "a bulk load"}
    assert said[label] in reading.error


# --------------------------------------------------------------------------------- text and SASS


def test_loads_are_numbered_as_in_the_text():
    body = re.sub(r"//[^\n]*", "", TEXT)
    targets = re.search(r"\.branchtargets\s+([^;]+);", body)[1].replace("\n", " ").split(",")
    targets = [target.strip() for target in targets]
    assert len(targets) == len(LOADS) * len(WIDTHS)
    for number, target in enumerate(targets):
        load, nbytes = LOADS[number // len(WIDTHS)], WIDTHS[number % len(WIDTHS)]
        block = re.search(rf"^{target}:\n(.*?)^\s+bra\s+JUDGE;", body, re.MULTILINE | re.DOTALL)[1]
        ops = [line.split()[0] for line in block.splitlines() if line.strip()]
        vector = {16: ".v4", 8: ".v2", 4: ""}[nbytes]
        assert ops == [f"{load}{vector}.u32"] * (16 // nbytes), target


def sass(arch, tmp_path):
    ptxas, nvdisasm = find_tool("ptxas"), find_tool("nvdisasm")
    if ptxas is None or nvdisasm is None:
        pytest.skip("needs ptxas and nvdisasm: pip install nvidia-cuda-nvcc nvidia-cuda-nvdisasm")
    path, cubin = tmp_path / "litmus.ptx", tmp_path / "litmus.cubin"
    path.write_text(TEXT)
    subprocess.run([ptxas, f"-arch={arch}", "-o", cubin, path], check=True)
    done = subprocess.run(
        [nvdisasm, "--print-code", cubin], capture_output=True, text=True, check=True
    )
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", done.stdout)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_machine_code_is_what_the_text_says(arch, tmp_path):
    """No load has become another one, none has left its loop, and nothing but acquires and the
    writer's fence empties L1."""
    code = sass(arch, tmp_path)
    # Between the reader's first read and the store that hands the words back.
    begin = next(i for i, line in enumerate(code) if "BRX" in line)
    end = next(i for i, line in enumerate(code) if i > begin and "MEMBAR" in line)
    reads = [line for line in code[begin:end] if "LDG" in line]
    assert len(reads) == len(LOADS) * (1 + 2 + 4)
    assert not [line for line in code[begin : end + 6] if "CCTL" in line]
    for kind, number in (("CONSTANT", 4), (".EL.", 1), (".NA", 3), ("STRONG.SYS", 2)):
        assert sum(kind in line for line in reads) == 7 * number, kind
    # Acquires: two in the reader, one in the watcher, one in the writer; and the writer's fence.
    assert sum("CCTL.IVALL" in line for line in code) == 5


# ------------------------------------------------------------------------------------ arithmetic


def test_the_pattern_tells_word_lane_and_round():
    words = litmus.pattern(16384, litmus.MAX_ROUND)
    assert len(np.unique(words)) == 4 * 16384
    assert (words & 0xFFFF == litmus.MAX_ROUND).all()
    assert words[4 * 5 + 3] == (4 * 5 + 3) << 16 | litmus.MAX_ROUND


def test_a_boundary_test_reads_on_all_sms_and_one_round_more():
    one, machine = one_rank()
    reading = one.run(Test("kernel", "local", "boundary", "ld.global.nc", 16))
    assert reading.checks == NUM_SMS * 8 * 11
    assert [values["roles"] for *_, values in machine.launched] == [1, *[4, 1] * 10]
