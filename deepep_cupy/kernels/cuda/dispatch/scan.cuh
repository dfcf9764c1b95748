#pragma once
// From the caller's arrays to slots: where each token of a block goes, and as which of the block's
// rows there.
//
// A lane looks at one choice. The choices of a token have a power of two of lanes side by side, so
// that a ballot of "mine is at rank r" holds a group of bits for each of the warp's tokens. A mask
// of ranks is a choice of ranks.
#include "common/access.cuh"
#include "dispatch/deal.cuh"

// The routing part of a block's shared memory.
struct RouteShared {
    u32 bad_token;                             // this block's lowest token with a bad choice, or
                                               // ~0; see kDuplicate
    u32 bad_of_all;                            // of all blocks
    u32 total[kNumRanks];                      // rows this rank sends to each rank
    u32 before[kNumRanks];                     // of them, rows of lower blocks
    u32 lower[kNumRanks];                      // rows that lower ranks send to each rank
    u32 warp_rows[2][kNumWarps][kNumRanks];    // rows of each warp, by parity of the turn
};

// Added to the number of a token that names an expert twice: tokens with an expert out of range
// are reported first.
constexpr u32 kDuplicate = 0x80000000u;

constexpr u32 kScanDepth = 4;  // choices a lane has in flight

// How a warp's lanes are dealt to the choices of its tokens.
struct Columns {
    u32 number;   // choices a token has
    u32 shift;    // log2 of the lanes a token has
    u32 leaders;  // the first lane of each token, a bit each
    u32 column;   // this lane's choice
    u32 leader;   // the first lane of this lane's token
};

DEVICE Columns columns_of(const DispatchCommon& d) {
    Columns at = {d.layout == kLayoutMask ? kNumRanks : d.num_topk, 0u, 1u, 0u, 0u};
    while ((1u << at.shift) < at.number) ++at.shift;
    for (u32 step = 1u << at.shift; step < 32u; step *= 2u) at.leaders |= at.leaders << step;
    at.column = lane_index() & ((1u << at.shift) - 1u);
    at.leader = lane_index() - at.column;
    return at;
}

// What send_row says of `token` and rank `lane`: a slot, with a cached handle a row; -1: not sent,
// as in all lanes >= R.
DEVICE u32 slot_of_lane(const DispatchCommon& d, u32 token) {
    if (lane_index() >= kNumRanks) return ~0u;
    return ld_u32(d.send_row + static_cast<u64>(token) * kNumRanks + lane_index());
}

DEVICE i64 read_expert(const DispatchCommon& d, u64 position) {
    if (d.index_bytes == 8) {
        return static_cast<i64>(read_local_u64(reinterpret_cast<const u64*>(d.topk_idx) + position));
    }
    return static_cast<i32>(read_local_u32(reinterpret_cast<const u32*>(d.topk_idx) + position));
}

// The expert, or the rank of a mask, that this lane's column of the token names; -1: none.
DEVICE i64 read_choice(const DispatchCommon& d, const Columns& at, u32 token) {
    if (at.column >= at.number) return -1;
    u64 position = static_cast<u64>(token) * at.number + at.column;
    if (d.layout != kLayoutMask) return read_expert(d, position);
    return ld_u8(d.is_token_in_rank + position) != 0 ? static_cast<i64>(at.column) : -1;
}

// Whether another lane of this token has the same expert. All lanes call it.
DEVICE bool is_named_twice(const Columns& at, u32 expert) {
    bool twice = false;
    u32 lanes = 1u << at.shift;
    // Half way round the token's lanes: every pair meets.
    for (u32 distance = 1; distance <= lanes / 2u; ++distance) {
        u32 other = at.leader + ((at.column + distance) & (lanes - 1u));
        twice |= warp_shuffle(expert, other) == expert;
    }
    return twice;
}

// What a warp has seen of the choices of kScanDepth times as many tokens as it looks at at once.
struct Look {
    u32 sent[kScanDepth];  // lane r: its tokens that go to rank r, a bit at the leader of each
    u32 bad;               // lowest token with a bad choice that this lane has seen, or ~0
};

// The first of these tokens for this lane; the others follow in steps of tokens_at_once().
DEVICE u32 tokens_at_once(const Columns& at) { return 32u >> at.shift; }
DEVICE u32 first_of_lane(const Columns& at, u32 first) {
    return first + warp_index() * kScanDepth * tokens_at_once(at) + (at.leader >> at.shift);
}

// One turn of the ballots. Lane r gets the warp's tokens that go to rank r.
DEVICE u32 tokens_sent(const DispatchCommon& d, const Columns& at, i64 choice, u32 token,
                       u32& bad) {
    bool mask = d.layout == kLayoutMask;
    i64 number = mask ? kNumRanks : d.num_experts;
    u32 per_rank = mask ? 1u : d.experts_per_rank;
    bool chosen = choice >= 0 && choice < number;
    if ((choice < -1 || choice >= number) && token < bad) bad = token;

    // No expert has the number that stands for "nothing".
    u32 expert = chosen ? static_cast<u32>(choice) : ~lane_index();
    bool twice = is_named_twice(at, expert);
    if (twice && (token | kDuplicate) < bad) bad = token | kDuplicate;

    u32 owner = 0;
    UNROLL
    for (u32 rank = 1; rank < kNumRanks; ++rank) owner += expert >= rank * per_rank ? 1u : 0u;
    u32 sent = 0;
    UNROLL
    for (u32 rank = 0; rank < kNumRanks; ++rank) {
        u32 votes = warp_ballot(chosen && owner == rank);
        if (lane_index() == rank) sent = votes;
    }
    for (u32 step = (1u << at.shift) / 2u; step != 0u; step /= 2u) sent |= sent >> step;
    return sent & at.leaders;
}

// Looks at the warp's part of the tokens from `first` on, all loads in flight together. Writes
// nothing, so that it may come before enter(). All lanes call it.
DEVICE Look look(const DispatchCommon& d, const Columns& at, u32 first, u32 end) {
    u32 mine = first_of_lane(at, first);
    i64 choice[kScanDepth];
    UNROLL
    for (u32 i = 0; i < kScanDepth; ++i) {
        u32 token = mine + i * tokens_at_once(at);
        choice[i] = token < end ? read_choice(d, at, token) : -1;
    }
    Look seen = {{}, ~0u};
    UNROLL
    for (u32 i = 0; i < kScanDepth; ++i) {
        u32 token = mine + i * tokens_at_once(at);
        bool any = token - (at.leader >> at.shift) < end;  // the same in all lanes
        if (any) seen.sent[i] = tokens_sent(d, at, choice[i], token, seen.bad);
    }
    return seen;
}

// Writes the slots of one warp's tokens that go to each rank; lane r has the slot of the first one
// that goes to rank r. All lanes call it.
DEVICE void write_slots(const DispatchCommon& d, const Columns& at, u32 sent, u32 slot, u32 token,
                        bool mine) {
    for (u32 first = 0; first < kNumRanks; first += 1u << at.shift) {
        u32 rank = first + at.column;
        u32 sent_there = warp_shuffle(sent, rank & 31u);
        u32 slot_there = warp_shuffle(slot, rank & 31u);
        if (rank >= kNumRanks || !mine) continue;
        bool goes = (sent_there >> at.leader & 1u) != 0u;
        u32 earlier = count_bits(sent_there & ((1u << at.leader) - 1u));
        st_u32(d.send_row + static_cast<u64>(token) * kNumRanks + rank,
               goes ? slot_there + earlier : ~0u);
    }
}

// What a block can know before it has entered the operation.
struct Ahead {
    Columns at;
    Look seen;  // of the first tokens
    u32 slot;   // with a cached handle: of this warp's first token at rank `lane`
};
DEVICE Ahead look_ahead(const DispatchCommon& d) {
    Ahead ahead = {};
    if (d.layout == kLayoutCached) {
        u32 token = first_token(begin_deal(d.num_tokens));
        ahead.slot = ~0u;
        if (token != kNoToken) ahead.slot = slot_of_lane(d, token);
        return ahead;
    }
    Range tokens = tokens_of_block(d.num_tokens, block_index());
    ahead.at = columns_of(d);
    ahead.seen = look(d, ahead.at, tokens.first, tokens.end);
    return ahead;
}

// Writes the slot of each of the block's tokens into send_row, -1 where it is not sent. Returns
// in lane r, of all warps, how many rows the block has for rank r. Ends with a block barrier.
DEVICE u32 scan_block(const DispatchCommon& d, RouteShared& s, const Ahead& ahead) {
    Range tokens = tokens_of_block(d.num_tokens, block_index());
    const Columns& at = ahead.at;
    Look seen = ahead.seen;
    u32 lane = lane_index() < kNumRanks ? lane_index() : 0u;
    u32 chunk = kNumWarps * kScanDepth * tokens_at_once(at);
    u32 rows = 0;
    u32 turn = 0;
    for (u32 first = tokens.first; first < tokens.end; first += chunk) {
        u32 count = 0;
        UNROLL
        for (u32 i = 0; i < kScanDepth; ++i) count += count_bits(seen.sent[i]);
        if (lane_index() < kNumRanks) s.warp_rows[turn][warp_index()][lane] = count;
        // One barrier a turn: who writes this half again has passed the next one.
        block_barrier();
        if (seen.bad != ~0u) shared_min(&s.bad_token, seen.bad);
        u32 slot = rows;
        for (u32 warp = 0; warp < kNumWarps; ++warp) {
            u32 other = s.warp_rows[turn][warp][lane];
            rows += other;
            if (warp < warp_index()) slot += other;
        }
        u32 mine = first_of_lane(at, first);
        UNROLL
        for (u32 i = 0; i < kScanDepth; ++i) {
            u32 token = mine + i * tokens_at_once(at);
            write_slots(d, at, seen.sent[i], slot, token, token < tokens.end);
            slot += count_bits(seen.sent[i]);
        }
        if (first + chunk < tokens.end) seen = look(d, at, first + chunk, tokens.end);
        turn ^= 1u;
    }
    block_barrier();
    return rows;
}

// Counts the block's choices, expert by expert. After the scan: nobody waits for it soon.
DEVICE void count_experts(const CommParams& c, const DispatchCommon& d) {
    u32* histogram = control_u32(own_region(c), kControlHistogram);
    Range tokens = tokens_of_block(d.num_tokens, block_index());
    u64 end = static_cast<u64>(tokens.end) * d.num_topk;
    u64 first = static_cast<u64>(tokens.first) * d.num_topk + thread_index();
    for (; first < end; first += kNumThreads * kScanDepth) {
        i64 expert[kScanDepth];
        UNROLL
        for (u32 i = 0; i < kScanDepth; ++i) {
            u64 position = first + i * kNumThreads;
            expert[i] = position < end ? read_expert(d, position) : -1;
        }
        UNROLL
        for (u32 i = 0; i < kScanDepth; ++i) {
            if (expert[i] < 0 || expert[i] >= static_cast<i64>(d.num_experts)) continue;
            red_add_relaxed_gpu_u32(histogram + expert[i], 1u);
        }
    }
}
