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

// Sends one row to all ranks that get it; row: this lane's find_row().
template <int kBytes, int kUnroll>
DEVICE void send_row(const CommParams& c, const CommShared& comm, const DispatchCommon& d,
                     u32 token, u32 row) {
    const u8* source = d.x + static_cast<u64>(token) * d.row_bytes;
    u32 units = d.row_bytes / kBytes;
    copy_units<kBytes, kUnroll, true>(source, units, lane_index(), 32u, [&](auto store_to) {
        for (u32 i = 0; i < kNumRanks; ++i) {
            u32 rank = (c.rank + 1u + i) % kNumRanks;
            u32 there = warp_shuffle(row, rank);
            if (there == ~0u) continue;
            store_to(rows_of_rank(c, comm, rank, kWordRowsOffset) +
                     static_cast<u64>(there) * d.row_bytes);
        }
    });
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
        if (d.access_bytes == 16) {
            send_row<16, 8>(c, s.comm, d, token, row);
        } else if (d.access_bytes == 4) {
            send_row<4, 4>(c, s.comm, d, token, row);
        } else {
            send_row<1, 4>(c, s.comm, d, token, row);
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
