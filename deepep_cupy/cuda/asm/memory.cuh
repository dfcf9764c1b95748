#pragma once
// Global memory: one instruction a function, order and scope in its name.
//
// ld_* / st_*           weak (ordinary) accesses
// *_relaxed_{gpu,sys}   strong, no order
// *_acquire_*           orders what follows after what the writer released
// *_release_*           orders what this thread (and what it has observed) did before
// fence_*               the same for all accesses around it, in this thread only
#include "asm/types.cuh"

// ---- words: strong accesses ----

DEVICE u32 ld_relaxed_gpu_u32(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u64 ld_relaxed_gpu_u64(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u32 ld_relaxed_sys_u32(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u64 ld_relaxed_sys_u64(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u64 ld_acquire_gpu_u64(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u64 ld_acquire_sys_u64(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void st_relaxed_gpu_u32(u32* p, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE void st_relaxed_gpu_u64(u64* p, u64 v) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DEVICE void st_release_gpu_u64(u64* p, u64 v) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DEVICE void st_relaxed_sys_u64(u64* p, u64 v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DEVICE void st_release_sys_u64(u64* p, u64 v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// ---- words of 16 bytes: scalar, so that none is ever seen half written ----
// PTX 8.4, which NVRTC speaks from 12.4 on. Vectors promise no more than their elements each.

DEVICE Vec16 ld_relaxed_sys_b128(const void* p) {
    Vec16 v;
    asm volatile(
        "{\n"
        ".reg .b128 word;\n"
        ".reg .b64 low, high;\n"
        "ld.relaxed.sys.global.b128 word, [%4];\n"
        "mov.b128 {low, high}, word;\n"
        "mov.b64 {%0, %1}, low;\n"
        "mov.b64 {%2, %3}, high;\n"
        "}"
        : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
        : "l"(p)
        : "memory");
    return v;
}
DEVICE void st_relaxed_sys_b128(void* p, const Vec16& v) {
    asm volatile(
        "{\n"
        ".reg .b128 word;\n"
        ".reg .b64 low, high;\n"
        "mov.b64 low, {%1, %2};\n"
        "mov.b64 high, {%3, %4};\n"
        "mov.b128 word, {low, high};\n"
        "st.relaxed.sys.global.b128 [%0], word;\n"
        "}" ::"l"(p),
        "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
        : "memory");
}

// ---- words: atomics on this GPU's memory ----

DEVICE u32 atom_add_acq_rel_gpu_u32(u32* p, u32 v) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(p), "r"(v)
                 : "memory");
    return before;
}
DEVICE u32 atom_cas_relaxed_gpu_u32(u32* p, u32 expected, u32 desired) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(before)
                 : "l"(p), "r"(expected), "r"(desired)
                 : "memory");
    return before;
}
DEVICE u32 atom_add_relaxed_gpu_u32(u32* p, u32 v) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(p), "r"(v)
                 : "memory");
    return before;
}
DEVICE void red_add_relaxed_gpu_u32(u32* p, u32 v) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE void red_or_relaxed_sys_u32(u32* p, u32 v) {
    asm volatile("red.relaxed.sys.global.or.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// ---- fences: for the calling thread ----

DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// ---- data: 16, 4 and 1 bytes ----

DEVICE Vec16 ld_v4(const void* p) {
    Vec16 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(p)
                 : "memory");
    return v;
}
DEVICE Vec16 ld_no_allocate_v4(const void* p) {
    Vec16 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(p)
                 : "memory");
    return v;
}
DEVICE Vec16 ld_relaxed_sys_v4(const void* p) {
    Vec16 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(p)
                 : "memory");
    return v;
}
DEVICE Vec16 ld_nc_no_allocate_l2_256_v4(const void* p) {
    Vec16 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(p));
    return v;
}
DEVICE void st_v4(void* p, const Vec16& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]),
                 "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}
DEVICE void st_relaxed_sys_v4(void* p, const Vec16& v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]),
                 "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}
DEVICE void st_no_allocate_v4(void* p, const Vec16& v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p),
                 "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

DEVICE u8 ld_u8(const u8* p) {
    u32 v;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return static_cast<u8>(v);
}
DEVICE u16 ld_u16(const u16* p) {
    u16 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u32 ld_u32(const u32* p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u64 ld_u64(const u64* p) {
    u64 v;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u8 ld_relaxed_sys_u8(const u8* p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u8 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return static_cast<u8>(v);
}
DEVICE u16 ld_relaxed_sys_u16(const u16* p) {
    u16 v;
    asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u32 ld_nc_no_allocate_u32(const u32* p) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
DEVICE u64 ld_nc_no_allocate_u64(const u64* p) {
    u64 v;
    asm volatile("ld.global.nc.L1::no_allocate.u64 %0, [%1];" : "=l"(v) : "l"(p));
    return v;
}
DEVICE void st_relaxed_sys_v2_u64(void* p, u64 low, u64 high) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(low), "l"(high)
                 : "memory");
}
DEVICE void st_u8(u8* p, u8 v) {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(static_cast<u32>(v)) : "memory");
}
DEVICE void st_u16(u16* p, u16 v) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory");
}
DEVICE void st_u32(u32* p, u32 v) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE void st_u64(u64* p, u64 v) {
    asm volatile("st.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
