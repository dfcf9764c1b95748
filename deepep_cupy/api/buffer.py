"""``Buffer``: the one class a user needs. Here it is built; see ``operations``, ``lifecycle``."""

from __future__ import annotations

import itertools
import threading
from typing import Any, cast

from deepep_cupy import __version__, log
from deepep_cupy.api.config import BufferArguments, agree
from deepep_cupy.api.contracts import Checker
from deepep_cupy.api.lifecycle import State
from deepep_cupy.api.operations import Operations
from deepep_cupy.engines.base import ModalEngine, modes_of
from deepep_cupy.engines.select import make_engine
from deepep_cupy.errors import ContractError, PlatformError
from deepep_cupy.plan.spec import pool_bytes_hint
from deepep_cupy.transport.board import AbortBoard
from deepep_cupy.transport.group import Group
from deepep_cupy.transport.lifetime import ExitGuard

__all__ = ["Buffer", "State"]


_serials = itertools.count(1)


class Buffer(Operations):
    """Moves rows of arrays to the ranks that hold their experts, and sums them on the way back.

    Collective: the constructor, ``dispatch``, ``combine``, ``barrier``, ``reset``, ``close``. All
    ranks call them in the same order, and those of several Buffers too. Everything else is local.

    Two engines: ``"cuda"`` moves CuPy arrays between GPUs of one node, ``"host"`` NumPy arrays
    between processes. It works on a duplicate of ``comm``. Usable as a context manager, which
    closes it; an exception inside makes this rank leave without waiting for the others, which
    learn of it in their next call. One thread at a time: a collective call raises ``StateError``
    while another thread is in one.

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
        self._inside = threading.Lock()
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
        modes = modes_of(self._engine)
        self._checker = Checker(
            self._spec,
            self._serial,
            self._engine.intake,
            modes,
            cast(ModalEngine, self._engine).intake_scales if "scales" in modes else None,
            self._engine.glance,
        )
        self._num_sms: int | None = None
        self._state = State.OPEN

    # ------------------------------------------------------------------------------ properties

    @property
    def engine_name(self) -> str:
        """``"host"`` (NumPy arrays) or ``"cuda"`` (CuPy arrays)."""
        return self._engine.name

    @property
    def modes(self) -> frozenset[str]:
        """What this Buffer's engine can do beside plain calls; a call that needs another mode is
        refused. ``engines.base`` lists them; the host engine has all."""
        return modes_of(self._engine)

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

    @property
    def num_max_tokens_per_rank(self) -> int:
        """M, the most tokens a rank dispatches in one call."""
        return self._spec.num_max_tokens_per_rank

    @staticmethod
    def size_hint(
        *,
        num_ranks: int,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int | None = None,
        dtype: Any = "bfloat16",
        do_expand: bool = False,
        expert_alignment: int = 1,
    ) -> int:
        """Bytes of GPU memory per rank that a Buffer of these sizes needs.

        Without ``do_expand`` this is what it takes when ``pool_bytes`` is None. The expanded
        layout needs more where the host does not wait for the counts: then give the
        constructor this number as ``pool_bytes``.

        Collective: no.  Stream: none.  Host sync: no.

        Args:
            num_ranks: Ranks of the communicator.
            num_max_tokens_per_rank: As for the constructor.
            hidden: As for the constructor.
            num_topk: As for the constructor.
            num_experts: As for the constructor.
            dtype: As for the constructor.
            do_expand: Make room for the expanded layout's worst case, ``num_ranks`` *
                ``num_max_tokens_per_rank`` * min(K, El) + El * (``expert_alignment`` - 1) rows
                for El local experts.
            expert_alignment: Of those dispatches.

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
        if complaint is None and expert_alignment < 1:
            complaint = f"argument 'expert_alignment' must be 1 or more, got {expert_alignment}"
        if complaint is not None:
            raise ContractError(f"size_hint(): {complaint}.")
        alignment = expert_alignment if do_expand else None
        return pool_bytes_hint(arguments.spec(0, num_ranks), expand_to=alignment)

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
