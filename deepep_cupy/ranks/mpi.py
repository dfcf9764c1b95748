"""The group of ranks over mpi4py: the only file that names it.

Everything here works on a duplicate of the caller's communicator, so that no message of ours can
meet one of the caller's. Methods that may wait for ever (``allgather``, windows, ``free``) are
marked as blocking in ``Group``; those that run inside an operation only start and test requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from deepep_cupy.errors import ContractError
from deepep_cupy.ranks.group import Bytes, LinkError, Request

__all__ = ["MPIGroup", "many_threads_may_call", "other_threads_may_call", "world"]

PAGE = 4096

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


class MPIGroup:
    """``Group`` on a duplicate of a communicator. The constructor is collective, and blocks."""

    def __init__(self, comm: Any) -> None:
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ContractError(
                f"Buffer(): argument 'comm' must be an mpi4py communicator such as "
                f"MPI.COMM_WORLD, got {type(comm).__name__}."
            )
        self._comm = comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self.world_size: int = MPI.COMM_WORLD.size
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
        """See ``Group.shared_window``."""
        machine = self._comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        shared = machine.Split(node, self.rank)
        machine.Free()
        return MPIWindow(shared, nbytes)

    def abort(self, code: int) -> None:
        """See ``Group.abort``."""
        if not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(code)

    def free(self) -> None:
        """See ``Group.free``."""
        self._comm.Free()
