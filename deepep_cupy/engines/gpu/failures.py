"""From the records of kernels to the errors a caller sees."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.errors import (
    ContractError,
    DeepEPCupyError,
    PeerAbortedError,
    PeerTimeoutError,
    StateError,
)
from deepep_cupy.memory.block import Block
from deepep_cupy.memory.pool import Pool
from deepep_cupy.protocol.control_block import (
    ABORT_LATE_SHIFT,
    ABORT_REPORTER_SHIFT,
    NUM_RECORDS,
    RECORD_HEAD,
    RECORD_WORDS,
    AbortFlag,
    Phase,
    ReportLayout,
    Verdict,
    header_words,
)
from deepep_cupy.protocol.headers import (
    ARGUMENTS,
    WORDS,
    Kind,
    kind_of,
    refused_elsewhere,
    verdict,
)
from deepep_cupy.protocol.sizes import BufferSpec
from deepep_cupy.ranks.abort_board import Abort, AbortReason
from deepep_cupy.ranks.rendezvous import Rendezvous, name_ranks

__all__ = ["FailureMonitor", "Record", "Report"]

_PHASES = {
    Phase.HEADER: "the header",
    Phase.PARTIAL: "its own blocks' counts",
    Phase.EXPERTS: "the rows per expert",
    Phase.LOAD: "a bulk load",
    Phase.ARRIVAL: "the end of the operation",
}
_WHAT_NEXT = "call reset() or close() on every rank, or end the program"
_HANDLE = ARGUMENTS.index("handle")


@dataclass(frozen=True)
class Record:
    """One failed or refused operation, as its kernel saw it.

    Attributes:
        verdict: ``Verdict.REFUSED`` or ``Verdict.FAILED``.
        serial: Of the launch.
        operation: Name of the method.
        epoch: Of the operation.
        timed_out: Some rank's wait expired.
        late: Ranks that were waited for in vain.
        reporters: Ranks that gave up.
        phase: What the first wait to expire on this rank was for; empty where none did.
        block: Of the grid, that wait's.
        headers: Word → value, for each rank; complete where the verdict is ``REFUSED``.
        counts: ``[source][destination]`` rows, as the headers say.
    """

    verdict: int
    serial: int
    operation: str
    epoch: int
    timed_out: bool
    late: tuple[int, ...]
    reporters: tuple[int, ...]
    phase: str
    block: int
    headers: tuple[dict[str, int], ...]
    counts: tuple[tuple[int, ...], ...]


class Report:
    """The words of ``protocol.control_block.ReportLayout``.

    Args:
        layout: Where they lie.

    Attributes:
        words: All of them.
        view: The same, cheaper to ask for one.
        seen: Number of records that ``take`` has returned; word 0 is that of those written.
        busy_at: Where ``busy_serial`` lies.
    """

    def __init__(self, layout: ReportLayout) -> None:
        import cupy

        self._layout = layout
        nbytes = 8 * layout.num_words
        self._memory: Any = cupy.cuda.alloc_pinned_memory(nbytes)
        self.words: NDArray[np.uint64] = np.frombuffer(self._memory, np.uint64, layout.num_words)
        self.words[:] = 0
        self.view: Any = memoryview(self.words)  # type: ignore[arg-type]
        self.seen = 0
        self.busy_at = layout.busy
        halves = self.view.cast("B").cast("I")[2 * layout.rows :]
        self._numbers, self._stamps = halves[::2], halves[1::2]

    @property
    def address(self) -> int:
        """Where kernels write."""
        return int(self.words.ctypes.data)

    # ------------------------------------------------------------------------------- counts

    def counts(self, serial: int, number: int) -> list[int] | None:
        """The first ``number`` counts of launch ``serial``, or None while some are missing."""
        if self._stamps[0] != serial:
            return None
        # A word is written at once, and once a launch: first its stamp, then its value.
        if self._stamps[:number].tolist().count(serial) != number:
            return None
        counts: list[int] = self._numbers[:number].tolist()
        return counts

    # ------------------------------------------------------------------------------ failures

    @property
    def has_news(self) -> bool:
        """True when a record has been written that ``take`` has not returned."""
        return bool(self.view[0] != self.seen)

    @property
    def busy_serial(self) -> int:
        """Serial of a launch that found the Buffer busy; 0: none did."""
        return int(self.view[self.busy_at])

    def take(self) -> tuple[list[Record], int]:
        """The records written since the last call, oldest first, and how many were lost: a ring
        of ``NUM_RECORDS`` holds them, in which a kernel may be writing the next one meanwhile."""
        found = []
        first, written = self.seen, int(self.view[0])
        for number in range(max(first, written - NUM_RECORDS), written):
            record = self._read(number)
            # Where as many have been counted since, the next one goes into this one's place.
            if int(self.view[0]) - number < NUM_RECORDS:
                found.append(record)
        self.seen = written
        return found, written - first - len(found)

    def clear(self) -> None:
        """Forget everything: the kernels' own counters are zeroed too."""
        self.words[:] = 0
        self.seen = 0

    def _read(self, number: int) -> Record:
        layout, width = self._layout, header_words(self._layout.num_ranks)
        begin = layout.records + number % NUM_RECORDS * layout.record_words
        words = [int(word) for word in self.words[begin : begin + layout.record_words]]
        said = dict(zip(RECORD_WORDS, words, strict=False))
        kind, abort, phase = kind_of(said["kind"]), said["abort"], said["phase"]
        ranks = range(layout.num_ranks)
        headers, counts = [], []
        for rank in ranks:
            at = RECORD_HEAD + rank * width
            headers.append(dict(zip(WORDS, words[at : at + len(WORDS)], strict=True)))
            counts.append(tuple(words[at + len(WORDS) : at + width]))
        return Record(
            verdict=said["verdict"],
            serial=said["serial"],
            operation=Kind(kind).name.lower() if kind in set(Kind) else f"operation {kind}",
            epoch=said["epoch"],
            timed_out=bool(abort & AbortFlag.TIMEOUT),
            late=tuple(rank for rank in ranks if abort >> ABORT_LATE_SHIFT >> rank & 1),
            reporters=tuple(rank for rank in ranks if abort >> ABORT_REPORTER_SHIFT >> rank & 1),
            phase=_PHASES[Phase(phase)] if phase in set(Phase) else "",
            block=said["block"],
            headers=tuple(headers),
            counts=tuple(counts),
        )


class FailureMonitor:
    """What the kernels of one Buffer have reported and no call has raised yet.

    Args:
        report: Where they write; an attribute too.
        rendezvous: The host's way to the other ranks, and the abort board.
        pool: Whose blocks are quarantined when an operation fails.
        spec: Sizes of the Buffer.

    Attributes:
        tracked: How many blocks operations had so far, for ``over``.
        left_at: When the host was last in a call of the Buffer, as ``time.monotonic`` says.
    """

    def __init__(
        self, report: Report, rendezvous: Rendezvous, pool: Pool, spec: BufferSpec
    ) -> None:
        self.report = report
        self._rendezvous = rendezvous
        self._pool = pool
        self._spec = spec
        self._own: set[int] = set()
        self._refused: list[Record] = []
        self._lost = 0
        self._failed: Record | None = None
        self._risky: deque[Block] = deque()
        self.tracked = 0
        self.left_at = time.monotonic()
        self._away = 0.0

    def own_refusal(self, serial: int) -> None:
        """The caller raises the refusal of this launch by itself."""
        self._own.add(serial)

    def track(self, blocks: list[Block]) -> None:
        """Remember blocks of the newest operation: late peers may write into them if it fails, and
        the host may have made many more calls before it learns of that."""
        self._risky.extend(blocks)
        self.tracked += len(blocks)

    def over(self, tracked: int) -> None:
        """The operations of the first ``tracked`` blocks have ended; where one had failed, there
        is a record of it."""
        if self.report.has_news or self._failed is not None:
            return
        risky = self._risky
        while risky and self.tracked - len(risky) < tracked:
            risky.popleft()

    def clear(self) -> None:
        """Forget everything, after a reset."""
        self.report.clear()
        self._own.clear()
        self._refused.clear()
        self._lost = 0
        self._failed = None
        self._risky.clear()

    # -------------------------------------------------------------------------------- raising

    @property
    def _quiet(self) -> bool:
        report = self.report
        view = report.view
        return bool(
            view[0] == report.seen
            and not (view[report.busy_at] or self._failed or self._refused or self._lost)
        )

    def raise_failure(self) -> None:
        """Raise what has poisoned the Buffer, again and again until ``clear``. For the begin of an
        operation: what was only refused does not keep the next one from being launched, for on
        other ranks it may have been launched already."""
        if not self._quiet:
            self._listen(time.monotonic() - self.left_at)
            self._raise_failed()

    def raise_pending(self, serial: int | None = None) -> None:
        """Raise a failure, again and again until ``clear``, else the oldest refusal, once.

        Args:
            serial: Only the refusal of this launch; older ones wait for the next call.
        """
        if self._quiet:
            return
        # A call that waits for the launch it has made is not away.
        self._listen(time.monotonic() - self.left_at if serial is None else 0.0)
        self._raise_failed()
        if self._lost and serial is None:
            lost, self._lost = self._lost, 0
            raise self._overwritten(lost)
        for record in self._refused:
            if serial is None or record.serial == serial:
                self._refused.remove(record)
                raise self._refusal(record)

    def _listen(self, away: float) -> None:
        """Take in what kernels have written.

        Args:
            away: Seconds that the host has been outside of the Buffer's calls.
        """
        if not self.report.has_news:
            return
        self._away = away
        records, lost = self.report.take()
        self._lost += lost
        for record in records:
            if record.verdict == Verdict.FAILED:
                for block in self._risky:
                    self._pool.quarantine(block)
                self._failed = record
            elif record.serial not in self._own and not _follows(record):
                self._refused.append(record)
            self._own.discard(record.serial)

    def _raise_failed(self) -> None:
        if self._failed is not None:
            raise self._failure(self._failed)
        if self.report.busy_serial:
            raise self._busy()

    def missing_report(self, serial: int) -> NoReturn:
        """A kernel has ended, and the counts it owes have not come."""
        self.raise_pending(serial)
        raise StateError(
            f"dispatch(): the kernel of rank {self._spec.rank} ended without a word; {_WHAT_NEXT}."
        )

    # --------------------------------------------------------------------------------- errors

    def _busy(self) -> StateError:
        return StateError(
            f"another operation of this Buffer was running on rank {self._spec.rank} when one "
            f"started; a Buffer is for one thread, or for threads that take turns; {_WHAT_NEXT}."
        )

    def _overwritten(self, number: int) -> ContractError:
        calls = "a call" if number == 1 else f"{number} calls"
        return ContractError(
            f"{calls} of this Buffer were refused earlier, and later refusals had overwritten why "
            f"before rank {self._spec.rank} looked; nothing was moved in them; call check() after "
            f"a synchronisation more often to learn more."
        )

    def _refusal(self, record: Record) -> ContractError:
        text = verdict(
            record.operation,
            record.headers,
            num_max_tokens_per_rank=self._spec.num_max_tokens_per_rank,
            num_experts=self._spec.num_experts,
            counts=record.counts,
        )
        error = ContractError(
            text or f"{record.operation}(): the ranks refused it; nothing was moved on any rank."
        )
        error.printed_elsewhere = refused_elsewhere(record.headers, self._spec.rank)
        return error

    def _failure(self, record: Record) -> DeepEPCupyError:
        rank, operation = self._spec.rank, record.operation
        if record.timed_out:
            return self._timeout(record)
        try:
            self._rendezvous.watch(operation)
        except DeepEPCupyError as error:
            return error
        origin = record.reporters[0] if record.reporters else -1
        text = f"rank {origin} gave up in {operation}()"
        self._rendezvous.board.abort(Abort(AbortReason.ERROR, origin, (), text))
        return PeerAbortedError(f"{text}, so rank {rank} cannot go on; {_WHAT_NEXT}.", origin)

    def _timeout(self, record: Record) -> PeerTimeoutError:
        rank, operation = self._spec.rank, record.operation
        self._rendezvous.board.abort(Abort(AbortReason.TIMEOUT, rank, record.late, operation))
        patience = f"{self._spec.timeout_s:g} s"
        late = tuple(each for each in record.late if each != rank)
        if not late:
            return PeerTimeoutError(
                f"{operation}(): {name_ranks(record.reporters)} waited {patience} in vain for "
                f"this rank, {rank}; {self._was_away()}{_WHAT_NEXT}.",
                record.late,
            )
        who = f"rank {rank}" if rank in record.reporters else name_ranks(record.reporters)
        phase = f"{record.phase} from " if record.phase else ""
        return PeerTimeoutError(
            f"{operation}(): {who} waited {patience} in vain for {phase}{name_ranks(late)}; "
            f"{self._was_away()}{_WHAT_NEXT}.",
            late,
        )

    def _was_away(self) -> str:
        """What the host did while the kernel waited, where it was elsewhere for long."""
        if self._away < self._spec.timeout_s / 2:
            return ""
        return (
            f"meanwhile this host was outside of the Buffer's calls for {self._away:.1f} s (a "
            f"kernel that waits stops a host that loads or compiles another kernel or frees "
            f"memory; if the late rank needs this host, do that before); "
        )


def _follows(record: Record) -> bool:
    """Whether a call was refused because the dispatch before it was, on every rank: its handle
    has no birth then. The dispatch has a record of its own."""
    return all(
        header["birth"] == 0 and header["refusal_value"] == _HANDLE for header in record.headers
    )
