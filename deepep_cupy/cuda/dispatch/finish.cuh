#pragma once
// The end: the handshake that closes the operation; then statistics of one that went well, or
// poison in the outputs of one that did not.
#include "common/poison.cuh"
#include "comm/leave.cuh"
#include "dispatch/move.cuh"

// ---- poison ----

// Parts of a block begin at multiples of kOffsetUnit, and blocks end at such.
DEVICE u64 whole_units(u64 nbytes) {
    return (nbytes + kOffsetUnit - 1u) / kOffsetUnit * kOffsetUnit;
}

// Poisons the first `rows` rows this rank received, or would have: share `share` of `shares`.
DEVICE void poison_received(const CommParams& c, const DispatchCommon& d, u64 rows, u32 share,
                            u32 shares) {
    u8* own = own_region(c);
    u64 entries = rows * d.num_topk;
    u64 unit = kOffsetUnit;
    fill_bytes(own + d.rows_offset * unit, whole_units(rows * d.row_bytes), poison_byte(d.dtype),
               share, shares);
    if (d.index_bytes != 0) {
        fill_bytes(own + d.index_offset * unit, whole_units(entries * d.index_bytes), 0xff, share,
                   shares);
    }
    if (d.has_weights != 0u) {
        fill_bytes(own + d.weights_offset * unit, whole_units(entries * 4u), 0xff, share, shares);
    }
    if (d.num_scales != 0u) {
        fill_bytes(own + scales_offset(d, d.capacity, d.index_offset),
                   whole_units(rows * d.num_scales * 4u), poison_byte_of_scales(d.dtype), share,
                   shares);
    }
    if (d.layout == kLayoutCached) return;
    fill_bytes(own + d.meta_offset * unit, whole_units(rows * 4u), 0xff, share, shares);
    u64 experts = d.num_reported_experts;
    fill_bytes(reinterpret_cast<u8*>(d.recv_rows_per_rank), kNumRanks * 4u, 0, share, shares);
    fill_bytes(reinterpret_cast<u8*>(d.psum_recv_rows), kNumRanks * 4u, 0, share, shares);
    fill_bytes(reinterpret_cast<u8*>(d.expert_counts), experts * 4u, 0, share, shares);
    fill_bytes(reinterpret_cast<u8*>(d.psum_expert_rows), experts * 4u, 0, share, shares);
    fill_bytes(reinterpret_cast<u8*>(d.send_row),
               static_cast<u64>(d.num_tokens) * kNumRanks * 4u, 0xff, share, shares);
    fill_bytes(reinterpret_cast<u8*>(d.birth_out), 4u, 0, share, shares);
}

// Adds this call's counts per expert to the caller's. The last block calls it, once all is well:
// it has acquired what the reporter wrote with the blocks' arrival counter.
DEVICE void add_statistics(const DispatchCommon& d) {
    for (u32 expert = thread_index(); expert < d.num_reported_experts; expert += kNumThreads) {
        st_u32(d.recv_stats + expert,
               ld_u32(d.recv_stats + expert) + ld_u32(d.expert_counts + expert));
    }
}

// Rows to poison. Where the host waits, the reporter may have told it the real number of rows, and
// the host may have given the memory behind them to somebody else: then only that number. The
// reporter had all headers when it reported; while one is missing, the host was told nothing.
// Relaxed: the reporter has seen these words, and its arrival precedes the last block's.
DEVICE u64 rows_to_poison(const CommParams& c, const CommShared& comm, const DispatchCommon& d,
                          Verdict verdict) {
    if (verdict == kRefused || d.layout == kLayoutCached || d.no_wait != 0u) return d.capacity;
    u64 rows = 0;
    for (u32 source = 0; source < kNumRanks; ++source) {
        u64* slot = header_slot(own_region(c), comm.epoch, source);
        u64 word = ld_relaxed_sys_u64(slot + kWordCounts + c.rank);
        if (!is_stamped(word, comm.epoch)) return d.capacity;
        rows += static_cast<u32>(word);
    }
    return rows < d.capacity ? rows : d.capacity;
}

// Ends a dispatch, with any verdict.
DEVICE void finish(const CommParams& c, CommShared& comm, const DispatchCommon& d,
                   Verdict verdict) {
    bool alone = leave(c, comm, verdict, true);  // PLANT(dispatch_handshake)
    bool all = verdict == kPoisoned;  // no block has touched anything: they share the work
    if (all || alone) {  // PLANT(dispatch_settled)
        u64 rows = all ? d.capacity : rows_to_poison(c, comm, d, verdict);
        poison_received(c, d, rows, all ? block_index() : 0u, all ? num_blocks() : 1u);
    } else if (d.recv_stats != nullptr && verdict == kGo && comm.last != 0u) {
        add_statistics(d);
    }
}
