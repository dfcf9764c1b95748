"""Calls of ``dispatch`` and ``combine``, as given and as checked.

===================  ============================================================================
``…Arguments``       what the user passed; its ``…Options`` are all that is no array, handle or
                     event
``…Call``            what the api hands to an engine: arrays that have been checked, and a plan
``…Plan``            what the checks found out about the options: shared by alike calls, so that
                     these are checked once (``api.call_cache``)
===================  ============================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from deepep_cupy.protocol.headers import Layout

__all__ = [
    "FORMATS",
    "HERE",
    "Array",
    "CallPlan",
    "CombineArguments",
    "CombineCall",
    "CombineOptions",
    "CombinePlan",
    "DispatchArguments",
    "DispatchCall",
    "DispatchOptions",
    "DispatchPlan",
    "Event",
    "Quantization",
    "Reduce",
    "Routing",
    "ScalesLayout",
    "Signature",
    "Streams",
    "imported",
    "listed",
]


Array: TypeAlias = Any
"""``numpy.ndarray`` on the host engine, ``cupy.ndarray`` on the CUDA engine."""


ScalesLayout: TypeAlias = Literal["row", "column"]
"""Order of received scales ``[rows, S]`` in memory: C (``row``) or Fortran (``column``)."""


Reduce: TypeAlias = Literal["exact", "per_rank", "per_node"]
"""How a combine of the expanded layout adds the copies of a token that one rank holds."""


class Event(Protocol):
    """A point in the work of this rank's GPU, as ``Engine.capture`` and the operations make it."""

    def wait(self) -> None:
        """Let the current stream wait for the point. The host does not wait."""
        ...


@dataclass(eq=False, slots=True)
class Streams:
    """Where an operation runs, and who waits for it. The results do not depend on it.

    With a ``previous_event`` or ``async_finish`` the operation runs on the communication stream;
    without both on the caller's current stream.

    Attributes:
        previous_event: The operation begins after this event instead of after the work of the
            current stream; all inputs must be ready then.
        async_finish: The current stream does not wait for the operation; the output holds an
            event to wait for. Inputs and outputs live until then, even if the caller drops them.
        allocate_on_comm_stream: New arrays belong to the communication stream. The api has
            checked that it comes with ``previous_event`` and ``async_finish``.
    """

    previous_event: Event | None = None
    async_finish: bool = False
    allocate_on_comm_stream: bool = False

    @property
    def apart(self) -> bool:
        """Whether the operation runs on the communication stream."""
        return self.async_finish or self.previous_event is not None


HERE = Streams()
"""On the current stream, which waits. The api passes this very object for it, so that engines may
compare with ``is``."""


FORMATS = {"fp8_e4m3": "float8_e4m3fn"}
"""What ``quantize`` may be → the dtype of the codes."""


@dataclass(frozen=True)
class Quantization:
    """How rows are cast on their way; the arithmetic is that of ``reference/quant.py``.

    Attributes:
        dtype: ``"float8_e4m3fn"``.
        round_scale: Scales are powers of two.
        use_ue8m0: Scales travel and arrive as packed exponents, int32; needs ``round_scale``.
    """

    dtype: str = "float8_e4m3fn"
    round_scale: bool = False
    use_ue8m0: bool = False


class Routing(Protocol):
    """Who sent what where in one dispatch: all that a handle keeps.

    A rank's *received tokens* are numbered 0..N-1 by (source rank, source token). The rows of
    ``recv_x`` are just these, or, in the expanded layout, one row per (received token, local
    expert it chose), sorted by (local expert, source rank, source token), where the rows of each
    expert begin at a multiple of ``expert_alignment``.

    Where the host did not wait, N stands for the worst case in all shapes (``waited`` is False),
    and the entries behind the real ones are -1.
    """

    @property
    def num_tokens(self) -> int:
        """T, tokens this rank sent."""
        ...

    @property
    def num_recv_tokens(self) -> int:
        """N, tokens this rank received, or ``num_worst_tokens``."""
        ...

    @property
    def waited(self) -> bool:
        """Whether the host waited for the counts, so that N is the real number."""
        ...

    @property
    def recv_src_idx(self) -> Array:
        """``[N]`` int32, token number on its source rank."""
        ...

    @property
    def recv_rows_per_rank(self) -> Array:
        """``[R]`` int32, tokens received from each rank."""
        ...

    @property
    def send_row(self) -> Array:
        """``[T, R]`` int32, number of token t among rank r's received tokens; -1: not sent."""
        ...

    @property
    def birth(self) -> Any:
        """The epoch of the dispatch; an int on the host, a device word on GPUs."""
        ...

    @property
    def psum_recv_rows(self) -> Array | None:
        """``[R]`` int32, inclusive sums of ``recv_rows_per_rank``; the last entry is the real
        number of received tokens."""
        ...

    @property
    def expert_counts(self) -> Array | None:
        """``[El]`` int32, received tokens that chose each local expert; None without choices."""
        ...

    @property
    def psum_expert_rows(self) -> Array | None:
        """``[El]`` int32, None where ``expert_counts`` is. Expanded: first row of the expert plus
        ``expert_counts``. Else inclusive sums of the counts, each rounded up to
        ``expert_alignment``."""
        ...

    @property
    def expanded_row(self) -> Array | None:
        """``[N, K]`` int32, row of ``recv_x`` that holds the copy for choice k of received token
        n; -1 where the choice is no expert of this rank. None where the layout is not expanded."""
        ...

    @property
    def num_expanded_rows(self) -> int:
        """Rows of ``recv_x`` in the expanded layout: the sum of the rounded counts, or, where the
        host did not wait, ``protocol.sizes.worst_expanded_rows``."""
        ...

    @property
    def expert_alignment(self) -> int:
        """Of the dispatch."""
        ...

    @property
    def expanded(self) -> bool:
        """Whether ``recv_x`` has a row per (token, local expert)."""
        ...

    @property
    def low_latency(self) -> bool:
        """Whether a low-latency dispatch made it: its combine goes that way too."""
        ...

    @property
    def expert_rows(self) -> int:
        """Of ``DispatchPlan``. Where it is not 0, row i of local expert e is row ``e *
        expert_rows + i`` in ``expanded_row``, and ``psum_expert_rows[e] = e * expert_rows +
        expert_counts[e]``."""
        ...

    @property
    def recv_src_info(self) -> Array | None:
        """``[El, expert_rows]`` int32, token number on its source rank of each row; entries
        behind the real ones are undefined. None without ``expert_rows``."""
        ...

    @property
    def recv_layout_range(self) -> Array | None:
        """``[El, R]`` int64: first row of each source rank among the expert's rows << 32 | how
        many they are. None without ``expert_rows``."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows of ``recv_x``, and of the ``x`` that combine takes."""
        ...


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


class DispatchOptions(NamedTuple):
    """What the user passed to ``dispatch`` beside arrays, handle and event: whole numbers, flags
    and names, part of the key that finds a call's plan. ``num_sms`` is the Buffer's."""

    expert_alignment: Any = 1
    own: bool = False
    num_worst_tokens: Any = 0
    config: Any = None
    num_sms: int | None = None
    async_finish: Any = False
    allocate_on_comm_stream: Any = False
    dtype: Any = None
    scales_layout: Any = "row"
    quantize: Any = None
    round_scale: Any = False
    use_ue8m0: Any = False
    do_cpu_sync: Any = None
    do_expand: Any = None
    do_zero_padding: Any = False
    tag: Any = None
    low_latency: Any = False


class DispatchArguments(NamedTuple):
    """What the user passed to ``dispatch``, not checked."""

    x: Any
    handle: Any = None
    topk_idx: Any = None
    topk_weights: Any = None
    is_token_in_rank: Any = None
    num_tokens_per_rank: Any = None
    num_tokens_per_rdma_rank: Any = None
    num_tokens_per_expert: Any = None
    cumulative_local_expert_recv_stats: Any = None
    previous_event: Any = None
    options: DispatchOptions = DispatchOptions()
    dest: Any = None


class CombineOptions(NamedTuple):
    """What the user passed to ``combine`` beside arrays, handle and event, part of the key that
    finds a call's plan. ``num_sms`` is the Buffer's."""

    own: bool = False
    config: Any = None
    num_sms: int | None = None
    async_finish: Any = False
    allocate_on_comm_stream: Any = False
    reduce: Any = "exact"
    tag: Any = None


class CombineArguments(NamedTuple):
    """What the user passed to ``combine``, not checked."""

    x: Any
    handle: Any
    topk_weights: Any = None
    row_weights: Any = None
    bias: Any = None
    out: Any = None
    previous_event: Any = None
    options: CombineOptions = CombineOptions()


@dataclass(eq=False, slots=True)
class CallPlan:
    """What alike calls have in common: calls that differ in nothing but the contents of their
    arrays and how many rows these have. All of them are passed to the engine with one plan.

    Attributes:
        tag: The caller's, compared between the ranks, or None.
        prepared: For the engine, to keep what it has worked out for these calls.
    """

    tag: int | None = field(default=None, kw_only=True)
    prepared: Any = field(default=None, init=False)


@dataclass(eq=False, slots=True, kw_only=True)
class DispatchPlan(CallPlan):
    """What the checks found out about alike dispatches.

    Attributes:
        view: Dtype that the bytes of ``x`` are taken for; None: its own.
        signature: Of the newest handle that such a call has made; None where one is given.
        expert_alignment: Each entry of the list of counts is rounded up to a multiple of this,
            and in the expanded layout each expert's first row is a multiple of it. With a
            routing: that of the routing.
        own: True when the results are to be ordinary memory rather than pool memory.
        scales_layout: Order of the received scales in memory.
        quantize: Cast the rows on their way; results as with ``scales``. Never with ``scales``.
        num_worst_tokens: ``None``: the host waits for the counts. Else the most tokens this rank
            can receive, at most R * M; the host does not wait, arrays have this many rows (in
            the expanded layout ``protocol.sizes.worst_expanded_rows``), and every rank raises
            where some rank would receive more (header word ``capacity``). May differ between
            ranks; with a routing always ``None``.
        expand: The expanded layout; equal to ``routing.expanded`` where there is a routing.
        zero_padding: Expanded layout: rows that only fill up an expert's rows to a multiple of
            ``expert_alignment`` are zero, their scales and weights too; else undefined. Rows
            behind the last expert's are undefined either way.
        num_sms: Blocks to use, or ``None``: a hint, and no result depends on it.
        streams: Where the calls run, without the event that a call begins after.
        low_latency: Rows go unasked to a fixed place at each receiver. With ``topk_idx``, at most
            ``BufferSpec.low_latency_tokens`` tokens, and ``num_worst_tokens`` always.
        expert_rows: R * M of DeepEP V1's layout, else 0: an expanded layout (``expand`` is true)
            in which each local expert has this many rows, and its real ones are the first of
            them; ``num_worst_tokens`` is as many. With ``quantize`` the scales' memory is
            ``[El, S, expert_rows]``. M is the number that this rank gave the call: the ranks
            compare it (``protocol.headers.layout_word``).
        hook: Send, and return: ``DispatchOutput.receive`` does the rest. Never with
            ``streams`` but ``HERE``.
    """

    view: np.dtype[Any] | None = None
    signature: Signature | None = None
    expert_alignment: int = 1
    own: bool = False
    scales_layout: ScalesLayout = "row"
    quantize: Quantization | None = None
    num_worst_tokens: int | None = None
    expand: bool = False
    zero_padding: bool = False
    num_sms: int | None = None
    streams: Streams = HERE
    low_latency: bool = False
    expert_rows: int = 0
    hook: bool = False

    @property
    def operation(self) -> str:
        """The method of ``Buffer``, for messages."""
        return "low_latency_dispatch" if self.expert_rows else "dispatch"

    def call(self, given: DispatchArguments) -> DispatchCall:
        """The call for the engine. ``given``: arrays are the engine's."""
        x, scales, handle, topk_idx = given.x, None, given.handle, given.topk_idx
        event = given.previous_event
        if type(x) is tuple:
            x, scales = x
        if self.view is not None:
            x = x.view(self.view)
        routed = handle is not None or topk_idx is not None
        return DispatchCall(
            x,
            topk_idx,
            given.topk_weights,
            None if routed else given.is_token_in_rank,
            None if handle is None else handle.routing,
            scales,
            given.cumulative_local_expert_recv_stats,
            self.streams if event is None else _begun_after(event, self.streams),
            self,
        )

    def signed(self, handle: Any, num_tokens: int) -> Signature:
        """The signature of a call's handle, which is the given one where that is not None."""
        signature = self.signature
        if signature is None:
            known: Signature = handle.signature
            return known
        if signature.num_tokens != num_tokens:
            self.signature = signature = replace(signature, num_tokens=num_tokens)
        return signature


@dataclass(eq=False, slots=True)
class DispatchCall:
    """A checked dispatch: its arrays, and its plan. Exactly one of topk_idx, is_token_in_rank and
    routing is given.

    Attributes:
        x: ``[T, H]`` rows, C-contiguous, any dtype; with ``scales`` of one byte; with
            ``plan.quantize`` bfloat16, float16 or float32.
        topk_idx: ``[T, K]`` int32 or int64, or ``None``. Values are not checked yet.
        topk_weights: ``[T, K]`` float32, or ``None``.
        is_token_in_rank: ``[T, R]`` bool, or ``None``.
        routing: A cached layout, or ``None``.
        scales: ``[T, S]`` of 4-byte items (float32, int32 or uint32), any strides, or ``None``:
            they travel bit for bit with their rows. S = ``protocol.sizes.num_scales(H, packed)``.
        recv_stats: ``[El]`` int32, to which the call adds ``expert_counts`` in place when it
            ends well, or ``None``. Never with ``routing``.
        streams: Where it runs.
        plan: Shared with alike calls.
        kept: Arrays of other libraries, to be kept until the call is over; see ``imported``.
        wait_stats: ``[R]`` int64, to which the call adds the cycles of the GPU's clock that it
            waited for each source's rows (host engine: none), or ``None``. Low latency.
    """

    x: Array
    topk_idx: Array | None = None
    topk_weights: Array | None = None
    is_token_in_rank: Array | None = None
    routing: Routing | None = None
    scales: Array | None = None
    recv_stats: Array | None = None
    streams: Streams = HERE
    plan: DispatchPlan = field(default_factory=DispatchPlan)
    kept: tuple[object, ...] = ()
    wait_stats: Array | None = None


@dataclass(eq=False, slots=True, kw_only=True)
class CombinePlan(CallPlan):
    """What the checks found out about alike combines.

    Attributes:
        own: True when the result is to be ordinary memory rather than pool memory.
        reduce: Expanded layout: ``"exact"``: terms are the copies, rank by rank and within
            a rank by ascending column of the choice, rounded once. ``"per_rank"``: each rank
            first adds its copies of a token in that order and rounds; the rest is a plain
            combine of these sums. Any layout: ``"per_node"``, of several nodes alone: each node
            first adds its ranks' rows of a token (expanded: their sums of copies) and rounds.
        num_sms: Blocks to use, or ``None``: a hint, and no result depends on it.
        streams: Where the calls run, without the event that a call begins after.
        hook: As in ``DispatchPlan``, with a routing that is ``low_latency``.
        expert_major: ``low_latency_combine``: the routing has ``expert_rows``.
    """

    own: bool = False
    reduce: Reduce = "exact"
    num_sms: int | None = None
    streams: Streams = HERE
    hook: bool = False
    expert_major: bool = False

    @property
    def operation(self) -> str:
        """The method of ``Buffer``, for messages."""
        return "low_latency_combine" if self.expert_major else "combine"

    def call(self, given: CombineArguments) -> CombineCall:
        """The call for the engine. ``given``: arrays are the engine's."""
        bias, event = given.bias, given.previous_event
        return CombineCall(
            given.x,
            given.handle.routing,
            given.topk_weights,
            () if bias is None else listed(bias),
            given.row_weights,
            given.out,
            self.streams if event is None else _begun_after(event, self.streams),
            self,
        )


@dataclass(eq=False, slots=True)
class CombineCall:
    """A checked combine: its arrays, and its plan.

    Attributes:
        x: ``[routing.num_rows, H]`` rows, C-contiguous.
        routing: The routing of the handle.
        topk_weights: ``[N, K]`` float32 to be summed over ranks; expanded: ``[num_rows]``
            float32, carried back to the choices they belong to. Or ``None``.
        biases: Zero to two arrays ``[T, H]`` of the dtype of ``x``.
        row_weights: Expanded layout, floating rows: ``[num_rows]`` float32 that each copy is
            multiplied with, in the type that sums are kept in, before it is added; or ``None``.
        out: ``[T, H]`` C-contiguous, dtype of ``x``, to write the result into, or ``None``. The
            engine refuses one that shares memory with any other argument.
        streams: Where it runs.
        plan: Shared with alike calls.
        kept: Arrays of other libraries, to be kept until the call is over; see ``imported``.
        token_weights: ``routing.expert_rows`` only, never with ``row_weights``: ``[T, K]``
            float32 weights of this rank's choices. They go to the ranks that hold the copies, and
            count there as ``row_weights``.
        wait_stats: As in ``DispatchCall``.
    """

    x: Array
    routing: Routing
    topk_weights: Array | None = None
    biases: tuple[Array, ...] = ()
    row_weights: Array | None = None
    out: Array | None = None
    streams: Streams = HERE
    plan: CombinePlan = field(default_factory=CombinePlan)
    kept: tuple[object, ...] = ()
    token_weights: Array | None = None
    wait_stats: Array | None = None


def imported(given: tuple[object, ...], checked: tuple[object, ...]) -> tuple[object, ...]:
    """Pairs (what the user passed, the engine's array over its memory), where these differ.

    Args:
        given: Arguments of a call, as the user passed them.
        checked: The same arguments with the engine's arrays.
    """
    pairs: list[tuple[object, object]] = []
    for ones, others in zip(given, checked, strict=True):
        if ones is others:
            continue
        if isinstance(ones, tuple | list) or isinstance(others, tuple | list):
            each = zip(_each(ones), _each(others), strict=False)
            pairs += [(one, other) for one, other in each if other is not None and one is not other]
        elif others is not None:
            pairs.append((ones, others))
    return tuple(pairs)


def _each(argument: object) -> tuple[object, ...]:
    return tuple(argument) if isinstance(argument, tuple | list) else (argument,)


def listed(bias: Any) -> tuple[Any, ...]:
    """The biases that one argument gives."""
    if bias is None:
        return ()
    return tuple(bias) if isinstance(bias, tuple | list) else (bias,)


def _begun_after(event: Any, streams: Streams) -> Streams:
    return Streams(event.event, streams.async_finish, streams.allocate_on_comm_stream)
