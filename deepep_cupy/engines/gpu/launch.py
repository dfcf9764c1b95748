"""Kernels of a Buffer, compiled, loaded, and ready to launch with a few writes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from deepep_cupy.errors import CompileError, PlatformError
from deepep_cupy.jit.build import Request, build_all, open_cache
from deepep_cupy.jit.compile import Loaded, compiler_archs, load, target_for
from deepep_cupy.jit.launch import CudaDriver, Launch, occupancy
from deepep_cupy.jit.spec import KernelSpec, Param, Struct, StructLayout
from deepep_cupy.protocol.headers import call_word
from deepep_cupy.ranks.group import Group

__all__ = ["COMM", "Kernels", "LocalLaunch", "ReadyLaunch"]

COMM = Struct(
    "CommParams",
    (
        Param("peer", "u8*", "kNumRanks", "symmetric region of each rank, as mapped here"),
        Param("report", "u64*", doc="host memory: counts and failures (protocol/control_block.py)"),
        Param("board", "const u32*", doc="host memory: abort words of the node, or null"),
        Param("timeout_ns", "u64", doc="most nanoseconds any wait may last"),
        Param("board_stride", "u32", doc="words between the ranks' lines of the board"),
        Param("serial", "u32", doc="number of this launch on this rank, never 0"),
        Param("rank", "u32"),
        Param("kind", "u32", doc="kKind..., and which call of it (protocol/headers.py)"),
        Param("refusal", "u32", doc="kRefusal..., when the host refused the caller's arguments"),
        Param("refusal_value", "u32", doc="the token or size in question"),
    ),
    "What every kernel needs to talk to the other ranks.",
)


class _Launch:
    """One kernel on one grid; its operation's fields are written in one go.

    Args:
        launch: The prepacked launch.
        layout: Of its parameters; those of the operation are named ``d.…``.

    Attributes:
        operation: ``operation(*values)`` writes all fields of the operation's struct, in their
            order (arrays flattened).
    """

    def __init__(self, launch: Launch, layout: StructLayout) -> None:
        self._launch = launch
        self._bytes = (ctypes.c_char * layout.nbytes).from_address(launch.packed.address)
        fields = sorted(
            (field for name, field in layout.fields.items() if name.startswith("d.")),
            key=lambda field: field.offset,
        )
        text, end = "<", fields[0].offset if fields else 0
        first = end
        for field in fields:
            text += f"{field.offset - end}x" if field.offset > end else ""
            text += field.letter if field.count is None else f"{field.count}{field.letter}"
            end = field.offset + field.nbytes
        self.operation = partial(struct.Struct(text).pack_into, self._bytes, first)
        self._start = launch.start


class LocalLaunch(_Launch):
    """A kernel that neither reads, writes nor awaits another rank."""

    def __call__(self, stream: int) -> None:
        """Launch."""
        self._start(stream)


class ReadyLaunch(_Launch):
    """A kernel that talks to the other ranks. The fields of ``CommParams`` are kept."""

    def __init__(self, launch: Launch, layout: StructLayout) -> None:
        super().__init__(launch, layout)
        comm = layout.fields
        self._serial, self._call = launch.slot("comm.serial"), launch.slot("comm.kind")
        self._kind: int = self._call[0]
        self._identity = 0
        self._refusal_at = comm["comm.refusal"].offset
        self._value_at = comm["comm.refusal_value"].offset
        self._u32 = struct.Struct("<I")

    def refusal(self, kind: int, code: int, value: int) -> None:
        """Set which operation this is, and why it is refused (code 0: it is not)."""
        self._kind, self._identity = int(kind), 0
        self._call[0] = self._kind
        self._u32.pack_into(self._bytes, self._refusal_at, code)
        self._u32.pack_into(self._bytes, self._value_at, value & 0xFFFFFFFF)

    def __call__(self, serial: int, stream: int, identity: int = 0) -> None:
        """Launch. ``identity``: see ``protocol.headers.call_word``."""
        self._serial[0] = serial
        if identity != self._identity:
            self._identity = identity
            self._call[0] = call_word(self._kind, identity)
        self._start(stream)


class Kernels:
    """All kernels a Buffer can need on one device. The constructor is collective.

    Args:
        group: The ranks; one of them compiles, the others load what it wrote.
        kernels: Those to choose from.
        constants: Name to value, for their text.
        arch: Compute capability of the device, as 90.
        path: ``"bulk"`` or ``"ldst"``.
    """

    def __init__(
        self,
        group: Group,
        kernels: Iterable[KernelSpec],
        constants: Mapping[str, int],
        *,
        arch: int,
        path: str,
    ) -> None:
        self.constants = constants
        target = target_for(arch, compiler_archs())
        wanted = [
            kernel
            for kernel in kernels
            if kernel.min_arch <= arch and (path == "bulk" or not kernel.name.endswith("_bulk"))
        ]

        def meet() -> None:
            group.allgather(None)

        requests = [Request(kernel, self.constants, target) for kernel in wanted]
        self._loaded: dict[str, tuple[KernelSpec, Loaded]] = {}
        trouble = ""
        try:
            cache = open_cache()  # a temporary one lasts until everything is loaded
            built = build_all(requests, cache, compiles=group.rank == 0, barrier=meet)
            for kernel, done in zip(wanted, built, strict=True):
                found = load(done.image, kernel.entry, kernel.name)
                _load_now(found, kernel, self.constants)
                self._loaded[kernel.name] = (kernel, found)
        except (CompileError, PlatformError) as error:
            trouble = str(error)
        # One rank alone may fail (another NVRTC, a full disk): all raise, so that no rank waits.
        for rank, reason in enumerate(group.allgather(trouble)):
            if reason:
                raise CompileError(f"rank {rank}: {reason}")
        self._ready: dict[tuple[str, int], ReadyLaunch] = {}
        self._local: dict[tuple[str, int], LocalLaunch] = {}
        self._comm: dict[str, Any] = {}

    def connect(self, **comm: Any) -> None:
        """Give the values of ``CommParams`` that stay the same for the Buffer's life."""
        self._comm = {**comm, "serial": 1, "kind": 0, "refusal": 0, "refusal_value": 0}

    def has(self, name: str) -> bool:
        """True when the kernel was built for this device and path."""
        return name in self._loaded

    def get(self, name: str, grid: int, kind: int) -> ReadyLaunch:
        """The launch of a kernel on ``grid`` blocks, made on first use."""
        ready = self._ready.get((name, grid))
        if ready is None:
            launch, layout = self._make(name, grid, {"comm": {**self._comm, "kind": kind}})
            ready = self._ready[name, grid] = ReadyLaunch(launch, layout)
        return ready

    def local(self, name: str, grid: int) -> LocalLaunch:
        """The launch of a kernel of this rank alone, on ``grid`` blocks, made on first use."""
        ready = self._local.get((name, grid))
        if ready is None:
            ready = self._local[name, grid] = LocalLaunch(*self._make(name, grid, {}))
        return ready

    def _make(self, name: str, grid: int, values: dict[str, Any]) -> tuple[Launch, StructLayout]:
        spec, loaded = self._loaded[name]
        layout = spec.layout(self.constants)
        for field_name, field in layout.fields.items():
            if field_name.startswith("d."):
                values[field_name] = 0 if field.count is None else [0] * field.count
        return Launch(loaded, spec, self.constants, grid=grid, values=values), layout


def _load_now(loaded: Loaded, kernel: KernelSpec, constants: Mapping[str, int]) -> None:
    """Let the driver bring a kernel onto the device now. By itself it does that at the first
    launch, which it cannot while a graph is being captured, nor while a kernel waits for a rank
    whose turn comes after that launch."""
    threads, nbytes = kernel.num_threads(constants), kernel.num_shared_bytes(constants)
    occupancy(loaded, threads, nbytes, CudaDriver())
