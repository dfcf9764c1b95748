"""What a dispatch leaves on a rank: the handle's arrays, and rows on their way into a layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deepep_cupy.engines.calls import DispatchCall, Routing
from deepep_cupy.engines.gpu.cupy_types import DeviceArray, DType, Pointer
from deepep_cupy.memory.block import BlockOwner
from deepep_cupy.memory.cuda_ipc import PoolArrays

__all__ = [
    "FLOAT32",
    "INT32",
    "Addresses",
    "GpuRouting",
    "Received",
    "num_words",
    "own_routing",
    "words_bytes",
]

INT32: DType = np.dtype(np.int32)
FLOAT32: DType = np.dtype(np.float32)


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


def num_words(num_tokens: int, num_ranks: int, num_experts: int) -> int:
    """How many words of four bytes ``Addresses`` reach over."""
    return num_tokens * num_ranks + 2 * (num_ranks + num_experts) + 1


def words_bytes(num_tokens: int, num_ranks: int, num_experts: int) -> int:
    """How many bytes ``Addresses`` reach over."""
    return 4 * num_words(num_tokens, num_ranks, num_experts)


class GpuRouting:
    """A routing (``engines.calls.Routing``) on a GPU. Its arrays are parts of one block of memory
    (``dispatch.py`` draws it), and are made when they are first asked for: most never are.

    Args:
        addresses: For kernels; they begin where the block does.
        arrays: Of the pool.
        owner: Of the block.
        sources_at: Where the source indices begin in the block, bytes.
        num_tokens: T.
        num_recv_tokens: N, as far as the host knows yet.
        waited: Whether the host waits for the counts; ``learn`` follows then.
        expert_alignment: Of the dispatch.

    Attributes:
        addresses: See Args; the other attributes are those of ``Routing``.
        host_rows_per_rank: Rows received from each rank, where the host knows them.
    """

    low_latency = False
    expert_rows = 0
    recv_src_info: DeviceArray | None = None
    recv_layout_range: DeviceArray | None = None

    def __init__(
        self,
        addresses: Addresses,
        arrays: PoolArrays,
        owner: BlockOwner,
        sources_at: int,
        *,
        num_tokens: int,
        num_recv_tokens: int,
        waited: bool,
        expert_alignment: int,
    ) -> None:
        self.addresses = addresses
        self.num_tokens = num_tokens
        self.num_recv_tokens = num_recv_tokens
        self.waited = waited
        self.expert_alignment = expert_alignment
        self.host_rows_per_rank: tuple[int, ...] | None = None
        self.expanded_row: DeviceArray | None = None
        self.num_expanded_rows = 0
        self._arrays = arrays
        self._owner = owner
        self._sources_at = sources_at

    @property
    def stream(self) -> object:
        """The stream that its memory was made for; None: it is not of the pool."""
        return self._owner.block.stream

    # Called while the dispatch is being made, before anybody else sees the routing:

    def learn(self, rows_per_rank: list[int]) -> int:
        """Note the counts that the host has waited for; N."""
        self.host_rows_per_rank = tuple(rows_per_rank)
        self.num_recv_tokens = number = sum(rows_per_rank)
        return number

    def expand(self, expanded_row: DeviceArray, num_expanded_rows: int) -> None:
        """Note where the copies lie in the expanded layout."""
        self.expanded_row, self.num_expanded_rows = expanded_row, num_expanded_rows

    @property
    def expanded(self) -> bool:
        """See ``Routing``."""
        return self.expanded_row is not None

    @property
    def num_rows(self) -> int:
        """See ``Routing``."""
        return self.num_recv_tokens if self.expanded_row is None else self.num_expanded_rows

    @property
    def num_ranks(self) -> int:
        """R."""
        return (self.addresses.psum_recv_rows - self.addresses.rows_per_rank) // 4

    # -------------------------------------------------------------------------------- arrays

    @cached_property
    def send_row(self) -> DeviceArray:
        """``[T, R]``."""
        known = self.addresses
        words = self._words(known.send_row, known.rows_per_rank)
        return words.reshape(self.num_tokens, self.num_ranks)

    @cached_property
    def recv_src_idx(self) -> DeviceArray:
        """``[N]``."""
        return self._array(self.num_recv_tokens, self._sources_at)

    @cached_property
    def recv_rows_per_rank(self) -> DeviceArray:
        """``[R]``."""
        return self._words(self.addresses.rows_per_rank, self.addresses.psum_recv_rows)

    @cached_property
    def psum_recv_rows(self) -> DeviceArray:
        """``[R]``."""
        return self._words(self.addresses.psum_recv_rows, self.addresses.expert_counts)

    @cached_property
    def expert_counts(self) -> DeviceArray | None:
        """``[El]``, or None."""
        return self._words_if_any(self.addresses.expert_counts, self.addresses.psum_expert_rows)

    @cached_property
    def psum_expert_rows(self) -> DeviceArray | None:
        """``[El]``, or None."""
        return self._words_if_any(self.addresses.psum_expert_rows, self.addresses.birth)

    @cached_property
    def birth(self) -> DeviceArray:
        """One word."""
        return self._words(self.addresses.birth, self.addresses.birth + 4)

    @cached_property
    def _begin(self) -> Pointer:
        pointer: Pointer = self._arrays.pointer(self._owner)
        return pointer

    def _array(self, length: int, offset: int) -> DeviceArray:
        array: DeviceArray = self._arrays.array(self._begin, (length,), INT32, offset)
        return array

    def _words(self, begin: int, end: int) -> DeviceArray:
        """The words between two addresses."""
        return self._array((end - begin) // 4, begin - self.addresses.send_row)

    def _words_if_any(self, begin: int, end: int) -> DeviceArray | None:
        return self._words(begin, end) if begin != end else None


def own_routing(routing: Routing) -> GpuRouting:
    """The routing of a handle of this engine, whose dispatches make no other."""
    if not isinstance(routing, GpuRouting):
        raise TypeError(f"a routing of the cuda engine is needed, got {type(routing).__name__}.")
    return routing


@dataclass(frozen=True, eq=False)
class Received:
    """Received tokens before they are put into the expanded layout, and after.

    Attributes:
        call: The call.
        rows: ``[N, H]``; expanded: ``[rows, H]``.
        scales: ``[N, S]``, C-ordered, or None; expanded: ``[rows, S]``.
        topk_idx: ``[N, K]`` local experts; None in a cached call, without choices and expanded.
        topk_weights: ``[N, K]`` float32, or None; expanded: ``[rows]``.
        routing: Of the tokens; in a cached call the given one.
        counts: Tokens of each local expert, where the host has just learnt them.
    """

    call: DispatchCall
    rows: DeviceArray
    scales: DeviceArray | None
    topk_idx: DeviceArray | None
    topk_weights: DeviceArray | None
    routing: GpuRouting
    counts: tuple[int, ...] | None
