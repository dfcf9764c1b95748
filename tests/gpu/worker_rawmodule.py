"""The public text of every kernel, loaded by plain CuPy, does what the library's own does.

mpirun -n 2 python tests/gpu/worker_rawmodule.py

``cupy.RawModule(code=kernel_source(...), options=kernel_options(...))`` compiles it with CuPy's
own options (subnormals are flushed: rows here are normal numbers), and the PTX of
``kernel_ptx(...)`` is loaded from a file. Both then take the place of the Buffer's kernels.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from common import Worker, runtime
from patterns import copies_of, fill, sources, wrong_rows, wrong_sums

from deepep_cupy.engines.gpu.kernels import kernel_options, kernel_ptx, kernel_source, list_kernels

ROW_BYTES = 14336


def main() -> None:
    """By text and by PTX."""
    worker = Worker("RAWMODULE", __doc__)
    if not worker.gpu:
        worker.say("RAWMODULE: skipped, it needs a GPU")
        return
    cupy = worker.xp
    arch = int(cupy.cuda.Device(worker.device).compute_capability)
    shape = {"num_ranks": worker.size, "max_row_bytes": ROW_BYTES}
    names = [spec.name for spec in list_kernels() if spec.min_arch <= arch]
    texts = {name: kernel_source(name, arch, **shape) for name in names}
    modules = {
        name: cupy.RawModule(code=text, options=kernel_options(name))
        for name, text in texts.items()
    }
    trips(worker, modules, "text")
    said = f"{len(names)} kernels by their text"
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.ptx" for name in names}
        for name, path in paths.items():
            path.write_text(kernel_ptx(name, arch, **shape))
        modules = {name: cupy.RawModule(path=str(path)) for name, path in paths.items()}
        try:
            trips(worker, modules, "PTX")
            said += " and by their PTX"
        except cupy.cuda.driver.CUDADriverError as error:
            # PTX of an NVRTC that is newer than the driver: nobody can load that.
            if "UNSUPPORTED_PTX_VERSION" not in str(error):
                raise
            said += f" (not by their PTX: {error})"
    worker.done(said)


def trips(worker: Worker, modules: dict[str, Any], what: str) -> None:
    """Round trips with these modules' functions on all paths. Collective."""
    from deepep_cupy.jit.compile import Loaded

    xp, rank = worker.xp, worker.rank
    functions = {}
    for name, module in modules.items():
        kernel = module.get_function(name)
        functions[name] = Loaded(name, int(kernel.kernel.ptr), (module, kernel))
    with worker.buffer(hidden=ROW_BYTES) as buffer:
        kernels = runtime(buffer).kernels
        idx = np.random.default_rng(rank).permuted(
            np.tile(np.arange(4 * worker.size), (60, 1)), axis=1
        )
        topk_idx = xp.asarray(np.ascontiguousarray(idx[:, : min(4, idx.shape[1])]))
        rows = {}
        for words in (100, 3584, 33):  # 33: rows that the bulk engine cannot move
            rows[words] = x = xp.empty((60, 4 * words), np.uint8).view(np.float32)
            fill(xp, x, rank, words)
        own = {words: modes(buffer, x, topk_idx) for words, x in rows.items()}
        for name, function in functions.items():
            if kernels.has(name):
                kernels._loaded[name] = (kernels._loaded[name][0], function)
        kernels._ready.clear()
        kernels._local.clear()
        for words, x in rows.items():
            got = buffer.dispatch(x, topk_idx=topk_idx)
            wrong = wrong_rows(xp, got.recv_x, *sources(xp, got.handle), words)
            assert wrong == 0, f"dispatch by {what}: {wrong} rows are wrong"
            back = buffer.combine(got.recv_x, got.handle)
            wrong = wrong_sums(xp, back.combined_x, rank, words, copies_of(got.handle))
            assert wrong == 0, f"combine by {what}: {wrong} rows are wrong"
            for name, value in modes(buffer, x, topk_idx).items():
                assert np.array_equal(value, own[words][name]), f"{name} by {what} is wrong"
            buffer.barrier()
        worker.synchronize()
        buffer.check()
        used = {name for name, _ in (*kernels._ready, *kernels._local)}
        missing = {name for name in functions if kernels.has(name)} - used
        assert not missing, f"these kernels were not launched: {missing}"
    worker.say(f"{what}: right with {', '.join(sorted(used))}")


def modes(buffer: Any, x: Any, topk_idx: Any) -> dict[str, Any]:
    """What the kernels beside plain dispatch and combine make, as bytes. Collective."""
    halves = x.view(ml_dtypes.bfloat16)
    codes, scales = buffer.dispatch(
        halves, topk_idx=topk_idx, quantize="fp8_e4m3", scales_layout="column"
    ).recv_x
    wide = buffer.dispatch(x, topk_idx=topk_idx, do_expand=True)
    late = buffer.dispatch(x, topk_idx=topk_idx, do_cpu_sync=False)
    outside = late.recv_x.copy()
    made = {
        "the cast": codes,
        "the scales": scales.T,
        "the expanded layout": wide.recv_x,
        "exact sums": buffer.combine(wide.recv_x, wide.handle).combined_x,
        "sums per rank": buffer.combine(wide.recv_x, wide.handle, reduce="per_rank").combined_x,
        "sums without a wait": buffer.combine(outside, late.handle).combined_x,
    }
    return {name: array.view(np.uint8).get() for name, array in made.items()}


if __name__ == "__main__":
    sys.exit(main())
