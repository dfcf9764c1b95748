"""Two compiles of a kernel compared: what changes, and whether anything else does."""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from deepep_cupy.inspect.listing import Chain, Listing, Op, site
from deepep_cupy.inspect.notes import ACCESS_CLASSES, NOTES, is_memory, stem
from deepep_cupy.inspect.page import document, facts_of
from deepep_cupy.jit.inspect import Place
from deepep_cupy.jit.source import PRELUDE

__all__ = ["Change", "Difference", "compare", "difference_page"]


@dataclass(frozen=True)
class Change:
    """An instruction that the two have in different numbers.

    Attributes:
        opcode: With all its qualifiers.
        first: How often in the first.
        second: How often in the second.
    """

    opcode: str
    first: int
    second: int

    @property
    def is_load(self) -> bool:
        """Whether it is a load, of PTX or of machine code."""
        return self.opcode.split(".")[0] in ("ld", "ldu", "LDG", "LD", "LDS", "LDL")


@dataclass(frozen=True)
class Difference:
    """What differs.

    Attributes:
        ptx: PTX instructions in different numbers.
        ptx_kept: Kinds of PTX instructions in the same number.
        sass: Machine instructions in different numbers.
        lines: Line that asks for instructions → the PTX it became, in the first and the second,
            where these differ in opcodes.
        constants: Changed lines of the generated constants, with ``-`` or ``+`` before them.
    """

    ptx: tuple[Change, ...]
    ptx_kept: int
    sass: tuple[Change, ...]
    lines: dict[Place, tuple[Counter[str], Counter[str]]]
    constants: tuple[str, ...]

    @property
    def only_loads(self) -> bool:
        """Whether every difference of PTX, in all and line by line, is one of load instructions."""
        by_line = (
            opcode
            for first, second in self.lines.values()
            for opcode in {*(first - second), *(second - first)}
        )
        return all(change.is_load for change in self.ptx) and all(
            Change(opcode, 0, 0).is_load for opcode in by_line
        )

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.ptx and not self.lines:
            return "The two have the same PTX instructions, line by line."
        if self.only_loads:
            return (
                "Only load instructions differ: every other PTX instruction occurs as often, on "
                f"every line ({self.ptx_kept} kinds of them are equal in number)."
            )
        others = [change.opcode for change in self.ptx if not change.is_load]
        return (
            f"Not loads alone differ: {len(self.ptx)} kinds of PTX instructions in number, of "
            f"which {len(others)} are no loads, and the PTX of {len(self.lines)} lines."
        )


def compare(first: Listing, second: Listing) -> Difference:
    """Return what differs between two compiles."""
    ptx, kept = _changes(first.ptx, second.ptx)
    sass, _ = _changes(first.sass, second.sass)
    by_line = [_by_line(each) for each in (first, second)]
    nothing: Counter[str] = Counter()
    lines = {
        place: (by_line[0].get(place, nothing), by_line[1].get(place, nothing))
        for place in dict.fromkeys((*by_line[0], *by_line[1]))
        if by_line[0].get(place, nothing) != by_line[1].get(place, nothing)
    }
    before, after = (list(each.sources.get(PRELUDE, {}).values()) for each in (first, second))
    changed = [row.rstrip() for row in difflib.ndiff(before, after) if row.startswith(("- ", "+ "))]
    if not first.sass or not second.sass:
        sass = ()
    return Difference(ptx, kept, sass, lines, tuple(changed))


def _changes(first: Iterable[Op], second: Iterable[Op]) -> tuple[tuple[Change, ...], int]:
    a, b = Counter(op.opcode for op in first), Counter(op.opcode for op in second)
    changed = tuple(Change(op, a[op], b[op]) for op in sorted({*a, *b}) if a[op] != b[op])
    return changed, len({*a, *b}) - len(changed)


def _asks(chain: Chain) -> Place:
    """The line that asks for row data, not the one of the access class that picks the load."""
    return next((place for place in chain if place[0] != ACCESS_CLASSES), chain[-1])


def _by_line(listing: Listing) -> dict[Place, Counter[str]]:
    found: defaultdict[Place, Counter[str]] = defaultdict(Counter)
    for op in listing.ptx:
        if op.chain:
            found[_asks(site(op.chain))][op.opcode] += 1
    return dict(found)


# ----------------------------------------------------------------------------------------- as HTML


def difference_page(first: tuple[str, Listing], second: tuple[str, Listing]) -> str:
    """Return a page that compares two compiles.

    Args:
        first: (what it is called, the compile).
        second: Likewise.
    """
    (first_name, a), (second_name, b) = first, second
    found = compare(a, b)
    names = (first_name, second_name)
    title = f"{first_name} and {second_name}"
    facts = "".join(
        f"<tr><td>{escape(name)}</td><td class=n>{escape(one)}</td>"
        f"<td class=n>{escape(two)}</td></tr>"
        for (name, one), (_, two) in zip(facts_of(a), facts_of(b), strict=True)
    )
    rest = [change for change in found.sass if not change.is_load]
    others = "what the register allocator made of it" if found.only_loads else "all else"
    missing = a.no_sass or b.no_sass
    machine = (
        f'<p class="warn">PTX alone: {escape(missing)}</p>'
        if missing
        else _table("Machine code: loads", [c for c in found.sass if c.is_load], names)
        + _table(f"Machine code: {others}", rest, names)
    )
    constants = "\n".join(
        f'<span class="{"del" if row[0] == "-" else "add"}">{escape(row)}</span>'
        for row in found.constants
    )
    return document(
        title,
        f"<header><h1>{escape(title)}</h1><p><strong>{escape(found.verdict)}</strong></p>"
        f"<table><tr><th></th>{_heads(names)}</tr>{facts}</table></header><main>"
        + _table("PTX: loads", [c for c in found.ptx if c.is_load], names)
        + _table(
            "PTX: all else that differs in number", [c for c in found.ptx if not c.is_load], names
        )
        + machine
        + f"<details open><summary>Constants of the text that differ</summary><pre>{constants}"
        "</pre></details>" + _changed_lines(found, a, b, names) + "</main>",
    )


def _heads(names: Iterable[str]) -> str:
    return "".join(f"<th>{escape(name)}</th>" for name in names)


def _table(title: str, changes: Iterable[Change], names: tuple[str, str]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(change.opcode)}</code></td><td class=n>{change.first}</td>"
        f"<td class=n>{change.second}</td><td>{escape(_note(change.opcode))}</td></tr>"
        for change in changes
    )
    if not rows:
        return f"<details><summary>{escape(title)}: none</summary></details>"
    return (
        f"<details open><summary>{escape(title)}</summary><table class=notes><tr><th></th>"
        f"{_heads(names)}<th></th></tr>{rows}</table></details>"
    )


def _note(opcode: str) -> str:
    return NOTES[stem(opcode)].text if is_memory(opcode) and stem(opcode) in NOTES else ""


def _counted(ops: Counter[str]) -> str:
    return escape("\n".join(f"{count} × {opcode}" for opcode, count in sorted(ops.items())))


def _changed_lines(found: Difference, a: Listing, b: Listing, names: tuple[str, str]) -> str:
    rows = []
    for place, (one, two) in found.lines.items():
        text = a.text_of(place) or b.text_of(place)
        rows.append(
            f'<div class="line"><div class="src"><a>{place[1]}</a><code>{escape(text)}</code></div>'
            f'<div class="out"><p class="chain">{escape(place[0])}:{place[1]}</p>'
            f'<div class="two"><pre class="del">{_counted(one - two)}</pre>'
            f'<pre class="add">{_counted(two - one)}</pre></div></div><div></div></div>'
        )
    return (
        f"<details open><summary>{len(rows)} lines whose PTX differs: what {escape(names[0])} has "
        f"and {escape(names[1])} has not, and the reverse</summary>{''.join(rows)}</details>"
    )
