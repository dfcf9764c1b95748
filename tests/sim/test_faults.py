"""The simulator has teeth: each planted fault is found, and soon."""

import pytest

from deepep_cupy._resources import kernel_dir
from deepep_cupy.engines.gpu.kernels import get_kernel
from simulator.build import kernel_text
from simulator.faults import LIMIT, PLANTED, Fault, change, marks, put, remove, seeds_needed, swap
from simulator.litmus import run_litmus
from simulator.machine import Loads
from simulator.scenario import SHAPES, run_story

QUICK = (
    "fence moved to another thread (before the arrivals)",
    "one lane waits for the bulk stores of all",
    "proxy fence removed (peers' rows before bulk loads)",
)


TEXT = """void f() {
    first(1);  // PLANT(one)
    // PLANT(two)
    if (a &&  // not the end;
        b) {
        third();
    }
}
"""


def test_a_mark_stands_for_one_statement():
    assert change(remove("one"))(TEXT) == TEXT.replace("    first(1);  // PLANT(one)\n", "")
    both = change(swap("one", "1", "2"), put("two", "if (c) {"))(TEXT)
    assert "".join(both.split()) == "voidf(){first(2);//PLANT(two)if(c){third();}}"


@pytest.mark.parametrize(
    "fault",
    [change(remove("three")), change(swap("one", "2", "3")), change(remove("one"), remove("one"))],
    ids=["no such mark", "no such piece", "the mark is gone"],
)
def test_a_fault_that_does_not_fit_the_text_is_refused(fault: Fault):
    with pytest.raises(ValueError, match=r"PLANT\(\w+\)"):
        fault(TEXT)


def test_every_mark_of_the_kernel_text_is_planted_and_the_other_way_round():
    there = [mark for path in kernel_dir().rglob("*.cu*") for mark in marks(path.read_text())]
    named = {one.mark for planted in PLANTED for one in planted.edit.changes}
    assert sorted(there) == sorted(named)


def test_nothing_that_looks_like_a_mark_is_none():
    for path in kernel_dir().rglob("*.cu*"):
        text = path.read_text()
        assert text.count("PLANT") == len(marks(text)), path


@pytest.mark.parametrize("planted", PLANTED, ids=[planted.name for planted in PLANTED])
def test_planted_fault_fits_its_kernels(planted):
    for kernel in planted.kernels:
        text = kernel_text(get_kernel(kernel), SHAPES[1].constants)
        assert planted.edit(text) != text


@pytest.mark.parametrize(
    "name",
    [pytest.param(p.name, marks=[] if p.name in QUICK else pytest.mark.slow) for p in PLANTED],
)
def test_planted_fault_is_found(name):
    planted = next(p for p in PLANTED if p.name == name)
    needed = seeds_needed(planted, lambda seed, focus: bool(run_story(seed, focus).problems))
    assert needed is not None, f"not found within {LIMIT} seeds"


def test_no_allocate_removed_where_the_flag_is_only_relaxed():
    """A consumer that works on Hopper by its load alone, and no longer without no_allocate."""
    produce = (
        "FIRST { WAIT(ld_acquire_sys_u64(g) == 1); st_v4(rows, Vec16{{7, 0, 0, 0}});"
        " st_release_sys_u64(f, 1); }"
    )
    consume = (
        "FIRST { ld_no_allocate_v4(rows); st_relaxed_sys_u64(g, 1);"
        " WAIT(ld_relaxed_sys_u64(f) == 1); st_u64(out, ld_no_allocate_v4(rows).word[0]); }"
    )
    for loads in (Loads.HOPPER, Loads.STRICT):
        how = {"num_out": 1, "loads": loads, "seeds": 100}
        assert set(run_litmus([(0, 0, produce), (1, 0, consume)], **how).seen) == {(7,)}
        faulty = consume.replace("ld_no_allocate_v4", "ld_v4")
        assert (0,) in run_litmus([(0, 0, produce), (1, 0, faulty)], **how).seen
