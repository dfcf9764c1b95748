"""As much of CuPy as the engine uses. Work is done at once; order is judged by vector clocks."""

from __future__ import annotations

import ctypes
import itertools
import math
import threading

import numpy as np

_numbers = itertools.count(16)  # below are handles with a meaning
_local = threading.local()


class RaceError(AssertionError):
    """Two accesses to the same bytes, one of them a write, that nothing orders."""


class Tracker:
    """Who touched which bytes, and what each stream has waited for. One device."""

    def __init__(self):
        self.host = {}  # stream number -> how much of its work the host has seen done
        self.accesses = []  # (begin, end, write, stream number, its clock, what)

    def touch(self, stream, what, *ranges):
        """One piece of work on a stream. ranges: (address, nbytes, write)."""
        for key, value in self.host.items():
            stream.clock[key] = max(value, stream.clock.get(key, 0))
        stream.clock[stream.ptr] = stream.clock.get(stream.ptr, 0) + 1
        for begin, nbytes, write in ranges:
            if nbytes:
                self._one(stream, what, begin, begin + nbytes, write)

    def _one(self, stream, what, begin, end, write):
        left = []
        for other in self.accesses:
            low, high, wrote, number, time, before = other
            if low < end and begin < high and (write or wrote):
                if stream.clock.get(number, 0) < time:
                    raise RaceError(f"{what} on stream {stream.ptr} is not ordered behind {before}")
                if write and begin <= low and high <= end:
                    continue  # replaced
            left.append(other)
        now = stream.clock[stream.ptr]
        left.append((begin, end, write, stream.ptr, now, f"{what} on stream {stream.ptr}"))
        self.accesses = left

    def forget(self, begin, end):
        """The bytes went back to the operating system."""
        self.accesses = [a for a in self.accesses if not (begin <= a[0] and a[1] <= end)]


class Stream:
    null = None

    def __init__(self, non_blocking=False, priority=None):
        self.ptr = next(_numbers)
        self.priority = priority
        self.clock = {}
        self.graph = None

    def __hash__(self):
        return self.ptr

    def __eq__(self, other):
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __enter__(self):
        stack().append(self)
        return self

    def __exit__(self, *error):
        stack().pop()

    def use(self):
        stack()[-1:] = [self]

    def wait_event(self, event):
        if event.graph is not None:
            assert self.graph in (None, event.graph), "a stream in two captures"
            self.graph = event.graph
            event.graph.streams.add(self)
        else:
            assert self.graph is None, "a graph waits for an event from outside"
        for key, value in event.clock.items():
            self.clock[key] = max(value, self.clock.get(key, 0))

    def synchronize(self):
        assert self.graph is None, "a stream under capture is synchronized"
        device().tracker.host.update(
            {k: max(v, device().tracker.host.get(k, 0)) for k, v in self.clock.items()}
        )

    def begin_capture(self):
        self.graph = Graph(self)

    def end_capture(self):
        graph = self.graph
        for stream in graph.streams:
            joined = stream is self or self.clock.get(stream.ptr, 0) >= stream.clock[stream.ptr]
            assert joined, "a stream of the capture was not joined"
            stream.graph = None
        return graph


class Graph:
    """Work to be done later, again and again."""

    def __init__(self, stream):
        self.number = next(_numbers)
        self.streams = {stream}
        self.work = []

    def launch(self, stream=None):
        stream = stream or current_stream()
        for work in self.work:
            work(stream)


class Event:
    def __init__(self, disable_timing=False):
        self.ptr = next(_numbers)
        self.clock, self.graph = {}, None

    def record(self, stream=None):
        stream = stream or current_stream()
        stream.clock[stream.ptr] = stream.clock.get(stream.ptr, 0) + 1
        self.clock, self.graph = dict(stream.clock), stream.graph


class Events:
    """``memory.stream_clock.EventSource``, and the event itself as CupyEvents has it."""

    class Recorded:
        def __init__(self, event):
            self.event = event

    patient = False
    """True: the host never finds an event done that it does not know to be."""

    def record(self, stream):
        event = Event()
        event.record(stream)
        return self.Recorded(event)

    def query(self, recorded):
        event, host = recorded.event, device().tracker.host
        assert event.graph is None, "an event of a graph is asked"
        done = all(host.get(key, 0) >= value for key, value in event.clock.items())
        if not done and not self.patient:
            for key, value in event.clock.items():
                host[key] = max(value, host.get(key, 0))
            done = True
        return done

    def wait(self, stream, recorded):
        stream.wait_event(recorded.event)

    def capture_id(self, stream):
        return 0 if stream.graph is None else stream.graph.number


# ------------------------------------------------------------------------------------- memory


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset

    def __add__(self, offset):
        made = object.__new__(MemoryPointer)
        made.mem, made.ptr = self.mem, self.ptr + offset
        return made


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self.owner = ptr, size, owner


class _Chunk:
    """Goes back to its stream's arena the moment it dies, as in CuPy."""

    def __init__(self, memory, arena):
        self.memory, self.arena, self.ptr = memory, arena, memory.ctypes.data

    def __del__(self):
        self.arena.append(self.memory)


def alloc(nbytes):
    arena = device().arenas.setdefault((current_stream().ptr, nbytes), [])
    memory = arena.pop() if arena else np.full(nbytes + 64, 0xAB, np.uint8)
    return MemoryPointer(_Chunk(memory, arena), -memory.ctypes.data % 64)


class ndarray(np.ndarray):  # noqa: N801
    def __new__(cls, shape, dtype=float, memptr=None):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if memptr is None:
            assert not dtype.name.startswith("float8"), "CuPy makes no FP8 arrays"
            memptr = alloc(nbytes)
        memory = (ctypes.c_char * max(1, nbytes)).from_address(memptr.ptr)
        made = np.ndarray.__new__(cls, shape, dtype, memory)
        made.memptr = memptr
        return made

    def __array_finalize__(self, other):
        self.memptr = getattr(other, "memptr", None)

    @property
    def data(self):
        return _At(self.__array_interface__["data"][0])

    @property
    def device(self):
        return device()

    def get(self):
        return np.array(self.view(np.ndarray))


class _At:
    def __init__(self, ptr):
        self.ptr = ptr


def empty(shape, dtype=float):
    return ndarray(shape, dtype)


def asarray(value):
    """A NumPy array on the device, any dtype, written by the current stream."""
    pointer = alloc(value.nbytes)
    made = ndarray(value.shape, value.dtype, pointer)
    raw = np.ascontiguousarray(value).view(np.uint8) if value.size else value
    if value.size:
        np.ndarray.view(made, np.ndarray).view(np.uint8)[...] = raw
        device().tracker.touch(current_stream(), "input", (made.data.ptr, made.nbytes, True))
    return made


# ------------------------------------------------------------------------------------- device


class Device:
    """The device of one rank; the current one of its thread."""

    def __init__(self, number):
        self.id = number
        self.tracker = Tracker()
        self.arenas = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def set_device(made):
    """Make it the current device of this thread, with a default stream."""
    _local.device, _local.stack = made, [Stream()]


def device():
    return _local.device


def stack():
    return _local.stack


def current_stream():
    return stack()[-1]


def run(stream, what, work, *ranges):
    """Do work on a stream, or note it down for the graph that is being captured."""

    def now(where):
        device().tracker.touch(where, what, *ranges)
        work()

    if stream.graph is None:
        now(stream)
    else:
        stream.clock[stream.ptr] = stream.clock.get(stream.ptr, 0) + 1
        stream.graph.work.append(now)


def by_pointer(ptr):
    """The stream with that number: launches know no more."""
    return _streams[ptr]


_streams = {}
_init = Stream.__init__


def _register(self, non_blocking=False, priority=None):
    _init(self, non_blocking, priority)
    _streams[self.ptr] = self


Stream.__init__ = _register


def memcpy_async(to, source, nbytes, kind, ptr):
    run(
        by_pointer(ptr),
        "memcpy",
        lambda: ctypes.memmove(to, source, nbytes),
        (source, nbytes, False),
        (to, nbytes, True),
    )
