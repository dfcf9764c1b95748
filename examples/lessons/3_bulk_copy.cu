// Lesson 3: the bulk copy engine (SM 90). One thread starts a copy of a row into shared memory and
// one from there to its destination; no register sees the bytes. The engine is another proxy:
// ordinary accesses and its own are in no order unless a proxy fence or an mbarrier makes one.
#include "asm/bulk.cuh"
#include "asm/memory.cuh"
#include "asm/thread.cuh"

constexpr u32 kMostBytes = 8192;

struct Shared {
    alignas(128) u8 stage[kMostBytes];
    u64 loaded;
};

extern "C" __global__ void lesson(const u8* row, u64* flag, u8* out, u32 bytes, u64 timeout_ns) {
    Shared& s = shared_memory<Shared>();
    if (thread_index() != 0 || bytes > kMostBytes) return;
    u64 deadline = global_timer() + timeout_ns;
    mbarrier_init(&s.loaded, 1);
    fence_mbarrier_init();  // the engine must know the mbarrier before it reports to it

    // The row's writer used ordinary stores, which this acquires by an ordinary load ...
    if (ld_acquire_sys_u64(flag) == 0) return;
    // ... and this puts the engine's reads, which go by another proxy, behind it.
    fence_proxy_async_global();

    // First how many bytes will come, then the copy that brings them.
    mbarrier_arrive_expect_bytes(&s.loaded, bytes);
    bulk_load(s.stage, row, bytes, &s.loaded);
    while (!mbarrier_try_wait_parity(&s.loaded, 0)) {
        if (global_timer() > deadline) break;  // ours always come; yours may have a wrong address
    }

    // The engine wrote the stage itself: no fence lies between that and its own store. Had this
    // thread changed the bytes, fence_proxy_async_shared() would have to stand here.
    bulk_store(out, s.stage, bytes);
    bulk_commit();
    // Without .read: the bytes are written and visible to this thread. Only now may it signal;
    // and a block must not end, its shared memory vanish, while the engine reads it.
    bulk_wait<0>();
    fence_acq_rel_sys();
    st_relaxed_sys_u64(flag, 0);
}
