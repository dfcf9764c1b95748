"""The group of ranks over mpi4py: the only file that names it.

Everything here works on a duplicate of the caller's communicator, so that no message of ours can
meet one of the caller's. Methods that may wait for ever (``allgather``, windows, ``free``) are
marked as blocking in ``Group``; those that run inside an operation only start and test requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from deepep_cupy.errors import ContractError, PeerTimeoutError, PlatformError
from deepep_cupy.ranks.group import Bytes, LinkError, Request
from deepep_cupy.ranks.rendezvous import poll

__all__ = ["MPIGroup", "MPIProgram", "many_threads_may_call", "other_threads_may_call", "world"]

PAGE = 4096
_SHARED = "/dev/shm"
_SPARE = 1 << 20
"""Bytes that MPI and others may take there between a look and the use of what was seen."""

_kept: list[Request] = []
"""Requests that were under way when their Buffer failed; see ``Group.keep``."""


def world() -> Any:
    """``MPI.COMM_WORLD``, for the commands."""
    return MPI.COMM_WORLD


def other_threads_may_call() -> bool:
    """Whether MPI may be called from another thread than the one that initialised it, one thread
    at a time."""
    return bool(MPI.Query_thread() >= MPI.THREAD_SERIALIZED)


def many_threads_may_call() -> bool:
    """Whether several threads may call MPI at once."""
    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


class MPIRequest:
    """One ``MPI.Request`` and the buffer it works on."""

    def __init__(self, request: Any, data: Bytes | None) -> None:
        self._request = request
        self._data = data
        self._done = False

    def begin(self, request: Any) -> None:
        """Take what MPI has started for this buffer."""
        self._request = request

    def test(self) -> bool:
        """See ``Request.test``."""
        if not self._done:
            try:
                self._done = bool(self._request.Test())
            except MPI.Exception as error:
                raise LinkError(error.Get_error_string()) from error
            if self._done:
                self._data = None
        return self._done

    def cancel(self) -> None:
        """See ``Request.cancel``."""
        if not self._done:
            self._request.Cancel()


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """MPI's errors as ``PlatformError``."""
    try:
        yield
    except MPI.Exception as error:
        text = error.Get_error_string().strip().splitlines()[-1]
        raise PlatformError(f"Buffer(): MPI could not {what}: {text}.") from error


def _meet(comm: Any, timeout_s: float) -> None:
    """Wait until all ranks have come, in a way that ends and can be interrupted."""
    request, rounds = comm.Ibarrier(), 0
    deadline = time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > deadline:
            raise PeerTimeoutError(
                f"Buffer(): rank {comm.rank} waited {timeout_s:g} s in vain for all "
                f"{comm.size} ranks to make this call; make it on every rank of the "
                f"communicator, in one order, or end the program."
            )
        poll(rounds)
        rounds += 1


class MPIWindow:
    """An ``MPI.Win`` of shared memory, in one MPI access epoch as long as it lives."""

    def __init__(self, node: Any, nbytes: int) -> None:
        self._node = node
        mine = nbytes + PAGE if node.rank == 0 else 0
        self._window = MPI.Win.Allocate_shared(mine, 1, MPI.INFO_NULL, node)
        # MPICH wants an epoch around accesses. No rank takes another lock: it costs nothing.
        self._window.Lock_all(MPI.MODE_NOCHECK)
        whole: Any = self._window.Shared_query(0)[0]
        everything = np.asarray(whole, dtype=np.uint8)
        # Mappings begin on pages, so the distance to the next page is the same on every rank.
        skip = node.bcast(-everything.ctypes.data % PAGE, root=0)
        self.memory: Bytes = everything[skip : skip + nbytes]
        if node.rank == 0:
            self.memory[:] = 0
        node.Barrier()

    def free(self) -> None:
        """See ``SharedWindow.free``."""
        self.memory = np.zeros(0, np.uint8)
        self._window.Unlock_all()
        self._window.Free()
        self._node.Free()


class MPIProgram:
    """``Program``.

    Raises:
        PlatformError: MPI is not initialised, or was finalised.
    """

    def __init__(self) -> None:
        if self.over or not MPI.Is_initialized():
            state = "has been finalised" if self.over else "is not initialised"
            raise PlatformError(
                f"Buffer(): MPI {state} in this process; make Buffers between MPI.Init() and "
                f"MPI.Finalize() (mpi4py does both, unless it is told not to)."
            )
        self.world_size: int = MPI.COMM_WORLD.size

    @property
    def over(self) -> bool:
        """See ``Program.over``."""
        return bool(MPI.Is_finalized())

    def abort(self, code: int) -> None:
        """See ``Program.abort``."""
        if not self.over:
            MPI.COMM_WORLD.Abort(code)


class MPIGroup(MPIProgram):
    """``Group`` on a duplicate of a communicator. The constructor is collective, and blocks once
    all ranks have come.

    Args:
        comm: An mpi4py intracommunicator.
        timeout_s: Seconds in which all ranks must come.

    Raises:
        ContractError: ``comm`` is none.
        PlatformError: MPI refuses; on the ranks that it tells.
        PeerTimeoutError: Some rank did not come in time. MPI does not say which.
    """

    def __init__(self, comm: Any, timeout_s: float = 100.0) -> None:
        super().__init__()
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ContractError(
                f"Buffer(): argument 'comm' must be an mpi4py communicator such as "
                f"MPI.COMM_WORLD, got {type(comm).__name__}."
            )
        with _refusals("make a communicator for the Buffer"):
            _meet(comm, timeout_s)
            self._comm = comm.Dup()
            self._comm.Set_errhandler(MPI.ERRORS_RETURN)
            self.rank: int = self._comm.rank
            self.size: int = self._comm.size
            self.host: str = MPI.Get_processor_name()
            node = self._comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
            self.node_ranks: tuple[int, ...] = tuple(node.allgather(self.rank))
            node.Free()

    def allgather(self, value: Any) -> list[Any]:
        """See ``Group.allgather``."""
        return list(self._comm.allgather(value))

    def ibarrier(self) -> Request:
        """See ``Group.ibarrier``."""
        return MPIRequest(self._start(self._comm.Ibarrier), None)

    def isend(self, peer: int, data: Bytes, tag: int) -> Request:
        """See ``Group.isend``."""
        return MPIRequest(self._start(self._comm.Isend, [data, MPI.BYTE], peer, tag), data)

    def irecv(self, peer: int, data: Bytes, tag: int) -> Request:
        """See ``Group.irecv``."""
        return MPIRequest(self._start(self._comm.Irecv, [data, MPI.BYTE], peer, tag), data)

    def take(self, peer: int, tag: int) -> Request | None:
        """See ``Group.take``."""
        status = MPI.Status()
        message = self._start(self._comm.Improbe, peer, tag, status)
        if message is None:
            return None
        scratch = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        request = MPIRequest(MPI.REQUEST_NULL, scratch)
        _kept.append(request)  # before the deed: an interrupt may come before the caller has it
        request.begin(self._start(message.Irecv, [scratch, MPI.BYTE]))
        return request

    def take_any(self, tag: int, nbytes: int) -> tuple[int, Bytes] | None:
        """See ``Group.take_any``."""
        status = MPI.Status()
        message = self._start(self._comm.Improbe, MPI.ANY_SOURCE, tag, status)
        if message is None:
            return None
        data = np.empty(nbytes, np.uint8)
        self._start(message.Recv, [data, MPI.BYTE])
        return status.Get_source(), data

    @staticmethod
    def _start(function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except MPI.Exception as error:
            raise LinkError(error.Get_error_string()) from error

    def keep(self, requests: list[Request]) -> None:
        """See ``Group.keep``."""
        _kept.extend(requests)

    def shared_window(self, nbytes: int, node: int = 0) -> MPIWindow:
        """See ``Group.shared_window``.

        Raises:
            PlatformError: On every rank: there is no room for it, or MPI refuses.
        """
        with _refusals("share memory between these ranks, which one mpirun must have started"):
            self._look_for_room(nbytes)
            machine = self._comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
            shared = machine.Split(node, self.rank)
            machine.Free()
            return MPIWindow(shared, nbytes)

    def _look_for_room(self, nbytes: int) -> None:
        """Where the file system of shared memory is full, writing there ends the process."""
        try:
            found = os.statvfs(_SHARED)
            room = found.f_bavail * found.f_frsize
        except OSError:
            room = -1  # there is none, and MPI has another way
        rooms = self._comm.allgather((room, self.host))
        for rank, (room, host) in enumerate(rooms):
            if 0 <= room < nbytes + _SPARE:
                error = PlatformError(
                    f"Buffer(): {_SHARED} of {host} has {room >> 10} KiB left, wanted at least "
                    f"{(nbytes + _SPARE) >> 10}, on rank {rank}; remove what ended programs have "
                    f"left there (mpich_shm_*), or give the container more (--shm-size)."
                )
                error.printed_elsewhere = self.rank != rank
                raise error

    def free(self) -> None:
        """See ``Group.free``."""
        self._comm.Free()
