#pragma once
// Adding up copies of the expanded layout: terms may be multiplied with a weight first.
#include "asm/thread.cuh"
#include "common/access.cuh"
#include "common/numeric.cuh"

// ---- a term: the accumulator's form of sixteen bytes of a copy, times its weight ----

template <class Value, int kCount>
DEVICE void multiply_values(Value (&value)[kCount], f32 weight) {
    Value factor = static_cast<Value>(weight);
    UNROLL
    for (int i = 0; i < kCount; ++i) value[i] = factor * value[i];
}
template <class Value, int kCount>
DEVICE void add_values(Value (&sum)[kCount], const Value (&term)[kCount]) {
    UNROLL
    for (int i = 0; i < kCount; ++i) sum[i] = sum[i] + term[i];
}

// Puts a copy into a sum: starts it (`first`) or adds to it. Copies without weights come with 1.0,
// by which a product is exact; integers have no weights.
template <class Number>
struct WeightedAdd {
    DEVICE_MEMBER void add(typename Number::Sum& sum, const Vec16& copy, f32 weight, bool first) {
        static_cast<void>(weight);
        if (first) {
            sum = Number::widen(copy);
        } else {
            Number::add(sum, copy);
        }
    }
};

template <class Number>
struct FloatWeightedAdd {
    DEVICE_MEMBER void add(typename Number::Sum& sum, const Vec16& copy, f32 weight, bool first) {
        typename Number::Sum term = Number::widen(copy);
        multiply_values(term.value, weight);
        if (first) {
            sum = term;
        } else {
            add_values(sum.value, term.value);
        }
    }
};
template <>
struct WeightedAdd<Bfloat16> : FloatWeightedAdd<Bfloat16> {};
template <>
struct WeightedAdd<Float16> : FloatWeightedAdd<Float16> {};
template <>
struct WeightedAdd<Float32> : FloatWeightedAdd<Float32> {};
template <>
struct WeightedAdd<Float64> : FloatWeightedAdd<Float64> {};

// ---- rows: the one loop that adds up copies ----

// Adds all copies to the sums of a chunk of a row, the units begin + 32 i + lane; `first`: there is
// no sum yet. Ends with the rounded sums at `out`. All lanes of a warp call it.
//
// Copies, which all lanes walk alike:
//   more()                whether there is another one
//   next(factor)          goes to it; returns its row, and its weight
//   read<kBytes>(p)       a unit of one, by the access class of where copies are
template <class Number, int kBytes, int kUnroll, int kBatch, class Copies>
DEVICE void add_copies(typename Number::Sum (&sum)[kUnroll], bool first, Copies copies, u8* out,
                       u32 begin, u32 units) {
    while (copies.more()) {
        // The loads of a batch first, so that they overlap; then the sums, in order.
        Vec16 piece[kBatch][kUnroll];
        f32 factor[kBatch];
        bool present[kBatch];
        UNROLL
        for (int j = 0; j < kBatch; ++j) {
            present[j] = copies.more();
            if (!present[j]) continue;
            const u8* source = copies.next(factor[j]);
            UNROLL
            for (int i = 0; i < kUnroll; ++i) {
                u32 unit = begin + 32u * i + lane_index();
                if (unit >= units) continue;
                const u8* p = source + static_cast<u64>(unit) * kBytes;
                piece[j][i] = Copies::template read<kBytes>(p);
            }
        }
        UNROLL
        for (int j = 0; j < kBatch; ++j) {
            if (!present[j]) continue;
            UNROLL
            for (int i = 0; i < kUnroll; ++i) {
                if (begin + 32u * i + lane_index() >= units) continue;
                WeightedAdd<Number>::add(sum[i], piece[j][i], factor[j], first);
            }
            first = false;
        }
    }
    UNROLL
    for (int i = 0; i < kUnroll; ++i) {
        u32 unit = begin + 32u * i + lane_index();
        if (unit >= units) continue;
        write_narrow<kBytes>(out + static_cast<u64>(unit) * kBytes, Number::narrow(sum[i]));
    }
}
