"""Streams, events, captures and graphs of one GPU. Work is done in steps, when its turn comes."""

from __future__ import annotations

import itertools

from host.memory import join

__all__ = ["CudaError", "Event", "Gpu", "Stream"]

_NOT_READY, _UNSUPPORTED, _INVALIDATED, _ISOLATION = 600, 900, 901, 905
_numbers = itertools.count(1)


class CudaError(RuntimeError):
    """``cupy.cuda.runtime.CUDARuntimeError``."""

    def __init__(self, status, text=""):
        super().__init__(f"cuda error {status} {text}")
        self.status = status


class Mark:
    """What an event was recorded behind. ``clock``: once that is over, what was known there."""

    __slots__ = ("capture", "clock", "ends", "gpu")

    def __init__(self, gpu, capture=None, ends=()):
        self.gpu, self.capture, self.ends, self.clock = gpu, capture, ends, None


class Work:
    """One entry of a stream's queue, or a node of a graph.

    Args:
        what: For reports.
        begin: (lane) -> generator of its steps; each value it yields is a condition for the next
            step, or None.
        host: What the thread that launched it knew.
    """

    __slots__ = ("after", "begin", "host", "number", "what")

    def __init__(self, what, begin, host=()):
        self.what, self.begin, self.host, self.number = what, begin, dict(host), 0
        self.after = ()


class Lane:
    """Where steps run one after the other, and what they know."""

    def __init__(self, gpu, name, clock=None):
        self.gpu, self.name = gpu, name
        self.clock = {} if clock is None else clock

    def tick(self):
        self.clock[self.name] = self.clock.get(self.name, 0) + 1

    def touch(self, what, *ranges):
        self.tick()
        self.gpu.world.memory.touch(self.clock, self.name, what, ranges)


class Stream:
    """``cupy.cuda.Stream``; an actor of the baton too. Number 0: the legacy default stream."""

    def __init__(self, gpu, non_blocking=False, legacy=False):
        self.gpu, self.non_blocking, self.legacy = gpu, non_blocking, legacy
        self.ptr = 0 if legacy else next(_numbers)
        self.name = f"rank {gpu.rank} stream {self.ptr}"
        self.lane = Lane(gpu, self.name)
        self.queue, self._steps, self._until = [], None, None
        self.capture, self.tips = None, ()
        self.weight = 1.0
        gpu.streams.append(self)
        gpu.world.baton.gpus.append(self)
        gpu.by_number[self.ptr] = self

    def __hash__(self):
        return hash((self.gpu.rank, self.ptr))

    def __eq__(self, other):
        return self is other

    # --------------------------------------------------------------------------- as the baton sees

    def ready(self):
        if self._steps is not None:
            return self._until is None or self._until()
        return bool(self.queue) and self._may_start(self.queue[0])

    def _may_start(self, work):
        if self.non_blocking:
            return True
        others = self.gpu.streams if self.legacy else (self.gpu.null,)
        return not any(
            each.queue and each.queue[0].number < work.number
            for each in others
            if each is not self and not each.non_blocking
        )

    def step(self):
        work = self.queue[0]
        if self._steps is None:
            join(self.lane.clock, work.host)
            if not self.non_blocking:
                others = self.gpu.streams if self.legacy else (self.gpu.null,)
                for each in others:
                    if not each.non_blocking:
                        join(self.lane.clock, each.lane.clock)
            self.lane.tick()
            self._steps = work.begin(self.lane)
        try:
            self._until = next(self._steps)
        except StopIteration:
            self.lane.tick()
            self._steps = self._until = None
            self.queue.pop(0)

    def pending(self):
        return [f"{self.name}: {work.what}" for work in self.queue[:1]]

    # ------------------------------------------------------------------------------ as CuPy has it

    def __enter__(self):
        self.gpu.world.stack().append(self)
        return self

    def __exit__(self, *error):
        self.gpu.world.stack().pop()

    def add(self, work):
        """Queue it, or make it a node of the graph that is being captured."""
        self.gpu.world.cuda_call(work.what)
        if self.capture is not None:
            work.after = self.tips
            self.tips = (work,)
            self.capture.nodes.append((work, self))
            return
        work.host = dict(self.gpu.world.host_clock())
        work.number = next(_numbers)
        self.queue.append(work)

    def record(self, event=None):
        event = Event(self.gpu) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event):
        self.gpu.world.cuda_call("wait for an event")
        mark = event.mark
        if mark is None:
            return
        if mark.capture is not None:
            if self.capture is not None and self.capture is not mark.capture:
                raise CudaError(_ISOLATION, "a stream in two captures")
            if mark.capture.over:
                raise CudaError(_ISOLATION, "an event of a graph is waited for outside")
            self.capture = mark.capture
            mark.capture.streams.add(self)
            self.tips = tuple(dict.fromkeys((*self.tips, *mark.ends)))
            return
        if self.capture is not None:
            self.capture.invalid = True
            raise CudaError(_ISOLATION, "a graph waits for an event from outside")

        def begin(lane):
            while mark.clock is None:
                yield lambda: mark.clock is not None
            join(lane.clock, mark.clock)

        self.add(Work("wait for an event", begin))

    def synchronize(self):
        world = self.gpu.world
        world.cuda_call("synchronize a stream")
        if self.capture is not None:
            self.capture.invalid = True
            raise CudaError(_UNSUPPORTED, "a stream under capture is synchronized")
        last = self.queue[-1] if self.queue else None
        world.baton.wait_until(lambda: last is None or last not in self.queue)
        world.learn(self.lane.clock)
        self.gpu.land()

    def begin_capture(self, mode=None):
        del mode
        assert self.non_blocking, "stories capture on streams of their own"
        self.gpu.world.cuda_call("begin a capture")
        self.capture = Capture(self)
        self.tips = ()

    def end_capture(self):
        self.gpu.world.cuda_call("end a capture")
        capture = self.capture
        joined = {id(tip) for tip in _behind(self.tips)}
        for each in capture.streams:
            if not all(id(tip) in joined for tip in each.tips):
                capture.invalid = True
            each.capture, each.tips = None, ()
        capture.over = True
        if capture.invalid:
            raise CudaError(_INVALIDATED, "the capture was invalidated")
        return Graph(capture)


def _behind(tips):
    """Nodes, and all that they come after."""
    left, found = list(tips), []
    while left:
        each = left.pop()
        if each not in found:
            found.append(each)
            left.extend(each.after)
    return found


class Capture:
    """What a capture has gathered so far."""

    def __init__(self, stream):
        self.number = next(_numbers)
        self.streams, self.nodes = {stream}, []
        self.over = self.invalid = False


class Graph:
    """Nodes that run in any order that their dependencies allow; one launch after the other."""

    def __init__(self, capture):
        self.nodes = capture.nodes
        self._running = False
        self._lanes = {}
        self._after = {}

    def launch(self, stream):
        stream.add(Work("graph", self._run))

    def _run(self, lane):
        while self._running:
            yield lambda: not self._running
        self._running = True
        join(lane.clock, self._after)
        left, ends = dict.fromkeys(work for work, _ in self.nodes), {}
        streams = dict(self.nodes)
        running = {}
        rng = lane.gpu.world.baton.random
        while left or running:
            for work in list(left):
                if all(each in ends for each in work.after):
                    del left[work]
                    stream = streams[work]
                    own = Lane(lane.gpu, f"{stream.name} in graph {id(self) and work.what}")
                    own.name = self._lanes.setdefault(work, f"{stream.name} graph {next(_numbers)}")
                    own.clock = dict(lane.clock)
                    own.clock[own.name] = self._after.get(own.name, 0)
                    for each in work.after:
                        join(own.clock, ends[each])
                    own.tick()
                    running[work] = [own, work.begin(own), None]
            able = [w for w, (_, _, until) in running.items() if until is None or until()]
            if not able:
                conditions = [until for _, _, until in running.values()]
                yield lambda conditions=conditions: any(each() for each in conditions)
                continue
            work = rng.choice(able)
            entry = running[work]
            try:
                entry[2] = next(entry[1])
            except StopIteration:
                entry[0].tick()
                ends[work] = entry[0].clock
                del running[work]
            yield None
        for clock in ends.values():
            join(lane.clock, clock)
        self._after = dict(lane.clock)
        self._running = False


class Event:
    """``cupy.cuda.Event``."""

    def __init__(self, gpu):
        self.gpu, self.mark = gpu, None
        self.ptr = next(_numbers)
        gpu.events[self.ptr] = self

    def record(self, stream=None):
        stream = self.gpu.world.stack()[-1] if stream is None else stream
        self.mark = mark = Mark(self.gpu, stream.capture, stream.tips)
        if stream.capture is not None:
            self.gpu.world.cuda_call("record an event")
            return

        def begin(lane):
            mark.clock = dict(lane.clock)
            return iter(())

        stream.add(Work("record an event", begin))

    def query(self):
        """0 or 600."""
        world, mark = self.gpu.world, self.mark
        world.cuda_call("ask an event", quiet=True)
        if mark is None:
            return 0
        if mark.capture is not None:
            mark.capture.invalid = True
            raise CudaError(_UNSUPPORTED, "an event of a capture is asked")
        if mark.clock is None:
            return _NOT_READY
        world.learn(mark.clock)
        self.gpu.land()
        return 0


class Gpu:
    """One rank's GPU: its streams, and what it has written to host memory that is on its way.

    Attributes:
        world: The machine.
        rank: Whose it is.
        streams: All of them.
        null: The legacy default stream.
    """

    def __init__(self, world, rank):
        self.world, self.rank = world, rank
        self.streams, self.events, self.by_number = [], {}, {}
        self._on_the_way = []  # lists of (address, value); each list lands in its own order
        self.null = Stream(self, legacy=True)
        self.arenas, self.slots = {}, 1
        self.weight = 1.0
        world.baton.gpus.append(self)

    # ---------------------------------------------------------------- stores to the host's memory

    def send(self, words):
        """Store 8-byte words to host memory: those of one call land in order, others in any."""
        self._on_the_way.append(list(words))

    def ready(self):
        return bool(self._on_the_way)

    def step(self):
        chosen = self.world.baton.random.choice(self._on_the_way)
        self._land_one(chosen)

    def _land_one(self, words):
        address, value = words.pop(0)
        self.world.store(address, value)
        if not words:
            self._on_the_way.remove(words)

    def land(self):
        """Kernels that the host knows to be over have stored all they had to."""
        while self._on_the_way:
            self._land_one(self._on_the_way[0])

    def pending(self):
        return []

    def synchronize(self):
        """All streams."""
        world = self.world
        world.cuda_call("synchronize the device")
        for stream in self.streams:
            if stream.capture is not None:
                stream.capture.invalid = True
                raise CudaError(_UNSUPPORTED, "the device is synchronized under capture")
        last = [stream.queue[-1] for stream in self.streams if stream.queue]
        world.baton.wait_until(
            lambda: not any(work in stream.queue for stream in self.streams for work in last)
        )
        for stream in self.streams:
            world.learn(stream.lane.clock)
        self.land()
