"""The headers that ranks exchange before any row moves, and the verdict they reach on them.

Every operation opens with one *header* per rank, the same words for both engines. All ranks see
all headers and reach the same verdict: go, or an error that names who differs in what. A rank
whose arguments were refused sends its refusal in the header's place.

=================  =========================================================================
word (32 bits)     meaning
=================  =========================================================================
``kind``           ``call_word``: the operation, and which call of it
``dtype``          ``dtype_code``: itemsize and kind of the rows, and of their scales; 0 for none
``row_bytes``      bytes of one row as it travels, its scales included
``num_topk``       K of the call, 0 without top-k arrays
``index_bytes``    4 or 8, itemsize of ``topk_idx``; 0 for none
``weights``        1 when weights travel
``layout``         ``layout_word``: where the routing comes from, and ``LayoutFlag``s
``birth``          cached dispatch and combine: epoch of the dispatch that made the handle
``refusal``        ``RefusalCode``, 0 for none
``refusal_value``  the token, size or argument the refusal is about
``capacity``       tokens the sender can receive: R * M, or ``num_worst_tokens``
``rows_offset``    the sender's block of rows, in units of ``OFFSET_UNIT`` bytes
``meta_offset``    the sender's array of source indices (dispatch) or weights (combine)
``weights_offset`` dispatch: the sender's array for received weights, same unit
``index_offset``   dispatch: the sender's array for received ``topk_idx``, same unit
``num_rows``       tokens sent (dispatch) or rows held (combine)
=================  =========================================================================

The first eight (``SIGNATURE``) must be equal on all ranks; behind the words follow R counts:
rows this rank sends to each rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

__all__ = [
    "ARGUMENTS",
    "DTYPE_CODES",
    "MAX_TAG",
    "OFFSET_UNIT",
    "REGION_BYTES",
    "SCALE_CODES",
    "SIGNATURE",
    "TAGGED",
    "WORDS",
    "Kind",
    "Layout",
    "LayoutFlag",
    "Refusal",
    "RefusalCode",
    "call_word",
    "describe_refusal",
    "difference",
    "dtype_code",
    "dtype_label",
    "dtype_name",
    "kind_of",
    "layout_word",
    "refused_elsewhere",
    "tagged",
    "verdict",
]

OFFSET_UNIT = 16
"""Offsets into the symmetric region travel in this unit, so that 32 bits reach 64 GiB."""
REGION_BYTES = OFFSET_UNIT << 32
"""Bytes of the symmetric region that such offsets reach."""


class Kind(IntEnum):
    """Operations that open with a header."""

    NONE = 0
    BARRIER = 1
    DISPATCH = 2
    COMBINE = 3


_CALL_SHIFT = 4
TAGGED = 1 << 27
"""Bit of a call's identity: the other bits are the caller's ``tag``."""
MAX_TAG = TAGGED - 1


def call_word(kind: int, identity: int = 0) -> int:
    """The header word ``kind``: which call this is.

    Ranks that meet in calls of the same form but not in the same call would give each other rows
    of the wrong one. The order of calls proves that they meet rightly, but for graphs: a replay
    may meet another rank's call outside of graphs, or another graph.

    Args:
        kind: The operation.
        identity: 0 for a call outside of graphs; in a graph the number of the captured call, by
            the order in which this rank captured its calls; ``TAGGED`` | tag where the caller gave
            the call a tag, which then alone tells it from others.
    """
    return int(kind) | identity << _CALL_SHIFT


def tagged(tag: int | None) -> int:
    """The identity that a tag gives a call; 0 without one."""
    return 0 if tag is None else TAGGED | tag


def kind_of(word: int) -> int:
    """The ``Kind`` in a header word ``kind``."""
    return word & ((1 << _CALL_SHIFT) - 1)


class Layout(IntEnum):
    """Where a dispatch takes its routing from (a combine repeats its handle's)."""

    NONE = 0
    TOPK = 1
    MASK = 2
    CACHED = 3


class LayoutFlag(IntFlag):
    """What stands in the word ``layout`` beside the ``Layout``: all ranks must want the same."""

    EXPANDED = 16
    """Dispatch and combine of the expanded layout."""
    PER_RANK = 32
    """Combine of the expanded layout with ``reduce="per_rank"``."""
    ROW_WEIGHTS = 64
    """Combine of the expanded layout that multiplies rows with weights."""
    PER_NODE = 128
    """Combine with ``reduce="per_node"``, on several nodes."""
    LOW_LATENCY = 256
    """Low-latency dispatch, and the combine of its handle."""
    TOKEN_WEIGHTS = 512
    """Combine of DeepEP V1's layout that brings each token's weights to its copies."""


_TOKENS_SHIFT = 16


def layout_word(layout: int, flags: LayoutFlag | int = 0, most_tokens: int = 0) -> int:
    """The header word ``layout``.

    Args:
        layout: Where the routing comes from.
        flags: What else all ranks must want.
        most_tokens: M of a dispatch to DeepEP V1's low-latency layout, else 0.
    """
    return int(layout) | int(flags) | most_tokens << _TOKENS_SHIFT


class RefusalCode(IntEnum):
    """Why a rank refused its own arguments."""

    NONE = 0
    ARGUMENT = 1
    TOO_MANY_TOKENS = 2
    EXPERT_OUT_OF_RANGE = 3
    DUPLICATE_EXPERT = 4
    POOL_EXHAUSTED = 5
    MORE_THAN_CALL_TAKES = 6
    CALLS_OPEN = 7


SIGNATURE = ("kind", "dtype", "row_bytes", "num_topk", "index_bytes", "weights", "layout", "birth")
WORDS = (
    *SIGNATURE,
    "refusal",
    "refusal_value",
    "capacity",
    "rows_offset",
    "meta_offset",
    "weights_offset",
    "index_offset",
    "num_rows",
)

_FIELD_NAMES = {
    "dtype": "the dtype of x",
    "row_bytes": "the bytes of a row of x",
    "num_topk": "the number of choices per token (num_topk)",
    "index_bytes": "the bytes of an entry of topk_idx (0: none given)",
    "weights": "whether topk_weights are given",
    "layout": "the routing and the layout",
    "birth": "the dispatch call that made the handle",
}


ARGUMENTS = (
    "",
    "x",
    "handle",
    "topk_idx",
    "topk_weights",
    "is_token_in_rank",
    "num_tokens_per_rank",
    "num_tokens_per_rdma_rank",
    "num_tokens_per_expert",
    "expert_alignment",
    "bias",
    "scales",
    "scales_layout",
    "quantize",
    "round_scale",
    "use_ue8m0",
    "num_worst_tokens",
    "do_cpu_sync",
    "do_expand",
    "do_zero_padding",
    "cumulative_local_expert_recv_stats",
    "config",
    "previous_event",
    "async_finish",
    "allocate_on_comm_stream",
    "out",
    "reduce",
    "row_weights",
    "dtype",
    "tag",
    "dest",
    "low_latency",
    "num_max_dispatch_tokens_per_rank",
    "num_experts",
    "use_fp8",
    "return_recv_hook",
    "dispatch_wait_recv_cost_stats",
    "combine_wait_recv_cost_stats",
    "use_logfmt",
    "zero_copy",
)
"""``refusal_value`` of ``RefusalCode.ARGUMENT``: which argument, 0 where it is none alone."""


@dataclass(frozen=True)
class Refusal:
    """Why a rank will not run this call: sent to all ranks, so that all raise.

    Attributes:
        code: The reason.
        value: The token or size in question; its meaning depends on the code.
    """

    code: RefusalCode
    value: int = 0


def describe_refusal(operation: str, rank: int, refusal: Refusal, limit: int = 0) -> str:
    """Describe in one sentence what ``rank`` refused.

    Args:
        operation: Name of the method, ``"dispatch"``.
        rank: The rank whose arguments were bad.
        refusal: Its (code, value).
        limit: ``num_max_tokens_per_rank`` or ``num_experts``, where the code speaks of one.
    """
    reasons = {
        RefusalCode.ARGUMENT: (
            f"its {_argument_name(refusal.value)} not allowed (see the error on that rank)"
        ),
        RefusalCode.TOO_MANY_TOKENS: (
            f"it has {refusal.value} tokens, more than num_max_tokens_per_rank = {limit}"
        ),
        RefusalCode.EXPERT_OUT_OF_RANGE: (
            f"topk_idx of its token {refusal.value} holds an expert outside -1..{limit - 1}"
        ),
        RefusalCode.DUPLICATE_EXPERT: (
            f"topk_idx of its token {refusal.value} names the same expert twice"
        ),
        RefusalCode.POOL_EXHAUSTED: (
            f"its pool has no room for {refusal.value} more MiB (see the error on that rank)"
        ),
        RefusalCode.MORE_THAN_CALL_TAKES: (
            f"it has {refusal.value} tokens, more than its low-latency call takes (see the error "
            f"on that rank)"
        ),
        RefusalCode.CALLS_OPEN: (
            f"it has sent {refusal.value} and not yet received it: hooks must be called first"
        ),
    }
    why = reasons.get(refusal.code, f"code {int(refusal.code)}, value {refusal.value}")
    return f"{operation}(): rank {rank} refused the call: {why}; nothing was moved on any rank."


def _argument_name(value: int) -> str:
    known = 0 < value < len(ARGUMENTS)
    return f"argument '{ARGUMENTS[value]}' is" if known else "arguments are"


def verdict(
    operation: str,
    headers: Sequence[Mapping[str, int]],
    *,
    num_max_tokens_per_rank: int,
    num_experts: int | None,
    counts: Sequence[Sequence[int]] | None = None,
) -> str | None:
    """Judge all headers, as every rank does: different calls first, then refusals, then the rest.

    Args:
        operation: Name of the method this rank is in.
        headers: One mapping word → value a rank, in rank order.
        num_max_tokens_per_rank: M of the Buffer.
        num_experts: E of the Buffer.
        counts: ``[source][destination]`` rows, to be compared with each rank's ``capacity``.

    Returns:
        The sentence of the ``ContractError`` to raise, or ``None`` where rows may move.
    """
    if len({kind_of(header["kind"]) for header in headers}) > 1:
        return difference(operation, headers)
    refused = [rank for rank, header in enumerate(headers) if header["refusal"]]
    if not refused:
        return difference(operation, headers) or _overflow(operation, headers, counts or ())
    first = headers[refused[0]]
    code = first["refusal"]
    known = RefusalCode(code) if code in set(RefusalCode) else RefusalCode.ARGUMENT
    many = known == RefusalCode.TOO_MANY_TOKENS
    limit = num_max_tokens_per_rank if many else num_experts or 0
    text = describe_refusal(operation, refused[0], Refusal(known, first["refusal_value"]), limit)
    also = ", ".join(str(rank) for rank in refused[1:])
    return f"{text[:-1]} (refused too on: {also})." if also else text


def _overflow(
    operation: str, headers: Sequence[Mapping[str, int]], counts: Sequence[Sequence[int]]
) -> str | None:
    for rank, (header, *column) in enumerate(zip(headers, *counts, strict=False)):
        if sum(column) > header["capacity"]:
            return (
                f"{operation}(): rank {rank} would receive {sum(column)} tokens, more than its "
                f"num_worst_tokens = {header['capacity']}; nothing was moved on any rank."
            )
    return None


def refused_elsewhere(headers: Sequence[Mapping[str, int]], rank: int) -> bool:
    """Whether other ranks refused their arguments, and ``rank`` did not."""
    return any(header["refusal"] for header in headers) and not headers[rank]["refusal"]


def difference(operation: str, headers: Sequence[Mapping[str, int]]) -> str | None:
    """Compare the signatures of all ranks.

    Args:
        operation: Name of the method this rank is in.
        headers: One mapping word → value a rank, in rank order.

    Returns:
        A sentence that names the field and each rank's value, or ``None`` where all agree.
    """
    for field in SIGNATURE:
        values = [header[field] for header in headers]
        if len(set(values)) > 1:
            return f"{operation}(): {_disagreement(field, values)}; nothing was moved on any rank."
    return None


def _disagreement(field: str, values: Sequence[int]) -> str:
    if field == "kind":
        calls = ", ".join(f"rank {r} calls {_call_name(v)}" for r, v in enumerate(values))
        return f"the ranks are in different calls: {calls}"
    shown = [_layout_name(v) if field == "layout" else str(v) for v in values]
    if field == "dtype":
        shown = [dtype_name(v) for v in values]
    if field == "birth":
        shown = [f"call {v}" for v in values]
    values_of = ", ".join(f"rank {r}: {v}" for r, v in enumerate(shown))
    return f"the ranks disagree on {_FIELD_NAMES[field]} ({values_of})"


def _call_name(word: int) -> str:
    kind, identity = kind_of(word), word >> _CALL_SHIFT
    name = Kind(kind).name.lower() if kind in set(Kind) else f"operation {kind}"
    if identity & TAGGED:
        return f"{name} with tag {identity & MAX_TAG}"
    return f"{name} in a graph (captured call {identity})" if identity else name


def _layout_name(value: int) -> str:
    names = {
        Layout.NONE: "none",
        Layout.TOPK: "topk_idx",
        Layout.MASK: "is_token_in_rank",
        Layout.CACHED: "handle",
    }
    value, most_tokens = value & ((1 << _TOKENS_SHIFT) - 1), value >> _TOKENS_SHIFT
    source, flags = value & 15, LayoutFlag(value & ~15)
    parts = [names[Layout(source)] if source in set(Layout) else str(value)]
    parts += [
        text
        for flag, text in (
            (LayoutFlag.EXPANDED, "expanded"),
            (LayoutFlag.PER_RANK, "reduce='per_rank'"),
            (LayoutFlag.ROW_WEIGHTS, "row_weights"),
            (LayoutFlag.PER_NODE, "reduce='per_node'"),
            (LayoutFlag.LOW_LATENCY, "low latency"),
            (LayoutFlag.TOKEN_WEIGHTS, "topk_weights"),
        )
        if flag in flags
    ]
    if most_tokens:
        parts.append(f"num_max_dispatch_tokens_per_rank={most_tokens}")
    return " + ".join(parts)


# Row dtypes. The code is what the header carries and what combine's kernel switches on.
DTYPE_CODES = {
    "bfloat16": 1,
    "float16": 2,
    "float32": 3,
    "float64": 4,
    "int8": 5,
    "uint8": 6,
    "int16": 7,
    "uint16": 8,
    "int32": 9,
    "uint32": 10,
    "int64": 11,
    "uint64": 12,
    "float8_e4m3fn": 13,
    "float8_e5m2": 14,
}
"""dtype name → code: dtypes combine can add (all but FP8), or dispatch knows by name."""


SCALE_CODES = {"float32": 1, "int32": 2, "uint32": 3}
"""dtype name of the scales that travel with rows → code."""
_SCALES_FACTOR = 16


_KIND_BITS = 16
_MOST_ITEM = (1 << _KIND_BITS) - 1
_LABELS = ("bool |b1", "complex64 <c8", "complex128 <c16", "datetime64[ns] <M8[ns]")
"""Labels that messages have a name for; those of other opaque dtypes show as numbers."""


def dtype_label(dtype: Any) -> str:
    """What tells a NumPy dtype from all others: its name where it has a code of its own, else its
    name and byte order, and those of its fields with their offsets."""
    if dtype.isnative and dtype.name in DTYPE_CODES:
        return str(dtype.name)
    return _layout_text(dtype)


def _layout_text(dtype: Any) -> str:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"{_layout_text(base)}{shape}"
    if dtype.fields is None:
        return f"{dtype.name} {dtype.str}"
    parts = [f"{name!r}@{dtype.fields[name][1]}" for name in dtype.names]
    inner = [_layout_text(dtype.fields[name][0]) for name in dtype.names]
    return f"{dtype.itemsize}{list(zip(parts, inner, strict=True))}"


def _kind_of(label: str) -> int:
    return zlib.crc32(label.encode(errors="backslashreplace")) & 0x7FFF


def dtype_code(name: str, itemsize: int, scales: str | None = None) -> int:
    """Code of a dtype: from ``DTYPE_CODES``, else of opaque rows: ``256 + itemsize``, and above
    these 16 bits a number that differs for other kinds of items.

    Args:
        name: ``dtype_label`` of the row dtype.
        itemsize: Its bytes.
        scales: dtype name of the scales; only with one-byte rows of a known dtype.
    """
    code = DTYPE_CODES.get(name)
    if code is None:
        code = _kind_of(name) << _KIND_BITS | min(256 + itemsize, _MOST_ITEM)
    return code if scales is None else code + _SCALES_FACTOR * SCALE_CODES[scales]


def dtype_name(code: int) -> str:
    """Name of a dtype code, for messages."""
    scales = {value: name for name, value in SCALE_CODES.items()}
    rest = code % _SCALES_FACTOR
    for name, known in DTYPE_CODES.items():
        if known == code:
            return name
        if known == rest and code // _SCALES_FACTOR in scales:
            return f"{name} with {scales[code // _SCALES_FACTOR]} scales"
    for label in _LABELS:
        if code >> _KIND_BITS == _kind_of(label):
            return label.partition(" ")[0]
    size, kind = (code & _MOST_ITEM) - 256, code >> _KIND_BITS
    return f"opaque {size}-byte items (kind {kind:04x})" if size > 0 else f"dtype code {code}"
