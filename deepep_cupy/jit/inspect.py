"""What the compiler made of a kernel: its memory instructions, and its machine code.

Everything here works on text and needs neither a GPU nor CuPy.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deepep_cupy.errors import CompileError, PlatformError

__all__ = [
    "Instruction",
    "Place",
    "Statement",
    "classify",
    "count_instructions",
    "disassemble",
    "find_tool",
    "memory_instructions",
    "opcodes",
    "own_name",
    "statements",
]

Place = tuple[str, int]
"""File, relative to ``cuda/`` where it is one of ours, and line."""

_KINDS = {
    "ld": "load",
    "ldu": "load",
    "st": "store",
    "atom": "atomic",
    "red": "reduction",
    "multimem": "multicast",
    "fence": "fence",
    "membar": "fence",
    "mbarrier": "mbarrier",
    "prefetch": "prefetch",
    "prefetchu": "prefetch",
    "applypriority": "prefetch",
    "discard": "prefetch",
    "createpolicy": "policy",
    "bar": "barrier",
    "barrier": "barrier",
    "griddepcontrol": "barrier",
}
_SPACES = ("global", "shared", "local", "const", "param")
_ORDERS = ("weak", "relaxed", "acquire", "release", "acq_rel", "sc", "volatile", "mmio", "proxy")
_SCOPES = ("cta", "cluster", "gpu", "gl", "sys")
_CACHE = re.compile(r"nc|ca|cg|cs|cv|lu|wb|wt|L1::\w+|L2::\w+")
_STATEMENT = re.compile(r"(?:@!?%?[\w$]+\s+)?([a-z][\w.:]*)(?=[\s;])")
_LOC = re.compile(r"\.loc\s+(\d+ \d+ \d+)(?:.*inlined_at\s+(\d+ \d+ \d+))?")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_OURS = re.compile(r".*deepep_cupy/cuda/")


@dataclass(frozen=True)
class Instruction:
    """One kind of memory instruction at one place of the source.

    Attributes:
        opcode: As written in the PTX, with all its qualifiers.
        kind: load, store, atomic, reduction, fence, bulk copy, async copy, mbarrier, barrier, ….
        space: global, shared, local, const, generic; empty where it makes no sense.
        order: weak, volatile, relaxed, acquire, release, acq_rel, sc, proxy, …; empty for none.
        scope: cta, cluster, gpu, sys; empty where there is none.
        cache: Cache operators and hints: nc, L1::no_allocate, L2::256B, ….
        source: ``asm/memory.cuh:30``, empty where the PTX names no line.
        caller: The place it was inlined at; empty where the PTX names none.
        count: How often it occurs there.
    """

    opcode: str
    kind: str
    space: str
    order: str
    scope: str
    cache: str
    source: str
    caller: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Statement:
    """One instruction of a PTX text.

    Attributes:
        text: As written, its predicate included, without the semicolon.
        opcode: With all its qualifiers.
        chain: The line it was made from, then the line that was inlined at, and so on up to the
            kernel; empty where the PTX names no line.
    """

    text: str
    opcode: str
    chain: tuple[Place, ...]


def own_name(file: str) -> str:
    """Return a file's name relative to ``cuda/``; any other file's as it is."""
    return _OURS.sub("", file)


def statements(ptx: str) -> Iterator[Statement]:
    """Yield the instructions of a PTX text, in order."""
    files = {number: own_name(name) for number, name in _FILE.findall(ptx)}
    chains: dict[str, tuple[Place, ...]] = {}
    chain: tuple[Place, ...] = ()
    in_code = False
    for raw in _COMMENT.sub("", ptx).splitlines():
        row = raw.strip()
        if row.startswith(".section"):
            in_code = False
        if row.startswith((".entry", ".visible .entry", ".func", ".weak .func")):
            chain, in_code = (), True
        location = _LOC.match(row)
        if location:
            at, inlined_at = location.groups()
            # PTX has the place of a call stand before what was inlined there: the last one counts.
            callers = chains.get(inlined_at) or (inlined_at and (_place(inlined_at, files),)) or ()
            chain = tuple(place for place in (_place(at, files), *callers) if place[1])
            chains[at] = chain
            continue
        if not in_code or row.startswith("."):
            continue
        for piece in row.strip("{} \t").split(";")[:-1]:
            text = re.sub(r"^[\w$]+:", "", piece.lstrip(" \t{}")).strip()
            found = _STATEMENT.match(text + ";")
            if found:
                yield Statement(" ".join(text.split()), found[1], chain)


def _place(location: str, files: dict[str, str]) -> Place:
    file, line, _ = location.split()
    return files.get(file, "?"), int(line)


def opcodes(ptx: str) -> Iterator[tuple[str, str, str]]:
    """Yield (opcode, source, caller) of each instruction of a PTX text, in order."""
    for one in statements(ptx):
        source, caller = (*(f"{file}:{line}" for file, line in one.chain[:2]), "", "")[:2]
        yield one.opcode, source, caller


def memory_instructions(ptx: str) -> list[Instruction]:
    """Return the memory instructions of a PTX text, those of one place and kind counted together.

    Loads of kernel parameters are left out: they are constants.
    """
    counted: Counter[Instruction] = Counter()
    for opcode, source, caller in opcodes(ptx):
        instruction = classify(opcode, source, caller)
        if instruction is not None and instruction.space != "param":
            counted[instruction] += 1
    return [
        Instruction(**{**vars(instruction), "count": count})
        for instruction, count in counted.items()
    ]


def count_instructions(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Return opcode -> count, in order of the name, wherever they come from."""
    counted: Counter[str] = Counter()
    for instruction in instructions:
        counted[instruction.opcode] += instruction.count
    return dict(sorted(counted.items()))


def disassemble(cubin: bytes, *, lines: bool = False) -> str:
    """Return the machine code of a cubin as text (SASS).

    Args:
        cubin: The machine code.
        lines: Put before each instruction where it comes from, with what it was inlined at.

    Raises:
        PlatformError: There is no ``nvdisasm``.
        CompileError: It does not take the cubin.
    """
    tool = find_tool("nvdisasm")
    if tool is None:
        raise PlatformError(
            "showing SASS needs nvdisasm, which is neither in this environment nor on PATH; "
            "pip install nvidia-cuda-nvdisasm"
        )
    with tempfile.TemporaryDirectory(prefix="deepep_cupy-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        options = ["--print-code", *(["--print-line-info-inline"] if lines else [])]
        done = subprocess.run(
            [str(tool), *options, str(path)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise CompileError(f"{tool} does not take the cubin: {done.stderr.strip()}")
    return done.stdout


def find_tool(name: str) -> Path | None:
    """Return ``nvdisasm`` or ``ptxas`` of NVIDIA's wheels in this environment, else of PATH."""
    for folder in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        for place in sorted(Path(folder).glob("nvidia/*/bin"), reverse=True):
            if (place / name).is_file():
                return place / name
    found = shutil.which(name)
    return None if found is None else Path(found)


def classify(opcode: str, source: str, caller: str) -> Instruction | None:
    """Take a PTX opcode apart; None where it neither touches memory nor orders accesses to it."""
    word, *rest = opcode.split(".")
    if word == "cp":
        kind = "bulk copy" if "bulk" in rest else "async copy"
    elif word in _KINDS:
        kind = _KINDS[word]
    else:
        return None
    spaces = [part for part in rest if part.split("::")[0] in _SPACES]
    order = next((part for part in rest if part in _ORDERS), "")
    if not order and kind in ("load", "store", "atomic", "reduction"):
        order = "relaxed" if kind in ("atomic", "reduction") else "weak"
    scope = next((part for part in rest if part in _SCOPES), "")
    if kind in ("atomic", "reduction"):
        scope = scope or "gpu"
    cache = " ".join(part for part in rest if _CACHE.fullmatch(part))
    space = " ".join(spaces)
    if not space and kind in ("load", "store", "atomic", "reduction"):
        space = "generic"
    return Instruction(opcode, kind, space, order, scope, cache, source, caller)
