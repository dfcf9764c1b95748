"""One compiled kernel as lines of CUDA with the PTX and the machine code that came of each.

Everything is read from what a compile leaves: the flattened text, the PTX with its ``.loc`` lines
and the cubin, which ``nvdisasm`` prints with the same lines. No GPU, no driver.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepep_cupy.errors import PlatformError
from deepep_cupy.jit.compile import Compiled
from deepep_cupy.jit.inspect import Place, disassemble, own_name, statements

__all__ = [
    "Chain",
    "Group",
    "Listing",
    "Op",
    "functions_of",
    "group_by_site",
    "read_ptx",
    "read_sass",
    "site",
    "source_lines",
]

Chain = tuple[Place, ...]
"""Innermost line first, then the line it was inlined at, up to the kernel."""

SASS_BYTES = 16
"""Of one instruction, on every architecture from SM 70 on."""

_WRAPPERS = "asm/"
"""Folder of functions of one instruction each: what they become belongs to their callers."""

_LINE = re.compile(r'#line (\d+) "([^"]*)"')
_SASS_PLACE = re.compile(r'\s*//## File "([^"]+)", line (\d+)')
_SASS_CODE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;")
_SASS_OPCODE = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_LOC_FUNCTION = re.compile(r"\.loc\s+(\d+) (\d+) \d+, function_name (\$\w+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_STRING = re.compile(r"^(\$\w+):\n((?:\.b8 [\d,]+\n?)+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Op:
    """One instruction, of PTX or of machine code.

    Attributes:
        text: As the compiler or ``nvdisasm`` wrote it, blanks made single.
        opcode: Its first word, predicate left out.
        chain: Where it comes from.
        number: Its position among the instructions of its kind, from 0.
    """

    text: str
    opcode: str
    chain: Chain
    number: int


@dataclass
class Group:
    """What one line became at one place where it was inlined: PTX and machine code.

    Attributes:
        chain: The line, then where it was inlined.
        ptx: In order.
        sass: In order.
    """

    chain: Chain
    ptx: list[Op] = field(default_factory=list)
    sass: list[Op] = field(default_factory=list)


@dataclass(frozen=True)
class Listing:
    """A kernel, read.

    Attributes:
        compiled: What was compiled.
        threads: Of a block.
        dynamic_shared: Bytes of shared memory that the launch adds.
        sources: File → its lines as compiled, the first one at 1.
        functions: Line → the function it stands in, where the compiler says so.
        ptx: Instructions in order.
        sass: Machine code in order; empty where there is none.
        no_sass: Why there is none, one sentence; empty where there is.
    """

    compiled: Compiled
    threads: int
    dynamic_shared: int
    sources: Mapping[str, Mapping[int, str]]
    functions: Mapping[Place, str]
    ptx: Sequence[Op]
    sass: Sequence[Op]
    no_sass: str

    @classmethod
    def of(cls, compiled: Compiled, *, threads: int = 0, dynamic_shared: int = 0) -> Listing:
        """Read a compiled kernel; with its machine code where ``nvdisasm`` is found."""
        sass: list[Op] = []
        no_sass = "" if compiled.cubin else "only PTX was asked for."
        if compiled.cubin:
            try:
                sass = read_sass(disassemble(compiled.cubin, lines=True))
            except PlatformError as error:
                no_sass = f"{error}."
        return cls(
            compiled,
            threads,
            dynamic_shared,
            source_lines(compiled.text, f"{compiled.name}.cu"),
            functions_of(compiled.ptx),
            read_ptx(compiled.ptx),
            sass,
            no_sass,
        )

    def text_of(self, place: Place) -> str:
        """The CUDA text of a line; empty where the compiler names a line that no file has."""
        return self.sources.get(place[0], {}).get(place[1], "")


def read_ptx(ptx: str) -> list[Op]:
    """The instructions of a PTX text."""
    return [
        Op(one.text, one.opcode, one.chain, number) for number, one in enumerate(statements(ptx))
    ]


def read_sass(text: str) -> list[Op]:
    """The instructions of what ``disassemble(..., lines=True)`` returned."""
    ops: list[Op] = []
    chain: list[Place] = []
    complete = True
    for row in text.splitlines():
        place = _SASS_PLACE.match(row)
        if place:
            if complete:
                chain, complete = [], False
            chain.append((own_name(place[1]), int(place[2])))
            continue
        code = _SASS_CODE.match(row)
        if code is None:
            continue
        complete = True
        words = " ".join(code[2].split())
        opcode = _SASS_OPCODE.match(words)
        if opcode:
            shown = f"{code[1]}  {words}"
            ops.append(Op(shown, opcode[1], tuple(chain), len(ops)))
    return ops


def source_lines(text: str, name: str) -> dict[str, dict[int, str]]:
    """File → line → text of a flattened kernel; what precedes the first ``#line`` is ``name``'s."""
    files: dict[str, dict[int, str]] = {}
    file, number = name, 1
    for row in text.splitlines():
        directive = _LINE.fullmatch(row)
        if directive:
            file, number = own_name(directive[2]), int(directive[1])
            continue
        files.setdefault(file, {})[number] = row
        number += 1
    # The title before the first directive is no part of any file of a flattened text.
    if len(files) > 1 and name in files and len(files[name]) == 1:
        del files[name]
    return files


def functions_of(ptx: str) -> dict[Place, str]:
    """Line → name of the function that it stands in, for lines that were inlined."""
    files = {number: own_name(name) for number, name in _FILE.findall(ptx)}
    names = {
        label: _plain_name(bytes(int(byte) for byte in re.findall(r"\d+", data.replace("b8", ""))))
        for label, data in _STRING.findall(ptx)
    }
    return {
        (files.get(file, "?"), int(line)): names[label]
        for file, line, label in _LOC_FUNCTION.findall(ptx)
        if label in names
    }


def _plain_name(mangled: bytes) -> str:
    """The last name of a mangled one: ``send_header`` of ``_ZN6spaces11send_headerERK1A``."""
    name = mangled.rstrip(b"\0").decode()
    rest = re.sub(r"^_ZN?K?", "", name)
    found = ""
    while length := re.match(r"\d+", rest):
        end = length.end() + int(length[0])
        found, rest = rest[length.end() : end], rest[end:]
    return found or name


def site(chain: Chain) -> Chain:
    """Return the chain from the line that asked for an instruction on: without the wrappers."""
    for index, place in enumerate(chain):
        if not place[0].startswith(_WRAPPERS):
            return chain[index:]
    return chain


def group_by_site(listing: Listing) -> dict[Place, dict[Chain, Group]]:
    """Line that asked for instructions → chain → what came of it there; in the order of the PTX."""
    found: defaultdict[Place, dict[Chain, Group]] = defaultdict(dict)
    for op in listing.ptx:
        if op.chain:
            _group(found, site(op.chain)).ptx.append(op)
    for op in listing.sass:
        if op.chain:
            _group(found, site(op.chain)).sass.append(op)
    return dict(found)


def _group(found: defaultdict[Place, dict[Chain, Group]], chain: Chain) -> Group:
    return found[chain[0]].setdefault(chain, Group(chain))
