"""``dispatch`` and ``combine`` inside compiled programs, and their gradients.

Each is the other's transpose: a dispatch copies a row to ranks, its gradient adds the copies'
gradients; a combine adds, its gradient copies. Backward calls reuse the handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from deepep_cupy.api.buffer import Buffer
from deepep_cupy.api.values import resolve_dtype, wrong_number
from deepep_cupy.engines.calls import FORMATS
from deepep_cupy.engines.gpu.routing import num_words
from deepep_cupy.errors import ContractError
from deepep_cupy.jax.attached import attached
from deepep_cupy.jax.chain import BACKWARD, call_site, token_for, token_made, varying_alike
from deepep_cupy.jax.site import Site
from deepep_cupy.jax.trees import Combined, Handle, Received
from deepep_cupy.protocol.sizes import MAX_ROWS, num_scales, worst_expanded_rows

__all__ = ["combine", "dispatch"]

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


def dispatch(
    buffer: Buffer,
    x: Any,
    topk_idx: Any = None,
    topk_weights: Any = None,
    *,
    handle: Handle | None = None,
    num_worst_tokens: int | None = None,
    expert_alignment: int = 1,
    layout: Literal["plain", "expanded"] = "plain",
    quantize: Literal["fp8_e4m3"] | None = None,
    after: Any = None,
) -> Received:
    """Send each token to every rank that holds one of its chosen experts, inside ``jax.jit``.

    ``Buffer.dispatch`` without a wait for the counts: shapes are static, counts stay in the
    handle. Rows behind the real ones are zero. Its gradient is a combine of the rows' gradients
    (and, for ``topk_weights``, of the weights'); with ``quantize`` it has none.

    Collective: yes, each time the program runs: on all ranks in the same order.  Stream: XLA's.
    Host sync: on the host engine.

    Args:
        buffer: Known by ``attach``.
        x: ``[T, H]`` of any dtype.
        topk_idx: ``[T, K]`` int32 or int64, -1: no choice. Or give ``handle``.
        topk_weights: ``[T, K]`` float32.
        handle: Of an earlier dispatch: send new rows the same ways, in its layout.
        num_worst_tokens: W, the most tokens this rank can receive; None: R * M, always enough.
            Where more come, every rank's call fails.
        expert_alignment: Begin each expert's rows at a multiple of this, in the expanded layout.
        layout: ``"expanded"``: a row per (token, local expert), grouped by expert, for
            ``jax.lax.ragged_dot`` with ``handle.group_sizes``.
        quantize: ``"fp8_e4m3"``: cast the rows on their way; ``recv.x`` is codes and scales.
        after: A result of another call, or its ``token``: come behind it. None: behind the newest
            call of the same trace. Needed where that is in another trace, such as around or beside
            a ``scan``: carry the token through it.

    Raises:
        ContractError: While tracing, on this rank, when a shape, dtype or option is wrong. What
            only the running program can find fails it; see ``check``.
        StateError: ``attach`` was not called.
    """
    found = attached(buffer, "dispatch")
    place, tag = call_site("dispatch")
    _expect(x, "dispatch", "x", "[T, H]", 2)
    tokens, hidden = x.shape
    spec = buffer._spec
    if tokens > spec.num_max_tokens_per_rank:
        raise ContractError(
            f"dispatch(): argument 'x' has {tokens} rows, but the Buffer was made for at most "
            f"{spec.num_max_tokens_per_rank} (num_max_tokens_per_rank), on rank {spec.rank}."
        )
    if handle is not None:
        return _again(found.number, x, topk_idx, topk_weights, handle, after, place, tag)
    _expect(topk_idx, "dispatch", "topk_idx", f"[{tokens}, K]", 2, tokens)
    topk = topk_idx.shape[1]
    if not 1 <= topk <= spec.num_topk or spec.num_experts is None:
        raise ContractError(
            f"dispatch(): argument 'topk_idx' has {topk} choices a token, but the Buffer was made "
            f"for {spec.num_topk} (num_topk), on rank {spec.rank}."
        )
    if topk_weights is not None:
        _expect_weights(topk_weights, "dispatch", (tokens, topk))
    capacity = spec.max_recv_tokens if num_worst_tokens is None else num_worst_tokens
    _expect_number("num_worst_tokens", capacity, spec.max_recv_tokens)
    _expect_number("expert_alignment", expert_alignment, MAX_ROWS)
    expanded = _one_of("dispatch", "layout", layout, ("plain", "expanded")) == "expanded"
    if quantize is not None:
        _one_of("dispatch", "quantize", quantize, tuple(FORMATS))
    rows = capacity
    if expanded:
        rows = worst_expanded_rows(capacity, topk, spec.num_local_experts, expert_alignment)
    site = Site(
        operation="dispatch",
        buffer=found.number,
        num_tokens=tokens,
        capacity=capacity,
        hidden=hidden,
        dtype=np.dtype(x.dtype).name,
        num_topk=topk,
        index_dtype=np.dtype(topk_idx.dtype).name,
        weights=topk_weights is not None,
        alignment=expert_alignment,
        expanded=expanded,
        num_rows=rows,
        quantize=quantize,
        place=place,
        tag=tag,
    )
    sizes = spec.num_ranks, spec.num_local_experts
    given = varying_alike(x, topk_idx, topk_weights, token_for(after))
    do = _dispatch_forward if quantize else _dispatch
    recv, arrays, token = do((site, sizes), *given)
    words, sources, table = arrays
    made = Handle(
        words,
        sources,
        table,
        topk_idx=given[1] if expanded else None,
        buffer=found.number,
        num_tokens=tokens,
        num_ranks=spec.num_ranks,
        num_local_experts=spec.num_local_experts,
        num_topk=topk,
        capacity=capacity,
        expert_alignment=expert_alignment,
        num_rows=rows,
    )
    received, choices, weights = recv
    return Received(received, choices, weights, made, token_made(token))


def _again(
    number: int,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    handle: Handle,
    after: Any,
    place: str,
    tag: int,
) -> Received:
    """A dispatch with a handle."""
    _expect_handle(handle, "dispatch", number)
    if topk_idx is not None:
        raise ContractError("dispatch(): give topk_idx or handle, not both.")
    if len(x) != handle.num_tokens:
        raise ContractError(
            f"dispatch(): argument 'x' must have {handle.num_tokens} rows, as the handle's "
            f"dispatch, got {len(x)}."
        )
    if topk_weights is not None:
        _expect_weights(topk_weights, "dispatch", (handle.num_tokens, handle.num_topk))
    site = _site_of(handle, "cached", x, topk_weights, place, tag)
    x, arrays, weights, token = varying_alike(x, _arrays(handle), topk_weights, token_for(after))
    sizes = handle.num_ranks, handle.num_local_experts
    recv, recv_weights, token = _cached((site, sizes), x, arrays, weights, token)
    return Received(recv, None, recv_weights, handle, token_made(token))


def combine(
    buffer: Buffer,
    y: Any,
    handle: Handle,
    topk_weights: Any = None,
    bias: Any = (),
    *,
    reduce: Literal["exact", "per_rank"] = "exact",
    after: Any = None,
) -> Combined:
    """Bring every row back to the rank of its token, and add the rows of each token, inside
    ``jax.jit``.

    ``Buffer.combine``, with the same bits. Its gradient is a dispatch with the handle. Rows behind
    the real ones are not read; their gradients are zero.

    Collective: yes, each time the program runs: on all ranks in the same order.  Stream: XLA's.
    Host sync: on the host engine.

    Args:
        buffer: Known by ``attach``.
        y: ``[W, H]``, or ``[rows, H]`` in the expanded layout: a row for each row of ``recv.x``.
        handle: Of the dispatch.
        topk_weights: ``[W, K]`` float32 to be summed over ranks as well; expanded ``[rows]``,
            carried back to the choices they belong to.
        bias: An array ``[T, H]`` or up to two of them, of the dtype of ``y``.
        reduce: In the expanded layout: ``"exact"``, or ``"per_rank"``: each rank first adds its
            copies of a token and rounds.
        after: As for ``dispatch``.

    Raises:
        ContractError: While tracing, on this rank, when a shape, dtype or option is wrong. What
            only the running program can find fails it; see ``check``.
        StateError: ``attach`` was not called.
    """
    found = attached(buffer, "combine")
    place, tag = call_site("combine")
    _expect_handle(handle, "combine", found.number)
    _expect(y, "combine", "y", f"[{handle.num_rows}, H]", 2, handle.num_rows)
    biases = tuple(bias) if isinstance(bias, tuple | list) else (bias,)
    for each in biases:
        wanted = (handle.num_tokens, y.shape[1]), np.dtype(y.dtype)
        if (jnp.shape(each), np.dtype(jnp.result_type(each))) != wanted:
            raise ContractError(
                f"combine(): argument 'bias' must be {wanted[1]} {list(wanted[0])}, got "
                f"{jnp.result_type(each)} {list(jnp.shape(each))}."
            )
    if len(biases) > 2:
        raise ContractError(f"combine(): at most two biases, got {len(biases)}.")
    if topk_weights is not None:
        rows = handle.num_rows
        shape = (rows,) if handle.expanded else (rows, handle.num_topk)
        _expect_weights(topk_weights, "combine", shape)
    _one_of("combine", "reduce", reduce, ("exact", "per_rank"))
    site = _site_of(handle, "combine", y, topk_weights, place, tag)
    site = replace(site, num_biases=len(biases), reduce=reduce)
    given = varying_alike(y, _arrays(handle), topk_weights, biases, token_for(after))
    sizes = handle.num_ranks, handle.num_local_experts
    out, weights, token = _combine((site, sizes), *given)
    return Combined(out, weights, token_made(token))


# ------------------------------------------------------------------------------------ checks


def _expect(
    value: Any, operation: str, argument: str, shape: str, ndim: int, length: int | None = None
) -> None:
    got = getattr(value, "shape", None)
    if got is None or len(got) != ndim or (length is not None and got[0] != length):
        what = f"shape {list(got)}" if got is not None else type(value).__name__
        raise ContractError(
            f"{operation}(): argument '{argument}' must be an array {shape}, got {what}."
        )


def _expect_number(argument: str, value: Any, most: int) -> None:
    complaint = wrong_number(argument, value, 1, most)
    if complaint is not None:
        raise ContractError(f"dispatch(): {complaint}.")


def _expect_weights(value: Any, operation: str, shape: tuple[int, ...]) -> None:
    got = getattr(value, "shape", None)
    if got != shape or np.dtype(value.dtype) != _FLOAT32:
        what = type(value).__name__ if got is None else f"{value.dtype} {list(got)}"
        raise ContractError(
            f"{operation}(): argument 'topk_weights' must be float32 {list(shape)}, got {what}."
        )


def _expect_handle(handle: Any, operation: str, number: int) -> None:
    if not isinstance(handle, Handle):
        raise ContractError(
            f"{operation}(): argument 'handle' must be the handle of a deepep_cupy.jax.dispatch, "
            f"got {type(handle).__name__}."
        )
    if handle.buffer != number:
        raise ContractError(f"{operation}(): argument 'handle' is of another Buffer.")


def _one_of(operation: str, argument: str, value: Any, right: tuple[str, ...]) -> str:
    if value not in right:
        raise ContractError(
            f"{operation}(): argument '{argument}' must be {' or '.join(map(repr, right))}, got "
            f"{value!r}."
        )
    return str(value)


# ------------------------------------------------------------- calls, forward and backward

_Meta = tuple[Site, tuple[int, int]]
"""The site, and R and El."""


def _arrays(handle: Handle) -> tuple[Any, ...]:
    """What XLA gets of a handle: words, and in the expanded layout the table and the choices."""
    if handle.expanded:
        return handle.words, handle.expanded_row, handle.topk_idx
    return (handle.words,)


def _site_of(
    handle: Handle,
    operation: Literal["cached", "combine"],
    rows: Any,
    weights: Any,
    place: str,
    tag: int,
) -> Site:
    return Site(
        operation=operation,
        buffer=handle.buffer,
        num_tokens=handle.num_tokens,
        capacity=handle.capacity,
        hidden=rows.shape[1],
        dtype=np.dtype(rows.dtype).name,
        num_topk=handle.num_topk,
        index_dtype="int32" if handle.topk_idx is None else np.dtype(handle.topk_idx.dtype).name,
        weights=weights is not None,
        alignment=handle.expert_alignment,
        expanded=handle.expanded,
        num_rows=handle.num_rows,
        place=place,
        tag=tag,
    )


def _backward(
    site: Site, operation: Literal["cached", "combine"], gradient: Any, weights: Any
) -> Site:
    """The site of the backward call of a call."""
    return replace(
        site,
        operation=operation,
        hidden=gradient.shape[1],
        dtype=np.dtype(gradient.dtype).name,
        weights=weights is not None,
        num_biases=0,
        tag=site.tag | BACKWARD,
    )


def _call(site: Site, results: Sequence[Any], operands: Sequence[Any], token: Any) -> list[Any]:
    """The foreign call. Last operands: a token that only has to be there, and the token; last
    result: the token, in the same memory."""
    before, last = token if isinstance(token, tuple) else (token, token)
    shapes = [*results, jax.ShapeDtypeStruct((), _FLOAT32)]
    given = varying_alike(*operands, before, last)
    call = jax.ffi.ffi_call(
        site.target,
        shapes,
        vmap_method="sequential",
        input_output_aliases={len(given) - 1: len(shapes) - 1},
    )
    made = call(*given, site=site.text())
    return list(varying_alike(*made, *given)[: len(shapes)])


def _struct(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _weights_struct(site: Site) -> jax.ShapeDtypeStruct:
    if site.expanded:
        return _struct(site.num_rows, dtype=_FLOAT32)
    return _struct(site.num_rows, site.num_topk, dtype=_FLOAT32)


def _dispatch_forward(meta: _Meta, x: Any, topk_idx: Any, topk_weights: Any, token: Any) -> Any:
    """(rows, choices or None, weights or None), (words, source indices, table or None), token."""
    site, (ranks, local) = meta
    if site.quantize:
        codes = resolve_dtype(FORMATS[site.quantize])
        scales = num_scales(site.hidden, packed=False)
        results = [
            _struct(site.num_rows, site.hidden, dtype=codes),
            _struct(site.num_rows, scales, dtype=_FLOAT32),
        ]
    else:
        results = [_struct(site.num_rows, site.hidden, dtype=x.dtype)]
    number = len(results)
    if not site.expanded:
        results.append(_struct(site.capacity, site.num_topk, dtype=topk_idx.dtype))
    if site.weights:
        results.append(_weights_struct(site))
    results.append(_struct(num_words(site.num_tokens, ranks, local), dtype=_INT32))
    results.append(_struct(site.capacity, dtype=_INT32))
    if site.expanded:
        results.append(_struct(site.capacity, site.num_topk, dtype=_INT32))
    operands = [x, topk_idx, *([] if topk_weights is None else [topk_weights])]
    *made, token = _call(site, results, operands, token)
    rows, made = made[:number], made[number:]
    choices = None if site.expanded else made.pop(0)
    weights = made.pop(0) if site.weights else None
    words, sources, *table = made
    arrays = words, sources, (table[0] if table else None)
    return (rows[0] if number == 1 else tuple(rows), choices, weights), arrays, token


def _cached_forward(meta: _Meta, x: Any, arrays: Any, topk_weights: Any, token: Any) -> Any:
    """Rows, weights or None, token."""
    site = meta[0]
    results = [_struct(site.num_rows, site.hidden, dtype=x.dtype)]
    if site.weights:
        results.append(_weights_struct(site))
    operands = [x, *arrays, *([] if topk_weights is None else [topk_weights])]
    rows, *weights, token = _call(site, results, operands, token)
    return rows, (weights[0] if weights else None), token


def _combine_forward(
    meta: _Meta, y: Any, arrays: Any, topk_weights: Any, bias: Any, token: Any
) -> Any:
    """Sums, weights or None, token."""
    site = meta[0]
    results = [_struct(site.num_tokens, site.hidden, dtype=y.dtype)]
    if site.weights:
        results.append(_struct(site.num_tokens, site.num_topk, dtype=_FLOAT32))
    operands = [y, *arrays, *([] if topk_weights is None else [topk_weights]), *bias]
    sums, *weights, token = _call(site, results, operands, token)
    return sums, (weights[0] if weights else None), token


def _gradient_by_combine(meta: _Meta, kept: Any, rows: Any, weights: Any, token: Any) -> Any:
    """Gradients of a dispatch's rows and weights, and the token."""
    site, sizes = meta
    arrays, before = kept
    back = _backward(site, "combine", rows, weights)
    return _combine_forward((back, sizes), rows, arrays, weights, (), (before, token))


_dispatch = jax.custom_vjp(_dispatch_forward, nondiff_argnums=(0,))
_cached = jax.custom_vjp(_cached_forward, nondiff_argnums=(0,))
_combine = jax.custom_vjp(_combine_forward, nondiff_argnums=(0,))


def _dispatch_fwd(meta: _Meta, x: Any, topk_idx: Any, topk_weights: Any, token: Any) -> Any:
    out = _dispatch_forward(meta, x, topk_idx, topk_weights, token)
    _, (words, _, table), token = out
    return out, ((words,) if table is None else (words, table, topk_idx), token)


def _dispatch_bwd(meta: _Meta, kept: Any, cotangents: Any) -> Any:
    (rows, _, weights), _, token = cotangents
    d_x, d_weights, token = _gradient_by_combine(meta, kept, rows, weights, token)
    return d_x, None, d_weights, token


def _cached_fwd(meta: _Meta, x: Any, arrays: Any, topk_weights: Any, token: Any) -> Any:
    out = _cached_forward(meta, x, arrays, topk_weights, token)
    return out, (arrays, out[2])


def _cached_bwd(meta: _Meta, kept: Any, cotangents: Any) -> Any:
    d_x, d_weights, token = _gradient_by_combine(meta, kept, *cotangents)
    return d_x, (None,) * len(kept[0]), d_weights, token


def _combine_fwd(meta: _Meta, y: Any, arrays: Any, topk_weights: Any, bias: Any, token: Any) -> Any:
    out = _combine_forward(meta, y, arrays, topk_weights, bias, token)
    return out, (arrays, out[2])


def _combine_bwd(meta: _Meta, kept: Any, cotangents: Any) -> Any:
    site, sizes = meta
    arrays, before = kept
    sums, weights, token = cotangents
    back = _backward(site, "cached", sums, weights)
    d_y, d_weights, token = _cached_forward((back, sizes), sums, arrays, weights, (before, token))
    return d_y, (None,) * len(arrays), d_weights, (sums,) * site.num_biases, token


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)
_cached.defvjp(_cached_fwd, _cached_bwd)
_combine.defvjp(_combine_fwd, _combine_bwd)
