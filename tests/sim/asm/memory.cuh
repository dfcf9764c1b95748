#pragma once
// Host form of cuda/asm/memory.cuh.
#include "asm/types.cuh"

constexpr auto kWeak = sim::Order::weak;
constexpr auto kRelaxed = sim::Order::relaxed;
constexpr auto kAcquire = sim::Order::acquire;
constexpr auto kRelease = sim::Order::release;
constexpr auto kAcqRel = sim::Order::acq_rel;
constexpr auto kNone = sim::Scope::none;
constexpr auto kGpu = sim::Scope::gpu;
constexpr auto kSys = sim::Scope::sys;
constexpr auto kAllocate = sim::Cache::allocate;
constexpr auto kNoAllocate = sim::Cache::no_allocate;
constexpr auto kReadOnly = sim::Cache::read_only;

// ---- words: strong accesses ----

DEVICE u32 ld_relaxed_gpu_u32(const u32* p, sim::Where where = SIM_HERE) {
    return static_cast<u32>(sim::load(p, 4, kRelaxed, kGpu, kAllocate, where));
}
DEVICE u64 ld_relaxed_gpu_u64(const u64* p, sim::Where where = SIM_HERE) {
    return static_cast<u64>(sim::load(p, 8, kRelaxed, kGpu, kAllocate, where));
}
DEVICE u32 ld_relaxed_sys_u32(const u32* p, sim::Where where = SIM_HERE) {
    return static_cast<u32>(sim::load(p, 4, kRelaxed, kSys, kAllocate, where));
}
DEVICE u64 ld_relaxed_sys_u64(const u64* p, sim::Where where = SIM_HERE) {
    return static_cast<u64>(sim::load(p, 8, kRelaxed, kSys, kAllocate, where));
}
DEVICE u64 ld_acquire_gpu_u64(const u64* p, sim::Where where = SIM_HERE) {
    return static_cast<u64>(sim::load(p, 8, kAcquire, kGpu, kAllocate, where));
}
DEVICE u64 ld_acquire_sys_u64(const u64* p, sim::Where where = SIM_HERE) {
    return static_cast<u64>(sim::load(p, 8, kAcquire, kSys, kAllocate, where));
}
DEVICE void st_relaxed_gpu_u32(u32* p, u32 v, sim::Where where = SIM_HERE) {
    sim::store(p, 4, v, kRelaxed, kGpu, where);
}
DEVICE void st_relaxed_gpu_u64(u64* p, u64 v, sim::Where where = SIM_HERE) {
    sim::store(p, 8, v, kRelaxed, kGpu, where);
}
DEVICE void st_release_gpu_u64(u64* p, u64 v, sim::Where where = SIM_HERE) {
    sim::store(p, 8, v, kRelease, kGpu, where);
}
DEVICE void st_relaxed_sys_u64(u64* p, u64 v, sim::Where where = SIM_HERE) {
    sim::store(p, 8, v, kRelaxed, kSys, where);
}
DEVICE void st_release_sys_u64(u64* p, u64 v, sim::Where where = SIM_HERE) {
    sim::store(p, 8, v, kRelease, kSys, where);
}

// ---- words of 16 bytes ----

DEVICE Vec16 ld_relaxed_sys_b128(const void* p, sim::Where where = SIM_HERE) {
    Vec16 v;
    sim::load_word16(&v, p, kRelaxed, kSys, where);
    return v;
}
DEVICE void st_relaxed_sys_b128(void* p, const Vec16& v, sim::Where where = SIM_HERE) {
    sim::store_word16(p, &v, kRelaxed, kSys, where);
}

// ---- words: atomics on this GPU's memory ----

DEVICE u32 atom_add_acq_rel_gpu_u32(u32* p, u32 v, sim::Where where = SIM_HERE) {
    return static_cast<u32>(sim::read_modify_write(p, 4, sim::Rmw::add, v, 0, kAcqRel, kGpu,
            true, where));
}
DEVICE u32 atom_cas_relaxed_gpu_u32(u32* p, u32 expected, u32 desired,
        sim::Where where = SIM_HERE) {
    return static_cast<u32>(sim::read_modify_write(p, 4, sim::Rmw::cas, desired, expected,
            kRelaxed, kGpu, true, where));
}
DEVICE u32 atom_add_relaxed_gpu_u32(u32* p, u32 v, sim::Where where = SIM_HERE) {
    return static_cast<u32>(sim::read_modify_write(p, 4, sim::Rmw::add, v, 0, kRelaxed, kGpu,
            true, where));
}
DEVICE void red_add_relaxed_gpu_u32(u32* p, u32 v, sim::Where where = SIM_HERE) {
    sim::read_modify_write(p, 4, sim::Rmw::add, v, 0, kRelaxed, kGpu, false, where);
}
DEVICE void red_or_relaxed_sys_u32(u32* p, u32 v, sim::Where where = SIM_HERE) {
    sim::read_modify_write(p, 4, sim::Rmw::bit_or, v, 0, kRelaxed, kSys, false, where);
}

// ---- fences: for the calling thread ----

DEVICE void fence_acq_rel_gpu(sim::Where where = SIM_HERE) {
    sim::fence(kGpu, where);
}
DEVICE void fence_acq_rel_sys(sim::Where where = SIM_HERE) {
    sim::fence(kSys, where);
}

// ---- data: 16, 4 and 1 bytes ----

DEVICE Vec16 ld_v4(const void* p, sim::Where where = SIM_HERE) {
    Vec16 v;
    sim::load16(&v, p, kWeak, kNone, kAllocate, where);
    return v;
}
DEVICE Vec16 ld_no_allocate_v4(const void* p, sim::Where where = SIM_HERE) {
    Vec16 v;
    sim::load16(&v, p, kWeak, kNone, kNoAllocate, where);
    return v;
}
DEVICE Vec16 ld_relaxed_sys_v4(const void* p, sim::Where where = SIM_HERE) {
    Vec16 v;
    sim::load16(&v, p, kRelaxed, kSys, kAllocate, where);
    return v;
}
DEVICE Vec16 ld_nc_no_allocate_l2_256_v4(const void* p, sim::Where where = SIM_HERE) {
    Vec16 v;
    sim::load16(&v, p, kWeak, kNone, kReadOnly, where);
    return v;
}
DEVICE void st_v4(void* p, const Vec16& v, sim::Where where = SIM_HERE) {
    sim::store16(p, &v, where);
}
DEVICE void st_relaxed_sys_v4(void* p, const Vec16& v, sim::Where where = SIM_HERE) {
    for (u32 i = 0; i < 4; ++i) {
        sim::store(static_cast<u32*>(p) + i, 4, v.word[i], kRelaxed, kSys, where);
    }
}
DEVICE void st_relaxed_sys_v2_u64(void* p, u64 low, u64 high, sim::Where where = SIM_HERE) {
    sim::store(p, 8, low, kRelaxed, kSys, where);
    sim::store(static_cast<u64*>(p) + 1, 8, high, kRelaxed, kSys, where);
}
DEVICE void st_no_allocate_v4(void* p, const Vec16& v, sim::Where where = SIM_HERE) {
    sim::store16(p, &v, where);
}
DEVICE u8 ld_u8(const u8* p, sim::Where where = SIM_HERE) {
    return static_cast<u8>(sim::load(p, 1, kWeak, kNone, kAllocate, where));
}
DEVICE u16 ld_u16(const u16* p, sim::Where where = SIM_HERE) {
    return static_cast<u16>(sim::load(p, 2, kWeak, kNone, kAllocate, where));
}
DEVICE u32 ld_u32(const u32* p, sim::Where where = SIM_HERE) {
    return static_cast<u32>(sim::load(p, 4, kWeak, kNone, kAllocate, where));
}
DEVICE u64 ld_u64(const u64* p, sim::Where where = SIM_HERE) {
    return static_cast<u64>(sim::load(p, 8, kWeak, kNone, kAllocate, where));
}
DEVICE u8 ld_relaxed_sys_u8(const u8* p, sim::Where where = SIM_HERE) {
    return static_cast<u8>(sim::load(p, 1, kRelaxed, kSys, kAllocate, where));
}
DEVICE u16 ld_relaxed_sys_u16(const u16* p, sim::Where where = SIM_HERE) {
    return static_cast<u16>(sim::load(p, 2, kRelaxed, kSys, kAllocate, where));
}
DEVICE u32 ld_nc_no_allocate_u32(const u32* p, sim::Where where = SIM_HERE) {
    return static_cast<u32>(sim::load(p, 4, kWeak, kNone, kReadOnly, where));
}
DEVICE u64 ld_nc_no_allocate_u64(const u64* p, sim::Where where = SIM_HERE) {
    return static_cast<u64>(sim::load(p, 8, kWeak, kNone, kReadOnly, where));
}
DEVICE void st_u8(u8* p, u8 v, sim::Where where = SIM_HERE) {
    sim::store(p, 1, v, kWeak, kNone, where);
}
DEVICE void st_u16(u16* p, u16 v, sim::Where where = SIM_HERE) {
    sim::store(p, 2, v, kWeak, kNone, where);
}
DEVICE void st_u32(u32* p, u32 v, sim::Where where = SIM_HERE) {
    sim::store(p, 4, v, kWeak, kNone, where);
}
DEVICE void st_u64(u64* p, u64 v, sim::Where where = SIM_HERE) {
    sim::store(p, 8, v, kWeak, kNone, where);
}
