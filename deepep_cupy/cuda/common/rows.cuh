#pragma once
// The one loop that copies rows by loads and stores.
#include "common/access.cuh"

// Copies units of kBytes bytes, of this rank's own memory, to one or more targets. This thread takes
// unit `mine` and every `step`-th one after it, kUnroll at a time: all their loads, which are then in
// flight together, before all their stores.
//
//   kToPeers          targets are memory of other ranks
//   for_each_target   calls what it is given with the address of each target in turn
//
// Threads that share units, such as a warp's lanes with mine = lane and step = 32, make the same
// number of turns, so that for_each_target may shuffle.
template <int kBytes, int kUnroll, bool kToPeers, class Index, class ForEachTarget>
DEVICE void copy_units(const u8* source, Index units, Index mine, Index step,
                       const ForEachTarget& for_each_target) {
    for (Index begin = 0; begin < units; begin += step * kUnroll) {
        Vec16 piece[kUnroll];
        UNROLL
        for (int i = 0; i < kUnroll; ++i) {
            Index unit = begin + step * i + mine;
            if (unit < units) {
                piece[i] = read_local_narrow<kBytes>(source + static_cast<u64>(unit) * kBytes);
            }
        }
        for_each_target([&](u8* target) {
            UNROLL
            for (int i = 0; i < kUnroll; ++i) {
                Index unit = begin + step * i + mine;
                if (unit >= units) continue;
                u8* p = target + static_cast<u64>(unit) * kBytes;
                if constexpr (kToPeers && kBytes == 16) {
                    write_peer(p, piece[i]);
                } else {
                    write_narrow<kBytes>(p, piece[i]);
                }
            }
        });
    }
}
