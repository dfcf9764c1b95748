"""What the api asks of an engine, and what it gets back.

Two engines exist: ``engines/host`` (NumPy and MPI) and ``engines/gpu`` (CuPy and kernels).
The api has checked shapes, dtypes and sizes before it builds a call. An engine checks what only
the ranks together can know (headers), and what only the data can tell (values of ``topk_idx``).
``reference/`` defines every result; this file defines what is passed to an engine and back.

Outputs are not frozen dataclasses, because one is made in every call and these are slower to
make; none of them is changed afterwards.

An engine names the modes it has in ``modes``; the api refuses, on every rank, a call that needs
another. Without any mode an engine does plain ``dispatch``, ``combine`` and ``barrier``.

===============  =========================================================================
mode             what a call may have then
===============  =========================================================================
``scales``       ``DispatchCall.scales``: FP8 rows with scales
``quantize``     ``DispatchPlan.quantize``: rows cast to FP8 on their way
``no_wait``      ``DispatchPlan.num_worst_tokens``: the host learns no count
``expand``       ``DispatchPlan.expand``, and combines of such handles
``expert_counts``  ``Routing.expert_counts`` and ``psum_expert_rows`` in every call with choices
``stats``        ``DispatchCall.recv_stats``
``events``       ``streams`` of both calls, ``capture``, ``comm_stream``
``out``          ``CombineCall.out``
``low_latency``  ``DispatchPlan.low_latency``, its ``expert_rows`` and ``hook``, and combines of
                 such routings
===============  =========================================================================

``no_wait`` and ``expand`` imply ``expert_counts`` for the calls that use them, and every
combination of the modes an engine names is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from deepep_cupy.engines.calls import Array, CombineCall, DispatchCall, Event, Routing
from deepep_cupy.protocol.headers import Kind, Refusal

__all__ = [
    "ALL_MODES",
    "CombineOutput",
    "DispatchLayout",
    "DispatchOutput",
    "Engine",
]

ALL_MODES = frozenset(
    {
        "scales",
        "quantize",
        "no_wait",
        "expand",
        "expert_counts",
        "stats",
        "events",
        "out",
        "low_latency",
    }
)
"""Every mode there is."""


@dataclass(eq=False, slots=True)
class DispatchOutput:
    """What a dispatch produced.

    Attributes:
        recv_x: ``[routing.num_rows, H]``; dtype of x, or of ``quantize``.
        recv_topk_idx: ``[N, K]``; rows behind the real ones are -1. ``None`` without choices, in
            a cached call and in the expanded layout.
        recv_topk_weights: ``[N, K]`` float32, 0 where the index is -1 and in rows behind the
            real ones (cached: as passed, unmasked); expanded: ``[routing.num_rows]``, the weight
            of the row's choice, cached or not.
        num_recv_tokens_per_expert: Rounded counts; ``[]`` where the host did not wait, without
            choices and in a cached call.
        routing: The given one in a cached call.
        recv_scales: ``[routing.num_rows, S]``, dtype of the scales (float32, or int32 for
            ``use_ue8m0``), in the order ``scales_layout``; with ``plan.expert_rows`` ``[El,
            expert_rows, S]`` in memory ``[El, S, expert_rows]``; ``None`` without scales.
        event: When the operation is done; always with ``async_finish``, else ``None``.
        receive: Of a call with ``plan.hook``, else ``None``: queues the receiving half on the
            stream that the call was made on; only then are the arrays defined. The api calls it
            at most once, within the capture of the call where there was one, and not after a
            ``reset``. It raises what a call without a hook would raise.
    """

    recv_x: Array
    recv_topk_idx: Array | None
    recv_topk_weights: Array | None
    num_recv_tokens_per_expert: list[int]
    routing: Routing
    recv_scales: Array | None = None
    event: Event | None = None
    receive: Callable[[], None] | None = None


@dataclass(eq=False, slots=True)
class CombineOutput:
    """What a combine produced.

    Attributes:
        combined_x: ``[T, H]``; ``CombineCall.out`` itself where that was given.
        combined_topk_weights: ``[T, K]`` float32 or ``None``. Expanded: the weight of the copy
            of each choice, bit for bit, and +0 for a choice that is -1.
        event: When the operation is done; always with ``async_finish``, else ``None``.
        receive: As in ``DispatchOutput``.
    """

    combined_x: Array
    combined_topk_weights: Array | None
    event: Event | None = None
    receive: Callable[[], None] | None = None


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
    """One way to move rows between ranks. All methods but ``import_array`` and ``empty`` may raise
    ``PeerTimeoutError`` and ``PeerAbortedError``."""

    name: str
    """``"host"`` or ``"cuda"``."""
    modes: frozenset[str]
    """Names of the modes it has, of ``ALL_MODES``."""

    @property
    def device(self) -> int | None:
        """Number of this rank's GPU, as CuPy counts; None on the host engine."""
        ...

    def array_module(self) -> ModuleType:
        """Local. The module that makes its arrays; makes this rank's GPU the current one."""
        ...

    def import_array(self, operation: str, argument: str, value: object) -> Array:
        """Turn what the user passed into this engine's array type without a copy.

        Raises:
            ContractError: Wrong kind of array, wrong device, not contiguous. Carries a refusal.
        """
        ...

    def import_scales(self, operation: str, argument: str, value: object) -> Array:
        """Local. As ``import_array``, but the array may have any strides. Mode ``scales``."""
        ...

    def capture(self) -> Event:
        """Local. The present end of the current stream. Mode ``events``."""
        ...

    def comm_stream(self) -> Any:
        """Local. The communication stream; None on the host engine. Mode ``events``."""
        ...

    def on(self, stream: int) -> AbstractContextManager[object]:
        """Local. Within it the CUDA stream at this address is the current one of this thread; on
        the host engine, nothing."""
        ...

    def array_key(self, value: object, strided: bool) -> tuple[Any, ...] | None:
        """A tuple that begins with the shape and dtype of an array that is writable and that
        ``import_array`` (``strided``: ``import_scales``) would return as it is; None for all
        else. Called for each array of each call, so it must be cheap."""
        ...

    def dispatch(self, call: DispatchCall) -> DispatchOutput:
        """Collective. Raises ContractError on every rank when headers differ or one refuses."""
        ...

    def combine(self, call: CombineCall) -> CombineOutput:
        """Collective. Raises ContractError on every rank when headers differ or one refuses."""
        ...

    def refuse(self, kind: Kind, refusal: Refusal) -> None:
        """Collective. Take this rank's place in the operation with a refusal; raises nothing for
        the refusal itself (the caller raises its own error). The operation may be a low-latency
        one or not (both have one kind), and calls with a hook may be open, as many as the Buffer
        allows: ``RefusalCode.CALLS_OPEN`` then."""
        ...

    def barrier(self, tag: int | None = None) -> None:
        """Collective. ``tag``: the caller's, in the header (``protocol.headers.call_word``)."""
        ...

    def get_dispatch_layout(
        self, topk_idx: Array, num_experts: int, kept: tuple[object, ...] = ()
    ) -> DispatchLayout:
        """Local. Entries outside 0..E-1 are ignored; the caller has checked shape and dtype.
        ``kept`` is kept until the engine has read ``topk_idx``, as that of a call."""
        ...

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """Local. Uninitialised memory from which combine needs no copy."""
        ...

    def peer_pointers(self) -> tuple[int, ...]:
        """Local. Addresses of all ranks' regions in this process; empty where there are none."""
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
        ``collective=False`` waits for no other rank, and frees what can be freed alone.
        """
        ...
