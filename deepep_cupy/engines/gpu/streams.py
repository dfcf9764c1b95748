"""Where an operation runs, whose its arrays are, and how long what it uses lives.

By default an operation runs on the caller's current stream, and nothing here costs anything. With
a ``previous_event`` or ``async_finish`` it runs on the communication stream of the Buffer; then

* blocks of the pool are made for that stream, and known to be used by the caller's stream too;
* ordinary memory is lent: it comes from CuPy's memory of that stream, and goes back there only
  when all streams that used it are done (CuPy itself would reuse it at once);
* inputs are kept until the operation is over.

Under graph capture all that an operation uses is kept until the Buffer is closed: the graph may
be launched at any time.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepep_cupy.transport.block import Block

if TYPE_CHECKING:
    from deepep_cupy.engines.gpu.core import Core

__all__ = ["Keeper", "StreamPoint", "Turn"]


class Keeper:
    """Keeps objects until work on the GPU is over, and lends memory.

    Args:
        events: CuPy's side of the pool.
        device: CUDA ordinal.

    Attributes:
        kept: Events, and what is kept until they are over.
        returned: Lent memory that nobody refers to any more, and the streams that used it.
    """

    def __init__(self, events: Any, device: int) -> None:
        import cupy

        self._cupy: Any = cupy
        self._events = events
        self._device = device
        self.kept: deque[tuple[Sequence[Any], Any]] = deque()
        self.returned: deque[tuple[Any, dict[Any, None]]] = deque()
        self._for_ever: list[Any] = []

    @property
    def captured(self) -> bool:
        """Whether graphs use anything."""
        return bool(self._for_ever)

    def until(self, event: Any, objects: Any) -> None:
        """Keep ``objects`` until ``event`` is over."""
        self.kept.append(((event,), objects))

    def for_ever(self, objects: Any) -> None:
        """Keep ``objects`` until ``clear``."""
        self._for_ever.append(objects)

    def lend(self, nbytes: int, stream: Any, user: Any) -> tuple[Any, _Lent]:
        """Memory for work on ``stream`` whose results ``user``, another stream, uses."""
        cuda = self._cupy.cuda
        with stream:
            memory = cuda.alloc(max(1, nbytes))
        lent = _Lent(memory, self.returned, user)
        whole = cuda.UnownedMemory(memory.ptr, max(1, nbytes), lent, self._device)
        return cuda.MemoryPointer(whole, 0), lent

    def reap(self) -> None:
        """Drop what is not used any more. Not under capture: it asks events."""
        events, returned, kept = self._events, self.returned, self.kept
        waiting = []
        marks: dict[Any, Any] = {}
        while returned:
            memory, users = returned.popleft()
            if any(events.capture_id(user) != 0 for user in users):
                waiting.append((memory, users))
                continue
            for user in users:
                if user not in marks:
                    marks[user] = events.record(user)
            kept.append((tuple(marks[user] for user in users), memory))
        returned.extend(waiting)
        while kept and all(map(events.query, kept[0][0])):
            kept.popleft()

    def clear(self) -> None:
        """Drop everything: nothing runs on the device any more, and no graph will."""
        self.kept.clear()
        self.returned.clear()
        self._for_ever.clear()


class _Lent:
    """Owner of lent memory; dies with the last array over it. Any thread, any lock, any capture:
    the finalizer only appends."""

    __slots__ = ("__weakref__", "_memory", "_returned", "users")

    def __init__(
        self, memory: Any, returned: deque[tuple[Any, dict[Any, None]]], user: Any
    ) -> None:
        self._memory = memory
        self._returned = returned
        self.users: dict[Any, None] = {user: None}

    def __del__(self) -> None:
        self._returned.append((self._memory, self.users))


class StreamPoint:
    """``engines.base.Event``: the end of an operation, or of what a stream had been given.

    Args:
        core: The engine's parts.
        event: Recorded.
        blocks: Of the pool, results of the operation.
        lent: Other memory of results.
    """

    def __init__(
        self, core: Core, event: Any, blocks: Sequence[Block] = (), lent: Sequence[Any] = ()
    ) -> None:
        self._core = core
        self._event = event
        self._blocks = blocks
        self._lent = lent

    def wait(self) -> None:
        """Let the current stream wait; it is a user of the results from here on. Raises what
        finished operations have left to be reported."""
        core = self._core
        stream = core.cupy.cuda.get_current_stream()
        stream.wait_event(self._event.event)
        for block in self._blocks:
            core.pool.record_stream(block, stream)
        for reference in self._lent:
            lent = reference()
            if lent is not None:
                lent.users[stream] = None
        core.news.raise_any()


class Turn:
    """One operation's place on the GPU. The engine has one for calls without streams, and uses
    it again and again.

    Args:
        core: The engine's parts.

    Attributes:
        stream: Where the operation runs.
        current: The caller's stream.
        capture: Number of the capture that the operation becomes part of, 0 for none.
        plain: Whether the operation runs on the caller's stream, and no graph is captured.
        held: Whether the device's lock is held.
        staged: Blocks to be given back at the end.
    """

    __slots__ = (
        "_core",
        "_lent",
        "_outputs",
        "capture",
        "current",
        "held",
        "plain",
        "staged",
        "stream",
    )

    def __init__(self, core: Core) -> None:
        self._core = core
        self.stream: Any = None
        self.current: Any = None
        self.capture = 0
        self.plain = True
        self.held = False
        self.staged: list[Block] = []
        self._outputs: list[Block] = []
        self._lent: list[Any] = []

    @property
    def capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.capture != 0

    def alloc(self, *wanted: tuple[int, str]) -> list[Block]:
        """Blocks of the pool, all or none; the one that will be shrunk comes last.

        Args:
            wanted: (bytes, label) of each.
        """
        pool = self._core.pool
        blocks = pool.alloc_all(wanted, self.stream, self.capture)
        if self.current is not self.stream:
            for block in blocks:
                pool.record_stream(block, self.current)
            self._outputs += blocks
        return blocks

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array in ordinary memory, of any dtype."""
        core, cuda = self._core, self._core.cupy.cuda
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if self.current is self.stream:
            pointer = cuda.alloc(nbytes)
        elif self.capture != 0:
            with self.stream:
                pointer = cuda.alloc(nbytes)
        else:
            pointer, lent = core.keeper.lend(nbytes, self.stream, self.current)
            self._lent.append(weakref.ref(lent))
        array = core.cupy.ndarray(shape, dtype, memptr=pointer)
        if self.capture != 0:
            core.keeper.for_ever(array)
        return array

    def copy(self, array: Any) -> Any:
        """A copy in ordinary memory; None of None. By bytes: any dtype, and the same order."""
        if array is None:
            return None
        if array.flags.c_contiguous:
            made = self.empty(array.shape, array.dtype)
        else:
            made = self.empty(array.shape[::-1], array.dtype).T
        self._core.copy_bytes(made.data.ptr, array.data.ptr, array.nbytes, self.stream)
        return made

    def keep(self, thing: Any) -> None:
        """Let something live until the operation is over; under capture, for ever."""
        self._core.foreign.append(thing)

    def point(self, event: Any) -> StreamPoint:
        """The end of this operation, for the caller."""
        return StreamPoint(self._core, event, tuple(self._outputs), tuple(self._lent))
