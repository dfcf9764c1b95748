"""The cast to FP8 on GPUs: a pass over a rank's own rows before they travel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from deepep_cupy.engines.base import DispatchCall
from deepep_cupy.engines.gpu.core import Core, dtype_code_of
from deepep_cupy.engines.gpu.streams import Turn
from deepep_cupy.plan.launch import access_bytes
from deepep_cupy.plan.local import cast_chunks, local_blocks
from deepep_cupy.plan.routing import num_scales

__all__ = ["quantize"]

_FP8: Any = np.dtype(ml_dtypes.float8_e4m3fn)


def quantize(core: Core, call: DispatchCall, turn: Turn) -> DispatchCall:
    """Cast the rows of a call that wants it; the call as if the caller had passed the pair.

    Args:
        core: The engine's parts.
        call: With ``quantize``, else it is returned as it is.
        turn: Its turn.
    """
    how = call.quantize
    if how is None:
        return call
    x = call.x
    tokens, hidden = x.shape
    packed = how.use_ue8m0
    codes = turn.empty((tokens, hidden), _FP8)
    columns = num_scales(hidden, packed=packed)
    scales = turn.empty((tokens, columns), np.dtype(np.int32 if packed else np.float32))
    if codes.nbytes:
        access = access_bytes(hidden * x.itemsize, (x.data.ptr,), (x.itemsize,))
        warps = tokens * cast_chunks(hidden, x.itemsize, access)
        launch = core.kernels.local("quantize", local_blocks(core.grids, warps))
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
            packed,
        )
        launch(turn.stream.ptr)
    return replace(call, x=codes, scales=scales, quantize=None)
