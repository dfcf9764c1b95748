"""The cast to FP8 on GPUs: by the kernel that sends the rows, or by one of its own before.

Each rank may choose another way: its peers see a dispatch of FP8 rows with scales in both cases.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from deepep_cupy.engines.calls import DispatchCall, Quantization
from deepep_cupy.engines.gpu.arrays import dtype_code_of
from deepep_cupy.engines.gpu.cupy_types import DType
from deepep_cupy.engines.gpu.grid import access_bytes, cast_chunks, local_blocks
from deepep_cupy.engines.gpu.operation import Operation
from deepep_cupy.engines.gpu.routing import FLOAT32, INT32
from deepep_cupy.engines.gpu.runtime import Runtime
from deepep_cupy.jit.spec import Param, Struct
from deepep_cupy.protocol.sizes import num_scales

__all__ = ["CAST", "QUANTIZE", "cast_on_the_way", "quantize", "travelling"]

CAST = Struct(
    "Cast",
    (
        Param("dtype", "u32", doc="kDtypeBfloat16, kDtypeFloat16 or kDtypeFloat32"),
        Param("round_scale", "u32", doc="1: scales are powers of two"),
        Param("packed", "u32", doc="1: scales are exponents; with round_scale"),
    ),
    "From what rows are cast to FP8, and how.",
)


QUANTIZE = Struct(
    "QuantizeCommon",
    (
        Param("x", "const u8*", doc="[T, H] elements"),
        Param("codes", "u8*", doc="[T] rows of H codes, written"),
        Param("scales", "u32*", doc="[T] rows of scales: float32 bits, or four exponents a word"),
        Param("num_tokens", "u32", doc="T"),
        Param("hidden", "u32", doc="H"),
        Param("code_stride", "u32", doc="bytes from one row of codes to the next"),
        Param("scale_stride", "u32", doc="words from one row of scales to the next"),
        Param("access_bytes", "u32", doc="16: rows and bases of x are multiples of it, those of "
              "codes of 8; else the element size"),
        Param("cast", CAST),
    ),
    "A cast to FP8.",
)  # fmt: skip


@cache
def _fp8() -> DType:
    """The dtype that rows are cast to; whoever only reads the kernels needs no ml_dtypes."""
    import ml_dtypes

    dtype: DType = np.dtype(ml_dtypes.float8_e4m3fn)
    return dtype


def travelling(call: DispatchCall) -> tuple[DType, DType | None, int]:
    """What a dispatch sends: dtype of rows, dtype of scales (None: there are none), S."""
    how, x, scales = call.plan.quantize, call.x, call.scales
    if how is not None:
        return _cast_types(x.shape[1], how)
    return x.dtype, *((None, 0) if scales is None else (scales.dtype, scales.shape[1]))


def _cast_types(hidden: int, how: Quantization) -> tuple[DType, DType, int]:
    packed = how.use_ue8m0
    return _fp8(), INT32 if packed else FLOAT32, num_scales(hidden, packed=packed)


def cast_on_the_way(runtime: Runtime, call: DispatchCall) -> tuple[int, ...] | None:
    """Fields of ``Cast`` where the dispatch kernel itself can cast such rows (whose base is a
    multiple of 16 bytes), else None."""
    how, hidden = call.plan.quantize, call.x.shape[1]
    if how is None or not runtime.bulk or hidden == 0 or hidden % 16:
        return None
    return dtype_code_of(call.x.dtype), int(how.round_scale), int(how.use_ue8m0)


def quantize(runtime: Runtime, call: DispatchCall, op: Operation) -> DispatchCall:
    """Cast the rows of a call that wants it; the call as if the caller had passed the pair.

    Args:
        runtime: The engine's parts.
        call: With ``quantize``, else it is returned as it is.
        op: The dispatch.
    """
    how = call.plan.quantize
    if how is None:
        return call
    x = call.x
    tokens, hidden = x.shape
    dtype, scales_dtype, columns = _cast_types(hidden, how)
    codes = op.empty((tokens, hidden), dtype)
    scales = op.empty((tokens, columns), scales_dtype)
    if codes.nbytes:
        access = access_bytes(hidden * x.itemsize, (x.data.ptr,), (x.itemsize,))
        warps = tokens * cast_chunks(hidden, x.itemsize, access)
        launch = runtime.kernels.local("quantize", local_blocks(runtime.grids, warps))
        launch.operation(
            x.data.ptr,
            codes.data.ptr,
            scales.data.ptr,
            tokens,
            hidden,
            hidden,
            columns,
            access,
            dtype_code_of(x.dtype),
            how.round_scale,
            how.use_ue8m0,
        )
        launch(op.stream.ptr)
    return replace(call, x=codes, scales=scales)
