"""What the GPU workers share: the start, arrays, trips with right answers, graphs, the last line.

A worker is an ordinary script: ``mpirun -n 2 python tests/gpu/worker_NAME.py``, with the checkout
on ``PYTHONPATH`` or the package installed. Rank r uses GPU r modulo the visible ones. Every worker
takes ``--engine host`` too: what needs no GPU then runs on NumPy arrays, which is how the scripts
themselves are tried out where there is none.

Its last line is ``NAME: ok, figures``; it ends with another exit code than 0 when something is
wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepep_cupy import Buffer
from deepep_cupy.errors import DeepEPCupyError
from deepep_cupy.testing.compare import assert_combine_equal, assert_dispatch_equal
from deepep_cupy.testing.data import Case, expected

LIMIT_VARIABLE = "GPU_TESTS_LIMIT_S"
"""Set by ``.ci/gpu``: seconds after which a worker writes the stacks of its threads."""


ROW_BYTES = 14336
"""Longest row of most Buffers: kernels for longer ones are the same, and are compiled before."""


class Worker:
    """One rank of a worker.

    Args:
        name: First word of the last line.
        doc: The script's docstring.
        arguments: Adds the script's own options.

    Attributes:
        comm: ``MPI.COMM_WORLD``.
        gpu: True on the cuda engine.
        xp: CuPy, or NumPy on the host engine.
    """

    def __init__(
        self, name: str, doc: str | None, arguments: Callable[[Any], None] | None = None
    ) -> None:
        self._start = time.monotonic()
        limit = float(os.environ.get(LIMIT_VARIABLE, "0"))
        if limit > 0:
            faulthandler.dump_traceback_later(limit)
        parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--engine", choices=("cuda", "host"), default="cuda")
        parser.add_argument("--timeout", type=float, default=20.0, help="timeout_s of the Buffers")
        parser.add_argument("--num-sms", type=int, help="num_sms of the Buffers")
        if arguments is not None:
            arguments(parser)
        self.options = parser.parse_args()
        from mpi4py import MPI

        self.name = name
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.gpu = self.options.engine == "cuda"
        self.xp: Any = np
        self.num_gpus = self.device = 0
        if self.gpu:
            import cupy

            self.xp = cupy
            self.num_gpus = cupy.cuda.runtime.getDeviceCount()
            self.device = self.rank % self.num_gpus
            cupy.cuda.Device(self.device).use()

    def buffer(self, **changes: Any) -> Buffer:
        """A Buffer on this worker's engine; small unless told otherwise."""
        arguments = {
            "num_max_tokens_per_rank": 64,
            "hidden": ROW_BYTES,
            "num_topk": 8,
            "num_experts": 4 * self.size,
            "dtype": "uint8",
            "engine": self.options.engine,
            "timeout_s": self.options.timeout,
            "num_sms": self.options.num_sms,
        }
        return Buffer(self.comm, **(arguments | changes))

    # ------------------------------------------------------------------------------- arrays

    def up(self, array: Any) -> Any:
        """A NumPy array where the engine wants it; as bytes, since CuPy copies few dtypes."""
        if array is None or not self.gpu:
            return array
        contiguous = np.ascontiguousarray(array)
        return self.xp.asarray(contiguous.view(np.uint8)).view(contiguous.dtype)

    def down(self, array: Any) -> Any:
        """The same values as a NumPy array."""
        return array.get() if hasattr(array, "get") else array

    def in_pool(self, buffer: Buffer, array: Any) -> Any:
        """The same bytes in memory from which combine needs no copy."""
        inside = buffer.empty(array.shape, array.dtype)
        if array.size:
            inside.view(np.uint8)[...] = array.view(np.uint8)
        return inside

    def synchronize(self) -> None:
        """Wait for the current stream."""
        if self.gpu:
            self.xp.cuda.get_current_stream().synchronize()

    # -------------------------------------------------------------------------------- ranks

    def meet(self) -> None:
        """Wait for all ranks, without the Buffer and without spinning."""
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(0.001)

    def say(self, *words: object) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(*words, flush=True)

    def most(self, value: float) -> float:
        """Collective. The greatest value of all ranks."""
        return max(self.comm.allgather(value))

    def done(self, *figures: str) -> None:
        """Collective. All is right: the last line."""
        self.meet()
        seconds = time.monotonic() - self._start
        what = ", ".join(figures)
        self.say(f"{self.name}: ok, {what} ({self.size} ranks, {seconds:.1f} s)")

    # ------------------------------------------------------------------------------- graphs

    def capture(self, buffer: Buffer, call: Callable[[int], object], calls: int) -> Graph:
        """Capture ``call(0)``, ``call(1)``, … in a graph. Collective: it opens with a barrier."""
        stream = self.xp.cuda.Stream(non_blocking=True)
        self.synchronize()
        kept: list[object] = []
        with stream:
            buffer.barrier()  # from here on the Buffer's last operation is on this stream
            stream.synchronize()
            stream.begin_capture()
            try:
                kept.extend(call(number) for number in range(calls))
            finally:
                captured = stream.end_capture()
        return Graph(self, stream, captured, calls, kept)


@dataclass
class Graph:
    """A captured graph, its stream, and the results its calls returned."""

    worker: Worker
    stream: Any
    captured: Any
    calls: int
    kept: list[object]

    def replay(self, times: int) -> float:
        """Launch ``times`` times and wait; microseconds of one call."""
        cuda = self.worker.xp.cuda
        begin, end = cuda.Event(), cuda.Event()
        with self.stream:
            begin.record(self.stream)
            for _ in range(times):
                self.captured.launch(self.stream)
            end.record(self.stream)
            self.stream.synchronize()
        elapsed_ms: float = cuda.get_elapsed_time(begin, end)
        return 1e3 * elapsed_ms / (times * self.calls)


# ---------------------------------------------------------------------------------------- kinds


def add_kinds(parser: Any) -> None:
    """The option ``--kinds``."""
    parser.add_argument(
        "--kinds",
        default="",
        help="copy path and loads of Buffers, as bulk-nc,ldst-coherent; default: the environment's",
    )


def kinds_of(worker: Worker) -> dict[str, dict[str, str]]:
    """Name of each kind asked for → what ``env.setting`` takes while its Buffers are made."""
    names = worker.options.kinds.split(",") if worker.options.kinds and worker.gpu else []
    kinds = {}
    for name in names:
        path, loads = name.split("-")
        kinds[name] = {"DEEPEP_CUPY_PATH": path, "DEEPEP_CUPY_LOADS": loads}
    return kinds or {"": {}}


def must_be(buffer: Any, kind: str) -> None:
    """A Buffer must be of the kind it was made for."""
    engine = buffer._engine
    if kind and kind != f"{engine.path}-{engine.loads}":
        raise AssertionError(f"wanted a Buffer of {kind}, got {engine.path}-{engine.loads}")


def runtime(buffer: Buffer) -> Any:
    """The inside of a cuda engine: memory, pool, kernels, news. All that workers know of it."""
    engine: Any = buffer._engine
    return engine._runtime


# --------------------------------------------------------------------------------------- errors


@dataclass(frozen=True)
class Seen:
    """What a call raised (``kind`` is ``"nothing"`` otherwise), and after how long."""

    kind: str
    seconds: float
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind} after {self.seconds:.2f} s: {self.text}"


def settle(worker: Worker, buffer: Buffer, call: Callable[[], object]) -> Seen:
    """Call, wait until the GPU is done, ask the Buffer; errors of this package are caught."""
    start = time.monotonic()
    try:
        call()
        worker.synchronize()
        buffer.check()
    except DeepEPCupyError as error:
        return Seen(type(error).__name__, time.monotonic() - start, str(error))
    return Seen("nothing", time.monotonic() - start)


# ---------------------------------------------------------------------------------------- trips


class RoundTrip:
    """A case's data of all ranks, and calls that compare with the reference, bit by bit."""

    def __init__(self, worker: Worker, case: Case, seed: int = 0) -> None:
        self.worker, self.case, rank = worker, case, worker.rank
        self.want = want = expected(case, seed)
        mine, up = want.inputs[rank], worker.up
        self.x, self.first_x = up(mine.x), up(mine.first_x)
        self.topk_idx, self.mask = up(mine.topk_idx), up(mine.mask)
        self.weights = up(mine.topk_weights)
        self.biases = tuple(up(bias) for bias in mine.biases)
        self.y = self.y_weights = None
        if want.rows:
            self.y, self.y_weights = up(want.rows[rank].y), up(want.rows[rank].topk_weights)

    def dispatch(self, buffer: Buffer, *, own: bool = False) -> Any:
        """The case's dispatch, in a cached case after the one that makes the handle; a handle."""
        rank = self.worker.rank
        routing: dict[str, Any] = {"topk_idx": self.topk_idx, "is_token_in_rank": self.mask}
        routing["expert_alignment"] = self.case.expert_alignment
        if self.case.cached:
            made = buffer.dispatch(self.first_x, **routing)
            first: Any = self.want.first
            assert_dispatch_equal(made, first[rank], rank=rank)
            routing = {"handle": made.handle}
        got = buffer.dispatch(self.x, topk_weights=self.weights, own=own, **routing)
        assert_dispatch_equal(got, self.want.dispatched[rank], rank=rank)
        return got.handle

    def combine(self, buffer: Buffer, handle: Any, *, in_pool: bool = False) -> Any:
        """The case's combine, of rows outside the pool or inside it; its result."""
        y: Any = self.y
        if in_pool:
            y = self.worker.in_pool(buffer, y)
        back = buffer.combine(y, handle, topk_weights=self.y_weights, bias=self.biases)
        self.worker.synchronize()
        buffer.check()
        rank = self.worker.rank
        assert_combine_equal(back, self.want.combined[rank], rank=rank)
        return back

    def round(self, buffer: Buffer) -> Any:
        """There and back, both ways; the handle."""
        handle = self.dispatch(buffer)
        if self.case.addable:
            self.combine(buffer, handle)
            self.combine(buffer, handle, in_pool=True)
        return handle


def small_case(worker: Worker, **changes: Any) -> Case:
    """A case that fits ``Worker.buffer()``."""
    size = worker.size
    settings: dict[str, Any] = {
        "num_tokens": (40, 7, 64, 1, 0, 33, 12, 64)[:size],
        "hidden": 400,
        "num_experts": 4 * size,
        "num_topk": min(4, 4 * size),
        "dtype": "float32",
    }
    return Case(size, **(settings | changes))
