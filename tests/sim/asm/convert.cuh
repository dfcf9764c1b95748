#pragma once
// Host form of cuda/asm/convert.cuh: the same bits, NaN payloads included.
#include "asm/types.cuh"

DEVICE f32 bits_to_f32(u32 bits) { return __builtin_bit_cast(f32, bits); }
DEVICE u32 f32_to_bits(f32 value) { return __builtin_bit_cast(u32, value); }
DEVICE f64 bits_to_f64(u64 bits) { return __builtin_bit_cast(f64, bits); }
DEVICE u64 f64_to_bits(f64 value) { return __builtin_bit_cast(u64, value); }

DEVICE f32 cvt_f32_f16(u16 half) {
    u32 sign = (half & 0x8000u) << 16;
    u32 exponent = half >> 10 & 0x1fu;
    u32 fraction = half & 0x3ffu;
    if (exponent == 31) return bits_to_f32(sign | (fraction ? 0x7fffffffu : 0x7f800000u));
    if (exponent == 0) {
        f32 magnitude = static_cast<f32>(fraction) * 0x1p-24f;
        return bits_to_f32(sign | f32_to_bits(magnitude));
    }
    return bits_to_f32(sign | (exponent + 112u) << 23 | fraction << 13);
}
DEVICE u16 cvt_rn_f16_f32(f32 value) {
    u32 bits = f32_to_bits(value);
    u32 sign = bits >> 16 & 0x8000u;
    u32 magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return static_cast<u16>(sign | 0x7c00u);  // 65520 and more
    if (magnitude < 0x38800000u) {                                          // subnormal or zero
        // Adding 0.5 rounds to a multiple of 2^-24, to nearest even, in the low bits.
        u32 rounded = f32_to_bits(bits_to_f32(magnitude) + 0.5f) - 0x3f000000u;
        return static_cast<u16>(sign | rounded);
    }
    u32 odd = magnitude >> 13 & 1u;
    return static_cast<u16>(sign | (magnitude - 0x38000000u + 0xfffu + odd) >> 13);
}
DEVICE u16 cvt_rn_bf16_f32(f32 value) {
    u32 bits = f32_to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

constexpr bool kHasCvtE4m3 = true;

// The code of one float: the nearest of the 127 magnitudes, of two equally near ones the even one.
DEVICE u32 nearest_e4m3(f32 value) {
    if (value != value) return 0x7fu;
    u32 sign = f32_to_bits(value) >> 24 & 0x80u;
    f64 magnitude = bits_to_f32(f32_to_bits(value) & 0x7fffffffu);
    if (magnitude > 448.0) return sign | 0x7eu;
    u32 best = 0;
    f64 best_distance = magnitude;
    for (u32 code = 1; code <= 0x7eu; ++code) {
        f64 fraction = code < 8 ? (code & 7u) / 8.0 : 1.0 + (code & 7u) / 8.0;
        f64 power = static_cast<f64>(1u << (code < 8 ? 1 : code >> 3)) / 128.0;
        f64 distance = __builtin_fabs(magnitude - fraction * power);
        if (distance < best_distance || (distance == best_distance && (code & 1u) == 0)) {
            best = code;
            best_distance = distance;
        }
    }
    return sign | best;
}
DEVICE u16 cvt_rn_satfinite_e4m3x2_f32(f32 high, f32 low) {
    return static_cast<u16>(nearest_e4m3(high) << 8 | nearest_e4m3(low));
}
