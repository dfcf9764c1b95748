"""``bench``: how long things take. Each sub-command has the two functions that a command has."""

from __future__ import annotations

import argparse
from typing import Protocol

from deepep_cupy.bench import flavors_command, jax_command, tune_command
from deepep_cupy.bench.runs import LatencyBench, OperationBench

__all__ = ["SubCommand", "add_arguments", "run"]


class SubCommand(Protocol):
    """What a sub-command offers: an object, or a module with these functions."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add its arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Run it; the exit code."""
        ...


_VERBS: dict[str, tuple[SubCommand, str]] = {
    "dispatch": (
        OperationBench("dispatch"),
        "rows to the ranks of their experts, beside what links carry",
    ),
    "combine": (OperationBench("combine"), "rows back and added up, beside what links carry"),
    "roundtrip": (OperationBench("roundtrip"), "one after the other"),
    "latency": (LatencyBench(), "few tokens: from Python, from graphs, and on the host"),
    "jax": (jax_command, "both inside jax.jit, beside the same calls outside"),
    "tune": (tune_command, "how many blocks are best on these GPUs; kept for later Buffers"),
    "flavors": (flavors_command, "kinds of loads and hints to L2, and what they mean for a Buffer"),
}
"""Verb → its sub-command, and one line for ``--help``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all sub-commands."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (command, summary) in _VERBS.items():
        command.add_arguments(verbs.add_parser(name, help=summary, description=summary))


def run(args: argparse.Namespace) -> int:
    """Run one; the exit code."""
    command, _ = _VERBS[args.verb]
    return command.run(args)
