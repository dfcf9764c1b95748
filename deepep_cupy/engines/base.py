"""What the api asks of an engine, and what it gets back.

Calls and outputs are made in every call, and so for speed not frozen; nobody changes one.

Two engines exist: ``engines/host.py`` (NumPy and MPI) and ``engines/cuda.py`` (CuPy and kernels).
The api has checked shapes, dtypes and sizes before it builds a call; an engine checks what only
the ranks together can know (headers) and what only the data can tell (values of ``topk_idx``).
What every result must be is said in ``reference/``; here is who passes what to whom.

An engine names the modes it has in ``modes``; the api refuses, on every rank, a call that needs
another. Without any mode an engine does plain ``dispatch``, ``combine`` and ``barrier``.

===============  =========================================================================
mode             what a call may have then
===============  =========================================================================
``scales``       ``DispatchCall.scales``: FP8 rows with scales
``quantize``     ``DispatchCall.quantize``: rows cast to FP8 on their way
``no_wait``      ``DispatchCall.num_worst_tokens``: the host learns no count
``expand``       ``DispatchCall.expand``, ``zero_padding``, and combines of such handles
``expert_counts``  ``Routing.expert_counts`` and ``psum_expert_rows`` in every call with choices
``stats``        ``DispatchCall.recv_stats``
``events``       ``streams`` of both calls, ``capture``, ``comm_stream``
``out``          ``CombineCall.out``
===============  =========================================================================

``no_wait`` and ``expand`` imply ``expert_counts`` for the calls that use them, and every
combination of the modes an engine names is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from deepep_cupy.plan.headers import Kind, Refusal

__all__ = [
    "ALL_MODES",
    "HERE",
    "Array",
    "CombineCall",
    "CombineOutput",
    "DispatchCall",
    "DispatchLayout",
    "DispatchOutput",
    "Engine",
    "Event",
    "Form",
    "ModalEngine",
    "Quantization",
    "Reduce",
    "Routing",
    "ScalesLayout",
    "Streams",
    "modes_of",
]

Array: TypeAlias = Any
"""``numpy.ndarray`` on the host engine, ``cupy.ndarray`` on the CUDA engine."""

ScalesLayout: TypeAlias = Literal["row", "column"]
"""Order of received scales ``[rows, S]`` in memory: C (``row``) or Fortran (``column``)."""

Reduce: TypeAlias = Literal["exact", "per_rank"]
"""How a combine of the expanded layout adds the copies of a token that one rank holds."""

ALL_MODES = frozenset(
    {"scales", "quantize", "no_wait", "expand", "expert_counts", "stats", "events", "out"}
)
"""Every mode there is."""


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
            event to wait for. Inputs and outputs live until then whatever the caller drops.
        allocate_on_comm_stream: New arrays belong to the communication stream. The api has
            checked that it comes with ``previous_event`` and ``async_finish``.
    """

    previous_event: Event | None = None
    async_finish: bool = False
    allocate_on_comm_stream: bool = False


HERE = Streams()
"""On the current stream, which waits; where the api says this, it is this very object."""


@dataclass(eq=False, slots=True)
class Form:
    """What calls have in common that differ in nothing but the contents of their arrays and how
    many rows these have. The api passes one object with all calls of a form.

    Attributes:
        plan: For the engine, to keep what it has worked out.
    """

    plan: Any = field(default=None, init=False)


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


@dataclass(frozen=True, eq=False)
class Routing:
    """Who sent what where in one dispatch: all that a handle keeps.

    A rank's *received tokens* are numbered 0..N-1 by (source rank, source token). The rows of
    ``recv_x`` are just these, or, in the expanded layout, one row per (received token, local
    expert it chose), sorted by (local expert, source rank, source token), where the rows of each
    expert begin at a multiple of ``expert_alignment``.

    Where the host did not wait, N stands for the worst case in all shapes (``waited`` is False),
    and the entries behind the real ones are -1.

    Attributes:
        num_tokens: T, tokens this rank sent.
        num_recv_tokens: N, tokens this rank received, or ``num_worst_tokens``.
        recv_src_idx: ``[N]`` int32, token number on its source rank.
        recv_rows_per_rank: ``[R]`` int32, tokens received from each rank.
        send_row: ``[T, R]`` int32, number of token t among rank r's received tokens; -1: not
            sent.
        birth: The epoch of the dispatch; an int on the host, a device word on GPUs.
        waited: Whether the host waited for the counts, so that N is the real number.
        psum_recv_rows: ``[R]`` int32, inclusive sums of ``recv_rows_per_rank``; the last entry
            is the real number of received tokens. None on an engine without ``no_wait``.
        expert_counts: ``[El]`` int32, received tokens that chose each local expert; None without
            choices, and on an engine without ``expert_counts``.
        psum_expert_rows: ``[El]`` int32. Expanded: first row of the expert plus
            ``expert_counts``. Else inclusive sums of the counts, each rounded up to
            ``expert_alignment``. None where ``expert_counts`` is.
        expanded_row: ``[N, K]`` int32, row of ``recv_x`` that holds the copy for choice k of
            received token n; -1 where the choice is no expert of this rank. None where the
            layout is not expanded.
        num_expanded_rows: Rows of ``recv_x`` in the expanded layout: the sum of the rounded
            counts, or, where the host did not wait, ``plan.routing.worst_expanded_rows``.
        expert_alignment: Of the dispatch.
    """

    num_tokens: int
    num_recv_tokens: int
    recv_src_idx: Array
    recv_rows_per_rank: Array
    send_row: Array
    birth: Any
    waited: bool = True
    psum_recv_rows: Array | None = None
    expert_counts: Array | None = None
    psum_expert_rows: Array | None = None
    expanded_row: Array | None = None
    num_expanded_rows: int = 0
    expert_alignment: int = 1

    @property
    def expanded(self) -> bool:
        """Whether ``recv_x`` has a row per (token, local expert)."""
        return self.expanded_row is not None

    @property
    def num_rows(self) -> int:
        """Rows of ``recv_x``, and of the ``x`` that combine takes."""
        return self.num_expanded_rows if self.expanded else self.num_recv_tokens


@dataclass(eq=False, slots=True)
class DispatchCall:
    """A checked dispatch. Exactly one of topk_idx, is_token_in_rank and routing is given.

    Attributes:
        x: ``[T, H]`` rows, C-contiguous, any dtype; with ``scales`` of one byte; with
            ``quantize`` bfloat16, float16 or float32.
        topk_idx: ``[T, K]`` int32 or int64, or ``None``. Values are not checked yet.
        topk_weights: ``[T, K]`` float32, or ``None``.
        is_token_in_rank: ``[T, R]`` bool, or ``None``.
        routing: A cached layout, or ``None``.
        expert_alignment: Each entry of the list of counts is rounded up to a multiple of this,
            and in the expanded layout each expert's first row is a multiple of it. With
            ``routing``: that of the routing.
        own: True when the results are to be ordinary memory rather than pool memory.
        scales: ``[T, S]`` of 4-byte items (float32, int32 or uint32), any strides, or ``None``:
            they travel bit for bit with their rows. S = ``plan.routing.num_scales(H, packed)``.
        scales_layout: Order of the received scales in memory.
        quantize: Cast the rows on their way; results as with ``scales``. Never with ``scales``.
        num_worst_tokens: ``None``: the host waits for the counts. Else the most tokens this rank
            can receive, at most R * M; the host does not wait, arrays have this many rows (in
            the expanded layout ``plan.routing.worst_expanded_rows``), and every rank raises
            where some rank would receive more (header word ``capacity``). May differ between
            ranks; with ``routing`` always ``None``.
        expand: The expanded layout; equal to ``routing.expanded`` where there is a routing.
        zero_padding: Expanded layout: rows that only fill up an expert's rows to a multiple of
            ``expert_alignment`` are zero, their scales and weights too; else undefined. Rows
            behind the last expert's are undefined either way.
        recv_stats: ``[El]`` int32, to which the call adds ``expert_counts`` in place when it
            ends well, or ``None``. Never with ``routing``.
        num_sms: Blocks to use, or ``None``: a hint, and no result depends on it.
        streams: Where it runs.
        form: Shared with calls like this one.
    """

    x: Array
    topk_idx: Array | None
    topk_weights: Array | None
    is_token_in_rank: Array | None
    routing: Routing | None
    expert_alignment: int
    own: bool
    scales: Array | None = None
    scales_layout: ScalesLayout = "row"
    quantize: Quantization | None = None
    num_worst_tokens: int | None = None
    expand: bool = False
    zero_padding: bool = False
    recv_stats: Array | None = None
    num_sms: int | None = None
    streams: Streams = HERE
    form: Form = field(default_factory=Form)


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
            ``use_ue8m0``), in the order ``scales_layout``; ``None`` without scales.
        event: When the operation is done; always with ``async_finish``, else ``None``.
    """

    recv_x: Array
    recv_topk_idx: Array | None
    recv_topk_weights: Array | None
    num_recv_tokens_per_expert: list[int]
    routing: Routing
    recv_scales: Array | None = None
    event: Event | None = None


@dataclass(eq=False, slots=True)
class CombineCall:
    """A checked combine.

    Attributes:
        x: ``[routing.num_rows, H]`` rows, C-contiguous.
        routing: The routing of the handle.
        topk_weights: ``[N, K]`` float32 to be summed over ranks; expanded: ``[num_rows]``
            float32, carried back to the choices they belong to. Or ``None``.
        biases: Zero to two arrays ``[T, H]`` of the dtype of ``x``.
        own: True when the result is to be ordinary memory rather than pool memory.
        reduce: Expanded layout only. ``"exact"``: terms are the copies, rank by rank and within
            a rank by ascending column of the choice, rounded once. ``"per_rank"``: each rank
            first adds its copies of a token in that order and rounds; the rest is a plain
            combine of these sums.
        row_weights: Expanded layout, floating rows: ``[num_rows]`` float32 that each copy is
            multiplied with, in the type that sums are kept in, before it is added; or ``None``.
        out: ``[T, H]`` C-contiguous, dtype of ``x``, to write the result into, or ``None``. The
            engine refuses one that shares memory with any other argument.
        num_sms: As in ``DispatchCall``.
        streams: As in ``DispatchCall``.
        form: As in ``DispatchCall``.
    """

    x: Array
    routing: Routing
    topk_weights: Array | None
    biases: tuple[Array, ...]
    own: bool = False
    reduce: Reduce = "exact"
    row_weights: Array | None = None
    out: Array | None = None
    num_sms: int | None = None
    streams: Streams = HERE
    form: Form = field(default_factory=Form)


@dataclass(eq=False, slots=True)
class CombineOutput:
    """What a combine produced.

    Attributes:
        combined_x: ``[T, H]``; ``CombineCall.out`` itself where that was given.
        combined_topk_weights: ``[T, K]`` float32 or ``None``. Expanded: the weight of the copy
            of each choice, bit for bit, and +0 for a choice that is -1.
        event: When the operation is done; always with ``async_finish``, else ``None``.
    """

    combined_x: Array
    combined_topk_weights: Array | None
    event: Event | None = None


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

    def glance(self, value: object, strided: bool) -> tuple[Any, ...] | None:
        """Shape, dtype and whatever else of a writable array that ``intake`` (``strided``:
        ``intake_scales``) would return as it is; None: ask there. Cheap."""
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


class ModalEngine(Engine, Protocol):
    """What an engine with modes has beside an ``Engine``; the api asks ``modes_of`` first."""

    modes: frozenset[str]
    """Names of the modes it has, of ``ALL_MODES``."""

    def intake_scales(self, operation: str, argument: str, value: object) -> Array:
        """Local. As ``intake``, but the array may have any strides. Mode ``scales``."""
        ...

    def capture(self) -> Event:
        """Local. The present end of the current stream. Mode ``events``."""
        ...

    def comm_stream(self) -> Any:
        """Local. The communication stream; None on the host engine. Mode ``events``."""
        ...


def modes_of(engine: Engine) -> frozenset[str]:
    """Modes of an engine; none where it names none."""
    modes: frozenset[str] = getattr(engine, "modes", frozenset())
    return modes
