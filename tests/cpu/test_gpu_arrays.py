"""What the importer of the GPU engine takes, on a module that stands where CuPy is imported."""

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
