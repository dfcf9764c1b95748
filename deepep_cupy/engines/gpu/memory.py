"""The symmetric memory of one Buffer: region, control block, pool, arrays over it."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.memory.cuda_ipc import CupyEvents, PoolArrays, open_region
from deepep_cupy.memory.pool import Pool
from deepep_cupy.protocol.control_block import ControlLayout
from deepep_cupy.protocol.sizes import BufferSpec, pool_bytes_hint
from deepep_cupy.ranks.group import Group

__all__ = ["SymmetricMemory", "epoch_after"]

_FIRST_EPOCH = 1


class SymmetricMemory:
    """Memory of this rank that all ranks have mapped. The constructor is collective.

    Args:
        group: The ranks.
        device: CUDA ordinal of this rank's GPU, the current device.
        spec: Sizes of the Buffer.
        control: Layout of the control block, which lies at the start of the region.

    Attributes:
        control: Layout of the control block.
        region: The memory of all ranks.
        events: The pool's CUDA events, made by CuPy.
        pool: Blocks behind the control block; offsets are those of the region.
        arrays: Arrays over blocks.
    """

    def __init__(self, group: Group, device: int, spec: BufferSpec, control: ControlLayout) -> None:
        from cupy.cuda import runtime

        self._runtime: ModuleType = runtime
        self.control = control
        nbytes = control.nbytes + (spec.pool_bytes or pool_bytes_hint(spec))
        self.region = open_region(group, device, nbytes, zero_bytes=control.nbytes)
        self._write_epoch(_FIRST_EPOCH)
        self.events = CupyEvents()
        self.pool = Pool(
            self.region.nbytes - control.nbytes,
            self.events,
            start=control.nbytes,
            who=f"rank {spec.rank}",
        )
        self.arrays = PoolArrays(self.region, self.pool, device)

    def epoch(self) -> int:
        """Epoch of the next operation. Waits for the device."""
        word = np.zeros(1, np.uint32)
        address = self.region.base + self.control.epoch
        self._runtime.memcpy(
            word.ctypes.data, address, word.nbytes, self._runtime.memcpyDeviceToHost
        )
        return int(word[0])

    def start_over(self, epochs: NDArray[np.int64]) -> None:
        """Zero the control block, and go on with an epoch later than any rank's. No kernel may be
        running on any rank, and none may start before all ranks have done this."""
        self._runtime.memset(self.region.base, 0, self.control.nbytes)
        self._runtime.deviceSynchronize()
        self._write_epoch(epoch_after(epochs))

    def _write_epoch(self, epoch: int) -> None:
        """Write the epoch, and wait until it is there: a copy of pageable memory returns before,
        and kernels on a non-blocking stream would not wait for it."""
        word = np.array([epoch], np.uint32)
        address = self.region.base + self.control.epoch
        self._runtime.memcpy(
            address, word.ctypes.data, word.nbytes, self._runtime.memcpyHostToDevice
        )
        self._runtime.deviceSynchronize()


def epoch_after(epochs: NDArray[np.int64]) -> int:
    """An epoch ahead of all of them, in wrapping order; never 0, which means "never written"."""
    newest = int(epochs[0])
    for epoch in epochs[1:]:
        if (int(epoch) - newest) % (1 << 32) < 1 << 31:
            newest = int(epoch)
    return (newest + 2) % (1 << 32) or 2
