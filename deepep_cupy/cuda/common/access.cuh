#pragma once
// Which instruction touches which kind of memory: the access classes.
//
// class         whose bytes                         coherent               nc
// local read    this rank's inputs, written by      ld.L1::no_allocate     ld.nc.L1::no_allocate
//               earlier kernels, constant here                             .L2::256B
// peer read     rows of other ranks, acquired by    ld.relaxed.sys         ld.nc.L1::no_allocate
//               this block before                                          .L2::256B
// peer write    the receiver's block                st.L1::no_allocate     the same
// local write   this rank's outputs                 st                     the same
//
// kLoadsNonCoherent picks the column; "coherent" leaves no ld.global.nc in the module. Why nc is
// sound for a class is argued in ptx/README.md: no line is allocated in L1, so none can be stale.
#include "asm/memory.cuh"
#include "generated/prelude.cuh"

DEVICE Vec16 read_local(const u8* p) {
    if constexpr (kLoadsNonCoherent) return ld_nc_no_allocate_l2_256_v4(p);
    return ld_no_allocate_v4(p);
}
DEVICE Vec16 read_peer(const u8* p) {
    if constexpr (kLoadsNonCoherent) return ld_nc_no_allocate_l2_256_v4(p);
    return ld_relaxed_sys_v4(p);
}
DEVICE void write_peer(u8* p, const Vec16& v) { st_no_allocate_v4(p, v); }
DEVICE void write_local(u8* p, const Vec16& v) { st_v4(p, v); }

// ---- narrow forms, for rows or bases that are no multiple of 16 bytes ----
// A value of kBytes bytes lies in the low bytes of a Vec16.

template <int kBytes>
DEVICE Vec16 read_local_narrow(const u8* p) {
    Vec16 v = {{0, 0, 0, 0}};
    if constexpr (kBytes == 16) {
        v = read_local(p);
    } else if constexpr (kBytes == 8) {
        u64 bits = ld_u64(reinterpret_cast<const u64*>(p));
        v.word[0] = static_cast<u32>(bits);
        v.word[1] = static_cast<u32>(bits >> 32);
    } else if constexpr (kBytes == 4) {
        v.word[0] = ld_u32(reinterpret_cast<const u32*>(p));
    } else if constexpr (kBytes == 2) {
        v.word[0] = ld_u16(reinterpret_cast<const u16*>(p));
    } else {
        v.word[0] = ld_u8(p);
    }
    return v;
}
template <int kBytes>
DEVICE Vec16 read_peer_narrow(const u8* p) {
    Vec16 v = {{0, 0, 0, 0}};
    if constexpr (kBytes == 16) {
        v = read_peer(p);
    } else if constexpr (kBytes == 8) {
        u64 bits = ld_relaxed_sys_u64(reinterpret_cast<const u64*>(p));
        v.word[0] = static_cast<u32>(bits);
        v.word[1] = static_cast<u32>(bits >> 32);
    } else if constexpr (kBytes == 4) {
        v.word[0] = ld_relaxed_sys_u32(reinterpret_cast<const u32*>(p));
    } else if constexpr (kBytes == 2) {
        v.word[0] = ld_relaxed_sys_u16(reinterpret_cast<const u16*>(p));
    } else {
        v.word[0] = ld_relaxed_sys_u8(p);
    }
    return v;
}
template <int kBytes>
DEVICE void write_narrow(u8* p, const Vec16& v) {
    if constexpr (kBytes == 16) {
        st_v4(p, v);
    } else if constexpr (kBytes == 8) {
        st_u64(reinterpret_cast<u64*>(p), v.word[0] | static_cast<u64>(v.word[1]) << 32);
    } else if constexpr (kBytes == 4) {
        st_u32(reinterpret_cast<u32*>(p), v.word[0]);
    } else if constexpr (kBytes == 2) {
        st_u16(reinterpret_cast<u16*>(p), static_cast<u16>(v.word[0]));
    } else {
        st_u8(p, static_cast<u8>(v.word[0]));
    }
}

// ---- small arrays: indices, weights, rows of a handle ----

DEVICE u32 read_local_u32(const u32* p) {
    if constexpr (kLoadsNonCoherent) return ld_nc_no_allocate_u32(p);
    return ld_u32(p);
}
DEVICE u64 read_local_u64(const u64* p) {
    if constexpr (kLoadsNonCoherent) return ld_nc_no_allocate_u64(p);
    return ld_u64(p);
}
