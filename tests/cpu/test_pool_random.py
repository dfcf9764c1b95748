"""The pool under 10^5 random steps, against an oracle that knows what happens before what.

The oracle is ``tests/streams.py``. The last tests break the pool in many ways, and
want each found.
"""

from __future__ import annotations

import itertools
import queue
import random
import threading

import pytest

from deepep_cupy.errors import StateError
from deepep_cupy.memory import pool as pool_module
from deepep_cupy.memory import stream_clock
from deepep_cupy.memory.free_list import FreeList, Stamp
from deepep_cupy.memory.pool import Pool, PoolExhaustedError
from deepep_cupy.memory.size_cache import SizeCache
from deepep_cupy.protocol.control_block import ALIGNMENT
from streams import LEGACY, RaceError, StreamModel, merge

CELLS = 512
START = 8 * ALIGNMENT


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch):
    """The pool collects garbage before it gives up, which takes longer than all the rest."""
    monkeypatch.setattr(pool_module.gc, "collect", lambda: 0)


def model(rng=None):
    return StreamModel(rng or random.Random(0), START, CELLS, ALIGNMENT)


class Program:
    """A user who does everything, at random, and follows the rules."""

    def __init__(self, seed, pool_class=Pool):
        self.rng = random.Random(seed)
        self.world = model(self.rng)
        self.pool = pool_class(CELLS * ALIGNMENT, self.world, start=START)
        self.arrays = []
        self.captured = []
        self.seen = []
        self.num_captures = 0
        self.serial = 0
        self.streams = ["a", "b", "c", LEGACY]
        self.counts = dict.fromkeys(("alloc", "exhausted", "captured", "quarantined", "shrunk"), 0)
        self.mail = queue.SimpleQueue()
        self.threads = [threading.Thread(target=self._reap, daemon=True) for _ in range(2)]
        for thread in self.threads:
            thread.start()

    def _reap(self):
        while (owner := self.mail.get()) is not None:
            del owner

    def finish(self):
        for _ in self.threads:
            self.mail.put(None)
        for thread in self.threads:
            thread.join()

    def run(self, steps):
        actions = (
            (self.alloc, 40),
            (self.drop, 34),
            (self.side, 9),
            (self.shrinking, 5),
            (self.observe, 6),
            (self.quarantine, 1),
            (self.capture, 2),
            (self.transient, 2),
            (self.steady, 4),
            (self.rare, 0.3),
        )
        names, weights = zip(*actions, strict=True)
        try:
            for step, action in enumerate(self.rng.choices(names, weights, k=steps)):
                action()
                if step % 499 == 0:
                    check(self.pool)
        finally:
            self.finish()

    # -- actions

    def pick_stream(self):
        usable = [s for s in self.streams if not (s == LEGACY and self.world.captures)]
        return self.rng.choice(usable)

    def size(self):
        cells_wanted = self.rng.choice((1, 1, 2, 3, 5, 8, 20, 60))
        return self.rng.randint((cells_wanted - 1) * ALIGNMENT, cells_wanted * ALIGNMENT)

    def get(self, nbytes, stream):
        self.world.sealed = captured = stream in self.world.captures
        try:
            block = self.pool.alloc(nbytes, stream, "random")
        except PoolExhaustedError:
            self.counts["exhausted"] += 1
            self.world.sealed = False
            self.relieve()
            return None
        finally:
            self.world.sealed = False
        assert block.nbytes >= max(nbytes, 1)
        self.counts["captured" if captured else "alloc"] += 1
        return block

    def alloc(self):
        stream = self.pick_stream()
        block = self.get(self.size(), stream)
        if block is not None:
            for _ in range(self.rng.randint(1, 2)):
                self.world.touch(stream, block)
            self.arrays.append((block, self.pool.own(block)))

    def drop(self):
        if self.arrays:
            at = self.rng.randrange(len(self.arrays))
            self.arrays[at], self.arrays[-1] = self.arrays[-1], self.arrays[at]
            _, owner = self.arrays.pop()
            if self.rng.random() < 0.3:
                self.mail.put(owner)  # the last reference dies in another thread
            del owner

    def relieve(self):
        for _ in range(len(self.arrays) // 2):
            self.drop()
        if self.rng.random() < 0.3:
            self.end_captures()
            self.world.synchronize()
            self.arrays = [each for each in self.arrays if not each[0].capture]
            self.pool.release_captured()
            self.world.graph_of.clear()
        if self.rng.random() < 0.3:
            self.release()

    def side(self):
        """A second stream works on an array; sometimes it is being captured."""
        if not self.arrays:
            return
        block, _ = self.rng.choice(self.arrays)
        stream = self.pick_stream()
        if block.quarantined or block.capture or block.stream in self.world.captures:
            return
        if block.stream == LEGACY and self.world.captures:
            return
        if stream in self.world.captures:
            self.world.synchronize()
            self.pool.record_stream(block, stream)
            for cell in self.world.cells(block):
                self.world.graph_of[cell] = (self.world.captures[stream], stream)
            return
        self.world.follow(stream, block.stream)
        self.pool.record_stream(block, stream)
        self.world.touch(stream, block)

    def shrinking(self):
        stream = self.pick_stream()
        if stream in self.world.captures:
            return
        block = self.get(self.rng.randint(30, 120) * ALIGNMENT, stream)
        if block is None:
            return
        kept = self.rng.randint(0, 30) * ALIGNMENT
        self.world.touch(stream, block, max(kept, ALIGNMENT))
        if self.rng.random() < 0.3:
            self.observe()
        self.pool.shrink(block, kept)
        self.counts["shrunk"] += 1
        self.world.touch(stream, block)
        self.arrays.append((block, self.pool.own(block)))

    def steady(self):
        """The same sizes on the same stream, again and again, some of them shrunk."""
        stream = self.pick_stream()
        sizes = [self.rng.choice((1, 2, 9, 60, 60)) * ALIGNMENT for _ in range(2)]
        for _ in range(self.rng.randint(2, 5)):
            held = []
            for nbytes in sizes:
                block = self.get(nbytes, stream)
                if block is None:
                    return
                captured = stream in self.world.captures
                kept = nbytes if captured or self.rng.random() < 0.5 else nbytes // 3
                self.world.touch(stream, block, max(kept, ALIGNMENT) // ALIGNMENT * ALIGNMENT)
                if kept < nbytes:
                    self.pool.shrink(block, kept)
                held.append((block, self.pool.own(block)))
            if self.rng.random() < 0.3:
                self.arrays += held
                self.side()
            elif self.rng.random() < 0.1:
                self.alloc()
            del held, block

    def observe(self):
        """The host learns, now or later, that what a stream had been given is over."""
        if self.seen and self.rng.random() < 0.5:
            checkpoint, stream, clock = self.seen.pop(self.rng.randrange(len(self.seen)))
            merge(self.world.host, clock)
            self.pool.completed(checkpoint, stream)
        elif len(self.seen) < 10:
            stream = self.rng.choice(self.streams)
            clock = dict(self.world.clocks.get(stream, {}))
            self.seen.append((self.pool.checkpoint(), stream, clock))

    def quarantine(self):
        if not self.arrays:
            return
        block = self.rng.choice(self.arrays)[0]
        if block.capture or block.stream in self.world.captures:
            return
        if self.rng.random() < 0.5:  # its array is already dead, perhaps the block reused
            self.arrays = [each for each in self.arrays if each[0] is not block]
            if self.rng.random() < 0.5:
                self.alloc()
        self.pool.quarantine(block)
        self.counts["quarantined"] += 1
        for cell in self.world.cells(block):
            self.world.withheld.add(cell)
        self.arrays = [each for each in self.arrays if not each[0].quarantined]

    def release(self):
        self.pool.release_quarantine()
        self.world.withheld.clear()

    def capture(self):
        if self.world.captures:
            self.end_captures()
        else:
            self.num_captures += 1
            for stream in self.rng.sample(("a", "b", "c"), self.rng.randint(1, 2)):
                self.world.captures[stream] = self.num_captures

    def end_captures(self):
        self.world.captures.clear()

    def transient(self):
        """A stream that is used for a while and never again."""
        self.serial += 1
        self.streams[4:] = [f"t{self.serial}"]

    def rare(self):
        self.end_captures()
        if self.rng.random() < 0.5:
            self.release()
        checkpoint = self.pool.checkpoint()
        self.world.synchronize()
        self.pool.completed(checkpoint)

    def end(self):
        """Give everything back."""
        self.end_captures()
        self.world.synchronize()
        self.arrays.clear()
        self.pool.release_quarantine()
        self.pool.release_captured()


def check(pool):
    """No byte lost, none in two places, segments molten where they can be."""
    blocks = pool.live()
    with pool._guard:
        homes = [("free", pool._free), *(("graph", graph) for graph in pool._graphs.values())]
        ranges = [(block.offset, block.end) for block in pool._live.values()]
        ranges += [(segment.offset, segment.end) for _, segment in pool._held]
        for _, home in homes:
            segments = list(home)
            assert home._offsets == [segment.offset for segment in segments]
            assert home.nbytes == sum(segment.nbytes for segment in segments)
            ranges += [(segment.offset, segment.end) for segment in segments]
        assert pool._live_bytes == sum(block.nbytes for block in pool._live.values())
    ranges.sort()
    assert ranges[0][0] == START
    assert ranges[-1][1] == START + CELLS * ALIGNMENT
    for (_, end), (offset, _) in itertools.pairwise(ranges):
        assert end == offset, f"{ranges}"
    assert all(low % ALIGNMENT == 0 and low < high for low, high in ranges)
    assert [block.offset for block in blocks] == sorted(block.offset for block in blocks)


@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_no_race_and_no_byte_lost_in_random_programs(seed):
    program = Program(seed)
    program.run(25_000)
    counts = program.counts
    assert counts["alloc"] > 5000, counts
    assert min(counts.values()) > 50, f"the program did not reach everything: {counts}"
    assert program.pool.statistics().num_waits > 100
    assert program.pool.statistics().num_again > 1000
    program.end()
    check(program.pool)
    numbers = program.pool.statistics()
    assert numbers.live == numbers.captured == numbers.quarantined == 0
    assert numbers.free == numbers.largest_free == CELLS * ALIGNMENT
    # Nothing grew: neither what is known about the streams that came and went, nor the free list.
    clock = program.pool._clock
    for facts in (clock._stamps, clock._over, clock._waited, *clock._waited.values()):
        assert len(facts) <= stream_clock.MAX_FACTS
    assert numbers.num_segments <= 2 * CELLS // 3
    assert not program.pool.given_back
    assert not program.pool._live
    assert not program.pool._graphs
    assert not program.pool._held


def test_streams_that_come_and_go_leave_nothing_behind():
    """One stream a call, never seen again, 20 of them busy: stamps and segments stay bounded."""
    world = model()

    def query(event):
        over = max(event.clock.values()) < world.serial - 20
        merge(world.host, event.clock if over else {})
        return over

    world.query = query
    pool = Pool(CELLS * ALIGNMENT, world, start=START)
    most = 0
    for serial in range(1000):
        block = pool.alloc(ALIGNMENT, f"s{serial}")
        world.touch(f"s{serial}", block)
        pool.free(block)
        most = max(most, len(pool._free))
    stamps = {id(stamp) for segment in pool._free for stamp in segment.pending.values()}
    assert len(stamps) <= most <= 3 * stream_clock.MAX_FACTS


# ------------------------------------------------------------------------------------------------
# The oracle has teeth: each way to break the pool is found.


def forgets_to_wait(patch):
    patch.setattr(stream_clock.StreamClock, "wait_for", lambda self, stream, stamps: None)


def thinks_every_wait_is_known(patch):
    patch.setattr(stream_clock.StreamClock, "needs_wait", lambda self, stream: lambda stamp: False)


def overlooks_record_stream(patch):
    def record_stream(self, block, stream):
        return None

    patch.setattr(Pool, "record_stream", record_stream)


def melts_unlike_neighbours(patch):
    """Coalescing keeps the stamps of one neighbour only."""
    right = FreeList.insert

    def insert(self, segment):
        before = [each for each in self if each.end == segment.offset]
        if before:
            segment.pending = dict(before[0].pending)
        right(self, segment)

    patch.setattr(FreeList, "insert", insert)


def believes_old_events(patch):
    """An event counts for memory that was given back after it was recorded."""
    right = stream_clock.StreamClock._remember_wait

    def remember(self, stream, stamp):
        stamp.covers += 3
        right(self, stream, stamp)

    patch.setattr(stream_clock.StreamClock, "_remember_wait", remember)


def hands_dirty_memory_to_graphs(patch):
    patch.setattr(stream_clock.StreamClock, "is_clean", lambda self, segment: True)


def gives_graph_memory_to_all(patch):
    patch.setattr(Pool, "_home", lambda self, capture: self._free)


def forgets_the_tail(patch):
    segment, right = pool_module.Segment, Pool._cut

    def cut(self, *args):
        pool_module.Segment = lambda offset, end, pending: segment(offset, end, {})
        right(self, *args)
        pool_module.Segment = segment

    patch.setattr(Pool, "_cut", cut)


def caches_for_another_stream(patch):
    right = SizeCache.put

    def put(self, block, tick):
        stream, block.stream = block.stream, {"a": "b", "b": "a"}.get(block.stream, block.stream)
        right(self, block, tick)
        block.stream = stream

    patch.setattr(SizeCache, "put", put)


def evicts_as_if_never_used(patch):
    right = SizeCache.evict

    def evict(self, low, high):
        blocks, tailed = right(self, low, high)
        for block in blocks:
            block.died = 0
        return blocks, tailed

    patch.setattr(SizeCache, "evict", evict)


def caches_under_a_wrong_size(patch):
    right = SizeCache.put

    def put(self, block, tick):
        room, block.room = block.room, 2 * block.room
        right(self, block, tick)
        block.room = room

    patch.setattr(SizeCache, "put", put)


def caches_for_all_streams(patch):
    def best_fit(self, nbytes, stream):
        for (room, _), blocks in self.cached.items():
            if blocks and room >= nbytes:
                return blocks, room
        return None, nbytes

    patch.setattr(SizeCache, "best_fit", best_fit)


def fits_where_it_has_no_room(patch):
    right = SizeCache.best_fit
    patch.setattr(
        SizeCache, "best_fit", lambda self, nbytes, stream: right(self, nbytes // 2, stream)
    )


def forgets_the_room_it_has(patch):
    right = SizeCache.best_fit
    patch.setattr(SizeCache, "best_fit", lambda self, *args: (right(self, *args)[0], args[0]))


def caches_in_graphs(patch):
    right = Pool._place

    def place(self, wanted, stream, capture, blocks):
        return right(self, wanted, stream, 0, blocks)

    patch.setattr(Pool, "_place", place)


def caches_with_its_other_users(patch):
    right = Pool._retire

    def retire(self, block):
        if block.capture or block.quarantined:
            right(self, block)
        else:
            block.retired = True
            del self._live[block.offset]
            self._live_bytes -= block.nbytes
            self._cache.put(block, self._clock.tick)

    patch.setattr(Pool, "_retire", retire)


def caches_in_quarantine(patch):
    right = Pool.quarantine

    def quarantine(self, block):
        evict, Pool._evict = Pool._evict, lambda self: None
        right(self, block)
        Pool._evict = evict

    patch.setattr(Pool, "quarantine", quarantine)


def records_under_capture(patch):
    right = Pool._drain

    def drain(self, *, may_record):
        right(self, may_record=True)

    patch.setattr(Pool, "_drain", drain)


def ignores_quarantine(patch):
    patch.setattr(Pool, "quarantine", lambda self, block: None)


def completes_too_much(patch):
    right = stream_clock.StreamClock.completed

    def completed(self, checkpoint, stream):
        right(self, checkpoint, None)

    patch.setattr(stream_clock.StreamClock, "completed", completed)


BREAKAGES = (
    forgets_to_wait,
    thinks_every_wait_is_known,
    overlooks_record_stream,
    melts_unlike_neighbours,
    believes_old_events,
    hands_dirty_memory_to_graphs,
    gives_graph_memory_to_all,
    forgets_the_tail,
    caches_for_another_stream,
    evicts_as_if_never_used,
    caches_under_a_wrong_size,
    caches_for_all_streams,
    fits_where_it_has_no_room,
    forgets_the_room_it_has,
    caches_in_graphs,
    caches_with_its_other_users,
    caches_in_quarantine,
    records_under_capture,
    ignores_quarantine,
    completes_too_much,
)


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda each: each.__name__)
def test_the_oracle_finds_a_broken_pool(breakage, monkeypatch):
    breakage(monkeypatch)
    # RaceError is the first; check() finds lost bytes; a pool that is broken may stumble itself.
    with pytest.raises((AssertionError, KeyError)):
        Program(seed=0).run(30_000)


def test_the_model_itself_refuses_what_cuda_refuses():
    world = model()
    world.captures["a"] = 1
    with pytest.raises(RaceError):
        world.record("a")
    with pytest.raises(StateError):
        Pool(CELLS * ALIGNMENT, world, start=START).alloc(1, LEGACY)
    assert Stamp("a", 1).covers == 1
