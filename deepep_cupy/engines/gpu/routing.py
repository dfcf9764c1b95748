"""What a dispatch leaves on a rank: the handle's arrays, and rows on their way into a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepep_cupy.engines.calls import DispatchCall, Routing
from deepep_cupy.memory.block import BlockOwner
from deepep_cupy.memory.cuda_ipc import PoolArrays

__all__ = ["Addresses", "GpuRouting", "Received", "addresses_of"]

_INT32 = np.dtype(np.int32)
FLOAT32 = np.dtype(np.float32)


class Addresses:
    """Device addresses of what kernels need of a routing: words of four bytes, one part behind
    the other.

    Args:
        base: Where they begin.
        num_tokens: T.
        num_ranks: R.
        num_experts: El, 0 without choices.
        waited: Whether the host knows the number of received tokens.

    Attributes:
        send_row: ``[T, R]``.
        rows_per_rank: ``[R]``.
        psum_recv_rows: ``[R]``.
        expert_counts: ``[El]``.
        psum_expert_rows: ``[El]``.
        birth: One word.
        num_real: One word, the real number of received tokens; 0 where N is that number.
    """

    __slots__ = (
        "birth",
        "expert_counts",
        "num_real",
        "psum_expert_rows",
        "psum_recv_rows",
        "rows_per_rank",
        "send_row",
    )

    def __init__(
        self, base: int, num_tokens: int, num_ranks: int, num_experts: int, *, waited: bool
    ) -> None:
        self.send_row = base
        self.rows_per_rank = base = base + 4 * num_tokens * num_ranks
        self.psum_recv_rows = base = base + 4 * num_ranks
        self.expert_counts = base = base + 4 * num_ranks
        self.num_real = 0 if waited else base - 4
        self.psum_expert_rows = base = base + 4 * num_experts
        self.birth = base + 4 * num_experts


def words_bytes(num_tokens: int, num_ranks: int, num_experts: int) -> int:
    """How many bytes ``Addresses`` reach over."""
    return 4 * (num_tokens * num_ranks + 2 * (num_ranks + num_experts) + 1)


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


class GpuRouting(Routing):
    """A routing on a GPU. Its arrays are parts of one block of memory (``dispatching.py``).

    Made by ``made_of``, not by its constructor; changed by ``changed``, not by
    ``dataclasses.replace``.

    Attributes:
        host_rows_per_rank: Rows received from each rank, where the host knows them.
        addresses: For kernels; they begin where the block does.
    """

    host_rows_per_rank: tuple[int, ...] | None = None
    addresses: Addresses
    _arrays: PoolArrays
    _owner: BlockOwner
    _sources_at: int

    @classmethod
    def made_of(cls, **values: Any) -> GpuRouting:
        """Make one of fields of ``Routing`` and of what stands in for the arrays: ``addresses``,
        ``_arrays``, ``_owner`` (of the block) and ``_sources_at`` (behind the words)."""
        routing = object.__new__(cls)
        object.__setattr__(routing, "__dict__", values)  # it is frozen, and so has no other way
        return routing

    def learn(self, rows_per_rank: list[int]) -> int:
        """Let the host know the counts of this routing, whose maker it waits for them; N."""
        number = sum(rows_per_rank)
        self.__dict__.update(host_rows_per_rank=tuple(rows_per_rank), num_recv_tokens=number)
        return number

    def changed(self, **values: Any) -> GpuRouting:
        """A copy with other values for some fields."""
        return self.made_of(**{**self.__dict__, **values})

    def _words(self, begin: int, end: int) -> Any:
        """The words between two addresses."""
        offset = begin - self.addresses.send_row
        return self._arrays.array(self._begin, ((end - begin) // 4,), _INT32, offset)

    _begin: Any = _Part(lambda r: r._arrays.pointer(r._owner))
    send_row: Any = _Part(
        lambda r: r._words(r.addresses.send_row, r.addresses.rows_per_rank).reshape(
            r.num_tokens, r.num_ranks
        )
    )
    recv_src_idx: Any = _Part(
        lambda r: r._arrays.array(r._begin, (r.num_recv_tokens,), _INT32, r._sources_at)
    )
    recv_rows_per_rank: Any = _Part(
        lambda r: r._words(r.addresses.rows_per_rank, r.addresses.psum_recv_rows)
    )
    psum_recv_rows: Any = _Part(
        lambda r: r._words(r.addresses.psum_recv_rows, r.addresses.expert_counts)
    )
    expert_counts: Any = _Part(
        lambda r: r._or_none(r.addresses.expert_counts, r.addresses.psum_expert_rows)
    )
    psum_expert_rows: Any = _Part(
        lambda r: r._or_none(r.addresses.psum_expert_rows, r.addresses.birth)
    )
    birth: Any = _Part(lambda r: r._words(r.addresses.birth, r.addresses.birth + 4))

    @property
    def num_ranks(self) -> int:
        """R."""
        return (self.addresses.psum_recv_rows - self.addresses.rows_per_rank) // 4

    def _or_none(self, begin: int, end: int) -> Any:
        return self._words(begin, end) if begin != end else None


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
    routing: GpuRouting
    counts: tuple[int, ...] | None
    num_real: int
