"""What each kernel does, in steps, from the bytes of its launch: the protocol of ``cuda/comm``.

A step is what other ranks, streams and hosts may come between. Rows are moved at once, one
destination or source a step.
"""

from __future__ import annotations

import ctypes

import numpy as np

from deepep_cupy.protocol.control_block import (
    ABORT_LATE_SHIFT,
    ABORT_REPORTER_SHIFT,
    DETAIL_WORDS,
    NUM_RECORDS,
    RECORD_HEAD,
    RECORD_WORDS,
    AbortFlag,
    Phase,
    Verdict,
    header_words,
)
from deepep_cupy.protocol.headers import (
    ARGUMENTS,
    OFFSET_UNIT,
    SIGNATURE,
    WORDS,
    Layout,
    RefusalCode,
)
from host.memory import at, join

__all__ = ["ENTER", "KERNELS"]

ENTER = ("epoch", "poisoned", "abort", "busy")
"""The order in which an operation asks for the state of its Buffer."""
_U32, _U64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def _stamped(epoch, value):
    return (epoch & _U32) << 32 | value & _U32


class Kernel:
    """One launch of a kernel that talks to other ranks.

    Args:
        world: The machine.
        lane: Where it runs.
        spec: Its name and struct.
        fields: What its launch gave it, by name without ``comm.`` and ``d.``.
    """

    handshake = True

    def __init__(self, world, lane, comm, fields):
        self.world, self.lane, self.comm, self.d = world, lane, comm, fields
        self.rank, self.ranks = comm["rank"], len(comm["peer"])
        self.own = comm["peer"][self.rank]
        self.control, self.report = world.control, world.report_layout
        self.verdict, self.failed, self.epoch = Verdict.GO, False, 0
        self.headers = [[0] * header_words(self.ranks) for _ in range(self.ranks)]

    # ------------------------------------------------------------------------------- words

    def u32(self, name, rank=None):
        base = self.own if rank is None else self.comm["peer"][rank]
        return ctypes.c_uint32.from_address(base + getattr(self.control, name))

    def send(self, rank, offset, value):
        """A word of a peer's inbox, released: it hands over what this kernel knows."""
        address = self.comm["peer"][rank] + offset
        ctypes.c_uint64.from_address(address).value = value
        self.lane.tick()
        self.world.released[address] = dict(self.lane.clock)

    def wait(self, offset, phase, peer):
        """Until a word of this rank's inbox carries this epoch: its value, or None."""
        address = self.own + offset
        word = ctypes.c_uint64.from_address(address)
        baton = self.world.baton
        deadline = baton.now + self.comm["timeout_ns"] / 1e9

        def come():
            return word.value >> 32 == self.epoch

        if self.rank in self.world.hasty and baton.random.random() < 0.02:
            deadline = baton.now
        if not come():
            baton.deadlines.append(deadline)
        while not come():
            if baton.now >= deadline:
                self.give_up(phase, peer, word.value)
                return None
            if self.told_to_stop():
                return None
            yield lambda: come() or baton.now >= deadline or self.told_to_stop(look=False)
        join(self.lane.clock, self.world.released.get(address, {}))
        return word.value & _U32

    def give_up(self, phase, peer, seen):
        claimed = self.u32("claimed")
        if claimed.value == 0:
            claimed.value = 1
            details = {"phase": phase, "peer": peer, "seen": seen, "block": 0}
            details["expected"] = self.epoch << 32
            words = at(self.own + self.control.details, (len(DETAIL_WORDS),), np.uint64)
            words[:] = [details[name] for name in DETAIL_WORDS]
        self.u32("abort").value |= self._abort(AbortFlag.TIMEOUT, 1 << peer, self.rank)

    @staticmethod
    def _abort(flag, late, reporter):
        return flag | late << ABORT_LATE_SHIFT | 1 << ABORT_REPORTER_SHIFT + reporter

    def told_to_stop(self, look=True):
        if self.u32("abort").value:
            return True
        if not self.comm["board"]:
            return False
        for rank in range(self.ranks):
            line = self.comm["board"] + 4 * rank * self.comm["board_stride"]
            if ctypes.c_uint32.from_address(line).value:
                if look:
                    self.u32("abort").value |= self._abort(AbortFlag.RAISED, 0, rank)
                return True
        return False

    # ------------------------------------------------------------------------------ entering

    def enter(self):
        """One word after the other; the verdict."""
        seen = {}
        for name in ENTER:
            word = self.u32(name)
            seen[name] = word.value
            if name == "busy" and word.value == 0:
                word.value = self.comm["serial"]
            yield None
        self.epoch = seen["epoch"]
        if seen["abort"]:
            self.verdict = Verdict.FAILED
        if seen["poisoned"]:
            self.verdict = Verdict.POISONED
        if seen["busy"]:
            self.verdict = Verdict.BUSY
            self.lane.gpu.send([(self.comm["report"] + 8 * self.report.busy, self.comm["serial"])])

    def slot(self, source):
        """Offset of a header: parity of the epoch, then source."""
        number = (self.epoch & 1) * self.ranks + source
        return self.control.headers + number * self.control.header_bytes

    def header(self, words, counts):
        """This rank's header in full."""
        filled = {"kind": self.comm["kind"], "refusal": self.comm["refusal"]}
        filled["refusal_value"] = self.comm["refusal_value"]
        filled.update(words)
        for name in WORDS:
            if name not in filled and name in self.comm:
                filled[name] = self.comm[name]
        if filled.get("birth") == 0 and not filled["refusal"]:
            filled["refusal"] = RefusalCode.ARGUMENT
            filled["refusal_value"] = ARGUMENTS.index("handle")
        return [filled.get(name, 0) for name in WORDS] + list(counts)

    def open(self, words, counts):
        """Headers of all ranks, and what follows from them."""
        mine = self.header(words, counts)
        for step in range(self.ranks):
            peer = (self.rank + 1 + step) % self.ranks
            for i, value in enumerate(mine):
                self.send(peer, self.slot(self.rank) + 8 * i, _stamped(self.epoch, value))
            yield None
        for source in range(self.ranks):
            for i in range(len(mine)):
                value = yield from self.wait(self.slot(source) + 8 * i, Phase.HEADER, source)
                if value is None:
                    self.verdict = Verdict.FAILED
                    return
                self.headers[source][i] = value
        self.judge()

    def judge(self):
        first, named = self.headers[0], len(SIGNATURE)
        refusal, capacity = WORDS.index("refusal"), WORDS.index("capacity")
        bad = any(header[:named] != first[:named] or header[refusal] for header in self.headers)
        for rank in range(self.ranks):
            rows = sum(header[len(WORDS) + rank] for header in self.headers)
            bad |= rows > self.headers[rank][capacity]
        if bad:
            self.verdict = Verdict.REFUSED

    def word(self, rank, name):
        return self.headers[rank][WORDS.index(name)]

    # ------------------------------------------------------------------------------- leaving

    def leave(self):
        """True where this operation failed or was refused."""
        if self.verdict == Verdict.BUSY:
            return False
        failed = self.failed or self.verdict == Verdict.FAILED
        if self.handshake and self.verdict == Verdict.GO:
            failed = yield from self._arrivals(failed)
        if failed:
            abort = self.u32("abort").value
            for rank in range(self.ranks):
                if rank != self.rank:
                    self.u32("abort", rank).value |= abort
        if failed or self.verdict == Verdict.REFUSED:
            self._write_record(Verdict.FAILED if failed else Verdict.REFUSED)
        yield None
        if failed:
            self.u32("poisoned").value = 1
        elif self.verdict != Verdict.POISONED:
            self.u32("epoch").value = self.epoch + 1 & _U32 or 2
        yield None
        self.u32("busy").value = 0
        return failed or self.verdict == Verdict.REFUSED

    def _arrived(self, source):
        return self.control.arrived + 8 * ((self.epoch & 1) * self.ranks + source)

    def _arrivals(self, failed):
        status = self.u32("abort").value if failed else 0
        for step in range(self.ranks):
            peer = (self.rank + 1 + step) % self.ranks
            self.send(peer, self._arrived(self.rank), _stamped(self.epoch, status))
            yield None
        if failed:
            return True
        for source in range(self.ranks):
            status = yield from self.wait(self._arrived(source), Phase.ARRIVAL, source)
            if status is None:
                return True
            self.u32("abort").value |= status
            if status or self.told_to_stop():
                return True
        return False

    def _write_record(self, verdict):
        failures = self.u32("failures")
        number = failures.value
        place = self.report.records + number % NUM_RECORDS * self.report.record_words
        details = at(self.own + self.control.details, (len(DETAIL_WORDS),), np.uint64)
        head = {"verdict": verdict, "serial": self.comm["serial"], "kind": self.comm["kind"]}
        head |= {"epoch": self.epoch, "abort": self.u32("abort").value}
        head |= dict(zip(DETAIL_WORDS, details.tolist(), strict=True))
        words = {RECORD_WORDS.index(name): int(head.get(name, 0)) for name in RECORD_WORDS}
        for rank, header in enumerate(self.headers):
            for i, value in enumerate(header):
                words[RECORD_HEAD + rank * header_words(self.ranks) + i] = value
        report = self.comm["report"]
        order = list(words.items())
        self.world.baton.random.shuffle(order)
        stores = [(report + 8 * (place + i), value) for i, value in order]
        failures.value = number + 1
        self.lane.gpu.send([*stores, (report, number + 1)])

    # ------------------------------------------------------------------------------ the whole

    def run(self):
        """The kernel."""
        words, counts = self.prepare()
        yield from self.enter()
        if self.verdict == Verdict.GO:
            yield from self.open(words, counts)
        if self.verdict == Verdict.GO:
            yield from self.move()
        bad = yield from self.leave()
        self.world.note_end(self)
        if bad or self.verdict == Verdict.POISONED:
            # Peers may be late and write into the blocks of an operation that failed: no race.
            self.tracked = self.verdict == Verdict.REFUSED
            self.poison()

    def prepare(self):
        return {}, [0] * self.ranks

    def move(self):
        yield None

    def poison(self):
        pass

    def _touch_poison(self, what, begin, nbytes):
        if self.tracked:
            self.lane.touch(what, (begin, nbytes, True))


class Barrier(Kernel):
    """``barrier``: the headers alone."""

    handshake = False


class Dispatch(Kernel):
    """``dispatch`` and ``dispatch_bulk``, rows without scales."""

    def prepare(self):
        d, ranks = self.d, self.ranks
        tokens, topk = d["num_tokens"], d["num_topk"]
        self.cached = d["layout"] == Layout.CACHED
        slots = (d["send_row"], 4 * tokens * ranks, not self.cached)
        self.lane.touch(f"dispatch {self.comm['serial']} of rank {self.rank}", slots)
        self.slots = at(d["send_row"], (tokens, ranks))
        words = {
            "dtype": d["dtype"],
            "row_bytes": d["row_bytes"],
            "num_topk": topk,
            "index_bytes": d["index_bytes"],
            "weights": d["has_weights"],
            "layout": d["layout"] | d["layout_flags"],
            "capacity": d["capacity"],
            "rows_offset": d["rows_offset"],
            "meta_offset": d["meta_offset"],
            "weights_offset": d["weights_offset"],
            "index_offset": d["index_offset"],
            "num_rows": tokens,
        }
        if self.cached:
            self.mask = self.slots >= 0
            self.lane.touch("birth of a handle", (d["birth_in"], 4, False))
            words["birth"] = int(at(d["birth_in"], (1,), np.uint32)[0])
            return words, [0] * ranks
        self._read("topk_idx", tokens * topk * d["index_bytes"])
        self.idx = at(d["topk_idx"], (tokens, topk), f"i{d['index_bytes']}").copy()
        owner = np.where(self.idx >= 0, self.idx // d["experts_per_rank"], -1)
        self.mask = np.stack([(owner == rank).any(axis=1) for rank in range(ranks)], axis=1)
        bad = np.flatnonzero((self.idx >= d["num_experts"]).any(axis=1))
        if len(bad):
            words["refusal"] = RefusalCode.EXPERT_OUT_OF_RANGE
            words["refusal_value"] = int(bad[0])
            self.mask[:] = False
        return words, self.mask.sum(axis=0).tolist()

    def _read(self, name, nbytes):
        what = f"{name} of dispatch {self.comm['serial']} of rank {self.rank}"
        self.lane.touch(what, (self.d[name], nbytes, False))

    def move(self):
        d = self.d
        tokens, ranks, me = d["num_tokens"], self.ranks, self.rank
        if not self.cached:
            counts = [header[len(WORDS) :] for header in self.headers]
            before = np.cumsum(np.vstack([np.zeros(ranks, int), counts]), axis=0)[me]
            rows = np.cumsum(self.mask, axis=0) - 1 + before
            self.slots[...] = np.where(self.mask, rows, -1)
            yield from self._count(counts)
            if self.failed:
                return
        for step in range(ranks):
            self._send_rows((me + 1 + step) % ranks)
            yield None
        if d["no_wait"]:
            self._tail()
        del tokens

    def _count(self, counts):
        """Counts per expert to their ranks; what came, into the handle and to the host."""
        d, local = self.d, self.d["num_reported_experts"]
        half = (self.epoch & 1) * self.ranks * local
        for rank in range(self.ranks):
            for expert in range(local):
                number = int((self.idx == rank * local + expert).sum())
                place = d["experts_offset"] + 8 * (half + self.rank * local + expert)
                self.send(rank, place, _stamped(self.epoch, number))
        yield None
        total = np.zeros(local, np.int64)
        for source in range(self.ranks):
            for expert in range(local):
                place = d["experts_offset"] + 8 * (half + source * local + expert)
                number = yield from self.wait(place, Phase.EXPERTS, source)
                if number is None:
                    self.failed = True
                    return
                total[expert] += number
        column = [row[self.rank] for row in counts]
        self._write_words(column, total)
        if not d["no_wait"]:
            report, stamp = self.comm["report"], self.comm["serial"]
            told = [(self.report.rows + i, value) for i, value in enumerate(column)]
            told += [(self.report.experts + i, int(value)) for i, value in enumerate(total)]
            self.world.baton.random.shuffle(told)
            for word, value in told:
                self.lane.gpu.send([(report + 8 * word, _stamped(stamp, value))])
        yield None

    def _write_words(self, column, total):
        d, local = self.d, len(total)
        rounded = -(-total // d["expert_alignment"]) * d["expert_alignment"]
        parts = [("recv_rows_per_rank", column), ("psum_recv_rows", np.cumsum(column))]
        parts += [("expert_counts", total), ("psum_expert_rows", np.cumsum(rounded))]
        parts += [("birth_out", [self.epoch])]
        del local
        for name, values in parts:
            if d[name]:
                what = f"{name} of dispatch {self.comm['serial']} of rank {self.rank}"
                self.lane.touch(what, (d[name], 4 * len(values), True))
                at(d[name], (len(values),), np.uint32)[:] = values

    def _send_rows(self, rank):
        d, chosen = self.d, np.flatnonzero(self.mask[:, rank])
        if not len(chosen):
            return
        tokens, there = d["num_tokens"], self.slots[chosen, rank]
        low, high = int(there.min()), int(there.max()) + 1
        capacity, base = self.word(rank, "capacity"), self.comm["peer"][rank]
        assert high <= capacity, "a row behind the block of its receiver"
        source = at(d["x"], (tokens, d["row_bytes"]), np.uint8)
        parts = [("rows_offset", source[chosen], True)]
        topk, local = d["num_topk"], np.ones((len(chosen), d["num_topk"]), bool)
        if not self.cached:
            parts.append(("meta_offset", chosen.astype(np.int32)[:, None], True))
            owned = self.idx[chosen]
            local = (owned >= 0) & (owned // d["experts_per_rank"] == rank)
            indices = np.where(local, owned - rank * d["experts_per_rank"], -1)
            parts.append(("index_offset", indices.astype(self.idx.dtype), True))
        if d["has_weights"]:
            given = at(d["topk_weights"], (tokens, topk), np.float32)[chosen]
            parts.append(("weights_offset", np.where(local, given, np.float32(0)), True))
            self._read("topk_weights", 4 * tokens * topk)
        self._read("x", tokens * d["row_bytes"])
        for name, values, _ in parts:
            width = values.itemsize * values.shape[1]
            begin = base + self.word(rank, name) * OFFSET_UNIT
            what = f"dispatch {self.comm['serial']} of rank {self.rank} to rank {rank}"
            self.lane.touch(what, (begin + low * width, (high - low) * width, True))
            at(begin, (capacity, values.shape[1]), values.dtype)[there] = values

    def _own_parts(self):
        """(name, width, byte of poison, byte behind the real rows) of this rank's own outputs."""
        d = self.d
        yield "rows_offset", d["row_bytes"], 0xFF, None
        if d["index_bytes"]:
            yield "index_offset", d["num_topk"] * d["index_bytes"], 0xFF, 0xFF
        if d["has_weights"]:
            yield "weights_offset", 4 * d["num_topk"], 0xFF, 0
        if not self.cached:
            yield "meta_offset", 4, 0xFF, 0xFF

    def _fill(self, name, width, byte, first, what):
        d = self.d
        begin = self.own + d[name] * OFFSET_UNIT + first * width
        nbytes = (d["capacity"] - first) * width
        self.lane.touch(what, (begin, nbytes, True))
        at(begin, (nbytes,), np.uint8)[:] = byte

    def _tail(self):
        d = self.d
        if self.cached:
            if not d["real_rows"]:
                return
            self.lane.touch("real rows of a handle", (d["real_rows"], 4, False))
            real = int(at(d["real_rows"], (1,))[0])
        else:
            real = sum(header[len(WORDS) + self.rank] for header in self.headers)
        for name, width, _, byte in self._own_parts():
            if byte is not None:
                self._fill(name, width, byte, real, f"tail of dispatch {self.comm['serial']}")

    def poison(self):
        d, what = self.d, f"poison of dispatch {self.comm['serial']} of rank {self.rank}"
        known = not self.cached and not d["no_wait"] and self.verdict == Verdict.GO
        rows = sum(h[len(WORDS) + self.rank] for h in self.headers) if known else d["capacity"]
        rows = min(rows, d["capacity"])
        for name, width, byte, _ in self._own_parts():
            begin = self.own + d[name] * OFFSET_UNIT
            self._touch_poison(what, begin, rows * width)
            at(begin, (rows * width,), np.uint8)[:] = byte
        if self.cached:
            return
        local = d["num_reported_experts"]
        parts = [("recv_rows_per_rank", self.ranks, 0), ("psum_recv_rows", self.ranks, 0)]
        parts += [("expert_counts", local, 0), ("psum_expert_rows", local, 0), ("birth_out", 1, 0)]
        parts += [("send_row", d["num_tokens"] * self.ranks, 0xFF)]
        for name, count, byte in parts:
            if d[name]:
                self._touch_poison(what, d[name], 4 * count)
                at(d[name], (4 * count,), np.uint8)[:] = byte


class Combine(Kernel):
    """``combine`` and ``combine_bulk`` of float32 rows."""

    def prepare(self):
        d = self.d
        self.lane.touch("birth of a handle", (d["birth"], 4, False))
        slots = (d["send_row"], 4 * d["num_tokens"] * self.ranks, False)
        self.lane.touch(f"send_row in combine {self.comm['serial']} of rank {self.rank}", slots)
        self.slots = at(d["send_row"], (d["num_tokens"], self.ranks)).copy()
        words = {
            "dtype": d["dtype"],
            "row_bytes": d["row_bytes"],
            "num_topk": d["num_topk"],
            "weights": d["has_weights"],
            "layout": d["layout"],
            "birth": int(at(d["birth"], (1,), np.uint32)[0]),
            "rows_offset": d["rows_offset"],
            "meta_offset": d["weights_offset"],
            "num_rows": d["num_rows"],
        }
        return words, [0] * self.ranks

    def move(self):
        d, me = self.d, self.rank
        tokens, width = d["num_tokens"], d["row_bytes"] // 4
        terms = [[] for _ in range(tokens)]
        fetched = {}
        for step in range(self.ranks):
            rank = (me + 1 + step) % self.ranks
            base = d["x"]
            if rank != me:
                base = self.comm["peer"][rank] + self.word(rank, "rows_offset") * OFFSET_UNIT
            chosen = np.flatnonzero(self.slots[:, rank] >= 0)
            if len(chosen):
                there = self.slots[chosen, rank]
                low, high = int(there.min()), int(there.max()) + 1
                what = f"combine {self.comm['serial']} of rank {me}, rows of rank {rank}"
                span = (base + low * d["row_bytes"], (high - low) * d["row_bytes"], False)
                self.lane.touch(what, span)
                rows = at(base, (high, width), np.float32)
                fetched[rank] = dict(zip(chosen.tolist(), rows[there].copy(), strict=True))
            yield None
        for rank in range(self.ranks):
            for token, row in fetched.get(rank, {}).items():
                terms[token].append(row)
        what = f"result of combine {self.comm['serial']} of rank {me}"
        self.lane.touch(what, (d["out"], tokens * d["row_bytes"], True))
        out = at(d["out"], (tokens, width), np.float32)
        for token, rows in enumerate(terms):
            total = np.zeros(width, np.float32)
            for i, row in enumerate(rows):
                total = row if i == 0 else total + row
            out[token] = total
        yield None

    def poison(self):
        d, what = self.d, f"poison of combine {self.comm['serial']} of rank {self.rank}"
        nbytes = d["num_tokens"] * d["row_bytes"]
        self._touch_poison(what, d["out"], nbytes)
        at(d["out"], (nbytes,), np.uint8)[:] = 0xFF


def stage(world, lane, comm, d):
    """``stage``: rows into the pool, but for those of this rank's own tokens."""
    del comm
    ranks = world.num_ranks
    lane.touch("stage reads its counts", (d["rows_per_rank"], 4 * ranks, False))
    counts = at(d["rows_per_rank"], (ranks,), np.int32).tolist()
    row = 0
    for rank, count in enumerate(counts):
        if rank != d["rank"] and count:
            begin, nbytes = row * d["row_bytes"], count * d["row_bytes"]
            lane.touch("stage", (d["x"] + begin, nbytes, False), (d["out"] + begin, nbytes, True))
            ctypes.memmove(d["out"] + begin, d["x"] + begin, nbytes)
        row += count
        yield None


def _operation(kind):
    def run(world, lane, comm, fields):
        return kind(world, lane, comm, fields).run()

    return run


KERNELS = {
    "barrier": _operation(Barrier),
    "dispatch": _operation(Dispatch),
    "dispatch_bulk": _operation(Dispatch),
    "combine": _operation(Combine),
    "combine_bulk": _operation(Combine),
    "stage": stage,
}
"""Name of a kernel -> (world, lane, comm, fields) -> its steps."""
