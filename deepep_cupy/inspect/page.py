"""One self-contained HTML page a kernel, and the index of a folder of them.

No network, no script: folding is ``<details>``, showing one kind alone is a radio button and a
style sheet. Everything shown is escaped text of the compile itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from deepep_cupy.inspect.listing import SASS_BYTES, Chain, Group, Listing, Op, group_by_site, site
from deepep_cupy.inspect.notes import KINDS, NOTES, is_memory, kind_of, kind_of_sass, reason, stem
from deepep_cupy.inspect.occupancy import occupancy
from deepep_cupy.inspect.purpose import PURPOSES, count_purposes
from deepep_cupy.inspect.style import MARKS, STYLE
from deepep_cupy.jit.inspect import Place
from deepep_cupy.jit.source import PRELUDE

__all__ = ["document", "facts_of", "index_page", "kernel_page"]

_MOST_CHIPS = 8
_MOST_REASON = 420


def document(title: str, body: str) -> str:
    """Wrap a body into a whole page."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body>{body}</body></html>\n"
    )


def kernel_page(listing: Listing, how: str, links: Sequence[tuple[str, str]] = ()) -> str:
    """Return the page of one kernel.

    Args:
        listing: The kernel.
        how: What it was compiled for, a few words.
        links: (text, address) of neighbouring pages.
    """
    compiled = listing.compiled
    return document(
        f"{compiled.name} for {compiled.target}",
        _filters()
        + f"<header>{_links(links)}<h1>{escape(compiled.name)} <small>{escape(how)}</small></h1>"
        + _facts(listing)
        + _purposes(listing)
        + "</header>"
        + _legend(listing)
        + _notes(listing)
        + f"<main>{_files(listing)}</main>",
    )


def index_page(title: str, rows: Iterable[tuple[Listing, str]], left_out: Sequence[str]) -> str:
    """Return the table of contents of a folder: (kernel, its page) a row."""
    cells = []
    for listing, address in rows:
        kinds = Counter(kind for op in listing.ptx if (kind := kind_of(op)))
        marks = "".join(
            f'<td class="n"><span class="c {kind}">{kinds[kind]}</span></td>'
            if kinds[kind]
            else "<td></td>"
            for kind in KINDS
        )
        facts = "".join(f'<td class="n">{escape(value)}</td>' for _, value in facts_of(listing))
        name = escape(listing.compiled.name)
        cells.append(f'<tr><th><a href="{escape(address)}">{name}</a></th>{facts}{marks}</tr>')
        head = [name for name, _ in facts_of(listing)]
    titles = "".join(f"<th>{escape(name)}</th>" for name in (*head, *KINDS))
    missing = f"<p>Not here: {escape('; '.join(left_out))}.</p>" if left_out else ""
    return document(
        title,
        f"<header><h1>{escape(title)}</h1><p>PTX instructions that touch or order memory are "
        f"counted by kind.</p></header><main><table class=index><tr><th>kernel</th>{titles}</tr>"
        f"{''.join(cells)}</table>{missing}</main>",
    )


# -------------------------------------------------------------------------------------- the head


def facts_of(listing: Listing) -> list[tuple[str, str]]:
    """What a kernel takes: (name, value), numbers as text."""
    used = listing.compiled.resources
    shared = used.shared_bytes + listing.dynamic_shared
    arch = listing.compiled.target.arch
    fits = occupancy(arch, threads=listing.threads, registers=used.registers, shared_bytes=shared)
    blocks = "not known" if fits is None else f"{fits.blocks}, limited by {fits.limited_by}"
    code = f"{len(listing.sass) * SASS_BYTES:,} bytes" if listing.sass else "not known"
    return [
        ("registers a thread", str(used.registers)),
        ("threads a block", str(listing.threads)),
        ("shared memory a block", f"{shared:,} bytes"),
        ("spills", f"{used.spill_bytes} bytes"),
        ("stack", f"{used.stack_bytes} bytes"),
        ("blocks an SM", blocks),
        ("machine code", code),
        ("PTX", f"{len(listing.ptx):,} instructions"),
    ]


def _facts(listing: Listing) -> str:
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts_of(listing)
    )
    missing = listing.no_sass
    told = f'<p class="warn">PTX alone: {escape(missing)}</p>' if missing else ""
    return f"<dl>{rows}</dl>{told}"


def _purposes(listing: Listing) -> str:
    machine = bool(listing.sass)
    counted = count_purposes(listing, listing.sass if machine else listing.ptx)
    total = sum(counted.values()) or 1
    rows = []
    for purpose, words in PURPOSES.items():
        count = counted[purpose]
        if not count:
            continue
        size = f"{count * SASS_BYTES:,}" if machine else f"{count:,}"
        share = 100 * count / total
        rows.append(
            f'<tr><td>{escape(words)}</td><td class="n">{size}</td><td class="n">{share:.0f} %</td>'
            f'<td class="bar"><i style="width:{share:.1f}%"></i></td></tr>'
        )
    what = "Bytes of machine code" if machine else "PTX instructions"
    return (
        f"<details open><summary>{what} by purpose</summary>"
        f'<table class="purposes">{"".join(rows)}</table></details>'
    )


def _links(links: Sequence[tuple[str, str]]) -> str:
    anchors = " · ".join(f'<a href="{escape(href)}">{escape(text)}</a>' for text, href in links)
    return f'<nav class="pages">{anchors}</nav>' if links else ""


def _filters() -> str:
    kinds = ("all", "any", *KINDS)
    return "".join(
        f'<input type="radio" name="show" id="show-{kind}"{" checked" if kind == "any" else ""}>'
        for kind in kinds
    )


def _legend(listing: Listing) -> str:
    counts = Counter(kind for op in listing.ptx if (kind := kind_of(op)))
    labels = "".join(
        f'<label for="show-{kind}" class="c {kind}" title="{escape(words)}">{MARKS[kind]} {kind} '
        f"<small>{counts[kind]}</small></label>"
        for kind, words in KINDS.items()
    )
    words = "".join(
        f'<li><span class="c {kind}">{MARKS[kind]} {kind}</span> {escape(text)}</li>'
        for kind, text in KINDS.items()
    )
    return (
        f'<nav class="legend"><span>Show lines:</span><label for="show-all" class="c">all</label>'
        f'<label for="show-any" class="c">of memory instructions</label>{labels}</nav>'
        f"<details class=words><summary>What the colours mean, and how to read this page</summary>"
        f"<ul>{words}</ul><p>Left: the CUDA text as compiled. Beside each line the PTX and the "
        f"machine code made from it, once for each chain of callers it was inlined into (← is "
        f"“called from”). A line also lists what was inlined into it from elsewhere; a name there "
        f"leads to the text it comes from. Right: what the instruction promises, and what the "
        f"kernel text says of its use here.</p></details>"
    )


def _notes(listing: Listing) -> str:
    counted: Counter[str] = Counter()
    places: defaultdict[str, dict[Place, None]] = defaultdict(dict)
    for op in listing.ptx:
        if is_memory(op.opcode):
            counted[stem(op.opcode)] += 1
            if op.chain:
                places[stem(op.opcode)][site(op.chain)[0]] = None
    rows = []
    for name in sorted(counted, key=lambda each: (list(KINDS).index(_kind(each)), each)):
        where = " ".join(_anchor(place, listing) for place in list(places[name])[:40])
        more = len(places[name]) - 40
        rows.append(
            f'<tr><td><code class="c {_kind(name)}">{escape(name)}</code></td>'
            f'<td class="n">{counted[name]}</td><td>{escape(_note(name))}</td>'
            f"<td><details><summary>{len(places[name])} lines</summary>{where}"
            f"{f' and {more} more' if more > 0 else ''}</details></td></tr>"
        )
    return (
        f"<details class=notes><summary>{len(rows)} kinds of memory and ordering instructions, and "
        f"what each promises</summary><table><tr><th>PTX</th><th>n</th><th>note</th><th>where</th>"
        f"</tr>{''.join(rows)}</table></details>"
    )


def _kind(name: str) -> str:
    return NOTES[name].kind if name in NOTES else "block"


def _note(name: str) -> str:
    return NOTES[name].text if name in NOTES else "There is no note on this instruction."


# -------------------------------------------------------------------------------------- the lines


def _files(listing: Listing) -> str:
    groups = group_by_site(listing)
    lines_of = _Lines(groups, _inlined(listing), _margins(listing), _uses(listing), listing)
    busy = Counter[str]()
    for (file, _), chains in groups.items():
        busy[file] += sum(len(group.ptx) for group in chains.values())
    parts = []
    for file, lines in listing.sources.items():
        if file == PRELUDE:
            shown = escape("\n".join(lines.values()))
            parts.append(
                f'<details class="file"><summary>{escape(file)} <small>constants and the '
                f"parameter struct</small></summary><pre>{shown}</pre></details>"
            )
            continue
        rows = "".join(_line((file, number), text, lines_of) for number, text in lines.items())
        parts.append(
            f'<details class="file" open><summary>{escape(file)} <small>{busy[file]:,} PTX '
            f"instructions</small></summary>{rows}</details>"
        )
    return "".join(parts)


@dataclass(frozen=True)
class _Lines:
    """All that is said of a line, by line."""

    groups: Mapping[Place, Mapping[Chain, Group]]
    inlined: Mapping[Place, Counter[tuple[str, str, Place]]]
    margins: Mapping[Place, Sequence[tuple[str, str]]]
    uses: Mapping[Place, Counter[Place]]
    listing: Listing


def _inlined(listing: Listing) -> dict[Place, Counter[tuple[str, str, Place]]]:
    """Line → what was inlined into it from other lines: (name, kind, line that asks) and count."""
    seen: defaultdict[Place, Counter[tuple[str, str, Place]]] = defaultdict(Counter)
    for op in listing.ptx:
        kind = kind_of(op)
        if kind and kind != "block" and op.chain:
            asks, *callers = site(op.chain)
            for place in dict.fromkeys(callers):
                seen[place][stem(op.opcode), kind, asks] += 1
    return dict(seen)


def _margins(listing: Listing) -> dict[Place, list[tuple[str, str]]]:
    """Line → (name, kind) of the memory instructions it asks for or, a wrapper, is."""
    found: defaultdict[Place, dict[tuple[str, str], None]] = defaultdict(dict)
    for op in listing.ptx:
        kind = kind_of(op)
        if kind and op.chain:
            for place in (op.chain[0], site(op.chain)[0]):
                found[place][stem(op.opcode), kind] = None
    return {
        place: sorted(names, key=lambda each: each[1] == "block") for place, names in found.items()
    }


def _uses(listing: Listing) -> dict[Place, Counter[Place]]:
    """Line of a wrapper → the lines that ask for it, with the number of instructions."""
    found: defaultdict[Place, Counter[Place]] = defaultdict(Counter)
    for op in listing.ptx:
        if op.chain and (asks := site(op.chain)[0]) != op.chain[0]:
            found[op.chain[0]][asks] += 1
    return dict(found)


def _line(place: Place, text: str, of: _Lines) -> str:
    own = of.groups.get(place, {})
    below = of.inlined.get(place, Counter[tuple[str, str, Place]]())
    names = of.margins.get(place, ())
    kinds = {kind for _, kind in names} | {kind for _, kind, _ in below}
    classes = "".join(f" k-{kind}" for kind in sorted(kinds))
    number = f'<a href="#{escape(_id(place))}">{place[1]}</a>'
    code = f'<div class="src">{number}<code>{escape(text) or " "}</code>{_chips(below)}</div>'
    out = _groups(own, of.listing) if own else ""
    if place in of.uses:
        out += _wrapped(of.uses[place], of.listing)
    margin = _margin(place, names, of.listing)
    rest = (
        f'<div class="out">{out}</div><div class="margin">{margin}</div>' if out or margin else ""
    )
    any_kind = " m" if kinds else ""
    return f'<div class="line{any_kind}{classes}" id="{escape(_id(place))}">{code}{rest}</div>'


def _wrapped(uses: Counter[Place], listing: Listing) -> str:
    where = " ".join(f"{_anchor(place, listing)} ×{count}" for place, count in uses.items())
    total = sum(uses.values())
    return (
        f"<details><summary>{total} PTX, shown at the {len(uses)} lines that ask for it</summary>"
        f"{where}</details>"
    )


def _chips(below: Counter[tuple[str, str, Place]]) -> str:
    if not below:
        return ""
    merged: dict[tuple[str, str], tuple[int, Place]] = {}
    for (name, kind, place), count in below.items():
        merged[name, kind] = (merged.get((name, kind), (0, place))[0] + count, place)
    order = list(KINDS)
    chips = [
        f'<a class="c {kind}" href="#{escape(_id(place))}" title="{escape(_note(name))}">'
        f"{escape(name)}{f' ×{count}' if count > 1 else ''}</a>"
        for (name, kind), (count, place) in sorted(
            merged.items(), key=lambda each: (order.index(each[0][1]), each[0])
        )
    ]
    if len(chips) <= _MOST_CHIPS:
        return f'<div class="chips">{"".join(chips)}</div>'
    return (
        f'<details class="chips"><summary>{len(chips)} kinds of memory instructions inlined here'
        f"</summary>{''.join(chips)}</details>"
    )


def _groups(own: Mapping[Chain, Group], listing: Listing) -> str:
    """All that a line became; of memory instructions the first place is shown unfolded."""
    first, *rest = own.values()
    memory = any(kind_of(op) for group in own.values() for op in group.ptx)
    body = _group(first, listing)
    if rest:
        others = "".join(_group(group, listing) for group in rest)
        where = f"and at {len(rest)} other place{'s' if len(rest) > 1 else ''}"
        body += f"<details><summary>{where}: {_counts(rest, listing)}</summary>{others}</details>"
    shown = " open" if memory else ""
    return f"<details{shown}><summary>{_counts([first], listing)}</summary>{body}</details>"


def _counts(groups: Sequence[Group], listing: Listing) -> str:
    ptx = sum(len(group.ptx) for group in groups)
    sass = sum(len(group.sass) for group in groups)
    return f"{ptx} PTX" + (f", {sass} SASS" if listing.sass else "")


def _group(group: Group, listing: Listing) -> str:
    first = group.chain[1:2]
    callers = "".join(f" ← {_anchor(place, listing)}" for place in first)
    callers += "".join(f" ← {escape(_short(place))}" for place in group.chain[2:])
    chain = f'<p class="chain">{callers}</p>' if callers else ""
    ptx = _code(group.ptx, kind_of)
    sass = _code(group.sass, kind_of_sass)
    columns = f"<pre>{ptx}</pre><pre>{sass}</pre>" if listing.sass else f"<pre>{ptx}</pre>"
    return f'{chain}<div class="two">{columns}</div>'


def _code(ops: Sequence[Op], kind_of_op: Callable[[Op], str]) -> str:
    rows = []
    for op in ops:
        kind = kind_of_op(op)
        text = escape(op.text)
        rows.append(f'<b class="{kind}">{text}</b>' if kind else text)
    return "\n".join(rows)


def _margin(place: Place, names: Sequence[tuple[str, str]], listing: Listing) -> str:
    parts = [
        f'<p><b class="c {kind}">{MARKS[kind]}</b> <code>{escape(name)}</code> '
        f"{escape(_note(name))}</p>"
        for name, kind in names
    ]
    ordered = any(kind not in ("block", "") for _, kind in names)
    if ordered and not place[0].startswith("asm/") and (said := reason(listing, place)):
        parts.append(f"<q>{escape(_shortened(said))}</q>")
    return "".join(parts)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_REASON else text[:_MOST_REASON].rsplit(" ", 1)[0] + " …"


def _id(place: Place) -> str:
    return f"{place[0]}:{place[1]}"


def _short(place: Place) -> str:
    return f"{place[0].rsplit('/', 1)[-1]}:{place[1]}"


def _anchor(place: Place, listing: Listing) -> str:
    text = listing.text_of(place).strip()[:80]
    title = f' title="{escape(text)}"' if text else ""
    return f'<a href="#{escape(_id(place))}"{title}>{escape(_short(place))}</a>'
