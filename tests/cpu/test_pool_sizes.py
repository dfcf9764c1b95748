"""What fits into a pool of the default size, block by block as a dispatch asks for them."""

from __future__ import annotations

import pytest

from deepep_cupy.memory.pool import Pool
from deepep_cupy.protocol.sizes import BufferSpec, pool_bytes_hint


class NoEvents:
    def capture_id(self, stream):
        return 0


SIZES = {
    "large": {},
    "one rank": {"ranks": 1},
    "two ranks": {"ranks": 2},
    "short rows": {"row": 512},
    "few tokens": {"tokens": 128},
    "many tokens": {"tokens": 65536},
    "one byte": {"row": 7168, "itemsize": 1},
    "particles": {"tokens": 1_000_000, "row": 16, "topk": 1},
    "masks": {"topk": 0},
}


def made(tokens=4096, row=14336, topk=8, ranks=8, **more):
    """A pool of the default size, and what a dispatch wants of it: handle, meta, rows."""
    spec = BufferSpec(
        num_ranks=ranks,
        rank=0,
        num_max_tokens_per_rank=tokens,
        max_row_bytes=row,
        num_topk=topk,
        num_experts=256 if topk else None,
        timeout_s=1.0,
        **more,
    )
    most = spec.max_recv_tokens
    scales = 4 * -(-row // 128) if spec.itemsize == 1 else 0
    handle = 8 * most + 8 * (ranks + spec.num_local_experts) + 1024
    sizes = [handle, most * (12 * topk + scales) + 1024, most * row]
    return Pool(pool_bytes_hint(spec), NoEvents()), sizes


@pytest.mark.parametrize("handles", [0, 61])
@pytest.mark.parametrize("sizes", SIZES)
def test_what_the_default_size_promises_fits(sizes, handles):
    """Handles of every layer of a large model, three receives and the rows of the experts."""
    pool, (handle, meta, rows) = made(**SIZES[sizes])
    handles = min(handles, (meta + rows) // handle)
    for layer in range(handles):
        alive = pool.alloc(handle, "s", "handle")
        for part in (1, 2, 1 + layer / 100):  # other rows, and a number of them that changes
            sizes = [(int(nbytes / part), "") for nbytes in (meta, rows)]
            for block in pool.alloc_all(sizes, "s"):
                pool.free(block)
    live = [pool.alloc(rows, "s", "experts")]
    for _ in range(3):
        live += pool.alloc_all(((handle, "handle"), (meta, "meta"), (rows, "rows")), "s")
    assert len(live) == 10
    assert not handles or alive in pool.live()
