"""Launches with prepacked arguments: checked once, cheap from then on.

CuPy checks nothing about kernel arguments, and its launch costs twice the driver's. Here the
values are checked against the spec when a launch is made, packed into one buffer, and a call
rewrites only the fields that changed::

    launch = Launch(loaded, spec, constants, grid=16, values={"epoch": address, ...})
    serial = launch.slot("serial")     # a view of eight bytes of the packed struct
    serial[0] += 1
    launch(stream)                     # an integer: the CUstream

The driver copies the struct before ``launch(stream)`` returns. One thread at a time may use one
``Launch``.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deepep_cupy.errors import ContractError, PlatformError
from deepep_cupy.jit.compile import Loaded
from deepep_cupy.jit.spec import Field, StructLayout

__all__ = ["CudaDriver", "Driver", "Launch", "Launchable", "Occupancy", "Packed", "occupancy"]


class Driver(Protocol):
    """The few driver calls a launch needs, on the current device."""

    def prepare(
        self, function: int, grid: int, threads: int, shared_bytes: int, params: int
    ) -> Any:
        """Return a callable that takes a stream (an integer) and launches."""
        ...

    def allow_shared(self, function: int, nbytes: int) -> None:
        """Let ``function`` be launched with so much dynamic shared memory."""
        ...

    def blocks_per_sm(self, function: int, threads: int, shared_bytes: int) -> int:
        """How many blocks fit on one SM at once."""
        ...

    def num_sms(self) -> int:
        """SMs of the current device."""
        ...


class Launchable(Protocol):
    """What a launch must know of a function: a ``KernelSpec``, or an entry of a PTX module."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def layout(self, constants: Mapping[str, int]) -> StructLayout:
        """The parameters, one behind the other."""
        ...

    def param_offsets(self, constants: Mapping[str, int]) -> tuple[int, ...]:
        """Where each parameter of the function begins."""
        ...

    def num_threads(self, constants: Mapping[str, int]) -> int:
        """Threads a block."""
        ...

    def num_shared_bytes(self, constants: Mapping[str, int]) -> int:
        """Bytes of dynamic shared memory a block."""
        ...


class CudaDriver:
    """The driver through ``cuda.bindings``."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise PlatformError(
                f"launching kernels needs the package cuda-bindings ({error}); install "
                "deepep_cupy[cuda13] or deepep_cupy[cuda12]"
            ) from error
        self._driver: Any = driver

    def prepare(
        self, function: int, grid: int, threads: int, shared_bytes: int, params: int
    ) -> Any:
        """Return a callable that takes a stream (an integer) and launches."""
        driver = self._driver
        launch, stream_type = driver.cuLaunchKernel, driver.CUstream
        kernel = driver.CUfunction(function)
        success = driver.CUresult.CUDA_SUCCESS
        streams: dict[int, Any] = {}

        def call(stream: int) -> None:
            handle = streams.get(stream)
            if handle is None:
                if len(streams) >= _STREAMS_KEPT:
                    streams.clear()
                handle = streams[stream] = stream_type(stream)
            (status,) = launch(kernel, grid, 1, 1, threads, 1, 1, shared_bytes, handle, params, 0)
            if status != success:
                raise PlatformError(
                    f"cuLaunchKernel: the driver answered {status!r}; grid of {grid} blocks of "
                    f"{threads} threads, {shared_bytes} bytes of shared memory; an earlier kernel "
                    "of this process may have faulted"
                )

        return call

    def allow_shared(self, function: int, nbytes: int) -> None:
        """Let ``function`` be launched with so much dynamic shared memory."""
        driver = self._driver
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._check(
            driver.cuFuncSetAttribute(driver.CUfunction(function), attribute, nbytes),
            f"allowing {nbytes} bytes of shared memory a block",
        )

    def blocks_per_sm(self, function: int, threads: int, shared_bytes: int) -> int:
        """How many blocks fit on one SM at once."""
        driver = self._driver
        return int(
            self._check(
                driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    driver.CUfunction(function), threads, shared_bytes
                ),
                "asking for the occupancy",
            )
        )

    def num_sms(self) -> int:
        """SMs of the current device."""
        driver = self._driver
        device = self._check(driver.cuCtxGetDevice(), "asking for the current device")
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return int(self._check(driver.cuDeviceGetAttribute(attribute, device), "counting the SMs"))

    def _check(self, answer: Sequence[Any], doing: str) -> Any:
        """The value of an answer ``(status, value)`` or ``(status,)``."""
        if answer[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise PlatformError(f"{doing}: the driver answered {answer[0]!r}")
        return answer[1] if len(answer) > 1 else None


_STREAMS_KEPT = 64
"""The most stream handles kept per launch: a program may make new streams without end."""


@dataclass(frozen=True)
class Occupancy:
    """How many blocks of a kernel the current device holds at once.

    Attributes:
        blocks_per_sm: On one SM.
        num_sms: SMs of the device.
    """

    blocks_per_sm: int
    num_sms: int

    @property
    def blocks(self) -> int:
        """On the whole device."""
        return self.blocks_per_sm * self.num_sms


def occupancy(loaded: Loaded, threads: int, shared_bytes: int, driver: Driver) -> Occupancy:
    """Return how many blocks fit at once, after allowing the kernel its shared memory."""
    if shared_bytes:
        driver.allow_shared(loaded.function, shared_bytes)
    per_sm = driver.blocks_per_sm(loaded.function, threads, shared_bytes)
    return Occupancy(per_sm, driver.num_sms())


class Packed:
    """The bytes of one parameter struct, at a fixed address.

    Args:
        layout: Of the struct.
        values: Field -> value for every field. A field of an inner struct is named
            ``"comm.epoch"``, or the inner struct is given as a mapping; an array takes a sequence
            of exactly its length.
        what: Whose arguments they are, for messages.

    Raises:
        ContractError: A field is missing or unknown, or a value does not fit its C type.
    """

    def __init__(self, layout: StructLayout, values: Mapping[str, object], what: str) -> None:
        self._what = what
        self._layout = layout
        self._words = (ctypes.c_uint64 * -(-layout.nbytes // 8))()
        self._bytes = memoryview(self._words).cast("B")
        flat = dict(_flat(values))
        missing = [name for name in layout.fields if name not in flat]
        if missing:
            raise ContractError(f"{what}: no value for {', '.join(missing)}")
        self.set(**flat)

    @property
    def address(self) -> int:
        """Where the struct lies in host memory."""
        return ctypes.addressof(self._words)

    def tobytes(self) -> bytes:
        """A copy of the struct."""
        return self._bytes[: self._layout.nbytes].tobytes()

    def slot(self, name: str) -> memoryview[Any]:
        """Return a writable view of one field's elements; assigning checks the C type's range."""
        field = self._field(name)
        part: Any = self._bytes[field.offset : field.offset + field.nbytes]
        view: memoryview[Any] = part.cast(field.letter)
        return view

    def set(self, **values: object) -> None:
        """Write some fields, with the checks of construction."""
        for name, value in _flat(values):
            field = self._field(name)
            slot = self.slot(name)
            for index, element in enumerate(self._elements(name, field, value)):
                slot[index] = element

    def _field(self, name: str) -> Field:
        try:
            return self._layout.fields[name]
        except KeyError:
            raise ContractError(
                f"{self._what}: there is no field {name!r}; there are "
                f"{', '.join(self._layout.fields)}"
            ) from None

    def _elements(self, name: str, field: Field, value: object) -> list[int | float]:
        if field.count is None:
            return [self._number(name, field, value)]
        elements = list(value) if isinstance(value, Sequence | memoryview) else None
        if elements is None or len(elements) != field.count:
            got = type(value).__name__ if elements is None else f"{len(elements)} values"
            raise ContractError(
                f"{self._what}: field {name!r} takes a sequence of {field.count} values of "
                f"{field.ctype}, got {got}"
            )
        return [self._number(f"{name}[{i}]", field, item) for i, item in enumerate(elements)]

    def _number(self, name: str, field: Field, value: object) -> int | float:
        wanted = f"{self._what}: field {name!r} takes {field.ctype}"
        if field.letter in "fd":
            if isinstance(value, int | float) or hasattr(value, "__float__"):
                return float(value)
            raise ContractError(f"{wanted}, got {type(value).__name__}")
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise ContractError(f"{wanted}, got {type(value).__name__}") from None
        bits = 8 * field.itemsize
        low = -(1 << bits - 1) if field.letter.islower() else 0
        if not low <= number < low + (1 << bits):
            raise ContractError(f"{wanted}, got {number}, which does not fit")
        return number


class Launch:
    """One kernel on one grid with its arguments packed.

    Args:
        loaded: The function, from ``jit.compile.load``.
        spec: Its spec, or its entry in the manifest of the PTX modules.
        constants: What it was compiled with.
        grid: Blocks. They wait for each other, so that all must be resident at once.
        values: A value for every field of the parameter struct, see ``Packed``.
        reserved_blocks: Blocks of other kernels that may be resident at the same time.
        driver: Driver calls; ``None`` for ``cuda.bindings``.

    Attributes:
        start: The launch as a bare callable, for code that launches often.

    Raises:
        ContractError: The values do not fit the spec.
        PlatformError: The grid cannot be resident at once; it is never made smaller.
    """

    def __init__(
        self,
        loaded: Loaded,
        spec: Launchable,
        constants: Mapping[str, int],
        *,
        grid: int,
        values: Mapping[str, object],
        reserved_blocks: int = 0,
        driver: Driver | None = None,
    ) -> None:
        used = CudaDriver() if driver is None else driver
        self.spec = spec
        self.grid = grid
        self.threads = spec.num_threads(constants)
        self.shared_bytes = spec.num_shared_bytes(constants)
        self.packed = Packed(spec.layout(constants), values, f"launch of {spec.name}")
        self._loaded = loaded
        self._check_resident(used, reserved_blocks)
        offsets = spec.param_offsets(constants)
        addresses = [self.packed.address + offset for offset in offsets]
        self._pointers = (ctypes.c_void_p * len(offsets))(*addresses)
        self.start = used.prepare(
            loaded.function,
            grid,
            self.threads,
            self.shared_bytes,
            ctypes.addressof(self._pointers),
        )
        self.slot = self.packed.slot
        self.set = self.packed.set

    def __call__(self, stream: int) -> None:
        """Launch on a stream; the struct's bytes are taken as they are now."""
        self.start(stream)

    def _check_resident(self, driver: Driver, reserved: int) -> None:
        if self.grid < 1:
            raise ContractError(f"launch of {self.spec.name}: grid must be >= 1, got {self.grid}")
        fits = occupancy(self._loaded, self.threads, self.shared_bytes, driver)
        free = fits.blocks - reserved
        if self.grid <= free:
            return
        taken = f", of which {reserved} are taken by kernels that may run beside it" * (
            reserved > 0
        )
        raise PlatformError(
            f"launch of {self.spec.name}: its {self.grid} blocks of {self.threads} threads and "
            f"{self.shared_bytes} bytes of shared memory wait for each other, and this GPU holds "
            f"{fits.blocks_per_sm} a SM on {fits.num_sms} SMs, {fits.blocks} at once{taken}; set "
            f"num_sms to at most {max(0, free)}"
        )


def _flat(values: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    """Fields of inner structs, given as mappings, under their dotted names."""
    flat: list[tuple[str, object]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat += _flat(value, f"{prefix}{name}.")
        else:
            flat.append((f"{prefix}{name}", value))
    return flat
