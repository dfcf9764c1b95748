"""Which GPU each rank uses, what it can do, and whether all ranks can run the CUDA engine.

``survey`` looks at this rank's GPU and tells the others; the ``Topology`` that comes of it is the
same on every rank, so that every rank reaches the same verdict with the same words. GPUs are
identified by UUID: a rank may see only its own, and ranks may number them differently.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass, replace
from types import ModuleType

from deepep_cupy.memory.cuda_ipc import device_uuid
from deepep_cupy.ranks.group import Group

__all__ = ["MIN_CAPABILITY", "Gpu", "Topology", "survey"]

MIN_CAPABILITY = (8, 0)
"""Compute capability below which the kernels do not run."""

_ATTRIBUTE_MPS = 133  # cudaDevAttrMpsEnabled
_DRIVER = "libcuda.so.1"


@dataclass(frozen=True)
class Gpu:
    """One rank and its GPU; sent to all ranks.

    Attributes:
        rank: The rank.
        host: Its node.
        device: CUDA ordinal in that rank's process, -1 where it has none.
        uuid: As ``nvidia-smi`` writes it, empty where unknown.
        name: The GPU's name.
        num_sms: Its multiprocessors.
        capability: Its compute capability.
        total_bytes: Its memory.
        mps: True where processes share it through an MPS server.
        unreachable: UUIDs of the other GPUs this rank sees to which its own has no peer access.
        objection: Why this rank cannot run the CUDA engine, empty where it can.
    """

    rank: int
    host: str
    device: int = -1
    uuid: str = ""
    name: str = ""
    num_sms: int = 0
    capability: tuple[int, int] = (0, 0)
    total_bytes: int = 0
    mps: bool = False
    unreachable: tuple[str, ...] = ()
    objection: str = ""


@dataclass(frozen=True)
class Topology:
    """The GPUs of all ranks, in rank order; equal on every rank."""

    gpus: tuple[Gpu, ...]

    @property
    def num_gpus(self) -> int:
        """How many different GPUs the ranks use."""
        return len({gpu.uuid for gpu in self.gpus})

    @property
    def mps(self) -> bool:
        """Whether every rank's GPU is shared through MPS."""
        return all(gpu.mps for gpu in self.gpus)

    def sharing(self, rank: int) -> tuple[int, ...]:
        """All ranks on the GPU of ``rank``, itself included."""
        uuid = self.gpus[rank].uuid
        return tuple(gpu.rank for gpu in self.gpus if gpu.uuid == uuid)

    @property
    def max_ranks_per_gpu(self) -> int:
        """The most ranks that share one GPU."""
        return max(len(self.sharing(gpu.rank)) for gpu in self.gpus)

    def objections(self) -> list[tuple[int, str]]:
        """(rank, reason) for every rank that cannot run the CUDA engine."""
        found = []
        for gpu in self.gpus:
            reason = gpu.objection or self._no_peer_access(gpu)
            if reason:
                found.append((gpu.rank, reason))
        return found

    def _no_peer_access(self, gpu: Gpu) -> str:
        for peer in self.gpus:
            if peer.uuid in gpu.unreachable and peer.host == gpu.host:
                return (
                    f"its GPU {_short(gpu.uuid)} has no peer access to GPU {_short(peer.uuid)} of "
                    f"rank {peer.rank} (see nvidia-smi topo -p2p r)"
                )
        return ""

    def verdict(self) -> str:
        """Empty where all ranks can run the CUDA engine; else who cannot, and why."""
        found = self.objections()
        if len(found) == len(self.gpus) > 1 and len({reason for _, reason in found}) == 1:
            return f"every rank: {found[0][1]}"
        return "; ".join(f"rank {rank}: {reason}" for rank, reason in found)

    def summary(self) -> str:
        """One line for people: the GPUs and who shares them."""
        shared: dict[str, list[int]] = {}
        for gpu in self.gpus:
            shared.setdefault(gpu.uuid, []).append(gpu.rank)
        parts = []
        for ranks in shared.values():
            gpu = self.gpus[ranks[0]]
            listed = ", ".join(map(str, ranks))
            how = (" under MPS" if gpu.mps else " taking turns") if len(ranks) > 1 else ""
            who = f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
            parts.append(f"{who} on {gpu.name or 'no GPU'} {_short(gpu.uuid)}{how}")
        return "; ".join(parts)


def survey(group: Group, device: int | None = None, *, local_rank: int | None = None) -> Topology:
    """Collective, and blocking. Look at this rank's GPU, and learn the others'.

    Args:
        group: The ranks.
        device: CUDA ordinal in this process; ``None``: ``local_rank`` modulo the visible GPUs.
        local_rank: This rank's number on its node; ``None``: its rank in ``group``.
    """
    mine = Gpu(group.rank, group.host)
    try:
        mine = _look(mine, device, group.rank if local_rank is None else local_rank)
    except Exception as error:  # noqa: BLE001 - after any error at all the peers must hear of it
        mine = replace(mine, objection=_say(error))
    return Topology(tuple(group.allgather(mine)))


def _look(gpu: Gpu, device: int | None, local_rank: int) -> Gpu:
    try:
        ctypes.CDLL(_DRIVER)  # the first thing that CUDA loads; to import CuPy takes far longer
    except OSError as error:
        return replace(gpu, objection=f"no NVIDIA driver ({error})")
    try:
        import cupy
        from cuda.bindings import driver  # noqa: F401 - launches need it
    except ImportError as error:
        return replace(
            gpu, objection=f"{error}; install deepep_cupy[cuda13] or deepep_cupy[cuda12]"
        )
    runtime: ModuleType = cupy.cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        return replace(gpu, objection=f"no usable NVIDIA driver or GPU ({error})")
    if count == 0:
        return replace(gpu, objection="no GPU is visible (see CUDA_VISIBLE_DEVICES)")
    ordinal = local_rank % count if device is None else device
    if not 0 <= ordinal < count:
        return replace(gpu, objection=f"device={ordinal} does not exist, {count} are visible")
    return _examine(gpu, runtime, ordinal, count)


def _examine(gpu: Gpu, runtime: ModuleType, ordinal: int, count: int) -> Gpu:
    properties = runtime.getDeviceProperties(ordinal)
    capability = (int(properties["major"]), int(properties["minor"]))
    mps = False
    with contextlib.suppress(runtime.CUDARuntimeError):  # an older driver does not know
        mps = bool(runtime.deviceGetAttribute(_ATTRIBUTE_MPS, ordinal))
    unreachable = tuple(
        device_uuid(other)
        for other in range(count)
        if other != ordinal and not runtime.deviceCanAccessPeer(ordinal, other)
    )
    objection = ""
    if capability < MIN_CAPABILITY:
        have, want = ".".join(map(str, capability)), ".".join(map(str, MIN_CAPABILITY))
        objection = f"its GPU has compute capability {have}, and {want} is the least"
    return replace(
        gpu,
        device=ordinal,
        uuid=device_uuid(ordinal),
        name=_text(properties["name"]),
        num_sms=int(properties["multiProcessorCount"]),
        capability=capability,
        total_bytes=int(properties["totalGlobalMem"]),
        mps=mps,
        unreachable=unreachable,
        objection=objection,
    )


def _text(raw: bytes | str) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw


def _short(uuid: str) -> str:
    return uuid[:12] or "(unknown)"


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
