"""What links and memory carry at so many SMs: the rows of an exchange with nothing around them.

One kernel copies rows between the Buffers' pools: pushed by their senders, pulled by their
receivers, both directions of every link at once, or copied within a GPU. An operation is judged
beside the time that these bare copies take in the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepep_cupy.bench.rows import WrongResultError
from deepep_cupy.bench.traffic import Traffic
from deepep_cupy.errors import CompileError, PlatformError
from deepep_cupy.protocol.control_block import align

__all__ = ["BoxLayout", "Ceiling", "CeilingKernel", "spread"]

_LONG_ROW = 1 << 20
"""Bytes of a row for which the kernel is specialised: its shared memory then holds the largest
pieces."""
_MOST_LOCAL_ROWS = 8192
_ROW_UNIT = 16


def spread(rows: tuple[int, ...]) -> int:
    """The stride in which a kernel takes rows, so that segments take turns.

    Near the golden ratio of their number, and without a common factor with it; 1 where there is
    one segment alone.
    """
    total = sum(rows)
    if sum(number > 0 for number in rows) < 2:
        return 1
    stride = max(1, round(total * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, total) != 1:
        stride += 1
    return stride


@dataclass(frozen=True)
class BoxLayout:
    """Where the rows of all ranks lie while they are copied.

    Each rank has an outbox and an inbox, with a segment for every rank in rank order.

    Attributes:
        traffic: Who sends how many rows to whom.
        row_bytes: A multiple of 16.
    """

    traffic: Traffic
    row_bytes: int

    def sent(self, rank: int) -> tuple[int, ...]:
        """Rows to each rank."""
        return self.traffic.rows[rank]

    def received(self, rank: int) -> tuple[int, ...]:
        """Rows from each rank."""
        return tuple(line[rank] for line in self.traffic.rows)

    def out_offset(self, source: int, destination: int) -> int:
        """Bytes before a segment in the outbox of ``source``."""
        return sum(self.sent(source)[:destination]) * self.row_bytes

    def in_offset(self, source: int, destination: int) -> int:
        """Bytes before a segment in the inbox of ``destination``."""
        return sum(self.received(destination)[:source]) * self.row_bytes

    def push(self, rank: int, outbox: int, inboxes: list[int]) -> dict[str, Any]:
        """What the kernel of a sender is launched with; addresses of boxes as it sees them."""
        ranks = range(self.traffic.num_ranks)
        return self._values(
            [outbox + self.out_offset(rank, other) for other in ranks],
            [inboxes[other] + self.in_offset(rank, other) for other in ranks],
            self.sent(rank),
        )

    def pull(self, rank: int, outboxes: list[int], inbox: int) -> dict[str, Any]:
        """What the kernel of a receiver is launched with; addresses as the receiver sees them."""
        ranks = range(self.traffic.num_ranks)
        return self._values(
            [outboxes[other] + self.out_offset(other, rank) for other in ranks],
            [inbox + self.in_offset(other, rank) for other in ranks],
            self.received(rank),
        )

    def local(self, rank: int, rows: int, outbox: int, inbox: int) -> dict[str, Any]:
        """A copy from a rank's own outbox to its own inbox."""
        segments = tuple(rows if other == rank else 0 for other in range(self.traffic.num_ranks))
        boxes = [outbox] * len(segments), [inbox] * len(segments)
        return self._values(*boxes, segments)

    def _values(
        self, source: list[int], target: list[int], rows: tuple[int, ...]
    ) -> dict[str, Any]:
        return {
            "source": source,
            "target": target,
            "rows": list(rows),
            "num_rows": sum(rows),
            "stride": spread(rows),
            "row_bytes": self.row_bytes,
        }


class CeilingKernel:
    """The copy kernel, compiled and loaded. The constructor is collective.

    Args:
        comm: mpi4py communicator.
        device: CUDA ordinal, the current device.
    """

    def __init__(self, comm: Any, device: int) -> None:
        import cupy

        from deepep_cupy.engines.gpu.kernels import get_kernel, shape_constants
        from deepep_cupy.jit.build import Request, build_all, open_cache
        from deepep_cupy.jit.compile import compiler_archs, load, target_for

        arch = int(cupy.cuda.Device(device).compute_capability)
        self.spec = get_kernel("ceiling_bulk" if arch >= 90 else "ceiling")
        self.constants = shape_constants(arch, num_ranks=comm.size, max_row_bytes=_LONG_ROW)
        request = Request(self.spec, self.constants, target_for(arch, compiler_archs()))
        trouble = ""
        try:
            cache = open_cache()  # a temporary one lasts until the kernel is loaded
            (built,) = build_all([request], cache, compiles=comm.rank == 0, barrier=comm.Barrier)
            self._loaded: Any = load(built.image, self.spec.entry, self.spec.name)
        except (CompileError, PlatformError) as error:
            trouble = str(error)
        for rank, reason in enumerate(comm.allgather(trouble)):
            if reason:
                raise CompileError(f"rank {rank}: {reason}")

    def launch(self, values: Mapping[str, Any], grid: int) -> Callable[[], None]:
        """Make a function that launches the kernel on the current stream."""
        import cupy

        from deepep_cupy.jit.launch import Launch

        ready = Launch(self._loaded, self.spec, self.constants, grid=grid, values={"d": values})
        current = cupy.cuda.get_current_stream
        return lambda: ready(current().ptr)


class Ceiling:
    """Copies that move what an exchange moves. The constructor is collective.

    Args:
        kernel: The kernel.
        comm: mpi4py communicator.
        buffer: Whose pool the boxes come from.
        region: The symmetric memory of that Buffer.
        traffic: The exchange.
        row_bytes: Bytes of a row as it travels.
        num_sms: Blocks of the kernel on this rank.
        all_sms: SMs of the GPU, for ``local, all SMs``; 0: without it.

    Attributes:
        calls: ``push`` and ``pull`` of all rows that cross links, where any do; ``local``.
        nbytes: Bytes that each moves: over the busiest link, or in the largest local copy.
    """

    def __init__(
        self,
        kernel: CeilingKernel,
        comm: Any,
        buffer: Any,
        region: Any,
        traffic: Traffic,
        row_bytes: int,
        num_sms: int,
        all_sms: int = 0,
    ) -> None:
        self._comm, self._buffer, rank = comm, buffer, comm.rank
        self._rank = rank
        self._boxes = boxes = BoxLayout(traffic.over_links(), align(row_bytes, _ROW_UNIT))
        received = sum(line[rank] for line in traffic.rows)
        self._local_rows = max(1, min(received, _MOST_LOCAL_ROWS))
        out_rows = max(sum(boxes.sent(rank)), self._local_rows)
        in_rows = max(sum(boxes.received(rank)), self._local_rows)
        self._outbox = buffer.empty((out_rows, boxes.row_bytes), np.uint8)
        self._inbox = buffer.empty((in_rows, boxes.row_bytes), np.uint8)
        mine = [box.data.ptr for box in (self._outbox, self._inbox)]
        every = comm.allgather([address - region.base for address in mine])
        bases = region.peer_base
        outboxes = [base + offsets[0] for base, offsets in zip(bases, every, strict=True)]
        inboxes = [base + offsets[1] for base, offsets in zip(bases, every, strict=True)]
        wanted = {"local": boxes.local(rank, self._local_rows, *mine)}
        self.nbytes = {"local": max(comm.allgather(self._local_rows)) * boxes.row_bytes}
        if boxes.traffic.wire_rows:
            wanted["push"] = boxes.push(rank, mine[0], inboxes)
            wanted["pull"] = boxes.pull(rank, outboxes, mine[1])
            self.nbytes |= dict.fromkeys(
                ("push", "pull"), boxes.traffic.wire_rows * boxes.row_bytes
            )
        self.calls: dict[str, Callable[[], None]] = {
            name: kernel.launch(values, num_sms) if values["num_rows"] else _nothing
            for name, values in wanted.items()
        }
        if all_sms:
            self.calls["local, all SMs"] = kernel.launch(wanted["local"], all_sms)
            self.nbytes["local, all SMs"] = self.nbytes["local"]

    def check(self) -> None:
        """Run each copy once and compare every byte. Collective.

        Raises:
            WrongResultError: On every rank.
        """
        self._outbox.fill(0xFF)
        for other, rows in enumerate(self._boxes.sent(self._rank)):
            self._segment(self._outbox, self._boxes.out_offset(self._rank, other), rows).fill(
                _mark(self._rank, other)
            )
        for name, call in self.calls.items():
            self._inbox.fill(0)
            self._buffer.barrier()
            call()
            self._buffer.barrier()
            wrong = self._comm.allgather(self._wrong_bytes(name))
            if any(wrong):
                raise WrongResultError(
                    f"bench: the ceiling {name!r} left {wrong} wrong bytes on the ranks; no time "
                    "of this run means anything."
                )

    def _wrong_bytes(self, name: str) -> int:
        if name.startswith("local"):
            rows = self._local_rows
            return int((self._inbox[:rows] != self._outbox[:rows]).sum())
        return sum(
            int(
                (
                    self._segment(self._inbox, self._boxes.in_offset(other, self._rank), rows)
                    != _mark(other, self._rank)
                ).sum()
            )
            for other, rows in enumerate(self._boxes.received(self._rank))
        )

    def _segment(self, box: Any, offset: int, rows: int) -> Any:
        begin = offset // self._boxes.row_bytes
        return box[begin : begin + rows]


def _mark(source: int, destination: int) -> int:
    """A byte other than 0 for the rows from one rank to another."""
    return 16 * source + destination + 1


def _nothing() -> None:
    """The call of a rank that has no rows to move."""
