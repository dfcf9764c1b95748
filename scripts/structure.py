#!/usr/bin/env python3
"""Print the structure of the package: a mirror to look into, not a limit.

    scripts/structure.py [PACKAGE] [--order ROOM,ROOM...] [--names PARAMETER]...

A room is a folder directly inside the package; files beside the folders are the room ``.``.
For each room: files, lines (Python, of which code and docstrings, and CUDA), and how often
``Any`` stands in its code. Then the imports within the package, between files and between rooms:

* layer: 0 for what imports nothing of the package, else one more than the highest layer it
  imports (the longest path down). A circle counts as one.
* circle: files (or rooms) that import each other, directly or through others.
* upward: an import from a room that stands higher in the declared order.

Imports inside functions, ``importlib.import_module("...")`` with a fixed text, and imports for
type checking alone count like any other: a reader follows them all. ``--names zero_padding``
counts the files in which a word occurs as, or within, a name of Python code or in CUDA text: how
far a parameter is spread.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ORDER = (
    *("protocol", "reference", "errors", "env", "_resources", "_version", "log"),
    *("jit", "ranks", "memory", "engines", "api", "__init__"),
    *("jax", "testing", "inspect", "cli", "litmus", "bench", "__main__"),
)
"""From the lowest to the highest. A room, or a file beside the rooms without its suffix.
``cli`` is what commands stand on; it finds those of ``bench`` and ``litmus`` by their names."""

CUDA_SUFFIXES = (".cu", ".cuh")
_CUDA_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

Graph = Mapping[str, set[str]]
"""Node → the nodes that it imports."""


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    room: str
    text: str
    cuda: bool

    @property
    def lines(self) -> int:
        """All lines."""
        return len(self.text.splitlines())


@dataclass(frozen=True)
class Python:
    """What the syntax tree of a Python file says."""

    code: int
    docs: int
    any_count: int
    names: frozenset[str]
    imports: frozenset[str]


def read(package: Path) -> dict[str, Source]:
    """Path relative to the package → source, of all Python and CUDA files."""
    found = {}
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", *CUDA_SUFFIXES) and "__pycache__" not in path.parts:
            relative = path.relative_to(package)
            room = relative.parts[0] if len(relative.parts) > 1 else "."
            cuda = path.suffix in CUDA_SUFFIXES
            found[relative.as_posix()] = Source(room, path.read_text(encoding="utf-8"), cuda)
    return found


def parse(source: str) -> Python:
    """Count and collect, for one file."""
    tree = ast.parse(source)
    doc_lines: set[int] = set()
    any_count, names, imports = 0, set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            doc_lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Name):
            names.add(node.id)
            any_count += node.id == "Any"
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, (ast.arg, ast.keyword)):
            names.add(node.arg or "")
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
            names.add(str(node.value))  # a field's name, given as a text
        imports |= set(_imported(node))
    code = sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in doc_lines
        for number, line in enumerate(source.splitlines(), 1)
    )
    return Python(code, len(doc_lines), any_count, frozenset(names), frozenset(imports))


def _imported(node: ast.AST) -> Iterable[str]:
    """Dotted names that a node imports; ``from a import b`` gives ``a.b``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("import_module")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ):
        yield str(node.args[0].value)


def imports_of(package: str, parsed: Mapping[str, Python]) -> dict[str, set[str]]:
    """File → files of the package that it imports. The longest known part of a name counts."""
    modules = {}
    for path in parsed:
        parts = [package, *path.removesuffix(".py").split("/")]
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for path, python in parsed.items():
        found = set()
        for name in python.imports:
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name:
                found.add(modules[name])
        graph[path] = found - {path}
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Groups of two or more nodes that can reach each other (strongly connected)."""
    return sorted(sorted(group) for group in _components(graph) if len(group) > 1)


def _components(graph: Graph) -> list[set[str]]:
    """Strongly connected components, those that are imported before those that import them."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in number:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], number[other])
        if low[node] == number[node]:
            at = stack.index(node)
            found.append(set(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return found


def layers(graph: Graph) -> dict[str, int]:
    """Node → its layer; all nodes of a circle have the same."""
    found: dict[str, int] = {}
    for group in _components(graph):
        below = {other for node in group for other in graph[node]} - group
        found |= dict.fromkeys(group, 1 + max((found[node] for node in below), default=-1))
    return found


def between(graph: Graph, room_of: Callable[[str], str]) -> dict[str, set[str]]:
    """The graph of the rooms of these files."""
    rooms: dict[str, set[str]] = {room_of(path): set() for path in graph}
    for path, imported in graph.items():
        rooms[room_of(path)] |= {room_of(other) for other in imported} - {room_of(path)}
    return rooms


def place_of(path: str) -> str:
    """The entry of the order that a file belongs to: its room, or the file itself."""
    return path.partition("/")[0].removesuffix(".py")


def upward(graph: Graph, order: tuple[str, ...]) -> list[tuple[str, str]]:
    """Imports from a higher place; files of places that the order leaves out are passed over."""
    rank = {place: number for number, place in enumerate(order)}

    def height(path: str) -> int | None:
        return rank.get(place_of(path))

    return sorted(
        (path, other)
        for path, imported in graph.items()
        for other in imported
        if (mine := height(path)) is not None
        and (its := height(other)) is not None
        and its > mine
        and other != "__init__.py"  # names of the package itself; it imports them when asked
    )


def files_naming(
    word: str, sources: Mapping[str, Source], parsed: Mapping[str, Python]
) -> list[str]:
    """Files in whose names the word occurs; of CUDA files, in whose text without comments."""
    return [
        path
        for path, source in sources.items()
        if (
            word in _CUDA_COMMENT.sub(" ", source.text)
            if source.cuda
            else any(word in name for name in parsed[path].names)
        )
    ]


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    """Words flush left, numbers flush right."""
    cells = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            c.rjust(w) if i else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )


def room_table(sources: Mapping[str, Source], parsed: Mapping[str, Python]) -> str:
    """One line a room, and the sum."""
    head = ("room", "files", "Python", "code", "docstrings", "CUDA", "Any")
    counts: dict[str, Counter[str]] = {}
    for path, source in sources.items():
        for room in (source.room, "all"):
            count = counts.setdefault(room, Counter())
            count["files"] += 1
            if source.cuda:
                count["CUDA"] += source.lines
                continue
            python = parsed[path]
            count["Python"] += source.lines
            count["code"] += python.code
            count["docstrings"] += python.docs
            count["Any"] += python.any_count
    rooms = [*sorted(room for room in counts if room != "all"), "all"]
    return table(head, [(room, *(counts[room][name] for name in head[1:])) for room in rooms])


def report(package: Path, order: tuple[str, ...], words: Iterable[str]) -> str:
    """Everything, as text."""
    sources = read(package)
    parsed = {path: parse(source.text) for path, source in sources.items() if not source.cuda}
    graph = imports_of(package.name, parsed)
    rooms = between(graph, lambda path: place_of(path))
    room_layers, file_layers = layers(rooms), layers(graph)
    parts = [room_table(sources, parsed), ""]
    parts.append(f"layers of rooms: {1 + max(room_layers.values(), default=-1)}")
    for layer in sorted(set(room_layers.values()), reverse=True):
        names = sorted(room for room, its in room_layers.items() if its == layer)
        parts.append(f"  {layer}: {', '.join(names)}")
    for what, each in (("rooms", rooms), ("files", graph)):
        found = circles(each)
        parts.append(f"circles of {what}: {len(found)}")
        parts += [f"  {', '.join(circle)}" for circle in found]
    parts.append(f"layers of files: {1 + max(file_layers.values(), default=-1)}")
    arrows = upward(graph, order)
    parts.append(f"upward imports: {len(arrows)}")
    parts += [f"  {path} -> {other}" for path, other in arrows]
    unknown = sorted({place_of(path) for path in graph} - set(order))
    if unknown:
        parts.append(f"rooms that the order leaves out: {', '.join(unknown)}")
    for word in words:
        naming = files_naming(word, sources, parsed)
        parts.append(f"files that name {word}: {len(naming)}")
        parts += [f"  {path}" for path in naming]
    return "\n".join(parts)


def main() -> None:
    """Print the report."""
    default = Path(__file__).resolve().parents[1] / "deepep_cupy"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", nargs="?", type=Path, default=default, metavar="PACKAGE")
    parser.add_argument("--order", metavar="ROOM,ROOM", help="from the lowest to the highest room")
    parser.add_argument("--names", action="append", default=[], metavar="PARAMETER")
    args = parser.parse_args()
    order = tuple(args.order.split(",")) if args.order else ORDER
    print(report(args.package.resolve(), order, args.names))


if __name__ == "__main__":
    main()
