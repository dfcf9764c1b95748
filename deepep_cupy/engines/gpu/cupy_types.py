"""What the engine uses of CuPy, which has no types of its own."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, TypeAlias

import numpy as np

__all__ = ["CudaEvent", "DType", "DeviceArray", "Pointer", "Stream", "SupportsDLPack"]

DType: TypeAlias = np.dtype[Any]
"""Any dtype, those of ml_dtypes included."""


class Pointer(Protocol):
    """``cupy.cuda.MemoryPointer``, and other objects that keep device memory alive."""

    @property
    def ptr(self) -> int:
        """Address."""
        ...


class Flags(Protocol):
    """``cupy.ndarray.flags``."""

    @property
    def c_contiguous(self) -> bool:
        """Whether rows follow each other."""
        ...


class Device(Protocol):
    """``cupy.cuda.Device``."""

    @property
    def id(self) -> int:
        """CUDA ordinal in this process."""
        ...


class DeviceArray(Protocol):
    """``cupy.ndarray``."""

    @property
    def device(self) -> Device:
        """The GPU it lies on."""
        ...

    @property
    def data(self) -> Pointer:
        """Where it lies."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        ...

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours, one number an axis."""
        ...

    @property
    def dtype(self) -> DType:
        """Of its elements."""
        ...

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        ...

    @property
    def size(self) -> int:
        """Number of elements."""
        ...

    @property
    def flags(self) -> Flags:
        """How it lies in memory."""
        ...

    @property
    def T(self) -> DeviceArray:
        """Axes in reverse order, over the same memory."""
        ...

    def __len__(self) -> int:
        """Extent of the first axis."""
        ...

    def reshape(self, *shape: int) -> DeviceArray:
        """Another shape, over the same memory."""
        ...


class SupportsDLPack(Protocol):
    """An array that another library can take over, by the DLPack protocol."""

    def __dlpack__(
        self, *, stream: int | None = None, max_version: tuple[int, int] | None = None
    ) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class CudaEvent(Protocol):
    """``cupy.cuda.Event``."""

    @property
    def ptr(self) -> int:
        """Handle."""
        ...


class Stream(Protocol):
    """``cupy.cuda.Stream``. Equal and hashed by handle."""

    @property
    def ptr(self) -> int:
        """Handle."""
        ...

    def __hash__(self) -> int: ...

    def wait_event(self, event: CudaEvent) -> None:
        """Let later work wait, on the device."""
        ...

    def synchronize(self) -> None:
        """Let the host wait for all work."""
        ...

    def __enter__(self) -> Stream:
        """Make it the current stream."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Make the stream before it current again."""
        ...
