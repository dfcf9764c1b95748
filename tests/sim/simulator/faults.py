"""Planted faults: small changes of kernel text, each with the story that must expose it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from simulator.scenario import SHAPES, Focus
from simulator.shapes import Edit

TWO_RANKS = (SHAPES[1],)
LIMIT = 500
"""Seeds within which a fault must be found."""


@dataclass(frozen=True)
class Planted:
    """One fault.

    Attributes:
        name: What was done to the text.
        kernels: Whose text is changed.
        edit: The change.
        focus: The kind of story.
        story: The story in a few words, for the table.
    """

    name: str
    kernels: tuple[str, ...]
    edit: Edit
    focus: Focus
    story: str


def change(*pairs: tuple[str, str]) -> Edit:
    """Replace pieces of text; spaces in the old text stand for any white space, comments too."""

    def edit(text: str) -> str:
        text = re.sub(r"//[^\n]*", "", text)
        for old, new in pairs:
            pattern = r"\s+".join(re.escape(word) for word in old.split())
            text, count = re.subn(pattern, new.replace("\\", r"\\"), text)
            if count == 0:
                raise ValueError(f"the kernel text has changed: no {old!r} in it any more")
        return text

    return edit


BOTH = ("dispatch", "combine")
ROUND = ("dispatch", "combine", "dispatch", "combine")
DISPATCH = ("dispatch", "dispatch", "dispatch")


def _focus(calls: tuple[str, ...], bulk: bool = False, trouble: str = "", **more: object) -> Focus:
    fixed = {"shapes": TWO_RANKS, "tokens": 2, "mode": "plain", **more}
    return Focus(calls=calls, bulk=bulk, trouble=trouble, **fixed)  # type: ignore[arg-type]


NEAR_WRAP = {"epochs": (2**32 - 4, 2**32 - 3, 2**32 - 2)}

PLANTED: tuple[Planted, ...] = (
    Planted(
        "release weakened to relaxed (a block's rows before)",
        ("dispatch",),
        change(
            (
                "st_release_gpu_u64(before_slot(c, block_index()) + thread_index()",
                "st_relaxed_gpu_u64(before_slot(c, block_index()) + thread_index()",
            )
        ),
        _focus(DISPATCH),
        "dispatch, several blocks",
    ),
    Planted(
        "release weakened to relaxed (a block's choices are counted)",
        ("dispatch",),
        change(
            (
                "st_release_gpu_u64(before_slot(c, block_index()) + kNumRanks",
                "st_relaxed_gpu_u64(before_slot(c, block_index()) + kNumRanks",
            )
        ),
        _focus(DISPATCH),
        "dispatch, several blocks",
    ),
    Planted(
        "acq_rel weakened to relaxed (arrival counter of the blocks)",
        ("dispatch",),
        change(("kAcqRel, kGpu, true", "kRelaxed, kGpu, true")),
        _focus(DISPATCH),
        "dispatch, several blocks",
    ),
    Planted(
        "sys scope narrowed to gpu (fence before the arrivals)",
        ("dispatch",),
        change(
            (
                "fence_acq_rel_sys(); st_relaxed_sys_u64(arrived_slot",
                "fence_acq_rel_gpu(); st_relaxed_sys_u64(arrived_slot",
            )
        ),
        _focus(DISPATCH),
        "dispatch",
    ),
    Planted(
        "sys scope narrowed to gpu (header words)",
        ("combine",),
        change(("st_relaxed_sys_u64(slot + word", "st_relaxed_gpu_u64(slot + word")),
        _focus(ROUND),
        "dispatch and combine",
    ),
    Planted(
        "fence removed (before the headers)",
        ("combine",),
        change(
            (
                "if (block_index() == 0 && first_word() < kNumRanks * kHeaderWords) "
                "fence_acq_rel_sys();",
                "",
            )
        ),
        _focus(ROUND),
        "combine of rows an earlier kernel wrote",
    ),
    Planted(
        "fence in other threads than those that send (before the headers)",
        ("combine",),
        change(
            (
                "if (block_index() == 0 && first_word() < kNumRanks * kHeaderWords) "
                "fence_acq_rel_sys();",
                "if (thread_index() == 0) fence_acq_rel_sys();",
            )
        ),
        _focus(ROUND),
        "combine of rows an earlier kernel wrote",
    ),
    Planted(
        "fence moved to another thread (before the arrivals)",
        ("dispatch",),
        change(
            (
                "fence_acq_rel_sys(); st_relaxed_sys_u64(arrived_slot",
                "st_relaxed_sys_u64(arrived_slot",
            ),
            (
                "for (u32 i = thread_index(); i < kNumRanks; i += kNumThreads) { u32 peer",
                "if (thread_index() == kNumThreads - 1) fence_acq_rel_sys();\n"
                "for (u32 i = thread_index(); i < kNumRanks; i += kNumThreads) { u32 peer",
            ),
        ),
        _focus(DISPATCH),
        "dispatch",
    ),
    Planted(
        "acquire removed (headers)",
        ("combine",),
        change(("ld_acquire_sys_u64(slot)", "ld_relaxed_sys_u64(slot)")),
        _focus(ROUND),
        "dispatch and combine",
    ),
    Planted(
        "acquire removed (headers), bulk loads",
        ("combine_bulk",),
        change(("ld_acquire_sys_u64(slot)", "ld_relaxed_sys_u64(slot)")),
        _focus(ROUND, bulk=True, row_bytes=(48, 384)),
        "dispatch and combine",
    ),
    Planted(
        "acquire removed (of all blocks' slots)",
        ("dispatch",),
        change(("ld_acquire_gpu_u64(slot);", "")),
        _focus(DISPATCH),
        "dispatch, several blocks",
    ),
    Planted(
        "wait_group weakened to .read",
        ("dispatch_bulk",),
        change(
            (
                "if (lane_index() == 0) bulk_wait<0>();",
                "if (lane_index() == 0) bulk_wait_read<0>();",
            )
        ),
        _focus(DISPATCH, bulk=True, row_bytes=(48, 384)),
        "dispatch by bulk copies",
    ),
    Planted(
        "one lane waits for the bulk stores of all",
        ("dispatch_bulk",),
        change(
            ("if (lane_index() == 0) bulk_wait<0>();", "if (thread_index() == 0) bulk_wait<0>();")
        ),
        _focus(DISPATCH, bulk=True, row_bytes=(48, 384)),
        "dispatch by bulk copies, two warps",
    ),
    Planted(
        "a stage reused before its bulk stores have read it",
        ("dispatch_bulk",),
        change(("bulk_wait_read<1>();", "")),
        _focus(DISPATCH, bulk=True, row_bytes=(384,)),
        "dispatch by bulk copies, rows in two pieces",
    ),
    Planted(
        "value word accepted by >= instead of ==",
        BOTH,
        change(("static_cast<u32>(word >> 32) == epoch", "static_cast<u32>(word >> 32) >= epoch")),
        _focus(ROUND, **NEAR_WRAP),
        "epochs that wrap round 2^32",
    ),
    Planted(
        "parity slots merged (headers)",
        ("barrier",),
        change(("((epoch & 1u) * kNumRanks + source) * kHeaderWords", "source * kHeaderWords")),
        _focus(("barrier",) * 5),
        "barriers: one rank an operation ahead",
    ),
    Planted(
        "epoch not advanced",
        ("dispatch",),
        change(("next_epoch(s.epoch));", "s.epoch);")),
        _focus(DISPATCH),
        "dispatch, three times",
    ),
    Planted(
        "wrap-around: epoch 0 used, which is 'never written'",
        ("dispatch", "barrier"),
        change(("epoch + 1u == 0u ? 2u : epoch + 1u", "epoch + 1u")),
        _focus(("barrier", "barrier", "dispatch", "dispatch", "dispatch"), **NEAR_WRAP),
        "epochs that wrap round 2^32",
    ),
    Planted(
        "closing handshake skipped (dispatch)",
        ("dispatch",),
        change(("leave(c, comm, verdict, true)", "leave(c, comm, verdict, false)")),
        _focus(DISPATCH),
        "dispatch",
    ),
    Planted(
        "opening handshake skipped: rows move before the headers are in",
        ("combine",),
        change(
            (
                "if (!wait_stamped(c, s, slot, {kPhaseHeader, source, stamped(s.epoch, 0)}, seen))",
                "seen = ld_relaxed_sys_u64(slot); if (false)",
            )
        ),
        _focus(ROUND),
        "dispatch and combine",
    ),
    Planted(
        "slot off by one (prefix over the blocks)",
        ("dispatch",),
        change(("if (block < block_index()) shared_add", "if (block <= block_index()) shared_add")),
        _focus(DISPATCH),
        "dispatch, several blocks",
    ),
    Planted(
        "combine's closing handshake removed",
        ("combine",),
        change(("leave(c, s, verdict, true)", "leave(c, s, verdict, false)")),
        _focus(ROUND),
        "the caller rewrites x after combine",
    ),
    Planted(
        "arrival sent before all blocks are done",
        ("dispatch",),
        change(
            (
                "s.last = (before & 0xffffu) + 1u == num_blocks();",
                "s.last = (before & 0xffffu) + 1u == (num_blocks() + 1u) / 2u;",
            )
        ),
        _focus(DISPATCH),
        "dispatch, several blocks",
    ),
    Planted(
        "block arrives before all its warps are done",
        ("dispatch",),
        change(
            (
                "bool failed = block_barrier_or(s.failed != 0u) || verdict == kFailed;",
                "bool failed = s.failed != 0u || verdict == kFailed;",
            )
        ),
        _focus(DISPATCH),
        "dispatch, two warps",
    ),
    Planted(
        "one arrival is not sent",
        ("dispatch",),
        change(
            (
                "kNumRanks; i += kNumThreads) { u32 peer = (c.rank + 1u + i) % kNumRanks; fence",
                "kNumRanks - 1u; i += kNumThreads) {\n"
                "u32 peer = (c.rank + 2u + i) % kNumRanks;\nfence",
            )
        ),
        _focus(DISPATCH),
        "dispatch",
    ),
    Planted(
        "early return skips the arrival",
        ("dispatch",),
        change(
            (
                "finish(p.comm, s.comm, p.d, verdict);",
                "if (verdict == kFailed) return;\n finish(p.comm, s.comm, p.d, verdict);",
            )
        ),
        _focus(DISPATCH, trouble="skew"),
        "one block's wait expires",
    ),
    Planted(
        "fail bit dropped from the arrival counter",
        ("dispatch",),
        change(("failed ? 0x10001u : 1u", "1u")),
        _focus(("dispatch", *("cached",) * 5), trouble="skew"),
        "one block's wait expires, cached dispatch",
    ),
    Planted(
        "counter not reset",
        ("dispatch",),
        change(("if (s.last) st_relaxed_gpu_u32(arrivals, 0u);", "")),
        _focus(DISPATCH),
        "dispatch, three times",
    ),
    Planted(
        "histogram not reset",
        ("dispatch",),
        change(("st_relaxed_gpu_u32(histogram + expert, 0u);", "")),
        _focus(DISPATCH),
        "dispatch, three times",
    ),
    Planted(
        "tickets not reset",
        ("dispatch",),
        change(("st_relaxed_gpu_u32(control_u32(own, kControlTickets), 0u);", "")),
        _focus(DISPATCH),
        "dispatch, three times",
    ),
    Planted(
        "a token dealt before its block's slots are acquired",
        ("dispatch_bulk",),
        change(("token = first_token(work.deal);", "token = next_token(c, work.deal);")),
        _focus(DISPATCH, bulk=True, row_bytes=(48, 384)),
        "dispatch by bulk copies, several blocks",
    ),
    Planted(
        "the rows of lower blocks taken before they are told",
        ("dispatch",),
        change(("if (!is_stamped(word, comm.epoch)) {", "if (false) {")),
        _focus(DISPATCH),
        "dispatch, several blocks",
    ),
    Planted(
        "header signature ignored",
        ("dispatch",),
        change(("disagree |= s.headers[source][word] != s.headers[0][word];", "")),
        _focus(DISPATCH, trouble="differ"),
        "rows of different sizes",
    ),
    Planted(
        "refusal ignored",
        ("dispatch",),
        change(("disagree |= s.headers[source][kWordRefusal] != 0u;", "")),
        _focus(DISPATCH, trouble="bad_expert"),
        "an expert out of range",
    ),
    Planted(
        "proxy fence removed (peers' rows before bulk loads)",
        ("combine_bulk",),
        change(("fence_proxy_async_global();", "")),
        _focus(ROUND, bulk=True, row_bytes=(48, 384)),
        "combine by bulk copies",
    ),
    Planted(
        "proxy fence removed (lanes' reads before the next bulk load)",
        ("combine_bulk",),
        change(("fence_proxy_async_shared();", "")),
        _focus(ROUND, bulk=True, row_bytes=(384,)),
        "combine by bulk copies",
    ),
    Planted(
        "warp barrier removed (lanes' reads before the next bulk load)",
        ("combine_bulk",),
        change(("warp_barrier();", "")),
        _focus(ROUND, bulk=True, row_bytes=(384,)),
        "combine by bulk copies",
    ),
    Planted(
        "proxy fence removed (codes before their bulk stores)",
        ("dispatch_cast_bulk",),
        change(("fence_proxy_async_shared(); warp_barrier();", "warp_barrier();")),
        _focus(DISPATCH, bulk=True, cast=True),
        "dispatch that casts",
    ),
    Planted(
        "warp barrier removed (codes before their bulk stores)",
        ("dispatch_cast_bulk",),
        change(("fence_proxy_async_shared(); warp_barrier();", "fence_proxy_async_shared();")),
        _focus(DISPATCH, bulk=True, cast=True, hidden=(272,)),
        "dispatch that casts",
    ),
    Planted(
        "warp barrier removed (elements before codes are written over them)",
        ("dispatch_cast_bulk",),
        change(("warp_barrier(); u8* out", "u8* out")),
        _focus(DISPATCH, bulk=True, cast=True, hidden=(272,)),
        "dispatch that casts",
    ),
    Planted(
        "warp barrier removed (zeros behind a short group before they are read)",
        ("dispatch_cast_bulk",),
        change(("Vec16{{0, 0, 0, 0}}); warp_barrier();", "Vec16{{0, 0, 0, 0}});")),
        _focus(DISPATCH, bulk=True, cast=True, hidden=(48, 144)),
        "dispatch that casts, short groups",
    ),
    Planted(
        "elements multiplied for the neighbouring group",
        ("dispatch_cast_bulk",),
        change(("begin / kGroupBytes + i", "begin / kGroupBytes + 1u + i")),
        _focus(DISPATCH, bulk=True, cast=True, hidden=(272,)),
        "dispatch that casts, several groups",
    ),
    Planted(
        "scale of the neighbouring group sent",
        ("dispatch_cast_bulk",),
        change(("sent = scale.sent;", "sent = warp_shuffle(scale.sent, lane_index() ^ 1u);")),
        _focus(DISPATCH, bulk=True, cast=True, hidden=(272,)),
        "dispatch that casts, several groups",
    ),
    Planted(
        "codes of a second piece stored where its elements would be",
        ("dispatch_cast_bulk",),
        change(("(pieces.bytes >> pieces.shift), stage", "pieces.bytes, stage")),
        _focus(DISPATCH, bulk=True, cast=True, hidden=(528, 1040)),
        "dispatch that casts, rows in several pieces",
    ),
    Planted(
        "the next load begins before the codes in its stage are read",
        ("dispatch_cast_bulk",),
        change(("bulk_wait_read<1>();", "")),
        _focus(DISPATCH, bulk=True, cast=True, hidden=(528, 1040)),
        "dispatch that casts, rows in several pieces",
    ),
    Planted(
        "block barrier removed (before other warps' counts are read)",
        ("dispatch",),
        change(("[lane] = count; block_barrier();", "[lane] = count;")),
        _focus(DISPATCH),
        "dispatch, two warps",
    ),
    Planted(
        "one lane alone waits for the bulk load",
        ("combine_bulk",),
        change(
            (
                "while (ok && !mbarrier_try_wait_parity(loaded, parity))",
                "while (ok && lane_index() == 0 && !mbarrier_try_wait_parity(loaded, parity))",
            )
        ),
        _focus(ROUND, bulk=True, row_bytes=(384,)),
        "combine by bulk copies",
    ),
    Planted(
        "rows behind the real ones not told to be none",
        ("dispatch",),
        change(("fill_tails(c, s.comm, d);", "")),
        _focus(DISPATCH, mode="no wait"),
        "dispatch without a host that waits",
    ),
    Planted(
        "rows behind the real ones begin a row too early",
        ("dispatch_bulk",),
        change(
            (
                "u64 rows = received_rows(c, comm, d); u64 tail",
                "u64 rows = received_rows(c, comm, d);\nif (rows != 0u) --rows;\nu64 tail",
            )
        ),
        _focus(DISPATCH, bulk=True, row_bytes=(48,), mode="no wait"),
        "dispatch without a host that waits",
    ),
    Planted(
        "room for rows not compared with counts",
        ("dispatch",),
        change(("disagree |= rows > s.headers[rank][kWordCapacity];", "")),
        _focus(("dispatch",), mode="full"),
        "a rank with too little room",
    ),
    Planted(
        "handle of a refused dispatch accepted",
        ("combine",),
        change(("if (birth != 0u || s.mine[kWordRefusal] != 0u) return;", "return;")),
        _focus(("dispatch", "combine"), mode="full"),
        "combine queued on a dispatch that was refused",
    ),
    Planted(
        "statistics added by the last block, whatever came of it",
        ("dispatch",),
        change(
            (
                "if (all || alone) {",
                "if (alone && comm.last != 0u && d.recv_stats != nullptr) add_statistics(d);\n"
                "if (all || alone) {",
            )
        ),
        _focus(DISPATCH, trouble="skew", mode="no wait"),
        "one block's wait expires",
    ),
)


def focus_of(planted: Planted) -> Focus:
    """The story's focus, with the fault in its kernels."""
    edits: Mapping[str, Edit] = dict.fromkeys(planted.kernels, planted.edit)
    return Focus(**{**vars(planted.focus), "edits": edits})


def seeds_needed(
    planted: Planted, run: Callable[[int, Focus], bool], limit: int = LIMIT
) -> int | None:
    """The first seed (from 0) that finds the fault, or ``None``."""
    focus = focus_of(planted)
    return next((seed for seed in range(limit) if run(seed, focus)), None)
