"""What a pool says of itself: where its bytes are, and why there is no room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepep_cupy.errors import ContractError
from deepep_cupy.plan.headers import Refusal, RefusalCode
from deepep_cupy.transport.block import Block

__all__ = ["PoolExhaustedError", "PoolStatistics", "exhausted"]

_MIB = 1 << 20


class PoolExhaustedError(ContractError):
    """No room for a block. Carries a refusal, so that the other ranks raise too."""


@dataclass(frozen=True)
class PoolStatistics:
    """Where the bytes are, and what was done.

    Attributes:
        nbytes: Size of the pool.
        live: Bytes in blocks, the quarantined and the graphs' included.
        peak: The most ``live`` has been.
        free: Bytes in no block, no graph and no quarantine.
        largest_free: The longest free range.
        quarantined: Bytes withheld until ``release_quarantine``.
        captured: Bytes that belong to graphs, their free ones included.
        num_blocks: Live blocks.
        num_segments: Free ranges the allocator looks at.
        num_allocs: Blocks handed out so far.
        num_again: Those of them that took the place of one of their kind.
        num_waits: Device-side waits queued so far to make reuse safe.
    """

    nbytes: int
    live: int
    peak: int
    free: int
    largest_free: int
    quarantined: int
    captured: int
    num_blocks: int
    num_segments: int
    num_allocs: int
    num_again: int
    num_waits: int


def exhausted(
    who: str,
    nbytes: int,
    label: str,
    live: Sequence[Block],
    numbers: PoolStatistics,
    *,
    captured: bool,
) -> PoolExhaustedError:
    """The error for ``nbytes`` that are not there.

    Args:
        who: Put before the message.
        nbytes: Bytes wanted.
        label: What for.
        live: All blocks in use.
        numbers: Where the bytes are.
        captured: Whether a graph wants them.
    """
    blocks = sorted(live, key=lambda block: -block.nbytes)
    held = ", ".join(_describe(block) for block in blocks[:8]) or "nothing"
    if len(blocks) > 8:
        held += f" and {len(blocks) - 8} smaller blocks"
    advice = "drop results that are no longer needed, ask for own=True where they must live "
    advice += "long, or enlarge pool_bytes (size_hint() gives the least)"
    if captured:
        advice = "a graph gets only memory on which no earlier work can be pending: drop old "
        advice += "results and make one eager call before the capture, or enlarge pool_bytes"
    message = (
        f"{who}alloc(): the pool of {_size(numbers.nbytes)} has no room for "
        f"{_size(nbytes)}{f' for {label}' if label else ''} ({_size(numbers.free)} free, "
        f"{_size(numbers.largest_free)} in one piece, {_size(numbers.quarantined)} in "
        f"quarantine, {_size(numbers.captured)} owned by graphs; live: {held}): {advice}."
    )
    return PoolExhaustedError(message, Refusal(RefusalCode.POOL_EXHAUSTED, -(-nbytes // _MIB)))


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:.1f} MiB" if nbytes >= _MIB // 10 else f"{nbytes} bytes"


def _describe(block: Block) -> str:
    state = " (quarantined)" if block.quarantined else " (a graph's)" if block.capture else ""
    return f"{block.label or 'unnamed'} {_size(block.nbytes)}{state}"
