#pragma once
// Conversions between float and its short forms; all round to nearest even, none flushes.
#include "asm/types.cuh"

DEVICE f32 bits_to_f32(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 f32_to_bits(f32 value) { return __float_as_uint(value); }
DEVICE f64 bits_to_f64(u64 bits) { return __longlong_as_double(static_cast<long long>(bits)); }
DEVICE u64 f64_to_bits(f64 value) { return static_cast<u64>(__double_as_longlong(value)); }

DEVICE f32 cvt_f32_f16(u16 half) {
    f32 v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(half));
    return v;
}
DEVICE u16 cvt_rn_f16_f32(f32 value) {
    u16 v;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(value));
    return v;
}
DEVICE u16 cvt_rn_bf16_f32(f32 value) {
    u16 v;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(value));
    return v;
}

// Is there an instruction for float8_e4m3fn? Where there is none: common/float8.cuh.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr bool kHasCvtE4m3 = false;
#else
constexpr bool kHasCvtE4m3 = true;
#endif

// Two codes, the second argument's in the low byte; beyond 448 is 448, NaN is 0x7f.
DEVICE u16 cvt_rn_satfinite_e4m3x2_f32(f32 high, f32 low) {
    u16 v;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
    return v;
}
