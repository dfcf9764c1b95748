"""The handle of a dispatch: all that ``combine`` and later dispatches need to know about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepep_cupy.engines.calls import Routing, Signature
from deepep_cupy.errors import ContractError

__all__ = ["DispatchHandle", "shape_of"]


@dataclass(frozen=True, eq=False, repr=False)
class DispatchHandle:
    """Who sent what where in one dispatch.

    Any number of handles may be alive, and be used any number of times, in any order, but all
    ranks use the handles of the same dispatch in the same call. Its arrays must not be written.
    Not DeepEP V1's tuple: the fields have names, and V2's ones are among them.

    Where the dispatch did not wait for its counts, N stands for ``num_worst_tokens`` in every
    shape; the real numbers are in ``psum_num_recv_tokens_per_scaleup_rank`` and, per expert,
    ``num_unaligned_recv_tokens_per_expert``, and entries behind the real ones are -1.

    Attributes:
        routing: The engine's arrays.
        num_recv_tokens_per_expert_list: The list the dispatch returned.
        signature: What a call with this handle must share with it.
    """

    routing: Routing
    num_recv_tokens_per_expert_list: list[int]
    signature: Signature

    @property
    def num_tokens(self) -> int:
        """T: tokens this rank dispatched, and rows ``combine`` returns."""
        return self.routing.num_tokens

    @property
    def num_recv_tokens(self) -> int:
        """N: tokens this rank received, and rows ``combine`` takes unless expanded."""
        return self.routing.num_recv_tokens

    @property
    def num_rows(self) -> int:
        """Rows of ``recv_x``, and rows ``combine`` takes."""
        return self.routing.num_rows

    @property
    def counts_known(self) -> bool:
        """Whether the host waited for the counts, so that N is the real number."""
        return self.routing.waited

    @property
    def recv_src_idx(self) -> Any:
        """``[N]`` int32: number of each received token on its source rank."""
        return self.routing.recv_src_idx

    @property
    def recv_rows_per_rank(self) -> Any:
        """``[R]`` int32: tokens received from each rank."""
        return self.routing.recv_rows_per_rank

    @property
    def send_row(self) -> Any:
        """``[T, R]`` int32: number of token t among rank r's received tokens, which is its row of
        ``recv_x`` unless expanded; -1: not sent there."""
        return self.routing.send_row

    @property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Any:
        """``[R]`` int32: inclusive sums of ``recv_rows_per_rank``; the last entry is the real
        number of received tokens. None where the engine counts on the host alone."""
        return self.routing.psum_recv_rows

    @property
    def num_unaligned_recv_tokens_per_expert(self) -> Any:
        """``[El]`` int32: received tokens per local expert; None without ``topk_idx``, and where
        the engine counts on the host alone."""
        return self.routing.expert_counts

    @property
    def psum_num_recv_tokens_per_expert(self) -> Any:
        """``[El]`` int32. Expanded: first row of each local expert plus its number of tokens,
        where its rows end. Else: inclusive sums of the counts, each rounded up to
        ``expert_alignment``. None where ``num_unaligned_recv_tokens_per_expert`` is."""
        return self.routing.psum_expert_rows

    @property
    def do_expand(self) -> bool:
        """Whether ``recv_x`` has a row per (token, local expert)."""
        return self.routing.expanded

    @property
    def expanded_row(self) -> Any:
        """``[N, K]`` int32: row of ``recv_x`` with the copy for choice k of received token n; -1
        where that is no expert of this rank. None unless expanded."""
        return self.routing.expanded_row

    @property
    def num_expanded_tokens(self) -> int:
        """Rows of ``recv_x`` in the expanded layout, padding included; else 0."""
        return self.routing.num_expanded_rows

    @property
    def expert_alignment(self) -> int:
        """Of the dispatch."""
        return self.routing.expert_alignment

    @property
    def low_latency(self) -> bool:
        """Whether a dispatch with ``low_latency=True`` made it: its combine goes that way too, and
        no later dispatch takes it."""
        return self.routing.low_latency

    def expert_slices(self) -> Any:
        """Where the rows of each local expert begin and end in ``recv_x`` and in what ``combine``
        takes; rows that only fill up to ``expert_alignment`` are left out. Expanded layout.

        Collective: no.  Stream: current.  Host sync: where the host waited for the counts, for
        one copy on GPUs.

        Returns:
            Where the host waited for the counts, a list of El pairs (start, end) of whole numbers:
            ``for e, (start, end) in enumerate(handle.expert_slices()): y[start:end] = ...``.
            Else ``[El, 2]`` int32 of the same numbers, on the GPU on the CUDA engine.

        Raises:
            ContractError: The layout is not the expanded one, where the rows of an expert are no
                slice.
        """
        ends, counts = self.routing.psum_expert_rows, self.routing.expert_counts
        if not self.do_expand or ends is None or counts is None:
            raise ContractError(
                "expert_slices(): only the expanded layout has each expert's rows side by side; "
                "dispatch with do_expand=True, or find them by recv_topk_idx."
            )
        pairs = ends.repeat(2).reshape(-1, 2)
        pairs[:, 0] -= counts
        if not self.counts_known:
            return pairs
        return [(start, end) for start, end in pairs.tolist()]

    @property
    def birth(self) -> Any:
        """Epoch of the dispatch: an int on the host engine, a device word on GPUs."""
        return self.routing.birth

    def __repr__(self) -> str:
        signature = self.signature
        words = [f"num_tokens={self.num_tokens}", f"num_recv_tokens={self.num_recv_tokens}"]
        words += [
            f"{name}={getattr(signature, name)}"
            for name in ("num_ranks", "num_topk", "num_experts")
        ]
        words.append(f"layout={signature.layout.name.lower()}")
        if self.do_expand:
            words.append("expanded")
        if not self.counts_known:
            words.append("low latency" if self.low_latency else "no wait")
        arrays = ((name, getattr(self, name)) for name in _SHOWN)
        words += [f"{name}={shape_of(array)}" for name, array in arrays if array is not None]
        return f"DispatchHandle({', '.join(words)})"


_SHOWN = (
    "send_row",
    "recv_src_idx",
    "recv_rows_per_rank",
    "num_unaligned_recv_tokens_per_expert",
    "expanded_row",
)
"""Arrays whose shapes the ``repr`` of a handle tells."""


def shape_of(value: Any) -> str:
    """``float32[8, 4]`` for an array, ``(…, …)`` for a pair of them; anything else as it is. It
    reads no element."""
    if type(value) is tuple:
        return f"({', '.join(shape_of(each) for each in value)})"
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"{value.dtype}{list(shape)}"
