"""DeepEP V1's calls: one whose plan is known is judged as one that was never seen."""

import dataclasses
import random

import ml_dtypes
import numpy as np
import pytest

from deepep_cupy.api.config import Config
from deepep_cupy.api.events import EventOverlap
from deepep_cupy.api.handle import DispatchHandle
from deepep_cupy.api.low_latency import (
    LowLatencyCombineArguments,
    LowLatencyCombineOptions,
    LowLatencyDispatchArguments,
    LowLatencyDispatchOptions,
    LowLatencyHandle,
)
from deepep_cupy.api.low_latency_cache import LowLatencyCalls
from deepep_cupy.api.low_latency_checks import LowLatencyChecker
from deepep_cupy.engines.calls import Signature
from deepep_cupy.engines.host.moves import HostRouting
from deepep_cupy.engines.protocol import ALL_MODES
from deepep_cupy.errors import ContractError
from deepep_cupy.protocol.headers import Layout
from deepep_cupy.protocol.sizes import BufferSpec

R, LOW, H, K, E = 2, 4, 32, 3, 6
LOCAL = E // R


class Foreign:
    """An array of another library."""

    def __init__(self, array):
        self.array = array


class Past:
    def wait(self):
        pass


def import_array(operation, argument, value):
    if isinstance(value, Foreign):
        return value.array
    if not isinstance(value, np.ndarray) or not value.flags.c_contiguous:
        raise ContractError(f"{operation}(): argument '{argument}' must be an array.")
    return value


def array_key(value, strided):
    del strided
    good = type(value) is np.ndarray and value.flags.writeable and value.flags.c_contiguous
    return (value.shape, value.dtype) if good else None


def calls(look=array_key):
    spec = BufferSpec(
        num_ranks=R,
        rank=1,
        num_max_tokens_per_rank=8,
        max_row_bytes=4 * H,
        num_topk=K,
        num_experts=E,
        timeout_s=1.0,
        low_latency_tokens=LOW,
    )
    checker = LowLatencyChecker(spec, 7, import_array, ALL_MODES, import_array)
    return LowLatencyCalls(checker, look)


def handle(tokens=3, most=LOW, *, weights=True, topk=K, buffer=7):
    nothing = np.zeros(0, np.int32)
    routing = HostRouting(
        num_tokens=tokens,
        num_recv_tokens=R * most,
        recv_src_idx=nothing,
        recv_rows_per_rank=nothing,
        send_row=nothing,
        birth=1,
        low_latency=True,
        expert_rows=R * most,
        expanded_row=np.zeros((0, K), np.int32),
        num_expanded_rows=LOCAL * R * most,
    )
    signature = Signature(buffer, R, tokens, topk, E, Layout.TOPK)
    came = np.zeros(LOCAL * R * most, np.float32) if weights else None
    return LowLatencyHandle(DispatchHandle(routing, [], signature), came, most, H, E)


def read_only(array):
    array.flags.writeable = False
    return array


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


FLAGS = (False, True, 0, 1, np.bool_(True), None)
COMMON = {
    "previous_event": [None, EventOverlap(), EventOverlap(Past()), Past()],
    "async_finish": FLAGS,
    "return_recv_hook": FLAGS,
    "own": FLAGS,
    "config": [None, Config(), Config(num_sms=3), 4],
    "num_sms": [None, 7],
}
DISPATCH = COMMON | {
    "x": [
        *(zeros(t, H) for t in (0, 2, 3, 5)),
        zeros(3, H, dtype=ml_dtypes.bfloat16),
        zeros(3, H, dtype=np.float64),
        zeros(3, 5 * H),
        zeros(3),
        Foreign(zeros(3, H)),
        (zeros(3, H), zeros(3, 1)),
    ],
    "topk_idx": [
        *(zeros(t, K, dtype=np.int64) for t in (2, 3, 5)),
        zeros(3, K, dtype=np.int32),
        zeros(3, K),
        zeros(3, K + 1, dtype=np.int64),
        None,
    ],
    "topk_weights": [None, zeros(3, K), zeros(2, K), zeros(3, K - 1), zeros(3, K, dtype="f8")],
    "cumulative_local_expert_recv_stats": [
        None,
        zeros(LOCAL, dtype=np.int32),
        zeros(E, dtype=np.int32),
        read_only(zeros(LOCAL, dtype=np.int32)),
    ],
    "dispatch_wait_recv_cost_stats": [
        None,
        zeros(R, dtype=np.int64),
        zeros(R, dtype=np.int32),
        zeros(R, R, dtype=np.int64),
    ],
    "num_max_dispatch_tokens_per_rank": [LOW, 2, 3, 0, LOW + 1, 3.0, np.int64(3), None, True],
    "num_experts": [E, E + R, None, float(E), np.int64(E), "6"],
    "use_fp8": FLAGS,
    "round_scale": FLAGS,
    "use_ue8m0": FLAGS,
}
COMBINE = COMMON | {
    "x": [
        *(zeros(LOCAL, R * most, H) for most in (2, LOW)),
        zeros(LOCAL, R * LOW, H, dtype=ml_dtypes.bfloat16),
        zeros(LOCAL, R * LOW, H, dtype=np.int32),
        zeros(LOCAL, R * LOW, H, dtype=ml_dtypes.float8_e4m3fn),
        zeros(LOCAL * R * LOW, H),
        zeros(LOCAL, R * LOW, 5 * H),
        Foreign(zeros(LOCAL, R * LOW, H)),
    ],
    "topk_idx": DISPATCH["topk_idx"],
    "topk_weights": DISPATCH["topk_weights"],
    "handle": [
        handle(),
        handle(2),
        handle(most=2),
        handle(weights=False),
        handle(topk=2),
        handle(buffer=8),
        handle().dispatched,
    ],
    "out": [None, zeros(3, H), zeros(2, H), zeros(3, H, dtype="f8"), read_only(zeros(3, H))],
    "combine_wait_recv_cost_stats": DISPATCH["dispatch_wait_recv_cost_stats"],
    "use_logfmt": FLAGS,
    "zero_copy": FLAGS,
    "reduce": ["per_rank", "exact", "per_node", 2],
}
RIGHT = {
    "dispatch": {
        "x": zeros(3, H),
        "topk_idx": zeros(3, K, dtype=np.int64),
        "num_max_dispatch_tokens_per_rank": LOW,
        "num_experts": E,
    },
    "combine": {
        "x": zeros(LOCAL, R * LOW, H),
        "topk_idx": zeros(3, K, dtype=np.int64),
        "handle": handle(),
    },
}
KINDS = {
    "dispatch": (DISPATCH, LowLatencyDispatchArguments, LowLatencyDispatchOptions),
    "combine": (COMBINE, LowLatencyCombineArguments, LowLatencyCombineOptions),
}


def outcome(made, operation, arguments):
    """What is passed on to the engine, or the error."""
    _, whole, options = KINDS[operation]
    chosen = options(**{name: arguments[name] for name in options._fields if name in arguments})
    names = [name for name in whole._fields if name != "options"]
    given = whole(**{name: arguments.get(name) for name in names}, options=chosen)
    try:
        call = getattr(made, operation)(given)
    except ContractError as error:
        return str(error), error.refusal
    call, *signature = call if operation == "dispatch" else (call,)
    found = {each.name: getattr(call, each.name) for each in dataclasses.fields(call)}
    plan = found.pop("plan")
    found |= {each.name: getattr(plan, each.name) for each in dataclasses.fields(plan)}
    del found["prepared"]
    found["streams"] = [getattr(call.streams, each) for each in type(call.streams).__slots__]
    return {name: described(value) for name, value in found.items()}, signature


def described(value):
    """Arrays: these very ones."""
    if isinstance(value, tuple | list):
        return type(value), [described(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.ctypes.data, value.shape, value.strides, value.dtype
    if isinstance(value, HostRouting | Past):
        return id(value)
    return type(value), value


def compare(operation, rounds, look=array_key):
    """Random calls on a checker that has seen many, and on new ones; how many were right."""
    warm, right, rng = calls(look), 0, random.Random(1)
    values = KINDS[operation][0]
    for _ in range(rounds):
        arguments = dict(RIGHT[operation])
        for name in rng.sample(sorted(values), rng.choice((0, 1, 1, 2, 3))):
            arguments[name] = rng.choice(values[name])
        got, want = (outcome(each, operation, arguments) for each in (warm, calls()))
        assert got == want, arguments
        right += isinstance(got[0], dict)
    return right


@pytest.mark.parametrize("operation", KINDS)
def test_a_known_call_is_judged_as_a_new_one(operation):
    values, *kinds = KINDS[operation]
    assert set(values) == {name for kind in kinds for name in kind._fields} - {"options"}
    assert compare(operation, 3000) > 600


def without_dtypes(value, strided):
    seen = array_key(value, strided)
    return seen and (seen[0], None)


def without_widths(value, strided):
    seen = array_key(value, strided)
    return seen and ((*seen[0][:1], *[1] * (len(seen[0]) - 1)), seen[1])


@pytest.mark.parametrize("operation", KINDS)
@pytest.mark.parametrize("look", [without_dtypes, without_widths])
def test_every_part_of_a_key_is_needed(operation, look):
    with pytest.raises(AssertionError):
        compare(operation, 3000, look)


def test_a_call_keeps_what_the_engine_did_not_take_as_it_is():
    x = Foreign(zeros(3, H))
    given = LowLatencyDispatchArguments(
        x, zeros(3, K, dtype=np.int64), None, None, None, None, LowLatencyDispatchOptions(LOW, E)
    )
    assert calls().dispatch(given)[0].kept == ((x, x.array),)
