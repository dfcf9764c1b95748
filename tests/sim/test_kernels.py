"""All kernels under seeds: calls, troubles and schedules drawn from each, judged to the last bit.

A failing seed prints how to see it again. ``campaign.py`` runs any number of them.
"""

import pytest

from campaign import describe
from simulator.scenario import SHAPES, Focus, run_story
from simulator.shapes import Shape, build_all

PLAIN = SHAPES[2:4]  # two and three ranks, both kinds of loads


@pytest.fixture(scope="module")
def built():
    build_all(list(PLAIN))


def check(seeds, focus):
    for seed in seeds:
        verdict = run_story(seed, focus)
        assert not verdict.problems, describe(seed, verdict, focus.to_json())


@pytest.mark.parametrize("bulk", [False, True], ids=["ldst", "bulk"])
def test_calls_end_well(built, bulk):
    check(range(20), Focus(shapes=PLAIN, bulk=bulk, trouble=""))


@pytest.mark.parametrize(
    "trouble", ["freeze", "skew", "absent", "abort", "refuse", "bad_expert", "differ"]
)
def test_trouble_ends_as_the_contract_says(built, trouble):
    check(range(6), Focus(shapes=PLAIN, trouble=trouble))


def test_epochs_wrap(built):
    calls = ("barrier", "dispatch", "combine", "cached", "barrier", "combine")
    check(range(10), Focus(shapes=PLAIN, calls=calls, trouble="", epochs=(2**32 - 4, 2**31 - 2)))


def test_rows_of_odd_sizes(built):
    check(range(10), Focus(shapes=PLAIN, row_bytes=(5, 6, 20, 21), trouble=""))


@pytest.mark.parametrize("bulk", [False, True], ids=["ldst", "bulk"])
def test_hosts_that_do_not_wait(built, bulk):
    check(range(10), Focus(shapes=PLAIN, bulk=bulk, trouble="", mode="no wait"))


@pytest.mark.parametrize("mode", [None, "no wait"])
def test_rows_cast_on_their_way(built, mode):
    check(range(12), Focus(shapes=PLAIN, bulk=True, trouble="", mode=mode, cast=True))


def test_too_little_room_is_found_out_by_nobody_but_the_kernels(built):
    calls = ("dispatch", "combine", "cached", "combine")
    check(range(10), Focus(shapes=PLAIN, calls=calls, trouble="", tokens=1, mode="full"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_seeds(part):
    build_all(list(SHAPES))
    check(range(part * 100, part * 100 + 100), Focus())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_threads", [32, 64])
def test_eight_ranks(num_threads):
    check(range(50), Focus(shapes=(Shape(8, num_threads),)))
