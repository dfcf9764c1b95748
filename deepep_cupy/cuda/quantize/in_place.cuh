#pragma once
// A piece of a row is cast where a bulk load has put it: in shared memory, by one warp, in two
// passes of 16 bytes a lane and step.
//
//   scales   lane g has group g. Each lane begins at another word of its group, so that no two of
//            eight neighbours read the same bank.
//   codes    the whole warp goes through the piece, side by side. Codes are a half or a quarter as
//            long as what they stand for: those of a step end before its own elements begin, but
//            in the first step, and fall on elements that all lanes have read.
//
// What it costs, from the machine code of SM 90, for a piece of 3584 16-bit channels: 125
// instructions of the warp for the scales (two elements at a time), 385 for the codes (8 elements
// a lane in 26: 8 to widen, 8 to multiply, 4 to convert), 85 to send the scales to two ranks; 5.3
// an element and lane. 4096 rows of 7168 are 8192 pieces: 24 SMs issue that in 51,000 cycles, 26 us
// at 1.98 GHz, beside the 100 us that the codes take over the link. Shared memory, too, is busy for
// a quarter of that time: a piece passes it in, is read twice, and leaves half as long.
#include "asm/bulk.cuh"
#include "quantize/codes.cuh"

static_assert(kCastStageBytes / (2 * kScaleGroup) <= 32, "a group of a piece needs a lane");

constexpr u32 kCastSteps = 4;  // whose loads are in flight together

// Zeros behind a piece that does not end with its last group: they change no largest magnitude.
DEVICE void fill_last_group(u8* piece, u32 bytes, u32 group_bytes) {
    if (bytes % group_bytes == 0) return;
    u32 at = bytes + lane_index() * 16u;
    if (at / group_bytes == bytes / group_bytes) st_shared_v4(piece + at, Vec16{{0, 0, 0, 0}});
    warp_barrier();  // PLANT(zeros_written)
}

// Of each group: lane g has that of group g, and others have one that nobody wants.
template <class Input>
DEVICE Scale scale_of_group(const Cast& cast, u8* piece, u32 bytes) {
    constexpr u32 kGroupBytes = kScaleGroup * Input::kBytes;
    fill_last_group(piece, bytes, kGroupBytes);
    u32 begin = lane_index() * kGroupBytes;
    const u8* group = piece + (begin < bytes ? begin : 0u);
    typename Input::Seen seen = 0;
    NO_UNROLL
    for (u32 first = 0; first < kGroupBytes; first += 256u) {
        UNROLL
        for (u32 i = 0; i < 8; ++i) {
            const u8* word = group + first + (i ^ lane_index() % 8u) * 16u;
            seen = Input::larger(seen, ld_shared_v4(word));
            seen = Input::larger(seen, ld_shared_v4(word + 128));
        }
    }
    return scale_of(cast, Input::largest(seen));
}

template <u32 kBytes>
DEVICE void write_codes(u8* p, const Vec16& codes) {
    if constexpr (kBytes == 8) {
        st_shared_v2(p, codes.word[0], codes.word[1]);
    } else {
        st_shared_u32(p, codes.word[0]);
    }
}

// So many steps of the whole warp, from byte `first` on; lanes behind `bytes` do nothing.
template <class Input, u32 kSteps>
DEVICE void write_codes_of_steps(u8* piece, u32 first, u32 bytes, f32 factor) {
    constexpr u32 kGroupBytes = kScaleGroup * Input::kBytes;
    u32 begin = first + lane_index() * 16u;
    bool mine = begin < bytes;
    Vec16 read[kSteps];
    UNROLL
    for (u32 i = 0; i < kSteps; ++i) {
        read[i] = ld_shared_v4(piece + (mine ? begin : first) + i * 512u);
    }
    warp_barrier();  // PLANT(elements_read)
    u8* out = piece + begin / Input::kBytes;
    UNROLL
    for (u32 i = 0; i < kSteps; ++i) {
        // PLANT(factor_of_group)
        u32 bits = warp_shuffle(f32_to_bits(factor), begin / kGroupBytes + i * 512u / kGroupBytes);
        Vec16 codes = codes_of<Input>(read[i], bits_to_f32(bits));
        if (mine) write_codes<16 / Input::kBytes>(out + i * 512u / Input::kBytes, codes);
    }
}

// The codes of a piece to its front; lane g brings what group g is multiplied with.
template <class Input>
DEVICE void write_codes_in_place(u8* piece, u32 bytes, f32 factor) {
    u32 first = 0;
    NO_UNROLL
    for (; first + kCastSteps * 512u <= bytes; first += kCastSteps * 512u) {
        write_codes_of_steps<Input, kCastSteps>(piece, first, ~0u, factor);
    }
    NO_UNROLL
    for (; first < bytes; first += 512u) {
        write_codes_of_steps<Input, 1>(piece, first, bytes, factor);
    }
}
