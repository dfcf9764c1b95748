"""Checks of the arguments of ``dispatch`` that say where rows go: choices, masks, ranks.

``dest`` is turned into a mask here, so that engines know nothing of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deepep_cupy.api.arguments import ArgumentChecker
from deepep_cupy.engines.calls import DispatchArguments
from deepep_cupy.protocol.sizes import BufferSpec

__all__ = ["check_companions", "choices", "mask_of_ranks"]

_INT32 = (np.dtype(np.int32),)
_INDEX = (np.dtype(np.int64), np.dtype(np.int32))
_BOOL = (np.dtype(np.bool_),)


def check_companions(
    checker: ArgumentChecker, spec: BufferSpec, given: DispatchArguments, num_tokens: int
) -> None:
    """Check that ``dest`` stands alone, and the counts that DeepEP needs and this package does
    not for their shapes and dtypes."""
    if given.dest is not None:
        for other in ("handle", "topk_idx", "is_token_in_rank"):
            if getattr(given, other) is not None:
                checker.refuse("dispatch", "dest", f"must not be given together with {other}")
    wanted: tuple[tuple[str, dict[str, int | None], tuple[np.dtype[Any], ...]], ...] = (
        ("is_token_in_rank", {"num_tokens": num_tokens, "num_ranks": spec.num_ranks}, _BOOL),
        ("num_tokens_per_rank", {"num_ranks": spec.num_ranks}, _INT32),
        ("num_tokens_per_rdma_rank", {"num_nodes": spec.num_nodes}, _INT32),
        ("num_tokens_per_expert", {"num_experts": spec.num_experts}, _INT32),
    )
    for argument, shape, dtypes in wanted:
        value = getattr(given, argument)
        if value is not None:
            checker.array("dispatch", argument, value, shape, dtypes)


def choices(
    checker: ArgumentChecker,
    spec: BufferSpec,
    value: object,
    num_tokens: int,
    operation: str = "dispatch",
) -> Any:
    """The engine's array of ``topk_idx``; its values are the engine's to check."""
    topk_idx = checker.take(operation, "topk_idx", value)
    if spec.num_experts is None:
        checker.refuse(operation, "topk_idx", "needs num_experts in the Buffer's constructor")
    shape = {"num_tokens": num_tokens, "num_topk": None}
    checker.expect(operation, "topk_idx", topk_idx, shape, _INDEX)
    if not 1 <= topk_idx.shape[1] <= spec.num_topk:
        checker.refuse(
            operation,
            "topk_idx",
            f"must have 1 to num_topk = {spec.num_topk} columns, as the Buffer's constructor "
            f"was told, got {topk_idx.shape[1]}",
        )
    return topk_idx


def mask_of_ranks(
    checker: ArgumentChecker, spec: BufferSpec, value: object, num_tokens: int
) -> Any:
    """``[T, R]`` bool, made on the current stream, from the ranks that each row names."""
    ranks, num_ranks = checker.take("dispatch", "dest", value), spec.num_ranks
    shape: dict[str, int | None] = {"num_tokens": num_tokens}
    if ranks.ndim != 1:
        shape["num_destinations"] = None
    checker.expect("dispatch", "dest", ranks, shape, _INDEX)
    columns = ranks.reshape(num_tokens, 1) if ranks.ndim == 1 else ranks
    # NumPy hands arrays of CuPy on to CuPy.
    mask = np.stack([(columns == rank).any(axis=1) for rank in range(num_ranks)], axis=1)
    if bool(((columns < -1) | (columns >= num_ranks)).any()):  # waits for the mask too
        checker.refuse("dispatch", "dest", f"must have ranks 0 to {num_ranks - 1}, or -1 for none")
    return mask
