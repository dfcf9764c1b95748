#pragma once
// Sixteen bytes of a row at a time: their largest magnitude, and their codes.
#include "asm/arithmetic.cuh"
#include "common/float8.cuh"
#include "common/numeric.cuh"
#include "quantize/scale.cuh"

// Each Input has: kBytes (of one element); element(); and the largest magnitude of any number of
// Vec16, found word by word: larger() of what has been `Seen` and one more, at the end largest().
// A NaN is passed over, as the number beside it is taken, and kFloor is left where all are NaN.

template <class Halves>
struct HalfInput {
    static constexpr u32 kBytes = 2;
    using Seen = u32;  // of the even and of the odd elements
    DEVICE_MEMBER f32 element(const Vec16& v, u32 i) {
        return Halves::to_f32(static_cast<u16>(v.word[i / 2] >> i % 2 * 16));
    }
    DEVICE_MEMBER u32 larger(u32 seen, const Vec16& v) {
        u32 first = Halves::larger_x2(v.word[0], v.word[1]);
        u32 second = Halves::larger_x2(v.word[2], v.word[3]);
        return Halves::larger_x2(seen, Halves::larger_x2(first, second));
    }
    DEVICE_MEMBER f32 largest(u32 seen) {
        f32 even = Halves::to_f32(static_cast<u16>(seen & 0x7fffu));
        f32 odd = Halves::to_f32(static_cast<u16>(seen >> 16 & 0x7fffu));
        return max_f32(bits_to_f32(kFloor), max_f32(even, odd));
    }
};
struct Bfloat16Cast : Bfloat16Halves {
    DEVICE_MEMBER u32 larger_x2(u32 a, u32 b) { return max_magnitude_bf16x2(a, b); }
};
struct Float16Cast : Float16Halves {
    DEVICE_MEMBER u32 larger_x2(u32 a, u32 b) { return max_magnitude_f16x2(a, b); }
};
struct WordInput {
    static constexpr u32 kBytes = 4;
    using Seen = f32;
    DEVICE_MEMBER f32 element(const Vec16& v, u32 i) { return bits_to_f32(v.word[i]); }
    DEVICE_MEMBER f32 larger(f32 seen, const Vec16& v) {
        f32 first = max_f32(abs_f32(element(v, 0)), abs_f32(element(v, 1)));
        f32 second = max_f32(abs_f32(element(v, 2)), abs_f32(element(v, 3)));
        return max_f32(seen, max_f32(first, second));
    }
    DEVICE_MEMBER f32 largest(f32 seen) { return max_f32(bits_to_f32(kFloor), seen); }
};

// Calls work.run<Input>() for the Input of a dtype code.
template <class Work>
DEVICE void with_input(u32 dtype, const Work& work) {
    switch (dtype) {
        case kDtypeBfloat16: work.template run<HalfInput<Bfloat16Cast>>(); break;
        case kDtypeFloat16: work.template run<HalfInput<Float16Cast>>(); break;
        default: work.template run<WordInput>(); break;
    }
}

// The codes of all elements of a Vec16, in the low bytes.
template <class Input>
DEVICE Vec16 codes_of(const Vec16& v, f32 factor) {
    Vec16 codes = {{0, 0, 0, 0}};
    UNROLL
    for (u32 j = 0; j < 16 / Input::kBytes; j += 2) {
        f32 low = mul_rn_f32(Input::element(v, j), factor);
        f32 high = mul_rn_f32(Input::element(v, j + 1), factor);
        codes.word[j / 4] |= to_e4m3x2(high, low) << j % 4 * 8;
    }
    return codes;
}
