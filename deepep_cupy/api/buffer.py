"""``Buffer``: the one class a user needs.

Its methods put the work in order: ``call_cache`` and ``checks`` turn arguments into a checked call,
an engine runs it, ``lifecycle`` allows it and handles its failures.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import ModuleType, TracebackType
from typing import Any, Literal, Self

from deepep_cupy import log
from deepep_cupy._version import __version__
from deepep_cupy.api.advice import suggest_keywords
from deepep_cupy.api.call_cache import CallCache, ForeignArrays
from deepep_cupy.api.checks import Checker
from deepep_cupy.api.config import BufferArguments, Config, agree
from deepep_cupy.api.events import EventOverlap
from deepep_cupy.api.handle import DispatchHandle
from deepep_cupy.api.lifecycle import CallLock, Lifecycle, State
from deepep_cupy.api.low_latency_cache import LowLatencyCalls
from deepep_cupy.api.low_latency_checks import LowLatencyChecker
from deepep_cupy.api.low_latency_methods import LowLatencyMethods
from deepep_cupy.api.results import CombineResult, DispatchResult, LayoutResult
from deepep_cupy.api.values import new_array, stream_address, wrong_flag, wrong_number
from deepep_cupy.engines.calls import (
    CombineArguments,
    CombineOptions,
    DispatchArguments,
    DispatchOptions,
    Routing,
    Signature,
    imported,
)
from deepep_cupy.engines.protocol import CombineOutput, DispatchOutput, Engine
from deepep_cupy.engines.select import make_engine, too_large
from deepep_cupy.errors import ContractError, PlatformError
from deepep_cupy.protocol.headers import Kind, Layout
from deepep_cupy.protocol.nodes import MAX_RANKS
from deepep_cupy.protocol.sizes import MAX_BLOCKS_WANTED, MAX_ROWS, pool_bytes_hint
from deepep_cupy.ranks.abort_board import AbortBoard
from deepep_cupy.ranks.exit_guard import ExitGuard, Watch, print_errors_once
from deepep_cupy.ranks.group import Group, Program

__all__ = ["Buffer"]


_DISPATCH, _COMBINE, _BARRIER = Kind.DISPATCH, Kind.COMBINE, Kind.BARRIER
_serials = itertools.count(1)
"""Numbers of this process's Buffers, by which a handle is known to be of one of them."""


class Buffer(LowLatencyMethods):
    """Moves rows of arrays to the ranks that hold their experts, and sums them on the way back.

    Collective: the constructor, ``dispatch``, ``combine``, ``barrier``, ``reset``, ``close``. All
    ranks call them in the same order, and those of several Buffers too. Everything else is local.

    Two engines: ``"cuda"`` moves CuPy arrays between GPUs of one node, ``"host"`` NumPy arrays
    between processes. It works on a duplicate of ``comm``. Usable as a context manager, which
    closes it; an exception inside makes this rank leave without waiting for the others, which
    learn of it in their next call. One thread at a time: a collective call raises ``StateError``
    while another thread is in one, of this Buffer or of another one of the process. On the host
    engine, where MPI was initialised with THREAD_MULTIPLE, threads may each have a Buffer.

    Args:
        comm: mpi4py communicator of 1 to 8 ranks of one node or, on the host engine, of up to 8
            nodes with as many ranks each.
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
        ranks_per_node: Take each so many ranks in a row, of one machine, for a node; None: what
            ``DEEPEP_CUPY_RANKS_PER_NODE`` says, and else nodes are machines.
        low_latency_tokens: M', the most tokens a rank dispatches in a low-latency call, up to 4096
            and M; 0: no such calls, and no memory for them.
        low_latency_in_flight: How many low-latency calls may be sent and not yet received, 1 to 4.

    Raises:
        ContractError: On every rank, when an argument is wrong or differs between ranks.
        PlatformError: On every rank, when these ranks or machines cannot do it.
        PeerTimeoutError: Not all ranks of ``comm`` made this call within ``timeout_s``. The
            program can only end then.
    """

    @suggest_keywords
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
        low_latency_tokens: int = 0,
        low_latency_in_flight: int = 1,
    ) -> None:
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
            low_latency_tokens=low_latency_tokens,
            low_latency_in_flight=low_latency_in_flight,
        )
        print_errors_once()
        with Watch(_program(), (ContractError, PlatformError)):
            self._construct(comm, arguments)

    def _construct(self, comm: Any, arguments: BufferArguments) -> None:
        """Meet the other ranks, agree with them, and make the parts. Collective."""
        engine, device = arguments.engine, arguments.device
        group = _make_group(comm, arguments.patience())
        board = None
        try:
            self._spec = agree(group, arguments, __version__)
            board = AbortBoard(group, self._spec.nodes)
            guard = ExitGuard(group, board)
            guard.begin()
            self._engine = make_engine(group, board, self._spec, engine, device)
        except (ContractError, PlatformError):
            # Every rank raises this, so that collective calls are safe.
            if board is not None:
                guard.end()
                board.free()
            group.free()
            raise
        guard.keep = self._engine
        for_checks = (
            self._spec,
            next(_serials),
            self._engine.import_array,
            self._engine.modes,
            self._engine.import_scales,
        )
        self._checker = Checker(*for_checks)
        low_latency = LowLatencyChecker(*for_checks)
        self._low_latency = LowLatencyCalls(low_latency, self._engine.array_key)
        self._calls = CallCache(
            self._checker,
            self._engine.array_key,
            self.num_max_tokens_per_rank,
            self._spec.low_latency_tokens,
            ForeignArrays(
                self._engine.array_key, self._engine.import_array, self._engine.import_scales
            ),
        )
        self._num_sms: int | None = None
        inside = _call_lock(self._engine.name)
        self._life = Lifecycle(self._spec, group, board, guard, self._engine, inside)

    # ------------------------------------------------------------------------------ properties

    @property
    def engine_name(self) -> str:
        """``"host"`` (NumPy arrays) or ``"cuda"`` (CuPy arrays)."""
        return self._engine.name

    @property
    def modes(self) -> frozenset[str]:
        """What this Buffer's engine can do beside plain calls; a call that needs another mode is
        refused on every rank. The host engine has all:

        * ``"scales"``: ``dispatch(x=(rows, scales))``, FP8 rows with their scales.
        * ``"quantize"``: ``dispatch(quantize=)``, rows cast to FP8 on their way.
        * ``"no_wait"``: ``num_worst_tokens=`` and ``do_cpu_sync=False``, the host learns no count.
        * ``"expand"``: ``do_expand=True``, a row per (token, local expert), and its combine.
        * ``"expert_counts"``: handles of all calls with ``topk_idx`` have
          ``num_unaligned_recv_tokens_per_expert``, not only those without a wait or expanded.
        * ``"stats"``: ``cumulative_local_expert_recv_stats=``.
        * ``"events"``: ``previous_event=``, ``async_finish=True``, ``capture()``.
        * ``"out"``: ``combine(out=)``.
        * ``"low_latency"``: ``dispatch(low_latency=True)``, in a Buffer with
          ``low_latency_tokens``.
        """
        return self._engine.modes

    @property
    def device(self) -> int | None:
        """This rank's GPU, as CuPy counts; None on the host engine. Arrays must be made on it."""
        return self._engine.device

    @property
    def xp(self) -> ModuleType:
        """The module that makes this Buffer's arrays: ``numpy`` on the host engine, ``cupy`` on
        GPUs, where this rank's GPU becomes the calling thread's current device."""
        return self._engine.array_module()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._spec.rank

    @property
    def num_ranks(self) -> int:
        """R, ranks of the communicator."""
        return self._spec.num_ranks

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, ascending; nodes by their lowest rank."""
        nodes = self._spec.nodes
        return (tuple(range(self.num_ranks)),) if nodes is None else nodes.ranks_of

    @property
    def num_max_tokens_per_rank(self) -> int:
        """M, the most tokens a rank dispatches in one call."""
        return self._spec.num_max_tokens_per_rank

    @property
    def low_latency_tokens(self) -> int:
        """M', the most tokens a rank dispatches in one low-latency call; 0: there are none."""
        return self._spec.low_latency_tokens

    @staticmethod
    @suggest_keywords
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
        low_latency_tokens: int = 0,
        low_latency_in_flight: int = 1,
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
            low_latency_tokens: As for the constructor; there is room for two live results of
                ``low_latency_dispatch``, ``num_ranks`` * M' rows for each local expert.
            low_latency_in_flight: As for the constructor.

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
            low_latency_tokens=low_latency_tokens,
            low_latency_in_flight=low_latency_in_flight,
        )
        complaint = (
            wrong_number("num_ranks", num_ranks, 1, MAX_RANKS)
            or wrong_number("expert_alignment", expert_alignment, 1, MAX_ROWS)
            or wrong_flag("do_expand", do_expand)
            or arguments.complaint(num_ranks)
        )
        if complaint is not None:
            raise ContractError(f"size_hint(): {complaint}.")
        spec = arguments.spec(0, num_ranks)
        nbytes = pool_bytes_hint(spec, expand_to=int(expert_alignment) if do_expand else None)
        complaint = too_large(spec, nbytes)
        if complaint is not None:
            raise ContractError(f"size_hint(): {complaint}.")
        return nbytes

    def __repr__(self) -> str:
        if not hasattr(self, "_life"):
            return "Buffer(not built)"
        return (
            f"Buffer(rank {self.rank} of {self.num_ranks}, engine {self.engine_name!r}, "
            f"{self.state.value})"
        )

    # ------------------------------------------------------------------------- the operations

    @suggest_keywords
    def get_dispatch_layout(
        self,
        topk_idx: Any,
        num_experts: int | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> LayoutResult:
        """Count where this rank's tokens go. ``dispatch`` does not need it.

        Collective: no.  Stream: current, also with the last three arguments.  Host sync: no.

        Args:
            topk_idx: ``[T, K]`` int64 or int32, C-contiguous; -1: no choice.
            num_experts: E; the Buffer's where it is None.
            previous_event: Waited for first.
            async_finish: Return an event with the result.
            allocate_on_comm_stream: Not used.

        Returns:
            num_tokens_per_rank ``[R]`` int32, num_tokens_per_rdma_rank ``[nodes]`` int32 (None on
            one node), num_tokens_per_expert ``[E]`` int32,
            is_token_in_rank ``[T, R]`` bool, event.

        Raises:
            ContractError: On this rank, when an argument is wrong.
            StateError: The Buffer is closed.
        """
        operation = "get_dispatch_layout"
        self._life.must_not_be_closed(operation)
        streams = self._checker.streams(
            operation, previous_event, async_finish, allocate_on_comm_stream
        )
        checked, number = self._checker.layout(topk_idx, num_experts)
        if streams.previous_event is not None:
            streams.previous_event.wait()
        kept = imported((topk_idx,), (checked,))
        found = self._engine.get_dispatch_layout(checked, number, kept)
        event = self._engine.capture() if streams.async_finish else None
        return LayoutResult(
            found.num_tokens_per_rank,
            self._count_by_node(found.is_token_in_rank),
            found.num_tokens_per_expert,
            found.is_token_in_rank,
            EventOverlap(event),
        )

    def _count_by_node(self, is_token_in_rank: Any) -> Any:
        """``[nodes]`` int32 tokens that any rank of a node gets; None on one node."""
        nodes = self._spec.nodes
        if nodes is None or nodes.num_nodes == 1:
            return None
        columns = [is_token_in_rank[:, list(ranks)].any(axis=1) for ranks in nodes.ranks_of]
        return self.xp.stack(columns).sum(axis=1).astype("int32")

    @suggest_keywords
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
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        own: bool = False,
        dest: Any = None,
        dtype: Any = None,
        scales_layout: Literal["row", "column"] = "row",
        quantize: Literal["fp8_e4m3"] | None = None,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool | None = None,
        do_zero_padding: bool = False,
        cumulative_local_expert_recv_stats: Any = None,
        tag: int | None = None,
        low_latency: bool = False,
    ) -> DispatchResult:
        """Send each token to every rank that holds one of its chosen experts, once a rank.

        Collective: yes.  Stream: current, or the communication stream with ``previous_event`` or
        ``async_finish``; ``x`` must be ready there on every rank, or other ranks' results are
        wrong.  Host sync: yes, for the counts; no with ``num_worst_tokens``,
        ``do_cpu_sync=False``, ``low_latency=True`` or ``handle``.

        Exactly one of ``topk_idx``, ``is_token_in_rank``, ``dest`` and ``handle`` decides where
        the rows go; the counts that DeepEP needs beside them are checked for their shape and not
        used. Rows are moved as bytes and arrive exactly as they are.

        Args:
            x: ``[T, H]`` of any dtype, C-contiguous; T ≤ ``num_max_tokens_per_rank``. Or a pair
                of FP8 rows (float8_e4m3fn, float8_e5m2, uint8 or int8) and their scales, of any
                strides: float32 ``[T, S]`` with S = ceil(H / 128), or packed UE8M0 exponents,
                int32 or uint32 ``[T, ceil(S / 4)]``. Scales travel bit for bit;
                the value of an element is the element *times* its scale.
            handle: Of an earlier dispatch of this Buffer: send new rows the same ways. All ranks
                pass the handle of the same call.
            is_token_in_rank: ``[T, R]`` bool. Beside ``topk_idx``, which then decides alone, its
                shape is checked and it is not used.
            topk_idx: ``[T, K]`` int64 or int32, K ≤ ``num_topk``, each row's experts different;
                -1: no choice.
            topk_weights: ``[T, K]`` float32; with ``topk_idx`` or ``handle``.
            expert_alignment: Round each entry of the list of counts up to a multiple of this,
                and in the expanded layout begin each expert's rows at one.
            num_worst_tokens: Do not wait for the counts: the most tokens this rank can receive,
                at most R * M. Arrays have this many rows; behind the real ones
                ``recv_topk_idx`` is -1, weights are 0 and rows are anything. 0: wait.
            config: ``num_sms`` of it is used on GPUs.
            previous_event: Begin after this event, not after the work of the current stream.
            async_finish: Do not let the current stream wait; the event in the result says when.
                Until then the arguments must not be overwritten, nor the results read.
            allocate_on_comm_stream: Results belong to the communication stream; with
                ``previous_event`` and ``async_finish``.
            own: On GPUs, copy the results out of the Buffer's pool into ordinary memory of CuPy, on
                the stream of the call: room in the pool is free at once, and results outlive the
                Buffer. Other streams are to be ordered as ever. In a graph they stay in the pool.
            dest: Instead of the above, the ranks each row goes to, once each: ``[T]`` or ``[T, n]``
                int64 or int32; -1: nowhere. No experts are needed then: ``num_topk=0``. Its values
                are checked, for which the host waits for the current stream on GPUs.
            dtype: Take the bytes of ``x`` for items of this dtype, of as many bytes: for FP8 rows
                from a library without FP8, as uint8. ``recv_x`` has it too.
            scales_layout: Received scales are C-ordered (``"row"``) or Fortran-ordered
                (``"column"``, as grouped matrix products want them).
            quantize: ``"fp8_e4m3"``: cast rows of bfloat16, float16 or float32 to float8_e4m3fn
                on their way, a scale per 128 channels. ``reference.quantize`` says every bit.
            round_scale: With ``quantize``: scales are powers of two.
            use_ue8m0: With ``round_scale``: scales arrive as packed exponents, int32.
            do_cpu_sync: False: do not wait for the counts, like ``num_worst_tokens = R * M``.
            do_expand: The expanded layout: a row per (token, local expert), grouped by expert.
                With ``handle`` it is the handle's, and may be left out.
            do_zero_padding: Zero the rows that only fill up an expert's group, with their scales
                and weights; else they are anything.
            cumulative_local_expert_recv_stats: ``[El]`` int32, to which the number of tokens per
                local expert is added in place, wrapping; with ``topk_idx``.
            tag: A number from 0 on that tells this call from others of its form: ranks that meet in
                calls with different tags all raise. None: a call in a graph is told from others by
                its number among this rank's captured calls, so that graphs meet only graphs
                captured in one order.
            low_latency: For few tokens a rank, at most ``low_latency_tokens``: rows go without a
                question to a place that is kept for them at each receiver. Results are those of
                the same call with ``num_worst_tokens`` (R * M' where it is not given). With
                ``topk_idx`` alone, not with ``handle``, a mask or ``do_cpu_sync=True``. The
                combine of its handle goes the same way by itself; no dispatch takes the handle.
            num_tokens_per_rank: DeepEP's, not needed: ``[R]`` int32, checked and not used.
            num_tokens_per_rdma_rank: DeepEP's, not needed: ``[nodes]`` int32, checked, not used.
            num_tokens_per_expert: DeepEP's, not needed: ``[E]`` int32, checked and not used.

        Returns:
            recv_x ``[N, H]`` in the order (source rank, source token), or a pair of rows and
            scales ``[N, S]``; recv_topk_idx ``[N, K]`` with this rank's experts numbered from 0
            and -1 elsewhere; recv_topk_weights ``[N, K]`` with 0 where the index is -1; the list
            of tokens per local expert; the handle; an event.
            With ``handle``: no indices, the weights exactly as passed, the list and the handle
            that were given.
            Without a wait: N is the worst case and the list empty; the counts are in the handle.
            Expanded: recv_x ``[rows, H]`` by (local expert, source rank, source token), no
            indices, weights ``[rows]``; where each expert's rows end is in the handle.

        Raises:
            ContractError: On every rank, when an argument is wrong on one or differs between
                ranks. Nothing moved, and the Buffer stays usable.
            StateError: The Buffer is closed, or poisoned by an earlier failure.
            PeerTimeoutError: A rank did not come in ``timeout_s``. The Buffer is poisoned.
            PeerAbortedError: Another rank gave up. The Buffer is poisoned.
        """
        given = DispatchArguments(
            x,
            handle,
            topk_idx,
            topk_weights,
            is_token_in_rank,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            num_tokens_per_expert,
            cumulative_local_expert_recv_stats,
            previous_event,
            DispatchOptions(
                expert_alignment,
                own,
                num_worst_tokens,
                config,
                self._num_sms,
                async_finish,
                allocate_on_comm_stream,
                dtype,
                scales_layout,
                quantize,
                round_scale,
                use_ue8m0,
                do_cpu_sync,
                do_expand,
                do_zero_padding,
                tag,
                low_latency,
            ),
            dest,
        )
        done, signature = self._life.operate("dispatch", _DISPATCH, self._dispatch, given)
        if handle is None:
            handle = DispatchHandle(done.routing, done.num_recv_tokens_per_expert, signature)
        return DispatchResult(
            done.recv_x if done.recv_scales is None else (done.recv_x, done.recv_scales),
            done.recv_topk_idx,
            done.recv_topk_weights,
            handle.num_recv_tokens_per_expert_list,
            handle,
            EventOverlap(done.event),
        )

    def _dispatch(self, given: DispatchArguments) -> tuple[DispatchOutput, Signature]:
        call, signature = self._calls.dispatch(given)
        return self._engine.dispatch(call), signature

    @suggest_keywords
    def combine(
        self,
        x: Any,
        handle: DispatchHandle,
        topk_weights: Any = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        own: bool = False,
        out: Any = None,
        reduce: Literal["exact", "per_rank", "per_node"] = "exact",
        row_weights: Any = None,
        tag: int | None = None,
    ) -> CombineResult:
        """Bring every row back to the rank of its token, and add the rows of each token.

        Collective: yes.  Stream: current, or the communication stream with ``previous_event`` or
        ``async_finish``; ``x`` must be ready there on every rank, or other ranks' results are
        wrong. When it returns, in stream order, ``x`` may be overwritten.  Host sync: no.

        A row is added as it is: weights must already be applied to it (or be given as
        ``row_weights``). Terms are added in the order bias 0, bias 1, rank 0, rank 1, …, in
        float32 for float16, bfloat16 and float32, in float64 for float64, in the row's own
        wrapping type for integers, and rounded once.

        Args:
            x: ``[rows, H]``, one row per row that the dispatch of ``handle`` returned,
                C-contiguous. Rows behind the real ones and rows that only fill up are not read.
            handle: Of the dispatch. All ranks pass the handle of the same call.
            topk_weights: ``[N, K]`` float32 to be summed over ranks as well. Expanded:
                ``[rows]``, carried back to the choices they belong to.
            bias: None, one array or two of them, ``[T, H]``, dtype of ``x``.
            config: ``num_sms`` of it is used on GPUs.
            previous_event: Begin after this event, not after the work of the current stream.
            async_finish: Do not let the current stream wait; the event in the result says when.
                Until then the arguments must not be overwritten, nor the results read.
            allocate_on_comm_stream: Results belong to the communication stream; with
                ``previous_event`` and ``async_finish``.
            own: As for ``dispatch``.
            out: ``[T, H]``, dtype of ``x``, C-contiguous: write the result here, and return it.
                Must share no memory with another argument.
            reduce: Expanded layout. ``"exact"``: every copy travels, terms are the copies (rank
                by rank, then by column of the choice), rounded once. ``"per_rank"``: each rank
                first adds its copies of a token and rounds; less travels. Any layout, on several
                nodes: ``"per_node"``: each node first adds its ranks' rows of a token, ascending,
                and rounds, and one row a node travels; then nodes are added like ranks.
                ``reference.combine`` says every bit. On one node it is ``"exact"`` for plain
                rows and ``"per_rank"`` for the expanded layout.
            row_weights: Expanded layout, floating rows: ``[rows]`` float32, multiplied into the
                copies in the type of the sum.
            tag: As for ``dispatch``.

        Returns:
            combined_x ``[T, H]``, dtype of ``x``, 0 for a token that went nowhere;
            combined_topk_weights ``[T, K]`` float32 or None; an event.

        Raises:
            ContractError: On every rank, when an argument is wrong on one or differs between
                ranks. Nothing moved, and the Buffer stays usable.
            StateError: The Buffer is closed, or poisoned by an earlier failure.
            PeerTimeoutError: A rank did not come in ``timeout_s``. The Buffer is poisoned.
            PeerAbortedError: Another rank gave up. The Buffer is poisoned.
        """
        given = CombineArguments(
            x,
            handle,
            topk_weights,
            row_weights,
            bias,
            out,
            previous_event,
            CombineOptions(
                own, config, self._num_sms, async_finish, allocate_on_comm_stream, reduce, tag
            ),
        )
        done = self._life.operate("combine", _COMBINE, self._combine, given)
        combined_x = done.combined_x if out is None else out
        return CombineResult(combined_x, done.combined_topk_weights, EventOverlap(done.event))

    def _handle_over(self, routing: Routing, num_topk: int) -> DispatchHandle:
        """A handle over what a dispatch by ``topk_idx`` left, kept elsewhere meanwhile."""
        signature = self._checker.signature(routing.num_tokens, num_topk, Layout.TOPK)
        return DispatchHandle(routing, [], signature)

    def _combine(self, given: CombineArguments) -> CombineOutput:
        return self._engine.combine(self._calls.combine(given))

    def barrier(self, tag: int | None = None) -> None:
        """Wait until every rank is here.

        Collective: yes.  Stream: current, which waits for all ranks' streams.  Host sync: only
        on the host engine.

        Args:
            tag: As for ``dispatch``.

        Raises:
            ContractError: On every rank, when one is in another call.
            StateError: The Buffer is closed, or poisoned by an earlier failure.
            PeerTimeoutError: A rank did not come in ``timeout_s``. The Buffer is poisoned.
            PeerAbortedError: Another rank gave up. The Buffer is poisoned.
        """
        self._life.operate("barrier", _BARRIER, self._barrier, tag)

    def _barrier(self, tag: int | None) -> None:
        self._engine.barrier(self._checker.tag("barrier", tag))

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Make an uninitialised array that ``combine`` reads without a copy.

        Collective: no.  Stream: current.  Host sync: no.

        Args:
            shape: Its shape.
            dtype: Its dtype.

        Returns:
            An array in the pool; the memory goes back to the pool when the array dies.

        Raises:
            ContractError: On this rank, when an argument is wrong or the pool has no room.
            StateError: The Buffer is closed, or poisoned by an earlier failure: late ranks may
                still write into its memory.
            PeerTimeoutError, PeerAbortedError: It is poisoned by what this rank learns only now.
        """
        self._life.must_be_open("empty")
        wanted = new_array("empty", shape, dtype)
        with self._life.failures("empty"):
            return self._engine.empty(*wanted)

    def peer_pointers(self) -> tuple[int, ...]:
        """Addresses of all ranks' regions of GPU memory, for kernels of your own.

        One address a rank, this rank's own included, as this process and its GPU see them; ``()``
        on the host engine, where no rank sees another's memory. They hold until ``close``, also
        over ``reset``. A kernel may touch through them bytes of arrays from ``empty`` alone, while
        their owner holds them: byte i of a rank's array ``a`` lies ``a.data.ptr -
        peer_pointers()[rank] + i`` behind that rank's address, a number that ranks tell each other
        by MPI. All other bytes are the Buffer's. Before a peer first touches a new array, its
        owner synchronises the current stream and the ranks meet: what used the memory before may
        still be running. Order between the ranks' kernels is then yours to make: the page
        ``docs/own_kernel.md`` and example 07 show how.

        Collective: no.  Stream: none.  Host sync: no.

        Raises:
            StateError: The Buffer is closed.
        """
        self._life.must_not_be_closed("peer_pointers")
        return self._engine.peer_pointers()

    def check(self) -> None:
        """Raise what finished operations, or other ranks, have left to be reported.

        Collective: no.  Stream: none.  Host sync: no.

        Raises:
            StateError: The Buffer is closed, or poisoned by an earlier failure.
            ContractError: A finished operation was refused; the Buffer stays usable.
            PeerTimeoutError: A rank was late. The Buffer is poisoned.
            PeerAbortedError: Another rank gave up. The Buffer is poisoned.
        """
        self._life.must_be_open("check")
        with self._life.failures("check"):
            self._engine.check()

    # --------------------------------------------------------------------------- streams, blocks

    def capture(self) -> EventOverlap:
        """Return an event at the present end of the current stream, for ``previous_event``.

        Collective: no.  Stream: current.  Host sync: no.

        Raises:
            StateError: The Buffer is closed.
            PlatformError: The engine has no events.
        """
        return EventOverlap(self._with_events("capture").capture())

    def on(self, stream: object) -> AbstractContextManager[object]:
        """Let the calls of this thread inside ``with buffer.on(stream):`` be on that stream.

        Calls are on CuPy's current stream, which knows nothing of the current streams of other
        libraries: a tensor that PyTorch overwrites on a stream of its own right behind a call may
        be overwritten before the call has read it. Inside, the call is on PyTorch's stream.

        Collective: no.  Stream: given.  Host sync: no.

        Args:
            stream: Of PyTorch, Numba, CuPy or cuda.core, anything with ``__cuda_stream__``, or the
                address of a ``cudaStream_t``; it must live as long as results of the calls do. On
                the host engine without effect.

        Returns:
            A context manager. It makes the stream CuPy's current one, too.

        Raises:
            ContractError: On this rank, when ``stream`` is none.
            StateError: The Buffer is closed.
        """
        self._life.must_not_be_closed("on")
        return self._engine.on(stream_address(stream))

    def get_comm_stream(self) -> Any:
        """The communication stream: a CuPy stream of high priority; None on the host engine.

        Collective: no.  Stream: none.  Host sync: no.

        Raises:
            StateError: The Buffer is closed.
            PlatformError: The engine has no events.
        """
        return self._with_events("get_comm_stream").comm_stream()

    def _with_events(self, operation: str) -> Engine:
        self._life.must_not_be_closed(operation)
        if "events" not in self._engine.modes:
            raise PlatformError(
                f"{operation}(): the {self._engine.name} engine of this Buffer has no events, on "
                f"rank {self._spec.rank}; work is in the order of the current stream."
            )
        return self._engine

    def set_num_sms(self, num_sms: int | None) -> None:
        """Set the GPU blocks of this rank's later calls on this Buffer; DeepEP V1's is for all.

        Collective: no, ranks may differ.  Stream: none.  Host sync: no.

        Args:
            num_sms: 1 or more, odd too; None: the constructor's. A call's ``config`` overrides it.

        Raises:
            ContractError: On this rank, when the number is wrong.
        """
        if num_sms is not None:
            num_sms = self._checker.number("set_num_sms", "num_sms", num_sms, 1, MAX_BLOCKS_WANTED)
        self._num_sms = num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """DeepEP V1's recommended settings for ``dispatch``; here equal for all numbers of ranks.

        Collective: no.  Stream: none.  Host sync: no.

        Args:
            num_ranks: R; any number from 1 on.

        Raises:
            ContractError: It is none.
        """
        complaint = wrong_number("num_ranks", num_ranks, 1, MAX_ROWS)
        if complaint is not None:
            raise ContractError(f"get_dispatch_config(): {complaint}.")
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """DeepEP V1's recommended settings for ``combine``; here equal for all numbers of ranks.

        Collective: no.  Stream: none.  Host sync: no.

        Args:
            num_ranks: R; any number from 1 on.

        Raises:
            ContractError: It is none.
        """
        complaint = wrong_number("num_ranks", num_ranks, 1, MAX_ROWS)
        if complaint is not None:
            raise ContractError(f"get_combine_config(): {complaint}.")
        return Config()

    # ---------------------------------------------------------------------------------- its life

    @property
    def state(self) -> State:
        """Where in its life this Buffer is."""
        return self._life.state

    def reset(self) -> None:
        """Bring a poisoned Buffer back to work, and ranks together that are in different calls.
        Handles stay valid. Harmless on an open Buffer.

        Collective: yes.  Stream: drains this Buffer's work.  Host sync: yes.

        Calls of other ranks that wait for this one end in 0.2 s with ``PeerAbortedError``.

        Raises:
            StateError: The Buffer is closed.
            PeerTimeoutError: A rank did not come in ``timeout_s``; still poisoned, try again.
            PeerAbortedError: A rank has left for ever: only ``close`` is left.
        """
        self._life.reset()

    def close(self) -> None:
        """Free everything, together with all other ranks. A second call does nothing.

        Collective: yes.  Stream: drains this Buffer's work.  Host sync: yes.

        Raises:
            PeerTimeoutError: A rank did not come in ``timeout_s``. The Buffer is closed all the
                same; its memory is left to the end of the process, which ends all ranks.
            PeerAbortedError: A rank has left for ever. The Buffer is closed as after a time-out.
            StateError: Another thread is in a call of this Buffer, which stays open.
        """
        self._life.close()

    def destroy(self) -> None:
        """DeepEP's name for ``close``."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._life.leave(error)

    def __del__(self) -> None:
        life = getattr(self, "_life", None)  # the constructor may have failed
        if life is not None and life.state is not State.CLOSED:
            warnings.warn(
                f"a Buffer that is {life.state.value} was dropped without close(); its memory is "
                f"left to the end of the process",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


def _call_lock(engine: str) -> CallLock:
    """Which threads may call a Buffer on that engine, made by the calling thread."""
    from deepep_cupy.ranks.mpi import many_threads_may_call, other_threads_may_call

    if engine != "host":
        return CallLock()
    only_thread = None if other_threads_may_call() else threading.get_ident()
    return CallLock(side_by_side=many_threads_may_call(), only_thread=only_thread)


def _program() -> Program:
    try:
        from deepep_cupy.ranks.mpi import MPIProgram
    except ImportError as error:
        raise PlatformError(
            f"Buffer(): mpi4py with an MPI library is needed, but: {error}; "
            f"pip install 'deepep_cupy[mpich]' brings both."
        ) from error
    return MPIProgram()


def _make_group(comm: Any, timeout_s: float) -> Group:
    from deepep_cupy.ranks.mpi import MPIGroup

    group: Group = MPIGroup(comm, timeout_s)
    return group
