"""``bench``: how long things take. Each sub-command is a module of its own."""

from __future__ import annotations

import argparse

from deepep_cupy.cli import bench_flavors

__all__ = ["add_arguments", "run"]

_VERBS = {
    "flavors": (bench_flavors, "kinds of loads and hints to L2, and what they mean for a Buffer"),
}
"""Sub-command → its module (``add_arguments`` and ``run``, as a command's), and one line."""


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
