"""XLA's memory on GPUs as CuPy arrays, for the cuda engine.

Rows that arrive lie in the Buffer's pool, which peers reach, and are copied from there to XLA's
memory; rows to be combined are copied the other way. Everything is queued on XLA's stream, in whose
order XLA uses and frees its memory: no host waits.

XLA may record calls into a command buffer, a CUDA graph, and replay it without Python. All of them
run on XLA's stream, so that they share the pool's memory, however often XLA records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from deepep_cupy.api.values import resolve_dtype
from deepep_cupy.engines.calls import Array, Routing
from deepep_cupy.engines.gpu.engine import CudaEngine
from deepep_cupy.engines.gpu.routing import Addresses, GpuRouting, own_routing
from deepep_cupy.jax.ffi import Frame
from deepep_cupy.jax.memory import HandleArrays
from deepep_cupy.jax.site import Site
from deepep_cupy.protocol.sizes import BufferSpec

__all__ = ["GpuMemory"]

_WORDS = (8, 4, 2, 1)
"""Bytes of the words that rows are copied in, the longest that fits."""


class GpuMemory:
    """See ``memory.Memory``: CuPy arrays. The constructor waits for the GPU, and compiles what
    could not be compiled while XLA records.

    Args:
        engine: The Buffer's.
    """

    platform = "CUDA"

    def __init__(self, engine: CudaEngine) -> None:
        import cupy

        self._cupy: ModuleType = cupy
        self._engine = engine
        self._device = engine.device
        self._copy_rows: Any = cupy.ElementwiseKernel(
            "raw T source, raw int32 ends, int64 last, int64 words",
            "T to",
            "to = i / words < ends[last] ? source[i] : T(0)",
            "deepep_cupy_real_rows",
        )
        with cupy.cuda.Device(self._device):
            ends = cupy.zeros(1, "int32")
            for size in _WORDS:
                word = cupy.zeros(1, f"uint{8 * size}")
                self._copy_rows(word, ends, 0, 1, word)
        engine.settle()

    def array(self, address: int, shape: tuple[int, ...], dtype: str) -> Array:
        """See ``Memory.array``."""
        kind, cuda = resolve_dtype(dtype), self._cupy.cuda
        nbytes = math.prod(shape) * kind.itemsize
        memory = cuda.UnownedMemory(address, nbytes, None, self._device)
        return self._cupy.ndarray(shape, kind, cuda.MemoryPointer(memory, 0))

    @contextmanager
    def stream(self, frame: Frame) -> Iterator[None]:
        """See ``Memory.stream``."""
        with self._engine.on(frame.stream()), self._engine.joined_captures():
            yield

    def put(self, to: Array, source: Array) -> None:
        """See ``Memory.put``."""
        runtime = self._cupy.cuda.runtime
        stream = self._cupy.cuda.get_current_stream().ptr
        if source.nbytes:
            kind = runtime.memcpyDeviceToDevice
            runtime.memcpyAsync(to.data.ptr, source.data.ptr, source.nbytes, kind, stream)

    def put_rows(self, to: Array, source: Array, ends: Array) -> None:
        """See ``Memory.put_rows``."""
        if not to.size:
            return
        row_bytes = to.nbytes // len(to)
        places = row_bytes | to.data.ptr | source.data.ptr
        size = next(size for size in _WORDS if places % size == 0)
        number, kind = to.nbytes // size, f"uint{8 * size}"
        words = [self.array(each.data.ptr, (number,), kind) for each in (source, to)]
        self._copy_rows(words[0], ends, len(ends) - 1, row_bytes // size, words[1])

    def words(self, routing: Routing, to: Array) -> None:
        """See ``Memory.words``: the block of a handle begins with just these words."""
        known = own_routing(routing).addresses
        assert known.birth + 4 - known.send_row == to.nbytes
        self.put(to, self.array(known.send_row, to.shape, "int32"))

    def routing(self, site: Site, spec: BufferSpec, arrays: HandleArrays) -> GpuRouting:
        """See ``Memory.routing``."""
        local = spec.num_local_experts
        known = Addresses(
            arrays.words.data.ptr, site.num_tokens, spec.num_ranks, local, waited=False
        )
        return _Kept(self, known, site, arrays.expanded_row)


class _Kept(GpuRouting):
    """The routing of a handle that XLA keeps: its words lie in XLA's memory, and belong to it."""

    def __init__(
        self, memory: GpuMemory, addresses: Addresses, site: Site, expanded_row: Array | None
    ) -> None:
        self._memory = memory
        self.addresses = addresses
        self.num_tokens = site.num_tokens
        self.num_recv_tokens = site.capacity
        self.waited = False
        self.expert_alignment = site.alignment
        self.host_rows_per_rank = None
        self.expanded_row = expanded_row
        self.num_expanded_rows = site.num_rows if site.expanded else 0

    @property
    def stream(self) -> None:
        """See ``GpuRouting.stream``."""

    def _words(self, begin: int, end: int) -> Array:
        return self._memory.array(begin, ((end - begin) // 4,), "int32")
