"""The product's own Buffers on simulated GPUs, under seeds; and mistakes that seeds must find."""

import pytest

from host import stories
from host.faults import FAULTS
from host_campaign import first_seed, try_seed

QUICK = (
    "record_stream is dropped",
    "the caller's stream does not wait for the end",
    "the end of an operation is recorded before its kernel",
)
"""Faults that the first seeds find."""
MISSED = {
    "an event's wait records no stream",
    "the tail of a shrunk block forgets the block's users",
    "the pool waits for no other stream",
    "completion of one stream is believed of all",
    "a graph's block goes to the eager list",
    "a capture takes memory with work pending",
    "blocks of a failed operation are not quarantined",
    "blocks of a refused wait are not given back",
    "stamps of memory that was given back are too old",
    "reset clears the board after its second meeting",
    "reset goes on from this rank's own epoch",
}
"""Faults that no seed is known to find: the stories are too tame for them."""


@pytest.mark.parametrize("first", range(0, 6, 2))
def test_some_seeds(first):
    for seed in range(first, first + 2):
        assert try_seed(seed) is None


def test_a_seed_tells_one_story():
    def told():
        kept = []
        stories.tell(stories.Story(4), kept.append)
        texts = [line.split(" stream ")[0] for line in kept[0].baton.last]
        return kept[0].ended, texts, kept[0].baton.choices

    assert told() == told()


@pytest.mark.parametrize("fault", QUICK)
def test_a_planted_fault_is_found(fault):
    found = first_seed(fault, 20)
    assert found
    assert try_seed(found[0]) is None


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in MISSED])
def test_all_planted_faults_are_found(fault):
    found = first_seed(fault)
    assert found
    assert try_seed(found[0]) is None
