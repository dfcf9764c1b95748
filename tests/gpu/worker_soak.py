"""Thousands of random calls of mixed shapes on one Buffer, with live handles and side streams.

mpirun -n 2 python tests/gpu/worker_soak.py [--calls 5000] [--seconds 600] [--seed 0]

Rows say where they come from (``patterns.py``), so that every dispatch is checked where it lies,
and every combine is a known multiple of a known row; now and then a case of the table runs too,
bit by bit against the reference. At the end nothing may have grown: not the pool, not CuPy's
memory, not the process.
"""

from __future__ import annotations

import gc
import random
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import RoundTrip, Worker, runtime, small_case
from patterns import copies_of, fill, sources, wrong_rows, wrong_sums

from deepep_cupy.reference import dispatch
from deepep_cupy.reference.combine import ADDABLE
from deepep_cupy.testing.compare import assert_same_bits

MOST_TOKENS = 512
MOST_TOPK = 8
ROW_BYTES = 14336
WORDS = (1, 3, 4, 25, 250, 256, 512, 1000, 1791, 1792, 3584)
"""Row lengths in words of four bytes."""


@dataclass
class Live:
    """A handle that is alive, and what is known of its dispatch."""

    handle: Any
    ranks: Any
    tokens: Any
    copies: Any
    num_tokens: int
    topk: int


class Soak:
    """The calls. All ranks draw the same plan; their tokens and choices differ."""

    def __init__(self, worker: Worker, buffer: Any, seed: int) -> None:
        self.worker, self.buffer, self.xp = worker, buffer, worker.xp
        self.plan = random.Random(seed)
        self.seed, self.calls = seed, 0
        self.live: list[Live] = []
        self.wrong = 0
        self.counts: dict[str, int] = {}
        self.side = worker.xp.cuda.Stream(non_blocking=True) if worker.gpu else None

    def step(self) -> None:
        """One call, perhaps on the side stream; drop something now and then."""
        weights = {"dispatch": 4, "cached": 3, "combine": 5, "table": 0.2}
        what = self.plan.choices(list(weights), list(weights.values()))[0]
        if not self.live and what in ("cached", "combine"):
            what = "dispatch"
        action = getattr(self, what)
        if self.side is not None and self.plan.random() < 0.1:
            what += " aside"
            main = self.xp.cuda.get_current_stream()
            self.side.wait_event(main.record())
            with self.side:
                action()
            main.wait_event(self.side.record())
        else:
            action()
        self.calls += 1
        self.counts[what] = self.counts.get(what, 0) + 1
        while len(self.live) > self.plan.randint(1, 8):
            self.live.pop(self.plan.randrange(len(self.live)))

    def expect(self, wrong: int, what: str) -> None:
        """Raise when something is wrong, with what is needed to do it again."""
        assert wrong == 0, f"call {self.calls}, {what}: {wrong} rows are wrong (seed {self.seed})"

    def _rows(self, number: int, words: int, dtype: Any) -> Any:
        return self.xp.empty((number, 4 * words), np.uint8).view(dtype)

    # ------------------------------------------------------------------------------------ calls

    def dispatch(self) -> None:
        """From topk_idx, or from a mask."""
        worker, size, plan = self.worker, self.worker.size, self.plan
        salt, words = self.calls, plan.choice(WORDS)
        tokens = [plan.choice((0, 1, 7, 64, plan.randint(0, MOST_TOKENS))) for _ in range(size)]
        topk, mask = plan.randint(1, min(MOST_TOPK, 4 * size)), plan.random() < 0.2
        weighted = plan.random() < 0.5
        index_dtype = plan.choice((np.int32, np.int64))
        rng = np.random.default_rng([self.seed, salt])
        order = [np.argsort(rng.random((each, 4 * size)), axis=1)[:, :topk] for each in tokens]
        idx = [np.ascontiguousarray(each.astype(index_dtype)) for each in order]
        for each in idx:
            each[rng.random(each.shape) < 0.2] = -1
        weights = [rng.random(each.shape, np.float32) for each in idx]
        masks = [rng.random((each, size)) < 0.5 for each in tokens]
        ids = [np.arange(each, dtype=np.int64)[:, None] for each in tokens]
        routing: dict[str, Any]
        if mask:
            want = dispatch(ids, is_token_in_rank=masks)[worker.rank]
            routing = {"is_token_in_rank": worker.up(masks[worker.rank])}
            topk = 0
        else:
            given: dict[str, Any] = {"topk_idx": idx, "num_experts": 4 * size}
            routing = {"topk_idx": worker.up(idx[worker.rank])}
            if weighted:
                given["topk_weights"] = weights
                routing["topk_weights"] = worker.up(weights[worker.rank])
            want = dispatch(ids, **given)[worker.rank]
        x = self._rows(tokens[worker.rank], words, np.int32)
        fill(self.xp, x, worker.rank, salt)
        got = self.buffer.dispatch(x, own=plan.random() < 0.2, **routing)
        for name in ("recv_topk_idx", "recv_topk_weights"):
            assert_same_bits(name, getattr(got, name), getattr(want, name), rank=worker.rank)
        for name in ("recv_src_idx", "recv_rows_per_rank", "send_row"):
            mine, right = getattr(got.handle, name), getattr(want.handle, name)
            assert_same_bits(name, mine, right, rank=worker.rank)
        assert got.num_recv_tokens_per_expert_list == want.num_recv_tokens_per_expert_list
        ranks, sent = sources(self.xp, got.handle)
        self.expect(wrong_rows(self.xp, got.recv_x, ranks, sent, salt), "dispatch")
        copies = copies_of(got.handle)
        self.live.append(Live(got.handle, ranks, sent, copies, tokens[worker.rank], topk))

    def cached(self) -> None:
        """Other rows, of another length, by a handle."""
        live, salt = self.plan.choice(self.live), self.calls
        x = self._rows(live.num_tokens, self.plan.choice(WORDS), np.int32)
        fill(self.xp, x, self.worker.rank, salt)
        got = self.buffer.dispatch(x, handle=live.handle, own=self.plan.random() < 0.2)
        wrong = wrong_rows(self.xp, got.recv_x, live.ranks, live.tokens, salt)
        self.expect(wrong, "cached dispatch")

    def combine(self) -> None:
        """Rows of one of three dtypes, in the pool, outside it, or just received."""
        import ml_dtypes

        plan, xp, buffer = self.plan, self.xp, self.buffer
        live, salt, words = plan.choice(self.live), self.calls, plan.choice(WORDS)
        dtype = np.dtype(plan.choice((np.int32, np.float32, ml_dtypes.bfloat16)))
        where = plan.choice(("inside", "outside", "received"))
        x = self._rows(live.num_tokens, words, dtype)
        fill(xp, x, self.worker.rank, salt)
        y = buffer.dispatch(x, handle=live.handle).recv_x
        if where == "inside":
            y = self.worker.in_pool(buffer, y)
        elif where == "outside":
            outside = self._rows(len(y), words, dtype)
            outside.view(np.uint8)[...] = y.view(np.uint8)
            y = outside
        sums = buffer.combine(y, live.handle).combined_x
        y.view(np.uint8)[...] = 255  # combine has read it
        wrong = wrong_sums(xp, sums, self.worker.rank, salt, live.copies)
        self.expect(wrong, f"combine of {dtype} {where}")

    def table(self) -> None:
        """A small case against the reference."""
        plan = self.plan
        layout = plan.choice(("topk", "cached", "mask", "cached_mask"))
        settings: dict[str, Any] = {"layout": layout}
        if "mask" in layout:
            settings |= {"num_experts": None, "num_topk": 0, "index_dtype": None, "weights": False}
        else:
            settings["num_topk"] = plan.randint(1, MOST_TOPK)
            settings["index_dtype"] = plan.choice(("int32", "int64"))
            settings["weights"] = plan.random() < 0.5
        case = small_case(
            self.worker,
            num_tokens=tuple(plan.randint(0, 100) for _ in range(self.worker.size)),
            hidden=plan.choice((1, 8, 33, 400, 1024)),
            dtype=plan.choice(ADDABLE),
            num_biases=plan.randint(0, 2),
            routing=plan.choice(("random", "half", "one", "skewed", "nothing")),
            **settings,
        )
        RoundTrip(self.worker, case, seed=self.calls).round(self.buffer)


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def memory(worker: Worker, buffer: Any) -> dict[str, int]:
    """What may not grow."""
    gc.collect()
    worker.synchronize()
    found = {"resident bytes": resident_bytes()}
    if worker.gpu:
        cupy = worker.xp
        cupy.get_default_memory_pool().free_all_blocks()
        statistics = runtime(buffer).pool.statistics()
        found["live bytes in the pool"] = statistics.live
        found["bytes quarantined"] = statistics.quarantined
        found["CuPy's used bytes"] = cupy.get_default_memory_pool().used_bytes()
    return found


ALLOWED = {"resident bytes": 100 << 20, "CuPy's used bytes": 8 << 20}
"""Growth that is none: allocators, caches of compiled kernels, events kept for reuse."""


def check_growth(
    worker: Worker, before: dict[str, int] | None, after: dict[str, int], when: str
) -> None:
    """Say what was taken ``when`` and at the end; nothing may have grown."""
    for name, value in after.items():
        first = before[name] if before is not None else value
        worker.say(f"  {name}: {first} after {when}, {value} at the end")
        assert value - first <= ALLOWED.get(name, 0), f"{name} grew from {first} to {value}"


def main() -> None:
    """Soak."""

    def arguments(parser: Any) -> None:
        parser.add_argument("--calls", type=int, default=5000)
        parser.add_argument("--seconds", type=float, default=600)
        parser.add_argument("--seed", type=int, default=0)

    worker = Worker("SOAK", __doc__, arguments)
    options = worker.options
    with worker.buffer(
        num_max_tokens_per_rank=MOST_TOKENS,
        hidden=ROW_BYTES,
        num_topk=MOST_TOPK,
        pool_bytes=16 * worker.size * MOST_TOKENS * ROW_BYTES + (64 << 20),
    ) as buffer:
        soak = Soak(worker, buffer, options.seed)
        end, before = time.monotonic() + options.seconds, None
        while soak.calls < options.calls:
            soak.step()
            if soak.calls % 100 == 0:
                buffer.check()
                if worker.most(float(time.monotonic() > end)):
                    break
            if soak.calls == min(500, options.calls // 4):
                kept, soak.live = soak.live, []
                del kept
                before = memory(worker, buffer)
        soak.live.clear()
        after = memory(worker, buffer)
        buffer.check()
        check_growth(worker, before, after, "the first calls")
    counts = ", ".join(f"{number} {what}" for what, number in sorted(soak.counts.items()))
    worker.done(f"{soak.calls} calls: {counts}")


if __name__ == "__main__":
    sys.exit(main())
