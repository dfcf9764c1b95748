// quantize: rows of bfloat16, float16 or float32 become float8_e4m3fn, with a scale a group.
//
// A pass over this rank's own memory before its rows travel: no block waits for another. A warp
// takes a chunk of a row, some groups of 128 channels, with all its loads in flight at once.
//
//   rows               elements a lane and load    lanes a group    groups a chunk
//   16-bit, aligned    8 (16 bytes)                16               8
//   32-bit, aligned    4 (16 bytes)                32               4
//   not aligned        1                           32               4
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "common/access.cuh"
#include "common/grid_stride.cuh"
#include "quantize/codes.cuh"

DEVICE u32 groups_of_row(const QuantizeCommon& d) {
    return (d.hidden + kScaleGroup - 1) / kScaleGroup;
}

// Writes the scales of kGroups groups from `first` on; lane i brings that of group first + i.
template <u32 kGroups>
DEVICE void write_scales(const QuantizeCommon& d, u32 token, u32 first, u32 mine) {
    u32 group = first + lane_index();
    bool has = lane_index() < kGroups && group < groups_of_row(d);
    u32* scales = d.scales + static_cast<u64>(token) * d.scale_stride;
    if (d.cast.packed == 0u) {
        if (has) st_u32(scales + group, mine);
        return;
    }
    u32 word = pack_exponents(mine, has);
    if (has && lane_index() % 4 == 0) st_u32(scales + group / 4, word);
}

// ---- rows and bases of multiples of 16 bytes ----

template <class Input>
struct Aligned {
    static constexpr u32 kPer = 16 / Input::kBytes;         // elements a lane and load
    static constexpr u32 kLanes = kScaleGroup / kPer;       // lanes a group
    static constexpr u32 kGroupsPerLoad = 32 / kLanes;
    static constexpr u32 kLoads = 4;
    static constexpr u32 kGroups = kLoads * kGroupsPerLoad;

    DEVICE_MEMBER void cast(const QuantizeCommon& d, u32 token, u32 chunk) {
        u32 first_group = chunk * kGroups;
        u32 channel = first_group * kScaleGroup + lane_index() * kPer;
        const u8* row = d.x + static_cast<u64>(token) * d.hidden * Input::kBytes;
        u8* codes = d.codes + static_cast<u64>(token) * d.code_stride;
        Vec16 piece[kLoads];
        UNROLL
        for (u32 i = 0; i < kLoads; ++i) {
            u32 at = channel + i * 32u * kPer;
            piece[i] = Vec16{{0, 0, 0, 0}};
            if (at < d.hidden) piece[i] = read_local(row + static_cast<u64>(at) * Input::kBytes);
        }
        u32 mine = 0;
        UNROLL
        for (u32 i = 0; i < kLoads; ++i) {
            f32 largest = Input::largest(Input::larger(0, piece[i]));
            Scale scale = scale_of(d.cast, largest_of_lanes<kLanes>(largest));
            u32 sent = warp_shuffle(scale.sent, lane_index() % kGroupsPerLoad * kLanes);
            if (lane_index() / kGroupsPerLoad == i) mine = sent;
            u32 at = channel + i * 32u * kPer;
            if (at < d.hidden) write_narrow<kPer>(codes + at, codes_of<Input>(piece[i], scale.factor));
        }
        write_scales<kGroups>(d, token, first_group, mine);
    }
};

// ---- any rows: one element at a time ----

template <class Input>
struct Single {
    static constexpr u32 kGroups = 4;
    static constexpr u32 kPer = kScaleGroup / 32;  // elements a lane and group

    DEVICE_MEMBER void cast(const QuantizeCommon& d, u32 token, u32 chunk) {
        const u8* row = d.x + static_cast<u64>(token) * d.hidden * Input::kBytes;
        u8* codes = d.codes + static_cast<u64>(token) * d.code_stride;
        u32 mine = 0;
        NO_UNROLL
        for (u32 i = 0; i < kGroups; ++i) {
            u32 channel = (chunk * kGroups + i) * kScaleGroup + lane_index();
            f32 value[kPer];
            f32 largest = bits_to_f32(kFloor);
            UNROLL
            for (u32 j = 0; j < kPer; ++j) {
                u32 at = channel + j * 32u;
                value[j] = 0.0f;
                if (at < d.hidden) {
                    const u8* p = row + static_cast<u64>(at) * Input::kBytes;
                    value[j] = Input::element(read_local_narrow<Input::kBytes>(p), 0);
                }
                largest = max_f32(largest, abs_f32(value[j]));
            }
            Scale scale = scale_of(d.cast, largest_of_lanes<32>(largest));
            if (lane_index() == i) mine = scale.sent;
            UNROLL
            for (u32 j = 0; j < kPer; ++j) {
                u32 at = channel + j * 32u;
                u32 code = to_e4m3x2(0.0f, mul_rn_f32(value[j], scale.factor));
                if (at < d.hidden) st_u8(codes + at, static_cast<u8>(code));
            }
        }
        write_scales<kGroups>(d, token, chunk * kGroups, mine);
    }
};

template <class Way>
DEVICE void cast_rows(const QuantizeCommon& d) {
    u32 chunks = (groups_of_row(d) + Way::kGroups - 1) / Way::kGroups;
    for (Walk item = walk_table(chunks); item.outer < d.num_tokens; next_item(item)) {
        Way::cast(d, item.outer, item.inner);
    }
}

struct CastAll {
    const QuantizeCommon& d;

    template <class Input>
    DEVICE_METHOD void run() const {
        if (d.access_bytes == 16) {
            cast_rows<Aligned<Input>>(d);
        } else {
            cast_rows<Single<Input>>(d);
        }
    }
};

KERNEL quantize(const GRID_CONSTANT QuantizeParams p) {
    with_input(p.d.cast.dtype, CastAll{p.d});
}
