#pragma once
// The exchange of counts: from the slots of one block to rows at every receiver.
//
//   prefix    blocks publish their counts; each adds up those before it, and publishes the sum
//   headers   ranks exchange their counts; each adds up those of lower ranks
//   row of token t at rank r = rows of lower ranks + rows of lower blocks + slot
//
// With a cached handle the rows are known: only the headers are exchanged.
#include "comm/header.cuh"
#include "dispatch/counts.cuh"
#include "dispatch/scan.cuh"

// ---- prefix over the blocks of the grid ----

DEVICE u64* partial_slot(const CommParams& c, u32 block) {
    return control_u64(own_region(c), kControlPartials) + block * (kNumRanks + 1u);
}
// R words: rows of all lower blocks. One more: the block's choices are in the histogram.
DEVICE u64* before_slot(const CommParams& c, u32 block) {
    return control_u64(own_region(c), kControlBefore) + block * (kNumRanks + 1u);
}

// Publishes this block's counts; lane r of each warp has its rows for rank r.
DEVICE void publish_counts(const CommParams& c, const CommShared& comm, const RouteShared& s,
                           u32 rows) {
    u64* mine = partial_slot(c, block_index());
    // Relaxed: each of these words is accepted under its epoch only, and hands over no other data.
    if (thread_index() < kNumRanks) {
        st_relaxed_gpu_u64(mine + thread_index(), stamped(comm.epoch, rows));
    }
    if (thread_index() == 0) {
        st_relaxed_gpu_u64(mine + kNumRanks, stamped(comm.epoch, s.bad_token));
    }
}

// Adds up what all blocks have published, and publishes the sum of those before this one.
DEVICE bool add_up_counts(const CommParams& c, CommShared& comm, RouteShared& s) {
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
            shared_min(&s.bad_of_all, value);
        } else {
            shared_add(&s.total[column], value);
            // PLANT(prefix_of_lower_blocks)
            if (block < block_index()) shared_add(&s.before[column], value);
        }
    }
    ok = !block_barrier_or(!ok);
    if (ok && thread_index() < kNumRanks) {
        // Release: the block's slots in send_row (ordered by the barrier above) come before this
        // word. Publishing the counts needs no release, so that it does not wait for the slots.
        // PLANT(rows_before_released)
        st_release_gpu_u64(before_slot(c, block_index()) + thread_index(),
                           stamped(comm.epoch, s.before[thread_index()]));
    }
    return ok;
}

// Publishes that this block's choices are in the histogram.
DEVICE void publish_experts(const CommParams& c, const CommShared& comm) {
    block_barrier();
    if (thread_index() == 0) {
        // Release: the block's additions to the histogram (ordered by the barrier) come before.
        // PLANT(choices_released)
        st_release_gpu_u64(before_slot(c, block_index()) + kNumRanks, stamped(comm.epoch, 0));
    }
}

// After it this block may read what all blocks have written before the word of that column: 0,
// their slots in send_row; R, their choices in the histogram.
DEVICE bool acquire_blocks(const CommParams& c, CommShared& comm, u32 column) {
    bool ok = true;
    for (u32 block = thread_index(); block < num_blocks(); block += kNumThreads) {
        u64* slot = before_slot(c, block) + column;
        u64 seen = 0;
        if (!wait_stamped(c, comm, slot, {kPhasePartial, c.rank, stamped(comm.epoch, block)},
                          seen)) {
            ok = false;
            break;
        }
        // Acquire, in the lane that polled; the block barrier below passes it on to the block.
        ld_acquire_gpu_u64(slot);  // PLANT(other_slots_acquired)
    }
    return !block_barrier_or(!ok);
}

// ---- between the ranks ----

// Fills this rank's header, but for what the scan finds. The thread that fills_header() calls it.
DEVICE void fill_header(const CommParams& c, CommShared& comm, const DispatchCommon& d) {
    bool cached = d.layout == kLayoutCached;
    u32 birth = cached ? ld_u32(d.birth_in) : 0u;
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
    if (cached) set_birth(comm, birth);
}

// Adds what the scan has found to the header. Block 0; ends with a block barrier.
DEVICE void complete_header(CommShared& comm, const RouteShared& s) {
    if (thread_index() < kNumRanks) {
        comm.mine[kWordCounts + thread_index()] = s.total[thread_index()];
    }
    if (thread_index() == 0 && s.bad_of_all != ~0u) {
        bool duplicate = (s.bad_of_all & kDuplicate) != 0u;
        comm.mine[kWordRefusal] = duplicate ? kRefusalDuplicateExpert : kRefusalExpertOutOfRange;
        comm.mine[kWordRefusalValue] = s.bad_of_all & ~kDuplicate;
    }
    block_barrier();
}

// From this block's tokens to what all blocks of this rank have for each rank, and its header.
template <class Begin>
DEVICE bool route_tokens(const CommParams& c, CommShared& comm, const DispatchCommon& d,
                         RouteShared& s, const Prefetched& prefetched, Begin begin_work) {
    for (u32 i = thread_index(); i < kNumRanks; i += kNumThreads) s.total[i] = s.before[i] = 0;
    if (thread_index() == 0) s.bad_token = s.bad_of_all = ~0u;
    bool counts = d.layout == kLayoutTopk;
    u32 rows = scan_block(d, s, prefetched);
    if (num_blocks() == 1) {
        if (thread_index() < kNumRanks) s.total[thread_index()] = rows;
        if (thread_index() == 0) s.bad_of_all = s.bad_token;
        block_barrier();
        complete_header(comm, s);
        send_header(c, comm);
        begin_work();
        if (counts) {
            count_experts(c, d, s);
            block_barrier();
            send_expert_counts(c, comm, d);
        }
        return true;
    }
    publish_counts(c, comm, s, rows);
    begin_work();
    if (!add_up_counts(c, comm, s)) return false;
    if (block_index() == 0) {
        complete_header(comm, s);
        send_header(c, comm);
    }
    if (counts) {
        count_experts(c, d, s);
        publish_experts(c, comm);
        if (is_reporter()) {
            if (!acquire_blocks(c, comm, kNumRanks)) return false;
            send_expert_counts(c, comm, d);
        }
    }
    return acquire_blocks(c, comm, 0);
}

// Routes this block's tokens and opens the operation. begin_work() runs in all threads of a block
// that has entered, once its own slots are known. After kGo:
//   send_row   slots of all tokens (absolute rows with a cached handle)
//   s.before, s.lower   what to add to a slot of this block's; before_slot() has other blocks'
//   comm.headers        where every rank wants its rows
template <class Begin>
DEVICE Verdict route(const CommParams& c, CommShared& comm, const DispatchCommon& d,
                     RouteShared& s, const Prefetched& prefetched, Begin begin_work) {
    bool cached = d.layout == kLayoutCached;
    if (cached) {
        if (block_index() == 0) send_header(c, comm);
        begin_work();
    } else if (!route_tokens(c, comm, d, s, prefetched, begin_work)) {
        return kFailed;
    }
    Verdict verdict = open_headers(c, comm);
    if (cached || verdict != kGo) return verdict;
    for (u32 rank = thread_index(); rank < kNumRanks; rank += kNumThreads) {
        u32 lower = 0;
        for (u32 source = 0; source < c.rank; ++source) {
            lower += comm.headers[source][kWordCounts + rank];
        }
        s.lower[rank] = lower;
    }
    block_barrier();
    return kGo;
}
