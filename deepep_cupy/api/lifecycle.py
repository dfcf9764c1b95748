"""The life of a Buffer: its states, what poisons it, how it is reset, closed and left behind."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import TracebackType
from typing import Any, Self, TypeVar

from deepep_cupy.engines.protocol import Engine
from deepep_cupy.errors import ContractError, PeerAbortedError, PeerTimeoutError, StateError
from deepep_cupy.protocol.headers import Kind
from deepep_cupy.protocol.sizes import BufferSpec
from deepep_cupy.ranks.abort_board import Abort, AbortBoard, AbortReason, RankState
from deepep_cupy.ranks.exit_guard import ExitGuard
from deepep_cupy.ranks.group import Group, LinkError

__all__ = ["Lifecycle", "State"]

D = TypeVar("D")


class State(Enum):
    """Life of a Buffer."""

    OPEN = "open"
    POISONED = "poisoned"
    CLOSED = "closed"


_OPEN = State.OPEN
_LEGAL = {
    State.OPEN: {State.POISONED, State.CLOSED},
    State.POISONED: {State.OPEN, State.CLOSED},
    State.CLOSED: set[State](),
}
"""State → states that may follow: open → poisoned → open (reset) → closed."""


class Lifecycle:
    """What ``Buffer`` is without its operations. ``Buffer.__init__`` sets the attributes."""

    _state: State
    _spec: BufferSpec
    _group: Group
    _board: AbortBoard
    _engine: Engine
    _guard: ExitGuard
    _inside: threading.Lock

    @property
    def state(self) -> State:
        """Where in its life this Buffer is."""
        return self._state

    def reset(self) -> None:
        """Bring a poisoned Buffer back to work. Handles stay valid. Harmless on an open one.

        Collective: yes.  Stream: drains this Buffer's work.  Host sync: yes.

        Raises:
            StateError: The Buffer is closed.
            PeerTimeoutError: A rank did not come in ``timeout_s``; still poisoned, try again.
            PeerAbortedError: A rank has left for ever: only ``close`` is left.
        """
        if self._state is State.CLOSED:
            raise StateError(f"reset(): {self._closed()}")
        with self._alone("reset"), self._failures("reset"):
            self._engine.reset()
        self._guard.doomed = False
        if self._state is State.POISONED:
            self._become(State.OPEN)

    def close(self) -> None:
        """Free everything, together with all other ranks. A second call does nothing.

        Collective: yes.  Stream: drains this Buffer's work.  Host sync: yes.

        Raises:
            PeerTimeoutError: A rank did not come in ``timeout_s``. The Buffer is closed all the
                same; its memory is left to the end of the process, which ends all ranks.
            PeerAbortedError: A rank has left for ever; the same follows.
            StateError: Another thread is in a call of this Buffer, which stays open.
        """
        if self._state is State.CLOSED:
            return
        with self._alone("close"):
            self._become(State.CLOSED)
            try:
                self._engine.close(collective=True)
            except BaseException as error:
                self._leave(error)
                raise
        self._board.free()
        self._group.free()
        self._guard.end()

    def destroy(self) -> None:
        """DeepEP's name for ``close``."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif self._state is not State.CLOSED:
            # The others may be anywhere: tell them, and wait for nobody.
            self._become(State.CLOSED)
            self._leave(error)
            if isinstance(error, SystemExit) and error.code not in (None, 0):
                self._guard.code = error.code if isinstance(error.code, int) else 1
                self._guard.doomed = True

    def __del__(self) -> None:
        if getattr(self, "_state", State.CLOSED) is not State.CLOSED:
            warnings.warn(
                f"a {self._state.value} Buffer was dropped without close(); its memory is left to "
                f"the end of the process",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    # ------------------------------------------------------------------------------------ states

    def _become(self, state: State) -> None:
        if state not in _LEGAL[self._state]:
            raise StateError(f"a Buffer cannot go from {self._state.value} to {state.value}.")
        self._state = state

    def _closed(self) -> str:
        return f"this Buffer is closed on rank {self._spec.rank}; make a new one on every rank."

    def _must_be_open(self, operation: str) -> None:
        if self._state is State.CLOSED:
            raise StateError(f"{operation}(): {self._closed()}")
        if self._state is State.POISONED:
            raise StateError(
                f"{operation}(): this Buffer is poisoned on rank {self._spec.rank} by an earlier "
                f"failure; call reset() or close() on every rank."
            )

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Keep other threads out: which of two calls comes first, no other rank could know."""
        if not self._inside.acquire(blocking=False):
            raise self._occupied(name)
        try:
            yield
        finally:
            self._inside.release()

    def _occupied(self, name: str) -> StateError:
        return StateError(
            f"{name}(): another thread is in a call of this Buffer on rank {self._spec.rank}; let "
            f"one thread make all of a Buffer's calls, or give each thread a Buffer of its own."
        )

    def _operate(self, name: str, kind: Kind, work: Callable[..., D], *given: Any) -> D:
        """Run an operation; a refused argument of this rank is told to all ranks."""
        if self._state is not _OPEN:
            self._must_be_open(name)
        if not self._inside.acquire(False):
            raise self._occupied(name)
        try:
            return work(*given)
        except BaseException as error:
            with self._failures(name):
                if isinstance(error, ContractError) and error.refusal is not None:
                    self._engine.refuse(kind, error.refusal)
                raise
        finally:
            self._inside.release()

    @contextmanager
    def _failures(self, name: str) -> Iterator[None]:
        """Poison the Buffer when anything but a contract or a state is broken."""
        try:
            yield
        except (ContractError, StateError):
            raise
        except (PeerTimeoutError, PeerAbortedError):
            self._poison()
            raise
        except LinkError as error:
            self._engine.abort(f"the link to another rank broke in {name}(): {error}")
            self._poison()
            raise PeerAbortedError(
                f"{name}(): the link from rank {self._spec.rank} to another rank broke: {error}; "
                f"that rank has probably died; end the program."
            ) from error
        except BaseException as error:
            # This rank's half of the operation is missing: the others must not wait for it.
            self._engine.abort(f"{type(error).__name__} in {name}(): {error}")
            self._poison()
            raise

    def _poison(self) -> None:
        self._guard.doomed = True
        if self._state is State.OPEN:
            self._become(State.POISONED)

    def _leave(self, error: BaseException) -> None:
        """This rank is gone for ever; tell the others, and free what can be freed alone."""
        text = f"{type(error).__name__}: {error}"
        cause = self._board.find() or Abort(AbortReason.ERROR, self._spec.rank, (), text)
        self._board.abort(cause, RankState.LEFT)
        self._engine.close(collective=False)
        if isinstance(error, PeerTimeoutError | PeerAbortedError):
            self._guard.doomed = True
