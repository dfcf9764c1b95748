"""The parts that checks of arguments are made of: shapes, dtypes, numbers, and how to refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from deepep_cupy.api.events import EventOverlap
from deepep_cupy.api.forms import CombineForm, DispatchForm, Glance, Memo
from deepep_cupy.api.handle import DispatchHandle, Signature
from deepep_cupy.api.tuning import Config
from deepep_cupy.engines.base import ALL_MODES, HERE, Streams
from deepep_cupy.errors import ContractError
from deepep_cupy.plan.headers import ARGUMENTS, Layout, Refusal, RefusalCode
from deepep_cupy.plan.spec import BufferSpec

__all__ = ["Checks", "Intake", "is_int"]

Intake = Callable[[str, str, object], Any]


def is_int(value: object) -> bool:
    """Whether it is a whole number, of Python or of NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class Checks:
    """Checks of one argument each, for one Buffer.

    Args:
        spec: Sizes of the Buffer.
        buffer: Serial number of the Buffer, for handles.
        intake: ``Engine.intake``.
        modes: ``Engine.modes``.
        intake_scales: ``ModalEngine.intake_scales``.
        glance: ``Engine.glance``; without, every call is checked anew.
    """

    def __init__(
        self,
        spec: BufferSpec,
        buffer: int,
        intake: Intake,
        modes: frozenset[str] = ALL_MODES,
        intake_scales: Intake | None = None,
        glance: Glance | None = None,
    ) -> None:
        self._spec = spec
        self._buffer = buffer
        self._intake = intake
        self._modes = modes
        self._intake_scales = intake_scales or intake
        self._glance = glance
        self._dispatches: Memo[DispatchForm] = Memo()
        self._combines: Memo[CombineForm] = Memo()

    def rows(self, operation: str, value: object, wire_itemsize: int | None = None) -> Any:
        """``[rows, H]`` of a length that the Buffer was made for.

        Args:
            operation: Method name, for messages.
            value: What the user passed.
            wire_itemsize: Bytes of an element as it travels, where that is not its own.
        """
        if isinstance(value, tuple | list):
            self.refuse(
                operation,
                "x",
                f"must be one array [rows, hidden], got a {type(value).__name__} of {len(value)}",
            )
        x = self.take(operation, "x", value)
        self.expect(operation, "x", x, {"rows": None, "hidden": None}, None)
        itemsize = x.dtype.itemsize if wire_itemsize is None else wire_itemsize
        row_bytes, most = x.shape[1] * itemsize, self._spec.max_row_bytes
        if not 1 <= row_bytes <= most:
            self.refuse(
                operation,
                "x",
                f"must have rows of 1 to {most} bytes (hidden × itemsize of the Buffer's "
                f"constructor), got {row_bytes} (shape {tuple(x.shape)}, {x.dtype})",
            )
        return x

    def handle(self, operation: str, value: object) -> DispatchHandle:
        """A handle of this Buffer."""
        if not isinstance(value, DispatchHandle):
            self.refuse(
                operation,
                "handle",
                f"must be a handle that dispatch() returned, got {type(value).__name__}",
            )
        if value.signature.buffer != self._buffer:
            self.refuse(operation, "handle", "must be of this Buffer, got one of another Buffer")
        return value

    def weights(
        self,
        operation: str,
        argument: str,
        value: object,
        shape: dict[str, int],
        signature: Signature,
    ) -> Any:
        """float32 weights of that shape, where there are choices to weigh."""
        if signature.layout == Layout.MASK:
            self.refuse(
                operation,
                argument,
                "must not be given where the routing came from is_token_in_rank: there are no "
                "choices to weigh",
            )
        weights = self.take(operation, argument, value)
        self.expect(operation, argument, weights, shape, (np.dtype(np.float32),))
        return weights

    def streams(
        self,
        operation: str,
        previous_event: object,
        async_finish: object,
        allocate_on_comm_stream: object,
    ) -> Streams:
        """Where the operation runs, as DeepEP says it."""
        background = self.flag(operation, "async_finish", async_finish)
        allocate = self.flag(operation, "allocate_on_comm_stream", allocate_on_comm_stream)
        if previous_event is None and not background and not allocate:
            return HERE
        self.need(operation, "async_finish" if background else "previous_event", "events")
        if previous_event is not None and not isinstance(previous_event, EventOverlap):
            self.refuse(
                operation,
                "previous_event",
                f"must be an EventOverlap, as capture() and other calls return it, got "
                f"{type(previous_event).__name__}",
            )
        if allocate and (previous_event is None or not background):
            self.refuse(
                operation,
                "allocate_on_comm_stream",
                "must come with previous_event and async_finish=True",
            )
        event = None if previous_event is None else previous_event.event
        return Streams(event, background, allocate)

    def num_sms(self, operation: str, config: object) -> int | None:
        """Blocks that a ``Config`` asks for."""
        if config is None:
            return None
        if not isinstance(config, Config):
            self.refuse(operation, "config", f"must be a Config, got {type(config).__name__}")
        return config.num_sms

    def flag(self, operation: str, argument: str, value: object) -> bool:
        """True or False, and nothing that only looks so."""
        if isinstance(value, bool | np.bool_):
            return bool(value)
        return self.refuse(operation, argument, f"must be True or False, got {value!r}")

    def number(self, operation: str, argument: str, value: object, low: int, high: int) -> int:
        """A whole number in these bounds."""
        if isinstance(value, int | np.integer) and is_int(value) and low <= value <= high:
            return int(value)
        return self.refuse(
            operation, argument, f"must be a whole number from {low} to {high}, got {value!r}"
        )

    def need(self, operation: str, argument: str, mode: str) -> None:
        """Refuse what the engine of this Buffer cannot do."""
        if mode not in self._modes:
            self.refuse(
                operation,
                argument,
                f"is not possible on this Buffer's engine, which has no mode '{mode}'; "
                f"engine='host' has all",
            )

    def expect(
        self,
        operation: str,
        argument: str,
        array: Any,
        shape: dict[str, Any],
        dtypes: tuple[np.dtype[Any], ...] | None,
    ) -> None:
        """Compare shape (None: any length) and dtype (None: any) with what is wanted."""
        got = tuple(array.shape)
        sizes = tuple(shape.values())
        fits = len(got) == len(sizes) and all(
            want in (None, have) for want, have in zip(sizes, got, strict=True)
        )
        if fits and (dtypes is None or np.dtype(array.dtype) in dtypes):
            return
        names = ", ".join(shape)
        numbers = ", ".join("any" if size is None else str(size) for size in sizes)
        wanted = f"shape [{names}] = [{numbers}]"
        if dtypes is not None:
            wanted += f" and dtype {' or '.join(str(dtype) for dtype in dtypes)}"
        self.refuse(operation, argument, f"must have {wanted}, got shape {got}, {array.dtype}")

    def writable(self, operation: str, argument: str, array: Any) -> None:
        """An array that may be written into; CuPy's always may."""
        if not getattr(array.flags, "writeable", True):
            self.refuse(operation, argument, "must be writable, got a read-only array")

    def take(self, operation: str, argument: str, value: object, *, strided: bool = False) -> Any:
        """The engine's array; whatever it complains about is refused on every rank."""
        try:
            intake = self._intake_scales if strided else self._intake
            return intake(operation, argument, value)
        except ContractError as error:
            if error.refusal is None:
                error.refusal = Refusal(RefusalCode.ARGUMENT, ARGUMENTS.index(argument))
            raise

    def refuse(self, operation: str, argument: str, complaint: str) -> NoReturn:
        """Raise the error that makes every rank raise."""
        subject = f"argument '{argument}' " if argument else ""
        number = ARGUMENTS.index(argument) if argument in ARGUMENTS else 0
        raise ContractError(
            f"{operation}(): {subject}{complaint}, on rank {self._spec.rank}.",
            Refusal(RefusalCode.ARGUMENT, number),
        )
