"""The cast, the expanded layout and its combines, in NumPy, from the parameters of the launches.

``FORMS``: kernel that talks to nobody -> (what it does, what it touches); both take the fields by
name, and the number of ranks.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from deepep_cupy.protocol.headers import DTYPE_CODES, OFFSET_UNIT, SCALE_CODES
from deepep_cupy.reference import quantize
from gpu_stand_in.memory import at

MORE_FIELDS = [("index_offset", None), ("row_weights_offset", None), ("weighted", None)]
"""Of ``combine_expanded``, behind those of ``combine``."""


def number_of(code):
    """The dtype of rows that can be added."""
    name = {code: name for name, code in DTYPE_CODES.items()}[code]
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def wide_of(number):
    """The type that they are added in."""
    return np.dtype(np.float32) if number.itemsize == 2 and number.kind not in "iu" else number


# ------------------------------------------------------------------------------------- the cast

CAST_FIELDS = [("cast_dtype", None), ("cast_round_scale", None), ("cast_packed", None)]
"""Of ``dispatch_cast_bulk``, behind those of ``dispatch``."""


def _quantize(p, num_ranks):
    del num_ranks
    x = at(p.x, (p.num_tokens, p.hidden), number_of(p.dtype))
    codes, scales = quantize(x, round_scale=bool(p.round_scale), use_ue8m0=bool(p.packed))
    assert p.code_stride == p.hidden
    assert p.scale_stride == scales.shape[1]
    at(p.codes, codes.shape, codes.dtype)[...] = codes
    at(p.scales, scales.shape, scales.dtype)[...] = scales


def _quantize_touches(p, num_ranks):
    del num_ranks
    elements = p.num_tokens * p.hidden
    given = (p.x, elements * number_of(p.dtype).itemsize, False)
    return given, (p.codes, elements, True), (p.scales, 4 * p.num_tokens * p.scale_stride, True)


# -------------------------------------------------------------------------------------- the rows


def _nothing(p, num_ranks):
    del p, num_ranks


def _slices_touch(p, num_ranks):
    del num_ranks
    chosen = (p.topk_idx, p.num_tokens * p.num_topk * p.index_bytes, False)
    return chosen, (p.table, 4 * p.num_slices * p.num_local_experts, True)


def _rows_touch(p, num_ranks):
    counts = ((a, 4 * p.num_local_experts, False) for a in (p.expert_counts, p.psum_expert_rows))
    table = (p.expanded_row, 4 * p.num_tokens * p.num_topk, True)
    return (*_slices_touch(p, num_ranks), *counts, table)


def _expand_rows(p, num_ranks):
    del num_ranks
    table = at(p.expanded_row, (p.num_tokens, p.num_topk))
    table[...] = -1
    if at(p.birth, (1,))[0] == 0:
        return
    real = int(at(p.num_received, (1,))[0]) if p.num_received else p.num_tokens
    chosen = at(p.topk_idx, table.shape, f"i{p.index_bytes}")
    next_row = at(p.psum_expert_rows, (p.num_local_experts,)).copy()
    next_row -= at(p.expert_counts, (p.num_local_experts,))
    for token, column in np.argwhere(chosen[:real] >= 0):
        expert = chosen[token, column]
        table[token, column] = next_row[expert]
        next_row[expert] += 1


# ------------------------------------------------------------------------------------ the copies


def _arrays(p):
    """(given, made) of rows, weights and scales; as bits."""
    yield (
        at(p.rows, (p.num_tokens, 1, p.row_bytes), np.uint8).repeat(p.num_topk, axis=1),
        at(p.out, (p.num_rows, p.row_bytes), np.uint8),
    )
    if p.weights:
        yield at(p.weights, (p.num_tokens, p.num_topk)), at(p.out_weights, (p.num_rows,))
    if p.num_scales:
        given = at(p.scales, (p.num_tokens, 1, p.num_scales)).repeat(p.num_topk, axis=1)
        yield given, at(p.out_scales, (p.num_rows, p.num_scales))


def _expand_copy(p, num_ranks):
    del num_ranks
    if at(p.birth, (1,))[0] == 0:
        code = p.dtype % 16 if p.dtype < 256 else 0
        is_float = any("float" in n for n, c in DTYPE_CODES.items() if c == code)
        at(p.out, (p.num_rows * p.row_bytes,), np.uint8)[...] = 0xFF if is_float else 0
        if p.weights:
            at(p.out_weights, (p.num_rows,))[...] = -1
        if p.num_scales:
            floats = p.dtype // 16 == SCALE_CODES["float32"]
            at(p.out_scales, (p.num_rows, p.num_scales))[...] = -1 if floats else 0
        return
    table = at(p.expanded_row, (p.num_tokens, p.num_topk))
    counts = at(p.expert_counts, (p.num_local_experts,))
    ends = at(p.psum_expert_rows, (p.num_local_experts,))
    token, column = np.nonzero(table >= 0)
    for given, made in _arrays(p):
        made[table[token, column]] = given[token, column]
        if p.zero_padding:
            for end, count in zip(ends, counts, strict=True):
                made[end : end + -count % p.alignment] = 0


def _copies_touch(p, num_ranks):
    del num_ranks
    entries, local = p.num_tokens * p.num_topk, 4 * p.num_local_experts
    return (
        (p.rows, p.num_tokens * p.row_bytes, False),
        (p.weights, 4 * entries, False),
        (p.scales, 4 * p.num_tokens * p.num_scales, False),
        (p.expanded_row, 4 * entries, False),
        (p.expert_counts, local, False),
        (p.psum_expert_rows, local, False),
        (p.birth, 4, False),
        (p.out, p.num_rows * p.row_bytes, True),
        (p.out_weights, 4 * p.num_rows if p.weights else 0, True),
        (p.out_scales, 4 * p.num_rows * p.num_scales, True),
    )


# -------------------------------------------------------------------------------------- the sums


def term(row, weight, wide):
    """One copy as it is added."""
    made = row.astype(wide)
    return made if weight is None else wide.type(weight) * made


def add(terms, width, wide):
    """In order, from the first on."""
    total = None
    for one in terms:
        total = one if total is None else total + one
    return np.zeros(width, wide) if total is None else total


def _reduce_copies(p, num_ranks):
    del num_ranks
    number = number_of(p.dtype)
    wide, width = wide_of(number), p.row_bytes // number.itemsize
    out = at(p.out, (p.num_tokens, width), number)
    table = at(p.expanded_row, (p.num_tokens, p.num_topk))
    for token, rows in enumerate(table):
        terms = []
        for column, row in enumerate(int(row) for row in rows):
            carried = 0
            if row >= 0:
                weight = at(p.row_weights + 4 * row, (1,), "f4")[0] if p.row_weights else None
                terms.append(term(at(p.x + row * p.row_bytes, (width,), number), weight, wide))
                carried = at(p.weights + 4 * row, (1,))[0] if p.weights else 0
            if p.weights:
                at(p.out_weights, table.shape)[token, column] = carried
        if terms:
            out[token] = add(terms, width, wide).astype(number)


def _reduce_touches(p, num_ranks):
    del num_ranks
    rows = at(p.expanded_row, (p.num_tokens, p.num_topk))
    most, entries = int(rows.max(initial=-1)) + 1, 4 * p.num_tokens * p.num_topk
    return (
        (p.x, most * p.row_bytes, False),
        (p.expanded_row, entries, False),
        (p.row_weights, 4 * most if p.row_weights else 0, False),
        (p.weights, 4 * most if p.weights else 0, False),
        (p.out, p.num_tokens * p.row_bytes, True),
        (p.out_weights, entries if p.weights else 0, True),
    )


def combine(world, p, launches):
    """``combine_expanded`` of one rank: every copy is a term."""
    number = number_of(p.dtype)
    wide, width = wide_of(number), p.row_bytes // number.itemsize
    out = at(p.out, (p.num_tokens, width), number)
    rows_of = at(p.send_row, (p.num_tokens, world.num_ranks))
    back = at(p.combined_weights, (p.num_tokens, p.num_topk)) if p.has_weights else None
    for token in range(p.num_tokens):
        terms = [at(b, out.shape, number)[token].astype(wide) for b in p.bias if b]
        if back is not None:
            back[token] = 0
        for rank, received in enumerate(int(row) for row in rows_of[token]):
            if received < 0:
                continue
            q, region = launches[rank].d, world.regions[rank]
            entry = region + q.index_offset * OFFSET_UNIT + 4 * received * p.num_topk
            base = p.x if q is p else region + q.rows_offset * OFFSET_UNIT
            for column, row in enumerate(int(row) for row in at(entry, (p.num_topk,))):
                if row < 0:
                    continue
                weight = None
                if p.weighted:
                    at_weight = region + q.row_weights_offset * OFFSET_UNIT + 4 * row
                    weight = at(at_weight, (1,), "f4")[0]
                terms.append(term(at(base + row * p.row_bytes, (width,), number), weight, wide))
                if back is not None:
                    carried = region + q.weights_offset * OFFSET_UNIT + 4 * row
                    back[token, column] = at(carried, (1,))[0]
        out[token] = add(terms, width, wide).astype(number)


FORMS = {
    "quantize": (_quantize, _quantize_touches),
    "expand_count": (_nothing, _slices_touch),
    "expand_starts": (_nothing, _slices_touch),
    "expand_rows": (_expand_rows, _rows_touch),
    "expand_copy": (_expand_copy, _copies_touch),
    "reduce_copies": (_reduce_copies, _reduce_touches),
}
