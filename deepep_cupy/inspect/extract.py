"""The neighbourhood of an instruction or a line, and whole machine code with its lines, as text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence

from deepep_cupy.errors import ContractError
from deepep_cupy.inspect.listing import Chain, Group, Listing, Op, group_by_site, site
from deepep_cupy.inspect.notes import KINDS, NOTES, is_memory, kind_of, kind_of_sass, reason, stem
from deepep_cupy.inspect.style import MARKS
from deepep_cupy.jit.inspect import Place

__all__ = ["around", "sass_with_lines"]

_INK = dict(zip(KINDS, ("34", "33", "31", "32", "35", "90"), strict=True))
_WIDTH = 100


def around(listing: Listing, what: str, lines: int, *, colour: bool = False) -> str:
    """Return CUDA, PTX and machine code round an instruction or a line.

    Args:
        listing: The kernel.
        what: The beginning of a PTX or a SASS opcode, or ``FILE:LINE``.
        lines: Lines and instructions shown before and after.
        colour: Mark kinds with the terminal's colours too, not by letters alone.

    Raises:
        ContractError: The kernel has no such instruction, file or line.
    """
    place = re.fullmatch(r"([^:\s]+):(\d+)", what)
    hits = _at_line(listing, place[1], int(place[2])) if place else _of_opcode(listing, what)
    groups = group_by_site(listing)
    by_site: dict[Place, list[Chain]] = {}
    for chain in hits:
        by_site.setdefault(chain[0], []).append(chain)
    show = _Shown(listing, lines, colour)
    return "\n\n".join(
        show.site(place, [groups[place][chain] for chain in chains])
        for place, chains in by_site.items()
    )


def sass_with_lines(listing: Listing) -> str:
    """Return the machine code, each run of instructions under the line it comes from."""
    rows: list[str] = []
    before: Chain | None = None
    for op in listing.sass:
        if op.chain != before:
            before = op.chain
            rows.append(f"// {_chain(op.chain)}")
            if text := listing.text_of(op.chain[0]).strip() if op.chain else "":
                rows.append(f"//     {text}")
        rows.append(f"    /*{op.text.replace('  ', '*/  ', 1)} ;")
    return "\n".join(rows)


# ------------------------------------------------------------------------------- what is asked for


def _of_opcode(listing: Listing, what: str) -> Iterable[Chain]:
    ops = [op for op in (*listing.ptx, *listing.sass) if _begins(op.opcode, what)]
    found = dict.fromkeys(site(op.chain) for op in ops if op.chain)
    if not found:
        there = ", ".join(sorted({op.opcode for op in listing.ptx if is_memory(op.opcode)}))
        compiled = listing.compiled
        raise ContractError(
            f"kernels show: {compiled.name} for {compiled.target} has no instruction {what}; of "
            f"memory and order it has {there}"
        )
    return found


def _begins(opcode: str, what: str) -> bool:
    return opcode.startswith(what) and opcode[len(what) : len(what) + 1] in ("", ".", ":")


def _at_line(listing: Listing, file: str, line: int) -> Iterable[Chain]:
    compiled = listing.compiled
    names = [name for name in listing.sources if name == file or name.endswith(f"/{file}")]
    if len(names) != 1:
        known = ", ".join(names or listing.sources)
        problem = "more than one file" if names else "no file"
        raise ContractError(
            f"kernels show: {compiled.name} is made of {problem} {file}; there are {known}"
        )
    place = (names[0], line)
    last = max(listing.sources[names[0]])
    if not 1 <= line <= last:
        raise ContractError(f"kernels show: {names[0]} has lines 1 to {last}, got {line}")
    ops = [*listing.ptx, *listing.sass]
    found = dict.fromkeys(site(op.chain) for op in ops if op.chain and op.chain[0] == place)
    found = found or dict.fromkeys(
        site(op.chain) for op in ops if op.chain and site(op.chain)[0] == place
    )
    found = found or dict.fromkeys(site(op.chain) for op in ops if place in op.chain)
    if not found:
        near = sorted({at[1] for op in ops for at in op.chain if at[0] == names[0]})
        near = sorted(sorted(near, key=lambda number: abs(number - line))[:4])
        where = f"; the nearest lines that do are {', '.join(map(str, near))}" if near else ""
        raise ContractError(
            f"kernels show: no instruction of {compiled.name} for {compiled.target} comes from "
            f"{names[0]}:{line}{where}"
        )
    return found


# ------------------------------------------------------------------------------------ how it looks


class _Shown:
    def __init__(self, listing: Listing, lines: int, colour: bool) -> None:
        self._listing = listing
        self._lines = lines
        self._colour = colour

    def site(self, place: Place, groups: Sequence[Group]) -> str:
        """One line that asks for instructions, and the first of the places it was inlined at."""
        listing = self._listing
        first = groups[0]
        rows = [_chain(first.chain)]
        text = listing.sources.get(place[0], {})
        for number in range(place[1] - self._lines, place[1] + self._lines + 1):
            if number in text:
                mark = ">" if number == place[1] else " "
                rows.append(f"  CUDA {mark}   {number:4d} | {text[number]}")
        rows += self._ops("PTX", first.ptx, listing.ptx, kind_of)
        if listing.sass:
            rows += self._ops("SASS", first.sass, listing.sass, kind_of_sass)
        rows += [f"  also at {_chain(group.chain[1:])}" for group in groups[1:]]
        memory = list(dict.fromkeys(stem(op.opcode) for op in first.ptx if kind_of(op)))
        for name in memory:
            rows += _wrapped(f"{name}: {NOTES[name].text}" if name in NOTES else name, "note")
        if memory and (said := reason(listing, place)):
            rows += _wrapped(said, "here")
        return "\n".join(rows)

    def _ops(
        self, name: str, own: Sequence[Op], every: Sequence[Op], kind_function: Callable[[Op], str]
    ) -> list[str]:
        mine = {op.number for op in own}
        marked = {op.number for op in own if kind_function(op)} or mine
        wanted = set(mine)
        for number in marked:
            wanted |= set(range(number - self._lines, number + self._lines + 1))
        rows: list[str] = []
        before = -1
        for number in sorted(number for number in wanted if 0 <= number < len(every)):
            if before >= 0 and number != before + 1:
                rows.append(f"  {name:4}     ...")
            before = number
            op = every[number]
            kind = kind_function(op)
            text = f"{op.text}"
            if kind and self._colour:
                text = f"\x1b[{_INK[kind]}m{text}\x1b[0m"
            mark = ">" if number in mine else " "
            rows.append(f"  {name:4} {mark} {MARKS.get(kind, ' ')} {text}")
        return rows


def _chain(chain: Chain) -> str:
    return " ← ".join(f"{file}:{line}" for file, line in chain) or "no line"


def _wrapped(text: str, head: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"  {head:4}   ",
        subsequent_indent=" " * 9,
        break_long_words=False,
        break_on_hyphens=False,
    )
