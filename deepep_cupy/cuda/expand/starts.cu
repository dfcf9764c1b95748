// expand_starts: from counts per slice to where each slice goes on. See expand/slices.cuh.
//
// A block takes 32 experts, one a lane; its warps share the slices.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "expand/slices.cuh"

struct Shared {
    u32 of_warp[kNumWarps][32];  // tokens in the warp's slices, by expert
};
static_assert(sizeof(Shared) <= kExpandSharedBytes, "kExpandSharedBytes is too small");

constexpr int kAtOnce = 8;  // slices whose counters a lane reads at a time

// Adds up the counters of one expert in slices first..end-1, from `sum` on; with kReplace each
// becomes the sum before it.
template <bool kReplace>
DEVICE u32 add_up_slices(const ExpandCommon& d, u32 expert, u32 first, u32 end, u32 sum) {
    for (u32 slice = first; slice < end; slice += kAtOnce) {
        u32 count[kAtOnce];
        UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
            count[i] = slice + i < end ? ld_u32(counters_of_slice(d, slice + i) + expert) : 0u;
        }
        UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
            if (kReplace && slice + i < end) st_u32(counters_of_slice(d, slice + i) + expert, sum);
            sum += count[i];
        }
    }
    return sum;
}

DEVICE void start_slices(const ExpandCommon& d, Shared& s, u32 first_expert) {
    u32 expert = first_expert + lane_index();
    bool mine = expert < d.num_local_experts;
    u32 share = (d.num_slices + kNumWarps - 1) / kNumWarps;
    u32 first = warp_index() * share;
    u32 end = first + share < d.num_slices ? first + share : d.num_slices;
    u32 sum = mine ? add_up_slices<false>(d, expert, first, end, 0u) : 0u;
    s.of_warp[warp_index()][lane_index()] = sum;
    block_barrier();
    u32 before = 0;
    for (u32 warp = 0; warp < warp_index(); ++warp) before += s.of_warp[warp][lane_index()];
    if (mine) add_up_slices<true>(d, expert, first, end, before);
    block_barrier();  // of_warp is free again
}

KERNEL expand_starts(const GRID_CONSTANT ExpandStartsParams p) {
    Shared& s = shared_memory<Shared>();
    for (u32 first = block_index() * 32u; first < p.d.num_local_experts;
         first += num_blocks() * 32u) {
        start_slices(p.d, s, first);
    }
}
