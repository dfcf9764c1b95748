"""The engine's own code around local kernels, on simulated memory: cast, expanded layout, sums."""

from types import SimpleNamespace

import numpy as np
import pytest

from deepep_cupy.engines.calls import Quantization
from deepep_cupy.engines.gpu import combine as combining_expanded
from deepep_cupy.engines.gpu import expand as expanding
from deepep_cupy.engines.gpu import quantize as quantizing
from deepep_cupy.engines.gpu.kernels import get_kernel
from deepep_cupy.engines.gpu.routing import Received as Tokens
from deepep_cupy.protocol.headers import LayoutFlag
from deepep_cupy.reference import quantize
from deepep_cupy.reference.combine import sum_copies
from engine_fakes import Array, Launch, Turn, make_core
from flat_calls import combine_call, dispatch_call
from local_ranks import BFLOAT16, SHAPE, Rank, Received, same_bits
from simulator.machine import Use

BASE = 0x1000
"""Of the region: no offset is an address."""


class Engine:
    """The fakes over one rank's memory; scratch may be written twice, so that all memory may."""

    def __init__(self, seed, num_local_experts=0, pool=True, byte_wise=False):
        self.rank = Rank(seed, 3, byte_wise=byte_wise)
        self.turn = Turn(lambda nbytes: self.rank.space(nbytes, Use.SCRATCH), pool)
        self.launched = []
        self.runtime = make_core(self.turn, self.local, num_local_experts)

    def local(self, name, grid):
        assert 1 <= grid <= 3
        self.launched.append(name)
        return Launch(
            get_kernel(name),
            SHAPE.constants,
            lambda **fields: self.rank.launch(name, grid, **fields),
        )

    def put(self, array):
        return None if array is None else Array(self.rank.put(array), array.shape, array.dtype)

    def get(self, array, rows=None):
        return self.rank.get(array.data.ptr, array.shape, array.dtype, rows)


@pytest.mark.parametrize("how", [Quantization(), Quantization(round_scale=True, use_ue8m0=True)])
@pytest.mark.parametrize(("tokens", "hidden"), [(4, 640), (3, 77), (0, 128)])
def test_quantize(how, tokens, hidden):
    x = np.random.default_rng(hidden).standard_normal((tokens, hidden)).astype(BFLOAT16)
    engine = Engine(1, byte_wise=True)
    call = dispatch_call(engine.put(x), quantize=how)
    made = quantizing.quantize(engine.runtime, call, engine.turn)
    assert made.plan is call.plan
    codes, scales = quantize(x, round_scale=how.round_scale, use_ue8m0=how.use_ue8m0)
    assert (made.x.shape, made.x.dtype) == (codes.shape, codes.dtype)
    assert (made.scales.shape, made.scales.dtype) == (scales.shape, scales.dtype)
    got = engine.get(made.x), engine.get(made.scales)
    engine.rank.run()
    same_bits("codes", got[0](), codes)
    same_bits("scales", got[1](), scales)
    assert quantizing.quantize(engine.runtime, dispatch_call(x), engine.turn).x is x


class Handle(SimpleNamespace):
    """A routing of the engine, without its class."""

    def expand(self, expanded_row, num_expanded_rows):
        self.expanded_row, self.num_expanded_rows = expanded_row, num_expanded_rows


def tokens_of(engine, received, cached):
    """What the dispatch leaves, as the engine sees it."""
    plain, want = received.plain[0], received.expanded[0].handle
    rows, scales = plain.recv_x if isinstance(plain.recv_x, tuple) else (plain.recv_x, None)
    waited = bool(plain.num_recv_tokens_per_expert_list)
    birth = engine.rank.put(np.array([3], np.uint32))
    real = engine.rank.put(np.array([received.real], np.uint32))
    known = {
        "expanded_row": engine.put(want.expanded_row) if cached else None,
        "num_expanded_rows": want.num_expanded_tokens if cached else 0,
    }
    handle = Handle(
        num_recv_tokens=len(rows),
        expert_alignment=received.alignment,
        addresses=SimpleNamespace(
            birth=birth,
            num_real=0 if waited else real,
            expert_counts=engine.rank.put(want.num_unaligned_recv_tokens_per_expert),
            psum_expert_rows=engine.rank.put(want.psum_num_recv_tokens_per_expert),
        ),
        **known,
    )
    counts = want.num_unaligned_recv_tokens_per_expert
    return Tokens(
        call=dispatch_call(None, expand=True, zero_padding=received.zero),
        rows=engine.put(rows),
        scales=engine.put(scales),
        topk_idx=None if cached else engine.put(plain.recv_topk_idx),
        topk_weights=engine.put(plain.recv_topk_weights),
        routing=handle,
        counts=tuple(int(count) for count in counts) if waited else None,
    )


SIZES = {
    "waited": {"tokens": 20, "topk": 4, "local": 3, "hidden": 12, "alignment": 4, "zero": True},
    "worst": {"tokens": 6, "topk": 3, "local": 4, "hidden": 9, "worst": 25, "weights": False},
    "fp8": {"tokens": 7, "topk": 2, "local": 2, "hidden": 160, "scales": 2, "dtype": np.uint8},
    "nothing": {"tokens": 0, "topk": 3, "local": 2, "hidden": 4},
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("pool", [True, False])
def test_expand(name, cached, pool):
    received = Received(11, index=np.int64, **SIZES[name])
    want = received.expanded[0]
    engine = Engine(2, received.local, pool, byte_wise=True)
    got = expanding.expand(engine.runtime, tokens_of(engine, received, cached), engine.turn)
    rows, scales = want.recv_x if isinstance(want.recv_x, tuple) else (want.recv_x, None)
    assert got.routing.num_expanded_rows == len(rows)
    if len(rows):
        assert engine.launched[-1] == "expand_copy"
        assert len(engine.launched) == (1 if cached else 4)
    reads = [(engine.get(got.routing.expanded_row), want.handle.expanded_row, slice(None))]
    for array, wanted in (
        (got.rows, rows),
        (got.topk_weights, want.recv_topk_weights),
        (got.scales, scales),
    ):
        assert (array is None) == (wanted is None)
        if wanted is not None:
            assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
            reads.append((engine.get(array, want.defined), wanted, want.defined))
    engine.rank.run()
    for read, wanted, rows_said in reads:
        same_bits(name, read()[rows_said], wanted[rows_said])


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_a_rank_are_combined_as_rows(weighted):
    case = {"tokens": 6, "topk": 4, "local": 4, "index": np.int64}
    handle = Received(5, **case).expanded[0].handle
    rng = np.random.default_rng(0)
    y = rng.standard_normal((handle.num_rows, 24)).astype(BFLOAT16)
    factors = rng.standard_normal(handle.num_rows).astype(np.float32)
    want = sum_copies(y, handle.expanded_row, factors if weighted else None)

    engine = Engine(3)
    offsets = []

    def stage(nbytes, label):
        assert label.endswith("of combine()")
        offsets.append(engine.turn._space(nbytes) - BASE)
        return SimpleNamespace(offset=offsets[-1])

    engine.turn.stage = stage
    engine.runtime.memory = SimpleNamespace(region=SimpleNamespace(base=BASE))
    routing = SimpleNamespace(expanded_row=engine.put(handle.expanded_row))
    call = combine_call(
        engine.put(y),
        routing,
        engine.put(factors),
        (),
        reduce="per_rank",
        row_weights=engine.put(factors) if weighted else None,
    )
    seen = []
    combining_expanded.combine_expanded(
        engine.runtime,
        lambda *values: seen.append(values),
        call,
        routing.expanded_row,
        engine.turn,
        "out",
        "weights",
    )
    flags = LayoutFlag.EXPANDED | LayoutFlag.PER_RANK
    flags |= LayoutFlag.ROW_WEIGHTS if weighted else LayoutFlag(0)
    sums, carried = offsets
    topk = handle.expanded_row.shape[1]
    assert seen == [
        (call, engine.turn, "out", "weights", sums, BASE + sums, carried, topk, int(flags))
    ]
    real = (handle.expanded_row >= 0).any(axis=1)
    got = engine.rank.get(BASE + sums, want.shape, want.dtype, real)
    engine.rank.run()
    same_bits("sums", got()[real], want[real])
