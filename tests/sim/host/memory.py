"""Bytes of the ranks' GPUs, and an order of all that touches them.

A clock says how much of each stream and host thread is known to be over: {name: number}. Work may
touch bytes only if what touched them before in another way is in its clock.
"""

from __future__ import annotations

import bisect
import ctypes

import numpy as np

__all__ = ["Memory", "RaceError", "at", "join"]


class RaceError(AssertionError):
    """Two accesses to the same bytes, one of them a write, that nothing orders."""


def at(address, shape, dtype=np.int32):
    """The array at an address."""
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.zeros(shape, dtype)
    size = count * np.dtype(dtype).itemsize
    raw = np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8)
    return raw.view(dtype).reshape(shape)


def join(clock, other):
    """Let a clock know what another one does."""
    for name, number in other.items():
        if clock.get(name, 0) < number:
            clock[name] = number


class _Touched:
    """One access that may still matter."""

    __slots__ = ("begin", "end", "name", "number", "what", "write")

    def __init__(self, begin, end, write, name, number, what):
        self.begin, self.end, self.write = begin, end, write
        self.name, self.number, self.what = name, number, what


class Memory:
    """All memory there is. Chunks live as long as this object: a late kernel touches no other."""

    def __init__(self):
        self._chunks, self._begins, self._touched = [], [], []

    def take(self, nbytes, fill=0xA5):
        """Address of new bytes, a multiple of 512."""
        raw = np.full(nbytes + 1024, fill, np.uint8)
        address = -(-raw.ctypes.data // 512) * 512
        i = bisect.bisect(self._begins, address)
        self._begins.insert(i, address)
        self._chunks.insert(i, raw)
        self._touched.insert(i, [])
        return address

    def touch(self, clock, name, what, ranges):
        """A step of ``name``, whose clock this is, touches (address, bytes, whether it writes)."""
        for begin, nbytes, write in ranges:
            if nbytes:
                self._touch(clock, name, what, begin, begin + nbytes, write)

    def _touch(self, clock, name, what, begin, end, write):
        i = bisect.bisect(self._begins, begin) - 1
        assert i >= 0, f"{what}: address {begin:#x} is nowhere"
        chunk = self._chunks[i]
        assert end <= chunk.ctypes.data + len(chunk), f"{what}: beyond its memory"
        left = []
        for other in self._touched[i]:
            if other.begin < end and begin < other.end and (write or other.write):
                if clock.get(other.name, 0) < other.number:
                    raise RaceError(
                        f"{what} {'writes' if write else 'reads'} {end - begin} bytes at "
                        f"{begin - self._begins[i]:#x} that {other.what} "
                        f"{'writes' if other.write else 'reads'}, and nothing orders them"
                    )
                if write and begin <= other.begin and other.end <= end:
                    continue
            elif (
                other.name == name
                and not (write or other.write)
                and begin <= other.begin
                and other.end <= end
            ):
                continue  # read again, later
            left.append(other)
        left.append(_Touched(begin, end, write, name, clock[name], what))
        self._touched[i] = left
