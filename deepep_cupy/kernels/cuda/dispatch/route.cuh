#pragma once
// Which token goes where: from the caller's arrays to the row each copy will have at its receiver.
//
//   scan      each block looks at its own tokens: slot of a token = number of earlier tokens of
//             the block for the same rank
//   prefix    blocks publish their counts; each adds up those before it
//   headers   ranks exchange their counts; each adds up those of lower ranks
//   row of token t at rank r = rows of lower ranks + rows of lower blocks + slot
//
// A cached handle brings the rows along: only the headers remain.
#include "comm/header.cuh"
#include "dispatch/counts.cuh"

// The routing part of a block's shared memory.
struct RouteShared {
    u32 bad_token;                          // this block's lowest token with a bad choice, or ~0;
                                            // see kDuplicate
    u32 bad_of_all;                         // of all blocks
    u32 total[kNumRanks];                   // rows this rank sends to each rank
    u32 before[kNumRanks];                  // of them, rows of lower blocks
    u32 base[kNumRanks];                    // what to add to a slot to get the absolute row
    u32 running[kNumRanks];                 // rows of this block so far
    u32 warp_count[kNumWarps][kNumRanks];   // rows of each warp in the current chunk
};

// Added to the number of a token that names an expert twice: tokens with an expert out of range
// are reported first.
constexpr u32 kDuplicate = 0x80000000u;

struct Range {
    u32 first;
    u32 end;
};

// The tokens of a block: contiguous and in order, so that slots follow token order.
DEVICE Range tokens_of_block(u32 num_tokens, u32 block) {
    u32 share = (num_tokens + num_blocks() - 1) / num_blocks();
    u32 first = block * share < num_tokens ? block * share : num_tokens;
    u32 end = first + share < num_tokens ? first + share : num_tokens;
    return {first, end};
}

// ---- scan ----

struct Destinations {
    u32 ranks;  // one bit a rank
    u32 bad;    // 0, 1: an expert out of range, 2: an expert twice
};

DEVICE i64 read_expert(const DispatchCommon& d, u64 position) {
    if (d.index_bytes == 8) {
        return static_cast<i64>(read_local_u64(reinterpret_cast<const u64*>(d.topk_idx) + position));
    }
    return static_cast<i32>(read_local_u32(reinterpret_cast<const u32*>(d.topk_idx) + position));
}

// Looks at the choices of one token; all loads are issued before the first is used.
template <int kMaxTopk>
DEVICE Destinations scan_choices(const CommParams& c, const DispatchCommon& d, u32 token) {
    i64 expert[kMaxTopk];
    UNROLL
    for (int k = 0; k < kMaxTopk; ++k) {
        expert[k] = -1;
        if (k < static_cast<int>(d.num_topk)) {
            expert[k] = read_expert(d, static_cast<u64>(token) * d.num_topk + k);
        }
    }
    Destinations to = {0, 0};
    u32* histogram = control_u32(own_region(c), kControlHistogram);
    UNROLL
    for (int k = 0; k < kMaxTopk; ++k) {
        if (expert[k] < -1 || expert[k] >= static_cast<i64>(d.num_experts)) {
            to.bad = 1;
        } else if (expert[k] >= 0) {
            u32 chosen = static_cast<u32>(expert[k]);
            to.ranks |= 1u << (chosen / d.experts_per_rank);
            red_add_relaxed_gpu_u32(histogram + chosen, 1u);
        }
    }
    UNROLL
    for (int k = 1; k < kMaxTopk; ++k) {
        UNROLL
        for (int j = 0; j < k; ++j) {
            if (expert[k] >= 0 && expert[k] == expert[j] && to.bad == 0) to.bad = 2;
        }
    }
    return to;
}

DEVICE Destinations scan_token(const CommParams& c, const DispatchCommon& d, u32 token) {
    if (d.layout == kLayoutMask) {
        Destinations to = {0, 0};
        for (u32 rank = 0; rank < kNumRanks; ++rank) {
            u64 position = static_cast<u64>(token) * kNumRanks + rank;
            if (ld_u8(d.is_token_in_rank + position) != 0) to.ranks |= 1u << rank;
        }
        return to;
    }
    if (d.num_topk <= 8) return scan_choices<8>(c, d, token);
    if (d.num_topk <= 16) return scan_choices<16>(c, d, token);
    return scan_choices<32>(c, d, token);
}

// Writes the slot (row within this block's rows) of each of the block's tokens into send_row,
// -1 where it is not sent, and leaves the block's counts in s.running.
DEVICE void scan_block(const CommParams& c, const DispatchCommon& d, RouteShared& s) {
    Range tokens = tokens_of_block(d.num_tokens, block_index());
    for (u32 first = tokens.first; first < tokens.end; first += kNumThreads) {
        u32 token = first + thread_index();
        bool mine = token < tokens.end;
        Destinations to = {0, 0};
        if (mine) to = scan_token(c, d, token);
        if (to.bad != 0) shared_min(&s.bad_token, to.bad == 2 ? token | kDuplicate : token);

        // Slots within the warp, then within the chunk of kNumThreads tokens.
        u32 lower_lanes = (1u << lane_index()) - 1u;
        u32 slot[kNumRanks];
        UNROLL
        for (u32 rank = 0; rank < kNumRanks; ++rank) {
            u32 votes = warp_ballot((to.ranks >> rank & 1u) != 0u);
            slot[rank] = count_bits(votes & lower_lanes);
            if (lane_index() == 0) s.warp_count[warp_index()][rank] = count_bits(votes);
        }
        block_barrier();
        UNROLL
        for (u32 rank = 0; rank < kNumRanks; ++rank) {
            u32 earlier = s.running[rank];
            for (u32 warp = 0; warp < warp_index(); ++warp) earlier += s.warp_count[warp][rank];
            if (mine) {
                bool sent = (to.ranks >> rank & 1u) != 0u;
                st_u32(d.send_row + static_cast<u64>(token) * kNumRanks + rank,
                       sent ? earlier + slot[rank] : ~0u);
            }
        }
        block_barrier();
        for (u32 rank = thread_index(); rank < kNumRanks; rank += kNumThreads) {
            u32 sum = 0;
            for (u32 warp = 0; warp < kNumWarps; ++warp) sum += s.warp_count[warp][rank];
            s.running[rank] += sum;
        }
        block_barrier();
    }
}

// ---- prefix over the blocks of the grid ----

DEVICE u64* partial_slot(const CommParams& c, u32 block) {
    return control_u64(own_region(c), kControlPartials) + block * (kNumRanks + 1u);
}

// Publishes this block's counts and adds up everybody's.
DEVICE bool prefix_blocks(const CommParams& c, CommShared& comm, RouteShared& s) {
    u64* mine = partial_slot(c, block_index());
    for (u32 i = thread_index(); i < kNumRanks; i += kNumThreads) {
        st_relaxed_gpu_u64(mine + i, stamped(comm.epoch, s.running[i]));
    }
    if (thread_index() == 0) {
        // Release: the block's additions to the histogram (ordered by the barrier at the end of
        // the scan) before its last word, which the clerk acquires.
        st_release_gpu_u64(mine + kNumRanks, stamped(comm.epoch, s.bad_token));
    }
    bool ok = true;
    u32 words = num_blocks() * (kNumRanks + 1u);
    for (u32 i = thread_index(); i < words; i += kNumThreads) {
        u32 block = i / (kNumRanks + 1u);
        u32 column = i % (kNumRanks + 1u);
        u64* slot = partial_slot(c, block) + column;
        u64 seen = 0;
        if (!wait_stamped(c, comm, slot, {kPhasePartial, c.rank, stamped(comm.epoch, block)},
                          seen)) {
            ok = false;
            break;
        }
        u32 value = static_cast<u32>(seen);
        if (column == kNumRanks) {
            if (is_clerk()) ld_acquire_gpu_u64(slot);
            shared_min(&s.bad_of_all, value);
        } else {
            shared_add(&s.total[column], value);
            if (block < block_index()) shared_add(&s.before[column], value);
        }
    }
    return !block_barrier_or(!ok);
}

// ---- the whole routing ----

// The epoch of a cached handle, for the header: loaded by the thread that will fill it in, before
// enter() waits for loads of its own.
DEVICE u32 read_birth(const DispatchCommon& d) {
    bool mine = block_index() == 0 && thread_index() == 0;
    return mine && d.layout == kLayoutCached ? ld_u32(d.birth_in) : 0u;
}

DEVICE void fill_header(const CommParams& c, CommShared& comm, const DispatchCommon& d,
                        const RouteShared& s, u32 birth) {
    begin_header(c, comm);
    u32* mine = comm.mine;
    mine[kWordDtype] = d.dtype;
    mine[kWordRowBytes] = d.row_bytes + 4u * d.num_scales;
    mine[kWordNumTopk] = d.num_topk;
    mine[kWordIndexBytes] = d.index_bytes;
    mine[kWordWeights] = d.has_weights;
    mine[kWordLayout] = d.layout | d.layout_flags;
    mine[kWordCapacity] = d.capacity;
    mine[kWordRowsOffset] = d.rows_offset;
    mine[kWordMetaOffset] = d.meta_offset;
    mine[kWordWeightsOffset] = d.weights_offset;
    mine[kWordIndexOffset] = d.index_offset;
    mine[kWordNumRows] = d.num_tokens;
    if (d.layout == kLayoutCached) {
        set_birth(comm, birth);
        return;
    }
    for (u32 rank = 0; rank < kNumRanks; ++rank) mine[kWordCounts + rank] = s.total[rank];
    if (s.bad_of_all != ~0u) {
        bool duplicate = (s.bad_of_all & kDuplicate) != 0u;
        mine[kWordRefusal] = duplicate ? kRefusalDuplicateExpert : kRefusalExpertOutOfRange;
        mine[kWordRefusalValue] = s.bad_of_all & ~kDuplicate;
    }
}

// Routes this block's tokens and opens the operation. before_handshake() runs in all threads once
// the block's own slots are known and before the ranks wait for each other. After kGo:
//   send_row   slots of this block's tokens (absolute rows with a cached handle)
//   s.base     what to add to a slot
//   comm.headers   where every rank wants its rows
// birth: read_birth().
template <class Early>
DEVICE Verdict route(const CommParams& c, CommShared& comm, const DispatchCommon& d,
                     RouteShared& s, u32 birth, Early before_handshake) {
    for (u32 i = thread_index(); i < kNumRanks; i += kNumThreads) {
        s.total[i] = s.before[i] = s.base[i] = s.running[i] = 0;
    }
    if (thread_index() == 0) s.bad_token = s.bad_of_all = ~0u;
    block_barrier();

    bool cached = d.layout == kLayoutCached;
    if (!cached) scan_block(c, d, s);
    before_handshake();
    if (!cached && !prefix_blocks(c, comm, s)) return kFailed;
    if (block_index() == 0) {
        if (thread_index() == 0) fill_header(c, comm, d, s, birth);
        block_barrier();
        send_header(c, comm);
    }
    if (is_clerk() && d.layout == kLayoutTopk) send_expert_counts(c, comm, d);

    Verdict verdict = open_headers(c, comm);
    if (verdict != kGo || cached) return verdict;
    for (u32 rank = thread_index(); rank < kNumRanks; rank += kNumThreads) {
        u32 lower = 0;
        for (u32 source = 0; source < c.rank; ++source) {
            lower += comm.headers[source][kWordCounts + rank];
        }
        s.base[rank] = lower + s.before[rank];
    }
    block_barrier();
    return kGo;
}
