#pragma once
// Filling ordinary memory with one value.
#include "asm/memory.cuh"
#include "asm/thread.cuh"
#include "generated/prelude.cuh"

// Blocks that share the work: `share` of `shares`.
DEVICE void fill_bytes(u8* p, u64 nbytes, u8 value, u32 share, u32 shares) {
    if (p == nullptr) return;
    u64 stride = static_cast<u64>(shares) * kNumThreads;
    u64 first = static_cast<u64>(share) * kNumThreads + thread_index();
    u64 head = (16u - (reinterpret_cast<u64>(p) & 15u)) & 15u;
    if (head > nbytes) head = nbytes;
    u64 vectors = (nbytes - head) / 16u;
    u32 word = value * 0x01010101u;
    NO_UNROLL
    for (u64 i = first; i < vectors; i += stride) {
        st_v4(p + head + i * 16u, Vec16{{word, word, word, word}});
    }
    u64 tail = head + vectors * 16u;
    NO_UNROLL
    for (u64 i = first; i < head + (nbytes - tail); i += stride) {
        st_u8(p + (i < head ? i : tail + (i - head)), value);
    }
}

// Whole words at a multiple of 4 bytes, by all blocks of the grid: touches no byte beside them.
DEVICE void fill_words(u32* p, u64 count, u32 word) {
    u64 stride = static_cast<u64>(num_blocks()) * kNumThreads;
    u64 first = static_cast<u64>(block_index()) * kNumThreads + thread_index();
    u64 head = (4u - (reinterpret_cast<u64>(p) / 4u & 3u)) & 3u;
    if (head > count) head = count;
    u64 vectors = (count - head) / 4u;
    NO_UNROLL
    for (u64 i = first; i < vectors; i += stride) {
        st_v4(p + head + i * 4u, Vec16{{word, word, word, word}});
    }
    u64 tail = head + vectors * 4u;
    NO_UNROLL
    for (u64 i = first; i < head + (count - tail); i += stride) {
        st_u32(p + (i < head ? i : tail + (i - head)), word);
    }
}
