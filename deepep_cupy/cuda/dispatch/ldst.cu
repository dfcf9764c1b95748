// dispatch: each row goes from its owner's memory straight to its final place at every receiver.
//
// This is the path of ordinary loads and stores: every GPU from SM 80 on, and rows or bases that
// are no multiple of 16 bytes. One warp a row; the load of a row is shared by all destinations.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "common/rows.cuh"
#include "dispatch/dispatch.cuh"

struct Shared {
    CommShared comm;
    RouteShared route;
};
static_assert(sizeof(Shared) <= kDispatchSharedBytes, "SHARED_HEAD in protocol/constants.py is small");

// Where a token's row goes: to the ranks behind this one first, so that ranks do not all write to
// the same one. row: this lane's find_row().
struct PeerRows {
    const CommParams& c;
    const CommShared& comm;
    const DispatchCommon& d;
    u32 row;

    template <class RowChunk>
    DEVICE_METHOD void store(const RowChunk& chunk) const {
        for (u32 i = 0; i < kNumRanks; ++i) {
            u32 rank = (c.rank + 1u + i) % kNumRanks;
            u32 there = warp_shuffle(row, rank);
            if (there == ~0u) continue;
            chunk.store(rows_of_rank(c, comm, rank, kWordRowsOffset) +
                        static_cast<u64>(there) * d.row_bytes);
        }
    }
};

template <int kBytes, int kUnroll>
DEVICE void send_row(const DispatchCommon& d, u32 token, const PeerRows& rows) {
    const u8* source = d.x + static_cast<u64>(token) * d.row_bytes;
    copy_units<kBytes, kUnroll, true>(source, d.row_bytes / kBytes, lane_index(), 32u, rows);
}

DEVICE void move_rows(const CommParams& c, const DispatchCommon& d, Shared& s) {
    Schedule schedule = begin_schedule(d.num_tokens);
    u32 token = first_token(schedule);
    if (token == kNoToken) token = next_token(c, schedule);
    for (; token != kNoToken; token = next_token(c, schedule)) {
        LaneSlot lane_slot = find_slot(c, d, schedule, token);
        if (warp_ballot(lane_slot.slot != ~0u) == 0u) continue;
        u32 row = ~0u;
        if (!find_row(c, s.comm, d, s.route, schedule, token, lane_slot, row)) break;
        send_metadata(c, s.comm, d, token, row);
        PeerRows rows = {c, s.comm, d, row};
        if (d.access_bytes == 16) {
            send_row<16, 8>(d, token, rows);
        } else if (d.access_bytes == 4) {
            send_row<4, 4>(d, token, rows);
        } else {
            send_row<1, 4>(d, token, rows);
        }
    }
    fill_tails(c, s.comm, d);  // PLANT(tails_filled)
}

KERNEL dispatch(const GRID_CONSTANT DispatchParams p) {
    Shared& s = shared_memory<Shared>();
    Snapshot snapshot = prefetch_state(p.comm);
    if (fills_header()) fill_header(p.comm, s.comm, p.d);
    Prefetched prefetched = prefetch_scan(p.d);
    Verdict verdict = enter(p.comm, s.comm, snapshot);
    if (verdict == kGo) verdict = route(p.comm, s.comm, p.d, s.route, prefetched, [] {});
    if (verdict == kGo) {
        report_counts(p.comm, s.comm, p.d);
        move_rows(p.comm, p.d, s);
    }
    finish(p.comm, s.comm, p.d, verdict);  // PLANT(dispatch_finishes)
}
