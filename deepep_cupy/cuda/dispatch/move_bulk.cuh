#pragma once
// Dispatch with the bulk copy engine of SM 90 and later, whatever becomes of the rows between.
//
// One lane a warp drives the engine: it loads a piece of a row into one of the warp's two stages
// and stores it to every destination, while the next piece is being loaded into the other. A piece
// is stored as soon as it is in, before the next load is looked for: the other order, where the
// next load waits for all stores that were started, cost 1 % on two H200.
//
// A kernel says what it does with rows by a type `Rows`:
//   kStageBytes     of a stage, at least those of a piece
//   pieces()        how rows are cut, and how much shorter they are when they are stored
//   send_with_row() what else goes to the ranks that get a row
//   change()        what happens to a piece that is in; the engine may store it afterwards
//   send_with_piece()  what else goes to the ranks that get it; `made` is what change() returned
// All lanes call them.
#include "asm/bulk.cuh"
#include "comm/bulk_wait.cuh"
#include "dispatch/dispatch.cuh"

constexpr int kStages = kDispatchStages;
static_assert(kStages == 2, "a load waits for all stores but those of the piece at hand");

template <u32 kStageBytes>
struct BulkShared {
    CommShared comm;
    RouteShared route;
    u64 loaded[kNumWarps][kStages];
    alignas(128) u8 stage[kNumWarps][kStages][kStageBytes];
};

// ---- the pieces a warp moves, in order ----

struct Pieces {
    u32 row_bytes;  // as they are loaded
    u32 bytes;      // of all pieces but the last of a row
    u32 count;      // a row
    u32 shift;      // a piece is stored with its bytes >> shift
};

// Rows are cut into pieces of equal size, a multiple of `unit` bytes and at most `most`, itself
// rounded down to such a multiple.
DEVICE Pieces cut_rows(u32 row_bytes, u32 unit, u32 most, u32 shift) {
    most = most / unit * unit;
    u32 count = (row_bytes + most - 1) / most;
    u32 bytes = ((row_bytes + count - 1) / count + unit - 1) / unit * unit;
    return {row_bytes, bytes, (row_bytes + bytes - 1) / bytes, shift};
}

// Where a warp is: a token that goes somewhere, and a piece of its row.
struct Cursor {
    u32 token;  // kNoToken: no more work
    u32 piece;
    LaneSlot lane_slot;
};

// Goes to a token, if it is sent anywhere.
DEVICE bool go_to(u32 token, const LaneSlot& lane_slot, Cursor& cursor) {
    cursor = {token, 0u, lane_slot};
    return token != kNoToken && warp_ballot(lane_slot.slot != ~0u) != 0u;
}

// Goes to the next token that is sent anywhere; to kNoToken where there is none.
DEVICE void seek(const CommParams& c, const DispatchCommon& d, Schedule& schedule, Cursor& cursor) {
    u32 token;
    LaneSlot lane_slot = {~0u, 0u};
    do {
        token = next_token(c, schedule);
        if (token != kNoToken) lane_slot = find_slot(c, d, schedule, token);
    } while (!go_to(token, lane_slot, cursor) && token != kNoToken);
}

DEVICE u32 piece_length(const Pieces& pieces, u32 piece) {
    u32 rest = pieces.row_bytes - piece * pieces.bytes;
    return rest < pieces.bytes ? rest : pieces.bytes;
}

// Starts loading the piece at the cursor. Lane 0 only.
DEVICE void start_load(const DispatchCommon& d, const Pieces& pieces, const Cursor& at, u8* stage,
                       u64* loaded) {
    u32 bytes = piece_length(pieces, at.piece);
    mbarrier_arrive_expect_bytes(loaded, bytes);
    bulk_load(stage,
              d.x + static_cast<u64>(at.token) * pieces.row_bytes +
                  static_cast<u64>(at.piece) * pieces.bytes,
              bytes, loaded);
}

// Starts storing a piece to every rank that gets the row. Lane 0 only, except the shuffle.
DEVICE void start_stores(const CommParams& c, const CommShared& comm, const DispatchCommon& d,
                         const Pieces& pieces, const Cursor& at, u32 row, const u8* stage) {
    u32 bytes = piece_length(pieces, at.piece) >> pieces.shift;
    NO_UNROLL  // unrolled, it crashes the ptxas of CUDA 12.8 and 12.9 for sm_100 and sm_120
    for (u32 i = 0; i < kNumRanks; ++i) {
        u32 rank = (c.rank + 1u + i) % kNumRanks;
        u32 there = warp_shuffle(row, rank);
        if (there == ~0u || lane_index() != 0) continue;
        bulk_store(rows_of_rank(c, comm, rank, kWordRowsOffset) +
                       static_cast<u64>(there) * d.row_bytes +
                       // PLANT(piece_stored_at)
                       static_cast<u64>(at.piece) * (pieces.bytes >> pieces.shift),
                   stage, bytes);
    }
    if (lane_index() == 0) bulk_commit();
}

// ---- one warp's work ----

// What a warp keeps between the load it starts early and the loop that follows the handshake.
struct WarpWork {
    Schedule schedule;
    Pieces pieces;
    Cursor next;  // the piece whose load is in flight
    bool begun;   // there is one
};

// Starts the warp's first load before the ranks have agreed: it only reads this rank's x. Other
// blocks' slots are not to be read yet, so that the first token is one of this block's.
template <class Shared>
DEVICE WarpWork begin_work(const CommParams& c, const DispatchCommon& d, Shared& s,
                           const Prefetched& prefetched, const Pieces& pieces) {
    WarpWork work;
    work.schedule = begin_schedule(d.num_tokens);
    work.pieces = pieces;
    u32 token = first_token(work.schedule);  // PLANT(first_token_of_own_share)
    LaneSlot lane_slot = {prefetched.slot, 0u};
    if (d.layout != kLayoutCached && token != kNoToken) {
        lane_slot = find_slot(c, d, work.schedule, token);
    }
    work.begun = go_to(token, lane_slot, work.next);
    if (work.begun && lane_index() == 0) {
        start_load(d, work.pieces, work.next, s.stage[warp_index()][0],
                   &s.loaded[warp_index()][0]);
    }
    return work;
}

// Goes to the next piece and starts its load, once the stores of the turn before have read the
// stage; those of this turn, just started, read the other one.
template <class Shared>
DEVICE void load_next(const CommParams& c, const DispatchCommon& d, Shared& s, WarpWork& work,
                      u32 stage) {
    if (work.next.piece + 1 < work.pieces.count) {
        ++work.next.piece;
    } else {
        seek(c, d, work.schedule, work.next);
    }
    if (work.next.token != kNoToken && lane_index() == 0) {
        bulk_wait_read<1>();  // PLANT(stage_read)
        start_load(d, work.pieces, work.next, s.stage[warp_index()][stage],
                   &s.loaded[warp_index()][stage]);
    }
}

template <class Rows, class Shared>
DEVICE void move_rows(const CommParams& c, const DispatchCommon& d, Shared& s, const Rows& rows,
                      WarpWork& work) {
    u32 warp = warp_index();
    if (!work.begun) {
        seek(c, d, work.schedule, work.next);
        if (work.next.token != kNoToken && lane_index() == 0) {
            start_load(d, work.pieces, work.next, s.stage[warp][0], &s.loaded[warp][0]);
        }
    }
    // What earlier kernels of the receivers did to their blocks with ordinary accesses was
    // acquired with their headers; this orders the engine's stores behind it.
    fence_proxy_async_global();
    u32 row = ~0u;
    for (u32 turn = 0; work.next.token != kNoToken; ++turn) {
        u32 stage = turn % kStages;
        u64* loaded = &s.loaded[warp][stage];
        u32 parity = turn / kStages & 1u;
        Cursor at = work.next;
        if (at.piece == 0) {
            if (!find_row(c, s.comm, d, s.route, work.schedule, at.token, at.lane_slot, row)) {
                wait_loaded(c, s.comm, loaded, parity);
                break;
            }
            rows.send_with_row(c, s.comm, at.token, row);
        }
        // The engine itself wrote what a load brings: no proxy fence lies between it and the
        // stores, but where lanes change it.
        if (!wait_loaded(c, s.comm, loaded, parity)) break;
        u32 made = rows.change(s.stage[warp][stage], piece_length(work.pieces, at.piece));
        start_stores(c, s.comm, d, work.pieces, at, row, s.stage[warp][stage]);
        load_next(c, d, s, work, 1 - stage);
        rows.send_with_piece(c, s.comm, work.pieces, at.piece, row, made);
    }
    fill_tails(c, s.comm, d);  // while the last stores are on their way
    // Completes what this thread has started: shared memory is free to vanish, and every store is
    // visible to this thread, hence ordered by the release that follows in leave().
    if (lane_index() == 0) bulk_wait<0>();  // PLANT(bulk_stores_complete)
}

// ---- the whole kernel ----

template <class Rows>
DEVICE void dispatch_by_bulk(const CommParams& c, const DispatchCommon& d, const Rows& rows) {
    using Shared = BulkShared<Rows::kStageBytes>;
    Shared& s = shared_memory<Shared>();
    Snapshot snapshot = prefetch_state(c);
    if (lane_index() == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(&s.loaded[warp_index()][stage], 1);
        }
        fence_mbarrier_init();
    }
    if (fills_header()) fill_header(c, s.comm, d);
    Prefetched prefetched = prefetch_scan(d);
    Verdict verdict = enter(c, s.comm, snapshot);
    if (verdict == kGo) {
        WarpWork work;
        work.begun = false;
        verdict = route(c, s.comm, d, s.route, prefetched,
                        [&] { work = begin_work(c, d, s, prefetched, rows.pieces()); });
        if (verdict == kGo) {
            report_counts(c, s.comm, d);
            move_rows(c, d, s, rows, work);
        } else if (work.begun) {
            // No row may move after all: a block may not end with a load in flight.
            wait_loaded(c, s.comm, &s.loaded[warp_index()][0], 0);
        }
    }
    finish(c, s.comm, d, verdict);
}
