// expand_count: how many tokens of each slice chose each local expert. See expand/slices.cuh.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "expand/slices.cuh"

constexpr int kAtOnce = 8;  // choices a lane reads before it counts them

DEVICE void count_slice(const ExpandCommon& d, u32 tokens, u32 slice) {
    u32* counters = counters_of_slice(d, slice);
    for (u32 expert = lane_index(); expert < d.num_local_experts; expert += 32u) {
        st_u32(counters + expert, 0u);
    }
    warp_barrier();  // the zeros precede other lanes' additions
    Slice part = slice_of_tokens(d, tokens, slice);
    u64 end = static_cast<u64>(part.end) * d.num_topk;
    u64 first = static_cast<u64>(part.first) * d.num_topk + lane_index();
    for (u64 position = first; position < end; position += 32u * kAtOnce) {
        u32 expert[kAtOnce];
        UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
            u64 at = position + 32u * i;
            expert[i] = at < end ? read_choice(d, at) : ~0u;
        }
        UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
            if (expert[i] != ~0u) red_add_relaxed_gpu_u32(counters + expert[i], 1u);
        }
    }
}

KERNEL expand_count(const GRID_CONSTANT ExpandCountParams p) {
    u32 tokens = tokens_received(p.d);
    for (u32 slice = first_item(); slice < p.d.num_slices; slice += item_stride()) {
        count_slice(p.d, tokens, slice);
    }
}
