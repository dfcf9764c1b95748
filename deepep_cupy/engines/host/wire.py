"""Messages of one Buffer: in order between each two ranks, counted so that all can be received.

All messages of a generation (the time between two resets) use one tag, so that each pair's
messages match in the order they were posted. After a failure some were sent and never received,
others posted and never sent; ``drain`` compares both ranks' counts and settles every one, so that
no stale message meets a later receive and nothing is left for ``MPI_Finalize`` to wait for. Counts
are of the Buffer's whole life: a drain may fail on one rank and be over on another, and the next
one finds out what either still lacks.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.ranks.abort_board import RankState
from deepep_cupy.ranks.group import Bytes, Request
from deepep_cupy.ranks.rendezvous import CONTROL_TAG, Pending, Rendezvous, poll

__all__ = ["CHUNK_BYTES", "Wire"]

CHUNK_BYTES = 1 << 30
"""Largest message: MPI counts are 32-bit."""

_TAGS = 1000
"""Generations that have tags of their own: MPI promises 32767."""


class Wire:
    """Sends and receives between this rank and its peers, for all operations alike."""

    def __init__(self, rendezvous: Rendezvous, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._rendezvous = rendezvous
        self._group = rendezvous.group
        self._chunk_bytes = chunk_bytes
        self._tag = CONTROL_TAG + 1
        self._pending: list[Pending] = []
        self.sent = np.zeros(self._group.size, np.int64)
        """Messages to each rank so far."""
        # For each rank, messages received so far, and receives that are posted. An exception from
        # outside, such as Ctrl-C, may come at any moment: the two change together.
        self._received: list[tuple[int, list[Request]]] = [(0, []) for _ in self.sent]
        # It may also come before a request is noted. So memory is noted before MPI learns of it,
        # and whether a receive may have escaped its note.
        self._memory: list[Bytes] = []
        self._unsure = False

    def send(self, peer: int, array: NDArray[np.generic]) -> None:
        """Start to send a C-contiguous array; empty ones send nothing."""
        for chunk in self._chunks(array):
            self._memory.append(chunk)
            request = self._group.isend(peer, chunk, self._tag)
            # First counted: who waits for a message that nobody is told of waits in vain. One that
            # is not even counted meets no receive, for the next generation has another tag.
            self.sent[peer] += 1
            self._pending.append(Pending(peer, request))

    def receive(self, peer: int, array: NDArray[np.generic]) -> None:
        """Start to receive into a C-contiguous array; empty ones receive nothing."""
        for chunk in self._chunks(array):
            self._memory.append(chunk)
            self._unsure = True
            request = self._group.irecv(peer, chunk, self._tag)
            self._pending.append(Pending(peer, request))
            self._received[peer][1].append(request)
            self._unsure = False

    def _chunks(self, array: NDArray[np.generic]) -> list[Bytes]:
        if array.nbytes == 0:
            return []
        flat = array.reshape(-1).view(np.uint8)
        return [flat[at : at + self._chunk_bytes] for at in range(0, flat.size, self._chunk_bytes)]

    def wait(self, operation: str, phase: str, patience_s: float = 0.0) -> None:
        """Wait for everything that was started; see ``Rendezvous.wait``."""
        self._rendezvous.wait(self._pending, operation, phase, patience_s=patience_s)
        for peer, (received, posted) in enumerate(self._received):
            self._received[peer] = received + len(posted), []
        self._memory.clear()

    def drain(self, operation: str, sent_to_me: NDArray[np.int64], generation: int) -> None:
        """Settle what a failure left, and begin a generation. All ranks are in this call.

        Args:
            operation: Method name, for messages.
            sent_to_me: ``[R]`` what each rank's ``sent`` holds for this rank.
            generation: The new one, the same on every rank.

        Raises:
            PeerAbortedError: A receive may have escaped its note: it may have taken a message that
                would be waited for in vain. All ranks learn that this one is lost for ever.
        """
        if self._unsure:
            raise self._rendezvous.lose_for_ever(
                operation, "it was interrupted while it posted a receive"
            )
        received = np.array([number for number, _ in self._received], np.int64)
        missing = sent_to_me - received
        for peer, (_, posted) in enumerate(self._received):
            for request in posted[max(0, int(missing[peer])) :]:
                request.cancel()
            missing[peer] -= len(posted)
        self._throw_away(operation, missing)
        self._rendezvous.wait(self._pending, operation, "what was under way", RankState.LEFT)
        self._tag = CONTROL_TAG + 1 + generation % _TAGS
        self._received = [(int(number), []) for number in sent_to_me]

    def _throw_away(self, operation: str, missing: NDArray[np.int64]) -> None:
        """Receive messages that nothing was posted for."""
        rounds, deadline = 0, time.monotonic() + self._rendezvous.timeout_s
        while (missing > 0).any():
            for peer in np.flatnonzero(missing > 0):
                self._unsure = True
                request = self._group.take(int(peer), self._tag)
                if request is not None:
                    self._pending.append(Pending(int(peer), request))
                    received, posted = self._received[peer]
                    self._received[peer] = received + 1, posted
                    missing[peer] -= 1
                self._unsure = False
            self._rendezvous.watch(operation, RankState.LEFT)
            if time.monotonic() > deadline:
                late = tuple(int(peer) for peer in np.flatnonzero(missing > 0))
                raise self._rendezvous.give_up(operation, "messages that were sent", late)
            poll(rounds)
            rounds += 1

    def abandon(self) -> None:
        """Give up all messages, and keep alive what peers may still read or write."""
        self._group.keep([each.request for each in self._pending])
        self._pending.clear()
