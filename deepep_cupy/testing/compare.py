"""Bit by bit comparison with the reference's results, and errors that show where they differ.

Arrays may be NumPy's, or have a ``get()`` that returns one (CuPy's). Failures raise
``AssertionError``; nothing here is skipped by ``python -O``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "assert_combine_equal",
    "assert_dispatch_equal",
    "assert_equal_or_nan",
    "assert_handle_equal",
    "assert_low_latency_equal",
    "assert_same_bits",
    "to_host",
]

Array: TypeAlias = npt.NDArray[Any]

_SHOWN = 5
"""Mismatches listed in an error."""


class _Dispatched(Protocol):
    """The fields of a dispatch result, ours and the reference's, that are compared."""

    @property
    def recv_x(self) -> Any: ...
    @property
    def recv_topk_idx(self) -> Any: ...
    @property
    def recv_topk_weights(self) -> Any: ...
    @property
    def num_recv_tokens_per_expert_list(self) -> Sequence[int]: ...
    @property
    def handle(self) -> Any: ...


class _Combined(Protocol):
    @property
    def combined_x(self) -> Any: ...
    @property
    def combined_topk_weights(self) -> Any: ...


def to_host(array: Any) -> Array:
    """Return a NumPy array: ``array`` itself, or a copy made by its ``get()``."""
    host = array.get() if hasattr(array, "get") else array
    if isinstance(host, np.ndarray):
        return host
    raise AssertionError(f"wanted an array, got {type(array).__name__}")


def assert_same_bits(name: str, got: Any, want: Any, *, rank: int | None = None) -> None:
    """Check dtype, shape and every bit; ``None`` equals only ``None``.

    Args:
        name: What is compared, for the message.
        got: The array under test.
        want: The right one.
        rank: Whose it is, for the message.

    Raises:
        AssertionError: They differ; the sentence counts and shows the first differences.
    """
    _compare(name, got, want, rank, any_nan=False)


def assert_equal_or_nan(name: str, got: Any, want: Any, *, rank: int | None = None) -> None:
    """Check as ``assert_same_bits`` does, but let any NaN equal any NaN: for sums."""
    _compare(name, got, want, rank, any_nan=True)


def assert_dispatch_equal(got: _Dispatched, want: _Dispatched, *, rank: int | None = None) -> None:
    """Check every field of a dispatch result and of its handle, bit by bit.

    Rows that the contract leaves undefined (``want.defined`` is False) are not compared.
    """
    defined = getattr(want, "defined", None)
    for name, value, right in _parts(got.recv_x, want.recv_x):
        _compare_defined(name, value, right, defined, rank)
    assert_same_bits("recv_topk_idx", got.recv_topk_idx, want.recv_topk_idx, rank=rank)
    expanded = getattr(want.handle, "expanded_row", None) is not None
    name, weights, right = "recv_topk_weights", got.recv_topk_weights, want.recv_topk_weights
    _compare_defined(name, weights, right, defined if expanded else None, rank)
    name = "num_recv_tokens_per_expert_list"
    _assert_same(name, list(getattr(got, name)), list(getattr(want, name)), rank)
    assert_handle_equal(got.handle, want.handle, rank=rank)


def assert_handle_equal(got: Any, want: Any, *, rank: int | None = None) -> None:
    """Check every field of a handle. Counts on the device are needed only in some modes; an
    engine may leave them out elsewhere."""
    for name in ("num_tokens", "num_recv_tokens", "num_rows", "num_expanded_tokens"):
        value, right = int(getattr(got, name)), int(getattr(want, name))
        _assert_same(f"handle.{name}", value, right, rank)
    for name in ("recv_src_idx", "recv_rows_per_rank", "send_row", "expanded_row"):
        assert_same_bits(f"handle.{name}", getattr(got, name), getattr(want, name), rank=rank)
    needed = want.expanded_row is not None or not want.counts_known
    for name in (
        "psum_num_recv_tokens_per_scaleup_rank",
        "num_unaligned_recv_tokens_per_expert",
        "psum_num_recv_tokens_per_expert",
    ):
        value = getattr(got, name)
        if needed or value is not None:
            assert_same_bits(f"handle.{name}", value, getattr(want, name), rank=rank)


def assert_low_latency_equal(got: Any, want: Any, *, rank: int | None = None) -> None:
    """Check every field of a ``low_latency_dispatch`` and of its handle (``want``: a
    ``reference.LowLatencyResult``). Rows that are not ``want.defined`` are not compared."""
    count, real = want.recv_count, want.defined
    assert_same_bits("recv_count", got.recv_count, count, rank=rank)
    found: list[Any] = [got.recv_x, want.recv_x]
    for number, value in enumerate(found):
        found[number] = value if isinstance(value, tuple) else (value,)
    _assert_same("parts of recv_x", len(found[0]), len(found[1]), rank)
    for name, value, right in zip(("recv_x", "scales"), *found, strict=False):
        if name == "scales":
            order = value.transpose(0, 2, 1).flags.c_contiguous
            _assert_same("memory of scales is [El, S, rows]", bool(order), True, rank)
        _compare_real(name, value, right, real, rank)
    handle = got.handle
    ranges = handle.recv_layout_range
    assert_same_bits("recv_layout_range", ranges, want.recv_layout_range, rank=rank)
    _compare_real("recv_src_info", handle.recv_src_info, want.recv_src_info, real, rank)
    weights = handle.recv_weights
    if weights is not None:
        weights = weights.reshape(real.shape)
    _compare_real("recv_weights", weights, want.weights, real, rank)


def _compare_real(name: str, got: Any, want: Any, real: Any, rank: int | None) -> None:
    """Compare the shapes, and what is real."""
    if got is None or want is None:
        assert_same_bits(name, got, want, rank=rank)
        return
    got = to_host(got)
    _assert_same(f"shape of {name}", got.shape, want.shape, rank)
    assert_same_bits(name, got[real], want[real], rank=rank)


def _parts(got: Any, want: Any) -> list[tuple[str, Any, Any]]:
    """Rows, and scales where they travel."""
    if not isinstance(want, tuple) and not isinstance(got, tuple):
        return [("recv_x", got, want)]
    if not (isinstance(want, tuple) and isinstance(got, tuple)) or len(got) != len(want):
        kinds = ["a pair" if isinstance(value, tuple) else "an array" for value in (got, want)]
        raise AssertionError(f"recv_x: got {kinds[0]}, wanted {kinds[1]}")
    _compare_order(got[1], want[1])
    return [("recv_x", got[0], want[0]), ("scales", got[1], want[1])]


def _compare_order(got: Any, want: Any) -> None:
    for flag in ("c_contiguous", "f_contiguous"):
        if getattr(want.flags, flag) and not getattr(got.flags, flag):
            raise AssertionError(f"scales: wanted {flag}, got strides {got.strides}")


def _compare_defined(name: str, got: Any, want: Any, defined: Any, rank: int | None) -> None:
    """Compare the shapes, and of the rows those that are defined."""
    if want is None or got is None or defined is None or defined.all():
        assert_same_bits(name, got, want, rank=rank)
        return
    got, want = to_host(got), to_host(want)
    if got.shape != want.shape:
        raise AssertionError(f"{_title(name, rank)}: got {got.shape}, wanted {want.shape}")
    blank = np.ascontiguousarray(got).copy()
    flat = blank.view(np.uint8).reshape(len(blank), -1)
    flat[~defined] = np.ascontiguousarray(want).view(np.uint8).reshape(len(blank), -1)[~defined]
    assert_same_bits(name, blank, want, rank=rank)


def assert_combine_equal(got: _Combined, want: _Combined, *, rank: int | None = None) -> None:
    """Check rows and weights of a combine result bit by bit; any NaN equals any NaN."""
    for name in ("combined_x", "combined_topk_weights"):
        assert_equal_or_nan(name, getattr(got, name), getattr(want, name), rank=rank)


def _assert_same(name: str, got: object, want: object, rank: int | None) -> None:
    if got != want:
        raise AssertionError(f"{_title(name, rank)}: got {got}, wanted {want}")


def _title(name: str, rank: int | None) -> str:
    return name if rank is None else f"{name} on rank {rank}"


def _compare(name: str, got: Any, want: Any, rank: int | None, *, any_nan: bool) -> None:
    title = _title(name, rank)
    if got is None or want is None:
        if got is not want:
            kinds = ["None" if value is None else "an array" for value in (got, want)]
            raise AssertionError(f"{title}: got {kinds[0]}, wanted {kinds[1]}")
        return
    got, want = to_host(got), to_host(want)
    if got.dtype != want.dtype or got.shape != want.shape:
        raise AssertionError(
            f"{title}: got {got.dtype} {got.shape}, wanted {want.dtype} {want.shape}"
        )
    got_bytes, want_bytes = _as_bytes(got), _as_bytes(want)
    if np.array_equal(got_bytes, want_bytes):
        return
    differs = (got_bytes != want_bytes).any(axis=1)
    got_nan, want_nan = _nan(got), _nan(want)
    if any_nan:
        differs &= ~(got_nan & want_nan)
    if differs.any():
        nan = (int(got_nan.sum()), int(want_nan.sum()))
        raise AssertionError(_describe(title, got, want, np.flatnonzero(differs), nan))


def _as_bytes(array: Array) -> Array:
    """``[size, itemsize]`` uint8."""
    shape = (array.size, array.dtype.itemsize)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(shape)


def _is_float(dtype: np.dtype[Any]) -> bool:
    """Whether NumPy or ml_dtypes gives its elements a value that may be NaN."""
    return dtype.kind in "fc" or (dtype.kind == "V" and dtype.name.startswith(("bfloat", "float")))


def _nan(array: Array) -> Array:
    """Which elements are NaN, flat; none in a dtype that has no NaN."""
    if _is_float(array.dtype):
        with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN like any other here
            flat: Array = np.isnan(array.reshape(-1))
        return flat
    return np.zeros(array.size, np.bool_)


def _describe(title: str, got: Array, want: Array, bad: Array, nan: tuple[int, int]) -> str:
    lines = [
        f"{title}: {len(bad)} of {got.size} elements differ ({got.dtype} {got.shape}; "
        f"NaN: got {nan[0]}, wanted {nan[1]})"
    ]
    got_flat, want_flat = got.reshape(-1), want.reshape(-1)
    for index in bad[:_SHOWN]:
        place = np.unravel_index(int(index), got.shape)
        if got.ndim == 2:
            where = f"row {place[0]}, column {place[1]}"
        else:
            where = "element " + ", ".join(str(int(i)) for i in place)
        lines.append(f"  {where}: got {_show(got_flat, index)}, wanted {_show(want_flat, index)}")
    if len(bad) > _SHOWN:
        rows = np.unique(bad // got.shape[-1])
        lines.append(f"  … in {len(rows)} rows, {rows[0]} to {rows[-1]}")
    return "\n".join(lines)


def _show(flat: Array, index: int) -> str:
    """An element's bits as a number, most significant digit first, and its value if it has one."""
    item = flat[index : index + 1]
    bits = "0x" + item.tobytes()[::-1].hex()
    has_value = _is_float(item.dtype) or item.dtype.kind in "iub"
    return f"{bits} ({item[0]})" if has_value else bits
