#pragma once
// Who runs: indices, barriers, warp exchanges, time.
#include "asm/types.cuh"

constexpr u32 kFullWarp = 0xffffffffu;

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 lane_index() { return threadIdx.x & 31u; }
DEVICE u32 warp_index() { return threadIdx.x >> 5; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE u32 num_blocks() { return gridDim.x; }

DEVICE void block_barrier() { __syncthreads(); }
DEVICE bool block_barrier_or(bool predicate) { return __syncthreads_or(predicate) != 0; }
DEVICE void warp_barrier() { __syncwarp(); }

DEVICE u32 warp_ballot(bool predicate) { return __ballot_sync(kFullWarp, predicate); }
DEVICE u32 warp_shuffle(u32 value, u32 source_lane) {
    return __shfl_sync(kFullWarp, value, static_cast<int>(source_lane));
}
// The lanes that have this lane's value, one bit each.
DEVICE u32 warp_match(u32 value) { return __match_any_sync(kFullWarp, value); }
DEVICE u32 count_bits(u32 mask) { return static_cast<u32>(__popc(mask)); }
DEVICE u32 lowest_bit(u32 mask) { return static_cast<u32>(__ffs(mask)) - 1u; }

// Nanoseconds of a clock that all SMs share. Coarse: microseconds on some GPUs.
DEVICE u64 global_timer() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// One turn of a polling loop: lets the simulator run somebody else; nothing on a GPU.
DEVICE void poll_pause() {}

// Atomics on this block's shared memory.
DEVICE u32 shared_add(u32* counter, u32 value) { return atomicAdd(counter, value); }
DEVICE u32 shared_min(u32* word, u32 value) { return atomicMin(word, value); }
