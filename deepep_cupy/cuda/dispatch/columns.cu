// columns: received scales from row-major to column-major order.
//
// One warp takes 32 rows, a row a lane: stores of a column are contiguous, and the few words of a
// row that one load brings into L1 serve the columns that follow.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "common/access.cuh"
#include "common/grid_stride.cuh"

KERNEL columns(const GRID_CONSTANT ColumnsParams p) {
    const ColumnsCommon& d = p.d;
    // Rows behind the real ones have no content.
    u32 rows = d.real_rows == nullptr ? d.num_rows : read_local_u32(d.real_rows);
    for (u32 item = first_item(); item * 32u < rows; item += item_stride()) {
        u32 row = item * 32u + lane_index();
        if (row >= rows) continue;
        const u32* source = d.scales + static_cast<u64>(row) * d.num_scales;
        for (u32 column = 0; column < d.num_scales; ++column) {
            st_u32(d.out + static_cast<u64>(column) * d.num_rows + row, ld_u32(source + column));
        }
    }
}
