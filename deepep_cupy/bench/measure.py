"""Times of calls, of ceilings and of NCCL, as rows of a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from deepep_cupy.bench.ceilings import Ceiling, CeilingKernel
from deepep_cupy.bench.modes import Mode
from deepep_cupy.bench.nccl import NcclExchange, Routes
from deepep_cupy.bench.timing import BUSY_FLUSHES, CudaTimer, HostTimer, Timer, slowest
from deepep_cupy.bench.workload import Ranks, Workload, graph_calls
from deepep_cupy.errors import DeepEPCupyError

__all__ = [
    "HOST_CALLS",
    "Bytes",
    "Measurement",
    "Meter",
    "Rates",
    "bytes_of",
    "ceilings_of",
    "count_ceilings",
    "floor_of",
    "measure_nccl",
    "measure_workload",
]

Step = Callable[[str], None]
HOST_CALLS = 10
"""Calls that the host's part is measured in, for each of those that a median is taken of."""
_MOST_RATIO = 1.005
"""A call faster than the bare copy of its bytes shows what the copy lacks, not what it reaches."""


@dataclass(kw_only=True)
class Measurement:
    """One line of the table. Times are medians in microseconds, of the slowest rank.

    Attributes:
        what: Name of the mode, the ceiling or the baseline.
        kind: ``"call"``, ``"ceiling"`` or ``"baseline"``.
        operation: ``"dispatch"``, ``"combine"`` or ``"roundtrip"``.
        num_sms: Blocks; None where that has no meaning.
        num_tokens: T.
        us: Between two events; on the host engine by the host's clock.
        graph_us: Of one call of those in a graph.
        host_us: That the host spends in the call.
        host_min_us: The least of these.
        wire_bytes: Over the busiest link, in its busier direction.
        logical_bytes: Of all rows that the busiest rank receives, its own included.
        floor_us: What the ceilings of the same run take for these bytes.
        note: What went wrong, if anything did.
    """

    what: str
    kind: str
    operation: str
    num_sms: int | None
    num_tokens: int
    us: float
    graph_us: float | None = None
    host_us: float | None = None
    host_min_us: float | None = None
    wire_bytes: int = 0
    logical_bytes: int = 0
    floor_us: float | None = None
    note: str = ""

    @property
    def wire_gb_s(self) -> float:
        """GB/s over the busiest link."""
        return self.wire_bytes / self.us / 1e3

    @property
    def logical_gb_s(self) -> float:
        """GB/s into the busiest rank."""
        return self.logical_bytes / self.us / 1e3

    @property
    def ratio(self) -> float | None:
        """The part of the ceiling that is reached: 1 is as fast as bare copies. None where the
        call is faster than they are, see ``above_ceiling``."""
        if self.floor_us is None or self.above_ceiling:
            return None
        return self.floor_us / self.us

    @property
    def above_ceiling(self) -> bool:
        """Whether the call is faster than the bare copy: that was no bound for it."""
        return self.floor_us is not None and self.floor_us > _MOST_RATIO * self.us

    def as_dict(self) -> dict[str, Any]:
        """All fields and the rates that follow from them, for JSON."""
        more = {"wire_gb_s": self.wire_gb_s, "logical_gb_s": self.logical_gb_s}
        return asdict(self) | more | {"ratio": self.ratio}


class Meter:
    """Times calls by events, in graphs and on the host; all ranks time the same calls together.

    Args:
        ranks: The ranks, settled.
        repeats: Calls that a median is taken of.
        busy: Writes of 256 MB before a call in which the host waits.
    """

    def __init__(self, ranks: Ranks, repeats: int = 20, busy: int = BUSY_FLUSHES) -> None:
        self._ranks, self._repeats = ranks, repeats
        self._timer: Timer = CudaTimer(flushes=BUSY_FLUSHES) if ranks.gpu else HostTimer()
        self._waiting = self._timer
        if ranks.gpu and busy != BUSY_FLUSHES:
            self._waiting = CudaTimer(flushes=busy)

    def events(
        self, call: Callable[[], Any], barrier: Callable[[], Any], *, waits: bool = False
    ) -> float:
        """Microseconds between two events round the call (host engine: by its clock); ``waits``:
        the host waits in it."""
        timer = self._waiting if waits else self._timer
        timing = timer.measure(call, repeats=self._repeats, barrier=barrier)
        return slowest(timing, self._ranks.comm.allgather)

    def graph(
        self, call: Callable[[], Any], barrier: Callable[[], Any], calls: int
    ) -> tuple[float, str]:
        """Microseconds of one call of a graph and an empty text, or 0 and why there is no graph."""
        timer = self._timer
        if not isinstance(timer, CudaTimer):
            return 0.0, "the host engine has no graphs"
        trouble, captured = "", None
        try:
            captured = timer.capture(call, calls=calls, barrier=barrier)
        except (DeepEPCupyError, RuntimeError) as error:
            trouble = f"no graph: {error}"
        every = self._ranks.comm.allgather(trouble)
        if captured is None or any(every):
            return 0.0, next(reason for reason in every if reason)
        timing = timer.replay(captured, repeats=self._repeats, barrier=barrier)
        return slowest(timing, self._ranks.comm.allgather), ""

    def host(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Microseconds the host spends in a call, the GPU being idle when it begins: the median
        and the least."""
        times = []
        for _ in range(HOST_CALLS * self._repeats):
            self._ranks.synchronize()
            self._ranks.comm.Barrier()
            begin = time.perf_counter()
            result = call()
            times.append(1e6 * (time.perf_counter() - begin))
            del result
        self._ranks.synchronize()
        return self._ranks.most(statistics.median(times)), self._ranks.most(min(times))


# ------------------------------------------------------------------------------------- ceilings

Rates = dict[tuple[str, str, int], float]
"""(way, ceiling, bytes of a row) → bytes a microsecond. Ways are ``there`` and ``back``, ceilings
``push``, ``pull``, ``local``, and ``local, all SMs``: what the expanded layout's kernels take."""

_WAYS = {"dispatch": ("there",), "combine": ("back",), "roundtrip": ("there", "back")}


def ceilings_of(
    workload: Workload, modes: Iterable[Mode], kernel: CeilingKernel, meter: Meter, step: Step
) -> tuple[list[Measurement], Rates]:
    """Time bare copies of what these modes move, with the SMs of the Buffer. Collective."""
    bench, rates = workload.bench, Rates()
    found: list[Measurement] = []
    modes = list(modes)
    ways = [way for way in ("there", "back") if any(way in _WAYS[mode.operation] for mode in modes)]
    sizes = sorted({bench.shape.row_bytes(mode) for mode in modes}, reverse=True)
    for way, size in ((way, size) for way in ways for size in sizes):
        traffic = workload.traffic if way == "there" else workload.traffic.reversed
        region, sms = bench.runtime.memory.region, bench.num_sms or 1
        expanded = any(m.expanded and size == bench.shape.row_bytes(m) for m in modes)
        ceiling = Ceiling(
            kernel,
            bench.ranks.comm,
            bench.buffer,
            region,
            traffic,
            size,
            sms,
            all_sms=bench.ranks.num_sms if expanded else 0,
        )
        ceiling.check()
        for name, call in ceiling.calls.items():
            label = f"ceiling: {name}{f' {way}' * (len(ways) > 1)}"
            label += f", rows of {size} B" * (size != sizes[0])
            step(label)
            us, nbytes = meter.events(call, bench.buffer.barrier), ceiling.nbytes[name]
            rates[way, name, size] = nbytes / us
            found.append(
                Measurement(
                    what=label,
                    kind="ceiling",
                    operation=modes[0].operation,
                    num_sms=bench.num_sms,
                    num_tokens=workload.most_tokens,
                    us=us,
                    wire_bytes=0 if name.startswith("local") else nbytes,
                    logical_bytes=nbytes if name.startswith("local") else 0,
                )
            )
        del ceiling  # its boxes are free before the next ones are made
    return found, rates


def count_ceilings(modes: Iterable[Mode]) -> int:
    """How many ceilings belong to these modes at most: steps of a progress bar."""
    modes = list(modes)
    ways = {way for mode in modes for way in _WAYS[mode.operation]}
    expanded = {mode.one_byte for mode in modes if mode.expanded}
    return len(ways) * (3 * len({mode.one_byte for mode in modes}) + len(expanded))


@dataclass(frozen=True)
class Bytes:
    """Bytes that a call moves over the busiest link, into the busiest rank, and within its GPU."""

    wire: int
    logical: int
    local: int


def bytes_of(workload: Workload, mode: Mode) -> dict[str, Bytes]:
    """What a call of this mode moves on the way ``there``, on the way ``back``, or on both.

    Bytes within a GPU count where they may bound the call: where nothing crosses a link, and in
    the expanded layout, whose rows are written (dispatch), or read and their sums written
    (combine), by the receiver.
    """
    size = workload.bench.shape.row_bytes(mode)
    found = {}
    for way in _WAYS[mode.operation]:
        exact = mode.operation == "combine" and "expand" in mode.features
        rows = workload.choices if exact else workload.traffic
        wire = (rows if way == "there" else rows.reversed).wire_rows * size
        logical = (rows if way == "there" else rows.reversed).logical_rows * size
        local = 0
        if mode.expanded and not exact:
            local = workload.choices.logical_rows * size
            if way == "back":
                local = (local + workload.traffic.logical_rows * size) // 2
            else:
                logical = local
        elif wire == 0:
            local = logical
        found[way] = Bytes(wire, logical, local)
    return found


def floor_of(
    moved: dict[str, Bytes], rates: Rates, size: int, *, expanded: bool = False
) -> float | None:
    """Microseconds that the ceilings take to move that much; None where none were measured."""
    total = 0.0
    for way, each in moved.items():
        name = "push" if way == "there" else "pull"
        link = rates.get((way, name, size))
        local = rates.get((way, "local, all SMs" if expanded else "local", size))
        if local is None or (each.wire and link is None):
            return None
        total += max(each.wire / link if link else 0.0, each.local / local)
    return total


# ---------------------------------------------------------------------------------------- calls


def measure_workload(
    workload: Workload, modes: Iterable[Mode], meter: Meter, rates: Rates, step: Step
) -> list[Measurement]:
    """Time the calls of these modes, each checked before and after. Collective."""
    bench, found = workload.bench, []
    for mode in modes:
        step(f"{mode.operation} {mode.name}")
        call, barrier = workload.prepare(mode), bench.buffer.barrier
        workload.check(mode, call())
        us = meter.events(call, barrier, waits=not mode.capturable)
        graph_us, note = 0.0, ""
        if mode.capturable and bench.ranks.gpu:
            graph_us, note = meter.graph(call, barrier, graph_calls(mode, workload.most_tokens))
        host_us, host_min_us = meter.host(call) if bench.ranks.gpu else (None, None)
        workload.check(mode, call())
        moved = bytes_of(workload, mode)
        found.append(
            Measurement(
                what=mode.name,
                kind="call",
                operation=mode.operation,
                num_sms=bench.num_sms,
                num_tokens=workload.most_tokens,
                us=us,
                graph_us=graph_us or None,
                host_us=host_us,
                host_min_us=host_min_us,
                wire_bytes=sum(each.wire for each in moved.values()),
                logical_bytes=sum(each.logical for each in moved.values()),
                floor_us=floor_of(
                    moved, rates, bench.shape.row_bytes(mode), expanded=mode.expanded
                ),
                note=note,
            )
        )
    return found


def measure_nccl(
    workload: Workload, operation: str, connection: Any, meter: Meter, rates: Rates, step: Step
) -> Measurement:
    """The rows of the workload moved by NCCL, checked before. Collective."""
    bench, ranks = workload.bench, workload.ranks
    step("NCCL")
    routes = Routes(ranks.down(workload.handle.send_row), workload.traffic, ranks.rank)
    exchange = NcclExchange(connection, workload.x, routes)
    workload.check_rows("NCCL", exchange.dispatch())
    workload.check_sums("NCCL", exchange.combine(workload.inside))
    calls: dict[str, tuple[str, Callable[[], Any]]] = {
        "dispatch": ("NCCL: pack, send/recv", exchange.dispatch),
        "combine": ("NCCL: send/recv, scatter", lambda: exchange.combine(workload.inside)),
        "roundtrip": (
            "NCCL: pack, send/recv, scatter",
            lambda: exchange.combine(exchange.dispatch()),
        ),
    }
    what, call = calls[operation]
    us = meter.events(call, bench.buffer.barrier)
    base = "pool" if operation == "combine" else "cached"
    moved = bytes_of(workload, Mode(operation, base))
    host_us, host_min_us = meter.host(call)
    return Measurement(
        what=what,
        kind="baseline",
        operation=operation,
        num_sms=None,
        num_tokens=workload.most_tokens,
        us=us,
        host_us=host_us,
        host_min_us=host_min_us,
        wire_bytes=sum(each.wire for each in moved.values()),
        logical_bytes=sum(each.logical for each in moved.values()),
        floor_us=floor_of(moved, rates, bench.shape.row_bytes()),
    )
