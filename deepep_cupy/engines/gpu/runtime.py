"""The parts of one engine of a GPU, as its operations find them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from deepep_cupy.engines.calls import HERE, CombineCall, DispatchCall
from deepep_cupy.engines.gpu.failures import FailureMonitor
from deepep_cupy.engines.gpu.grid import GridPlan
from deepep_cupy.engines.gpu.launch import Kernels
from deepep_cupy.engines.gpu.memory import SymmetricMemory
from deepep_cupy.engines.gpu.operation import GpuEvent, Operation, OperationQueue
from deepep_cupy.protocol.sizes import BufferSpec

__all__ = ["Runtime"]


class Runtime:
    """The parts of one engine. A context manager: whoever enters it is on the engine's device, and
    the Buffer is not poisoned as far as this rank knows.

    Args:
        spec: Sizes of the Buffer.
        device: CUDA ordinal.
        path: ``"bulk"`` or ``"ldst"``.
        grids: Blocks per operation.
        kernels: Compiled and loaded.
        memory: Region, pool, arrays.
        failures: What kernels have reported.

    Attributes:
        bulk: Whether the path is ``"bulk"``.
        pool: Of ``memory``, as ``arrays``.
        queue: What the operations share.
    """

    def __init__(
        self,
        *,
        spec: BufferSpec,
        device: int,
        path: str,
        grids: GridPlan,
        kernels: Kernels,
        memory: SymmetricMemory,
        failures: FailureMonitor,
    ) -> None:
        import cupy

        self.spec = spec
        self.bulk = path == "bulk"
        self.grids = grids
        self.kernels = kernels
        self.memory, self.pool, self.arrays = memory, memory.pool, memory.arrays
        self.failures = failures
        self.queue = OperationQueue(device, spec.rank, memory, failures)
        self._device: Any = cupy.cuda.Device(device)
        self._operation = Operation(self.queue)
        self._grids: dict[int, GridPlan] = {}

    def __enter__(self) -> Runtime:
        self.failures.raise_failure()
        self._device.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._device.__exit__(*error)
        self.failures.left_at = time.monotonic()

    def operation(self, call: DispatchCall | CombineCall | None = None) -> Operation:
        """The frame of an operation, to be entered; see ``engines.gpu.operation``.

        Args:
            call: What the operation does; None: it has no arrays, and is on the current stream.
        """
        op = self._operation
        if call is not None and call.streams is not HERE and call.streams.apart:
            op = Operation(self.queue)
        op.call = call
        return op

    def point(self) -> GpuEvent:
        """What the current stream has been given so far."""
        queue = self.queue
        return GpuEvent(queue, queue.events.record(queue.current_stream()))

    def grid_plan(self, num_sms: int | None) -> GridPlan:
        """Blocks per operation where a call asks for so many; a hint."""
        if num_sms is None:
            return self.grids
        plan = self._grids.get(num_sms)
        if plan is None:
            plan = self._grids[num_sms] = replace(self.grids, wanted=num_sms)
        return plan
