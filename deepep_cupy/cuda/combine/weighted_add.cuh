#pragma once
// Adding up copies of the expanded layout: terms may be multiplied with a weight first.
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
