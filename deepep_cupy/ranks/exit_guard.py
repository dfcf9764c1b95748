"""Ends the whole program where one process would otherwise leave the others waiting.

``MPI_Finalize`` waits for all ranks. A process that ends after a rank was late, or by an
exception that the others do not know of, would wait there for ever, and they for it. So an
``atexit`` hook, registered after mpi4py is imported and thus run before it finalizes, ends the
whole program with ``MPI_Abort`` in these cases. After an exception that nobody caught it does so
too where all Buffers are closed.

Where a program ends in order with an open Buffer, rank 0 says so in one line.

An error that all ranks raise is printed once, by the rank at fault: the others print one line.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import time
from dataclasses import dataclass
from types import TracebackType

from deepep_cupy.errors import DeepEPCupyError, described
from deepep_cupy.ranks.abort_board import Abort, AbortBoard, AbortReason, RankState
from deepep_cupy.ranks.group import Group, Program

__all__ = ["ExitGuard", "Watch"]

_GRACE_S = 1.0
"""Seconds in which the other ranks can print their errors before all are ended."""


@dataclass(eq=False)
class ExitGuard:
    """Watches over one Buffer until it is closed by all ranks together.

    Attributes:
        group: Its ranks.
        board: Their abort board.
        keep: What must live until the process ends where the Buffer is never closed.
        doomed: True while an unreset failure means that ranks cannot end in an orderly way.
        code: Exit code to end with.
    """

    group: Group
    board: AbortBoard
    keep: object = None
    doomed: bool = False
    code: int = 1

    def begin(self) -> None:
        """Start to watch."""
        _guards.append(self)

    def end(self) -> None:
        """Stop watching: all ranks have closed the Buffer."""
        if self in _guards:
            _guards.remove(self)


class Watch:
    """Watches over the construction of a Buffer: ``with Watch(program):``. From its begin on, an
    exception that nobody catches ends all ranks, for the rest of the process.

    Where the construction fails on this rank and perhaps on no other, the ranks cannot end in an
    orderly way any more, whatever becomes of the exception.

    Args:
        program: The processes.
        together: What all ranks raise where one does.
    """

    def __init__(self, program: Program, together: tuple[type[BaseException], ...]) -> None:
        self._program, self._together = program, together

    def __enter__(self) -> None:
        _programs[:] = [self._program]
        if not _guards:
            atexit.unregister(_at_exit)
            atexit.register(_at_exit)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, self._together):
            _doomed[:] = [True]


_guards: list[ExitGuard] = []
_programs: list[Program] = []
"""The processes of the last Buffer, which need no longer be there: they know how to end."""
_doomed: list[bool] = []
"""Not empty: a construction was left by some ranks."""


def print_errors_once() -> None:
    """From now on an error that another rank tells in full is one line here, if nobody catches
    it; all others go to the ``sys.excepthook`` that was there."""
    before = sys.excepthook
    if getattr(before, "prints_once", False):
        return

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, DeepEPCupyError) and error.printed_elsewhere:
            sys.stderr.write(f"{kind.__module__}.{kind.__qualname__}: {error}\n")
        else:
            before(kind, error, traceback)

    hook.prints_once = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _at_exit() -> None:
    # Set by the interpreter when an uncaught exception ended the program.
    uncaught = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    programs = [*(guard.group for guard in _guards), *_programs]
    if not programs or programs[0].over:
        return
    fatal = [guard for guard in _guards if guard.group.size > 1 and (guard.doomed or uncaught)]
    if not fatal:
        if (uncaught or _doomed) and programs[0].world_size > 1:
            try:
                time.sleep(_GRACE_S)
                _flush()
            finally:
                programs[0].abort(1)
        elif _guards and not uncaught and _guards[0].group.rank == 0:
            with contextlib.suppress(Exception):
                sys.stderr.write(
                    "deepep_cupy: a Buffer was not closed at the end of the program; write "
                    "'with Buffer(...)', or close() on all ranks.\n"
                )
        return
    first = fatal[0]
    try:
        _flush()
        _tell(fatal)
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and not first.board.all_exiting():
            time.sleep(0.005)
    finally:  # whatever fails above, the others must not wait for this process
        first.group.abort(first.code)


def _tell(fatal: list[ExitGuard]) -> None:
    """Write to the boards of these Buffers that this process ends, and why."""
    error = getattr(sys, "last_value", None)
    text = "it ends" if error is None else described(error)
    for guard in fatal:
        try:
            if guard.board.find() is None:  # others in a call can still say why they end
                reason = AbortReason.ERROR
                guard.board.abort(Abort(reason, guard.group.rank, (), text), RankState.LEFT)
        finally:
            guard.board.exiting()


def _flush() -> None:
    """Write out what is still held back, as far as there is somewhere to write to."""
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a full disk, a reader that has gone, a stream closed
            if stream is not None:
                stream.flush()
