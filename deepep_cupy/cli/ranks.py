"""MPI for the commands: imported when one of them needs it, with an error that says what to do."""

from __future__ import annotations

import importlib
from typing import Any

from deepep_cupy.errors import ContractError, PlatformError
from deepep_cupy.protocol.nodes import MAX_RANKS

__all__ = ["mpi", "world"]


def mpi(command: str) -> Any:
    """Import ``deepep_cupy.ranks.mpi`` and return it.

    Args:
        command: Its first word begins the message.

    Raises:
        PlatformError: mpi4py, or the MPI library that it loads, cannot be imported.
    """
    try:
        return importlib.import_module("deepep_cupy.ranks.mpi")
    except ImportError as error:
        raise PlatformError(
            f"{command.split()[0]}: {error.name or error} cannot be imported; "
            "pip install 'deepep_cupy[mpich]'."
        ) from error


def world(command: str) -> Any:
    """Return ``MPI.COMM_WORLD``.

    Args:
        command: For messages, such as ``"bench dispatch"``.

    Raises:
        PlatformError: See ``mpi``.
        ContractError: There are more ranks than a Buffer takes.
    """
    comm = mpi(command).world()
    if comm.size > MAX_RANKS:
        raise ContractError(
            f"{command}: wanted 1 to {MAX_RANKS} ranks, got {comm.size}; start fewer with "
            "mpirun -n."
        )
    return comm
