"""What each instruction of a kernel is there for: by the function it was inlined from.

The innermost function, or file, of an instruction's chain that a table below names decides. What
serves everybody (``asm/``, ``common/access.cuh``, filling, numbers) is in no table, and belongs to
its caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from deepep_cupy.inspect.listing import Chain, Listing, Op
from deepep_cupy.jit.inspect import Place

__all__ = ["FILES", "FUNCTIONS", "PURPOSES", "count_purposes", "purpose_of"]

PURPOSES: Mapping[str, str] = {
    "rows": "moving rows: loads, stores and sums of row data",
    "beside": "what travels beside rows: indices, weights, scales",
    "routing": "which row goes where: scan, prefix sums, tickets",
    "counts": "counts for the host, the peers and later kernels",
    "headers": "headers: told, awaited, compared",
    "waits": "waiting for a word: polls and clocks",
    "exit": "the exit: arrivals, counters, epoch",
    "failures": "failures: giving up, records, poisoned outputs",
    "other": "the rest: entry, addresses, constants",
}
"""Purpose → in words, in the order shown."""

FUNCTIONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("give_up", "told_to_stop", "write_record", "send_aborts", "rows_to_poison"), "failures"
    ),
    **dict.fromkeys(("poison_received", "poison_combined", "poison"), "failures"),
    **dict.fromkeys(("send_metadata", "send_choices", "send_scales", "send_words"), "beside"),
    **dict.fromkeys(("combine_weights", "gather_weights", "fill_tails", "write_scales"), "beside"),
    **dict.fromkeys(("copy_scales", "add_statistics"), "beside"),
    **dict.fromkeys(("find_row", "find_slot", "row_of_lane", "sources_of_token"), "routing"),
    **dict.fromkeys(("fill_header", "complete_header", "open_combine"), "headers"),
}
"""Function → purpose."""

FILES: tuple[tuple[str, str], ...] = (
    ("comm/wait", "waits"),
    ("comm/bulk_wait", "waits"),
    ("comm/header", "headers"),
    ("comm/leave", "exit"),
    ("dispatch/counts", "counts"),
    ("dispatch/scan", "routing"),
    ("dispatch/exchange", "routing"),
    ("dispatch/schedule", "routing"),
    ("dispatch/", "rows"),
    ("combine/", "rows"),
    ("expand/count", "routing"),
    ("expand/starts", "routing"),
    ("expand/rows", "routing"),
    ("expand/slices", "routing"),
    ("expand/", "rows"),
    ("quantize/", "rows"),
    ("bench/", "rows"),
)
"""Beginning of a file's name → purpose; the first that fits."""


def purpose_of(chain: Chain, functions: Mapping[Place, str]) -> str:
    """Return the purpose of an instruction, a key of ``PURPOSES``."""
    for place in chain:
        if place in functions and functions[place] in FUNCTIONS:
            return FUNCTIONS[functions[place]]
        for beginning, purpose in FILES:
            if place[0].startswith(beginning):
                return purpose
    return "other"


def count_purposes(listing: Listing, ops: Iterable[Op]) -> Counter[str]:
    """Return purpose → instructions."""
    return Counter(purpose_of(op.chain, listing.functions) for op in ops)
