"""Inputs of a case from a seed, and the results that the reference computes from them.

Everything follows from (case, rank, seed): each rank can build the inputs of all ranks alone, so
that it can run the reference beside the real thing and compare, with nothing exchanged.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from deepep_cupy.reference import (
    DispatchResult,
    combine,
    dispatch,
    get_dispatch_layout,
    low_latency_combine,
    low_latency_dispatch,
)
from deepep_cupy.reference.quant import num_groups
from deepep_cupy.testing.cases import (
    Case,
    cases,
    low_latency_cases,
    mode_cases,
    node_cases,
    sequence,
)

__all__ = [
    "Case",
    "Expected",
    "Inputs",
    "RankExpected",
    "Rows",
    "cases",
    "expected",
    "low_latency_cases",
    "make_inputs",
    "make_rank_inputs",
    "make_rows",
    "mode_cases",
    "node_cases",
    "sequence",
]

Array: TypeAlias = npt.NDArray[Any]

_finfo: Any = ml_dtypes.finfo  # has no types
_TINY_COLUMNS = slice(5, None, 16)
_CANCELLING, _FACTOR = 80.5, np.float32(46.787754)
"""A number of eight bits and one of 24, whose product is no float32."""
_FIRST_BYTES = 16
"""A cached case's first dispatch carries rows of at most this many bytes."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What one rank passes to dispatch, and its biases for combine.

    Attributes:
        x: ``[T, H]`` of the case's dtype: random bits, NaN payloads included; where they are
            cast on their way: rows of every kind of number, of zeros, of giants and of tiny ones.
        topk_idx: ``[T, K]``, or ``None`` where a mask is dispatched.
        topk_weights: ``[T, K]`` float32, zeros, infinities and NaN among them; or ``None``.
        mask: ``[T, R]`` bool, or ``None`` where ``topk_idx`` is given.
        biases: 0 to 2 arrays ``[T, H]`` of the case's dtype.
        first_x: In a cached case: ``[T, *]`` uint8, the rows of the dispatch that makes the
            handle (with ``topk_idx`` or ``mask`` and no weights); ``x`` and ``topk_weights`` then
            go into the cached call. Else ``None``.
        scales: ``[T, S]``, random bits, in some order and with some strides; or ``None``.
        stats: ``[El]`` int32 to add to, or ``None``.
    """

    x: Array
    topk_idx: Array | None
    topk_weights: Array | None
    mask: Array | None
    biases: tuple[Array, ...]
    first_x: Array | None
    scales: Array | None = None
    stats: Array | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """What one rank passes to combine: a row, and weights, for each row it received.

    Attributes:
        y: ``[rows, H]``, of DeepEP V1's layout ``[El, R * M, H]``; NaN where combine must not read.
        topk_weights: ``[N, K]``, expanded ``[rows]``, or ``None``.
        row_weights: Expanded: ``[rows]``, or ``None``.
    """

    y: Array
    topk_weights: Array | None
    row_weights: Array | None = None


@dataclass(frozen=True, eq=False)
class RankExpected:
    """One rank's entries of ``Expected``: its inputs and its right answers."""

    inputs: Inputs
    first: DispatchResult | None
    dispatched: Any
    rows: Rows | None
    combined: Any
    worst: int | None
    stats: Array | None


@dataclass(frozen=True, eq=False)
class Expected:
    """A case's inputs and right answers, one list entry a rank.

    Attributes:
        inputs: Of dispatch.
        first: Result of the dispatch that makes the handle, in a cached case; else ``None``.
        dispatched: Result of the dispatch under test; of DeepEP V1's calls ``LowLatencyResult``.
        rows: Inputs of combine; empty where the rows cannot be added.
        combined: Result of combine; empty where the rows cannot be added.
        worst: ``num_worst_tokens``; ``None`` where the host waits.
        stats: Right statistics afterwards; ``None`` where there are none.
    """

    inputs: list[Inputs]
    first: list[DispatchResult] | None
    dispatched: list[Any]
    rows: list[Rows]
    combined: list[Any]
    worst: list[int] | None = None
    stats: list[Array] | None = None

    def of_rank(self, rank: int) -> RankExpected:
        """Return the entries of one rank."""
        return RankExpected(
            inputs=self.inputs[rank],
            first=self.first[rank] if self.first else None,
            dispatched=self.dispatched[rank],
            rows=self.rows[rank] if self.rows else None,
            combined=self.combined[rank] if self.combined else None,
            worst=self.worst[rank] if self.worst else None,
            stats=self.stats[rank] if self.stats else None,
        )


def make_inputs(case: Case, seed: int) -> list[Inputs]:
    """Build the inputs of all ranks."""
    return [make_rank_inputs(case, seed, rank) for rank in range(case.num_ranks)]


def make_rank_inputs(case: Case, seed: int, rank: int) -> Inputs:
    """Build the inputs of one rank: the entry ``rank`` of ``make_inputs``."""
    tokens = case.num_tokens[rank]
    rng = _rng(case, seed, rank, 0)
    topk_idx = mask = weights = first_x = None
    if case.from_topk:
        topk_idx = _topk_idx(case, seed, rng, tokens)
    else:
        mask = _mask(case, seed, rng, tokens)
    if case.weights:
        weights = _floats(rng, (tokens, case.num_topk), np.dtype(np.float32))
    if case.cached:
        first_x = _bits(rng, (tokens, min(_FIRST_BYTES, case.row_bytes)), np.dtype(np.uint8))
    shape = (tokens, case.hidden)
    stats = None
    if case.stats:
        stats = rng.integers(-9, 1000, (case.num_experts or 0) // case.num_ranks, np.int32)
    x = (
        _to_cast(rng, shape, case.row_dtype)
        if case.quantized
        else _bits(rng, shape, case.row_dtype)
    )
    return Inputs(
        x=x,
        topk_idx=topk_idx,
        topk_weights=weights,
        mask=mask,
        biases=tuple(_values(rng, shape, case.sum_dtype) for _ in range(case.num_biases)),
        first_x=first_x,
        scales=_scales(case, rng, tokens) if case.fp8 in ("scales", "packed") else None,
        stats=stats,
    )


def make_rows(case: Case, seed: int, rank: int, num_rows: int, unread: Array | None = None) -> Rows:
    """Build what ``rank`` gives to combine, once it knows how many rows it received.

    The rows have nothing to do with ``recv_x``, and the weights nothing with
    ``recv_topk_weights``: every row has all K of them, so that sums over ranks are sums.

    Args:
        case: The case.
        seed: Of the inputs.
        rank: Whose.
        num_rows: Rows of ``recv_x``.
        unread: ``[num_rows]`` bool, rows that combine must not read: they are NaN.
    """
    if not case.addable:
        raise ValueError(f"make_rows(): rows of {case.dtype} cannot be combined")
    rng = _rng(case, seed, rank, 1)
    weights = row_weights = None
    if case.weights and not case.low_latency:
        shape = (num_rows,) if case.expand else (num_rows, case.num_topk)
        weights = _floats(rng, (num_rows, math.prod(shape[1:])), np.dtype(np.float32))
        weights = weights.reshape(shape)
    y = _values(rng, (num_rows, case.hidden), case.sum_dtype)
    if case.row_weights:
        row_weights = _floats(rng, (num_rows, 1), np.dtype(np.float32)).reshape(num_rows)
        # Where biases are tiny, products of most rows cancel: a fused one leaves its rounding.
        row_weights[rng.random(num_rows) < 0.7] = _FACTOR
        columns = y[:, _TINY_COLUMNS]
        columns[...] = rng.choice([_CANCELLING, -_CANCELLING], columns.shape)
    if unread is not None and y.dtype.kind not in "iu":
        y[unread] = np.nan
    return Rows(y, weights, row_weights)


def expected(case: Case, seed: int, nodes: Sequence[Sequence[int]] | None = None) -> Expected:
    """Run the reference for all ranks of a case; ``nodes``: see ``reference.combine``."""
    inputs = make_inputs(case, seed)
    if case.by_expert:
        return _expected_by_expert(case, seed, inputs)
    routing: dict[str, Any] = {"expert_alignment": case.expert_alignment}
    if case.from_topk:
        routing |= {
            "topk_idx": [entry.topk_idx for entry in inputs],
            "num_experts": case.num_experts,
            "do_expand": case.expand,
        }
    else:
        routing["is_token_in_rank"] = [entry.mask for entry in inputs]
    worst = _worst(case, inputs)
    routing["num_worst_tokens"] = worst
    rows: dict[str, Any] = {
        "topk_weights": [entry.topk_weights for entry in inputs] if case.weights else None,
        "do_zero_padding": case.zero_padding,
        "scales_layout": case.scales_layout,
        "quantize": case.quantized,
        "round_scale": case.fp8 in ("round", "ue8m0"),
        "use_ue8m0": case.fp8 == "ue8m0",
    }
    xs: Any = [entry.x for entry in inputs]
    if case.fp8 in ("scales", "packed"):
        xs = [(entry.x, entry.scales) for entry in inputs]
    stats = [_given(entry.stats).copy() for entry in inputs] if case.stats else None
    first = None
    if case.cached:
        first = dispatch([_given(entry.first_x) for entry in inputs], **routing)
        dispatched = dispatch(xs, handles=[result.handle for result in first], **rows)
    else:
        dispatched = dispatch(xs, recv_stats=stats, **routing, **rows)
    if not case.addable:
        return Expected(inputs, first, dispatched, [], [], worst, stats)
    handles = [result.handle for result in dispatched]
    given = [
        make_rows(case, seed, rank, result.handle.num_rows, ~_copies(result))
        for rank, result in enumerate(dispatched)
    ]
    combined = combine(
        [entry.y for entry in given],
        handles,
        topk_weights=None
        if given[0].topk_weights is None
        else [_given(entry.topk_weights) for entry in given],
        biases=[entry.biases for entry in inputs],
        reduce=case.reduce,
        row_weights=[_given(e.row_weights) for e in given] if case.row_weights else None,
        nodes=nodes,
    )
    return Expected(inputs, first, dispatched, given, combined, worst, stats)


def _expected_by_expert(case: Case, seed: int, inputs: list[Inputs]) -> Expected:
    """The same of DeepEP V1's calls, whose results are ``LowLatencyResult`` and arrays."""
    stats = [_given(entry.stats).copy() for entry in inputs] if case.stats else None
    dispatched = low_latency_dispatch(
        [entry.x for entry in inputs],
        [_given(entry.topk_idx) for entry in inputs],
        case.num_max_tokens,
        case.num_experts or 0,
        topk_weights=[_given(entry.topk_weights) for entry in inputs] if case.weights else None,
        use_fp8=case.quantized,
        round_scale=case.fp8 in ("round", "ue8m0"),
        use_ue8m0=case.fp8 == "ue8m0",
        recv_stats=stats,
    )
    rows = []
    for rank, result in enumerate(dispatched):
        made = make_rows(case, seed, rank, result.defined.size, ~result.defined.reshape(-1))
        weights = None
        if not case.weights:
            shape = (case.num_tokens[rank], case.num_topk)
            weights = _floats(_rng(case, seed, rank, 2), shape, np.dtype(np.float32))
        rows.append(Rows(made.y.reshape(*result.defined.shape, case.hidden), weights))
    combined = low_latency_combine(
        [entry.y for entry in rows],
        dispatched,
        topk_weights=None if case.weights else [_given(entry.topk_weights) for entry in rows],
        reduce="exact" if case.reduce == "exact" else "per_rank",
    )
    return Expected(inputs, None, dispatched, rows, combined, None, stats)


def _copies(result: DispatchResult) -> Array:
    """``[rows]`` bool: rows that hold a token, and no padding."""
    handle = result.handle
    if handle.expanded_row is None:
        return result.defined
    holds = np.zeros(handle.num_rows, np.bool_)
    holds[handle.expanded_row[handle.expanded_row >= 0]] = True
    return holds


def _worst(case: Case, inputs: list[Inputs]) -> list[int] | None:
    """``num_worst_tokens`` of each rank."""
    most = case.num_ranks * case.num_max_tokens
    if case.wait == "host":
        return None
    if case.wait == "worst":
        return [most] * case.num_ranks
    masks: list[Any] = [entry.mask for entry in inputs]
    if case.from_topk:
        experts = case.num_experts or 1
        masks = [
            get_dispatch_layout(_given(entry.topk_idx), experts, case.num_ranks).is_token_in_rank
            for entry in inputs
        ]
    received = np.sum([mask.sum(axis=0) for mask in masks], axis=0)
    return [max(1, int(number)) for number in received]


def _given(array: Array | None) -> Array:
    if array is None:
        raise ValueError("an array of this case is missing")
    return array


def _rng(case: Case, seed: int, rank: int, purpose: int) -> np.random.Generator:
    words = (zlib.crc32(case.id.encode()), seed, rank, purpose)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))


def _hot(case: Case, seed: int, number: int) -> int:
    """The one expert or rank that all tokens of all ranks go to."""
    return (zlib.crc32(case.id.encode()) + seed) % number


def _topk_idx(case: Case, seed: int, rng: np.random.Generator, tokens: int) -> Array:
    """Expert numbers, distinct within a token; -1 in the columns that lie beyond E."""
    experts = case.num_experts or 1
    columns = min(case.num_topk, experts)
    out = np.full((tokens, case.num_topk), -1, case.index_dtype)
    if case.routing == "nothing":
        return out
    if case.routing == "one":
        out[np.arange(tokens), rng.integers(0, columns, tokens)] = _hot(case, seed, experts)
        return out
    step = np.arange(columns)
    if case.routing == "skewed":
        start = (experts * rng.random((tokens, 1)) ** 4).astype(np.int64)
        out[:, :columns] = (start + step) % experts
        return out
    # A walk round a shuffled circle of experts meets none twice while its stride is coprime to E.
    strides = np.array([s for s in range(1, experts + 1) if math.gcd(s, experts) == 1])
    start = rng.integers(0, experts, (tokens, 1))
    stride = rng.choice(strides, (tokens, 1))
    out[:, :columns] = rng.permutation(experts)[(start + stride * step) % experts]
    if case.routing == "half":
        out[:, 1::2] = -1
    return out


def _mask(case: Case, seed: int, rng: np.random.Generator, tokens: int) -> Array:
    shape = (tokens, case.num_ranks)
    if case.routing == "nothing":
        return np.zeros(shape, np.bool_)
    if case.routing == "one":
        return np.broadcast_to(
            np.arange(case.num_ranks) == _hot(case, seed, case.num_ranks), shape
        ).copy()
    if case.routing == "skewed":
        return rng.random(shape) < 1 / (1 + np.arange(case.num_ranks)) ** 2
    mask = rng.random(shape) < 0.6
    if case.routing == "half":
        mask[1::2] = False
    return mask


def _bits(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
    """Random bits."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    words = rng.integers(0, 2**64, -(-nbytes // 8), dtype=np.uint64)
    return words.view(np.uint8)[:nbytes].view(dtype).reshape(shape)


def _values(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
    """Numbers to add: random integers (their sums wrap), or ``_floats``."""
    return _bits(rng, shape, dtype) if dtype.kind in "iu" else _floats(rng, shape, dtype)


def _floats(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
    """Floats whose sum shows its order: mixed magnitudes, cancelling giants, rare specials."""
    info = _finfo(dtype)
    word = np.dtype(f"uint{8 * dtype.itemsize}")
    out = _bits(rng, shape, dtype)
    bits = out.view(word)
    # Keep sign and fraction; of the exponent only the low bits, centred on that of 1.0.
    spread = 3 if info.nexp == 5 else 5
    bias = (1 << (info.nexp - 1)) - 1
    kept = (1 << (8 * dtype.itemsize - 1)) | ((1 << (info.nmant + spread)) - 1)
    bits &= word.type(kept)
    bits += word.type((bias - (1 << (spread - 1))) << info.nmant)
    special = _specials(dtype).view(word)
    flat = bits.reshape(-1)
    at = rng.integers(0, max(1, flat.size), flat.size // 4)
    flat[at] = special[rng.integers(0, special.size, at.size)]
    # In these columns every rank's rows hold signed zeros and subnormals, and so do their sums.
    least = _tiny(dtype)
    columns = out[:, _TINY_COLUMNS]
    columns[...] = least[rng.integers(0, least.size, columns.shape)]
    return out


def _to_cast(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
    """Rows to be cast to FP8: in turn ordinary ones, zeros, giants, tiny ones, and any bits."""
    info = _finfo(dtype)
    with np.errstate(all="ignore"):
        out = (rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))).astype(dtype)
        sign = np.where(rng.random(shape) < 0.5, -1.0, 1.0)
        turn = np.arange(shape[0]) + int(rng.integers(5))
        out[turn % 5 == 1] = (0.0 * sign[turn % 5 == 1]).astype(dtype)
        giant = (sign * float(info.max) * rng.random(shape)).astype(dtype)
        out[turn % 5 == 2] = giant[turn % 5 == 2]
        # Around the floor of the largest value, and subnormals.
        tiny = sign * 10.0 ** rng.uniform(math.log10(float(info.smallest_subnormal)), -3, shape)
        out[turn % 5 == 3] = tiny.astype(dtype)[turn % 5 == 3]
        out[turn % 5 == 4] = _floats(rng, shape, dtype)[turn % 5 == 4]
    return out


def _scales(case: Case, rng: np.random.Generator, tokens: int) -> Array:
    """Random bits in C order, in Fortran order, or in every second place."""
    packed = case.fp8 == "packed"
    groups = num_groups(case.hidden)
    columns = -(-groups // 4) if packed else groups
    dtype = np.dtype((np.int32, np.uint32)[case.hidden % 2] if packed else np.float32)
    array = _bits(rng, (tokens, columns), dtype)
    order = zlib.crc32(case.id.encode()) % 3
    if order == 1:
        return np.asfortranarray(array)
    if order == 2:
        wide = np.zeros((tokens, 2 * columns), dtype)
        wide[:, ::2] = array
        return wide[:, ::2]
    return array


def _specials(dtype: np.dtype[Any]) -> Array:
    """The values strewn among the others, each as often as it stands here (of 64)."""
    info = _finfo(dtype)
    giant = 2.0 ** (15 if info.nexp == 5 else 60 if info.nexp == 11 else 30)
    tiny, least = float(info.smallest_normal), float(info.smallest_subnormal)
    top = float(info.max)
    signed = (
        *[giant] * 20,
        *[0.0] * 5,
        *(least, 3 * least, tiny - least, tiny),
        *(top, 1.0),
    )
    rare = (float("inf"), float("nan"))
    return np.array((*signed, *(-value for value in signed), *rare)).astype(dtype)


def _tiny(dtype: np.dtype[Any]) -> Array:
    info = _finfo(dtype)
    least, normal = float(info.smallest_subnormal), float(info.smallest_normal)
    values = (*[-0.0] * 6, 0.0, least, -least, 3 * least, -normal, normal - least)
    return np.array(values).astype(dtype)
