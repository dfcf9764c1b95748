"""A progress bar on standard error, drawn only where that is a terminal."""

from __future__ import annotations

import sys
import time

__all__ = ["Progress"]

_WIDTH = 30
_EVERY_S = 0.1


class Progress:
    """How much of a number of steps is done, and how long the rest may take.

    Args:
        total: Steps.
        shown: False: draws nothing (ranks other than 0).
    """

    def __init__(self, total: int, *, shown: bool = True) -> None:
        self._total = total
        self._shown = shown and sys.stderr.isatty()
        self._start = time.monotonic()
        self._next = 0.0
        self._drawn = 0

    def update(self, done: int, what: str = "") -> None:
        """Redraw, at most ten times a second."""
        now = time.monotonic()
        if not self._shown or now < self._next:
            return
        self._next = now + _EVERY_S
        filled = _WIDTH * done // max(1, self._total)
        left = (now - self._start) * (self._total - done) / max(1, done)
        bar = (
            f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {done}/{self._total}, {left:.0f} s  {what}"
        )
        self._draw(bar[:110])

    def clear(self) -> None:
        """Wipe the bar, before a line is printed."""
        if self._drawn:
            self._draw("")
            self._drawn = 0
            self._next = 0.0

    def _draw(self, text: str) -> None:
        print(f"\r{text:<{self._drawn}}", end="\r", file=sys.stderr, flush=True)
        self._drawn = len(text)
