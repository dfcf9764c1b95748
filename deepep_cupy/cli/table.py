"""Columns of text for commands that print tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["columns"]


def columns(
    head: Sequence[str], rows: Sequence[Sequence[object]], words: Collection[str] | None = None
) -> str:
    """Lay out rows under their heads; a column of numbers is set flush right.

    Args:
        head: One text a column.
        rows: Cells in the order of the heads.
        words: Heads of columns that are no numbers; ``None``: those in which not all are ``int``.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    if words is None:
        right = [
            bool(rows) and all(isinstance(row[i], int) for row in rows) for i in range(len(head))
        ]
    else:
        right = [name not in words for name in head]
    lines = [list(head), *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )
