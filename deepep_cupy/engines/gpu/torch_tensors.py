"""PyTorch's tensors, looked at directly: its ``__dlpack__`` takes 12 to 15 µs of Python a tensor.

Nothing here imports PyTorch: who passes a tensor has it loaded.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

from deepep_cupy.engines.gpu.cupy_types import DeviceArray, DType

__all__ = ["TensorReader"]

_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
)


class TensorReader:
    """Makes CuPy arrays over the memory of tensors.

    Args:
        cupy: CuPy.
        device: CUDA ordinal.
    """

    def __init__(self, cupy: ModuleType, device: int) -> None:
        self._cupy, self._device = cupy, device
        self._dtypes: dict[object, DType] = {}
        self._current: Any = None

    def read(self, value: Any) -> DeviceArray | None:
        """An array that keeps the tensor alive. None: it is none, or none that is plain, lies on
        the device and is ready on the current stream; DLPack knows what to do then."""
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not getattr(torch, "Tensor", None):
            return None
        if not value.is_cuda or value.get_device() != self._device or value.requires_grad:
            return None
        if value.layout is not torch.strided or value.is_neg() or not value.is_contiguous():
            return None
        cupy, nbytes = self._cupy, value.nbytes
        dtype = (self._dtypes or self._learn(torch)).get(value.dtype)
        if dtype is None or nbytes == 0:
            return None
        if self._current(self._device) != cupy.cuda.get_current_stream().ptr:
            return None
        cuda = cupy.cuda
        memory = cuda.UnownedMemory(value.data_ptr(), nbytes, value, self._device)
        array: DeviceArray = cupy.ndarray(tuple(value.shape), dtype, cuda.MemoryPointer(memory, 0))
        return array

    def _learn(self, torch: Any) -> dict[object, DType]:
        """Its dtypes, and how it is asked for its stream."""
        import ml_dtypes

        for name in _NAMES:
            if hasattr(torch, name):
                self._dtypes[getattr(torch, name)] = np.dtype(getattr(ml_dtypes, name, name))
        self._current = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
            lambda device: torch.cuda.current_stream(device).cuda_stream
        )
        return self._dtypes
