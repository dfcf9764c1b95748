"""DeepEP V1's low-latency layout: as many rows for every expert, by (source rank, source token).

What arrives, and every sum, is that of the expanded layout: see ``reference.dispatch`` and
``reference.combine``. Here is only where things lie. The letters R, T, H, K, E and El are those of
the package's docstring; M is the most tokens that a rank sends in the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from deepep_cupy.reference.combine import combine
from deepep_cupy.reference.dispatch import dispatch
from deepep_cupy.reference.layout import Handle, place_weights

__all__ = [
    "LowLatencyResult",
    "low_latency_combine",
    "low_latency_dispatch",
    "source_info",
    "transposed",
]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class LowLatencyResult:
    """What one rank receives.

    Attributes:
        recv_x: ``[El, R * M, H]``: the rows of local expert e are the first ``recv_count[e]`` of
            its R * M, by (source rank, source token); the others may hold anything. With FP8 a
            pair of them and the scales ``[El, R * M, S]``, whose memory is ``[El, S, R * M]``.
        recv_count: ``[El]`` int32.
        recv_src_info: ``[El, R * M]`` int32: token of each row on its source rank; -1 behind the
            real ones, which a Buffer may leave undefined.
        recv_layout_range: ``[El, R]`` int64: first row of each source rank among the expert's
            rows << 32 | how many they are.
        weights: ``[El, R * M]`` float32: the weight of each row's choice, or ``None``.
        defined: ``[El, R * M]`` bool: rows whose content is specified.
        handle: The routing, of the expanded layout with R * M rows for each expert.
    """

    recv_x: Array | tuple[Array, Array]
    recv_count: Array
    recv_src_info: Array
    recv_layout_range: Array
    weights: Array | None
    defined: Array
    handle: Handle


def low_latency_dispatch(
    xs: Sequence[Array],
    topk_idx: Sequence[Array],
    num_max_dispatch_tokens_per_rank: int,
    num_experts: int,
    *,
    topk_weights: Sequence[Array] | None = None,
    use_fp8: bool = True,
    round_scale: bool = False,
    use_ue8m0: bool = False,
    recv_stats: Sequence[Array] | None = None,
) -> list[LowLatencyResult]:
    """Send each token to every rank that has one of its experts, and lay its rows out by expert.

    Args:
        xs: Per rank ``[T, H]``, T at most M.
        topk_idx: Per rank ``[T, K]`` global expert numbers, -1 for none.
        num_max_dispatch_tokens_per_rank: M.
        num_experts: E.
        topk_weights: Per rank ``[T, K]`` float32.
        use_fp8: Cast the rows to FP8, by ``reference.quantize``.
        round_scale: Of ``reference.quantize``.
        use_ue8m0: Of ``reference.quantize``.
        recv_stats: Per rank ``[El]`` int32, to which the counts are added.

    Raises:
        ValueError: A rank has more than M tokens, or what ``reference.dispatch`` refuses.
    """
    num_ranks, most = len(xs), num_max_dispatch_tokens_per_rank
    for rank, x in enumerate(xs):
        if len(x) > most:
            raise ValueError(f"low_latency_dispatch(): {len(x)} tokens on rank {rank}, not {most}")
    num_local, rows = num_experts // num_ranks, num_ranks * most
    done = dispatch(
        xs,
        topk_idx=topk_idx,
        num_experts=num_experts,
        topk_weights=topk_weights,
        do_expand=True,
        quantize=use_fp8,
        round_scale=round_scale,
        use_ue8m0=use_ue8m0,
        recv_stats=recv_stats,
        expert_rows=rows,
    )
    results = []
    for each in done:
        info, ranges = source_info(each.handle, rows)
        parts = each.recv_x if isinstance(each.recv_x, tuple) else (each.recv_x,)
        recv_x, *scales = (part.reshape(num_local, rows, part.shape[1]) for part in parts)
        weights, counts = each.recv_topk_weights, each.handle.num_unaligned_recv_tokens_per_expert
        assert counts is not None
        results.append(
            LowLatencyResult(
                recv_x=(recv_x, transposed(scales[0])) if scales else recv_x,
                recv_count=counts,
                recv_src_info=info,
                recv_layout_range=ranges,
                weights=None if weights is None else weights.reshape(num_local, rows),
                defined=each.defined.reshape(num_local, rows),
                handle=each.handle,
            )
        )
    return results


def low_latency_combine(
    ys: Sequence[Array],
    results: Sequence[LowLatencyResult],
    *,
    topk_weights: Sequence[Array] | None = None,
    reduce: Literal["exact", "per_rank"] = "per_rank",
) -> list[Array]:
    """Add up each token's weighted rows, by the rules of ``reference.combine``.

    Args:
        ys: Per rank ``[El, R * M, H]`` of a floating dtype.
        results: Of one dispatch.
        topk_weights: Per rank ``[T, K]`` float32; ``None``: those that the dispatch was given.
        reduce: Of ``reference.combine``, whose ``row_weights`` are these weights.

    Returns:
        Per rank ``[T, H]``, dtype of ``ys``.

    Raises:
        ValueError: There are no weights, or what ``reference.combine`` refuses.
    """
    handles = [result.handle for result in results]
    if topk_weights is None:
        given = [result.weights for result in results]
    else:
        given = [_brought(topk_weights, handle) for handle in handles]
    rows = [weights.reshape(-1) for weights in given if weights is not None]
    if len(rows) < len(given):
        raise ValueError("low_latency_combine(): no weights, neither here nor in the dispatch")
    flat = [y.reshape(-1, y.shape[-1]) for y in ys]
    combined = combine(flat, handles, reduce=reduce, row_weights=rows)
    return [each.combined_x for each in combined]


def source_info(handle: Handle, rows: int) -> tuple[Array, Array]:
    """``recv_src_info`` and ``recv_layout_range`` of a handle with ``rows`` for each expert."""
    table, num_ranks = handle.expanded_row, len(handle.recv_rows_per_rank)
    assert table is not None
    info = np.full(handle.num_expanded_tokens, -1, np.int32)
    counts = np.zeros((handle.num_expanded_tokens // rows, num_ranks), np.int64)
    source = np.repeat(np.arange(num_ranks), handle.recv_rows_per_rank)
    token, column = np.nonzero(table >= 0)
    row = table[token, column]
    info[row] = handle.recv_src_idx[token]
    np.add.at(counts, (row // rows, source[token]), 1)
    first = np.cumsum(counts, axis=1) - counts
    return info.reshape(len(counts), rows), first << 32 | counts


def transposed(scales: Array) -> Array:
    """The scales ``[El, rows, S]`` in memory ``[El, S, rows]``."""
    return np.ascontiguousarray(scales.transpose(0, 2, 1)).transpose(0, 2, 1)


def _brought(topk_weights: Sequence[Array], handle: Handle) -> Array:
    """``[rows]``: each row's weight, from its own rank's ``[T, K]``."""
    out = np.zeros(handle.num_expanded_tokens, np.float32)
    ends = np.cumsum(handle.recv_rows_per_rank)
    sources = np.split(handle.recv_src_idx[: handle.num_real_tokens], ends[:-1])
    received = [weights[token] for weights, token in zip(topk_weights, sources, strict=True)]
    table = handle.expanded_row
    assert table is not None
    place_weights(np.concatenate(received), table[: handle.num_real_tokens], out)
    return out
