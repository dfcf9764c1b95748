// stage: rows of ordinary memory to where the peers can read them, before a combine.
//
// Only rows that were really received, whose number no host knows here, and not those of this
// rank's own tokens, which it reads where they are.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "common/access.cuh"
#include "asm/thread.cuh"

// What is copied: all units but those of the rank's own rows.
struct PeerUnits {
    u64 before;  // units before the rank's own
    u64 own;
    u64 total;   // units to copy
};

DEVICE PeerUnits peer_units(const StageCommon& d, u64 units_per_row) {
    u64 before = 0;
    u64 own = 0;
    u64 rows = 0;
    for (u32 source = 0; source < kNumRanks; ++source) {
        u32 count = read_local_u32(d.rows_per_rank + source);
        if (source < d.rank) before += count;
        if (source == d.rank) own = count;
        rows += count;
    }
    return {before * units_per_row, own * units_per_row, (rows - own) * units_per_row};
}

template <int kBytes, int kUnroll>
DEVICE void copy_units(const StageCommon& d) {
    PeerUnits units = peer_units(d, d.row_bytes / kBytes);
    u64 stride = static_cast<u64>(num_blocks()) * kNumThreads;
    u64 begin = static_cast<u64>(block_index()) * kNumThreads + thread_index();
    for (u64 first = begin; first < units.total; first += stride * kUnroll) {
        // All loads, then all stores: kUnroll loads a thread are in flight.
        Vec16 piece[kUnroll];
        UNROLL
        for (int i = 0; i < kUnroll; ++i) {
            u64 unit = first + stride * i;
            if (unit >= units.total) continue;
            u64 place = unit < units.before ? unit : unit + units.own;
            piece[i] = read_local_narrow<kBytes>(d.x + place * kBytes);
        }
        UNROLL
        for (int i = 0; i < kUnroll; ++i) {
            u64 unit = first + stride * i;
            if (unit >= units.total) continue;
            u64 place = unit < units.before ? unit : unit + units.own;
            write_narrow<kBytes>(d.out + place * kBytes, piece[i]);
        }
    }
}

KERNEL stage(const GRID_CONSTANT StageParams p) {
    if (p.d.access_bytes == 16) {
        copy_units<16, 4>(p.d);
    } else if (p.d.access_bytes == 4) {
        copy_units<4, 4>(p.d);
    } else {
        copy_units<1, 4>(p.d);
    }
}
