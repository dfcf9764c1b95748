// reduce_copies: each received token's copies in the expanded layout become one row.
//
// Copies are added by ascending choice, in the accumulator of common/numeric.cuh, and rounded once;
// an ordinary combine then takes the sums. One warp a token; a pass over this rank's own memory.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "common/access.cuh"
#include "common/grid_stride.cuh"
#include "combine/weighted_add.cuh"

constexpr int kBatch = 2;  // copies whose loads are in flight together

// One token's copies, by ascending choice. row, weight: of the copy for choice `lane`.
struct LocalCopies {
    const ReduceCommon& d;
    u32 row;
    f32 weight;
    u32 rest;  // choices still to come, a bit each

    DEVICE_METHOD bool more() const { return rest != 0u; }
    DEVICE_METHOD const u8* next(f32& factor) {
        u32 choice = lowest_bit(rest);
        rest &= rest - 1u;
        factor = bits_to_f32(warp_shuffle(f32_to_bits(weight), choice));
        return d.x + static_cast<u64>(warp_shuffle(row, choice)) * d.row_bytes;
    }
    template <int kBytes>
    DEVICE_MEMBER Vec16 read(const u8* p) {
        return read_local_narrow<kBytes>(p);
    }
};

template <class Number, int kBytes>
DEVICE void reduce_row(const ReduceCommon& d, u32 token, const LocalCopies& copies) {
    constexpr int kUnroll = kBytes < 16 ? 1 : 3;
    u32 units = d.row_bytes / kBytes;
    u8* out = d.out + static_cast<u64>(token) * d.row_bytes;
    for (u32 begin = 0; begin < units; begin += 32u * kUnroll) {
        typename Number::Sum sum[kUnroll];
        add_copies<Number, kBytes, kUnroll, kBatch>(sum, true, copies, out, begin, units);
    }
}

struct ReduceTokens {
    const ReduceCommon& d;

    template <class Number>
    DEVICE_METHOD void run() const {
        for (u32 token = first_item(); token < d.num_tokens; token += item_stride()) {
            bool chooses = lane_index() < d.num_topk;
            u64 entry = static_cast<u64>(token) * d.num_topk + lane_index();
            u32 row = chooses ? read_local_u32(d.expanded_row + entry) : ~0u;
            u32 copies = warp_ballot(row != ~0u);
            if (copies == 0u) continue;  // behind the tokens really received
            f32 weight = 1.0f;
            if (d.row_weights != nullptr && row != ~0u) {
                weight = bits_to_f32(read_local_u32(d.row_weights + row));
            }
            if (d.weights != nullptr && chooses) {
                st_u32(d.out_weights + entry, row != ~0u ? read_local_u32(d.weights + row) : 0u);
            }
            LocalCopies all = {d, row, weight, copies};
            if (d.access_bytes == 16) {
                reduce_row<Number, 16>(d, token, all);
            } else {
                reduce_row<Number, Number::kBytes>(d, token, all);
            }
        }
    }
};

KERNEL reduce_copies(const GRID_CONSTANT ReduceCopiesParams p) {
    with_number(p.d.dtype, ReduceTokens{p.d});
}
