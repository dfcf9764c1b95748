#pragma once
// Host form of cuda/asm/arithmetic.cuh.
#include "asm/types.cuh"

DEVICE f32 abs_f32(f32 value) { return __builtin_fabsf(value); }
DEVICE f32 max_f32(f32 a, f32 b) {
    if (a != a) return b;
    if (b != b) return a;
    return a > b ? a : b;
}
// The larger magnitude of two halves, a NaN giving way; with a sign that nobody may rely on.
DEVICE u32 max_magnitude_of_halves(u32 a, u32 b, u32 infinity) {
    u32 sign = (a ^ b) & 0x8000u;
    a &= 0x7fffu;
    b &= 0x7fffu;
    if (a > infinity) a = b > infinity ? 0x7fffu : 0u;
    if (b > infinity) b = 0u;
    return sign | (a > b ? a : b);
}
DEVICE u32 max_magnitude_bf16x2(u32 a, u32 b) {
    return max_magnitude_of_halves(a >> 16, b >> 16, 0x7f80u) << 16 |
           max_magnitude_of_halves(a & 0xffffu, b & 0xffffu, 0x7f80u);
}
DEVICE u32 max_magnitude_f16x2(u32 a, u32 b) {
    return max_magnitude_of_halves(a >> 16, b >> 16, 0x7c00u) << 16 |
           max_magnitude_of_halves(a & 0xffffu, b & 0xffffu, 0x7c00u);
}
DEVICE f32 div_rn_f32(f32 a, f32 b) { return a / b; }
DEVICE f32 mul_rn_f32(f32 a, f32 b) { return a * b; }
