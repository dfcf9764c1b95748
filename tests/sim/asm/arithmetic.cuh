#pragma once
// Host form of kernels/cuda/asm/arithmetic.cuh.
#include "asm/types.cuh"

DEVICE f32 abs_f32(f32 value) { return __builtin_fabsf(value); }
DEVICE f32 max_f32(f32 a, f32 b) {
    if (a != a) return b;
    if (b != b) return a;
    return a > b ? a : b;
}
DEVICE u32 abs_bf16x2(u32 value) { return value & 0x7fff7fffu; }
DEVICE u32 abs_f16x2(u32 value) { return value & 0x7fff7fffu; }
// Sign and magnitude to a number that grows with the value; a NaN gives way to the other half.
DEVICE i32 rank_of_half(u32 half) {
    i32 magnitude = static_cast<i32>(half & 0x7fffu);
    return (half & 0x8000u) != 0 ? -magnitude : magnitude;
}
DEVICE u32 max_of_halves(u32 a, u32 b, u32 infinity) {
    if ((a & 0x7fffu) > infinity) return (b & 0x7fffu) > infinity ? 0x7fffu : b;
    if ((b & 0x7fffu) > infinity) return a;
    return rank_of_half(a) > rank_of_half(b) ? a : b;
}
DEVICE u32 max_bf16x2(u32 a, u32 b) {
    return max_of_halves(a >> 16, b >> 16, 0x7f80u) << 16 |
           max_of_halves(a & 0xffffu, b & 0xffffu, 0x7f80u);
}
DEVICE u32 max_f16x2(u32 a, u32 b) {
    return max_of_halves(a >> 16, b >> 16, 0x7c00u) << 16 |
           max_of_halves(a & 0xffffu, b & 0xffffu, 0x7c00u);
}
DEVICE f32 div_rn_f32(f32 a, f32 b) { return a / b; }
DEVICE f32 mul_rn_f32(f32 a, f32 b) { return a * b; }
