#pragma once
// The expanded layout: rows sorted by (local expert, source rank, source token).
//
// Received tokens are numbered by (source rank, source token) already, so that all there is to do
// is a stable counting sort of their choices by local expert, in three kernels:
//
//   expand_count    tokens are cut into slices; a warp counts how many of a slice chose each expert
//   expand_starts   for each expert, adds up the slices before each slice
//   expand_rows     a warp goes through a slice in order: row of a copy =
//                   first row of the expert + copies in slices before + copies in the slice before
//
// The dispatch has counted the tokens of each expert and laid out the experts' rows; the number of
// tokens is read on the device, since the host may not know it.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "common/access.cuh"
#include "common/grid_stride.cuh"

// Tokens to look at: none where the dispatch failed.
DEVICE u32 tokens_received(const ExpandCommon& d) {
    if (read_local_u32(d.birth) == 0u) return 0;
    if (d.num_received == nullptr) return d.num_tokens;
    u32 received = read_local_u32(d.num_received);
    return received < d.num_tokens ? received : d.num_tokens;
}

struct Slice {
    u32 first;
    u32 end;
};
DEVICE Slice slice_of_tokens(const ExpandCommon& d, u32 tokens, u32 slice) {
    u32 share = (tokens + d.num_slices - 1) / d.num_slices;
    u64 first = static_cast<u64>(slice) * share;
    u64 end = first + share;
    return {static_cast<u32>(first < tokens ? first : tokens),
            static_cast<u32>(end < tokens ? end : tokens)};
}

// A choice: a local expert, or a number that is none.
DEVICE u32 read_choice(const ExpandCommon& d, u64 position) {
    if (d.index_bytes == 8) {
        u64 expert = read_local_u64(reinterpret_cast<const u64*>(d.topk_idx) + position);
        return expert < d.num_local_experts ? static_cast<u32>(expert) : ~0u;
    }
    u32 expert = read_local_u32(reinterpret_cast<const u32*>(d.topk_idx) + position);
    return expert < d.num_local_experts ? expert : ~0u;
}

// Counters of a slice, one an expert: expand_count leaves counts, expand_starts makes them those of
// the slices before, expand_rows goes on counting.
DEVICE u32* counters_of_slice(const ExpandCommon& d, u32 slice) {
    return d.table + static_cast<u64>(slice) * d.num_local_experts;
}
