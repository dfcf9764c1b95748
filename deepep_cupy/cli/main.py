"""Find the command, import its module, run it.

A command is a module of this folder, or ``command.py`` of a room of its own, with two functions::

    def add_arguments(parser: argparse.ArgumentParser) -> None: ...
    def run(args: argparse.Namespace) -> int: ...          # the exit code

Only the module of the command that was asked for is imported, so that ``--help``, ``env`` and
``kernels list`` work where CuPy, MPI or a driver are missing or broken.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from deepep_cupy._version import __version__
from deepep_cupy.errors import DeepEPCupyError

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "env": "versions, GPUs, environment variables and the engine that would be chosen",
    "check": "round trips of every mode against the reference on these ranks",
    "kernels": "list, show and compile the CUDA kernels",
    "ptx": "list, show and verify the hand-written PTX modules",
    "litmus": "which loads see what was just written: is the policy of loads right here",
    "bench": "how long operations take, against what the links carry",
}
"""Command → its line in ``--help``."""

_MODULES = {"bench": "bench.command", "litmus": "litmus.command"}
"""Command → the module of ``deepep_cupy`` that runs it, where that is not ``cli.<command>``."""

_EXIT_ERROR = 1
_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments without the program's name; ``None``: those of this process.

    Returns:
        The exit code: 0 if all was well, 1 after an error, 130 after Ctrl-C. Wrong arguments leave
        through ``SystemExit(2)``, as ``argparse`` does.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser(arguments).parse_args(arguments)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
    except DeepEPCupyError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_ERROR
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; nothing is left to be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_ERROR
    return code


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser with the arguments of the command in ``arguments`` alone."""
    parser = argparse.ArgumentParser(
        prog="python -m deepep_cupy",
        description="Expert-parallel dispatch and combine for CuPy and MPI.",
    )
    parser.add_argument("--version", action="version", version=f"deepep_cupy {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{name}: {summary}.")
        if name == asked:
            module = importlib.import_module(f"deepep_cupy.{_MODULES.get(name, f'cli.{name}')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser
