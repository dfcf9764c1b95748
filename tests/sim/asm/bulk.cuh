#pragma once
// Host form of cuda/asm/bulk.cuh.
#include "asm/types.cuh"

DEVICE u32 shared_address(const void* p) {
    return static_cast<u32>(static_cast<const u8*>(p) - static_cast<u8*>(sim::shared_base()));
}

DEVICE Vec16 ld_shared_v4(const void* p, sim::Where where = SIM_HERE) {
    Vec16 v;
    sim::shared_load(&v, p, 16, where);
    return v;
}
DEVICE void st_shared_v4(void* p, const Vec16& v, sim::Where where = SIM_HERE) {
    sim::shared_store(p, &v, 16, where);
}
DEVICE void st_shared_v2(void* p, u32 first, u32 second, sim::Where where = SIM_HERE) {
    u32 words[2] = {first, second};
    sim::shared_store(p, words, 8, where);
}
DEVICE void st_shared_u32(void* p, u32 v, sim::Where where = SIM_HERE) {
    sim::shared_store(p, &v, 4, where);
}

DEVICE void mbarrier_init(u64* barrier, u32 arrivals, sim::Where where = SIM_HERE) {
    sim::mbarrier_init(barrier, arrivals, where);
}
DEVICE void fence_mbarrier_init(sim::Where where = SIM_HERE) { sim::fence_mbarrier_init(where); }
DEVICE void mbarrier_arrive_expect_bytes(u64* barrier, u32 bytes, sim::Where where = SIM_HERE) {
    sim::mbarrier_arrive_expect(barrier, bytes, where);
}
DEVICE bool mbarrier_try_wait_parity(u64* barrier, u32 parity, sim::Where where = SIM_HERE) {
    return sim::mbarrier_try_wait(barrier, parity, where);
}

DEVICE void bulk_load(void* shared, const void* global, u32 bytes, u64* barrier,
                      sim::Where where = SIM_HERE) {
    sim::bulk_load(shared, global, bytes, barrier, where);
}
DEVICE void bulk_store(void* global, const void* shared, u32 bytes, sim::Where where = SIM_HERE) {
    sim::bulk_store(global, shared, bytes, where);
}
DEVICE void bulk_prefetch(const void* global, u32 bytes) {
    static_cast<void>(global), static_cast<void>(bytes);
}
DEVICE void bulk_commit(sim::Where where = SIM_HERE) { sim::bulk_commit(where); }
template <int kPending>
DEVICE void bulk_wait_read(sim::Where where = SIM_HERE) {
    sim::bulk_wait(kPending, true, where);
}
template <int kPending>
DEVICE void bulk_wait(sim::Where where = SIM_HERE) {
    sim::bulk_wait(kPending, false, where);
}

DEVICE void fence_proxy_async_shared(sim::Where where = SIM_HERE) {
    sim::fence_proxy_shared(where);
}
DEVICE void fence_proxy_async_global(sim::Where where = SIM_HERE) {
    sim::fence_proxy_global(where);
}
