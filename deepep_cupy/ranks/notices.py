"""Notices: what ranks of other nodes have on their lines of the abort board.

A node's board lies in its own memory. What a rank writes there it also tells each rank of the other
nodes, in one small message a change that holds the whole line: the last one that came is the line
as it is. Nobody waits for a notice; they are taken in whenever the board is looked at.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from deepep_cupy.ranks.group import Bytes, Group, LinkError, Request

__all__ = ["NOTICE_TAG", "Notices"]

NOTICE_TAG = 2000
"""Above the tags of ``Wire``'s generations."""
_DRAIN_S = 10.0
"""Longest wait for notices that were sent before all ranks met: they are on their way."""


class Notices:
    """Notices between this rank and those of other nodes.

    Args:
        group: All ranks.
        far: Ranks of other nodes.
        nbytes: Length of a notice.
    """

    def __init__(self, group: Group, far: tuple[int, ...], nbytes: int) -> None:
        self._group = group
        self._far = far
        self._nbytes = nbytes
        self._sending: list[Request] = []
        self._told = 0
        self._heard = dict.fromkeys(far, 0)

    def tell(self, line: Bytes) -> None:
        """Send this rank's line to all ranks of other nodes. A link that is broken is passed over:
        whoever is behind it learns nothing any more."""
        self._told += 1
        self._sending = [each for each in self._sending if not _over(each)]
        for peer in self._far:
            with contextlib.suppress(LinkError):
                self._sending.append(self._group.isend(peer, line.copy(), NOTICE_TAG))

    def hear(self) -> Iterator[tuple[int, Bytes]]:
        """Rank and line of each notice that has come, in their order for each rank."""
        while self._far:
            with contextlib.suppress(LinkError):
                notice = self._group.take_any(NOTICE_TAG, self._nbytes)
                if notice is not None:
                    self._heard[notice[0]] += 1
                    yield notice
                    continue
            return

    def drain(self) -> None:
        """Collective, and blocking, after a barrier that all ranks passed: take in all notices that
        were sent, so that MPI is left with none that nobody receives."""
        told = self._group.allgather(self._told)
        deadline = time.monotonic() + _DRAIN_S
        while time.monotonic() < deadline:
            for _ in self.hear():
                pass
            self._sending = [each for each in self._sending if not _over(each)]
            missing = any(self._heard[rank] < told[rank] for rank in self._far)
            if not missing and not self._sending:
                return
            time.sleep(0.0005)
        self._group.keep(self._sending)


def _over(request: Request) -> bool:
    """Whether a message is sent, or never will be."""
    try:
        return request.test()
    except LinkError:
        return True
