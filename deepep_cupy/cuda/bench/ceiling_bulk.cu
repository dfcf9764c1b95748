// ceiling_bulk: what the links carry, by the bulk copy engine of SM 90 and later.
//
// Rows from one place to another with no handshake and nothing else around it: pushed when the
// targets lie on peers, pulled when the sources do, a local copy when neither does. The launches
// before and after it bring the order; inside there is none.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "asm/bulk.cuh"
#include "asm/thread.cuh"
#include "bench/rows.cuh"

// A warp has as much room for rows as in a dispatch, in four stages: two loads ahead of the one
// it waits for, and one whose store is still being read.
enum : u32 {
    kStages = 4,
    kAhead = 2,
    kStageBytes = kDispatchStages * kDispatchStageBytes / 4 / 16 * 16
};

struct Shared {
    u64 loaded[kNumWarps][kStages];
    alignas(128) u8 stage[kNumWarps][kStages][kStageBytes];
};
static_assert(sizeof(Shared) <= kDispatchBulkSharedBytes, "more stages than a dispatch has");

DEVICE void start_load(const Piece& piece, u8* stage, u64* loaded) {
    mbarrier_arrive_expect_bytes(loaded, piece.bytes);
    bulk_load(stage, piece.source, piece.bytes, loaded);
}

KERNEL ceiling_bulk(const GRID_CONSTANT CeilingBulkParams p) {
    Shared& s = shared_memory<Shared>();
    if (lane_index() != 0) return;
    const CeilingCopy& d = p.d;
    u32 warp = warp_index();
    for (u32 stage = 0; stage < kStages; ++stage) mbarrier_init(&s.loaded[warp][stage], 1);
    fence_mbarrier_init();

    u32 pieces = (d.row_bytes + kStageBytes - 1) / kStageBytes;
    u64 total = static_cast<u64>(d.num_rows) * pieces;
    u64 step = static_cast<u64>(num_blocks()) * kNumWarps;
    u64 item = static_cast<u64>(warp) * num_blocks() + block_index();
    for (u32 turn = 0; turn < kAhead && item + turn * step < total; ++turn) {
        start_load(piece_of(d, item + turn * step, pieces, kStageBytes), s.stage[warp][turn],
                   &s.loaded[warp][turn]);
    }
    for (u32 turn = 0; item < total; ++turn, item += step) {
        if (item + kAhead * step < total) {
            u32 next = (turn + kAhead) % kStages;
            bulk_wait_read<1>();  // the stores of all turns but the last have read their stages
            start_load(piece_of(d, item + kAhead * step, pieces, kStageBytes), s.stage[warp][next],
                       &s.loaded[warp][next]);
        }
        u32 stage = turn % kStages;
        while (!mbarrier_try_wait_parity(&s.loaded[warp][stage], turn / kStages & 1u)) poll_pause();
        Piece piece = piece_of(d, item, pieces, kStageBytes);
        bulk_store(piece.target, s.stage[warp][stage], piece.bytes);
        bulk_commit();
    }
    bulk_wait<0>();  // shared memory may vanish
}
