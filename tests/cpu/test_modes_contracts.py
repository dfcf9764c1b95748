"""Checks of the modes' arguments, made alone; events and Config; headers and sizes of the modes."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from deepep_cupy import Buffer, Config, EventOverlap
from deepep_cupy.api.checks import Checker
from deepep_cupy.api.handle import DispatchHandle
from deepep_cupy.api.results import CombineResult, DispatchResult
from deepep_cupy.engines.calls import Quantization, Signature
from deepep_cupy.engines.host.engine import HostEngine
from deepep_cupy.engines.host.moves import HostRouting
from deepep_cupy.engines.protocol import ALL_MODES
from deepep_cupy.errors import ContractError
from deepep_cupy.protocol.headers import (
    ARGUMENTS,
    WORDS,
    Kind,
    Layout,
    LayoutFlag,
    RefusalCode,
    dtype_code,
    dtype_name,
    layout_word,
    verdict,
)
from deepep_cupy.protocol.sizes import BufferSpec, num_scales, worst_expanded_rows
from flat_calls import always_checked, arguments_of

R, M, H, K, E = 2, 8, 256, 3, 6
FP8 = ml_dtypes.float8_e4m3fn


def make_checker(modes=ALL_MODES):
    spec = BufferSpec(
        num_ranks=R,
        rank=1,
        num_max_tokens_per_rank=M,
        max_row_bytes=2 * H,
        num_topk=K,
        num_experts=E,
        timeout_s=1.0,
    )

    def import_array(operation, argument, value):
        if not isinstance(value, np.ndarray):
            raise ContractError(f"{operation}(): argument '{argument}' must be an array.")
        return value

    return always_checked(Checker(spec, 7, import_array, modes, import_array), M)


@pytest.fixture
def checker():
    return make_checker()


class Past:
    """An event that counts who waits for it."""

    def __init__(self):
        self.waits = 0

    def wait(self):
        self.waits += 1


def handle(expanded=False, waited=True, alignment=4):
    nothing = np.zeros(0, np.int32)
    routing = HostRouting(
        num_tokens=4,
        num_recv_tokens=5,
        recv_src_idx=nothing,
        recv_rows_per_rank=nothing,
        send_row=nothing,
        birth=1,
        waited=waited,
        expanded_row=np.zeros((5, K), np.int32) if expanded else None,
        num_expanded_rows=12 if expanded else 0,
        expert_alignment=alignment,
    )
    return DispatchHandle(routing, [4, 8, 0], Signature(7, R, 4, K, E, Layout.TOPK))


def dispatch(checker, **changes):
    right = {
        "x": np.zeros((4, H), np.float16),
        "handle": None,
        "topk_idx": np.zeros((4, K), np.int64),
        "topk_weights": None,
        "is_token_in_rank": None,
        "num_tokens_per_rank": None,
        "num_tokens_per_rdma_rank": None,
        "num_tokens_per_expert": None,
        "expert_alignment": 1,
        "own": False,
    }
    return checker.dispatch(arguments_of("dispatch", right | changes))[0]


def cached(checker, known, **changes):
    return dispatch(checker, handle=known, topk_idx=None, **changes)


def combine(checker, known=None, rows=12, **changes):
    right = {"x": np.zeros((rows, H), np.float16), "handle": known or handle(expanded=True)}
    return checker.combine(arguments_of("combine", right | changes))


# ------------------------------------------------------------------------------------- dispatch


def test_plain_calls_need_no_mode():
    call = dispatch(make_checker(frozenset()))
    assert (
        call.scales is call.plan.quantize is call.plan.num_worst_tokens is call.recv_stats is None
    )
    assert not call.plan.expand
    assert call.streams.previous_event is None


@pytest.mark.parametrize("dtype", [FP8, ml_dtypes.float8_e5m2, np.uint8, np.int8])
@pytest.mark.parametrize("order", ["C", "F"])
def test_right_scales(checker, dtype, order):
    rows = np.zeros((4, 257), dtype)
    for scales in (np.zeros((4, 3), np.float32, order), np.zeros((4, 1), np.int32, order)):
        call = dispatch(checker, x=(rows, scales), scales_layout="column")
        assert call.x is rows
        assert call.scales is scales
        assert call.plan.scales_layout == "column"


def test_bytes_are_taken_for_another_dtype(checker):
    call = dispatch(checker, x=np.zeros((4, H), np.uint8), dtype="float8_e4m3fn")
    assert call.x.dtype == FP8
    call = dispatch(checker, x=(np.zeros((4, H), np.uint8), np.zeros((4, 2), "f4")), dtype=FP8)
    assert call.x.dtype == FP8
    assert dispatch(checker, x=np.zeros((4, H), "u2"), dtype="bfloat16").x.dtype == "bfloat16"


def test_right_casts(checker):
    for dtype in (ml_dtypes.bfloat16, np.float16, np.float32):
        call = dispatch(checker, x=np.zeros((4, H), dtype), quantize="fp8_e4m3")
        assert call.plan.quantize == Quantization(
            "float8_e4m3fn", round_scale=False, use_ue8m0=False
        )
    call = dispatch(checker, quantize="fp8_e4m3", round_scale=True, use_ue8m0=True)
    assert call.plan.quantize == Quantization("float8_e4m3fn", round_scale=True, use_ue8m0=True)
    # What travels is shorter than what is cast.
    assert dispatch(checker, x=np.zeros((4, 2 * H), "f4"), quantize="fp8_e4m3").x.shape[1] == 2 * H


def test_not_to_wait(checker):
    assert dispatch(checker, num_worst_tokens=5).plan.num_worst_tokens == 5
    assert dispatch(checker, num_worst_tokens=R * M).plan.num_worst_tokens == R * M
    assert dispatch(checker, do_cpu_sync=False).plan.num_worst_tokens == R * M
    assert dispatch(checker, do_cpu_sync=False, num_worst_tokens=3).plan.num_worst_tokens == 3
    assert dispatch(checker, do_cpu_sync=True).plan.num_worst_tokens is None
    mask = np.zeros((4, R), bool)
    call = dispatch(checker, topk_idx=None, is_token_in_rank=mask, do_cpu_sync=False)
    assert call.plan.num_worst_tokens == R * M


def test_a_handle_says_how(checker):
    for known in (handle(), handle(expanded=True), handle(expanded=True, waited=False)):
        call = cached(checker, known)
        assert call.plan.expand == known.do_expand
        assert call.plan.expert_alignment == 4
        assert call.plan.num_worst_tokens is None
        cached(checker, known, do_expand=known.do_expand, do_cpu_sync=False, num_worst_tokens=5)
    assert cached(checker, handle(expanded=True), do_zero_padding=True).plan.zero_padding
    assert cached(checker, handle(expanded=True), expert_alignment=4).plan.expert_alignment == 4


def test_streams(checker):
    past = EventOverlap(Past())
    call = dispatch(checker, previous_event=past, async_finish=True, allocate_on_comm_stream=True)
    assert call.streams.previous_event is past.event
    assert call.streams.async_finish
    assert call.streams.allocate_on_comm_stream
    assert dispatch(checker, previous_event=EventOverlap()).streams.previous_event is None


def test_blocks(checker):
    assert dispatch(checker).plan.num_sms is None
    assert dispatch(checker, num_sms=7).plan.num_sms == 7
    assert dispatch(checker, num_sms=7, config=Config(num_sms=3)).plan.num_sms == 3
    assert combine(checker, config=Config(3, 1, 2, 1, 2)).plan.num_sms == 3


def test_statistics(checker):
    stats = np.zeros(E // R, np.int32)
    assert dispatch(checker, cumulative_local_expert_recv_stats=stats).recv_stats is stats


FROZEN = np.zeros(E // R, np.int32)
FROZEN.flags.writeable = False
ROWS, SCALES = np.zeros((4, H), FP8), np.zeros((4, 2), np.float32)
STATS = "cumulative_local_expert_recv_stats"


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("x", {"x": (ROWS,)}),
        ("x", {"x": (ROWS, SCALES, SCALES)}),
        ("x", {"x": (np.zeros((4, H // 2), np.float16), SCALES)}),
        ("x", {"x": (np.zeros((4, H), bool), SCALES)}),
        ("scales", {"x": (ROWS, None)}),
        ("scales", {"x": (ROWS, SCALES[:, :1])}),
        ("scales", {"x": (ROWS, SCALES.astype("f8"))}),
        ("scales", {"x": (ROWS, SCALES.view(np.int32))}),
        ("scales", {"x": (ROWS, SCALES[:3])}),
        ("scales_layout", {"scales_layout": "C"}),
        ("dtype", {"dtype": FP8}),
        ("dtype", {"dtype": "float17"}),
        ("quantize", {"quantize": "fp4"}),
        ("quantize", {"quantize": True}),
        ("quantize", {"x": (ROWS, SCALES), "quantize": "fp8_e4m3"}),
        ("x", {"x": np.zeros((4, H // 4)), "quantize": "fp8_e4m3"}),
        ("x", {"x": np.zeros((4, 2 * H + 1), "f4"), "quantize": "fp8_e4m3"}),
        ("round_scale", {"round_scale": True}),
        ("round_scale", {"round_scale": 1, "quantize": "fp8_e4m3"}),
        ("use_ue8m0", {"use_ue8m0": True}),
        ("use_ue8m0", {"use_ue8m0": True, "quantize": "fp8_e4m3"}),
        ("num_worst_tokens", {"num_worst_tokens": -1}),
        ("num_worst_tokens", {"num_worst_tokens": R * M + 1}),
        ("num_worst_tokens", {"num_worst_tokens": 1.0}),
        ("do_cpu_sync", {"do_cpu_sync": True, "num_worst_tokens": 4}),
        ("do_cpu_sync", {"do_cpu_sync": 0}),
        ("do_cpu_sync", {"topk_idx": None, "handle": handle(), "do_cpu_sync": True}),
        ("num_worst_tokens", {"topk_idx": None, "handle": handle(), "num_worst_tokens": 4}),
        ("do_expand", {"do_expand": 1}),
        (
            "do_expand",
            {"topk_idx": None, "is_token_in_rank": np.zeros((4, R), bool), "do_expand": True},
        ),
        ("do_expand", {"topk_idx": None, "handle": handle(), "do_expand": True}),
        ("do_expand", {"topk_idx": None, "handle": handle(expanded=True), "do_expand": False}),
        (
            "expert_alignment",
            {"topk_idx": None, "handle": handle(expanded=True), "expert_alignment": 8},
        ),
        ("do_zero_padding", {"do_zero_padding": True}),
        (STATS, {STATS: np.zeros(E, np.int32)}),
        (STATS, {STATS: np.zeros(E // R, np.int64)}),
        (STATS, {STATS: FROZEN}),
        (STATS, {STATS: FROZEN.copy(), "topk_idx": None, "handle": handle()}),
        ("config", {"config": 20}),
        ("previous_event", {"previous_event": Past()}),
        ("async_finish", {"async_finish": "yes"}),
        ("allocate_on_comm_stream", {"allocate_on_comm_stream": True}),
        (
            "allocate_on_comm_stream",
            {"allocate_on_comm_stream": True, "previous_event": EventOverlap(Past())},
        ),
        ("allocate_on_comm_stream", {"allocate_on_comm_stream": True, "async_finish": True}),
    ],
)
def test_wrong_dispatches_are_refused_by_argument(checker, argument, changes):
    with pytest.raises(ContractError, match=r"^dispatch\(\): .*\.$") as caught:
        dispatch(checker, **changes)
    assert caught.value.refusal.code == RefusalCode.ARGUMENT
    assert ARGUMENTS[caught.value.refusal.value] == argument


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("scales", {"x": (ROWS, SCALES)}),
        ("quantize", {"quantize": "fp8_e4m3"}),
        ("no_wait", {"num_worst_tokens": 3}),
        ("no_wait", {"do_cpu_sync": False}),
        ("expand", {"do_expand": True}),
        ("stats", {STATS: np.zeros(E // R, np.int32)}),
        ("events", {"async_finish": True}),
        ("events", {"previous_event": EventOverlap(Past())}),
    ],
)
def test_what_an_engine_lacks_is_refused(mode, changes):
    dispatch(make_checker(frozenset({mode})), **changes)
    with pytest.raises(ContractError, match=f"no mode '{mode}'; engine='host' has all") as caught:
        dispatch(make_checker(ALL_MODES - {mode}), **changes)
    assert caught.value.refusal.code == RefusalCode.ARGUMENT
    assert HostEngine.modes == ALL_MODES


# -------------------------------------------------------------------------------------- combine


def test_right_combines(checker):
    call = combine(checker)
    assert call.plan.reduce == "exact"
    assert call.out is call.row_weights is None
    weights, out = np.zeros(12, np.float32), np.zeros((4, H), np.float16)
    call = combine(checker, topk_weights=weights, row_weights=weights, reduce="per_rank", out=out)
    assert call.topk_weights is call.row_weights is weights
    assert call.plan.reduce == "per_rank"
    assert call.out is out
    assert combine(checker, known=handle(), rows=5, reduce="per_rank").x.shape[0] == 5


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("x", {"rows": 5}),
        ("x", {"known": handle(), "rows": 12}),
        ("x", {"x": (ROWS, SCALES)}),
        ("topk_weights", {"topk_weights": np.zeros((5, K), np.float32)}),
        ("topk_weights", {"topk_weights": np.zeros(11, np.float32)}),
        ("row_weights", {"row_weights": np.zeros(12)}),
        ("row_weights", {"row_weights": np.zeros((12, 1), np.float32)}),
        ("row_weights", {"row_weights": np.zeros(12, "f4"), "x": np.zeros((12, H), np.int16)}),
        ("row_weights", {"row_weights": np.zeros(5, "f4"), "known": handle(), "rows": 5}),
        ("reduce", {"reduce": "sum"}),
        ("out", {"out": np.zeros((4, H), np.float32)}),
        ("out", {"out": np.zeros((5, H), np.float16)}),
        ("out", {"out": np.zeros((4, 1), np.float16)}),
        ("out", {"out": np.broadcast_to(np.zeros(H, np.float16), (4, H))}),
        ("config", {"config": {}}),
        ("previous_event", {"previous_event": 1}),
    ],
)
def test_wrong_combines_are_refused_by_argument(checker, argument, changes):
    with pytest.raises(ContractError, match=rf"^combine\(\): argument '{argument}'") as caught:
        combine(checker, **changes)
    assert ARGUMENTS[caught.value.refusal.value] == argument


def test_out_may_be_lacking():
    out = np.zeros((4, H), np.float16)
    with pytest.raises(ContractError, match="no mode 'out'"):
        combine(make_checker(ALL_MODES - {"out"}), out=out)


def test_a_handle_shows_its_layout():
    assert "expanded" not in repr(handle())
    shown = repr(handle(expanded=True, waited=False))
    assert "layout=topk, expanded, no wait, send_row=int32[0], " in shown
    assert shown.endswith(f"expanded_row=int32[5, {K}])")
    known = handle(expanded=True)
    assert (known.num_rows, known.num_recv_tokens, known.num_expanded_tokens) == (12, 5, 12)
    assert handle().num_rows == 5


def expanded_over(ends, counts, *, waited):
    routing = replace(
        handle(expanded=True, waited=waited).routing,
        psum_expert_rows=np.array(ends, np.int32),
        expert_counts=np.array(counts, np.int32),
    )
    return replace(handle(), routing=routing)


def test_slices_of_experts_leave_padding_out():
    known = expanded_over([3, 4, 9], [3, 0, 1], waited=True)
    assert known.expert_slices() == [(0, 3), (4, 4), (8, 9)]
    unknown = expanded_over([3, 4, 9], [3, 0, 1], waited=False).expert_slices()
    assert (unknown.dtype, unknown.tolist()) == (np.int32, [[0, 3], [4, 4], [8, 9]])
    with pytest.raises(ContractError, match=r"^expert_slices\(\): only the expanded layout"):
        handle().expert_slices()


def test_a_result_shows_shapes_and_no_elements():
    rows = (np.zeros((5, 256), np.uint8), np.ones((5, 2), np.float32))
    shown = repr(DispatchResult(rows, np.zeros((5, 2)), None, [], handle(), EventOverlap()))
    assert shown.startswith(
        "DispatchResult(recv_x=(uint8[5, 256], float32[5, 2]), recv_topk_idx=float64[5, 2], "
        "recv_topk_weights=None, num_recv_tokens_per_expert_list=[], handle=DispatchHandle("
    )
    assert "float16[4, 7]" in repr(CombineResult(np.ones((4, 7), np.float16), None, EventOverlap()))


def test_every_mode_is_described():
    described = set(re.findall(r'\* ``"(\w+)"``', Buffer.modes.__doc__))
    assert described == ALL_MODES


# ------------------------------------------------------------------------- events and settings


def test_an_event_is_waited_for_when_a_block_ends():
    past = Past()
    event = EventOverlap(past)
    with event as same:
        assert same is event
        assert past.waits == 0
    assert past.waits == 1
    with event(release_handle=True):
        pass
    assert past.waits == 2
    assert event.event is None
    event.current_stream_wait()
    assert past.waits == 2
    assert repr(event) == "EventOverlap()"


def test_an_event_is_waited_for_after_an_error_too():
    past = Past()
    with pytest.raises(KeyError), EventOverlap(past):
        raise KeyError
    assert past.waits == 1


def test_hooks_run_once_after_the_wait():
    past, seen = Past(), []
    event = EventOverlap(past, extra_tensors=(1, 2))
    event.register_hook_after_wait(lambda: seen.append(past.waits))
    event.current_stream_wait()
    event.current_stream_wait(release_handle=True)
    assert seen == [1]
    assert event.extra_tensors is None


@pytest.mark.parametrize("wrong", [{"num_sms": 0}, {"num_sms": 2.0}, {"num_sms": True}])
def test_wrong_settings(wrong):
    with pytest.raises(ContractError, match=r"Config\(\): argument 'num_sms'"):
        Config(**wrong)
    assert Buffer.get_dispatch_config(8) == Buffer.get_combine_config(3) == Config()


# ----------------------------------------------------------------------------- headers and sizes


def header(**words):
    return dict.fromkeys(WORDS, 0) | {"kind": Kind.DISPATCH, "capacity": 9} | words


LIMITS = {"num_max_tokens_per_rank": 128, "num_experts": 64}


def test_too_little_room_is_said_with_both_numbers():
    headers = [header(capacity=8), header(capacity=5)]
    assert verdict("dispatch", headers, **LIMITS, counts=[[3, 4], [5, 1]]) is None
    text = verdict("dispatch", headers, **LIMITS, counts=[[3, 4], [5, 2]])
    assert text == (
        "dispatch(): rank 1 would receive 6 tokens, more than its num_worst_tokens = 5; nothing "
        "was moved on any rank."
    )
    wrong = [header(capacity=8), header(capacity=5, refusal=RefusalCode.ARGUMENT)]
    assert "refused" in verdict("dispatch", wrong, **LIMITS, counts=[[9, 9], [9, 9]])


def test_layouts_and_scales_are_compared_and_named():
    words = [
        layout_word(Layout.TOPK),
        layout_word(Layout.TOPK, LayoutFlag.EXPANDED),
        layout_word(Layout.NONE, LayoutFlag.EXPANDED | LayoutFlag.PER_RANK),
        layout_word(Layout.NONE, LayoutFlag.EXPANDED | LayoutFlag.ROW_WEIGHTS),
    ]
    assert len(set(words)) == 4
    text = verdict("combine", [header(layout=word) for word in words], **LIMITS)
    assert (
        "the routing and the layout (rank 0: topk_idx, rank 1: topk_idx + expanded, rank 2: none "
        "+ expanded + reduce='per_rank', rank 3: none + expanded + row_weights)" in text
    )
    codes = [dtype_code("float8_e4m3fn", 1, scales) for scales in (None, "float32", "int32")]
    assert len(set(codes)) == 3
    assert max(codes) < 256
    text = verdict("dispatch", [header(dtype=code) for code in codes], **LIMITS)
    assert "rank 0: float8_e4m3fn, rank 1: float8_e4m3fn with float32 scales" in text
    assert dtype_name(dtype_code("uint8", 1, "uint32")) == "uint8 with uint32 scales"


def test_sizes():
    assert [num_scales(h, packed=False) for h in (1, 128, 129, 7168)] == [1, 1, 2, 56]
    assert [num_scales(h, packed=True) for h in (1, 512, 513, 7168)] == [1, 1, 2, 14]
    assert worst_expanded_rows(10, 8, 3, 1) == 30
    assert worst_expanded_rows(10, 2, 3, 16) == 20 + 3 * 15
    assert worst_expanded_rows(0, 2, 3, 16) == 45


def test_size_hint_makes_room_for_the_expanded_layout():
    sizes = {"num_ranks": 8, "num_max_tokens_per_rank": 128, "hidden": 7168, "num_topk": 8}
    plain = Buffer.size_hint(**sizes, num_experts=256)
    expanded = Buffer.size_hint(**sizes, num_experts=256, do_expand=True, expert_alignment=128)
    rows = 8 * 128 * 8 + 32 * 127
    assert expanded - plain > 3 * rows * 7168 * 2
    assert expanded > Buffer.size_hint(**sizes, num_experts=256, do_expand=True)
    bytes_ = Buffer.size_hint(**sizes, num_experts=256, dtype="uint8")
    assert bytes_ > plain // 2
    with pytest.raises(ContractError, match="expert_alignment"):
        Buffer.size_hint(**sizes, num_experts=256, do_expand=True, expert_alignment=0)
