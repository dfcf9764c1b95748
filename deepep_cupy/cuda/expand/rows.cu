// expand_rows: the row of each copy in the expanded layout. See expand/slices.cuh.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "common/fill.cuh"
#include "expand/slices.cuh"

// Goes through a slice in order, as many tokens at a time as a warp has lanes for their choices.
DEVICE void place_slice(const ExpandCommon& d, u32 tokens, u32 slice) {
    u32* counters = counters_of_slice(d, slice);
    Slice part = slice_of_tokens(d, tokens, slice);
    u32 at_once = 32u / d.num_topk;
    u32 lane = lane_index();
    u32 lower_lanes = (1u << lane) - 1u;
    bool used = lane < at_once * d.num_topk;
    u64 end = static_cast<u64>(part.end) * d.num_topk;
    u64 position = static_cast<u64>(part.first) * d.num_topk + lane;
    u32 expert = used && position < end ? read_choice(d, position) : ~0u;
    for (u32 token = part.first; token < part.end; token += at_once) {
        // The next tokens' choices are on their way while these are placed.
        u64 following = position + at_once * d.num_topk;
        u32 next = used && following < end ? read_choice(d, following) : ~0u;
        // A token names an expert once: lanes of one expert are different tokens, in order.
        u32 same = warp_match(expert);
        u32 leader = lowest_bit(same);
        u32 row = 0;
        if (expert != ~0u) {
            row = ld_u32(d.psum_expert_rows + expert) - ld_u32(d.expert_counts + expert);
        }
        u32 before = 0;
        if (expert != ~0u && lane == leader) {
            before = ld_u32(counters + expert);
            st_u32(counters + expert, before + count_bits(same));
        }
        before = warp_shuffle(before, leader);
        row += before + count_bits(same & lower_lanes);
        if (used && position < end) st_u32(d.expanded_row + position, expert != ~0u ? row : ~0u);
        warp_barrier();  // the counters pass from these leaders to the next
        expert = next;
        position = following;
    }
}

KERNEL expand_rows(const GRID_CONSTANT ExpandRowsParams p) {
    u32 tokens = tokens_received(p.d);
    for (u32 slice = first_item(); slice < p.d.num_slices; slice += item_stride()) {
        place_slice(p.d, tokens, slice);
    }
    u64 received = static_cast<u64>(tokens) * p.d.num_topk;
    u64 entries = static_cast<u64>(p.d.num_tokens) * p.d.num_topk;
    fill_words(p.d.expanded_row + received, entries - received, ~0u);
}
