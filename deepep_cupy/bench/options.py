"""Options that the benches of operations share, and what is made of them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from deepep_cupy.bench.modes import Mode
from deepep_cupy.bench.plots import need_matplotlib
from deepep_cupy.bench.routing import ROUTINGS
from deepep_cupy.bench.workload import Shape
from deepep_cupy.errors import ContractError
from deepep_cupy.protocol.sizes import MAX_TOPK

__all__ = [
    "add_common",
    "check_common",
    "check_files",
    "modes_of_names",
    "numbers",
    "positive",
    "shape_of",
]

_PICTURES = (".png", ".pdf", ".svg")
_MOST_EXPONENT = 20
_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "uint8", "int32")


def positive(text: str) -> int:
    """A whole number from 1 on."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def numbers(text: str) -> list[int]:
    """``8,16,24`` as numbers; each once, in this order."""
    return list(dict.fromkeys(positive(part) for part in text.split(",")))


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add them to the parser of a sub-command."""
    add = parser.add_argument
    add("--hidden", type=positive, default=7168, metavar="H", help="elements of a row")
    add("--topk", type=positive, default=8, metavar="K", help="choices of a token")
    add("--experts", type=positive, default=256, metavar="E",
        help="of all ranks; rounded up to a multiple of the ranks")  # fmt: skip
    add("--dtype", choices=_DTYPES, default="bfloat16", help="of rows (default: bfloat16)")
    add("--routing", choices=ROUTINGS, default="uniform",
        help="choices of experts; zipf: more of the low ones, k-hot: a few on rank 0")  # fmt: skip
    add("--exponent", type=float, default=1.0, help="of zipf (default: 1)")
    add("--hot", type=positive, metavar="N", help="experts of k-hot (default: K)")
    add("--seed", type=int, default=0, help="of choices (default: 0)")
    add("--repeats", type=positive, default=20, help="calls a median is taken of (default: 20)")
    add("--engine", choices=("auto", "cuda", "host"), default="auto",
        help="as the Buffer's argument; host: times only")  # fmt: skip
    add("--timeout", type=float, default=60.0, metavar="S", help="timeout_s of the Buffers")
    add("--no-nccl", action="store_true", help="do not compare with NCCL")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--plot", type=Path, metavar="FILE.png", help="draw the times; needs matplotlib")


def check_common(operation: str, args: argparse.Namespace) -> None:
    """Check what argparse cannot, before anything is measured.

    Raises:
        ContractError: On every rank: two options do not fit together, or a file cannot be written.
        PlatformError: On every rank: a picture is wanted and matplotlib is not installed.
    """

    def refuse(option: str, complaint: str) -> None:
        raise ContractError(f"bench {operation}: argument --{option} {complaint}.")

    if args.topk > min(MAX_TOPK, args.experts):
        refuse("topk", f"must be at most {min(MAX_TOPK, args.experts)}, got {args.topk}")
    if args.hot is not None and not args.topk <= args.hot <= args.experts:
        refuse("hot", f"must be {args.topk} to {args.experts}, got {args.hot}")
    if args.hot is not None and args.routing != "k-hot":
        refuse("hot", f"is for --routing k-hot, got --routing {args.routing}")
    if not 0 <= args.exponent <= _MOST_EXPONENT:
        refuse("exponent", f"must be 0 to {_MOST_EXPONENT}, got {args.exponent:g}")
    if not 0 < args.timeout < math.inf:
        refuse("timeout", f"must be a positive number of seconds, got {args.timeout:g}")
    if args.seed < 0:
        refuse("seed", f"must be 0 or more, got {args.seed}")
    check_files(operation, args)


def check_files(operation: str, args: argparse.Namespace) -> None:
    """Check that ``--json`` and ``--plot`` can be written, before anything is measured.

    Raises:
        ContractError: On every rank: a file cannot be written, or is no kind of picture.
        PlatformError: On every rank: a picture is wanted and matplotlib is not installed.
    """
    for option in ("json", "plot"):
        path = getattr(args, option)
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ContractError(
                f"bench {operation}: argument --{option} must name a file in a folder that "
                f"exists, got {path}."
            )
    if args.plot is not None:
        if args.plot.suffix not in _PICTURES:
            raise ContractError(
                f"bench {operation}: argument --plot must end with {' or '.join(_PICTURES)}, got "
                f"{args.plot}."
            )
        need_matplotlib(operation)


def modes_of_names(operation: str, text: str, parse: Callable[[str], Mode]) -> list[Mode]:
    """Modes by their names, separated by commas; each once.

    Raises:
        ContractError: One of the names is unknown.
    """
    try:
        return list(dict.fromkeys(parse(name) for name in text.split(",")))
    except ValueError as error:
        raise ContractError(f"bench {operation}: argument --mode: {error}.") from error


def shape_of(args: argparse.Namespace, tokens: int) -> Shape:
    """Sizes and routing as the options say, for this many tokens."""
    return Shape(
        num_tokens=tokens,
        hidden=args.hidden,
        num_topk=args.topk,
        num_experts=args.experts,
        dtype=args.dtype,
        routing=args.routing,
        exponent=args.exponent,
        num_hot=args.hot,
        seed=args.seed,
    )
