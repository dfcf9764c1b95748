"""Expert-parallel dispatch and combine for MPI programs, on CuPy or NumPy arrays.

MPI starts the ranks, ``Buffer`` moves rows of arrays to the ranks that hold their experts and
sums them on the way back: between the GPUs of one node, or, on a machine with none, between
processes. Names are DeepEP's. Importing this package needs neither CuPy nor MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deepep_cupy._version import __version__

if TYPE_CHECKING:
    from deepep_cupy.api.buffer import Buffer
    from deepep_cupy.api.config import Config
    from deepep_cupy.api.events import EventOverlap
    from deepep_cupy.api.handle import DispatchHandle
    from deepep_cupy.api.low_latency import (
        LowLatencyCombineResult,
        LowLatencyDispatchResult,
        LowLatencyHandle,
    )
    from deepep_cupy.api.results import CombineResult, DispatchResult, LayoutResult
    from deepep_cupy.engines.gpu.kernels import kernel_options, kernel_ptx, kernel_source
    from deepep_cupy.errors import (
        CompileError,
        ContractError,
        DeepEPCupyError,
        PeerAbortedError,
        PeerTimeoutError,
        PlatformError,
        StateError,
    )

__all__ = [
    "Buffer",
    "CombineResult",
    "CompileError",
    "Config",
    "ContractError",
    "DeepEPCupyError",
    "DispatchHandle",
    "DispatchResult",
    "EventOverlap",
    "LayoutResult",
    "LowLatencyCombineResult",
    "LowLatencyDispatchResult",
    "LowLatencyHandle",
    "PeerAbortedError",
    "PeerTimeoutError",
    "PlatformError",
    "StateError",
    "__version__",
    "kernel_options",
    "kernel_ptx",
    "kernel_source",
]

_HOME = {
    "Buffer": "api.buffer",
    "CombineResult": "api.results",
    "CompileError": "errors",
    "Config": "api.config",
    "ContractError": "errors",
    "DeepEPCupyError": "errors",
    "DispatchHandle": "api.handle",
    "DispatchResult": "api.results",
    "EventOverlap": "api.events",
    "LayoutResult": "api.results",
    "LowLatencyCombineResult": "api.low_latency",
    "LowLatencyDispatchResult": "api.low_latency",
    "LowLatencyHandle": "api.low_latency",
    "PeerAbortedError": "errors",
    "PeerTimeoutError": "errors",
    "PlatformError": "errors",
    "StateError": "errors",
    "kernel_options": "engines.gpu.kernels",
    "kernel_ptx": "engines.gpu.kernels",
    "kernel_source": "engines.gpu.kernels",
}
"""Public name → module it lives in. Loaded when first asked for: commands that need little stay
light."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deepep_cupy' has no attribute {name!r}")
    return getattr(importlib.import_module(f"deepep_cupy.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
