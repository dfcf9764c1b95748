"""Dispatch and combine as a user of NCCL would write them: pack, grouped send/receive, scatter.

Through CuPy's binding, on the same arrays. The layout (who sends how many rows to whom, and
where each row goes) is known beforehand and not timed, as in a cached dispatch.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.bench.traffic import Traffic
from deepep_cupy.errors import DeepEPCupyError

__all__ = ["NcclExchange", "NcclFailedError", "Routes", "connect", "nccl", "why_no_nccl"]

_WIDE = {16: "complex128", 8: "uint64", 4: "uint32", 2: "uint16", 1: "uint8"}
"""Bytes → what rows are gathered in: CuPy moves one such item a thread."""


def nccl() -> Any:
    """CuPy's binding; None where it, or the library, is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's, that there is no such library
            from cupy.cuda import nccl as binding
    except ImportError:
        return None
    return binding if binding.available else None


def why_no_nccl(comm: Any, gpus: tuple[str, ...], dtype: str) -> str:
    """Collective. Why this baseline cannot be measured; empty where it can."""
    if not all(comm.allgather(nccl() is not None)):
        return "NCCL is not installed: pip install nvidia-nccl-cu13 (or -cu12) to compare with it"
    if comm.size == 1:
        return "NCCL has nothing to do on one rank"
    if len(set(gpus)) < comm.size:
        return "NCCL does not put two ranks on one GPU"
    if dtype not in _LOADS:
        return f"the scatter of this baseline has no {dtype}"
    return ""


class Routes:
    """Which rows go where, in the order of a dispatch. NumPy alone.

    Args:
        send_row: ``[T, R]``, of the handle.
        traffic: Rows from rank to rank.
        rank: This rank.

    Attributes:
        pack: Tokens whose rows go to other ranks: rank by rank, in token order.
        own: Tokens whose rows stay here.
        send: Rows before each rank's segment of packed rows, and behind the last.
        receive: Rows before each rank's segment of received rows, this rank's own among them, and
            behind the last.
        back: ``[T, R]``: where a token's row is among those that came back; -1: nowhere. This
            rank's own are found where they were received.
    """

    def __init__(self, send_row: NDArray[Any], traffic: Traffic, rank: int) -> None:
        ranks = range(traffic.num_ranks)
        tokens = [np.flatnonzero(send_row[:, other] >= 0) for other in ranks]
        remote = [tokens[other] if other != rank else tokens[other][:0] for other in ranks]
        self.pack = np.concatenate(remote).astype(np.int32)
        self.own = tokens[rank].astype(np.int32)
        self.send = _edges([len(each) for each in remote])
        self.receive = _edges([line[rank] for line in traffic.rows])
        back = np.full(send_row.shape, -1, np.int32)
        for other in ranks:
            if other == rank:
                back[tokens[rank], rank] = self.receive[rank] + np.arange(len(tokens[rank]))
            else:
                begin, end = self.send[other : other + 2]
                back[tokens[other], other] = np.arange(begin, end)
        self.back = back


def _edges(counts: list[int]) -> list[int]:
    return [0, *(int(end) for end in np.cumsum(counts))]


class NcclExchange:
    """Dispatch and combine by NCCL.

    Args:
        connection: Of all ranks, from ``connect``.
        x: ``[T, H]``, as for dispatch.
        routes: Which rows go where.
    """

    def __init__(self, connection: Any, x: Any, routes: Routes) -> None:
        import cupy

        self._nccl, self._cupy = nccl(), cupy
        self._comm = connection
        self._rank, self._ranks = connection.rank_id(), connection.size()
        self._routes = routes
        self._row_bytes = x.shape[1] * x.itemsize
        width = next(each for each in _WIDE if self._row_bytes % each == 0)
        self._wide = np.dtype(_WIDE[width])
        self._x = self._items(x)
        self._pack, self._own = cupy.asarray(routes.pack), cupy.asarray(routes.own)
        self._back = cupy.asarray(routes.back)
        columns = self._x.shape[1]
        self._packed = cupy.empty((routes.send[-1], columns), self._wide)
        self._received = cupy.empty((routes.receive[-1], columns), self._wide)
        self._returned = cupy.empty_like(self._packed)
        self._combined = cupy.empty((len(x), self._row_bytes), np.uint8)
        self._add = _Adder(x.dtype.name, self._ranks, self._rank)
        self._dtype = x.dtype

    def dispatch(self) -> Any:
        """Pack, exchange: rows arrive at their final place. ``[N, H]``."""
        take, routes = self._cupy.take, self._routes
        if len(routes.pack):
            take(self._x, self._pack, axis=0, out=self._packed)
        begin, end = routes.receive[self._rank : self._rank + 2]
        if end > begin:
            take(self._x, self._own, axis=0, out=self._received[begin:end])
        self._exchange(self._packed, routes.send, self._received, routes.receive)
        return self._rows(self._received)

    def combine(self, rows: Any) -> Any:
        """Exchange, scatter: ``rows [N, H]`` lie as they were received. ``[T, H]``."""
        items, routes = self._items(rows), self._routes
        self._exchange(items, routes.receive, self._returned, routes.send)
        self._add(self._back, self._returned, items, self._combined)
        return self._combined.view(self._dtype)

    def _exchange(self, source: Any, send: list[int], target: Any, receive: list[int]) -> None:
        """Segments of other ranks, all in one group."""
        stream, binding = self._cupy.cuda.get_current_stream().ptr, self._nccl
        size, byte = self._row_bytes, binding.NCCL_UINT8
        binding.groupStart()
        for step in range(1, self._ranks):
            peer = (self._rank + step) % self._ranks
            begin, end = send[peer : peer + 2]
            if end > begin:
                address = source.data.ptr + begin * size
                self._comm.send(address, (end - begin) * size, byte, peer, stream)
            peer = (self._rank - step) % self._ranks
            begin, end = receive[peer : peer + 2]
            if end > begin:
                address = target.data.ptr + begin * size
                self._comm.recv(address, (end - begin) * size, byte, peer, stream)
        binding.groupEnd()

    def _items(self, rows: Any) -> Any:
        return rows.view(np.uint8).view(self._wide)

    def _rows(self, items: Any) -> Any:
        return items.view(np.uint8).view(self._dtype)


class NcclFailedError(DeepEPCupyError):
    """NCCL is installed and does not work on these ranks."""


def connect(comm: Any) -> Any:
    """Collective. NCCL's communicator of the ranks of an mpi4py communicator, each on a GPU of its
    own that is the current device; lives until the process ends or ``destroy()``.

    Raises:
        NcclFailedError: On every rank, where it cannot be made on one.
    """
    binding = nccl()
    connection, trouble = None, ""
    try:
        identity = binding.get_unique_id() if comm.rank == 0 else None
    except RuntimeError as error:
        identity, trouble = None, str(error)
    identity = comm.bcast(identity)
    if identity is not None:
        try:
            connection = binding.NcclCommunicator(comm.size, identity, comm.rank)
        except RuntimeError as error:
            trouble = str(error)
    reasons = [each for each in comm.allgather(trouble) if each]
    if reasons:
        raise NcclFailedError(f"NCCL does not work on these ranks: {reasons[0]}")
    return connection


_LOADS = {
    "bfloat16": (
        "uint32",
        "s0 += __uint_as_float({value} << 16); s1 += __uint_as_float({value} & 0xffff0000u);",
        "unsigned int a = __float_as_uint(s0), b = __float_as_uint(s1);"
        "a += 0x7fffu + ((a >> 16) & 1u); b += 0x7fffu + ((b >> 16) & 1u);"
        "out = (a >> 16) | (b & 0xffff0000u);",
    ),
    "float16": ("float16", "s0 += (float){value};", "out = s0;"),
    "float32": ("float32", "s0 += {value};", "out = s0;"),
    "float64": ("float64", "s0 += {value};", "out = s0;"),
}
"""Row dtype → items of a thread, how one is added, and how the sum is rounded and stored."""


class _Adder:
    """Adds the rows of each token in rank order, in float32 (float64 rows: in float64)."""

    def __init__(self, dtype: str, ranks: int, rank: int) -> None:
        import cupy

        item, add, store = _LOADS[dtype]
        self._item = np.dtype(item)
        wide = "double" if dtype == "float64" else "float"
        code = f"""
            {wide} s0 = 0{", s1 = 0" * (dtype == "bfloat16")};
            long long token = i / columns, column = i % columns;
            for (int r = 0; r < {ranks}; ++r) {{
                long long row = back[token * {ranks} + r];
                if (row < 0) continue;
                T value = r == {rank} ? own[row * columns + column]
                                      : returned[row * columns + column];
                {add.format(value="value")}
            }}
            {store}
        """
        self._kernel = cupy.ElementwiseKernel(
            "raw int32 back, raw T returned, raw T own, int64 columns", "T out", code, "scatter"
        )

    def __call__(self, back: Any, returned: Any, own: Any, out: Any) -> None:
        items = [array.view(np.uint8).view(self._item) for array in (returned, own, out)]
        columns = items[2].shape[1]
        flat = [array.reshape(-1) for array in items]
        self._kernel(back.reshape(-1), flat[0], flat[1], columns, flat[2])
