"""Where every word lies: the control block of the symmetric region, and the report on the host.

Offsets are computed here once and emitted into the kernels' prelude (``constants``), so that host
and device cannot disagree.

Control block (device memory, start of each rank's region; peers write into the *inbox* lines)::

    offset   bytes            what                                   written by
    epoch        4  epoch of the next operation                      this rank's kernels
    poisoned     4  1 after a failure, until reset()                 this rank's kernels
    arrivals     4  blocks that left: count | failures << 16         this rank's kernels
    busy         4  serial of the operation inside, 0 for none       this rank's kernels
    tickets      4  drawn by the warps of a dispatch so far          this rank's blocks
    failures     4  records written to the report so far             this rank's kernels
    claimed      4  1 once a thread owns the details of a failure    this rank's kernels
    details     64  what that thread was waiting for                 this rank's kernels
    abort        4  why to stop: ``AbortFlag``s and ranks            peers and this rank
    headers      2 x R x (words + R) x 8   (epoch << 32 | value)     peers, by epoch parity
    arrived      2 x R x 8                 (epoch << 32 | status)    peers, by epoch parity
    partials     blocks x (R + 1) x 8      (epoch << 32 | rows, bad) this rank's blocks
    before       blocks x (R + 1) x 8      (epoch << 32 | rows)      this rank's blocks
    histogram    E x 4    rows per expert, all ranks' experts        this rank's blocks
    experts      2 x E x 8 (epoch << 32 | count), [R][E / R]         peers, by epoch parity

Report (page-locked host memory, one per Buffer)::

    word     what                                                    written
    0        records written so far                                  after each record
    1        serial of an operation that found the Buffer busy       on conflict
    2        unused
    8        4 records, the last four failures                       on failure
    then     R words (serial << 32 | rows from that rank)            dispatch, on GO
    then     E / R words (serial << 32 | rows for that expert)       dispatch, on GO

A record is ``RECORD_WORDS``, room up to ``RECORD_HEAD``, and all ranks' headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag

from deepep_cupy.protocol.headers import WORDS

__all__ = [
    "ABORT_LATE_SHIFT",
    "ABORT_REPORTER_SHIFT",
    "ALIGNMENT",
    "DETAIL_WORDS",
    "MAX_BLOCKS",
    "NUM_RECORDS",
    "RECORD_HEAD",
    "RECORD_WORDS",
    "AbortFlag",
    "ControlLayout",
    "Phase",
    "ReportLayout",
    "Verdict",
    "align",
    "header_words",
]

ALIGNMENT = 512
"""The pool begins at a multiple of this; so does each of its blocks, and each size is one."""
LINE = 128
"""Words that different parties write lie on different lines."""
MAX_BLOCKS = 256
"""Blocks a grid may have."""
NUM_RECORDS = 4
"""Failure records kept."""
RECORD_HEAD = 16
"""Words of a record before the headers."""
DETAIL_WORDS = ("phase", "peer", "expected", "seen", "block")
"""What the thread that gave up first was waiting for: the ``Phase``, the rank, the word's wanted
and its last value, and the thread's block."""
RECORD_WORDS = ("verdict", "serial", "kind", "epoch", "abort", *DETAIL_WORDS)
"""First words of a record: the ``Verdict``, which operation, the abort word, and the details."""
ABORT_LATE_SHIFT = 8
"""First bit of the late ranks in an abort word, one bit a rank."""
ABORT_REPORTER_SHIFT = 16
"""First bit of the ranks that gave up in an abort word, one bit a rank."""


class Verdict(IntEnum):
    """How an operation stands on a rank, as far as a block of its kernel knows."""

    GO = 0
    """Work."""
    REFUSED = 1
    """Headers differ, or a rank refused: nothing moves, the Buffer stays usable."""
    FAILED = 2
    """A wait expired, or a rank aborted: the Buffer is poisoned."""
    POISONED = 3
    """An earlier operation failed."""
    BUSY = 4
    """Another operation of this Buffer is running: take no part."""


class Phase(IntEnum):
    """What a wait was for."""

    HEADER = 1
    """A rank's header."""
    PARTIAL = 2
    """Rows that another block of the same kernel counted."""
    EXPERTS = 3
    """Rows per expert that a rank announces."""
    LOAD = 4
    """A bulk load into shared memory."""
    ARRIVAL = 5
    """A rank's word that its part of the operation is complete."""


class AbortFlag(IntFlag):
    """Why ranks stop: the low bits of an abort word. Words of several ranks may be or-ed."""

    TIMEOUT = 1
    """A wait expired."""
    RAISED = 2
    """A process gave up on the abort board."""


def align(number: int, unit: int) -> int:
    """Round ``number`` up to a multiple of ``unit``."""
    return -(-number // unit) * unit


def header_words(num_ranks: int) -> int:
    """Words of one header: the fixed ones and R counts."""
    return len(WORDS) + num_ranks


@dataclass(frozen=True)
class ControlLayout:
    """Byte offsets in the control block; everything before ``histogram`` depends on R alone.

    Attributes:
        num_ranks: R.
        num_experts: E, 0 without experts.
    """

    num_ranks: int
    num_experts: int = 0

    epoch = 0
    poisoned = 4
    arrivals = LINE
    busy = 2 * LINE
    tickets = 2 * LINE + 64
    failures = 3 * LINE
    claimed = 3 * LINE + 4
    details = 3 * LINE + 16
    abort = 4 * LINE
    headers = 5 * LINE

    @property
    def header_bytes(self) -> int:
        """Bytes of one header slot."""
        return 8 * header_words(self.num_ranks)

    @property
    def arrived(self) -> int:
        """Arrival words, [parity][rank]."""
        return align(self.headers + 2 * self.num_ranks * self.header_bytes, LINE)

    @property
    def partials(self) -> int:
        """Rows of each block for each rank, and its lowest bad token, [block][R + 1]."""
        return align(self.arrived + 2 * self.num_ranks * 8, LINE)

    @property
    def before(self) -> int:
        """Rows of all lower blocks, and whether choices are counted, [block][R + 1]."""
        return align(self.partials + MAX_BLOCKS * (self.num_ranks + 1) * 8, LINE)

    @property
    def histogram(self) -> int:
        """Rows per expert of the whole group, [E]."""
        return align(self.before + MAX_BLOCKS * (self.num_ranks + 1) * 8, LINE)

    @property
    def experts(self) -> int:
        """Rows per local expert announced by each rank, [parity][R][E / R]."""
        return align(self.histogram + self.num_experts * 4, LINE)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole control block."""
        return align(self.experts + 2 * self.num_experts * 8, ALIGNMENT)


@dataclass(frozen=True)
class ReportLayout:
    """Word (8-byte) offsets in the report."""

    num_ranks: int
    num_experts: int = 0

    num_failures = 0
    busy = 1
    records = 8

    @property
    def record_words(self) -> int:
        """Words of one record: the head and all ranks' headers."""
        return RECORD_HEAD + self.num_ranks * header_words(self.num_ranks)

    @property
    def rows(self) -> int:
        """Rows received from each rank, [R]."""
        return self.records + NUM_RECORDS * self.record_words

    @property
    def experts(self) -> int:
        """Rows received for each local expert, [E / R]."""
        return self.rows + self.num_ranks

    @property
    def num_words(self) -> int:
        """Words of the whole report."""
        return self.experts + self.num_experts // self.num_ranks
