// Lesson 1: a coherent load. Another GPU writes a row while this kernel is already running, then a
// flag; this kernel waits for the flag, and reads the row.
#include "asm/memory.cuh"
#include "asm/thread.cuh"

extern "C" __global__ void lesson(const u8* row, u64* flag, u8* out, u32 words, u64 round,
                                  u64 timeout_ns) {
    bool in_time = true;
    if (thread_index() == 0) {
        u64 deadline = global_timer() + timeout_ns;
        // A poll orders nothing: the round's number in the flag proves that it is new.
        while (in_time && ld_relaxed_sys_u64(flag) != round) in_time = global_timer() < deadline;
        // Acquire: what the writer did before its release is visible to this thread from here on,
        // and behind the barrier to the block. The SM's L1 is emptied (CCTL.IVALL).
        if (in_time) ld_acquire_sys_u64(flag);
    }
    if (block_barrier_or(!in_time)) return;
    for (u32 i = thread_index(); i < words; i += blockDim.x) {
        // A strong load at system scope: L1 is not asked, so no old line of it can answer. That is
        // a promise of PTX, whatever other blocks on this SM have read before.
        st_v4(out + i * 16u, ld_relaxed_sys_v4(row + i * 16u));
    }
}
