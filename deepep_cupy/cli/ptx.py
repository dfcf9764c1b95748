"""``ptx``: list, show and verify the hand-written PTX modules. None of it needs a GPU or CuPy."""

from __future__ import annotations

import argparse

from deepep_cupy import env
from deepep_cupy.cli.table import columns
from deepep_cupy.engines.gpu.ptx_modules import assemble, get_module, list_modules, verify
from deepep_cupy.errors import CompileError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``list``, ``show`` and ``verify``."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verbs.add_parser("list", help="modules, targets, twins and entries")
    show = verbs.add_parser("show", help="the text of one module")
    show.add_argument("name", metavar="NAME")
    check = verbs.add_parser("verify", help="compare text and manifest, assemble with ptxas")
    check.add_argument(
        "--no-ptxas", action="store_true", help="compare only, where there is no ptxas"
    )


def run(args: argparse.Namespace) -> int:
    """Print; under ``mpirun`` rank 0 alone works and prints."""
    if env.launcher_rank() != 0:
        return 0
    verbs = {"list": _list, "show": _show, "verify": _verify}
    return verbs[args.verb](args)


def _list(args: argparse.Namespace) -> int:
    del args
    rows = []
    for module in list_modules():
        for entry in module.entries:
            rows.append(
                (
                    module.name,
                    module.target,
                    module.ptx_version,
                    module.twin or "-",
                    entry.name,
                    len(entry.params),
                    module.doc,
                )
            )
    print(columns(("module", "target", "PTX", "twin", "entry", "params", "what it does"), rows))
    return 0


def _show(args: argparse.Namespace) -> int:
    print(get_module(args.name).path.read_text(encoding="utf-8"), end="")
    return 0


def _verify(args: argparse.Namespace) -> int:
    problems = verify()
    modules = [module for module in list_modules() if module.path.is_file()]
    if not args.no_ptxas:
        for module in modules:
            problems += [f"{module.file}: {each}" for each in assemble(module.path, module.target)]
    if problems:
        raise CompileError("ptx verify:\n  " + "\n  ".join(problems))
    how = "text and manifest agree" if args.no_ptxas else "text and manifest agree, ptxas takes all"
    print(f"{len(modules)} modules: {how}")
    return 0
