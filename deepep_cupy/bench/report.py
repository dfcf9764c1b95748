"""What a bench of operations shows on rank 0: a progress bar, a table, JSON, a picture."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deepep_cupy._version import __version__
from deepep_cupy.bench.measure import HOST_CALLS, Measurement
from deepep_cupy.bench.plots import colors, log_axis, new_figure
from deepep_cupy.bench.workload import Ranks, Shape
from deepep_cupy.cli.progress import Progress
from deepep_cupy.cli.table import columns

__all__ = ["BenchReport", "Steps", "heading", "table"]

_PACKAGES = ("numpy", "cupy-cuda13x", "cupy-cuda12x", "mpi4py")

METHOD = {
    True: "times: µs, median of {repeats}, slowest rank; events around the call, behind 3 x 256 MB "
    "written and a barrier on the device; host: median and least of {host_calls} calls on an idle "
    "GPU",
    False: "host engine: times by the host's clock alone, no ceilings, graphs or links; it is for "
    "trying programs out",
}

ABOVE = (
    "of ceiling: none where a call is faster than the bare copy; the copy gives each block a fixed "
    "share of the rows, calls let blocks draw theirs one by one"
)


class Steps:
    """Steps of a bench on a progress bar.

    Args:
        total: Steps.
        shown: Whether this rank draws the bar.
    """

    def __init__(self, total: int, *, shown: bool) -> None:
        self._bar = Progress(total, shown=shown)
        self._done = 0

    def __call__(self, what: str) -> None:
        """Begin the next step."""
        self._bar.update(self._done, what)
        self._done += 1

    def clear(self) -> None:
        """Wipe the bar: all is done."""
        self._bar.clear()


def heading(command: str, shape: Shape, ranks: Ranks, tokens: str) -> str:
    """One line: what is measured, and on which ranks."""
    size, gpus = ranks.size, len(set(ranks.gpus))
    where = f"{size} rank{'s' * (size > 1)}"
    if ranks.gpu:
        where += f" on {gpus} GPU{'s' * (gpus > 1)}"
    skew = {"zipf": f" (exponent {shape.exponent:g})",
            "k-hot": f" ({shape.num_hot or shape.num_topk} experts)"}  # fmt: skip
    return (
        f"bench {command}: {tokens} tokens a rank, rows of {shape.hidden} {shape.dtype} "
        f"({shape.row_bytes()} bytes), top-{shape.num_topk} of {shape.experts_of(size)} experts, "
        f"{shape.routing}{skew.get(shape.routing, '')}; {where}, engine {ranks.engine}"
    )


# ---------------------------------------------------------------------------------------- table

_COLUMNS: dict[str, Callable[[Measurement], Any]] = {
    "T": lambda row: row.num_tokens,
    "SMs": lambda row: row.num_sms,
    "what": lambda row: row.what,
    "µs": lambda row: row.us,
    "graph µs": lambda row: row.graph_us,
    "host µs": lambda row: row.host_us,
    "host min": lambda row: row.host_min_us,
    "wire MB": lambda row: row.wire_bytes / 1e6 or None,
    "wire GB/s": lambda row: row.wire_gb_s or None,
    "logical GB/s": lambda row: row.logical_gb_s or None,
    "floor µs": lambda row: row.floor_us,
    "of ceiling": lambda row: row.ratio if row.kind != "ceiling" else None,
}
_BYTES = ("wire MB", "wire GB/s", "logical GB/s")


def table(rows: Sequence[Measurement]) -> str:
    """Lay out measurements; numbers flush right, columns without a value left out.

    Rows of several numbers of tokens are about time: the columns of bytes are left out.
    """
    wanted = dict(_COLUMNS)
    if len({row.num_tokens for row in rows}) > 1:
        wanted = {name: get for name, get in wanted.items() if name not in _BYTES}
        wanted["what"] = name_of
    else:
        del wanted["T"]
    shown: dict[str, list[str]] = {}
    for name, get in wanted.items():
        cells = [_cell(get(row)) for row in rows]
        if all(cell == "-" for cell in cells):
            continue
        shown[name] = cells
    return columns(list(shown), list(zip(*shown.values(), strict=True)), words={"what"})


def name_of(row: Measurement) -> str:
    """The name of a row among rows of several operations."""
    return row.what if row.kind != "call" else f"{row.operation} {row.what}"


def _cell(value: Any) -> str:
    """A number with three significant digits, or with all before the point; None as ``-``."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 1000 else 0}f}"


# --------------------------------------------------------------------------------------- report


class BenchReport:
    """Rows and notes of one bench: as text, as JSON, as a picture.

    Args:
        command: ``dispatch`` and so on.
        shape: What was measured.
        ranks: The ranks, settled.
        repeats: Calls of a median.
        tokens: T, in words.
    """

    def __init__(
        self, command: str, shape: Shape, ranks: Ranks, repeats: int, tokens: str = ""
    ) -> None:
        self.rows: list[Measurement] = []
        self.notes: list[str] = []
        self._command, self._shape, self._ranks, self._repeats = command, shape, ranks, repeats
        self._tokens = tokens or str(shape.num_tokens)

    def note(self, line: str) -> None:
        """A line below the table; each once."""
        if line not in self.notes:
            self.notes.append(line)

    def text(self) -> str:
        """Heading, table, notes."""
        for row in self.rows:
            if row.note:
                self.note(f"{row.operation} {row.what}: {row.note}")
        if any(row.above_ceiling for row in self.rows):
            self.note(ABOVE)
        method = METHOD[self._ranks.gpu].format(
            repeats=self._repeats, host_calls=HOST_CALLS * self._repeats
        )
        return "\n".join(
            [
                heading(self._command, self._shape, self._ranks, self._tokens),
                table(self.rows),
                method,
                *self.notes,
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        shape, ranks = self._shape, self._ranks
        return {
            "command": f"bench {self._command}",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": _machine(ranks),
            "settings": {
                "num_ranks": ranks.size,
                "num_gpus": len(set(ranks.gpus)) if ranks.gpu else 0,
                "engine": ranks.engine,
                "hidden": shape.hidden,
                "num_topk": shape.num_topk,
                "num_experts": shape.experts_of(ranks.size),
                "dtype": shape.dtype,
                "routing": shape.routing,
                "exponent": shape.exponent,
                "num_hot": shape.num_hot,
                "seed": shape.seed,
                "repeats": self._repeats,
            },
            "rows": [row.as_dict() for row in self.rows],
            "notes": self.notes,
        }

    def publish(self, json_file: Path | None, plot_file: Path | None) -> None:
        """Print, and write what was asked for; nothing on ranks other than 0."""
        if self._ranks.rank:
            return
        print(self.text(), flush=True)
        if json_file is not None:
            json_file.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        if plot_file is not None:
            title = heading(self._command, self._shape, self._ranks, self._tokens)
            plot(self.rows, title, plot_file)


def _machine(ranks: Ranks) -> dict[str, Any]:
    versions = {"deepep_cupy": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine: dict[str, Any] = {"python": platform.python_version(), "packages": versions}
    if ranks.gpu:
        runtime = ranks.xp.cuda.runtime
        properties = runtime.getDeviceProperties(ranks.device)
        machine["gpu"] = properties["name"].decode()
        machine["gpu_sms"] = int(properties["multiProcessorCount"])
        machine["cuda_driver"] = int(runtime.driverGetVersion())
    return machine


# -------------------------------------------------------------------------------------- picture

_STYLES = {"call": "-", "ceiling": "--", "baseline": ":"}


def plot(rows: Sequence[Measurement], title: str, path: Path) -> None:
    """Times over SMs, or over tokens where there are several, or as bars where there is one of
    each; ceilings are dashed."""
    over_tokens = len({row.num_tokens for row in rows}) > 1
    at = _COLUMNS["T" if over_tokens else "SMs"]
    ticks = sorted({at(row) for row in rows} - {None})
    figure = new_figure(8, 5)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    if len(ticks) > 1:
        _lines(axes, rows, at, graphs=over_tokens)
        log_axis(axes, ticks, base=2)
        axes.set_xlabel("tokens a rank" if over_tokens else "SMs")
        axes.set_ylabel("µs")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
    else:
        _bars(axes, rows)
    axes.set_title(title, fontsize=8, wrap=True)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def _lines(
    axes: Any, rows: Sequence[Measurement], at: Callable[[Measurement], Any], *, graphs: bool
) -> None:
    axes.set_prop_cycle(color=colors())  # no two lines alike
    for name in dict.fromkeys(name_of(row) for row in rows):
        points = [row for row in rows if name_of(row) == name]
        style = _STYLES[points[0].kind]
        if at(points[0]) is None:
            axes.axhline(points[0].us, linestyle=style, color="grey", label=name)
            continue
        xs = [at(row) for row in points]
        (line,) = axes.plot(xs, [row.us for row in points], style, marker="o", label=name)
        captured = [(x, row.graph_us) for x, row in zip(xs, points, strict=True) if row.graph_us]
        if graphs and captured:
            where, times = zip(*captured, strict=True)
            label, color = f"{name}, in a graph", line.get_color()
            axes.plot(where, times, "--", marker=".", color=color, label=label)


def _bars(axes: Any, rows: Sequence[Measurement]) -> None:
    colors = {"call": "tab:blue", "ceiling": "tab:green", "baseline": "tab:grey"}
    names = [name_of(row) for row in rows]
    bars = axes.barh(names, [row.us for row in rows], color=[colors[row.kind] for row in rows])
    axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)  # the number behind the longest bar is inside the picture
    axes.set_xlabel("µs")
