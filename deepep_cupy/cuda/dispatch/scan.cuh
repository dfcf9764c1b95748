#pragma once
// The scan: from the caller's choices to slots. The slot of a token at a rank is the number of
// earlier tokens of the same block that go there.
//
// A lane reads one choice of a token. A token's choices have a power of two of lanes side by side,
// so that a ballot of "mine is at rank r" holds a group of bits for each of the warp's tokens. A
// mask of ranks is a choice of ranks. The code is kept short, its loops rolled: a kernel that begins
// with cold caches fetches each line of it from memory, which costs more than running it.
#include "common/access.cuh"
#include "dispatch/schedule.cuh"

constexpr u32 kScanDepth = 4;  // choices a lane has in flight
constexpr u32 kCountedExperts = 256;  // at a time

// The routing part of a block's shared memory.
struct RouteShared {
    u32 bad_token;                             // this block's lowest token with a bad choice, or
                                               // ~0; see kDuplicate
    u32 bad_of_all;                            // of all blocks
    u32 total[kNumRanks];                      // rows this rank sends to each rank
    u32 before[kNumRanks];                     // of them, rows of lower blocks
    u32 lower[kNumRanks];                      // rows that lower ranks send to each rank
    union {
        u32 warp_rows[2][kNumWarps][kNumRanks];  // of the scan, by parity of the turn
        u32 choices[kCountedExperts];            // of some experts, after the scan
    };
};

// Added to the number of a token that names an expert twice: tokens with an expert out of range
// are reported first.
constexpr u32 kDuplicate = 0x80000000u;

// Which choice of which token each lane of a warp reads.
struct LaneMap {
    u32 number;   // choices a token has
    u32 shift;    // log2 of the lanes a token has
    u32 leaders;  // the first lane of each token, a bit each
    u32 column;   // this lane's choice
    u32 leader;   // the first lane of this lane's token
};

DEVICE LaneMap map_lanes(const DispatchCommon& d) {
    LaneMap map = {d.layout == kLayoutMask ? kNumRanks : d.num_topk, 0u, 1u, 0u, 0u};
    NO_UNROLL
    while ((1u << map.shift) < map.number) ++map.shift;
    NO_UNROLL
    for (u32 step = 1u << map.shift; step < 32u; step *= 2u) map.leaders |= map.leaders << step;
    map.column = lane_index() & ((1u << map.shift) - 1u);
    map.leader = lane_index() - map.column;
    return map;
}

// The entry of send_row for `token` and rank `lane`: a slot, with a cached handle a row; -1 where
// the token is not sent, and in all lanes >= R.
DEVICE u32 slot_of_lane(const DispatchCommon& d, u32 token) {
    if (lane_index() >= kNumRanks) return ~0u;
    return ld_u32(d.send_row + static_cast<u64>(token) * kNumRanks + lane_index());
}

// An expert, -1 for none, of 8 or 4 bytes; or a byte of a mask: 0, or -1 for none.
DEVICE i64 read_choice(const u8* p, u32 bytes) {
    if (bytes == 8) return static_cast<i64>(read_local_u64(reinterpret_cast<const u64*>(p)));
    if (bytes == 4) return static_cast<i32>(read_local_u32(reinterpret_cast<const u32*>(p)));
    return ld_u8(p) != 0 ? 0 : -1;
}
DEVICE i64 read_expert(const DispatchCommon& d, u64 position) {
    return read_choice(d.topk_idx + position * d.index_bytes, d.index_bytes);
}

// Whether another lane of this token has the same expert. All lanes call it.
DEVICE bool is_named_twice(const LaneMap& map, u32 expert) {
    bool twice = false;
    u32 lanes = 1u << map.shift;
    // Half way round the token's lanes: every pair meets.
    NO_UNROLL
    for (u32 distance = 1; distance <= lanes / 2u; ++distance) {
        u32 other = map.leader + ((map.column + distance) & (lanes - 1u));
        twice |= warp_shuffle(expert, other) == expert;
    }
    return twice;
}

// What a warp has found in kScanDepth steps, in each of which it reads tokens_at_once() tokens.
struct Scan {
    u32 sent;  // lane i * R + r: the tokens of step i that go to rank r, a bit at each one's leader
    u32 bad;   // lowest token with a bad choice that this lane has seen, or ~0
};
static_assert(kScanDepth * kNumRanks <= 32, "a lane for each rank and step");

// The first of these tokens for this lane; the others follow in steps of tokens_at_once().
DEVICE u32 tokens_at_once(const LaneMap& map) { return 32u >> map.shift; }
DEVICE u32 first_of_lane(const LaneMap& map, u32 first) {
    return first + warp_index() * kScanDepth * tokens_at_once(map) + (map.leader >> map.shift);
}

// One ballot for each rank, for step i. All lanes call it.
DEVICE void vote(const DispatchCommon& d, const LaneMap& map, i64 choice, u32 token, u32 i,
                 Scan& seen) {
    bool mask = d.layout == kLayoutMask;
    if (mask && choice == 0) choice = map.column;
    i64 number = mask ? kNumRanks : d.num_experts;
    u32 per_rank = mask ? 1u : d.experts_per_rank;
    bool chosen = choice >= 0 && choice < number;
    if ((choice < -1 || choice >= number) && token < seen.bad) seen.bad = token;

    // No expert has the number that stands for "nothing".
    u32 expert = chosen ? static_cast<u32>(choice) : ~lane_index();
    bool twice = is_named_twice(map, expert);
    if (twice && (token | kDuplicate) < seen.bad) seen.bad = token | kDuplicate;

    u32 owner = 0;
    UNROLL
    for (u32 rank = 1; rank < kNumRanks; ++rank) owner += expert >= rank * per_rank ? 1u : 0u;
    UNROLL
    for (u32 rank = 0; rank < kNumRanks; ++rank) {
        u32 votes = warp_ballot(chosen && owner == rank);
        if (lane_index() == i * kNumRanks + rank) seen.sent = votes;
    }
}

// Scans the warp's part of the tokens from `first` on, all loads in flight together. Writes
// nothing, so that it may come before enter(). All lanes call it.
DEVICE Scan scan_tokens(const DispatchCommon& d, const LaneMap& map, u32 first, u32 end) {
    u32 token = first_of_lane(map, first);
    bool mask = d.layout == kLayoutMask;
    u32 bytes = mask ? 1u : d.index_bytes;
    const u8* p = (mask ? d.is_token_in_rank : d.topk_idx) +
                  (static_cast<u64>(token) * map.number + map.column) * bytes;
    i64 choice[kScanDepth];
    UNROLL
    for (u32 i = 0; i < kScanDepth; ++i) {
        u32 step = i * tokens_at_once(map);
        choice[i] = -1;
        if (map.column < map.number && token + step < end) {
            choice[i] = read_choice(p + static_cast<u64>(step) * map.number * bytes, bytes);
        }
    }
    Scan seen = {0u, ~0u};
    NO_UNROLL
    for (u32 i = 0; i < kScanDepth; ++i) {
        if (token - (map.leader >> map.shift) >= end) break;  // the same in all lanes
        vote(d, map, choice[0], token, i, seen);
        UNROLL
        for (u32 j = 1; j < kScanDepth; ++j) choice[j - 1] = choice[j];
        token += tokens_at_once(map);
    }
    // Any choice of a token is a bit at its leader.
    NO_UNROLL
    for (u32 step = (1u << map.shift) / 2u; step != 0u; step /= 2u) seen.sent |= seen.sent >> step;
    seen.sent &= map.leaders;
    return seen;
}

// Lane r: the rows for rank r in all steps of this warp. All lanes call it.
DEVICE u32 rows_seen(const Scan& seen) {
    u32 rows = 0;
    UNROLL
    for (u32 i = 0; i < kScanDepth; ++i) {
        rows += count_bits(warp_shuffle(seen.sent, (i * kNumRanks + lane_index()) & 31u));
    }
    return rows;
}

// Writes the slots of the warp's tokens; lane r has the slot of the first one that goes to rank r.
// All lanes call it.
DEVICE void write_slots(const DispatchCommon& d, const LaneMap& map, const Scan& seen, u32 slot,
                        u32 token, u32 end) {
    NO_UNROLL
    for (u32 i = 0; i < kScanDepth; ++i) {
        NO_UNROLL
        for (u32 first = 0; first < kNumRanks; first += 1u << map.shift) {
            u32 rank = first + map.column;
            u32 sent = warp_shuffle(seen.sent, (i * kNumRanks + rank) & 31u);
            u32 slot_there = warp_shuffle(slot, rank & 31u);
            if (rank >= kNumRanks || token >= end) continue;
            bool goes = (sent >> map.leader & 1u) != 0u;
            u32 earlier = count_bits(sent & ((1u << map.leader) - 1u));
            st_u32(d.send_row + static_cast<u64>(token) * kNumRanks + rank,
                   goes ? slot_there + earlier : ~0u);
        }
        slot += count_bits(warp_shuffle(seen.sent, (i * kNumRanks + lane_index()) & 31u));
        token += tokens_at_once(map);
    }
}

// What a block reads of the caller's arrays before it has entered the operation.
struct Prefetched {
    LaneMap map;
    Scan seen;  // of the first tokens
    u32 slot;   // with a cached handle: of this warp's first token at rank `lane`
};
DEVICE Prefetched prefetch_scan(const DispatchCommon& d) {
    Prefetched prefetched = {};
    if (d.layout == kLayoutCached) {
        u32 token = first_token(begin_schedule(d.num_tokens));
        prefetched.slot = ~0u;
        if (token != kNoToken) prefetched.slot = slot_of_lane(d, token);
        return prefetched;
    }
    Range tokens = tokens_of_block(d.num_tokens, block_index());
    prefetched.map = map_lanes(d);
    prefetched.seen = scan_tokens(d, prefetched.map, tokens.first, tokens.end);
    return prefetched;
}

// Writes the slot of each of the block's tokens into send_row, -1 where it is not sent. Returns
// in lane r, of all warps, how many rows the block has for rank r. Ends with a block barrier.
DEVICE u32 scan_block(const DispatchCommon& d, RouteShared& s, const Prefetched& prefetched) {
    Range tokens = tokens_of_block(d.num_tokens, block_index());
    const LaneMap& map = prefetched.map;
    Scan seen = prefetched.seen;
    u32 lane = lane_index() < kNumRanks ? lane_index() : 0u;
    u32 chunk = kNumWarps * kScanDepth * tokens_at_once(map);
    u32 rows = 0;
    u32 turn = 0;
    for (u32 first = tokens.first; first < tokens.end; first += chunk) {
        u32 count = rows_seen(seen);
        if (lane_index() < kNumRanks) s.warp_rows[turn][warp_index()][lane] = count;
        // One barrier a turn: who writes this half again has passed the next one.
        block_barrier();  // PLANT(warp_rows_written)
        if (seen.bad != ~0u) shared_min(&s.bad_token, seen.bad);
        u32 slot = rows;
        for (u32 warp = 0; warp < kNumWarps; ++warp) {
            u32 other = s.warp_rows[turn][warp][lane];
            rows += other;
            if (warp < warp_index()) slot += other;
        }
        write_slots(d, map, seen, slot, first_of_lane(map, first), tokens.end);
        if (first + chunk < tokens.end) seen = scan_tokens(d, map, first + chunk, tokens.end);
        turn ^= 1u;
    }
    block_barrier();
    return rows;
}

// Counts the block's choices of the experts from `low` on into s.choices.
DEVICE void count_choices(const DispatchCommon& d, RouteShared& s, u32 low) {
    Range tokens = tokens_of_block(d.num_tokens, block_index());
    u64 end = static_cast<u64>(tokens.end) * d.num_topk;
    u64 first = static_cast<u64>(tokens.first) * d.num_topk + thread_index();
    NO_UNROLL
    for (; first < end; first += kNumThreads * kScanDepth) {
        i64 expert[kScanDepth];
        UNROLL
        for (u32 i = 0; i < kScanDepth; ++i) {
            u64 position = first + i * kNumThreads;
            expert[i] = position < end ? read_expert(d, position) : -1;
        }
        UNROLL
        for (u32 i = 0; i < kScanDepth; ++i) {
            // Lower ones, -1 included, wrap round to large numbers.
            u64 counter = static_cast<u64>(expert[i]) - low;
            if (counter < kCountedExperts) shared_add(&s.choices[counter], 1u);
        }
    }
}

// Adds the block's choices to the rank's histogram. After the scan, whose result the peers wait
// for. In shared memory first: thousands of additions to the few lines of the histogram took 6 us
// on an H200.
DEVICE void count_experts(const CommParams& c, const DispatchCommon& d, RouteShared& s) {
    u32* histogram = control_u32(own_region(c), kControlHistogram);
    NO_UNROLL
    for (u32 low = 0; low < d.num_experts; low += kCountedExperts) {
        NO_UNROLL
        for (u32 i = thread_index(); i < kCountedExperts; i += kNumThreads) s.choices[i] = 0;
        block_barrier();
        count_choices(d, s, low);
        block_barrier();
        NO_UNROLL
        for (u32 i = thread_index(); i < kCountedExperts; i += kNumThreads) {
            u32 count = s.choices[i];
            if (count != 0u && low + i < d.num_experts) {
                red_add_relaxed_gpu_u32(histogram + low + i, count);
            }
        }
    }
}
