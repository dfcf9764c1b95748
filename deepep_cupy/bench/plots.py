"""matplotlib for the pictures of the benches: without a window, and without its global state."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

from deepep_cupy.errors import PlatformError

__all__ = ["colors", "log_axis", "need_matplotlib", "new_figure"]


def need_matplotlib(command: str) -> None:
    """Check that pictures can be drawn, before minutes are spent.

    Raises:
        PlatformError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PlatformError(
            f"bench {command}: --plot needs matplotlib; pip install 'deepep_cupy[examples]'."
        )


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches, drawn by the Agg renderer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def colors() -> list[Any]:
    """Twenty colors, for pictures with many lines."""
    from matplotlib import colormaps

    return [colormaps["tab20"](i) for i in range(20)]


def log_axis(axes: Any, ticks: Iterable[int], **scale: Any) -> None:
    """A logarithmic x axis with these ticks and no others."""
    ticks = list(ticks)
    axes.set_xscale("log", **scale)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
