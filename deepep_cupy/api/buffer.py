"""``Buffer``: the one class a user needs. Sequencing only: checks, engine, results, states."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from deepep_cupy import __version__, log
from deepep_cupy.api.config import BufferArguments, agree
from deepep_cupy.api.contracts import Checker, DispatchArguments
from deepep_cupy.api.handle import DispatchHandle
from deepep_cupy.api.lifecycle import Lifecycle, State
from deepep_cupy.api.results import CombineResult, DispatchResult, LayoutResult
from deepep_cupy.engines.select import make_engine
from deepep_cupy.errors import ContractError, PlatformError, StateError
from deepep_cupy.plan.headers import Kind
from deepep_cupy.plan.spec import pool_bytes_hint
from deepep_cupy.transport.board import AbortBoard
from deepep_cupy.transport.group import Group
from deepep_cupy.transport.lifetime import ExitGuard

__all__ = ["Buffer", "State"]


_serials = itertools.count(1)


class Buffer(Lifecycle):
    """Moves rows of arrays to the ranks that hold their experts, and sums them on the way back.

    Collective: the constructor, ``dispatch``, ``combine``, ``barrier``, ``reset``, ``close``. All
    ranks call them in the same order, and those of several Buffers too. Everything else is local.

    Two engines: ``"cuda"`` moves CuPy arrays between GPUs of one node, ``"host"`` NumPy arrays
    between processes. It works on a duplicate of ``comm``. Usable as a context manager, which
    closes it; an exception inside makes this rank leave without waiting for the others, which
    learn of it in their next call.

    Args:
        comm: mpi4py communicator of 1 to 8 ranks of one node.
        num_max_tokens_per_rank: M, the most tokens a rank dispatches in one call.
        hidden: Elements of the longest row; calls may use any row of up to
            ``hidden * itemsize`` bytes, of any dtype.
        num_topk: The most choices per token, 0 to 32; 0: dispatch by ``is_token_in_rank`` only.
        num_experts: Experts of all ranks together, a multiple of the number of ranks.
        dtype: The dtype ``hidden`` counts elements of.
        pool_bytes: Bytes of GPU memory all ranks can see, None for a default (``size_hint``).
        num_sms: GPU blocks per operation, None for a default. May differ between ranks.
        engine: ``"cuda"``, ``"host"``, or ``"auto"``: cuda where every rank can.
        device: GPU of this rank; None: node-local rank modulo the visible GPUs. May differ.
        timeout_s: Seconds a rank waits for the others before ``PeerTimeoutError``.
        ranks_per_node: Ranks that share a node, where MPI cannot know.

    Raises:
        ContractError: On every rank, when an argument is wrong or differs between ranks.
        PlatformError: On every rank, when these ranks or machines cannot do it.
    """

    def __init__(
        self,
        comm: Any,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int | None = None,
        dtype: Any = "bfloat16",
        pool_bytes: int | None = None,
        num_sms: int | None = None,
        engine: str = "auto",
        device: int | None = None,
        timeout_s: float = 100.0,
        ranks_per_node: int | None = None,
    ) -> None:
        self._state = State.CLOSED  # until everything below has worked
        log.set_up()
        arguments = BufferArguments(
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            num_experts=num_experts,
            dtype=dtype,
            pool_bytes=pool_bytes,
            num_sms=num_sms,
            engine=engine,
            device=device,
            timeout_s=timeout_s,
            ranks_per_node=ranks_per_node,
        )
        self._group = _make_group(comm)
        board = None
        try:
            self._spec = agree(self._group, arguments, __version__)
            self._board = board = AbortBoard(self._group)
            self._guard = ExitGuard(self._group, board)
            self._guard.begin()
            self._engine = make_engine(self._group, board, self._spec, engine, device)
        except (ContractError, PlatformError):
            # Every rank raises this, so that collective calls are safe.
            if board is not None:
                self._guard.end()
                board.free()
            self._group.free()
            raise
        self._guard.keep = self._engine
        self._serial = next(_serials)
        self._checker = Checker(self._spec, self._serial, self._engine.intake)
        self._state = State.OPEN

    # ------------------------------------------------------------------------------ properties

    @property
    def engine_name(self) -> str:
        """``"host"`` (NumPy arrays) or ``"cuda"`` (CuPy arrays)."""
        return self._engine.name

    @property
    def device(self) -> int | None:
        """This rank's GPU, as CuPy counts; None on the host engine. Arrays must be made on it."""
        return self._engine.device

    @property
    def rank(self) -> int:
        """This rank."""
        return self._spec.rank

    @property
    def num_ranks(self) -> int:
        """R, ranks of the communicator."""
        return self._spec.num_ranks

    @staticmethod
    def size_hint(
        *,
        num_ranks: int,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int | None = None,
        dtype: Any = "bfloat16",
    ) -> int:
        """Bytes of GPU memory per rank a Buffer of these sizes takes when ``pool_bytes`` is None.

        Collective: no.  Stream: none.  Host sync: no.

        Args:
            num_ranks: Ranks of the communicator.
            num_max_tokens_per_rank: As for the constructor.
            hidden: As for the constructor.
            num_topk: As for the constructor.
            num_experts: As for the constructor.
            dtype: As for the constructor.

        Raises:
            ContractError: An argument is wrong.
        """
        arguments = BufferArguments(
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            num_experts=num_experts,
            dtype=dtype,
            pool_bytes=None,
            num_sms=None,
            engine="auto",
            device=None,
            timeout_s=1,
            ranks_per_node=None,
        )
        complaint = arguments.complaint(num_ranks)
        if complaint is not None:
            raise ContractError(f"size_hint(): {complaint}.")
        return pool_bytes_hint(arguments.spec(0, num_ranks))

    # ------------------------------------------------------------------------------ operations

    def get_dispatch_layout(self, topk_idx: Any, num_experts: int | None = None) -> LayoutResult:
        """Count where this rank's tokens go. ``dispatch`` does not need it.

        Collective: no.  Stream: current.  Host sync: no.

        Args:
            topk_idx: ``[T, K]`` int64 or int32, C-contiguous; -1: no choice.
            num_experts: E; the Buffer's where it is None.

        Returns:
            num_tokens_per_rank ``[R]`` int32, None, num_tokens_per_expert ``[E]`` int32,
            is_token_in_rank ``[T, R]`` bool, None.

        Raises:
            ContractError: On this rank, when an argument is wrong.
            StateError: The Buffer is closed.
        """
        if self._state is State.CLOSED:
            raise StateError(f"get_dispatch_layout(): {self._closed()}")
        checked, number = self._checker.layout(topk_idx, num_experts)
        found = self._engine.get_dispatch_layout(checked, number)
        return LayoutResult(
            found.num_tokens_per_rank,
            None,
            found.num_tokens_per_expert,
            found.is_token_in_rank,
            None,
        )

    def dispatch(
        self,
        x: Any,
        handle: DispatchHandle | None = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        expert_alignment: int = 1,
        *,
        own: bool = False,
    ) -> DispatchResult:
        """Send each token to every rank that holds one of its chosen experts, once a rank.

        Collective: yes.  Stream: current; ``x`` must be ready on it on every rank, or other
        ranks' results are wrong.  Host sync: yes, for the counts.

        Where the rows go is told by exactly one of ``topk_idx``, ``is_token_in_rank`` and
        ``handle``; the counts that DeepEP needs beside them are checked for their shape and not
        used. Rows are moved as bytes and arrive exactly as they are.

        Args:
            x: ``[T, H]`` of any dtype, C-contiguous; T ≤ ``num_max_tokens_per_rank``.
            handle: Of an earlier dispatch of this Buffer: send new rows the same ways. All ranks
                pass the handle of the same call.
            num_tokens_per_rank: ``[R]`` int32; not needed.
            num_tokens_per_rdma_rank: ``[1]`` int32; not needed.
            is_token_in_rank: ``[T, R]`` bool; not needed with ``topk_idx``.
            num_tokens_per_expert: ``[E]`` int32; not needed.
            topk_idx: ``[T, K]`` int64 or int32, K ≤ ``num_topk``, each row's experts different;
                -1: no choice.
            topk_weights: ``[T, K]`` float32; with ``topk_idx`` or ``handle``.
            expert_alignment: Round each entry of the list of counts up to a multiple of this.
            own: On GPUs, copy the results out of the Buffer's pool into ordinary memory.

        Returns:
            recv_x ``[N, H]`` in the order (source rank, source token); recv_topk_idx ``[N, K]``
            with this rank's experts numbered from 0 and -1 elsewhere; recv_topk_weights ``[N, K]``
            with 0 where the index is -1; the list of rows per local expert; the handle; None.
            With ``handle``: no indices, the weights exactly as passed, the list and the handle
            that were given.

        Raises:
            ContractError: On every rank, when an argument is wrong on one or differs between
                ranks. Nothing moved, and the Buffer stays usable.
            StateError: The Buffer is closed, or poisoned by an earlier failure.
            PeerTimeoutError: A rank did not come in ``timeout_s``. The Buffer is poisoned.
            PeerAbortedError: Another rank gave up. The Buffer is poisoned.
        """
        given = DispatchArguments(
            x=x,
            handle=handle,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_rank=num_tokens_per_rank,
            num_tokens_per_rdma_rank=num_tokens_per_rdma_rank,
            num_tokens_per_expert=num_tokens_per_expert,
            expert_alignment=expert_alignment,
            own=own,
        )
        with self._operation("dispatch", Kind.DISPATCH):
            call, signature = self._checker.dispatch(given)
            done = self._engine.dispatch(call)
        counts = done.num_recv_tokens_per_expert
        if handle is None:
            handle = DispatchHandle(done.routing, counts, signature)
        return DispatchResult(
            done.recv_x,
            done.recv_topk_idx,
            done.recv_topk_weights,
            handle.num_recv_tokens_per_expert_list,
            handle,
            None,
        )

    def combine(
        self,
        x: Any,
        handle: DispatchHandle,
        topk_weights: Any = None,
        bias: Any = None,
        *,
        own: bool = False,
    ) -> CombineResult:
        """Bring every row back to the rank of its token, and add the rows of each token.

        Collective: yes.  Stream: current; ``x`` must be ready on it on every rank, or other
        ranks' results are wrong. When it returns, in stream order, ``x`` may be overwritten.
        Host sync: no.

        A row is added as it is: weights must already be applied to it. Terms are added in the
        order bias 0, bias 1, rank 0, rank 1, …, in float32 for float16, bfloat16 and float32, in
        float64 for float64, in the row's own wrapping type for integers, and rounded once.

        Args:
            x: ``[N, H]``, one row per row that the dispatch of ``handle`` received, C-contiguous.
            handle: Of the dispatch. All ranks pass the handle of the same call.
            topk_weights: ``[N, K]`` float32 to be summed over ranks as well.
            bias: None, one array or two of them, ``[T, H]``, dtype of ``x``.
            own: On GPUs, copy the result out of the Buffer's pool into ordinary memory.

        Returns:
            combined_x ``[T, H]``, dtype of ``x``, 0 for a token that went nowhere;
            combined_topk_weights ``[T, K]`` float32 or None; None.

        Raises:
            ContractError: On every rank, when an argument is wrong on one or differs between
                ranks. Nothing moved, and the Buffer stays usable.
            StateError: The Buffer is closed, or poisoned by an earlier failure.
            PeerTimeoutError: A rank did not come in ``timeout_s``. The Buffer is poisoned.
            PeerAbortedError: Another rank gave up. The Buffer is poisoned.
        """
        with self._operation("combine", Kind.COMBINE):
            call = self._checker.combine(x, handle, topk_weights, bias, own=own)
            done = self._engine.combine(call)
        return CombineResult(done.combined_x, done.combined_topk_weights, None)

    def barrier(self) -> None:
        """Wait until every rank is here.

        Collective: yes.  Stream: current, which waits for all ranks' streams.  Host sync: only
        on the host engine.

        Raises:
            ContractError: On every rank, when one is in another call.
            StateError: The Buffer is closed, or poisoned by an earlier failure.
            PeerTimeoutError: A rank did not come in ``timeout_s``. The Buffer is poisoned.
            PeerAbortedError: Another rank gave up. The Buffer is poisoned.
        """
        with self._operation("barrier", Kind.BARRIER):
            self._engine.barrier()

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Make an uninitialised array that ``combine`` reads without a copy.

        Collective: no.  Stream: current.  Host sync: no.

        Args:
            shape: Its shape.
            dtype: Its dtype.

        Returns:
            An array in the pool; the memory goes back to the pool when the array dies.

        Raises:
            StateError: The Buffer is closed.
        """
        if self._state is State.CLOSED:
            raise StateError(f"empty(): {self._closed()}")
        return self._engine.empty(shape, dtype)

    def check(self) -> None:
        """Raise what finished operations, or other ranks, have left to be reported.

        Collective: no.  Stream: none.  Host sync: no.

        Raises:
            StateError: The Buffer is closed, or poisoned by an earlier failure.
            ContractError: A finished operation was refused; the Buffer stays usable.
            PeerTimeoutError: A rank was late. The Buffer is poisoned.
            PeerAbortedError: Another rank gave up. The Buffer is poisoned.
        """
        self._must_be_open("check")
        with self._failures("check"):
            self._engine.check()

    def __repr__(self) -> str:
        if not hasattr(self, "_engine"):
            return "Buffer(not built)"
        return (
            f"Buffer(rank {self.rank} of {self.num_ranks}, engine {self.engine_name!r}, "
            f"{self._state.value})"
        )


def _make_group(comm: Any) -> Group:
    try:
        from deepep_cupy.transport.mpi import MPIGroup
    except ImportError as error:
        raise PlatformError(
            f"Buffer(): mpi4py with an MPI library is needed, but: {error}; "
            f"pip install 'deepep_cupy[mpich]' brings both."
        ) from error
    group: Group = MPIGroup(comm)
    return group
