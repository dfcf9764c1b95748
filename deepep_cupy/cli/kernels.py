"""``kernels``: list, show, compile and compare the CUDA kernels. None of it needs a GPU.

``list`` and ``show --format cuda`` need NumPy alone; everything else CuPy and NVRTC, no driver.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from deepep_cupy import env
from deepep_cupy.cli.table import columns
from deepep_cupy.engines.gpu import loads as policy
from deepep_cupy.engines.gpu.kernels import get_kernel, kernel_source, list_kernels
from deepep_cupy.engines.gpu.kernels import shape_constants as constants_of
from deepep_cupy.errors import CompileError, ContractError, PlatformError
from deepep_cupy.inspect.difference import compare, difference_page
from deepep_cupy.inspect.extract import around, sass_with_lines
from deepep_cupy.inspect.listing import Listing
from deepep_cupy.inspect.page import index_page, kernel_page
from deepep_cupy.jit.build import Built, Request, build, open_cache
from deepep_cupy.jit.compile import Compiled, compile_text, parse_arch, parse_target
from deepep_cupy.jit.inspect import count_instructions, memory_instructions
from deepep_cupy.jit.spec import KernelSpec
from deepep_cupy.protocol.nodes import MAX_RANKS_PER_NODE

__all__ = ["add_arguments", "run"]

_LOADS = ("coherent", "nc")
_SHAPE = (
    ("ranks", 1, MAX_RANKS_PER_NODE),
    ("hidden", 1, 1 << 30),
    ("itemsize", 1, 1 << 10),
    ("threads", 32, 1024),
)
"""Options of the shape, their smallest and largest values."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``list``, ``show``, ``compile`` and ``diff``."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verbs.add_parser("list", help="names, files and oldest architectures")

    show = verbs.add_parser(
        "show", help="the text, the PTX or the machine code of one kernel; pages of all"
    )
    show.add_argument("name", metavar="NAME", nargs="?", help="may be left out with --html alone")
    show.add_argument("--format", choices=("cuda", "ptx", "sass"), help="default: cuda")
    show.add_argument(
        "--instructions", action="store_true", help="a table of the memory instructions instead"
    )
    show.add_argument(
        "--html",
        type=Path,
        metavar="PATH",
        help="write CUDA, PTX and machine code side by side: one kernel to a file, all to a folder",
    )
    show.add_argument(
        "--around",
        metavar="OPCODE|FILE:LINE",
        help="CUDA, PTX and machine code round an instruction or a line of the text",
    )
    show.add_argument(
        "--lines", type=int, default=3, metavar="N", help="with --around: N before and after"
    )
    show.add_argument("--arch", default="sm_90", help="e.g. sm_90 (the default)")
    show.add_argument(
        "--loads",
        choices=("auto", *_LOADS),
        help="default: DEEPEP_CUPY_LOADS; auto: what the policy table says of the architecture",
    )
    _add_shape(show)

    compile_ = verbs.add_parser(
        "compile", help="registers, shared memory and spills; fills the cache"
    )
    compile_.add_argument("names", metavar="NAME", nargs="*", help="default: all kernels")
    compile_.add_argument("--arch", action="append", help="may be repeated; default: sm_90")
    compile_.add_argument("--loads", nargs="+", choices=_LOADS, default=["coherent"])
    compile_.add_argument("--strict", action="store_true", help="fail on spills and on any stack")
    compile_.add_argument("--file", type=Path, help="compile this whole text instead")
    _add_shape(compile_)

    diff = verbs.add_parser(
        "diff",
        help="a kernel compiled two ways, or two kernels",
        epilog="A and B are NAME[:WORD,...]; words are coherent, nc, sm_90, ranks=8, hidden=4096, "
        "itemsize=2, threads=256. With A alone, its two --loads are compared.",
    )
    diff.add_argument("name", metavar="A")
    diff.add_argument("other", metavar="B", nargs="?")
    diff.add_argument("--loads", nargs=2, choices=_LOADS, default=["coherent", "nc"])
    diff.add_argument("--arch", default="sm_90")
    diff.add_argument("--html", type=Path, metavar="FILE", help="write a page")
    _add_shape(diff)


def _add_shape(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("what the text is specialised for")
    shape.add_argument("--ranks", type=int, default=2, metavar="R")
    shape.add_argument("--hidden", type=int, default=7168, metavar="H")
    shape.add_argument("--itemsize", type=int, default=2, metavar="BYTES", help="of one element")
    shape.add_argument("--threads", type=int, metavar="N", help="per block")


def run(args: argparse.Namespace) -> int:
    """Print; under ``mpirun`` rank 0 alone works and prints."""
    if env.launcher_rank() != 0:
        return 0
    verbs = {"list": _list, "show": _show, "compile": _compile, "diff": _diff}
    return verbs[args.verb](args)


def _list(args: argparse.Namespace) -> int:
    del args
    rows = [
        (spec.name, spec.source, f"sm_{spec.min_arch}", len(spec.params), spec.doc)
        for spec in list_kernels()
    ]
    print(columns(("kernel", "file", "from", "params", "what it does"), rows))
    return 0


def _show(args: argparse.Namespace) -> int:
    loads = _loads(args)
    if args.name is None:
        if args.html is None:
            raise ContractError("kernels show: give a NAME, or --html FOLDER for pages of all")
        return _write_pages(args, loads)
    spec = get_kernel(args.name)
    ways = [
        f"--{name}"
        for name in ("html", "around", "instructions", "format")
        if getattr(args, name) not in (None, False)
    ]
    if args.instructions and args.format not in (None, "ptx"):
        raise ContractError(
            f"kernels show: argument --instructions is a table made of the PTX and goes without "
            f"--format {args.format}"
        )
    if len(ways) > 1 and ways != ["--instructions", "--format"]:
        raise ContractError(f"kernels show: {' and '.join(ways)} do not go together: give one")
    if ways in ([], ["--format"]) and args.format in (None, "cuda"):
        print(kernel_source(spec.name, args.arch, **_shape(args, loads)), end="")
        return 0
    built = _build(spec, args.arch, args, loads)
    if args.html is not None:
        page = kernel_page(_listing(built), _how(args, loads))
        return _report_page(_write(args.html, page))
    if args.around is not None:
        if args.lines < 0:
            raise ContractError("kernels show: --lines must be at least 0")
        print(around(_listing(built), args.around, args.lines, colour=sys.stdout.isatty()))
    elif args.instructions:
        print(_instruction_table(built.compiled))
    elif args.format == "ptx":
        print(built.compiled.ptx)
    else:
        listing = _listing(built)
        if listing.no_sass:
            raise PlatformError(f"kernels show: {listing.no_sass.removesuffix('.')}")
        print(sass_with_lines(listing))
    return 0


def _loads(args: argparse.Namespace) -> str:
    choice = policy.resolve(
        args.loads or env.loads(), parse_arch(args.arch), gpu="", driver="", across_gpus=True
    )
    return str(choice.loads)


def _how(args: argparse.Namespace, loads: str) -> str:
    ranks = f"{args.ranks} rank{'' if args.ranks == 1 else 's'}"
    return f"{args.arch}, {loads} loads, {ranks}, rows up to {args.hidden * args.itemsize:,} bytes"


def _listing(built: Built) -> Listing:
    constants = built.request.constants
    return Listing.of(
        built.compiled,
        threads=constants["kNumThreads"],
        dynamic_shared=built.request.spec.num_shared_bytes(constants),
    )


def _write_pages(args: argparse.Namespace, loads: str) -> int:
    """All kernels of one architecture, and their table of contents."""
    arch = parse_arch(args.arch)
    specs = [spec for spec in list_kernels() if spec.min_arch <= arch]
    left_out = [
        f"{spec.name}, which needs sm_{spec.min_arch}"
        for spec in list_kernels()
        if spec.min_arch > arch
    ]
    how = _how(args, loads)
    rows = []
    sizes = []
    for at, spec in enumerate(specs):
        listing = _listing(_build(spec, args.arch, args, loads))
        rows.append((listing, f"{spec.name}.html"))
        links = [("all kernels", "index.html")]
        links += [(f"← {one.name}", f"{one.name}.html") for one in specs[max(at - 1, 0) : at]]
        links += [(f"{one.name} →", f"{one.name}.html") for one in specs[at + 1 : at + 2]]
        page = kernel_page(listing, how, links)
        sizes.append(_write(args.html / f"{spec.name}.html", page)[1])
    _write(args.html / "index.html", index_page(f"Kernels: {how}", rows, left_out))
    print(
        f"{args.html / 'index.html'}: {len(rows)} pages, {sum(sizes):,} bytes, the largest "
        f"{max(sizes):,}"
    )
    return 0


def _write(path: Path, page: str) -> tuple[Path, int]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path, path.write_bytes(page.encode())
    except OSError as error:
        raise ContractError(f"kernels: --html {path} cannot be written: {error}") from None


def _report_page(written: tuple[Path, int]) -> int:
    print(f"{written[0]}: {written[1]:,} bytes")
    return 0


def _compile(args: argparse.Namespace) -> int:
    arches = args.arch or ["sm_90"]
    if args.file is not None and args.names:
        raise ContractError("kernels compile: argument --file goes without names of kernels")
    if args.file is not None:
        return _report([_compile_file(args.file, arch) for arch in arches], args.strict)
    specs = [get_kernel(name) for name in args.names] or list_kernels()
    rows = []
    for spec in specs:
        for arch in arches:
            if parse_arch(arch) < spec.min_arch and not args.names:
                continue  # of all kernels those that there are for this architecture
            for loads in args.loads:
                built = _build(spec, arch, args, loads)
                dynamic = spec.num_shared_bytes(built.request.constants)
                how = "cached" if built.cached else "compiled"
                rows.append((loads, how, dynamic, built.compiled))
    return _report(rows, args.strict)


def _report(rows: list[tuple[str, str, int, Compiled]], strict: bool) -> int:
    """Print a table of (loads, how, dynamic shared memory, compiled); the exit code.

    Raises:
        CompileError: ``strict`` is given and a kernel uses local memory.
    """
    table = []
    spilling = []
    for loads, how, dynamic, compiled in rows:
        used = compiled.resources
        table.append(
            (
                compiled.name,
                str(compiled.target),
                loads,
                used.registers,
                used.shared_bytes + dynamic,
                used.stack_bytes,
                used.spill_bytes,
                how,
            )
        )
        if used.spill_bytes or used.stack_bytes:
            spilling.append(f"{compiled.name} for {compiled.target}")
    head = ("kernel", "arch", "loads", "registers", "shared", "stack", "spills", "")
    print(columns(head, table))
    if strict and spilling:
        raise CompileError(f"local memory is used (stack, spills) by {', '.join(spilling)}")
    return 0


def _diff(args: argparse.Namespace) -> int:
    if args.other is None and args.html is None and ":" not in args.name:
        return _diff_loads(args)
    if args.other is None:
        joint = "," if ":" in args.name else ":"
        names = [f"{args.name}{joint}{loads}" for loads in args.loads]
    else:
        names = [args.name, args.other]
    first, second = ((name, _variant(name, args)) for name in names)
    if args.html is not None:
        return _report_page(_write(args.html, difference_page(first, second)))
    found = compare(first[1], second[1])
    if found.ptx:
        rows = [(change.opcode, change.first, change.second) for change in found.ptx]
        print(columns(("PTX instruction", *names), rows))
    print(found.verdict)
    return 0


def _variant(text: str, args: argparse.Namespace) -> Listing:
    """The kernel that ``NAME[:WORD,...]`` asks for, the rest as in the options."""
    name, _, words = text.partition(":")
    changed = argparse.Namespace(**vars(args))
    loads = "coherent"
    for word in words.split(",") if words else ():
        key, _, value = word.partition("=")
        if word in _LOADS:
            loads = word
        elif re.fullmatch(r"sm_\d+[af]?", word):
            changed.arch = word
        elif key in ("ranks", "hidden", "itemsize", "threads") and value.isdecimal():
            setattr(changed, key, int(value))
        else:
            raise ContractError(
                f"kernels diff: {text}: the word {word!r} must be coherent, nc, sm_90, or one of "
                "ranks=, hidden=, itemsize=, threads= with a number"
            )
    return _listing(_build(get_kernel(name), changed.arch, changed, loads))


def _diff_loads(args: argparse.Namespace) -> int:
    spec = get_kernel(args.name)
    first, second = (
        count_instructions(memory_instructions(_build(spec, args.arch, args, loads).compiled.ptx))
        for loads in args.loads
    )
    rows = [
        (opcode, first.get(opcode, 0), second.get(opcode, 0))
        for opcode in sorted({*first, *second})
        if first.get(opcode, 0) != second.get(opcode, 0)
    ]
    if rows:
        print(columns(("instruction", *args.loads), rows))
    else:
        print(f"{spec.name}: the same memory instructions with {' and '.join(args.loads)}")
    return 0


def _build(spec: KernelSpec, arch: str, args: argparse.Namespace, loads: str) -> Built:
    target = parse_target(arch)
    if target.arch < spec.min_arch:
        raise ContractError(
            f"kernels {args.verb}: {spec.name} needs sm_{spec.min_arch} or newer, got --arch {arch}"
        )
    request = Request(spec, constants_of(arch, **_shape(args, loads)), target)
    return build(request, open_cache())


def _shape(args: argparse.Namespace, loads: str) -> dict[str, Any]:
    for name, low, high in _SHAPE:
        value = getattr(args, name)
        if value is not None and not (low <= value <= high and (low < 32 or value % 32 == 0)):
            wanted = "a multiple of 32 from" if low == 32 else "a whole number from"
            raise ContractError(
                f"kernels {args.verb}: argument --{name} must be {wanted} {low} to {high}, got "
                f"{value}"
            )
    shape = {
        "num_ranks": args.ranks,
        "max_row_bytes": args.hidden * args.itemsize,
        "loads": loads,
    }
    return shape if args.threads is None else {**shape, "num_threads": args.threads}


def _compile_file(path: Path, arch: str) -> tuple[str, str, int, Compiled]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ContractError(f"kernels compile: --file {path} cannot be read: {error}") from None
    entry = re.search(r"^// deepep_cupy .*, entry (\w+)$", text, re.MULTILINE)
    compiled = compile_text(
        text,
        name=path.stem.split(".")[0],
        entry=entry[1] if entry else "",
        target=parse_target(arch),
    )
    return "as in the file", "compiled", 0, compiled


def _instruction_table(compiled: Compiled) -> str:
    rows = [
        (
            found.count,
            found.kind,
            found.space,
            found.order,
            found.scope,
            found.cache,
            found.opcode,
            found.source,
            found.caller,
        )
        for found in memory_instructions(compiled.ptx)
    ]
    head = ("n", "class", "space", "order", "scope", "cache", "instruction", "line", "called from")
    return columns(head, rows)
