"""Columns of text for commands that print tables."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["columns"]


def columns(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out rows under their heads; a column of numbers is set flush right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [bool(rows) and all(isinstance(row[i], int) for row in rows) for i in range(len(head))]
    lines = [list(head), *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )
