"""One sentence on every memory and ordering instruction that occurs in a kernel, and its kind.

What an access is for, and which load it may be, is said in ``cuda/common/access.cuh`` and argued in
``ptx/README.md``; what a fence orders is said above it in the kernel text, which ``reason`` reads.
Here stands what the instruction itself promises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepep_cupy.inspect.listing import Listing, Op
from deepep_cupy.jit.inspect import Place, classify

__all__ = [
    "ACCESS_CLASSES",
    "KINDS",
    "NOTES",
    "Note",
    "is_memory",
    "kind_of",
    "kind_of_sass",
    "note_of",
    "reason",
    "stem",
]

KINDS: Mapping[str, str] = {
    "rows": "row data, and what travels beside it: weak or strong, but past L1 or fresh in it",
    "headers": "words between ranks and blocks: headers, counts, arrivals, tickets",
    "fences": "fences: order what this thread did around them, move nothing",
    "engine": "the bulk copy engine and the mbarriers it reports to",
    "atomics": "read and write in one: exactly one thread gets each value",
    "block": "inside one block: its shared memory and its barriers",
}
"""Kind → in words, in the order of the legend."""


@dataclass(frozen=True)
class Note:
    """What is to be known of an instruction.

    Attributes:
        kind: A key of ``KINDS``.
        text: One sentence: what it promises, to whom, by way of which cache, and why it is used.
    """

    kind: str
    text: str


_TEXT = """\
[rows]
ld.global
    Weak load, no order, no scope, may fill and hit L1: for this rank's own indices, weights and
    narrow rows, which earlier kernels wrote, so that the kernel's start has emptied L1 of older
    lines.
ld.global.L1::no_allocate
    Weak load, no order, no scope, told not to keep a line in L1: 16 bytes of this rank's own
    rows, which are read once, so that a line in L1 would only push others out.
ld.global.nc
    Non-coherent load that keeps its line in L1 and finds it there again, however old: in no kernel
    of this package, since litmus found it stale wherever another SM's block had acquired.
ld.global.nc.L1::no_allocate
    Non-coherent load: PTX promises its value only while nobody writes the bytes during the
    kernel, which holds for this rank's inputs; no_allocate leaves no line in L1 that could grow
    stale.
ld.global.nc.L1::no_allocate.L2::256B
    Non-coherent load that leaves no line in L1 and asks L2 for 256 bytes: right by the rules
    for this rank's inputs; for peers' rows it rests on no_allocate and on the header this block
    acquired, and on litmus.
st.global
    Weak store, no order, no scope, written through to L2: outputs and what travels beside rows;
    the fence or release of whoever signals later publishes it.
st.global.L1::no_allocate
    Weak store that keeps no line in L1: 16 bytes of a row straight to its final place at the
    receiver, published by the release of the arrival that follows.
ld.relaxed.sys.global.v4
    Strong load at system scope, no order, answered by the L2 of the GPU that owns the bytes and
    never by L1: 16 bytes of a peer's row, whose header this block has acquired.
[headers]
ld.relaxed.sys.global
    Strong load at system scope that orders nothing and does not look into L1: polls of words
    that prove themselves by their epoch, and narrow pieces of peers' rows; an acquire at each
    turn would empty L1 each time.
ld.acquire.sys.global
    Load that acquires at system scope: what the writer of this word did before its release is
    seen by all that this thread does next, for which L1 is emptied; it comes once, after the
    poll has seen the word.
st.relaxed.sys.global
    Strong store at system scope that orders nothing: a word for a peer or the host which
    carries its epoch; where it must speak of other bytes, a fence stands before it in the same
    thread.
st.release.sys.global
    Store that releases at system scope: all that this thread did, or has observed, is visible
    to whoever acquires this word, here the host that reads a record after its number.
ld.relaxed.sys.global.b128
    Strong load at system scope of one word of 16 bytes, seen whole or not at all, past L1: a piece
    of a low-latency row and the epoch that proves it, so that nothing need be acquired.
st.relaxed.sys.global.b128
    Strong store at system scope of one word of 16 bytes, which no reader sees in part: 12 bytes of
    a low-latency row and the epoch, so that no fence stands between a row and its flag.
ld.relaxed.gpu.global
    Strong load at GPU scope, no order, answered by this GPU's L2: words that other blocks of
    this rank wrote, stable or proven by their epoch.
st.relaxed.gpu.global
    Strong store at GPU scope, no order, lands in this GPU's L2: words for other blocks of this
    rank that prove themselves, and control words for later kernels, which the kernel's end
    publishes.
ld.acquire.gpu.global
    Load that acquires at GPU scope: what another block of this GPU released with this word (its
    slots, its choices) may be read now; the block barrier behind it passes that on.
st.release.gpu.global
    Store that releases at GPU scope: this block's slots or additions, ordered by the barrier
    before it, are visible to the block that acquires the word.
[fences]
fence.acq_rel.sys
    Fence for all accesses of this thread at system scope: what came before is visible on every
    GPU before any store that follows, so that one fence serves the relaxed words to all peers.
fence.acq_rel.gpu
    Fence for all accesses of this thread at GPU scope: orders them for the other blocks of this
    GPU, and promises nothing to peers.
fence.mbarrier_init.release.cluster
    Makes initialised mbarriers known to the async proxy, at cluster scope, before the engine
    may report to them.
fence.proxy.async.global
    Orders this thread's ordinary accesses to global memory with the copy engine's, which go by
    another proxy: what was acquired with the headers lies before the engine's loads and stores.
fence.proxy.async.shared::cta
    Orders this thread's ordinary accesses to shared memory with the copy engine's: reads or
    writes of a stage lie before the engine touches it next.
[engine]
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
    One thread starts a copy from global to shared memory past L1, ordered with nothing; the
    bytes that have come are counted in an mbarrier, and no register sees them.
cp.async.bulk.global.shared::cta.bulk_group
    One thread starts a copy from shared to global memory, a peer's included, by way of L2; it
    is done only after a wait for its group.
cp.async.bulk.prefetch.L2.global
    A hint that one thread gives: bytes which will be read soon come to L2 meanwhile; no value
    depends on it, and it orders nothing.
cp.async.bulk.commit_group
    Closes this thread's group of bulk stores, for the waits that follow; orders and waits for
    nothing.
cp.async.bulk.wait_group
    Waits until this thread's bulk stores are written and visible to it, so that the release
    that follows publishes them; without it they may land after the signal.
cp.async.bulk.wait_group.read
    Waits until this thread's bulk stores have read their shared memory, which may be filled
    again; says nothing of where the bytes are.
mbarrier.init.shared::cta
    Sets up an mbarrier in shared memory for one arrival a phase; a fence must follow before the
    engine uses it.
mbarrier.arrive.expect_tx.shared::cta
    Arrives (release at CTA scope) and says how many bytes the engine will bring in this phase,
    before the copies are started.
mbarrier.try_wait.parity.shared::cta
    Tests, and sleeps a while for, the end of a phase; true acquires at CTA scope: the engine's
    bytes are visible to this thread.
[atomics]
atom.acq_rel.gpu.global.add
    Counts a block in, at GPU scope in L2: releases what the block did and acquires what earlier
    arrivals released, so that the last one speaks for all.
atom.relaxed.gpu.global.add
    Draws a ticket at GPU scope in L2: a number of its own for each warp is all that it means,
    so it orders nothing.
atom.relaxed.gpu.global.cas
    Takes a word at GPU scope in L2 if it is free (the Buffer's busy word, the claim to report a
    failure): who was first, and no order.
red.relaxed.gpu.global.add
    Adds at GPU scope in L2 without an answer: the histogram of choices, published by a later
    release of the same block.
red.relaxed.sys.global.or
    Sets bits at system scope without an answer: abort words, into which several ranks may write
    at once.
[block]
ld.shared
    Load of this block's shared memory, by no cache; the barrier or mbarrier before it made the
    bytes visible.
st.shared
    Store to this block's shared memory, by no cache; visible to the other threads after the
    next barrier.
atom.shared.add
    Adds in this block's shared memory and returns what was there; relaxed, and ordered by the
    next barrier.
atom.shared.or
    Sets bits in this block's shared memory; relaxed, and ordered by the next barrier.
atom.shared.min
    Keeps the least in this block's shared memory (the lowest bad token); relaxed, and ordered
    by the next barrier.
atom.relaxed.gpu.shared.add
    Adds in this block's shared memory and returns what was there, as compilers write it for SM 100
    and later: relaxed, and ordered by the next barrier.
atom.relaxed.gpu.shared.or
    Sets bits in this block's shared memory, as compilers write it for SM 100 and later: relaxed,
    and ordered by the next barrier.
atom.relaxed.gpu.shared.min
    Keeps the least in this block's shared memory (the lowest bad token), as compilers write it for
    SM 100 and later: relaxed, and ordered by the next barrier.
bar.sync
    Barrier of the block: what any of its threads did before is visible to all of them behind
    it, so that one thread's acquire or release serves the block.
bar.red.or.pred
    Barrier of the block that also tells all threads whether any of them said yes: a wait that
    failed anywhere ends the block's work.
bar.warp.sync
    Barrier of a warp: orders its lanes' accesses to memory among them.
"""


def _parse(text: str) -> dict[str, Note]:
    """Read kinds in brackets, instructions, and under each its note."""
    notes: dict[str, list[str]] = {}
    kinds: dict[str, str] = {}
    kind = name = ""
    for row in text.splitlines():
        if row.startswith("["):
            kind = row.strip("[]")
        elif row.startswith(" "):
            notes[name].append(row.strip())
        else:
            name = row
            notes[name], kinds[name] = [], kind
    return {name: Note(kinds[name], " ".join(words)) for name, words in notes.items()}


NOTES: Mapping[str, Note] = _parse(_TEXT)
"""Instruction without its type and vector, unless these matter → note."""

_WIDTH = re.compile(r"(\.v[24])?\.[usbf]\d+$")
ACCESS_CLASSES = "common/access.cuh"
"""The file that picks the load of row data, by ``DEEPEP_CUPY_LOADS``."""

_FUNCTION = re.compile(r"\s*(?:DEVICE|DEVICE_METHOD|DEVICE_MEMBER|KERNEL)\s")

_SASS_KINDS = (
    ("engine", r"UBLKCP|UBLKRED|UTMACMDFLUSH|SYNCS|DEPBAR|ARRIVES"),
    ("fences", r"MEMBAR|FENCE|CGAERRBAR|ERRBAR|CCTL"),
    ("atomics", r"ATOM(?!S)|ATOMG|RED(?!UX)|REDG"),
    ("block", r"LDS|STS|ATOMS|BAR|WARPSYNC|LDSM"),
    ("rows", r"(?:LDG|STG)\.E\.(?:NA\.)?(?:EF\.)?(?:LTC\w*\.)?(?:128|U?16|U?8)\b.*"),
    ("headers", r"(?:LDG|STG|LD|ST)\b.*\.STRONG\..*"),
    ("rows", r"LDG|STG|LD|ST"),
)


def stem(opcode: str) -> str:
    """Return the key of an opcode in ``NOTES``, or what would be it."""
    if opcode in NOTES:
        return opcode
    vector = _WIDTH.search(opcode)
    plain = _WIDTH.sub("", opcode)
    wide = f"{plain}{vector[1]}" if vector and vector[1] else plain
    return wide if wide in NOTES else plain


def note_of(opcode: str) -> Note | None:
    """Return the note on a PTX instruction; None: it neither touches memory nor orders accesses.

    Raises:
        KeyError: It does, and has no note.
    """
    if not is_memory(opcode):
        return None
    return NOTES[stem(opcode)]


def is_memory(opcode: str) -> bool:
    """Tell whether a PTX instruction touches memory or orders accesses to it."""
    found = classify(opcode, "", "")
    return found is not None and found.space != "param"


def kind_of(op: Op) -> str:
    """Return the kind of a PTX instruction, ``""`` for one that has nothing to do with memory.

    What is reached through the access classes is row data, whatever the instruction.
    """
    if not is_memory(op.opcode):
        return ""
    note = NOTES.get(stem(op.opcode))
    kind = note.kind if note else "block"
    if kind == "headers" and any(file == ACCESS_CLASSES for file, _ in op.chain):
        return "rows"
    return kind


def kind_of_sass(op: Op) -> str:
    """Return the kind of a machine instruction, ``""`` for one that touches no memory."""
    for kind, pattern in _SASS_KINDS:
        if re.match(rf"(?:{pattern})(?:\.|$)", op.opcode) or re.fullmatch(pattern, op.opcode):
            return kind
    return ""


def reason(listing: Listing, place: Place) -> str:
    """Return what the kernel text says of a line: the comment above it, else above its function.

    A line that continues a statement belongs to that statement's comment. ``""`` for none.
    """
    lines = listing.sources.get(place[0], {})
    own = re.search(r"//\s*(?!PLANT)(\S.*)$", lines.get(place[1], ""))
    if own:
        return _clean([own[1]])
    number = place[1] - 1
    while number > 0:
        row = lines.get(number, "").strip()
        if row.startswith("//") or not row or row.endswith((";", "{", "}")):
            break
        number -= 1
    return _comment_up_to(lines, number) or _comment_of_function(lines, place[1])


def _comment_of_function(lines: Mapping[int, str], number: int) -> str:
    while number > 0 and not _FUNCTION.match(lines.get(number, "")):
        number -= 1
    while lines.get(number - 1, "").startswith("template"):
        number -= 1
    return _comment_up_to(lines, number - 1)


def _comment_up_to(lines: Mapping[int, str], number: int) -> str:
    comment: list[str] = []
    while lines.get(number, "").strip().startswith("//"):
        comment.insert(0, lines[number].strip().lstrip("/ "))
        number -= 1
    return _clean(comment)


def _clean(comment: Sequence[str]) -> str:
    rows = [row for row in comment if not row.startswith(("PLANT(", "----"))]
    return " ".join(re.sub(r"//\s*PLANT.*|PLANT\(.*?\)", "", row).strip() for row in rows).strip()
