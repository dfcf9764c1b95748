"""Whether this process can run the CUDA engine, and who shares its GPU."""

from __future__ import annotations

from typing import Any

from deepep_cupy.plan.spec import BufferSpec
from deepep_cupy.transport.cuda_ipc import device_uuid
from deepep_cupy.transport.group import Group

__all__ = ["probe", "ranks_on_same_gpu"]

_OLDEST_ARCH = 80


def probe(spec: BufferSpec, device: int | None) -> str | None:
    """This rank's vote for the CUDA engine. Local.

    Args:
        spec: Sizes of the Buffer.
        device: The caller's choice of GPU, ``None`` for the default.

    Returns:
        ``None`` when this rank can, else the reason why not.
    """
    try:
        import cuda.bindings.driver  # noqa: F401
        import cupy
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except ImportError as error:
        return f"{error.name or error} is not installed (pip install 'deepep_cupy[cuda13]')"
    except Exception as error:  # noqa: BLE001 - any failure of the libraries means "cannot"
        return f"CUDA's compiler library does not work: {error}"
    runtime: Any = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except Exception as error:  # noqa: BLE001 - no driver, too old a driver, no permission, …
        return f"no usable GPU: {error}"
    if count == 0:
        return "no GPU is visible (see CUDA_VISIBLE_DEVICES)"
    chosen = spec.rank % count if device is None else device
    if not 0 <= chosen < count:
        return f"device={device} does not exist: {count} GPUs are visible"
    arch = int(cupy.cuda.Device(chosen).compute_capability)
    if arch < _OLDEST_ARCH:
        return f"GPU {chosen} has compute capability {arch / 10}, 8.0 is the oldest supported"
    return None


def ranks_on_same_gpu(group: Group, device: int) -> tuple[int, ...]:
    """Ranks whose GPU is this rank's, itself included. Collective, and blocking."""
    uuids = group.allgather((group.host, device_uuid(device)))
    return tuple(rank for rank, uuid in enumerate(uuids) if uuid == uuids[group.rank])
