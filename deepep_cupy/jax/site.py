"""A call site: everything about a call that JAX knows when it traces, as text for XLA.

A site travels in the compiled program as its only attribute, a string of JSON. So a handler needs
no table that was filled when the program was traced, and programs from JAX's persistent
compilation cache work.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

__all__ = ["TARGET", "Operation", "Site"]

Operation: TypeAlias = Literal["dispatch", "cached", "combine"]

TARGET = "deepep_cupy_{}"
"""Name of an operation's target in XLA."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Everything static of a call.

    Attributes:
        operation: ``"cached"`` is a dispatch with a handle.
        buffer: Number of the Buffer in this process, in the order of ``attach``.
        num_tokens: T, tokens this rank dispatched.
        capacity: W, received tokens that there is room for.
        hidden: H, elements of a row that is given.
        dtype: Of these rows.
        num_topk: K; 0 where neither choices nor weights travel.
        index_dtype: Of ``topk_idx``.
        weights: Whether ``topk_weights`` are given.
        alignment: ``expert_alignment`` of the dispatch.
        expanded: Whether rows are in the expanded layout.
        num_rows: Rows of ``recv_x``, and of ``combine``'s argument.
        reduce: Of a combine of the expanded layout.
        quantize: ``"fp8_e4m3"``, or None.
        num_biases: Of a combine.
        place: Where in the user's program the call stands, for messages.
        tag: Compared between the ranks: calls whose order XLA, or a user, has swapped meet calls of
            another tag.
    """

    operation: Operation
    buffer: int
    num_tokens: int
    capacity: int
    hidden: int
    dtype: str
    num_topk: int = 0
    index_dtype: str = "int32"
    weights: bool = False
    alignment: int = 1
    expanded: bool = False
    num_rows: int = 0
    reduce: Literal["exact", "per_rank"] = "exact"
    quantize: Literal["fp8_e4m3"] | None = None
    num_biases: int = 0
    place: str = ""
    tag: int = 0

    @property
    def target(self) -> str:
        """Name of the target that runs it."""
        return TARGET.format(self.operation)

    def text(self) -> str:
        """For XLA."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(text: bytes) -> Site:
        """The site that ``text`` is of."""
        return Site(**json.loads(text))
