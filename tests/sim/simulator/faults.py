"""Planted faults: small changes of kernel text, each with the story that must expose it.

The kernel text marks the spots with comments, ``// PLANT(name)``: at the end of a statement's first
line, or alone on the line above it. A fault changes marked statements and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from simulator.scenario import SHAPES, Focus

TWO_RANKS = (SHAPES[1],)
LIMIT = 500
"""Seeds within which a fault must be found."""

_COMMENT = re.compile(r"[ ]*//.*")
_MARK = re.compile(r"^(.*?)[ ]*//[ ]PLANT\((\w+)\)$", re.MULTILINE)


def marks(text: str) -> list[str]:
    """The names of all marks in a text, in order."""
    return [match[2] for match in _MARK.finditer(text)]


def _statement(text: str, mark: str) -> tuple[int, int]:
    """Where the marked statement is: whole lines, up to one that ends with ``;`` or a brace."""
    found = [match for match in _MARK.finditer(text) if match[2] == mark]
    if len(found) != 1:
        raise ValueError(f"PLANT({mark}) stands {len(found)} times in the kernel text, not once")
    begin = found[0].start() if found[0][1] else found[0].end() + 1
    end = begin
    for line in text[begin:].splitlines(keepends=True):
        end += len(line)
        if _COMMENT.sub("", line).rstrip().endswith((";", "{", "}")):
            return begin, end
    raise ValueError(f"PLANT({mark}): no statement follows")


@dataclass(frozen=True)
class Change:
    """What is done to one marked statement.

    Attributes:
        mark: The name in ``PLANT(name)``.
        edit: From the statement, without comments, to what takes its place.
    """

    mark: str
    edit: Callable[[str], str]

    def __call__(self, text: str) -> str:
        """The text after the change."""
        begin, end = _statement(text, self.mark)
        return text[:begin] + self.edit(_COMMENT.sub("", text[begin:end])) + text[end:]


def swap(mark: str, old: str, new: str) -> Change:
    """Replace a piece of the marked statement."""

    def edit(statement: str) -> str:
        if statement.count(old) != 1:
            raise ValueError(f"PLANT({mark}): {old!r} is not once in the statement any more")
        return statement.replace(old, new)

    return Change(mark, edit)


def put(mark: str, new: str) -> Change:
    """Replace the marked statement."""
    return Change(mark, lambda statement: new + "\n")


def remove(mark: str) -> Change:
    """Delete the marked statement."""
    return Change(mark, lambda statement: "")


def insert(mark: str, new: str) -> Change:
    """Put something in front of the marked statement, which stays."""
    return Change(mark, lambda statement: new + "\n" + statement)


@dataclass(frozen=True)
class Fault:
    """Changes that together are one fault: an edit of kernel text.

    Attributes:
        changes: One or more, of different statements.
    """

    changes: tuple[Change, ...]

    def __call__(self, text: str) -> str:
        """The text with the fault."""
        for change in self.changes:
            text = change(text)
        return text


@dataclass(frozen=True)
class Planted:
    """One fault and what finds it.

    Attributes:
        name: What was done to the text.
        kernels: Whose text is changed.
        edit: The change.
        focus: The kind of story.
        story: The story in a few words, for the table.
    """

    name: str
    kernels: tuple[str, ...]
    edit: Fault
    focus: Focus
    story: str


def change(*changes: Change) -> Fault:
    """One fault of some changes."""
    return Fault(changes)


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
        change(swap("rows_before_released", "st_release_gpu", "st_relaxed_gpu")),
        _focus(DISPATCH),
        "dispatch, several blocks",
    ),
    Planted(
        "release weakened to relaxed (a block's choices are counted)",
        ("dispatch",),
        change(swap("choices_released", "st_release_gpu", "st_relaxed_gpu")),
        _focus(DISPATCH),
        "dispatch, several blocks",
    ),
    Planted(
        "acq_rel weakened to relaxed (arrival counter of the blocks)",
        ("dispatch",),
        change(swap("block_counts_in", "add_acq_rel_gpu", "add_relaxed_gpu")),
        _focus(DISPATCH),
        "dispatch, several blocks",
    ),
    Planted(
        "a block that gave up forgotten by the last one",
        ("dispatch",),
        change(swap("failed_blocks_counted", " || (before >> 16) != 0u", "")),
        _focus(DISPATCH, trouble="skew", blocks=(2, 3)),
        "dispatch, several blocks, one of which gives up",
    ),
    Planted(
        "sys scope narrowed to gpu (fence before the arrivals)",
        ("dispatch",),
        change(swap("fence_before_arrivals", "acq_rel_sys", "acq_rel_gpu")),
        _focus(DISPATCH),
        "dispatch",
    ),
    Planted(
        "sys scope narrowed to gpu (header words)",
        ("combine",),
        change(swap("header_word_sent", "st_relaxed_sys", "st_relaxed_gpu")),
        _focus(ROUND),
        "dispatch and combine",
    ),
    Planted(
        "fence removed (before the headers)",
        ("combine",),
        change(remove("fence_before_headers")),
        _focus(ROUND),
        "combine of rows an earlier kernel wrote",
    ),
    Planted(
        "fence in other threads than those that send (before the headers)",
        ("combine",),
        change(put("fence_before_headers", "if (thread_index() == 0) fence_acq_rel_sys();")),
        _focus(ROUND),
        "combine of rows an earlier kernel wrote",
    ),
    Planted(
        "fence moved to another thread (before the arrivals)",
        ("dispatch",),
        change(
            remove("fence_before_arrivals"),
            insert(
                "arrival_to_each_rank",
                "if (thread_index() == kNumThreads - 1) fence_acq_rel_sys();",
            ),
        ),
        _focus(DISPATCH),
        "dispatch",
    ),
    Planted(
        "acquire removed (headers)",
        ("combine",),
        change(swap("header_acquired", "ld_acquire_sys", "ld_relaxed_sys")),
        _focus(ROUND),
        "dispatch and combine",
    ),
    Planted(
        "acquire removed (headers), bulk loads",
        ("combine_bulk",),
        change(swap("header_acquired", "ld_acquire_sys", "ld_relaxed_sys")),
        _focus(ROUND, bulk=True, row_bytes=(48, 384)),
        "dispatch and combine",
    ),
    Planted(
        "acquire removed (of all blocks' slots)",
        ("dispatch",),
        change(remove("other_slots_acquired")),
        _focus(DISPATCH),
        "dispatch, several blocks",
    ),
    Planted(
        "wait_group weakened to .read",
        ("dispatch_bulk",),
        change(swap("bulk_stores_complete", "bulk_wait<0>", "bulk_wait_read<0>")),
        _focus(DISPATCH, bulk=True, row_bytes=(48, 384)),
        "dispatch by bulk copies",
    ),
    Planted(
        "one lane waits for the bulk stores of all",
        ("dispatch_bulk",),
        change(swap("bulk_stores_complete", "lane_index()", "thread_index()")),
        _focus(DISPATCH, bulk=True, row_bytes=(48, 384)),
        "dispatch by bulk copies, two warps",
    ),
    Planted(
        "a stage reused before its bulk stores have read it",
        ("dispatch_bulk",),
        change(remove("stage_read")),
        _focus(DISPATCH, bulk=True, row_bytes=(384,)),
        "dispatch by bulk copies, rows in two pieces",
    ),
    Planted(
        "value word accepted by >= instead of ==",
        BOTH,
        change(swap("stamp_compared", "== epoch", ">= epoch")),
        _focus(ROUND, **NEAR_WRAP),
        "epochs that wrap round 2^32",
    ),
    Planted(
        "parity slots merged (headers)",
        ("barrier",),
        change(swap("header_parity", "((epoch & 1u) * kNumRanks + source)", "source")),
        _focus(("barrier",) * 5),
        "barriers: one rank an operation ahead",
    ),
    Planted(
        "epoch not advanced",
        ("dispatch",),
        change(swap("epoch_advanced", "next_epoch(s.epoch)", "s.epoch")),
        _focus(DISPATCH),
        "dispatch, three times",
    ),
    Planted(
        "wrap-around: epoch 0 used, which is 'never written'",
        ("dispatch", "barrier"),
        change(swap("epoch_wraps", "epoch + 1u == 0u ? 2u : epoch + 1u", "epoch + 1u")),
        _focus(("barrier", "barrier", "dispatch", "dispatch", "dispatch"), **NEAR_WRAP),
        "epochs that wrap round 2^32",
    ),
    Planted(
        "closing handshake skipped (dispatch)",
        ("dispatch",),
        change(swap("dispatch_handshake", "true", "false")),
        _focus(DISPATCH),
        "dispatch",
    ),
    Planted(
        "opening handshake skipped: rows move before the headers are in",
        ("combine",),
        change(put("headers_awaited", "seen = ld_relaxed_sys_u64(slot); if (false) {")),
        _focus(ROUND),
        "dispatch and combine",
    ),
    Planted(
        "slot off by one (prefix over the blocks)",
        ("dispatch",),
        change(swap("prefix_of_lower_blocks", "block < block_index()", "block <= block_index()")),
        _focus(DISPATCH),
        "dispatch, several blocks",
    ),
    Planted(
        "combine's closing handshake removed",
        ("combine",),
        change(swap("combine_handshake", "true", "false")),
        _focus(ROUND),
        "the caller rewrites x after combine",
    ),
    Planted(
        "arrival sent before all blocks are done",
        ("dispatch",),
        change(swap("last_block_found", "num_blocks()", "(num_blocks() + 1u) / 2u")),
        _focus(DISPATCH),
        "dispatch, several blocks",
    ),
    Planted(
        "block arrives before all its warps are done",
        ("dispatch",),
        change(swap("all_warps_done", "block_barrier_or(s.failed != 0u)", "s.failed != 0u")),
        _focus(DISPATCH),
        "dispatch, two warps",
    ),
    Planted(
        "one arrival is not sent",
        ("dispatch",),
        change(
            swap("arrival_to_each_rank", "i < kNumRanks", "i < kNumRanks - 1u"),
            swap("arrival_peer", "1u", "2u"),
        ),
        _focus(DISPATCH),
        "dispatch",
    ),
    Planted(
        "early return skips the arrival",
        ("dispatch",),
        change(insert("dispatch_finishes", "if (verdict == kFailed) return;")),
        _focus(DISPATCH, trouble="skew"),
        "one block's wait expires",
    ),
    Planted(
        "fail bit dropped from the arrival counter",
        ("dispatch",),
        change(swap("block_counts_in", "failed ? 0x10001u : 1u", "1u")),
        _focus(("dispatch", *("cached",) * 5), trouble="skew"),
        "one block's wait expires, cached dispatch",
    ),
    Planted(
        "counter not reset",
        ("dispatch",),
        change(remove("counter_reset")),
        _focus(DISPATCH),
        "dispatch, three times",
    ),
    Planted(
        "histogram not reset",
        ("dispatch",),
        change(remove("histogram_reset")),
        _focus(DISPATCH),
        "dispatch, three times",
    ),
    Planted(
        "tickets not reset",
        ("dispatch",),
        change(remove("tickets_reset")),
        _focus(DISPATCH),
        "dispatch, three times",
    ),
    Planted(
        "a token dealt before its block's slots are acquired",
        ("dispatch_bulk",),
        change(swap("first_token_of_own_share", "first_token(", "next_token(c, ")),
        _focus(DISPATCH, bulk=True, row_bytes=(48, 384)),
        "dispatch by bulk copies, several blocks",
    ),
    Planted(
        "the rows of lower blocks taken before they are told",
        ("dispatch",),
        change(put("lower_blocks_awaited", "if (false) {")),
        _focus(DISPATCH),
        "dispatch, several blocks",
    ),
    Planted(
        "header signature ignored",
        ("dispatch",),
        change(remove("signature_compared")),
        _focus(DISPATCH, trouble="differ"),
        "rows of different sizes",
    ),
    Planted(
        "refusal ignored",
        ("dispatch",),
        change(remove("refusal_heeded")),
        _focus(DISPATCH, trouble="bad_expert"),
        "an expert out of range",
    ),
    Planted(
        "proxy fence removed (peers' rows before bulk loads)",
        ("combine_bulk",),
        change(remove("proxy_fence_before_loads")),
        _focus(ROUND, bulk=True, row_bytes=(48, 384)),
        "combine by bulk copies",
    ),
    Planted(
        "proxy fence removed (lanes' reads before the next bulk load)",
        ("combine_bulk",),
        change(remove("proxy_fence_after_reads")),
        _focus(ROUND, bulk=True, row_bytes=(384,)),
        "combine by bulk copies",
    ),
    Planted(
        "warp barrier removed (lanes' reads before the next bulk load)",
        ("combine_bulk",),
        change(remove("warp_barrier_after_reads"), remove("warp_barrier_before_loads")),
        _focus(ROUND, bulk=True, row_bytes=(384,)),
        "combine by bulk copies",
    ),
    Planted(
        "proxy fence removed (codes before their bulk stores)",
        ("dispatch_cast_bulk",),
        change(remove("proxy_fence_after_codes")),
        _focus(DISPATCH, bulk=True, cast=True),
        "dispatch that casts",
    ),
    Planted(
        "warp barrier removed (codes before their bulk stores)",
        ("dispatch_cast_bulk",),
        change(remove("warp_barrier_after_codes")),
        _focus(DISPATCH, bulk=True, cast=True, hidden=(272,)),
        "dispatch that casts",
    ),
    Planted(
        "warp barrier removed (elements before codes are written over them)",
        ("dispatch_cast_bulk",),
        change(remove("elements_read")),
        _focus(DISPATCH, bulk=True, cast=True, hidden=(272,)),
        "dispatch that casts",
    ),
    Planted(
        "warp barrier removed (zeros behind a short group before they are read)",
        ("dispatch_cast_bulk",),
        change(remove("zeros_written")),
        _focus(DISPATCH, bulk=True, cast=True, hidden=(48, 144)),
        "dispatch that casts, short groups",
    ),
    Planted(
        "elements multiplied for the neighbouring group",
        ("dispatch_cast_bulk",),
        change(swap("factor_of_group", "kGroupBytes + i", "kGroupBytes + 1u + i")),
        _focus(DISPATCH, bulk=True, cast=True, hidden=(272,)),
        "dispatch that casts, several groups",
    ),
    Planted(
        "scale of the neighbouring group sent",
        ("dispatch_cast_bulk",),
        change(swap("scale_sent", "scale.sent", "warp_shuffle(scale.sent, lane_index() ^ 1u)")),
        _focus(DISPATCH, bulk=True, cast=True, hidden=(272,)),
        "dispatch that casts, several groups",
    ),
    Planted(
        "codes of a second piece stored where its elements would be",
        ("dispatch_cast_bulk",),
        change(swap("piece_stored_at", "(pieces.bytes >> pieces.shift)", "pieces.bytes")),
        _focus(DISPATCH, bulk=True, cast=True, hidden=(528, 1040)),
        "dispatch that casts, rows in several pieces",
    ),
    Planted(
        "the next load begins before the codes in its stage are read",
        ("dispatch_cast_bulk",),
        change(remove("stage_read")),
        _focus(DISPATCH, bulk=True, cast=True, hidden=(528, 1040)),
        "dispatch that casts, rows in several pieces",
    ),
    Planted(
        "block barrier removed (before other warps' counts are read)",
        ("dispatch",),
        change(remove("warp_rows_written")),
        _focus(DISPATCH),
        "dispatch, two warps",
    ),
    Planted(
        "one lane alone waits for the bulk load",
        ("combine_bulk",),
        change(swap("load_awaited", "ok && ", "ok && lane_index() == 0 && ")),
        _focus(ROUND, bulk=True, row_bytes=(384,)),
        "combine by bulk copies",
    ),
    Planted(
        "rows behind the real ones not told to be none",
        ("dispatch",),
        change(remove("tails_filled")),
        _focus(DISPATCH, mode="no wait"),
        "dispatch without a host that waits",
    ),
    Planted(
        "rows behind the real ones begin a row too early",
        ("dispatch_bulk",),
        change(insert("tail_begins", "if (rows != 0u) --rows;")),
        _focus(DISPATCH, bulk=True, row_bytes=(48,), mode="no wait"),
        "dispatch without a host that waits",
    ),
    Planted(
        "room for rows not compared with counts",
        ("dispatch",),
        change(remove("capacity_compared")),
        _focus(("dispatch",), mode="full"),
        "a rank with too little room",
    ),
    Planted(
        "handle of a refused dispatch accepted",
        ("combine",),
        change(put("handle_accepted", "return;")),
        _focus(("dispatch", "combine"), mode="full"),
        "combine queued on a dispatch that was refused",
    ),
    Planted(
        "statistics added by the last block, whatever came of it",
        ("dispatch",),
        change(
            insert(
                "dispatch_settled",
                "if (alone && comm.last != 0u && d.recv_stats != nullptr) add_statistics(d);",
            )
        ),
        _focus(DISPATCH, trouble="skew", mode="no wait"),
        "one block's wait expires",
    ),
)


def focus_of(planted: Planted) -> Focus:
    """The story's focus, with the fault in its kernels."""
    edits: Mapping[str, Fault] = dict.fromkeys(planted.kernels, planted.edit)
    return Focus(**{**vars(planted.focus), "edits": edits})


def seeds_needed(
    planted: Planted, run: Callable[[int, Focus], bool], limit: int = LIMIT
) -> int | None:
    """The first seed (from 0) that finds the fault, or ``None``."""
    focus = focus_of(planted)
    return next((seed for seed in range(limit) if run(seed, focus)), None)
