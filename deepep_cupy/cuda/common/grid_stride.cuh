#pragma once
// Work dealt to the warps of the grid in turn, so that few items use many blocks.
#include "asm/thread.cuh"
#include "generated/prelude.cuh"

DEVICE u32 first_item() { return warp_index() * num_blocks() + block_index(); }
DEVICE u32 item_stride() { return num_blocks() * kNumWarps; }

// The items (outer, inner) of a table of so many columns, as one warp walks them: divisions at the
// start alone, and no product that could overflow.
struct Walk {
    u32 outer;
    u32 inner;
    u32 columns;
    u32 outer_step;
    u32 inner_step;
};
DEVICE Walk walk_table(u32 columns) {
    u32 first = first_item();
    u32 step = item_stride();
    return {first / columns, first % columns, columns, step / columns, step % columns};
}
DEVICE void next_item(Walk& walk) {
    walk.outer += walk.outer_step;
    walk.inner += walk.inner_step;
    if (walk.inner >= walk.columns) {
        walk.inner -= walk.columns;
        ++walk.outer;
    }
}
