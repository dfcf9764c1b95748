"""What dispatch, combine and barrier do, in NumPy, from the very parameters of the launches.

Ranks are threads. A launch waits until all ranks have launched; then one of them does the work of
all, reading and writing memory by address.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np

from deepep_cupy.engines.gpu.kernels import get_kernel
from deepep_cupy.jit.spec import Struct
from deepep_cupy.protocol.control_block import NUM_RECORDS, RECORD_HEAD, RECORD_WORDS, Verdict
from deepep_cupy.protocol.headers import (
    ARGUMENTS,
    DTYPE_CODES,
    OFFSET_UNIT,
    SIGNATURE,
    WORDS,
    Layout,
    LayoutFlag,
    RefusalCode,
    call_word,
)
from deepep_cupy.reference import quantize
from gpu_stand_in import device as d
from gpu_stand_in import expanding, staging
from gpu_stand_in.memory import at


def fields_of(struct):
    """Names and counts, those of inner structs in their place."""
    for param in struct.params:
        if isinstance(param.ctype, Struct):
            yield from fields_of(param.ctype)
        else:
            yield param.name, param.count


FIELDS = {
    name: list(fields_of(get_kernel(name).params[1].ctype)) for name in ("dispatch", "combine")
}
FIELDS["dispatch_cast"] = FIELDS["dispatch"] + expanding.CAST_FIELDS
FIELDS["combine_expanded"] = FIELDS["combine"] + expanding.MORE_FIELDS


FORMS = {**staging.FORMS, **expanding.FORMS}
"""Kernel that talks to nobody -> (what it does, what it touches)."""


class World:
    """The ranks of one Buffer.

    Attributes:
        regions: Address of each rank's region.
    """

    def __init__(self, num_ranks, spec_of, control, report_layout):
        self.num_ranks, self.spec_of = num_ranks, spec_of
        self.control, self.report_layout = control, report_layout
        self.regions, self.reports = [0] * num_ranks, [None] * num_ranks
        self.epoch = 1
        self._lock = threading.Condition()
        self._here, self._round = {}, 0

    def meet(self, rank, launch):
        """All ranks' launches of one operation; the last one does it."""
        with self._lock:
            mine = self._round
            self._here[rank] = launch
            if len(self._here) == self.num_ranks:
                try:
                    self._operate([self._here[r] for r in range(self.num_ranks)])
                finally:
                    self._here, self._round = {}, mine + 1
                    self._lock.notify_all()
                return
            done = self._lock.wait_for(lambda: self._round > mine, timeout=20)
            assert done, f"rank {rank} waits in vain for the others' launches"

    def _operate(self, launches):
        counts = np.zeros((self.num_ranks, self.num_ranks), np.int64)
        masks = []
        headers = [dict.fromkeys(WORDS, 0) for _ in launches]
        for rank, launch in enumerate(launches):
            headers[rank]["kind"] = call_word(launch.kind, launch.identity)
            headers[rank]["refusal"], headers[rank]["refusal_value"] = launch.refused
            if launch.name.startswith("dispatch"):
                masks.append(self._mask(launch.d))
                fill_dispatch(headers[rank], launch.d)
                if launch.d.layout != Layout.CACHED:
                    counts[rank] = masks[-1].sum(axis=0)
            elif launch.name.startswith("combine"):
                fill_combine(headers[rank], launch.d)
        differs = any(len({header[word] for header in headers}) > 1 for word in SIGNATURE)
        refused = any(header["refusal"] for header in headers)
        full = any(counts[:, r].sum() > headers[r]["capacity"] for r in range(self.num_ranks))
        dispatches = launches[0].name.startswith("dispatch")
        if differs or refused or (full and dispatches):
            for rank, launch in enumerate(launches):
                self._record(rank, launch, headers, counts)
        elif dispatches:
            for rank, launch in enumerate(launches):
                self._receive(rank, launches, masks, headers, counts)
                self._tell(rank, launch, counts)
        elif launches[0].name.startswith("combine"):
            expanded = launches[0].name == "combine_expanded"
            for launch in launches:
                if expanded:
                    expanding.combine(self, launch.d, launches)
                else:
                    self._combine(launch.d, launches)
        self.epoch += 1

    # ------------------------------------------------------------------------------- dispatch

    def _mask(self, p):
        ranks = self.num_ranks
        if p.layout == Layout.CACHED:
            return at(p.send_row, (p.num_tokens, ranks)) >= 0
        if p.layout == Layout.MASK:
            return at(p.is_token_in_rank, (p.num_tokens, ranks), np.bool_)
        choices = self._choices(p)
        owner = np.where(choices >= 0, choices // p.experts_per_rank, -1)
        return np.stack([(owner == rank).any(axis=1) for rank in range(ranks)], axis=1)

    def _choices(self, p):
        return at(p.topk_idx, (p.num_tokens, p.num_topk), f"i{p.index_bytes}")

    def _receive(self, rank, launches, masks, headers, counts):
        """Everything that comes to one rank, and what it notes down itself."""
        p = launches[rank].d
        cached = p.layout == Layout.CACHED
        region = self.regions[rank]
        capacity = p.capacity
        rows = at(region + p.rows_offset * OFFSET_UNIT, (capacity, p.row_bytes), np.uint8)
        sources = at(region + p.meta_offset * OFFSET_UNIT, (0 if cached else capacity,))
        shape = (capacity, p.num_topk)
        weights = at(region + p.weights_offset * OFFSET_UNIT, shape if p.has_weights else (0, 0))
        indices = at(
            region + p.index_offset * OFFSET_UNIT,
            shape if p.index_bytes else (0, 0),
            f"i{p.index_bytes or 4}",
        )
        behind = -(-capacity * p.num_topk * p.index_bytes // OFFSET_UNIT)
        scales = at(
            region + (p.index_offset + behind) * OFFSET_UNIT, (capacity, p.num_scales), np.uint32
        )
        row = 0
        for source, launch in enumerate(launches):
            q = launch.d
            sent, sent_scales = what_is_sent(q)
            slots = at(q.send_row, (q.num_tokens, self.num_ranks))
            for token in np.flatnonzero(masks[source][:, rank]):
                there = slots[token, rank] if cached else row
                slots[token, rank] = there
                row += 1
                rows[there] = sent[token]
                if q.num_scales:
                    scales[there] = sent_scales[token]
                if not cached:
                    sources[there] = token
                local = np.ones(p.num_topk, np.bool_)
                if q.index_bytes:
                    chosen = self._choices(q)[token]
                    local = chosen // q.experts_per_rank == rank
                    local &= chosen >= 0
                    indices[there] = np.where(local, chosen - rank * q.experts_per_rank, -1)
                if q.has_weights:
                    given = at(q.topk_weights, (q.num_tokens, q.num_topk))[token]
                    weights[there] = np.where(local, given, 0)
            if not cached:
                slots[~masks[source][:, rank], rank] = -1
        if cached:
            row = int(at(p.real_rows, (1,))[0]) if p.real_rows else capacity
        if p.no_wait:
            sources[row:] = -1
            indices[row:] = -1
            weights[row:] = 0
        if not cached:
            self._note(rank, launches[rank], indices[:row], counts)

    def _note(self, rank, launch, indices, counts):
        p = launch.d
        column = counts[:, rank]
        at(p.recv_rows_per_rank, (self.num_ranks,))[...] = column
        at(p.psum_recv_rows, (self.num_ranks,))[...] = np.cumsum(column)
        at(p.birth_out, (1,))[...] = self.epoch
        local = p.num_reported_experts
        per_expert = np.bincount(indices[indices >= 0].ravel(), minlength=local)[:local]
        launch.per_expert = per_expert
        if p.expert_counts:
            rounded = -(-per_expert // p.expert_alignment) * p.expert_alignment
            at(p.expert_counts, (local,))[...] = per_expert
            ends = np.cumsum(rounded)
            if p.layout_flags & LayoutFlag.EXPANDED:
                ends = ends - rounded + per_expert
            at(p.psum_expert_rows, (local,))[...] = ends
        if p.recv_stats:
            at(p.recv_stats, (local,))[...] += per_expert.astype(np.int32)

    def _tell(self, rank, launch, counts):
        if launch.d.no_wait or launch.d.layout == Layout.CACHED:
            return
        words, layout = self.reports[rank], self.report_layout
        stamp = np.uint64(launch.serial << 32)
        words[layout.rows : layout.rows + self.num_ranks] = (
            counts[:, rank].astype(np.uint64) | stamp
        )
        local = launch.d.num_reported_experts
        told = launch.per_expert.astype(np.uint64) | stamp
        words[layout.experts : layout.experts + local] = told

    # -------------------------------------------------------------------------------- combine

    def _combine(self, p, launches):
        """Floats of four bytes, and bytes that are one number each; enough for the plumbing."""
        dtype = {code: name for name, code in DTYPE_CODES.items()}[p.dtype]
        import ml_dtypes

        number = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
        wide = np.float32 if number.itemsize == 2 and number.kind != "i" else number
        width = p.row_bytes // number.itemsize
        rows_of = at(p.send_row, (p.num_tokens, self.num_ranks))
        biases = [at(b, (p.num_tokens, width), number) for b in p.bias if b]
        out = at(p.out, (p.num_tokens, width), number)
        for token in range(p.num_tokens):
            terms = [bias[token] for bias in biases]
            weights = []
            for rank, row in enumerate(rows_of[token]):
                if row < 0:
                    continue
                q = launches[rank].d
                base = self.regions[rank] + q.rows_offset * OFFSET_UNIT
                if q is p:
                    base = p.x
                terms.append(at(base + int(row) * p.row_bytes, (width,), number))
                if p.has_weights:
                    begin = self.regions[rank] + q.weights_offset * OFFSET_UNIT
                    begin += 4 * int(row) * p.num_topk
                    weights.append(at(begin, (p.num_topk,), np.float32))
            out[token] = total(terms, width, wide).astype(number)
            if p.has_weights:
                into = at(p.combined_weights, (p.num_tokens, p.num_topk), np.float32)
                if p.layout & LayoutFlag.EXPANDED:
                    into[token] = gathered(weights, p.num_topk)
                else:
                    into[token] = total(weights, p.num_topk, np.float32)

    # ------------------------------------------------------------------------------- refusals

    def _record(self, rank, launch, headers, counts):
        words, layout = self.reports[rank], self.report_layout
        number = int(words[0])
        begin = layout.records + number % NUM_RECORDS * layout.record_words
        record = words[begin : begin + layout.record_words]
        record[:] = 0
        said = {"verdict": Verdict.REFUSED, "serial": launch.serial, "kind": launch.kind}
        for word, value in (said | {"epoch": self.epoch}).items():
            record[RECORD_WORDS.index(word)] = value
        width = len(WORDS) + self.num_ranks
        for source, header in enumerate(headers):
            first = RECORD_HEAD + source * width
            record[first : first + width] = [*header.values(), *counts[source]]
        words[0] = number + 1
        if launch.name.startswith("dispatch") and launch.d.layout != Layout.CACHED:
            p = launch.d
            at(p.birth_out, (1,))[...] = 0
            at(p.send_row, (p.num_tokens, self.num_ranks))[...] = -1
            for counts_at in (p.recv_rows_per_rank, p.psum_recv_rows):
                at(counts_at, (self.num_ranks,))[...] = 0
            if p.expert_counts:
                for counts_at in (p.expert_counts, p.psum_expert_rows):
                    at(counts_at, (p.num_reported_experts,))[...] = 0


def total(terms, width, wide):
    """The sum of rows, in order, in the wide type."""
    made = None
    for term in terms:
        made = term.astype(wide) if made is None else made + term.astype(wide)
    return np.zeros(width, wide) if made is None else made


def gathered(weights, width):
    """Their bits or-ed: one rank has each."""
    made = np.zeros(width, np.uint32)
    for one in weights:
        made |= one.view(np.uint32)
    return made.view(np.float32)


def what_is_sent(q):
    """The bytes of a rank's rows, and their scales."""
    if hasattr(q, "cast_dtype"):
        x = at(q.x, (q.num_tokens, q.row_bytes), expanding.number_of(q.cast_dtype))
        how = {"round_scale": bool(q.cast_round_scale), "use_ue8m0": bool(q.cast_packed)}
        codes, scales = quantize(x, **how)
        assert scales.shape[1] == q.num_scales
        return codes.view(np.uint8), scales.view(np.uint32)
    scales = np.zeros((q.num_tokens, q.num_scales), np.uint32)
    for token, row in enumerate(scales):
        first = q.scales + 4 * token * q.scales_token_stride
        for i in range(q.num_scales):
            row[i] = at(first + i * 4 * q.scales_stride, (1,), np.uint32)[0]
    return at(q.x, (q.num_tokens, q.row_bytes), np.uint8), scales


def fill_dispatch(header, p):
    header |= {
        "dtype": p.dtype,
        "row_bytes": p.row_bytes + 4 * p.num_scales,
        "num_topk": p.num_topk,
        "index_bytes": p.index_bytes,
        "weights": p.has_weights,
        "layout": p.layout | p.layout_flags,
        "capacity": p.capacity,
    }
    if p.layout == Layout.CACHED:
        set_birth(header, p.birth_in)


def fill_combine(header, p):
    header |= {
        "dtype": p.dtype,
        "row_bytes": p.row_bytes,
        "num_topk": p.num_topk,
        "weights": p.has_weights,
        "layout": p.layout,
    }
    set_birth(header, p.birth)


def set_birth(header, address):
    header["birth"] = int(at(address, (1,), np.uint32)[0])
    if header["birth"] == 0:
        header["refusal"] = RefusalCode.ARGUMENT
        header["refusal_value"] = ARGUMENTS.index("handle")


class Kernels:
    """Where ``engines.gpu.launches.Kernels`` stands, for one rank."""

    def __init__(self, world, rank):
        self.world, self.rank = world, rank
        self.grids = []

    def local(self, name, grid):
        self.grids.append((name, grid))
        return LocalLaunch(self, name)

    def get(self, name, grid, kind):
        self.grids.append((name, grid))
        return Launch(self, name, int(kind))


class LocalLaunch:
    """A launch of a kernel that talks to nobody."""

    def __init__(self, kernels, name):
        self.kernels, self.name = kernels, name

    def operation(self, *values):
        names = [name for name, _ in fields_of(get_kernel(self.name).params[0].ctype)]
        self.d = SimpleNamespace(**dict(zip(names, values, strict=True)))

    def __call__(self, ptr):
        work, touches = FORMS[self.name]
        p, ranks = self.d, self.kernels.world.num_ranks
        stream = d.by_pointer(ptr)
        ranges = () if stream.graph else touches(p, ranks)
        d.run(stream, self.name, lambda: work(p, ranks), *ranges)


class Launch:
    """One launch: fields by name, in the order of the struct."""

    def __init__(self, kernels, name, kind):
        self.kernels, self.name, self.kind = kernels, name, kind
        self.refused = (0, 0)
        self.d = None

    def operation(self, *values):
        left, named = list(values), {}
        for name, count in FIELDS[self.name.removesuffix("_bulk")]:
            named[name] = left.pop(0) if count is None else [left.pop(0) for _ in range(count)]
        assert not left, f"{len(left)} values too many for {self.name}"
        self.d = SimpleNamespace(**named)

    def refusal(self, kind, code, value):
        self.kind, self.refused = int(kind), (int(code), value & 0xFFFFFFFF)

    def __call__(self, serial, ptr, identity=0):
        self.serial, self.identity = serial, identity
        world, rank = self.kernels.world, self.kernels.rank
        launched = SimpleNamespace(**vars(self))
        d.run(d.by_pointer(ptr), self.name, lambda: world.meet(rank, launched), *self._ranges())

    def _ranges(self):
        """What the kernel of this rank reads and writes of its own memory."""
        if self.d is None:
            return ()
        p, ranks, region = self.d, self.kernels.world.num_ranks, self.kernels.world.regions
        own = region[self.kernels.rank]
        slots = 4 * p.num_tokens * ranks
        if self.name.startswith("combine"):
            rows = (own + p.rows_offset * OFFSET_UNIT, p.num_rows * p.row_bytes, False)
            biases = ((b, p.num_tokens * p.row_bytes, False) for b in p.bias if b)
            out = (p.out, p.num_tokens * p.row_bytes, True)
            return (rows, *biases, (p.send_row, slots, False), out)
        cached = p.layout == Layout.CACHED
        rows = (own + p.rows_offset * OFFSET_UNIT, p.capacity * p.row_bytes, True)
        wide = expanding.number_of(p.cast_dtype).itemsize if hasattr(p, "cast_dtype") else 1
        given = (p.x, p.num_tokens * p.row_bytes * wide, False)
        weights = (p.topk_weights, 4 * p.num_tokens * p.num_topk * p.has_weights, False)
        return (given, weights, rows, (p.send_row, slots, not cached))
