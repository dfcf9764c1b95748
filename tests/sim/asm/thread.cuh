#pragma once
// Host form of cuda/asm/thread.cuh.
#include "asm/types.cuh"

constexpr u32 kFullWarp = 0xffffffffu;

DEVICE u32 thread_index() { return sim::thread_index(); }
DEVICE u32 lane_index() { return sim::thread_index() & 31u; }
DEVICE u32 warp_index() { return sim::thread_index() >> 5; }
DEVICE u32 block_index() { return sim::block_index(); }
DEVICE u32 num_blocks() { return sim::num_blocks(); }

DEVICE void block_barrier(sim::Where where = SIM_HERE) { sim::block_barrier(false, where); }
DEVICE bool block_barrier_or(bool predicate, sim::Where where = SIM_HERE) {
    return sim::block_barrier(predicate, where);
}
DEVICE void warp_barrier(sim::Where where = SIM_HERE) {
    sim::warp_meet(sim::WarpOp::barrier, 0, 0, where);
}

DEVICE u32 warp_ballot(bool predicate, sim::Where where = SIM_HERE) {
    return sim::warp_meet(sim::WarpOp::ballot, predicate ? 1u : 0u, 0, where);
}
DEVICE u32 warp_shuffle(u32 value, u32 source_lane, sim::Where where = SIM_HERE) {
    return sim::warp_meet(sim::WarpOp::shuffle, value, source_lane, where);
}
DEVICE u32 warp_match(u32 value, sim::Where where = SIM_HERE) {
    u32 lanes = 0;
    for (u32 lane = 0; lane < 32; ++lane) {
        if (warp_shuffle(value, lane, where) == value) lanes |= 1u << lane;
    }
    return lanes;
}
DEVICE u32 count_bits(u32 mask) { return static_cast<u32>(__builtin_popcount(mask)); }
DEVICE u32 lowest_bit(u32 mask) { return static_cast<u32>(__builtin_ctz(mask)); }

DEVICE u64 global_timer(sim::Where where = SIM_HERE) { return sim::global_timer(where); }
DEVICE void poll_pause(sim::Where where = SIM_HERE) { sim::poll_pause(where); }

DEVICE u32 shared_add(u32* counter, u32 value, sim::Where where = SIM_HERE) {
    return sim::shared_rmw(counter, value, 0, where);
}
DEVICE u32 shared_min(u32* word, u32 value, sim::Where where = SIM_HERE) {
    return sim::shared_rmw(word, value, 2, where);
}
