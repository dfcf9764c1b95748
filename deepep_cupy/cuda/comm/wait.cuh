#pragma once
// The one way to wait: until a word is acceptable, the time is up, or somebody aborted.
#include "comm/control.cuh"

// What the thread is waiting for, for the error message.
struct Wait {
    Phase phase;
    u32 peer;
    u64 expected;
};

// ---- giving up ----

// Records why this thread gives up. The abort word makes every other wait of this rank end too.
DEVICE void give_up(const CommParams& c, const Wait& wait, u64 seen) {
    u8* own = own_region(c);
    if (atom_cas_relaxed_gpu_u32(control_u32(own, kControlClaimed), 0u, 1u) == 0u) {
        // Read by the last block to leave: ordered by its arrival counter (comm/leave.cuh).
        u64* details = control_u64(own, kControlDetails);
        st_relaxed_gpu_u64(details + kDetailPhase, wait.phase);
        st_relaxed_gpu_u64(details + kDetailPeer, wait.peer);
        st_relaxed_gpu_u64(details + kDetailExpected, wait.expected);
        st_relaxed_gpu_u64(details + kDetailSeen, seen);
        st_relaxed_gpu_u64(details + kDetailBlock, block_index());
    }
    // Sys scope: peers or their reasons into the same word.
    red_or_relaxed_sys_u32(control_u32(own, kControlAbort),
                           abort_word(kAbortTimeout, 1u << wait.peer, c.rank));
}

// Whether another rank wants this one to stop. Peers write the abort word in device memory; a
// process that has lost its GPU, or never had one, writes its line of the board in host memory.
DEVICE bool told_to_stop(const CommParams& c, bool look_at_board) {
    u32* abort = control_u32(own_region(c), kControlAbort);
    if (ld_relaxed_sys_u32(abort) != 0u) return true;
    if (!look_at_board || c.board == nullptr) return false;
    for (u32 rank = 0; rank < kNumRanks; ++rank) {
        if (ld_relaxed_sys_u32(c.board + rank * c.board_stride) != 0u) {
            red_or_relaxed_sys_u32(abort, abort_word(kAbortRaised, 0u, rank));
            return true;
        }
    }
    return false;
}

// The time one wait has lasted: tick() is called at every poll and looks at the clock at few.
struct PollTimer {
    u64 deadline = 0;
    u32 polls = 0;
};

enum Tick : u32 { kKeepWaiting, kTimeIsUp, kToldToStop };

DEVICE Tick tick(const CommParams& c, PollTimer& timer) {
    poll_pause();
    if (++timer.polls % kTurnsPerCheck != 0) return kKeepWaiting;
    u64 now = global_timer();
    if (timer.deadline == 0) timer.deadline = now + c.timeout_ns;
    if (now >= timer.deadline) return kTimeIsUp;
    bool look_at_board = timer.polls % (16u * kTurnsPerCheck) == 0;
    return told_to_stop(c, look_at_board) ? kToldToStop : kKeepWaiting;
}

// ---- waiting ----

// Polls a word of this rank's memory until it carries this epoch. Returns false after give_up() or
// an abort.
//
// Relaxed: the epoch in the word proves the value. A caller that will read other data that the
// writer released acquires the word afterwards.
DEVICE bool wait_stamped(const CommParams& c, const CommShared& s, u64* word, Wait wait,
                         u64& seen) {
    PollTimer timer;
    for (;;) {
        seen = ld_relaxed_sys_u64(word);
        if (is_stamped(seen, s.epoch)) return true;
        Tick now = tick(c, timer);
        if (now == kTimeIsUp) give_up(c, wait, seen);
        if (now != kKeepWaiting) return false;
    }
}
