#pragma once
// The one exit: every block that entered comes through here, with any verdict.
//
// The last block sends this rank's result to all ranks and receives theirs. An operation that ends
// with kGo has an arrival from every rank: all rows that were to come have come, and no rank reads
// or writes this rank's memory any more.
#include "comm/wait.cuh"

// ---- the report on the host ----

// Writes a record of what went wrong. All threads of the last block call it.
DEVICE void write_record(const CommParams& c, CommShared& s, Verdict verdict) {
    u8* own = own_region(c);
    u32 number = ld_relaxed_gpu_u32(control_u32(own, kControlFailures));
    u64* record =
        c.report + kReportRecords + (number % kReportNumRecords) * kReportRecordWords;
    u64* details = control_u64(own, kControlDetails);
    NO_UNROLL
    for (u32 i = thread_index(); i < kNumRanks * kHeaderWords; i += kNumThreads) {
        u32 source = i / kHeaderWords;
        u32 word = i % kHeaderWords;
        st_relaxed_sys_u64(record + kReportRecordHead + i, s.headers[source][word]);
    }
    if (thread_index() == 0) {
        u32 abort = ld_relaxed_sys_u32(control_u32(own, kControlAbort));
        st_relaxed_sys_u64(record + kRecordVerdict, verdict);
        st_relaxed_sys_u64(record + kRecordSerial, c.serial);
        st_relaxed_sys_u64(record + kRecordKind, c.kind);
        st_relaxed_sys_u64(record + kRecordEpoch, s.epoch);
        st_relaxed_sys_u64(record + kRecordAbort, abort);
        NO_UNROLL
        for (u32 i = 0; i < kNumDetails; ++i) {
            st_relaxed_sys_u64(record + kRecordPhase + i, ld_relaxed_gpu_u64(details + i));
        }
    }
    block_barrier();
    if (thread_index() == 0) {
        st_relaxed_gpu_u32(control_u32(own, kControlFailures), number + 1);
        // Release: the record (this block's stores, ordered by the barrier) before its number.
        st_release_sys_u64(c.report + kReportNumFailures, number + 1);
    }
}

// ---- arrivals ----

// Sends an arrival to every rank: this one is done with the operation, with 0 or an abort word.
DEVICE void send_arrivals(const CommParams& c, const CommShared& s, u32 status) {
    for (u32 i = thread_index(); i < kNumRanks; i += kNumThreads) {  // PLANT(arrival_to_each_rank)
        u32 peer = (c.rank + 1u + i) % kNumRanks;  // PLANT(arrival_peer)
        // Release, in the thread that signals. The blocks' rows (or reads) precede it: each block
        // passed its barrier, then released its arrival in the counter, whose acquire by the last
        // block's first thread is passed on by a block barrier.
        fence_acq_rel_sys();  // PLANT(fence_before_arrivals)
        st_relaxed_sys_u64(arrived_slot(c.peer[peer], s.epoch, c.rank),
                           stamped(s.epoch, status));
    }
}

// Waits for every peer's word. Returns false when one failed, aborted or did not come, or has
// given up since.
DEVICE bool receive_arrivals(const CommParams& c, CommShared& s) {
    bool ok = true;
    for (u32 source = thread_index(); source < kNumRanks; source += kNumThreads) {
        u64* slot = arrived_slot(own_region(c), s.epoch, source);
        u64 seen = 0;
        if (!wait_stamped(c, s, slot, {kPhaseArrival, source, stamped(s.epoch, 0)}, seen)) {
            ok = false;
            break;
        }
        // Acquire: the peer's rows are here for all later kernels of this stream.
        u32 status = static_cast<u32>(ld_acquire_sys_u64(slot));
        if (status != 0u) {
            red_or_relaxed_sys_u32(control_u32(own_region(c), kControlAbort), status);
        }
        // A rank may give up after its own arrival and then send an abort: its later kernels may
        // already be overwriting rows that this rank was reading. So each thread looks at the abort
        // word after its arrival has come, and the one whose arrival came last looks last.
        if (status != 0u || told_to_stop(c, false)) {
            ok = false;
            break;
        }
    }
    return !block_barrier_or(!ok);
}

// Sends this rank's abort word to all others; their waits end within microseconds.
DEVICE void send_aborts(const CommParams& c) {
    u32 abort = ld_relaxed_sys_u32(control_u32(own_region(c), kControlAbort));
    for (u32 i = thread_index(); i < kNumRanks; i += kNumThreads) {
        if (i != c.rank) red_or_relaxed_sys_u32(control_u32(c.peer[i], kControlAbort), abort);
    }
}

// ---- leaving ----

// Ends the operation for this block. Returns true in the rank's last block when the operation
// failed or was refused: all other blocks have left, so that block alone poisons the outputs,
// whatever some of them may have written or be reading before.
//
//   verdict    what this block knows; kFailed when any of its threads gave up
//   handshake  whether ranks wait for each other's arrivals (where headers alone are the whole
//              operation, they do not)
DEVICE bool leave(const CommParams& c, CommShared& s, Verdict verdict, bool handshake) {
    if (verdict == kBusy) return false;
    // All accesses of the block's threads precede its arrival (barrier, then release below).
    bool failed = block_barrier_or(s.failed != 0u) || verdict == kFailed;  // PLANT(all_warps_done)
    if (num_blocks() == 1) {
        if (thread_index() == 0) {
            s.last = 1;
            s.failed = failed;
        }
    } else if (thread_index() == 0) {
        u32* arrivals = control_u32(own_region(c), kControlArrivals);
        // Release: this block's work. Acquire: what the other blocks released.
        // PLANT(block_counts_in)
        u32 before = atom_add_acq_rel_gpu_u32(arrivals, failed ? 0x10001u : 1u);
        s.last = (before & 0xffffu) + 1u == num_blocks();  // PLANT(last_block_found)
        s.failed = failed || (before >> 16) != 0u;  // PLANT(failed_blocks_counted)
        if (s.last) st_relaxed_gpu_u32(arrivals, 0u);  // PLANT(counter_reset)
    }
    block_barrier();
    if (s.last == 0u) return false;

    // ---- last block: settle with the peers ----
    failed = s.failed != 0u;
    if (handshake && verdict == kGo) {
        u32 status = 0;
        if (failed) status = ld_relaxed_sys_u32(control_u32(own_region(c), kControlAbort));
        send_arrivals(c, s, status);
        if (!failed) failed = !receive_arrivals(c, s);
    }
    if (failed) send_aborts(c);

    // ---- and with the host ----
    if (failed) {
        write_record(c, s, kFailed);
    } else if (verdict == kRefused) {
        write_record(c, s, kRefused);
    }
    block_barrier();
    if (thread_index() == 0) {
        u8* own = own_region(c);
        if (failed) {
            st_relaxed_gpu_u32(control_u32(own, kControlPoisoned), 1u);
        } else if (verdict != kPoisoned) {
            // PLANT(epoch_advanced)
            st_relaxed_gpu_u32(control_u32(own, kControlEpoch), next_epoch(s.epoch));
        }
        st_relaxed_gpu_u32(control_u32(own, kControlTickets), 0u);  // PLANT(tickets_reset)
        st_relaxed_gpu_u32(control_u32(own, kControlBusy), 0u);
    }
    return failed || verdict == kRefused;
}
