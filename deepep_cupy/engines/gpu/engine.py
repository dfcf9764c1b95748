"""The engine of a node of GPUs: CuPy arrays, and one kernel per operation and rank.

A dispatch writes every row at its final place in a block of the receiver's pool; a combine reads
rows where they lie in the pools. What the kernels tell each other is in ``cuda/comm/``, where the
words lie in ``protocol/control_block.py``; this package chooses blocks, launches kernels in stream
order, and turns reports into arrays and errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from deepep_cupy import env
from deepep_cupy.engines.calls import CombineCall, DispatchCall
from deepep_cupy.engines.gpu import loads as policy
from deepep_cupy.engines.gpu.arrays import ArrayImporter, StreamAddress
from deepep_cupy.engines.gpu.combine import Combiner
from deepep_cupy.engines.gpu.cupy_types import DeviceArray, Stream
from deepep_cupy.engines.gpu.dispatch import Dispatcher
from deepep_cupy.engines.gpu.failures import FailureMonitor, Report
from deepep_cupy.engines.gpu.grid import GridPlan
from deepep_cupy.engines.gpu.kernels import KERNELS, shape_constants
from deepep_cupy.engines.gpu.launch import Kernels
from deepep_cupy.engines.gpu.layout import count_layout
from deepep_cupy.engines.gpu.memory import SymmetricMemory
from deepep_cupy.engines.gpu.operation import GpuEvent
from deepep_cupy.engines.gpu.runtime import Runtime
from deepep_cupy.engines.gpu.topology import Topology
from deepep_cupy.engines.gpu.tuning import Key as TuningKey
from deepep_cupy.engines.gpu.tuning import load as tuning_of
from deepep_cupy.engines.protocol import ALL_MODES, CombineOutput, DispatchLayout, DispatchOutput
from deepep_cupy.errors import PlatformError
from deepep_cupy.protocol.control_block import ControlLayout, ReportLayout
from deepep_cupy.protocol.headers import Kind, Refusal, RefusalCode
from deepep_cupy.protocol.sizes import BufferSpec
from deepep_cupy.ranks.abort_board import LINE_BYTES, Abort, AbortBoard, AbortReason
from deepep_cupy.ranks.group import Group
from deepep_cupy.ranks.rendezvous import Hurry, Rendezvous

__all__ = ["CudaEngine"]

_left_behind: list[object] = []
"""What engines that could not close together leave to the process's end: peers may use it."""


def _grids(topology: Topology, spec: BufferSpec) -> GridPlan:
    """How this rank's operations are spread over the SMs of its GPU."""
    gpu, sharing = topology.gpus[spec.rank], len(topology.sharing(spec.rank))
    tuning = tuning_of(TuningKey(gpu.name, spec.num_ranks, sharing, spec.max_row_bytes))
    return GridPlan(gpu.num_sms, sharing, spec.num_sms, tuning)


class CudaEngine:
    """See ``engines.protocol.Engine``. The constructor is collective.

    Args:
        group: The ranks.
        board: Their abort board.
        spec: Sizes of the Buffer.
        topology: The GPUs of all ranks.
        choose_device: Make this rank's GPU the current device of the calling thread.
    """

    name = "cuda"
    modes = ALL_MODES - {"low_latency"}

    def __init__(
        self,
        group: Group,
        board: AbortBoard,
        spec: BufferSpec,
        topology: Topology,
        *,
        choose_device: bool = False,
    ) -> None:
        import cupy

        self._cupy: ModuleType = cupy
        self._board, self._spec = board, spec
        gpu = topology.gpus[group.rank]
        self.device = gpu.device
        self._device: Any = cupy.cuda.Device(gpu.device)
        if choose_device:
            self._device.use()
        self._external: dict[int, Any] = {}
        self._intake = ArrayImporter(self.device, group.rank)
        self.array_key = self._intake.array_key
        self._rendezvous = Rendezvous(group, board, spec.timeout_s)
        arch = 10 * gpu.capability[0] + gpu.capability[1]
        self.loads = self._choose_loads(group, topology, arch)
        self.path = self._choose_path(arch)
        control = ControlLayout(spec.num_ranks, spec.num_experts or 0)
        with self._device:
            constants = shape_constants(
                arch,
                num_ranks=spec.num_ranks,
                max_row_bytes=spec.max_row_bytes,
                loads=self.loads,
            )
            kernels = Kernels(group, KERNELS, constants, arch=arch, path=self.path)
            memory = SymmetricMemory(group, self.device, spec, control)
            report = Report(ReportLayout(spec.num_ranks, spec.num_experts or 0))
            self._board_address = self._register_board()
            kernels.connect(
                peer=memory.region.peer_base,
                report=report.address,
                board=self._board_address,
                timeout_ns=int(spec.timeout_s * 1e9),
                board_stride=LINE_BYTES // 4,
                rank=spec.rank,
            )
            self._runtime = Runtime(
                spec=spec,
                device=self.device,
                path=self.path,
                grids=_grids(topology, spec),
                kernels=kernels,
                memory=memory,
                failures=FailureMonitor(report, self._rendezvous, memory.pool, spec),
            )
        self._dispatcher = Dispatcher(self._runtime)
        self._combiner = Combiner(self._runtime)

    def _choose_loads(self, group: Group, topology: Topology, arch: int) -> str:
        """Kernels are compiled once a node: all ranks take the same."""
        choice = policy.resolve(
            env.loads(),
            arch,
            gpu=topology.gpus[group.rank].name,
            driver=policy.driver_name(self._cupy.cuda.runtime.driverGetVersion()),
            across_gpus=topology.num_gpus > 1,
        )
        return "nc" if all(each == "nc" for each in group.allgather(choice.loads)) else "coherent"

    def _choose_path(self, arch: int) -> str:
        wanted = env.path()
        if wanted == "bulk" and arch < 90:
            raise PlatformError(
                f"Buffer(): DEEPEP_CUPY_PATH=bulk needs compute capability 9.0 or more, the GPU of "
                f"rank {self._spec.rank} has {arch / 10}; use auto or ldst."
            )
        return "bulk" if arch >= 90 and wanted != "ldst" else "ldst"

    def _register_board(self) -> int:
        """The abort board as kernels see it; 0 where the driver cannot map such memory."""
        runtime = self._cupy.cuda.runtime
        try:
            runtime.hostRegister(self._board.address, self._board.nbytes, 0)
        except runtime.CUDARuntimeError:
            return 0
        return self._board.address

    # ------------------------------------------------------------------------------- local

    def array_module(self) -> ModuleType:
        """See ``Engine.array_module``."""
        self._device.use()
        return self._cupy

    def import_array(self, operation: str, argument: str, value: object) -> DeviceArray:
        """See ``Engine.import_array``."""
        return self._intake(operation, argument, value)

    def import_scales(self, operation: str, argument: str, value: object) -> DeviceArray:
        """See ``Engine.import_scales``."""
        return self._intake(operation, argument, value, strided=True)

    def capture(self) -> GpuEvent:
        """See ``Engine.capture``."""
        with self._device:
            return self._runtime.point()

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """See ``Engine.on``."""
        cuda = self._cupy.cuda
        found = self._external.get(stream)
        if found is None:
            known = {0: cuda.Stream.null, 1: cuda.Stream.null, 2: cuda.Stream.ptds}
            found = known.get(stream) or cuda.Stream.from_external(StreamAddress(stream))
            self._external[stream] = found
        with self._device, found:
            yield

    def comm_stream(self) -> Stream:
        """See ``Engine.comm_stream``: a ``cupy.cuda.Stream`` of the highest priority."""
        return self._runtime.queue.comm

    def joined_captures(self) -> AbstractContextManager[None]:
        """Within it, operations captured by this thread are of graphs that are launched on one
        stream, one after the other: they share memory of the pool, and whoever launches them keeps
        their inputs."""
        return self._runtime.queue.events.joined()

    def settle(self) -> None:
        """Wait for the GPU; then all free memory of the pool may be captured. Local."""
        with self._device:
            seen = self._runtime.pool.checkpoint()
            self._cupy.cuda.runtime.deviceSynchronize()
            self._runtime.pool.completed(seen)

    def empty(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        """See ``Engine.empty``."""
        self._runtime.failures.raise_failure()
        with self._device:
            stream = self._cupy.cuda.get_current_stream()
            self._runtime.queue.order.check_thread(stream)
            array: DeviceArray = self._runtime.arrays.empty(tuple(shape), dtype, stream, "empty()")
            return array

    def peer_pointers(self) -> tuple[int, ...]:
        """See ``Engine.peer_pointers``."""
        return tuple(self._runtime.memory.region.peer_base)

    def get_dispatch_layout(
        self, topk_idx: Any, num_experts: int, kept: tuple[object, ...] = ()
    ) -> DispatchLayout:
        """See ``Engine.get_dispatch_layout``."""
        with self._device:
            found = count_layout(self._runtime, topk_idx, num_experts)
            if kept:
                self._runtime.queue.keep(kept)
            return found

    def check(self) -> None:
        """See ``Engine.check``."""
        self._runtime.failures.raise_pending()
        self._rendezvous.watch("check")

    # --------------------------------------------------------------------------- operations

    def barrier(self, tag: int | None = None) -> None:
        """See ``Engine.barrier``."""
        with self._runtime as runtime:
            self._launch_barrier(Kind.BARRIER, Refusal(RefusalCode.NONE), tag)
            runtime.failures.raise_pending()

    def refuse(self, kind: Kind, refusal: Refusal) -> None:
        """See ``Engine.refuse``. Under graph capture nothing is sent: the error stays local."""
        with self._runtime as runtime:
            runtime.failures.own_refusal(self._launch_barrier(kind, refusal))

    def _launch_barrier(self, kind: Kind, refusal: Refusal, tag: int | None = None) -> int:
        """Launch the kernel that only exchanges headers; number of the operation."""
        with self._runtime.operation() as op:
            if op.capture == 0 or refusal.code == RefusalCode.NONE:
                launch = self._runtime.kernels.get("barrier", 1, kind)
                launch.refusal(kind, refusal.code, refusal.value)
                op.launch(launch, tag)
            return op.serial

    def dispatch(self, call: DispatchCall) -> DispatchOutput:
        """See ``Engine.dispatch``."""
        with self._runtime as runtime:
            output = self._dispatcher.run(call)
            runtime.failures.raise_pending()
            return output

    def combine(self, call: CombineCall) -> CombineOutput:
        """See ``Engine.combine``."""
        with self._runtime as runtime:
            output = self._combiner.run(call)
            runtime.failures.raise_pending()
            return output

    # ------------------------------------------------------------------------------- the end

    def abort(self, reason: str) -> None:
        """See ``Engine.abort``: kernels that wait look at the board, and so does every host."""
        self._board.abort(Abort(AbortReason.ERROR, self._spec.rank, (), reason))

    def reset(self) -> None:
        """See ``Engine.reset``."""
        runtime, hurry = self._runtime, Hurry(self._board, self._spec.rank)
        with self._device:
            runtime.queue.drain(hurry)
            self._rendezvous.barrier("reset", hurry)
            queue = runtime.queue
            mine = np.array([runtime.memory.epoch(), queue.captured_calls], np.int64)
            states = self._rendezvous.exchange("reset", mine)
            runtime.memory.start_over(states[:, 0])
            # A rank that failed within a capture has counted fewer calls than the others.
            queue.captured_calls = int(states[:, 1].max())
            runtime.failures.clear()
            runtime.pool.release_quarantine()
            self._board.clear()
            self._rendezvous.barrier("reset")

    def close(self, *, collective: bool) -> None:
        """See ``Engine.close``."""
        runtime = self._runtime
        if not collective:
            runtime.memory.region.leave()
            _left_behind.append(self)
            return
        with self._device:
            try:
                runtime.queue.drain()
                self._rendezvous.barrier("close")
                runtime.memory.region.close(lambda: self._rendezvous.barrier("close"))
            except BaseException:
                _left_behind.append(self)
                raise
            runtime.queue.retention.clear()
            runtime.pool.close()
            if self._board_address:
                self._cupy.cuda.runtime.hostUnregister(self._board_address)
