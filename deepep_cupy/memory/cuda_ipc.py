"""Device memory through CuPy and CUDA IPC, arrays over it, and CuPy's side of the pool.

CuPy is imported when a class here is made, never at import.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepep_cupy.errors import PlatformError
from deepep_cupy.memory.block import Block, BlockOwner
from deepep_cupy.memory.free_list import Stream
from deepep_cupy.memory.pool import Pool
from deepep_cupy.memory.region import MemoryCallError, SymmetricRegion
from deepep_cupy.memory.stream_clock import JOINED
from deepep_cupy.ranks.group import Group

__all__ = ["CudaMemory", "CupyEvents", "PoolArrays", "Recorded", "device_uuid", "open_region"]

_OUT_OF_MEMORY = 2
_NOT_READY = 600
_CAPTURE_INVALIDATED, _CAPTURE_IMPLICIT = 901, 906
_NO_PEER_ACCESS = (217, 711)  # cudaErrorPeerAccessUnsupported, cudaErrorTooManyPeers


def open_region(group: Group, device: int, nbytes: int, *, zero_bytes: int = 0) -> SymmetricRegion:
    """Collective. Make this rank's region on ``device`` and open the peers'.

    Args:
        group: The ranks.
        device: CUDA ordinal in this process; it must be the current device.
        nbytes: Bytes, control part included; rounded up to 2 MiB.
        zero_bytes: Control bytes at the base that are zeroed before any peer sees them.

    Raises:
        RegionError: On every rank, with the same text.
    """
    return SymmetricRegion(group, CudaMemory(device), nbytes, zero_bytes=zero_bytes)


def device_uuid(device: int) -> str:
    """UUID of a GPU (of a MIG instance, where there is one), written as ``nvidia-smi`` does."""
    from cuda.bindings import driver

    success = driver.CUresult.CUDA_SUCCESS
    driver.cuInit(0)
    status, handle = driver.cuDeviceGet(device)
    if status == success:
        status, uuid = driver.cuDeviceGetUuid(handle)
        if status == success:
            digits = bytes(uuid.bytes).hex()
            return "-".join(
                ("GPU", digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
            )
    raise PlatformError(f"asking for the UUID of device {device}: the driver answered {status!r}")


class CudaMemory:
    """``DeviceMemory`` of one device. Plain ``cudaMalloc``: no pool of CuPy's can be exported."""

    def __init__(self, device: int) -> None:
        from cupy import cuda

        self._device = device
        self._cuda: Any = cuda
        self._error: type[Exception] = cuda.runtime.CUDARuntimeError

    def identity(self) -> tuple[str, str]:
        """See ``DeviceMemory``."""
        return device_uuid(self._device), _container()

    def allocate(self, nbytes: int) -> int:
        """See ``DeviceMemory``."""
        with self._cuda.Device(self._device):
            try:
                return int(self._cuda.runtime.malloc(nbytes))
            except self._error as error:
                if _status(error) != _OUT_OF_MEMORY:
                    raise MemoryCallError("refused", str(error)) from error
                free, total = self._cuda.runtime.memGetInfo()
                raise MemoryCallError(
                    "memory",
                    f"wanted {nbytes >> 20} MiB, of {total >> 20} MiB {free >> 20} MiB are free",
                ) from error

    def zero(self, address: int, nbytes: int) -> None:
        """See ``DeviceMemory``."""
        with self._cuda.Device(self._device):
            try:
                self._cuda.runtime.memset(address, 0, nbytes)
                self._cuda.runtime.deviceSynchronize()
            except self._error as error:
                raise MemoryCallError("refused", str(error)) from error

    def export(self, address: int) -> bytes:
        """See ``DeviceMemory``."""
        with self._cuda.Device(self._device):
            try:
                return bytes(self._cuda.runtime.ipcGetMemHandle(address))
            except self._error as error:
                raise MemoryCallError("refused", f"cudaIpcGetMemHandle: {error}") from error

    def open(self, handle: bytes, uuid: str) -> int:
        """See ``DeviceMemory``. The peer's GPU need not be visible to this process."""
        runtime = self._cuda.runtime
        with self._cuda.Device(self._device):
            peer = _ordinal_of(uuid, runtime.getDeviceCount())
            if peer not in (None, self._device) and not runtime.deviceCanAccessPeer(
                self._device, peer
            ):
                raise MemoryCallError("peer access", "cudaDeviceCanAccessPeer says no")
            try:
                return int(runtime.ipcOpenMemHandle(handle))
            except self._error as error:
                why = "peer access" if _status(error) in _NO_PEER_ACCESS else "refused"
                raise MemoryCallError(why, f"cudaIpcOpenMemHandle: {error}") from error

    def close(self, address: int) -> None:
        """See ``DeviceMemory``."""
        with self._cuda.Device(self._device):
            self._cuda.runtime.ipcCloseMemHandle(address)

    def free(self, address: int) -> None:
        """See ``DeviceMemory``."""
        with self._cuda.Device(self._device):
            self._cuda.runtime.free(address)

    def synchronize(self) -> None:
        """See ``DeviceMemory``."""
        with self._cuda.Device(self._device):
            self._cuda.runtime.deviceSynchronize()


class CupyEvents:
    """``EventSource`` on CuPy's streams (``cupy.cuda.Stream`` objects, also from ``from_external``;
    a stream of another library must live as long as memory was used on it).

    The per-thread default stream is one object for CuPy but one stream per thread for CUDA: a
    Buffer that uses it must be used from one thread.
    """

    def __init__(self) -> None:
        from cupy import cuda

        self._runtime: Any = cuda.runtime
        self._new: Any = cuda.Event
        self._error: type[Exception] = cuda.runtime.CUDARuntimeError
        self._spare: deque[Any] = deque()
        # All of them, for ever: one that dies in a reference cycle together with its ``Recorded``
        # would be destroyed, and kept for the next use all the same.
        self._made: list[Any] = []
        self._thread = threading.local()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Within it, what this thread captures becomes part of graphs that all run on one stream,
        one after the other: ``capture_id`` is ``JOINED`` for each of them."""
        self._thread.joined = True
        try:
            yield
        finally:
            self._thread.joined = False

    def record(self, stream: Any) -> Recorded:
        """See ``EventSource``."""
        if self._spare:
            event = self._spare.pop()
        else:
            event = self._new(disable_timing=True)
            self._made.append(event)
        event.record(stream)
        return Recorded(event, self._spare)

    def query(self, event: Recorded) -> bool:
        """See ``EventSource``. Raises the error that an earlier kernel's fault has left."""
        status = self._runtime.eventQuery(event.event.ptr)
        if status not in (0, _NOT_READY):
            raise self._error(status)
        return bool(status == 0)

    def wait(self, stream: Any, event: Recorded) -> None:
        """See ``EventSource``."""
        stream.wait_event(event.event)

    def capture_id(self, stream: Any) -> int:
        """See ``EventSource``."""
        try:
            if not self._runtime.streamIsCapturing(stream.ptr):
                return 0
        except self._error as error:
            if _status(error) in (_CAPTURE_IMPLICIT, _CAPTURE_INVALIDATED):
                return -1
            raise
        if getattr(self._thread, "joined", False):
            return JOINED
        from cuda.bindings import driver

        status, _, number, *_ = driver.cuStreamGetCaptureInfo(stream.ptr)
        return int(number) if status == driver.CUresult.CUDA_SUCCESS else -1


class Recorded:
    """An event in use. It is kept for the next use when its last reference goes, in any thread."""

    __slots__ = ("_spare", "event")

    def __init__(self, event: Any, spare: deque[Any]) -> None:
        self.event = event
        self._spare = spare

    def __del__(self) -> None:
        self._spare.append(self.event)


class PoolArrays:
    """CuPy arrays over the blocks of a pool in a region.

    Args:
        region: The memory.
        pool: Offsets of this pool are offsets in ``region``.
        device: CUDA ordinal the region lies on.

    Attributes:
        base: Address of offset 0.
        allocation: What arrays keep alive.
    """

    def __init__(self, region: SymmetricRegion, pool: Pool, device: int) -> None:
        import cupy

        self._ndarray: Any = cupy.ndarray
        self._memory: Any = cupy.cuda.UnownedMemory
        self._pointer: Any = cupy.cuda.MemoryPointer
        self._pool = pool
        self._given_back = pool.given_back
        self._region = region
        self.allocation = region.allocation
        self.base = region.base
        self._device = device

    def own(self, block: Block) -> Any:
        """A ``MemoryPointer`` to ``block``; the block is given back when the last array made from
        it dies. Once per block."""
        owner = BlockOwner(block, self._given_back, self.allocation)
        memory = self._memory(self.base + block.offset, block.nbytes, owner, self._device)
        return self._pointer(memory, 0)

    def pointer(self, owner: BlockOwner) -> Any:
        """A ``MemoryPointer`` to a block that has an owner; arrays made from it keep the owner."""
        block = owner.block
        memory = self._memory(self.base + block.offset, block.nbytes, owner, self._device)
        return self._pointer(memory, 0)

    def array(self, pointer: Any, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> Any:
        """An array ``offset`` bytes behind ``pointer``; any dtype, FP8 included."""
        return self._ndarray(shape, dtype, pointer + offset if offset else pointer)

    def empty(self, shape: Sequence[int], dtype: Any, stream: Stream, label: str = "") -> Any:
        """A new array in a block of its own."""
        import numpy

        nbytes = numpy.dtype(dtype).itemsize
        for extent in shape:
            nbytes *= extent
        return self.array(self.own(self._pool.alloc(nbytes, stream, label)), tuple(shape), dtype)

    def find(self, array: Any) -> int | None:
        """Offset in the region of a C-contiguous array that lies wholly in it, else ``None``."""
        return self._region.find(array.data.ptr, array.nbytes)

    def record_stream(self, array: Any, stream: Stream) -> bool:
        """Note that ``stream`` works on ``array``; False where it lies outside the pool."""
        offset = self.find(array)
        block = None if offset is None else self._pool.block_at(offset)
        if block is None:
            return False
        self._pool.record_stream(block, stream)
        return True


def _status(error: Exception) -> int:
    return int(getattr(error, "status", -1))


def _ordinal_of(uuid: str, count: int) -> int | None:
    for device in range(count):
        if device_uuid(device) == uuid:
            return device
    return None


def _container() -> str:
    """Names of the namespaces that CUDA IPC looks through; equal where processes share them."""
    names = []
    for kind in ("ipc", "pid"):
        try:
            names.append(str((Path("/proc/self/ns") / kind).readlink()))
        except OSError:
            names.append(kind)
    return " ".join(names)
