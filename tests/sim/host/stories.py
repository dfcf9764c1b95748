"""What ranks do under a seed, and what must come of it.

A story is a list of sections, the same for all ranks: calls that must go well, calls that must be
refused, calls during which a rank is late or interrupted. Streams, events, memory and the moments
at which results are read and dropped are each rank's own.
"""

from __future__ import annotations

import contextlib
import gc
import random
from dataclasses import dataclass, field

import numpy as np

from deepep_cupy import reference
from deepep_cupy.api.buffer import Buffer
from deepep_cupy.api.lifecycle import State
from deepep_cupy.errors import (
    ContractError,
    DeepEPCupyError,
    PeerAbortedError,
    PeerTimeoutError,
    StateError,
)
from host.baton import Lock
from host.gpus import Event, Stream
from host.machine import Array, Machine
from host.ranks import Group

__all__ = ["Story", "StoryError", "tell"]

HIDDEN, TOPK, MOST_TOKENS, TIMEOUT_S = 16, 2, 5, 1.0


class StoryError(AssertionError):
    """Something came out that must not."""


@dataclass
class Call:
    """One collective call of all ranks.

    Attributes:
        kind: ``"dispatch"``, ``"cached"``, ``"combine"`` or ``"barrier"``.
        number: In the story.
        buffer: Which Buffer.
        xs, idx, weights: Of all ranks, for dispatches.
        source: The dispatch whose handle is used.
        factor: Rows of a combine are those of its dispatch times this.
        limits: ``num_worst_tokens`` of each rank; 0: its host waits.
        wanted: What each rank must get; None: poison.
    """

    kind: str
    number: int
    buffer: int = 0
    xs: list = field(default_factory=list)
    idx: list = field(default_factory=list)
    weights: list = None
    source: Call = None
    factor: int = 1
    limits: list = None
    wanted: list = None


@dataclass
class Section:
    """Calls with one end.

    Attributes:
        end: ``"fine"``, ``"refused"``, ``"ahead"``, ``"late"``, ``"interrupted"`` or ``"graph"``.
        calls: In order.
        culprit: The rank that is late, is interrupted, or refuses.
        followers: Calls behind a refused one; of ``"ahead"`` the most, each rank makes some of
            them. Of late ranks: 1 where the clock of one jumps.
    """

    end: str
    calls: list
    culprit: int = 0
    followers: int = 0


class Story:
    """Drawn from a seed.

    Args:
        seed: Of everything.
        num_ranks: R; None: drawn.
        followers: The most calls queued behind a refused no-wait dispatch.
        elsewhere: Whether plain calls may be on another stream than their handle's.
    """

    def __init__(self, seed, *, num_ranks=None, followers=6, elsewhere=False):
        self.seed = seed
        self.random = random.Random(f"story {seed}")
        self.numbers = np.random.default_rng(seed)
        self.num_ranks = num_ranks or self.random.choice((1, 2, 2, 2, 3, 4))
        self.num_experts = 2 * self.num_ranks
        tight = 24 if self.num_ranks < 3 else 40  # KiB: memory is used again at once
        self.pool_bytes = self.random.choice((tight, tight, 192)) << 10
        self.num_buffers = self.random.choice((1, 1, 2))
        self.elsewhere = elsewhere
        self._most_followers, self._number = followers, 0
        self.sections = self._draw()

    def _draw(self):
        ends = ["fine"] * 4 + ["refused", "refused", "graph", "graph", "late", "interrupted"]
        if self.num_ranks == 1:
            ends = ["fine"] * 3 + ["refused", "graph", "graph"]
        chosen = [self.random.choice(ends) for _ in range(self.random.randint(1, 3))]
        return [self._section(end) for end in [*chosen, "fine"]]

    def _section(self, end):
        culprit = self.random.randrange(self.num_ranks)
        if end == "refused":
            return self._refused(culprit)
        if end == "graph":
            first = self.dispatch(limits=[self.num_ranks * MOST_TOKENS] * self.num_ranks)
            return Section(end, [first, self.combine(first)], culprit)
        calls, made = [], {}
        for _ in range(self.random.randint(2, 7)):
            buffer = self.random.randrange(self.num_buffers)
            kind = self.random.choice(("dispatch", "dispatch", "cached", "combine", "combine"))
            kind = "barrier" if self.random.random() < 0.1 else kind
            if kind == "barrier":
                calls.append(self._call("barrier", buffer=buffer))
            elif kind == "dispatch" or not made.get(buffer):
                calls.append(self.dispatch(buffer))
                made.setdefault(buffer, []).append(calls[-1])
            else:
                source = self.random.choice(made[buffer][-2:])
                calls.append((self.cached if kind == "cached" else self.combine)(source))
        return Section(end, calls, culprit, self.random.randrange(2))

    def _refused(self, culprit):
        how = self.random.choice(("expert", "argument", "room"))
        if how == "room":
            call = self.dispatch(limits=[self.num_ranks * MOST_TOKENS] * self.num_ranks)
            total = sum(result.handle.num_recv_tokens for result in call.wanted)
            if total:
                culprit = max(
                    range(self.num_ranks), key=lambda r: call.wanted[r].handle.num_recv_tokens
                )
            real = int(call.wanted[culprit].handle.recv_rows_per_rank.sum())
            if real < 2:
                return self._section("fine")
            call.limits[culprit] = real - 1
            number = self.random.randint(0, self._most_followers)
            call.wanted = None
            ahead = number and self.random.random() < 0.5
            return Section("ahead" if ahead else "refused", [call], culprit, number)
        call = self.dispatch(limits=[0] * self.num_ranks)
        call.wanted = None
        call.idx[culprit] = call.idx[culprit].copy()
        if how == "expert" and len(call.idx[culprit]):
            call.idx[culprit][0, 0] = self.num_experts
        else:
            call.idx[culprit] = np.zeros((len(call.xs[culprit]) + 1, TOPK), np.int64)
        return Section("refused", [call], culprit)

    # ---------------------------------------------------------------------------------- calls

    def _call(self, kind, **given):
        self._number += 1
        return Call(kind, self._number, **given)

    def _rows(self):
        counts = [self.random.randint(0, MOST_TOKENS) for _ in range(self.num_ranks)]
        return [self.numbers.random((count, HIDDEN)).astype(np.float32) for count in counts]

    def dispatch(self, buffer=0, limits=None):
        xs, numbers, experts = self._rows(), self.numbers, self.num_experts
        idx = []
        for x in xs:
            chosen = [numbers.permutation(experts)[:TOPK] for _ in range(len(x))]
            one = np.array(chosen, np.int64).reshape(len(x), TOPK)
            one[numbers.random(one.shape) < 0.2] = -1
            idx.append(one)
        weights = None
        if self.random.random() < 0.5:
            weights = [numbers.random((len(x), TOPK)).astype(np.float32) for x in xs]
        if limits is None:
            most = self.num_ranks * MOST_TOKENS
            limits = [self.random.choice((0, 0, most)) for _ in xs]
        wanted = reference.dispatch(xs, topk_idx=idx, topk_weights=weights, num_experts=experts)
        return self._call(
            "dispatch", buffer=buffer, xs=xs, idx=idx, weights=weights, limits=limits, wanted=wanted
        )

    def cached(self, source):
        counts = [len(x) for x in source.xs]
        xs = [self.numbers.random((count, HIDDEN)).astype(np.float32) for count in counts]
        handles = [result.handle for result in source.wanted]
        wanted = reference.dispatch(xs, handles=handles)
        return self._call("cached", buffer=source.buffer, xs=xs, source=source, wanted=wanted)

    def combine(self, source):
        factor = self.random.choice((1, 1, 2))
        handles = [result.handle for result in source.wanted]
        ys = [result.recv_x * np.float32(factor) for result in source.wanted]
        wanted = reference.combine(ys, handles)
        return self._call(
            "combine", buffer=source.buffer, source=source, factor=factor, wanted=wanted
        )


@dataclass
class Seen:
    """What a reader found in one result."""

    rank: int
    section: int
    what: str
    wanted: object
    got: object


class Rank:
    """One rank's program."""

    def __init__(self, machine, story, rank):
        self.machine, self.story, self.rank = machine, story, rank
        self.random = random.Random(f"rank {rank} of {story.seed}")
        self.seen, self.errors, self.live, self.homes = [], {}, {}, {}
        self.graphs, self.buffers = [], []
        self.world, self.section = Group(machine, rank, "program"), 0
        self.failing = False  # results of an operation that failed may be anything

    def main(self):
        machine, story = self.machine, self.story
        gpu = machine.gpu
        self.main_stream = gpu.null if self.random.random() < 0.5 else Stream(gpu)
        self.streams = [self.main_stream, Stream(gpu, non_blocking=True)]
        machine.stack()[-1] = self.main_stream
        for i in range(story.num_buffers):
            made = Buffer(
                Group(machine, self.rank, f"buffer {i}"),
                num_max_tokens_per_rank=MOST_TOKENS,
                hidden=HIDDEN,
                num_topk=TOPK,
                num_experts=story.num_experts,
                dtype="float32",
                pool_bytes=story.pool_bytes,
                engine="cuda",
                timeout_s=TIMEOUT_S,
            )
            self.buffers.append(made)
        for self.section, section in enumerate(story.sections):
            getattr(self, f"_{section.end}")(section)
            if self.random.random() < 0.5:
                self.live.clear()
        self._end()

    def _end(self):
        self.live.clear()
        gc.collect()  # errors keep the frames they came through
        for _ in range(2):  # what reap() takes back is over one round later
            for stream in self._all_streams():
                stream.synchronize()
            for buffer in self.buffers:
                buffer._engine._runtime.queue.retention.reap()
        for buffer in self.buffers:
            buffer.check()
            buffer.empty((1,), np.uint8)
            queue = buffer._engine._runtime.queue
            queue.retention.reap()
            numbers = buffer._engine._runtime.pool.statistics()
            live = [str(block) for block in buffer._engine._runtime.pool.live()]
            if numbers.live > numbers.captured or numbers.quarantined:
                raise StoryError(f"rank {self.rank}: the pool still holds {live}")
            if queue.retention.kept or queue.retention.returned:
                raise StoryError(f"rank {self.rank}: something is still kept")
        for buffer in self.buffers:
            buffer.close()

    def _all_streams(self):
        return [*self.streams, *(buffer.get_comm_stream() for buffer in self.buffers)]

    # ------------------------------------------------------------------------------- sections

    def _fine(self, section):
        for i, call in enumerate(section.calls):
            self._noise()
            self.do(call)
            needed = {id(later.source) for later in section.calls[i + 1 :]}
            for other in section.calls[: i + 1]:
                if id(other) not in needed and self.random.random() < 0.6:
                    self.live.pop(other.number, None)

    def _refused(self, section):
        call = section.calls[0]
        buffer = self.buffers[call.buffer]
        raised, done = self._followed(call, section.followers)
        raised += self._settle(buffer)
        if not raised:
            raise StoryError(f"rank {self.rank}: a refusal was never raised")
        if raised > 1 and not section.followers:
            raise StoryError(f"rank {self.rank}: a refusal was raised {raised} times")
        self.errors[self.section] = raised
        self.live.pop(call.number, None)
        del done
        self.world.allgather(None)

    def _followed(self, call, followers):
        """A call that is refused, and more behind it: how often that was raised, its result."""
        buffer, raised = self.buffers[call.buffer], 0
        try:
            self.do(call)
        except ContractError as error:
            raised += 1
            self.machine.baton.note(f"rank {self.rank}: {error}")
        done = self.live.get(call.number)
        for _ in range(followers):
            if self.random.random() < 0.3:
                self.main_stream.synchronize()
            try:
                if done is not None:
                    buffer.combine(Array(done.recv_x.shape, np.float32), done.handle)
                else:
                    buffer.barrier()
            except ContractError:
                raised += 1
        return raised, done

    def _ahead(self, section):
        """Behind a refused call each rank makes another number of calls; then all reset."""
        self._calm()
        call, baton = section.calls[0], self.machine.baton
        self.failing = True
        done = None
        with contextlib.suppress(PeerAbortedError, StateError):
            done = self._followed(call, self.random.randint(0, section.followers))[1]
        self.live.clear()
        del done
        begun = baton.now
        for buffer in self.buffers:
            buffer.reset()
        if baton.now - begun > TIMEOUT_S / 2:
            raise StoryError(f"rank {self.rank}: reset() took {baton.now - begun:.2f} s")
        self.failing = False

    def _settle(self, buffer):
        """What the page of the api says to do after a refusal."""
        for stream in self._all_streams():
            stream.synchronize()
        for raised in range(10):
            try:
                buffer.check()
            except ContractError:
                continue
            return raised
        raise StoryError(f"rank {self.rank}: check() raises for ever")

    def _late(self, section):
        baton = self.machine.baton
        self._calm()
        if section.followers:
            self.machine.hasty.add(section.culprit)
        elif self.rank == section.culprit:
            until = baton.now + 3 * TIMEOUT_S
            baton.wait_until(lambda: baton.now >= until)
        self._fail(section)

    def _interrupted(self, section):
        self._calm()
        if self.rank == section.culprit:
            self.machine.interrupt[self.machine.baton.me.name] = KeyboardInterrupt()
        self._fail(section)

    def _calm(self):
        """Nothing of the sections before is under way on any rank."""
        for stream in self._all_streams():
            stream.synchronize()
        self.world.allgather(None)

    def _fail(self, section):
        self.failing = True
        try:
            for call in section.calls:
                self.do(call)
        except (DeepEPCupyError, KeyboardInterrupt) as error:
            alone = len(self.buffers) == 1  # another Buffer's ranks know nothing of this one's
            untold = isinstance(error, PeerTimeoutError) or "it is in reset()" in str(error)
            if section.end == "interrupted" and alone and untold:
                raise StoryError("nobody was told of an interrupt") from error
            self.machine.baton.note(f"rank {self.rank}: {type(error).__name__}: {error}")
        self.machine.interrupt.pop(self.machine.baton.me.name, None)
        self.live.clear()
        self.machine.hasty.clear()
        for _ in range(self.random.randrange(3)):
            with contextlib.suppress(DeepEPCupyError):  # a poisoned Buffer hands out nothing
                self._own_kernel(self.random.choice(self.buffers), self.random.choice(self.streams))
        for buffer in self.buffers:
            for _ in range(12):
                try:
                    buffer.reset()
                    break
                except (PeerTimeoutError, PeerAbortedError, KeyboardInterrupt):
                    continue
            else:
                raise StoryError(f"rank {self.rank}: reset() never passes")
        self.failing = False

    def _graph(self, section):
        first, second = section.calls
        buffer, gpu = self.buffers[first.buffer], self.machine.gpu
        stream = Stream(gpu, non_blocking=True)
        xs = self.up(self.main_stream, first.xs[self.rank])
        idx = self.up(self.main_stream, first.idx[self.rank])
        weights = None
        if first.weights is not None:
            weights = self.up(self.main_stream, first.weights[self.rank])
        self.main_stream.synchronize()
        asked = self.random.random() < 0.5
        with stream:
            stream.begin_capture()
            got = buffer.dispatch(
                xs,
                topk_idx=idx,
                topk_weights=weights,
                num_worst_tokens=first.limits[self.rank],
                async_finish=asked,
            )
            if asked:
                got.event.current_stream_wait()
            y = got.recv_x
            factor, rows = second.factor, y.view(np.ndarray)
            if factor != 1:
                y = Array(got.recv_x.shape, np.float32)
                target = y.view(np.ndarray)
                ranges = [(got.recv_x.data.ptr, y.nbytes, False), (y.data.ptr, y.nbytes, True)]
                self.machine.kernel(
                    stream, "factor", ranges, lambda: np.multiply(rows, factor, out=target)
                )
            back = buffer.combine(y, got.handle)
            if section.culprit == self.rank and self.random.random() < 0.5:
                self._refused_in_graph(buffer, got)
            graph = stream.end_capture()
        del xs, idx, weights, y
        eager = self.random.random() < 0.7
        for turn in range(2):
            for values in (first.xs[self.rank], first.idx[self.rank]):
                self.up(self.main_stream, np.zeros_like(values))
            self._replay(graph, stream)
            self._read(stream, first, got, f"replay {turn}")
            self._read_combined(stream, second, back, f"replay {turn}")
            if eager and turn == 0 and section.followers == 0:
                self._noise()
            self._join(stream)
        self.graphs.append((graph, got, back))

    def _refused_in_graph(self, buffer, got):
        """Stays here: no other rank may hear of it."""
        try:
            buffer.combine(Array((1, 1, 1), np.float32), got.handle)
        except ContractError:
            return
        raise StoryError("rows of three dimensions are taken")

    def _replay(self, graph, stream):
        """Behind all that this rank has queued so far."""
        for other in self._all_streams():
            self._after(stream, other)
        graph.launch(stream)

    def _join(self, stream):
        for other in self._all_streams():
            self._after(other, stream)

    def _after(self, stream, other):
        event = Event(self.machine.gpu)
        event.record(other)
        stream.wait_event(event)

    # ---------------------------------------------------------------------------------- calls

    def do(self, call):
        getattr(self, f"_{call.kind}")(call)

    def up(self, stream, values):
        """A new array, written on ``stream``."""
        with stream:
            made = Array(values.shape, values.dtype)
        plain = made.view(np.ndarray)

        def write():
            plain[...] = values

        self.machine.kernel(stream, "input", [(made.data.ptr, made.nbytes, True)], write)
        return made

    def _streams_for(self, buffer):
        """Arguments about streams, by chance."""
        how = self.random.randrange(5)
        if how < 2:
            return {}
        if how == 2:
            return {"async_finish": True}
        given = {"previous_event": buffer.capture()}
        if how == 4:
            given["async_finish"] = True
            given["allocate_on_comm_stream"] = self.random.random() < 0.5
        return given

    def _dispatch(self, call):
        buffer, me = self.buffers[call.buffer], self.rank
        stream = self.random.choice(self.streams)
        with stream:
            given = {"topk_idx": self.up(stream, call.idx[me])}
            if call.weights is not None:
                given["topk_weights"] = self.up(stream, call.weights[me])
            x = self.up(stream, call.xs[me])
            given |= self._streams_for(buffer)
            given["num_worst_tokens"] = call.limits[me]
            got = buffer.dispatch(x, **given)
            del given, x
            reader = self._reader(stream, got)
        self._read(reader, call, got, "eager")
        self.live[call.number] = got
        self.homes[call.number] = reader

    def _cached(self, call):
        buffer, source = self.buffers[call.buffer], self.live.get(call.source.number)
        stream = self._stream_of(call.source)
        with stream:
            x = self.up(stream, call.xs[self.rank])
            got = buffer.dispatch(x, handle=source.handle, **self._streams_for(buffer))
            del x
            reader = self._reader(stream, got)
        self._read(reader, call, got, "cached", real=self._real(call.source))

    def _combine(self, call):
        buffer, source = self.buffers[call.buffer], self.live.get(call.source.number)
        stream = self._stream_of(call.source)
        with stream:
            y = source.recv_x
            if call.factor != 1 or self.random.random() < 0.4:
                rows = call.source.wanted[self.rank].recv_x * np.float32(call.factor)
                y = self._copy(buffer, stream, rows, y.shape)
            back = buffer.combine(y, source.handle, **self._streams_for(buffer))
            del y
            reader = self._reader(stream, back)
        self._read_combined(reader, call, back, "eager")

    def _copy(self, buffer, stream, rows, shape):
        """Rows outside of the pool, or within."""
        y = buffer.empty(shape, np.float32) if self.random.random() < 0.5 else Array(shape, "f4")
        plain = y.view(np.ndarray)

        def write():
            plain[...] = 7
            plain[: len(rows)] = rows

        self.machine.kernel(stream, "expert", [(y.data.ptr, y.nbytes, True)], write)
        return y

    def _barrier(self, call):
        with self.random.choice(self.streams):
            self.buffers[call.buffer].barrier()

    def _stream_of(self, source):
        """Where a plain call with that dispatch's handle may be."""
        home = self.homes[source.number]
        if not self.story.elsewhere:
            return home
        stream = self.random.choice(self.streams)
        if stream is not home:
            self._after(stream, home)
        return stream

    def _reader(self, stream, got):
        """The stream on which a result is used: now or, with an event, another one."""
        if got.event.event is None:
            return stream
        reader = self.random.choice(self.streams)
        with reader:
            got.event.current_stream_wait()
        return reader

    # --------------------------------------------------------------------------------- results

    def _real(self, call):
        return int(call.wanted[self.rank].handle.recv_rows_per_rank.sum())

    def _look(self, stream, what, array, wanted, real=None):
        if array is None or not array.nbytes or self.failing:
            return
        plain = array.view(np.ndarray)
        part = plain if real is None else plain[:real]
        if not part.size:
            return
        seen = Seen(self.rank, self.section, what, wanted, None)

        def read():
            seen.got = part.copy()

        self.machine.kernel(stream, what, [(array.data.ptr, part.nbytes, False)], read)
        self.seen.append(seen)

    def _read(self, stream, call, got, how, real=None):
        what = f"{how} dispatch {call.number} on rank {self.rank}"
        wanted = None if call.wanted is None else call.wanted[self.rank]
        real = self._real(call) if real is None and wanted is not None else real
        rows = None if wanted is None else wanted.recv_x[:real]
        self._look(stream, f"rows of {what}", got.recv_x, rows, real)
        if call.kind == "cached":
            return
        chosen = None if wanted is None else wanted.recv_topk_idx[:real]
        self._look(stream, f"indices of {what}", got.recv_topk_idx, chosen, real)

    def _read_combined(self, stream, call, back, how):
        what = f"rows of {how} combine {call.number} on rank {self.rank}"
        self._look(stream, what, back.combined_x, call.wanted[self.rank].combined_x)

    def _own_kernel(self, buffer, stream):
        """A kernel of the caller's that writes into memory of the pool, and drops it."""
        with stream:
            try:
                made = buffer.empty((self.random.choice((64, 600, 1300, 4000)),), np.uint8)
            except StateError:
                return
        plain, ranges = made.view(np.ndarray), [(made.data.ptr, made.nbytes, True)]
        self.machine.kernel(stream, "the caller's own kernel", ranges, lambda: plain.fill(0xEE))

    def _noise(self):
        """What the caller does besides."""
        buffer = self.random.choice(self.buffers)
        stream = self.random.choice(self.streams)
        kind = self.random.randrange(6)
        if kind == 0 and self.live:
            self.machine.baton.point()
        elif kind == 1:
            self._own_kernel(buffer, stream)
        elif kind == 2:
            stream.synchronize()
        elif kind == 3:
            buffer.check()
        elif kind == 4:
            gc.collect(0)


def tell(story, watch=None):
    """Run a story; raises what was found. ``watch`` is given the machine."""
    machine = Machine(story.seed, story.num_ranks, story.num_experts)
    if watch is not None:
        watch(machine)
    slots = machine.baton.random.choice((1, 1, 2))
    for gpu in machine.gpus:
        gpu.slots = slots
    ranks = [Rank(machine, story, rank) for rank in range(story.num_ranks)]
    collecting = gc.isenabled()
    gc.disable()
    gc.freeze()  # what is there already is not looked through
    try:
        with machine.install():
            for rank in ranks:
                machine.start(rank.rank, f"rank {rank.rank}", rank.main)
            machine.baton.run()
            for rank in ranks:
                _judge(rank)
            if Lock.held:
                raise StoryError("a lock is still held")
    finally:
        for rank in ranks:
            for buffer in rank.buffers:
                buffer._life.state = State.CLOSED  # where something was found they are dropped
        gc.unfreeze()
        if collecting:
            gc.enable()


def _judge(rank):
    """Results are right, or poison where this rank was told that they are not."""
    for seen in rank.seen:
        if seen.got is None:
            raise StoryError(f"{seen.what}: never read")
        if seen.wanted is not None and seen.got.tobytes() == seen.wanted.tobytes():
            continue
        poisoned = seen.got.view(np.uint8).min() == 0xFF
        if not poisoned:
            raise StoryError(f"{seen.what}: wrong, and nobody was told:\n{seen.got}\n{seen.wanted}")
        if seen.section not in rank.errors:
            raise StoryError(f"{seen.what}: poison, and nothing was raised")
