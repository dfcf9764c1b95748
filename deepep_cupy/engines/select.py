"""Which engine the ranks run on: one vote, the same answer everywhere."""

from __future__ import annotations

import importlib
from typing import Any

from deepep_cupy.engines.base import Engine
from deepep_cupy.engines.host import HostEngine
from deepep_cupy.errors import PlatformError
from deepep_cupy.log import logger
from deepep_cupy.plan.spec import BufferSpec
from deepep_cupy.transport.board import AbortBoard
from deepep_cupy.transport.group import Group

__all__ = ["ENGINES", "make_engine", "why_not_cuda"]

ENGINES = ("auto", "cuda", "host")
_CUDA_ENGINE = "deepep_cupy.engines.cuda"


def make_engine(
    group: Group, board: AbortBoard, spec: BufferSpec, engine: str, device: int | None
) -> Engine:
    """Vote, and build the engine. Collective, and blocking.

    Args:
        group: The ranks.
        board: Their abort board.
        spec: Sizes of the Buffer.
        engine: One of ``ENGINES``, the same on every rank.
        device: GPU of this rank, ``None`` for the default.

    Raises:
        PlatformError: On every rank, when ``engine="cuda"`` and a rank cannot.
    """
    if engine == "host":
        return HostEngine(group, board, spec)
    votes = group.allgather(why_not_cuda(spec, device))
    against = [f"rank {rank}: {reason}" for rank, reason in enumerate(votes) if reason is not None]
    if not against:
        cuda: Any = importlib.import_module(_CUDA_ENGINE)
        return cuda.CudaEngine(group, board, spec, device=device)  # type: ignore[no-any-return]
    more = f" (and {len(against) - 1} more)" if len(against) > 1 else ""
    if engine == "cuda":
        raise PlatformError(
            f"Buffer(): engine='cuda' is not possible, {against[0]}{more}; mend that, or use "
            f"engine='host'."
        )
    if group.rank == 0:
        logger.info("running on the host engine: %s%s", against[0], more)
    return HostEngine(group, board, spec)


def why_not_cuda(spec: BufferSpec, device: int | None) -> str | None:
    """This rank's vote: ``None`` for cuda, else the reason against it."""
    try:
        module: Any = importlib.import_module(_CUDA_ENGINE)
    except ImportError as error:
        missing = error.name or str(error)
        if missing == _CUDA_ENGINE:
            return "this version has no CUDA engine"
        return f"{missing} is not installed (pip install 'deepep_cupy[cuda13]')"
    reason: str | None = module.probe(spec, device)
    return reason
