// expand_copy: each received row, its weights and its scales to the rows of its copies.
//
// One warp a token; a row is read once for all its copies. The same kernel zeroes the rows that
// fill up an expert's rows to a multiple of the alignment.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "common/access.cuh"
#include "common/poison.cuh"
#include "common/rows.cuh"
#include "common/grid_stride.cuh"

// Where a token's copies lie. row: of the copy for choice `lane`; copies: choices, one bit each.
struct CopyRows {
    const ExpandCopyCommon& d;
    u32 row;
    u32 copies;

    template <class RowChunk>
    DEVICE_METHOD void store(const RowChunk& chunk) const {
        for (u32 rest = copies; rest != 0u; rest &= rest - 1u) {
            u64 there = warp_shuffle(row, lowest_bit(rest));
            chunk.store(d.out + there * d.row_bytes);
        }
    }
};

// row: of the copy for choice `lane`, ~0 where there is none; copies: one bit a choice.

template <int kBytes, int kUnroll>
DEVICE void copy_row(const ExpandCopyCommon& d, u32 token, u32 row, u32 copies) {
    const u8* source = d.rows + static_cast<u64>(token) * d.row_bytes;
    u32 units = d.row_bytes / kBytes;
    copy_units<kBytes, kUnroll, false>(source, units, lane_index(), 32u,
                                       CopyRows{d, row, copies});
}

DEVICE void copy_scales(const ExpandCopyCommon& d, u32 token, u32 row, u32 copies) {
    for (u32 first = 0; first < d.num_scales; first += 32u) {
        u32 column = first + lane_index();
        bool mine = column < d.num_scales;
        u32 word = 0;
        if (mine) word = read_local_u32(d.scales + static_cast<u64>(token) * d.num_scales + column);
        for (u32 rest = copies; rest != 0u; rest &= rest - 1u) {
            u64 there = warp_shuffle(row, lowest_bit(rest));
            if (mine) st_u32(d.out_scales + there * d.num_scales + column, word);
        }
    }
}

template <int kBytes, int kUnroll>
DEVICE void copy_tokens(const ExpandCopyCommon& d) {
    for (u32 token = first_item(); token < d.num_tokens; token += item_stride()) {
        u64 entry = static_cast<u64>(token) * d.num_topk + lane_index();
        u32 row = ~0u;
        if (lane_index() < d.num_topk) row = read_local_u32(d.expanded_row + entry);
        u32 copies = warp_ballot(row != ~0u);
        if (copies == 0u) continue;  // behind the tokens really received
        if (d.weights != nullptr && row != ~0u) {
            st_u32(d.out_weights + row, read_local_u32(d.weights + entry));
        }
        copy_row<kBytes, kUnroll>(d, token, row, copies);
        copy_scales(d, token, row, copies);
    }
}

// ---- padding ----

template <int kBytes>
DEVICE void zero_row(const ExpandCopyCommon& d, u64 row) {
    u8* target = d.out + row * d.row_bytes;
    for (u32 unit = lane_index(); unit < d.row_bytes / kBytes; unit += 32u) {
        write_narrow<kBytes>(target + static_cast<u64>(unit) * kBytes, Vec16{{0, 0, 0, 0}});
    }
    if (d.weights != nullptr && lane_index() == 0) st_u32(d.out_weights + row, 0u);
    for (u32 column = lane_index(); column < d.num_scales; column += 32u) {
        st_u32(d.out_scales + row * d.num_scales + column, 0u);
    }
}

// An expert has at most alignment - 1 such rows; each is one item of work.
template <int kBytes>
DEVICE void zero_padding(const ExpandCopyCommon& d) {
    if (d.zero_padding == 0u || d.alignment < 2) return;
    Walk item = walk_table(d.alignment - 1);
    for (; item.outer < d.num_local_experts; next_item(item)) {
        u32 count = read_local_u32(d.expert_counts + item.outer);
        u32 padded = (count + d.alignment - 1) / d.alignment * d.alignment;
        if (item.inner >= padded - count) continue;
        u32 end = read_local_u32(d.psum_expert_rows + item.outer);
        zero_row<kBytes>(d, static_cast<u64>(end) + item.inner);
    }
}

template <int kBytes, int kUnroll>
DEVICE void expand(const ExpandCopyCommon& d) {
    copy_tokens<kBytes, kUnroll>(d);
    zero_padding<kBytes>(d);
}

DEVICE void poison(const ExpandCopyCommon& d) {
    u32 share = block_index();
    u32 shares = num_blocks();
    fill_bytes(d.out, d.num_rows * d.row_bytes, poison_byte(d.dtype), share, shares);
    if (d.weights != nullptr) {
        fill_bytes(reinterpret_cast<u8*>(d.out_weights), d.num_rows * 4u, 0xff, share, shares);
    }
    if (d.num_scales != 0u) {
        fill_bytes(reinterpret_cast<u8*>(d.out_scales), d.num_rows * d.num_scales * 4u,
                   poison_byte_of_scales(d.dtype), share, shares);
    }
}

KERNEL expand_copy(const GRID_CONSTANT ExpandCopyParams p) {
    if (read_local_u32(p.d.birth) == 0u) {
        poison(p.d);
    } else if (p.d.access_bytes == 16) {
        expand<16, 8>(p.d);
    } else if (p.d.access_bytes == 4) {
        expand<4, 4>(p.d);
    } else {
        expand<1, 4>(p.d);
    }
}
