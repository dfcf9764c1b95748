"""Kernels of a Buffer, compiled, loaded, and ready to launch with a few writes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from typing import Any

from deepep_cupy.errors import CompileError, PlatformError
from deepep_cupy.kernels.build import Request, build_all, open_cache, shape_constants
from deepep_cupy.kernels.compile import Loaded, compiler_archs, load, target_for
from deepep_cupy.kernels.launch import Launch
from deepep_cupy.kernels.registry import KERNELS
from deepep_cupy.kernels.spec import KernelSpec
from deepep_cupy.plan.spec import BufferSpec
from deepep_cupy.transport.group import Group

__all__ = ["Kernels", "ReadyLaunch"]


class ReadyLaunch:
    """One kernel on one grid. ``operation`` fields are written in one go, ``comm`` ones kept.

    Args:
        launch: The prepacked launch.
        spec: Its kernel.
        constants: What the kernel was compiled with.
    """

    def __init__(self, launch: Launch, spec: KernelSpec, constants: Mapping[str, int]) -> None:
        self._launch = launch
        layout = spec.layout(constants)
        self._bytes = (ctypes.c_char * layout.nbytes).from_address(launch.packed.address)
        fields = sorted(
            (field for name, field in layout.fields.items() if name.startswith("d.")),
            key=lambda field: field.offset,
        )
        text, end = "<", fields[0].offset if fields else 0
        self._first = end
        for field in fields:
            text += f"{field.offset - end}x" if field.offset > end else ""
            text += field.letter if field.count is None else f"{field.count}{field.letter}"
            end = field.offset + field.nbytes
        self._operation = struct.Struct(text)
        comm = layout.fields
        serial, kind = comm["comm.serial"], comm["comm.kind"]
        refusal, value = comm["comm.refusal"], comm["comm.refusal_value"]
        self._serial_at = serial.offset
        self._kind_at = kind.offset
        self._refusal_at = refusal.offset
        self._value_at = value.offset
        self._u32 = struct.Struct("<I")

    def operation(self, *values: int) -> None:
        """Write all fields of the operation's struct, in their order (arrays flattened)."""
        self._operation.pack_into(self._bytes, self._first, *values)

    def refusal(self, kind: int, code: int, value: int) -> None:
        """Say which operation this is, and why it is refused (0: it is not)."""
        self._u32.pack_into(self._bytes, self._kind_at, kind)
        self._u32.pack_into(self._bytes, self._refusal_at, code)
        self._u32.pack_into(self._bytes, self._value_at, value & 0xFFFFFFFF)

    def __call__(self, serial: int, stream: int) -> None:
        """Launch."""
        self._u32.pack_into(self._bytes, self._serial_at, serial)
        self._launch(stream)


class Kernels:
    """All kernels a Buffer can need on one device. The constructor is collective.

    Args:
        group: The ranks; one of them compiles, the others load what it wrote.
        spec: Sizes of the Buffer.
        arch: Compute capability of the device, as 90.
        loads: ``"coherent"`` or ``"nc"``.
        path: ``"bulk"`` or ``"ldst"``.
    """

    def __init__(self, group: Group, spec: BufferSpec, arch: int, loads: str, path: str) -> None:
        self.constants = shape_constants(
            arch, num_ranks=spec.num_ranks, max_row_bytes=spec.max_row_bytes, loads=loads
        )
        target = target_for(arch, compiler_archs())
        wanted = [
            kernel
            for kernel in KERNELS
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
                self._loaded[kernel.name] = (kernel, load(done.path, kernel.entry))
        except (CompileError, PlatformError) as error:
            trouble = str(error)
        # One rank alone may fail (another NVRTC, a full disk): all raise, so that nobody waits.
        for rank, said in enumerate(group.allgather(trouble)):
            if said:
                raise CompileError(f"rank {rank}: {said}")
        self._ready: dict[tuple[str, int], ReadyLaunch] = {}
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
            spec, loaded = self._loaded[name]
            layout = spec.layout(self.constants)
            values: dict[str, Any] = {"comm": {**self._comm, "kind": kind}}
            for field_name, field in layout.fields.items():
                if field_name.startswith("d."):
                    values[field_name] = 0 if field.count is None else [0] * field.count
            launch = Launch(loaded, spec, self.constants, grid=grid, values=values)
            ready = self._ready[name, grid] = ReadyLaunch(launch, spec, self.constants)
        return ready
