"""The rows of ``bench``, which say where they come from, for the workers."""

from deepep_cupy.bench.rows import (
    as_words,
    copies_of,
    fill,
    pattern,
    sources,
    wrong_rows,
    wrong_sums,
)

__all__ = ["as_words", "copies_of", "fill", "pattern", "sources", "wrong_rows", "wrong_sums"]
