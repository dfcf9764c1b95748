"""What every operation of a CUDA engine needs: streams in order, kernels, memory, reports."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from deepep_cupy.engines.calls import HERE, CombineCall, DispatchCall, Streams
from deepep_cupy.engines.gpu.failures import FailureMonitor, Report
from deepep_cupy.engines.gpu.grid import GridPlan
from deepep_cupy.engines.gpu.launch import Kernels
from deepep_cupy.engines.gpu.memory import SymmetricMemory
from deepep_cupy.errors import ContractError, StateError
from deepep_cupy.memory.block import Block
from deepep_cupy.protocol.control_block import ControlLayout
from deepep_cupy.protocol.headers import ARGUMENTS, OFFSET_UNIT, Refusal, RefusalCode, dtype_code
from deepep_cupy.protocol.sizes import BufferSpec

if TYPE_CHECKING:
    pass

__all__ = [
    "DeviceOrder",
    "GpuEvent",
    "Operation",
    "Retention",
    "Runtime",
    "address",
    "dtype_code_of",
]


# ------------------ Where an operation runs, whose its arrays are, and how long what it uses lives


class Retention:
    """Keeps objects until work on the GPU is over, and lends memory.

    Args:
        events: CuPy's side of the pool.
        device: CUDA ordinal.

    Attributes:
        kept: Events, and what is kept until they are over.
        returned: Borrowed memory that nobody refers to any more, and the streams that used it.
    """

    def __init__(self, events: Any, device: int) -> None:
        import cupy

        self._cupy: Any = cupy
        self._events = events
        self._device = device
        self.kept: deque[tuple[Sequence[Any], Any]] = deque()
        self.returned: deque[tuple[Any, dict[Any, None]]] = deque()
        self._for_ever: list[Any] = []

    @property
    def captured(self) -> bool:
        """Whether graphs use anything."""
        return bool(self._for_ever)

    def until(self, event: Any, objects: Any) -> None:
        """Keep ``objects`` until ``event`` is over."""
        self.kept.append(((event,), objects))

    def for_ever(self, objects: Any) -> None:
        """Keep ``objects`` until ``clear``."""
        self._for_ever.append(objects)

    def borrow(self, nbytes: int, stream: Any, user: Any) -> tuple[Any, Borrowed]:
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
        marks: dict[Any, Any] = {}
        while returned:
            memory, users = returned.popleft()
            if any(events.capture_id(user) != 0 for user in users):
                waiting.append((memory, users))
                continue
            for user in users:
                if user not in marks:
                    marks[user] = events.record(user)
            kept.append((tuple(marks[user] for user in users), memory))
        returned.extend(waiting)
        while kept and all(map(events.query, kept[0][0])):
            kept.popleft()

    def clear(self) -> None:
        """Drop everything: nothing runs on the device any more, and no graph will."""
        self.kept.clear()
        self.returned.clear()
        self._for_ever.clear()


class Borrowed:
    """Owner of lent memory; dies with the last array over it. Any thread, any lock, any capture:
    the finalizer only appends."""

    __slots__ = ("__weakref__", "_memory", "_returned", "users")

    def __init__(
        self, memory: Any, returned: deque[tuple[Any, dict[Any, None]]], user: Any
    ) -> None:
        self._memory = memory
        self._returned = returned
        self.users: dict[Any, None] = {user: None}

    def __del__(self) -> None:
        self._returned.append((self._memory, self.users))


class GpuEvent:
    """``engines.protocol.Event``: the end of an operation, or of what a stream had been given.

    Args:
        core: The engine's parts.
        event: Recorded.
        blocks: Of the pool, results of the operation.
        lent: Other memory of results.
    """

    def __init__(
        self,
        runtime: Runtime,
        event: Any,
        blocks: Sequence[Block] = (),
        borrowed: Sequence[Any] = (),
    ) -> None:
        self._runtime = runtime
        self._event = event
        self._blocks = blocks
        self._borrowed = borrowed

    def wait(self) -> None:
        """Let the current stream wait; it is a user of the results from here on. Raises what
        finished operations have left to be reported."""
        runtime = self._runtime
        stream = runtime.cupy.cuda.get_current_stream()
        stream.wait_event(self._event.event)
        for block in self._blocks:
            runtime.pool.record_stream(block, stream)
        for reference in self._borrowed:
            borrowed = reference()
            if borrowed is not None:
                borrowed.users[stream] = None
        runtime.failures.raise_pending()


class Operation:
    """One operation's place on the GPU. The engine has one for calls without streams, and uses
    it again and again.

    Args:
        core: The engine's parts.

    Attributes:
        stream: Where the operation runs.
        current: The caller's stream.
        capture: Number of the capture that the operation becomes part of, 0 for none.
        plain: Whether the operation runs on the caller's stream, and no graph is captured.
        held: Whether the device's lock is held.
        staged: Blocks to be given back at the end.
    """

    __slots__ = (
        "_borrowed",
        "_outputs",
        "_runtime",
        "capture",
        "current",
        "held",
        "plain",
        "staged",
        "stream",
    )

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.stream: Any = None
        self.current: Any = None
        self.capture = 0
        self.plain = True
        self.held = False
        self.staged: list[Block] = []
        self._outputs: list[Block] = []
        self._borrowed: list[Any] = []

    @property
    def capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.capture != 0

    def alloc(self, *wanted: tuple[int, str]) -> list[Block]:
        """Blocks of the pool, all or none; the one that will be shrunk comes last.

        Args:
            wanted: (bytes, label) of each.
        """
        pool = self._runtime.pool
        blocks = pool.alloc_all(wanted, self.stream, self.capture)
        if self.current is not self.stream:
            for block in blocks:
                pool.record_stream(block, self.current)
            self._outputs += blocks
        return blocks

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array in ordinary memory, of any dtype."""
        runtime, cuda = self._runtime, self._runtime.cupy.cuda
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if self.current is self.stream:
            pointer = cuda.alloc(nbytes)
        elif self.capture != 0:
            with self.stream:
                pointer = cuda.alloc(nbytes)
        else:
            pointer, borrowed = runtime.retention.borrow(nbytes, self.stream, self.current)
            self._borrowed.append(weakref.ref(borrowed))
        array = runtime.cupy.ndarray(shape, dtype, memptr=pointer)
        if self.capture != 0:
            runtime.retention.for_ever(array)
        return array

    def copy(self, array: Any) -> Any:
        """A copy in ordinary memory; None of None. By bytes: any dtype, and the same order."""
        if array is None:
            return None
        if array.flags.c_contiguous:
            made = self.empty(array.shape, array.dtype)
        else:
            made = self.empty(array.shape[::-1], array.dtype).T
        self._runtime.copy_bytes(made.data.ptr, array.data.ptr, array.nbytes, self.stream)
        return made

    def keep(self, thing: Any) -> None:
        """Let something live until the operation is over; under capture, for ever."""
        self._runtime.keep_alive.append(thing)

    def point(self, event: Any) -> GpuEvent:
        """The end of this operation, for the caller."""
        return GpuEvent(self._runtime, event, tuple(self._outputs), tuple(self._borrowed))


# ---------------- One operation at a time on a GPU, whatever Buffers, streams and threads a proces


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
        self._last: Any = None
        self._end: Any = None
        self._captured: tuple[int, Any] = (0, None)

    @classmethod
    def of(cls, device: int) -> DeviceOrder:
        """The order of a device, shared by all Buffers of the process."""
        return cls._orders.setdefault(device, cls())

    def enter(self, stream: Any, events: Any) -> None:
        """Make ``stream`` wait for the last operation, which may be on another stream."""
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

    def leave(self, stream: Any, events: Any) -> None:
        """The operation is launched; needed where ``precise``."""
        self._end = events.record(stream)

    def enter_captured(self, stream: Any, events: Any, capture: int) -> None:
        """The same for an operation in a graph: behind the last one of that graph. How a graph
        stands to what is launched outside of it is its user's to say, by the stream."""
        number, last = self._captured
        if number == capture and last.ptr != stream.ptr:
            stream.wait_event(events.record(last).event)
        self._captured = (capture, stream)

    def drain(self) -> None:
        """Wait until the last operation has ended: it ends by itself, at the latest in
        ``timeout_s``."""
        if self._last is not None:
            self._last.synchronize()


_PATIENT_POLLS = 2000
"""Polls of the counts before the host looks whether the stream is still alive."""
_LAST_SERIAL = 0xFFFFFFFF
_PROBE_EVERY = 16
"""Operations between two looks at what is over, for the sake of graphs captured later."""
_HIGHEST = -100
"""A priority that CUDA clamps to the highest there is."""


class Runtime:
    """The parts of one engine, and the order of its operations.

    Args:
        spec: Sizes of the Buffer.
        control: Layout of the control block.
        device: CUDA ordinal.
        path: ``"bulk"`` or ``"ldst"``.
        grids: Blocks per operation.
        kernels: Compiled and loaded.
        memory: Region, pool, arrays.
        report: What kernels write.
        news: What becomes of it.

    Attributes:
        serial: Number of the newest launch.
        comm: The communication stream: of the highest priority, waits for no default stream.
        keeper: Keeps objects until work is over.
        foreign: Arrays of other libraries, and whatever else lives until the operation that is
            being prepared is over.
    """

    def __init__(
        self,
        *,
        spec: BufferSpec,
        control: ControlLayout,
        device: int,
        path: str,
        grids: GridPlan,
        kernels: Kernels,
        memory: SymmetricMemory,
        report: Report,
        failures: FailureMonitor,
    ) -> None:
        import cupy

        self.cupy: Any = cupy
        self.spec = spec
        self.control = control
        self.bulk = path == "bulk"
        self.grids = grids
        self.kernels = kernels
        self.memory = memory
        self.pool, self.arrays, self.events = memory.pool, memory.arrays, memory.events
        self.report = report
        self.failures = failures
        self.order = DeviceOrder.of(device)
        self.serial = 0
        self._current_stream: Any = cupy.cuda.get_current_stream
        self._array: type = cupy.ndarray
        self.comm: Any = cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST)
        self.retention = Retention(self.events, device)
        self.keep_alive: list[Any] = []
        self._device: Any = cupy.cuda.Device(device)
        self._operation = Operation(self)
        self._probe: tuple[int, Any, Any] | None = None
        self._grids: dict[int, GridPlan] = {}
        runtime = cupy.cuda.runtime
        self._memcpy: Any = runtime.memcpyAsync
        self._on_device = runtime.memcpyDeviceToDevice

    # --------------------------------------------------------------------------------- order

    def __enter__(self) -> Runtime:
        """A call, on the engine's device, after what earlier ones have left to be raised."""
        self.failures.raise_pending()
        self._device.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._device.__exit__(*error)

    def begin(self, streams: Streams = HERE) -> Operation:
        """Begin an operation: on the current stream, or on the communication stream, ordered
        behind the last operation of any Buffer on this GPU. Counts the serial up. ``launched``
        must follow, and ``end`` in any case."""
        stream, events, op = self._current_stream(), self.events, self._operation
        capture = events.capture_id(stream)
        if capture < 0:
            raise StateError(
                "this stream cannot be used while another stream is being captured; use a stream "
                "made with non_blocking=True."
            )
        if streams is not HERE and (streams.async_finish or streams.previous_event is not None):
            op = Operation(self)
            op.current, op.capture = stream, capture
            self._move_to_comm(op, streams)
            op.stream = stream = self.comm
            op.plain = False
        else:
            op.current = op.stream = stream
            op.capture = capture
            op.plain = capture == 0
        self.serial = serial = self.serial % _LAST_SERIAL + 1
        if capture == 0:
            if serial % _PROBE_EVERY == 0:
                self._look(stream)
            retention = self.retention
            if retention.kept or retention.returned:
                retention.reap()
        order = self.order
        order.lock.acquire()
        op.held = True
        try:
            if capture == 0:
                order.enter(stream, events)
            else:
                order.enter_captured(stream, events, capture)
        except BaseException:
            self.end(op)
            raise
        return op

    def _move_to_comm(self, op: Operation, streams: Streams) -> None:
        """Let the communication stream wait for what the operation comes after."""
        comm, previous = self.comm, streams.previous_event
        if previous is None:
            comm.wait_event(self.events.record(op.current).event)
        else:
            with comm:
                previous.wait()
        self.order.precise = True
        found = self.events.capture_id(comm)
        if found == op.capture:
            return
        if op.capture == 0:
            raise StateError(
                f"the communication stream of rank {self.spec.rank} is being captured into a "
                f"graph; end the capture before calls outside of it."
            )
        raise ContractError(
            f"argument 'previous_event' must have been made within the graph that is being "
            f"captured, on rank {self.spec.rank}.",
            Refusal(RefusalCode.ARGUMENT, ARGUMENTS.index("previous_event")),
        )

    def launched(self, op: Operation) -> None:
        """The operation is on its stream: the next one may come."""
        if op.held:
            order = self.order
            if order.precise and op.capture == 0:
                order.leave(op.stream, self.events)
            op.held = False
            order.lock.release()

    def end(self, op: Operation) -> None:
        """Give back what the turn holds, however the operation ended."""
        if op.held:
            op.held = False
            self.order.lock.release()
        if op.staged:
            # In stream order: behind the kernels, and so behind all readers.
            self.give_back(op.staged)
            op.staged = []

    def settle(
        self, op: Operation, call: DispatchCall | CombineCall, streams: Streams
    ) -> GpuEvent | None:
        """All of the operation is on its stream: keep what it uses, let the caller's stream wait
        for it, or say when it is over."""
        keep_alive, self.keep_alive = self.keep_alive, []
        if op.capture != 0:
            self.retention.for_ever((call, keep_alive))
        if op.current is op.stream:
            if keep_alive and op.capture == 0:
                self.retention.until(self.events.record(op.stream), keep_alive)
            return None
        end = self.events.record(op.stream)
        if op.capture == 0:
            self.retention.until(end, (call.routing, keep_alive, self._outside_pool(call)))
        if streams.async_finish:
            return op.point(end)
        op.current.wait_event(end.event)
        return None

    def settle_failed(self, op: Operation, call: DispatchCall | CombineCall) -> None:
        """The same for an operation that raised: its kernel may be running."""
        with contextlib.suppress(Exception):  # the first error is the one to see
            self.settle(op, call, Streams())

    def point(self) -> GpuEvent:
        """What the current stream has been given so far."""
        return GpuEvent(self, self.events.record(self._current_stream()))

    def drain(self) -> None:
        """Wait until all operations of this Buffer are over, those in graphs too. Each of them
        ends by itself, at the latest in ``timeout_s``."""
        self.order.drain()
        if self.retention.captured:
            self.cupy.cuda.runtime.deviceSynchronize()

    def _outside_pool(self, call: DispatchCall | CombineCall) -> list[Any]:
        """The arrays of a call that the pool does not keep for the communication stream."""
        given = [getattr(call, each.name) for each in fields(call)]
        if isinstance(call, CombineCall):
            given += call.biases
        arrays = [value for value in given if isinstance(value, self._array)]
        return [array for array in arrays if not self.arrays.record_stream(array, self.comm)]

    def _look(self, stream: Any) -> None:
        """Tell the pool what is over: a graph gets only memory of which the host knows that."""
        probe = self._probe
        if probe is not None and self.events.query(probe[2]):
            self.pool.completed(probe[0], probe[1])
            probe = None
        if probe is None:
            self._probe = (self.pool.checkpoint(), stream, self.events.record(stream))

    def grid_plan(self, num_sms: int | None) -> GridPlan:
        """Blocks per operation where a call asks for so many; a hint."""
        if num_sms is None:
            return self.grids
        plan = self._grids.get(num_sms)
        if plan is None:
            plan = self._grids[num_sms] = replace(self.grids, wanted=num_sms)
        return plan

    # --------------------------------------------------------------------------------- waits

    def wait_counts(self, number: int, stream: Any, blocks: list[Block]) -> list[int]:
        """Wait until the operation just launched has told its counts. The stream may be busy for
        long with what was queued before, so that the wait ends when the stream does. Where that
        fails, the blocks are given back, whoever owns them: when it is known that nobody writes
        into them any more."""
        serial, counts_of, report = self.serial, self.report.counts, self.report
        polls, end = 0, None
        try:
            while True:
                counts = counts_of(serial, number)
                if counts is not None:
                    return counts
                if report.has_news:
                    self.failures.raise_pending(serial)
                polls += 1
                if polls % _PATIENT_POLLS == 0:
                    if end is None:
                        end = self.events.record(stream)
                    elif self.events.query(end):
                        counts = counts_of(serial, number)
                        return (
                            counts if counts is not None else self.failures.missing_report(serial)
                        )
                    time.sleep(0)  # lets other threads of this process run
        except BaseException as error:
            for block in blocks:
                if not isinstance(error, ContractError):
                    self.pool.quarantine(block)
                self.pool.free(block)
            raise

    # ------------------------------------------------------------------------ blocks and bytes

    def place(self, array: Any, op: Operation, label: str) -> int:
        """Offset in the region where the peers find an array, copied there if need be; the copy
        lives until the end of the turn."""
        offset = self.arrays.find(array) if array.nbytes else self.control.nbytes
        if offset is not None and offset % OFFSET_UNIT == 0:
            return offset
        block = self.stage(array.nbytes, op, label)
        self.copy_bytes(
            self.memory.region.base + block.offset, array.data.ptr, array.nbytes, op.stream
        )
        return block.offset

    def stage(self, nbytes: int, op: Operation, label: str) -> Block:
        """A block that lives until the end of the turn."""
        block = self.pool.alloc(nbytes, op.stream, label)
        op.staged.append(block)
        return block

    def copy_bytes(self, to: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy on the device, in stream order."""
        if nbytes:
            self._memcpy(to, source, nbytes, self._on_device, stream.ptr)

    def give_back(self, blocks: list[Block]) -> None:
        """Return blocks that have no owner yet."""
        for block in blocks:
            self.pool.free(block)


def address(array: Any) -> int:
    """Device address of an array; 0 for None."""
    return 0 if array is None else int(array.data.ptr)


def dtype_code_of(dtype: Any, scales: Any = None) -> int:
    """Code of a row dtype, and of that of its scales if there are any, for headers and kernels."""
    name = dtype.name if dtype.isnative else "swapped bytes"
    return dtype_code(name, dtype.itemsize, None if scales is None else scales.name)
