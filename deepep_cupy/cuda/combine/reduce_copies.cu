// reduce_copies: each received token's copies in the expanded layout become one row.
//
// Copies are added by ascending choice, in the accumulator of common/numeric.cuh, and rounded once;
// an ordinary combine then takes the sums. A pass over this rank's own memory: a warp a token where
// there are many, else a row is spread over as many warps as there are for it.
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

// Units a lane takes at once, and a warp.
template <int kBytes>
constexpr int kUnroll = kBytes < 16 ? 1 : 3;
template <int kBytes>
constexpr u32 kChunk = 32u * kUnroll<kBytes>;

// Every `pieces`-th chunk of a row, from chunk `piece` on.
template <class Number, int kBytes>
DEVICE void reduce_piece(const ReduceCommon& d, u32 token, u32 piece, u32 pieces,
                         const LocalCopies& copies) {
    u32 units = d.row_bytes / kBytes;
    u8* out = d.out + static_cast<u64>(token) * d.row_bytes;
    for (u32 begin = kChunk<kBytes> * piece; begin < units; begin += kChunk<kBytes> * pieces) {
        typename Number::Sum sum[kUnroll<kBytes>];
        add_copies<Number, kBytes, kUnroll<kBytes>, kBatch>(sum, true, copies, out, begin, units);
    }
}

template <class Number, int kBytes>
DEVICE void reduce_tokens(const ReduceCommon& d) {
    u32 chunks = (d.row_bytes / kBytes + kChunk<kBytes> - 1u) / kChunk<kBytes>;
    u32 warps = d.num_tokens == 0u ? 0u : item_stride() / d.num_tokens;
    u32 pieces = warps < 1u || chunks < 1u ? 1u : warps < chunks ? warps : chunks;
    for (Walk item = walk_table(pieces); item.outer < d.num_tokens; next_item(item)) {
        u32 token = item.outer;
        bool chooses = lane_index() < d.num_topk;
        u64 entry = static_cast<u64>(token) * d.num_topk + lane_index();
        u32 row = chooses ? read_local_u32(d.expanded_row + entry) : ~0u;
        u32 copies = warp_ballot(row != ~0u);
        if (copies == 0u) continue;  // behind the tokens really received
        f32 weight = 1.0f;
        if (d.row_weights != nullptr && row != ~0u) {
            weight = bits_to_f32(read_local_u32(d.row_weights + row));
        }
        if (d.weights != nullptr && chooses && item.inner == 0u) {
            st_u32(d.out_weights + entry, row != ~0u ? read_local_u32(d.weights + row) : 0u);
        }
        reduce_piece<Number, kBytes>(d, token, item.inner, pieces, {d, row, weight, copies});
    }
}

struct ReduceTokens {
    const ReduceCommon& d;

    template <class Number>
    DEVICE_METHOD void run() const {
        if (d.access_bytes == 16) {
            reduce_tokens<Number, 16>(d);
        } else {
            reduce_tokens<Number, Number::kBytes>(d);
        }
    }
};

KERNEL reduce_copies(const GRID_CONSTANT ReduceCopiesParams p) {
    with_number(p.d.dtype, ReduceTokens{p.d});
}
