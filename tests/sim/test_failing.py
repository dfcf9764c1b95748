"""How kernels end that cannot go on: who is told, by whom, and what the record says."""

import struct

import numpy as np
import pytest

from deepep_cupy.protocol.control_block import ABORT_REPORTER_SHIFT, RECORD_WORDS, AbortFlag
from simulator.calls import Ways, call_barrier
from simulator.shapes import Shape
from simulator.world import FAILED, Setting, World

SHAPES = (Shape(1, 32), Shape(2, 32), Shape(3, 64))


def world_of(shape, seed):
    return World(seed, Setting(shape=shape, num_experts=shape.num_ranks))


def barrier(world, present):
    call_barrier(world, Ways(False, (1,) * world.num_ranks, present, {}, np.random.default_rng(0)))


def abort_word(world, rank):
    return world.control_word(rank, world.memory[rank].control.abort)


def reporters(world, rank):
    word = abort_word(world, rank) >> ABORT_REPORTER_SHIFT
    return {each for each in range(world.num_ranks) if word >> each & 1}


def record(world, rank):
    words = world.report_words(rank)
    layout = world.memory[rank].report_layout
    assert words[layout.num_failures] == 1
    return dict(zip(RECORD_WORDS, words[layout.records :], strict=False))


@pytest.mark.parametrize("seed", range(3))
def test_a_waiting_kernel_looks_at_the_board(seed):
    """A process that has no GPU any more can reach it there alone, long before the time is up."""
    world = world_of(SHAPES[1], seed)
    barrier(world, [0])
    world.machine.host_store(0, 1, world.board, 64, 1)
    assert not world.machine.run()
    assert world.verdicts()[0, 1] == FAILED
    assert abort_word(world, 0) & AbortFlag.RAISED
    assert not abort_word(world, 0) & AbortFlag.TIMEOUT
    assert reporters(world, 0) == {1}


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_gives_up_tells_the_others(seed):
    """Rank 0 hears that rank 2 gave up; rank 1 hears it from rank 0, before its time is up."""
    world = world_of(SHAPES[2], seed)
    barrier(world, [0, 1])
    memory, word = world.memory[0], AbortFlag.RAISED | 1 << ABORT_REPORTER_SHIFT + 2
    world.machine.host_store(0, 1, memory.device, memory.control.abort, word)
    assert not world.machine.run()
    assert [world.verdicts()[rank, 1] for rank in (0, 1)] == [FAILED, FAILED]
    assert [abort_word(world, rank) & word for rank in (0, 1)] == [word, word]


def test_the_first_wait_to_expire_is_the_one_of_the_record():
    world = world_of(SHAPES[2], 1)
    barrier(world, [0])
    assert not world.machine.run()
    assert world.control_word(0, world.memory[0].control.claimed) == 1
    assert record(world, 0)["peer"] in (1, 2)
    assert world.late_ranks(0) <= {1, 2}


def test_a_kernel_that_finds_another_one_inside_does_nothing_and_says_so():
    world = world_of(SHAPES[0], 1)
    memory = world.memory[0]
    world.machine.poke(memory.device, memory.control.busy, struct.pack("<I", 99))
    barrier(world, [0])
    assert not world.machine.run()
    assert world.report_words(0)[memory.report_layout.busy] == 1
    assert world.control_word(0, memory.control.busy) == 99
    assert world.control_word(0, memory.control.epoch) == world.setting.first_epoch
