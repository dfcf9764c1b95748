// barrier: no rank leaves before all have come. Also how a rank refuses an operation.
//
// A header exchange and nothing else: a header is released after everything this rank did and
// acquired before anything it does next. One block.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "comm/header.cuh"
#include "comm/leave.cuh"

static_assert(sizeof(CommShared) <= kBarrierSharedBytes,
              "SHARED_HEAD in protocol/constants.py is small");

KERNEL barrier(const GRID_CONSTANT BarrierParams p) {
    CommShared& s = shared_memory<CommShared>();
    Snapshot snapshot = prefetch_state(p.comm);
    if (fills_header()) begin_header(p.comm, s);
    Verdict verdict = enter(p.comm, s, snapshot);
    if (verdict == kGo) {
        send_header(p.comm, s);
        verdict = open_headers(p.comm, s);
    }
    // Nobody waits for an arrival: having all headers is all there is to know.
    leave(p.comm, s, verdict, false);
}
