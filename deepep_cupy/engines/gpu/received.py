"""What a dispatch leaves on a rank: the handle's arrays, and rows on their way into a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepep_cupy.engines.base import DispatchCall, Routing
from deepep_cupy.transport.cuda_ipc import PoolArrays

__all__ = ["Addresses", "CudaRouting", "Received", "addresses_of"]

_INT32 = np.dtype(np.int32)


@dataclass(frozen=True)
class Addresses:
    """Device addresses of what kernels need of a routing.

    Attributes:
        send_row: ``[T, R]``.
        birth: One word.
        num_real: One word, the real number of received tokens; 0 where N is that number.
        rows_per_rank: ``[R]``.
    """

    send_row: int
    birth: int
    num_real: int
    rows_per_rank: int


class _Part:
    """An attribute that is made when it is first asked for: most handles' arrays never are."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, routing: Any, owner: type | None = None) -> Any:
        if routing is None:
            return self
        made = routing.__dict__[self._name] = self._make(routing)
        return made


class CudaRouting(Routing):
    """A routing on a GPU. Its arrays are parts of two blocks of memory::

        words   send_row [T, R] | rows per rank [R] | their sums [R] | counts per expert [El] |
                psum_expert_rows [El] | birth [1]
        meta    recv_src_idx [N] | ... (engines/gpu/dispatching.py)

    Made by ``made_of``, not by its constructor; changed by ``changed``, not by
    ``dataclasses.replace``.

    Attributes:
        host_rows_per_rank: Rows received from each rank, where the host knows them.
        addresses: For kernels.
    """

    host_rows_per_rank: tuple[int, ...] | None = None
    _words: Any
    _num_ranks: int
    _num_experts: int
    _arrays: PoolArrays
    _meta: Any

    @classmethod
    def made_of(cls, **values: Any) -> CudaRouting:
        """Make one of fields of ``Routing`` and of what stands in for the arrays: ``_words``,
        ``_num_ranks``, ``_num_experts`` (El, 0 without choices), and ``_arrays`` and ``_meta``
        (where the block begins)."""
        routing = object.__new__(cls)
        routing.__dict__.update(values)
        return routing

    def changed(self, **values: Any) -> CudaRouting:
        """A copy with other values for some fields."""
        return self.made_of(**{**self.__dict__, **values})

    def _slice(self, at: int, count: int) -> Any:
        first = self.num_tokens * self._num_ranks + at
        return self._words[first : first + count]

    send_row: Any = _Part(
        lambda r: r._slice(-r.num_tokens * r._num_ranks, r.num_tokens * r._num_ranks).reshape(
            r.num_tokens, r._num_ranks
        )
    )
    recv_src_idx: Any = _Part(lambda r: r._arrays.array(r._meta, (r.num_recv_tokens,), _INT32))
    recv_rows_per_rank: Any = _Part(lambda r: r._slice(0, r._num_ranks))
    psum_recv_rows: Any = _Part(lambda r: r._slice(r._num_ranks, r._num_ranks))
    expert_counts: Any = _Part(
        lambda r: r._slice(2 * r._num_ranks, r._num_experts) if r._num_experts else None
    )
    psum_expert_rows: Any = _Part(
        lambda r: (
            r._slice(2 * r._num_ranks + r._num_experts, r._num_experts) if r._num_experts else None
        )
    )
    birth: Any = _Part(lambda r: r._slice(2 * (r._num_ranks + r._num_experts), 1))
    addresses: Any = _Part(lambda r: r._addresses())

    def _addresses(self) -> Addresses:
        base, ranks = self._words.data.ptr, self._num_ranks
        counts = base + 4 * self.num_tokens * ranks
        real = counts + 4 * (2 * ranks - 1)
        birth = counts + 8 * (ranks + self._num_experts)
        return Addresses(base, birth, 0 if self.waited else real, counts)


def addresses_of(routing: Routing) -> Addresses:
    """Where kernels find what they need of a routing of this engine."""
    found: Addresses = getattr(routing, "addresses")  # noqa: B009 - the api knows Routing alone
    return found


@dataclass(frozen=True, eq=False)
class Received:
    """Received tokens before they are put into the expanded layout, and after.

    Attributes:
        call: The call.
        rows: ``[N, H]``; expanded: ``[rows, H]``.
        scales: ``[N, S]``, C-ordered, or None; expanded: ``[rows, S]``.
        topk_idx: ``[N, K]`` local experts; None in a cached call, without choices and expanded.
        topk_weights: ``[N, K]`` float32, or None; expanded: ``[rows]``.
        routing: Of the tokens; in a cached call the given one. Expanded: with its
            ``expanded_row`` and ``num_expanded_rows``.
        counts: Tokens of each local expert, where the host has just learnt them.
        num_real: Device address of the real number of tokens; 0 where N is that number.
    """

    call: DispatchCall
    rows: Any
    scales: Any
    topk_idx: Any
    topk_weights: Any
    routing: CudaRouting
    counts: tuple[int, ...] | None
    num_real: int
