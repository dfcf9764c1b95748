"""Late, stopped, dead and raising ranks: what each rank sees, and how the program ends.

Scenarios after which the program goes on share one start; the others have one each. Rank 1 is the
one in trouble.
"""

import os
import re
from pathlib import Path

import pytest

from ranks import run_ranks

WORKER = Path(__file__).with_name("failure_worker.py")
RANKS = 3
GOOD = (0, 2)
BAD = 1
TIMEOUT_S = 1.0
"""As in the worker."""
NODES = len(os.environ.get("CLUSTER_NODES", "here").split(","))
"""More than one below ``deepep_cupy.testing.cluster``."""

GO_ON = (
    "late",
    "late_rows",
    "late_combine",
    "late_barrier",
    "late_reset",
    "reset_ends_waits",
    "reset_fails_within",
    "late_then_close",
    "out_of_memory",
    "raises_and_is_caught",
    "stopped_for_a_while",
    "dropped",
)


@pytest.fixture(scope="module")
def sections():
    """Per scenario of GO_ON, what each rank printed."""
    run = run_ranks(WORKER, RANKS, *GO_ON, limit_s=120)
    run.check()
    found = {}
    for rank, output in enumerate(run.outputs):
        for section in output.split("===== ")[1:]:
            name, _, text = section.partition("\n")
            found.setdefault(name, {})[rank] = text
    return found


def saw(text):
    """(class, seconds, message) of every report."""
    found = re.findall(r"^SAW (\w+) ([\d.]+) ?(.*)$", text, re.MULTILINE)
    return [(kind, float(seconds), message) for kind, seconds, message in found]


def test_a_reset_ends_what_waits_for_its_rank(sections):
    for rank in range(RANKS):
        text = sections["reset_ends_waits"][rank]
        *waited, (reset, seconds, _) = saw(text)
        assert (reset, "WORKS again open" in text) == ("nothing", True)
        assert seconds < 0.6
        if rank != BAD:
            ((kind, seconds, message),) = waited
            assert kind == "PeerAbortedError"
            assert "rank 1 aborted (it is in reset(), and waits for the others)" in message
            assert seconds < 0.6


def test_a_reset_that_failed_spoils_no_later_one(sections):
    for rank in range(RANKS):
        first, second = saw(sections["reset_fails_within"][rank])
        assert "WORKS again open" in sections["reset_fails_within"][rank]
        if rank == BAD:
            assert (first[0], second[0]) == ("KeyboardInterrupt", "PeerTimeoutError")
        else:
            assert first[0] == second[0] != "nothing"


@pytest.mark.parametrize("name", ["late", "late_rows", "late_combine", "late_barrier"])
def test_late_rank_is_named_and_reset_mends(sections, name):
    for rank in GOOD:
        (first, seconds, message), (then, _, advice) = saw(sections[name][rank])
        assert first == "PeerTimeoutError"
        assert "in vain for" in message
        assert "rank 1" in message
        assert seconds < TIMEOUT_S + 1.0
        assert then == "StateError"
        assert "reset()" in advice
        assert "WORKS again open" in sections[name][rank]
    (first, _, message), (then, _, later) = saw(sections[name][BAD])
    # All that rank 1 is to get may have come before the others gave up on it: then its call is
    # right, and the next one tells. Across nodes that the others gave up is itself a message.
    may_be_right = name in ("late_rows", "late_combine") or (NODES > 1 and name == "late_barrier")
    assert (first, then) in (
        ("PeerAbortedError", "StateError"),
        *[("nothing", "PeerAbortedError")] * may_be_right,
    )
    assert "in vain for this rank (1)" in message + later
    assert "WORKS again open" in sections[name][BAD]


def test_reset_that_failed_can_be_tried_again(sections):
    for rank in GOOD:
        reports = saw(sections["late_reset"][rank])
        kinds = [kind for kind, _, _ in reports]
        assert kinds == ["PeerTimeoutError", "PeerTimeoutError", "StateError"]
        assert "in vain for rank 1 to make this call" in reports[1][2]
    for rank in range(RANKS):
        assert "WORKS again open" in sections["late_reset"][rank]


def test_poisoned_buffer_can_be_closed(sections):
    for rank in range(RANKS):
        assert "END closed" in sections["late_then_close"][rank]


def test_failure_between_headers_and_rows_is_told_at_once(sections):
    texts = sections["out_of_memory"]
    for rank in GOOD:
        ((kind, seconds, message),) = saw(texts[rank])
        assert kind == "PeerAbortedError"
        assert "rank 1 aborted (MemoryError in dispatch(): no room for recv_x)" in message
        assert seconds < TIMEOUT_S
    assert "SAW MemoryError poisoned" in texts[BAD]
    assert all("WORKS again open" in text for text in texts.values())


def test_refused_everywhere_and_caught_outside(sections):
    for text in sections["raises_and_is_caught"].values():
        assert text.split() == ["SAW", "ContractError", "END"]


def test_stopped_for_a_while_is_no_failure(sections):
    for text in sections["stopped_for_a_while"].values():
        assert [kind for kind, _, _ in saw(text)] == ["nothing"]


def test_dropped_buffer_warns(sections):
    for text in sections["dropped"].values():
        assert "SAW ['ResourceWarning']" in text


# ------------------------------------------------------------------- the program ends with it


def ends(name, limit_s=30.0):
    """Run a scenario; all its processes must have ended by themselves."""
    run = run_ranks(WORKER, RANKS, name, limit_s=limit_s)
    assert not run.timed_out, run
    assert not run.survivors, run
    return run


@pytest.mark.parametrize("name", ["stopped", "stopped_in_rows"])
def test_sigstop(name):
    run = ends(name)
    assert run.returncode != 0, run
    start_up_s = 8.0  # interpreters and imports on a busy machine, and the end of mpirun
    assert run.seconds < TIMEOUT_S + 5.0 + start_up_s, run
    for rank in GOOD:
        last = run.outputs[rank].strip().splitlines()
        errors = [line for line in last if "PeerTimeoutError: " in line]
        assert errors, run
        assert "rank 1" in errors[-1], run


def test_kill_9():
    run = ends("killed")
    assert run.returncode != 0, run


def test_a_buffer_that_is_open_at_the_end_is_one_line_of_rank_0():
    run = ends("stays_open")
    assert run.returncode == 0, run
    told = [text.count("a Buffer was not closed at the end") for text in run.outputs]
    assert told == [1] + [0] * (RANKS - 1), run


@pytest.mark.parametrize("name", ["raises", "raises_bare"])
def test_exception_on_one_rank(name):
    run = ends(name)
    assert run.returncode != 0, run
    assert "ValueError: the batch is bad" in run.outputs[BAD], run
    for rank in GOOD:
        wanted = "PeerAbortedError: combine(): rank 1 aborted (ValueError: the batch is bad)"
        assert wanted in run.outputs[rank], run


def test_exception_after_close():
    """``mpirun python`` without ``-m mpi4py``: nobody waits for a rank that has ended."""
    run = ends("raises_after_close")
    assert run.returncode != 0, run
    assert "ValueError: the batch is bad" in run.outputs[BAD], run


def only_line_of(output):
    """What a rank said, without the line about the engine and those of MPI."""
    said = [line for line in output.splitlines() if line.startswith(("Traceback", "deepep_cupy.e"))]
    (line,) = said
    return line


def test_a_refusal_is_one_traceback_and_one_line_on_each_other_rank():
    run = ends("refused")
    assert run.returncode != 0, run
    assert run.outputs[BAD].count("Traceback") == 1, run
    assert "'topk_idx' must have shape" in run.outputs[BAD], run
    for rank in GOOD:
        line = only_line_of(run.outputs[rank])
        assert line.startswith("deepep_cupy.errors.ContractError: dispatch(): rank 1 refused"), run


@pytest.mark.skipif(NODES > 1, reason="three nodes may have nine ranks")
def test_too_many_ranks_are_one_traceback():
    run = run_ranks(WORKER, 9, "constructed", limit_s=60.0)
    assert run.returncode != 0, run
    assert run.outputs[0].count("Traceback") == 1, run
    for output in run.outputs[1:]:
        assert only_line_of(output).startswith("deepep_cupy.errors.PlatformError: Buffer(): the"), (
            run
        )


def test_a_construction_that_not_all_ranks_make_ends():
    """After timeout_s on those that do; the program then ends, also where the error was caught."""
    run = ends("constructed_by_some")
    assert run.returncode != 0, run
    assert run.seconds < 20, run
    for rank in GOOD:
        ((kind, seconds, message),) = saw(run.outputs[rank])
        assert kind == "PeerTimeoutError", run
        assert TIMEOUT_S <= seconds < TIMEOUT_S + 1, run
        assert "in vain for all 3 ranks to make this call" in message, run


def test_a_construction_can_be_interrupted():
    run = ends("interrupted_construction")
    assert run.returncode != 0, run
    assert run.seconds < 20, run
    assert "KeyboardInterrupt" in run.outputs[0], run


def test_interrupts_anywhere_in_an_operation():
    """Thousands of them by hand, with other seeds. The end is not in order where a Buffer was lost
    on the way, as all ranks were told."""
    worker = WORKER.with_name("interrupt_worker.py")
    run = run_ranks(worker, 2, "--seed", 4, "--count", 20, limit_s=120)
    assert re.search(r"^INTERRUPTS: ok, 20 in .* KeyboardInterrupt \d", run.outputs[0], re.M), run
    assert not run.timed_out, run
    assert not run.survivors, run


def test_exception_that_one_rank_catches_outside():
    """The others hear of it at once, and that they end is not held up by their limit."""
    run = ends("raises_and_stays")
    assert run.returncode != 0, run
    for rank in GOOD:
        kind, seconds, message = saw(run.outputs[rank])[0]
        assert kind == "PeerAbortedError", run
        assert seconds < TIMEOUT_S, run
        assert "rank 1 aborted (ValueError: cannot reshape" in message, run


def test_exception_on_one_rank_while_others_are_elsewhere():
    run = ends("raises_while_others_wait_elsewhere")
    assert run.returncode != 0, run
    assert "ValueError: the batch is bad" in run.outputs[BAD], run


def test_sys_exit_on_one_rank():
    run = ends("exits")
    assert run.returncode != 0, run
    assert "rank 1 aborted (SystemExit: 3)" in run.outputs[0], run


def test_end_without_reset_is_not_a_good_end():
    run = ends("late_for_good")
    assert run.returncode != 0, run
    for rank in GOOD:
        assert "SAW PeerTimeoutError" in run.outputs[rank], run
        assert "END" in run.outputs[rank], run


def test_rank_that_does_not_close_is_named():
    run = ends("close_alone")
    assert run.returncode != 0, run
    for rank in GOOD:
        first, second = saw(run.outputs[rank])
        assert first[0] == "PeerTimeoutError", run
        assert "rank 1" in first[2], run
        assert second[0] == "nothing", run


def test_no_close_at_all():
    run = ends("no_close")
    run.check()
    assert all("END" in output for output in run.outputs), run
