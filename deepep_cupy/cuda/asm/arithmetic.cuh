#pragma once
// Float arithmetic whose instruction matters. None flushes, whatever the compiler is told.
#include "asm/types.cuh"

DEVICE f32 abs_f32(f32 value) {
    f32 v;
    asm("abs.f32 %0, %1;" : "=f"(v) : "f"(value));
    return v;
}
// The larger one; of a number and a NaN, the number.
DEVICE f32 max_f32(f32 a, f32 b) {
    f32 v;
    asm("max.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}
// The larger magnitude, of two pairs of 16-bit floats at once; of a number and a NaN, the number's.
// The sign says nothing: from SM 86 on one instruction does it, and leaves any.
DEVICE u32 max_magnitude_bf16x2(u32 a, u32 b) {
    u32 v;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 860
    asm("max.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
#else
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
#endif
    return v;
}
DEVICE u32 max_magnitude_f16x2(u32 a, u32 b) {
    u32 v;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 860
    asm("max.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
#else
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
#endif
    return v;
}
// IEEE division.
DEVICE f32 div_rn_f32(f32 a, f32 b) {
    f32 v;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}
// One rounding; never part of a fused multiply-add.
DEVICE f32 mul_rn_f32(f32 a, f32 b) {
    f32 v;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}
