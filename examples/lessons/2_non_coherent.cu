// Lesson 2: a non-coherent load. ld.global.nc promises its value only while nobody writes the
// bytes during the kernel; here somebody does. Block 1 writes a word round after round, block 0
// reads it once a round and counts old values. ALLOCATE picks the load: a plain nc load keeps its
// line in L1 and finds it there again, one with L1::no_allocate leaves none behind.
#include "asm/memory.cuh"
#include "asm/thread.cuh"

// Volatile, and that is the first lesson: the compiler may move or repeat an nc load as it likes,
// and would read once for all rounds.
static __device__ u32 read_word(const u32* p) {
    u32 v;
#ifdef ALLOCATE
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
#else
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
#endif
    return v;
}

// Waits for a word of the other block without an acquire: nothing here empties L1.
static __device__ bool wait_for(const u32* word, u32 value, u64 deadline) {
    while (ld_relaxed_gpu_u32(word) != value) {
        if (global_timer() > deadline) return false;
    }
    return true;
}

// counts: old values that were read, rounds that were done. Two blocks of one thread; other words
// than the one under test are on lines of their own.
extern "C" __global__ void lesson(u32* word, u32* flag, u32* ack, u32* counts, u32 rounds,
                                  u64 timeout_ns) {
    u64 deadline = global_timer() + timeout_ns;
    u32 old = 0;
    u32 round = 1;
    for (; round <= rounds; ++round) {
        if (block_index() == 1) {
            if (!wait_for(ack, round - 1u, deadline)) break;
            st_relaxed_gpu_u32(word, round);
            fence_acq_rel_gpu();  // release: the word before the flag
            st_relaxed_gpu_u32(flag, round);
        } else {
            if (!wait_for(flag, round, deadline)) break;
            old += read_word(word) != round ? 1u : 0u;
            st_relaxed_gpu_u32(ack, round);
        }
    }
    if (block_index() == 1) return;
    st_u32(counts, old);
    st_u32(counts + 1, round - 1u);
}
