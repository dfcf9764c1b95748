"""What every operation of a CUDA engine needs: streams in order, kernels, memory, reports."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from deepep_cupy.engines.gpu.launches import Kernels
from deepep_cupy.engines.gpu.memory import SymmetricMemory
from deepep_cupy.engines.gpu.news import News
from deepep_cupy.engines.gpu.order import DeviceOrder
from deepep_cupy.engines.gpu.report import Report
from deepep_cupy.errors import ContractError, DeepEPCupyError
from deepep_cupy.plan.headers import dtype_code
from deepep_cupy.plan.launch import GridPlan
from deepep_cupy.plan.layout import ControlLayout
from deepep_cupy.plan.spec import BufferSpec
from deepep_cupy.transport.block import Block

__all__ = ["Core", "address", "copy_of", "dtype_code_of"]

_PATIENT_POLLS = 2000
"""Polls of the counts before the host looks whether the stream is still alive."""
_LAST_SERIAL = 0xFFFFFFFF


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
        foreign: Arrays of other libraries given to the operation that is being prepared.
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
        self.foreign: list[Any] = []
        self._kept: deque[tuple[Any, list[Any]]] = deque()
        self._captured: list[list[Any]] = []

    # --------------------------------------------------------------------------------- order

    def begin(self) -> tuple[Any, bool]:
        """The current stream, ordered behind the last operation of any Buffer on this GPU, and
        whether a graph is being captured on it. Counts the serial up."""
        stream = self._current_stream()
        capturing = self.events.capture_id(stream) != 0
        if not capturing:
            self.order.enter(stream, self.events)
        self.serial = self.serial % _LAST_SERIAL + 1
        return stream, capturing

    def keep_foreign(self) -> None:
        """Keep the arrays of other libraries that this operation was given until it is over:
        their owners reuse memory on streams of their own. Under capture, for ever."""
        if not self.foreign:
            return
        kept, stream = self._kept, self._current_stream()
        if self.events.capture_id(stream) == 0:
            while kept and self.events.query(kept[0][0]):
                kept.popleft()
            kept.append((self.events.record(stream), self.foreign))
        else:
            self._captured.append(self.foreign)
        self.foreign = []

    # --------------------------------------------------------------------------------- waits

    def wait_counts(self, number: int, stream: Any, blocks: tuple[Block, ...]) -> list[int]:
        """Wait until the operation just launched has told its counts. The stream may be busy for
        long with what was queued before, so that the wait ends when the stream does."""
        serial, counts_of, report = self.serial, self.report.counts, self.report
        polls, end = 0, None
        try:
            while True:
                counts = counts_of(serial, number)
                if counts is not None:
                    self.news.at_risk(*blocks)
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
        except DeepEPCupyError as error:
            for block in blocks:
                if not isinstance(error, ContractError):
                    self.pool.quarantine(block)
                self.pool.free(block)
            raise

    # -------------------------------------------------------------------------------- blocks

    def alloc(self, stream: Any, *wanted: tuple[int, str]) -> list[Block]:
        """Blocks for one operation, all or none; the one that will be shrunk comes last.

        Args:
            stream: Where they are used first.
            wanted: (bytes, label) of each.
        """
        blocks: list[Block] = []
        try:
            for nbytes, label in wanted:
                blocks.append(self.pool.alloc(nbytes, stream, label))
        except BaseException:
            self.give_back(blocks)
            raise
        return blocks

    def give_back(self, blocks: list[Block]) -> None:
        """Return blocks that have no owner yet."""
        for block in blocks:
            self.pool.free(block)


def address(array: Any) -> int:
    """Device address of an array; 0 for None."""
    return 0 if array is None else int(array.data.ptr)


def copy_of(array: Any) -> Any:
    """A copy in ordinary memory; by bytes, since CuPy copies no FP8."""
    return None if array is None else array.view("u1").copy().view(array.dtype)


def dtype_code_of(dtype: Any) -> int:
    """Code of a row dtype for headers and kernels."""
    name = dtype.name if dtype.isnative else "swapped bytes"
    return dtype_code(name, dtype.itemsize)
