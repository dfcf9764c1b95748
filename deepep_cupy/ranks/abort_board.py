"""The abort board: a few words per rank in memory of the node that every rank has mapped.

A rank learns here that another one gave up, even where its own device context is dead or no
message is on its way. Each rank writes its own line only.

One line of 64 bytes a rank (sixteen 32-bit words), then one line of 192 bytes of text a rank:

====  ==========  ==========================================================================
word  name        meaning
====  ==========  ==========================================================================
0     state       0 fine, 1 aborted (only ``reset`` or ``close`` follow), 2 left for ever
1     reason      ``AbortReason``
2     origin      the rank that gave up first, as far as this rank knows
3     late        bit mask of the ranks that were waited for in vain
4     meeting     serial number of the last ``Rendezvous.barrier`` this rank arrived at
5     exiting     1: this process is about to end
6-15  (free)      0
====  ==========  ==========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.ranks.group import Group

__all__ = ["LINE_BYTES", "Abort", "AbortBoard", "AbortReason", "RankState"]

LINE_BYTES = 64
_TEXT_BYTES = 192
_STATE, _REASON, _ORIGIN, _LATE, _MEETING, _EXITING = range(6)


class RankState(IntEnum):
    """Word 0 of a line."""

    FINE = 0
    ABORTED = 1
    LEFT = 2


class AbortReason(IntEnum):
    """Word 1 of a line."""

    NONE = 0
    TIMEOUT = 1
    ERROR = 2


@dataclass(frozen=True)
class Abort:
    """Why a rank gave up.

    Attributes:
        reason: Late peers, or an error on that rank.
        origin: The rank that gave up first.
        late: The ranks that were waited for in vain.
        text: What went wrong, for people.
    """

    reason: AbortReason
    origin: int
    late: tuple[int, ...] = ()
    text: str = ""


class AbortBoard:
    """Lines of all ranks of one Buffer. The constructor and ``free`` are collective."""

    def __init__(self, group: Group) -> None:
        self._rank = group.rank
        self._size = group.size
        self._window = group.shared_window(self._size * (LINE_BYTES + _TEXT_BYTES))
        lines = self._window.memory[: self._size * LINE_BYTES]
        self.array: NDArray[np.uint32] = lines.view(np.uint32).reshape(self._size, -1)
        self._text = self._window.memory[self._size * LINE_BYTES :].reshape(self._size, -1)

    @property
    def address(self) -> int:
        """Where the lines begin in this process: a page boundary, fit for ``hostRegister``."""
        return self._window.memory.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes of lines and text."""
        return self._window.memory.nbytes

    # ------------------------------------------------------------------------------ this rank

    def abort(self, abort: Abort, state: RankState = RankState.ABORTED) -> None:
        """Write this rank's line: it gives up (``ABORTED``), or is gone for ever (``LEFT``)."""
        text = abort.text.encode()[: _TEXT_BYTES - 1]
        self._text[self._rank] = 0
        self._text[self._rank, : len(text)] = np.frombuffer(text, np.uint8)
        line = self.array[self._rank]
        line[_REASON] = abort.reason
        line[_ORIGIN] = abort.origin
        line[_LATE] = sum(1 << rank for rank in abort.late)
        line[_STATE] = state  # last: who sees it sees the words above (stores keep their order)

    def clear(self) -> None:
        """Declare this rank fine again; only between the two barriers of ``reset``."""
        self.array[self._rank, _STATE] = RankState.FINE

    def arrive(self, serial: int) -> None:
        """Declare that this rank is at barrier number ``serial``."""
        self.array[self._rank, _MEETING] = serial & 0xFFFFFFFF

    def exiting(self) -> None:
        """Declare that this process is about to end."""
        self.array[self._rank, _EXITING] = 1

    # ------------------------------------------------------------------------------ all ranks

    def find(self, at_least: RankState = RankState.ABORTED) -> Abort | None:
        """Why a rank gave up: a time-out where there is one, as other errors follow from it.

        Args:
            at_least: Lines below this state are passed over.

        Returns:
            ``None`` where no line has this state.
        """
        states = self.array[:, _STATE]
        if not states.any():
            return None
        found = [self._read(rank) for rank in range(self._size) if states[rank] >= at_least]
        if not found:
            return None
        return next((abort for abort in found if abort.reason == AbortReason.TIMEOUT), found[0])

    def _read(self, rank: int) -> Abort:
        line = self.array[rank]
        late = int(line[_LATE])
        return Abort(
            AbortReason(int(line[_REASON])),
            int(line[_ORIGIN]),
            tuple(r for r in range(self._size) if late >> r & 1),
            bytes(self._text[rank]).rstrip(b"\0").decode(errors="replace"),
        )

    def hopeless(self, at_least: RankState = RankState.ABORTED) -> frozenset[int]:
        """Ranks of which nothing more is expected: those in this state, and those that they
        waited for in vain."""
        states = self.array[:, _STATE]
        if not states.any():
            return frozenset()
        gone = [rank for rank in range(self._size) if states[rank] >= at_least]
        if at_least == RankState.ABORTED:
            gone += [late for rank in gone for late in self._read(rank).late]
        return frozenset(gone)

    def not_arrived(self, serial: int) -> tuple[int, ...]:
        """Ranks that are not at barrier number ``serial`` yet."""
        behind = self.array[:, _MEETING] - np.uint32(serial & 0xFFFFFFFF)
        return self._ranks(behind.view(np.int32) < 0)

    def all_exiting(self) -> bool:
        """True when every process is about to end."""
        return bool(self.array[:, _EXITING].all())

    def _ranks(self, chosen: NDArray[np.bool_]) -> tuple[int, ...]:
        return tuple(int(rank) for rank in np.flatnonzero(chosen))

    def free(self) -> None:
        """Collective, and blocking: only after a barrier that all ranks passed."""
        self.array = np.zeros((self._size, LINE_BYTES // 4), np.uint32)
        self._text = np.zeros((self._size, _TEXT_BYTES), np.uint8)
        self._window.free()
