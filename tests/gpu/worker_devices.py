"""Which GPUs a rank sees must not matter.

mpirun -n 2 python tests/gpu/worker_devices.py all     # every rank sees all, and uses its own
mpirun -n 2 python tests/gpu/worker_devices.py one     # every rank sees its own alone
mpirun -n 2 python tests/gpu/worker_devices.py turned  # all, but numbered differently
mpirun -n 2 python tests/gpu/worker_devices.py given   # all, chosen by the argument ``device``

CUDA_VISIBLE_DEVICES must list the GPUs to use, as ``0,1``; it is changed before CUDA starts.
"""

from __future__ import annotations

import os
import sys
from typing import Any

MODES = ("all", "one", "turned", "given")


def choose(mode: str) -> None:
    """Set what this rank will see."""
    from deepep_cupy.env import launcher_rank

    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if mode not in ("one", "turned") or not visible:
        return
    place = launcher_rank() % len(visible)
    turned = [*visible[place:], *visible[:place]]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(turned[:1] if mode == "one" else turned)


def main() -> None:
    """Round trips on the GPUs chosen."""
    mode = next((word for word in sys.argv[1:] if word in MODES), "all")
    choose(mode)
    from common import RoundTrip, Worker, small_case

    def arguments(parser: Any) -> None:
        parser.add_argument("mode", choices=MODES, nargs="?", default="all")

    worker = Worker("DEVICES", __doc__, arguments)
    device: int | None = None
    if worker.gpu and mode == "given":
        device = (worker.rank + 1) % worker.num_gpus
        worker.device = device
    elif worker.gpu and mode == "turned":
        device = worker.device = 0
    if worker.gpu:
        worker.xp.cuda.Device(worker.device).use()
    trip = RoundTrip(worker, small_case(worker, dtype="bfloat16", num_tokens=(64,) * worker.size))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    with worker.buffer(device=device) as buffer:
        for _ in range(10):
            trip.round(buffer)
            buffer.barrier()
        worker.synchronize()
        buffer.check()
        uuid = ""
        if worker.gpu:
            from deepep_cupy.memory.cuda_ipc import device_uuid

            uuid = device_uuid(buffer._engine.device)
    every = worker.comm.allgather((seen, worker.device, uuid))
    for rank, (names, number, gpu) in enumerate(every):
        worker.say(f"  rank {rank}: sees {names or 'what there is'}, uses {number}: {gpu}")
    used = len({gpu for _, _, gpu in every})
    worker.done(f"{mode}, {used} GPUs in use")


if __name__ == "__main__":
    sys.exit(main())
