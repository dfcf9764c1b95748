"""One message of more than 2^31 bytes each way, checked row by row. Needs 10 GB of memory.

mpirun -n 2 python tests/mpi/big_worker.py
"""

import numpy as np
from mpi4py import MPI

from deepep_cupy import Buffer

ROWS, WORDS = 2100, 1 << 17  # 1 MiB a row, 2.05 GiB


def main():
    comm = MPI.COMM_WORLD
    num_tokens = ROWS if comm.rank == 0 else 0
    x = np.empty((num_tokens, WORDS), np.uint64)
    for token in range(num_tokens):
        x[token] = np.arange(WORDS, dtype=np.uint64) + np.uint64(token * WORDS)
    mask = np.zeros((num_tokens, 2), bool)
    mask[:, 1] = True
    with Buffer(
        comm,
        num_max_tokens_per_rank=ROWS,
        hidden=WORDS,
        num_topk=0,
        dtype="uint64",
        engine="host",
    ) as buffer:
        got = buffer.dispatch(x, is_token_in_rank=mask)
        assert len(got.recv_x) == (0 if comm.rank == 0 else ROWS)
        check(got.recv_x)
        back = buffer.combine(got.recv_x, got.handle)
        assert len(back.combined_x) == num_tokens
        check(back.combined_x)


def check(rows):
    for token, row in enumerate(rows):
        first = np.uint64(token * WORDS)
        assert row[0] == first
        assert np.array_equal(row - first, np.arange(WORDS, dtype=np.uint64))


if __name__ == "__main__":
    main()
