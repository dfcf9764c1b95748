#pragma once
// How combine adds rows: sixteen bytes at a time, in the type the contract names.
//
// rows                 added in          and then
// bfloat16, float16    float32           rounded once to nearest even
// float32, float64     themselves        as they are
// integers             themselves        wrapping
//
// Compiled with -fmad=false and -ftz=false; every addition is one IEEE operation, in order.
#include "asm/convert.cuh"
#include "asm/types.cuh"
#include "generated/prelude.cuh"

// Each Number has: Sum (what a Vec16 becomes), kBytes (of one element), widen, add, narrow.

template <class Halves>
struct HalfNumber {
    static constexpr int kBytes = 2;
    struct Sum {
        f32 value[8];
    };
    DEVICE_MEMBER Sum widen(const Vec16& v) {
        Sum sum;
        UNROLL
        for (int i = 0; i < 4; ++i) {
            sum.value[2 * i] = Halves::to_f32(static_cast<u16>(v.word[i]));
            sum.value[2 * i + 1] = Halves::to_f32(static_cast<u16>(v.word[i] >> 16));
        }
        return sum;
    }
    DEVICE_MEMBER void add(Sum& sum, const Vec16& v) {
        Sum term = widen(v);
        UNROLL
        for (int i = 0; i < 8; ++i) sum.value[i] = sum.value[i] + term.value[i];
    }
    DEVICE_MEMBER Vec16 narrow(const Sum& sum) {
        Vec16 v;
        UNROLL
        for (int i = 0; i < 4; ++i) {
            v.word[i] = static_cast<u32>(Halves::from_f32(sum.value[2 * i])) |
                        static_cast<u32>(Halves::from_f32(sum.value[2 * i + 1])) << 16;
        }
        return v;
    }
};

struct Bfloat16Halves {
    DEVICE_MEMBER f32 to_f32(u16 bits) { return bits_to_f32(static_cast<u32>(bits) << 16); }
    DEVICE_MEMBER u16 from_f32(f32 value) { return cvt_rn_bf16_f32(value); }
};
struct Float16Halves {
    DEVICE_MEMBER f32 to_f32(u16 bits) { return cvt_f32_f16(bits); }
    DEVICE_MEMBER u16 from_f32(f32 value) { return cvt_rn_f16_f32(value); }
};
using Bfloat16 = HalfNumber<Bfloat16Halves>;
using Float16 = HalfNumber<Float16Halves>;

struct Float32 {
    static constexpr int kBytes = 4;
    struct Sum {
        f32 value[4];
    };
    DEVICE_MEMBER Sum widen(const Vec16& v) {
        Sum sum;
        UNROLL
        for (int i = 0; i < 4; ++i) sum.value[i] = bits_to_f32(v.word[i]);
        return sum;
    }
    DEVICE_MEMBER void add(Sum& sum, const Vec16& v) {
        UNROLL
        for (int i = 0; i < 4; ++i) sum.value[i] = sum.value[i] + bits_to_f32(v.word[i]);
    }
    DEVICE_MEMBER Vec16 narrow(const Sum& sum) {
        Vec16 v;
        UNROLL
        for (int i = 0; i < 4; ++i) v.word[i] = f32_to_bits(sum.value[i]);
        return v;
    }
};

struct Float64 {
    static constexpr int kBytes = 8;
    struct Sum {
        f64 value[2];
    };
    DEVICE_MEMBER f64 element(const Vec16& v, int i) {
        return bits_to_f64(v.word[2 * i] | static_cast<u64>(v.word[2 * i + 1]) << 32);
    }
    DEVICE_MEMBER Sum widen(const Vec16& v) { return {{element(v, 0), element(v, 1)}}; }
    DEVICE_MEMBER void add(Sum& sum, const Vec16& v) {
        UNROLL
        for (int i = 0; i < 2; ++i) sum.value[i] = sum.value[i] + element(v, i);
    }
    DEVICE_MEMBER Vec16 narrow(const Sum& sum) {
        u64 low = f64_to_bits(sum.value[0]);
        u64 high = f64_to_bits(sum.value[1]);
        return {{static_cast<u32>(low), static_cast<u32>(low >> 32), static_cast<u32>(high),
                 static_cast<u32>(high >> 32)}};
    }
};

// Elements of 1, 2 or 4 bytes, several to a word: kHigh has the top bit of each element. Adding
// without the top bits cannot carry into a neighbour; the top bits are added without carry.
template <int kElementBytes, u32 kHigh>
struct PackedInteger {
    static constexpr int kBytes = kElementBytes;
    using Sum = Vec16;
    DEVICE_MEMBER Sum widen(const Vec16& v) { return v; }
    DEVICE_MEMBER void add(Sum& sum, const Vec16& v) {
        UNROLL
        for (int i = 0; i < 4; ++i) {
            u32 a = sum.word[i];
            u32 b = v.word[i];
            sum.word[i] = ((a & ~kHigh) + (b & ~kHigh)) ^ ((a ^ b) & kHigh);
        }
    }
    DEVICE_MEMBER Vec16 narrow(const Sum& sum) { return sum; }
};
using Integer8 = PackedInteger<1, 0x80808080u>;
using Integer16 = PackedInteger<2, 0x80008000u>;
using Integer32 = PackedInteger<4, 0x80000000u>;

struct Integer64 {
    static constexpr int kBytes = 8;
    using Sum = Vec16;
    DEVICE_MEMBER Sum widen(const Vec16& v) { return v; }
    DEVICE_MEMBER void add(Sum& sum, const Vec16& v) {
        UNROLL
        for (int i = 0; i < 4; i += 2) {
            u64 a = sum.word[i] | static_cast<u64>(sum.word[i + 1]) << 32;
            u64 b = v.word[i] | static_cast<u64>(v.word[i + 1]) << 32;
            sum.word[i] = static_cast<u32>(a + b);
            sum.word[i + 1] = static_cast<u32>((a + b) >> 32);
        }
    }
    DEVICE_MEMBER Vec16 narrow(const Sum& sum) { return sum; }
};

// Calls work.run<Number>() for the Number of a dtype code.
template <class Work>
DEVICE void with_number(u32 dtype, const Work& work) {
    switch (dtype) {
        case kDtypeBfloat16: work.template run<Bfloat16>(); break;
        case kDtypeFloat16: work.template run<Float16>(); break;
        case kDtypeFloat32: work.template run<Float32>(); break;
        case kDtypeFloat64: work.template run<Float64>(); break;
        case kDtypeInt8:
        case kDtypeUint8: work.template run<Integer8>(); break;
        case kDtypeInt16:
        case kDtypeUint16: work.template run<Integer16>(); break;
        case kDtypeInt32:
        case kDtypeUint32: work.template run<Integer32>(); break;
        default: work.template run<Integer64>(); break;
    }
}
