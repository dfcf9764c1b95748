"""What users pass to the host engine, as NumPy arrays: theirs, and those of other libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.engines.dlpack import OneCapsule, pose_as_integers
from deepep_cupy.errors import ContractError

__all__ = ["ArrayImporter"]

_DLPACK_CPU = (1, 3)
"""DLPack device types: memory of the host, page-locked memory."""


class ArrayImporter:
    """Takes arrays in memory of the host, without a copy where their library allows it.

    Args:
        rank: For messages.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(
        self, operation: str, argument: str, value: object, *, strided: bool = False
    ) -> NDArray[Any]:
        """See ``engines.protocol.Engine.import_array``.

        Args:
            operation: Method name, for messages.
            argument: Its argument.
            value: What the user passed.
            strided: Any strides will do.
        """
        array = (
            value if isinstance(value, np.ndarray) else self._foreign(operation, argument, value)
        )
        if array.dtype.hasobject:
            raise self._refused(
                operation, argument, f"an array of plain bytes, got dtype {array.dtype}"
            )
        if not strided and not array.flags.c_contiguous:
            raise self._refused(
                operation,
                argument,
                f"C-contiguous, got shape {array.shape} with strides {array.strides}; "
                f"numpy.ascontiguousarray() makes it so",
            )
        return array.view(np.ndarray)

    def _foreign(self, operation: str, argument: str, value: Any) -> NDArray[Any]:
        """An array of another library: by DLPack, else by ``__array__``."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        hint = "; cupy.asnumpy() makes one" if kind.startswith("cupy") else ""
        wanted = "a NumPy array, or one in memory of the host with DLPack or __array__"
        try:
            if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
                if int(value.__dlpack_device__()[0]) in _DLPACK_CPU:
                    return _take_dlpack(value)
                kind += " in memory of a GPU"
            elif hasattr(value, "__array__"):
                array = np.asarray(value).view()
                array.flags.writeable = False  # it may be a copy: what is written would be lost
                return array
        except Exception as error:
            raise self._refused(
                operation, argument, f"{wanted}, got {kind}, which cannot be taken: {error}"
            ) from error
        raise self._refused(
            operation,
            argument,
            f"{wanted}, because this Buffer runs on the host engine, got {kind}{hint}",
        )

    def _refused(self, operation: str, argument: str, complaint: str) -> ContractError:
        return ContractError(
            f"{operation}(): argument '{argument}' must be {complaint}, on rank {self._rank}."
        )


def _take_dlpack(value: Any) -> NDArray[Any]:
    """An array over the memory of ``value``; bfloat16 and FP8, which NumPy does not know, too."""
    try:
        capsule = value.__dlpack__(max_version=(1, 0))
    except TypeError:  # a producer from before the versions
        capsule = value.__dlpack__()
    dtype = pose_as_integers(capsule, bfloat16=True)
    handed: Any = OneCapsule(capsule, value.__dlpack_device__())
    given: NDArray[Any] = np.from_dlpack(handed)
    return given if dtype is None else given.view(dtype)
