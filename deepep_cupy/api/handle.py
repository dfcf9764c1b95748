"""The handle of a dispatch: all that ``combine`` and later dispatches need to know about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepep_cupy.engines.base import Routing
from deepep_cupy.plan.headers import Layout

__all__ = ["DispatchHandle", "Signature"]


@dataclass(frozen=True)
class Signature:
    """What a call must share with the dispatch that made its handle. The dtype is not in it.

    Attributes:
        buffer: Serial number of the Buffer in this process.
        num_ranks: R.
        num_tokens: T, tokens this rank dispatched.
        num_topk: K, 0 without ``topk_idx``.
        num_experts: E of the Buffer, or None.
        layout: Whether choices or a mask were dispatched.
    """

    buffer: int
    num_ranks: int
    num_tokens: int
    num_topk: int
    num_experts: int | None
    layout: Layout


@dataclass(frozen=True, eq=False, repr=False)
class DispatchHandle:
    """Who sent what where in one dispatch.

    Any number of handles may be alive, and be used any number of times, in any order, but all
    ranks use the handles of the same dispatch in the same call. Its arrays must not be written.
    Not DeepEP V1's tuple: the fields have names.

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
        """N: rows this rank received, and rows ``combine`` takes."""
        return self.routing.num_recv_tokens

    @property
    def recv_src_idx(self) -> Any:
        """``[N]`` int32: number of each received row's token on its source rank."""
        return self.routing.recv_src_idx

    @property
    def recv_rows_per_rank(self) -> Any:
        """``[R]`` int32: rows received from each rank."""
        return self.routing.recv_rows_per_rank

    @property
    def send_row(self) -> Any:
        """``[T, R]`` int32: row of token t in rank r's ``recv_x``; -1: not sent there."""
        return self.routing.send_row

    @property
    def birth(self) -> Any:
        """Epoch of the dispatch: an int on the host engine, a device word on GPUs."""
        return self.routing.birth

    def __repr__(self) -> str:
        signature = self.signature
        return (
            f"DispatchHandle(num_tokens={self.num_tokens}, num_recv_tokens={self.num_recv_tokens},"
            f" num_ranks={signature.num_ranks}, num_topk={signature.num_topk}, "
            f"num_experts={signature.num_experts}, layout={signature.layout.name.lower()})"
        )
