"""What the pool promises, one sentence at a time; the random programs are in test_pool_random."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepep_cupy.errors import ContractError, StateError
from deepep_cupy.memory.pool import Pool, PoolExhaustedError
from deepep_cupy.memory.stream_clock import JOINED
from deepep_cupy.protocol.control_block import ALIGNMENT
from deepep_cupy.protocol.headers import OFFSET_UNIT, RefusalCode

MIB = 1 << 20


class Events:
    """Streams that do nothing, and remember what was asked of them."""

    def __init__(self):
        self.calls = []
        self.captures = {}
        self.over = False

    def record(self, stream):
        self.calls.append(("record", stream))
        return f"event {len(self.calls)}"

    def query(self, event):
        self.calls.append(("query", event))
        return self.over

    def wait(self, stream, event):
        self.calls.append(("wait", stream))

    def capture_id(self, stream):
        return self.captures.get(stream, 0)


@pytest.fixture
def events():
    return Events()


@pytest.fixture
def pool(events):
    return Pool(64 * MIB, events, who="rank 1")


def test_blocks_are_aligned_disjoint_and_inside(events):
    pool = Pool(MIB + 100, events, start=4096)
    blocks = [pool.alloc(nbytes, "s") for nbytes in (0, 1, 511, 512, 513, 100_000)]
    assert [block.nbytes for block in blocks] == [512, 512, 512, 512, 1024, 100_352]
    assert ALIGNMENT % OFFSET_UNIT == 0
    spans = sorted((block.offset, block.end) for block in blocks)
    assert spans[0][0] >= 4096
    assert spans[-1][1] <= 4096 + MIB
    assert all(end <= offset for (_, end), (offset, _) in itertools.pairwise(spans))
    assert all(block.offset % ALIGNMENT == 0 for block in blocks)


@pytest.mark.parametrize(("nbytes", "start"), [(0, 0), (511, 0), (4096, 100), (4096, -512)])
def test_a_pool_of_nothing_is_refused(events, nbytes, start):
    with pytest.raises(ContractError, match="at least 512 bytes"):
        Pool(nbytes, events, start=start)


def test_a_negative_size_is_refused(pool):
    with pytest.raises(ContractError, match="negative"):
        pool.alloc(-1, "s")


def test_the_same_stream_gets_a_block_back_without_any_call_to_cuda(pool, events):
    for _ in range(10):
        block = pool.alloc(60 * MIB, "s")
        pool.free(block)
    assert events.calls == []


def test_another_stream_waits_once_for_an_event_of_the_first(pool, events):
    pool.free(pool.alloc(60 * MIB, "a"))
    block = pool.alloc(60 * MIB, "b")
    assert events.calls == [("record", "a"), ("wait", "b")]
    pool.free(block)
    pool.alloc(60 * MIB, "b")
    assert len(events.calls) == 2


def test_a_stream_that_has_waited_does_not_wait_again_for_the_same_past(pool, events):
    first, second = pool.alloc(20 * MIB, "a"), pool.alloc(20 * MIB, "a")
    pool.free(first)
    pool.free(second)
    pool.alloc(20 * MIB, "b")  # virgin memory
    assert events.calls == []
    pool.alloc(20 * MIB, "b")
    assert events.calls == [("record", "a"), ("wait", "b")]
    pool.alloc(20 * MIB, "b")  # given back before that event was recorded
    assert events.calls == [("record", "a"), ("wait", "b")]


def test_memory_that_needs_no_wait_is_preferred(pool, events):
    blocks = [pool.alloc(16 * MIB, stream) for stream in "abc"]
    for block in blocks:
        pool.free(block)
    assert pool.alloc(16 * MIB, "c").offset == blocks[2].offset
    assert pool.alloc(16 * MIB, "b").offset == blocks[1].offset
    assert events.calls == []


def test_cached_memory_is_preferred_to_a_wait(pool, events):
    mine, other = pool.alloc(32 * MIB, "a"), pool.alloc(32 * MIB, "b")
    pool.free(other)
    pool.live()
    pool.free(mine)
    assert mine.offset <= pool.alloc(512, "a").offset < mine.end
    assert events.calls == []


def test_calls_of_two_kinds_in_turn_need_no_search(pool, events):
    for _ in range(20):
        for sizes in ((512, 4096, 40 * MIB), (512, 8192, 25 * MIB)):
            for block in pool.alloc_all([(nbytes, "") for nbytes in sizes], "s"):
                pool.free(block)
    numbers = pool.statistics()
    assert numbers.num_allocs - numbers.num_again <= 6
    assert numbers.free == numbers.largest_free == 64 * MIB
    # Both at once still find room.
    blocks = [pool.alloc(nbytes * MIB, "s") for nbytes in (25, 38)]
    assert blocks[0].end == blocks[1].offset
    assert events.calls == []


def test_what_a_side_stream_read_does_not_slow_its_neighbours(pool, events):
    kept = [pool.alloc(16 * MIB, "main") for _ in range(3)]
    pool.record_stream(kept[1], "side")
    for block in kept:
        pool.free(block)
    assert {pool.alloc(16 * MIB, "main").offset for _ in range(2)}.isdisjoint({kept[1].offset})
    assert ("wait", "main") not in events.calls
    pool.alloc(16 * MIB, "main")  # never used before
    assert ("wait", "main") not in events.calls
    pool.alloc(16 * MIB, "main")  # now there is nothing else
    assert events.calls == [("record", "side"), ("wait", "main")]


def test_the_event_of_a_side_stream_is_recorded_at_the_next_allocation(pool, events):
    block = pool.alloc(MIB, "main")
    pool.record_stream(block, "side")
    pool.free(block)
    pool.alloc(MIB, "other")
    assert ("record", "side") in events.calls
    assert ("record", "main") not in events.calls


def test_a_cheaper_wait_is_preferred(pool, events):
    blocks = [pool.alloc(16 * MIB, stream) for stream in "abcd"]
    pool.record_stream(blocks[0], "x")
    for block in (blocks[2], blocks[0], blocks[1], blocks[3]):
        pool.free(block)
        pool.checkpoint()
    assert pool.alloc(16 * MIB, "new").offset == blocks[2].offset


# ------------------------------------------------------------------------------------ finalizers


def test_the_last_array_gives_the_block_back(pool):
    owner = pool.own(pool.alloc(60 * MIB, "s"))
    views = [owner, owner]
    del owner
    with pytest.raises(PoolExhaustedError):
        pool.alloc(60 * MIB, "s")
    views.clear()
    assert pool.alloc(60 * MIB, "s").nbytes == 60 * MIB


def test_arrays_keep_what_they_are_told_to_keep(pool):
    class Memory:
        pass

    memory = Memory()
    alive = weakref.ref(memory)
    owner = pool.own(pool.alloc(1, "s"), memory)
    del memory
    assert alive() is not None
    pool.close()
    del owner
    assert alive() is None


def test_a_finalizer_calls_nothing(pool, events):
    owner = pool.own(pool.alloc(MIB, "s"))
    pool.record_stream(owner.block, "side")
    with pool._guard:  # as in a collection of garbage that interrupts alloc()
        del owner
    assert events.calls == []
    assert pool.statistics().num_blocks == 0


def test_finalizers_in_many_threads(pool):
    owners = [pool.own(pool.alloc(512, "s")) for _ in range(4000)]
    slices = [owners[start::8] for start in range(8)]
    owners.clear()
    threads = [threading.Thread(target=each.clear) for each in slices]
    for thread in threads:
        thread.start()
    for _ in range(200):
        pool.free(pool.alloc(512, "s"))
    for thread in threads:
        thread.join()
    numbers = pool.statistics()
    assert numbers.live == numbers.num_blocks == 0
    assert numbers.free == numbers.largest_free == numbers.nbytes


def test_allocating_in_many_threads(pool):
    def work(stream):
        for _ in range(300):
            held = [pool.own(pool.alloc(1000, stream)) for _ in range(5)]
            assert len({owner.block.offset for owner in held}) == 5

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(work, ["s0", "s1", "s2", "s3"]))
    assert pool.statistics().live == 0


def test_a_finalizer_that_uses_the_pool_inside_the_pool_is_told_so(pool):
    with pool._guard, pytest.raises(StateError, match="finalizer"):
        pool.alloc(1, "s")
    assert pool.alloc(1, "s").nbytes == 512


def test_arrays_in_reference_cycles_are_found_before_giving_up(pool):
    gc.disable()
    try:
        cycle = {"owner": pool.own(pool.alloc(60 * MIB, "s"))}
        cycle["self"] = cycle
        del cycle
        assert pool.alloc(60 * MIB, "s").nbytes == 60 * MIB
    finally:
        gc.enable()


def test_giving_back_twice_is_harmless(pool):
    block = pool.alloc(MIB, "s")
    pool.free(block)
    pool.free(block)
    pool.alloc(MIB, "s")
    assert pool.statistics().live == MIB


# --------------------------------------------------------------------------------------- shrink


def test_shrink_gives_the_tail_back(pool):
    block = pool.alloc(60 * MIB, "s")
    pool.shrink(block, 10 * MIB + 1)
    assert block.nbytes == 10 * MIB + 512
    assert pool.statistics().live == block.nbytes
    other = pool.alloc(50 * MIB, "s")
    assert other.offset == block.end
    pool.shrink(block, 20 * MIB)  # larger than it is
    assert block.nbytes == 10 * MIB + 512
    pool.shrink(block, 0)
    assert block.nbytes == 512


def test_a_tail_that_another_stream_uses_waits_for_it(pool, events):
    block = pool.alloc(60 * MIB, "s")
    pool.record_stream(block, "other")
    pool.shrink(block, 10 * MIB)
    again = pool.alloc(50 * MIB, "s")
    assert again.offset == block.end
    assert [call for call in events.calls if call[0] == "wait"] == [("wait", "s")]


def test_shrink_of_what_is_gone_or_quarantined_is_refused(pool):
    gone, failed = pool.alloc(MIB, "s"), pool.alloc(MIB, "s")
    pool.free(gone)
    pool.live()
    pool.quarantine(failed)
    for block in (gone, failed):
        with pytest.raises(StateError, match="not in use"):
            pool.shrink(block, 512)


def test_worst_case_blocks_that_shrink_pack_without_gaps(events):
    """Results of 1/16 of the worst case each, with small blocks beside them, fill the pool."""
    worst, real = 160 * MIB, 10 * MIB
    pool = Pool(1024 * MIB, events)
    rows = []
    for _ in range((1024 * MIB * 7 // 8 - worst) // real + 1):
        pool.alloc(MIB, "s", "handle")
        rows.append(pool.alloc(worst, "s", "recv_x"))
        pool.shrink(rows[-1], real)
    assert len(rows) == 74
    assert all(a.end == b.offset for a, b in itertools.pairwise(rows))
    # ... and an exact block still fits behind them.
    assert pool.alloc(140 * MIB, "s").offset == rows[-1].end


def test_small_blocks_stay_out_of_the_way_of_large_ones(pool):
    small = [pool.alloc(4096, "s") for _ in range(100)]
    assert min(block.offset for block in small) >= pool.statistics().nbytes // 8 * 7
    assert pool.alloc(56 * MIB, "s").offset == 0
    # A full pool is a full pool: small ones go anywhere then, and large ones use their zone.
    pool = Pool(MIB, Events())
    assert len([pool.alloc(512, "s") for _ in range(2048)]) == 2048


# ---------------------------------------------------------------------------- capture, quarantine


def test_graph_memory_is_never_handed_to_eager_calls(pool, events):
    events.captures["g"] = 7
    owner = pool.own(pool.alloc(40 * MIB, "g", "in graph"))
    assert owner.block.capture == 7
    events.captures.clear()
    del owner
    with pytest.raises(PoolExhaustedError, match=r"40\.0 MiB owned by graphs"):
        pool.alloc(40 * MIB, "g")
    pool.release_captured()
    assert pool.alloc(40 * MIB, "g").nbytes == 40 * MIB


def test_a_capture_reuses_its_own_memory_on_the_same_stream_only(pool, events):
    events.captures.update(g=7, h=7)
    first = pool.alloc(40 * MIB, "g")
    pool.free(first)
    with pytest.raises(PoolExhaustedError):
        pool.alloc(40 * MIB, "h")
    assert pool.alloc(40 * MIB, "g").offset == first.offset
    events.captures["g"] = 8
    with pytest.raises(PoolExhaustedError, match="before the capture"):
        pool.alloc(40 * MIB, "g")
    assert events.calls == []


def test_joined_captures_reuse_memory_on_every_stream_and_nobody_else_does(pool, events):
    events.captures.update(g=JOINED, h=JOINED)
    first = pool.alloc(40 * MIB, "g")
    pool.free(first)
    again = pool.alloc(40 * MIB, "h")
    assert again.offset == first.offset
    pool.free(again)
    with pytest.raises(PoolExhaustedError):
        pool.alloc(40 * MIB, "s")
    events.captures["h"] = 8
    with pytest.raises(PoolExhaustedError):
        pool.alloc(40 * MIB, "h")
    assert events.calls == []


def test_a_capture_gets_only_memory_that_the_host_knows_to_be_idle(pool, events):
    pool.free(pool.alloc(60 * MIB, "s"))
    checkpoint = pool.checkpoint()
    events.captures["s"] = 1
    with pytest.raises(PoolExhaustedError):
        pool.alloc(60 * MIB, "s")
    pool.completed(checkpoint, "other stream")
    with pytest.raises(PoolExhaustedError):
        pool.alloc(60 * MIB, "s")
    pool.completed(checkpoint, "s")
    assert pool.alloc(60 * MIB, "s").capture == 1
    assert events.calls == []


def test_nothing_of_cuda_is_called_while_the_stream_is_captured(pool, events):
    block = pool.alloc(MIB, "main")
    pool.record_stream(block, "side")
    events.captures["g"] = 1
    pool.free(block)
    pool.alloc(MIB, "g")
    assert events.calls == []


def test_a_captured_stream_makes_a_block_the_graphs(pool, events):
    block = pool.alloc(40 * MIB, "main")
    events.captures["g"] = 3
    pool.record_stream(block, "g")
    pool.free(block)
    events.captures.clear()
    with pytest.raises(PoolExhaustedError):
        pool.alloc(40 * MIB, "main")
    pool.release_captured(4)
    with pytest.raises(PoolExhaustedError):
        pool.alloc(40 * MIB, "main")
    pool.release_captured(3)
    pool.alloc(40 * MIB, "main")


def test_a_released_capture_leaves_live_blocks_of_another_one_alone(pool, events):
    events.captures.update(g=3, h=5)
    mine, other = pool.alloc(MIB, "g"), pool.alloc(MIB, "h")
    pool.release_captured(3)
    assert (mine.capture, other.capture) == (0, 5)


def test_a_free_block_is_left_alone_while_its_stream_is_captured(pool, events):
    pool.free(pool.alloc(60 * MIB, "a"))
    events.captures["a"] = 1
    with pytest.raises(PoolExhaustedError):
        pool.alloc(60 * MIB, "b")
    assert events.calls == []
    events.captures.clear()
    pool.alloc(60 * MIB, "b")
    assert events.calls == [("record", "a"), ("wait", "b")]


def test_quarantine_outlives_the_arrays(pool):
    owner = pool.own(pool.alloc(40 * MIB, "s"))
    pool.quarantine(owner.block)
    del owner
    with pytest.raises(PoolExhaustedError, match=r"40\.0 MiB in quarantine"):
        pool.alloc(40 * MIB, "s")
    pool.release_quarantine()
    assert pool.alloc(40 * MIB, "s").offset == 0


def test_quarantine_ends_with_the_arrays_alive(pool):
    block = pool.alloc(40 * MIB, "s")
    pool.quarantine(block)
    pool.release_quarantine()
    assert pool.live() == (block,)
    pool.shrink(block, MIB)


def test_quarantine_of_a_block_that_was_given_back_and_partly_reused(pool):
    block = pool.alloc(40 * MIB, "s")
    pool.free(block)
    reused = pool.alloc(10 * MIB, "s")
    assert reused.offset == block.offset
    pool.quarantine(block)
    assert reused.quarantined
    assert pool.statistics().quarantined == 40 * MIB
    pool.free(reused)
    assert pool.statistics().quarantined == 40 * MIB
    pool.release_quarantine()
    assert pool.statistics().largest_free == pool.statistics().nbytes


# -------------------------------------------------------------------------------------- messages


def test_exhausted_says_who_holds_what_and_what_to_do(pool):
    pool.alloc(40 * MIB, "s", "recv_x of dispatch")
    pool.quarantine(pool.alloc(10 * MIB, "s", "staging"))
    for _ in range(9):
        pool.alloc(512, "s", "handle")
    with pytest.raises(PoolExhaustedError) as caught:
        pool.alloc(30 * MIB + 1, "s", "y")
    text = str(caught.value)
    for part in (
        "rank 1: alloc(): the pool of 64.0 MiB has no room for 30.0 MiB for y",
        "live: recv_x of dispatch 40.0 MiB, staging 10.0 MiB (quarantined), handle 512 bytes",
        "and 3 smaller blocks",
        "pool_bytes",
        "own=True",
        "drop results",
    ):
        assert part in text
    assert caught.value.refusal.code == RefusalCode.POOL_EXHAUSTED
    assert caught.value.refusal.value == 31


def test_a_closed_pool_hands_out_nothing(pool):
    owner = pool.own(pool.alloc(1, "s"))
    pool.close()
    with pytest.raises(StateError, match="closed"):
        pool.alloc(1, "s")
    del owner


def test_an_event_that_cannot_be_recorded_loses_no_memory(pool, events, monkeypatch):
    pool.free(pool.alloc(60 * MIB, "a"))
    monkeypatch.setattr(events, "record", lambda stream: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pool.alloc(60 * MIB, "b")
    assert pool.statistics().free == pool.statistics().nbytes


def test_blocks_of_one_operation_come_together_or_not_at_all(pool, events, monkeypatch):
    for small in (512, 2 * MIB):
        with pytest.raises(PoolExhaustedError, match=r"no room for 63\.0 MiB for rows"):
            pool.alloc_all(((small, "meta"), (MIB, "rows"), (63 * MIB, "rows")), "a")
        assert pool.statistics().free == pool.statistics().nbytes
    pool.free(pool.alloc(60 * MIB, "a"))
    monkeypatch.setattr(events, "record", lambda stream: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pool.alloc_all(((512, "meta"), (60 * MIB, "rows")), "b")
    assert pool.statistics().free == pool.statistics().nbytes


def test_block_at(pool):
    block = pool.alloc(1024, "s")
    assert pool.block_at(block.offset) is block
    assert pool.block_at(block.end - 1) is block
    assert pool.block_at(block.end) is None
    assert pool.block_at(0) is None
    assert repr(block).startswith("Block('', offset=")
