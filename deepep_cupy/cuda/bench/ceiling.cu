// ceiling: what the links carry, by 16-byte loads and stores: the same copy for GPUs that have no
// bulk copy engine.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "asm/memory.cuh"
#include "asm/thread.cuh"
#include "bench/rows.cuh"

enum : u32 { kLanes = 32, kWords = 8, kPieceBytes = kLanes * kWords * 16 };

// All loads of a piece are under way before the first store waits for its word.
DEVICE void copy_piece(const Piece& piece) {
    Vec16 word[kWords];
    UNROLL
    for (u32 i = 0; i < kWords; ++i) {
        u32 offset = (i * kLanes + lane_index()) * 16;
        if (offset < piece.bytes) word[i] = ld_no_allocate_v4(piece.source + offset);
    }
    UNROLL
    for (u32 i = 0; i < kWords; ++i) {
        u32 offset = (i * kLanes + lane_index()) * 16;
        if (offset < piece.bytes) st_no_allocate_v4(piece.target + offset, word[i]);
    }
}

KERNEL ceiling(const GRID_CONSTANT CeilingParams p) {
    const CeilingCopy& d = p.d;
    u32 pieces = (d.row_bytes + kPieceBytes - 1) / kPieceBytes;
    u64 total = static_cast<u64>(d.num_rows) * pieces;
    u64 step = static_cast<u64>(num_blocks()) * kNumWarps;
    u64 item = static_cast<u64>(warp_index()) * num_blocks() + block_index();
    for (; item < total; item += step) copy_piece(piece_of(d, item, pieces, kPieceBytes));
}
