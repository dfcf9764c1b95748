#pragma once
// Rows per expert and per rank: told to the peers, to a host that waits, and to later kernels.
// All of it is the work of the clerk, the last block of the grid.
#include "common/access.cuh"
#include "comm/wait.cuh"

DEVICE bool is_clerk() { return block_index() == num_blocks() - 1; }

// ---- between the ranks ----

DEVICE u64* expert_slots(const CommParams& c, const DispatchCommon& d, u32 epoch, u32 receiver,
                         u32 source) {
    return control_u64(c.peer[receiver], d.experts_offset) + (epoch & 1u) * d.num_experts +
           source * d.experts_per_rank;
}

// Sends each rank the counts of its experts. Takes them out of the histogram, which is all zeros
// again at the end of every operation.
DEVICE void send_expert_counts(const CommParams& c, const CommShared& comm,
                               const DispatchCommon& d) {
    u32* histogram = control_u32(own_region(c), kControlHistogram);
    for (u32 expert = thread_index(); expert < d.num_experts; expert += kNumThreads) {
        u32 count = ld_relaxed_gpu_u32(histogram + expert);
        st_relaxed_gpu_u32(histogram + expert, 0u);
        u32 owner = expert / d.experts_per_rank;
        u64* slots = expert_slots(c, d, comm.epoch, owner, c.rank);
        // Relaxed: the count proves itself by its epoch and speaks of nothing else.
        st_relaxed_sys_u64(slots + expert % d.experts_per_rank, stamped(comm.epoch, count));
    }
}

// Adds up what all ranks sent for one local expert. The words of all ranks are asked for before
// the first is looked at; only those that have not come are waited for one by one.
DEVICE bool count_of_expert(const CommParams& c, const CommShared& comm, const DispatchCommon& d,
                            u32 expert, u32& count) {
    u64* slots = expert_slots(c, d, comm.epoch, c.rank, 0) + expert;
    u64 seen[kNumRanks];
    UNROLL
    for (u32 source = 0; source < kNumRanks; ++source) {
        seen[source] = ld_relaxed_sys_u64(slots + source * d.experts_per_rank);
    }
    u32 missing = 0;
    count = 0;
    UNROLL
    for (u32 source = 0; source < kNumRanks; ++source) {
        if (is_stamped(seen[source], comm.epoch)) {
            count += static_cast<u32>(seen[source]);
        } else {
            missing |= 1u << source;
        }
    }
    NO_UNROLL
    for (; missing != 0u; missing &= missing - 1u) {
        u32 source = lowest_bit(missing);
        Wait wait = {kPhaseExperts, source, stamped(comm.epoch, expert)};
        u64 word = 0;
        if (!wait_stamped(c, comm, slots + source * d.experts_per_rank, wait, word)) return false;
        count += static_cast<u32>(word);
    }
    return true;
}

// ---- to the host and to later kernels ----

DEVICE u32 rows_from(const CommParams& c, const CommShared& comm, u32 source) {
    return comm.headers[source][kWordCounts + c.rank];
}

// The counts per expert, and their sums. One warp.
DEVICE void report_experts(const CommParams& c, CommShared& comm, const DispatchCommon& d) {
    u32 lane = lane_index();
    u32 end = 0;  // of the rows of all experts so far, rounded up
    for (u32 first = 0; first < d.num_reported_experts; first += 32u) {
        u32 expert = first + lane;
        bool mine = expert < d.num_reported_experts;
        u32 count = 0;
        bool ok = !mine || count_of_expert(c, comm, d, expert, count);
        if (mine && ok && d.no_wait == 0u) {
            st_relaxed_sys_u64(c.report + kReportExperts + expert, stamped(c.serial, count));
        }
        if (warp_ballot(!ok) != 0u) {
            comm.failed = 1;
            return;
        }
        if (d.expert_counts == nullptr) continue;
        u32 rounded = (count + d.expert_alignment - 1u) / d.expert_alignment * d.expert_alignment;
        u32 sum = rounded;  // of the lanes up to this one
        UNROLL
        for (u32 step = 1; step < 32u; step *= 2u) {
            u32 lower = warp_shuffle(sum, (lane - step) & 31u);
            if (lane >= step) sum += lower;
        }
        if (mine) {
            // Plain layout: inclusive sums. Expanded: where the expert's rows really end.
            u32 padding = (d.layout_flags & kFlagExpanded) != 0u ? rounded - count : 0u;
            st_u32(d.expert_counts + expert, count);
            st_u32(d.psum_expert_rows + expert, end + sum - padding);
        }
        end += warp_shuffle(sum, 31u);
    }
}

// Writes all counts into the handle's arrays, and tells them to the host if it waits. The last
// warp of the clerk does it before it moves rows, of which it has the fewest.
DEVICE void report_counts(const CommParams& c, CommShared& comm, const DispatchCommon& d) {
    if (!is_clerk() || warp_index() != kNumWarps - 1 || d.layout == kLayoutCached) return;
    u32 source = lane_index();
    if (source < kNumRanks) {
        u32 rows = rows_from(c, comm, source);
        u32 sum = 0;
        for (u32 lower = 0; lower <= source; ++lower) sum += rows_from(c, comm, lower);
        if (d.no_wait == 0u) {
            st_relaxed_sys_u64(c.report + kReportRows + source, stamped(c.serial, rows));
        }
        st_u32(d.recv_rows_per_rank + source, rows);
        if (d.psum_recv_rows != nullptr) st_u32(d.psum_recv_rows + source, sum);
        if (source == 0) st_u32(d.birth_out, comm.epoch);
    }
    report_experts(c, comm, d);
}
