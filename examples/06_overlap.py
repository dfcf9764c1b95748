"""Hide dispatch and combine behind the experts' work, and draw the time that this saves.

The tokens of a mixture-of-experts layer are cut into two micro-batches, A and B. One after the
other, communication and experts take turns. Overlapped, dispatch B runs on the Buffer's
communication stream while the experts work on A, and combine A while they work on B. The results
have the same bits. A call beside the experts takes ``--num-sms`` SMs, which the experts do not get:
with few the call is slow, with many they are.

USAGE (one process, or any number of ranks up to eight; the picture needs the extra "examples"):
    python examples/06_overlap.py
    mpirun -n 2 python -m mpi4py examples/06_overlap.py --out .       (draws ./overlap.png)
    options: --num-sms N (calls beside the experts), --gemm-sms N (the experts), --runs N

Expected output: the engine, a table of when each piece began and ended, the time saved (none on
the host engine, which has no streams), and
    OK: both ways give the same bits, and the right ones
"""

import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
from mpi4py import MPI
from support import to_host
from timeline import Experts, measure, options, other_sms, report

from deepep_cupy import Buffer, Config

comm = MPI.COMM_WORLD
rank, num_ranks = comm.rank, comm.size
num_local, topk_weights = 4, np.float32([0.75, 0.25])  # experts of a rank; a token has two
num_experts, num_topk = num_local * num_ranks, len(topk_weights)
ON_GPUS = 4096, 7168, 2048, "float16"  # tokens of a micro-batch, hidden, width inside an expert
ON_HOST = 256, 128, 64, "float32"


def main() -> int:
    """Run the layer both ways; 0 when the results are equal, and right, on all ranks."""
    args = options(__doc__)
    tokens, hidden, _, dtype = ON_GPUS  # the most: the host engine is given less
    sizes = {"num_max_tokens_per_rank": tokens, "hidden": hidden, "dtype": dtype}
    sizes |= {"num_topk": num_topk, "num_experts": num_experts}
    room = Buffer.size_hint(num_ranks=num_ranks, **sizes, do_expand=True)
    with Buffer(comm, **sizes, pool_bytes=room) as buffer:
        xp = buffer.xp  # NumPy or, on GPUs, CuPy
        args.gemm_sms = args.gemm_sms or other_sms(xp, args.num_sms)
        experts, batches = prepare(xp, buffer)
        ways = {
            "one after the other": partial(one_after_the_other, buffer, experts, batches),
            "overlapped": partial(overlapped, buffer, experts, batches, args),
        }
        found = measure(comm, xp, buffer, ways, args)
        right = [is_right(xp, experts, *each) for each in zip(batches, found.results, strict=True)]
    good = all(comm.allgather(found.same_bits and all(right)))
    if rank == 0:
        tokens = f"2 x {len(batches[0].x)} tokens each, top {num_topk} of {num_experts} experts"
        print(f"engine: {buffer.engine_name}, {num_ranks} ranks, {tokens}")
        report(found, args)
        print("OK: both ways give the same bits, and the right ones" if good else "WRONG: results")
    return 0 if good else 1


def one_after_the_other(buffer, experts, batches, timeline):
    """Plain calls, all on the current stream."""
    outs = []
    for name, batch in zip("AB", batches, strict=True):
        with timeline.piece(f"dispatch {name}"):
            recv = buffer.dispatch(batch.x, handle=batch.handle)
        with timeline.piece(f"experts {name}"):
            y = experts(recv)
        with timeline.piece(f"combine {name}"):
            outs.append(buffer.combine(y, batch.handle, **batch.how).combined_x)
    return outs


def overlapped(buffer, experts, batches, args, timeline):
    """Run the layer with events; the host waits in none of its calls."""

    def start(name, call, *given, **named):
        """The library: a call on the communication stream, behind the current stream's work."""
        before = buffer.capture()
        named |= {"previous_event": before, "async_finish": True, "allocate_on_comm_stream": True}
        with timeline.piece(name, buffer.get_comm_stream(), before):
            return call(*given, **named)

    (a, b), few = batches, {"config": Config(num_sms=args.num_sms)}
    recv_a = start("dispatch A", buffer.dispatch, a.x, handle=a.handle)
    recv_b = start("dispatch B", buffer.dispatch, b.x, handle=b.handle, **few)
    recv_a.event.current_stream_wait()
    with recv_b.event, timeline.piece("experts A"):  # beside dispatch B, awaited at the end
        y_a = experts(recv_a, args.gemm_sms)
    out_a = start("combine A", buffer.combine, y_a, a.handle, **a.how, **few)
    with out_a.event, timeline.piece("experts B"):
        y_b = experts(recv_b, args.gemm_sms)
    out_b = start("combine B", buffer.combine, y_b, b.handle, **b.how)
    out_b.event.current_stream_wait()
    return [out_a.combined_x, out_b.combined_x]


def prepare(xp, buffer):
    """The experts of this rank, and two micro-batches whose routes are known."""
    tokens, hidden, ffn, dtype = ON_HOST if xp is np else ON_GPUS
    rng = np.random.default_rng(rank)
    experts, batches = Experts(xp, rng, num_local, hidden, ffn, dtype), []
    for _ in "AB":
        x = experts.numbers(tokens, hidden)
        order = rng.random((tokens, num_experts)).argsort(axis=1)
        topk_idx = xp.asarray(np.ascontiguousarray(order[:, :num_topk]))
        weights = xp.asarray(np.tile(topk_weights, (tokens, 1)))
        # The library: the host waits here for the counts of rows. What it has not queued by then
        # overlaps with nothing, so routes are found once and used again (handle=), as a backward
        # pass does. Where they change each time: num_worst_tokens=, and a grouped product that
        # reads the experts' ends on the GPU (handle.psum_num_recv_tokens_per_expert).
        recv = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, do_expand=True)
        how = {"row_weights": recv.recv_topk_weights, "reduce": "per_rank"}
        batches.append(SimpleNamespace(x=x, topk_idx=topk_idx, handle=recv.handle, how=how))
    return experts, batches


def is_right(xp, experts, batch, out):
    """Compare some tokens with what all experts make of them, without the library."""
    given = (batch.x, batch.topk_idx, out)
    x, topk_idx, out = (np.concatenate(comm.allgather(to_host(a[-8:]))) for a in given)
    share = 0
    for e in range(num_local):
        weight = (topk_idx == rank * num_local + e) @ topk_weights
        share += weight[:, None] * to_host(experts.one(e, xp.asarray(x)))
    want = sum(comm.allgather(share))
    return bool(abs(out - want).max() <= 0.004 * abs(want).max())


if __name__ == "__main__":
    sys.exit(main())
