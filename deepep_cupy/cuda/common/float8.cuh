#pragma once
// float8_e4m3fn, by the instruction or, before SM 89, by integers; the same bits either way.
//
//   code          value
//   s eeee mmm    (1 + m / 8) * 2^(e - 7), or m / 8 * 2^-6 where e is 0; the largest, 0x7e, is 448
//   s 1111 111    NaN; there is no infinity
#include "asm/arithmetic.cuh"
#include "asm/convert.cuh"

// One code: nearest, ties to even, beyond 448 is 448 with its sign, NaN is 0x7f.
DEVICE u32 e4m3_by_integers(f32 value) {
    u32 bits = f32_to_bits(value);
    u32 sign = bits >> 24 & 0x80u;
    u32 magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fu;           // NaN
    if (magnitude >= 0x43e00000u) return sign | 0x7eu;   // 448 and more
    if (magnitude < 0x3c800000u) {                       // below 2^-6: multiples of 2^-9
        // Next to 2^14 the floats are 2^-9 apart: the addition rounds, in the low bits.
        u32 rounded = f32_to_bits(bits_to_f32(magnitude) + 16384.0f) - 0x46800000u;
        return sign | rounded;
    }
    u32 odd = magnitude >> 20 & 1u;
    return sign | (magnitude + 0x7ffffu + odd - 0x3c000000u) >> 20;
}

// Two codes, the second argument's in the low byte.
DEVICE u32 to_e4m3x2(f32 high, f32 low) {
    if constexpr (kHasCvtE4m3) return cvt_rn_satfinite_e4m3x2_f32(high, low);
    return e4m3_by_integers(high) << 8 | e4m3_by_integers(low);
}
