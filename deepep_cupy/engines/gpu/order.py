"""One operation at a time on a GPU, whatever Buffers and streams a process uses.

The blocks of an operation wait for each other. Two operations whose blocks are half resident each
would wait for ever; so every operation is queued behind the one before it.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["DeviceOrder"]


class DeviceOrder:
    """The order of all operations of this process on one device."""

    _orders: ClassVar[dict[int, DeviceOrder]] = {}

    def __init__(self) -> None:
        self._last: Any = None

    @classmethod
    def of(cls, device: int) -> DeviceOrder:
        """The order of a device, shared by all Buffers of the process."""
        return cls._orders.setdefault(device, cls())

    def enter(self, stream: Any, events: Any) -> None:
        """Make ``stream`` wait for the last operation, which may be on another stream."""
        last, self._last = self._last, stream
        if last is not None and last.ptr != stream.ptr:
            stream.wait_event(events.record(last).event)

    def drain(self) -> None:
        """Wait until the last operation has ended: it ends by itself, at the latest in
        ``timeout_s``."""
        if self._last is not None:
            self._last.synchronize()
