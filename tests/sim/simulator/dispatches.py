"""Dispatch in a World, in every mode its kernels have: inputs, parameters, comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from deepep_cupy.engines.gpu.grid import access_bytes
from deepep_cupy.protocol.control_block import align
from deepep_cupy.protocol.headers import OFFSET_UNIT, Kind, Layout, LayoutFlag, dtype_code
from deepep_cupy.reference import DispatchResult, dispatch
from simulator.calls import Array, Handle, Rng, Routing, Ways, check_poison, compare, equal
from simulator.casts import Cast
from simulator.machine import Use
from simulator.world import Call, World


@dataclass(frozen=True)
class Mode:
    """What a dispatch does beside moving rows.

    Attributes:
        worst: Per rank: rows it has room for, while its host does not wait; None: it waits.
        scales: Per rank ``[T, S]``, or None.
        by_columns: The scales lie column by column at their source.
        alignment: Counts per expert are written, rounded up to this; 0: they are not.
        expanded: The header says so, and sums of counts are those of that layout.
        stats: Counts are added to statistics; with ``alignment``.
        cast: The rows that are sent, and ``scales``, are cast from others.
    """

    worst: list[int] | None = None
    scales: list[Array] | None = None
    by_columns: bool = False
    alignment: int = 0
    expanded: bool = False
    stats: bool = False
    cast: Cast | None = None

    def __str__(self) -> str:
        parts = ["" if self.worst is None else f"no wait {self.worst}", *self._flags()]
        return ", ".join(part for part in parts if part)

    def _flags(self) -> list[str]:
        said = [] if self.scales is None else [f"scales {self.scales[0].dtype}"]
        said += [] if self.cast is None else [str(self.cast)]
        said += [f"counts by {self.alignment}"] * (self.alignment > 0)
        return said + ["expanded"] * self.expanded + ["stats"] * self.stats


PLAIN = Mode()


def random_mode(rng: Rng, xs: list[Array], routing: Routing, most: int, cached: bool) -> Mode:
    """Some mode, half of the time none. ``most``: rows a rank may receive."""
    if rng.random() < 0.5:
        return PLAIN
    scales = worst = None
    if rng.random() < 0.5:
        dtype = np.float32 if rng.random() < 0.5 else np.int32
        scales = []
        for x in xs:
            groups = -(-x.shape[1] // 128)
            columns = groups if dtype == np.float32 else -(-groups // 4)
            words = rng.integers(0, 1 << 32, (len(x), columns), np.uint32)
            scales.append(words.view(dtype))
    choices = routing.topk_idx is not None
    if cached:
        return Mode(scales=scales, by_columns=rng.random() < 0.5)
    if rng.random() < 0.6:
        worst = [int(rng.integers(most // 2, most + 1)) for _ in xs]
    alignment = int(rng.choice([0, 1, 4])) if choices else 0
    expanded = choices and alignment > 0 and rng.random() < 0.4
    stats = alignment > 0 and rng.random() < 0.5
    return Mode(worst, scales, rng.random() < 0.5, alignment, bool(expanded), bool(stats))


def rows_received(world: World, routing: Routing) -> list[int]:
    """Rows each rank will receive."""
    ranks, per_rank = world.num_ranks, world.setting.num_experts // world.num_ranks
    total = np.zeros(ranks, int)
    for rank in range(ranks):
        if routing.mask is not None:
            total += routing.mask[rank].sum(axis=0)
        elif routing.topk_idx is not None:
            owner = np.where(routing.topk_idx[rank] >= 0, routing.topk_idx[rank] // per_rank, -1)
            total += [(owner == r).any(axis=1).sum() for r in range(ranks)]
    return [int(rows) for rows in total]


def call_dispatch(
    world: World,
    ways: Ways,
    xs: list[Array],
    routing: Routing,
    handle: Handle | None = None,
    mode: Mode = PLAIN,
) -> tuple[Call, Handle | None]:
    """A dispatch, new or (with ``handle``) cached. Bad choices are refused by the kernel."""
    call = world.begin_call("dispatch" if handle is None else "cached dispatch")
    results = _expected(world, xs, routing, handle, mode)
    nowhere = [0] * world.num_ranks
    made = Handle(
        results or [], [*nowhere], [*nowhere], call.serial, [*nowhere], mode.worst is None
    )
    for rank in range(world.num_ranks):
        if rank not in ways.present:
            continue
        if rank in ways.refusals:
            world.launch(rank, call, "barrier", Kind.DISPATCH, 1, refusal=ways.refusals[rank])
            continue
        _OnRank(world, ways, call, rank, xs[rank], routing, handle, made, mode).tell()
    if handle is not None:
        return call, handle
    return call, made if results is not None else None


def _expected(
    world: World, xs: list[Array], routing: Routing, handle: Handle | None, mode: Mode
) -> list[DispatchResult] | None:
    rows: Any = xs if mode.scales is None else list(zip(xs, mode.scales, strict=True))
    try:
        if handle is not None:
            handles = [result.handle for result in handle.results]
            return dispatch(rows, handles=handles, topk_weights=routing.weights)
        return dispatch(
            rows,
            topk_idx=routing.topk_idx,
            topk_weights=routing.weights,
            is_token_in_rank=routing.mask,
            num_experts=None if routing.topk_idx is None else world.setting.num_experts,
            expert_alignment=mode.alignment or 1,
            num_worst_tokens=_possible(mode, world, routing),
        )
    except ValueError:
        return None  # every rank refuses


def _possible(mode: Mode, world: World, routing: Routing) -> list[int] | None:
    """The worst case as given, or, where it is too small and all ranks refuse, as large as it
    would have to be: the sizes of what is called refused need a reference too."""
    if mode.worst is None:
        return None
    real = rows_received(world, routing)
    if all(rows <= room for rows, room in zip(real, mode.worst, strict=True)):
        return mode.worst
    return [max(pair) for pair in zip(real, mode.worst, strict=True)]


class _OnRank:
    """One rank's part of a dispatch."""

    def __init__(
        self,
        world: World,
        ways: Ways,
        call: Call,
        rank: int,
        x: Array,
        routing: Routing,
        handle: Handle | None,
        made: Handle,
        mode: Mode,
    ) -> None:
        self.world, self.ways, self.call, self.rank = world, ways, call, rank
        self.x, self.handle, self.made, self.mode = x, handle, made, mode
        self.memory = world.memory[rank]
        self.cached = handle is not None
        self.index = None if routing.topk_idx is None or self.cached else routing.topk_idx[rank]
        self.weights = None if routing.weights is None else routing.weights[rank]
        self.mask = None if routing.mask is None or self.cached else routing.mask[rank]
        self.scales = None if mode.scales is None else mode.scales[rank]
        self.dtype = "uint8" if mode.cast is None else "float8_e4m3fn"
        self.topk = 0
        if self.weights is not None or self.index is not None:
            self.topk = (self.index if self.weights is None else self.weights).shape[1]  # type: ignore[union-attr]
        self.capacity = world.num_ranks * world.setting.max_tokens
        if mode.worst is not None:
            self.capacity = mode.worst[rank]
        if handle is not None:
            self.capacity = handle.results[rank].handle.num_recv_tokens
        self.want = made.results[rank] if made.results else None
        self.reads: dict[str, tuple[Any, Array | None, int]] = {}

    def local(self, offset: int) -> int:
        """Address of an offset in this rank's own memory."""
        return self.memory.local.address(offset)

    def put(self, array: Array | None) -> int:
        """Address of an input array, 0 for None."""
        return 0 if array is None else self.local(self.world.array(self.rank, self.call, array))

    def tell(self) -> None:
        """Append the launch, and what a later kernel of the user reads."""
        world, rank, call, ways = self.world, self.rank, self.call, self.ways
        row_bytes = self.x.shape[1]
        shift = 0 if row_bytes % 16 == 0 else ways.pick() % 2 * (4 if row_bytes % 4 == 0 else 1)
        cast = self.mode.cast
        if cast is not None and not (ways.bulk and row_bytes % 16 == 0 and cast.fused[rank]):
            cast = None  # was done before
        given = self.x if cast is None else cast.rows[rank]
        x_at = self.local(world.array(rank, call, given, shift))
        access = access_bytes(row_bytes, (x_at,), (4, 1))
        rows, meta = world.block(rank, call, ways.pick()), world.block(rank, call, ways.pick())
        fields = {"x": x_at, "access_bytes": access, **self._sizes()}
        fields |= self._inputs(scales=cast is None) | self._places(rows, meta) | self._outputs()
        kernel = "dispatch_bulk" if ways.bulk and access == 16 else "dispatch"
        if cast is not None:
            kernel = "dispatch_cast_bulk"
            fields = {f"sent.{name}": value for name, value in fields.items()}
            fields |= {f"cast.{name}": value for name, value in cast.fields().items()}
        world.launch(rank, call, kernel, Kind.DISPATCH, ways.grids[rank], fields)
        self._read_results()
        world.free_slot(rank, rows)
        world.free_slot(rank, meta)
        call.checks[rank] = self._check
        call.poisoned[rank] = lambda: self._check_poison(late=False)
        call.remains[rank] = lambda: self._check_poison(late=True)

    # ------------------------------------------------------------------------------- fields

    def _sizes(self) -> dict[str, int]:
        index, scales, ranks = self.index, self.scales, self.world.num_ranks
        experts = 0 if index is None else self.world.setting.num_experts
        layout = Layout.MASK if index is None else Layout.TOPK
        waits = self.made.waits if self.handle is None else self.handle.waits
        return {
            "num_tokens": len(self.x),
            "num_topk": self.topk,
            "has_weights": int(self.weights is not None),
            "index_bytes": 0 if index is None else index.itemsize,
            "num_experts": experts,
            "experts_per_rank": max(1, experts // ranks),
            "num_reported_experts": experts // ranks,
            "experts_offset": self.memory.control.experts,
            "expert_alignment": self.mode.alignment or 1,
            "row_bytes": self.x.shape[1],
            "num_scales": 0 if scales is None else scales.shape[1],
            "dtype": dtype_code(self.dtype, 1, None if scales is None else scales.dtype.name),
            "layout": Layout.CACHED if self.cached else layout,
            "layout_flags": int(LayoutFlag.EXPANDED) * self.mode.expanded,
            "no_wait": int(not waits),
            "capacity": self.capacity,
        }

    def _inputs(self, *, scales: bool) -> dict[str, int]:
        fields = {
            "topk_idx": self.put(self.index),
            "topk_weights": self.put(self.weights),
            "is_token_in_rank": self.put(self.mask),
        }
        if scales and self.scales is not None:
            tokens, columns = self.scales.shape
            turned = self.mode.by_columns
            fields["scales"] = self.put(self.scales.T if turned else self.scales)
            fields["scales_token_stride"] = 1 if turned else columns
            fields["scales_stride"] = tokens if turned else 1
        return fields

    def _places(self, rows: int, meta: int) -> dict[str, int]:
        """Where the parts of the blocks begin; noted down for reading them."""
        index_bytes = 0 if self.index is None else self.index.itemsize
        weights_at = meta + align(0 if self.cached else 4 * self.capacity, OFFSET_UNIT)
        weights = 4 * self.capacity * self.topk * (self.weights is not None)
        index_at = weights_at + align(weights, OFFSET_UNIT)
        scales_at = index_at + align(self.capacity * self.topk * index_bytes, OFFSET_UNIT)
        self.at = {"rows": rows, "sources": meta, "weights": weights_at, "index": index_at}
        self.at["scales"] = scales_at
        return {
            "rows_offset": rows // OFFSET_UNIT,
            "meta_offset": meta // OFFSET_UNIT,
            "weights_offset": weights_at // OFFSET_UNIT,
            "index_offset": index_at // OFFSET_UNIT,
        }

    def _outputs(self) -> dict[str, int]:
        handle, made, rank = self.handle, self.made, self.rank
        world, call, ranks = self.world, self.call, self.world.num_ranks
        if handle is not None:
            fields = {"send_row": handle.send_row[rank], "birth_in": handle.birth[rank]}
            if not handle.waits:
                fields["real_rows"] = handle.real_rows[rank]
            return {name: self.local(offset) for name, offset in fields.items()}
        made.send_row[rank] = world.output(rank, call, 4 * len(self.x) * ranks, Use.SCRATCH)
        made.birth[rank] = world.output(rank, call, 4)
        self.outputs = {
            "send_row": made.send_row[rank],
            "birth_out": made.birth[rank],
            "recv_rows_per_rank": world.output(rank, call, 4 * ranks),
        }
        if not made.waits or self.mode.alignment:
            self.outputs["psum_recv_rows"] = world.output(rank, call, 4 * ranks)
            made.real_rows[rank] = self.outputs["psum_recv_rows"] + 4 * (ranks - 1)
        if self.mode.alignment:
            experts = world.setting.num_experts // ranks
            for name in ("expert_counts", "psum_expert_rows"):
                self.outputs[name] = world.output(rank, call, 4 * experts, Use.SCRATCH)
        if self.mode.stats:
            self.before = np.arange(experts, dtype=np.uint32) * 1000
            self.outputs["recv_stats"] = world.changed(rank, call, self.before)
        return {name: self.local(offset) for name, offset in self.outputs.items()}

    # ------------------------------------------------------------------------------ results

    def _read_results(self) -> None:
        """Plan the reads: name -> (how to get it, what it must be, the byte of its poison)."""
        want, capacity, topk = self.want, self.capacity, self.topk
        handle = None if want is None else want.handle
        real = capacity if handle is None else min(capacity, handle.num_real_tokens)
        number = capacity if handle is None else min(capacity, handle.num_recv_tokens)
        rows = scales = None
        if want is not None:
            rows, scales = want.recv_x if isinstance(want.recv_x, tuple) else (want.recv_x, None)
            rows, scales = rows[:real], None if scales is None else scales[:real]
        poison = 0 if self.dtype == "uint8" else 0xFF
        self._block("rows", real * self.x.shape[1], rows, poison)
        if self.scales is not None:
            poison = 0xFF if self.scales.dtype == np.float32 else 0
            self._block("scales", real * self.scales.shape[1] * 4, scales, poison)
        if self.weights is not None:
            self._block("weights", number * topk * 4, want and want.recv_topk_weights)
        if self.index is not None:
            nbytes = number * topk * self.index.itemsize
            self._block("index", nbytes, want and want.recv_topk_idx)
        if self.cached:
            return
        self._block("sources", number * 4, handle and handle.recv_src_idx)
        ranks = self.world.num_ranks
        self._own("send_row", 4 * len(self.x) * ranks, handle and handle.send_row, 0xFF)
        self._own("recv_rows_per_rank", 4 * ranks, handle and handle.recv_rows_per_rank)
        if "psum_recv_rows" in self.outputs:
            sums = handle and np.cumsum(handle.recv_rows_per_rank, dtype=np.int32)
            self._own("psum_recv_rows", 4 * ranks, sums)
        if self.mode.alignment:
            self._read_counts(handle)

    def _read_counts(self, handle: Any) -> None:
        experts = self.world.setting.num_experts // self.world.num_ranks
        counts = ends = total = None
        if handle is not None:
            counts = handle.num_unaligned_recv_tokens_per_expert
            ends = handle.psum_num_recv_tokens_per_expert
            if self.mode.expanded:
                ends = (ends - -(-counts // self.mode.alignment) * self.mode.alignment) + counts
                ends = ends.astype(np.int32)
        self._own("expert_counts", 4 * experts, counts)
        self._own("psum_expert_rows", 4 * experts, ends)
        if self.mode.stats:
            if counts is not None:
                total = self.before + counts.astype(np.uint32)
            self._own("recv_stats", 4 * experts, total, None)

    def _block(self, name: str, nbytes: int, want: Array | None, poison: int = 0xFF) -> None:
        region, offset = self.memory.device, self.at[name]
        get = self.world.read(self.rank, self.call, region, offset, nbytes)
        self.reads[name] = (get, want, poison)

    def _own(self, name: str, nbytes: int, want: Array | None, poison: int | None = 0) -> None:
        region, offset = self.memory.local.region, self.outputs[name]
        get = self.world.read(self.rank, self.call, region, offset, nbytes)
        self.reads[name] = (get, want, poison)  # type: ignore[assignment]

    def _check(self) -> None:
        world, call, rank = self.world, self.call, self.rank
        if self.want is None:
            raise AssertionError(f"rank {rank} says ok to a call that had to be refused")
        for name, (get, want, _) in self.reads.items():
            assert want is not None
            compare(f"{call.name} {call.serial}, rank {rank}: {name}", get(), want)
        newest = not any("dispatch" in other.name for other in world.calls[call.serial :])
        if newest and not self.cached and self.made.waits:
            self._check_report()

    def _check_report(self) -> None:
        """What the host that waits was told."""
        assert self.want is not None
        words = self.world.report_words(self.rank)
        layout, serial = self.memory.report_layout, self.call.serial
        counts = [serial << 32 | int(n) for n in self.want.recv_rows_per_rank]
        equal("rows reported to the host", words[layout.rows : layout.experts], counts)
        per_expert = self.want.handle.num_unaligned_recv_tokens_per_expert
        if per_expert is not None:
            counts = [serial << 32 | int(n) for n in per_expert]
            got = words[layout.experts : layout.experts + len(counts)]
            equal("experts' rows reported to the host", got, counts)

    def _check_poison(self, *, late: bool) -> None:
        """Everything is poisoned, but what a late peer may have written over it."""
        for name, (get, want, poison) in self.reads.items():
            if name == "recv_stats":
                compare("statistics of a call that did not end well", get(), self.before)
            else:
                check_poison(name, get(), poison, want if late else None)
