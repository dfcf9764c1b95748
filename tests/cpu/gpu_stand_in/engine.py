"""The engine's parts over the stand-ins, one set for each rank; ranks are threads."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

from deepep_cupy.engines.gpu.grid import GridPlan
from deepep_cupy.memory.cuda_ipc import PoolArrays
from deepep_cupy.memory.pool import Pool
from deepep_cupy.protocol.control_block import ControlLayout, ReportLayout
from deepep_cupy.protocol.sizes import BufferSpec
from gpu_stand_in import cupy_like
from gpu_stand_in import device as d
from gpu_stand_in.kernels import Kernels, World

__all__ = ["Rank", "run_ranks", "stand_in"]

POOL_BYTES = 4 << 20


class stand_in:  # noqa: N801
    """``with stand_in():`` cupy is the stand-in."""

    def __enter__(self):
        self.before = {name: sys.modules.get(name) for name in ("cupy", "cupy.cuda")}
        sys.modules["cupy"], sys.modules["cupy.cuda"] = cupy_like, cupy_like.cuda

    def __exit__(self, *error):
        for name, module in self.before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


class Region:
    """A rank's symmetric memory."""

    def __init__(self, nbytes):
        self._memory = np.zeros(nbytes + 512, np.uint8)
        self.base = self._memory.ctypes.data + -self._memory.ctypes.data % 512
        self.nbytes, self.allocation = nbytes, self

    def find(self, ptr, nbytes):
        offset = ptr - self.base
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else None


class Rendezvous:
    """Nobody gives up here."""

    board = None

    def watch(self, operation):
        pass


class Rank:
    """One rank's engine: ``runtime``, ``dispatcher``, ``combiner``; made in its own thread."""

    def __init__(self, world, spec):
        from deepep_cupy.engines.gpu import operation as order
        from deepep_cupy.engines.gpu.combine import Combiner
        from deepep_cupy.engines.gpu.dispatch import Dispatcher
        from deepep_cupy.engines.gpu.failures import FailureMonitor, Report
        from deepep_cupy.engines.gpu.runtime import Runtime

        rank = spec.rank
        d.set_device(d.Device(rank))
        order.DeviceOrder._orders.pop(rank, None)
        control, events = world.control, d.Events()
        region = Region(control.nbytes + POOL_BYTES)
        pool = Pool(POOL_BYTES, events, start=control.nbytes, who=f"rank {rank}")
        report = Report(world.report_layout)
        world.regions[rank], world.reports[rank] = region.base, report.words
        memory = SimpleNamespace(
            control=control,
            region=region,
            pool=pool,
            arrays=PoolArrays(region, pool, rank),
            events=events,
        )
        self.device = d.device()
        self.spec, self.events, self.kernels = spec, events, Kernels(world, rank)
        self.runtime = Runtime(
            spec=spec,
            device=rank,
            path="bulk",
            grids=GridPlan(132, 1, None),
            kernels=self.kernels,
            memory=memory,
            failures=FailureMonitor(report, Rendezvous(), pool, spec),
        )
        self.dispatcher, self.combiner = Dispatcher(self.runtime), Combiner(self.runtime)

    def dispatch(self, call):
        with self.runtime:
            return self.dispatcher.run(call)

    def combine(self, call):
        """Its kernel is over at once, and on GPUs that of the call before it."""
        with self.runtime as runtime:
            output = self.combiner.run(call)
            runtime.failures.raise_pending()
            return output


def run_ranks(num_ranks, work, *, num_experts=None, max_tokens=16, num_topk=8, row_bytes=4096):
    """Run ``work(rank)`` with a ``Rank`` in a thread for each rank; the results in order."""
    control = ControlLayout(num_ranks, num_experts or 0)
    world = World(num_ranks, None, control, ReportLayout(num_ranks, num_experts or 0))
    ready = threading.Barrier(num_ranks)

    def one(rank):
        spec = BufferSpec(
            num_ranks=num_ranks,
            rank=rank,
            num_max_tokens_per_rank=max_tokens,
            max_row_bytes=row_bytes,
            num_topk=num_topk,
            num_experts=num_experts,
            timeout_s=10,
        )
        made = Rank(world, spec)
        ready.wait(10)
        return work(made)

    with stand_in(), ThreadPoolExecutor(num_ranks) as pool:
        return [future.result(60) for future in [pool.submit(one, r) for r in range(num_ranks)]]
