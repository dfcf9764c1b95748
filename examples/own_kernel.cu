// Rows to a mailbox in a peer's memory, and out of this rank's own.
#include "asm/memory.cuh"
#include "asm/thread.cuh"

// Sends words of 16 bytes; the last block to finish tells the peer.
extern "C" __global__ void put_rows(const u8* rows, u8* mailbox, u64* flag, u32* done, u64 words,
                                    u64 round) {
    u64 step = static_cast<u64>(num_blocks()) * blockDim.x;
    for (u64 i = block_index() * blockDim.x + thread_index(); i < words; i += step) {
        st_no_allocate_v4(mailbox + i * 16u, ld_no_allocate_v4(rows + i * 16u));
    }
    block_barrier();
    if (thread_index() != 0) return;
    // Release: this block's stores (the barrier orders them). Acquire: those of earlier blocks.
    if (atom_add_acq_rel_gpu_u32(done, 1u) + 1u != num_blocks()) return;
    st_relaxed_gpu_u32(done, 0u);  // for the next round
    // Release for the peer, in the thread that signals: all rows before the flag.
    fence_acq_rel_sys();
    st_relaxed_sys_u64(flag, round);
}

// Waits for the flag in this rank's memory, at most so long, and copies the mailbox out.
extern "C" __global__ void take_rows(u8* rows, const u8* mailbox, u64* flag, u32* late, u64 words,
                                     u64 round, u64 timeout_ns) {
    bool in_time = true;
    if (thread_index() == 0) {
        u64 deadline = global_timer() + timeout_ns;
        // Relaxed: the number proves itself, and an acquire at each turn would empty L1.
        while (in_time && ld_relaxed_sys_u64(flag) != round) in_time = global_timer() < deadline;
        // Acquire, in the thread that polled; the barrier below passes it on to the block.
        if (in_time) ld_acquire_sys_u64(flag);
        if (!in_time) st_relaxed_gpu_u32(late, 1u);
    }
    if (block_barrier_or(!in_time)) return;
    u64 step = static_cast<u64>(num_blocks()) * blockDim.x;
    for (u64 i = block_index() * blockDim.x + thread_index(); i < words; i += step) {
        st_v4(rows + i * 16u, ld_relaxed_sys_v4(mailbox + i * 16u));
    }
}
