// barrier: no rank leaves before all have come. Also how a rank refuses an operation.
//
// A header exchange and nothing else: a header is released after everything this rank did and
// acquired before anything it does next. One block.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "comm/header.cuh"
#include "comm/leave.cuh"

struct Shared {
    CommShared comm;
};
static_assert(sizeof(Shared) <= kBarrierSharedBytes, "SHARED_HEAD in protocol/constants.py is small");

KERNEL barrier(const GRID_CONSTANT BarrierParams p) {
    Shared& s = shared_memory<Shared>();
    Snapshot snapshot = prefetch_state(p.comm);
    if (fills_header()) begin_header(p.comm, s.comm);
    Verdict verdict = enter(p.comm, s.comm, snapshot);
    if (verdict == kGo) {
        send_header(p.comm, s.comm);
        verdict = open_headers(p.comm, s.comm);
    }
    // Nobody waits for an arrival: having all headers is all there is to know.
    leave(p.comm, s.comm, verdict, false);
}
