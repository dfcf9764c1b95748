"""Runs an example or a command after breaking ``Buffer`` in a chosen way, on the last rank only.

    mpirun -n 2 python tests/mpi/with_fault.py FAULT SCRIPT.py [ARGUMENTS]
    mpirun -n 2 python tests/mpi/with_fault.py FAULT deepep_cupy check

FAULT: ``none``; ``dispatch``: received rows stand one place too low; ``combine``: the result is
zero; ``bit``: one bit of the result is wrong; ``raise``: the third call raises an error.
"""

import runpy
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from deepep_cupy import Buffer

IS_LAST = MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1
calls = 0


def wrong_dispatch(result):
    rows = result.recv_x
    if isinstance(rows, tuple):  # with scales
        return result._replace(recv_x=(np.roll(rows[0], 1, axis=0), rows[1]))
    return result._replace(recv_x=np.roll(rows, 1, axis=0))


def wrong_combine(result):
    return result._replace(combined_x=np.zeros_like(result.combined_x))


def wrong_bit(result):
    if result.combined_x.size:
        result.combined_x.reshape(-1).view(np.uint8)[-1] ^= 1
    return result


def raising(result):
    global calls
    calls += 1
    if calls == 3:
        raise RuntimeError("planted")
    return result


FAULTS = {
    "none": {},
    "dispatch": {"dispatch": wrong_dispatch},
    "combine": {"combine": wrong_combine},
    "bit": {"combine": wrong_bit},
    "raise": {"dispatch": raising, "combine": raising},
}


def plant(name, change):
    method = getattr(Buffer, name)
    setattr(Buffer, name, lambda *given, **named: change(method(*given, **named)))


def main():
    fault, target, *arguments = sys.argv[1:]
    for name, change in FAULTS[fault].items():
        if IS_LAST:
            plant(name, change)
    sys.argv = [target, *arguments]
    if target.endswith(".py"):
        sys.path.insert(0, str(Path(target).parent))
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
