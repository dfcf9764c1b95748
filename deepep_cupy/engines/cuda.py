"""The engine of a node of GPUs: CuPy arrays, and one kernel per operation and rank.

A dispatch writes every row at its final place in a block of the receiver's pool; a combine reads
rows where they lie in the pools. What the kernels tell each other is in ``kernels/cuda/comm/``,
where the words lie in ``plan/layout.py``; here blocks are chosen, kernels launched in stream
order, and reports turned into arrays and errors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepep_cupy import env
from deepep_cupy.engines.base import (
    CombineCall,
    CombineOutput,
    DispatchCall,
    DispatchLayout,
    DispatchOutput,
    Routing,
)
from deepep_cupy.engines.gpu.intake import Intake
from deepep_cupy.engines.gpu.launches import Kernels
from deepep_cupy.engines.gpu.memory import SymmetricMemory
from deepep_cupy.engines.gpu.news import News
from deepep_cupy.engines.gpu.order import DeviceOrder
from deepep_cupy.engines.gpu.report import Report
from deepep_cupy.errors import (
    ContractError,
    DeepEPCupyError,
    PlatformError,
)
from deepep_cupy.plan.headers import (
    OFFSET_UNIT,
    Kind,
    Layout,
    Refusal,
    RefusalCode,
    dtype_code,
)
from deepep_cupy.plan.launch import GridPlan, access_bytes
from deepep_cupy.plan.layout import ControlLayout, ReportLayout, align
from deepep_cupy.plan.spec import BufferSpec
from deepep_cupy.transport.block import Block
from deepep_cupy.transport.board import LINE_BYTES, Abort, AbortBoard, AbortReason
from deepep_cupy.transport.group import Group
from deepep_cupy.transport.rendezvous import Rendezvous
from deepep_cupy.transport.topology import Topology

__all__ = ["CudaEngine"]

_PATIENT_POLLS = 2000
"""Polls of the counts before the host looks whether the stream is still alive."""

_left_behind: list[object] = []
"""What engines that could not close together leave to the process's end: peers may use it."""


class CudaRouting(Routing):
    """A routing whose row counts the host knows too.

    Attributes:
        host_rows_per_rank: Rows received from each rank.
    """

    host_rows_per_rank: tuple[int, ...]


class CudaEngine:
    """See ``engines.base.Engine``. The constructor is collective.

    Args:
        group: The ranks.
        board: Their abort board.
        spec: Sizes of the Buffer.
        topology: The GPUs of all ranks.
        choose_device: Make this rank's GPU the current device of the calling thread.
    """

    name = "cuda"

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

        self._cupy: Any = cupy
        self._group, self._board, self._spec = group, board, spec
        gpu = topology.gpus[group.rank]
        self.device = gpu.device
        self._device: Any = cupy.cuda.Device(gpu.device)
        if choose_device:
            self._device.use()
        self._intake = Intake(self.device, group.rank)
        self._rendezvous = Rendezvous(group, board, spec.timeout_s)
        self._experts = spec.num_experts or 0
        self._control = ControlLayout(spec.num_ranks, self._experts)
        with self._device:
            self._order = DeviceOrder.of(self.device)
            sharing = len(topology.sharing(group.rank))
            self._grids = GridPlan(gpu.num_sms, sharing, spec.num_sms)
            self._kernels = self._make_kernels(10 * gpu.capability[0] + gpu.capability[1])
            self._memory = SymmetricMemory(group, self.device, spec, self._control)
            self._pool, self._arrays = self._memory.pool, self._memory.arrays
            self._events = self._memory.events
            self._connect()
        self._serial = 0

    # ---------------------------------------------------------------------------- building

    def _make_kernels(self, arch: int) -> Kernels:
        self.loads = "nc" if env.loads() == "nc" else "coherent"
        wanted = env.path()
        if wanted == "bulk" and arch < 90:
            raise PlatformError(
                f"Buffer(): DEEPEP_CUPY_PATH=bulk needs compute capability 9.0 or more, the GPU of "
                f"rank {self._group.rank} has {arch / 10}; use auto or ldst."
            )
        self.path = "bulk" if arch >= 90 and wanted != "ldst" else "ldst"
        return Kernels(self._group, self._spec, arch, self.loads, self.path)

    def _connect(self) -> None:
        spec = self._spec
        self._report = Report(ReportLayout(spec.num_ranks, self._experts))
        self._news = News(self._report, self._rendezvous, self._pool, spec)
        self._board_address = self._register_board()
        self._kernels.connect(
            peer=self._memory.region.peer_base,
            report=self._report.address,
            board=self._board_address,
            timeout_ns=int(spec.timeout_s * 1e9),
            board_stride=LINE_BYTES // 4,
            rank=spec.rank,
        )

    def _register_board(self) -> int:
        """The abort board as kernels see it; 0 where the driver cannot map such memory."""
        runtime = self._cupy.cuda.runtime
        try:
            runtime.hostRegister(self._board.address, self._board.nbytes, 0)
        except runtime.CUDARuntimeError:
            return 0
        return self._board.address

    # ------------------------------------------------------------------------------- local

    def intake(self, operation: str, argument: str, value: object) -> Any:
        """See ``Engine.intake``."""
        return self._intake(operation, argument, value)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """See ``Engine.empty``."""
        with self._device:
            stream = self._cupy.cuda.get_current_stream()
            return self._arrays.empty(tuple(shape), dtype, stream, "empty()")

    def get_dispatch_layout(self, topk_idx: Any, num_experts: int) -> DispatchLayout:
        """See ``Engine.get_dispatch_layout``."""
        cupy, ranks = self._cupy, self._spec.num_ranks
        with self._device:
            valid = (topk_idx >= 0) & (topk_idx < num_experts)
            owner = cupy.where(valid, topk_idx // (num_experts // ranks), -1)
            mask = (owner[:, :, None] == cupy.arange(ranks)[None, None, :]).any(axis=1)
            chosen = cupy.where(valid, topk_idx, num_experts).ravel()
            counts = cupy.bincount(chosen, minlength=num_experts + 1)[:num_experts]
            return DispatchLayout(
                mask.sum(axis=0, dtype=cupy.int32), counts.astype(cupy.int32), mask
            )

    def check(self) -> None:
        """See ``Engine.check``."""
        self._news.raise_any()
        self._rendezvous.watch("check")

    # --------------------------------------------------------------------------- operations

    def barrier(self) -> None:
        """See ``Engine.barrier``."""
        self._launch_barrier(Kind.BARRIER, Refusal(RefusalCode.NONE))

    def refuse(self, kind: Kind, refusal: Refusal) -> None:
        """See ``Engine.refuse``. Under graph capture nothing is sent: the error stays local."""
        with self._device:
            stream = self._cupy.cuda.get_current_stream()
            if self._events.capture_id(stream) != 0:
                return
        serial = self._launch_barrier(kind, refusal)
        self._news.own_refusal(serial)

    def _launch_barrier(self, kind: Kind, refusal: Refusal) -> int:
        self._news.raise_any()
        with self._device:
            stream = self._begin()
            launch = self._kernels.get("barrier", 1, kind)
            launch.refusal(kind, refusal.code, refusal.value)
            launch(self._serial, stream.ptr)
        return self._serial

    def dispatch(self, call: DispatchCall) -> DispatchOutput:
        """See ``Engine.dispatch``."""
        self._news.raise_any()
        with self._device:
            stream = self._begin()
            if call.routing is not None:
                return self._dispatch_cached(call, call.routing, stream)
            return self._dispatch_new(call, stream)

    def _dispatch_new(self, call: DispatchCall, stream: Any) -> DispatchOutput:
        cupy, spec = self._cupy, self._spec
        if self._events.capture_id(stream) != 0:
            raise ContractError(
                "dispatch(): the host must wait for the counts, which is not possible while a "
                "graph is being captured; capture calls with a handle instead."
            )
        x, topk_idx = call.x, call.topk_idx
        tokens, topk = len(x), 0 if topk_idx is None else topk_idx.shape[1]
        row_bytes = x.shape[1] * x.itemsize
        capacity = spec.max_recv_tokens
        index_bytes = 0 if topk_idx is None else topk_idx.itemsize
        has_weights = call.topk_weights is not None
        weights_at = align(4 * capacity, OFFSET_UNIT)
        index_at = weights_at + align(4 * capacity * topk * has_weights, OFFSET_UNIT)
        meta = self._pool.alloc(
            index_at + capacity * topk * index_bytes, stream, "indices of dispatch()"
        )
        rows = self._alloc_rows(capacity * row_bytes, stream, "recv_x of dispatch()", meta)
        ranks = spec.num_ranks
        words = cupy.empty(tokens * ranks + ranks + 1, cupy.int32)
        send_row, per_rank = words.data.ptr, words.data.ptr + 4 * tokens * ranks
        experts = self._experts if topk_idx is not None else 0
        self._run_dispatch(
            stream,
            x.data.ptr,
            _address(topk_idx),
            _address(call.topk_weights),
            _address(call.is_token_in_rank),
            send_row,
            per_rank,
            per_rank + 4 * ranks,
            0,
            tokens,
            topk,
            has_weights,
            index_bytes,
            experts,
            max(1, experts // ranks),
            experts // ranks,
            self._control.experts,
            row_bytes,
            access_bytes(row_bytes, (x.data.ptr,), (4, 1)),
            _code(x.dtype),
            Layout.TOPK if topk_idx is not None else Layout.MASK,
            capacity,
            rows.offset // OFFSET_UNIT,
            meta.offset // OFFSET_UNIT,
            (meta.offset + weights_at) // OFFSET_UNIT,
            (meta.offset + index_at) // OFFSET_UNIT,
        )
        counts = self._wait_counts(ranks + experts // ranks, stream, (meta, rows))
        from_rank = tuple(int(count) for count in counts[:ranks])
        number = sum(from_rank)
        self._pool.shrink(rows, number * row_bytes)
        meta_at = self._arrays.own(meta)
        recv_x = self._arrays.array(self._arrays.own(rows), (number, x.shape[1]), x.dtype)
        recv_idx = recv_weights = None
        if topk_idx is not None:
            recv_idx = self._arrays.array(meta_at, (number, topk), topk_idx.dtype, index_at)
        if has_weights:
            recv_weights = self._arrays.array(meta_at, (number, topk), cupy.float32, weights_at)
        routing = CudaRouting(
            num_tokens=tokens,
            num_recv_tokens=number,
            recv_src_idx=self._arrays.array(meta_at, (number,), cupy.int32),
            recv_rows_per_rank=words[tokens * ranks : -1],
            send_row=words[: tokens * ranks].reshape(tokens, ranks),
            birth=words[-1:],
        )
        object.__setattr__(routing, "host_rows_per_rank", from_rank)
        unit = call.expert_alignment
        aligned = [align(int(count), unit) for count in counts[ranks:]]
        if call.own:
            recv_x, recv_idx, recv_weights = map(_copy, (recv_x, recv_idx, recv_weights))
        return DispatchOutput(recv_x, recv_idx, recv_weights, aligned, routing)

    def _dispatch_cached(self, call: DispatchCall, routing: Routing, stream: Any) -> DispatchOutput:
        x, weights = call.x, call.topk_weights
        row_bytes, number = x.shape[1] * x.itemsize, routing.num_recv_tokens
        topk = 0 if weights is None else weights.shape[1]
        meta = self._pool.alloc(4 * number * topk, stream, "weights of dispatch()")
        rows = self._alloc_rows(number * row_bytes, stream, "recv_x of dispatch()", meta)
        self._run_dispatch(
            stream,
            x.data.ptr,
            0,
            _address(weights),
            0,
            routing.send_row.data.ptr,
            0,
            0,
            routing.birth.data.ptr,
            len(x),
            topk,
            weights is not None,
            0,
            0,
            1,
            0,
            self._control.experts,
            row_bytes,
            access_bytes(row_bytes, (x.data.ptr,), (4, 1)),
            _code(x.dtype),
            Layout.CACHED,
            number,
            rows.offset // OFFSET_UNIT,
            meta.offset // OFFSET_UNIT,
            meta.offset // OFFSET_UNIT,
            0,
        )
        recv_weights = None
        meta_at = self._arrays.own(meta)
        recv_x = self._arrays.array(self._arrays.own(rows), (number, x.shape[1]), x.dtype)
        if weights is not None:
            recv_weights = self._arrays.array(meta_at, (number, topk), self._cupy.float32)
        self._news.at_risk(meta, rows)
        if call.own:
            recv_x, recv_weights = _copy(recv_x), _copy(recv_weights)
        return DispatchOutput(recv_x, None, recv_weights, [], routing)

    def _alloc_rows(self, nbytes: int, stream: Any, label: str, meta: Block) -> Block:
        try:
            return self._pool.alloc(nbytes, stream, label)
        except BaseException:
            self._pool.free(meta)
            raise

    def _run_dispatch(self, stream: Any, *fields: int) -> None:
        tokens, access = fields[8], fields[17]
        name = "dispatch_bulk" if access == 16 and self.path == "bulk" else "dispatch"
        launch = self._kernels.get(name, self._grids.dispatch(tokens), Kind.DISPATCH)
        launch.operation(*fields)
        launch(self._serial, stream.ptr)

    def combine(self, call: CombineCall) -> CombineOutput:
        """See ``Engine.combine``."""
        self._news.raise_any()
        cupy, routing, weights = self._cupy, call.routing, call.topk_weights
        with self._device:
            stream = self._begin()
            x, tokens = call.x, routing.num_tokens
            row_bytes = x.shape[1] * x.itemsize
            out = cupy.empty((tokens, x.shape[1]), x.dtype)
            out_weights = None
            topk = weights_offset = 0
            staged: list[Block] = []
            rows_offset, own_rows = self._place_rows(x, routing, stream, staged)
            if weights is not None:
                topk = weights.shape[1]
                out_weights = cupy.empty((tokens, topk), cupy.float32)
                weights_offset = self._place(weights, stream, staged)
            biases = [bias.data.ptr for bias in call.biases]
            access = access_bytes(
                row_bytes, (own_rows, out.data.ptr, *biases), (max(x.itemsize, 1),)
            )
            biases += [0] * (2 - len(biases))
            bulk = access == 16 and self.path == "bulk"
            launch = self._kernels.get(
                "combine_bulk" if bulk else "combine", self._grids.combine(tokens), Kind.COMBINE
            )
            launch.operation(
                own_rows,
                out.data.ptr,
                _address(out_weights),
                *biases,
                routing.send_row.data.ptr,
                routing.birth.data.ptr,
                tokens,
                routing.num_recv_tokens,
                topk,
                weights is not None,
                row_bytes,
                access,
                _code(x.dtype),
                rows_offset // OFFSET_UNIT,
                weights_offset // OFFSET_UNIT,
            )
            launch(self._serial, stream.ptr)
            self._news.at_risk(*staged)
            for block in staged:
                self._pool.free(block)
        return CombineOutput(out, out_weights)

    def _place_rows(
        self, x: Any, routing: Routing, stream: Any, staged: list[Block]
    ) -> tuple[int, int]:
        """Where the peers find the rows (offset in the region), and where this rank does.

        Rows outside the pool are copied into it, but for those of this rank's own tokens.
        """
        offset = self._arrays.find(x) if x.nbytes else self._control.nbytes
        if offset is not None and offset % OFFSET_UNIT == 0:
            return offset, x.data.ptr
        block = self._pool.alloc(x.nbytes, stream, "rows of combine()")
        staged.append(block)
        to, row_bytes = self._memory.region.base + block.offset, x.shape[1] * x.itemsize
        counts = getattr(routing, "host_rows_per_rank", None)
        rank = self._spec.rank
        if counts is None or x.data.ptr % OFFSET_UNIT:
            self._copy_rows(to, x.data.ptr, x.nbytes, stream)
            return block.offset, to
        before = sum(counts[:rank]) * row_bytes
        behind = before + counts[rank] * row_bytes
        self._copy_rows(to, x.data.ptr, before, stream)
        self._copy_rows(to + behind, x.data.ptr + behind, x.nbytes - behind, stream)
        return block.offset, x.data.ptr

    def _place(self, array: Any, stream: Any, staged: list[Block]) -> int:
        offset = self._arrays.find(array) if array.nbytes else self._control.nbytes
        if offset is not None and offset % OFFSET_UNIT == 0:
            return offset
        block = self._pool.alloc(array.nbytes, stream, "weights of combine()")
        staged.append(block)
        self._copy_rows(
            self._memory.region.base + block.offset, array.data.ptr, array.nbytes, stream
        )
        return block.offset

    def _copy_rows(self, to: int, source: int, nbytes: int, stream: Any) -> None:
        if nbytes:
            runtime = self._cupy.cuda.runtime
            runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)

    # --------------------------------------------------------------- order, waits, failures

    def _begin(self) -> Any:
        """The current stream, ordered behind the last operation of any Buffer on this GPU; the
        next serial."""
        stream = self._cupy.cuda.get_current_stream()
        self._order.enter(stream, self._events)
        self._serial = self._serial % 0xFFFFFFFF + 1
        return stream

    def _wait_counts(self, number: int, stream: Any, blocks: tuple[Block, ...]) -> Any:
        """Wait until the running dispatch has told its counts. The stream may be busy for long
        with what was queued before, so that the wait ends when the stream does."""
        serial, counts_of = self._serial, self._report.counts
        polls, end = 0, None
        try:
            while True:
                counts = counts_of(serial, number)
                if counts is not None:
                    self._news.at_risk(*blocks)
                    return counts
                if self._report.has_news:
                    self._news.raise_any(serial)
                polls += 1
                if polls % _PATIENT_POLLS == 0:
                    if end is None:
                        end = self._events.record(stream)
                    elif self._events.query(end):
                        counts = counts_of(serial, number)
                        return counts if counts is not None else self._news.silence(serial)
                    time.sleep(0)  # lets other threads of this process run
        except DeepEPCupyError as error:
            for block in blocks:
                if not isinstance(error, ContractError):
                    self._pool.quarantine(block)
                self._pool.free(block)
            raise

    # ------------------------------------------------------------------------------- the end

    def abort(self, reason: str) -> None:
        """See ``Engine.abort``: kernels that wait look at the board, and so does every host."""
        self._board.abort(Abort(AbortReason.ERROR, self._spec.rank, (), reason))

    def reset(self) -> None:
        """See ``Engine.reset``."""
        with self._device:
            self._order.drain()
            self._rendezvous.barrier("reset")
            mine = np.array([self._memory.epoch()], np.int64)
            epochs = self._rendezvous.exchange("reset", mine)[:, 0]
            self._memory.start_over(epochs)
            self._news.clear()
            self._pool.release_quarantine()
            self._board.clear()
            self._rendezvous.barrier("reset")

    def close(self, *, collective: bool) -> None:
        """See ``Engine.close``."""
        if not collective:
            self._memory.region.leave()
            _left_behind.append(self)
            return
        with self._device:
            try:
                self._order.drain()
                self._rendezvous.barrier("close")
                self._memory.region.close(lambda: self._rendezvous.barrier("close"))
            except BaseException:
                _left_behind.append(self)
                raise
            self._pool.close()
            if self._board_address:
                self._cupy.cuda.runtime.hostUnregister(self._board_address)


def _address(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)


def _copy(array: Any) -> Any:
    """In ordinary memory; by bytes, since CuPy copies no FP8."""
    return None if array is None else array.view("u1").copy().view(array.dtype)


def _code(dtype: Any) -> int:
    name = dtype.name if dtype.isnative else "swapped bytes"
    return dtype_code(name, dtype.itemsize)
