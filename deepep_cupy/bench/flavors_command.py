"""``bench flavors``: what kinds of loads and hints to L2 are worth, measured here.

Two parts. *Copies* move the same bytes with each kind of load, and by the copy engine with each
hint, over numbers of SMs. *Whole* times dispatch and combine with ``DEEPEP_CUPY_LOADS=nc`` against
``coherent``, on both paths. Rank 0 prints tables, writes JSON and draws a plot.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepep_cupy.bench.flavors import CLASSES, FLAVORS, Copies, Flavor, Whole
from deepep_cupy.bench.options import check_files
from deepep_cupy.bench.plots import log_axis, new_figure
from deepep_cupy.cli.progress import Progress
from deepep_cupy.cli.ranks import mpi, world
from deepep_cupy.cli.table import columns
from deepep_cupy.errors import ContractError

__all__ = ["add_arguments", "run"]

_FAST, _SLOW = "ld.global.nc.L1::no_allocate.L2::256B", "ld.volatile.global"
_CLAIM = 30.0
"""Percent less time that articles promise for ``_FAST`` in place of ``_SLOW``."""
_MOST = 1 << 24
_OPERATIONS = {
    "layout": "dispatch from topk_idx",
    "dispatch": "dispatch with a handle",
    "combine": "combine",
}
_QUICK = {"sms": "8,16,64", "rows": 1024, "repeats": 6, "tokens": 512, "whole_sms": "16"}
_FULL = {
    "sms": "2,4,8,16,24,64,132",
    "rows": 8192,
    "repeats": 20,
    "tokens": 4096,
    "whole_sms": "8,16,24",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench flavors``."""
    parser.add_argument("--quick", action="store_true", help="fewer and smaller: to try it out")
    parser.add_argument("--sms", help=f"of the copies (default: {_FULL['sms']})")
    parser.add_argument("--rows", type=int, help=f"of each copy (default: {_FULL['rows']})")
    parser.add_argument("--row-bytes", type=int, default=14336, help="default: 14336")
    parser.add_argument("--repeats", type=int, help=f"timed calls (default: {_FULL['repeats']})")
    parser.add_argument(
        "--tokens", type=int, help=f"a rank, of whole operations (default: {_FULL['tokens']})"
    )
    parser.add_argument("--hidden", type=int, default=7168, help="of these (default: 7168)")
    parser.add_argument(
        "--whole-sms", help=f"of whole operations (default: {_FULL['whole_sms']}); none: no such"
    )
    parser.add_argument("--no-copies", action="store_true", help="whole operations alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; 1 when a copy was wrong or results differ. Collective."""
    defaults = _QUICK if args.quick else _FULL
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    sms, whole_sms = _numbers("--sms", args.sms), _numbers("--whole-sms", args.whole_sms)
    for name in ("rows", "row_bytes", "repeats", "tokens", "hidden"):
        if not 1 <= getattr(args, name) <= _MOST:
            raise ContractError(
                f"bench flavors: argument --{name.replace('_', '-')} must be at least 1 and at "
                f"most {_MOST}, got {getattr(args, name)}."
            )
    if args.row_bytes % 16:
        raise ContractError(
            f"bench flavors: argument --row-bytes must be a multiple of 16, got {args.row_bytes}."
        )
    check_files("flavors", args)
    measuring = _Measuring(args)
    results = measuring.measure([] if args.no_copies else sms, whole_sms)
    if measuring.rank == 0:
        print(_report(results))
        if args.json is not None:
            args.json.write_text(json.dumps(results.as_json(), indent=1) + "\n", encoding="utf-8")
        if args.plot is not None:
            _plot(results, args.plot)
    return 1 if results.wrong else 0


def _numbers(name: str, text: str) -> list[int]:
    if text == "none":
        return []
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ContractError(
            f"bench flavors: argument {name} must be numbers with commas between, got {text!r}."
        )
    return [int(word) for word in words]


# ------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Point:
    """The time of one copy on the slowest rank: what is copied, how, and by how many SMs."""

    kind: str
    flavor: str
    sms: int
    us: float
    gb_s: float


@dataclass(frozen=True)
class Pair:
    """The times of one operation with each of the two kinds of loads."""

    path: str
    operation: str
    sms: int
    coherent_us: float
    nc_us: float

    @property
    def saved(self) -> float:
        """Percent of the time that ``nc`` saves."""
        return 100.0 * (1.0 - self.nc_us / self.coherent_us)


@dataclass
class Results:
    """All figures of ``bench flavors``, and what they were measured on."""

    gpu: str
    ranks: int
    nbytes: int
    tokens: int
    hidden: int
    points: list[Point]
    pairs: list[Pair]
    wrong: list[str]

    def as_json(self) -> dict[str, Any]:
        """For ``json.dumps``."""
        return asdict(self)


class _Measuring:
    """Both parts on these ranks. All of it is collective."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._comm = world("bench flavors")
        self._group = mpi("bench flavors").MPIGroup(self._comm)
        self.rank: int = self._comm.rank

    def measure(self, sms: Sequence[int], whole_sms: Sequence[int]) -> Results:
        """Measure the copies by these numbers of SMs, and whole operations by those."""
        from deepep_cupy import Buffer

        args = self._args
        with Buffer(
            self._comm,
            num_max_tokens_per_rank=64,
            hidden=args.hidden,
            num_topk=0,
            dtype="bfloat16",
            engine="cuda",
        ) as buffer:
            device = int(buffer.device or 0)
            cupy = importlib.import_module("cupy")
            properties = cupy.cuda.runtime.getDeviceProperties(device)
            self._num_sms = int(properties["multiProcessorCount"])
            self._arch = 10 * int(properties["major"]) + int(properties["minor"])
            results = Results(
                gpu=bytes(properties["name"]).decode(errors="replace"),
                ranks=self._comm.size,
                nbytes=args.rows * args.row_bytes,
                tokens=args.tokens,
                hidden=args.hidden,
                points=[],
                pairs=[],
                wrong=[],
            )
            todo = list(self._copies([each for each in sms if each <= self._num_sms]))
            total = len(todo) + 2 * len(_OPERATIONS) * len(whole_sms)
            self._bar = Progress(total, shown=self.rank == 0)
            if todo:
                self._measure_copies(results, todo, buffer.barrier, device)
            buffer.check()
        for path in ("ldst", "bulk") if self._arch >= 90 else ("ldst",):
            for number in whole_sms:
                self._measure_whole(results, path, min(number, self._num_sms))
        self._bar.clear()
        return results

    def _copies(self, sms: Sequence[int]) -> Iterator[tuple[str, Flavor, int]]:
        for kind in CLASSES:
            for flavor in FLAVORS:
                if flavor.bulk and not 90 <= self._arch < 120:
                    continue  # no bulk copies, or too little shared memory for these
                for number in sms:
                    yield kind, flavor, number

    def _measure_copies(
        self, results: Results, todo: Sequence[tuple[str, Flavor, int]], barrier: Any, device: int
    ) -> None:
        copies = Copies(self._group, device, results.nbytes, barrier)
        results.nbytes = copies.nbytes
        checked = set()
        for number, (kind, flavor, sms) in enumerate(todo):
            self._bar.update(number, f"{kind}, {flavor.name}, {sms} SMs")
            if (kind, flavor) not in checked:
                checked.add((kind, flavor))
                if not copies.check(kind, flavor, sms):
                    results.wrong.append(f"{kind} with {flavor.name}: wrong bytes")
            us = copies.measure(kind, flavor, sms, self._args.repeats)
            gb_s = copies.nbytes / us / 1e3
            results.points.append(Point(kind, flavor.name, sms, us, gb_s))
        copies.close()

    def _measure_whole(self, results: Results, path: str, sms: int) -> None:
        args = self._args
        whole = Whole(
            self._comm,
            path=path,
            num_sms=sms,
            tokens=args.tokens,
            hidden=args.hidden,
            allgather=self._group.allgather,
        )
        if not whole.same_results():
            results.wrong.append(f"path {path}, {sms} SMs: nc and coherent give other bytes")
        for operation in _OPERATIONS:
            self._bar.update(len(results.points) + len(results.pairs), f"{operation}, {path}")
            times = whole.measure(operation, args.repeats)
            pair = Pair(path, operation, sms, times["coherent"], times["nc"])
            results.pairs.append(pair)
        whole.close()


# -------------------------------------------------------------------------------------- printing


def _report(results: Results) -> str:
    """All tables, and whether the claim of 30 % was reached."""
    parts = [
        f"{results.ranks} ranks on {results.gpu}; medians of the slowest rank, L2 emptied, ranks "
        "begin together and all move at once"
    ]
    for kind, description in CLASSES.items():
        points = [point for point in results.points if point.kind == kind]
        if not points:
            continue
        sms = list(dict.fromkeys(point.sms for point in points))
        head = (f"{kind}: {description}", *(f"{number} SMs" for number in sms))
        for what, cell in (("GB/s", "gb_s"), ("us", "us")):
            rows = [
                (name, *(f"{getattr(point, cell):.0f}" for point in points if point.flavor == name))
                for name in dict.fromkeys(point.flavor for point in points)
            ]
            table = columns((head[0], *head[1:]), rows)
            parts.append(f"\n{results.nbytes / 1e6:.0f} MB a rank, {what}\n{table}")
    if results.points:
        parts.append("\n" + "\n".join(_claim(results.points)))
    if results.pairs:
        pairs = [
            (
                pair.path,
                _OPERATIONS[pair.operation],
                pair.sms,
                f"{pair.coherent_us:.1f}",
                f"{pair.nc_us:.1f}",
                f"{pair.saved:+.1f} %",
            )
            for pair in results.pairs
        ]
        head = ("path", "operation", "SMs", "coherent us", "nc us", "nc saves")
        parts.append(
            f"\nwhole operations, {results.tokens} tokens a rank, H={results.hidden}, bfloat16, "
            f"top-8\n{columns(head, pairs)}"
        )
    parts += [f"WRONG: {each}" for each in results.wrong]
    return "\n".join(parts)


def _claim(points: Sequence[Point]) -> Iterator[str]:
    """What ``nc`` saves of the time that ``volatile`` loads take, and whether it is 30 %."""
    times = {(point.kind, point.flavor, point.sms): point.us for point in points}
    saved = {
        (kind, sms): 100.0 * (1.0 - times[kind, _FAST, sms] / us)
        for (kind, flavor, sms), us in times.items()
        if flavor == _SLOW and (kind, _FAST, sms) in times
    }
    if not saved:
        return
    sms = sorted({number for _, number in saved})
    rows = [
        (kind, *(f"{saved[kind, number]:+.1f} %" for number in sms if (kind, number) in saved))
        for kind in CLASSES
        if any(each == kind for each, _ in saved)
    ]
    yield f"time that {_FAST} saves of {_SLOW}"
    yield columns(("", *(f"{number} SMs" for number in sms)), rows)
    (kind, number), most = max(saved.items(), key=lambda item: item[1])
    reached = sum(each >= _CLAIM for each in saved.values())
    yield (
        f'"{_CLAIM:.0f} % lower latency": reached in {reached} of {len(saved)} cases; the most is '
        f"{most:.1f} % ({kind}, {number} SMs)"
    )


# ----------------------------------------------------------------------------------------- plot


_BASIS = "ld.global"
_CURVES = {
    "ld.volatile.global": ("ld.volatile", "tab:red", "s-"),
    "ld.global.nc": ("nc", "tab:blue", "o-"),
    _FAST: ("nc.L1::no_allocate.L2::256B", "tab:cyan", "^--"),
    "bulk": ("bulk copy", "tab:green", "D-"),
}
"""Loads worth a curve: how the legend calls them, colour, style. The others are in the tables."""
_ROWS = {
    "push": "own rows, pushed to the peer",
    "staged": "arrived rows, copied here",
    "pull": "the peer's rows, pulled",
}


def _plot(results: Results, path: Path) -> None:
    """Per kind of copy, how much faster than ``ld`` a few loads are; then whole operations."""
    kinds = [kind for kind in CLASSES if any(point.kind == kind for point in results.points)]
    panels = len(kinds) + bool(results.pairs)
    if not panels:
        return
    figure = new_figure(4.6 * panels, 4.4)
    figure.set_layout_engine("constrained")
    all_axes = figure.subplots(1, panels, squeeze=False)[0]
    for axes, kind in zip(all_axes, kinds, strict=False):
        speed = {(p.flavor, p.sms): p.gb_s for p in results.points if p.kind == kind}
        sms = sorted({number for flavor, number in speed if flavor == _BASIS})
        axes.axhline(0, color="black", linewidth=1, label="ld")
        for flavor, (name, color, style) in _CURVES.items():
            over = [
                (number, 100.0 * (speed[flavor, number] / speed[_BASIS, number] - 1.0))
                for number in sms
                if (flavor, number) in speed
            ]
            if over:
                axes.plot(*zip(*over, strict=True), style, color=color, label=name, markersize=5)
        log_axis(axes, sms)
        axes.set(xlabel="SMs", title=_ROWS[kind])
        axes.grid(alpha=0.3)
    if kinds:
        all_axes[0].set_ylabel("GB/s: % more than ld")
        names = all_axes[0].get_legend_handles_labels()
        figure.legend(*names, loc="outside lower left", ncols=len(names[1]), frameon=False)
    if results.pairs:
        _plot_whole(all_axes[-1], results.pairs)
    figure.suptitle(
        f"{results.ranks} ranks on {results.gpu}: {results.nbytes / 1e6:.0f} MB of rows a rank"
    )
    figure.savefig(path, dpi=110)


def _plot_whole(axes: Any, pairs: Sequence[Pair]) -> None:
    names = [f"{_OPERATIONS[p.operation]}, {p.path}, {p.sms} SMs" for p in pairs]
    bars = axes.barh(names, [pair.saved for pair in pairs], color="tab:blue")
    axes.bar_label(bars, fmt="%+.1f", padding=3, fontsize=8)
    axes.axvline(0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set(xlabel="% of the time that nc loads save", title="whole operations")
    axes.tick_params(axis="y", labelsize=8)
