"""What stands where MPI is: messages between the ranks of a machine, and memory of the node."""

from __future__ import annotations

import numpy as np

from host.memory import join

__all__ = ["Group"]


class _Request:
    """``ranks.group.Request``."""

    def __init__(self, machine, ready):
        self._machine, self._ready, self._done = machine, ready, False

    def test(self):
        self._machine.baton.point(quiet=True)
        self._done = self._done or self._ready()
        return self._done

    def cancel(self):
        self._ready = lambda: True


class _Window:
    def __init__(self, memory):
        self.memory = memory

    def free(self):
        pass


class Group:
    """``ranks.group.Group`` of one rank."""

    host, over = "node", False

    def __init__(self, machine, rank, name="world"):
        self._machine, self.rank, self._name = machine, rank, name
        self.size = self.world_size = machine.num_ranks
        self.node_ranks = tuple(range(self.size))
        self._calls = self._meets = self._made = 0
        self.aborted = None

    def allgather(self, value):
        """All ranks' values."""
        machine = self._machine
        self._calls += 1
        told = machine.meetings.setdefault((self._name, self._calls), {})
        machine.baton.point()
        told[self.rank] = value, dict(machine.host_clock())
        machine.baton.version += 1
        machine.baton.wait_until(lambda: len(told) == self.size)
        for _, clock in told.values():
            machine.learn(clock)
        return [told[rank][0] for rank in range(self.size)]

    def ibarrier(self):
        machine = self._machine
        self._meets += 1
        come = machine.barriers.setdefault((self._name, self._meets), {})
        machine.baton.point()
        come[self.rank] = dict(machine.host_clock())

        def ready():
            if len(come) < self.size:
                return False
            for clock in come.values():
                machine.learn(clock)
            return True

        return _Request(machine, ready)

    def isend(self, peer, data, tag):
        box = self._machine.mail.setdefault((self._name, self.rank, peer, tag), [])
        self._machine.baton.point()
        box.append((bytes(data), dict(self._machine.host_clock())))
        return _Request(self._machine, lambda: True)

    def irecv(self, peer, data, tag):
        machine = self._machine
        box = machine.mail.setdefault((self._name, peer, self.rank, tag), [])

        def ready():
            if not box:
                return False
            raw, clock = box.pop(0)
            data[:] = np.frombuffer(raw, np.uint8)
            join(machine.baton.me.clock, clock)
            return True

        return _Request(machine, ready)

    def take(self, peer, tag):
        box = self._machine.mail.get((self._name, peer, self.rank, tag))
        return _Request(self._machine, lambda: bool(box.pop(0))) if box else None

    def take_any(self, tag, nbytes):
        del tag, nbytes  # of several nodes

    def keep(self, requests):
        pass

    def shared_window(self, nbytes, node=0):
        del node
        self._made += 1
        key = self._name, self._made
        if key not in self._machine.windows:
            raw = np.zeros(nbytes + 8192, np.uint8)
            shift = -raw.ctypes.data % 4096
            self._machine.windows[key] = raw[shift : shift + nbytes]
        self.allgather(None)
        return _Window(self._machine.windows[key])

    def abort(self, code):
        self.aborted = code

    def free(self):
        pass
