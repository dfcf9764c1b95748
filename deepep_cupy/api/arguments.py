"""Checks of one argument each: flags, numbers, arrays, handles, streams.

A check that fails raises ``ContractError`` with a refusal, which the Buffer sends to the other
ranks in this rank's place, so that all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias

import numpy as np

from deepep_cupy.api import advice
from deepep_cupy.api.config import Config
from deepep_cupy.api.events import EventOverlap
from deepep_cupy.api.handle import DispatchHandle
from deepep_cupy.api.values import is_int, misfit
from deepep_cupy.engines.calls import (
    HERE,
    CombineOptions,
    DispatchOptions,
    Signature,
    Streams,
)
from deepep_cupy.errors import ContractError, shown
from deepep_cupy.protocol.headers import ARGUMENTS, MAX_TAG, Layout, Refusal, RefusalCode
from deepep_cupy.protocol.sizes import BufferSpec
from deepep_cupy.reference.combine import ADDABLE

__all__ = ["ArgumentChecker", "ImportArray", "Shape"]

ImportArray: TypeAlias = Callable[[str, str, object], Any]
Shape: TypeAlias = Mapping[str, int | None]
"""Names of the axes, for messages, and their lengths; None: any."""
_Dtypes: TypeAlias = tuple[np.dtype[Any], ...] | None
"""Those that are right; None: any."""

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_FLOAT32 = (np.dtype(np.float32),)


class ArgumentChecker:
    """Checks arguments of one Buffer's calls, one at a time.

    Args:
        spec: Sizes of the Buffer.
        buffer: Serial number of the Buffer, for handles.
        import_array: ``Engine.import_array``.
        modes: ``Engine.modes``.
        import_scales: ``Engine.import_scales``.
    """

    def __init__(
        self,
        spec: BufferSpec,
        buffer: int,
        import_array: ImportArray,
        modes: frozenset[str],
        import_scales: ImportArray,
    ) -> None:
        self._spec = spec
        self._buffer = buffer
        self._import_array = import_array
        self._modes = modes
        self._import_scales = import_scales

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
        x = self.array(operation, "x", value, {"rows": None, "hidden": None}, None)
        self.row_length(operation, x, x.dtype.itemsize if wire_itemsize is None else wire_itemsize)
        return x

    def row_length(self, operation: str, x: Any, itemsize: int) -> None:
        """Rows, the last axis, of a length that the Buffer was made for."""
        row_bytes = x.shape[-1] * itemsize
        if not 1 <= row_bytes <= self._spec.max_row_bytes:
            self.refuse(operation, "x", advice.of_row_bytes(operation, x, row_bytes, self._spec))

    def addable(self, operation: str, x: Any) -> np.dtype[Any]:
        """The dtype of rows that are to be added."""
        dtype: np.dtype[Any] = np.dtype(x.dtype)
        if not (dtype.isnative and dtype.name in ADDABLE):
            why = " (FP8 rows cannot be added exactly: combine a wider type)"
            self.refuse(
                operation,
                "x",
                f"must have a dtype that can be added ({', '.join(ADDABLE)}), got {dtype}"
                f"{why if dtype.name in _FP8 else ''}",
            )
        return dtype

    def handle(self, operation: str, value: object) -> DispatchHandle:
        """A handle of this Buffer."""
        if not isinstance(value, DispatchHandle):
            self.refuse(
                operation,
                "handle",
                f"must be a handle that dispatch() returned, got {type(value).__name__}"
                + advice.of_handle(operation, value),
            )
        if value.signature.buffer != self._buffer:
            self.refuse(operation, "handle", "must be of this Buffer, got one of another Buffer")
        return value

    def weights(
        self, operation: str, argument: str, value: object, shape: Shape, signature: Signature
    ) -> Any:
        """float32 weights of that shape, where there are choices to weigh."""
        if signature.layout == Layout.MASK:
            self.refuse(
                operation,
                argument,
                "must not be given where the routing came from is_token_in_rank: there are no "
                "choices to weigh",
            )
        return self.array(operation, argument, value, shape, _FLOAT32)

    def streams(
        self, operation: str, previous_event: object, async_finish: object, allocate: object
    ) -> Streams:
        """Where the operation runs, from DeepEP's three arguments."""
        background = self.flag(operation, "async_finish", async_finish)
        allocate = self.flag(operation, "allocate_on_comm_stream", allocate)
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

    def streams_of_plan(
        self, operation: str, event: object, options: DispatchOptions | CombineOptions
    ) -> Streams:
        """Where alike calls run. The event to begin after is each call's own, and not kept."""
        allocate = options.allocate_on_comm_stream
        found = self.streams(operation, event, options.async_finish, allocate)
        return found if event is None else replace(found, previous_event=None)

    def num_sms(self, operation: str, config: object) -> int | None:
        """Blocks that a ``Config`` asks for."""
        if config is None:
            return None
        if not isinstance(config, Config):
            self.refuse(operation, "config", f"must be a Config, got {type(config).__name__}")
        return config.num_sms

    def flag(self, operation: str, argument: str, value: object) -> bool:
        """True or False; 0 and 1 are refused."""
        if isinstance(value, bool | np.bool_):
            return bool(value)
        return self.refuse(operation, argument, f"must be True or False, got {shown(value)}")

    def one_of(self, operation: str, argument: str, value: object, known: tuple[Any, ...]) -> Any:
        """One of these names."""
        for each in known:
            if isinstance(value, str) and value == each:
                return each
        names = " or ".join(repr(each) for each in known)
        return self.refuse(operation, argument, f"must be {names}, got {shown(value)}")

    def number(self, operation: str, argument: str, value: object, low: int, high: int) -> int:
        """A whole number in these bounds."""
        if is_int(value) and low <= value <= high:
            return int(value)
        return self.refuse(
            operation, argument, f"must be a whole number from {low} to {high}, got {shown(value)}"
        )

    def tag(self, operation: str, value: object) -> int | None:
        """The number that the caller gave a call, or None."""
        return None if value is None else self.number(operation, "tag", value, 0, MAX_TAG)

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
        self, operation: str, argument: str, array: Any, shape: Shape, dtypes: _Dtypes
    ) -> None:
        """Compare shape and dtype with what is wanted."""
        complaint = misfit(array, shape, dtypes)
        if complaint is not None:
            self.refuse(operation, argument, complaint)

    def array(
        self, operation: str, argument: str, value: object, shape: Shape, dtypes: _Dtypes
    ) -> Any:
        """The engine's array, if its shape and dtype are right."""
        array = self.take(operation, argument, value)
        self.expect(operation, argument, array, shape, dtypes)
        return array

    def writable(self, operation: str, argument: str, array: Any) -> None:
        """An array that may be written into; CuPy's always may."""
        if not getattr(array.flags, "writeable", True):
            self.refuse(operation, argument, "must be writable, got a read-only array")

    def take(self, operation: str, argument: str, value: object, *, strided: bool = False) -> Any:
        """The engine's array. Where the engine raises, its error makes every rank raise."""
        try:
            import_array = self._import_scales if strided else self._import_array
            return import_array(operation, argument, value)
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
