"""``bench`` as on GPUs, with no GPU: NumPy plays CuPy, memory copies play the ceiling's kernel and
MPI plays NCCL, while the host engine moves the rows.

mpirun -n 2 python tests/cpu/bench_worker.py GPUS dispatch --dtype float32 ...

GPUS is how many there are; rank r is on GPU r modulo GPUS. What clocks say means nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import sys
import time
import types
from types import SimpleNamespace

import numpy as np
from mpi4py import MPI

from deepep_cupy.engines.gpu.grid import GridPlan
from deepep_cupy.engines.host.engine import HostEngine
from deepep_cupy.memory import cuda_ipc
from deepep_cupy.ranks.mpi import MPIGroup

COMM = MPI.COMM_WORLD
POOL_BYTES = 64 << 20
NUM_SMS = 132
FAULT = os.environ.get("BENCH_WORKER_FAULT") == "1"
"""The ceiling's kernel forgets a row."""


class Array(np.ndarray):
    """NumPy's array with what CuPy's has beside it."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, memset_async=lambda *arguments: None)

    def get(self):
        return np.asarray(self)


def as_array(array, *arguments):
    return np.array(array, *arguments).view(Array)


class Stream:
    """Everything is done at once."""

    ptr = 0
    capturing = False

    def __init__(self, non_blocking=False):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def synchronize(self):
        assert not Stream.capturing, "the host waits in a capture"

    def begin_capture(self):
        Stream.capturing = True

    def end_capture(self):
        Stream.capturing = False
        return SimpleNamespace(launch=lambda stream: None)


class Event:
    """A point in the host's time."""

    def record(self, stream):
        self.at = time.perf_counter()


class Nccl:
    """Sends and receives addresses, all at the end of a group."""

    def __init__(self, size, identity, rank):
        assert (size, identity, rank) == (COMM.size, "identity", COMM.rank)
        self._comm = COMM.Dup()

    requests: list = []  # noqa: RUF012

    def size(self):
        return self._comm.size

    def rank_id(self):
        return self._comm.rank

    def send(self, address, count, dtype, peer, stream):
        buffer = (ctypes.c_char * count).from_address(address)
        Nccl.requests.append(self._comm.Isend([buffer, MPI.BYTE], peer))

    def recv(self, address, count, dtype, peer, stream):
        buffer = (ctypes.c_char * count).from_address(address)
        Nccl.requests.append(self._comm.Irecv([buffer, MPI.BYTE], peer))

    def destroy(self):
        self._comm.Free()


def group_end():
    MPI.Request.Waitall(Nccl.requests)
    Nccl.requests.clear()


class Scatter:
    """The elementwise kernel of the baseline, for float32."""

    def __init__(self, inputs, outputs, code, name):
        assert (inputs.split()[-1], outputs, name) == ("columns", "T out", "scatter")

    def __call__(self, back, returned, own, columns, out):
        assert out.dtype == np.float32
        rows = [each.reshape(-1, columns) for each in (returned, own, out)]
        for token, line in enumerate(back.reshape(-1, COMM.size)):
            total = np.zeros(columns, np.float32)
            for rank, row in enumerate(line):
                if row >= 0:
                    total = total + rows[rank == COMM.rank][row]
            rows[2][token] = total


class Kernel:
    """The ceiling's kernel, of its values alone."""

    def __init__(self, comm, device):
        assert (comm, device) == (COMM, 0)

    def launch(self, values, grid):
        def call():
            rows, size = values["rows"], values["row_bytes"]
            for number in range(values["num_rows"]):
                row, segment = number * values["stride"] % values["num_rows"], 0
                while row >= rows[segment]:
                    row -= rows[segment]
                    segment += 1
                offset = row * size
                if FAULT and number == 3:
                    continue
                ctypes.memmove(values["target"][segment] + offset,
                               values["source"][segment] + offset, size)  # fmt: skip

        assert 1 <= grid <= NUM_SMS
        return call


def make_cupy():
    """The module ``cupy``."""
    cupy = types.ModuleType("cupy")
    cupy.__getattr__ = lambda name: getattr(np, name)
    cupy.asarray = as_array
    cupy.empty = lambda *arguments: np.empty(*arguments).view(Array)
    cupy.empty_like = lambda array: np.empty_like(array).view(Array)
    cupy.ElementwiseKernel = Scatter
    cupy.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
    nccl = types.ModuleType("cupy.cuda.nccl")
    nccl.available, nccl.NCCL_UINT8, nccl.NcclCommunicator = True, 1, Nccl
    nccl.get_unique_id = lambda: "identity"
    nccl.groupStart, nccl.groupEnd = Nccl.requests.clear, group_end
    runtime = SimpleNamespace(
        getDeviceProperties=lambda device: {"name": b"No GPU", "multiProcessorCount": NUM_SMS},
        driverGetVersion=lambda: 13000,
    )
    device = SimpleNamespace(use=lambda: None, compute_capability="90")
    stream = Stream()
    cuda = types.ModuleType("cupy.cuda")
    cuda.Device = lambda number: device
    cuda.Stream, cuda.Event, cuda.runtime, cuda.nccl = Stream, Event, runtime, nccl
    cuda.get_current_stream = lambda: stream
    cuda.get_elapsed_time = lambda begin, end: 1e3 * (end.at - begin.at)
    cupy.cuda = cuda
    sys.modules |= {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}


class Region:
    """Memory of all ranks, of which each hands out its part."""

    def __init__(self):
        self._window = MPIGroup(COMM).shared_window(COMM.size * POOL_BYTES)
        start = self._window.memory.ctypes.data
        self.peer_base = [start + rank * POOL_BYTES for rank in range(COMM.size)]
        self.base = self.peer_base[COMM.rank]
        self.used = 0

    def empty(self, shape, dtype):
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        begin = COMM.rank * POOL_BYTES + self.used
        self.used = (self.used + nbytes + 511) // 512 * 512
        assert self.used <= POOL_BYTES
        part = self._window.memory[begin : begin + nbytes]
        return part.view(dtype).reshape(shape).view(Array)


def play_gpus(gpus):
    """Make the host engine look like one of GPUs."""
    make_cupy()
    region = Region()
    real_init = HostEngine.__init__

    def init(engine, group, board, spec, *arguments, **options):
        real_init(engine, group, board, spec, *arguments, **options)
        grids = GridPlan(NUM_SMS, COMM.size // gpus or 1, spec.num_sms)
        engine._runtime = SimpleNamespace(grids=grids, memory=SimpleNamespace(region=region))

    real_dispatch = HostEngine.dispatch

    def dispatch(engine, call):
        done = real_dispatch(engine, call)
        return dataclasses.replace(done, recv_x=done.recv_x.view(Array))

    HostEngine.__init__, HostEngine.dispatch = init, dispatch
    HostEngine.device = property(lambda engine: 0)
    HostEngine.empty = lambda engine, shape, dtype: region.empty(shape, dtype)
    cuda_ipc.device_uuid = lambda device: f"GPU-{COMM.rank % gpus}"
    from deepep_cupy.bench import runs

    runs.CeilingKernel = Kernel
    return region


def main():
    """Run the command."""
    from deepep_cupy.cli.main import main as command

    gpus, *arguments = sys.argv[1:]
    region = play_gpus(int(gpus))
    code = command(["bench", *arguments, "--engine", "host"])
    with contextlib.suppress(BrokenPipeError):
        print(f"exit code {code}, {region.used} bytes of boxes", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
