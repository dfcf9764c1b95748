"""The combine that fetches every copy of the expanded layout: two and three ranks, bit by bit."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from deepep_cupy.engines.calls import CombineCall
from deepep_cupy.engines.gpu.combine import combine_expanded
from deepep_cupy.engines.gpu.kernels import get_kernel
from deepep_cupy.engines.gpu.routing import GpuRouting
from deepep_cupy.protocol.headers import Kind
from deepep_cupy.reference import combine, dispatch
from engine_fakes import Array, Launch, Turn
from simulator.machine import Use, with_lines
from simulator.shapes import Shape
from simulator.world import Setting, World

BIRTH = 41
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Story:
    """One combine on all ranks of a dispatch that the reference has done.

    Args:
        seed: Of the data and the machine.
        ranks: R.
        dtype: Of the rows.
        hidden: H.
        topk: K.
        local: El.
        weighted: Rows are multiplied with weights.
        weights: Weights travel back.
        biases: How many.
        worst: Shapes of a dispatch that did not wait.
    """

    def __init__(
        self, seed, ranks, dtype, hidden, *, topk, local, weighted, weights, biases, worst
    ):
        rng = self.rng = np.random.default_rng(seed)
        tokens = [int(t) for t in rng.integers(0, 7, ranks)]
        tokens[seed % ranks] = 5
        experts = ranks * local
        index = [
            np.array([rng.permutation(experts)[:topk] for _ in range(t)], np.int64).reshape(t, topk)
            for t in tokens
        ]
        for one in index:
            one[rng.random(one.shape) < 0.3] = -1
        arrived = dispatch(
            [np.zeros((t, 1), np.uint8) for t in tokens],
            topk_idx=index,
            num_experts=experts,
            do_expand=True,
            expert_alignment=2,
            num_worst_tokens=[7 * ranks] * ranks if worst else None,
        )
        self.handles = [one.handle for one in arrived]
        self.dtype, self.hidden, self.topk = np.dtype(dtype), hidden, topk
        rows = [handle.num_rows for handle in self.handles]
        self.ys = [self.values((n, hidden)) for n in rows]
        self.biases = [[self.values((t, hidden)) for _ in range(biases)] for t in tokens]
        self.row_weights = [rng.standard_normal(n).astype(np.float32) for n in rows]
        self.weights = None
        if weights:
            self.weights = [rng.standard_normal(n).astype(np.float32) for n in rows]
        for one in self.weights or ():
            one[rng.random(one.shape) < 0.3] = -0.0
        self.weighted = weighted
        self.want = combine(
            self.ys,
            self.handles,
            topk_weights=self.weights,
            biases=self.biases,
            row_weights=self.row_weights if weighted else None,
        )
        setting = Setting(Shape(ranks), experts, byte_wise=hidden * self.dtype.itemsize % 4 != 0)
        self.world = World(seed, setting)

    def values(self, shape):
        if self.dtype.kind in "iu":
            return self.rng.integers(-100, 100, shape).astype(self.dtype)
        values = (self.rng.standard_normal(shape) * 100).astype(self.dtype)
        values[self.rng.random(shape) < 0.1] = -0.0
        return values

    def in_pool(self, rank, call, array):
        """Into a block that peers read; its offset."""
        world = self.world
        offset, device = world.take_slot(rank, 0), world.memory[rank].device
        raw = array.tobytes()
        raw += bytes(-len(raw) % 4)
        assert len(raw) <= 16 * 1024
        world.machine.mark(rank, call.serial, device, offset, 16 * 1024, Use.INPUT)
        if raw:
            world.machine.write(rank, call.serial, device, offset, raw)
        return offset

    def launch(self, rank, call, grid):
        """On one rank, by the engine's own code; what a later kernel reads."""
        world, handle, memory = self.world, self.handles[rank], self.world.memory[rank]
        local, tokens = memory.local.address, handle.num_tokens

        def array(data):
            return Array(local(world.array(rank, call, data)), data.shape, data.dtype, data)

        def launch(**fields):
            world.launch(rank, call, "combine_expanded", Kind.COMBINE, grid, fields)

        def get(name, wanted_grid, kind):
            assert (name, wanted_grid, kind) == ("combine_expanded", grid, Kind.COMBINE)
            return Launch(get_kernel(name), world.setting.shape.constants, launch)

        core = SimpleNamespace(
            kernels=SimpleNamespace(get=get),
            grid_plan=lambda num_sms: SimpleNamespace(combine=lambda tokens: grid),
        )
        addresses = SimpleNamespace(
            send_row=array(handle.send_row).data.ptr,
            birth=array(np.array([BIRTH], np.uint32)).data.ptr,
        )
        routing = GpuRouting(
            addresses,
            None,
            None,
            0,
            num_tokens=tokens,
            num_recv_tokens=len(handle.expanded_row),
            waited=True,
            expert_alignment=1,
        )
        routing.expand(array(handle.expanded_row), handle.num_rows)
        sizes = (tokens * self.hidden * self.dtype.itemsize, 4 * tokens * self.topk)
        out, out_weights = (world.output(rank, call, size) for size in sizes)
        combine_expanded(
            core,
            None,
            CombineCall(
                array(self.ys[rank]),
                routing,
                None if self.weights is None else array(self.weights[rank]),
                tuple(array(bias) for bias in self.biases[rank]),
                row_weights=array(self.row_weights[rank]) if self.weighted else None,
            ),
            routing.expanded_row,
            Turn(None, place=lambda array, label: self.in_pool(rank, call, array.host)),
            Array(local(out), (tokens, self.hidden), self.dtype),
            None if self.weights is None else Array(local(out_weights), (tokens, self.topk), "f4"),
        )
        wanted = [(out, self.want[rank].combined_x)]
        if self.weights is not None:
            wanted.append((out_weights, self.want[rank].combined_topk_weights))
        return [
            (world.read(rank, call, memory.local.region, at, want.nbytes), want)
            for at, want in wanted
            if want.nbytes
        ]

    def run(self, grids):
        """All ranks; nothing may be wrong."""
        call = self.world.begin_call("combine")
        reads = [self.launch(rank, call, grids[rank]) for rank in range(len(self.handles))]
        faults = self.world.machine.run()
        assert not faults, with_lines(faults[0].text)
        assert set(self.world.verdicts().values()) == {"ok"}
        for rank, of_rank in enumerate(reads):
            for read, want in of_rank:
                got = np.frombuffer(read(), want.dtype).reshape(want.shape)
                bad = np.argwhere(got.view(np.uint8) != want.view(np.uint8))
                assert not len(bad), f"rank {rank}: {len(bad)} bytes differ, first at {bad[0]}"


CASES = {
    "bfloat16": (BFLOAT16, 24, {"topk": 4, "local": 3, "weighted": True}),
    "bfloat16, odd": (BFLOAT16, 5, {"topk": 6, "local": 6, "weights": False}),
    "float16": (np.float16, 8, {"topk": 8, "local": 4, "biases": 2}),
    "float32": (np.float32, 300, {"topk": 3, "local": 2, "weighted": True, "biases": 1}),
    "float64": (np.float64, 6, {"topk": 5, "local": 8, "weighted": True, "worst": True}),
    "int8": (np.int8, 16, {"topk": 2, "local": 1}),
    "int32, odd": (np.int32, 3, {"topk": 12, "local": 12, "biases": 1}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("seed", "ranks"), [(0, 2), (1, 2), (2, 3), (3, 1)])
def test_exact_sums(name, seed, ranks):
    dtype, hidden, changes = CASES[name]
    settings = {"weighted": False, "weights": True, "biases": 0, "worst": False} | changes
    settings["topk"] = min(settings["topk"], ranks * settings["local"])
    grids = [1 + (seed + rank) % 3 for rank in range(ranks)]
    Story(seed, ranks, dtype, hidden, **settings).run(grids)
