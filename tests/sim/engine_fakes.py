"""Stand-ins for CuPy and the CUDA engine's parts, over the simulator's memory.

What ``engines/gpu`` does between the exchange and the caller's arrays then runs as on a GPU: its
own code chooses blocks, grids and fields, the kernels are the product's, in the simulator.
"""

from types import SimpleNamespace

import numpy as np

from deepep_cupy.engines.gpu.grid import GridPlan
from deepep_cupy.memory.pool import PoolExhaustedError


class Array:
    """As much of a CuPy array as the engine asks for."""

    def __init__(self, address, shape, dtype, host=None):
        self.host = host
        self.data = SimpleNamespace(ptr=address)
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.itemsize = self.dtype.itemsize
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.itemsize

    def __len__(self):
        return self.shape[0]


class Turn:
    """An operation whose memory is that of one simulated rank.

    Args:
        space: Number of bytes -> address of memory that kernels write.
        pool: Whether the pool has room.
        place: (array, label) -> offset where the peers find it.
    """

    def __init__(self, space, pool=True, place=None):
        self._space, self._pool, self.place = space, pool, place
        self.stream = SimpleNamespace(ptr=0)
        self.staged = []

    def empty(self, shape, dtype):
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return Array(self._space(size), shape, dtype)

    def alloc(self, *wanted):
        if not self._pool:
            raise PoolExhaustedError("no room")
        return [SimpleNamespace(nbytes=nbytes, label=label) for nbytes, label in wanted]

    def launch(self, launch, tag=None):
        launch()


class Launch:
    """Fields as the engine gives them; a call launches."""

    def __init__(self, spec, constants, launch):
        layout = spec.layout(constants)
        self._fields = [field for field in layout.fields.items() if field[0].startswith("d.")]
        self._launch = launch
        self._values = {}

    def operation(self, *values):
        given = list(values)
        for name, field in self._fields:
            count = 1 if field.count is None else field.count
            taken, given = given[:count], given[count:]
            assert len(taken) == count, f"{name} is missing"
            numbers = [int(value) for value in taken]
            self._values[name] = numbers[0] if field.count is None else numbers
        assert not given, f"{len(given)} values too many"

    def __call__(self, *where):
        self._launch(**{name.removeprefix("d."): value for name, value in self._values.items()})


def make_core(turn, local, num_local_experts=0, ranks_on_gpu=1):
    """A core whose local kernels are launched by ``local(name, grid)``."""

    def own(block):
        return turn._space(block.nbytes)

    return SimpleNamespace(
        arrays=SimpleNamespace(own=own, array=Array),
        grids=GridPlan(3, ranks_on_gpu, None),
        kernels=SimpleNamespace(local=local),
        spec=SimpleNamespace(num_local_experts=num_local_experts),
    )
