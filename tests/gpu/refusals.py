"""Calls that one rank makes wrongly: every rank raises and says who and what, and nothing moves.

The last rank is the odd one. Used by ``worker_cases.py`` and ``worker_failures.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from common import RoundTrip, Worker, settle, small_case

Calls = Iterator[tuple[str, tuple[str, ...], Callable[[], object]]]
"""What is wrong, words that every rank's error holds, and the call."""


def refuse_all(worker: Worker, buffer: Any) -> int:
    """Make all wrong calls there are, with right ones between; their number. Collective."""
    trip = RoundTrip(worker, small_case(worker, num_tokens=(40,) * worker.size), seed=2)
    number = 0
    for part in (bad_values, differing, wrong_arrays):
        for what, words, call in part(worker, buffer, trip):
            seen = settle(worker, buffer, call)
            worker.say(f"{what}: {seen}")
            assert seen.kind == "ContractError", f"{what}: {seen}"
            missing = [word for word in words if word not in seen.text]
            assert not missing, f"{what}: {missing} not in: {seen}"
            number += 1
            if number % 3 == 0:
                trip.round(buffer)
    trip.round(buffer)
    return number


def bad_values(worker: Worker, buffer: Any, trip: RoundTrip) -> Calls:
    """Too many tokens, and wrong entries of topk_idx."""
    last, up, most = worker.size - 1, worker.up, buffer._spec.num_max_tokens_per_rank
    odd = worker.rank == last
    tokens = most + 1 if odd else 3
    x = up(np.zeros((tokens, 8), np.float32))
    yield (
        "too many tokens",
        ("dispatch()", f"rank {last} refused", str(most + 1), f"= {most}"),
        lambda: buffer.dispatch(x, topk_idx=up(np.full((tokens, 1), -1, np.int64))),
    )
    experts = buffer._spec.num_experts
    for what, row, why in (
        ("an expert beyond the last", [experts, 0, -1, -1], "outside"),
        ("an expert below -1", [0, -2, -1, -1], "outside"),
        ("an expert twice", [3, -1, 2, 3], "twice"),
    ):
        idx = worker.down(trip.topk_idx).copy()
        idx[13, :] = -1
        if odd:
            idx[13, : min(4, idx.shape[1])] = row[: idx.shape[1]]
        yield (
            what,
            (f"rank {last} refused", "token 13", why, "nothing was moved"),
            lambda idx=idx: buffer.dispatch(trip.x, topk_idx=up(idx)),
        )


def differing(worker: Worker, buffer: Any, trip: RoundTrip) -> Calls:
    """Ranks that differ in dtype, sizes, handles, or in the call."""
    last = worker.size - 1
    if last == 0:
        return
    odd, up, xp = worker.rank == last, worker.up, worker.xp
    x, idx, weights = trip.x, trip.topk_idx, trip.weights
    columns = trip.case.num_topk
    wide = up(np.zeros((len(x), x.shape[1] // 2), np.float64))
    yield (
        "dtype",
        ("dtype of x", "rank 0: float32", f"rank {last}: float64"),
        lambda: buffer.dispatch(wide if odd else x, topk_idx=idx),
    )
    narrow = xp.ascontiguousarray(x[:, :40])
    yield (
        "row bytes",
        ("bytes of a row", f"rank 0: {trip.case.row_bytes}", f"rank {last}: 160"),
        lambda: buffer.dispatch(narrow if odd else x, topk_idx=idx),
    )
    fewer = xp.ascontiguousarray(idx[:, :2])
    yield (
        "num_topk",
        ("num_topk", f"rank 0: {columns}", f"rank {last}: 2"),
        lambda: buffer.dispatch(x, topk_idx=fewer if odd else idx),
    )
    short = up(worker.down(idx).astype(np.int32))
    yield (
        "index width",
        ("entry of topk_idx", "rank 0: 8", f"rank {last}: 4"),
        lambda: buffer.dispatch(x, topk_idx=short if odd else idx),
    )
    yield (
        "weights or none",
        ("topk_weights", "rank 0: 1", f"rank {last}: 0"),
        lambda: buffer.dispatch(x, topk_idx=idx, topk_weights=None if odd else weights),
    )
    yield from wrong_calls(worker, buffer, trip)


def wrong_calls(worker: Worker, buffer: Any, trip: RoundTrip) -> Calls:
    """Handles of different dispatches, and different operations."""
    last, x = worker.size - 1, trip.x
    odd = worker.rank == last
    one, two = trip.dispatch(buffer), trip.dispatch(buffer)
    swapped = two if odd else one
    words = ("made the handle", "rank 0: call", f"rank {last}: call")
    yield "handles swapped, dispatch", words, lambda: buffer.dispatch(x, handle=swapped)
    yield "handles swapped, combine", words, lambda: buffer.combine(trip.y, swapped)
    yield (
        "dispatch against combine",
        ("rank 0 calls dispatch", f"rank {last} calls combine"),
        lambda: buffer.combine(trip.y, one) if odd else buffer.dispatch(x, topk_idx=trip.topk_idx),
    )
    yield (
        "barrier against dispatch",
        ("rank 0 calls barrier", f"rank {last} calls dispatch"),
        lambda: buffer.dispatch(x, handle=one) if odd else buffer.barrier(),
    )
    mask = worker.up(np.ones((len(x), worker.size), np.bool_))
    yield (
        "mask against handle",
        ("rank 0: is_token_in_rank", f"rank {last}: handle"),
        lambda: buffer.dispatch(x, **({"handle": one} if odd else {"is_token_in_rank": mask})),
    )
    trip.combine(buffer, two)
    trip.combine(buffer, one)


def wrong_arrays(worker: Worker, buffer: Any, trip: RoundTrip) -> Calls:
    """Arrays of a kind that the last rank must not pass; each says wanted and got there."""
    last, xp = worker.size - 1, worker.xp
    odd = worker.rank == last
    x, idx = trip.x, trip.topk_idx

    def words(argument: str, *own: str) -> tuple[str, ...]:
        other = (f"rank {last} refused", f"argument '{argument}'")
        return ("dispatch()", f"argument '{argument}'", *own) if odd else other

    strided = xp.zeros((len(x), 2 * x.shape[1]), x.dtype)[:, ::2]
    yield (
        "not contiguous",
        words("x", "C-contiguous", "strides"),
        lambda: buffer.dispatch(strided if odd else x, topk_idx=idx),
    )
    small = worker.up(worker.down(idx).astype(np.int16))
    yield (
        "topk_idx of int16",
        words("topk_idx", "int64 or int32", "int16"),
        lambda: buffer.dispatch(x, topk_idx=small if odd else idx),
    )
    yield (
        "one row too many",
        words("topk_idx", "shape"),
        lambda: buffer.dispatch(x[:-1] if odd else x, topk_idx=idx),
    )
    if not worker.gpu:
        return
    yield (
        "a NumPy array",
        words("x", "CuPy array", "numpy.ndarray"),
        lambda: buffer.dispatch(worker.down(x) if odd else x, topk_idx=idx),
    )
    yield (
        "NumPy weights",
        words("topk_weights", "CuPy array", "numpy.ndarray"),
        lambda: buffer.dispatch(
            x, topk_idx=idx, topk_weights=worker.down(trip.weights) if odd else trip.weights
        ),
    )
    if worker.num_gpus > 1:
        with xp.cuda.Device((worker.device + 1) % worker.num_gpus):
            elsewhere = xp.zeros(x.shape, x.dtype)
        yield (
            "an array on another GPU",
            words("x", f"on device {worker.device}", "got an array on device"),
            lambda: buffer.dispatch(elsewhere if odd else x, topk_idx=idx),
        )
