"""A call whose plan is known is judged as one that was never seen: same call, or same error."""

import dataclasses
import random
import weakref

import ml_dtypes
import numpy as np
import pytest

from deepep_cupy.api import call_cache
from deepep_cupy.api.call_cache import CallCache, ForeignArrays
from deepep_cupy.api.checks import Checker
from deepep_cupy.api.config import Config
from deepep_cupy.api.events import EventOverlap
from deepep_cupy.api.handle import DispatchHandle
from deepep_cupy.engines.calls import (
    CombineArguments,
    CombineOptions,
    DispatchArguments,
    DispatchOptions,
    Signature,
)
from deepep_cupy.engines.host.moves import HostRouting
from deepep_cupy.engines.protocol import ALL_MODES
from deepep_cupy.errors import ContractError
from deepep_cupy.protocol.headers import MAX_TAG, Layout
from deepep_cupy.protocol.sizes import BufferSpec
from flat_calls import always_checked, arguments_of

R, M, H, K, E = 2, 8, 256, 3, 6
LOW = 3
"""low_latency_tokens"""
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


class Foreign:
    """An array of another library."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self):
        raise AssertionError("the engine's import knows it")


def import_array(operation, argument, value):
    if isinstance(value, Foreign):
        return value.array
    if not isinstance(value, np.ndarray) or not value.flags.c_contiguous:
        raise ContractError(f"{operation}(): argument '{argument}' must be an array.")
    return value


def import_scales(operation, argument, value):
    return value if isinstance(value, np.ndarray) else import_array(operation, argument, value)


def array_key(value, strided):
    if type(value) is not np.ndarray or not value.flags.writeable:
        return None
    return (value.shape, value.dtype) if strided or value.flags.c_contiguous else None


def cache(look=None):
    spec = BufferSpec(
        num_ranks=R,
        rank=1,
        num_max_tokens_per_rank=M,
        max_row_bytes=4 * H,
        num_topk=K,
        num_experts=E,
        timeout_s=1.0,
        low_latency_tokens=LOW,
    )
    checker = Checker(spec, 7, import_array, ALL_MODES, import_scales)
    if look is None:
        return always_checked(checker, M)
    return CallCache(checker, look, M, LOW, ForeignArrays(look, import_array, import_scales))


def handle(tokens=4, rows=5, *, topk=K, expanded=False, alignment=1, buffer=7, low=False):
    nothing = np.zeros(0, np.int32)
    routing = HostRouting(
        num_tokens=tokens,
        num_recv_tokens=rows,
        recv_src_idx=nothing,
        recv_rows_per_rank=nothing,
        send_row=nothing,
        birth=1,
        expanded_row=np.zeros((rows, K), np.int32) if expanded else None,
        num_expanded_rows=12 if expanded else 0,
        expert_alignment=alignment,
        low_latency=low,
    )
    layout = Layout.TOPK if topk else Layout.MASK
    return DispatchHandle(routing, [4, 8, 0], Signature(buffer, R, tokens, topk, E, layout))


def read_only(array):
    array.flags.writeable = False
    return array


class Past:
    def wait(self):
        pass


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


HANDLES = [
    None,
    handle(),
    handle(3, 6),
    handle(expanded=True),
    handle(alignment=2),
    handle(expanded=True, alignment=4),
    handle(topk=0),
    handle(low=True),
    handle(buffer=8),
    "no handle",
]
FLAGS = (False, True, 0, 1, np.bool_(True), None)
TAGS = (None, 0, 7, np.int64(7), MAX_TAG, MAX_TAG + 1, -1, True, 7.0, "7")
DISPATCH = {
    "x": [
        *(zeros(t, H, dtype=np.float16) for t in (0, 3, 4, 9)),
        zeros(4, H, dtype=ml_dtypes.bfloat16),
        zeros(4, 3 * H, dtype=np.float16),
        zeros(4, H, dtype=FP8),
        (zeros(4, H, dtype=FP8), zeros(4, 2)),
        [zeros(4, H, dtype=FP8), zeros(4, 2)],
        (zeros(4, H, dtype=FP8), zeros(2, 4).T),
        (zeros(4, H, dtype=FP8), zeros(4, 1, dtype=np.int32)),
        (zeros(4, H, dtype=FP8), zeros(3, 2)),
        (zeros(4, H, dtype=FP8), None),
        zeros(4, H, 1, dtype=np.float16),
        zeros(4),
        zeros(),
        Foreign(zeros(4, H, dtype=np.float16)),
        zeros(H, 4, dtype=np.float16).T,
    ],
    "handle": HANDLES,
    "topk_idx": [
        *(zeros(t, K, dtype=np.int64) for t in (0, 3, 4)),
        zeros(4, K, dtype=np.int32),
        zeros(4, K),
        zeros(4, K - 1, dtype=np.int64),
        zeros(4, K + 1, dtype=np.int64),
        zeros(4, dtype=np.int64),
        Foreign(zeros(4, K, dtype=np.int64)),
        None,
    ],
    "topk_weights": [
        None,
        *(zeros(t, K) for t in (3, 4)),
        zeros(4, K - 1),
        zeros(4, K, dtype="f8"),
    ],
    "is_token_in_rank": [None, zeros(4, R, dtype=bool), zeros(3, R, dtype=bool), zeros(4, R)],
    "num_tokens_per_rank": [None, zeros(R, dtype=np.int32), zeros(R + 1, dtype=np.int32), zeros(R)],
    "num_tokens_per_expert": [None, zeros(E, dtype=np.int32), zeros(E, 1, dtype=np.int32)],
    "cumulative_local_expert_recv_stats": [
        None,
        zeros(E // R, dtype=np.int32),
        zeros(E, dtype=np.int32),
        read_only(zeros(E // R, dtype=np.int32)),
    ],
    "previous_event": [None, EventOverlap(), EventOverlap(Past()), Past()],
    "expert_alignment": [1, 2, 4, True, 1.0, np.int64(4), 0],
    "own": [False, True],
    "num_worst_tokens": [0, 5, 6, M * R, False, 5.0, 17, np.int64(5), [1]],
    "config": [None, Config(), Config(num_sms=3), 4],
    "num_sms": [None, 7],
    "async_finish": FLAGS,
    "allocate_on_comm_stream": FLAGS,
    "dtype": [None, "uint16", np.uint16, np.dtype("u1"), "uint8", FP8, "nothing", ["uint8"]],
    "scales_layout": ["row", "column", "diagonal", 1],
    "quantize": [None, "fp8_e4m3", "fp4"],
    "round_scale": FLAGS,
    "use_ue8m0": FLAGS,
    "do_cpu_sync": [None, False, True, 0],
    "do_expand": [None, False, True, 1],
    "do_zero_padding": FLAGS,
    "tag": TAGS,
    "low_latency": FLAGS,
}
COMBINE = {
    "x": [
        *(zeros(rows, H) for rows in (5, 6, 12)),
        zeros(5, H, dtype=np.float16),
        zeros(5, H, dtype=np.int32),
        zeros(5, H, dtype=FP8),
        zeros(5, 3),
        zeros(5),
        Foreign(zeros(5, H)),
    ],
    "handle": HANDLES[1:],
    "topk_weights": [
        None,
        zeros(5, K),
        zeros(6, K),
        zeros(12),
        zeros(5, 2),
        zeros(5, K, dtype="f8"),
    ],
    "row_weights": [None, zeros(12), zeros(5), zeros(12, 1)],
    "bias": [
        None,
        (),
        (None,),
        zeros(4, H),
        [zeros(4, H)],
        (zeros(4, H), zeros(4, H)),
        [zeros(4, H)] * 3,
        zeros(3, H),
        zeros(4, H, dtype=np.float16),
        Foreign(zeros(4, H)),
    ],
    "out": [None, zeros(4, H), zeros(3, H), zeros(4, H, dtype="f8"), read_only(zeros(4, H))],
    "previous_event": DISPATCH["previous_event"],
    "own": [False, True],
    "config": DISPATCH["config"],
    "num_sms": [None, 7],
    "async_finish": FLAGS,
    "allocate_on_comm_stream": FLAGS,
    "reduce": ["exact", "per_rank", "least", 2],
    "tag": TAGS,
}
RIGHT = {
    "dispatch": (
        {"x": zeros(4, H, dtype=np.float16), "topk_idx": zeros(4, K, dtype=np.int64)},
        {"x": (zeros(4, H, dtype=FP8), zeros(4, 2)), "topk_idx": zeros(4, K, dtype=np.int32)},
        {"x": zeros(4, H, dtype=np.float16), "handle": HANDLES[1]},
        {"x": zeros(4, H, dtype=np.float16), "is_token_in_rank": zeros(4, R, dtype=bool)},
        {
            "x": zeros(3, H, dtype=np.float16),
            "topk_idx": zeros(3, K, dtype=np.int64),
            "low_latency": True,
        },
    ),
    "combine": (
        {"x": zeros(5, H), "handle": HANDLES[1]},
        {"x": zeros(12, H), "handle": HANDLES[3], "row_weights": zeros(12)},
    ),
}


def outcome(made, operation, arguments):
    """What is passed on to the engine, or the error."""
    try:
        call = getattr(made, operation)(arguments_of(operation, arguments))
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


def compare(operation, values, rng, rounds, look=array_key):
    """Random calls on a checker that has seen many, and on new ones; how many were right."""
    warm, right = cache(look), 0
    for _ in range(rounds):
        arguments = dict(rng.choice(RIGHT[operation]))
        for name in rng.sample(sorted(values), rng.choice((0, 1, 1, 2, 3))):
            arguments[name] = rng.choice(values[name])
        got, want = (outcome(each, operation, arguments) for each in (warm, cache()))
        assert got == want, arguments
        right += isinstance(got[0], dict)
    return right, warm


CASES = {"dispatch": DISPATCH, "combine": COMBINE}


@pytest.mark.parametrize("operation", CASES)
@pytest.mark.parametrize("seed", range(2))
def test_a_known_call_is_judged_as_a_new_one(operation, seed):
    right, warm = compare(operation, CASES[operation], random.Random(seed), 4000)
    assert right > 400
    plans = warm._dispatches if operation == "dispatch" else warm._combines
    assert 1 < len(plans._plans) <= call_cache._MOST_PLANS


def test_every_argument_is_tried():
    dispatch = {*DispatchArguments._fields, *DispatchOptions._fields} - {"options"}
    assert set(DISPATCH) | {"num_tokens_per_rdma_rank", "dest"} == dispatch
    assert set(COMBINE) == {*CombineArguments._fields, *CombineOptions._fields} - {"options"}


def test_values_of_dest_are_looked_at_in_every_call():
    made, x = cache(array_key), zeros(4, H, dtype=np.float16)
    dest = np.array([1, 0, -1, 1], np.int32)
    for _ in range(2):
        call, signature = made.dispatch(DispatchArguments(x, dest=dest))
        assert call.is_token_in_rank.tolist() == [[0, 1], [1, 0], [0, 0], [0, 1]]
        assert (signature.num_topk, signature.layout.name) == (0, "MASK")
        assert any(kept is call.is_token_in_rank for _, kept in call.kept)
    for wrong in (R, -2):
        dest[2] = wrong
        with pytest.raises(ContractError, match=r"argument 'dest' must have ranks 0 to 1, or -1"):
            made.dispatch(DispatchArguments(x, dest=dest))


def test_a_call_carries_what_the_engine_did_not_take_as_it_is():
    made = cache(array_key)
    x, scales = Foreign(zeros(4, H, dtype=FP8)), zeros(4, 2)
    idx, weights = zeros(4, K, dtype=np.int64), Foreign(zeros(4, K))
    for rows in ((x, scales), [x, scales]):
        call, _ = made.dispatch(DispatchArguments(rows, topk_idx=idx, topk_weights=weights))
        assert call.kept == ((x, x.array), (weights, weights.array))
    for _ in range(2):
        call, _ = made.dispatch(DispatchArguments((x.array, scales), topk_idx=idx))
        assert call.kept == ()
    bias = zeros(4, H), Foreign(zeros(4, H))
    for given in (bias, list(bias)):
        done = made.combine(CombineArguments(zeros(5, H), HANDLES[1], bias=given))
        assert done.kept == ((bias[1], bias[1].array),)


def test_arrays_of_other_libraries_have_the_plan_of_the_engines(monkeypatch):
    made = cache(array_key)
    x, idx, weights = zeros(4, H), zeros(4, K, dtype=np.int64), zeros(4, K)
    own, _ = made.dispatch(DispatchArguments(x, topk_idx=idx, topk_weights=weights))
    rows, bias, out = zeros(5, H), [zeros(4, H), zeros(4, H)], zeros(4, H)
    back = made.combine(CombineArguments(rows, HANDLES[1], bias=bias, out=out))
    with monkeypatch.context() as patch:
        patch.setattr(made, "_checker", None)
        others = Foreign(x), Foreign(idx), Foreign(weights)
        given = DispatchArguments(others[0], topk_idx=others[1], topk_weights=others[2])
        call, _ = made.dispatch(given)
        assert call.plan is own.plan
        assert call.x is x
        assert call.topk_idx is idx
        assert call.topk_weights is weights
        assert call.kept == tuple((each, each.array) for each in others)
        others = Foreign(rows), Foreign(bias[1]), Foreign(out)
        given = CombineArguments(others[0], HANDLES[1], bias=[bias[0], others[1]], out=others[2])
        call = made.combine(given)
        assert call.plan is back.plan
        assert call.kept == tuple((each, each.array) for each in others)
    with pytest.raises(ContractError, match=r"argument 'topk_weights' must be an array"):
        made.dispatch(DispatchArguments(Foreign(x), topk_idx=idx, topk_weights=weights[::2]))


@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_the_number_of_tokens_makes_no_new_plan(tokens, monkeypatch):
    made = cache(array_key)
    x, idx = zeros(4, H, dtype=np.float16), zeros(4, K, dtype=np.int64)
    first, _ = made.dispatch(DispatchArguments(x, topk_idx=idx))
    monkeypatch.setattr(made, "_checker", None)
    x, idx = zeros(tokens, H, dtype=np.float16), zeros(tokens, K, dtype=np.int64)
    second, signature = made.dispatch(DispatchArguments(x, topk_idx=idx))
    assert second.plan is first.plan
    assert signature.num_tokens == tokens


def test_more_tokens_than_the_buffer_takes_are_refused_in_later_calls_too():
    for more in ({"topk_idx": np.int64}, {"is_token_in_rank": np.bool_}):
        made = cache(array_key)
        widths = {"topk_idx": K, "is_token_in_rank": R}
        for tokens in (M, M + 1, M, M + 1):
            extra = {name: zeros(tokens, widths[name], dtype=kind) for name, kind in more.items()}
            given = DispatchArguments(zeros(tokens, H, dtype=np.float16), **extra)
            if tokens == M:
                made.dispatch(given)
                continue
            with pytest.raises(ContractError, match=f"{M + 1}"):
                made.dispatch(given)


def test_a_plan_keeps_nothing_of_its_calls():
    """Neither arrays nor events, of the first call or of later ones; and there are not many."""
    made = cache(array_key)
    for turn in range(3 * call_cache._MOST_PLANS):
        x = zeros(5, H - turn // 2)
        given = x[:4], Past(), handle()
        seen = [weakref.ref(each) for each in (x, given[1], given[2])]
        event = EventOverlap(given[1])
        made.dispatch(DispatchArguments(given[0], handle=given[2], previous_event=event))
        made.combine(CombineArguments(x, given[2], bias=(zeros(4, H - turn // 2),)))
        made.combine(CombineArguments(x, given[2], previous_event=event))
        del x, given, event
        assert [each() for each in seen] == [None] * 3
        for plans in (made._dispatches, made._combines):
            assert len(plans._plans) <= call_cache._MOST_PLANS


# ------------------------------------------------------------------------------------------------
# What a key must have in it: with any part left out, some call is judged wrongly.


def types(patch):
    """All numbers and flags are alike."""

    def kinds(function, values):
        return [
            int if isinstance(each, int | float | np.generic) else type(each) for each in values
        ]

    patch.setattr(call_cache, "map", kinds, raising=False)


def shapes(patch):
    def look(value, strided):
        seen = array_key(value, strided)
        return seen and ((*seen[0][:1], *[1] * (len(seen[0]) - 1)), seen[1])

    return look


def dtypes(patch):
    def look(value, strided):
        seen = array_key(value, strided)
        return seen and (seen[0], None)

    return look


def handles(patch):
    patch.setattr(call_cache, "kind_of", lambda handle: None)


def weights(patch):
    for name in ("dispatch_key", "combine_key"):
        right = getattr(call_cache, name)
        patch.setattr(
            call_cache,
            name,
            lambda given, *more, f=right: f(given._replace(topk_weights=None), *more),
        )


@pytest.mark.parametrize("operation", CASES)
@pytest.mark.parametrize("part", [types, shapes, dtypes, handles, weights])
def test_every_part_of_a_key_is_needed(part, operation, monkeypatch):
    look = part(monkeypatch) or array_key
    with pytest.raises(AssertionError):
        compare(operation, CASES[operation], random.Random(0), 4000, look)


@pytest.mark.parametrize("tokens", [M + 1, M + 7])
def test_the_most_tokens_are_checked_in_every_call_of_a_form(tokens):
    made = cache(array_key)
    for rows in (1, M, M - 1):
        made.dispatch(of_tokens(rows))
    for _ in range(2):
        with pytest.raises(ContractError, match=rf"{tokens} tokens, more than .* = {M}"):
            made.dispatch(of_tokens(tokens))
    assert len(made.dispatch(of_tokens(M))[0].x) == M


def of_tokens(tokens):
    return DispatchArguments(
        zeros(tokens, H, dtype=np.float16), topk_idx=zeros(tokens, K, dtype=np.int64)
    )
