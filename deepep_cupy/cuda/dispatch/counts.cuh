#pragma once
// Counts per expert and per rank: sent to the peers, reported to a host that waits, and written for
// later kernels. All of it is the work of one block, the last of the grid: the reporter.
#include "common/access.cuh"
#include "comm/wait.cuh"

DEVICE bool is_reporter() { return block_index() == num_blocks() - 1; }

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
        st_relaxed_gpu_u32(histogram + expert, 0u);  // PLANT(histogram_reset)
        u32 owner = expert / d.experts_per_rank;
        u64* slots = expert_slots(c, d, comm.epoch, owner, c.rank);
        // Relaxed: the count is accepted under its epoch only, and hands over no other data.
        st_relaxed_sys_u64(slots + expert % d.experts_per_rank, stamped(comm.epoch, count));
    }
}

// What all ranks have sent so far for one local expert.
struct ExpertWords {
    u64 seen[kNumRanks];
};
DEVICE ExpertWords ask_for_expert(const CommParams& c, const CommShared& comm,
                                  const DispatchCommon& d, u32 expert) {
    u64* slots = expert_slots(c, d, comm.epoch, c.rank, 0) + expert;
    ExpertWords words;
    UNROLL
    for (u32 source = 0; source < kNumRanks; ++source) {
        words.seen[source] = ld_relaxed_sys_u64(slots + source * d.experts_per_rank);
    }
    return words;
}

// Adds up the count of one expert; waits, one by one, for the words that had not come.
DEVICE bool count_of_expert(const CommParams& c, const CommShared& comm, const DispatchCommon& d,
                            u32 expert, const ExpertWords& words, u32& count) {
    u64* slots = expert_slots(c, d, comm.epoch, c.rank, 0) + expert;
    u32 missing = 0;
    count = 0;
    UNROLL
    for (u32 source = 0; source < kNumRanks; ++source) {
        if (is_stamped(words.seen[source], comm.epoch)) {
            count += static_cast<u32>(words.seen[source]);
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

// Experts of one lane, side by side, whose words are on their way together.
constexpr u32 kExpertsPerLane = kNumRanks <= 2 ? 4 : kNumRanks <= 4 ? 2 : 1;

// Writes the counts of this lane's experts from `expert` on, and where their rows end: `end` is
// where those of lower experts do.
DEVICE void write_expert_counts(const CommParams& c, const DispatchCommon& d, u32 expert, u32 end,
                                const u32 (&count)[kExpertsPerLane],
                                const u32 (&rounded)[kExpertsPerLane]) {
    UNROLL
    for (u32 i = 0; i < kExpertsPerLane; ++i, ++expert) {
        if (expert >= d.num_reported_experts) return;
        if (d.no_wait == 0u) {
            st_relaxed_sys_u64(c.report + kReportExperts + expert, stamped(c.serial, count[i]));
        }
        if (d.expert_counts == nullptr) continue;
        end += rounded[i];
        // Plain layout: inclusive sums. Expanded: where the expert's rows really end.
        u32 padding = (d.layout_flags & kFlagExpanded) != 0u ? rounded[i] - count[i] : 0u;
        st_u32(d.expert_counts + expert, count[i]);
        st_u32(d.psum_expert_rows + expert, end - padding);
    }
}

// The counts per expert, and their sums. One warp.
DEVICE void report_experts(const CommParams& c, CommShared& comm, const DispatchCommon& d) {
    u32 lane = lane_index();
    u32 end = 0;  // of the rows of all experts so far, rounded up
    for (u32 first = 0; first < d.num_reported_experts; first += 32u * kExpertsPerLane) {
        u32 expert = first + lane * kExpertsPerLane;
        ExpertWords words[kExpertsPerLane] = {};
        UNROLL
        for (u32 i = 0; i < kExpertsPerLane; ++i) {
            if (expert + i < d.num_reported_experts) {
                words[i] = ask_for_expert(c, comm, d, expert + i);
            }
        }
        u32 count[kExpertsPerLane];
        u32 rounded[kExpertsPerLane];
        u32 rows = 0;  // of this lane's experts
        bool ok = true;
        UNROLL
        for (u32 i = 0; i < kExpertsPerLane; ++i) {
            count[i] = 0;
            if (ok && expert + i < d.num_reported_experts) {
                ok = count_of_expert(c, comm, d, expert + i, words[i], count[i]);
            }
            rounded[i] =
                (count[i] + d.expert_alignment - 1u) / d.expert_alignment * d.expert_alignment;
            rows += rounded[i];
        }
        if (warp_ballot(!ok) != 0u) {
            comm.failed = 1;
            return;
        }
        u32 sum = rows;  // of the lanes up to this one
        UNROLL
        for (u32 step = 1; step < 32u; step *= 2u) {
            u32 lower = warp_shuffle(sum, (lane - step) & 31u);
            if (lane >= step) sum += lower;
        }
        write_expert_counts(c, d, expert, end + sum - rows, count, rounded);
        end += warp_shuffle(sum, 31u);
    }
}

// Writes all counts into the handle's arrays, and tells them to the host if it waits. The last
// warp of the reporter does it before it moves rows.
DEVICE void report_counts(const CommParams& c, CommShared& comm, const DispatchCommon& d) {
    if (!is_reporter() || warp_index() != kNumWarps - 1 || d.layout == kLayoutCached) return;
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
