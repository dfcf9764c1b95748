"""``stage`` and ``columns``, in NumPy; ``FORMS``: name -> (what it does, what it touches).

Both take the fields by name, and the number of ranks.
"""

from __future__ import annotations

import numpy as np

from gpu_stand_in.memory import at


def _real(p, num_ranks):
    counts = at(p.rows_per_rank, (num_ranks,))
    ends = np.cumsum(counts)
    own = slice(ends[p.rank] - counts[p.rank], ends[p.rank]) if p.rank < num_ranks else slice(0)
    return int(ends[-1]), own


def _stage(p, num_ranks):
    rows, own = _real(p, num_ranks)
    source, out = (at(a, (rows, p.row_bytes), np.uint8) for a in (p.x, p.out))
    copied = np.ones(rows, np.bool_)
    copied[own] = False
    out[copied] = source[copied]


def _stage_touches(p, num_ranks):
    rows, _ = _real(p, num_ranks)
    return (p.x, rows * p.row_bytes, False), (p.out, rows * p.row_bytes, True)


def _columns(p, num_ranks):
    del num_ranks
    rows = int(at(p.real_rows, (1,))[0]) if p.real_rows else p.num_rows
    scales = at(p.scales, (p.num_rows, p.num_scales))
    at(p.out, (p.num_scales, p.num_rows))[:, :rows] = scales[:rows].T


def _columns_touches(p, num_ranks):
    del num_ranks
    nbytes = 4 * p.num_rows * p.num_scales
    return (p.scales, nbytes, False), (p.out, nbytes, True)


FORMS = {"stage": (_stage, _stage_touches), "columns": (_columns, _columns_touches)}
