"""The few things this package asks of MPI, as protocols: engines see no MPI.

Only ``ranks/mpi.py`` implements them. Buffers are flat ``uint8`` arrays; a request keeps its
buffer alive until it is done.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bytes", "Group", "LinkError", "Program", "Request", "SharedWindow"]

Bytes: TypeAlias = NDArray[np.uint8]


class LinkError(RuntimeError):
    """The messaging layer reports an error, for example that the other process is gone."""


class Request(Protocol):
    """A message or a barrier under way."""

    def test(self) -> bool:
        """Make progress; True once it is done, and from then on.

        Raises:
            LinkError: The messaging layer gave up on it.
        """
        ...

    def cancel(self) -> None:
        """Withdraw a receive that no message will ever match."""
        ...


class SharedWindow(Protocol):
    """Memory of one node that every rank of the group has mapped."""

    memory: Bytes
    """The whole window, at an address that is a multiple of the page size."""

    def free(self) -> None:
        """Collective, and blocking: only after a barrier that all ranks passed."""
        ...


class Program(Protocol):
    """All processes that were started together."""

    world_size: int
    """How many, which may be more than the ranks of a group."""

    @property
    def over(self) -> bool:
        """Whether the messaging layer has been shut down: nothing of it may be used any more."""
        ...

    def abort(self, code: int) -> None:
        """End every process of the program now."""
        ...


class Group(Program, Protocol):
    """The ranks of one Buffer, on a communicator of their own."""

    rank: int
    size: int
    node_ranks: tuple[int, ...]
    """Ranks of this group that are on this one's machine, ascending."""
    host: str
    """Name of this node, for messages."""

    def allgather(self, value: Any) -> list[Any]:
        """Collective, and blocking: constructors only."""
        ...

    def ibarrier(self) -> Request:
        """Collective. Start a barrier."""
        ...

    def isend(self, peer: int, data: Bytes, tag: int) -> Request:
        """Start to send ``data``."""
        ...

    def irecv(self, peer: int, data: Bytes, tag: int) -> Request:
        """Start to receive into ``data``."""
        ...

    def take(self, peer: int, tag: int) -> Request | None:
        """Start to receive a message of any size and throw it away; None where there is none."""
        ...

    def take_any(self, tag: int, nbytes: int) -> tuple[int, Bytes] | None:
        """Receive a short message of this size from any rank, and say from which; None where there
        is none."""
        ...

    def keep(self, requests: list[Request]) -> None:
        """Keep requests, and so their buffers, until the process ends: a peer may still write."""
        ...

    def shared_window(self, nbytes: int, node: int = 0) -> SharedWindow:
        """Collective, and blocking: zeroed memory that all ranks of this machine see which give
        the same ``node``."""
        ...

    def free(self) -> None:
        """Collective, and blocking: only after a barrier that all ranks passed."""
        ...
