"""Mistakes put into the product's Python, each of which some seed must find.

A fault replaces functions of the product while a story runs. ``FAULTS``: name -> (options of the
stories that can find it, a function that plants it by ``patch(where, name, value)``).
"""

from __future__ import annotations

import contextlib
import inspect
from types import FunctionType

from deepep_cupy.engines.gpu import engine, failures, memory, operation
from deepep_cupy.memory import block, cuda_ipc, pool, stream_clock
from deepep_cupy.protocol.headers import RefusalCode
from deepep_cupy.ranks import abort_board, rendezvous

__all__ = ["FAULTS", "options_of", "planted"]

FAULTS = {}


def _fault(name, **options):
    def note(plant):
        FAULTS[name] = options, plant
        return plant

    return note


def options_of(name):
    """Options of ``Story`` for a fault, or for the product as it is."""
    return {} if name is None else FAULTS[name][0]


@contextlib.contextmanager
def planted(name):
    """The product with a mistake."""
    before = []

    def patch(where, attribute, value):
        old = where.__dict__[attribute]
        if isinstance(value, FunctionType) and value is not _nothing:
            # Else every seed finds a fault that is called wrongly, and proves nothing.
            given, wanted = (list(inspect.signature(f).parameters) for f in (value, old))
            assert given == wanted, f"{attribute} takes {wanted}, its fault {name!r} {given}"
        before.append((where, attribute, old))
        setattr(where, attribute, value)

    FAULTS[name][1](patch)
    try:
        yield
    finally:
        for where, attribute, value in reversed(before):
            setattr(where, attribute, value)


def _nothing(*given, **named):
    del given, named


# ------------------------------------------------------------------------------------- the pool


@_fault("stamps of memory that was given back are too old")
def _(patch):
    stamp = stream_clock.StreamClock.stamp

    def older(self, stream, tick=None):
        return stamp(self, stream, max(1, (self.tick if tick is None else tick) - 3))

    patch(stream_clock.StreamClock, "stamp", older)


@_fault("record_stream is dropped")
def _(patch):
    patch(pool.Pool, "record_stream", _nothing)


@_fault("an event's wait records no stream")
def _(patch):
    def wait(self):
        self._queue.current_stream().wait_event(self._event.event)
        self._queue.failures.raise_pending()

    patch(operation.GpuEvent, "wait", wait)


@_fault("the tail of a shrunk block forgets the block's users")
def _(patch):
    cut = pool.Pool._cut
    patch(pool.Pool, "_cut", lambda self, block, home, users=None: cut(self, block, home))


@_fault("the pool waits for no other stream")
def _(patch):
    patch(stream_clock.StreamClock, "wait_for", _nothing)


@_fault("completion of one stream is believed of all")
def _(patch):
    completed = stream_clock.StreamClock.completed

    def of_all(self, checkpoint, stream):
        del stream
        completed(self, checkpoint, None)

    patch(stream_clock.StreamClock, "completed", of_all)


@_fault("a graph's block goes to the eager list")
def _(patch):
    patch(pool.Pool, "_home", lambda self, capture: self._free)


@_fault("a capture takes memory with work pending")
def _(patch):
    patch(stream_clock.StreamClock, "is_clean", lambda self, segment: True)


@_fault("blocks of a failed operation are not quarantined")
def _(patch):
    patch(pool.Pool, "quarantine", _nothing)


@_fault("blocks of a refused wait are not given back")
def _(patch):
    free = pool.Pool.free

    def keep(self, block):
        if "dispatch" not in block.label:
            free(self, block)

    patch(pool.Pool, "free", keep)


@_fault("a finalizer calls CUDA")
def _(patch):
    def __del__(self):  # noqa: N807 - it becomes that method
        import cupy

        cupy.cuda.get_current_stream().record()
        self._queue.append(self.block)

    patch(block.BlockOwner, "__del__", __del__)


# -------------------------------------------------------------------------- streams and lifetimes


@_fault("staged memory is given back before the kernel")
def _(patch):
    def stage(self, nbytes, label):
        made = self._queue.pool.alloc(nbytes, self.current, label)
        self._queue.pool.free(made)
        return made

    patch(operation.Operation, "stage", stage)


@_fault("the end of an operation is recorded before its kernel")
def _(patch):
    launch, finish, early = operation.Operation.launch, operation.Operation._finish, {}

    def first(self, ready, tag=None):
        early[id(self)] = self._queue.events.record(self.stream)
        launch(self, ready, tag)

    def late(self, *, async_finish):
        events, mark, stream = self._queue.events, early.pop(id(self), None), self.stream
        record = cuda_ipc.CupyEvents.record

        def which(where):
            return mark if where is stream and mark is not None else record(events, where)

        events.record = which
        try:
            return finish(self, async_finish=async_finish)
        finally:
            del events.record

    patch(operation.Operation, "launch", first)
    patch(operation.Operation, "_finish", late)


@_fault("inputs of a call are not kept")
def _(patch):
    patch(operation.Retention, "until", _nothing)


@_fault("inputs of a captured call are not kept")
def _(patch):
    patch(operation.Retention, "for_ever", _nothing)


@_fault("borrowed memory goes back at once")
def _(patch):
    class Nobody:
        users = {}  # noqa: RUF012 - nobody looks at it

    def borrow(self, nbytes, stream, user):
        del user
        with stream:
            return self._cupy.cuda.alloc(nbytes), Nobody()

    patch(operation.Retention, "borrow", borrow)


@_fault("users of borrowed memory are forgotten")
def _(patch):
    reap = operation.Retention.reap

    def careless(self):
        self.returned.clear()
        reap(self)

    patch(operation.Retention, "reap", careless)


@_fault("operations of two Buffers are in no order")
def _(patch):
    patch(operation.DeviceOrder, "of", classmethod(lambda cls, device: cls()))


@_fault("operations on two streams are in no order")
def _(patch):
    def enter(self, stream, events):
        del events
        self._last = stream

    patch(operation.DeviceOrder, "enter", enter)


@_fault("the end of an older operation is kept")
def _(patch):
    enter = operation.DeviceOrder.enter

    def keeping(self, stream, events):
        end, same = self._end, self._last is stream
        enter(self, stream, events)
        if same:
            self._end = end

    patch(operation.DeviceOrder, "enter", keeping)
    patch(operation.DeviceOrder, "leave", _leave_once)


def _leave_once(self, stream, events):
    if self._end is None:
        self._end = events.record(stream)


@_fault("the communication stream does not wait for previous_event")
def _(patch):
    wait = operation.GpuEvent.wait

    def forgetful(self):
        if self._queue.current_stream() is not self._queue.comm:
            wait(self)

    patch(operation.GpuEvent, "wait", forgetful)


@_fault("the communication stream does not wait for the caller's")
def _(patch):
    move = operation.Operation._move_to_comm

    def forgetful(self, streams):
        if streams.previous_event is None:
            self._queue.order.precise = True
            return self._queue.comm
        return move(self, streams)

    patch(operation.Operation, "_move_to_comm", forgetful)


@_fault("the caller's stream does not wait for the end")
def _(patch):
    finish = operation.Operation._finish

    class Careless:
        def __init__(self, stream):
            self.ptr = stream.ptr

        wait_event = _nothing

    def forgetful(self, *, async_finish):
        if self.current is not self.stream:
            self.current = Careless(self.current)
        return finish(self, async_finish=async_finish)

    patch(operation.Operation, "_finish", forgetful)


@_fault("the lock of the device is kept after an error")
def _(patch):
    def leave(self):
        self.call, self._locked = None, False
        self.give_back(self.staged)
        self.staged = []

    patch(operation.Operation, "_leave", leave)


# ----------------------------------------------------------------------------- refusals, failures


@_fault("counts of an earlier call are taken")
def _(patch):
    def counts(self, serial, number):
        del serial
        if not all(self._stamps[:number].tolist()):
            return None
        return self._numbers[:number].tolist()

    patch(failures.Report, "counts", counts)


@_fault("counts are read before their stamps")
def _(patch):
    def counts(self, serial, number):
        numbers = self._numbers[:number].tolist()
        operation.time.sleep(0)
        if self._stamps[:number].tolist().count(serial) != number:
            return None
        return numbers

    patch(failures.Report, "counts", counts)


@_fault("only the first count's stamp is looked at")
def _(patch):
    def counts(self, serial, number):
        return self._numbers[:number].tolist() if self._stamps[0] == serial else None

    patch(failures.Report, "counts", counts)


@_fault("a refusal under capture is launched")
def _(patch):
    def launch(self, kind, refusal, tag=None):
        with self._runtime.operation() as op:
            ready = self._runtime.kernels.get("barrier", 1, kind)
            ready.refusal(kind, refusal.code, refusal.value)
            op.launch(ready, tag)
            return op.serial

    patch(engine.CudaEngine, "_launch_barrier", launch)


@_fault("a refusal is sent twice")
def _(patch):
    refuse = engine.CudaEngine.refuse

    def twice(self, kind, refusal):
        refuse(self, kind, refusal)
        refuse(self, kind, refusal)

    patch(engine.CudaEngine, "refuse", twice)


@_fault("a refusal is not sent")
def _(patch):
    patch(engine.CudaEngine, "refuse", _nothing)


@_fault("a refusal is sent without its reason")
def _(patch):
    launch = engine.CudaEngine._launch_barrier

    def silent(self, kind, refusal, tag=None):
        return launch(self, kind, type(refusal)(RefusalCode.NONE), tag)

    patch(engine.CudaEngine, "_launch_barrier", silent)


@_fault("this rank's own refusal is forgotten")
def _(patch):
    patch(failures.FailureMonitor, "own_refusal", _nothing)


@_fault("a refusal that is found late is dropped")
def _(patch):
    take = failures.Report.take

    def some(self):
        records, lost = take(self)
        return [each for each in records if each.verdict != 1], lost

    patch(failures.Report, "take", some)


@_fault("a refusal found in the next call keeps it from being launched")
def _(patch):
    def raise_failure(self):
        self.raise_pending()

    patch(failures.FailureMonitor, "raise_failure", raise_failure)


@_fault("records that were overwritten are passed over")
def _(patch):
    take = failures.Report.take

    def some(self):
        return take(self)[0], 0

    patch(failures.Report, "take", some)


@_fault("reset leaves ranks waiting that wait for it")
def _(patch):
    patch(rendezvous.Hurry, "__call__", _nothing)


@_fault("an error is not told to ranks that wait")
def _(patch):
    patch(engine.CudaEngine, "abort", _nothing)


@_fault("reset does not drain")
def _(patch):
    patch(operation.OperationQueue, "drain", _nothing)


@_fault("reset clears the board after its second meeting")
def _(patch):
    reset, clear = engine.CudaEngine.reset, abort_board.AbortBoard.clear

    def late(self):
        reset(self)
        clear(self._board)

    patch(engine.CudaEngine, "reset", late)
    patch(abort_board.AbortBoard, "clear", _nothing)


@_fault("reset goes on from this rank's own epoch")
def _(patch):
    patch(rendezvous.Rendezvous, "exchange", lambda self, operation, words: words[None])


@_fault("the epoch is still on its way when kernels start")
def _(patch):
    write = memory.SymmetricMemory._write_epoch

    def hasty(self, epoch):
        runtime = self._runtime

        class Hasty:
            def __getattr__(self, name):
                return _nothing if name == "deviceSynchronize" else getattr(runtime, name)

        self._runtime = Hasty()
        try:
            write(self, epoch)
        finally:
            self._runtime = runtime

    patch(memory.SymmetricMemory, "_write_epoch", hasty)
