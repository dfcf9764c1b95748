"""One case on a Buffer: the calls, as users write them, and the comparison of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from deepep_cupy.testing import compare
from deepep_cupy.testing.cases import Case
from deepep_cupy.testing.data import RankExpected

if TYPE_CHECKING:
    from deepep_cupy.api.buffer import Buffer

__all__ = ["MODES", "RoundTrip", "buffer_arguments", "modes_needed"]

MODES: dict[str, Callable[[Case], bool]] = {
    "scales": lambda case: case.fp8 in ("scales", "packed"),
    "quantize": lambda case: case.quantized,
    "no_wait": lambda case: case.wait != "host",
    "expand": lambda case: case.expand,
    "stats": lambda case: case.stats,
    "out": lambda case: case.out and case.addable,
    "events": lambda case: case.background,
    "low_latency": lambda case: bool(case.low_latency),
}
"""Mode of an engine → whether a case needs it."""


def modes_needed(case: Case) -> set[str]:
    """Modes that an engine must have for this case."""
    return {mode for mode, needs in MODES.items() if needs(case)}


def buffer_arguments(case: Case) -> dict[str, Any]:
    """Sizes of a Buffer for this case; rows are counted in bytes."""
    sizes = {
        "num_max_tokens_per_rank": case.num_max_tokens,
        "hidden": case.row_bytes,
        "num_topk": case.num_topk,
        "num_experts": case.num_experts,
        "dtype": "uint8",
    }
    if case.low_latency:
        sizes["low_latency_tokens"] = case.num_max_tokens
    return sizes


class RoundTrip:
    """The calls of one case on one rank, with the engine's arrays.

    Args:
        buffer: To call.
        case: What to do.
        part: This rank's arrays and answers.
        up: Makes an array of the engine from a NumPy one, with the same order of its items.
    """

    def __init__(
        self,
        buffer: Buffer,
        case: Case,
        part: RankExpected,
        up: Callable[[Any], Any] = lambda array: array,
    ) -> None:
        self._buffer = buffer
        self._case = case
        self._part = part
        inputs = part.inputs

        def put(array: Any) -> Any:
            return None if array is None else up(array)

        x = put(inputs.x)
        self._x = (x, put(inputs.scales)) if inputs.scales is not None else x
        self._first_x = put(inputs.first_x)
        self._topk_idx, self._mask = put(inputs.topk_idx), put(inputs.mask)
        self._weights = put(inputs.topk_weights)
        self._biases = tuple(up(bias) for bias in inputs.biases)
        self._stats = put(None if inputs.stats is None else inputs.stats.copy())
        self._first: Any = None
        self._y = self._y_weights = self._row_weights = None
        self._outs: list[Any] = []
        if part.rows is not None:
            rows = part.rows
            self._y, self._y_weights = put(rows.y), put(rows.topk_weights)
            self._row_weights = put(rows.row_weights)
            if case.out:
                shape = (case.num_tokens[buffer.rank], case.hidden)
                full = np.full(shape, 0xFF, np.uint8).repeat(case.sum_dtype.itemsize, axis=1)
                self._outs = [up(full.view(case.sum_dtype)) for _ in range(2)]

    def dispatch(self) -> Any:
        """Make the case's dispatch; in a cached case first the one that gives the handle."""
        case, buffer = self._case, self._buffer
        if case.by_expert:
            return self._dispatch_by_expert()
        fresh: dict[str, Any] = {"expert_alignment": case.expert_alignment}
        if case.from_topk:
            fresh["topk_idx"] = self._topk_idx
        else:
            fresh["is_token_in_rank"] = self._mask
        if case.expand:
            fresh["do_expand"] = True
        most = buffer.num_ranks * buffer.num_max_tokens_per_rank
        if case.low_latency:
            fresh["low_latency"] = True
            most = buffer.num_ranks * buffer.low_latency_tokens
        if case.wait == "worst" and self._part.worst == most:
            fresh["do_cpu_sync"] = False
        elif case.wait != "host":  # on a Buffer for more tokens, "worst" is the case's worst
            fresh["num_worst_tokens"] = self._part.worst
        rows: dict[str, Any] = {"topk_weights": self._weights, "do_zero_padding": case.zero_padding}
        if case.fp8:
            rows["scales_layout"] = case.scales_layout
        if case.quantized:
            rows |= {
                "quantize": "fp8_e4m3",
                "round_scale": case.fp8 in ("round", "ue8m0"),
                "use_ue8m0": case.fp8 == "ue8m0",
            }
        if not case.cached:
            if case.stats:
                rows["cumulative_local_expert_recv_stats"] = self._stats
            return self._finish(buffer.dispatch(self._x, **fresh, **rows, **self._streams()))
        self._first = buffer.dispatch(self._first_x, **fresh)
        handle = self._first.handle
        return self._finish(buffer.dispatch(self._x, handle=handle, **rows, **self._streams()))

    def _dispatch_by_expert(self) -> Any:
        case = self._case
        got = self._buffer.low_latency_dispatch(
            self._x,
            self._topk_idx,
            case.num_max_tokens,
            case.num_experts or 0,
            self._stats,
            use_fp8=case.quantized,
            round_scale=case.fp8 in ("round", "ue8m0"),
            use_ue8m0=case.fp8 == "ue8m0",
            topk_weights=self._weights,
            return_recv_hook=case.low_latency == "hook",
            **self._streams(),
        )
        return self._finish(got)

    def combine(self, handle: Any) -> list[Any]:
        """Combine rows in ordinary memory and, on GPUs, the same rows in the Buffer's own."""
        case = self._case
        y: Any = self._y
        places = [y]
        if self._buffer.engine_name != "host":
            places.append(self._buffer.empty(y.shape, y.dtype))
            places[1][...] = y
        options: dict[str, Any] = {"topk_weights": self._y_weights, "bias": self._biases}
        if case.expand:
            options["row_weights"] = self._row_weights
        if case.expand or case.reduce == "per_node":
            options["reduce"] = case.reduce
        if case.by_expert:
            given = self._topk_idx, self._y_weights, handle
            options = {"reduce": case.reduce, "return_recv_hook": case.low_latency == "hook"}
        results = []
        for number, rows in enumerate(places):
            if case.out:
                options["out"] = self._outs[number]
            options |= self._streams()
            if case.by_expert:
                got: Any = self._buffer.low_latency_combine(rows, *given, **options)
            else:
                got = self._buffer.combine(rows, handle, **options)
            results.append(self._finish(got))
        return results

    def _streams(self) -> dict[str, Any]:
        if not self._case.background:
            return {}
        return {"previous_event": self._buffer.capture(), "async_finish": True}

    def _finish(self, got: Any) -> Any:
        if self._case.low_latency == "hook":
            got.hook()
        got.event.current_stream_wait()
        return got

    def compare_dispatch(self, got: Any) -> None:
        """Raise ``AssertionError`` where a dispatch differs from the reference."""
        rank = self._buffer.rank
        if self._case.by_expert:
            compare.assert_low_latency_equal(got, self._part.dispatched, rank=rank)
            if self._case.stats:
                compare.assert_same_bits("statistics", self._stats, self._part.stats, rank=rank)
            return
        if self._part.first is not None:
            compare.assert_dispatch_equal(self._first, self._part.first, rank=rank)
            if got.handle is not self._first.handle:
                raise AssertionError("a cached call returned another handle than it was given")
        compare.assert_dispatch_equal(self._as_given(got), self._part.dispatched, rank=rank)
        if self._case.stats:
            compare.assert_same_bits("statistics", self._stats, self._part.stats, rank=rank)

    def compare_combine(self, got: list[Any]) -> None:
        """Raise ``AssertionError`` where a combine differs from the reference."""
        for number, each in enumerate(got):
            want: Any = self._part.combined
            if self._case.by_expert:
                rows = each.combined_x
                compare.assert_equal_or_nan("combined_x", rows, want, rank=self._buffer.rank)
            else:
                compare.assert_combine_equal(each, want, rank=self._buffer.rank)
            if self._case.out and each.combined_x is not self._outs[number]:
                raise AssertionError("combine returned another array than out")

    def _as_given(self, got: Any) -> Any:
        """View received bytes in the dtype of the case: CuPy has no opaque items."""
        if self._case.fp8:
            return got
        rows = compare.to_host(got.recv_x)
        return got._replace(recv_x=rows.view(self._case.row_dtype))
