// What the links carry: rows from one place to another by the bulk copy engine, with no handshake
// and nothing else around it. Pushed when `to` lies on the peers, pulled when `from` does.
#include "asm/types.cuh"
#include "asm/bulk.cuh"
#include "asm/thread.cuh"

enum : u32 { kNumThreads = 512, kNumWarps = 16, kStages = 4, kAhead = 2, kStageBytes = 3584 };

struct Shared {
    u64 loaded[kNumWarps][kStages];
    alignas(128) u8 stage[kNumWarps][kStages][kStageBytes];
};

// Segments of `rows` rows: segment i is copied from from[i] to to[i].
struct Copy {
    const u64* from;
    const u64* to;
    u32 segments;
    u32 rows;
    u32 row_bytes;
    u32 pieces;  // a row
};

// Where a piece lies within its segment, and how long it is.
struct Piece {
    u32 segment;
    u64 offset;
    u32 bytes;
};
DEVICE Piece piece_of(const Copy& c, u64 item) {
    u64 row = item / c.pieces;
    u32 begin = static_cast<u32>(item % c.pieces) * kStageBytes;
    u32 rest = c.row_bytes - begin;
    return {static_cast<u32>(row % c.segments), row / c.segments * c.row_bytes + begin,
            rest < kStageBytes ? rest : static_cast<u32>(kStageBytes)};
}

DEVICE void start_load(const Copy& c, u64 item, u8* stage, u64* loaded) {
    Piece piece = piece_of(c, item);
    mbarrier_arrive_expect_bytes(loaded, piece.bytes);
    bulk_load(stage, reinterpret_cast<const u8*>(c.from[piece.segment]) + piece.offset,
              piece.bytes, loaded);
}

KERNEL ceiling_copy(const u64* from, const u64* to, u32 segments, u32 rows, u32 row_bytes) {
    Shared& s = shared_memory<Shared>();
    if (lane_index() != 0) return;
    u32 warp = warp_index();
    for (u32 stage = 0; stage < kStages; ++stage) mbarrier_init(&s.loaded[warp][stage], 1);
    fence_mbarrier_init();
    Copy c = {from, to, segments, rows, row_bytes, (row_bytes + kStageBytes - 1) / kStageBytes};
    u64 total = static_cast<u64>(segments) * rows * c.pieces;
    u64 step = static_cast<u64>(num_blocks()) * kNumWarps;
    u64 item = static_cast<u64>(warp) * num_blocks() + block_index();
    for (u32 turn = 0; turn < kAhead && item + turn * step < total; ++turn) {
        start_load(c, item + turn * step, s.stage[warp][turn], &s.loaded[warp][turn]);
    }
    for (u32 turn = 0; item < total; ++turn, item += step) {
        if (item + kAhead * step < total) {
            u32 next = (turn + kAhead) % kStages;
            bulk_wait_read<1>();  // the stores of all turns but the last have read their stages
            start_load(c, item + kAhead * step, s.stage[warp][next], &s.loaded[warp][next]);
        }
        u32 stage = turn % kStages;
        while (!mbarrier_try_wait_parity(&s.loaded[warp][stage], turn / kStages & 1u)) {
        }
        Piece piece = piece_of(c, item);
        bulk_store(reinterpret_cast<u8*>(c.to[piece.segment]) + piece.offset, s.stage[warp][stage],
                   piece.bytes);
        bulk_commit();
    }
    bulk_wait<0>();
}
