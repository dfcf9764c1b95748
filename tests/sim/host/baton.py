"""Host threads that take turns by a seed, and the clock they share.

They are greenlets: one runs at a time, the one that holds the baton. ``point`` is called wherever
it may change hands; between two points of a thread any other thread, and any stream of any GPU, may
have gone on for long. Who is fast and who starves is drawn anew every now and then.
"""

from __future__ import annotations

import random

from greenlet import getcurrent, greenlet

__all__ = ["Baton", "Hang", "Lock", "RLock"]

_WEIGHTS = (0.01, 0.3, 1, 1, 4, 40)
_MOST_CHOICES = 400_000


class Hang(BaseException):
    """Nobody can go on, or somebody waits for longer than any wait may last."""


class Actor:
    """Something that can go on: a host thread, or work of a GPU."""

    weight = 1.0
    name = ""

    def ready(self):
        raise NotImplementedError


class HostThread(Actor):
    """A thread of a rank's process."""

    def __init__(self, baton, name, work):
        self.name, self.seen, self.until, self.done = name, -1, None, False
        self._baton, self._work = baton, work
        self.greenlet = greenlet(self._main)

    def _main(self):
        try:
            if self._baton.broken is None:
                self._work()
        except BaseException as error:  # noqa: BLE001 - raised again by run()
            self._baton.give_up(error)
        self.done = True
        self._baton.version += 1

    def ready(self):
        if self.until is not None:
            return self.until()
        return self.seen != self._baton.version

    def __repr__(self):
        return self.name


class Baton:
    """Who goes on.

    Args:
        seed: Everything follows from it.

    Attributes:
        now: Virtual seconds.
        random: The seed's generator.
        gpus: Actors that are no threads; each has ``step()``.
        version: Grows whenever something may have changed that a waiting thread looks at.
        me: The running thread; None before and after all.
        last: The newest things that happened, for reports.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.now, self.version, self.choices = 0.0, 0, 0
        self.threads, self.gpus = [], []
        self.broken, self.longest, self.deadlines = None, 60.0, []
        self.last = []
        self.me = None
        self._draw_at = 0
        self._linger = self.random.choice((0.2, 0.6, 0.9))
        self.muted = 0

    def spawn(self, name, work):
        made = HostThread(self, name, work)
        self.threads.append(made)
        return made

    def run(self):
        """Until all threads have ended; raises the first error."""
        hub = getcurrent()
        for each in self.threads:
            each.greenlet.parent = hub  # whoever ends comes back here
        while not all(each.done for each in self.threads):
            self._go(self._choose())
        self.me = None
        if self.broken is not None:
            raise self.broken

    def _go(self, chosen):
        self.me = chosen
        chosen.greenlet.switch()

    def note(self, text):
        self.last.append(f"{self.now:9.6f}  {text}")
        del self.last[:-4000]

    # ------------------------------------------------------------------------------- switching

    def point(self, quiet=False):
        """The calling thread does something that others may see: any of them may come first.

        Args:
            quiet: It only looks: nobody who waits can go on because of it.
        """
        me = self.me
        if me is None or self.muted:
            return
        self.version += not quiet
        if self.random.random() >= self._linger:
            self._switch(me)

    def poll(self):
        """The calling thread has looked at something in vain."""
        me = self.me
        if me is None:
            return
        me.seen = self.version
        try:
            self._switch(me)
        finally:
            me.seen = -1

    def wait_until(self, condition):
        """The calling thread cannot go on before."""
        me = self.me
        if condition():
            return
        assert me is not None, "only threads of the baton may wait"
        me.until = condition
        try:
            self._switch(me)
        finally:
            me.until = None

    def _switch(self, me):
        chosen = self._choose()
        if chosen is not me:
            self._go(chosen)
        if self.broken is not None:
            raise Hang("another thread has failed") from None

    def give_up(self, error):
        """End all threads."""
        if self.broken is None or isinstance(self.broken, Hang):
            self.broken = error if not isinstance(self.broken, Hang) else self.broken

    def _choose(self):
        """The next thread that goes on; work of GPUs is done on the way."""
        while True:
            if self.broken is not None:
                return next(each for each in self.threads if not each.done)
            self.choices += 1
            if self.choices > _MOST_CHOICES:
                self.broken = Hang("no end in sight: " + self._who())
                continue
            if self.choices >= self._draw_at:
                self._draw()
            ready = [each for each in self.threads if not each.done and each.ready()]
            ready += [each for each in self.gpus if each.ready()]
            if not ready:
                self._let_time_pass()
                continue
            chosen = self.random.choices(ready, [each.weight for each in ready])[0]
            if isinstance(chosen, HostThread):
                return chosen
            self.version += 1
            try:
                chosen.step()
            except BaseException as error:  # noqa: BLE001 - raised again by run()
                self.broken = error

    def _draw(self):
        for each in (*self.threads, *self.gpus):
            each.weight = self.random.choice(_WEIGHTS)
        self._draw_at = self.choices + self.random.choice((5, 40, 300))

    def _let_time_pass(self):
        """Nobody can go on: the clock moves to where somebody may."""
        later = [at for at in self.deadlines if at > self.now]
        self.deadlines = later
        self.now = min([self.now + 0.05, *later])
        self.version += 1
        if self.now > self.longest:
            self.broken = Hang("nobody can go on: " + self._who())

    def _who(self):
        waiting = [each.name for each in self.threads if not each.done]
        return ", ".join(waiting + [text for gpu in self.gpus for text in gpu.pending()])


class Lock:
    """``threading.Lock`` for threads with a baton."""

    baton = None
    held = set()  # noqa: RUF012 - of the story that runs

    def __init__(self):
        self._owner, self._depth = None, 0

    def acquire(self, blocking=True, timeout=-1):
        del timeout
        baton = Lock.baton
        me = baton.me or Lock
        if self._again(me):
            self._depth += 1
            return True
        baton.point(quiet=True)
        if self._owner is not None:
            if not blocking:
                return False
            baton.wait_until(lambda: self._owner is None)
        self._owner, self._depth = me, 1
        Lock.held.add(self)
        return True

    def _again(self, me):
        del me
        return False

    def release(self):
        assert self._owner is not None, "a lock that nobody holds is released"
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            Lock.held.discard(self)
            Lock.baton.version += 1

    def locked(self):
        return self._owner is not None

    def __enter__(self):
        self.acquire()
        return self

    def __exit__(self, *error):
        self.release()


class RLock(Lock):
    """``threading.RLock``."""

    def _again(self, me):
        return self._owner == me
