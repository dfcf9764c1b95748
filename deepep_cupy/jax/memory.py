"""XLA's memory as arrays of a Buffer's engine, and a handle's words as a routing."""

from __future__ import annotations

import ctypes
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.api.values import resolve_dtype
from deepep_cupy.engines.calls import Array, Routing
from deepep_cupy.engines.host.moves import HostRouting
from deepep_cupy.jax.ffi import Frame
from deepep_cupy.jax.site import Site
from deepep_cupy.protocol.sizes import BufferSpec
from deepep_cupy.reference.layout import local_choices

__all__ = ["HandleArrays", "HostMemory", "Memory"]


class HandleArrays(NamedTuple):
    """A handle's arrays in XLA's memory.

    Attributes:
        words: ``[num_words]`` int32, in the order of ``engines.gpu.routing.Addresses`` on both
            engines: on GPUs they are copied as they are.
        expanded_row: ``[W, K]`` int32 in the expanded layout, else None.
        topk_idx: ``[T, K]``, the choices that were dispatched, in the expanded layout; else None.
    """

    words: Array
    expanded_row: Array | None
    topk_idx: Array | None


class Memory(Protocol):
    """What an engine's arrays need to lie in XLA's memory."""

    platform: str
    """XLA's name of it, for ``jax.ffi.register_ffi_target``."""

    def array(self, address: int, shape: tuple[int, ...], dtype: str) -> Array:
        """An array over ``shape`` items at ``address``, C-ordered."""
        ...

    def stream(self, frame: Frame) -> AbstractContextManager[object]:
        """Within it, work of the engine is in the order of XLA's stream."""
        ...

    def put(self, to: Array, source: Array) -> None:
        """Copy."""
        ...

    def put_rows(self, to: Array, source: Array, ends: Array) -> None:
        """Copy rows of ``source``, as many as the last item of ``ends`` says; zero the others."""
        ...

    def words(self, routing: Routing, to: Array) -> None:
        """Write a handle's words."""
        ...

    def routing(self, site: Site, spec: BufferSpec, arrays: HandleArrays) -> Routing:
        """The routing that the arrays of a handle describe."""
        ...


class HostMemory:
    """See ``Memory``: NumPy arrays."""

    platform = "cpu"

    def array(self, address: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """See ``Memory.array``."""
        kind = resolve_dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        if not nbytes:
            return np.empty(shape, kind)
        memory: Any = (ctypes.c_char * nbytes).from_address(address)
        return np.frombuffer(memory, kind).reshape(shape)

    def stream(self, frame: Frame) -> AbstractContextManager[object]:
        """See ``Memory.stream``: work is over when the handler returns."""
        del frame
        return nullcontext()

    def put(self, to: NDArray[Any], source: NDArray[Any]) -> None:
        """See ``Memory.put``."""
        to[...] = source

    def put_rows(self, to: NDArray[Any], source: NDArray[Any], ends: NDArray[Any]) -> None:
        """See ``Memory.put_rows``."""
        real = int(ends[-1])
        to[:real] = source[:real]
        to[real:] = np.zeros((), to.dtype)

    def words(self, routing: Routing, to: NDArray[Any]) -> None:
        """See ``Memory.words``."""
        parts = (
            routing.send_row,
            routing.recv_rows_per_rank,
            routing.psum_recv_rows,
            routing.expert_counts,
            routing.psum_expert_rows,
        )
        np.concatenate([np.ravel(part) for part in parts if part is not None], out=to[:-1])
        to[-1:].view(np.uint32)[0] = routing.birth

    def routing(self, site: Site, spec: BufferSpec, arrays: HandleArrays) -> HostRouting:
        """See ``Memory.routing``."""
        ranks, local, words = spec.num_ranks, spec.num_local_experts, arrays.words
        sizes = (site.num_tokens * ranks, ranks, ranks, local, local)
        send, per_rank, psum, counts, ends, birth = np.split(words, np.cumsum(sizes))
        send_row = send.reshape(site.num_tokens, ranks)
        columns: tuple[NDArray[np.bool_], ...] = ()
        if arrays.topk_idx is not None:
            columns = tuple(
                local_choices(arrays.topk_idx[sent], rank, local) >= 0
                for rank, sent in enumerate((send_row >= 0).T)
            )
        return HostRouting(
            num_tokens=site.num_tokens,
            num_recv_tokens=site.capacity,
            recv_src_idx=np.zeros(0, np.int32),  # neither operation reads it
            recv_rows_per_rank=per_rank,
            send_row=send_row,
            birth=int(birth.view(np.uint32)[0]),
            waited=False,
            psum_recv_rows=psum,
            expert_counts=counts,
            psum_expert_rows=ends,
            expanded_row=arrays.expanded_row,
            num_expanded_rows=site.num_rows if site.expanded else 0,
            expert_alignment=site.alignment,
            sent_columns=columns,
        )
