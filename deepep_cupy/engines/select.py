"""Which engine the ranks run on: one vote, the same answer everywhere."""

from __future__ import annotations

from typing import Any

from deepep_cupy import env
from deepep_cupy.engines.gpu.topology import survey
from deepep_cupy.engines.host.engine import HostEngine
from deepep_cupy.engines.protocol import Engine
from deepep_cupy.errors import ContractError, PlatformError
from deepep_cupy.log import logger
from deepep_cupy.memory.region import RegionError
from deepep_cupy.protocol.control_block import ControlLayout
from deepep_cupy.protocol.headers import REGION_BYTES
from deepep_cupy.protocol.sizes import BufferSpec, pool_bytes_hint
from deepep_cupy.ranks.abort_board import AbortBoard
from deepep_cupy.ranks.group import Group

__all__ = ["ENGINES", "make_engine", "too_large", "why_not_cuda"]

ENGINES = ("auto", "cuda", "host")


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
        ContractError: On every rank, when the GPUs' pools would be too large to be addressed.
        PlatformError: On every rank, when ``engine="cuda"`` and a rank cannot, or when there is
            too little GPU memory on a rank.
    """
    if engine == "host":
        return HostEngine(group, board, spec)
    against = _too_far_apart(spec)
    if not against:
        topology = survey(group, device, local_rank=env.launcher_local_rank())
        against = topology.verdict() or _who_has_no_compiler(group)
    if not against:
        complaint = too_large(spec, spec.pool_bytes or pool_bytes_hint(spec))
        if complaint is not None:
            raise ContractError(f"Buffer(): {complaint}.")
        from deepep_cupy.engines.gpu.engine import CudaEngine

        try:
            return CudaEngine(group, board, spec, topology, choose_device=device is None)
        except RegionError as error:
            # Too little GPU memory is an error, which the slow host engine would only hide.
            if engine == "cuda" or error.out_of_memory:
                raise
            against = str(error)
    if engine == "cuda":
        refused = PlatformError(
            f"Buffer(): engine='cuda' is not possible ({against}); mend that, or use engine='host'."
        )
        refused.printed_elsewhere = group.rank > 0
        raise refused
    if group.rank == 0:
        logger.info("running on the host engine: %s", against)
    return HostEngine(group, board, spec)


def _too_far_apart(spec: BufferSpec) -> str:
    """Why GPUs of these nodes cannot work together; empty where there is one node."""
    if spec.num_nodes == 1:
        return ""
    return f"the ranks are on {spec.num_nodes} nodes, and GPUs work together within one"


def too_large(spec: BufferSpec, pool_bytes: int) -> str | None:
    """What to say of a pool on GPUs that offsets in headers do not reach; None: they reach it."""
    most = REGION_BYTES - ControlLayout(spec.num_ranks, spec.num_experts or 0).nbytes
    if pool_bytes <= most:
        return None
    return (
        f"these sizes need a pool of {pool_bytes / 2**30:.1f} GiB on each rank, and 64 GiB can be "
        f"addressed; lower num_max_tokens_per_rank or hidden, or give pool_bytes of at most {most} "
        f"where calls are smaller"
    )


def _who_has_no_compiler(group: Group) -> str:
    """Which ranks cannot compile kernels, and why. Collective, and blocking."""
    reasons = group.allgather(_why_no_compiler())
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)


def _why_no_compiler() -> str:
    """Why this process cannot compile kernels; empty where it can. Local."""
    try:
        from deepep_cupy.jit.compile import compiler_version

        compiler_version()
    except Exception as error:  # noqa: BLE001 - any failure means "cannot"
        return f"no NVRTC: {error}"
    return ""


def why_not_cuda(spec: BufferSpec, device: int | None) -> str | None:
    """Why this process alone could not use the CUDA engine; ``None`` where it could. Local."""
    del spec  # sizes matter only once memory is allocated
    alone: Any = _Alone()
    return survey(alone, device).gpus[0].objection or _why_no_compiler() or None


class _Alone:
    """A group of this rank alone, with what ``survey`` needs."""

    rank = 0
    host = "this node"

    def allgather(self, value: Any) -> list[Any]:
        return [value]
