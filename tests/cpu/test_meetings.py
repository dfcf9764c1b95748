"""What ranks tell each other, in which order: boards, exits, resets, and the constructor's vote."""

import gc
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from deepep_cupy.api.config import BufferArguments, agree
from deepep_cupy.api.lifecycle import CallLock, Lifecycle, State
from deepep_cupy.engines.host.engine import HostEngine
from deepep_cupy.engines.host.wire import CHUNK_BYTES, Wire
from deepep_cupy.errors import ContractError, PeerAbortedError, PeerTimeoutError
from deepep_cupy.protocol.sizes import BufferSpec
from deepep_cupy.ranks import abort_board, exit_guard
from deepep_cupy.ranks.abort_board import Abort, AbortBoard, AbortReason, RankState
from deepep_cupy.ranks.exit_guard import ExitGuard
from deepep_cupy.ranks.rendezvous import Rendezvous

SPEC = BufferSpec(
    num_ranks=2,
    rank=0,
    num_max_tokens_per_rank=4,
    max_row_bytes=8,
    num_topk=1,
    num_experts=2,
    timeout_s=1.0,
)


class Group:
    """Rank 0 of two on one machine; nothing ever comes from rank 1."""

    over = False
    host, world_size, size, rank, node_ranks = "here", 2, 2, 0, (0, 1)

    def __init__(self):
        self.kept, self.codes, self.others = [], [], lambda value: value

    def shared_window(self, nbytes, node=0):
        return SimpleNamespace(memory=np.zeros(nbytes, np.uint8), free=lambda: None)

    def irecv(self, peer, data, tag):
        return SimpleNamespace(test=lambda: False, cancel=lambda: None, data=data)

    isend = irecv

    def keep(self, requests):
        self.kept += requests

    def allgather(self, value):
        return [value, self.others(value)]

    def abort(self, code):
        self.codes.append(code)


def test_what_an_exchange_that_failed_has_posted_is_kept():
    """A message may still come, into memory that must be there."""
    group = Group()
    meeting = Rendezvous(group, AbortBoard(group), 0.02)
    with pytest.raises(PeerTimeoutError):
        meeting.exchange("reset", np.arange(3))
    assert [request.data.nbytes for request in group.kept] == [24, 24]


class Interrupted(Group):
    """Ctrl-C comes when MPI has a request and nobody has noted it."""

    def irecv(self, peer, data, tag):
        self.posted = weakref.ref(data.base if data.base is not None else data)
        raise KeyboardInterrupt

    isend = irecv


def test_memory_of_a_receive_that_was_interrupted_lives():
    """MPI writes there. The next drain says on every rank that this one is lost."""
    group = Interrupted()
    board = AbortBoard(group)
    wire = Wire(Rendezvous(group, board, 0.02))
    with pytest.raises(KeyboardInterrupt):
        wire.receive(1, np.zeros(8))
    gc.collect()
    assert group.posted() is not None
    for _ in range(2):
        with pytest.raises(PeerAbortedError, match="interrupted while it posted a receive"):
            wire.drain("reset", np.ones(2, np.int64), 3)
    assert board.find(RankState.LEFT).origin == 0


def test_memory_of_a_send_that_was_interrupted_lives():
    group = Interrupted()
    wire = Wire(Rendezvous(group, AbortBoard(group), 0.02))
    with pytest.raises(KeyboardInterrupt):
        wire.send(1, np.zeros(8))
    gc.collect()
    assert group.posted() is not None
    wire.drain("reset", np.zeros(2, np.int64), 3)
    assert wire.sent[1] == 0


def test_memory_of_an_exchange_that_was_interrupted_lives():
    group = Interrupted()
    meeting = Rendezvous(group, AbortBoard(group), 0.02)
    with pytest.raises(KeyboardInterrupt):
        meeting.exchange("reset", np.arange(3))
    gc.collect()
    assert group.posted() is not None


def test_the_state_of_a_board_is_written_last():
    """Who sees it sees the words that belong to it."""
    board = AbortBoard(Group())
    written = []

    class Recording(np.ndarray):
        def __setitem__(self, key, value):
            written.append(key)
            super().__setitem__(key, value)

    board._lines = board._lines.view(Recording)
    board.abort(Abort(AbortReason.TIMEOUT, 0, (1,), "dispatch"))
    assert set(written) >= {abort_board._REASON, abort_board._ORIGIN, abort_board._LATE}
    assert written.count(abort_board._STATE) == 1
    assert written[-1] == abort_board._STATE


def test_messages_fit_a_count_of_mpi():
    assert CHUNK_BYTES < 2**31


def test_a_process_that_ends_says_so_before_it_waits_for_the_others(monkeypatch):
    group = Group()
    board = AbortBoard(group)
    guards = [ExitGuard(group, board, doomed=True), ExitGuard(group, AbortBoard(group))]
    monkeypatch.setattr(exit_guard, "_guards", guards)
    monkeypatch.setattr(exit_guard, "_flush", lambda: None)
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.setattr(exit_guard, "_GRACE_S", 0.01)
    exit_guard._at_exit()
    assert board.array[0, abort_board._EXITING] == 1
    assert board.find(RankState.LEFT).text == "it ends"
    assert group.codes == [1]
    assert guards[1].board.array[0, abort_board._EXITING] == 0


class Unwritable:
    """A stream whose disk is full, or whose reader has gone."""

    closed = False

    def write(self, text):
        raise OSError(28, "No space left on device")

    def flush(self):
        raise OSError(28, "No space left on device")


class UnshownError(Exception):
    def __str__(self):
        raise RuntimeError("an exception whose text cannot be made")


ERRORS = [UnshownError(), OSError("bad path \udcff"), RuntimeError("a wrong batch")]
"""What can end a program, worst first."""


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_nothing_on_the_way_out_keeps_the_others_waiting(error, monkeypatch):
    """The board is written and the program ended, whatever streams and texts do."""
    group = Group()
    board = AbortBoard(group)
    monkeypatch.setattr(exit_guard, "_guards", [ExitGuard(group, board)])
    monkeypatch.setattr(exit_guard, "_GRACE_S", 0.01)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Unwritable())
    monkeypatch.setattr(exit_guard.logging, "shutdown", Unwritable().flush)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    exit_guard._at_exit()
    assert group.codes == [1]
    assert board.find(RankState.LEFT).text.startswith(type(error).__name__)


def test_a_board_that_cannot_be_written_does_not_stop_the_end(monkeypatch):
    group = Group()
    monkeypatch.setattr(exit_guard, "_guards", [ExitGuard(group, None, doomed=True)])
    monkeypatch.setattr(exit_guard, "_flush", lambda: None)
    with pytest.raises(AttributeError):
        exit_guard._at_exit()
    assert group.codes == [1]


def test_a_program_without_open_buffers_ends_though_nothing_can_be_written(monkeypatch):
    group = Group()
    monkeypatch.setattr(exit_guard, "_guards", [])
    monkeypatch.setattr(exit_guard, "_programs", [group])
    monkeypatch.setattr(exit_guard, "_GRACE_S", 0.01)
    monkeypatch.setattr(sys, "stdout", Unwritable())
    monkeypatch.setattr(sys, "last_value", RuntimeError("x"), raising=False)
    exit_guard._at_exit()
    assert group.codes == [1]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_any_text_poisons_and_is_told(error):
    done = []
    engine = SimpleNamespace(name="host", abort=done.append)
    life = Lifecycle(SPEC, None, None, ExitGuard(Group(), None), engine, CallLock())
    with pytest.raises(type(error)), life.failures("dispatch"):
        raise error
    assert life.state is State.POISONED
    assert done[0].startswith(type(error).__name__)


def test_a_buffer_is_poisoned_before_the_others_are_told():
    """Telling them may itself be interrupted."""
    life = None

    def abort(text):
        assert life.state is State.POISONED
        raise KeyboardInterrupt

    engine = SimpleNamespace(name="host", abort=abort)
    life = Lifecycle(SPEC, None, None, ExitGuard(Group(), None), engine, CallLock())
    with pytest.raises(KeyboardInterrupt), life.failures("dispatch"):
        raise OSError("a broken disk")
    assert life.state is State.POISONED


def test_a_rank_that_has_left_does_not_come_back():
    """Passing on another rank's reason said that this one might be reset."""
    board = AbortBoard(Group())
    board.abort(Abort(AbortReason.ERROR, 0, (), "gone"), RankState.LEFT)
    board.abort(Abort(AbortReason.TIMEOUT, 1, (0,), "reset"))
    assert board.find(RankState.LEFT).text == "gone"


def test_a_board_takes_a_text_of_any_path():
    board = AbortBoard(Group())
    board.abort(Abort(AbortReason.ERROR, 0, (), "no file bad\udcff"))
    assert board.find().text == "no file bad?"


def test_a_reset_lets_the_process_end_in_an_orderly_way():
    guard = ExitGuard(Group(), None)
    done = []
    engine = SimpleNamespace(name="host", reset=lambda: done.append(1), abort=done.append)
    life = Lifecycle(SPEC, Group(), None, guard, engine, CallLock())
    with pytest.raises(ZeroDivisionError), life.failures("dispatch"):
        _ = 1 // 0
    assert (life.state, guard.doomed) == (State.POISONED, True)
    life.reset()
    assert (life.state, guard.doomed) == (State.OPEN, False)


def arguments():
    return BufferArguments(
        num_max_tokens_per_rank=4,
        hidden=4,
        num_topk=1,
        num_experts=2,
        dtype="float32",
        pool_bytes=None,
        num_sms=None,
        engine="host",
        device=None,
        timeout_s=5,
        ranks_per_node=None,
    )


def test_versions_must_be_the_same():
    """Headers and kernels of another version are another protocol."""
    group = Group()
    assert agree(group, arguments(), "1.0").num_ranks == 2
    asked = []

    def other(value):
        asked.append(value)
        return (*value[:2], {**value[2], "version of deepep_cupy": "1.1"}, *value[3:])

    group.others = other
    with pytest.raises(ContractError, match=r"'version of deepep_cupy' must be .* rank 1: 1\.1"):
        agree(group, arguments(), "1.0")
    assert asked[0][2]["version of deepep_cupy"] == "1.0"


def host_engine(done):
    engine = HostEngine.__new__(HostEngine)
    engine._spec, engine._epoch, engine._generation = SPEC, 5, 1
    engine._board = SimpleNamespace(clear=lambda: done.append("board"))

    def exchange(operation, words):
        done.append("exchange")
        return np.array([words, [9, 4, *words[2:]]])

    engine._rendezvous = SimpleNamespace(
        barrier=lambda operation, hurry=None: done.append(f"barrier of {operation}"),
        exchange=exchange,
    )
    sent = np.zeros(2, np.int64)
    engine._wire = SimpleNamespace(sent=sent, drain=lambda *_: done.append("drain"))
    return engine


def test_a_reset_goes_on_behind_the_newest_epoch_of_all_ranks():
    done = []
    engine = host_engine(done)
    engine.reset()
    assert (engine._epoch, engine._generation) == (11, 5)
    assert done == ["barrier of reset", "exchange", "drain", "board", "barrier of reset"]


def test_a_close_meets_twice():
    """A rank that gave up in the first barrier is not in the second."""
    done = []
    host_engine(done).close(collective=True)
    assert done == ["barrier of close", "exchange", "drain", "barrier of close"]
