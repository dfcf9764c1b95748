"""Inputs of a case from a seed, and what the reference makes of them.

Everything follows from (case, rank, seed): each rank can build the inputs of all ranks alone, so
that it can run the reference beside the real thing and compare, with nothing exchanged.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from deepep_cupy.reference import CombineResult, DispatchResult, combine, dispatch
from deepep_cupy.testing.cases import Case, cases, sequence

__all__ = [
    "Case",
    "Expected",
    "Inputs",
    "Rows",
    "cases",
    "expected",
    "make_inputs",
    "make_rank_inputs",
    "make_rows",
    "sequence",
]

Array: TypeAlias = npt.NDArray[Any]

_finfo: Any = ml_dtypes.finfo  # has no types
_TINY_COLUMNS = slice(5, None, 16)
_FIRST_BYTES = 16
"""A cached case's first dispatch carries rows of at most this many bytes."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What one rank passes to dispatch, and its biases for combine.

    Attributes:
        x: ``[T, H]`` of the case's dtype: random bits, NaN payloads included.
        topk_idx: ``[T, K]``, or ``None`` where a mask is dispatched.
        topk_weights: ``[T, K]`` float32, zeros, infinities and NaN among them; or ``None``.
        mask: ``[T, R]`` bool, or ``None`` where ``topk_idx`` is given.
        biases: 0 to 2 arrays ``[T, H]`` of the case's dtype.
        first_x: In a cached case: ``[T, *]`` uint8, the rows of the dispatch that makes the
            handle (with ``topk_idx`` or ``mask`` and no weights); ``x`` and ``topk_weights`` then
            go into the cached call. Else ``None``.
    """

    x: Array
    topk_idx: Array | None
    topk_weights: Array | None
    mask: Array | None
    biases: tuple[Array, ...]
    first_x: Array | None


@dataclass(frozen=True, eq=False)
class Rows:
    """What one rank passes to combine: ``y`` [N, H] and, where weights travel, ``[N, K]``."""

    y: Array
    topk_weights: Array | None


@dataclass(frozen=True, eq=False)
class Expected:
    """A case's inputs and right answers, one list entry a rank.

    Attributes:
        inputs: Of dispatch.
        first: Result of the dispatch that makes the handle, in a cached case; else ``None``.
        dispatched: Result of the dispatch under test.
        rows: Inputs of combine; empty where the rows cannot be added.
        combined: Result of combine; empty where the rows cannot be added.
    """

    inputs: list[Inputs]
    first: list[DispatchResult] | None
    dispatched: list[DispatchResult]
    rows: list[Rows]
    combined: list[CombineResult]


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
    return Inputs(
        x=_bits(rng, shape, case.row_dtype),
        topk_idx=topk_idx,
        topk_weights=weights,
        mask=mask,
        biases=tuple(_values(rng, shape, case.row_dtype) for _ in range(case.num_biases)),
        first_x=first_x,
    )


def make_rows(case: Case, seed: int, rank: int, num_rows: int) -> Rows:
    """Build what ``rank`` gives to combine, once it knows how many rows it received.

    The rows have nothing to do with ``recv_x``, and the weights nothing with
    ``recv_topk_weights``: every row has all K of them, so that sums over ranks are sums.
    """
    if not case.addable:
        raise ValueError(f"make_rows(): rows of {case.dtype} cannot be combined")
    rng = _rng(case, seed, rank, 1)
    weights = None
    if case.weights:
        weights = _floats(rng, (num_rows, case.num_topk), np.dtype(np.float32))
    return Rows(_values(rng, (num_rows, case.hidden), case.row_dtype), weights)


def expected(case: Case, seed: int) -> Expected:
    """Run the reference for all ranks of a case."""
    inputs = make_inputs(case, seed)
    routing: dict[str, Any] = {"expert_alignment": case.expert_alignment}
    if case.from_topk:
        routing |= {
            "topk_idx": [entry.topk_idx for entry in inputs],
            "num_experts": case.num_experts,
        }
    else:
        routing["is_token_in_rank"] = [entry.mask for entry in inputs]
    weights: Any = [entry.topk_weights for entry in inputs] if case.weights else None
    xs = [entry.x for entry in inputs]
    first = None
    if case.cached:
        first = dispatch([_given(entry.first_x) for entry in inputs], **routing)
        handles = [result.handle for result in first]
        dispatched = dispatch(xs, handles=handles, topk_weights=weights)
    else:
        dispatched = dispatch(xs, topk_weights=weights, **routing)
    if not case.addable:
        return Expected(inputs, first, dispatched, [], [])
    handles = [result.handle for result in dispatched]
    rows = [make_rows(case, seed, r, handle.num_recv_tokens) for r, handle in enumerate(handles)]
    combined = combine(
        [entry.y for entry in rows],
        handles,
        topk_weights=[_given(entry.topk_weights) for entry in rows] if case.weights else None,
        biases=[entry.biases for entry in inputs],
    )
    return Expected(inputs, first, dispatched, rows, combined)


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
