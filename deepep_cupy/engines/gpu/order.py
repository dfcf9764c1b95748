"""One operation at a time on a GPU, whatever Buffers, streams and threads a process uses.

The blocks of an operation wait for each other. Two operations whose blocks are half resident each
would wait for ever; so every operation is queued behind the one before it.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from deepep_cupy.errors import StateError

__all__ = ["DeviceOrder"]


class DeviceOrder:
    """The order of all operations of this process on one device.

    Attributes:
        lock: Held from ``enter`` until the operation is launched and ``leave`` was called.
        precise: Whether ``leave`` marks the end of each operation with an event. Without, the
            next operation on another stream waits for all that the stream was given meanwhile,
            which costs nothing as long as one stream is used.
    """

    _orders: ClassVar[dict[int, DeviceOrder]] = {}

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.precise = False
        self._last: Any = None
        self._end: Any = None
        self._captured: tuple[int, Any] = (0, None)

    @classmethod
    def of(cls, device: int) -> DeviceOrder:
        """The order of a device, shared by all Buffers of the process."""
        return cls._orders.setdefault(device, cls())

    def enter(self, stream: Any, events: Any) -> None:
        """Make ``stream`` wait for the last operation, which may be on another stream."""
        last = self._last
        if last is stream:
            self._end = None
            return
        if last is not None and last.ptr != stream.ptr:
            if self._end is None and events.capture_id(last) != 0:
                raise StateError(
                    "the last operation's stream is being captured into a graph; end the capture "
                    "before using a Buffer on another stream."
                )
            stream.wait_event((self._end or events.record(last)).event)
        self._last, self._end = stream, None

    def leave(self, stream: Any, events: Any) -> None:
        """The operation is launched; needed where ``precise``."""
        self._end = events.record(stream)

    def enter_captured(self, stream: Any, events: Any, capture: int) -> None:
        """The same for an operation in a graph: behind the last one of that graph. How a graph
        stands to what is launched outside of it is its user's to say, by the stream."""
        number, last = self._captured
        if number == capture and last.ptr != stream.ptr:
            stream.wait_event(events.record(last).event)
        self._captured = (capture, stream)

    def drain(self) -> None:
        """Wait until the last operation has ended: it ends by itself, at the latest in
        ``timeout_s``."""
        if self._last is not None:
            self._last.synchronize()
