"""Dispatches whose sizes leave the stories' usual ones: grids with blocks that have no tokens, many
tokens for few warps, more experts than are counted at once, every K, bad choices of every kind."""

import numpy as np
import pytest

from deepep_cupy.engines.host.engine import check_experts
from deepep_cupy.protocol.control_block import RECORD_HEAD, header_words
from deepep_cupy.protocol.headers import WORDS
from simulator import calls
from simulator.calls import Routing, Ways
from simulator.dispatches import call_dispatch
from simulator.scenario import Focus
from simulator.shapes import Shape, build_all
from simulator.world import OK, REFUSED, Setting, World
from test_kernels import check

ONE_WARP = (Shape(1, 32), Shape(2, 32))
TWO_WARPS = (Shape(2, 64, "nc"), Shape(3, 64))
ANY_RANKS = tuple(Shape(ranks, 32) for ranks in range(1, 9))
ROWS = (16, 48)
STORIES = {
    "many tokens for few warps": Focus(
        shapes=ONE_WARP,
        calls=("dispatch", "cached", "dispatch", "combine"),
        blocks=(1, 2),
        tokens=20,
        most_tokens=48,
    ),
    "last blocks without tokens": Focus(
        shapes=TWO_WARPS,
        calls=("dispatch", "mask", "dispatch", "cached"),
        blocks=(5, 7),
        tokens=5,
        most_tokens=16,
    ),
    "fewer tokens than blocks, or none": Focus(
        shapes=TWO_WARPS, calls=("dispatch", "mask", "cached"), blocks=(1, 4, 8), empty=0.4
    ),
    "more experts than are counted at once": Focus(
        shapes=TWO_WARPS,
        calls=("dispatch", "dispatch"),
        blocks=(1, 3, 5),
        most_tokens=12,
        experts=(85, 86, 128, 129, 300),
        topk=(1, 3, 5, 9, 17, 31, 32),
    ),
    "every K": Focus(
        shapes=(Shape(2, 32), Shape(3, 64)),
        calls=("dispatch", "dispatch"),
        most_tokens=24,
        experts=(16, 33),
        topk=tuple(range(1, 33)),
    ),
    "masks of every number of ranks": Focus(
        shapes=ANY_RANKS, calls=("mask", "mask", "cached"), blocks=(1, 2, 4), most_tokens=12
    ),
    "rows in two pieces": Focus(
        shapes=TWO_WARPS,
        calls=("dispatch", "dispatch", "cached"),
        bulk=True,
        blocks=(1, 2, 4),
        row_bytes=(272, 384),
        tokens=10,
        most_tokens=32,
    ),
}
QUICK = [name for name, focus in STORIES.items() if focus.shapes == TWO_WARPS]
"""Stories whose kernels other tests compile, too."""
TROUBLES = ("skew", "abort", "freeze", "refuse", "bad_expert", "differ")
FEW = ("freeze", "refuse", "differ")
"""By default: a rank that stops, an argument refused on one rank, calls that differ."""
AMONG_RANKS = ("freeze", "differ")
"""Troubles that need another rank: who would find out that the only one has stopped?"""


def _with(focus: Focus, trouble: str) -> Focus:
    rows, shapes = focus.row_bytes or ROWS, focus.shapes
    if trouble in AMONG_RANKS:
        shapes = tuple(shape for shape in shapes if shape.num_ranks > 1)
    return Focus(**{**vars(focus), "trouble": trouble, "row_bytes": rows, "shapes": shapes})


@pytest.mark.parametrize(
    "story", [pytest.param(s, marks=[] if s in QUICK else pytest.mark.slow) for s in STORIES]
)
def test_sizes(story):
    check(range(6), _with(STORIES[story], ""))


@pytest.mark.parametrize(
    "trouble", [pytest.param(t, marks=[] if t in FEW else pytest.mark.slow) for t in TROUBLES]
)
def test_trouble_in_larger_grids(trouble):
    focus = Focus(
        shapes=TWO_WARPS,
        calls=("dispatch", "cached", "dispatch", "combine"),
        blocks=(2, 5),
        tokens=10,
        most_tokens=40,
    )
    check(range(4), _with(focus, trouble))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("story", STORIES)
def test_sizes_under_many_seeds(story):
    check(range(6, 56), _with(STORIES[story], ""))
    for trouble in TROUBLES:
        check(range(6), _with(STORIES[story], trouble))


# ---------------------------------------------------------------------------- bad choices

_OUTSIDE = {
    np.int32: (-2, 2**31 - 1, -(2**31)),
    np.int64: (-2, 2**31, 2**32, 2**32 + 1, 2**32 - 1, -(2**32), 2**63 - 1, -(2**63)),
}


def _spoil(rng, index, num_experts):
    """Name an expert twice, or one that is none, or leave a token without any."""
    tokens, topk = index.shape
    token, column = int(rng.integers(tokens)), int(rng.integers(topk))
    kind = int(rng.integers(3))
    if kind == 0:
        index[token, column] = index[token, int(rng.integers(topk))]
    elif kind == 1:
        index[token, column] = rng.choice((num_experts, *_OUTSIDE[index.dtype.type]))
    else:
        index[token] = -1


def _choices(rng, num_ranks, num_experts):
    dtype = np.int64 if rng.random() < 0.6 else np.int32
    topk = min(num_experts, int(rng.integers(1, 33)))
    found = []
    for _ in range(num_ranks):
        tokens = int(rng.integers(1, 30))
        rows = [rng.permutation(num_experts)[:topk] for _ in range(tokens)]
        index = np.array(rows, dtype)
        for _ in range(int(rng.integers(3))):
            _spoil(rng, index, num_experts)
        found.append(index)
    return found


def _refusals_heard(world, rank):
    """Refusal and value of each rank, as the record on ``rank`` shows them."""
    words = world.report_words(rank)
    begin, width = (
        world.memory[rank].report_layout.records + RECORD_HEAD,
        header_words(world.num_ranks),
    )
    code, value = WORDS.index("refusal"), WORDS.index("refusal_value")
    heads = [begin + source * width for source in range(world.num_ranks)]
    return [(words[head + code], words[head + value]) for head in heads]


@pytest.mark.parametrize(
    "shape",
    [
        *TWO_WARPS,
        pytest.param(Shape(1, 32), marks=pytest.mark.slow),
        pytest.param(Shape(8, 32), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_refusals_are_those_of_the_plan(shape):
    """Every rank hears the same token and reason that ``check_experts`` finds."""
    build_all([shape])
    ranks = shape.num_ranks
    for seed in range(12):
        rng = np.random.default_rng([seed, ranks])
        experts = ranks * int(rng.choice((1, 4, 12, 33, 150)[: 3 if ranks == 8 else 5]))
        index = _choices(rng, ranks, experts)
        found = [check_experts(choices, experts) for choices in index]
        told = [(0, 0) if each is None else (int(each.code), each.value) for each in found]
        world = World(seed, Setting(shape, experts, max_tokens=32), 6)
        grids = [int(rng.integers(1, 7)) for _ in range(ranks)]
        ways = Ways(bool(rng.integers(2)), grids, range(ranks), {}, rng)
        rows = [calls.random_rows(rng, len(choices), 16) for choices in index]
        call, _ = call_dispatch(world, ways, rows, Routing(index, None, None))
        faults = world.machine.run()
        assert not faults, f"seed {seed}: {faults[0].text}"
        want = OK if found == [None] * ranks else REFUSED
        for rank in range(ranks):
            assert world.verdicts()[rank, 1] == want, f"seed {seed}, rank {rank}"
            if want == OK:
                call.checks[rank]()
            else:
                assert _refusals_heard(world, rank) == told, f"seed {seed}, rank {rank}"
