#pragma once
// Where this kernel's communication words are, and what a block keeps about the operation.
//
// One operation of one Buffer is one kernel on every rank. All its blocks
//     prefetch_state()    ask for the epoch, and whether the Buffer may work at all
//     enter()          learn it                                                (comm/header.cuh)
//     open_headers()   tell the peers about this rank's call and read theirs   (comm/header.cuh)
//     ...              move rows
//     leave()          count in; the last block tells the peers and ends it    (comm/leave.cuh)
// Offsets come from protocol/control_block.py, whose docstring draws the control block.
#include "asm/memory.cuh"
#include "asm/thread.cuh"
#include "asm/types.cuh"
#include "generated/prelude.cuh"

// protocol/control_block.py says what each is, and gives the numbers.
using Verdict = u32;  // kGo, kRefused, kFailed, kPoisoned, kBusy: how an operation stands here
using Phase = u32;    // kPhase...: what a wait was for; the host turns it into words

// An abort word: why (kAbort...), who is late, who says so. Words of several ranks may be or-ed.
DEVICE u32 abort_word(u32 flags, u32 late_ranks, u32 reporter) {
    return flags | late_ranks << kAbortLateShift | 1u << (kAbortReporterShift + reporter);
}

// The communication part of a block's shared memory.
struct CommShared {
    u32 epoch;
    u32 verdict;
    u32 failed;                                  // some thread of this block gave up
    u32 last;                                    // this block was the last to leave
    u32 disagree;                                // headers differ or refuse
    u32 mine[kHeaderWords];                      // the header this rank sends
    u32 headers[kNumRanks][kHeaderWords];        // the headers all ranks sent
};

DEVICE u8* own_region(const CommParams& c) { return c.peer[c.rank]; }

DEVICE u32* control_u32(u8* region, u64 offset) { return reinterpret_cast<u32*>(region + offset); }
DEVICE u64* control_u64(u8* region, u64 offset) { return reinterpret_cast<u64*>(region + offset); }

// Slots that carry a value exist twice, by the parity of the epoch: a rank one operation ahead
// writes into the other one, and no rank can be two ahead, since every operation opens with the
// headers of all ranks.
DEVICE u64* header_slot(u8* region, u32 epoch, u32 source) {
    return control_u64(region, kControlHeaders) +
           ((epoch & 1u) * kNumRanks + source) * kHeaderWords;  // PLANT(header_parity)
}
DEVICE u64* arrived_slot(u8* region, u32 epoch, u32 source) {
    return control_u64(region, kControlArrived) + (epoch & 1u) * kNumRanks + source;
}

// A value that proves itself: readers accept it only under their own epoch.
DEVICE u64 stamped(u32 epoch, u32 value) { return static_cast<u64>(epoch) << 32 | value; }
// PLANT(stamp_compared)
DEVICE bool is_stamped(u64 word, u32 epoch) { return static_cast<u32>(word >> 32) == epoch; }

// Epoch 0 means "never written". Skipping to 2 keeps the parities alternating.
// PLANT(epoch_wraps)
DEVICE u32 next_epoch(u32 epoch) { return epoch + 1u == 0u ? 2u : epoch + 1u; }
