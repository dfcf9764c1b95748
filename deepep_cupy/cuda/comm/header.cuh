#pragma once
// The opening: every rank tells every rank what it is about to do; nobody moves a row before it
// has read them all.
//
// For rows to be moved, the headers also prove two things of the rank that sent one:
//   dispatch   its receive block is free: what used it before ended in earlier kernels there
//   combine    its rows are ready: they were written by earlier kernels there
// Both are facts about other words, so headers are sent with release and read with acquire.
#include "comm/wait.cuh"

// ---- entering ----

// State of the Buffer that the first thread asks for early. Until enter() uses it, a block does
// what it may do in any state: it fills in its header and reads this rank's inputs.
struct Snapshot {
    u32 epoch;
    u32 poisoned;
    u32 abort;
    u32 inside;  // serial of the operation that is at work already, 0 for none
};

// The thread that fills in s.mine, before enter(): where there is another, not the one that waits
// for what prefetch_state() has asked for.
DEVICE bool fills_header() {
    return block_index() == 0 && thread_index() == (kNumWarps > 1 ? 32u : 0u);
}

// Words of all ranks' headers are dealt to the threads from the last one down: the first warps
// have more to do between prefetch_state() and enter().
DEVICE u32 first_word() { return kNumThreads - 1u - thread_index(); }

// First of all in a kernel, by all threads: asks for the state of the Buffer.
DEVICE Snapshot prefetch_state(const CommParams& c) {
    // Release, long before the words are sent, in each thread that will send some: what earlier
    // kernels of this stream read or wrote (ordered before this thread by the kernel boundary)
    // precedes them at every peer. Nothing that this kernel does needs to precede its headers.
    // PLANT(fence_before_headers)
    if (block_index() == 0 && first_word() < kNumRanks * kHeaderWords) fence_acq_rel_sys();
    Snapshot snapshot = {};
    if (thread_index() == 0) {
        u8* own = own_region(c);
        // Kernels of one Buffer run one after the other, so epoch and poison are stable here.
        snapshot.epoch = ld_relaxed_gpu_u32(control_u32(own, kControlEpoch));
        snapshot.poisoned = ld_relaxed_gpu_u32(control_u32(own, kControlPoisoned));
        snapshot.abort = ld_relaxed_sys_u32(control_u32(own, kControlAbort));
        snapshot.inside = atom_cas_relaxed_gpu_u32(control_u32(own, kControlBusy), 0u, c.serial);
    }
    return snapshot;
}

// Decides whether to work. All threads of a block call it.
DEVICE Verdict enter(const CommParams& c, CommShared& s, const Snapshot& snapshot) {
    // A record shows zeros where a header never came.
    for (u32 i = thread_index(); i < kNumRanks * kHeaderWords; i += kNumThreads) {
        s.headers[i / kHeaderWords][i % kHeaderWords] = 0;
    }
    if (thread_index() == 0) {
        s.epoch = snapshot.epoch;
        s.failed = 0;
        s.last = 0;
        s.disagree = 0;
        s.verdict = kGo;
        if (snapshot.abort != 0u) s.verdict = kFailed;
        if (snapshot.poisoned != 0u) s.verdict = kPoisoned;
        if (snapshot.inside != 0u && snapshot.inside != c.serial) {
            s.verdict = kBusy;
            st_relaxed_sys_u64(c.report + kReportBusy, c.serial);
        }
    }
    block_barrier();
    return s.verdict;
}

// ---- sending ----

// Sends s.mine to all ranks, this one included. Block 0 calls it, after a block barrier that
// follows the writing of s.mine; each word's release is in prefetch_state().
DEVICE void send_header(const CommParams& c, const CommShared& s) {
    NO_UNROLL
    for (u32 i = first_word(); i < kNumRanks * kHeaderWords; i += kNumThreads) {
        u32 peer = (c.rank + 1u + i / kHeaderWords) % kNumRanks;
        u32 word = i % kHeaderWords;
        u64* slot = header_slot(c.peer[peer], s.epoch, c.rank);
        st_relaxed_sys_u64(slot + word, stamped(s.epoch, s.mine[word]));  // PLANT(header_word_sent)
    }
}

// ---- receiving ----

// Reads all ranks' headers into s.headers. All threads of a block call it; every block for itself,
// so that each has acquired what it will read.
DEVICE bool receive_headers(const CommParams& c, CommShared& s) {
    bool ok = true;
    NO_UNROLL
    for (u32 i = thread_index(); i < kNumRanks * kHeaderWords; i += kNumThreads) {
        u32 source = i / kHeaderWords;
        u32 word = i % kHeaderWords;
        u64* slot = header_slot(own_region(c), s.epoch, source) + word;
        u64 seen = 0;
        // PLANT(headers_awaited)
        if (!wait_stamped(c, s, slot, {kPhaseHeader, source, stamped(s.epoch, 0)}, seen)) {
            ok = false;
            break;
        }
        // Acquire, in each lane that polled; the block barrier below passes it on to the block.
        // PLANT(header_acquired)
        s.headers[source][word] = static_cast<u32>(ld_acquire_sys_u64(slot));
    }
    return !block_barrier_or(!ok);
}

// Compares the headers: every rank comes to the same verdict.
DEVICE Verdict judge_headers(CommShared& s) {
    bool disagree = false;
    NO_UNROLL
    for (u32 i = thread_index(); i < kNumRanks * kNumSignatureWords; i += kNumThreads) {
        u32 source = i / kNumSignatureWords;
        u32 word = i % kNumSignatureWords;
        disagree |= s.headers[source][word] != s.headers[0][word];  // PLANT(signature_compared)
        disagree |= s.headers[source][kWordRefusal] != 0u;  // PLANT(refusal_heeded)
    }
    NO_UNROLL
    for (u32 rank = thread_index(); rank < kNumRanks; rank += kNumThreads) {
        u64 rows = 0;
        NO_UNROLL
        for (u32 source = 0; source < kNumRanks; ++source) {
            rows += s.headers[source][kWordCounts + rank];
        }
        disagree |= rows > s.headers[rank][kWordCapacity];  // PLANT(capacity_compared)
    }
    if (block_barrier_or(disagree)) {
        if (thread_index() == 0) s.disagree = 1;
        return kRefused;
    }
    return kGo;
}

// Receives and judges: the whole opening as seen by a block that need not send.
DEVICE Verdict open_headers(const CommParams& c, CommShared& s) {
    if (!receive_headers(c, s)) return kFailed;
    return judge_headers(s);
}

// Fills the words that every operation has. The thread that fills_header() calls it.
DEVICE void begin_header(const CommParams& c, CommShared& s) {
    for (u32 word = 0; word < kHeaderWords; ++word) s.mine[word] = 0;
    s.mine[kWordKind] = c.kind;
    s.mine[kWordRefusal] = c.refusal;
    s.mine[kWordRefusalValue] = c.refusal_value;
}

// Names the dispatch that made the handle in use. A dispatch that was refused or failed left 0:
// operations that the host has queued on it meanwhile are refused, too. After begin_header().
DEVICE void set_birth(CommShared& s, u32 birth) {
    s.mine[kWordBirth] = birth;
    if (birth != 0u || s.mine[kWordRefusal] != 0u) return;  // PLANT(handle_accepted)
    s.mine[kWordRefusal] = kRefusalArgument;
    s.mine[kWordRefusalValue] = kArgumentHandle;
}
