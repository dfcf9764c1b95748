#pragma once
// Host form of cuda/asm/types.cuh.
#include "engine/device.h"

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;
using f32 = float;
using f64 = double;

struct alignas(16) Vec16 {
    u32 word[4];
};

#define DEVICE [[maybe_unused]] static inline
#define DEVICE_MEMBER static inline
#define DEVICE_METHOD inline
#define KERNEL extern "C" void
#define GRID_CONSTANT
#define UNROLL
#define NO_UNROLL

template <class Shared>
DEVICE Shared& shared_memory() {
    return *static_cast<Shared*>(sim::shared_base());
}
