// dispatch_bulk: dispatch with the bulk copy engine of SM 90 and later.
//
// Rows go from memory to the stages of shared memory and on to their destinations: no register
// ever holds row data. Rows and bases are multiples of 16 bytes.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "dispatch/move_bulk.cuh"

struct PlainRows {
    static constexpr u32 kStageBytes = kDispatchStageBytes;
    const DispatchCommon& d;

    DEVICE_METHOD Pieces pieces() const { return cut_rows(d.row_bytes, 16u, kStageBytes, 0u); }

    DEVICE_METHOD void send_with_row(const CommParams& c, const CommShared& comm, u32 token,
                                     u32 row) const {
        send_metadata(c, comm, d, token, row);
    }

    DEVICE_METHOD u32 change(u8*, u32) const { return 0; }

    DEVICE_METHOD void send_with_piece(const CommParams&, const CommShared&, const Pieces&, u32,
                                       u32, u32) const {}
};
static_assert(sizeof(BulkShared<kDispatchStageBytes>) <= kDispatchBulkSharedBytes,
              "SHARED_HEAD in protocol/constants.py is small");

KERNEL dispatch_bulk(const GRID_CONSTANT DispatchBulkParams p) {
    dispatch_by_bulk(p.comm, p.d, PlainRows{p.d});
}
