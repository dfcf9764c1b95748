"""The hand-written barrier on the simulator: alone, mixed with its twin, and beside it.

Both must leave the same words in all regions and reports, and no rank may leave too early.
"""

from __future__ import annotations

import functools
import re
import struct

import pytest

from deepep_cupy.protocol.control_block import NUM_RECORDS
from deepep_cupy.protocol.headers import WORDS, Kind, RefusalCode
from simulator.barriers import STRIDE, TEXT, Node

SEEDS = 12
GO, REFUSED, FAILED = 0, 1, 2
TIMEOUT, RAISED = 1, 2
LATE_NS = 1_000_000


def header(**words):
    return {**dict.fromkeys(WORDS, 0), **words}


# --------------------------------------------------------------------------------------- scenarios
# Each queues launches on a node, runs it, and checks what must come out of it.


def after_three(epoch):
    for _ in range(3):
        epoch = 2 if epoch == 0xFFFFFFFF else epoch + 1
    return epoch


def scenario_three_barriers(node):
    begin = node.read(0, node.control.epoch)
    for rank in node.ranks:
        for _ in range(3):
            node.queue(rank)
    node.run()
    assert node.epochs() == {after_three(begin)}
    for rank in node.ranks:
        assert not any(node.report(rank))
        assert node.read(rank, node.control.busy) == 0
        last = (begin + 2) % 2**32 if begin < 0xFFFFFFFE else after_three(begin) - 1
        for each in node.headers(rank, last):
            assert {stamp for stamp, _ in each} == {last}
            assert [value for _, value in each] == [Kind.BARRIER] + [0] * (len(each) - 1)


def scenario_refusal_then_barrier(node):
    """The last rank refuses a dispatch; all learn why, and the next barrier is an ordinary one."""
    last = node.size - 1
    for rank in node.ranks:
        refusal = {"refusal": RefusalCode.TOO_MANY_TOKENS, "refusal_value": 4711}
        node.queue(rank, kind=Kind.DISPATCH, **(refusal if rank == last else {}))
        node.queue(rank)
    node.watch_reports()
    node.run()
    assert node.epochs() == {3}
    for rank in node.ranks:
        head, headers = node.record(rank)
        assert node.report(rank)[0] == node.read(rank, node.control.failures) == 1
        assert node.report(rank, seen=True) == node.report(rank)
        assert head[:5] == [REFUSED, 1, Kind.DISPATCH, 1, 0]
        assert not any(head[5:])
        for source in node.ranks:
            said = dict(zip(WORDS, headers[source], strict=False))
            refused = {"refusal": 2, "refusal_value": 4711} if source == last else {}
            assert said == header(kind=Kind.DISPATCH, **refused)
        assert node.read(rank, node.control.poisoned) == 0


def scenario_another_call(node):
    """Rank 0 is in another call, six times: the records go round."""
    for rank in node.ranks:
        for _ in range(NUM_RECORDS + 2):
            node.queue(rank, kind=Kind.COMBINE if rank == 0 else Kind.BARRIER)
    node.run()
    differ = node.size > 1
    assert node.epochs() == {NUM_RECORDS + 3}
    for rank in node.ranks:
        assert node.report(rank)[0] == (NUM_RECORDS + 2) * differ
        serials = [node.record(rank, number)[0][1] for number in range(NUM_RECORDS)]
        assert serials == ([5, 6, 3, 4] if differ else [0] * NUM_RECORDS)


def scenario_busy(node):
    """Rank 0's Buffer has another operation inside: it takes no part, and no word of it changes."""
    node.write(0, node.control.busy, 99)
    before = node.state()[0][0]
    node.queue(0, serial=7)
    node.run()
    assert node.state()[0][0] == before
    assert node.report(0) == [0, 7] + [0] * (node.layout.num_words - 2)


def scenario_poisoned(node):
    """All return at once, and nothing but the busy word was touched in between."""
    for rank in node.ranks:
        node.write(rank, node.control.poisoned, 1)
        node.write(rank, node.control.abort, 0x10001)
        node.queue(rank)
    before = node.state()
    node.run()
    assert node.state() == before


def scenario_aborted_before(node):
    """A peer's abort word is there when rank 0 comes; it tells the others and poisons itself."""
    word = RAISED | 1 << 16 + node.size - 1
    node.write(0, node.control.abort, word)
    node.queue(0)
    node.run()
    assert [node.read(rank, node.control.abort) for rank in node.ranks] == [word] * node.size
    head, _ = node.record(0)
    assert head[:10] == [FAILED, 1, Kind.BARRIER, 1, word, 0, 0, 0, 0, 0]
    assert node.report(0)[0] == 1
    assert node.read(0, node.control.poisoned) == 1
    assert node.read(0, node.control.epoch) == 1


def scenario_board(node):
    """The last rank never comes, but says on the board that it gave up. The next call is void.
    (Nothing happens where it is alone.)"""
    last = node.size - 1
    node.machine.poke(node.board, 4 * STRIDE * last, struct.pack("<I", 1))
    for rank in range(last):
        node.queue(rank)
        node.queue(rank)
    node.run()
    word = RAISED | 1 << 16 + last
    for rank in range(last):
        assert node.read(rank, node.control.abort) == word
        head, headers = node.record(rank)
        assert head[:10] == [FAILED, 1, Kind.BARRIER, 1, word, 0, 0, 0, 0, 0]
        assert node.report(rank)[0] == 1
        assert node.read(rank, node.control.poisoned) == 1
        assert node.read(rank, node.control.epoch) == 1
        assert node.read(rank, node.control.busy) == 0
        if node.flavor == "ptx":
            assert not any(headers[last])


def scenario_late(node):
    """The last rank never comes; the first wait to expire says for whom it waited."""
    last = node.size - 1
    node.timeout_ns = LATE_NS
    for rank in range(last):
        node.queue(rank)
        node.queue(rank)
    began = node.machine.now
    node.run()
    assert node.machine.now - began >= LATE_NS or node.size == 1
    reporters = []
    for rank in range(last):
        abort = node.read(rank, node.control.abort)
        assert abort & 0xFFFF == TIMEOUT | 1 << 8 + last
        assert 0 < abort >> 16 < 1 << last
        head, headers = node.record(rank)
        assert head[:4] == [FAILED, 1, Kind.BARRIER, 1]
        assert head[4] & 0xFFFF == abort & 0xFFFF
        if node.read(rank, node.control.claimed):
            reporters.append(rank)
            assert abort >> 16 & 1 << rank
            assert head[5:10] == [1, last, 1 << 32, 0, 0]
        for source in range(last):
            said = dict(zip(WORDS, headers[source], strict=False))
            assert said == header(kind=Kind.BARRIER)
        assert node.report(rank)[0] == 1
        assert node.read(rank, node.control.poisoned) == 1
        assert node.read(rank, node.control.epoch) == 1
        assert node.read(rank, node.control.busy) == 0
    assert reporters or node.size == 1


SCENARIOS = {
    name.removeprefix("scenario_"): function
    for name, function in list(globals().items())
    if name.startswith("scenario_")
}
EXACT = [name for name in SCENARIOS if name not in ("aborted_before", "board", "late")]
"""Nothing in these depends on time, or on what shared memory held before."""


@functools.cache
def alone(name, size):
    """The state that the hand-written module leaves, checked."""
    node = Node(size, "ptx", seed=size)
    SCENARIOS[name](node)
    return node.state()


def sizes_and_names(*sizes):
    """The sizes given, and with ``-m slow`` the others."""
    slow = [pytest.param(n, marks=pytest.mark.slow) for n in range(1, 9) if n not in sizes]

    def mark(test):
        test = pytest.mark.parametrize("name", SCENARIOS)(test)
        return pytest.mark.parametrize("size", [*sizes, *slow], ids=lambda n: f"R{n}")(test)

    return mark


@sizes_and_names(1, 2, 3, 8)
def test_alone(name, size):
    alone(name, size)


@sizes_and_names(1, 2, 3)
def test_with_and_like_its_twin(name, size):
    for seed, flavor in enumerate(("mixed", "cuda")):
        node = Node(size, flavor, seed)
        SCENARIOS[name](node)
        if name in EXACT:
            assert node.state() == alone(name, size)


@pytest.mark.parametrize("epoch", [0xFFFFFFFC, 0xFFFFFFFD, 0xFFFFFFFE, 0xFFFFFFFF])
def test_epochs_wrap_past_zero(epoch):
    scenario_three_barriers(Node(3, "mixed", seed=epoch & 7, epoch=epoch))


@pytest.mark.parametrize("flavor", ["ptx", "cuda"])
@pytest.mark.parametrize(("extra", "verdict"), [(0, GO), (1, REFUSED)])
def test_rows_are_counted_against_the_capacity(flavor, extra, verdict):
    """Headers of ranks 1 and 2 are written by hand: their counts exceed 32 bits together."""
    node = Node(3, flavor)
    most = 0xFFFFFFFF
    said = {
        1: {"kind": Kind.BARRIER, "capacity": most, "counts": [0, most - 1, 5]},
        2: {"kind": Kind.BARRIER, "capacity": 5, "counts": [0, 1 + extra, 0]},
    }
    node.queue(0)
    for source, words in said.items():
        values = [words.get(word, 0) for word in WORDS] + words["counts"]
        for i, value in enumerate(values):
            place = node.control.headers + (node.size + source) * node.control.header_bytes + 8 * i
            node.write(0, place, 1 << 32 | value, 8)
        node.wrote(source, 1)
    node.run()
    assert node.read(0, node.control.epoch) == 2
    assert node.report(0)[0] == (verdict == REFUSED)
    if verdict == REFUSED:
        assert node.record(0)[1][1][-3:] == said[1]["counts"]


# ---------------------------------------------------------------------------------- planted faults


def planted(old, new):
    """The text with one instruction broken; one space stands for any number of them."""
    text, count = re.subn(re.escape(old).replace("\\ ", " +"), new, TEXT)
    assert count, f"{old!r} is not there to be broken"
    return text


FAULTS = {
    "no fence": ("three_barriers", planted("    fence.acq_rel.sys;", "")),
    "no acquire": ("three_barriers", planted("ld.acquire.sys", "ld.relaxed.sys")),
    "an acquire within this GPU": ("three_barriers", planted("ld.acquire.sys", "ld.acquire.gpu")),
    "a fence for this GPU alone": (
        "three_barriers",
        planted("fence.acq_rel.sys", "fence.acq_rel.gpu"),
    ),
    "lanes do not meet behind the header": (
        "three_barriers",
        planted("bar.red.or.pred %p_failed, 0, %p_gave_up;", "mov.pred %p_failed, %p_gave_up;"),
    ),
    "no release of the number": (
        "refusal_then_barrier",
        planted("st.release.sys", "st.relaxed.sys"),
    ),
    "no barrier in the record": (
        "refusal_then_barrier",
        planted("RECORDED:\n bar.warp.sync 0xffffffff;\n bar.sync 0;", "RECORDED:\n"),
    ),
    "stores for this GPU alone": ("three_barriers", planted("st.relaxed.sys", "st.relaxed.gpu")),
    "no parity": ("three_barriers", planted("%r_parity, %r_epoch, 1;", "%r_parity, %r_epoch, 0;")),
    "a wrong slot": ("refusal_then_barrier", planted("%r_parity, %r_rank;", "%r_parity, %r_warp;")),
    "polls at the peer": ("three_barriers", planted("%rd_slot, %rd_own;", "%rd_slot, %rd_region;")),
    "epoch zero": ("three_barriers", planted("%r_epoch, 2, %r_epoch", "%r_epoch, 0, %r_epoch")),
    "blind to the board": ("board", planted("%rd_line, [board];", "%rd_line, [report];")),
    "deaf to refusals": (
        "refusal_then_barrier",
        planted("%r_value, 0, %p_is;", "%r_value, 2, %p_is;"),
    ),
    "never busy": ("busy", planted("mov.b32 %r_verdict, 4;", "")),
    "blames rank 0": ("late", planted("shl.b32 %r_left, %r_left, %r_warp;", "")),
    "one record for all": (
        "another_call",
        planted("rem.u32 %r_left, %r_number", "rem.u32 %r_left, %r_epoch"),
    ),
}


def story(name, seed, text=TEXT):
    """One scenario under the conditions in which faults are looked for."""
    epoch = 0xFFFFFFFD if name == "three_barriers" else 1
    SCENARIOS[name](Node(3, seed=seed, epoch=epoch, text=text, timeout_ns=10**6))


@pytest.mark.parametrize("name", sorted({name for name, _ in FAULTS.values()}))
def test_nothing_is_found_where_nothing_is_planted(name):
    for seed in range(SEEDS):
        story(name, seed)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    name, text = FAULTS[fault]
    for seed in range(SEEDS):
        try:
            story(name, seed, text)
        except AssertionError:
            return
    pytest.fail("nothing was noticed")
