"""``EventOverlap``: DeepEP's event, to let a stream wait for what another one does."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from deepep_cupy.engines.calls import Event
from deepep_cupy.errors import ContractError, shown

__all__ = ["EventOverlap"]


class EventOverlap:
    """A point in a stream's work: what ``capture`` and every operation return.

    ``current_stream_wait`` lets the current stream wait for it; as a context manager it does so
    at the end, so that what is queued inside the block overlaps with the operation::

        recv_x, *_, event = buffer.dispatch(x, topk_idx=topk_idx, async_finish=True)
        with event:
            other = work()          # runs beside the dispatch
        use(recv_x)                 # after both

    Results of an operation without ``async_finish`` are in stream order already; the event that
    comes with them has nothing to wait for. On the host engine no event has.

    Args:
        event: The engine's event, or None for one without effect.
        extra_tensors: Arrays to keep alive as long as this object lives.

    Raises:
        ContractError: ``event`` is no event.
    """

    def __init__(self, event: Event | None = None, extra_tensors: Any = None) -> None:
        if event is not None and not callable(getattr(event, "wait", None)):
            raise ContractError(
                f"EventOverlap(): argument 'event' must be an engine's event or None, got "
                f"{shown(event)}."
            )
        self.event = event
        self.extra_tensors = extra_tensors
        self._hook: Callable[[], object] | None = None
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Let the current stream wait for this point. The host does not wait.

        Collective: no.  Stream: current.  Host sync: no.

        Args:
            release_handle: Forget the event, and the kept arrays, afterwards.
        """
        if self.event is not None:
            self.event.wait()
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = self.extra_tensors = None

    def register_hook_after_wait(self, hook: Callable[[], object]) -> None:
        """Call ``hook()`` once, in the next ``current_stream_wait``.

        Args:
            hook: Takes nothing; what it returns is dropped.

        Raises:
            ContractError: It cannot be called.
        """
        if not callable(hook):
            raise ContractError(
                f"register_hook_after_wait(): argument 'hook' must be a function, got "
                f"{shown(hook)}."
            )
        self._hook = hook

    def __call__(self, release_handle: bool = False) -> Self:
        """For ``with event(release_handle=True):``; concerns the next block alone.

        Args:
            release_handle: As for ``current_stream_wait``.
        """
        self._release = release_handle
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        release, self._release = self._release, False
        self.current_stream_wait(release)

    def __repr__(self) -> str:
        return f"EventOverlap({'with an event' if self.event is not None else ''})"
