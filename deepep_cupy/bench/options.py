"""Options that the benches of operations share, and what is made of them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from deepep_cupy.bench.modes import Mode
from deepep_cupy.bench.plots import need_matplotlib
from deepep_cupy.bench.routing import ROUTINGS, read_choices
from deepep_cupy.bench.timing import BUSY_FLUSHES
from deepep_cupy.bench.workload import Shape
from deepep_cupy.errors import ContractError
from deepep_cupy.protocol.sizes import MAX_TOPK

__all__ = [
    "add_common",
    "check_common",
    "check_files",
    "counts",
    "modes_of_names",
    "numbers",
    "positive",
    "shape_of",
    "tokens_of",
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


def counts(text: str) -> list[int]:
    """``4096,1500`` as numbers from 0 on, not all of them 0."""
    found = [0 if part.strip() == "0" else positive(part) for part in text.split(",")]
    if not any(found):
        raise argparse.ArgumentTypeError(f"must not be 0 alone, got {text!r}")
    return found


def _routing(text: str) -> str:
    """One of the patterns, or the name of a file."""
    if text not in ROUTINGS and not text.endswith(".npy"):
        raise argparse.ArgumentTypeError(
            f"must be {', '.join(ROUTINGS)} or a file .npy, got {text!r}"
        )
    return text


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add them to the parser of a sub-command."""
    add = parser.add_argument
    add("--hidden", type=positive, default=7168, metavar="H", help="elements of a row")
    add("--topk", type=positive, default=8, metavar="K", help="choices of a token")
    add("--experts", type=positive, default=256, metavar="E",
        help="of all ranks; rounded up to a multiple of the ranks")  # fmt: skip
    add("--dtype", choices=_DTYPES, default="bfloat16", help="of rows (default: bfloat16)")
    add("--routing", type=_routing, default="uniform", metavar="NAME",
        help="choices of experts: uniform; zipf, more of the low ones; k-hot, a few on rank 0; or "
        "FILE.npy, integers [ranks, tokens, choices] (K is then the file's)")  # fmt: skip
    add("--exponent", type=float, default=1.0, help="of zipf (default: 1)")
    add("--hot", type=positive, metavar="N", help="experts of k-hot (default: K)")
    add("--seed", type=int, default=0, help="of choices (default: 0)")
    add("--repeats", type=positive, default=20, help="calls a median is taken of (default: 20)")
    add("--busy", type=positive, default=BUSY_FLUSHES, metavar="N",
        help="times 256 MB are written before a call whose host waits (default: 3)")  # fmt: skip
    add("--engine", choices=("auto", "cuda", "host"), default="auto",
        help="as the Buffer's argument; host: times only")  # fmt: skip
    add("--timeout", type=float, default=60.0, metavar="S", help="timeout_s of the Buffers")
    parser.set_defaults(choices=None)
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

    if args.routing.endswith(".npy"):
        try:
            args.choices = read_choices(Path(args.routing), args.experts)
        except ValueError as error:
            raise ContractError(f"bench {operation}: argument --routing: {error}.") from error
        args.topk = args.choices.shape[2]
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


def tokens_of(
    operation: str, args: argparse.Namespace, default: Sequence[int], num_ranks: int
) -> list[int]:
    """``--tokens``; without it the default, or what a file of choices has.

    Raises:
        ContractError: On every rank: the file is of other ranks, or has fewer tokens.
    """
    choices = args.choices
    if choices is None:
        return list(args.tokens or default)
    if len(choices) != num_ranks:
        raise ContractError(
            f"bench {operation}: argument --routing must hold choices of {num_ranks} ranks, got "
            f"those of {len(choices)}."
        )
    most = choices.shape[1]
    found = args.tokens or [each for each in default if each <= most]
    if max(found, default=0) > most:
        raise ContractError(
            f"bench {operation}: argument --tokens must be at most {most}, what the file of "
            f"--routing has of each rank, got {max(found)}."
        )
    return list(found or [most])


def shape_of(args: argparse.Namespace, tokens: Sequence[int]) -> Shape:
    """Sizes and routing as the options say, for at most this many tokens."""
    return Shape(
        num_tokens=max(tokens),
        choices=args.choices,
        hidden=args.hidden,
        num_topk=args.topk,
        num_experts=args.experts,
        dtype=args.dtype,
        routing=args.routing,
        exponent=args.exponent,
        num_hot=args.hot,
        seed=args.seed,
    )
