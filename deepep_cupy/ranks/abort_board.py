"""The abort board: a few words per rank in memory of the node that its ranks have mapped.

A rank learns here that another one gave up, even where its own device context is dead or no
message is on its way. Each rank writes its own line only. Lines of other nodes come as notices
(``notices.py``) whenever the board is looked at.

One line of 64 bytes a rank (sixteen 32-bit words), then one line of 192 bytes of text a rank:

====  ==========  ==========================================================================
word  name        meaning
====  ==========  ==========================================================================
0     state       0 fine, 1 aborted (only ``reset`` or ``close`` follow), 2 left for ever
1     reason      ``AbortReason``
2     origin      the rank that gave up first, as far as this rank knows
3     late        bit mask of the ranks below 32 that were waited for in vain
4     meeting     serial number of the last ``Rendezvous.barrier`` this rank arrived at
5     exiting     1: this process is about to end
6     late_high   bit mask of the ranks from 32 on that were waited for in vain
7-15  (free)      0
====  ==========  ==========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.protocol.nodes import NodeMap
from deepep_cupy.ranks.group import Group
from deepep_cupy.ranks.notices import Notices

__all__ = ["LINE_BYTES", "Abort", "AbortBoard", "AbortReason", "RankState"]

LINE_BYTES = 64
_TEXT_BYTES = 192
_STATE, _REASON, _ORIGIN, _LATE, _MEETING, _EXITING, _LATE_HIGH = range(7)


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
    """Lines of all ranks of one Buffer. The constructor and ``free`` are collective.

    Args:
        group: The ranks.
        nodes: Where they are; ``None``: all on one node.
    """

    def __init__(self, group: Group, nodes: NodeMap | None = None) -> None:
        self._rank = group.rank
        self._size = group.size
        nodes = nodes or NodeMap.one(group.size)
        mates = nodes.mates_of(group.rank)
        self._far = tuple(rank for rank in range(self._size) if rank not in mates)
        self._window = group.shared_window(
            self._size * (LINE_BYTES + _TEXT_BYTES), nodes.node_of(group.rank)
        )
        lines = self._window.memory[: self._size * LINE_BYTES]
        self._lines: NDArray[np.uint32] = lines.view(np.uint32).reshape(self._size, -1)
        self._text = self._window.memory[self._size * LINE_BYTES :].reshape(self._size, -1)
        # Lines of far ranks in memory that all ranks of the node share: each keeps its own copy.
        self._far_lines = np.zeros_like(self._lines)
        self._far_text = np.zeros_like(self._text)
        self._notices = Notices(group, self._far, LINE_BYTES + _TEXT_BYTES)

    @property
    def address(self) -> int:
        """Where the lines begin in this process: a page boundary, fit for ``hostRegister``."""
        return self._window.memory.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes of lines and text."""
        return self._window.memory.nbytes

    @property
    def array(self) -> NDArray[np.uint32]:
        """``[R, 16]``, the lines as this rank knows them now. Those of its node are memory that
        changes, where all ranks are on one."""
        if not self._far:
            return self._lines
        for rank, notice in self._notices.hear():
            self._far_lines[rank] = notice[:LINE_BYTES].view(np.uint32)
            self._far_text[rank] = notice[LINE_BYTES:]
        lines = self._lines.copy()
        lines[list(self._far)] = self._far_lines[list(self._far)]
        return lines

    def _tell(self) -> None:
        if self._far:
            line = self._lines[self._rank].view(np.uint8)
            self._notices.tell(np.concatenate([line, self._text[self._rank]]))

    # ------------------------------------------------------------------------------ this rank

    def abort(self, abort: Abort, state: RankState = RankState.ABORTED) -> None:
        """Write this rank's line: it gives up (``ABORTED``), or is gone for ever (``LEFT``)."""
        if self.array[self._rank, _STATE] == RankState.LEFT:
            return  # for ever, with the reason of then
        text = abort.text.encode(errors="replace")[: _TEXT_BYTES - 1]
        self._text[self._rank] = 0
        self._text[self._rank, : len(text)] = np.frombuffer(text, np.uint8)
        line = self._lines[self._rank]
        late = sum(1 << rank for rank in abort.late)
        new = line[_STATE] != state
        line[_REASON] = abort.reason
        line[_ORIGIN] = abort.origin
        line[_LATE], line[_LATE_HIGH] = late & 0xFFFFFFFF, late >> 32
        line[_STATE] = state  # last: who sees it sees the words above (stores keep their order)
        if new:  # what is passed on in every call is told once
            self._tell()

    def clear(self) -> None:
        """Declare this rank fine again; only between the two barriers of ``reset``."""
        self._lines[self._rank, _STATE] = RankState.FINE
        self._tell()

    def arrive(self, serial: int) -> None:
        """Declare that this rank is at barrier number ``serial``."""
        self._lines[self._rank, _MEETING] = serial & 0xFFFFFFFF
        self._tell()

    def exiting(self) -> None:
        """Declare that this process is about to end."""
        self._lines[self._rank, _EXITING] = 1
        self._tell()

    # ------------------------------------------------------------------------------ all ranks

    def find(self, at_least: RankState = RankState.ABORTED) -> Abort | None:
        """Why a rank gave up: a time-out where there is one, as other errors follow from it.

        Args:
            at_least: Lines below this state are passed over.

        Returns:
            ``None`` where no line has this state.
        """
        lines = self.array
        states = lines[:, _STATE]
        if not states.any():
            return None
        found = [self._read(lines, r) for r in range(self._size) if states[r] >= at_least]
        if not found:
            return None
        return next((abort for abort in found if abort.reason == AbortReason.TIMEOUT), found[0])

    def _read(self, lines: NDArray[np.uint32], rank: int) -> Abort:
        line = lines[rank]
        late = int(line[_LATE]) | int(line[_LATE_HIGH]) << 32
        text = self._far_text if rank in self._far else self._text
        return Abort(
            AbortReason(int(line[_REASON])),
            int(line[_ORIGIN]),
            tuple(r for r in range(self._size) if late >> r & 1),
            bytes(text[rank]).rstrip(b"\0").decode(errors="replace"),
        )

    def hopeless(self, at_least: RankState = RankState.ABORTED) -> frozenset[int]:
        """Ranks of which nothing more is expected: those in this state, and those that they
        waited for in vain."""
        lines = self.array
        states = lines[:, _STATE]
        if not states.any():
            return frozenset()
        gone = [rank for rank in range(self._size) if states[rank] >= at_least]
        if at_least == RankState.ABORTED:
            gone += [late for rank in gone for late in self._read(lines, rank).late]
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
        if self._far:
            self._notices.drain()
        self._far = ()
        self._lines = np.zeros((self._size, LINE_BYTES // 4), np.uint32)
        self._text = np.zeros((self._size, _TEXT_BYTES), np.uint8)
        self._window.free()
