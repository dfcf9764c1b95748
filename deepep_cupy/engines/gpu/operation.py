"""One operation on a GPU: where it runs, what it waits for, and how long what it uses lives.

``with runtime.operation(call) as op`` is the frame of every operation that talks to other ranks::

    entered        ordered behind the last operation of any Buffer on this GPU; has a number
    op.alloc ...   memory for results, in the order of the operation's stream
    op.launch      the kernel; from here on another thread may begin the next operation
    op.finish      the caller's stream waits, or gets an event; inputs are kept until the end
    left           staged memory is given back, in stream order, however the operation ended
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import ModuleType, TracebackType
from typing import ClassVar, NoReturn, TypeAlias, overload

import numpy as np

from deepep_cupy.engines.calls import HERE, CombineCall, DispatchCall, Streams
from deepep_cupy.engines.gpu.cupy_types import DeviceArray, DType, Pointer, Stream
from deepep_cupy.engines.gpu.failures import FailureMonitor
from deepep_cupy.engines.gpu.launch import ReadyLaunch
from deepep_cupy.engines.gpu.memory import SymmetricMemory
from deepep_cupy.engines.gpu.routing import own_routing
from deepep_cupy.errors import ContractError, StateError
from deepep_cupy.memory.block import Block
from deepep_cupy.memory.cuda_ipc import CupyEvents, Recorded
from deepep_cupy.memory.stream_clock import JOINED
from deepep_cupy.protocol.headers import (
    ARGUMENTS,
    MAX_TAG,
    OFFSET_UNIT,
    Refusal,
    RefusalCode,
    tagged,
)
from deepep_cupy.ranks.rendezvous import Hurry, poll

__all__ = ["DeviceOrder", "GpuEvent", "Operation", "OperationQueue", "Retention"]

Users: TypeAlias = dict[Stream, None]
"""Streams that work on some memory, in the order they came."""

_PATIENT_POLLS = 2000
"""Polls of the counts before the host looks whether the stream is still alive."""
_LAST_SERIAL = 0xFFFFFFFF
_PROBE_EVERY = 16
"""Operations between two looks at what is over, for the sake of graphs captured later."""
_PER_THREAD = 2
"""Handle of the per-thread default stream: each thread's own, by one name."""
_HIGHEST = -100
"""A priority that CUDA clamps to the highest there is."""


class DeviceOrder:
    """The order of all operations of this process on one device.

    Attributes:
        lock: Held from ``enter`` until the operation is launched and ``leave`` was called.
        precise: Whether ``leave`` marks the end of each operation with an event. Without, the
            next operation on another stream waits for all that the stream was given meanwhile,
            which costs nothing as long as one stream is used.
    """

    _orders: ClassVar[dict[int, DeviceOrder]] = {}

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.precise = False
        self._last: Stream | None = None
        self._end: Recorded | None = None
        self._captured: tuple[int, Stream] | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, device: int) -> DeviceOrder:
        """The order of a device, shared by all Buffers of the process."""
        return cls._orders.setdefault(device, cls())

    def enter(self, stream: Stream, events: CupyEvents) -> None:
        """Make ``stream`` wait for the last operation, which may be on another stream."""
        if self._thread is not None or stream.ptr == _PER_THREAD:
            self.check_thread(stream)
        last = self._last
        if last is stream:
            self._end = None
            return
        if last is not None and last.ptr != stream.ptr:
            if self._end is None and events.capture_id(last) != 0:
                raise StateError(
                    "the last operation's stream is being captured into a graph; end the capture "
                    "before using a Buffer on another stream."
                )
            stream.wait_event((self._end or events.record(last)).event)
        self._last, self._end = stream, None

    def is_last(self, stream: Stream) -> bool:
        """Whether the last operation is on this stream."""
        return self._last is stream

    def check_thread(self, stream: Stream) -> None:
        """Refuse a second thread where one uses its per-thread default stream: nothing that this
        stream does can be waited for, or be recorded, in another thread.

        Raises:
            StateError: On this rank.
        """
        me = threading.current_thread()
        if self._thread is None and stream.ptr == _PER_THREAD:
            self._thread = me
        if self._thread not in (None, me):
            raise StateError(
                "the Buffers of this process were used on a per-thread default stream "
                "(CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1) by another thread, and only that thread "
                "can name it; in programs with several threads, let each that uses a Buffer do so "
                "on a stream of its own: with cupy.cuda.Stream(non_blocking=True)."
            )

    def leave(self, stream: Stream, events: CupyEvents) -> None:
        """The operation is launched; needed where ``precise``."""
        self._end = events.record(stream)

    def enter_captured(self, stream: Stream, events: CupyEvents, capture: int) -> None:
        """Make ``stream``, which is being captured, wait for the last operation of that graph. Its
        user orders a graph and launches outside of it, by the stream the graph is launched on, and
        whoever joins captures orders all operations in them."""
        if capture == JOINED:
            return
        if self._captured is not None:
            number, last = self._captured
            if number == capture and last.ptr != stream.ptr:
                stream.wait_event(events.record(last).event)
        self._captured = (capture, stream)

    def drain(self, events: CupyEvents, hurry: Hurry | None) -> None:
        """Wait until the last operation has ended: it ends by itself, at the latest in
        ``timeout_s``, and sooner where it can be hurried."""
        last = self._last
        if last is None:
            return
        if hurry is not None and events.capture_id(last) == 0:
            end, rounds = events.record(last), 0
            while not (hurry.done or events.query(end)):
                hurry()
                poll(rounds)
                rounds += 1
        last.synchronize()


class Retention:
    """Keeps objects until work on the GPU is over, and lends memory.

    Args:
        events: CuPy's side of the pool.
        device: CUDA ordinal.

    Attributes:
        captured: Whether graphs have operations of this Buffer.
        kept: Events, and what is kept until they are over.
        returned: Borrowed memory that has no reference left, and the streams that used it.
    """

    def __init__(self, events: CupyEvents, device: int) -> None:
        import cupy

        self._cupy: ModuleType = cupy
        self._events = events
        self._device = device
        self.kept: deque[tuple[Sequence[Recorded], object]] = deque()
        self.returned: deque[tuple[Pointer, Users]] = deque()
        self._for_ever: list[object] = []
        self.captured = False

    def until(self, event: Recorded, objects: object) -> None:
        """Keep ``objects`` until ``event`` is over."""
        self.kept.append(((event,), objects))

    def for_ever(self, objects: object) -> None:
        """Keep ``objects`` until ``clear``."""
        self._for_ever.append(objects)

    def borrow(self, nbytes: int, stream: Stream, user: Stream) -> tuple[Pointer, Borrowed]:
        """Memory for work on ``stream`` whose results ``user``, another stream, uses."""
        cuda = self._cupy.cuda
        with stream:
            memory = cuda.alloc(max(1, nbytes))
        borrowed = Borrowed(memory, self.returned, user)
        whole = cuda.UnownedMemory(memory.ptr, max(1, nbytes), borrowed, self._device)
        return cuda.MemoryPointer(whole, 0), borrowed

    def reap(self) -> None:
        """Drop what is not used any more. Not under capture: it asks events."""
        events, returned, kept = self._events, self.returned, self.kept
        waiting = []
        ends: dict[Stream, Recorded] = {}
        while returned:
            memory, users = returned.popleft()
            if any(events.capture_id(user) != 0 for user in users):
                waiting.append((memory, users))
                continue
            for user in users:
                if user not in ends:
                    ends[user] = events.record(user)
            kept.append((tuple(ends[user] for user in users), memory))
        returned.extend(waiting)
        while kept and all(map(events.query, kept[0][0])):
            kept.popleft()

    def clear(self) -> None:
        """Drop everything: nothing runs on the device any more, and no graph will."""
        self.kept.clear()
        self.returned.clear()
        self._for_ever.clear()
        self.captured = False


class Borrowed:
    """Owner of borrowed memory; dies with the last array over it.

    That may be in any thread, under any lock and during any capture, so that the finalizer only
    appends to ``returned``.

    Args:
        memory: What was borrowed.
        returned: Of the ``Retention`` that lent it.
        user: The first stream that uses the memory.

    Attributes:
        users: All streams that do.
    """

    __slots__ = ("__weakref__", "_memory", "_returned", "users")

    def __init__(
        self, memory: Pointer, returned: deque[tuple[Pointer, Users]], user: Stream
    ) -> None:
        self._memory = memory
        self._returned = returned
        self.users: Users = {user: None}

    def __del__(self) -> None:
        self._returned.append((self._memory, self.users))


class OperationQueue:
    """What the operations of one engine share.

    Args:
        device: CUDA ordinal.
        rank: For messages.
        memory: Region, pool, arrays.
        failures: What kernels have reported.

    Attributes:
        pool: Of ``memory``, as ``arrays`` and ``events``.
        comm: The communication stream: of the highest priority, waits for no default stream.
        order: Of all operations on the device.
        retention: Keeps objects until work is over.
        serial: Number of the newest operation.
        captured_calls: Calls without a tag that graphs were given.
        current_stream: CuPy's current stream of the calling thread.
    """

    def __init__(
        self, device: int, rank: int, memory: SymmetricMemory, failures: FailureMonitor
    ) -> None:
        import cupy

        self.cupy: ModuleType = cupy
        self.rank = rank
        self.memory, self.failures = memory, failures
        self.pool, self.arrays, self.events = memory.pool, memory.arrays, memory.events
        self.comm: Stream = cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST)
        self.order = DeviceOrder.of(device)
        self.retention = Retention(self.events, device)
        self.serial = self.captured_calls = 0
        self.current_stream: Callable[[], Stream] = cupy.cuda.get_current_stream
        runtime = cupy.cuda.runtime
        self._memcpy: Callable[[int, int, int, int, int], None] = runtime.memcpyAsync
        self._on_device = runtime.memcpyDeviceToDevice
        self._probe: tuple[int, Stream, Recorded, int] | None = None

    def next_serial(self, stream: Stream, capture: int) -> int:
        """Number of a new operation on ``stream``. Outside of captures a good moment to look at
        what is over."""
        self.serial = serial = self.serial % _LAST_SERIAL + 1
        if capture == 0:
            if serial % _PROBE_EVERY == 0:
                self._look(stream)
            retention = self.retention
            if retention.kept or retention.returned:
                retention.reap()
        return serial

    def _look(self, stream: Stream) -> None:
        """Learn what is over: a graph gets only memory of which the host knows that, and late peers
        write no more into blocks of operations that have ended."""
        probe = self._probe
        if probe is not None and self.events.query(probe[2]):
            self.pool.completed(probe[0], probe[1])
            self.failures.over(probe[3])
            probe = None
        if probe is None:
            # All operations are behind the last one's stream.
            tracked = self.failures.tracked if self.order.is_last(stream) else 0
            self._probe = (self.pool.checkpoint(), stream, self.events.record(stream), tracked)

    def copy_bytes(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy on the device, in stream order. ``stream``: its address."""
        self._memcpy(to, source, nbytes, self._on_device, stream)

    def keep(self, things: object) -> None:
        """Let things live until what the current stream has been given so far is over; under
        capture, for ever."""
        stream, retention = self.current_stream(), self.retention
        if self.events.capture_id(stream) != 0:
            retention.for_ever(things)
        else:
            retention.until(self.events.record(stream), things)

    def drain(self, hurry: Hurry | None = None) -> None:
        """Wait until all operations of this Buffer are over, those in graphs too. Each of them
        ends by itself, at the latest in ``timeout_s``.

        Args:
            hurry: Lets those end that wait for other ranks.
        """
        self.order.drain(self.events, hurry)
        if self.retention.captured:
            self.cupy.cuda.runtime.deviceSynchronize()


class GpuEvent:
    """``engines.calls.Event``: the end of an operation, or of what a stream had been given.

    Args:
        queue: The engine's.
        event: Recorded there.
        blocks: Of the pool, results of the operation.
        borrowed: Weak references to the owners of other memory of results.
    """

    def __init__(
        self,
        queue: OperationQueue,
        event: Recorded,
        blocks: Sequence[Block] = (),
        borrowed: Sequence[weakref.ref[Borrowed]] = (),
    ) -> None:
        self._queue = queue
        self._event = event
        self._blocks = blocks
        self._borrowed = borrowed

    def wait(self) -> None:
        """Let the current stream wait; it is a user of the results from here on. Raises what
        finished operations have left to be reported."""
        queue = self._queue
        stream = queue.current_stream()
        stream.wait_event(self._event.event)
        for block in self._blocks:
            queue.pool.record_stream(block, stream)
        for reference in self._borrowed:
            borrowed = reference()
            if borrowed is not None:
                borrowed.users[stream] = None
        queue.failures.raise_pending()


class Operation:
    """One operation's place on the GPU: on the current stream, or on the communication stream.

    A context manager (see the top of this file). The engine has one for calls without stream
    arguments, and uses it again and again.

    Args:
        queue: The engine's.

    Attributes:
        call: What the operation does; None where it has no arrays. Lives until the operation is
            over.
        serial: Its number.
        stream: Where the operation runs.
        current: The caller's stream.
        capture: Number of the capture that the operation becomes part of, 0 for none.
        plain: Whether the operation runs on the caller's stream, and no graph is captured.
        staged: Blocks to be given back when the operation is left.
    """

    __slots__ = (
        "_borrowed",
        "_kept",
        "_locked",
        "_outputs",
        "_queue",
        "call",
        "capture",
        "current",
        "plain",
        "serial",
        "staged",
        "stream",
    )

    def __init__(self, queue: OperationQueue) -> None:
        self._queue = queue
        self.call: DispatchCall | CombineCall | None = None
        self.serial = 0
        self.stream: Stream = queue.comm
        self.current: Stream = queue.comm
        self.capture = 0
        self.plain = True
        self._locked = False
        self.staged: list[Block] = []
        self._outputs: list[Block] = []
        self._borrowed: list[weakref.ref[Borrowed]] = []
        self._kept: list[object] = []

    # --------------------------------------------------------------------------------- frame

    def __enter__(self) -> Operation:
        """Begin, with the next number, behind the last operation of any Buffer on this GPU."""
        queue, call = self._queue, self.call
        events, order = queue.events, queue.order
        try:
            self.current = self.stream = stream = queue.current_stream()
            self.capture = capture = events.capture_id(stream)
            if capture < 0:
                _refuse_stream()
            self.plain = capture == 0
            if call is not None and call.streams is not HERE and call.streams.apart:
                self.plain = False
                self.stream = stream = self._move_to_comm(call.streams)
            self.serial = queue.next_serial(stream, capture)
            order.lock.acquire()
            self._locked = True
            if capture == 0:
                order.enter(stream, events)
            else:
                order.enter_captured(stream, events, capture)
        except BaseException:
            self._leave()
            raise
        return self

    def _move_to_comm(self, streams: Streams) -> Stream:
        """Let the communication stream wait for what the operation comes after."""
        queue, previous = self._queue, streams.previous_event
        comm, events = queue.comm, queue.events
        if previous is None:
            comm.wait_event(events.record(self.current).event)
        else:
            with comm:
                previous.wait()
        queue.order.precise = True
        if events.capture_id(comm) == self.capture:
            return comm
        if self.capture == 0:
            raise StateError(
                f"the communication stream of rank {queue.rank} is being captured into a graph; "
                f"end the capture before calls outside of it."
            )
        raise ContractError(
            f"argument 'previous_event' must have been made within the graph that is being "
            f"captured, on rank {queue.rank}.",
            Refusal(RefusalCode.ARGUMENT, ARGUMENTS.index("previous_event")),
        )

    def launch(self, ready: ReadyLaunch, tag: int | None = None) -> None:
        """Start the kernel that talks to the other ranks. It is the last of the operation's
        kernels that does; the next operation of any Buffer may begin.

        Args:
            ready: Its launch.
            tag: The caller's, or None.
        """
        queue, identity = self._queue, tagged(tag)
        if self.capture != 0:
            queue.retention.captured = True
        if tag is None and self.capture != 0:
            identity = queue.captured_calls = queue.captured_calls % MAX_TAG + 1
        ready(self.serial, self.stream.ptr, identity)
        order = queue.order
        if order.precise and self.capture == 0:
            order.leave(self.stream, self._queue.events)
        self._locked = False
        order.lock.release()

    def finish(self) -> GpuEvent | None:
        """All of the operation is on its stream: keep what it uses, and let the caller's stream
        wait for it, or, where the call wants an event, return that of its end."""
        call = self.call
        if self.plain:
            if call is not None and self._queue.pool.only_stream is not self.stream:
                self._use_elsewhere(call)
            if call is None or not call.kept:
                return None
        return self._finish(async_finish=call is not None and call.streams.async_finish)

    def _finish(self, *, async_finish: bool) -> GpuEvent | None:
        queue, call = self._queue, self.call
        retention, events = queue.retention, queue.events
        kept, self._kept = self._kept, []
        if call is not None:
            kept.extend(call.kept)
        if self.capture not in (0, JOINED):  # who joins captures keeps what they use
            retention.for_ever((call, kept))
        if self.current is self.stream:
            if kept and self.capture == 0:
                retention.until(events.record(self.stream), kept)
            return None
        end = events.record(self.stream)
        if self.capture == 0 and call is not None:
            retention.until(end, (call.routing, kept, self._outside_pool(call)))
        if async_finish:
            return GpuEvent(queue, end, tuple(self._outputs), tuple(self._borrowed))
        self.current.wait_event(end.event)
        return None

    def _use_elsewhere(self, call: DispatchCall | CombineCall) -> None:
        """Note that a plain call's stream works on what it reads: memory of the pool, which may
        have been made for another stream."""
        queue, stream = self._queue, self.stream
        routing = call.routing
        home = None if routing is None else own_routing(routing).stream
        if home is not None and home != stream:
            queue.retention.until(queue.events.record(stream), routing)
        self._outside_pool(call)

    def _outside_pool(self, call: DispatchCall | CombineCall) -> list[DeviceArray]:
        """The arrays of a call that the pool does not keep for the communication stream."""
        queue = self._queue
        given = [getattr(call, each.name) for each in fields(call)]
        if isinstance(call, CombineCall):
            given += call.biases
        arrays = [value for value in given if isinstance(value, queue.cupy.ndarray)]
        return [array for array in arrays if not queue.arrays.record_stream(array, self.stream)]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give back what the operation holds. After an error its kernel may be running all the
        same, and so its inputs are kept and the caller's stream waits for it."""
        if error is not None and self.call is not None:
            with contextlib.suppress(Exception):  # the first error is the one to see
                self._finish(async_finish=False)
        self._leave()

    def _leave(self) -> None:
        self.call = None
        if self._locked:
            self._locked = False
            self._queue.order.lock.release()
        if self.staged:
            # In stream order: behind the kernels, and so behind all readers.
            self.give_back(self.staged)
            self.staged = []

    # -------------------------------------------------------------------------------- memory

    def alloc(self, *wanted: tuple[int, str]) -> list[Block]:
        """Blocks of the pool, all or none; the one that will be shrunk comes last.

        Args:
            wanted: (bytes, label) of each.
        """
        pool = self._queue.pool
        blocks = pool.alloc_all(wanted, self.stream, self.capture)
        if self.current is not self.stream:
            for block in blocks:
                pool.record_stream(block, self.current)
            self._outputs += blocks
        return blocks

    def give_back(self, blocks: list[Block]) -> None:
        """Return blocks that have no owner yet."""
        pool = self._queue.pool
        for block in blocks:
            pool.free(block)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        """An array of any dtype, in ordinary memory; under capture in the pool's.

        Some allocators (CuPy's ``MemoryAsyncPool``) would make memory a part of the graph, which
        cannot be replayed while an array of the last replay is alive.
        """
        queue = self._queue
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        array: DeviceArray
        if self.capture != 0:
            (block,) = self.alloc((max(1, nbytes), "a captured call's result"))
            array = queue.arrays.array(queue.arrays.own(block), shape, dtype)
            queue.retention.for_ever(array)
            return array
        if self.current is self.stream:
            pointer = queue.cupy.cuda.alloc(nbytes)
        else:
            pointer, borrowed = queue.retention.borrow(nbytes, self.stream, self.current)
            self._borrowed.append(weakref.ref(borrowed))
        array = queue.cupy.ndarray(shape, dtype, memptr=pointer)
        return array

    @overload
    def copy(self, array: DeviceArray) -> DeviceArray: ...

    @overload
    def copy(self, array: None) -> None: ...

    def copy(self, array: DeviceArray | None) -> DeviceArray | None:
        """A copy in ordinary memory; None of None. By bytes: any dtype, and the same order."""
        if array is None:
            return None
        if array.flags.c_contiguous:
            made = self.empty(array.shape, array.dtype)
        else:
            made = self.empty(array.shape[::-1], array.dtype).T
        self.copy_bytes(made.data.ptr, array.data.ptr, array.nbytes)
        return made

    def copy_bytes(self, to: int, source: int, nbytes: int) -> None:
        """Copy on the device, in the order of the operation's stream."""
        if nbytes:
            self._queue.copy_bytes(to, source, nbytes, self.stream.ptr)

    def stage(self, nbytes: int, label: str) -> Block:
        """A block that lives until the operation is left."""
        block = self._queue.pool.alloc(nbytes, self.stream, label)
        self.staged.append(block)
        return block

    def place(self, array: DeviceArray, label: str) -> int:
        """Offset in the region where the peers find an array, copied there if need be; the copy
        lives until the operation is left."""
        memory = self._queue.memory
        offset = memory.arrays.find(array) if array.nbytes else memory.control.nbytes
        if offset is not None and offset % OFFSET_UNIT == 0:
            return offset
        block = self.stage(array.nbytes, label)
        self.copy_bytes(memory.region.base + block.offset, array.data.ptr, array.nbytes)
        return block.offset

    def keep(self, thing: object) -> None:
        """Let something live until the operation is over; under capture, for ever."""
        self._kept.append(thing)

    # --------------------------------------------------------------------------------- waits

    def wait_counts(self, number: int, blocks: list[Block]) -> list[int]:
        """Wait until the operation, which is launched, has reported its counts.

        The stream may be busy for long with what was queued before, so that the wait ends when
        the stream does. Where that fails, the blocks are given back, whoever owns them: when it
        is known that no rank writes into them any more.
        """
        queue, serial = self._queue, self.serial
        events, failures = queue.events, queue.failures
        report = failures.report
        polls, end, counts_of = 0, None, report.counts
        try:
            while True:
                counts = counts_of(serial, number)
                if counts is not None:
                    return counts
                if report.has_news:
                    failures.raise_pending(serial)
                polls += 1
                if polls % _PATIENT_POLLS == 0:
                    if end is None:
                        end = events.record(self.stream)
                    elif events.query(end):
                        counts = counts_of(serial, number)
                        return counts if counts is not None else failures.missing_report(serial)
                    time.sleep(0)  # lets other threads of this process run
        except BaseException as error:
            for block in blocks:
                if not isinstance(error, ContractError):
                    queue.pool.quarantine(block)
                queue.pool.free(block)
            raise


def _refuse_stream() -> NoReturn:
    raise StateError(
        "this stream cannot be used while another stream is being captured; use a stream made "
        "with non_blocking=True."
    )
