"""From the records of kernels to the errors a caller sees."""

from __future__ import annotations

from collections import deque
from typing import NoReturn

from deepep_cupy.engines.gpu.report import FAILED, Record, Report
from deepep_cupy.errors import (
    ContractError,
    DeepEPCupyError,
    PeerAbortedError,
    PeerTimeoutError,
    StateError,
)
from deepep_cupy.plan.headers import ARGUMENTS, verdict
from deepep_cupy.plan.spec import BufferSpec
from deepep_cupy.transport.block import Block
from deepep_cupy.transport.board import Abort, AbortReason
from deepep_cupy.transport.pool import Pool
from deepep_cupy.transport.rendezvous import Rendezvous, name_ranks

__all__ = ["News"]

_WHAT_NEXT = "call reset() or close() on every rank, or end the program"
_BLOCKS_AT_RISK = 12
_HANDLE = ARGUMENTS.index("handle")


class News:
    """What the kernels of one Buffer have reported and nobody has raised yet.

    Args:
        report: Where they write.
        rendezvous: The host's way to the other ranks, and the abort board.
        pool: Whose blocks are quarantined when an operation fails.
        spec: Sizes of the Buffer.
    """

    def __init__(
        self, report: Report, rendezvous: Rendezvous, pool: Pool, spec: BufferSpec
    ) -> None:
        self._report = report
        self._rendezvous = rendezvous
        self._pool = pool
        self._spec = spec
        self._own: set[int] = set()
        self._refused: list[Record] = []
        self._failed: Record | None = None
        self._risky: deque[Block] = deque(maxlen=_BLOCKS_AT_RISK)

    def own_refusal(self, serial: int) -> None:
        """The caller raises the refusal of this launch by itself."""
        self._own.add(serial)

    def at_risk(self, blocks: list[Block]) -> None:
        """Remember blocks of the newest operation: late peers may write into them if it fails."""
        self._risky.extend(blocks)

    def clear(self) -> None:
        """Forget everything, after a reset."""
        self._report.clear()
        self._own.clear()
        self._refused.clear()
        self._failed = None
        self._risky.clear()

    # -------------------------------------------------------------------------------- raising

    def raise_any(self, serial: int | None = None) -> None:
        """Raise a failure, again and again until ``clear``, else the oldest refusal, once.

        Args:
            serial: Only the refusal of this launch; older ones wait for the next call.
        """
        report = self._report
        view = report.view
        if view[0] == report.seen and not (view[report.busy_at] or self._failed or self._refused):
            return
        if report.has_news:
            for record in report.take():
                if record.verdict == FAILED:
                    for block in self._risky:
                        self._pool.quarantine(block)
                    self._failed = record
                elif record.serial not in self._own and not _follows(record):
                    self._refused.append(record)
                self._own.discard(record.serial)
        if self._failed is not None:
            raise self._failure(self._failed)
        for record in self._refused:
            if serial is None or record.serial == serial:
                self._refused.remove(record)
                raise self._refusal(record)
        if report.busy_serial:
            raise self._busy()

    def silence(self, serial: int) -> NoReturn:
        """A kernel has ended, and the counts it owes have not come."""
        self.raise_any(serial)
        raise StateError(
            f"dispatch(): the kernel of rank {self._spec.rank} ended without a word; {_WHAT_NEXT}."
        )

    # --------------------------------------------------------------------------------- errors

    def _busy(self) -> StateError:
        return StateError(
            f"another operation of this Buffer was running on rank {self._spec.rank} when one "
            f"started; a Buffer is for one thread, or for threads that take turns; {_WHAT_NEXT}."
        )

    def _refusal(self, record: Record) -> ContractError:
        text = verdict(
            record.operation,
            record.headers,
            num_max_tokens_per_rank=self._spec.num_max_tokens_per_rank,
            num_experts=self._spec.num_experts,
            counts=record.counts,
        )
        return ContractError(
            text or f"{record.operation}(): the ranks refused it; nothing was moved on any rank."
        )

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
                f"this rank, {rank}; {_WHAT_NEXT}.",
                record.late,
            )
        who = f"rank {rank}" if rank in record.reporters else name_ranks(record.reporters)
        phase = f"{record.phase} from " if record.phase else ""
        return PeerTimeoutError(
            f"{operation}(): {who} waited {patience} in vain for {phase}{name_ranks(late)}; "
            f"{_WHAT_NEXT}.",
            late,
        )


def _follows(record: Record) -> bool:
    """Whether a call was refused because the dispatch before it was, on every rank: its handle
    has no birth then. The dispatch has a record of its own."""
    return all(
        header["birth"] == 0 and header["refusal_value"] == _HANDLE for header in record.headers
    )
