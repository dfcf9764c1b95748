"""What a bench measures on: ranks, a Buffer, rows, and every way to call it.

Calls are checked before and after they are timed: their rows name where they come from, see
``bench.rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np

from deepep_cupy import Buffer
from deepep_cupy.bench.modes import Mode
from deepep_cupy.bench.routing import choose
from deepep_cupy.bench.rows import (
    WrongResultError,
    copies_of,
    fill,
    pattern,
    sources,
    wrong_rows,
    wrong_sums,
)
from deepep_cupy.bench.traffic import Traffic, choices_per_rank, row_bytes, rows_per_rank
from deepep_cupy.protocol.control_block import align
from deepep_cupy.reference.quant import num_groups, quantize

__all__ = ["Bench", "Ranks", "Shape", "Workload", "graph_calls"]

_SALT, _SCALE_SALT, _BYTE_SALT, _BIAS_SALT = 7, 8, 9, 10
_CAST_SAMPLE = 16
"""Received rows whose cast is compared with the reference."""
_ROOM = 64 << 20
_FEW = 256


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and routing, alike on all ranks.

    Attributes:
        num_tokens: T of each rank, the most there are.
        hidden: H.
        num_topk: K.
        num_experts: E, rounded up to a multiple of the ranks.
        dtype: Name of the row dtype.
        routing: Which experts tokens choose: one of ``bench.routing.ROUTINGS``.
        exponent: Of Zipf's law, for ``zipf``.
        num_hot: Experts that are ever chosen, for ``k-hot``; None: K.
        seed: Of choices and weights.
        choices: ``[R, T, K]`` experts of a file, in place of ``routing``.
    """

    num_tokens: int = 4096
    hidden: int = 7168
    num_topk: int = 8
    num_experts: int = 256
    dtype: str = "bfloat16"
    routing: str = "uniform"
    exponent: float = 1.0
    num_hot: int | None = None
    seed: int = 0
    choices: Any = field(default=None, compare=False, repr=False)

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of the rows."""
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    def row_bytes(self, mode: Mode | None = None) -> int:
        """Bytes of a row on the wire."""
        return row_bytes(
            self.hidden, self.row_dtype.itemsize, fp8=mode is not None and mode.one_byte
        )

    def experts_of(self, num_ranks: int) -> int:
        """E for that many ranks."""
        return align(self.num_experts, num_ranks)


class Ranks:
    """The ranks of a bench, and where their arrays live: known once a Buffer has been built.

    Args:
        comm: mpi4py communicator.
        engine: ``"auto"``, ``"cuda"`` or ``"host"``; after ``settle`` the one that was chosen.

    Attributes:
        gpu: True on the cuda engine.
        xp: CuPy, or NumPy.
        device: This rank's GPU.
        gpus: For each rank, which GPU it is on; on the host engine each is on its own.
        num_sms: SMs of this rank's GPU; 0 without one.
    """

    def __init__(self, comm: Any, engine: str = "auto") -> None:
        self.comm, self.engine = comm, engine
        self.rank, self.size = int(comm.rank), int(comm.size)
        self.gpu = False
        self.xp: Any = np
        self.device: int | None = None
        self.num_sms = 0
        self.gpus: tuple[str, ...] = tuple(f"rank {rank}" for rank in range(self.size))
        self._settled = False

    def settle(self, buffer: Buffer) -> None:
        """Collective. Take over what the first Buffer has chosen."""
        if self._settled:
            return
        self._settled = True
        self.engine, self.device = buffer.engine_name, buffer.device
        if self.device is not None:
            import cupy

            from deepep_cupy.memory.cuda_ipc import device_uuid

            self.gpu, self.xp = True, cupy
            cupy.cuda.Device(self.device).use()
            found = cupy.cuda.runtime.getDeviceProperties(self.device)
            self.num_sms = int(found["multiProcessorCount"])
            self.gpus = tuple(self.comm.allgather(device_uuid(self.device)))

    def up(self, array: Any) -> Any:
        """A NumPy array where the engine wants it."""
        return self.xp.asarray(array) if self.gpu else array

    def down(self, array: Any) -> Any:
        """An array of the engine as a NumPy array."""
        return array.get() if hasattr(array, "get") else array

    def rows(self, count: int, nbytes: int, dtype: Any) -> Any:
        """Uninitialised rows in ordinary memory; by bytes, since CuPy makes no FP8."""
        return self.xp.empty((count, nbytes), np.uint8).view(dtype)

    def synchronize(self) -> None:
        """Wait for the current stream."""
        if self.gpu:
            self.xp.cuda.get_current_stream().synchronize()

    def most(self, value: float) -> float:
        """Collective. The greatest value of all ranks."""
        return float(max(self.comm.allgather(value)))

    def agree_on_zero(self, what: str, wrong: int) -> None:
        """Collective. Do nothing where every rank counted 0 wrong rows.

        Raises:
            WrongResultError: On every rank, where one counted more.
        """
        every = self.comm.allgather(wrong)
        if any(every):
            raise WrongResultError(f"bench: {what}: {every} rows are wrong on the ranks.")


class Bench:
    """A Buffer for one number of SMs. The constructor is collective; a context manager.

    Args:
        ranks: The ranks.
        shape: Sizes.
        num_sms: As the Buffer's argument.
        modes: What will be measured on it, each once and with one graph: sizes the pool.
        timeout_s: As the Buffer's argument.
    """

    def __init__(
        self,
        ranks: Ranks,
        shape: Shape,
        *,
        num_sms: int | None = None,
        modes: Iterable[Mode] = (),
        timeout_s: float = 60.0,
    ) -> None:
        self.ranks, self.shape = ranks, shape
        self.num_experts = shape.experts_of(ranks.size)
        tokens = max(1, shape.num_tokens)
        sizes: dict[str, Any] = {
            "num_max_tokens_per_rank": tokens,
            "hidden": shape.hidden,
            "dtype": shape.row_dtype,
            "num_topk": shape.num_topk,
            "num_experts": self.num_experts,
        }
        # Beside what a Buffer takes for itself: received rows that stay, boxes of the ceilings,
        # expanded rows, and for every graph what its calls write.
        worst = ranks.size * tokens * (shape.row_bytes() + 12 * shape.num_topk + 8)
        copies = max(1, min(shape.num_topk, self.num_experts // ranks.size))
        modes = tuple(modes)
        parts = 5 + 2 * copies * any(mode.expanded for mode in modes)
        parts += sum(
            kept_rows(mode, tokens, copies, ranks.size) for mode in modes if mode.capturable
        )
        pool = Buffer.size_hint(num_ranks=ranks.size, **sizes) + parts * worst + _ROOM
        self.buffer = Buffer(
            ranks.comm,
            num_sms=num_sms,
            engine=ranks.engine,
            pool_bytes=pool,
            timeout_s=timeout_s,
            **sizes,
        )
        ranks.settle(self.buffer)
        self.engine_modes = self.buffer.modes
        self.num_sms = int(self.runtime.grids.most) if ranks.gpu else None

    @property
    def runtime(self) -> Any:
        """What a cuda engine works with. A bench reads ``grids.most``, the SMs of an operation,
        and ``memory.region``, the symmetric memory; no public name gives them."""
        engine: Any = self.buffer._engine
        return engine._runtime

    def __enter__(self) -> Self:
        self.buffer.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.buffer.__exit__(kind, error, traceback)
        if self.ranks.gpu:  # what graphs have used belongs to streams that are gone
            self.ranks.xp.get_default_memory_pool().free_all_blocks()


def graph_calls(mode: Mode, num_tokens: int) -> int:
    """Calls in the graph of a mode: a graph keeps what its combines and its dispatches to the
    expanded layout return, and the rows between dispatch and combine."""
    if num_tokens <= _FEW or (mode.operation == "dispatch" and not mode.expanded):
        return 20
    return 2 if mode.operation == "dispatch" else 5


def kept_rows(mode: Mode, num_tokens: int, copies: int, num_ranks: int) -> int:
    """What the graph of a mode keeps in the pool, in received rows at their worst: those of R T
    tokens."""
    calls = graph_calls(mode, num_tokens)
    if mode.operation == "roundtrip":
        return calls
    if mode.operation == "dispatch":
        return 1 + calls * copies * mode.expanded
    staged = copies if mode.expanded and mode.base == "outside" else 1
    return -(-calls // num_ranks) + staged + mode.expanded  # results, staged rows, sums of copies


class Workload:
    """Arrays for one number of tokens, a handle, and the calls. The constructor is collective.

    Args:
        bench: The Buffer.
        num_tokens: Tokens of this rank.

    Attributes:
        most_tokens: T of the rank that has most.
        traffic: Rows from rank to rank in a dispatch.
        choices: Rows from rank to rank in a dispatch to the expanded layout.
        handle: Of a dispatch in the plain layout.
        inside: Rows for combine in the Buffer's own memory.
        sources: (rank, token) of each of these rows.
    """

    def __init__(self, bench: Bench, num_tokens: int) -> None:
        self.bench, self.ranks, self.num_tokens = bench, bench.ranks, num_tokens
        ranks, shape = bench.ranks, bench.shape
        self.most_tokens = int(ranks.most(num_tokens))
        rng = np.random.default_rng([shape.seed, ranks.rank])
        if shape.choices is not None:
            choice = np.ascontiguousarray(shape.choices[ranks.rank, :num_tokens])
        else:
            choice = choose(
                shape.routing,
                num_tokens,
                shape.num_topk,
                bench.num_experts,
                rng,
                exponent=shape.exponent,
                num_hot=shape.num_hot,
            )
        self.traffic = self._traffic(rows_per_rank(choice, bench.num_experts, ranks.size))
        self.choices = self._traffic(choices_per_rank(choice, bench.num_experts, ranks.size))
        self.topk_idx = ranks.up(choice)
        self.weights = ranks.up(rng.random((num_tokens, shape.num_topk), np.float32))
        self.x = ranks.rows(num_tokens, shape.row_bytes(), shape.row_dtype)
        fill(ranks.xp, self.x, ranks.rank, _SALT)
        self._received = got = self._dispatch()
        self.handle = got.handle
        self.inside = got.recv_x
        self.sources = sources(ranks.xp, self.handle)
        self._outside: Any = None
        self._fp8: Any = None
        self._expanded: Any = None
        self._bias: Any = None
        self.check_rows("dispatch", self.inside)

    def _traffic(self, mine: list[int]) -> Traffic:
        return Traffic.of(self.ranks.comm.allgather(mine), self.ranks.gpus)

    # ------------------------------------------------------------------------------- arrays

    @property
    def outside(self) -> Any:
        """Rows for combine in ordinary memory."""
        if self._outside is None:
            shape = self.bench.shape
            self._outside = self.ranks.rows(len(self.inside), shape.row_bytes(), shape.row_dtype)
            self._outside.view(np.uint8)[...] = self.inside.view(np.uint8)
        return self._outside

    @property
    def fp8(self) -> Any:
        """FP8 rows and their scales, both filled with bytes that say where they come from."""
        if self._fp8 is None:
            ranks, hidden = self.ranks, self.bench.shape.hidden
            rows = ranks.rows(self.num_tokens, hidden, np.uint8)
            scales = ranks.rows(self.num_tokens, 4 * num_groups(hidden), np.float32)
            fill(ranks.xp, rows, ranks.rank, _BYTE_SALT)
            fill(ranks.xp, scales, ranks.rank, _SCALE_SALT)
            self._fp8 = rows.view(np.dtype(ml_dtypes.float8_e4m3fn)), scales
        return self._fp8

    @property
    def expanded(self) -> Any:
        """Result of a dispatch to the expanded layout. Collective the first time."""
        if self._expanded is None:
            self._expanded = self._dispatch(do_expand=True)
        return self._expanded

    @property
    def bias(self) -> Any:
        """A bias, filled with bytes that say whose it is."""
        if self._bias is None:
            ranks, shape = self.ranks, self.bench.shape
            self._bias = ranks.rows(self.num_tokens, shape.row_bytes(), shape.row_dtype)
            fill(ranks.xp, self._bias, ranks.rank, _BIAS_SALT)
        return self._bias

    # -------------------------------------------------------------------------------- calls

    def _dispatch(self, **options: Any) -> Any:
        return self.bench.buffer.dispatch(
            self.x, topk_idx=self.topk_idx, topk_weights=self.weights, **options
        )

    def prepare(self, mode: Mode) -> Callable[[], Any]:
        """Make all arrays of a mode and the function that calls it. Collective."""
        make = {
            "dispatch": self._dispatch_call,
            "combine": self._combine_call,
            "roundtrip": self._roundtrip_call,
        }[mode.operation]
        return make(mode)

    def _dispatch_call(self, mode: Mode) -> Callable[[], Any]:
        buffer, expand = self.bench.buffer, "expand" in mode.features
        x = self.fp8 if "fp8" in mode.features else self.x
        options: dict[str, Any] = {}
        if mode.base == "cached":
            options["handle"] = self.expanded.handle if expand else self.handle
        else:
            options |= {"topk_idx": self.topk_idx, "topk_weights": self.weights}
            if mode.base == "no_wait":
                options["num_worst_tokens"] = self.ranks.size * max(1, self.most_tokens)
            if expand:
                options["do_expand"] = True
        if "cast" in mode.features:
            options["quantize"] = "fp8_e4m3"
        return lambda: buffer.dispatch(x, **options)

    def _combine_call(self, mode: Mode) -> Callable[[], Any]:
        buffer = self.bench.buffer
        got = self.expanded if mode.expanded else self._received
        rows, handle = got.recv_x, got.handle
        if mode.base == "outside" and not mode.expanded:
            rows = self.outside
        elif mode.base == "outside":
            shape = self.bench.shape
            rows = self.ranks.rows(len(rows), shape.row_bytes(), shape.row_dtype)
            rows.view(np.uint8)[...] = got.recv_x.view(np.uint8)
        options: dict[str, Any] = {}
        if "weights" in mode.features:
            options["topk_weights"] = got.recv_topk_weights
        if "bias" in mode.features:
            options["bias"] = self.bias
        if "per_rank" in mode.features:
            options["reduce"] = "per_rank"
        return lambda: buffer.combine(rows, handle, **options)

    def _roundtrip_call(self, mode: Mode) -> Callable[[], Any]:
        there = self._dispatch_call(mode)
        back = self.bench.buffer.combine

        def call() -> Any:
            got = there()
            return back(got.recv_x, got.handle)

        return call

    # ------------------------------------------------------------------------------- checks

    def check(self, mode: Mode, result: Any) -> None:
        """Compare the result of a mode's call with what must have come. Collective.

        Sums of ``per_rank`` are not checked: they are rounded in between.

        Raises:
            WrongResultError: On every rank.
        """
        what = f"{mode.operation} {mode.name}"
        if mode.operation == "dispatch":
            self._check_dispatch(what, mode, result)
        elif "per_rank" not in mode.features:
            copies = (self.topk_idx >= 0).sum(axis=1) if mode.expanded else None
            bias_salt = _BIAS_SALT if "bias" in mode.features else None
            self.check_sums(what, result.combined_x, copies, bias_salt)
        if "weights" in mode.features:
            want = self.weights * (self.topk_idx >= 0)
            wrong = int((result.combined_topk_weights != want).any(axis=1).sum())
            self.ranks.agree_on_zero(f"{what}: weights", wrong)
        self.ranks.synchronize()
        self.bench.buffer.check()

    def check_rows(self, what: str, rows: Any) -> None:
        """Compare received rows of ``x``, in the order of a dispatch. Collective."""
        wrong = wrong_rows(self.ranks.xp, rows, *self.sources, _SALT)
        self.ranks.agree_on_zero(what, wrong)

    def check_sums(
        self, what: str, sums: Any, copies: Any = None, bias_salt: int | None = None
    ) -> None:
        """Compare combined rows of ``x``. Collective."""
        copies = copies_of(self.handle) if copies is None else copies
        wrong = wrong_sums(self.ranks.xp, sums, self.ranks.rank, _SALT, copies, bias_salt)
        self.ranks.agree_on_zero(what, wrong)

    def _check_dispatch(self, what: str, mode: Mode, got: Any) -> None:
        ranks, tokens = self.sources
        rows, scales = got.recv_x if mode.one_byte else (got.recv_x, None)
        if mode.expanded:
            place = got.handle.expanded_row[: len(ranks)]
            number, column = self.ranks.xp.nonzero(place >= 0)
            at, ranks, tokens = place[number, column], ranks[number], tokens[number]
        else:
            at = self.ranks.xp.arange(len(ranks))
        if mode.base != "no_wait" and len(rows) != len(at):
            wrong = max(1, abs(len(rows) - len(at)))
        elif "cast" in mode.features:
            wrong = self._wrong_casts(rows, scales, at, ranks, tokens)
        else:
            xp, salt = self.ranks.xp, _BYTE_SALT if mode.one_byte else _SALT
            wrong = wrong_rows(xp, rows, ranks, tokens, salt, at)
            if scales is not None:
                wrong += wrong_rows(xp, scales, ranks, tokens, _SCALE_SALT, at)
        self.ranks.agree_on_zero(what, wrong)

    def _wrong_casts(self, rows: Any, scales: Any, at: Any, ranks: Any, tokens: Any) -> int:
        """How many of a few rows differ from the reference's cast."""
        if not len(at):
            return 0
        down, shape = self.ranks.down, self.bench.shape
        sample = np.unique(np.linspace(0, len(at) - 1, _CAST_SAMPLE).astype(np.int64))
        at, ranks, tokens = (down(each)[sample] for each in (at, ranks, tokens))
        words = pattern(np, ranks, tokens, shape.row_bytes() // 4, _SALT)
        codes, inverse = quantize(words.view(shape.row_dtype))
        where = self.ranks.up(at)
        got_codes = down(rows.view(np.uint8)[where])
        got_scales = down(scales[where])
        wrong = (got_codes != codes.view(np.uint8)).any(axis=1)
        wrong |= (got_scales.view(np.uint32) != inverse.view(np.uint32)).any(axis=1)
        return int(wrong.sum())
