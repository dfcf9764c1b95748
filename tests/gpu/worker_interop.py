"""Arrays of JAX and PyTorch, and anything with ``__cuda_array_interface__``, as they are.

mpirun -n 2 python tests/gpu/worker_interop.py

A producer's work may still be running when the call is made: it must be waited for.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from common import RoundTrip, Worker, small_case

from deepep_cupy.testing.compare import assert_combine_equal, assert_dispatch_equal


class Interface:
    """An array of some other library: the interface alone, on a stream of its own."""

    def __init__(self, array: Any, stream: Any) -> None:
        described = dict(array.__cuda_array_interface__)
        described["stream"] = stream.ptr
        self.__cuda_array_interface__ = described
        self.keep = array


def main() -> None:
    """All libraries that are installed."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    worker = Worker("INTEROP", __doc__)
    if not worker.gpu:
        worker.say("INTEROP: skipped, it needs a GPU")
        return
    trip = RoundTrip(worker, small_case(worker, num_tokens=(64,) * worker.size, dtype="float32"))
    said = []
    with worker.buffer() as buffer:
        for library in (interface, torch_tensors, torch_streams, numba_arrays, jax_arrays):
            result = library(worker, buffer, trip)
            worker.say(f"{library.__name__}: {result}")
            worker.meet()
            said.append(result)
    worker.done(*said)


def round_trip(worker: Worker, buffer: Any, trip: RoundTrip, arrays: dict[str, Any]) -> None:
    """Dispatch and combine of arrays of another library. Collective."""
    rank = worker.rank
    got = buffer.dispatch(arrays["x"], topk_idx=arrays["topk_idx"], topk_weights=arrays["weights"])
    assert_dispatch_equal(got, trip.want.dispatched[rank], rank=rank)
    back = buffer.combine(arrays["y"], got.handle, topk_weights=arrays["y_weights"])
    worker.synchronize()
    buffer.check()
    assert_combine_equal(back, trip.want.combined[rank], rank=rank)


def host_arrays(trip: RoundTrip) -> dict[str, Any]:
    """This rank's inputs as NumPy arrays."""
    rank = trip.worker.rank
    mine, rows = trip.want.inputs[rank], trip.want.rows[rank]
    return {
        "x": mine.x,
        "topk_idx": mine.topk_idx,
        "weights": mine.topk_weights,
        "y": rows.y,
        "y_weights": rows.topk_weights,
    }


def interface(worker: Worker, buffer: Any, trip: RoundTrip) -> str:
    """Written by a slow kernel on a side stream that the interface names."""
    cupy = worker.xp
    side = cupy.cuda.Stream(non_blocking=True)
    arrays, sources = {}, []
    for name, value in host_arrays(trip).items():
        right = cupy.asarray(value)
        sources.append(right)  # read by the side stream later: not to be freed until then
        array = cupy.full(right.shape, -1, right.dtype)
        cupy.cuda.get_current_stream().synchronize()
        with side:
            slow = cupy.zeros(1 << 26, cupy.uint8)
            for _ in range(20):
                slow += 1
            cupy.copyto(array, right)
        arrays[name] = Interface(array, side)
    round_trip(worker, buffer, trip, arrays)
    return "__cuda_array_interface__"


def torch_tensors(worker: Worker, buffer: Any, trip: RoundTrip) -> str:
    """By DLPack; bfloat16 there and back as well."""
    try:
        import torch
    except ImportError as error:
        return f"no torch ({error})"
    with torch.cuda.device(worker.device):
        arrays = {name: torch.as_tensor(a).cuda() for name, a in host_arrays(trip).items()}
        torch.cuda.synchronize()
        round_trip(worker, buffer, trip, arrays)
        x = torch.arange(64 * 8, device="cuda", dtype=torch.float32).reshape(64, 8)
        half = x.to(torch.bfloat16)
        torch.cuda.synchronize()
        got = buffer.dispatch(half, topk_idx=arrays["topk_idx"])
        assert got.recv_x.dtype.name == "bfloat16", got.recv_x.dtype
        received = torch.from_dlpack(got.recv_x).float().cpu().numpy()
    tokens = worker.down(got.handle.recv_src_idx)
    want = half.float().cpu().numpy()[tokens]
    assert np.array_equal(received, want), "bfloat16 of torch came out wrong"
    return f"torch {torch.__version__}"


def torch_streams(worker: Worker, buffer: Any, trip: RoundTrip) -> str:
    """A tensor is made late on a side stream, and overwritten there right behind the call."""
    try:
        import torch
    except ImportError as error:
        return f"no torch ({error})"
    with torch.cuda.device(worker.device):
        arrays, side = host_arrays(trip), torch.cuda.Stream()
        idx = torch.as_tensor(arrays["topk_idx"]).cuda()
        slow = torch.zeros(1 << 26, device="cuda")
        right = torch.as_tensor(arrays["x"]).cuda()
        torch.cuda.synchronize()
        want = trip.want.dispatched[worker.rank].recv_x
        for _ in range(20):
            with torch.cuda.stream(side), buffer.on(side):
                for _ in range(5):
                    slow += 1
                x = right.clone()
                got = buffer.dispatch(x, topk_idx=idx, num_worst_tokens=64 * worker.size)
                x.zero_()
                rows = torch.from_dlpack(got.recv_x).clone()
            side.synchronize()
            found = rows.cpu().numpy()[: len(want)]
            assert found.tobytes() == want.tobytes(), "overwritten too early"
    buffer.check()
    return "torch on a side stream"


def numba_arrays(worker: Worker, buffer: Any, trip: RoundTrip) -> str:
    """By ``__cuda_array_interface__``, on a stream of Numba."""
    try:
        from numba import cuda

        stream = cuda.stream()
    except Exception as error:  # noqa: BLE001 - not installed, or for another CUDA
        return f"no numba ({type(error).__name__})"
    with buffer.on(stream):
        arrays = {n: cuda.to_device(a, stream=stream) for n, a in host_arrays(trip).items()}
        round_trip(worker, buffer, trip, arrays)
    return "numba"


def jax_arrays(worker: Worker, buffer: Any, trip: RoundTrip) -> str:
    """By DLPack; bfloat16 there and back as well."""
    try:
        import jax

        jax.config.update("jax_enable_x64", True)
        devices = jax.devices("gpu")
    except (ImportError, RuntimeError) as error:
        return f"no jax on GPUs ({error})"
    device = devices[worker.device]
    arrays = {name: jax.device_put(a, device) for name, a in host_arrays(trip).items()}
    round_trip(worker, buffer, trip, arrays)
    x = jax.device_put(np.arange(64 * 8, dtype=np.float32).reshape(64, 8), device)
    half = x.astype(jax.numpy.bfloat16)
    got = buffer.dispatch(half, topk_idx=arrays["topk_idx"])
    assert got.recv_x.dtype.name == "bfloat16", got.recv_x.dtype
    worker.synchronize()
    received = np.asarray(jax.dlpack.from_dlpack(got.recv_x).astype(np.float32))
    tokens = worker.down(got.handle.recv_src_idx)
    want = np.asarray(half.astype(np.float32))[tokens]
    assert np.array_equal(received, want), "bfloat16 of JAX came out wrong"
    return f"jax {jax.__version__}"


if __name__ == "__main__":
    sys.exit(main())
