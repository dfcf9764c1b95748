"""The bench's arithmetic: patterns of choices, bytes, modes, rows, ceilings, floors."""

from __future__ import annotations

import ctypes
import itertools
import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from deepep_cupy.bench.ceilings import BoxLayout, spread
from deepep_cupy.bench.measure import Bytes, Measurement, bytes_of, count_ceilings, floor_of
from deepep_cupy.bench.modes import DEFAULTS, available, parse
from deepep_cupy.bench.nccl import Routes
from deepep_cupy.bench.routing import ROUTINGS, choose
from deepep_cupy.bench.rows import copies_of, fill, pattern, wrong_rows, wrong_sums
from deepep_cupy.bench.traffic import Traffic, choices_per_rank, row_bytes, rows_per_rank
from deepep_cupy.bench.workload import Shape
from deepep_cupy.engines.protocol import ALL_MODES
from deepep_cupy.reference.quant import num_groups

# ------------------------------------------------------------------------------------- choices


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("tokens", "topk", "experts"), [(300, 8, 64), (1, 1, 1), (0, 2, 4)])
def test_choices_are_experts_and_different(routing, tokens, topk, experts):
    chosen = choose(routing, tokens, topk, experts, np.random.default_rng(3))
    assert (chosen.shape, chosen.dtype) == ((tokens, topk), np.int64)
    assert ((chosen >= 0) & (chosen < experts)).all()
    assert all(len(set(row)) == topk for row in chosen.tolist())
    again = choose(routing, tokens, topk, experts, np.random.default_rng(3))
    assert (chosen == again).all()


def test_uniform_is_even_and_in_no_order():
    chosen = choose("uniform", 4000, 4, 16, np.random.default_rng(0))
    share = np.bincount(chosen.ravel(), minlength=16) / 4000
    assert np.abs(share - 4 / 16).max() < 0.05
    assert 0.4 < (chosen[:, 0] < chosen[:, 1]).mean() < 0.6


def test_zipf_falls_as_its_law_says():
    one = choose("zipf", 20000, 1, 8, np.random.default_rng(0), exponent=1.5)
    law = (1.0 + np.arange(8)) ** -1.5
    share = np.bincount(one.ravel(), minlength=8) / 20000
    assert np.abs(share - law / law.sum()).max() < 0.02
    many = choose("zipf", 2000, 8, 64, np.random.default_rng(0))
    counts = np.bincount(many.ravel(), minlength=64)
    assert (np.diff(counts.reshape(8, 8).sum(axis=1)) < 0).all()


def test_k_hot_stays_among_the_hot():
    assert set(choose("k-hot", 50, 4, 64, np.random.default_rng(0)).ravel()) == {0, 1, 2, 3}
    six = choose("k-hot", 500, 4, 64, np.random.default_rng(0), num_hot=6)
    assert set(six.ravel()) == set(range(6))
    for hot in (3, 65):
        with pytest.raises(ValueError, match="takes 4 to 64 experts"):
            choose("k-hot", 5, 4, 64, np.random.default_rng(0), num_hot=hot)
    with pytest.raises(ValueError, match="one of uniform, zipf, k-hot"):
        choose("cold", 5, 4, 64, np.random.default_rng(0))


# --------------------------------------------------------------------------------------- bytes


def test_a_token_counts_once_a_rank_and_a_choice_always():
    topk_idx = np.array([[0, 1, 7], [2, 3, -1], [6, 5, 4]])
    assert rows_per_rank(topk_idx, 8, 4) == [1, 1, 1, 2]
    assert choices_per_rank(topk_idx, 8, 4) == [2, 2, 2, 2]


def test_bytes_of_a_row():
    assert row_bytes(7168, 2) == 14336
    assert row_bytes(7168, 2, fp8=True) == 7168 + 4 * 56
    assert row_bytes(130, 4, fp8=True) == 130 + 4 * num_groups(130)
    assert Shape(dtype="float8_e4m3fn").row_bytes() == 7168
    assert Shape().row_bytes(parse("dispatch", "cached+cast")) == 7392


def test_the_published_sizes():
    """T=4096, top-8 of 256 on two ranks: 58.7 MB over the link, 117 MB received."""
    rng = np.random.default_rng(0)
    rows = [rows_per_rank(choose("uniform", 4096, 8, 256, rng), 256, 2) for _ in range(2)]
    traffic = Traffic.of(rows, ["a", "b"])
    assert traffic.wire_rows * 14336 / 1e6 == pytest.approx(58.7, rel=0.01)
    assert traffic.logical_rows * 14336 / 1e6 == pytest.approx(117, rel=0.01)


def test_the_busiest_link_and_rank():
    traffic = Traffic.of([[1, 2, 3], [10, 0, 4], [20, 5, 0]], ["a", "b", "c"])
    assert traffic.wire_rows == 30  # into a
    assert traffic.reversed.wire_rows == 30  # out of a
    assert traffic.logical_rows == 31
    assert traffic.reversed.rows == ((1, 10, 20), (2, 0, 5), (3, 4, 0))
    shared = Traffic.of(traffic.rows, ["a", "a", "b"])
    assert shared.wire_rows == 25  # out of b: 20 + 5; into b: 3 + 4
    assert shared.over_links().rows == ((0, 0, 3), (0, 0, 4), (20, 5, 0))
    assert Traffic.of(traffic.rows, ["a"] * 3).wire_rows == 0


# --------------------------------------------------------------------------------------- modes


def test_names_of_modes():
    mode = parse("dispatch", "no_wait+expand+fp8")
    assert (mode.name, mode.needs) == ("no_wait+fp8+expand", {"no_wait", "scales", "expand"})
    assert mode.one_byte
    assert mode.expanded
    assert mode.capturable
    assert not parse("dispatch", "uncached").capturable
    assert parse("combine", "pool+per_rank").needs == {"expand"}
    for operation, names in DEFAULTS.items():
        assert [parse(operation, name).name for name in names] == list(names)
        assert set().union(*(parse(operation, name).needs for name in names)) <= ALL_MODES


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("dispatch", "pool"),
        ("dispatch", "cached+fp9"),
        ("dispatch", "cached+fp8+cast"),
        ("combine", "pool+expand+per_rank"),
        ("roundtrip", "cached+fp8"),
        ("dispatch", ""),
    ],
)
def test_wrong_names_of_modes(operation, name):
    with pytest.raises(ValueError, match="got"):
        parse(operation, name)


def test_modes_join_when_the_engine_has_them():
    modes = [parse("dispatch", name) for name in DEFAULTS["dispatch"]]
    taken, left = available(modes, frozenset(), "bfloat16")
    assert [mode.name for mode in taken] == ["uncached", "cached"]
    assert "no mode quantize" in left["cached+cast"]
    taken, left = available(modes, ALL_MODES, "bfloat16")
    assert (len(taken), left) == (len(modes), {})
    _, left = available(modes, ALL_MODES, "float64")
    assert list(left) == ["cached+cast"]
    taken, _ = available([parse("combine", "pool")], ALL_MODES, "float8_e4m3fn")
    assert taken == []


# ---------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "uint8", "int32"])
def test_rows_and_sums_are_judged(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = np.empty((9, 64), np.uint8).view(dtype)
    fill(np, x, 2, 7)
    ranks, tokens = np.full(9, 2, np.uint32), np.arange(9)
    assert wrong_rows(np, x, ranks, tokens, 7) == 0
    assert wrong_rows(np, x[::-1].copy(), ranks, tokens, 7, at=8 - tokens) == 0
    assert wrong_rows(np, x, ranks, tokens, 8) == 9
    copies = np.array([0, 1, 2, 3, 1, 0, 2, 1, 3])
    wide = np.float64 if dtype == np.float64 else np.float32 if dtype.kind != "i" else dtype
    if dtype.kind == "u":
        wide = dtype
    sums = sum((x.astype(wide) * (copies > n)[:, None] for n in range(3)), np.zeros_like(x, wide))
    sums = sums.astype(dtype)
    assert wrong_sums(np, sums, 2, 7, copies) == 0
    bias = np.empty_like(x)
    fill(np, bias, 2, 10)
    begun = bias.astype(wide)
    for n in range(3):
        begun = np.where((copies > n)[:, None], begun + x.astype(wide), begun)
    begun = begun.astype(dtype)
    assert wrong_sums(np, begun, 2, 7, copies, 10) == 0
    assert wrong_sums(np, begun, 2, 7, copies) > 5
    sums.view(np.uint8)[4, 5] ^= 1
    assert wrong_sums(np, sums, 2, 7, copies) == 1


def test_patterns_are_normal_numbers():
    for dtype in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64):
        values = pattern(np, np.zeros(5, np.uint32), np.arange(5), 64, 1).view(dtype)
        values = np.abs(values.astype(np.float64))
        assert (values > 2.0**-20).all()
        assert (values < 4).all()


# ------------------------------------------------------------------------------------ ceilings


@pytest.mark.parametrize("rows", [(0, 5, 0), (3, 4), (1, 1, 1, 1), (100, 1, 50), (4096, 4096), ()])
def test_a_stride_meets_every_row_once(rows):
    total, stride = sum(rows), spread(rows)
    assert stride >= 1
    assert math.gcd(stride, max(total, 1)) == 1
    order = [number * stride % total for number in range(total)]
    assert sorted(order) == list(range(total))


def test_segments_take_turns_in_proportion():
    rows = (600, 300, 100)
    stride, total = spread(rows), sum(rows)
    order = np.array([number * stride % total for number in range(total)])
    segment = np.searchsorted(np.cumsum(rows), order, side="right")
    for begin in range(0, total, 50):
        share = np.bincount(segment[begin : begin + 50], minlength=3) / 50
        assert np.abs(share - np.array(rows) / total).max() < 0.06


def run_kernel(values):
    """What the kernel does with its parameters."""
    rows, size = values["rows"], values["row_bytes"]
    assert values["num_rows"] == sum(rows)
    for segment, count in enumerate(rows):
        if count:
            source, target = values["source"][segment], values["target"][segment]
            ctypes.memmove(target, source, count * size)


@pytest.mark.parametrize("way", ["push", "pull"])
def test_boxes_of_all_ranks(way):
    """Every segment of every outbox arrives in its place of an inbox."""
    traffic = Traffic.of([[0, 2, 3], [1, 0, 0], [4, 5, 0]], "abc")
    layout, size = BoxLayout(traffic, 16), 16
    ranks = range(3)
    outboxes = [np.zeros(max(1, sum(layout.sent(rank))) * size, np.uint8) for rank in ranks]
    inboxes = [np.zeros(max(1, sum(layout.received(rank))) * size, np.uint8) for rank in ranks]
    for source, destination in itertools.product(ranks, ranks):
        begin = layout.out_offset(source, destination)
        end = begin + traffic.rows[source][destination] * size
        outboxes[source][begin:end] = 16 * source + destination + 1
    addresses = [[box.ctypes.data for box in boxes] for boxes in (outboxes, inboxes)]
    for rank in ranks:
        if way == "push":
            run_kernel(layout.push(rank, addresses[0][rank], addresses[1]))
        else:
            run_kernel(layout.pull(rank, addresses[0], addresses[1][rank]))
    for rank in ranks:
        want = [
            np.full(traffic.rows[source][rank] * size, 16 * source + rank + 1, np.uint8)
            for source in ranks
        ]
        assert (inboxes[rank][: sum(map(len, want))] == np.concatenate(want)).all()


# -------------------------------------------------------------------------------------- floors


def load(rows, choices, gpus, **shape):
    shape = Shape(hidden=64, dtype="float32", **shape)
    return SimpleNamespace(
        traffic=Traffic.of(rows, gpus),
        choices=Traffic.of(choices, gpus),
        bench=SimpleNamespace(shape=shape),
    )


TWO = load([[4, 3], [2, 5]], [[8, 6], [4, 10]], "ab")


@pytest.mark.parametrize(
    ("operation", "name", "want"),
    [
        ("dispatch", "cached", {"there": Bytes(3 * 256, 8 * 256, 0)}),
        ("dispatch", "cached+fp8", {"there": Bytes(3 * 68, 8 * 68, 0)}),
        ("dispatch", "no_wait+expand", {"there": Bytes(3 * 256, 16 * 256, 16 * 256)}),
        ("combine", "pool", {"back": Bytes(3 * 256, 7 * 256, 0)}),
        ("combine", "pool+expand", {"back": Bytes(6 * 256, 14 * 256, 0)}),
        ("combine", "pool+per_rank", {"back": Bytes(3 * 256, 7 * 256, 12 * 256)}),
    ],
)
def test_bytes_of_calls(operation, name, want):
    """``per_rank``: the rank that holds most reads 16 copies and writes 8 sums."""
    assert bytes_of(TWO, parse(operation, name)) == want


def test_a_round_trip_goes_both_ways():
    moved = bytes_of(TWO, parse("roundtrip", "cached"))
    assert moved == {"there": Bytes(768, 2048, 0), "back": Bytes(768, 1792, 0)}
    rates = {("there", "push", 256): 2.0, ("there", "local", 256): 1.0}
    rates |= {("back", "pull", 256): 4.0, ("back", "local", 256): 1.0}
    assert floor_of(moved, rates, 256) == 768 / 2 + 768 / 4


def test_one_gpu_has_no_link():
    alone = load([[7]], [[20]], "a")
    moved = bytes_of(alone, parse("dispatch", "cached"))
    assert moved == {"there": Bytes(0, 7 * 256, 7 * 256)}
    assert floor_of(moved, {("there", "local", 256): 7.0}, 256) == 256
    assert floor_of(moved, {}, 256) is None


def test_the_larger_bound_counts():
    moved = {"there": Bytes(1000, 0, 600)}
    rates = {("there", "push", 1): 10.0, ("there", "local", 1): 2.0}
    assert floor_of(moved, rates, 1) == 300
    rates["there", "local", 1] = 60.0
    assert floor_of(moved, rates, 1) == 100
    assert floor_of(moved, {("there", "local", 1): 2.0}, 1) is None
    rates["there", "local, all SMs", 1] = 3.0
    assert floor_of(moved, rates, 1, expanded=True) == 200


def test_figures_of_a_measurement():
    row = Measurement(
        what="cached", kind="call", operation="dispatch", num_sms=24, num_tokens=4096,
        us=200.0, wire_bytes=60_000_000, logical_bytes=120_000_000, floor_us=170.0,
    )  # fmt: skip
    assert (row.wire_gb_s, row.logical_gb_s, row.ratio) == (300.0, 600.0, 0.85)
    assert row.as_dict()["ratio"] == 0.85
    modes = [parse("dispatch", name) for name in ("cached", "cached+fp8")]
    assert count_ceilings(modes) == 6
    assert count_ceilings([parse("roundtrip", "cached")]) == 6
    assert count_ceilings([*modes, parse("dispatch", "cached+expand")]) == 7


# ---------------------------------------------------------------------------------------- NCCL


def test_routes_of_a_baseline():
    """Two ranks exchange packed rows by hand; every row is where a dispatch puts it."""
    send_rows = [np.array([[0, -1], [1, 0], [-1, 1]]), np.array([[2, 2], [-1, 3], [3, -1]])]
    traffic = Traffic.of([[2, 2], [2, 2]], "ab")
    routes = [Routes(send_row, traffic, rank) for rank, send_row in enumerate(send_rows)]
    xs = [np.array([10, 11, 12]), np.array([20, 21, 22])]
    packed = [x[route.pack] for x, route in zip(xs, routes, strict=True)]
    received = [np.zeros(4, int), np.zeros(4, int)]
    for rank, route in enumerate(routes):
        begin, end = route.receive[rank : rank + 2]
        received[rank][begin:end] = xs[rank][route.own]
        other = 1 - rank
        begin, end = routes[other].receive[rank : rank + 2]
        received[other][begin:end] = packed[rank][slice(*route.send[other : other + 2])]
    assert received[0].tolist() == [10, 11, 20, 22]
    assert received[1].tolist() == [11, 12, 20, 21]
    returned = [np.zeros_like(each) for each in packed]
    for rank, route in enumerate(routes):
        other = 1 - rank
        begin, end = routes[other].send[rank : rank + 2]
        returned[other][begin:end] = received[rank][slice(*route.receive[other : other + 2])]
    for rank, route in enumerate(routes):
        sums = [
            sum(
                (received[rank] if source == rank else returned[rank])[row]
                for source, row in enumerate(line)
                if row >= 0
            )
            for line in route.back
        ]
        copies = copies_of(SimpleNamespace(send_row=send_rows[rank]))
        assert sums == (xs[rank] * copies).tolist()
