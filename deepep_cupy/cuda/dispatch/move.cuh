#pragma once
// Moving, as far as all kernels do it alike: the row of each copy at its receiver, what travels
// beside a row, and the rows behind the last real one. The rows themselves: ldst.cu, move_bulk.cuh.
#include "common/access.cuh"
#include "common/fill.cuh"
#include "comm/wait.cuh"
#include "dispatch/counts.cuh"
#include "dispatch/exchange.cuh"
#include "dispatch/scan.cuh"

// ---- rows of a token ----

// What is known of the copy of `token` for rank `lane` before the exchange is over.
struct LaneSlot {
    u32 slot;    // slot_of_lane()
    u64 before;  // another block's token: that block's before_slot(), as far as it was written
};

DEVICE bool is_of_other_block(const DispatchCommon& d, const Schedule& schedule, u32 token) {
    return d.layout != kLayoutCached && token / schedule.share != block_index();
}

DEVICE LaneSlot find_slot(const CommParams& c, const DispatchCommon& d, const Schedule& schedule,
                           u32 token) {
    LaneSlot lane_slot = {slot_of_lane(d, token), 0u};
    if (lane_index() < kNumRanks && is_of_other_block(d, schedule, token)) {
        u32 block = token / schedule.share;
        lane_slot.before = ld_relaxed_gpu_u64(before_slot(c, block) + lane_index());
    }
    return lane_slot;
}

// The row at rank `lane`, absolute; completes send_row. Each entry is this lane's alone from here
// on. All lanes call it; false after a wait that was given up.
DEVICE bool find_row(const CommParams& c, CommShared& comm, const DispatchCommon& d,
                     const RouteShared& s, const Schedule& schedule, u32 token,
                     const LaneSlot& lane_slot, u32& row) {
    row = lane_slot.slot;
    if (d.layout == kLayoutCached) return true;
    bool ok = true;
    if (row != ~0u) {
        u32 before = s.before[lane_index()];
        if (is_of_other_block(d, schedule, token)) {
            u32 block = token / schedule.share;
            u64 word = lane_slot.before;
            if (!is_stamped(word, comm.epoch)) {  // PLANT(lower_blocks_awaited)
                Wait wait = {kPhasePartial, c.rank, stamped(comm.epoch, block)};
                ok = wait_stamped(c, comm, before_slot(c, block) + lane_index(), wait, word);
            }
            before = static_cast<u32>(word);
        }
        row += s.lower[lane_index()] + before;
        st_u32(d.send_row + static_cast<u64>(token) * kNumRanks + lane_index(), row);
    }
    if (warp_ballot(!ok) == 0u) return true;
    comm.failed = 1;
    return false;
}

DEVICE u8* rows_of_rank(const CommParams& c, const CommShared& comm, u32 rank, u32 offset_word) {
    return c.peer[rank] + static_cast<u64>(comm.headers[rank][offset_word]) * kOffsetUnit;
}

// Received scales lie behind the received topk_idx, or where that would be. Capacity and offset
// are the receiver's; K and the width of an index are the same on all ranks.
DEVICE u64 scales_offset(const DispatchCommon& d, u32 capacity, u32 index_offset) {
    u64 index_bytes = static_cast<u64>(capacity) * d.num_topk * d.index_bytes;
    u64 units = (index_bytes + kOffsetUnit - 1u) / kOffsetUnit;
    return (index_offset + units) * kOffsetUnit;
}

DEVICE u32* scales_of_rank(const CommParams& c, const CommShared& comm, const DispatchCommon& d,
                           u32 rank) {
    const u32* header = comm.headers[rank];
    return control_u32(c.peer[rank],
                       scales_offset(d, header[kWordCapacity], header[kWordIndexOffset]));
}

// ---- what travels beside a row; row: this lane's find_row() ----

// One word of the scales of a row from each lane that has one: to every rank that gets the row.
DEVICE void send_words(const CommParams& c, const CommShared& comm, const DispatchCommon& d,
                       u32 row, u32 word, bool mine, u32 value) {
    NO_UNROLL
    for (u32 i = 0; i < kNumRanks; ++i) {
        u32 rank = (c.rank + 1u + i) % kNumRanks;
        u32 there = warp_shuffle(row, rank);
        if (there == ~0u || !mine) continue;
        st_u32(scales_of_rank(c, comm, d, rank) + static_cast<u64>(there) * d.num_scales + word,
               value);
    }
}

// Scales: words of any meaning, any strides at the source, row by row at the receiver.
DEVICE void send_scales(const CommParams& c, const CommShared& comm, const DispatchCommon& d,
                        u32 token, u32 row) {
    const u32* source = d.scales + static_cast<i64>(token) * d.scales_token_stride;
    for (u32 first = 0; first < d.num_scales; first += 32u) {
        u32 word = first + lane_index();
        bool mine = word < d.num_scales;
        u32 value = 0;
        if (mine) value = read_local_u32(source + static_cast<i64>(word) * d.scales_stride);
        send_words(c, comm, d, row, word, mine, value);
    }
}

// Source index, local expert numbers, weights.
DEVICE void send_choices(const CommParams& c, const CommShared& comm, const DispatchCommon& d,
                          u32 token, u32 row) {
    bool cached = d.layout == kLayoutCached;
    u32 lane = lane_index();
    u64 position = static_cast<u64>(token) * d.num_topk + lane;
    bool chooses = lane < d.num_topk;
    i64 expert = -1;
    u32 weight = 0;
    if (chooses && d.index_bytes != 0) expert = read_expert(d, position);
    if (chooses && d.has_weights != 0u) {
        weight = read_local_u32(d.topk_weights + position);
    }
    for (u32 i = 0; i < kNumRanks; ++i) {
        u32 rank = (c.rank + 1u + i) % kNumRanks;
        u32 there = warp_shuffle(row, rank);
        if (there == ~0u) continue;
        if (!cached && lane == 0) {
            u8* sources = rows_of_rank(c, comm, rank, kWordMetaOffset);
            st_u32(reinterpret_cast<u32*>(sources) + there, token);
        }
        if (!chooses) continue;
        u64 entry = static_cast<u64>(there) * d.num_topk + lane;
        i64 first = static_cast<i64>(rank) * d.experts_per_rank;
        bool local = expert >= first && expert < first + d.experts_per_rank;
        if (d.index_bytes == 8) {
            u64* indices = reinterpret_cast<u64*>(rows_of_rank(c, comm, rank, kWordIndexOffset));
            st_u64(indices + entry, static_cast<u64>(local ? expert - first : -1));
        } else if (d.index_bytes == 4) {
            u32* indices = reinterpret_cast<u32*>(rows_of_rank(c, comm, rank, kWordIndexOffset));
            st_u32(indices + entry, static_cast<u32>(local ? expert - first : -1));
        }
        if (d.has_weights != 0u) {
            u32* weights = reinterpret_cast<u32*>(rows_of_rank(c, comm, rank, kWordWeightsOffset));
            st_u32(weights + entry, local || cached ? weight : 0u);
        }
    }
}

// All that travels beside a row.
DEVICE void send_metadata(const CommParams& c, const CommShared& comm, const DispatchCommon& d,
                          u32 token, u32 row) {
    send_choices(c, comm, d, token, row);
    if (d.num_scales != 0u) send_scales(c, comm, d, token, row);
}

// ---- rows behind the real ones ----

// Rows this rank receives.
DEVICE u32 received_rows(const CommParams& c, const CommShared& comm, const DispatchCommon& d) {
    if (d.layout == kLayoutCached) return d.real_rows == nullptr ? d.capacity : ld_u32(d.real_rows);
    u32 rows = 0;
    for (u32 source = 0; source < kNumRanks; ++source) rows += rows_from(c, comm, source);
    return rows;
}

// Marks the rows from N on, which nobody fills, where the host does not learn N: -1 in indices,
// weight 0. All blocks share the work.
//
// No wait: the headers, which this block has, brought N (a cached handle has it): every row that a
// peer writes is below N, and what used the memory before ended in earlier kernels of this rank.
DEVICE void fill_tails(const CommParams& c, const CommShared& comm, const DispatchCommon& d) {
    if (d.no_wait == 0u) return;
    u8* own = own_region(c);
    u64 unit = kOffsetUnit;
    u64 rows = received_rows(c, comm, d);
    u64 tail = rows < d.capacity ? d.capacity - rows : 0u;  // PLANT(tail_begins)
    u32* sources = control_u32(own, d.meta_offset * unit);
    u32* indices = control_u32(own, d.index_offset * unit);
    u32* weights = control_u32(own, d.weights_offset * unit);
    u64 index_words = static_cast<u64>(d.num_topk) * (d.index_bytes / 4u);
    if (d.layout != kLayoutCached) {
        fill_words(sources + rows, tail, ~0u);
        fill_words(indices + rows * index_words, tail * index_words, ~0u);
    }
    if (d.has_weights != 0u) fill_words(weights + rows * d.num_topk, tail * d.num_topk, 0u);
}
