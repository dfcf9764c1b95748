"""Handlers of XLA's foreign function interface, written in Python with ctypes.

XLA calls a handler with one argument, a *call frame*: the addresses of operands and results, the
attributes of the call, and a table of functions that a handler may call back. The layout of both is
``xla/ffi/api/c_api.h``, which JAX ships (``jax.ffi.include_dir()``); a test compares every offset
here with that header. Layouts only grow at their ends within a major version, so that sizes that
are large enough are enough; a handler refuses others when it is registered.
"""

from __future__ import annotations

import ctypes
import sys
import traceback
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from deepep_cupy.errors import PlatformError

__all__ = [
    "LAYOUT",
    "RECORDABLE",
    "ErrorCode",
    "Frame",
    "Handler",
    "Work",
    "make_handler",
    "pointer_of",
]

_WORD = 8
LAYOUT = {
    "XLA_FFI_CallFrame.extension_start": 1,
    "XLA_FFI_CallFrame.api": 2,
    "XLA_FFI_CallFrame.ctx": 3,
    "XLA_FFI_CallFrame.args.size": 7,
    "XLA_FFI_CallFrame.args.args": 9,
    "XLA_FFI_CallFrame.rets.size": 12,
    "XLA_FFI_CallFrame.rets.rets": 14,
    "XLA_FFI_CallFrame.attrs.size": 17,
    "XLA_FFI_CallFrame.attrs.attrs": 20,
    "XLA_FFI_Api.api_version.major_version": 4,
    "XLA_FFI_Api.XLA_FFI_Error_Create": 6,
    "XLA_FFI_Api.XLA_FFI_Stream_Get": 10,
    "XLA_FFI_Buffer.data": 3,
    "XLA_FFI_ByteSpan.ptr": 0,
    "XLA_FFI_ByteSpan.len": 1,
}
"""Member of a struct of the header → where it begins, in words of eight bytes."""

_at = LAYOUT.__getitem__
_EXTENSION, _API, _CONTEXT = (
    _at("XLA_FFI_CallFrame.extension_start"),
    _at("XLA_FFI_CallFrame.api"),
    _at("XLA_FFI_CallFrame.ctx"),
)
_NUM_ARGS, _ARGS = _at("XLA_FFI_CallFrame.args.size"), _at("XLA_FFI_CallFrame.args.args")
_NUM_RETS, _RETS = _at("XLA_FFI_CallFrame.rets.size"), _at("XLA_FFI_CallFrame.rets.rets")
_NUM_ATTRS, _ATTRS = _at("XLA_FFI_CallFrame.attrs.size"), _at("XLA_FFI_CallFrame.attrs.attrs")
_VERSION = _at("XLA_FFI_Api.api_version.major_version")
_ERROR_CREATE, _STREAM_GET = (
    _at("XLA_FFI_Api.XLA_FFI_Error_Create"),
    _at("XLA_FFI_Api.XLA_FFI_Stream_Get"),
)
_DATA = _at("XLA_FFI_Buffer.data")
_FRAME_WORDS = _ATTRS + 1
_API_WORDS = _STREAM_GET + 1
_METADATA_EXTENSION = 1
RECORDABLE = 1
"""``XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE``: XLA may record the handler's work into a
command buffer and replay it without calling the handler."""
_MAJOR = 0
"""The major version whose layouts these are. It has been 0 since JAX has an FFI."""


class ErrorCode:
    """What XLA calls the kinds of errors (``XLA_FFI_Error_Code``)."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13


class _ErrorArguments(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("message", c_char_p),
        ("errc", c_int),
    )


class _StreamArguments(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("ctx", c_void_p),
        ("stream", c_void_p),
    )


class _Extension(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("type", c_int), ("next", c_void_p))


class _Version(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("major_version", c_int),
        ("minor_version", c_int),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("api_version", _Version), ("traits", c_uint32))


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


Handler = ctypes.CFUNCTYPE(c_void_p, c_void_p)
"""The type of a handler for C: an error or null, from a call frame."""
_Function = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_word = c_uint64.from_address


def _words(address: int, number: int) -> Any:
    return (c_uint64 * number).from_address(address)


class Frame:
    """One call of a handler. Good until the handler returns.

    Args:
        address: Of the call frame.
    """

    __slots__ = ("_frame",)

    def __init__(self, address: int) -> None:
        self._frame = _words(address, _FRAME_WORDS)

    def operands(self) -> list[int]:
        """Addresses of the operands' bytes."""
        return self._data(_NUM_ARGS, _ARGS)

    def results(self) -> list[int]:
        """Addresses of the results' bytes."""
        return self._data(_NUM_RETS, _RETS)

    def _data(self, number_at: int, at: int) -> list[int]:
        number = self._frame[number_at]
        if not number:
            return []
        buffers = _words(self._frame[at], number)
        return [_word(buffer + _WORD * _DATA).value for buffer in buffers]

    def text(self) -> bytes:
        """The call's only attribute, a string."""
        span = _words(_word(self._frame[_ATTRS]).value, 2)
        return ctypes.string_at(span[0], span[1])

    def stream(self) -> int:
        """The ``CUstream`` XLA works on; on GPUs alone."""
        given = _StreamArguments(ctypes.sizeof(_StreamArguments), None, self._frame[_CONTEXT], None)
        error = self._function(_STREAM_GET)(ctypes.addressof(given))
        if error:
            raise PlatformError("XLA names no stream for a call of deepep_cupy; is it on a GPU?")
        return given.stream or 0

    def error(self, message: str, code: int) -> int:
        """A new error, which XLA frees."""
        text = message.encode(errors="replace")
        given = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, text, code)
        return int(self._function(_ERROR_CREATE)(ctypes.addressof(given)) or 0)

    def _function(self, number: int) -> Any:
        return _Function(_word(self._frame[_API] + _WORD * number).value)


Work = Callable[[Frame], None]
"""What a handler does; what it raises becomes the error of the execution."""


def make_handler(work: Work, code_of: Callable[[BaseException], int], traits: int = 0) -> Any:
    """A C function for ``jax.ffi.register_ffi_target``; it must live as long as the process.

    Args:
        work: Called for every execution.
        code_of: The ``ErrorCode`` of what ``work`` raised.
        traits: ``XLA_FFI_Handler_Traits``.
    """

    def call(address: int) -> int:
        frame = Frame(address)
        try:
            extension = _word(address + _WORD * _EXTENSION).value
            if extension and _Extension.from_address(extension).type == _METADATA_EXTENSION:
                _answer_metadata(address, extension, traits)
                return 0
            work(frame)
        except BaseException as error:  # noqa: BLE001 - nothing may pass through XLA's frames
            try:
                return frame.error(f"{type(error).__name__}: {error}", code_of(error))
            except BaseException:  # noqa: BLE001
                traceback.print_exc(file=sys.stderr)
                return frame.error("an error of deepep_cupy has no text", ErrorCode.INTERNAL)
        return 0

    return Handler(call)


def _answer_metadata(frame: int, extension: int, traits: int) -> None:
    """Tell XLA, which asks before the first call, which version this handler was made for."""
    words = _words(frame, _FRAME_WORDS)
    version = _word(words[_API] + _WORD * _VERSION).value
    major, minor = version & 0xFFFFFFFF, version >> 32
    if major != _MAJOR or words[0] < _WORD * _FRAME_WORDS:
        raise PlatformError(
            f"this JAX speaks version {major}.{minor} of XLA's FFI, deepep_cupy {_MAJOR}.x; "
            f"use a JAX of a version that the page on JAX names."
        )
    if _word(words[_API]).value < _WORD * _API_WORDS:
        raise PlatformError("this JAX is too old for deepep_cupy: its FFI has no streams.")
    metadata = _MetadataExtension.from_address(extension).metadata.contents
    metadata.api_version.major_version = major
    metadata.api_version.minor_version = minor
    metadata.traits = traits


def pointer_of(handler: Any) -> int:
    """The address of a handler's code."""
    return int(ctypes.cast(handler, c_void_p).value or 0)
