#pragma once
// The one loop that copies rows by loads and stores.
#include "common/access.cuh"

// One thread's share of a chunk: `piece[i]` is unit first + i * step of a row of so many units.
template <int kBytes, int kUnroll, bool kToPeers, class Index>
struct Chunk {
    Vec16 piece[kUnroll];
    Index first;
    Index step;
    Index units;

    DEVICE_METHOD void load(const u8* source) {
        UNROLL
        for (int i = 0; i < kUnroll; ++i) {
            Index unit = first + step * i;
            if (unit < units) {
                piece[i] = read_local_narrow<kBytes>(source + static_cast<u64>(unit) * kBytes);
            }
        }
    }

    DEVICE_METHOD void store(u8* target) const {
        UNROLL
        for (int i = 0; i < kUnroll; ++i) {
            Index unit = first + step * i;
            if (unit >= units) continue;
            u8* p = target + static_cast<u64>(unit) * kBytes;
            if constexpr (kToPeers && kBytes == 16) {
                write_peer(p, piece[i]);
            } else {
                write_narrow<kBytes>(p, piece[i]);
            }
        }
    }
};

// Copies units of kBytes bytes, of this rank's own memory, to one or more targets. This thread takes
// unit `mine` and every `step`-th one after it, kUnroll at a time: all their loads, which are then in
// flight together, before all their stores.
//
//   kToPeers   targets are memory of other ranks
//   targets    targets.store(chunk) calls chunk.store(address) for each target
//
// Threads that share units, such as a warp's lanes with mine = lane and step = 32, make the same
// number of turns, so that targets may shuffle.
template <int kBytes, int kUnroll, bool kToPeers, class Index, class Targets>
DEVICE void copy_units(const u8* source, Index units, Index mine, Index step,
                       const Targets& targets) {
    for (Index begin = 0; begin < units; begin += step * kUnroll) {
        Chunk<kBytes, kUnroll, kToPeers, Index> chunk;
        chunk.first = begin + mine;
        chunk.step = step;
        chunk.units = units;
        chunk.load(source);
        targets.store(chunk);
    }
}
