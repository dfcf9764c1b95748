"""One region of device memory a rank, which all ranks have mapped.

The ranks agree on every step: either all of them hold a region and have opened all others, or all
raise the same error, which names the ranks that failed and says what to do. The calls themselves
are those of ``DeviceMemory``, so that the agreement is tested without a GPU.

Life::

    allocate, zero the control part, export ─▶ allgather ─▶ open the peers' ─▶ allgather ─▶ in use
    in use ─▶ finish own work ─▶ meet ─▶ close the peers' ─▶ meet ─▶ free

Memory is never freed while a peer may have it mapped, nor while an array over it is alive: the
arrays of this rank keep the ``Allocation``, which frees when the last reference goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deepep_cupy.errors import PlatformError
from deepep_cupy.protocol.control_block import align
from deepep_cupy.ranks.group import Group

__all__ = [
    "GRANULE",
    "Allocation",
    "DeviceMemory",
    "MemoryCallError",
    "Offer",
    "RegionError",
    "SymmetricRegion",
]

GRANULE = 2 << 20
"""Sizes are multiples of this: a smaller one would share its mapping with other allocations."""


class RegionError(PlatformError):
    """The ranks could not make memory that all of them see.

    Attributes:
        out_of_memory: True where the reason is too little memory on a rank.
    """

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class MemoryCallError(Exception):
    """What a ``DeviceMemory`` raises.

    Attributes:
        why: ``"memory"``, ``"peer access"`` or ``"refused"``.
    """

    def __init__(self, why: str, message: str) -> None:
        super().__init__(message)
        self.why = why


class DeviceMemory(Protocol):
    """The calls on one device's memory. Those that can fail raise ``MemoryCallError``."""

    def identity(self) -> tuple[str, str]:
        """(UUID of the GPU, names of the namespaces that CUDA IPC looks through)."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Address of new memory."""
        ...

    def zero(self, address: int, nbytes: int) -> None:
        """Fill with zeros, and wait for it."""
        ...

    def export(self, address: int) -> bytes:
        """A handle that another process can open."""
        ...

    def open(self, handle: bytes, uuid: str) -> int:
        """Map a peer's memory, which lies on GPU ``uuid``; return the address here."""
        ...

    def close(self, address: int) -> None:
        """Undo ``open``."""
        ...

    def free(self, address: int) -> None:
        """Undo ``allocate``."""
        ...

    def synchronize(self) -> None:
        """Wait for all work of this process on the device."""
        ...


@dataclass(frozen=True)
class Offer:
    """What a rank tells the others about its region.

    Attributes:
        rank: The rank.
        host: Its node.
        uuid: Its GPU.
        container: Where it runs; ranks with different names do not share process numbers.
        nbytes: Size of its region.
        handle: To open it with; empty where it failed.
        why: ``MemoryCallError.why``, empty where it did not fail.
        error: What failed.
    """

    rank: int
    host: str
    uuid: str
    container: str
    nbytes: int
    handle: bytes = b""
    why: str = ""
    error: str = ""


class Allocation:
    """Device memory that is freed with the last reference, once that is allowed.

    Attributes:
        address: Its first byte.
        may_free: Set when no peer has it mapped any more. Until then it is left to the process.
    """

    __slots__ = ("_memory", "address", "may_free")

    def __init__(self, memory: DeviceMemory, address: int) -> None:
        self._memory = memory
        self.address = address
        self.may_free = False

    def free(self) -> None:
        """Free it now. No peer may have it mapped, and no array over it may exist."""
        self.may_free = False
        try:  # noqa: SIM105 - at the interpreter's end nothing may be left, contextlib neither
            self._memory.free(self.address)
        except Exception:  # noqa: BLE001
            pass

    def __del__(self) -> None:
        if self.may_free:
            self.free()


@dataclass
class _Opened:
    """Addresses of the peers' regions, as far as they are open."""

    base: dict[int, int] = field(default_factory=dict)
    failures: list[tuple[int, int, str, str]] = field(default_factory=list)
    """(this rank, peer, why, error)"""


class SymmetricRegion:
    """This rank's region and the peers'. The constructor and ``close`` are collective.

    Args:
        group: The ranks.
        memory: The calls on this rank's device.
        nbytes: Bytes wanted; rounded up to ``GRANULE``.
        zero_bytes: Bytes from the base on that must be 0 before any peer sees them.

    Attributes:
        base: Address of this rank's region.
        nbytes: Its size.
        peer_base: Addresses of all ranks' regions in this process; this rank's own included.
        peer_nbytes: Their sizes.
        offers: Those of all ranks.
        allocation: Keep it as long as an array over the region lives.

    Raises:
        RegionError: On every rank, with the same text.
    """

    def __init__(
        self, group: Group, memory: DeviceMemory, nbytes: int, *, zero_bytes: int = 0
    ) -> None:
        self._group = group
        self._memory = memory
        self.nbytes = align(max(nbytes, 1), GRANULE)
        self._closed = False
        offer, allocation = self._offer(min(zero_bytes, self.nbytes))
        self.offers: list[Offer] = group.allgather(offer)
        error = explain_offers(self.offers)
        if error is not None:
            if allocation is not None:
                allocation.free()  # no peer has opened it
            raise error
        assert allocation is not None  # an offer without error has one
        opened = self._open_peers()
        # Behind this line every region is zeroed and open on every rank.
        failures = [each for rank in group.allgather(opened.failures) for each in rank]
        if failures:
            for address in opened.base.values():
                with contextlib.suppress(Exception):
                    memory.close(address)
            group.allgather(None)  # no peer has it open any more
            allocation.free()
            raise explain_failures(self.offers, failures)
        self.allocation = allocation
        self._opened = opened.base
        self.base = allocation.address
        self.peer_base = [
            self.base if rank == group.rank else opened.base[rank] for rank in range(group.size)
        ]
        self.peer_nbytes = [each.nbytes for each in self.offers]

    def _offer(self, zero_bytes: int) -> tuple[Offer, Allocation | None]:
        group, memory = self._group, self._memory
        allocation = None
        uuid = container = ""
        handle, why, error = b"", "", ""
        try:
            uuid, container = memory.identity()
            allocation = Allocation(memory, memory.allocate(self.nbytes))
            if zero_bytes:
                memory.zero(allocation.address, zero_bytes)
            if group.size > 1:
                handle = memory.export(allocation.address)
        except Exception as failure:  # noqa: BLE001 - after any error at all the peers must hear of it
            why, error = getattr(failure, "why", "refused"), str(failure)
        return (
            Offer(group.rank, group.host, uuid, container, self.nbytes, handle, why, error),
            allocation,
        )

    def _open_peers(self) -> _Opened:
        opened = _Opened()
        me = self._group.rank
        for offer in self.offers:
            if offer.rank == me:
                continue
            try:
                opened.base[offer.rank] = self._memory.open(offer.handle, offer.uuid)
            except Exception as failure:  # noqa: BLE001 - the peers wait to hear of it
                why = getattr(failure, "why", "refused")
                opened.failures.append((me, offer.rank, why, str(failure)))
        return opened

    def find(self, address: int, nbytes: int) -> int | None:
        """Offset of ``[address, address + nbytes)`` where it lies within this region."""
        offset = address - self.base
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else None

    def close(self, meet: Callable[[], None]) -> None:
        """Collective. Unmap the peers' regions and free this one; a second call does nothing.

        Arrays over this rank's region may live on; they keep its memory.

        Args:
            meet: A barrier that raises rather than waits for ever. If it raises, everything is
                left to the process's end.
        """
        if self._closed:
            return
        self._closed = True
        self._memory.synchronize()
        meet()  # no rank works on this region any more
        for address in self._opened.values():
            self._memory.close(address)
        self._opened.clear()
        meet()  # no peer has it mapped any more
        self.allocation.may_free = True
        del self.allocation

    def leave(self) -> None:
        """Local. Leave mappings and memory to the process's end: a peer may still use them."""
        self._closed = True


def explain_offers(offers: Sequence[Offer]) -> RegionError | None:
    """The error all ranks raise for regions that could not be made; ``None`` if all were made."""
    failed = [offer for offer in offers if offer.why]
    if failed:
        short = any(offer.why == "memory" for offer in failed)
        said = "; ".join(
            f"rank {offer.rank} on GPU {offer.uuid or 'unknown'} of {offer.host}: {offer.error}"
            for offer in failed
        )
        advice = (
            "lower pool_bytes or num_max_tokens_per_rank, or free memory on that GPU"
            if short
            else "use engine='host', or repair CUDA on that rank"
        )
        return RegionError(
            f"Buffer(): the ranks cannot share GPU memory ({said}); {advice}.",
            out_of_memory=short,
        )
    hosts = sorted({offer.host for offer in offers})
    if len(hosts) > 1:
        return RegionError(
            f"Buffer(): the ranks run on several nodes ({', '.join(hosts)}), and GPU memory is "
            "shared within one node only; start all ranks on one node."
        )
    return None


def explain_failures(
    offers: Sequence[Offer], failures: Sequence[tuple[int, int, str, str]]
) -> RegionError:
    """The error all ranks raise for regions that could not be opened.

    Args:
        offers: Of all ranks.
        failures: (rank, peer, why, error) of all ranks.
    """
    rank, peer, why, error = min(failures)
    a, b = offers[rank], offers[peer]
    pairs = ", ".join(f"{r}→{p}" for r, p, _, _ in sorted(failures))
    if why == "peer access":
        advice = (
            f"GPU {a.uuid} of rank {rank} and GPU {b.uuid} of rank {peer} cannot reach each "
            "other's memory (see nvidia-smi topo -p2p r); choose GPUs joined by NVLink with "
            "device= or CUDA_VISIBLE_DEVICES, or use engine='host'"
        )
    elif a.container != b.container:
        advice = (
            f"ranks {rank} and {peer} run in different containers; start them in one, or give "
            "both --ipc=host and --pid=host, or use engine='host'"
        )
    else:
        advice = (
            "CUDA IPC was refused; in a container give it --ipc=host, under MPS let all ranks use "
            "one MPS server, or use engine='host'"
        )
    return RegionError(
        f"Buffer(): rank {rank} cannot open the memory of rank {peer} ({error}; rank→peer that "
        f"failed: {pairs}): {advice}."
    )
