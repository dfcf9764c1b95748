"""The module that stands where ``cupy`` is imported."""

import types

import numpy as np

from gpu_stand_in import device as d

int32, float32 = np.int32, np.float32
ndarray, empty, asarray = d.ndarray, d.empty, d.asarray

cuda = types.ModuleType("cupy.cuda")
cuda.Stream, cuda.Event = d.Stream, d.Event
cuda.MemoryPointer, cuda.UnownedMemory, cuda.alloc = d.MemoryPointer, d.UnownedMemory, d.alloc
cuda.get_current_stream = d.current_stream
cuda.Device = lambda number: d.device()
cuda.alloc_pinned_memory = bytearray
cuda.runtime = types.SimpleNamespace(
    memcpyAsync=d.memcpy_async,
    memcpyDeviceToDevice=3,
    deviceSynchronize=lambda: None,
)
