"""Kernels as the simulator runs them: the product's text and constants, in small sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deepep_cupy.engines.gpu.kernels import get_kernel
from deepep_cupy.protocol.constants import SHARED_HEAD, KernelShape, kernel_constants
from simulator.build import build_kernel, entry_text, kernel_text

MAX_ROW_BYTES = 384
STORY_KERNELS = (
    *("barrier", "dispatch", "dispatch_bulk", "dispatch_cast_bulk"),
    *("combine", "combine_bulk"),
)
"""Kernels in which ranks talk to each other."""

Edit = Callable[[str], str]
"""A change of a kernel's whole text: a planted fault."""


@dataclass(frozen=True)
class Shape:
    """What kernels are compiled for.

    Attributes:
        num_ranks: R.
        num_threads: Threads a block.
        loads: ``"coherent"`` or ``"nc"``.
    """

    num_ranks: int
    num_threads: int = 64
    loads: str = "coherent"

    @property
    def constants(self) -> Mapping[str, int]:
        """The product's constants: stages of 256 bytes (casting, of 2048), two of them a warp."""
        shape = KernelShape(
            num_ranks=self.num_ranks,
            max_row_bytes=MAX_ROW_BYTES,
            num_threads=self.num_threads,
            loads=self.loads,
            shared_limit=SHARED_HEAD + self.num_threads // 32 * 1024,
            turns_per_check=2,
        )
        return kernel_constants(shape)


@functools.cache
def library(shape: Shape, kernel: str, edit: Edit | None = None) -> Path:
    """One kernel, compiled; ``edit`` must change its text."""
    spec = get_kernel(kernel)
    text = kernel_text(spec, shape.constants)
    if edit is not None:
        changed = edit(text)
        if changed == text:
            raise ValueError(f"the planted fault changes nothing in {kernel}")
        text = changed
    return build_kernel(text + entry_text(spec))


def build_all(shapes: list[Shape]) -> None:
    """Compile the stories' kernels for some shapes, two at a time."""
    wanted = [(shape, name) for shape in shapes for name in STORY_KERNELS]
    with ThreadPoolExecutor(2) as workers:
        list(workers.map(lambda pair: library(*pair), wanted))
