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

// row, weight: of the copy for choice `lane`; copies: one bit a choice.
template <class Number, int kBytes>
DEVICE void reduce_row(const ReduceCommon& d, u32 token, u32 row, f32 weight, u32 copies) {
    constexpr int kUnroll = kBytes < 16 ? 1 : 3;
    u32 units = d.row_bytes / kBytes;
    u8* out = d.out + static_cast<u64>(token) * d.row_bytes;
    for (u32 begin = 0; begin < units; begin += 32u * kUnroll) {
        typename Number::Sum sum[kUnroll];
        bool first = true;
        u32 rest = copies;
        while (rest != 0u) {
            // The loads of a batch first, so that they overlap; then the sums, in order.
            Vec16 piece[kBatch][kUnroll];
            f32 factor[kBatch];
            bool present[kBatch];
            UNROLL
            for (int j = 0; j < kBatch; ++j) {
                present[j] = rest != 0u;
                if (!present[j]) continue;
                u32 choice = lowest_bit(rest);
                rest &= rest - 1u;
                const u8* source = d.x + static_cast<u64>(warp_shuffle(row, choice)) * d.row_bytes;
                factor[j] = bits_to_f32(warp_shuffle(f32_to_bits(weight), choice));
                UNROLL
                for (int i = 0; i < kUnroll; ++i) {
                    u32 unit = begin + 32u * i + lane_index();
                    if (unit >= units) continue;
                    piece[j][i] =
                        read_local_narrow<kBytes>(source + static_cast<u64>(unit) * kBytes);
                }
            }
            UNROLL
            for (int j = 0; j < kBatch; ++j) {
                if (!present[j]) continue;
                UNROLL
                for (int i = 0; i < kUnroll; ++i) {
                    if (begin + 32u * i + lane_index() >= units) continue;
                    WeightedAdd<Number>::add(sum[i], piece[j][i], factor[j], first);
                }
                first = false;
            }
        }
        UNROLL
        for (int i = 0; i < kUnroll; ++i) {
            u32 unit = begin + 32u * i + lane_index();
            if (unit >= units) continue;
            write_narrow<kBytes>(out + static_cast<u64>(unit) * kBytes, Number::narrow(sum[i]));
        }
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
            if (d.access_bytes == 16) {
                reduce_row<Number, 16>(d, token, row, weight, copies);
            } else {
                reduce_row<Number, Number::kBytes>(d, token, row, weight, copies);
            }
        }
    }
};

KERNEL reduce_copies(const GRID_CONSTANT ReduceCopiesParams p) {
    with_number(p.d.dtype, ReduceTokens{p.d});
}
