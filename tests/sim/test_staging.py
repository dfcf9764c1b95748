"""Kernels that put arrays where they are wanted: rows into the pool, scales into columns."""

import numpy as np
import pytest

from deepep_cupy.engines.gpu.grid import access_bytes
from local_ranks import Rank, same_bits


@pytest.mark.parametrize("leave_own", [True, False])
@pytest.mark.parametrize("real", [0, 1, 37])
@pytest.mark.parametrize(
    ("row_bytes", "shift", "grid"), [(48, 0, 2), (20, 0, 3), (16, 4, 1), (5, 1, 2)]
)
def test_stage(row_bytes, shift, grid, real, leave_own):
    """One simulated rank: its own rows are all rows, or (as if it were another) none."""
    rng = np.random.default_rng(row_bytes)
    x = rng.integers(0, 256, (real + 3, row_bytes), np.uint8)
    rank = Rank(seed=real, grid=grid, byte_wise=row_bytes % 4 != 0)
    source, out = rank.put(x, shift), rank.space(x.nbytes)
    rank.launch(
        "stage",
        x=source,
        out=out,
        rows_per_rank=rank.put(np.array([real], np.uint32)),
        rank=0 if leave_own else 1,
        row_bytes=row_bytes,
        access_bytes=access_bytes(row_bytes, (source, out), (4, 1)),
    )
    copied = np.arange(len(x)) < (0 if leave_own else real)
    got = rank.get(out, x.shape, np.uint8, copied)
    rank.run()
    same_bits("rows", got(), np.where(copied[:, None], x, 0).astype(np.uint8))


@pytest.mark.parametrize("real", [None, 0, 33])
@pytest.mark.parametrize(("rows", "scales", "grid"), [(40, 3, 1), (100, 1, 2), (64, 9, 3)])
def test_columns(rows, scales, grid, real):
    given = np.random.default_rng(rows).integers(0, 1 << 31, (rows, scales), np.int32)
    rank = Rank(seed=rows, grid=grid)
    out = rank.space(given.nbytes)
    rank.launch(
        "columns",
        scales=rank.put(given),
        out=out,
        real_rows=0 if real is None else rank.put(np.array([real], np.uint32)),
        num_rows=rows,
        num_scales=scales,
    )
    defined = np.tile(np.arange(rows) < (rows if real is None else real), scales)
    got = rank.get(out, (scales * rows, 1), np.int32, defined)
    rank.run()
    want = np.where(defined, given.T.reshape(-1), 0).astype(np.int32)
    same_bits("scales", got(), want[:, None])
