"""What kernels tell the host: counts, and records of what went wrong, in page-locked memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepep_cupy.plan.headers import WORDS, Kind
from deepep_cupy.plan.layout import NUM_RECORDS, RECORD_HEAD, ReportLayout, header_words

__all__ = ["FAILED", "REFUSED", "Record", "Report"]

REFUSED, FAILED = 1, 2
"""Verdicts of ``comm/control.cuh``."""
_TIMEOUT, _RAISED = 1, 2
_PHASES = {
    1: "the header",
    2: "its own blocks' counts",
    3: "the rows per expert",
    4: "a bulk load",
    5: "the end of the operation",
}


@dataclass(frozen=True)
class Record:
    """One failed or refused operation, as its kernel saw it.

    Attributes:
        verdict: ``REFUSED`` or ``FAILED``.
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
    """The words of ``plan.layout.ReportLayout``.

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
        # A word is written at once, and once a launch: first its stamp, then what it says.
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

    def take(self) -> list[Record]:
        """The records written since the last call, oldest first; at most ``NUM_RECORDS``."""
        written = int(self.view[0])
        first = max(self.seen, written - NUM_RECORDS)
        self.seen = written
        return [self._read(number) for number in range(first, written)]

    def clear(self) -> None:
        """Forget everything: the kernels' own counters are zeroed too."""
        self.words[:] = 0
        self.seen = 0

    def _read(self, number: int) -> Record:
        layout, width = self._layout, header_words(self._layout.num_ranks)
        begin = layout.records + number % NUM_RECORDS * layout.record_words
        words = [int(word) for word in self.words[begin : begin + layout.record_words]]
        verdict, serial, kind, epoch, abort, phase = words[:6]
        block = words[9]
        ranks = range(layout.num_ranks)
        headers, counts = [], []
        for rank in ranks:
            at = RECORD_HEAD + rank * width
            headers.append(dict(zip(WORDS, words[at : at + len(WORDS)], strict=True)))
            counts.append(tuple(words[at + len(WORDS) : at + width]))
        return Record(
            verdict=verdict,
            serial=serial,
            operation=Kind(kind).name.lower() if kind in set(Kind) else f"operation {kind}",
            epoch=epoch,
            timed_out=bool(abort & _TIMEOUT),
            late=tuple(rank for rank in ranks if abort >> 8 >> rank & 1),
            reporters=tuple(rank for rank in ranks if abort >> 16 >> rank & 1),
            phase=_PHASES.get(phase, ""),
            block=block,
            headers=tuple(headers),
            counts=tuple(counts),
        )
