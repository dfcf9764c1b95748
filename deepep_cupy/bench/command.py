"""``bench``: how long things take. Each sub-command is a module of its own."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

from deepep_cupy.bench import flavors_command
from deepep_cupy.bench.runs import OperationBench, add_latency_arguments, run_latency

__all__ = ["add_arguments", "run"]

_LATENCY = SimpleNamespace(add_arguments=add_latency_arguments, run=run_latency)
_VERBS: dict[str, tuple[Any, str]] = {
    "dispatch": (
        OperationBench("dispatch"),
        "rows to the ranks of their experts, beside what links carry",
    ),
    "combine": (OperationBench("combine"), "rows back and added up, beside what links carry"),
    "roundtrip": (OperationBench("roundtrip"), "one after the other"),
    "latency": (_LATENCY, "few tokens: from Python, from graphs, and on the host"),
    "flavors": (flavors_command, "kinds of loads and hints to L2, and what they mean for a Buffer"),
}
"""Sub-command → what has ``add_arguments`` and ``run``, as a command's module, and one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all sub-commands."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (module, summary) in _VERBS.items():
        module.add_arguments(verbs.add_parser(name, help=summary, description=summary))


def run(args: argparse.Namespace) -> int:
    """Run one."""
    module, _ = _VERBS[args.verb]
    code: int = module.run(args)
    return code
