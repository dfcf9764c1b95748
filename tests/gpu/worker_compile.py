"""Compile, on all cores, the kernels that the other workers will need; they find them cached.

python tests/gpu/worker_compile.py [--ranks 1,2,3,4,8] [--arch 90] [--quick]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

ROW_BYTES = 14336
"""Longest row of most Buffers of the workers, of which none has a shorter one."""
LONG_ROW_BYTES = 32768
"""Of ``worker_cases.py``, where it tries all sizes."""


def build_one(task: tuple[str, int, int, str, int]) -> tuple[str, bool]:
    """One kernel of one shape; its label, and whether it was there already."""
    from deepep_cupy.engines.gpu.kernels import get_kernel, shape_constants
    from deepep_cupy.jit.build import Request, build, open_cache
    from deepep_cupy.jit.compile import compiler_archs, target_for

    name, ranks, row_bytes, loads, arch = task
    constants = shape_constants(arch, num_ranks=ranks, max_row_bytes=row_bytes, loads=loads)
    request = Request(get_kernel(name), constants, target_for(arch, compiler_archs()))
    return f"{request.label} R{ranks} {row_bytes} {loads}", build(request, open_cache()).cached


def main() -> None:
    """Compile all shapes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1,2,3,4,8")
    parser.add_argument("--arch", type=int, default=0, help="as 90; default: that of GPU 0")
    parser.add_argument("--quick", action="store_true", help="what the quick parts need")
    parser.add_argument("--engine", help="ignored")
    options = parser.parse_args()
    arch = options.arch
    if not arch:
        import cupy

        arch = int(cupy.cuda.Device(0).compute_capability)
    from deepep_cupy.engines.gpu.kernels import KERNELS, shape_constants
    from deepep_cupy.testing.data import cases

    begin = time.monotonic()
    tasks = []
    for ranks in (int(number) for number in options.ranks.split(",")):
        longest = max(case.row_bytes for case in cases(ranks, small=options.quick))
        shapes = {  # what a longer row does not change is compiled once
            tuple(shape_constants(arch, num_ranks=ranks, max_row_bytes=row, loads=loads).items()):
            (row, loads)
            for row in (ROW_BYTES, max(ROW_BYTES, longest), LONG_ROW_BYTES)
            for loads in ("coherent", "nc")
        }  # fmt: skip
        tasks += [
            (kernel.name, ranks, row_bytes, loads, arch)
            for row_bytes, loads in shapes.values()
            for kernel in KERNELS
            if kernel.min_arch <= arch
        ]
    fork_free = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=fork_free) as pool:
        done = list(pool.map(build_one, tasks))
    cached = sum(was_there for _, was_there in done)
    seconds = time.monotonic() - begin
    print(f"COMPILE: ok, {len(done)} kernels, {cached} of them cached, {seconds:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
