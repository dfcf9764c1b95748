// dispatch_bulk: dispatch with the bulk copy engine of SM 90 and later.
//
// One lane a warp drives the engine: it loads a piece of a row into one of the warp's two stages
// and stores it to every destination, while the next piece is being loaded into the other. No
// register ever holds row data. Rows and bases are multiples of 16 bytes.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "asm/bulk.cuh"
#include "common/bulk_wait.cuh"
#include "dispatch/deliver.cuh"

constexpr int kStages = kDispatchStages;
static_assert(kStages == 2, "free_stage() below waits for all but the newest group");

struct Shared {
    CommShared comm;
    RouteShared route;
    u64 loaded[kNumWarps][kStages];
    alignas(128) u8 stage[kNumWarps][kStages][kDispatchStageBytes];
};
static_assert(sizeof(Shared) <= kDispatchBulkSharedBytes,
              "SHARED_HEAD in plan/constants.py is small");

// ---- the pieces a warp moves, in order ----

// Rows are cut into equal pieces that fit a stage.
struct Pieces {
    u32 bytes;  // of all pieces but the last of a row
    u32 count;  // a row
};
DEVICE Pieces pieces_of_row(u32 row_bytes) {
    u32 count = (row_bytes + kDispatchStageBytes - 1) / kDispatchStageBytes;
    u32 bytes = ((row_bytes + count - 1) / count + 15u) & ~15u;
    return {bytes, (row_bytes + bytes - 1) / bytes};
}

// Where a warp is: a token that goes somewhere, and a piece of its row.
struct Cursor {
    u32 token;  // kNoToken: no more work
    u32 piece;
    Place place;
};

// Goes to a token, if it is sent anywhere.
DEVICE bool go_to(u32 token, const Place& place, Cursor& cursor) {
    cursor = {token, 0u, place};
    return token != kNoToken && warp_ballot(place.slot != ~0u) != 0u;
}

// Goes to the next token that is sent anywhere; to kNoToken where there is none.
DEVICE void seek(const CommParams& c, const DispatchCommon& d, Deal& deal, Cursor& cursor) {
    u32 token;
    Place place = {~0u, 0u};
    do {
        token = next_token(c, deal);
        if (token != kNoToken) place = place_of_lane(c, d, deal, token);
    } while (!go_to(token, place, cursor) && token != kNoToken);
}

DEVICE u32 piece_length(const DispatchCommon& d, const Pieces& pieces, u32 piece) {
    u32 rest = d.row_bytes - piece * pieces.bytes;
    return rest < pieces.bytes ? rest : pieces.bytes;
}

// Starts loading the piece at the cursor. Lane 0 only.
DEVICE void start_load(const DispatchCommon& d, const Pieces& pieces, const Cursor& at, u8* stage,
                       u64* loaded) {
    u32 bytes = piece_length(d, pieces, at.piece);
    mbarrier_arrive_expect_bytes(loaded, bytes);
    bulk_load(stage,
              d.x + static_cast<u64>(at.token) * d.row_bytes +
                  static_cast<u64>(at.piece) * pieces.bytes,
              bytes, loaded);
}

// Starts storing a loaded piece to every rank that gets the row. Lane 0 only, except the shuffle.
DEVICE void start_stores(const CommParams& c, const CommShared& comm, const DispatchCommon& d,
                         const Pieces& pieces, const Cursor& at, u32 row, const u8* stage) {
    u32 bytes = piece_length(d, pieces, at.piece);
    NO_UNROLL  // unrolled, it crashes the ptxas of CUDA 12.8 and 12.9 for sm_100 and sm_120
    for (u32 i = 0; i < kNumRanks; ++i) {
        u32 rank = (c.rank + 1u + i) % kNumRanks;
        u32 there = warp_shuffle(row, rank);
        if (there == ~0u || lane_index() != 0) continue;
        bulk_store(rows_of_rank(c, comm, rank, kWordRowsOffset) +
                       static_cast<u64>(there) * d.row_bytes +
                       static_cast<u64>(at.piece) * pieces.bytes,
                   stage, bytes);
    }
    if (lane_index() == 0) bulk_commit();
}

// ---- one warp's work ----

// What a warp keeps between the load it starts early and the loop that follows the handshake.
struct WarpWork {
    Deal deal;
    Pieces pieces;
    Cursor next;  // the piece whose load is in flight
    bool begun;   // there is one
};

// Starts the warp's first load before the ranks have agreed: it only reads this rank's x. Other
// blocks' slots are not to be read yet, so that the first token is one of this block's.
DEVICE WarpWork begin_work(const CommParams& c, const DispatchCommon& d, Shared& s,
                           const Ahead& ahead) {
    WarpWork work;
    work.deal = begin_deal(d.num_tokens);
    work.pieces = pieces_of_row(d.row_bytes);
    u32 token = first_token(work.deal);
    Place place = {ahead.slot, 0u};
    if (d.layout != kLayoutCached && token != kNoToken) {
        place = place_of_lane(c, d, work.deal, token);
    }
    work.begun = go_to(token, place, work.next);
    if (work.begun && lane_index() == 0) {
        start_load(d, work.pieces, work.next, s.stage[warp_index()][0],
                   &s.loaded[warp_index()][0]);
    }
    return work;
}

DEVICE void move_rows(const CommParams& c, const DispatchCommon& d, Shared& s, WarpWork& work) {
    u32 warp = warp_index();
    if (!work.begun) {
        seek(c, d, work.deal, work.next);
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
        Cursor at = work.next;
        if (at.piece == 0) {
            bool found = find_row(c, s.comm, d, s.route, work.deal, at.token, at.place, row);
            if (!found) {
                wait_loaded(c, s.comm, &s.loaded[warp][stage], turn / kStages & 1u);
                break;
            }
            send_metadata(c, s.comm, d, at.token, row);
        }

        // Next load: into the other stage, once the stores of the turn before have read it.
        if (at.piece + 1 < work.pieces.count) {
            work.next.piece = at.piece + 1;
        } else {
            seek(c, d, work.deal, work.next);
        }
        if (work.next.token != kNoToken && lane_index() == 0) {
            bulk_wait_read<0>();
            start_load(d, work.pieces, work.next, s.stage[warp][1 - stage],
                       &s.loaded[warp][1 - stage]);
        }

        // This load's bytes are in; the engine itself wrote them, so no proxy fence lies between.
        if (!wait_loaded(c, s.comm, &s.loaded[warp][stage], turn / kStages & 1u)) break;
        start_stores(c, s.comm, d, work.pieces, at, row, s.stage[warp][stage]);
    }
    fill_tails(c, s.comm, d);  // while the last stores are on their way
    // Completes what this thread has started: shared memory is free to vanish, and every store is
    // visible to this thread, hence ordered by the release that follows in leave().
    if (lane_index() == 0) bulk_wait<0>();
}

// No row may move after all: waits for the load in flight, so that the block can end.
DEVICE void drop_work(const CommParams& c, Shared& s, const WarpWork& work) {
    if (work.begun) wait_loaded(c, s.comm, &s.loaded[warp_index()][0], 0);
}

KERNEL dispatch_bulk(const GRID_CONSTANT DispatchBulkParams p) {
    Shared& s = shared_memory<Shared>();
    Entry entry = begin_enter(p.comm);
    if (lane_index() == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(&s.loaded[warp_index()][stage], 1);
        }
        fence_mbarrier_init();
    }
    if (fills_header()) fill_header(p.comm, s.comm, p.d);
    Ahead ahead = look_ahead(p.d);
    Verdict verdict = enter(p.comm, s.comm, entry);
    if (verdict == kGo) {
        WarpWork work;
        verdict = route(p.comm, s.comm, p.d, s.route, ahead,
                        [&] { work = begin_work(p.comm, p.d, s, ahead); });
        if (verdict == kGo) {
            report_counts(p.comm, s.comm, p.d);
            move_rows(p.comm, p.d, s, work);
        } else {
            drop_work(p.comm, s, work);
        }
    }
    finish(p.comm, s.comm, p.d, verdict);
}
