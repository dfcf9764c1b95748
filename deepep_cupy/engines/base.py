"""What the api asks of an engine, and what it gets back.

Two engines exist: ``engines/host.py`` (NumPy and MPI) and ``engines/cuda.py`` (CuPy and kernels).
The api has checked shapes, dtypes and sizes before it builds a call; an engine checks what only
the ranks together can know (headers) and what only the data can tell (values of ``topk_idx``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from deepep_cupy.plan.headers import Kind, Refusal

__all__ = [
    "Array",
    "CombineCall",
    "CombineOutput",
    "DispatchCall",
    "DispatchLayout",
    "DispatchOutput",
    "Engine",
    "Routing",
]

Array: TypeAlias = Any
"""``numpy.ndarray`` on the host engine, ``cupy.ndarray`` on the CUDA engine."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Who sent what where in one dispatch: all that a handle keeps.

    Attributes:
        num_tokens: T, tokens this rank sent.
        num_recv_tokens: N, rows this rank received.
        recv_src_idx: ``[N]`` int32, token number on its source rank.
        recv_rows_per_rank: ``[R]`` int32, rows received from each rank.
        send_row: ``[T, R]`` int32, absolute row of token t in rank r's ``recv_x``; -1: not sent.
        birth: The epoch of the dispatch; an int on the host, a device word on GPUs.
    """

    num_tokens: int
    num_recv_tokens: int
    recv_src_idx: Array
    recv_rows_per_rank: Array
    send_row: Array
    birth: Any


@dataclass(frozen=True, eq=False)
class DispatchCall:
    """A checked dispatch. Exactly one of topk_idx, is_token_in_rank and routing is given.

    Attributes:
        x: ``[T, H]`` rows, C-contiguous, any dtype.
        topk_idx: ``[T, K]`` int32 or int64, or ``None``. Values are not checked yet.
        topk_weights: ``[T, K]`` float32, or ``None``.
        is_token_in_rank: ``[T, R]`` bool, or ``None``.
        routing: A cached layout, or ``None``.
        expert_alignment: Each entry of the list of counts is rounded up to a multiple of this.
        own: True when the results are to be ordinary memory rather than pool memory.
    """

    x: Array
    topk_idx: Array | None
    topk_weights: Array | None
    is_token_in_rank: Array | None
    routing: Routing | None
    expert_alignment: int
    own: bool


@dataclass(frozen=True, eq=False)
class DispatchOutput:
    """What a dispatch produced; ``routing`` is the given one in a cached call."""

    recv_x: Array
    recv_topk_idx: Array | None
    recv_topk_weights: Array | None
    num_recv_tokens_per_expert: list[int]
    routing: Routing


@dataclass(frozen=True, eq=False)
class CombineCall:
    """A checked combine.

    Attributes:
        x: ``[N, H]`` rows, C-contiguous.
        routing: The routing of the handle.
        topk_weights: ``[N, K]`` float32, or ``None``.
        biases: Zero to two arrays ``[T, H]`` of the dtype of ``x``.
        own: True when the result is to be ordinary memory rather than pool memory.
    """

    x: Array
    routing: Routing
    topk_weights: Array | None
    biases: tuple[Array, ...]
    own: bool = False


@dataclass(frozen=True, eq=False)
class CombineOutput:
    """``combined_x`` [T, H] and ``combined_topk_weights`` [T, K] or ``None``."""

    combined_x: Array
    combined_topk_weights: Array | None


@dataclass(frozen=True, eq=False)
class DispatchLayout:
    """Counts of one rank's tokens: local, no communication.

    Attributes:
        num_tokens_per_rank: ``[R]`` int32; a token counts once a rank.
        num_tokens_per_expert: ``[E]`` int32.
        is_token_in_rank: ``[T, R]`` bool.
    """

    num_tokens_per_rank: Array
    num_tokens_per_expert: Array
    is_token_in_rank: Array


class Engine(Protocol):
    """One way to move rows between ranks. All methods but ``intake`` and ``empty`` may raise
    ``PeerTimeoutError`` and ``PeerAbortedError``."""

    name: str
    """``"host"`` or ``"cuda"``."""

    @property
    def device(self) -> int | None:
        """Number of this rank's GPU, as CuPy counts; None on the host engine."""
        ...

    def intake(self, operation: str, argument: str, value: object) -> Array:
        """Turn what the user passed into this engine's array type without a copy.

        Raises:
            ContractError: Wrong kind of array, wrong device, not contiguous. Carries a refusal.
        """
        ...

    def dispatch(self, call: DispatchCall) -> DispatchOutput:
        """Collective. Raises ContractError on every rank when headers differ or one refuses."""
        ...

    def combine(self, call: CombineCall) -> CombineOutput:
        """Collective. Raises ContractError on every rank when headers differ or one refuses."""
        ...

    def refuse(self, kind: Kind, refusal: Refusal) -> None:
        """Collective. Take this rank's place in the operation with a refusal; raises nothing for
        the refusal itself (the caller raises its own error)."""
        ...

    def barrier(self) -> None:
        """Collective."""
        ...

    def get_dispatch_layout(self, topk_idx: Array, num_experts: int) -> DispatchLayout:
        """Local. Entries outside 0..E-1 are ignored; the caller has checked shape and dtype."""
        ...

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """Local. Uninitialised memory from which combine needs no copy."""
        ...

    def check(self) -> None:
        """Local. Raise what a finished operation has left to be reported, if anything."""
        ...

    def abort(self, reason: str) -> None:
        """Local. Tell all ranks that this one gives up; nothing waits."""
        ...

    def reset(self) -> None:
        """Collective. Bring a poisoned engine back to work; older routings stay valid.

        Begins with ``Rendezvous.barrier`` (bounded, names who is late) and ends with another,
        after which every rank has cleared its line of the abort board.
        """
        ...

    def close(self, *, collective: bool) -> None:
        """Free everything but the group and the board, which the Buffer frees afterwards.

        ``collective=True`` begins with ``Rendezvous.barrier``, frees, and meets a second time:
        where it returns on one rank, it returns on all, and what blocks may follow. Where it
        raises, peers may still write here, and what they can reach is left as it is.
        ``collective=False`` waits for nobody and frees what can be freed alone.
        """
        ...
