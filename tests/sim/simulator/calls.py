"""Combine and barrier in a World: inputs from a seed, parameters from the plan, and the comparison
with the reference, bit by bit. Dispatch is in ``dispatches``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from deepep_cupy.engines.gpu.grid import access_bytes
from deepep_cupy.protocol.control_block import align
from deepep_cupy.protocol.headers import OFFSET_UNIT, Kind, Layout, Refusal, dtype_code
from deepep_cupy.reference import DispatchResult, combine
from simulator.machine import Use
from simulator.world import Call, World

Array = np.ndarray[Any, Any]
Rng = np.random.Generator


@dataclass
class Handle:
    """What a dispatch leaves for combine and cached calls, on all ranks.

    Attributes:
        results: The reference's.
        send_row: Per rank: offset in its local memory.
        birth: Per rank: offset of the word.
        serial: Of the dispatch.
        real_rows: Per rank: offset of the word with the number of rows received.
        waits: Whether the host waited for that number.
    """

    results: list[DispatchResult]
    send_row: list[int]
    birth: list[int]
    serial: int
    real_rows: list[int]
    waits: bool = True


@dataclass(frozen=True)
class Routing:
    """Where tokens go: ``topk_idx`` and weights, or a mask; one entry a rank."""

    topk_idx: list[Array] | None
    weights: list[Array] | None
    mask: list[Array] | None

    @property
    def num_topk(self) -> int:
        """K, 0 with a mask."""
        return 0 if self.topk_idx is None else self.topk_idx[0].shape[1]


@dataclass(frozen=True)
class Ways:
    """How a call is made, on all ranks or per rank.

    Attributes:
        bulk: Use the bulk copy kernels where the rows allow.
        grids: Blocks, per rank.
        present: Ranks that make the call.
        refusals: Rank -> refusal it sends instead.
        picks: Random numbers for the choice of blocks.
    """

    bulk: bool
    grids: Sequence[int]
    present: Sequence[int]
    refusals: dict[int, Refusal]
    picks: Rng

    def pick(self) -> int:
        """The next choice."""
        return int(self.picks.integers(1 << 30))


def random_routing(
    rng: Rng,
    world: World,
    tokens: list[int],
    use_mask: bool,
    topks: tuple[int, ...] | None = None,
) -> Routing:
    """Choices of all ranks' tokens, some columns and some whole tokens empty."""
    ranks, experts = world.num_ranks, world.setting.num_experts
    if use_mask:
        return Routing(None, None, [rng.random((t, ranks)) < 0.6 for t in tokens])
    topk = int(rng.integers(1, min(experts, 5) + 1))
    if rng.random() < 0.1:
        topk = min(experts, int(rng.integers(9, 21)))
    if topks is not None:
        topk = min(experts, topks[int(rng.integers(len(topks)))])
    dtype = np.int64 if rng.random() < 0.5 else np.int32
    index = []
    for count in tokens:
        rows = [rng.permutation(experts)[:topk] for _ in range(count)]
        chosen = np.array(rows, dtype).reshape(count, topk)
        chosen[rng.random((count, topk)) < rng.choice([0.0, 0.2, 0.9])] = -1
        index.append(chosen)
    weights = None
    if rng.random() < 0.7:
        weights = [rng.random((t, topk)).astype(np.float32) for t in tokens]
    return Routing(index, weights, None)


def random_rows(rng: Rng, tokens: int, row_bytes: int) -> Array:
    """Rows of random bytes."""
    return rng.integers(0, 256, (tokens, row_bytes), dtype=np.uint8)


def call_barrier(world: World, ways: Ways) -> Call:
    """A barrier; with refusals, of a dispatch that some ranks refuse."""
    call = world.begin_call("barrier")
    for rank in ways.present:
        refusal = ways.refusals.get(rank)
        world.launch(rank, call, "barrier", Kind.BARRIER, 1, refusal=refusal)
    return call


# ------------------------------------------------------------------------------- combine

COMBINED = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "int8": np.dtype(np.int8),
    "uint16": np.dtype(np.uint16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}


def call_combine(
    world: World, ways: Ways, rng: Rng, handle: Handle, dtype: np.dtype[Any], width: int
) -> Call:
    """A combine of fresh rows; afterwards their owner overwrites them at once."""
    call = world.begin_call("combine")
    topk = int(rng.integers(1, 5)) if rng.random() < 0.5 else 0
    num_biases = int(rng.integers(0, 3))
    sizes = [(result.handle.num_recv_tokens, result.handle.num_tokens) for result in handle.results]
    ys = [_values(rng, (rows, width), dtype) for rows, _ in sizes]
    weights = [rng.random((rows, topk)).astype(np.float32) for rows, _ in sizes] if topk else None
    biases = [[_values(rng, (t, width), dtype) for _ in range(num_biases)] for _, t in sizes]
    handles = [result.handle for result in handle.results]
    want = combine(ys, handles, topk_weights=weights, biases=biases)
    for rank in range(world.num_ranks):
        if rank not in ways.present:
            continue
        if rank in ways.refusals:
            world.launch(rank, call, "barrier", Kind.COMBINE, 1, refusal=ways.refusals[rank])
            continue
        given = None if weights is None else weights[rank]
        _combine_on_rank(world, ways, call, rank, ys[rank], given, biases[rank], handle, want[rank])
    return call


def _combine_on_rank(
    world: World,
    ways: Ways,
    call: Call,
    rank: int,
    y: Array,
    weights: Array | None,
    biases: list[Array],
    handle: Handle,
    want: Any,
) -> None:
    memory, machine = world.memory[rank], world.machine
    local, device = memory.local.address, memory.device
    tokens, width = handle.results[rank].handle.num_tokens, y.shape[1]
    row_bytes, topk = width * y.itemsize, 0 if weights is None else weights.shape[1]
    blocks = []

    def place(array: Array) -> int:
        offset = world.take_slot(rank, ways.pick())
        blocks.append(offset)
        machine.mark(rank, call.serial, device, offset, memory.slot_bytes, Use.INPUT)
        raw = array.tobytes()
        if raw:
            machine.write(rank, call.serial, device, offset, raw + bytes(-len(raw) % 4))
        return offset

    rows = place(y)
    weights_at = 0 if weights is None else place(weights)
    bias_at = [local(world.array(rank, call, bias)) for bias in biases]
    own = machine.address(rank, device, rows)
    if ways.pick() % 2:  # this rank's own rows need not lie in the pool
        own = local(world.array(rank, call, y))
    out = world.output(rank, call, tokens * row_bytes)
    out_weights = world.output(rank, call, tokens * topk * 4)
    access = access_bytes(row_bytes, (own, local(out), *bias_at), (y.itemsize,))
    fields = {
        "x": own,
        "out": local(out),
        "combined_weights": local(out_weights) if topk else 0,
        "bias": [*bias_at, *[0] * (2 - len(bias_at))],
        "send_row": local(handle.send_row[rank]),
        "birth": local(handle.birth[rank]),
        "num_tokens": tokens,
        "num_rows": len(y),
        "num_topk": topk,
        "has_weights": int(topk > 0),
        "row_bytes": row_bytes,
        "access_bytes": access,
        "dtype": dtype_code(y.dtype.name, y.itemsize),
        "rows_offset": rows // OFFSET_UNIT,
        "weights_offset": weights_at // OFFSET_UNIT,
        "layout": Layout.NONE,
    }
    bulk = ways.bulk and access == 16
    kernel = "combine_bulk" if bulk else "combine"
    world.launch(rank, call, kernel, Kind.COMBINE, ways.grids[rank], fields)

    # The contract: after a combine that ended well, its rows may be overwritten at once. (After one
    # that failed here others may still read them, and end well.)
    unless = (device, memory.control.poisoned)
    for offset, array in zip(blocks, (y, weights), strict=False):
        if array is not None and array.nbytes:
            garbage = bytes([0xEE]) * align(array.nbytes, 4)
            machine.write(rank, call.serial, device, offset, garbage, unless=unless)
    for offset in blocks:
        world.free_slot(rank, offset)
    reads = {"combined_x": world.read(rank, call, memory.local.region, out, tokens * row_bytes)}
    if topk:
        reads["combined_topk_weights"] = world.read(
            rank, call, memory.local.region, out_weights, tokens * topk * 4
        )

    def check() -> None:
        for name, get in reads.items():
            compare(f"combine {call.serial}, rank {rank}: {name}", get(), getattr(want, name))

    def poisoned() -> None:
        for name, get in reads.items():
            integers = name == "combined_x" and y.dtype.kind in "iu"
            check_poison(name, get(), 0 if integers else 0xFF, None)

    call.checks[rank] = check
    call.poisoned[rank] = poisoned
    call.remains[rank] = call.poisoned[rank]


# ------------------------------------------------------------------------------- comparing


def _values(rng: Rng, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
    """Numbers that add up with rounding, or integers that wrap."""
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-2, 3, shape)).astype(dtype)


def compare(what: str, got: bytes, want: Array) -> None:
    wanted = np.ascontiguousarray(want).tobytes()
    if got == wanted:
        return
    a, b = np.frombuffer(got, np.uint8), np.frombuffer(wanted, np.uint8)
    if len(a) != len(b):
        raise AssertionError(f"{what}: {len(a)} bytes, wanted {len(b)}")
    bad = np.flatnonzero(a != b)
    row_bytes = len(wanted) // max(1, len(want))
    rows = sorted({int(i) // row_bytes for i in bad})
    first = int(bad[0])
    seen, right = got[first : first + 8].hex(), wanted[first : first + 8].hex()
    raise AssertionError(
        f"{what}: {len(bad)} of {len(a)} bytes differ, in rows {rows[:10]} of {len(want)}; first "
        f"at byte {first}: got {seen}, wanted {right}"
    )


def equal(what: str, got: Sequence[int], want: Sequence[int]) -> None:
    if list(got) != list(want):
        raise AssertionError(f"{what}: got {list(map(hex, got))}, wanted {list(map(hex, want))}")


def check_poison(name: str, got: bytes, poison: int, late: Array | None) -> None:
    """All bytes are poison, or (``late``) what a late peer would have written there."""
    seen = np.frombuffer(got, np.uint8)
    bad = seen != poison
    if late is not None:
        rows = np.ascontiguousarray(late).view(np.uint8).reshape(-1)
        bad[: len(rows)] &= seen[: len(rows)] != rows[: len(seen)]
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        raise AssertionError(f"{name} is not poisoned: byte {first} of {len(seen)}")
