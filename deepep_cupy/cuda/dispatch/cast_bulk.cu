// dispatch_cast_bulk: dispatch of bfloat16, float16 or float32 rows that become float8_e4m3fn on
// their way, with the bulk copy engine of SM 90 and later.
//
// A rank's rows are read once, by bulk loads; a warp casts each piece in its stage, sends the
// scales with ordinary stores, and hands the codes to the engine. To its peers it is a dispatch of
// FP8 rows with scales, byte for byte. Rows of x and of codes are multiples of 16 bytes.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "dispatch/move_bulk.cuh"
#include "quantize/in_place.cuh"

// Lane g has the scale of group g, and what is to be multiplied with it.
struct CastPiece {
    const Cast& cast;
    u8* stage;
    u32 bytes;
    u32& sent;

    template <class Input>
    DEVICE_METHOD void run() const {
        Scale scale = scale_of_group<Input>(cast, stage, bytes);
        write_codes_in_place<Input>(stage, bytes, scale.factor);
        sent = scale.sent;  // PLANT(scale_sent)
    }
};

struct CastRows {
    static constexpr u32 kStageBytes = kCastStageBytes;
    const DispatchCommon& d;
    const Cast& cast;

    DEVICE_METHOD Pieces pieces() const {
        u32 shift = cast.dtype == kDtypeFloat32 ? 2u : 1u;
        return cut_rows(d.row_bytes << shift, kCastUnit << shift, kStageBytes, shift);
    }

    DEVICE_METHOD void send_with_row(const CommParams& c, const CommShared& comm, u32 token,
                                     u32 row) const {
        send_choices(c, comm, d, token, row);
    }

    // While the engine still reads the piece before. Returns the scale of group g in lane g.
    DEVICE_METHOD u32 change(u8* stage, u32 bytes) const {
        u32 sent = 0;
        with_input(cast.dtype, CastPiece{cast, stage, bytes, sent});
        // The engine reads what all lanes wrote, and later writes what all lanes read: a proxy
        // fence in each of them, then the warp barrier before the lane that drives it.
        fence_proxy_async_shared();  // PLANT(proxy_fence_after_codes)
        warp_barrier();  // PLANT(warp_barrier_after_codes)
        return sent;
    }

    // Scales, a word for each group or, packed, for each four.
    DEVICE_METHOD void send_with_piece(const CommParams& c, const CommShared& comm,
                                       const Pieces& pieces, u32 piece, u32 row,
                                       u32 scale) const {
        u32 channels = piece_length(pieces, piece) >> pieces.shift;
        bool has = lane_index() < (channels + kScaleGroup - 1) / kScaleGroup;
        u32 word = piece * (pieces.bytes >> pieces.shift) / kScaleGroup + lane_index();
        if (cast.packed != 0u) {
            scale = pack_exponents(scale, has);
            has = has && word % 4 == 0;
            word /= 4;
        }
        send_words(c, comm, d, row, word, has, scale);
    }
};
static_assert(sizeof(BulkShared<kCastStageBytes>) <= kDispatchCastBulkSharedBytes,
              "SHARED_HEAD in protocol/constants.py is small");

KERNEL dispatch_cast_bulk(const GRID_CONSTANT DispatchCastBulkParams p) {
    dispatch_by_bulk(p.comm, p.d.sent, CastRows{p.d.sent, p.d.cast});
}
