#pragma once
// What a failed operation leaves in its outputs: NaN in floats, 0 in integers, -1 in indices, so
// that no later kernel can take garbage for a result or for an index.
#include "asm/memory.cuh"
#include "asm/thread.cuh"
#include "generated/prelude.cuh"

// The bytes of a poisoned element of a row: all bits set is NaN in every float type here.
DEVICE u8 poison_byte(u32 dtype) {
    bool is_float = dtype == kDtypeBfloat16 || dtype == kDtypeFloat16 || dtype == kDtypeFloat32 ||
                    dtype == kDtypeFloat64 || dtype == kDtypeFloat8E4m3fn ||
                    dtype == kDtypeFloat8E5m2;
    return is_float ? 0xff : 0;
}

// Blocks that share the work: `share` of `shares`.
DEVICE void fill_bytes(u8* p, u64 nbytes, u8 value, u32 share, u32 shares) {
    if (p == nullptr) return;
    u64 stride = static_cast<u64>(shares) * kNumThreads;
    u64 first = static_cast<u64>(share) * kNumThreads + thread_index();
    u64 head = (16u - (reinterpret_cast<u64>(p) & 15u)) & 15u;
    if (head > nbytes) head = nbytes;
    u64 vectors = (nbytes - head) / 16u;
    u32 word = value * 0x01010101u;
    for (u64 i = first; i < vectors; i += stride) {
        st_v4(p + head + i * 16u, Vec16{{word, word, word, word}});
    }
    u64 tail = head + vectors * 16u;
    for (u64 i = first; i < head + (nbytes - tail); i += stride) {
        st_u8(p + (i < head ? i : tail + (i - head)), value);
    }
}
