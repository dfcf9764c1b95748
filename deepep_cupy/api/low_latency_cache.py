"""Plans of DeepEP V1's low-latency calls that were checked before: see ``call_cache``."""

from __future__ import annotations

from deepep_cupy.api.call_cache import ArrayKey, Key, PlanCache, by_row, kind_of, whole
from deepep_cupy.api.low_latency import (
    LowLatencyCombineArguments,
    LowLatencyDispatchArguments,
    LowLatencyHandle,
    combine_call,
    dispatch_call,
)
from deepep_cupy.api.low_latency_checks import LowLatencyChecker
from deepep_cupy.engines.calls import (
    CombineCall,
    CombinePlan,
    DispatchCall,
    DispatchPlan,
    Signature,
    imported,
)

__all__ = ["LowLatencyCalls"]


class LowLatencyCalls:
    """Makes calls of arguments: with the plan of an earlier call like it, else by all checks.

    Args:
        checker: The Buffer's checks.
        array_key: ``Engine.array_key``.
    """

    def __init__(self, checker: LowLatencyChecker, array_key: ArrayKey) -> None:
        self._checker = checker
        self._array_key = array_key
        self._dispatches: PlanCache[DispatchPlan] = PlanCache()
        self._combines: PlanCache[CombinePlan] = PlanCache()

    def dispatch(self, given: LowLatencyDispatchArguments) -> tuple[DispatchCall, Signature]:
        """The call for the engine, and the signature of the handle to make.

        Raises:
            ContractError: An argument is wrong. Carries a refusal.
        """
        key = _dispatch_key(given, self._array_key)
        plan, checked = self._dispatches.find(key), given
        if plan is None:
            checked, plan = self._checker.dispatch(given)
            self._dispatches.keep(key, plan)
        call = dispatch_call(checked, plan)
        if checked is not given:
            call.kept = imported(given[:-1], checked[:-1])
        return call, plan.signed(None, len(call.x))

    def combine(self, given: LowLatencyCombineArguments) -> CombineCall:
        """The call for the engine.

        Raises:
            ContractError: An argument is wrong. Carries a refusal.
        """
        key = _combine_key(given, self._array_key)
        plan, checked = self._combines.find(key), given
        if plan is None:
            checked, plan = self._checker.combine(given)
            self._combines.keep(key, plan)
        call = combine_call(checked, plan)
        if checked is not given:
            call.kept = imported(given[:-1], checked[:-1])
        return call


def _dispatch_key(given: LowLatencyDispatchArguments, array_key: ArrayKey) -> Key | None:
    """The key of a ``low_latency_dispatch``'s plan; None: only the checks can tell."""
    options, weights, seen = given.options, given.topk_weights, array_key(given.x, False)
    most = options.num_max_dispatch_tokens_per_rank
    if seen is None or len(seen[0]) != 2 or type(most) is not int or seen[0][0] > most:
        return None
    tokens, hidden = seen[0]
    of_choices = by_row(array_key(given.topk_idx, False), tokens)
    of_weights = None if weights is None else by_row(array_key(weights, False), tokens)
    if of_choices is None or (of_weights is None and weights is not None):
        return None
    stats = given.cumulative_local_expert_recv_stats, given.dispatch_wait_recv_cost_stats
    of_stats = whole(stats, array_key)
    if of_stats is None:
        return None
    types = type(given.previous_event), *map(type, options)
    return types, options, hidden, seen[1], of_choices, of_weights, of_stats


def _combine_key(given: LowLatencyCombineArguments, array_key: ArrayKey) -> Key | None:
    """The key of a ``low_latency_combine``'s plan; None: only the checks can tell."""
    handle, options = given.handle, given.options
    if type(handle) is not LowLatencyHandle:
        return None
    parts: list[object] = []
    tokens = handle.dispatched.num_tokens
    for array in (given.topk_idx, given.topk_weights, given.out):
        part = None if array is None else by_row(array_key(array, False), tokens)
        if part is None and array is not None:
            return None
        parts.append(part)
    of_arrays = whole((given.x, given.combine_wait_recv_cost_stats), array_key)
    if of_arrays is None:
        return None
    parts += [handle.recv_weights is None, handle.num_max_dispatch_tokens_per_rank]
    types = type(given.previous_event), *map(type, options)
    return types, options, kind_of(handle.dispatched), of_arrays, tuple(parts)
