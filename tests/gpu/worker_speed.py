"""How long dispatch and combine take, beside what the links carry in the same run.

mpirun -n 2 python tests/gpu/worker_speed.py [--sms 8,16,24,64] [--json FILE]

Large: T=4096, H=7168, top-8 of 256, bfloat16. CUDA events round each call, behind a write of
256 MB and a barrier on the device; the median of 30, and of the ranks the slowest. *wire* counts
bytes that cross a link, one direction; *ratio* is the time of the ceiling (the same bytes, pushed
for dispatch, pulled for combine, by as many SMs) over that of the call.
Small: T=1 and T=128 from CUDA graphs, and called from Python.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import Worker, core
from patterns import copies_of, fill, sources, wrong_rows, wrong_sums

from deepep_cupy.testing.timing import CudaTimer, HostTimer, Timer, slowest

SEED = 7
BF16 = "bfloat16"


class Bench:
    """One Buffer with so many SMs, its data, and a handle. The constructor is collective."""

    def __init__(self, worker: Worker, tokens: int, num_sms: int | None) -> None:
        import ml_dtypes

        options, size = worker.options, worker.size
        self.worker, self.bf16 = worker, np.dtype(ml_dtypes.bfloat16)
        experts = -(-256 // size) * size
        topk = min(8, experts)
        row_bytes = options.hidden * self.bf16.itemsize
        self.buffer = worker.buffer(
            num_max_tokens_per_rank=tokens,
            hidden=options.hidden,
            dtype=BF16,
            num_topk=topk,
            num_experts=experts,
            num_sms=num_sms,
            pool_bytes=6 * size * tokens * row_bytes + (64 << 20),
        )
        rng = np.random.default_rng([SEED, worker.rank])
        choice = np.argsort(rng.random((tokens, experts)), axis=1)[:, :topk]
        self.topk_idx = worker.up(np.ascontiguousarray(choice))
        self.weights = worker.up(rng.random((tokens, topk), np.float32))
        self.x = self._rows(tokens, options.hidden)
        fill(worker.xp, self.x, worker.rank, SEED)
        got = self.dispatch()
        self.handle = got.handle
        sent = worker.down(self.handle.send_row) >= 0
        sent[:, worker.rank] = False
        self.wire_rows = int(sent.sum())
        self.wire_bytes = worker.most(self.wire_rows * row_bytes)
        self.outside = self._rows(*got.recv_x.shape)
        self.outside.view(np.uint8)[...] = got.recv_x.view(np.uint8)
        self.inside = worker.in_pool(self.buffer, self.outside)
        self.check(got)

    def _rows(self, rows: int, hidden: int) -> Any:
        return self.worker.xp.empty((rows, hidden * 2), np.uint8).view(self.bf16)

    def check(self, got: Any) -> None:
        """What is timed is right."""
        xp, rank = self.worker.xp, self.worker.rank
        wrong = wrong_rows(xp, got.recv_x, *sources(xp, got.handle), SEED)
        assert wrong == 0, f"dispatch: {wrong} rows are wrong"
        for call in (self.combine_inside, self.combine_outside):
            sums = call().combined_x
            wrong = wrong_sums(xp, sums, rank, SEED, copies_of(got.handle))
            assert wrong == 0, f"{call.__name__}: {wrong} rows are wrong"

    def dispatch(self) -> Any:
        """From topk_idx."""
        return self.buffer.dispatch(self.x, topk_idx=self.topk_idx, topk_weights=self.weights)

    def cached(self) -> Any:
        """With a handle."""
        return self.buffer.dispatch(self.x, handle=self.handle)

    def combine_inside(self) -> Any:
        """Of rows in the pool."""
        return self.buffer.combine(self.inside, self.handle)

    def combine_outside(self) -> Any:
        """Of rows in other memory."""
        return self.buffer.combine(self.outside, self.handle)


class Ceiling:
    """The same bytes with nothing around them. The constructor is collective."""

    def __init__(self, bench: Bench, num_sms: int) -> None:
        from deepep_cupy.kernels.compile import Target, compile_text
        from deepep_cupy.kernels.source import flatten

        worker, cupy = bench.worker, bench.worker.xp
        text = flatten("ceiling.cu", search=[Path(__file__).parent])
        arch = int(cupy.cuda.Device(worker.device).compute_capability)
        made = compile_text(text, name="ceiling", entry="ceiling_copy", target=Target(arch))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ceiling.cubin"
            path.write_bytes(made.cubin)
            self._kernel = cupy.RawModule(path=str(path)).get_function("ceiling_copy")
            self._shared_bytes = 16 * 4 * 3584 + 512
            self._kernel.max_dynamic_shared_size_bytes = self._shared_bytes
        self._num_sms, self._row_bytes = num_sms, bench.x.shape[1] * 2
        peers, rank = worker.size - 1, worker.rank
        self.rows = max(1, int(worker.most(bench.wire_rows)) // peers)
        self.wire_bytes = self.rows * peers * self._row_bytes
        shape = (peers, self.rows, self._row_bytes)
        self._outbox = bench.buffer.empty(shape, np.uint8)
        self._inbox = bench.buffer.empty(shape, np.uint8)
        region = core(bench.buffer).memory.region
        offsets = worker.comm.allgather(
            (self._outbox.data.ptr - region.base, self._inbox.data.ptr - region.base)
        )
        segment = self.rows * self._row_bytes
        self._peers = [(rank + 1 + i) % worker.size for i in range(peers)]
        there = [(rank - peer - 1) % worker.size * segment for peer in self._peers]
        here = [i * segment for i in range(peers)]

        def addresses(box: int, offset_of: list[int] | None) -> Any:
            own = self._inbox.data.ptr if box else self._outbox.data.ptr
            if offset_of is None:
                return [own + offset for offset in here]
            return [
                region.peer_base[peer] + offsets[peer][box] + offset
                for peer, offset in zip(self._peers, offset_of, strict=True)
            ]

        def up(numbers: Any) -> Any:
            return cupy.asarray(np.array(numbers, np.uint64))

        self._push = up(addresses(0, None)), up(addresses(1, there))
        self._pull = up(addresses(0, there)), up(addresses(1, None))
        for i, peer in enumerate(self._peers):
            self._outbox[i].fill(16 * rank + peer + 1)

    def _run(self, pair: tuple[Any, Any]) -> None:
        arguments = (
            *pair,
            np.uint32(len(self._peers)),
            np.uint32(self.rows),
            np.uint32(self._row_bytes),
        )
        self._kernel((self._num_sms,), (512,), arguments, shared_mem=self._shared_bytes)

    def push(self) -> None:
        """Write all segments into the peers' inboxes."""
        self._run(self._push)

    def pull(self) -> None:
        """Read all segments from the peers' outboxes."""
        self._run(self._pull)

    def check(self, bench: Bench) -> None:
        """Both bring what they should. Collective."""
        for call in (self.push, self.pull):
            self._inbox.fill(0)
            bench.buffer.barrier()
            call()
            bench.buffer.barrier()
            for i, peer in enumerate(self._peers):
                want = 16 * peer + bench.worker.rank + 1
                wrong = int((self._inbox[i] != want).sum())
                assert wrong == 0, f"{call.__name__}: {wrong} bytes from rank {peer} are wrong"
            bench.worker.synchronize()
            bench.worker.meet()


def large(worker: Worker, timer: Timer, num_sms: int | None) -> list[dict[str, Any]]:
    """All calls and ceilings at one number of SMs."""
    bench = Bench(worker, worker.options.tokens, num_sms)
    calls = {
        "dispatch from topk_idx": (bench.dispatch, "push"),
        "dispatch, cached": (bench.cached, "push"),
        "combine in the pool": (bench.combine_inside, "pull"),
        "combine outside": (bench.combine_outside, "pull"),
    }
    times: dict[str, float] = {}
    nbytes = dict.fromkeys(calls, bench.wire_bytes)
    todo: dict[str, Any] = {name: call for name, (call, _) in calls.items()}
    if worker.gpu and worker.size > 1 and num_sms is not None:
        ceiling = Ceiling(bench, num_sms)
        ceiling.check(bench)
        todo |= {"push": ceiling.push, "pull": ceiling.pull}
        nbytes |= {"push": ceiling.wire_bytes, "pull": ceiling.wire_bytes}
    with bench.buffer:
        for name, call in todo.items():
            timing = timer.measure(
                call, repeats=worker.options.repeats, barrier=bench.buffer.barrier
            )
            times[name] = slowest(timing, worker.comm.allgather)
        bench.buffer.check()
        bench.check(bench.dispatch())
    rows = []
    for name in todo:
        row: dict[str, Any] = {"sms": num_sms, "what": name, "us": times[name]}
        row["wire_gb_s"] = nbytes[name] / times[name] / 1e3
        of = calls[name][1] if name in calls else ""
        if of in times:
            row["ratio"] = times[of] * nbytes[name] / nbytes[of] / times[name]
        rows.append(row)
    return rows


def small(worker: Worker, timer: Timer, tokens: int) -> list[dict[str, Any]]:
    """Few tokens: from graphs, and from Python."""
    bench = Bench(worker, tokens, None)
    calls = {
        "dispatch from topk_idx": bench.dispatch,
        "dispatch, cached": bench.cached,
        "combine in the pool": bench.combine_inside,
    }
    rows = []
    with bench.buffer as buffer:
        for name, call in calls.items():
            row: dict[str, Any] = {"tokens": tokens, "what": name}
            timing = timer.measure(call, repeats=worker.options.repeats, barrier=buffer.barrier)
            row["events_us"] = slowest(timing, worker.comm.allgather)
            row["python_us"] = worker.most(python_time(worker, call))
            if worker.gpu and call != bench.dispatch:
                graph = worker.capture(buffer, lambda _, call=call: call(), 20)
                graph.replay(1)
                every = [graph.replay(10) for _ in range(5)]
                row["graph_us"] = worker.most(sorted(every)[2])
            buffer.check()
            rows.append(row)
    return rows


def python_time(worker: Worker, call: Any) -> float:
    """Microseconds the host spends in a call, median; the GPU is left to catch up in between."""
    times = []
    for _ in range(30):
        worker.synchronize()
        begin = time.perf_counter()
        result = call()
        times.append(1e6 * (time.perf_counter() - begin))
        del result
    return float(np.median(times))


def show(worker: Worker, rows: list[dict[str, Any]]) -> None:
    """An aligned table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *[[_cell(row.get(name)) for name in names] for row in rows]]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    for line in cells:
        worker.say("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Measure, print, write."""

    def arguments(parser: Any) -> None:
        parser.add_argument("--sms", default="8,16,24,64")
        parser.add_argument("--tokens", type=int, default=4096)
        parser.add_argument("--hidden", type=int, default=7168)
        parser.add_argument("--repeats", type=int, default=30)
        parser.add_argument("--small", default="1,128", help="tokens of the small batches")
        parser.add_argument("--json", type=Path)

    worker = Worker("SPEED", __doc__, arguments)
    options = worker.options
    timer: Timer = CudaTimer() if worker.gpu else HostTimer()
    sms: list[int | None] = [int(each) for each in options.sms.split(",")]
    large_rows = [row for number in sms for row in large(worker, timer, number)]
    worker.say(f"T={options.tokens}, H={options.hidden}, bfloat16, top-8, {worker.size} ranks")
    show(worker, large_rows)
    small_rows = []
    for tokens in (int(each) for each in options.small.split(",") if each):
        small_rows += small(worker, timer, tokens)
    show(worker, small_rows)
    if options.json and worker.rank == 0:
        options.json.write_text(json.dumps({"large": large_rows, "small": small_rows}, indent=1))
    best = [
        f"{row['what']} at {row['sms']} SMs {row['us']:.0f} us ({row.get('ratio', 0):.2f})"
        for row in large_rows
        if row["sms"] == (16 if 16 in sms else sms[0]) and row["what"] != "dispatch, cached"
    ]
    worker.done(*best)


if __name__ == "__main__":
    sys.exit(main())
