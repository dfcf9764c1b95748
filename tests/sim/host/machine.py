"""A node of ranks with a GPU each: what stands where CuPy, the driver, MPI and the clock are.

``Machine.install`` puts it there; the product's own Buffer then runs on it, in threads of the
baton, one process's threads for each rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import sys
import threading
import types
from types import SimpleNamespace

import numpy as np

from deepep_cupy.api import buffer as api_buffer
from deepep_cupy.api import lifecycle
from deepep_cupy.engines.gpu import engine as gpu_engine
from deepep_cupy.engines.gpu import grid as gpu_grid
from deepep_cupy.engines.gpu import launch as gpu_launch
from deepep_cupy.engines.gpu import operation as gpu_operation
from deepep_cupy.engines.gpu import routing as gpu_routing
from deepep_cupy.engines.gpu.topology import Gpu as Described
from deepep_cupy.engines.gpu.topology import Topology
from deepep_cupy.jit import launch as jit_launch
from deepep_cupy.jit.compile import Loaded
from deepep_cupy.memory import cuda_ipc
from deepep_cupy.memory import pool as memory_pool
from deepep_cupy.memory import region as memory_region
from deepep_cupy.protocol.control_block import ControlLayout, ReportLayout
from deepep_cupy.ranks import rendezvous
from host.baton import Baton, Lock, RLock
from host.gpus import CudaError, Event, Gpu, Stream, Work
from host.memory import Memory, at, join
from host.operations import KERNELS

__all__ = ["Array", "Machine"]

_OTHERS = {
    name: getattr(threading, name)
    for name in threading.__all__
    if name not in ("Lock", "RLock", "get_ident")
}
_TRACED = ("engines/gpu/", "deepep_cupy/memory/", "api/lifecycle")


class Machine:
    """See the top of this file.

    Args:
        seed: Of the baton.
        num_ranks: R.
        num_experts: E.

    Attributes:
        ended: (rank, serial) -> verdict, for operations that have ended, in order.
    """

    def __init__(self, seed, num_ranks, num_experts):
        self.baton, self.memory = Baton(seed), Memory()
        self.num_ranks, self.released, self.ended = num_ranks, {}, []
        self.control = ControlLayout(num_ranks, num_experts)
        self.report_layout = ReportLayout(num_ranks, num_experts)
        self.gpus = [Gpu(self, rank) for rank in range(num_ranks)]
        self.meetings, self.mail, self.windows, self.barriers = {}, {}, {}, {}
        self.specs, self.interrupt = [], {}
        self.hasty = set()  # ranks whose clocks jump: their waits end too early
        self.traced = self.baton.random.random() < 0.2
        self._interrupted = set()

    # ------------------------------------------------------------------------------- threads

    def start(self, rank, name, work):
        """A thread of a rank's process."""

        def main():
            if self.traced:
                sys.settrace(self._trace)
            try:
                work()
            finally:
                sys.settrace(None)

        thread = self.baton.spawn(name, main)
        thread.rank, thread.stack = rank, [self.gpus[rank].null]
        thread.clock = {name: 1}
        return thread

    def _trace(self, frame, event, arg):
        del event, arg
        if not any(part in frame.f_code.co_filename for part in _TRACED):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace_inside

    def _trace_inside(self, frame, event, arg):
        del arg
        inside = frame.f_code.co_name == "__del__"  # where no error may come up
        if event == "opcode" and not inside and self.baton.random.random() < 0.01:
            self.baton.point(quiet=True)
        return self._trace_inside

    @property
    def gpu(self):
        """Of the calling thread."""
        return self.gpus[self.baton.me.rank]

    def stack(self):
        """Current streams of the calling thread."""
        return self.baton.me.stack

    def host_clock(self):
        me = self.baton.me
        me.clock[me.name] = me.clock.get(me.name, 0) + 1
        return me.clock

    def learn(self, clock):
        join(self.baton.me.clock, clock)

    def cuda_call(self, what, quiet=False):
        """Every call into CUDA."""
        self.baton.note(f"{self.baton.me}: {what}")
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "__del__":
                self.baton.give_up(AssertionError(f"a finalizer calls CUDA: {what}"))
                return
            frame = frame.f_back
        self.baton.point(quiet)

    def poll(self, *given):
        """Where the product waits."""
        del given
        me = self.baton.me
        error = self.interrupt.get(me.name)
        if error is not None and me.name not in self._interrupted:
            self._interrupted.add(me.name)
            raise error
        self.baton.poll()

    def store(self, address, value):
        """A word of host memory."""
        ctypes.c_uint64.from_address(address).value = value

    def note_end(self, kernel):
        serial, verdict = kernel.comm["serial"], kernel.verdict
        self.ended.append((kernel.rank, serial, kernel.comm["kind"], int(verdict)))
        self.baton.note(f"operation {serial} of rank {kernel.rank} ends: {verdict!r}")

    # --------------------------------------------------------------------------------- kernels

    def kernel(self, stream, what, ranges, work):
        """A kernel of the caller's: touches (address, bytes, whether it writes), then works."""

        def begin(lane):
            lane.touch(what, *ranges)
            work()
            yield None

        stream.add(Work(what, begin))

    def launch(self, spec, layout, raw, stream):
        fields = {"comm": {}, "d": {}}
        for name, field in layout.fields.items():
            words = np.frombuffer(raw, np.uint8, field.nbytes, field.offset)
            values = memoryview(words.tobytes()).cast(field.letter).tolist()
            part, _, rest = name.partition(".")
            fields[part][rest.rpartition(".")[2]] = values[0] if field.count is None else values
        begin = KERNELS[spec.name]

        def steps(lane):
            gpu = lane.gpu
            while fields["comm"] and gpu.slots == 0:
                yield lambda: gpu.slots > 0
            gpu.slots -= 1
            yield from begin(self, lane, fields["comm"], fields["d"])
            gpu.slots += 1

        stream.add(Work(f"{spec.name} {fields['comm'].get('serial', '')}", steps))

    # ---------------------------------------------------------------------------------- putting

    @contextlib.contextmanager
    def install(self):
        """The product runs on this machine."""
        Lock.baton, Lock.held = self.baton, set()
        cupy = make_cupy(self)
        threads = SimpleNamespace(
            Lock=Lock, RLock=RLock, get_ident=lambda: id(self.baton.me), **_OTHERS
        )
        clock = SimpleNamespace(monotonic=lambda: self.baton.now, sleep=self.poll)
        driver = _Bindings(self)
        values = [
            (api_buffer, "_make_group", lambda comm, timeout_s: comm),
            (api_buffer, "_program", lambda: None),
            (api_buffer, "Watch", lambda *_: contextlib.nullcontext()),
            (api_buffer, "make_engine", self._make_engine),
            (api_buffer, "ExitGuard", _Guard),
            (api_buffer, "print_errors_once", lambda: None),
            (gpu_engine.policy, "resolve", lambda *a, **k: SimpleNamespace(loads="coherent")),
            (gpu_launch, "open_cache", lambda: None),
            (gpu_launch, "compiler_archs", lambda: (90,)),
            (gpu_launch, "build_all", self._build_all),
            (gpu_launch, "load", self._load),
            (jit_launch, "CudaDriver", lambda: _Driver(self)),
            (gpu_launch, "CudaDriver", lambda: _Driver(self)),
            (cuda_ipc, "device_uuid", lambda device: f"GPU-{device}"),
            (gpu_operation, "threading", threads),
            (gpu_operation, "time", clock),
            (gpu_operation, "_PATIENT_POLLS", 2),
            (memory_pool, "threading", threads),
            (memory_region, "GRANULE", 512),
            (lifecycle, "threading", threads),
            (lifecycle.CallLock, "_process", _OfProcess(self)),
            (rendezvous, "time", clock),
            (rendezvous, "poll", self.poll),
        ]
        modules = {"cupy": cupy, "cupy.cuda": cupy.cuda, "cuda": driver.root}
        modules |= {"cuda.bindings": driver.root.bindings, "cuda.bindings.driver": driver}
        before = [(where, name, getattr(where, name)) for where, name, _ in values]
        hidden = {name: sys.modules.get(name) for name in modules}
        gpu_operation.DeviceOrder._orders.clear()
        _without_locks()
        for where, name, value in values:
            setattr(where, name, value)
        sys.modules.update(modules)
        try:
            yield self
        finally:
            for where, name, value in before:
                setattr(where, name, value)
            for name, module in hidden.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module
            gpu_operation.DeviceOrder._orders.clear()
            gpu_engine._left_behind.clear()

    def _make_engine(self, group, board, spec, engine, device):
        del engine, device
        gpus = [
            Described(r, "node", r, f"GPU-{r}", "simulated", 132, (9, 0), 1 << 30)
            for r in range(group.size)
        ]
        return gpu_engine.CudaEngine(group, board, spec, Topology(tuple(gpus)))

    def _build_all(self, requests, cache, *, compiles, barrier):
        del cache, compiles
        barrier()
        return [SimpleNamespace(image=(each.spec, each.constants)) for each in requests]

    def _load(self, image, entry, name):
        del name
        self.specs.append(image)
        return Loaded(entry, len(self.specs) - 1, ())


class _OfProcess:
    """One lock for each rank: what a process has once."""

    def __init__(self, machine):
        self._machine, self._locks = machine, {}

    def _of_rank(self):
        return self._locks.setdefault(self._machine.baton.me.rank, lifecycle.Holding())

    def take(self, me):
        return self._of_rank().take(me)

    def give_back(self, me):
        self._of_rank().give_back(me)


def _without_locks():
    """Until Python 3.12 a ``cached_property`` holds a lock, one for all ranks of this process."""
    for kind in (gpu_grid.GridPlan, gpu_routing.GpuRouting):
        for value in vars(kind).values():
            if isinstance(value, functools.cached_property) and hasattr(value, "lock"):
                value.lock = contextlib.nullcontext()


class _Guard:
    """``ranks.exit_guard.ExitGuard`` of a process that does not end."""

    def __init__(self, group, board):
        self.doomed, self.keep, self.code = False, None, 1

    def begin(self):
        pass

    def end(self):
        pass


class _Bindings(types.ModuleType):
    """``cuda.bindings.driver``."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, machine):
        super().__init__("cuda.bindings.driver")
        self._machine = machine
        self.root = types.ModuleType("cuda")
        self.root.bindings = types.ModuleType("cuda.bindings")
        self.root.bindings.driver = self

    def cuStreamGetCaptureInfo(self, ptr):
        stream = self._machine.gpu.by_number[ptr]
        if stream.capture is None or stream.capture.invalid:
            return 1, 0, 0
        return 0, 1, stream.capture.number


class _Driver:
    """``jit.launch.Driver``."""

    def __init__(self, machine):
        self._machine = machine

    def prepare(self, function, grid, threads, shared_bytes, params):
        del grid, threads, shared_bytes
        machine = self._machine
        spec, constants = machine.specs[function]
        layout = spec.layout(constants)

        def call(stream):
            first = ctypes.c_void_p.from_address(params).value
            raw = ctypes.string_at(first, layout.nbytes)
            machine.launch(spec, layout, raw, machine.gpu.by_number[stream])

        return call

    def allow_shared(self, function, nbytes):
        pass

    def blocks_per_sm(self, function, threads, shared_bytes):
        return 1

    def num_sms(self):
        return 132


# ------------------------------------------------------------------------------------------- CuPy


class _At:
    def __init__(self, ptr, device_id):
        self.ptr, self.device_id = ptr, device_id


class Array(np.ndarray):
    """``cupy.ndarray``: host memory that stands for the device's. Tests look at it in kernels."""

    def __new__(cls, shape, dtype=float, memptr=None):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if memptr is None:
            memptr = cls.machine.alloc(nbytes)
        raw = (ctypes.c_char * max(1, nbytes)).from_address(memptr.ptr)
        made = np.ndarray.__new__(cls, shape, dtype, raw)
        made.memptr = memptr
        return made

    machine = None

    def __array_finalize__(self, other):
        self.memptr = getattr(other, "memptr", None)

    @property
    def data(self):
        address = self.__array_interface__["data"][0]
        return _At(address, self.device.id)

    @property
    def device(self):
        machine = Array.machine.machine
        return SimpleNamespace(id=machine.baton.me.rank if machine.baton.me else 0)

    def get(self):
        """A copy on the host, in the order of the current stream."""
        machine = Array.machine.machine
        stream = machine.stack()[-1]
        found = []
        ranges = [(self.data.ptr, self.nbytes, False)]
        plain = self.view(np.ndarray)
        machine.kernel(stream, "get", ranges, lambda: found.append(plain.copy()))
        stream.synchronize()
        return found[0]


class _Chunk:
    """Memory of an arena; goes back to it the moment it dies, as in CuPy."""

    def __init__(self, address, arena):
        self.ptr, self._arena = address, arena

    def __del__(self):
        self._arena.append(self.ptr)


class _Pointer:
    """``cupy.cuda.MemoryPointer``."""

    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset

    def __add__(self, offset):
        made = object.__new__(_Pointer)
        made.mem, made.ptr = self.mem, self.ptr + offset
        return made


class _Unowned:
    """``cupy.cuda.UnownedMemory``."""

    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self.owner = ptr, size, owner


class _Device:
    """``cupy.cuda.Device``."""

    def __init__(self, number):
        self.id = number

    def use(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class _Arenas:
    """CuPy's memory pool: an arena for each stream; memory comes back in stream order. What comes
    again is overwritten first, so that whoever still uses it is seen."""

    def __init__(self, machine):
        self.machine = machine

    def alloc(self, nbytes):
        machine, gpu = self.machine, self.machine.gpu
        stream = machine.stack()[-1]
        size = -(-max(1, nbytes) // 512) * 512
        arena = gpu.arenas.setdefault((stream.ptr, size), [])
        if not arena:
            return _Pointer(_Chunk(machine.memory.take(size), arena), 0)
        address = arena.pop()
        chunk = _Chunk(address, arena)
        if stream.capture is None:
            self._overwrite(stream, address, size)
        return _Pointer(chunk, 0)

    def _overwrite(self, stream, address, size):
        def work():
            at(address, (size,), np.uint8)[:] = 0xDD

        what = f"the next user of ordinary memory on {stream.name}"
        self.machine.kernel(stream, what, [(address, size, True)], work)


class _Runtime:
    """``cupy.cuda.runtime``."""

    CUDARuntimeError = CudaError

    def __init__(self, machine):
        self._machine = machine
        self.memcpyHostToDevice, self.memcpyDeviceToHost, self.memcpyDeviceToDevice = 1, 2, 3

    def memcpyAsync(self, to, source, nbytes, kind, ptr):
        assert kind == 3
        machine = self._machine
        stream = machine.gpu.by_number[ptr]
        ranges = [(source, nbytes, False), (to, nbytes, True)]
        machine.kernel(stream, "copy", ranges, lambda: ctypes.memmove(to, source, nbytes))

    def memcpy(self, to, source, nbytes, kind):
        """Of pageable memory: to the device it is on its way when this returns."""
        machine, gpu = self._machine, self._machine.gpu
        if kind == 1:
            raw = ctypes.string_at(source, nbytes)
            machine.kernel(gpu.null, "copy from the host", [], lambda: _store(to, raw))
            return
        machine.kernel(gpu.null, "copy to the host", [], lambda: ctypes.memmove(to, source, nbytes))
        gpu.null.synchronize()

    def memset(self, address, value, nbytes):
        gpu, raw = self._machine.gpu, bytes([value]) * nbytes
        self._machine.kernel(gpu.null, "memset", [], lambda: _store(address, raw))

    def deviceSynchronize(self):
        self._machine.gpu.synchronize()

    def eventQuery(self, ptr):
        return self._machine.gpu.events[ptr].query()

    def streamIsCapturing(self, ptr):
        self._machine.cuda_call("ask whether a stream is captured", quiet=True)
        return self._machine.gpu.by_number[ptr].capture is not None

    def malloc(self, nbytes):
        self._machine.cuda_call("malloc")
        return self._machine.memory.take(nbytes)

    def free(self, address):
        pass

    def ipcGetMemHandle(self, address):
        return address.to_bytes(8, "little")

    def ipcOpenMemHandle(self, handle):
        return int.from_bytes(handle, "little")

    def ipcCloseMemHandle(self, address):
        self._machine.cuda_call("unmap a peer's memory")

    def getDeviceCount(self):
        return self._machine.num_ranks

    def deviceCanAccessPeer(self, device, peer):
        del device, peer
        return True

    def driverGetVersion(self):
        return 13000

    def hostRegister(self, address, nbytes, flags):
        pass

    def hostUnregister(self, address):
        pass


def _store(to, raw):
    ctypes.memmove(to, raw, len(raw))


def make_cupy(machine):
    """The module that stands where ``cupy`` is imported."""
    cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    Array.machine = arenas = _Arenas(machine)
    cupy.ndarray, cupy.cuda = Array, cuda
    cupy.empty = Array
    cupy.int32, cupy.float32 = np.int32, np.float32
    cuda.runtime = _Runtime(machine)
    cuda.Device, cuda.MemoryPointer, cuda.UnownedMemory = _Device, _Pointer, _Unowned
    cuda.alloc = arenas.alloc
    cuda.Event = lambda disable_timing=False: Event(machine.gpu)
    cuda.Stream = lambda non_blocking=False, priority=None: Stream(machine.gpu, non_blocking)
    cuda.get_current_stream = lambda: machine.stack()[-1]
    cuda.alloc_pinned_memory = lambda nbytes: np.zeros(nbytes, np.uint8)
    return cupy
