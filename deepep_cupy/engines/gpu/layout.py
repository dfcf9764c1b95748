"""Counts of where a rank's tokens go, by one kernel."""

from __future__ import annotations

import numpy as np

from deepep_cupy.engines.gpu.cupy_types import DeviceArray
from deepep_cupy.engines.gpu.grid import local_blocks
from deepep_cupy.engines.gpu.routing import INT32
from deepep_cupy.engines.gpu.runtime import Runtime
from deepep_cupy.engines.protocol import DispatchLayout
from deepep_cupy.jit.spec import Param, Struct

__all__ = ["LAYOUT", "count_layout"]

LAYOUT = Struct(
    "LayoutCommon",
    (
        Param("topk_idx", "const u8*", doc="[T, K] of index_bytes each, experts or none"),
        Param("is_token_in_rank", "u8*", doc="[T, R] written, 0 or 1"),
        Param("rank_counts", "u32*", doc="[R] tokens of each rank are added"),
        Param("expert_counts", "u32*", doc="[E] choices of each expert are added"),
        Param("num_tokens", "u32", doc="T"),
        Param("num_topk", "u32", doc="K"),
        Param("index_bytes", "u32", doc="4 or 8"),
        Param("num_experts", "u32", doc="E, a multiple of R"),
        Param("experts_per_rank", "u32", doc="E / R"),
    ),
    "Where one rank's tokens go.",
)


_BOOL = np.dtype(np.bool_)
_WARP = 32


def count_layout(runtime: Runtime, topk_idx: DeviceArray, num_experts: int) -> DispatchLayout:
    """Count on the current stream; the host waits for nothing.

    Args:
        runtime: The engine's parts, on whose device this is.
        topk_idx: ``[T, K]`` int64 or int32.
        num_experts: E, a multiple of R.
    """
    cupy, ranks = runtime.queue.cupy, runtime.spec.num_ranks
    stream = cupy.cuda.get_current_stream()
    tokens, topk = topk_idx.shape
    mask = cupy.empty((tokens, ranks), _BOOL)
    counts = cupy.empty((ranks + num_experts,), INT32)
    counts.data.memset_async(0, counts.nbytes, stream)
    if topk_idx.size:
        launch = runtime.kernels.local("layout", local_blocks(runtime.grids, -(-tokens // _WARP)))
        launch.operation(
            topk_idx.data.ptr,
            mask.data.ptr,
            counts.data.ptr,
            counts.data.ptr + INT32.itemsize * ranks,
            tokens,
            topk,
            topk_idx.itemsize,
            num_experts,
            num_experts // ranks,
        )
        launch(stream.ptr)
    elif mask.size:  # tokens without any choice
        mask.data.memset_async(0, mask.nbytes, stream)
    return DispatchLayout(counts[:ranks], counts[ranks:], mask)
