"""Every case of the table on GPUs, bit by bit against the reference.

mpirun -n 2 python tests/gpu/worker_table.py [--seed N] [--small]

DEEPEP_CUPY_PATH and DEEPEP_CUPY_LOADS choose the kernels. Cases with the same number of experts
share a Buffer, so that its pool is used again and again. Before every case all free memory, the
pool's and CuPy's, is filled with ones: NaN in every float type, and no legal index.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

from deepep_cupy import Buffer
from deepep_cupy.testing.compare import assert_combine_equal, assert_dispatch_equal
from deepep_cupy.testing.data import Case, Expected, cases, expected

POOL_BYTES = 5 << 30
POISON_BYTES = 1 << 30


def main() -> None:
    """Run all cases; rank 0 prints one line each and a last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    start = time.monotonic()
    chosen = sorted(cases(comm.size, small=options.small), key=lambda case: case.num_experts or 0)
    name = ""
    for experts, group in itertools.groupby(chosen, key=lambda case: case.num_experts):
        with Buffer(
            comm,
            num_max_tokens_per_rank=max(case.num_max_tokens for case in chosen),
            hidden=max(case.row_bytes for case in chosen),
            num_topk=32 if experts else 0,
            num_experts=experts,
            dtype="uint8",
            engine="cuda",
            pool_bytes=POOL_BYTES,
            timeout_s=20,
        ) as buffer:
            name = f"path {buffer._engine.path}, loads {buffer._engine.loads}"
            for case in group:
                begin = time.monotonic()
                run(buffer, case, expected(case, options.seed))
                if comm.rank == 0:
                    print(f"{time.monotonic() - begin:6.3f} s {case.id}", flush=True)
    if comm.rank == 0:
        seconds = time.monotonic() - start
        print(f"TABLE: ok, {len(chosen)} cases on {comm.size} ranks, {name}, {seconds:.1f} s")


def poison(buffer: Any) -> None:
    """Fill free memory with ones."""
    for array in (
        buffer.empty((POISON_BYTES,), np.uint8),
        cupy.empty(POISON_BYTES, np.uint8),
        *(cupy.empty(1 << size, np.uint8) for size in range(9, 27)),
    ):
        array.fill(255)


def upload(array: Any) -> Any:
    """To the GPU; opaque items as bytes."""
    if array is None:
        return None
    if array.dtype.kind == "V" and array.dtype.name.startswith("void"):
        array = array.view(np.uint8).reshape(len(array), array.shape[1] * array.itemsize)
    if array.dtype.name.startswith("float8"):
        return cupy.asarray(array.view(np.uint8)).view(array.dtype)
    return cupy.asarray(array)


def dispatch_is_right(got: Any, want: Any, case: Case, rank: int) -> None:
    """Compare a dispatch, opaque items as what they are."""
    rows = got.recv_x.view(np.uint8).get().view(got.recv_x.dtype)
    if rows.dtype != case.row_dtype and case.row_dtype.kind == "V":
        rows = rows.view(case.row_dtype)
    assert_dispatch_equal(got._replace(recv_x=rows), want, rank=rank)


def run(buffer: Any, case: Case, want: Expected) -> None:
    """One case, twice: rows for combine outside the pool, then inside it."""
    rank = buffer.rank
    inputs = want.inputs[rank]
    routing: dict[str, Any] = {
        "topk_idx": upload(inputs.topk_idx),
        "is_token_in_rank": upload(inputs.mask),
        "expert_alignment": case.expert_alignment,
    }
    x, weights = upload(inputs.x), upload(inputs.topk_weights)
    biases = tuple(upload(bias) for bias in inputs.biases)
    poison(buffer)
    if case.cached:
        made = buffer.dispatch(upload(inputs.first_x), **routing)
        assert_dispatch_equal(made, want.first[rank], rank=rank)
        routing = {"handle": made.handle}
    for in_pool in (False, True):
        got = buffer.dispatch(x, topk_weights=weights, own=not in_pool, **routing)
        dispatch_is_right(got, want.dispatched[rank], case, rank)
        if not want.rows:
            continue
        rows = want.rows[rank]
        y, row_weights = upload(rows.y), upload(rows.topk_weights)
        if in_pool:
            y = copy_into_pool(buffer, y)
            if row_weights is not None:
                row_weights = copy_into_pool(buffer, row_weights)
        poison(buffer)
        back = buffer.combine(y, got.handle, topk_weights=row_weights, bias=biases)
        cupy.cuda.get_current_stream().synchronize()
        buffer.check()
        assert_combine_equal(back, want.combined[rank], rank=rank)


def copy_into_pool(buffer: Any, array: Any) -> Any:
    """The same values in memory the peers can read."""
    inside = buffer.empty(array.shape, array.dtype)
    if array.nbytes:
        cupy.cuda.runtime.memcpy(inside.data.ptr, array.data.ptr, array.nbytes, 3)
    return inside


if __name__ == "__main__":
    sys.exit(main())
