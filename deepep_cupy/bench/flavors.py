"""Times kinds of loads and L2 hints against each other, and whole operations with either choice.

``Copies`` moves the same bytes with each kind, all ranks at once: own rows pushed to the next rank,
rows that have arrived copied on, rows of the next rank pulled. ``Whole`` times dispatch and combine
of Buffers that differ in ``DEEPEP_CUPY_LOADS`` and in nothing else. All times are medians of the
slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepep_cupy import env
from deepep_cupy.bench.timing import BUSY_FLUSHES, CudaTimer, slowest
from deepep_cupy.engines.gpu.ptx_modules import PtxEntry, get_module, load_entry
from deepep_cupy.jit.launch import Driver, Launch, Launchable
from deepep_cupy.memory.cuda_ipc import open_region
from deepep_cupy.protocol.control_block import align

__all__ = [
    "CLASSES",
    "FLAVORS",
    "HINTS",
    "LOADS",
    "SHARED_BYTES",
    "BulkEntry",
    "Copies",
    "Flavor",
    "Whole",
]

LOADS = (
    "ld.global",
    "ld.global.L1::no_allocate",
    "ld.volatile.global",
    "ld.relaxed.sys.global",
    "ld.global.nc",
    "ld.global.nc.L1::no_allocate",
    "ld.global.nc.L1::no_allocate.L2::256B",
)
"""Kinds of loads, as ``ptx/copy_flavors.sm_80.ptx`` numbers them."""
HINTS = ("none", "evict_first", "evict_normal")
"""Hints to L2, as ``ptx/copy_flavors_bulk.sm_90.ptx`` numbers them."""
CHUNK_BYTES = 4096
SHARED_BYTES = 16 * 4 * 3584
"""Dynamic shared memory of a block of bulk copies."""
_LIMIT_NS = 5_000_000_000


@dataclass(frozen=True)
class Flavor:
    """One way to copy.

    Attributes:
        name: For tables.
        load: Kind of load, empty for bulk copies.
        load_hint: Hint of bulk loads.
        store_hint: Hint of bulk stores.
    """

    name: str
    load: str = ""
    load_hint: str = "none"
    store_hint: str = "none"

    @property
    def bulk(self) -> bool:
        """Whether the copy engine moves the rows (``cp.async.bulk``)."""
        return not self.load


FLAVORS = (
    *(Flavor(load, load) for load in LOADS),
    Flavor("bulk"),
    Flavor("bulk, loads evict_first", load_hint="evict_first"),
    Flavor("bulk, stores evict_first", store_hint="evict_first"),
    Flavor("bulk, both evict_first", load_hint="evict_first", store_hint="evict_first"),
    Flavor("bulk, both evict_normal", load_hint="evict_normal", store_hint="evict_normal"),
)
"""All ways to copy. DeepEP hints ``evict_first`` on most of its bulk copies."""

CLASSES: Mapping[str, str] = {
    "push": "own rows, stored to the next rank",
    "staged": "rows that have arrived, stored locally",
    "pull": "rows of the next rank, stored locally",
}
"""What is copied from where to where → in words."""


@dataclass(frozen=True)
class BulkEntry:
    """The entry of bulk copies with the size of its dynamic shared memory, which is not in the
    manifest."""

    entry: PtxEntry

    @property
    def name(self) -> str:
        """For messages."""
        return self.entry.name

    def layout(self, constants: Mapping[str, int]) -> Any:
        """See ``Launchable``."""
        return self.entry.layout(constants)

    def param_offsets(self, constants: Mapping[str, int]) -> tuple[int, ...]:
        """See ``Launchable``."""
        return self.entry.param_offsets(constants)

    def num_threads(self, constants: Mapping[str, int]) -> int:
        """See ``Launchable``."""
        return self.entry.num_threads(constants)

    def num_shared_bytes(self, constants: Mapping[str, int]) -> int:
        """See ``Launchable``."""
        del constants
        return SHARED_BYTES


class Copies:
    """One rank's memory, and copies to and from its neighbour. The constructor is collective.

    Args:
        group: The ranks.
        device: CUDA ordinal; it must be the current device.
        nbytes: Bytes of each copy, rounded up to whole chunks.
        barrier: Brings the ranks together on the current stream.
        driver: Driver calls of launches; ``None`` for the real ones.
    """

    def __init__(
        self,
        group: Any,
        device: int,
        nbytes: int,
        barrier: Callable[[], object],
        driver: Driver | None = None,
    ) -> None:
        import cupy

        self.nbytes = align(nbytes, CHUNK_BYTES)
        self._cupy: Any = cupy
        self._group, self._device, self._driver = group, device, driver
        self._next, self._before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        self._region = open_region(group, device, 3 * self.nbytes + 4096)
        self._barrier, self._timer = barrier, CudaTimer()
        self._loaded: dict[str, tuple[Any, Launchable]] = {}
        self._ready: dict[tuple[bool, int], Launch] = {}
        self._failed = self._area(3, 4)
        self._failed.fill(0)
        self._area(0).view("u4")[...] = self._pattern(group.rank)
        cupy.cuda.get_current_stream().synchronize()
        self._meet()

    def measure(self, kind: str, flavor: Flavor, num_sms: int, repeats: int) -> float:
        """Microseconds of one copy. Collective; all ranks get the slowest one's."""
        call = self._call(kind, flavor, num_sms)
        timing = self._timer.measure(call, repeats=repeats, barrier=self._barrier)
        return slowest(timing, self._group.allgather)

    def check(self, kind: str, flavor: Flavor, num_sms: int) -> bool:
        """Copy once into cleared memory and compare every byte. Collective; "push" must have run
        before "staged"."""
        target = 1 if kind == "push" else 2
        self._area(target).fill(0)
        self._barrier()
        self._call(kind, flavor, num_sms)()
        self._barrier()
        whose = self._next if kind == "pull" else self._before
        wrong = int((self._area(target).view("u4") != self._pattern(whose)).sum())
        late = int(self._failed.view("u4")[0])
        self._meet()
        return all(self._group.allgather(wrong == 0 and late == 0))

    def close(self) -> None:
        """Free the memory. Collective."""
        self._region.close(self._meet)

    def _meet(self) -> None:
        self._group.allgather(None)

    def _call(self, kind: str, flavor: Flavor, num_sms: int) -> Callable[[], None]:
        own, there = self._region.base, self._region.peer_base[self._next]
        n = self.nbytes
        to, source = {
            "push": (there + n, own),
            "staged": (own + 2 * n, own + n),
            "pull": (own + 2 * n, there),
        }[kind]
        launch = self._launch(flavor.bulk, num_sms)
        launch.set(**{"to": to, "from": source})
        if flavor.bulk:
            hints = HINTS.index(flavor.load_hint), HINTS.index(flavor.store_hint)
            launch.set(load_hint=hints[0], store_hint=hints[1])
        else:
            launch.set(load=LOADS.index(flavor.load))
        stream = self._cupy.cuda.get_current_stream
        return lambda: launch(stream().ptr)

    def _launch(self, bulk: bool, num_sms: int) -> Launch:
        ready = self._ready.get((bulk, num_sms))
        if ready is None:
            values: dict[str, int] = {"to": 0, "from": 0}
            if bulk:
                loaded, entry = self._load("copy_flavors_bulk", "copy_flavor_bulk")
                values |= {"num_bytes": self.nbytes, "failed": self._region.base + 3 * self.nbytes}
                values |= {"limit_ns": _LIMIT_NS, "load_hint": 0, "store_hint": 0}
            else:
                loaded, entry = self._load("copy_flavors", "copy_flavor")
                values |= {"num_words": self.nbytes // 16, "load": 0}
            ready = Launch(loaded, entry, {}, grid=num_sms, values=values, driver=self._driver)
            self._ready[bulk, num_sms] = ready
        return ready

    def _load(self, module: str, name: str) -> tuple[Any, Launchable]:
        if module not in self._loaded:
            loaded, entry = load_entry(get_module(module), name)
            bulk = module == "copy_flavors_bulk"
            self._loaded[module] = loaded, BulkEntry(entry) if bulk else entry
        return self._loaded[module]

    def _area(self, number: int, nbytes: int = 0) -> Any:
        """The rank's own rows (0), what arrives (1), what is copied on (2), a word (3)."""
        cuda, region = self._cupy.cuda, self._region
        size = nbytes or self.nbytes
        start = region.base + number * self.nbytes
        memory = cuda.UnownedMemory(start, size, region.allocation, self._device)
        return self._cupy.ndarray((size,), "u1", memptr=cuda.MemoryPointer(memory, 0))

    def _pattern(self, rank: int) -> Any:
        """The rows of a rank: every word is made from its place and from the rank."""
        words = self._cupy.arange(self.nbytes // 4, dtype="u4")
        return words * np.uint32(2654435761) + np.uint32(rank + 1)


# ---------------------------------------------------------------------------- whole operations


class Whole:
    """Buffers on one path that differ in their loads alone. The constructor is collective.

    Args:
        comm: ``MPI.COMM_WORLD``.
        path: ``DEEPEP_CUPY_PATH``.
        num_sms: Of each operation.
        tokens: A rank.
        hidden: Elements of a row, bfloat16.
        allgather: Collective.
    """

    def __init__(
        self,
        comm: Any,
        *,
        path: str,
        num_sms: int,
        tokens: int,
        hidden: int,
        allgather: Callable[[Any], list[Any]],
    ) -> None:
        import cupy
        import ml_dtypes

        from deepep_cupy import Buffer

        self._allgather = allgather
        bf16 = np.dtype(ml_dtypes.bfloat16)
        size, topk = comm.size, 8
        experts = align(256, size)
        rng = np.random.default_rng([11, comm.rank])
        choice = np.argpartition(rng.random((tokens, experts)), topk, axis=1)[:, :topk]
        self._topk_idx: Any = cupy.asarray(np.ascontiguousarray(choice.astype(np.int64)))
        rows = rng.integers(0, 1 << 14, (tokens, hidden), np.uint16)  # small positive numbers
        self._x: Any = cupy.asarray(rows).view(bf16)
        self.buffers: dict[str, Any] = {}
        self._handles: dict[str, Any] = {}
        self._y: dict[str, Any] = {}
        for loads in ("coherent", "nc"):
            with env.setting(DEEPEP_CUPY_LOADS=loads, DEEPEP_CUPY_PATH=path):
                buffer = Buffer(
                    comm,
                    num_max_tokens_per_rank=tokens,
                    hidden=hidden,
                    num_topk=topk,
                    num_experts=experts,
                    dtype="bfloat16",
                    num_sms=num_sms,
                    engine="cuda",
                )
            got = buffer.dispatch(self._x, topk_idx=self._topk_idx)
            y = buffer.empty(got.recv_x.shape, bf16)
            y.view("u1")[...] = got.recv_x.view("u1")
            self.buffers[loads], self._handles[loads], self._y[loads] = buffer, got.handle, y
        self._timer = CudaTimer(flushes=BUSY_FLUSHES)

    def same_results(self) -> bool:
        """Whether both kinds of loads give the same bytes. Collective."""
        results = [
            (
                self.buffers[loads].dispatch(self._x, handle=self._handles[loads]).recv_x,
                self.buffers[loads].combine(self._y[loads], self._handles[loads]).combined_x,
            )
            for loads in ("coherent", "nc")
        ]
        same = all(
            bool((a.view("u1") == b.view("u1")).all()) for a, b in zip(*results, strict=True)
        )
        return all(self._allgather(same))

    def measure(self, operation: str, repeats: int) -> dict[str, float]:
        """Microseconds with each kind of loads; the two take turns. Collective.

        Args:
            operation: ``"dispatch"`` (with a handle), ``"layout"`` (dispatch from ``topk_idx``) or
                ``"combine"``.
            repeats: Calls in all.
        """
        times: dict[str, list[float]] = {"coherent": [], "nc": []}
        for _ in range(2):
            for loads, found in times.items():
                timing = self._timer.measure(
                    self._call(operation, loads),
                    repeats=-(-repeats // 2),
                    barrier=self.buffers[loads].barrier,
                )
                found += timing.microseconds
        medians = {loads: float(np.median(found)) for loads, found in times.items()}
        every = self._allgather(medians)
        return {loads: max(each[loads] for each in every) for loads in medians}

    def _call(self, operation: str, loads: str) -> Callable[[], Any]:
        buffer, handle, y = self.buffers[loads], self._handles[loads], self._y[loads]
        return {
            "dispatch": lambda: buffer.dispatch(self._x, handle=handle),
            "layout": lambda: buffer.dispatch(self._x, topk_idx=self._topk_idx),
            "combine": lambda: buffer.combine(y, handle),
        }[operation]

    def close(self) -> None:
        """Check and close both Buffers. Collective."""
        for buffer in self.buffers.values():
            buffer.check()
            buffer.close()
