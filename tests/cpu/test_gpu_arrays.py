"""What the importer of the GPU engine takes, on a module that stands where CuPy is imported."""

import contextlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from deepep_cupy.errors import ContractError

BASE = 0x7F0000000000


class DeviceArray:
    """What the importer looks at."""

    def __init__(self, address, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.size, self.itemsize = int(np.prod(shape)), self.dtype.itemsize
        steps = [int(np.prod(shape[axis + 1 :])) * self.itemsize for axis in range(len(shape))]
        self.strides, self._c_contiguous = tuple(steps), True
        self.flags = SimpleNamespace(c_contiguous=True)
        self.data = SimpleNamespace(ptr=address, device_id=0)
        self.device = SimpleNamespace(id=0)


@pytest.fixture
def importer(monkeypatch):
    from deepep_cupy.engines.gpu.arrays import ArrayImporter

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=DeviceArray))
    return ArrayImporter(0, 1)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    ("argument", "dtype"),
    [
        ("topk_idx", np.int64),
        ("topk_idx", np.int32),
        ("topk_weights", np.float32),
        ("scales", np.uint32),
        ("cumulative_local_expert_recv_stats", np.int32),
        ("bias", np.float16),
        ("out", np.float64),
    ],
)
def test_addresses_are_multiples_of_the_item(importer, argument, dtype, strided):
    if strided and np.dtype(dtype).itemsize != 4:
        return
    item = np.dtype(dtype).itemsize
    for off in range(1, 17):
        array = DeviceArray(BASE + off, (4, 2), dtype)
        if off % item == 0:
            assert importer("dispatch", argument, array, strided=strided) is array
            assert importer.array_key(array, strided)[:2] == ((4, 2), dtype)
            continue
        # Neither in the first call nor in a later one of a known form.
        assert importer.array_key(array, strided) is None
        with pytest.raises(ContractError, match=rf"'{argument}' must be at an address .* rank 1"):
            importer("dispatch", argument, array, strided=strided)


def test_bytes_and_nothing_may_lie_anywhere(importer):
    for array in (
        DeviceArray(BASE + 1, (4, 3), np.uint8),
        DeviceArray(BASE + 3, (4, 3), "V5"),
        DeviceArray(BASE + 1, (0, 2), np.int64),
    ):
        assert importer("dispatch", "x", array) is array


class Tensor:
    """What the importer asks a tensor of PyTorch."""

    def __init__(self, shape=(4, 2), dtype="float32", **changes):
        self.shape, self.dtype, self.layout, self.is_cuda = shape, f"torch.{dtype}", "strided", True
        self.requires_grad, self.negative, self.contiguous, self.at = False, False, True, 0
        self.nbytes = int(np.prod(shape)) * 4
        vars(self).update(changes)

    def get_device(self):
        return self.at

    def is_neg(self):
        return self.negative

    def is_contiguous(self):
        return self.contiguous

    def data_ptr(self):
        return BASE

    def __dlpack_device__(self):
        return (2, self.at)

    def __dlpack__(self, **options):
        raise BufferError("by way of DLPack")


def test_tensors_of_pytorch_are_looked_at_directly(monkeypatch):
    from deepep_cupy.engines.gpu.arrays import ArrayImporter

    owners, streams = [], {"torch": 7, "cupy": 7}

    def memory(address, nbytes, owner, device):
        owners.append((nbytes, owner, device))
        return address

    class Array(DeviceArray):
        def __init__(self, shape, dtype, pointer):
            super().__init__(pointer, shape, dtype)

    cuda = SimpleNamespace(
        UnownedMemory=memory,
        MemoryPointer=lambda address, offset: address + offset,
        get_current_stream=lambda: SimpleNamespace(ptr=streams["cupy"]),
        runtime=SimpleNamespace(streamIsCapturing=lambda stream: False),
        Device=lambda number: contextlib.nullcontext(),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Array, cuda=cuda))
    names = {name: f"torch.{name}" for name in ("float32", "bfloat16", "int64")}
    core = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: streams["torch"])
    torch = SimpleNamespace(Tensor=Tensor, strided="strided", _C=core, **names)
    monkeypatch.setitem(sys.modules, "torch", torch)
    importer = ArrayImporter(0, 1)
    for name in names:
        tensor = Tensor(dtype=name)
        array = importer("dispatch", "x", tensor)
        assert (array.shape, array.dtype.name, array.data.ptr) == ((4, 2), name, BASE)
        assert owners.pop() == (32, tensor, 0)
    for other in ({"requires_grad": True}, {"negative": True}, {"contiguous": False}, {"at": 1},
                  {"layout": "sparse"}, {"dtype": "complex64"}, {"nbytes": 0}):  # fmt: skip
        with pytest.raises(ContractError, match="by way of DLPack"):
            importer("dispatch", "x", Tensor(**other))
    streams["torch"] = 8
    with pytest.raises(ContractError, match="by way of DLPack"):
        importer("dispatch", "x", Tensor())
    assert not owners
