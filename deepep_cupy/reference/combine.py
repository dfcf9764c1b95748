"""Combine: every token's rows back to its rank, and added up in a fixed order.

The letters R, T, H, K, E, El and N are those of the package's docstring.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from deepep_cupy.reference.layout import Handle

__all__ = [
    "ACCUMULATOR",
    "ADDABLE",
    "CombineResult",
    "Terms",
    "add",
    "combine",
    "sum_copies",
    "weighted",
]

Array: TypeAlias = npt.NDArray[Any]

Terms: TypeAlias = Iterable[tuple[Array, Array]]
"""Pairs in the order in which they are added: tokens, each at most once, and a row for each."""

ACCUMULATOR: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(ml_dtypes.bfloat16): np.dtype(np.float32),
    np.dtype(np.float16): np.dtype(np.float32),
    np.dtype(np.float32): np.dtype(np.float32),
    np.dtype(np.float64): np.dtype(np.float64),
    **{np.dtype(f"{kind}{8 * n}"): np.dtype(f"{kind}{8 * n}")
       for n in (1, 2, 4, 8) for kind in ("int", "uint")},
}  # fmt: skip
"""Row dtype → the type its sum is kept in. No other dtype can be combined."""
ADDABLE = tuple(dtype.name for dtype in ACCUMULATOR)
"""Names of the row dtypes that combine takes."""

_BLOCK_ELEMENTS = 1 << 18
"""Elements summed at a time: small enough for the cache. No effect on the result."""


@dataclass(frozen=True, eq=False)
class CombineResult:
    """What one rank gets back.

    Attributes:
        combined_x: ``[T, H]``, dtype of the rows.
        combined_topk_weights: ``[T, K]`` float32, or ``None`` when no weights were passed.
    """

    combined_x: Array
    combined_topk_weights: Array | None


def combine(
    ys: Sequence[Array],
    handles: Sequence[Handle],
    *,
    topk_weights: Sequence[Array] | None = None,
    biases: Sequence[Sequence[Array]] | None = None,
    reduce: Literal["exact", "per_rank", "per_node"] = "exact",
    row_weights: Sequence[Array] | None = None,
    nodes: Sequence[Sequence[int]] | None = None,
) -> list[CombineResult]:
    """Add up, for each token, the rows that the ranks it was sent to give back.

    For token t of a rank, ``combined_x[t]`` is the sum of the *terms present*, in this order:
    ``bias_0[t]`` if given, ``bias_1[t]`` if given, then row ``send_row[t, r]`` of rank r's ``y``
    for every rank r the token was sent to, by ascending r. Element by element:

    1. Every term is converted, exactly, to the accumulator: float32 for float16, bfloat16 and
       float32 rows; float64 for float64 rows; the row's own type for integers.
    2. The sum starts as the first term present, so that a lone -0 stays -0. With no term at all
       it is +0. Each further term is added with one IEEE addition, rounded to nearest even in
       the accumulator; integers wrap. No fused multiply-add, no flush of subnormals to zero, no
       other order of additions.
    3. The sum is rounded once, to nearest even, to the dtype of the rows.

    Results are equal bit by bit, but for NaN: any NaN equals any NaN.

    Weights are not multiplied into rows: the caller does that when making ``y``. ``topk_weights``
    travel beside the rows: ``combined_topk_weights[t]`` is the float32 sum of the rows'
    weights over the ranks the token was sent to, ascending, by rule 2 (DeepEP V1 sums, V2
    gathers; dispatch zeroes the columns of other ranks, so that after a plain round trip the two
    agree, up to the sign of a zero).

    **The expanded layout.** Where the handles are expanded, ``y`` has a row per copy: rank r
    holds, for each choice k of token t that is an expert of r, the copy
    ``expanded_row[send_row[t, r], k]``.

    * ``row_weights`` multiply the copies: a copy becomes ``acc(weight) * acc(copy)`` in the
      accumulator, one rounding, before rule 2; not for integers. Without them it is
      ``acc(copy)``.
    * ``reduce="exact"``: every copy is a term: by ascending r, and within r by ascending k. One
      rounding to the dtype of the rows, at the end.
    * ``reduce="per_rank"``: each rank adds its copies of a token by ascending k (rules 1 to 3,
      so with a rounding of its own; a lone copy without ``row_weights`` stays as it is); these
      sums are then combined as the rows of a plain layout would be.
    * ``topk_weights`` are ``[rows]`` and carried back to where they belong:
      ``combined_topk_weights[t, k]`` is the weight of the copy of choice k, bit for bit, and +0
      where the choice is -1.

    **Several nodes.** ``reduce="per_node"``: each node first adds the rows that its ranks have of
    a token, by ascending rank (rules 1 to 3, so with a rounding of its own, on the token's own
    node too); in the expanded layout those rows are the sums of ``"per_rank"``. What is combined
    then are these sums, as if each node were one rank: biases first, nodes by their lowest rank.
    ``topk_weights`` of a layout that is not expanded are summed the same two ways. With one node
    there is nothing between a rank and the whole: plain rows are combined as by ``"exact"``, the
    expanded layout's as by ``"per_rank"``. No other way to add depends on ``nodes``.

    In a layout of the worst case the rows behind the real ones are not read, and neither are
    rows that only fill up an expert's group.

    FP8 rows, opaque bytes, booleans and complex numbers are refused: their sum has no single
    meaning.

    After a combine that ended without error no rank reads ``ys`` any more. After an operation
    that failed on a poisoned Buffer, float outputs are NaN, integer outputs 0 and indices -1.

    Args:
        ys: Per rank ``[rows, H]``, one row per row of ``recv_x`` and in its order; dtype and H
            equal on all ranks, and not necessarily those of the dispatch.
        handles: Per rank the handle of one dispatch.
        topk_weights: Per rank ``[N, K]`` float32, K equal on all ranks, or expanded ``[rows]``;
            on all ranks or on none.
        biases: Per rank zero to two arrays ``[T, H]`` of the dtype of the rows. Ranks
            may differ in how many they pass.
        reduce: ``"per_node"`` on several nodes; the others are of the expanded layout, and without
            effect on any other.
        row_weights: Per rank ``[rows]`` float32; expanded layout alone.
        nodes: The ranks of each node, ascending; None: all on one.

    Returns:
        One ``CombineResult`` a rank.

    Raises:
        ValueError: An argument breaks one of the rules above. The sentence names the rank.
    """
    given = [()] * len(ys) if biases is None else biases
    _check(ys, handles, given)
    expanded = handles[0].expanded_row is not None
    if row_weights is not None:
        if not expanded or ys[0].dtype.kind in "iu":
            raise ValueError("combine(): row_weights need an expanded layout and floating rows")
        _check_weights("row_weights", row_weights, handles)
    if topk_weights is not None:
        _check_weights("topk_weights", topk_weights, handles)
    copies = [
        _Copies(y, _table(y, handle), None if row_weights is None else row_weights[rank])
        for rank, (y, handle) in enumerate(zip(ys, handles, strict=True))
    ]
    if expanded and reduce != "exact":
        copies = [copy.summed() for copy in copies]
    groups = nodes if reduce == "per_node" and nodes is not None and len(nodes) > 1 else None
    results = []
    for rank, handle in enumerate(handles):
        combined_weights = None
        if topk_weights is not None and expanded:
            combined_weights = _gather(topk_weights, handles, handle.send_row)
        elif topk_weights is not None:
            plain = [_Copies(weight, _table(weight, handle)) for weight in topk_weights]
            combined_weights = _add_by_node(plain, handle.send_row, (), groups)
        combined_x = _add_by_node(copies, handle.send_row, given[rank], groups)
        results.append(CombineResult(combined_x, combined_weights))
    return results


def add(
    shape: tuple[int, int], dtype: np.dtype[Any], biases: Sequence[Array], terms: Terms
) -> Array:
    """Add biases, then terms, to one row per token, by the rules of ``combine``.

    Args:
        shape: ``[T, H]`` of the result.
        dtype: Dtype of the result, of the biases and, but for ``weighted`` ones, of the terms.
        biases: Arrays of that shape, in their order.
        terms: The rows of some tokens each.
    """
    total = np.zeros(shape, ACCUMULATOR[dtype])
    started = np.full(shape[0], bool(biases))
    with np.errstate(all="ignore"):  # overflow, NaN and subnormal sums are ordinary results here
        for number, bias in enumerate(biases):
            total = total + bias.astype(total.dtype) if number else bias.astype(total.dtype)
        for token, rows in terms:
            exact = rows.astype(total.dtype, copy=False)
            further = started[token]  # the first term is taken as it is: 0 + -0 would lose a sign
            total[token[~further]] = exact[~further]
            total[token[further]] += exact[further]
            started[token] = True
        return total.astype(dtype, copy=False)


def weighted(rows: Array, weights: Array | None) -> Array:
    """``[n, H]`` rows times ``[n]`` weights, in the accumulator; as they are without weights."""
    if weights is None:
        return rows
    accumulator = ACCUMULATOR[rows.dtype]
    with np.errstate(all="ignore"):
        product: Array = weights[:, None].astype(accumulator) * rows.astype(accumulator)
    return product


def sum_copies(y: Array, expanded_row: Array, row_weights: Array | None = None) -> Array:
    """Add one rank's copies of each received token: ``combine``'s ``reduce="per_rank"``.

    Args:
        y: ``[rows, H]`` of the expanded layout.
        expanded_row: ``[N, K]``, of the handle.
        row_weights: ``[rows]`` float32.

    Returns:
        ``[N, H]`` of the dtype of ``y``; +0 for a token without copies.
    """
    one_each = np.arange(len(expanded_row), dtype=np.int32)[:, None]
    return _add([_Copies(y, expanded_row, row_weights)], one_each, ())


@dataclass(frozen=True, eq=False)
class _Copies:
    """The rows one rank gives back, of which each received token has some.

    Attributes:
        y: ``[rows, H]``.
        table: ``[N, columns]`` row of ``y`` of each copy of a received token; -1: no copy.
        weights: ``[rows]``, or ``None``.
    """

    y: Array
    table: Array
    weights: Array | None = None

    def terms(self, received: Array) -> Iterator[tuple[Array, Array]]:
        """By column: which of these received tokens have a copy there, and those copies."""
        for column in self.table[received].T:
            present = np.flatnonzero(column >= 0)
            row = column[present]
            yield (
                present,
                weighted(self.y[row], None if self.weights is None else self.weights[row]),
            )

    def summed(self) -> _Copies:
        """One row per received token: the sum of its copies, rounded."""
        y = sum_copies(self.y, self.table, self.weights)
        return _Copies(y, np.arange(len(y), dtype=np.int32)[:, None])


def _table(y: Array, handle: Handle) -> Array:
    """Rows of the copies; in a layout that is not expanded, a token's one row."""
    if handle.expanded_row is not None:
        return handle.expanded_row
    return np.arange(len(y), dtype=np.int32)[:, None]


def _add(copies: Sequence[_Copies], send_row: Array, biases: Sequence[Array]) -> Array:
    """All tokens of one rank, a block of tokens at a time."""
    num_tokens, width = len(send_row), copies[0].y.shape[1]
    out = np.empty((num_tokens, width), copies[0].y.dtype)
    step = max(1, _BLOCK_ELEMENTS // max(1, width))
    for begin in range(0, num_tokens, step):
        block = slice(begin, begin + step)
        terms = _terms(copies, send_row[block])
        out[block] = add(out[block].shape, out.dtype, [bias[block] for bias in biases], terms)
    return out


def _add_by_node(
    copies: Sequence[_Copies],
    send_row: Array,
    biases: Sequence[Array],
    nodes: Sequence[Sequence[int]] | None,
) -> Array:
    """All tokens of one rank: node by node first, where there are ``nodes``."""
    if nodes is None:
        return _add(copies, send_row, biases)
    of_token = np.arange(len(send_row), dtype=np.int32)[:, None]
    sums, present = [], []
    for ranks in nodes:
        columns = send_row[:, list(ranks)]
        node = [copies[rank] for rank in ranks]
        sums.append(_Copies(_add(node, columns, ()), of_token))
        present.append((columns >= 0).any(axis=1))
    return _add(sums, np.where(np.stack(present, axis=1), of_token, -1), biases)


def _terms(copies: Sequence[_Copies], send_row: Array) -> Iterator[tuple[Array, Array]]:
    """The terms of some tokens in their order, rank by rank."""
    for rank, copy in enumerate(copies):
        sent = np.flatnonzero(send_row[:, rank] >= 0)
        for present, rows in copy.terms(send_row[sent, rank]):
            yield sent[present], rows


def _gather(weights: Sequence[Array], handles: Sequence[Handle], send_row: Array) -> Array:
    """Weights of copies to the choices of one rank's tokens."""
    columns = 0 if handles[0].expanded_row is None else handles[0].expanded_row.shape[1]
    out = np.zeros((len(send_row), columns), np.float32)
    for rank, (weight, handle) in enumerate(zip(weights, handles, strict=True)):
        sent = np.flatnonzero(send_row[:, rank] >= 0)
        if handle.expanded_row is not None:
            row = handle.expanded_row[send_row[sent, rank]]
            token, column = np.nonzero(row >= 0)
            out[sent[token], column] = weight[row[token, column]]
    return out


def _check(
    ys: Sequence[Array], handles: Sequence[Handle], biases: Sequence[Sequence[Array]]
) -> None:
    if not ys or len(ys) != len(handles) or len(ys) != len(biases):
        raise ValueError(
            f"combine(): wanted one y, one handle and one sequence of biases a rank, got "
            f"{len(ys)}, {len(handles)} and {len(biases)}"
        )
    if ys[0].dtype not in ACCUMULATOR:
        known = ", ".join(sorted(dtype.name for dtype in ACCUMULATOR))
        raise ValueError(f"combine(): rows of {ys[0].dtype} cannot be added; wanted one of {known}")
    if ys[0].ndim != 2:
        raise ValueError(f"combine(): y must be [rows, H], got shape {ys[0].shape} on rank 0")
    width, dtype = ys[0].shape[1:], ys[0].dtype
    if len({handle.expanded_row is None for handle in handles}) > 1:
        raise ValueError("combine(): wanted the handles of one dispatch, got two layouts")
    for rank, (y, handle) in enumerate(zip(ys, handles, strict=True)):
        _check_array("y", y, (handle.num_rows, *width), dtype, rank)
        if len(biases[rank]) > 2:
            raise ValueError(
                f"combine(): wanted 0 to 2 biases, got {len(biases[rank])} on rank {rank}"
            )
        for number, bias in enumerate(biases[rank]):
            _check_array(f"bias_{number}", bias, (handle.num_tokens, *width), dtype, rank)


def _check_weights(name: str, weights: Sequence[Array], handles: Sequence[Handle]) -> None:
    if len(weights) != len(handles):
        raise ValueError(f"combine(): wanted {len(handles)} {name}, one a rank, got {len(weights)}")
    columns = () if handles[0].expanded_row is not None else weights[0].shape[1:2]
    for rank, (weight, handle) in enumerate(zip(weights, handles, strict=True)):
        _check_array(name, weight, (handle.num_rows, *columns), np.dtype(np.float32), rank)


def _check_array(
    name: str, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any], rank: int
) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"combine(): {name} must be {dtype} {shape}, got {array.dtype} {array.shape} "
            f"on rank {rank}"
        )
