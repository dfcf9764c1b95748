"""What can go wrong, as classes. Every message is one sentence that says what to do.

=====================  =====================================================================
class                  whose fault, and what follows
=====================  =====================================================================
``ContractError``      the caller's arguments; nothing moved, the Buffer stays usable
``StateError``         a call that the Buffer's state does not allow (closed, poisoned, busy)
``CompileError``       a kernel text did not compile; carries the numbered source
``PeerTimeoutError``   a rank did not arrive in time; the Buffer is poisoned until ``reset()``
``PeerAbortedError``   a rank has given up; the Buffer is poisoned until ``reset()``
``PlatformError``      this machine cannot do what was asked (no GPU, no peer access, …)
=====================  =====================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepep_cupy.protocol.headers import Refusal

__all__ = [
    "CompileError",
    "ContractError",
    "DeepEPCupyError",
    "PeerAbortedError",
    "PeerTimeoutError",
    "PlatformError",
    "StateError",
    "described",
    "shown",
]


_LONGEST = 200
"""Characters of somebody's value in a message."""


def shown(value: object) -> str:
    """``repr(value)`` for a message: cut where it is long, replaced where ``repr`` itself fails."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a message about an error must not be the next error
        return f"a {type(value).__name__} that cannot be shown"
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return text.encode(errors="backslashreplace").decode()


def described(error: BaseException) -> str:
    """Class and text of an exception, whatever its ``str`` does."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - see above
        return f"{type(error).__name__} (its text cannot be shown)"
    return text.encode(errors="backslashreplace").decode()


class DeepEPCupyError(Exception):
    """Base class of every error this package raises on purpose.

    Attributes:
        printed_elsewhere: Whether another rank, the one at fault, prints the traceback: then this
            rank, if nobody catches the error, prints one line.
    """

    printed_elsewhere = False


class ContractError(DeepEPCupyError, ValueError):
    """The caller broke the contract: wrong shape, dtype, size, value or handle.

    Attributes:
        refusal: The (code, value) that is sent to the other ranks so that they raise too;
            ``None`` where the error was learnt from another rank or concerns this rank alone.
    """

    def __init__(self, message: str, refusal: Refusal | None = None) -> None:
        super().__init__(message)
        self.refusal = refusal


class StateError(DeepEPCupyError, RuntimeError):
    """The Buffer's state does not allow this call."""


class CompileError(DeepEPCupyError, RuntimeError):
    """A kernel did not compile or load."""


class PeerTimeoutError(DeepEPCupyError, TimeoutError):
    """A rank did not arrive within ``timeout_s``.

    Attributes:
        late_ranks: The ranks that were waited for in vain.
    """

    def __init__(self, message: str, late_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.late_ranks = late_ranks


class PeerAbortedError(DeepEPCupyError, RuntimeError):
    """Another rank aborted the communication.

    Attributes:
        rank: The rank that aborted, or -1 where it is not known.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class PlatformError(DeepEPCupyError, RuntimeError):
    """This machine, driver or communicator cannot do what was asked."""
