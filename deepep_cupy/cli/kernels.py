"""``kernels``: list, show, compile and compare the CUDA kernels. None of it needs a GPU.

``list`` and ``show --format cuda`` need NumPy alone; everything else CuPy and NVRTC, no driver.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from deepep_cupy import env
from deepep_cupy.cli.table import columns
from deepep_cupy.engines.gpu import loads as policy
from deepep_cupy.engines.gpu.kernels import get_kernel, kernel_source, list_kernels
from deepep_cupy.engines.gpu.kernels import shape_constants as constants_of
from deepep_cupy.errors import CompileError, ContractError
from deepep_cupy.jit.build import Built, Request, build, open_cache
from deepep_cupy.jit.compile import Compiled, compile_text, parse_arch, parse_target
from deepep_cupy.jit.inspect import count_instructions, disassemble, memory_instructions
from deepep_cupy.jit.spec import KernelSpec
from deepep_cupy.protocol.sizes import MAX_RANKS

__all__ = ["add_arguments", "run"]

_LOADS = ("coherent", "nc")
_SHAPE = (
    ("ranks", 1, MAX_RANKS),
    ("hidden", 1, 1 << 30),
    ("itemsize", 1, 1 << 10),
    ("threads", 32, 1024),
)
"""Options of the shape, their smallest and largest values."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``list``, ``show``, ``compile`` and ``diff``."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verbs.add_parser("list", help="names, files and oldest architectures")

    show = verbs.add_parser("show", help="the text, the PTX or the machine code of one kernel")
    show.add_argument("name", metavar="NAME")
    show.add_argument("--format", choices=("cuda", "ptx", "sass"), help="default: cuda")
    show.add_argument(
        "--instructions", action="store_true", help="a table of the memory instructions instead"
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

    diff = verbs.add_parser("diff", help="memory instructions of a kernel, two ways")
    diff.add_argument("name", metavar="NAME")
    diff.add_argument("--loads", nargs=2, choices=_LOADS, default=["coherent", "nc"])
    diff.add_argument("--arch", default="sm_90")
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
    spec = get_kernel(args.name)
    if args.instructions and args.format not in (None, "ptx"):
        raise ContractError(
            f"kernels show: argument --instructions is a table made of the PTX and goes without "
            f"--format {args.format}"
        )
    choice = policy.resolve(
        args.loads or env.loads(), parse_arch(args.arch), gpu="", driver="", across_gpus=True
    )
    if args.format in (None, "cuda") and not args.instructions:
        print(kernel_source(spec.name, args.arch, **_shape(args, choice.loads)), end="")
        return 0
    compiled = _build(spec, args.arch, args, choice.loads).compiled
    if args.instructions:
        print(_instruction_table(compiled))
    elif args.format == "ptx":
        print(compiled.ptx)
    else:
        print(disassemble(compiled.cubin))
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
