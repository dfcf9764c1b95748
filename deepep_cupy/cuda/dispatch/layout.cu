// layout: where this rank's tokens go, counted before a dispatch.
//
// One warp takes 32 tokens, a token a lane. A lane reads a few choices at once, so that their loads
// overlap. The counters are zero at the start, and tokens are added to them in any order.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "common/access.cuh"
#include "common/grid_stride.cuh"

constexpr int kAtOnce = 8;  // choices a lane reads before it counts them

// A choice: an expert, or a number that is none.
DEVICE u32 read_expert(const LayoutCommon& d, u64 position) {
    u64 expert = d.index_bytes == 8
                     ? read_local_u64(reinterpret_cast<const u64*>(d.topk_idx) + position)
                     : read_local_u32(reinterpret_cast<const u32*>(d.topk_idx) + position);
    return expert < d.num_experts ? static_cast<u32>(expert) : ~0u;
}

// Counts the choices of a token; the ranks that have any of them, one bit each.
DEVICE u32 count_choices(const LayoutCommon& d, u32 token) {
    u64 first = static_cast<u64>(token) * d.num_topk;
    u32 ranks = 0;
    for (u32 begin = 0; begin < d.num_topk; begin += kAtOnce) {
        u32 expert[kAtOnce];
        UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
            expert[i] = begin + i < d.num_topk ? read_expert(d, first + begin + i) : ~0u;
        }
        UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
            if (expert[i] == ~0u) continue;
            red_add_relaxed_gpu_u32(d.expert_counts + expert[i], 1u);
            ranks |= 1u << expert[i] / d.experts_per_rank;
        }
    }
    return ranks;
}

KERNEL layout(const GRID_CONSTANT LayoutParams p) {
    const LayoutCommon& d = p.d;
    for (u32 item = first_item(); item * 32u < d.num_tokens; item += item_stride()) {
        u32 token = item * 32u + lane_index();
        bool there = token < d.num_tokens;
        u32 ranks = there ? count_choices(d, token) : 0u;
        UNROLL
        for (u32 rank = 0; rank < kNumRanks; ++rank) {
            bool sent = (ranks >> rank & 1u) != 0u;
            if (there) st_u8(d.is_token_in_rank + static_cast<u64>(token) * kNumRanks + rank, sent);
            u32 tokens = count_bits(warp_ballot(sent));
            if (lane_index() == 0 && tokens != 0u) {
                red_add_relaxed_gpu_u32(d.rank_counts + rank, tokens);
            }
        }
    }
}
