"""Calls that were sent and not yet received: their hooks, and what is refused meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from deepep_cupy.errors import StateError

__all__ = ["Hook", "OpenCalls"]


class Hook:
    """Queues the receiving half of one call, once.

    Args:
        name: The call's method of ``Buffer``, for messages.
        receive: ``receive`` of the engine's output.
        finish: ``Lifecycle.receive``.

    Attributes:
        name: See Args.
        receive: See Args.
        gone: Why it may not be called any more; None: it may.
    """

    def __init__(
        self, name: str, receive: Callable[[], None], finish: Callable[[Hook], None]
    ) -> None:
        self.name = name
        self.receive = receive
        self.gone: str | None = None
        self._finish = finish

    def __call__(self) -> None:
        """Queue the receiving half on the stream that the call was made on.

        Raises:
            StateError: It was called before, ``reset`` or ``close`` has dropped the call, or the
                Buffer is closed or poisoned.
            PeerTimeoutError: A rank did not come in ``timeout_s``. The Buffer is poisoned.
            PeerAbortedError: Another rank gave up. The Buffer is poisoned.
        """
        self._finish(self)


class OpenCalls:
    """The calls of one Buffer whose hooks are still to be called.

    Args:
        most: How many there may be.
        rank: This rank, for messages.
    """

    def __init__(self, most: int, rank: int) -> None:
        self._most = most
        self._rank = rank
        self._hooks: list[Hook] = []

    def __len__(self) -> int:
        return len(self._hooks)

    def full(self, *, sends: bool) -> bool:
        """Whether no further call may come: one that only sends, or another."""
        return bool(self._hooks) and not (sends and len(self._hooks) < self._most)

    def complaint(self, operation: str, *, sends: bool) -> StateError:
        """Why not."""
        names = ", ".join(hook.name for hook in self._hooks)
        most = f", which is all of low_latency_in_flight = {self._most}" if sends else ""
        return StateError(
            f"{operation}(): {len(self._hooks)} sent and not yet received ({names}){most}, on rank "
            f"{self._rank}; call the hooks first."
        )

    def add(self, hook: Hook) -> None:
        """Note a call that was sent."""
        self._hooks.append(hook)

    def take(self, hook: Hook) -> None:
        """Strike a call whose hook is called.

        Raises:
            StateError: It was struck before.
        """
        if hook.gone is not None:
            raise StateError(f"{hook.name}(): its hook {hook.gone}, on rank {self._rank}.")
        self._hooks.remove(hook)
        hook.gone = "was called before; a call is received once"

    def drop(self, operation: str) -> None:
        """Forget all of them: their outputs stay undefined."""
        for hook in self._hooks:
            hook.gone = f"came too late: {operation}() has dropped the call"
        self._hooks.clear()
