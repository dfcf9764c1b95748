"""Late, stopped, refusing and raising ranks in the middle of real work: what every rank sees.

mpirun -n 2 python tests/gpu/worker_failures.py [--timeout 2] [--slack 1] [SCENARIO ...]

Rank 1 is the one in trouble. After each scenario ``reset()`` makes the Buffer work again, old
handles included. Three more end the program, with another exit code than 0, and are asked for by
name: ``raises``, ``dead_context`` (one rank a GPU, and no MPS: it faults on purpose), ``killed``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from common import RoundTrip, Seen, Worker, runtime, settle, small_case
from refusals import refuse_all

from deepep_cupy.errors import DeepEPCupyError

BAD = 1
FAULT = r"""
extern "C" __global__ void fault(int* nowhere) { *nowhere = 1; }
"""
Scenario = Callable[["Scene"], None]


class Scene:
    """What a scenario works with."""

    def __init__(self, worker: Worker, buffer: Any, trip: RoundTrip) -> None:
        self.worker, self.buffer, self.trip = worker, buffer, trip
        self.bad = worker.rank == BAD
        self.wait: float = worker.options.timeout
        self.slack: float = worker.options.slack

    def settle(self, call: Callable[[], object]) -> Seen:
        """See ``common.settle``."""
        return settle(self.worker, self.buffer, call)

    def judge(self, what: str, seen: Seen, good: Wanted, bad: Wanted) -> None:
        """Compare what each rank saw with what it should have seen. Collective."""
        for rank, each in enumerate(self.worker.comm.allgather(seen)):
            self.worker.say(f"  {what}, rank {rank}: {each}")
        (bad if self.bad else good).check(what, seen)

    def mend(self, *handles: Any) -> None:
        """All are poisoned; reset, and normal work. Collective."""
        again = self.settle(self.buffer.barrier)
        assert again.kind == "StateError", f"a poisoned Buffer: {again}"
        assert "reset()" in again.text, again
        self.worker.meet()
        self.buffer.reset()
        self.works(*handles)

    def works(self, *handles: Any) -> None:
        """Round trips are right, and older handles are valid. Collective."""
        for _ in range(3):
            self.trip.round(self.buffer)
        for handle in handles:
            self.trip.combine(self.buffer, handle)
        self.buffer.barrier()
        self.worker.synchronize()
        self.buffer.check()
        assert self.buffer.state.value == "open"


class Wanted:
    """What a rank should see: one of these errors, this text, no earlier and no later."""

    def __init__(
        self, kinds: tuple[str, ...], text: str, least: float = 0.0, most: float = 1e9
    ) -> None:
        self.kinds, self.text, self.least, self.most = kinds, text, least, most

    def check(self, what: str, seen: Seen) -> None:
        """Raise unless ``seen`` is that."""
        assert seen.kind in self.kinds, f"{what}: wanted {self.kinds}, saw {seen}"
        if seen.kind != "nothing":
            assert re.search(self.text, seen.text), f"{what}: no {self.text!r} in: {seen}"
        assert self.least <= seen.seconds <= self.most, (
            f"{what}: wanted {self.least:.2f} to {self.most:.2f} s, saw {seen}"
        )


# ------------------------------------------------------------------------------------ late ranks


def late(scene: Scene, what: str, call: Callable[[], object]) -> None:
    """Rank 1 sleeps before a call."""
    scene.worker.meet()
    if scene.bad:
        time.sleep(2 * scene.wait)
    seen = scene.settle(call)
    scene.judge(
        what,
        seen,
        Wanted(
            ("PeerTimeoutError",),
            rf"in vain for .*\brank {BAD}\b.*reset\(\)",
            0.9 * scene.wait,
            scene.wait + scene.slack,
        ),
        Wanted(("PeerTimeoutError", "PeerAbortedError"), "in vain for this rank"),
    )


def late_dispatch(scene: Scene) -> None:
    """From topk_idx: the host waits, and raises in the call."""
    handle = scene.trip.round(scene.buffer)
    late(scene, "late dispatch", lambda: scene.trip.dispatch(scene.buffer))
    scene.mend(handle)


def late_barrier(scene: Scene) -> None:
    """A barrier."""
    handle = scene.trip.round(scene.buffer)
    late(scene, "late barrier", scene.buffer.barrier)
    scene.mend(handle)


def late_combine(scene: Scene) -> None:
    """The host queues more behind it before it learns of the failure: all outputs are poison."""
    worker, buffer, trip = scene.worker, scene.buffer, scene.trip
    handle = trip.round(buffer)
    y: Any = trip.y
    outputs: list[Any] = []

    def call() -> None:
        for _ in range(2):
            back = buffer.combine(y, handle, topk_weights=trip.y_weights)
            outputs.extend((back.combined_x, back.combined_topk_weights))
        got = buffer.dispatch(trip.x, handle=handle, topk_weights=trip.weights)
        outputs.extend((got.recv_x, got.recv_topk_weights))

    late(scene, "late combine", call)
    if worker.gpu and not scene.bad:
        assert len(outputs) == 6, f"only {len(outputs)} outputs: something waited"
        for number, output in enumerate(outputs):
            whole = bool(worker.xp.isnan(output).all())
            assert whole, f"queued output {number} is not all NaN: {output}"
    outputs.clear()
    scene.mend(handle)


# --------------------------------------------------------------------------------- stopped ranks


def stopped(scene: Scene, what: str, call: Callable[[], object]) -> None:
    """Rank 1 is stopped somewhere in a long row of calls, and goes on later."""
    scene.worker.meet()
    helper = None
    if scene.bad:
        pid, long = os.getpid(), 2 * scene.wait + 1
        script = f"sleep 0.7; kill -STOP {pid}; sleep {long}; kill -CONT {pid}"
        helper = subprocess.Popen(["sh", "-c", script])
    end = time.monotonic() + 60 + 4 * scene.wait
    while (seen := scene.settle(call)).kind == "nothing" and time.monotonic() < end:
        pass
    if helper is not None:
        helper.wait()
    scene.judge(
        what,
        seen,
        Wanted(
            ("PeerTimeoutError",),
            rf"in vain for .*\brank {BAD}\b.*reset\(\)",
            0,
            scene.wait + scene.slack,
        ),
        Wanted(("PeerTimeoutError", "PeerAbortedError"), "in vain for this rank"),
    )


def stopped_dispatch(scene: Scene) -> None:
    """In dispatches."""
    handle = scene.trip.round(scene.buffer)
    stopped(scene, "stopped dispatch", lambda: scene.trip.dispatch(scene.buffer))
    scene.mend(handle)


def stopped_combine(scene: Scene) -> None:
    """In combines and cached dispatches, several of which are queued at a time."""
    buffer, trip = scene.buffer, scene.trip
    handle = trip.round(buffer)
    y: Any = trip.y

    def call() -> None:
        for _ in range(5):
            buffer.combine(y, handle, topk_weights=trip.y_weights)
            buffer.dispatch(trip.x, handle=handle)

    stopped(scene, "stopped combine", call)
    scene.mend(handle)


# ----------------------------------------------------------------- ranks that refuse, that raise


def refused(scene: Scene) -> None:
    """Wrong calls of one rank: all raise, and the Buffer stays usable."""
    number = refuse_all(scene.worker, scene.buffer)
    scene.worker.say(f"  {number} refusals")
    scene.works()


def raises_inside(scene: Scene) -> None:
    """Rank 1 fails in the call before it launches: the others hear of it at once."""
    worker, buffer = scene.worker, scene.buffer
    handle = scene.trip.round(buffer)
    inside: Any = runtime(buffer) if worker.gpu else buffer._engine._mover
    name = "operation" if worker.gpu else "move"
    worker.meet()

    def fail(*_: object) -> None:
        raise MemoryError("no room for recv_x")

    real = getattr(inside, name)
    if scene.bad:
        setattr(inside, name, fail)
    start = time.monotonic()
    try:
        seen = scene.settle(lambda: scene.trip.dispatch(buffer))
    except MemoryError as error:
        seen = Seen("MemoryError", time.monotonic() - start, str(error))
    setattr(inside, name, real)
    text = rf"rank {BAD} aborted \(MemoryError in dispatch\(\): no room for recv_x\)"
    scene.judge(
        "raises inside",
        seen,
        Wanted(("PeerAbortedError",), text, 0, scene.wait / 2),
        Wanted(("MemoryError",), "no room"),
    )
    scene.mend(handle)


# ----------------------------------------------------------- after these the program ends badly


def in_combines(scene: Scene) -> None:
    """What the good ranks do meanwhile; they report what they see, and go down with it."""
    start = time.monotonic()
    try:
        handle = scene.trip.dispatch(scene.buffer)
        while True:
            start = time.monotonic()
            scene.trip.combine(scene.buffer, handle)
    except DeepEPCupyError as error:
        seen = Seen(type(error).__name__, time.monotonic() - start, str(error))
        print(f"SAW rank {scene.worker.rank}: {seen}", flush=True)
        if not 0 <= seen.seconds <= scene.slack:
            print("TOO LATE", flush=True)
        raise


def leave(scene: Scene, last_words: Callable[[], None]) -> None:
    """A few right trips, then rank 1 goes."""
    scene.trip.round(scene.buffer)
    scene.worker.meet()
    if scene.bad:
        scene.trip.combine(scene.buffer, scene.trip.dispatch(scene.buffer))
        time.sleep(0.3)  # the others wait in the next combine
        last_words()
    in_combines(scene)


def raises(scene: Scene) -> None:
    """An exception that rank 1 does not catch."""

    def last_words() -> None:
        raise ValueError("the batch is bad")

    leave(scene, last_words)


def dead_context(scene: Scene) -> None:
    """A kernel of rank 1 writes to nowhere, which ends its CUDA context."""
    cupy = scene.worker.xp
    kernel = cupy.RawKernel(FAULT, "fault")
    kernel((1,), (1,), (cupy.zeros(1, cupy.int32),))  # compiled and loaded: no delay later

    def last_words() -> None:
        kernel((1,), (1,), (cupy.uint64(0x10),))
        scene.worker.synchronize()
        raise AssertionError("the kernel did not fault")

    leave(scene, last_words)


def killed(scene: Scene) -> None:
    """``kill -9`` of rank 1."""
    leave(scene, lambda: os.kill(os.getpid(), signal.SIGKILL))


SCENARIOS: tuple[Scenario, ...] = (
    late_barrier,
    late_dispatch,
    late_combine,
    refused,
    raises_inside,
    stopped_dispatch,
    stopped_combine,
)
ENDINGS: tuple[Scenario, ...] = (raises, dead_context, killed)


def main() -> None:
    """Run the scenarios asked for, or all that do not end the program."""
    known = {scenario.__name__: scenario for scenario in (*SCENARIOS, *ENDINGS)}

    def arguments(parser: Any) -> None:
        parser.set_defaults(timeout=2.0)
        parser.add_argument("--slack", type=float, default=1.0, help="seconds a limit may be late")
        parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(known))

    worker = Worker("FAILURES", __doc__, arguments)
    chosen = [known[name] for name in worker.options.scenarios] or SCENARIOS
    with worker.buffer() as buffer:
        scene = Scene(worker, buffer, RoundTrip(worker, small_case(worker), seed=1))
        for scenario in chosen:
            worker.say(f"== {scenario.__name__}")
            scenario(scene)
    worker.done(f"{len(chosen)} scenarios, timeout_s {worker.options.timeout:g}")


if __name__ == "__main__":
    sys.exit(main())
