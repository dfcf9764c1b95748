"""What every operation of a CUDA engine needs: streams in order, kernels, memory, reports."""

from __future__ import annotations

import contextlib
import time
from dataclasses import fields, replace
from typing import Any

from deepep_cupy.engines.base import HERE, CombineCall, DispatchCall, Streams
from deepep_cupy.engines.gpu.launches import Kernels
from deepep_cupy.engines.gpu.memory import SymmetricMemory
from deepep_cupy.engines.gpu.news import News
from deepep_cupy.engines.gpu.order import DeviceOrder
from deepep_cupy.engines.gpu.report import Report
from deepep_cupy.engines.gpu.streams import Keeper, StreamPoint, Turn
from deepep_cupy.errors import ContractError, StateError
from deepep_cupy.plan.headers import ARGUMENTS, OFFSET_UNIT, Refusal, RefusalCode, dtype_code
from deepep_cupy.plan.launch import GridPlan
from deepep_cupy.plan.layout import ControlLayout
from deepep_cupy.plan.spec import BufferSpec
from deepep_cupy.transport.block import Block

__all__ = ["Core", "address", "dtype_code_of"]

_PATIENT_POLLS = 2000
"""Polls of the counts before the host looks whether the stream is still alive."""
_LAST_SERIAL = 0xFFFFFFFF
_PROBE_EVERY = 16
"""Operations between two looks at what is over, for the sake of graphs captured later."""
_HIGHEST = -100
"""A priority that CUDA clamps to the highest there is."""


class Core:
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
        news: News,
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
        self.news = news
        self.order = DeviceOrder.of(device)
        self.serial = 0
        self._current_stream: Any = cupy.cuda.get_current_stream
        self._array: type = cupy.ndarray
        self.comm: Any = cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST)
        self.keeper = Keeper(self.events, device)
        self.foreign: list[Any] = []
        self._device: Any = cupy.cuda.Device(device)
        self._turn = Turn(self)
        self._probe: tuple[int, Any, Any] | None = None
        self._grids: dict[int, GridPlan] = {}
        runtime = cupy.cuda.runtime
        self._memcpy: Any = runtime.memcpyAsync
        self._on_device = runtime.memcpyDeviceToDevice

    # --------------------------------------------------------------------------------- order

    def __enter__(self) -> Core:
        """A call, on the engine's device, after what earlier ones have left to be raised."""
        self.news.raise_any()
        self._device.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._device.__exit__(*error)

    def begin(self, streams: Streams = HERE) -> Turn:
        """Begin an operation: on the current stream, or on the communication stream, ordered
        behind the last operation of any Buffer on this GPU. Counts the serial up. ``launched``
        must follow, and ``end`` in any case."""
        stream, events, turn = self._current_stream(), self.events, self._turn
        capture = events.capture_id(stream)
        if capture < 0:
            raise StateError(
                "this stream cannot be used while another stream is being captured; use a stream "
                "made with non_blocking=True."
            )
        if streams is not HERE and (streams.async_finish or streams.previous_event is not None):
            turn = Turn(self)
            turn.current, turn.capture = stream, capture
            self._move_to_comm(turn, streams)
            turn.stream = stream = self.comm
            turn.plain = False
        else:
            turn.current = turn.stream = stream
            turn.capture = capture
            turn.plain = capture == 0
        self.serial = serial = self.serial % _LAST_SERIAL + 1
        if capture == 0:
            if serial % _PROBE_EVERY == 0:
                self._look(stream)
            keeper = self.keeper
            if keeper.kept or keeper.returned:
                keeper.reap()
        order = self.order
        order.lock.acquire()
        turn.held = True
        try:
            if capture == 0:
                order.enter(stream, events)
            else:
                order.enter_captured(stream, events, capture)
        except BaseException:
            self.end(turn)
            raise
        return turn

    def _move_to_comm(self, turn: Turn, streams: Streams) -> None:
        """Let the communication stream wait for what the operation comes after."""
        comm, previous = self.comm, streams.previous_event
        if previous is None:
            comm.wait_event(self.events.record(turn.current).event)
        else:
            with comm:
                previous.wait()
        self.order.precise = True
        found = self.events.capture_id(comm)
        if found == turn.capture:
            return
        if turn.capture == 0:
            raise StateError(
                f"the communication stream of rank {self.spec.rank} is being captured into a "
                f"graph; end the capture before calls outside of it."
            )
        raise ContractError(
            f"argument 'previous_event' must have been made within the graph that is being "
            f"captured, on rank {self.spec.rank}.",
            Refusal(RefusalCode.ARGUMENT, ARGUMENTS.index("previous_event")),
        )

    def launched(self, turn: Turn) -> None:
        """The operation is on its stream: the next one may come."""
        if turn.held:
            order = self.order
            if order.precise and turn.capture == 0:
                order.leave(turn.stream, self.events)
            turn.held = False
            order.lock.release()

    def end(self, turn: Turn) -> None:
        """Give back what the turn holds, however the operation ended."""
        if turn.held:
            turn.held = False
            self.order.lock.release()
        if turn.staged:
            # In stream order: behind the kernels, and so behind all readers.
            self.give_back(turn.staged)
            turn.staged = []

    def settle(
        self, turn: Turn, call: DispatchCall | CombineCall, streams: Streams
    ) -> StreamPoint | None:
        """All of the operation is on its stream: keep what it uses, let the caller's stream wait
        for it, or say when it is over."""
        foreign, self.foreign = self.foreign, []
        if turn.capture != 0:
            self.keeper.for_ever((call, foreign))
        if turn.current is turn.stream:
            if foreign and turn.capture == 0:
                self.keeper.until(self.events.record(turn.stream), foreign)
            return None
        end = self.events.record(turn.stream)
        if turn.capture == 0:
            self.keeper.until(end, (call.routing, foreign, self._outside_pool(call)))
        if streams.async_finish:
            return turn.point(end)
        turn.current.wait_event(end.event)
        return None

    def settle_failed(self, turn: Turn, call: DispatchCall | CombineCall) -> None:
        """The same for an operation that raised: its kernel may be running."""
        with contextlib.suppress(Exception):  # the first error is the one to see
            self.settle(turn, call, Streams())

    def point(self) -> StreamPoint:
        """What the current stream has been given so far."""
        return StreamPoint(self, self.events.record(self._current_stream()))

    def drain(self) -> None:
        """Wait until all operations of this Buffer are over, those in graphs too. Each of them
        ends by itself, at the latest in ``timeout_s``."""
        self.order.drain()
        if self.keeper.captured:
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
                    self.news.raise_any(serial)
                polls += 1
                if polls % _PATIENT_POLLS == 0:
                    if end is None:
                        end = self.events.record(stream)
                    elif self.events.query(end):
                        counts = counts_of(serial, number)
                        return counts if counts is not None else self.news.silence(serial)
                    time.sleep(0)  # lets other threads of this process run
        except BaseException as error:
            for block in blocks:
                if not isinstance(error, ContractError):
                    self.pool.quarantine(block)
                self.pool.free(block)
            raise

    # ------------------------------------------------------------------------ blocks and bytes

    def place(self, array: Any, turn: Turn, label: str) -> int:
        """Offset in the region where the peers find an array, copied there if need be; the copy
        lives until the end of the turn."""
        offset = self.arrays.find(array) if array.nbytes else self.control.nbytes
        if offset is not None and offset % OFFSET_UNIT == 0:
            return offset
        block = self.stage(array.nbytes, turn, label)
        self.copy_bytes(
            self.memory.region.base + block.offset, array.data.ptr, array.nbytes, turn.stream
        )
        return block.offset

    def stage(self, nbytes: int, turn: Turn, label: str) -> Block:
        """A block that lives until the end of the turn."""
        block = self.pool.alloc(nbytes, turn.stream, label)
        turn.staged.append(block)
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
