"""The numbers a kernel text is compiled with: one mapping for all kernels.

What may differ from call to call is a parameter of the kernel; what is here is fixed for a Buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepep_cupy.protocol.control_block import (
    ABORT_LATE_SHIFT,
    ABORT_REPORTER_SHIFT,
    DETAIL_WORDS,
    MAX_BLOCKS,
    NUM_RECORDS,
    RECORD_HEAD,
    RECORD_WORDS,
    AbortFlag,
    ControlLayout,
    Phase,
    ReportLayout,
    Verdict,
    align,
    header_words,
)
from deepep_cupy.protocol.headers import (
    ARGUMENTS,
    DTYPE_CODES,
    OFFSET_UNIT,
    SCALE_CODES,
    SIGNATURE,
    WORDS,
    Kind,
    Layout,
    LayoutFlag,
    RefusalCode,
    dtype_code,
)
from deepep_cupy.protocol.sizes import SCALE_GROUP

__all__ = ["KernelShape", "kernel_constants", "shared_memory_limit"]

SHARED_HEAD = 3072
"""Bytes of shared memory before the stages: headers, counters, mbarriers."""
CAST_UNIT = 4 * SCALE_GROUP
"""A row that is cast on its way is cut at multiples of so many channels: the scales of a piece are
whole words, packed four to a word or not."""


def shared_memory_limit(arch: int) -> int:
    """Most dynamic shared memory of one block on ``sm_<arch>`` (CUDA programming guide)."""
    if arch >= 120:
        return 101_376
    if arch in (86, 89):
        return 101_376
    if arch >= 90:
        return 232_448
    return 166_912


@dataclass(frozen=True, kw_only=True)
class KernelShape:
    """What kernel texts are specialised for.

    Attributes:
        num_ranks: R.
        max_row_bytes: The longest row.
        num_threads: Threads a block, a multiple of 32.
        loads: ``"coherent"`` or ``"nc"``: which instruction reads rows (``common/access.cuh``).
        shared_limit: Dynamic shared memory a block may use, in bytes.
        turns_per_check: Polls between two looks at the clock and the abort words.
    """

    num_ranks: int = 2
    max_row_bytes: int = 14336
    num_threads: int = 512
    loads: str = "coherent"
    shared_limit: int = 232_448
    turns_per_check: int = 64

    @property
    def num_warps(self) -> int:
        """Warps a block."""
        return self.num_threads // 32

    @property
    def warp_bytes(self) -> int:
        """Stage memory of one warp, a multiple of 256."""
        return (self.shared_limit - SHARED_HEAD) // self.num_warps // 256 * 256

    @property
    def dispatch_stage_bytes(self) -> int:
        """One of the two pieces of a row a warp holds while it dispatches."""
        half = align(-(-self.max_row_bytes // 2), 128)
        return max(128, min(half, self.warp_bytes // 2))

    @property
    def cast_stage_bytes(self) -> int:
        """One of the two pieces of a row a warp holds while it casts the row to FP8: full units of
        ``CAST_UNIT`` float32 channels, and no more groups than a warp has lanes."""
        unit = 4 * CAST_UNIT
        half = align(-(-self.max_row_bytes // 2), unit)
        return max(unit, min(half, self.warp_bytes // 2, 2 * SCALE_GROUP * 32))

    @property
    def combine_piece_bytes(self) -> int:
        """Piece of a row a warp adds up at a time; it holds two pieces of each rank's row. At
        most four 16-byte words a lane, so that a sum fits into registers."""
        most = min(4 * 512, self.warp_bytes // (2 * self.num_ranks)) // 128 * 128
        return max(128, min(most, align(self.max_row_bytes, 128)))


def kernel_constants(shape: KernelShape) -> dict[str, int]:
    """All constants of the prelude, by their C names."""
    control = ControlLayout(shape.num_ranks)
    report = ReportLayout(shape.num_ranks)
    stages = 2
    constants = {
        "kNumRanks": shape.num_ranks,
        "kNumThreads": shape.num_threads,
        "kNumWarps": shape.num_warps,
        "kMaxBlocks": MAX_BLOCKS,
        "kLoadsNonCoherent": int(shape.loads == "nc"),
        "kTurnsPerCheck": shape.turns_per_check,
        "kOffsetUnit": OFFSET_UNIT,
        "kHeaderWords": header_words(shape.num_ranks),
        "kWordCounts": len(WORDS),
        "kNumSignatureWords": len(SIGNATURE),
        "kControlEpoch": control.epoch,
        "kControlPoisoned": control.poisoned,
        "kControlArrivals": control.arrivals,
        "kControlBusy": control.busy,
        "kControlFailures": control.failures,
        "kControlClaimed": control.claimed,
        "kControlDetails": control.details,
        "kControlAbort": control.abort,
        "kControlHeaders": control.headers,
        "kControlArrived": control.arrived,
        "kControlTickets": control.tickets,
        "kControlPartials": control.partials,
        "kControlBefore": control.before,
        "kControlHistogram": control.histogram,
        "kReportNumFailures": report.num_failures,
        "kReportBusy": report.busy,
        "kReportRecords": report.records,
        "kReportNumRecords": NUM_RECORDS,
        "kReportRecordWords": report.record_words,
        "kReportRecordHead": RECORD_HEAD,
        "kReportRows": report.rows,
        "kReportExperts": report.experts,
        "kNumDetails": len(DETAIL_WORDS),
        "kAbortLateShift": ABORT_LATE_SHIFT,
        "kAbortReporterShift": ABORT_REPORTER_SHIFT,
        "kDispatchStages": stages,
        "kDispatchStageBytes": shape.dispatch_stage_bytes,
        "kDispatchSharedBytes": SHARED_HEAD,
        "kDispatchBulkSharedBytes": (
            SHARED_HEAD + shape.num_warps * stages * shape.dispatch_stage_bytes
        ),
        "kCastStageBytes": shape.cast_stage_bytes,
        "kDispatchCastBulkSharedBytes": (
            SHARED_HEAD + shape.num_warps * stages * shape.cast_stage_bytes
        ),
        "kCombinePieceBytes": shape.combine_piece_bytes,
        "kCombineSharedBytes": SHARED_HEAD,
        "kCombineBulkSharedBytes": (
            SHARED_HEAD + shape.num_warps * 2 * shape.num_ranks * shape.combine_piece_bytes
        ),
        "kBarrierSharedBytes": SHARED_HEAD,
        "kScaleGroup": SCALE_GROUP,
        "kCastUnit": CAST_UNIT,
        "kExpandSharedBytes": 128 * shape.num_warps,
    }
    constants |= {f"kWord{_camel(word)}": index for index, word in enumerate(WORDS)}
    constants |= {f"kRecord{_camel(word)}": index for index, word in enumerate(RECORD_WORDS)}
    constants |= {f"kDetail{_camel(word)}": index for index, word in enumerate(DETAIL_WORDS)}
    constants |= {f"k{_camel(verdict.name)}": int(verdict) for verdict in Verdict}
    constants |= {f"kPhase{_camel(phase.name)}": int(phase) for phase in Phase}
    constants |= {f"kAbort{_camel(str(flag.name))}": int(flag) for flag in AbortFlag}
    constants |= {f"kKind{_camel(kind.name)}": int(kind) for kind in Kind}
    constants |= {f"kLayout{_camel(layout.name)}": int(layout) for layout in Layout}
    constants |= {
        f"kFlag{_camel(str(flag.name))}": int(flag)
        for flag in LayoutFlag
        if flag != LayoutFlag.PER_NODE  # kernels know one node
    }
    constants |= {f"kDtype{_camel(name)}": code for name, code in DTYPE_CODES.items()}
    constants |= {f"kScales{_camel(name)}": code for name, code in SCALE_CODES.items()}
    constants["kScalesFactor"] = dtype_code("", 0, "float32") - dtype_code("", 0)
    constants["kArgumentHandle"] = ARGUMENTS.index("handle")
    constants |= {f"kRefusal{_camel(code.name)}": int(code) for code in RefusalCode}
    return constants


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.lower().split("_"))
