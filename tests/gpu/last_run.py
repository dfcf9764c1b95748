"""``LAST_RUN.md``: what was last run on GPUs, and of which kernel text. Standard library only.

``.ci/gpu`` writes it; ``tests/cpu/test_last_run.py`` compares the digest with the text there is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

PATH = Path(__file__).with_name("LAST_RUN.md")

FILES = (
    "deepep_cupy/cuda/**/*.cu",
    "deepep_cupy/cuda/**/*.cuh",
    "deepep_cupy/engines/gpu/combine.py",
    "deepep_cupy/engines/gpu/dispatch.py",
    "deepep_cupy/engines/gpu/expand.py",
    "deepep_cupy/engines/gpu/kernels.py",
    "deepep_cupy/engines/gpu/quantize.py",
    "deepep_cupy/protocol/constants.py",
    "deepep_cupy/protocol/headers.py",
    "deepep_cupy/protocol/control_block.py",
    "ptx/*.ptx",
)
"""All that decides what the kernels are, as patterns below the root of the repository."""


@dataclass(frozen=True)
class Row:
    """One command of a run.

    Attributes:
        part: Its part and name, ``"barrier"``.
        ranks: How many.
        gpus: ``"2"``, ``"2 MPS"``, ``"2 in turns"``.
        seconds: It took.
        result: ``"ok"``, ``"FAILED"``, ``"skipped"``.
        figure: The worker's last line, or why not.
        date: Of the run.
        text: First digits of the kernel text's digest.
    """

    part: str
    ranks: str
    gpus: str
    seconds: str
    result: str
    figure: str
    date: str
    text: str


def digest(root: Path) -> str:
    """SHA-256 of all kernel text below ``root``; comments are not part of it."""
    whole = hashlib.sha256()
    for path in sorted({path for pattern in FILES for path in root.glob(pattern)}):
        text = path.read_text()
        text = python_without_words(text) if path.suffix == ".py" else text_without_comments(text)
        whole.update(path.relative_to(root).as_posix().encode() + b"\0")
        whole.update(text.encode() + b"\0")
    return whole.hexdigest()


def text_without_comments(text: str) -> str:
    """CUDA or PTX text: without ``//`` comments, and any white space the same."""
    return " ".join(re.sub(r"//[^\n]*", "", text).split())


def python_without_words(text: str) -> str:
    """Python text without docstrings and lines of comment, and any white space the same."""
    text = re.sub(r'"""[\s\S]*?"""', "", text)
    return " ".join(re.sub(r"(^|\s)#[^\n]*", "", text).split())


def short(whole: str) -> str:
    """The digits that are shown."""
    return whole[:16]


def digest_in(page: str) -> str:
    """The digest a page was written for; empty where it names none."""
    found = re.search(r"kernel text: `([0-9a-f]{16})`", page)
    return found[1] if found else ""


def rows_in(page: str) -> list[Row]:
    """The rows of a page's table."""
    rows = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        is_row = line.startswith("| ") and len(cells) == len(fields(Row))
        if is_row and cells[0] not in ("part", "---"):
            rows.append(Row(*cells))
    return rows


def merge(old: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    """What a run found, and what earlier runs found of the parts it left out, perhaps of an older
    text: each row says of which."""
    done = {(row.part, row.ranks, row.gpus) for row in new}
    return [*(row for row in old if (row.part, row.ranks, row.gpus) not in done), *new]


def page(machine: Iterable[tuple[str, str]], rows: Sequence[Row], text: str, date: str) -> str:
    """The whole page."""
    head = [
        "# Last run of `.ci/gpu`",
        "",
        "Written by the script; do not edit. CI warns when the kernel text has changed since.",
        "Rows of what the last run left out are older: the last column tells of which text.",
        "",
        f"* date: {date}",
        f"* kernel text: `{text}`",
        *(f"* {name}: {value}" for name, value in machine),
        "",
    ]
    table = [["part", "ranks", "GPUs", "seconds", "result", "figures", "date", "text"]]
    table += [[cell.replace("|", "/") for cell in astuple(row)] for row in rows]
    lines = ["| " + " | ".join(cells) + " |" for cells in table]
    lines.insert(1, "| " + " | ".join(["---"] * len(table[0])) + " |")
    return "\n".join([*head, *lines]) + "\n"
