"""The life of a Buffer: its states, what poisons it, how it is reset, closed and left behind."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import FrameType
from typing import Any, ClassVar, TypeAlias, TypeVar

from deepep_cupy.api.hooks import Hook, OpenCalls
from deepep_cupy.engines.protocol import Engine
from deepep_cupy.errors import (
    ContractError,
    PeerAbortedError,
    PeerTimeoutError,
    StateError,
    described,
)
from deepep_cupy.protocol.headers import Kind, Refusal, RefusalCode
from deepep_cupy.protocol.sizes import BufferSpec
from deepep_cupy.ranks.abort_board import Abort, AbortBoard, AbortReason, RankState
from deepep_cupy.ranks.exit_guard import ExitGuard
from deepep_cupy.ranks.group import Group, LinkError

__all__ = ["CallLock", "Lifecycle", "State"]

D = TypeVar("D")
Holder: TypeAlias = tuple[int, FrameType]
"""A call: its thread, as ``threading.get_ident`` says, and its frame."""


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


class CallLock:
    """Held by the call of a Buffer that is under way. It never waits: who comes then is refused.

    Calls of different Buffers must come in one order on all ranks. Calls of two threads at once
    have none, so that here at most one thread of the process is in a call of any Buffer; but where
    nothing of two calls meets, they may run side by side.

    Args:
        side_by_side: Whether they may.
        only_thread: The one thread that may call, as ``threading.get_ident`` says; None: any.
    """

    _process: ClassVar[Holding]

    def __init__(self, *, side_by_side: bool = False, only_thread: int | None = None) -> None:
        self._own = Holding()
        self._others = Holding() if side_by_side else CallLock._process
        self._only_thread = only_thread
        self.side_by_side = side_by_side

    @property
    def forbidden(self) -> bool:
        """Whether the calling thread may never call."""
        return self._only_thread is not None and threading.get_ident() != self._only_thread

    def locked(self) -> bool:
        """Whether a call of this Buffer is under way."""
        return self._own.locked()

    def acquire(self, me: Holder) -> bool:
        """Take it, where no other call is in the way; whether that was so."""
        if self.forbidden or not self._own.take(me):
            return False
        if self._others.take(me):
            return True
        self._own.give_back(me)
        return False

    def release(self, me: Holder) -> None:
        """Give back what ``me`` holds, if it holds anything."""
        self._others.give_back(me)
        self._own.give_back(me)


class Holding:
    """Who holds a lock.

    An exception from outside, such as Ctrl-C, may come at any moment: after the lock was taken and
    before its holder knows, or on the way to giving it back. So each step is one operation of a
    dictionary, and what a call of this thread has left that is not running any more, the next one
    takes over.
    """

    def __init__(self) -> None:
        self._held: dict[str, Holder] = {}

    def locked(self) -> bool:
        """Whether anybody holds it."""
        return "lock" in self._held

    def take(self, me: Holder) -> bool:
        """Hold it; False where somebody else does."""
        found = self._held.setdefault("lock", me)
        if found is me:
            return True
        if found[0] != me[0] or _is_running(found[1]):
            return False
        self._held["lock"] = me
        return True

    def give_back(self, me: Holder) -> None:
        """Hold it no longer, where ``me`` does."""
        if self._held.get("lock") is me:
            self._held.pop("lock", None)


CallLock._process = Holding()


def _is_running(frame: FrameType) -> bool:
    """Whether a call of this thread is under way."""
    here: FrameType | None = sys._getframe()
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None


class Lifecycle:
    """State of one Buffer, and what leads from one state to the next.

    Args:
        spec: Sizes of the Buffer.
        group: Its ranks.
        board: Their abort board.
        guard: What the end of the process does with this Buffer.
        engine: What runs its operations.
        inside: Which threads may call.

    Attributes:
        state: Where in its life the Buffer is.
        inside: Held by the thread that is in a collective call.
        sent: Calls that were sent and not yet received.
    """

    def __init__(
        self,
        spec: BufferSpec,
        group: Group,
        board: AbortBoard,
        guard: ExitGuard,
        engine: Engine,
        inside: CallLock,
    ) -> None:
        self._spec = spec
        self._group = group
        self._board = board
        self._guard = guard
        self._engine = engine
        self.state = State.OPEN
        self.inside = inside
        self.sent = OpenCalls(spec.low_latency_in_flight, spec.rank)

    def reset(self) -> None:
        """See ``Buffer.reset``."""
        self.must_not_be_closed("reset")
        if self._group.over:
            raise self._too_late("reset")
        me = threading.get_ident(), sys._getframe()
        try:
            self._enter("reset", me)
            with self.failures("reset"):
                self.sent.drop("reset")
                self._engine.reset()
        finally:
            self.inside.release(me)
            del me  # the frame that it names would hold itself, and all that it has
        self._guard.doomed = False
        if self.state is State.POISONED:
            self._become(State.OPEN)

    def close(self) -> None:
        """See ``Buffer.close``."""
        if self.state is State.CLOSED:
            return
        if self._group.over:
            self._become(State.CLOSED)
            self._guard.end()
            raise self._too_late("close")
        me = threading.get_ident(), sys._getframe()
        try:
            self._enter("close", me)
            self._become(State.CLOSED)
            self.sent.drop("close")
            try:
                self._engine.close(collective=True)
            except BaseException as error:
                self._abandon(error)
                raise
        finally:
            self.inside.release(me)
            del me  # the frame that it names would hold itself, and all that it has
        self._board.free()
        self._group.free()
        self._guard.end()

    def leave(self, error: BaseException) -> None:
        """Close this rank's half alone because of an error: the other ranks may be anywhere, so
        the board names this one, and none is waited for."""
        if self.state is State.CLOSED:
            return
        self._become(State.CLOSED)
        if self._group.over:
            self._guard.end()
            return
        self._abandon(error)
        if isinstance(error, SystemExit) and error.code not in (None, 0):
            self._guard.code = error.code if isinstance(error.code, int) else 1
            self._guard.doomed = True

    def operate(
        self, name: str, kind: Kind, work: Callable[..., D], *given: Any, sends: bool = False
    ) -> D:
        """Run a collective operation. Where this rank refuses an argument, all ranks learn it.

        Args:
            name: Method of ``Buffer``, for messages.
            kind: The operation, for the header that a refusal goes out with.
            work: Does it.
            given: For ``work``.
            sends: Whether the call is to be received later, by ``hook``.
        """
        if self.state is not _OPEN:
            self.must_be_open(name)
        me = threading.get_ident(), sys._getframe()
        try:
            self._enter(name, me, poisons=True)
            if len(self.sent):
                self._refuse_while_open(name, kind, sends=sends)
            return work(*given)
        except BaseException as error:
            with self.failures(name):
                if isinstance(error, ContractError) and error.refusal is not None:
                    self._engine.refuse(kind, error.refusal)
                raise
        finally:
            self.inside.release(me)
            del me  # the frame that it names would hold itself, and all that it has

    def _refuse_while_open(self, name: str, kind: Kind, *, sends: bool) -> None:
        """Refuse what may not come between sending and receiving; all ranks learn it."""
        if self.sent.full(sends=sends):
            self._engine.refuse(kind, Refusal(RefusalCode.CALLS_OPEN, len(self.sent)))
            raise self.sent.complaint(name, sends=sends)

    def hook(self, name: str, receive: Callable[[], None] | None) -> Hook | None:
        """What receives a call that was sent; None where there is nothing to receive.

        Args:
            name: Method of ``Buffer``, for messages.
            receive: Of the engine's output.
        """
        if receive is None:
            return None
        hook = Hook(name, receive, self._receive)
        self.sent.add(hook)
        return hook

    def _receive(self, hook: Hook) -> None:
        """See ``Hook.__call__``."""
        if hook.gone is None:
            self.must_be_open(hook.name)
        me = threading.get_ident(), sys._getframe()
        try:
            self._enter(hook.name, me)
            with self.failures(hook.name):
                self.sent.take(hook)
                hook.receive()
        finally:
            self.inside.release(me)
            del me  # the frame that it names would hold itself, and all that it has

    # ------------------------------------------------------------------------------------ states

    def _become(self, state: State) -> None:
        if state not in _LEGAL[self.state]:
            raise StateError(f"a Buffer cannot go from {self.state.value} to {state.value}.")
        self.state = state

    def must_not_be_closed(self, operation: str) -> None:
        """Refuse a local operation of a closed Buffer."""
        if self.state is State.CLOSED:
            raise StateError(
                f"{operation}(): this Buffer is closed on rank {self._spec.rank}; make a new one "
                f"on every rank."
            )

    def must_be_open(self, operation: str) -> None:
        """Refuse an operation that a poisoned Buffer cannot do either."""
        self.must_not_be_closed(operation)
        if self.state is State.POISONED:
            raise StateError(
                f"{operation}(): this Buffer is poisoned on rank {self._spec.rank} by an earlier "
                f"failure; call reset() or close() on every rank."
            )

    def _too_late(self, operation: str) -> StateError:
        return StateError(
            f"{operation}(): MPI has been finalised on rank {self._spec.rank}, and the ranks "
            f"cannot meet any more; close Buffers before MPI.Finalize() (end the 'with' first)."
        )

    def _enter(self, name: str, me: Holder, *, poisons: bool = False) -> None:
        """Keep other threads out: other ranks cannot know which of two calls comes first."""
        if not self.inside.acquire(me):
            raise self._occupied(name, poisons=poisons)

    def _occupied(self, name: str, *, poisons: bool = False) -> StateError:
        """Why this thread may not call now.

        Args:
            name: Method of ``Buffer``.
            poisons: Other ranks may have come to this call, in another order than the calls that
                this rank is in: they are told at once, and the Buffer is poisoned.
        """
        rank, lock = self._spec.rank, self.inside
        if lock.forbidden:
            return StateError(
                f"{name}(): only the thread that made this Buffer may call it on rank {rank}, "
                f"because MPI was initialised for one thread; let mpi4py ask for more "
                f"(mpi4py.rc.thread_level = 'multiple', its default)."
            )
        if lock.locked():
            more = ", or give each thread a Buffer of its own" if lock.side_by_side else ""
            return StateError(
                f"{name}(): another thread is in a call of this Buffer on rank {rank}; let one "
                f"thread make all of a Buffer's calls{more}."
            )
        what = (
            f"{name}(): another thread is in a call of another Buffer on rank {rank}; all ranks "
            f"must make the calls of all Buffers in one order: in one thread, or in threads that "
            f"take turns"
        )
        if self._engine.name == "host":
            what += " (or initialise MPI with THREAD_MULTIPLE, for a Buffer a thread)"
        if poisons:
            self._engine.abort(what)
            self._poison()
        return StateError(f"{what}.")

    @contextmanager
    def failures(self, name: str) -> Iterator[None]:
        """Poison the Buffer when anything but a contract or a state is broken."""
        try:
            yield
        except (ContractError, StateError):
            raise
        except (PeerTimeoutError, PeerAbortedError):
            self._poison()
            raise
        except LinkError as error:
            self._poison()
            self._engine.abort(f"the link to another rank broke in {name}(): {error}")
            raise PeerAbortedError(
                f"{name}(): the link from rank {self._spec.rank} to another rank broke: {error}; "
                f"that rank has probably died; end the program."
            ) from error
        except BaseException as error:
            # This rank's half of the operation is missing: the others must not wait for it.
            self._poison()
            self._engine.abort(described(error).replace(": ", f" in {name}(): ", 1))
            raise

    def _poison(self) -> None:
        self._guard.doomed = True
        if self.state is State.OPEN:
            self._become(State.POISONED)

    def _abandon(self, error: BaseException) -> None:
        """Tell the other ranks that this one is gone for ever; free what can be freed alone."""
        text = described(error)
        cause = self._board.find() or Abort(AbortReason.ERROR, self._spec.rank, (), text)
        self._board.abort(cause, RankState.LEFT)
        self._engine.close(collective=False)
        if isinstance(error, PeerTimeoutError | PeerAbortedError):
            self._guard.doomed = True
