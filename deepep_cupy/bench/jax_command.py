"""``bench jax``: a dispatch and a combine inside ``jax.jit``, beside the same calls outside.

One round trip has weights both ways and fixed shapes: W = 2 T rows. Each row of the table is the
mean of many round trips of which only the last is waited for, on the slowest rank: what a program
pays that queues ahead. The sums of all are compared, bit by bit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from deepep_cupy import Buffer
from deepep_cupy.bench.options import numbers, positive
from deepep_cupy.cli.progress import Progress
from deepep_cupy.cli.ranks import world
from deepep_cupy.cli.table import columns
from deepep_cupy.errors import ContractError, PlatformError

__all__ = ["add_arguments", "run"]

_WARM_UP = 8
"""Round trips before the clock: XLA compiles in the first and may record in the next ones."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench jax``."""
    add = parser.add_argument
    add("--tokens", type=numbers, default=[128, 4096], metavar="T,T", help="default: 128,4096")
    add("--hidden", type=positive, default=7168, metavar="H", help="of bfloat16 rows")
    add("--topk", type=positive, default=8, metavar="K", help="choices of a token")
    add("--experts", type=positive, default=256, metavar="E", help="of all ranks")
    add("--repeats", type=positive, default=100, help="round trips of a mean (default: 100)")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 where results differ. Collective."""
    try:
        import jax
    except ImportError as error:
        raise PlatformError("bench jax: needs JAX; pip install 'deepep_cupy[jax]'.") from error
    comm = world("bench jax")
    if args.experts % comm.size or args.topk > args.experts:
        raise ContractError(
            f"bench jax: argument --experts must be a multiple of the {comm.size} ranks and at "
            f"least --topk = {args.topk}, got {args.experts}."
        )
    engine = "host" if jax.default_backend() == "cpu" else "cuda"
    progress = Progress(len(args.tokens), shown=comm.rank == 0)
    rows, wrong = [], 0
    for number, tokens in enumerate(args.tokens):
        progress.update(number, f"{tokens} tokens")
        found, equal = _Trip(comm, engine, tokens, args).measure(args.repeats)
        rows += found
        wrong += not equal
    progress.clear()
    if comm.rank == 0:
        print(f"{engine} engine, {comm.size} ranks, JAX {jax.__version__}; us a round trip")
        print(columns(("tokens", "round trip", "us"), rows, words=["round trip"]))
        print("WRONG: the sums differ" if wrong else "the sums of all are equal, to the bit")
    return 1 if wrong else 0


class _Way(NamedTuple):
    """One way to make a round trip: queue it, and read the sums of the last one."""

    name: str
    call: Callable[[], object]
    wait: Callable[[], object]
    read: Callable[[], Any]


class _Trip:
    """One size: a Buffer, inputs, and every way to make a round trip."""

    def __init__(self, comm: Any, engine: str, tokens: int, args: argparse.Namespace) -> None:
        self._comm, self._tokens, self._most = comm, tokens, min(2, comm.size) * tokens
        self._buffer = Buffer(
            comm,
            num_max_tokens_per_rank=tokens,
            hidden=args.hidden,
            num_topk=args.topk,
            num_experts=args.experts,
            engine=engine,
        )
        rng = np.random.default_rng([tokens, comm.rank])
        chosen = rng.random((tokens, args.experts)).argsort(axis=1)[:, : args.topk]
        self._choices = np.ascontiguousarray(chosen, dtype=np.int32)
        rows = rng.integers(-8, 8, (tokens, args.hidden), dtype=np.int8)
        self._rows = rows.astype(ml_dtypes.bfloat16)
        self._weights = rng.random((tokens, args.topk), dtype=np.float32)
        self._out: Any = None

    def measure(self, repeats: int) -> tuple[list[tuple[int, str, int]], bool]:
        """Collective. Rows of the table, and whether the sums of all ways are equal."""
        found, sums = [], set()
        with self._buffer:
            for make in (self._eager, self._graph, self._jitted):
                way = make()
                if way is not None:
                    found.append((self._tokens, way.name, round(self._time(way, repeats))))
                    sums.add(np.asarray(way.read()).tobytes())
        return found, all(self._comm.allgather(len(sums) == 1))

    def _time(self, way: _Way, repeats: int) -> float:
        for _ in range(_WARM_UP):
            way.call()
        way.wait()
        self._comm.barrier()
        begun = time.perf_counter()
        for _ in range(repeats):
            way.call()
        way.wait()
        mine = (time.perf_counter() - begun) / repeats * 1e6
        return float(max(self._comm.allgather(mine)))

    def _eager(self) -> _Way:
        buffer, xp = self._buffer, self._buffer.xp
        x, choices, weights = map(xp.asarray, (self._rows, self._choices, self._weights))

        def call() -> None:
            recv = buffer.dispatch(
                x, topk_idx=choices, topk_weights=weights, num_worst_tokens=self._most
            )
            sums = buffer.combine(recv.recv_x, recv.handle, recv.recv_topk_weights)
            self._out = sums.combined_x

        return _Way("eager", call, self._synchronize, self._read)

    def _graph(self) -> _Way | None:
        """The eager calls in a CUDA graph; None on the host engine."""
        if self._buffer.device is None:
            return None
        call = self._eager().call
        call()
        self._synchronize()
        stream = self._buffer.xp.cuda.Stream(non_blocking=True)
        with stream:
            self._buffer.barrier()  # from here on the last operation is on this stream
            stream.synchronize()
            stream.begin_capture()
            try:
                call()
            finally:
                graph = stream.end_capture()
        launch = partial(graph.launch, stream)
        return _Way("eager, in a CUDA graph", launch, stream.synchronize, self._read)

    def _jitted(self) -> _Way:
        import jax

        import deepep_cupy.jax as ep

        buffer = self._buffer
        ep.attach(buffer)

        def trip(x: Any, choices: Any, weights: Any) -> Any:
            recv = ep.dispatch(buffer, x, choices, weights, num_worst_tokens=self._most)
            return ep.combine(buffer, recv.x, recv.handle, recv.topk_weights).x

        compiled = jax.jit(trip)
        given = [jax.numpy.asarray(each) for each in (self._rows, self._choices, self._weights)]

        def call() -> None:
            self._out = compiled(*given)

        return _Way("jax.jit", call, lambda: jax.block_until_ready(self._out), self._read)

    def _synchronize(self) -> None:
        if self._buffer.device is not None:
            self._buffer.xp.cuda.get_current_stream().synchronize()

    def _read(self) -> Any:
        return self._out.get() if hasattr(self._out, "get") else self._out
