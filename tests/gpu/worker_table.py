"""Every case of the table on GPUs, bit by bit against the reference.

mpirun -n 2 python tests/gpu/worker_table.py [--seed N] [--small] [--kinds bulk-nc,ldst-coherent]

Cases with the same number of experts share a Buffer of each kind, so that its pool is used again
and again. Before every case all free memory, the pool's and CuPy's, is filled with ones: NaN in
every float type, and no legal index.
"""

from __future__ import annotations

import itertools
import sys
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
from common import ROW_BYTES, Worker, add_kinds, kinds_of, must_be

from deepep_cupy import env
from deepep_cupy.testing.compare import assert_combine_equal, assert_dispatch_equal, to_host
from deepep_cupy.testing.data import Case, Expected, cases, expected


def main() -> None:
    """Run all cases; rank 0 prints one line each and a last line."""

    def options(parser: Any) -> None:
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--small", action="store_true")
        add_kinds(parser)

    worker = Worker("TABLE", __doc__, options)
    small, kinds = worker.options.small, kinds_of(worker)
    chosen = sorted(cases(worker.size, small=small), key=lambda case: case.num_experts or 0)
    names = []
    for experts, group in itertools.groupby(chosen, key=lambda case: case.num_experts):
        with ExitStack() as stack:
            buffers = {}
            for kind, variables in kinds.items():
                with env.setting(**variables):
                    buffer = stack.enter_context(buffer_for(worker, chosen, experts))
                must_be(buffer, kind)
                buffers[kind] = buffer
            names = [kind_name(buffer) for buffer in buffers.values()]
            for case in group:
                begin = time.monotonic()
                want = expected(case, worker.options.seed)
                for kind, buffer in buffers.items():
                    try:
                        run(worker, buffer, case, want)
                    except AssertionError as error:
                        raise AssertionError(f"{case.id} {kind}: {error}") from error
                worker.say(f"{time.monotonic() - begin:6.3f} s {case.id}")
    worker.done(f"{len(chosen)} cases", " and ".join(names))


def buffer_for(worker: Worker, chosen: list[Case], experts: int | None) -> Any:
    """A Buffer for all cases."""
    most = 1 << 30 if worker.options.small else 5 << 30
    return worker.buffer(
        num_max_tokens_per_rank=max(case.num_max_tokens for case in chosen),
        hidden=max(ROW_BYTES, *(case.row_bytes for case in chosen)),
        num_topk=32 if experts else 0,
        num_experts=experts,
        pool_bytes=most if worker.gpu else None,
    )


def kind_name(buffer: Any) -> str:
    """What kernels a Buffer has."""
    engine = buffer._engine
    return f"{engine.path} {engine.loads}" if hasattr(engine, "path") else buffer.engine_name


def poison(worker: Worker, buffer: Any) -> None:
    """Fill free memory with ones."""
    if not worker.gpu:
        return
    many = 256 << 20 if worker.options.small else 1 << 30
    empty = worker.xp.empty
    for array in (
        buffer.empty((many,), np.uint8),
        empty(many, np.uint8),
        *(empty(1 << size, np.uint8) for size in range(9, 27)),
    ):
        array.fill(255)


def upload(worker: Worker, array: Any) -> Any:
    """To the engine; opaque items as bytes."""
    if array is None:
        return None
    if worker.gpu and array.dtype.kind == "V" and array.dtype.name.startswith("void"):
        array = array.view(np.uint8).reshape(len(array), array.shape[1] * array.itemsize)
    return worker.up(array)


def dispatch_is_right(got: Any, want: Any, case: Case, rank: int) -> None:
    """Compare a dispatch, opaque items as what they are."""
    rows = to_host(got.recv_x.view(np.uint8)).view(got.recv_x.dtype)
    if rows.dtype != case.row_dtype and case.row_dtype.kind == "V":
        rows = rows.view(case.row_dtype)
    assert_dispatch_equal(got._replace(recv_x=rows), want, rank=rank)


def run(worker: Worker, buffer: Any, case: Case, want: Expected) -> None:
    """One case, twice: rows for combine outside the pool, then inside it."""
    rank = worker.rank
    inputs = want.inputs[rank]
    routing: dict[str, Any] = {
        "topk_idx": upload(worker, inputs.topk_idx),
        "is_token_in_rank": upload(worker, inputs.mask),
        "expert_alignment": case.expert_alignment,
    }
    x, weights = upload(worker, inputs.x), upload(worker, inputs.topk_weights)
    biases = tuple(upload(worker, bias) for bias in inputs.biases)
    poison(worker, buffer)
    if case.cached:
        made = buffer.dispatch(upload(worker, inputs.first_x), **routing)
        first: Any = want.first
        assert_dispatch_equal(made, first[rank], rank=rank)
        routing = {"handle": made.handle}
    for in_pool in (False, True):
        got = buffer.dispatch(x, topk_weights=weights, own=not in_pool, **routing)
        dispatch_is_right(got, want.dispatched[rank], case, rank)
        if not want.rows:
            continue
        rows = want.rows[rank]
        y, row_weights = upload(worker, rows.y), upload(worker, rows.topk_weights)
        if in_pool:
            y = worker.in_pool(buffer, y)
            if row_weights is not None:
                row_weights = worker.in_pool(buffer, row_weights)
        poison(worker, buffer)
        back = buffer.combine(y, got.handle, topk_weights=row_weights, bias=biases)
        worker.synchronize()
        buffer.check()
        assert_combine_equal(back, want.combined[rank], rank=rank)


if __name__ == "__main__":
    sys.exit(main())
