"""Waits between ranks that end: by success, by a deadline, or because another rank gave up.

Nothing here blocks inside MPI. Every wait tests its requests, looks at the abort board, and names
the ranks it waited for in vain. Both engines meet through it in ``reset`` and ``close``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.errors import PeerAbortedError, PeerTimeoutError
from deepep_cupy.ranks.abort_board import Abort, AbortBoard, AbortReason, RankState
from deepep_cupy.ranks.group import Group, LinkError, Request

__all__ = ["CONTROL_TAG", "Hurry", "Pending", "Rendezvous", "name_ranks", "poll"]

CONTROL_TAG = 0
"""Tags from here on are the operations'."""
_EXCHANGE_TAG, _EXCHANGES = 3000, 1000
"""Tags of ``Rendezvous.exchange``, a meeting each: MPI promises tags up to 32767."""

_YIELDS = 100
"""Polls that only give the processor away, before the first sleep."""
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3
_GRACE_S = 0.2
"""What is under way when a rank begins a ``reset`` may end by itself in this time."""
_LAST_CHANCES = 20
"""Polls after the deadline, or after a peer gave up, before the wait fails. What is waited for may
have come all the same: this process may itself have been stopped for a while, or the peer may have
given up in a later call."""


@dataclass(eq=False)
class Pending:
    """A request, and the rank it waits for."""

    peer: int
    request: Request


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 1, 3``."""
    listed = ", ".join(str(rank) for rank in ranks)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def poll(round_number: int) -> None:
    """Give the processor away: at once in the first rounds, for up to a millisecond later."""
    if round_number < _YIELDS:
        os.sched_yield()
    else:
        doublings = min((round_number - _YIELDS) // 16, 16)
        time.sleep(min(_FIRST_SLEEP_S * 2**doublings, _LONGEST_SLEEP_S))


class Hurry:
    """Ends what waits for this rank in vain: some time after a ``reset`` has begun on it, the
    abort board says so, and kernels and hosts that wait for this rank give up.

    Args:
        board: Of the ranks.
        rank: This one.

    Attributes:
        done: Whether the board says so.
    """

    def __init__(self, board: AbortBoard, rank: int) -> None:
        self.done = False
        self._board, self._rank = board, rank
        self._since = time.monotonic()

    def __call__(self) -> None:
        """Look at the clock."""
        if not self.done and time.monotonic() - self._since > _GRACE_S:
            self.done = True
            if self._board.find() is None:  # else all learn of what came first
                text = "it is in reset(), and waits for the others"
                self._board.abort(Abort(AbortReason.ERROR, self._rank, (), text))


class Rendezvous:
    """Bounded waits among the ranks of one Buffer.

    Args:
        group: The ranks.
        board: Their abort board.
        timeout_s: Seconds any one wait may last.
    """

    def __init__(self, group: Group, board: AbortBoard, timeout_s: float) -> None:
        self.group = group
        self.board = board
        self.timeout_s = timeout_s
        self._serial = 0
        """Of the newest meeting that this rank has passed."""
        self._barrier: tuple[int, Request] | None = None
        """A meeting that has been started: its serial, and MPI's part."""
        self._starting = False
        self._exchanged: list[NDArray[Any]] = []
        """What MPI may still read and write for an exchange."""

    def watch(self, operation: str, at_least: RankState = RankState.ABORTED) -> None:
        """Raise when a rank has given up.

        Raises:
            PeerTimeoutError: It waited in vain for a rank that is not this one.
            PeerAbortedError: Any other reason.
        """
        abort = self.board.find(at_least)
        if abort is not None:
            raise self._pass_on(operation, abort)

    def wait(
        self,
        pending: list[Pending],
        operation: str,
        phase: str,
        at_least: RankState = RankState.ABORTED,
        patience_s: float = 0.0,
    ) -> None:
        """Wait until all requests are done; those that are not stay in ``pending`` if this raises.

        Args:
            pending: Requests; done ones are removed.
            operation: Method name, for the message.
            phase: What is waited for, for the message.
            at_least: State of another rank that ends the wait.
            patience_s: Wait so much longer than ``timeout_s``.
        """
        expired, hopeless, rounds = 0, 0, 0
        deadline = time.monotonic() + self.timeout_s + patience_s
        while True:
            expired += time.monotonic() > deadline
            # A rank that has given up may have sent this before: only what stays away is lost.
            gone = self.board.hopeless(at_least)
            hopeless += any(each.peer in gone for each in pending)
            self._test(pending, operation)
            if not pending:
                return
            if hopeless > _LAST_CHANCES:
                self.watch(operation, at_least)
            if expired > _LAST_CHANCES:
                late = tuple(sorted({each.peer for each in pending}))
                raise self.give_up(operation, phase, late)
            poll(rounds)
            rounds += 1

    def _test(self, pending: list[Pending], operation: str) -> None:
        for each in pending[:]:
            try:
                done = each.request.test()
            except LinkError as error:
                pending.remove(each)
                raise self._lost(operation, each.peer, error) from error
            if done:
                pending.remove(each)

    def barrier(self, operation: str, hurry: Hurry | None = None) -> None:
        """Meet all ranks. A barrier that failed is taken up again by the next call.

        Args:
            operation: Method name, for messages.
            hurry: Ends other ranks' waits for this one, so that they come.

        Raises:
            PeerTimeoutError: Names the ranks that did not come.
            PeerAbortedError: A rank has left for ever.
        """
        if self._barrier is None:
            if self._starting:  # an interrupt came before the note of what MPI may have started
                raise self.lose_for_ever(operation, "an interrupt as it began to meet the others")
            serial = self._serial + 1
            self.board.arrive(serial)
            self._starting = True
            self._barrier = serial, self.group.ibarrier()
        expired, rounds = 0, 0
        deadline = time.monotonic() + self.timeout_s
        while not self._met(operation, *self._barrier):
            self.watch(operation, RankState.LEFT)
            expired += time.monotonic() > deadline
            if expired > _LAST_CHANCES:
                late = self.board.not_arrived(self._barrier[0])
                raise self.give_up(operation, "", late)
            if hurry is not None:
                hurry()
            poll(rounds)
            rounds += 1
        self._serial = self._barrier[0]
        self._starting = False
        self._barrier = None

    def _met(self, operation: str, serial: int, barrier: Request) -> bool:
        try:
            return barrier.test()
        except LinkError as error:
            late = self.board.not_arrived(serial)
            raise self._lost(operation, late[0] if late else -1, error) from error

    def exchange(self, operation: str, words: NDArray[np.int64]) -> NDArray[np.int64]:
        """Send a few words to every rank; return ``[R, len(words)]``, one row a rank.

        After a ``barrier`` that all ranks passed, and once for each: what an exchange that failed
        has left, a receive perhaps, has that meeting's tag and meets no later one's messages.
        """
        group = self.group
        everyone = np.zeros((group.size, len(words)), np.int64)
        everyone[group.rank] = words
        mine = words.astype(np.int64).view(np.uint8)
        pending: list[Pending] = []
        # Before MPI learns of it: an interrupt may come before a request is noted.
        self._exchanged += [everyone, mine]
        tag = _EXCHANGE_TAG + self._serial % _EXCHANGES
        try:
            for peer in range(group.size):
                if peer != group.rank:
                    theirs = everyone[peer].view(np.uint8)
                    pending.append(Pending(peer, group.irecv(peer, theirs, tag)))
                    pending.append(Pending(peer, group.isend(peer, mine, tag)))
            self.wait(pending, operation, "their state", RankState.LEFT)
        except BaseException:  # an interrupt too: MPI writes into what was posted
            group.keep([each.request for each in pending])
            raise
        del self._exchanged[-2:]
        return everyone

    # ------------------------------------------------------------------------------- failures

    def give_up(self, operation: str, phase: str, late: tuple[int, ...]) -> PeerTimeoutError:
        """Write to the board that ``late`` did not come in time, and return the error to raise.

        Args:
            operation: Method name.
            phase: What was waited for; empty: that they make this call.
            late: The ranks that were waited for.
        """
        rank = self.group.rank
        self.board.abort(Abort(AbortReason.TIMEOUT, rank, late, operation))
        who = name_ranks(late) if late else "the other ranks"
        what = f"{phase} from {who}" if phase else f"{who} to make this call"
        return PeerTimeoutError(
            f"{operation}(): rank {rank} waited {self.timeout_s:g} s in vain for {what}; "
            f"{_what_next(operation)}.",
            late,
        )

    def lose_for_ever(self, operation: str, text: str) -> PeerAbortedError:
        """Write to the board that this rank can never meet the others again; return the error."""
        rank = self.group.rank
        self.board.abort(Abort(AbortReason.ERROR, rank, (), text), RankState.LEFT)
        return PeerAbortedError(
            f"{operation}(): rank {rank} cannot go on with this Buffer, for {text}; end the "
            f"program.",
            rank,
        )

    def _lost(self, operation: str, peer: int, error: LinkError) -> PeerAbortedError:
        rank = self.group.rank
        who = f"rank {peer}" if peer >= 0 else "another rank"
        text = f"the link from rank {rank} to {who} broke: {error}"
        self.board.abort(Abort(AbortReason.ERROR, rank, (), text))
        return PeerAbortedError(
            f"{operation}(): {text}; {who} has probably died; end the program.", peer
        )

    def _pass_on(self, operation: str, abort: Abort) -> PeerTimeoutError | PeerAbortedError:
        """The error to raise for another rank's line, which is copied to this rank's line."""
        rank = self.group.rank
        self.board.abort(abort)
        what_next = _what_next(operation)
        if abort.reason != AbortReason.TIMEOUT:
            return PeerAbortedError(
                f"{operation}(): rank {abort.origin} aborted ({abort.text}), so rank {rank} "
                f"cannot go on; {what_next}.",
                abort.origin,
            )
        others = tuple(late for late in abort.late if late != rank)
        if others:
            return PeerTimeoutError(
                f"{operation}(): rank {abort.origin} waited in vain for {name_ranks(abort.late)} "
                f"in {abort.text}(), so rank {rank} cannot go on; {what_next}.",
                others,
            )
        return PeerAbortedError(
            f"{operation}(): rank {abort.origin} waited in vain for this rank ({rank}) in "
            f"{abort.text}() and gave up; {what_next}.",
            abort.origin,
        )


def _what_next(operation: str) -> str:
    if operation == "close":
        return "end the program: this Buffer's memory is left to the end of the process"
    return "call reset() or close() on every rank, or end the program"
