"""A kernel of your own that puts rows into a peer's memory, with this package's building blocks.

Each rank has a mailbox in the Buffer's memory. It sends its rows to the rank on its right, with
ordinary stores over NVLink, and signals with one word; it takes what came from the left once it
has acquired that word, or gives up at a deadline. ``examples/own_kernel.cu`` is the kernel, in 40
lines, ``docs/own_kernel.md`` explains each step. Without a GPU it is compiled and not run.

USAGE (one process, or any number of ranks up to eight):
    python examples/07_own_kernel.py
    mpirun -n 2 python -m mpi4py examples/07_own_kernel.py

Expected output: the engine, what was sent or what was compiled, and
    OK: 3 rounds of 256 rows came from the left on each of 2 ranks
"""

import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from deepep_cupy import Buffer, kernel_options
from deepep_cupy.jit.compile import compile_text, parse_target

comm = MPI.COMM_WORLD
rank, num_ranks = comm.rank, comm.size
left, right = (rank - 1) % num_ranks, (rank + 1) % num_ranks
NUM_ROWS, HIDDEN, ROUNDS, TIMEOUT_S = 256, 4096, 3, 20.0
BLOCKS, THREADS = 16, 256  # few enough that all blocks that wait are resident
TEXT = Path(__file__).with_name("own_kernel.cu").read_text()


def main() -> int:
    """Send and check three rounds; 0 when every rank got its neighbour's rows."""
    with Buffer(
        comm,
        num_max_tokens_per_rank=NUM_ROWS,
        hidden=HIDDEN,
        num_topk=1,
        num_experts=num_ranks,
        dtype="float32",
    ) as buffer:
        if rank == 0:
            print(f"engine: {buffer.engine_name}, {num_ranks} ranks")
        if buffer.engine_name == "host":
            return compile_only()
        wrong = exchange(buffer.xp, buffer)
    problems = [said for said in comm.allgather(wrong) if said]
    if rank == 0:
        good = f"OK: {ROUNDS} rounds of {NUM_ROWS} rows came from the left on each of "
        print(f"WRONG: {'; '.join(problems)}" if problems else f"{good}{num_ranks} ranks")
    return 1 if problems else 0


def compile_only() -> int:
    """No GPU: the text is compiled for one, by NVRTC, and that is all."""
    if rank == 0:
        made = compile_text(
            TEXT,
            name="own_kernel",
            entry="take_rows",
            target=parse_target("sm_90"),
            options=kernel_options(arch="sm_90"),
        )
        print(
            f"OK: there is no GPU here, so own_kernel.cu was compiled for sm_90 "
            f"({len(made.cubin):,} bytes) and not run"
        )
    return 0


def exchange(cupy, buffer) -> str:
    """Three rounds; what is wrong, or nothing."""
    # The library: the options with which our text finds "asm/memory.cuh".
    module = cupy.RawModule(code=TEXT, options=kernel_options())
    put, take = module.get_function("put_rows"), module.get_function("take_rows")

    # The library: memory that all ranks can reach, and where each rank's is in this process.
    mailbox = buffer.empty((NUM_ROWS, HIDDEN), np.float32)
    flag = buffer.empty((1,), np.uint64)
    flag[:] = 0
    pointers = buffer.peer_pointers()
    offsets = comm.allgather([array.data.ptr - pointers[rank] for array in (mailbox, flag)])
    mailbox_there, flag_there = (np.uint64(pointers[right] + at) for at in offsets[right])

    out = cupy.empty((NUM_ROWS, HIDDEN), np.float32)  # ordinary memory of this rank
    done, late = cupy.zeros(1, np.uint32), cupy.zeros(1, np.uint32)
    words, problem = np.uint64(mailbox.nbytes // 16), ""
    for number in range(1, ROUNDS + 1):
        sent, wanted = (cupy.asarray(rows_of(who, number)) for who in (rank, left))
        # The mailbox on the right is free: its owner's work is done, and all ranks have met.
        cupy.cuda.get_current_stream().synchronize()
        comm.barrier()
        current = np.uint64(number)
        put((BLOCKS,), (THREADS,), (sent, mailbox_there, flag_there, done, words, current))
        limit = np.uint64(TIMEOUT_S * 1e9)
        take((BLOCKS,), (THREADS,), (out, mailbox, flag, late, words, current, limit))
        bad = int((out.view(np.uint32) != wanted.view(np.uint32)).any(axis=1).sum())
        if int(late[0]):
            problem = problem or f"rank {rank} waited {TIMEOUT_S:g} s for rank {left}"
        elif bad:
            problem = problem or f"{bad} rows from rank {left} in round {number} on rank {rank}"
    # Memory that a peer may still be writing must not go: all have taken their last rows.
    comm.barrier()
    return problem


def rows_of(who, number):
    """The rows that a rank sends in a round."""
    rng = np.random.default_rng([who, number])
    return rng.standard_normal((NUM_ROWS, HIDDEN), dtype=np.float32)


if __name__ == "__main__":
    sys.exit(main())
