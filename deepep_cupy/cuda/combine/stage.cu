// stage: rows of ordinary memory to where the peers can read them, before a combine.
//
// Only rows that were really received, whose number no host knows here, and not those of this
// rank's own tokens, which it reads where they are.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "asm/thread.cuh"
#include "common/access.cuh"
#include "common/rows.cuh"

struct OneTarget {
    u8* address;

    template <class RowChunk>
    DEVICE_METHOD void store(const RowChunk& chunk) const {
        chunk.store(address);
    }
};

// Copies `count` rows, from row `first` on, to the same rows of the target.
template <int kBytes, int kUnroll>
DEVICE void copy_rows(const StageCommon& d, u64 first, u64 count) {
    u64 stride = static_cast<u64>(num_blocks()) * kNumThreads;
    u64 mine = static_cast<u64>(block_index()) * kNumThreads + thread_index();
    u64 offset = first * d.row_bytes;
    u64 units = count * (d.row_bytes / kBytes);
    copy_units<kBytes, kUnroll, false>(d.x + offset, units, mine, stride, OneTarget{d.out + offset});
}

// All rows received, but this rank's own: those before them, then those behind.
template <int kBytes, int kUnroll>
DEVICE void copy_received(const StageCommon& d) {
    u64 rows = 0;
    u64 first[2] = {0, 0};
    u64 end[2] = {0, 0};
    for (u32 source = 0; source < kNumRanks; ++source) {
        if (source == d.rank) end[0] = rows;
        rows += read_local_u32(d.rows_per_rank + source);
        if (source == d.rank) first[1] = rows;
    }
    end[1] = rows;
    NO_UNROLL
    for (u32 part = 0; part < 2; ++part) {
        copy_rows<kBytes, kUnroll>(d, part == 0 ? first[0] : first[1],
                                   part == 0 ? end[0] - first[0] : end[1] - first[1]);
    }
}

KERNEL stage(const GRID_CONSTANT StageParams p) {
    if (p.d.access_bytes == 16) {
        copy_received<16, 4>(p.d);
    } else if (p.d.access_bytes == 4) {
        copy_received<4, 4>(p.d);
    } else {
        copy_received<1, 4>(p.d);
    }
}
