"""From ``.cu`` files to one string: includes flattened, constants and structs put in.

The string is all a compiler needs. It names no folder of this machine, so that it can be its own
cache key, and ``#line`` directives make every compiler report real files and lines.

=====================================  =====================================================
line in a file                         what becomes of it
=====================================  =====================================================
``#include "asm/types.cuh"``           the file, relative to ``cuda/``; the first time only
``#include "generated/prelude.cuh"``   the constants and the kernel's parameter struct
``#pragma once``                       an empty line: each file comes once anyway
``#include <atomic>``                  kept, in files of a ``search`` folder only (the simulator's)
any other include, or one in ``#if``   refused
=====================================  =====================================================
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deepep_cupy._resources import kernel_dir
from deepep_cupy._version import __version__
from deepep_cupy.errors import CompileError
from deepep_cupy.jit.spec import KernelSpec

__all__ = ["PRELUDE", "flatten", "generate", "include_options", "locate", "prelude"]

PRELUDE = "generated/prelude.cuh"
"""The include that stands for the generated text."""

_SHOWN_ROOT = "deepep_cupy/cuda"
_DIRECTIVE = re.compile(r"\s*#\s*(include|include_next|import|pragma|if|ifdef|ifndef|endif)\b(.*)")
_QUOTED = re.compile(r'\s*"([A-Za-z0-9_./]+)"\s*(//.*)?$')
_ANGLED = re.compile(r"\s*<[A-Za-z0-9_./]+>\s*(//.*)?$")
_LINE = re.compile(r'#line (\d+) "([^"]*)"')


def generate(spec: KernelSpec, constants: Mapping[str, int], *, search: Sequence[Path] = ()) -> str:
    """Return the whole text of one kernel.

    Args:
        spec: The kernel.
        constants: Name -> value, from ``protocol.constants``.
        search: Folders looked into before ``cuda``, e.g. the simulator's, whose
            ``asm/*.cuh`` then take the place of ours.

    Raises:
        CompileError: A file is missing, files include each other in a circle, or an include has an
            unknown form.
    """
    title = f"// deepep_cupy {__version__}, kernel {spec.name}, entry {spec.entry}\n"
    return title + flatten(spec.source, search=search, generated=prelude(spec, constants))


def include_options() -> tuple[str, ...]:
    """Return the options with which a text of somebody else finds the files of ``cuda/asm``."""
    folder = kernel_dir()
    digest = hashlib.sha256()
    for path in sorted((folder / "asm").glob("*.cuh")):
        digest.update(path.read_bytes())
    return (f"-I{folder}", f"-DDEEPEP_CUPY_ASM=0x{digest.hexdigest()[:8]}")


def prelude(spec: KernelSpec, constants: Mapping[str, int]) -> str:
    """Return the generated C text: the constants, then the parameter struct."""
    # Enumerators, not ``constexpr`` variables: NVRTC gives every namespace-scope variable a word of
    # device memory and a ``.global`` line in the PTX, used or not.
    small = [(name, value) for name, value in constants.items() if _is_int(value)]
    large = [(name, value) for name, value in constants.items() if not _is_int(value)]
    lines = []
    for ctype, group in (("int", small), ("long long", large)):
        if group:
            entries = [f"    {name} = {int(value)}," for name, value in group]
            lines += [f"enum : {ctype} {{", *entries, "};"]
    struct = spec.struct
    for inner in (*struct.inner(), struct):
        lines += ["", inner.declaration()]
    nbytes = spec.layout(constants).nbytes
    lines.append(f'static_assert(sizeof({struct.name}) == {nbytes}, "as packed by the host");')
    return "\n".join(lines) + "\n"


def flatten(source: str, *, search: Sequence[Path] = (), generated: str | None = None) -> str:
    """Return ``source`` with every include replaced by the text of its file.

    Args:
        source: A file relative to ``cuda/`` (or to a folder of ``search``).
        search: Folders looked into first.
        generated: What ``#include "generated/prelude.cuh"`` stands for; ``None`` refuses it.

    Raises:
        CompileError: As ``generate``.
    """
    work = _Flattening(tuple(search), generated)
    work.add(source, wanted_by="")
    return "\n".join(work.lines) + "\n"


def locate(text: str, file: str, line: int) -> int | None:
    """Return the line number in a flattened ``text`` of a line of one of its files, from 1."""
    name, number = "", 0
    for index, row in enumerate(text.splitlines(), start=1):
        directive = _LINE.fullmatch(row)
        if directive:
            number, name = int(directive[1]), directive[2]
            continue
        if (name, number) == (file, line):
            return index
        number += 1
    return None


@dataclass
class _Flattening:
    search: tuple[Path, ...]
    generated: str | None
    lines: list[str] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    open_files: list[str] = field(default_factory=list)

    def add(self, name: str, wanted_by: str) -> None:
        path, shown, ours = self._find(name, wanted_by)
        self.done.add(name)
        self.open_files.append(name)
        self.lines.append(f'#line 1 "{shown}"')
        depth = 0
        for number, row in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            where = f"{shown}:{number}"
            directive = _DIRECTIVE.match(row)
            if directive is None:
                self.lines.append(row)
                continue
            word, rest = directive.groups()
            depth += {"if": 1, "ifdef": 1, "ifndef": 1, "endif": -1}.get(word, 0)
            if word in ("include", "include_next", "import"):
                if word != "include" or depth:
                    raise _refused(where, row, "an include inside #if, or #import")
                if self._include(rest, row, where, ours):
                    self.lines.append(f'#line {number + 1} "{shown}"')
            else:
                self.lines.append("" if rest.strip() == "once" else row)
        self.open_files.pop()

    def _include(self, rest: str, row: str, where: str, ours: bool) -> bool:
        """Put the file in; True when lines of another file now stand here."""
        quoted = _QUOTED.fullmatch(rest)
        if quoted is None:
            if not ours and _ANGLED.fullmatch(rest):
                self.lines.append(row)
                return False
            raise _refused(where, row, "this form of include")
        name = quoted[1]
        if name in self.open_files:
            chain = " -> ".join([*self.open_files[self.open_files.index(name) :], name])
            raise CompileError(f"flattening {where}: the includes go round: {chain}")
        if name in self.done:
            self.lines.append("")
            return False
        if name == PRELUDE:
            if self.generated is None:
                raise _refused(where, row, "the prelude, which this text is flattened without,")
            self.done.add(name)
            self.lines += [f'#line 1 "{PRELUDE}"', *self.generated.splitlines()]
        else:
            self.add(name, wanted_by=where)
        return True

    def _find(self, name: str, wanted_by: str) -> tuple[Path, str, bool]:
        """The file, the name to show, and whether it is one of this package's own."""
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise _refused(wanted_by, name, "a path that leaves cuda")
        for folder in self.search:
            if (folder / name).is_file():
                return folder / name, (folder / name).as_posix(), False
        path = kernel_dir() / name
        if path.is_file():
            return path, f"{_SHOWN_ROOT}/{name}", True
        folders = ", ".join(str(folder) for folder in (*self.search, kernel_dir()))
        by = f", included by {wanted_by}" if wanted_by else ""
        raise CompileError(f"flattening: no file {name!r} in {folders}{by}")


def _refused(where: str, row: str, what: str) -> CompileError:
    return CompileError(
        f"flattening {where}: {what} is not known to the flattener: {row.strip()!r}; write "
        '#include "folder/file.cuh", relative to cuda, outside of any #if'
    )


def _is_int(value: int) -> bool:
    return -(1 << 31) <= value < 1 << 31
