"""Each kernel once or twice on a few tokens: for tools under which everything is slow.

mpirun -n 2 compute-sanitizer --tool memcheck python tests/gpu/worker_small.py

DEEPEP_CUPY_PATH chooses the kernels: ``bulk`` and ``ldst`` between them run all five. Rows are
those a bulk copy can move, and others that it cannot.
"""

from __future__ import annotations

import sys

import numpy as np
from common import RoundTrip, Worker, settle, small_case
from refusals import bad_values

from deepep_cupy import Buffer
from deepep_cupy.reference import get_dispatch_layout


def main() -> None:
    """A round trip of each kind, a refusal, barriers."""
    worker = Worker("SMALL", __doc__)
    tokens = (9, 3, 0, 5, 1, 7, 2, 4)[: worker.size]
    mask = {"num_experts": None, "num_topk": 0, "index_dtype": None, "weights": False}
    cases = [
        small_case(worker, num_tokens=tokens, dtype="bfloat16", hidden=520, num_biases=2),
        small_case(worker, num_tokens=tokens, dtype="float32", hidden=33, layout="cached"),
        small_case(worker, num_tokens=tokens, dtype="float64", hidden=64, layout="mask", **mask),
        small_case(worker, num_tokens=tokens, dtype="int8", hidden=7168, index_dtype="int32"),
        small_case(worker, num_tokens=tokens, dtype="float16", hidden=5, weights=False),
    ]
    with worker.buffer(num_sms=3) as buffer:
        for case in cases:
            RoundTrip(worker, case).round(buffer)
            worker.say(case.id)
        trip = RoundTrip(worker, small_case(worker, num_tokens=(20,) * worker.size))
        count_layout(worker, buffer, trip)
        refused = 0
        for what, _, call in bad_values(worker, buffer, trip):
            seen = settle(worker, buffer, call)
            assert seen.kind == "ContractError", f"{what}: {seen}"
            refused += 1
        for _ in range(3):
            buffer.barrier()
        worker.synchronize()
        buffer.check()
        path = getattr(buffer._engine, "path", "host")
    worker.done(f"{len(cases)} cases, {refused} refusals, 3 barriers on the path {path}")


def count_layout(worker: Worker, buffer: Buffer, trip: RoundTrip) -> None:
    """The counts before a dispatch are those of the reference, also with choices of nothing."""
    experts = trip.case.num_experts
    for dtype in (np.int64, np.int32):
        idx = trip.want.inputs[worker.rank].topk_idx.astype(dtype)
        idx[0] = -1
        want = get_dispatch_layout(idx, experts, worker.size)
        got = buffer.get_dispatch_layout(worker.up(idx), experts)
        for name in ("num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank"):
            found = worker.down(getattr(got, name))
            assert np.array_equal(found, getattr(want, name)), f"{name}: {found}"


if __name__ == "__main__":
    sys.exit(main())
