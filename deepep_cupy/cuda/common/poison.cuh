#pragma once
// What a failed operation leaves in its outputs: NaN in floats, 0 in integers, -1 in indices, so
// that no later kernel can take garbage for a result or for an index.
#include "common/fill.cuh"

// Where scales travel with the rows, the dtype code is kDtype... + kScalesFactor * kScales...

// The bytes of a poisoned element of a row: all bits set is NaN in every float type here.
DEVICE u8 poison_byte(u32 dtype) {
    if (dtype < 256u) dtype %= kScalesFactor;
    bool is_float = dtype == kDtypeBfloat16 || dtype == kDtypeFloat16 || dtype == kDtypeFloat32 ||
                    dtype == kDtypeFloat64 || dtype == kDtypeFloat8E4m3fn ||
                    dtype == kDtypeFloat8E5m2;
    return is_float ? 0xff : 0;
}
DEVICE u8 poison_byte_of_scales(u32 dtype) {
    return dtype / kScalesFactor == kScalesFloat32 ? 0xff : 0;
}
