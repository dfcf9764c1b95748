"""Arrays of other libraries, as CuPy arrays over the same memory, ordered after their producer.

==============================  ========================================================
given                           taken
==============================  ========================================================
``cupy.ndarray``                as it is
``__dlpack__`` (JAX, torch, …)  through DLPack: the producer's stream is waited for on the device
tensors of PyTorch              as they lie, where its stream is the current one
``__cuda_array_interface__``    likewise, from the ``stream`` it names
NumPy arrays, lists, …          refused
==============================  ========================================================

FP8 comes through DLPack too, although CuPy takes none: its bytes do, under their own dtype.
While a graph is being captured no stream is waited for: what is given must be ready on the
current stream then.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import ModuleType
from typing import Any

from deepep_cupy.engines.dlpack import OneCapsule, pose_as_integers
from deepep_cupy.engines.gpu.cupy_types import DeviceArray, DType, SupportsDLPack
from deepep_cupy.engines.gpu.torch_tensors import TensorReader
from deepep_cupy.errors import ContractError
from deepep_cupy.protocol.headers import dtype_code, dtype_label

__all__ = ["ArrayImporter", "StreamAddress", "address", "dtype_code_of", "take_dlpack"]

_DLPACK_CUDA = (2, 13)
"""DLPack device types: CUDA memory, managed memory."""
_LEGACY_STREAM, _PER_THREAD_STREAM = 1, 2
_CONTIGUOUS = "flags.c_contiguous"


def take_dlpack(value: SupportsDLPack, device: tuple[int, int]) -> DeviceArray:
    """A CuPy array over the memory of ``value``, ready on the current stream of the device.

    Args:
        value: The array.
        device: Its ``__dlpack_device__()``.
    """
    import cupy

    current = cupy.cuda.get_current_stream()
    capturing = cupy.cuda.runtime.streamIsCapturing(current.ptr)
    # 1 is how DLPack calls the legacy default stream, -1 asks for no synchronization.
    stream = -1 if capturing else current.ptr or 1
    try:
        capsule = value.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # a producer from before the versions
        capsule = value.__dlpack__(stream=stream)
    dtype = pose_as_integers(capsule, bfloat16=False)
    given = cupy.from_dlpack(OneCapsule(capsule, device))
    array: DeviceArray = given if dtype is None else given.view(dtype)
    return array


class ArrayImporter:
    """Takes arrays on one device.

    Args:
        device: CUDA ordinal in this process.
        rank: For messages.
    """

    def __init__(self, device: int, rank: int) -> None:
        import cupy

        self._cupy: ModuleType = cupy
        self._array: type[DeviceArray] = cupy.ndarray
        self._device = device
        self._rank = rank
        self._tensors = TensorReader(cupy, device)
        # CuPy makes an object of its flags for every question, which takes longer than the rest.
        contiguous = "_c_contiguous" if hasattr(cupy.ndarray, "_c_contiguous") else _CONTIGUOUS
        self._look: Callable[[object], tuple[Any, ...]] = attrgetter(
            "shape", "dtype", "data.device_id", contiguous, "data.ptr"
        )

    def __call__(
        self, operation: str, argument: str, value: object, *, strided: bool = False
    ) -> DeviceArray:
        """See ``engines.protocol.Engine.import_array``.

        Args:
            operation: Method name, for messages.
            argument: Its argument.
            value: What the user passed.
            strided: Any strides will do, of items of four bytes.
        """
        array: DeviceArray
        if isinstance(value, self._array):
            array = value
        else:
            array = self._foreign(operation, argument, value)
        if array.device.id != self._device:
            raise self._refused(
                operation,
                argument,
                f"on device {self._device}, the Buffer's, got an array on device {array.device.id}",
            )
        if array.size and array.data.ptr % array.dtype.alignment:
            raise self._refused(
                operation,
                argument,
                f"at an address that is a multiple of {array.dtype.alignment} bytes, as GPUs read "
                f"{array.dtype}, got address {array.data.ptr:#x} (a view into bytes?); .copy() "
                f"makes it so",
            )
        if strided:
            return self._with_strides(operation, argument, array)
        if not array.flags.c_contiguous:
            raise self._refused(
                operation,
                argument,
                f"C-contiguous, got shape {array.shape} with strides {array.strides}; "
                f"cupy.ascontiguousarray() makes it so",
            )
        return array

    def array_key(self, value: object, strided: bool) -> tuple[Any, ...] | None:
        """See ``engines.protocol.Engine.array_key``."""
        if type(value) is not self._array:
            return None
        seen = self._look(value)
        if seen[2] != self._device or not (_is_of_words(value) if strided else seen[3]):
            return None
        # Almost all arrays begin at multiples of 16: only others ask their dtype.
        if seen[4] & 15 and seen[4] % seen[1].alignment:
            return None
        return seen

    def _with_strides(self, operation: str, argument: str, array: DeviceArray) -> DeviceArray:
        """Kernels read whole words: strides count these."""
        if not _is_of_words(array):
            raise self._refused(
                operation,
                argument,
                f"of 4-byte items at strides of whole items, got {array.dtype} with strides "
                f"{array.strides}",
            )
        return array

    def _foreign(self, operation: str, argument: str, value: Any) -> DeviceArray:
        wanted = "a CuPy array or a GPU array with DLPack or __cuda_array_interface__"
        try:
            tensor = self._tensors.read(value)
            if tensor is not None:
                return tensor
            if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
                device = value.__dlpack_device__()
                if int(device[0]) not in _DLPACK_CUDA:
                    on_host = f"{_kind(value)} in host memory; cupy.asarray() copies it"
                    raise self._refused(operation, argument, f"{wanted}, got {on_host}")  # noqa: TRY301
                with self._cupy.cuda.Device(self._device):
                    return take_dlpack(value, device)
            if hasattr(value, "__cuda_array_interface__"):
                return self._from_interface(value)
        except ContractError:
            raise
        except Exception as error:
            raise self._refused(
                operation, argument, f"{wanted}, got {_kind(value)}, which cannot be taken: {error}"
            ) from error
        raise self._refused(
            operation,
            argument,
            f"{wanted}, because this Buffer runs on the cuda engine, got {_kind(value)}",
        )

    def _from_interface(self, value: Any) -> DeviceArray:
        """Like ``cupy.asarray``, but the host does not wait for the producer's stream."""
        cupy, described = self._cupy, value.__cuda_array_interface__
        stream = described.get("stream")
        current = cupy.cuda.get_current_stream()
        if stream is not None and not cupy.cuda.runtime.streamIsCapturing(current.ptr):
            producer = {
                _LEGACY_STREAM: cupy.cuda.Stream.null,
                _PER_THREAD_STREAM: cupy.cuda.Stream.ptds,
            }.get(stream)
            producer = producer or cupy.cuda.Stream.from_external(StreamAddress(stream))
            current.wait_event(producer.record())
        array: DeviceArray = cupy.asarray(_WithoutStream(value, {**described, "stream": None}))
        return array

    def _refused(self, operation: str, argument: str, complaint: str) -> ContractError:
        return ContractError(
            f"{operation}(): argument '{argument}' must be {complaint}, on rank {self._rank}."
        )


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _is_of_words(array: DeviceArray) -> bool:
    return array.itemsize == 4 and not any(stride % 4 for stride in array.strides)


class StreamAddress:
    """The address of a stream, as ``cupy.cuda.Stream.from_external`` takes one."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


class _WithoutStream:
    """An interface whose stream has been waited for; keeps the array alive."""

    def __init__(self, value: object, described: dict[str, object]) -> None:
        self.value = value
        self.__cuda_array_interface__ = described


def address(array: DeviceArray | None) -> int:
    """Device address of an array; 0 for None."""
    return 0 if array is None else array.data.ptr


def dtype_code_of(dtype: DType, scales: DType | None = None) -> int:
    """Code of a row dtype, and of that of its scales if there are any, for headers and kernels."""
    return dtype_code(dtype_label(dtype), dtype.itemsize, None if scales is None else scales.name)
