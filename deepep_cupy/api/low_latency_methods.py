"""The methods of ``Buffer`` that have DeepEP V1's low-latency names."""

from __future__ import annotations

from typing import Any, Literal

from deepep_cupy.api.advice import suggest_keywords
from deepep_cupy.api.config import Config
from deepep_cupy.api.events import EventOverlap
from deepep_cupy.api.handle import DispatchHandle
from deepep_cupy.api.lifecycle import Lifecycle
from deepep_cupy.api.low_latency import (
    LowLatencyCombineArguments,
    LowLatencyCombineOptions,
    LowLatencyCombineResult,
    LowLatencyDispatchArguments,
    LowLatencyDispatchOptions,
    LowLatencyDispatchResult,
    LowLatencyHandle,
)
from deepep_cupy.api.low_latency_cache import LowLatencyCalls
from deepep_cupy.api.values import is_true
from deepep_cupy.engines.calls import Signature
from deepep_cupy.engines.protocol import CombineOutput, DispatchOutput, Engine
from deepep_cupy.protocol.headers import Kind
from deepep_cupy.protocol.sizes import BufferSpec

__all__ = ["LowLatencyMethods"]


class LowLatencyMethods:
    """A part of ``Buffer``, which makes what is used here."""

    _spec: BufferSpec
    _engine: Engine
    _life: Lifecycle
    _low_latency: LowLatencyCalls
    _num_sms: int | None

    @suggest_keywords
    def low_latency_dispatch(
        self,
        x: Any,
        topk_idx: Any,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Any = None,
        dispatch_wait_recv_cost_stats: Any = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: Any = None,
        previous_event: EventOverlap | None = None,
        own: bool = False,
        config: Config | None = None,
    ) -> LowLatencyDispatchResult:
        """Send each token to the ranks of its experts, into DeepEP V1's layout of decoding.

        For few tokens a rank, in a Buffer made with ``low_latency_tokens`` = M'. Every expert has
        room for all tokens that can come, R * M rows with M =
        ``num_max_dispatch_tokens_per_rank``, so that nothing waits for counts.

        Collective: yes.  Stream: current, or the communication stream with ``previous_event`` or
        ``async_finish``.  Host sync: no.

        Args:
            x: ``[T, H]``, C-contiguous, T ≤ M: bfloat16, float16 or float32 to be cast, or of any
                dtype with ``use_fp8=False``.
            topk_idx: ``[T, K]`` int64 or int32, K ≤ ``num_topk``, each row's experts different;
                -1: no choice.
            num_max_dispatch_tokens_per_rank: M ≤ M', equal on all ranks; may change from call to
                call.
            num_experts: E, the Buffer's.
            cumulative_local_expert_recv_stats: ``[El]`` int32, to which ``recv_count`` is added.
            dispatch_wait_recv_cost_stats: ``[R]`` int64, to which the clock cycles are added that
                the GPU waited for each source's rows; the host engine adds none.
            use_fp8: Cast the rows to float8_e4m3fn, a scale per 128 channels, as
                ``dispatch(quantize="fp8_e4m3")`` does.
            round_scale: With ``use_fp8``: scales are powers of two.
            use_ue8m0: With ``round_scale``: scales arrive as packed exponents, int32.
            async_finish: Do not let the current stream wait; the event in the result says when.
            return_recv_hook: Send, and return: ``hook()`` queues the receiving half on the stream
                the call was made on, and only then are outputs defined. Up to
                ``low_latency_in_flight`` calls may be open, their hooks may come in any order, and
                any other operation is refused meanwhile. Not with the two events.
            topk_weights: ``[T, K]`` float32: they go along, and the combine needs none.
            previous_event: Begin after this event, not after the work of the current stream.
            own: On GPUs, results in ordinary memory, not in the Buffer's pool.
            config: ``num_sms`` of it is used on GPUs.

        Returns:
            recv_x ``[El, R * M, H]``, of which each expert e's first ``recv_count[e]`` rows hold
            what came, by (source rank, source token), and the others anything; with FP8 a pair
            with the scales ``[El, R * M, S]`` in memory ``[El, S, R * M]``; recv_count ``[El]``
            int32; the handle; an event; the hook or None.

        Raises:
            ContractError: On every rank, when an argument is wrong on one or differs between
                ranks. Nothing moved, and the Buffer stays usable.
            StateError: Too many calls are open, or the Buffer is closed or poisoned.
            PeerTimeoutError: A rank did not come in ``timeout_s``. The Buffer is poisoned.
            PeerAbortedError: Another rank gave up. The Buffer is poisoned.
        """
        given = LowLatencyDispatchArguments(
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            previous_event,
            LowLatencyDispatchOptions(
                num_max_dispatch_tokens_per_rank,
                num_experts,
                use_fp8,
                round_scale,
                use_ue8m0,
                async_finish,
                return_recv_hook,
                own,
                config,
                self._num_sms,
            ),
        )
        name, sends = "low_latency_dispatch", is_true(return_recv_hook)
        work = self._low_latency_dispatch
        done, signature = self._life.operate(name, Kind.DISPATCH, work, given, sends=sends)
        rows = done.recv_x.reshape(self._spec.num_local_experts, -1, done.recv_x.shape[1])
        handle = LowLatencyHandle(
            DispatchHandle(done.routing, [], signature),
            done.recv_topk_weights,
            int(num_max_dispatch_tokens_per_rank),
            rows.shape[2],
            int(num_experts),
        )
        return LowLatencyDispatchResult(
            rows if done.recv_scales is None else (rows, done.recv_scales),
            done.routing.expert_counts,
            handle,
            EventOverlap(done.event),
            self._life.hook(name, done.receive),
        )

    def _low_latency_dispatch(
        self, given: LowLatencyDispatchArguments
    ) -> tuple[DispatchOutput, Signature]:
        call, signature = self._low_latency.dispatch(given)
        return self._engine.dispatch(call), signature

    @suggest_keywords
    def low_latency_combine(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Any = None,
        combine_wait_recv_cost_stats: Any = None,
        *,
        reduce: Literal["exact", "per_rank"] = "per_rank",
        previous_event: EventOverlap | None = None,
        own: bool = False,
        config: Config | None = None,
    ) -> LowLatencyCombineResult:
        """Bring the rows of a ``low_latency_dispatch`` back, and add each token's, weighted.

        Results are those of ``combine`` of the expanded layout with ``row_weights``.

        Collective: yes.  Stream: as ``low_latency_dispatch``; ``x`` is read by its own rank only.
        Host sync: no.

        Args:
            x: ``[El, R * M, H]`` of a floating dtype, C-contiguous; rows that ``recv_count`` does
                not count are not read.
            topk_idx: ``[T, K]`` int64 or int32; its shape is checked, the handle decides.
            topk_weights: ``[T, K]`` float32 weights of this rank's choices; None: those that the
                dispatch was given, which cost nothing now.
            handle: Of the dispatch. All ranks pass the handle of the same call.
            use_logfmt: Must be False.
            zero_copy: Accepted: nothing is copied anyway.
            async_finish: As for ``low_latency_dispatch``.
            return_recv_hook: As for ``low_latency_dispatch``.
            out: ``[T, H]``, dtype of ``x``, C-contiguous: write the result here, and return it.
            combine_wait_recv_cost_stats: ``[R]`` int64, as in ``low_latency_dispatch``.
            reduce: ``"per_rank"``: each rank first adds its copies of a token and rounds.
                ``"exact"``: every copy travels, and is a term of its own; one rounding. A token's
                bits do not depend on how many others there are.
            previous_event: Begin after this event, not after the work of the current stream.
            own: On GPUs, the result in ordinary memory, not in the Buffer's pool.
            config: ``num_sms`` of it is used on GPUs.

        Returns:
            combined_x ``[T, H]``, dtype of ``x``, 0 for a token that went nowhere; an event; the
            hook or None.

        Raises:
            ContractError: On every rank, when an argument is wrong on one or differs between
                ranks. Nothing moved, and the Buffer stays usable.
            StateError: Too many calls are open, or the Buffer is closed or poisoned.
            PeerTimeoutError: A rank did not come in ``timeout_s``. The Buffer is poisoned.
            PeerAbortedError: Another rank gave up. The Buffer is poisoned.
        """
        given = LowLatencyCombineArguments(
            x,
            topk_idx,
            topk_weights,
            handle,
            out,
            combine_wait_recv_cost_stats,
            previous_event,
            LowLatencyCombineOptions(
                use_logfmt,
                zero_copy,
                async_finish,
                return_recv_hook,
                reduce,
                own,
                config,
                self._num_sms,
            ),
        )
        name, sends = "low_latency_combine", is_true(return_recv_hook)
        work = self._low_latency_combine
        done = self._life.operate(name, Kind.COMBINE, work, given, sends=sends)
        return LowLatencyCombineResult(
            done.combined_x if out is None else out,
            EventOverlap(done.event),
            self._life.hook(name, done.receive),
        )

    def _low_latency_combine(self, given: LowLatencyCombineArguments) -> CombineOutput:
        return self._engine.combine(self._low_latency.combine(given))

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """DeepEP V1's; here there is nothing to clean, between no calls, and it does nothing.

        Collective: no.  Stream: none.  Host sync: no.

        Args:
            num_max_dispatch_tokens_per_rank: Not used.
            hidden: Not used.
            num_experts: Not used.

        Raises:
            StateError: The Buffer is closed.
        """
        del num_max_dispatch_tokens_per_rank, hidden, num_experts
        self._life.must_not_be_closed("clean_low_latency_buffer")
