#pragma once
// The scale of a group of channels, step by step as reference/quant.py says it.
#include "asm/arithmetic.cuh"
#include "asm/convert.cuh"
#include "asm/thread.cuh"
#include "generated/prelude.cuh"

constexpr u32 kFloor = 0x38d1b717u;    // 1e-4, where the largest magnitude begins
constexpr u32 kInverse = 0x3b124925u;  // the float32 next to 1 / 448

struct Scale {
    f32 factor;  // what elements are multiplied with
    u32 sent;    // what travels: the bits of a float32, or a biased exponent
};

DEVICE Scale scale_of(const Cast& cast, f32 largest) {
    f32 inverse = mul_rn_f32(largest, bits_to_f32(kInverse));
    if (cast.round_scale == 0u) {
        return {div_rn_f32(448.0f, largest), f32_to_bits(inverse)};
    }
    // The power of two that is not below it.
    u32 bits = f32_to_bits(inverse);
    u32 exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0u ? 1u : 0u);
    u32 factor = exponent < 255u ? (254u - exponent) << 23 : 0u;
    return {bits_to_f32(factor), cast.packed != 0u ? exponent : exponent << 23};
}

// Four exponents to a word, the first in the lowest byte; those of missing groups are 0. Lane i
// brings that of group i, and a lane 4 * i gets word i.
DEVICE u32 pack_exponents(u32 mine, bool has) {
    u32 word = has ? mine << lane_index() % 4 * 8 : 0u;
    word |= warp_shuffle(word, lane_index() ^ 1u);
    word |= warp_shuffle(word, lane_index() ^ 2u);
    return word;
}

// The largest value of kLanes neighbouring lanes, in all of them. No value is NaN.
template <u32 kLanes>
DEVICE f32 largest_of_lanes(f32 value) {
    UNROLL
    for (u32 distance = kLanes / 2; distance > 0; distance /= 2) {
        u32 other = warp_shuffle(f32_to_bits(value), lane_index() ^ distance);
        value = max_f32(value, bits_to_f32(other));
    }
    return value;
}
