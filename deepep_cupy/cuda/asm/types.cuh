#pragma once
// Fixed-width names, and the few spellings that differ between a GPU and the simulator.
//
// Everything under asm/ has a second form for the simulator (tests/sim/asm/, same file names, same
// signatures): kernel text above this folder is plain C++ and compiles for both.

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

// Sixteen bytes: what one thread moves at a time.
struct alignas(16) Vec16 {
    u32 word[4];
};

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER static __device__ __forceinline__
#define DEVICE_METHOD __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
#define GRID_CONSTANT __grid_constant__
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")

// The block's shared memory, one struct a kernel; its size is a launch argument.
template <class Shared>
DEVICE Shared& shared_memory() {
    extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];
    return *reinterpret_cast<Shared*>(dynamic_shared_memory);
}
