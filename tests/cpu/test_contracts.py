"""Checks of arguments that one rank makes alone, with no communication and no engine."""

import ml_dtypes
import numpy as np
import pytest

from deepep_cupy.api.checks import Checker
from deepep_cupy.api.config import BufferArguments
from deepep_cupy.api.handle import DispatchHandle
from deepep_cupy.api.results import DispatchResult
from deepep_cupy.api.values import new_array, resolve_dtype
from deepep_cupy.engines.calls import CombineArguments, CombineOptions, Signature
from deepep_cupy.engines.host.moves import HostRouting
from deepep_cupy.engines.protocol import ALL_MODES
from deepep_cupy.errors import ContractError
from deepep_cupy.protocol.headers import ARGUMENTS, Layout, RefusalCode
from deepep_cupy.protocol.sizes import BufferSpec
from flat_calls import always_checked, arguments_of

R, M, H, K, E = 2, 8, 16, 3, 6
RANK = 1


def spec(**changes):
    sizes = {
        "num_ranks": R,
        "rank": RANK,
        "num_max_tokens_per_rank": M,
        "max_row_bytes": 4 * H,
        "num_topk": K,
        "num_experts": E,
        "timeout_s": 1.0,
    }
    return BufferSpec(**(sizes | changes))


def import_array(operation, argument, value):
    if not isinstance(value, np.ndarray):
        raise ContractError(f"{operation}(): argument '{argument}' must be an array.")
    return value


def alone():
    return Checker(spec(), 7, import_array, ALL_MODES, import_array)


@pytest.fixture
def checker():
    return always_checked(alone(), M)


def handle(buffer=7, num_tokens=4, rows=5, num_topk=K, layout=Layout.TOPK):
    nothing = np.zeros(0, np.int32)
    routing = HostRouting(num_tokens, rows, nothing, nothing, nothing, 1)
    signature = Signature(buffer, R, num_tokens, num_topk, E, layout)
    return DispatchHandle(routing, [3, 2, 0], signature)


def given(**changes):
    needed = ("handle", "topk_weights", "is_token_in_rank", "num_tokens_per_rank")
    nothing = dict.fromkeys((*needed, "num_tokens_per_rdma_rank", "num_tokens_per_expert"))
    right = {
        "x": np.zeros((4, H), np.float32),
        "topk_idx": np.zeros((4, K), np.int64),
        "expert_alignment": 1,
        "own": False,
    }
    return arguments_of("dispatch", nothing | right | changes)


def test_a_right_dispatch(checker):
    call, signature = checker.dispatch(given(topk_weights=np.zeros((4, K), np.float32)))
    assert call.routing is None
    assert call.topk_weights.shape == (4, K)
    assert signature == Signature(7, R, 4, K, E, Layout.TOPK)


def test_fewer_choices_and_shorter_rows_are_fine(checker):
    call, signature = checker.dispatch(
        given(x=np.zeros((4, 3), "V5"), topk_idx=np.zeros((4, 1), np.int32))
    )
    assert signature.num_topk == 1
    assert call.x.dtype == "V5"


def test_layout_arrays_beside_choices_are_not_used(checker):
    call, _ = checker.dispatch(
        given(
            is_token_in_rank=np.zeros((4, R), bool),
            num_tokens_per_rank=np.zeros(R, np.int32),
            num_tokens_per_rdma_rank=np.zeros(1, np.int32),
            num_tokens_per_expert=np.zeros(E, np.int32),
        )
    )
    assert call.is_token_in_rank is None


def test_a_mask_alone(checker):
    mask = np.zeros((4, R), bool)
    call, signature = checker.dispatch(given(topk_idx=None, is_token_in_rank=mask))
    assert call.is_token_in_rank is mask
    assert signature == Signature(7, R, 4, 0, E, Layout.MASK)


def test_a_handle(checker):
    known = handle()
    weights = np.zeros((4, K), np.float32)
    call, signature = checker.dispatch(given(topk_idx=None, handle=known, topk_weights=weights))
    assert call.routing is known.routing
    assert signature is known.signature
    assert call.topk_weights is weights


def test_too_many_tokens_carry_both_numbers(checker):
    with pytest.raises(ContractError, match=r"rank 1 .* 9 tokens, more than .* = 8") as caught:
        checker.dispatch(given(x=np.zeros((9, H), np.int8), topk_idx=np.zeros((9, K), np.int64)))
    assert caught.value.refusal.code == RefusalCode.TOO_MANY_TOKENS
    assert caught.value.refusal.value == 9


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("x", {"x": [[1.0]]}),
        ("x", {"x": None}),
        ("x", {"x": np.zeros((4, H, 1), np.float32)}),
        ("x", {"x": np.zeros((4, 0), np.float32)}),
        ("x", {"x": np.zeros((4, H + 1), np.float32)}),
        ("topk_idx", {"topk_idx": np.zeros((4, K), np.uint64)}),
        ("topk_idx", {"topk_idx": np.zeros((3, K), np.int64)}),
        ("topk_idx", {"topk_idx": np.zeros((4, K + 1), np.int64)}),
        ("topk_idx", {"topk_idx": np.zeros((4, 0), np.int64)}),
        ("topk_idx", {"handle": handle()}),
        ("topk_weights", {"topk_weights": np.zeros((4, K))}),
        ("topk_weights", {"topk_weights": np.zeros((4, K - 1), np.float32)}),
        ("topk_weights", {"topk_weights": 1.0}),
        ("is_token_in_rank", {"is_token_in_rank": np.zeros((4, R + 1), bool)}),
        ("num_tokens_per_rank", {"num_tokens_per_rank": np.zeros(R + 1, np.int32)}),
        ("num_tokens_per_rdma_rank", {"num_tokens_per_rdma_rank": np.zeros(2, np.int32)}),
        ("num_tokens_per_expert", {"num_tokens_per_expert": np.zeros(E, np.int64)}),
        ("expert_alignment", {"expert_alignment": 0}),
        ("expert_alignment", {"expert_alignment": True}),
        ("handle", {"topk_idx": None, "handle": handle(buffer=8)}),
        ("handle", {"topk_idx": None, "handle": object()}),
        ("x", {"topk_idx": None, "handle": handle(num_tokens=3)}),
        ("", {"topk_idx": None}),
    ],
)
def test_wrong_dispatches_are_refused_by_argument(checker, argument, changes):
    with pytest.raises(ContractError, match=r"^dispatch\(\): .*\.$") as caught:
        checker.dispatch(given(**changes))
    assert caught.value.refusal.code == RefusalCode.ARGUMENT
    assert ARGUMENTS[caught.value.refusal.value] == argument


@pytest.mark.parametrize("weights", [None, np.zeros((4, K), np.float32)])
def test_choices_in_the_place_of_the_handle_are_named(checker, weights):
    """``dispatch(x, idx)`` and ``dispatch(x, idx, w)``, as people type them."""
    positional = {"topk_idx": None, "handle": np.zeros((4, K), np.int64)}
    with pytest.raises(ContractError, match=r"'handle' .* topk_idx and topk_weights are keywords"):
        checker.dispatch(given(**positional, num_tokens_per_rank=weights))


def test_what_is_no_handle_is_told_where_one_is(checker):
    recv = DispatchResult(None, None, None, [], handle(), None)
    with pytest.raises(ContractError, match=r"give its member: handle=recv\.handle"):
        combine(checker, known=recv)
    with pytest.raises(ContractError, match=r"the rows come first: combine\(y, handle\)"):
        checker.combine(CombineArguments(x=handle(), handle=np.zeros((5, H), np.float32)))


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_rows_of_longer_items_than_the_buffers_name_cause_and_cure(operation):
    """``float32`` rows on a Buffer made for the default ``bfloat16``."""
    checker = Checker(spec(max_row_bytes=2 * H), 7, import_array, ALL_MODES, import_array)
    checker = always_checked(checker, M)
    cure = r"made for bfloat16 rows \(the default\): give it dtype='float32'"
    if operation == "dispatch":
        with pytest.raises(ContractError, match=cure + ", on rank 1"):
            checker.dispatch(given())
    else:
        with pytest.raises(ContractError, match=cure + r", or pass y.astype\(recv_x.dtype\)"):
            combine(checker)
    with pytest.raises(ContractError, match=r"float16\), on rank 1\.$"):  # too long in any dtype
        checker.dispatch(given(x=np.zeros((4, H + 1), np.float16)))


def test_choices_need_experts():
    checker = Checker(spec(num_experts=None), 7, import_array, ALL_MODES, import_array)
    checker = always_checked(checker, M)
    with pytest.raises(ContractError, match="needs num_experts"):
        checker.dispatch(given())


def combine(checker, x=None, known=None, weights=None, bias=None):
    rows = np.zeros((5, H), np.float32) if x is None else x
    return checker.combine(
        CombineArguments(x=rows, handle=known or handle(), topk_weights=weights, bias=bias)
    )


def test_right_combines(checker):
    bias = np.zeros((4, H), np.float32)
    assert combine(checker).biases == ()
    assert combine(checker, bias=bias).biases == (bias,)
    assert combine(checker, bias=(bias, bias)).biases == (bias, bias)
    assert combine(checker, bias=()).biases == ()
    weights = np.zeros((5, K), np.float32)
    assert combine(checker, weights=weights).topk_weights is weights
    assert combine(checker, x=np.zeros((5, 1), np.uint8)).x.dtype == np.uint8


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("x", {"x": np.zeros((4, H), np.float32)}),
        ("x", {"x": np.zeros((5, H), bool)}),
        ("x", {"x": np.zeros((5, H), ">f4")}),
        ("x", {"x": np.zeros((5, H), ml_dtypes.float8_e4m3fn)}),
        ("x", {"x": np.zeros((5, 2), "V5")}),
        ("handle", {"known": handle(buffer=1)}),
        ("topk_weights", {"weights": np.zeros((4, K), np.float32)}),
        (
            "topk_weights",
            {"weights": np.zeros((5, 0), np.float32), "known": handle(layout=Layout.MASK)},
        ),
        ("bias", {"bias": np.zeros((5, H), np.float32)}),
        ("bias", {"bias": np.zeros((4, H), np.float16)}),
        ("bias", {"bias": [np.zeros((4, H), np.float32)] * 3}),
        ("bias", {"bias": (None, None)}),
    ],
)
def test_wrong_combines_are_refused_by_argument(checker, argument, changes):
    with pytest.raises(ContractError, match=rf"^combine\(\): argument '{argument}'") as caught:
        combine(checker, **changes)
    assert ARGUMENTS[caught.value.refusal.value] == argument


def test_messages_say_wanted_got_and_where(checker):
    with pytest.raises(ContractError) as caught:
        checker.dispatch(given(topk_idx=np.zeros((3, K), np.int16)))
    assert str(caught.value) == (
        "dispatch(): argument 'topk_idx' must have shape [num_tokens, num_topk] = [4, any] and "
        "dtype int64 or int32, got shape (3, 3), int16, on rank 1."
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "argument"),
    [
        (3, "float32", "shape"),
        ((-1, 2), "float32", "shape"),
        ((1.5,), "float32", "shape"),
        ((True,), "float32", "shape"),
        ("12", "float32", "shape"),
        ((1 << 40, 1 << 40), "float32", "shape"),
        ((3,), "no dtype", "dtype"),
        ((3,), object, "dtype"),
        ((3,), None, "dtype"),
    ],
)
def test_new_arrays_are_checked(shape, dtype, argument):
    with pytest.raises(ContractError, match=rf"^empty\(\): argument '{argument}' must "):
        new_array("empty", shape, dtype)


def test_right_new_arrays():
    assert new_array("empty", [np.int64(3), 0], "f4") == ((3, 0), np.float32)


@pytest.mark.parametrize("number", [0, 3, -2, True, 2.0, "2", 1 << 21])
def test_layouts_check_the_number_of_experts(number):
    with pytest.raises(ContractError, match="argument 'num_experts' must be a positive multiple"):
        alone().layout(np.zeros((4, K), np.int64), number)


def test_own_is_true_or_false(checker):
    for wrong in (1, "no", None):
        with pytest.raises(ContractError, match=r"dispatch\(\): argument 'own' must be True or"):
            checker.dispatch(given(own=wrong))
        back = CombineArguments(
            np.zeros((5, H), np.float32), handle(), options=CombineOptions(own=wrong)
        )
        with pytest.raises(ContractError, match=r"combine\(\): argument 'own' must be True or"):
            alone().combine(back)


def test_alignments_leave_row_numbers_in_32_bits(checker):
    local, copies = E // R, R * M * K
    most = (2**31 - 1 - copies) // local + 1
    assert copies + local * (most - 1) <= 2**31 - 1 < copies + local * most
    call, _ = checker.dispatch(given(expert_alignment=most))
    assert call.plan.expert_alignment == most
    for wrong in (most + 1, 1 << 30, 1 << 31):
        with pytest.raises(ContractError, match=rf"whole number from 1 to {most}, got {wrong}"):
            checker.dispatch(given(expert_alignment=wrong))


# -------------------------------------------------------------------------- the constructor's


def arguments(**changes):
    right = {
        "num_max_tokens_per_rank": M,
        "hidden": H,
        "num_topk": K,
        "num_experts": E,
        "dtype": "bfloat16",
        "pool_bytes": None,
        "num_sms": None,
        "engine": "auto",
        "device": None,
        "timeout_s": 100.0,
        "ranks_per_node": None,
    }
    return BufferArguments(**(right | changes))


def test_right_constructors():
    assert arguments().complaint(R) is None
    assert arguments(num_topk=0, num_experts=None).complaint(R) is None
    assert arguments(hidden=np.int64(H), num_experts=R).complaint(R) is None
    built = arguments(dtype=np.float64).spec(RANK, R)
    assert built.max_row_bytes == 8 * H
    assert built.num_local_experts == E // R
    assert built.max_recv_tokens == R * M


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_max_tokens_per_rank", 0),
        ("hidden", 1.5),
        ("hidden", None),
        ("num_topk", -1),
        ("num_topk", 33),
        ("num_experts", 5),
        ("num_experts", 0),
        ("num_experts", None),
        ("num_sms", 0),
        ("timeout_s", 1e12),
        ("timeout_s", True),
        ("pool_bytes", 1 << 50),
        ("pool_bytes", 64 << 30),
        ("num_max_tokens_per_rank", 1 << 30),
        ("hidden", 1 << 30),
        ("engine", np.zeros(3)),
        ("dtype", "__doc__"),
        ("dtype", "__name__"),
        ("dtype", "finfo"),
        ("dtype", "(2,)f4"),
        ("num_sms", True),
        ("pool_bytes", -1),
        ("device", -1),
        ("timeout_s", 0.0),
        ("timeout_s", float("nan")),
        ("timeout_s", float("inf")),
        ("timeout_s", "1"),
        ("engine", "CUDA"),
        ("dtype", "float17"),
        ("dtype", None),
        ("dtype", object),
        ("ranks_per_node", 0),
        ("low_latency_tokens", -1),
        ("low_latency_tokens", 4097),
        ("low_latency_tokens", M + 1),
        ("low_latency_in_flight", 0),
        ("low_latency_in_flight", 5),
    ],
)
def test_wrong_constructors_name_the_argument(field, value):
    assert f"'{field}'" in arguments(**{field: value}).complaint(R)


@pytest.mark.parametrize("changes", [{"num_topk": 0, "num_experts": None}, {"num_experts": 8194}])
def test_low_latency_needs_choices_of_few_experts(changes):
    assert "'low_latency_tokens' needs" in arguments(low_latency_tokens=1, **changes).complaint(2)
    assert arguments(**changes).complaint(2) is None


def test_equal_arguments_look_equal():
    same = [
        arguments(),
        arguments(hidden=np.int32(H), timeout_s=100, dtype=ml_dtypes.bfloat16),
        arguments(num_sms=3, device=1),
    ]
    assert len({str(each.comparable()) for each in same}) == 1
    assert arguments(dtype="float16").comparable() != arguments().comparable()


def test_dtypes():
    assert resolve_dtype("bfloat16") == ml_dtypes.bfloat16
    assert resolve_dtype("float8_e4m3fn").itemsize == 1
    assert resolve_dtype("V7").itemsize == 7
    assert resolve_dtype(np.uint8) == np.uint8
