#pragma once
// Waiting for a bulk load: bounded like every other wait.
#include "asm/bulk.cuh"
#include "comm/wait.cuh"

// Waits until the mbarrier's phase of this parity is complete: its bytes are in shared memory and
// visible to this thread. All lanes of a warp call it and get the same answer: false after
// give_up(). Aborts are not looked at: a block may not end with a load in flight, and a load
// whose source is mapped always completes.
DEVICE bool wait_loaded(const CommParams& c, CommShared& s, u64* loaded, u32 parity) {
    PollTimer timer;
    bool ok = true;
    while (ok && !mbarrier_try_wait_parity(loaded, parity)) {  // PLANT(load_awaited)
        if (tick(c, timer) == kTimeIsUp) {
            give_up(c, {kPhaseLoad, c.rank, parity}, 0);
            s.failed = 1;
            ok = false;
        }
    }
    return warp_ballot(!ok) == 0u;
}
