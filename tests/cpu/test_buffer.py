"""What of ``Buffer`` can be seen with no second rank, and the waits on a group of pretence."""

import ctypes
import inspect
import pydoc
import re
import subprocess
import sys
import threading
import time
import types
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import deepep_cupy
from deepep_cupy import env
from deepep_cupy.api.lifecycle import _LEGAL, CallLock, Lifecycle, State
from deepep_cupy.api.values import stream_address
from deepep_cupy.engines.host.engine import HostEngine
from deepep_cupy.engines.select import too_large
from deepep_cupy.errors import ContractError, PeerAbortedError, PeerTimeoutError, StateError
from deepep_cupy.protocol.headers import Kind
from deepep_cupy.protocol.sizes import BufferSpec
from deepep_cupy.ranks.abort_board import Abort, AbortBoard, AbortReason, RankState
from deepep_cupy.ranks.group import LinkError
from deepep_cupy.ranks.rendezvous import Pending, Rendezvous

# -------------------------------------------------------------------------------- the package


def test_public_names():
    for name in deepep_cupy.__all__:
        assert getattr(deepep_cupy, name) is not None
    assert set(deepep_cupy.__all__) <= set(dir(deepep_cupy))
    with pytest.raises(AttributeError, match="no attribute 'buffer_'"):
        _ = deepep_cupy.buffer_


@pytest.mark.parametrize(
    ("method", "unknown", "said"),
    [
        ("dispatch", "topk_index", "dispatch(): there is no argument 'topk_index'; did you mean "
         "'topk_idx'?"),
        ("dispatch", "weights", "did you mean 'topk_weights'?"),
        ("combine", "biases", "did you mean 'bias'?"),
        ("size_hint", "expert_align", "did you mean 'expert_alignment'?"),
        ("__init__", "num_tokens_per_rank", "did you mean 'num_max_tokens_per_rank'?"),
        ("get_dispatch_layout", "zzz", "there are topk_idx, num_experts, previous_event, "),
    ],
)  # fmt: skip
def test_an_unknown_keyword_suggests_the_nearest(method, unknown, said):
    with pytest.raises(TypeError) as caught:
        getattr(deepep_cupy.Buffer, method)(None, **{unknown: 1})
    assert said in str(caught.value)
    assert "self" in inspect.signature(deepep_cupy.Buffer.dispatch).parameters


def test_other_type_errors_are_what_they_were():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'handle'"):
        deepep_cupy.Buffer.combine(None, 1)


@pytest.mark.parametrize("name", ["DispatchResult", "CombineResult", "LayoutResult"])
def test_help_describes_the_members_of_a_result(name):
    result = getattr(deepep_cupy, name)
    assert "Alias for field" not in pydoc.render_doc(result, renderer=pydoc.plaintext)
    arrays = [field for field, of in result.__annotations__.items() if of.__forward_arg__ == "Any"]
    assert arrays
    for field in arrays:
        text = inspect.getdoc(getattr(result, field))
        assert re.search(r"``\[\w+(, \w+)?\]``", text), f"{field} has no shape"
        assert re.search(r"dtype of|float32|int32|bool", text), f"{field} has no dtype"


def test_importing_needs_little():
    """Neither CuPy nor MPI for the names; nothing but the standard library for the package."""
    code = (
        "import sys, deepep_cupy; heavy = {'numpy', 'ml_dtypes', 'mpi4py', 'cupy'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "deepep_cupy.Buffer, deepep_cupy.ContractError;"
        "assert not {'mpi4py', 'cupy'} & set(sys.modules)"
    )
    root = env.Path(deepep_cupy.__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=60,
        env=env.child_environment({}, root),
    )


def test_size_hint_grows_with_what_it_holds():
    sizes = {"num_ranks": 2, "num_max_tokens_per_rank": 128, "hidden": 7168, "num_topk": 8}
    hint = deepep_cupy.Buffer.size_hint(**sizes, num_experts=256)
    receive = 2 * 128 * 7168 * 2
    assert hint > 2 * receive
    for name in ("num_ranks", "num_max_tokens_per_rank", "hidden"):
        more = sizes | {name: 2 * sizes[name]}
        assert deepep_cupy.Buffer.size_hint(**more, num_experts=256) > hint
    for wrong in ({"num_ranks": 65}, {"num_ranks": 0}, {"expert_alignment": "a"}):
        with pytest.raises(ContractError, match=r"must be a whole number from 1 to"):
            deepep_cupy.Buffer.size_hint(**(sizes | wrong), num_experts=256)
    with pytest.raises(ContractError, match=r"size_hint\(\): argument 'hidden'"):
        deepep_cupy.Buffer.size_hint(**(sizes | {"hidden": 0}), num_experts=256)


SIZES = {"num_ranks": 8, "num_max_tokens_per_rank": 24576, "hidden": 7168, "num_topk": 8}


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_ranks": True},
        {"num_ranks": -1},
        {"num_ranks": "2"},
        {"expert_alignment": 1.5},
        {"expert_alignment": True},
        {"do_expand": "no"},
        {"do_expand": 1},
        {"num_experts": "a"},
        {"hidden": None},
    ],
)
def test_size_hint_checks_what_it_is_given(wrong):
    sizes = SIZES | {"num_experts": 256, "num_max_tokens_per_rank": 128}
    name = next(iter(wrong))
    with pytest.raises(ContractError, match=rf"^size_hint\(\): argument '{name}' must be "):
        deepep_cupy.Buffer.size_hint(**(sizes | wrong))


def test_a_pool_that_headers_cannot_address_is_refused_before_it_is_made():
    recipe = SIZES | {"num_experts": 256, "do_expand": True}
    with pytest.raises(ContractError, match=r"^size_hint\(\): these sizes need .* 64 GiB can be"):
        deepep_cupy.Buffer.size_hint(**recipe)
    assert deepep_cupy.Buffer.size_hint(**(recipe | {"num_max_tokens_per_rank": 4096})) < 64 << 30
    sizes = {
        "num_ranks": 8,
        "rank": 0,
        "num_max_tokens_per_rank": 1 << 20,
        "max_row_bytes": 14336,
        "num_topk": 8,
        "num_experts": 256,
        "timeout_s": 1.0,
    }
    assert too_large(BufferSpec(**sizes), 65 << 30)
    assert too_large(BufferSpec(**sizes), (64 << 30) - 1)  # the control block comes first
    assert too_large(BufferSpec(**sizes), 63 << 30) is None


def test_settings_and_events_check_what_they_are_given():
    assert deepep_cupy.Config().num_sms is None
    with pytest.raises(ContractError, match=r"^Config\(\): argument 'num_max_nvl_chunked_send"):
        deepep_cupy.Config(num_max_nvl_chunked_send_tokens=None)
    for wrong in (0, True, 1.0, "20", 1 << 40):
        with pytest.raises(ContractError, match=r"^Config\(\): argument 'num_sms' must be a whole"):
            deepep_cupy.Config(num_sms=wrong)
        for name in ("get_dispatch_config", "get_combine_config"):
            with pytest.raises(ContractError, match=rf"^{name}\(\): argument 'num_ranks' must be"):
                getattr(deepep_cupy.Buffer, name)(wrong)
    assert deepep_cupy.Config(np.int64(3)).num_sms == 3
    for wrong in (3, "event", object()):
        with pytest.raises(ContractError, match=r"^EventOverlap\(\): argument 'event'"):
            deepep_cupy.EventOverlap(wrong)
        with pytest.raises(ContractError, match=r"argument 'hook' must be a function"):
            deepep_cupy.EventOverlap().register_hook_after_wait(wrong)


class Aborts:
    """Stands for an engine of which only what it tells the other ranks is asked."""

    name = "cuda"

    def __init__(self):
        self.reasons = []

    def abort(self, reason):
        self.reasons.append(reason)


def life(**lock):
    spec = BufferSpec(
        num_ranks=1, rank=0, num_max_tokens_per_rank=1, max_row_bytes=1, num_topk=1,
        num_experts=1, timeout_s=1.0,
    )  # fmt: skip
    guard = types.SimpleNamespace(doomed=False)
    return Lifecycle(spec, None, None, guard, Aborts(), CallLock(**lock))


def in_a_call(buffer, meanwhile):
    """Run ``meanwhile`` while another thread is in a call of ``buffer``."""
    inside, over = threading.Event(), threading.Event()

    def work():
        inside.set()
        assert over.wait(10)

    thread = threading.Thread(target=buffer.operate, args=("dispatch", Kind.DISPATCH, work))
    thread.start()
    try:
        assert inside.wait(10)
        return meanwhile()
    finally:
        over.set()
        thread.join()


def test_calls_of_two_buffers_from_two_threads_at_once_end_for_all_ranks():
    one, two = life(), life()

    def call(buffer=two):
        return buffer.operate("combine", Kind.COMBINE, lambda: 7)

    def meanwhile():
        with pytest.raises(StateError, match="in a call of another Buffer on rank 0; all ranks"):
            call()
        with pytest.raises(
            StateError, match=r"this Buffer on rank 0; .* make all of a Buffer's calls\.$"
        ):
            call(one)

    in_a_call(one, meanwhile)
    (reason,) = two._engine.reasons
    assert reason.startswith("combine(): another thread is in a call of another Buffer")
    assert (one.state, two.state) == (State.OPEN, State.POISONED)
    assert two._guard.doomed
    assert not one._engine.reasons
    assert call(one) == 7


def test_a_call_keeps_nothing_alive():
    """Not even until the collector of garbage comes: arrays and memory of the pool hang on it."""

    class Thing:
        pass

    thing, one = Thing(), life()
    alive = weakref.ref(thing)
    assert one.operate("dispatch", Kind.DISPATCH, lambda given: given is not None, thing)
    del thing
    assert alive() is None


def test_what_an_interrupted_call_has_left_locked_its_thread_takes_over():
    """And no other thread, and not the call itself from within."""
    one, two = life(), life()

    def interrupted():
        assert one.inside.acquire((threading.get_ident(), sys._getframe()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert one.inside.locked()
    said = []

    def elsewhere():
        try:
            one.operate("barrier", Kind.BARRIER, lambda: 1)
        except StateError as error:
            said.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "another thread is in a call of this Buffer" in said[0]
    for each in (two, one):
        assert each.operate("combine", Kind.COMBINE, lambda: 7) == 7

    def within():
        return one.operate("barrier", Kind.BARRIER, lambda: 1)

    with pytest.raises(StateError, match="in a call of this Buffer"):
        one.operate("combine", Kind.COMBINE, within)


def test_threads_that_may_call_side_by_side_do():
    one, two = life(side_by_side=True), life(side_by_side=True)
    assert in_a_call(one, lambda: two.operate("combine", Kind.COMBINE, lambda: 7)) == 7
    assert not one.inside.locked()
    assert not two.inside.locked()


def test_other_threads_than_mpis_are_refused():
    one = life(only_thread=threading.get_ident() + 1)
    with pytest.raises(StateError, match="only the thread that made this Buffer"):
        one.operate("combine", Kind.COMBINE, lambda: 7)
    assert one.state is State.OPEN
    assert life(only_thread=threading.get_ident()).operate("", Kind.COMBINE, lambda: 7) == 7


def test_states():
    assert set(_LEGAL) == set(State)
    assert _LEGAL[State.CLOSED] == set()
    assert State.OPEN in _LEGAL[State.POISONED]
    assert State.OPEN not in _LEGAL[State.OPEN]


# ----------------------------------------------------------------------------------- the waits


class FakeWindow:
    def __init__(self, nbytes):
        self.memory = np.zeros(nbytes, np.uint8)

    def free(self):
        pass


class FakeRequest:
    """Done at the given test; -1: never."""

    def __init__(self, done_at=-1, error=None):
        self.tests = 0
        self.done_at = done_at
        self.error = error

    def test(self):
        self.tests += 1
        if self.error:
            raise LinkError(self.error)
        return 0 <= self.done_at <= self.tests

    def cancel(self):
        pass


class FakeGroup:
    host = "here"
    over = False
    world_size = size = 4
    node_ranks = (0, 1, 2, 3)

    def __init__(self, rank=0, window=None):
        self.rank = rank
        self.window = window
        self.barriers = [FakeRequest()]

    def shared_window(self, nbytes, node=0):
        self.window = self.window or FakeWindow(nbytes)
        return self.window

    def ibarrier(self):
        return self.barriers.pop(0)


def party(timeout_s=0.05):
    """The meeting place of rank 0, and the boards of ranks 1 to 3."""
    group = FakeGroup()
    board = AbortBoard(group)
    others = {rank: AbortBoard(FakeGroup(rank, group.window)) for rank in (1, 2, 3)}
    return Rendezvous(group, board, timeout_s), others


def test_board_words():
    meeting, others = party()
    board = meeting.board
    assert board.array.shape == (4, 16)
    assert board.find() is None
    others[2].abort(Abort(AbortReason.ERROR, 2, (), "ValueError: é" + "x" * 300))
    assert board.array[2, 0] == 1
    found = board.find()
    assert (found.reason, found.origin) == (AbortReason.ERROR, 2)
    assert found.text.startswith("ValueError: éx")
    # A timeout explains the others' errors, whoever wrote first.
    others[3].abort(Abort(AbortReason.TIMEOUT, 3, (0, 1), "dispatch"))
    assert board.find() == Abort(AbortReason.TIMEOUT, 3, (0, 1), "dispatch")
    assert board.hopeless() == {0, 1, 2, 3}
    assert board.hopeless(RankState.LEFT) == set()
    assert board.find(RankState.LEFT) is None
    for each in others.values():
        each.clear()
    assert board.find() is None


def test_board_meetings_compare_across_the_wrap():
    meeting, others = party()
    board = meeting.board
    board.arrive(2**32)
    others[1].arrive(2**32 - 1)
    others[2].arrive(2**32 + 5)
    others[3].arrive(2**32)
    assert board.not_arrived(2**32) == (1,)


def test_wait_that_succeeds():
    meeting, _ = party(timeout_s=60)
    pending = [Pending(1, FakeRequest(3)), Pending(2, FakeRequest(150))]
    meeting.wait(pending, "dispatch", "rows")
    assert pending == []


def test_wait_names_all_late_ranks_once():
    meeting, others = party()
    pending = [Pending(3, FakeRequest()), Pending(1, FakeRequest()), Pending(3, FakeRequest())]
    pending.append(Pending(2, FakeRequest(0)))
    start = time.monotonic()
    with pytest.raises(
        PeerTimeoutError, match=r"rank 0 waited 0\.05 s .* rows from ranks 1, 3"
    ) as e:
        meeting.wait(pending, "dispatch", "rows")
    assert time.monotonic() - start < 10.0
    assert e.value.late_ranks == (1, 3)
    assert len(pending) == 3
    assert others[1].find() == Abort(AbortReason.TIMEOUT, 0, (1, 3), "dispatch")


def test_wait_ends_when_a_peer_it_needs_has_given_up():
    meeting, others = party(timeout_s=60)
    others[2].abort(Abort(AbortReason.ERROR, 2, (), "ValueError: no"))
    pending = [Pending(1, FakeRequest(60)), Pending(2, FakeRequest())]
    with pytest.raises(PeerAbortedError, match=r"rank 2 aborted \(ValueError: no\)") as caught:
        meeting.wait(pending, "combine", "rows")
    assert caught.value.rank == 2
    assert others[1].array[0, 0] == 1  # passed on


def test_wait_ends_when_the_rank_it_waits_for_was_given_up_by_another():
    meeting, others = party(timeout_s=60)
    others[2].abort(Abort(AbortReason.TIMEOUT, 2, (3,), "barrier"))
    wanted = r"rank 2 waited in vain for rank 3 in barrier\(\)"
    with pytest.raises(PeerTimeoutError, match=wanted) as caught:
        meeting.wait([Pending(3, FakeRequest())], "barrier", "the header")
    assert caught.value.late_ranks == (3,)


def test_the_late_rank_itself_is_told():
    meeting, others = party()
    others[1].abort(Abort(AbortReason.TIMEOUT, 1, (0,), "dispatch"))
    with pytest.raises(PeerAbortedError, match=r"rank 1 waited in vain for this rank \(0\)"):
        meeting.watch("dispatch")


def test_wait_goes_on_when_a_peer_it_does_not_need_has_left():
    """It may have sent all it had to and left after that."""
    meeting, others = party(timeout_s=60)
    others[2].abort(Abort(AbortReason.ERROR, 2, (), "SystemExit"), RankState.LEFT)
    meeting.wait([Pending(1, FakeRequest(200))], "dispatch", "rows")


def test_wait_hears_what_a_peer_sent_before_it_gave_up():
    meeting, others = party(timeout_s=60)
    others[2].abort(Abort(AbortReason.ERROR, 2, (), "SystemExit"), RankState.LEFT)
    meeting.wait([Pending(2, FakeRequest(10))], "dispatch", "rows")


def test_a_broken_link_is_an_abort():
    meeting, others = party()
    with pytest.raises(PeerAbortedError, match="link from rank 0 to rank 3 broke: gone"):
        meeting.wait([Pending(3, FakeRequest(error="gone"))], "dispatch", "rows")
    assert others[1].find().reason == AbortReason.ERROR


def test_a_barrier_is_taken_up_again():
    meeting, others = party()
    request = meeting.group.barriers[0]
    others[1].arrive(1)
    with pytest.raises(PeerTimeoutError, match="for ranks 2, 3 to make this call") as caught:
        meeting.barrier("reset")
    assert caught.value.late_ranks == (2, 3)
    request.done_at = 0
    meeting.barrier("reset")
    assert meeting.group.barriers == []


def test_a_barrier_ends_when_a_rank_has_left():
    meeting, others = party(timeout_s=60)
    others[1].abort(Abort(AbortReason.ERROR, 1, (), "poisoned only"))
    others[2].abort(Abort(AbortReason.ERROR, 2, (), "SystemExit: 1"), RankState.LEFT)
    with pytest.raises(PeerAbortedError, match="rank 2 aborted"):
        meeting.barrier("close")


# ----------------------------------------------------------------------------- the host's arrays


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (type("ndarray", (), {"__module__": "cupy"})(), ("got cupy.ndarray", "cupy.asnumpy()")),
        ([1, 2], ("got list",)),
        (np.zeros((4, 4))[:, ::2], ("C-contiguous", "strides (32, 16)", "ascontiguousarray")),
        (np.zeros((4, 4), object), ("plain bytes", "object")),
    ],
)
def test_host_engine_says_what_it_wants(value, words):
    group = FakeGroup(rank=1)
    spec = BufferSpec(
        num_ranks=4,
        rank=1,
        num_max_tokens_per_rank=1,
        max_row_bytes=1,
        num_topk=0,
        num_experts=None,
        timeout_s=1.0,
    )
    engine = HostEngine(group, AbortBoard(group), spec)
    with pytest.raises(ContractError, match=r"dispatch\(\): argument 'x' must be .* rank 1") as e:
        engine.import_array("dispatch", "x", value)
    assert [word for word in words if word not in str(e.value)] == []


# ------------------------------------------------------------------------- streams of libraries


class Protocol:
    """As cuda.core's streams."""

    def __cuda_stream__(self):
        return 0, 77


@pytest.mark.parametrize(
    ("stream", "wanted"),
    [
        (0, 0),
        (np.uint64(1 << 47), 1 << 47),
        (SimpleNamespace(cuda_stream=5, ptr=6), 5),
        (SimpleNamespace(ptr=6), 6),
        (SimpleNamespace(handle=ctypes.c_void_p(9)), 9),
        (SimpleNamespace(handle=ctypes.c_void_p(0)), 0),
        (SimpleNamespace(__cuda_stream__=(0, 8)), 8),
        (Protocol(), 77),
    ],
)
def test_streams_of_other_libraries(stream, wanted):
    assert stream_address(stream) == wanted


@pytest.mark.parametrize("stream", [None, True, -1, 1.0, "0", SimpleNamespace(ptr="x")])
def test_what_is_no_stream(stream):
    with pytest.raises(ContractError, match=r"on\(\): argument 'stream' must be a CUDA stream"):
        stream_address(stream)
