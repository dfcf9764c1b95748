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
