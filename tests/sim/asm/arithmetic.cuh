#pragma once
// Host form of kernels/cuda/asm/arithmetic.cuh.
#include "asm/types.cuh"

DEVICE f32 abs_f32(f32 value) { return __builtin_fabsf(value); }
DEVICE f32 max_f32(f32 a, f32 b) {
    if (a != a) return b;
    if (b != b) return a;
    return a > b ? a : b;
}
DEVICE f32 div_rn_f32(f32 a, f32 b) { return a / b; }
DEVICE f32 mul_rn_f32(f32 a, f32 b) { return a * b; }
