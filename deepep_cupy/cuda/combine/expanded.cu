// combine_expanded: each rank fetches all copies its tokens have in the expanded layout and adds
// them up: biases, then ranks in ascending order, in a rank by ascending choice, one rounding.
//
// Where the copies lie is in the owners' own tables: entry [n, k] of expanded_row for the n-th
// token that rank received. A token names an expert once, so that choice k has one copy at most:
// lane k of the token's warp keeps its rank, its row and its weight. Ordinary loads, any row size.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "combine/rows.cuh"
#include "combine/weighted_add.cuh"

static_assert(sizeof(CommShared) <= kCombineSharedBytes,
              "SHARED_HEAD in protocol/constants.py is small");

constexpr int kBatch = 4;  // copies whose loads are in flight together

// The header of this layout. The thread that fills_header() calls it.
DEVICE void fill_expanded(const CommParams& c, CommShared& s, const CombineExpanded& d) {
    fill_header(c, s, d.plain);
    s.mine[kWordWeightsOffset] = d.row_weights_offset;
    s.mine[kWordIndexOffset] = d.index_offset;
}

// Four bytes of an array of a rank that the given header word locates.
DEVICE u32 read_word_of_rank(const CommParams& c, const CommShared& s, u32 rank, u32 header_word,
                             u64 entry) {
    const u8* array = c.peer[rank] + static_cast<u64>(s.headers[rank][header_word]) * kOffsetUnit;
    return read_peer_narrow<4>(array + entry * 4u).word[0];
}

// ---- where a token's copies are ----

// Entries of all ranks' tables for choice `lane`, on their way while another token is added up.
struct Lookup {
    u32 found[kNumRanks];
};

// row: this lane's row_of_lane().
DEVICE Lookup look_up(const CommParams& c, const CommShared& s, const CombineCommon& d, u32 row) {
    Lookup lookup;
    UNROLL
    for (u32 rank = 0; rank < kNumRanks; ++rank) {
        u32 there = warp_shuffle(row, rank);
        lookup.found[rank] = ~0u;
        if (there != ~0u && lane_index() < d.num_topk) {
            u64 entry = static_cast<u64>(there) * d.num_topk + lane_index();
            lookup.found[rank] = read_word_of_rank(c, s, rank, kWordIndexOffset, entry);
        }
    }
    return lookup;
}

struct Copy {
    u32 rank;  // ~0: choice `lane` has no copy
    u32 row;
};
DEVICE Copy copy_found(const Lookup& lookup) {
    Copy copy = {~0u, 0u};
    UNROLL
    for (u32 rank = 0; rank < kNumRanks; ++rank) {
        if (lookup.found[rank] != ~0u) copy = {rank, lookup.found[rank]};
    }
    return copy;
}

// A token's copies in the order of their addition: by rank, then by choice. Lane k has the copy of
// choice k and its weight.
struct PeerCopies {
    const CommParams& c;
    const CommShared& s;
    const CombineCommon& d;
    Copy copy;
    f32 weight;
    u32 rest;      // copies still to come
    u32 rank;      // of the copy at hand
    u32 choices;   // of this rank, still to come

    DEVICE_METHOD bool more() const { return rest != 0u; }
    DEVICE_METHOD const u8* next(f32& factor) {
        --rest;
        while (choices == 0u) {
            ++rank;
            choices = warp_ballot(copy.rank == rank);
        }
        u32 choice = lowest_bit(choices);
        choices &= choices - 1u;
        u64 row = warp_shuffle(copy.row, choice);
        factor = bits_to_f32(warp_shuffle(f32_to_bits(weight), choice));
        return rows_of_rank(c, s, d, rank) + row * d.row_bytes;
    }
    template <int kBytes>
    DEVICE_MEMBER Vec16 read(const u8* p) {
        return read_peer_narrow<kBytes>(p);
    }
};

// ---- adding ----

// Starts the sums of a chunk of a row with the biases. Returns whether there was none.
template <class Number, int kBytes, int kUnroll>
DEVICE bool add_biases(const CombineCommon& d, u32 token, u32 begin, u32 units,
                       typename Number::Sum (&sum)[kUnroll]) {
    UNROLL
    for (int i = 0; i < kUnroll; ++i) sum[i] = Number::widen(Vec16{{0, 0, 0, 0}});
    bool first = true;
    UNROLL
    for (int b = 0; b < 2; ++b) {
        if (d.bias[b] == nullptr) continue;
        const u8* source = d.bias[b] + static_cast<u64>(token) * d.row_bytes;
        UNROLL
        for (int i = 0; i < kUnroll; ++i) {
            u32 unit = begin + 32u * i + lane_index();
            if (unit >= units) continue;
            Vec16 term = read_local_narrow<kBytes>(source + static_cast<u64>(unit) * kBytes);
            if (first) {
                sum[i] = Number::widen(term);
            } else {
                Number::add(sum[i], term);
            }
        }
        first = false;
    }
    return first;
}

template <class Number, int kBytes>
DEVICE void add_row(const CombineCommon& d, u32 token, const PeerCopies& copies) {
    constexpr int kUnroll = kBytes < 16 ? 1 : 2;
    u32 units = d.row_bytes / kBytes;
    u8* out = d.out + static_cast<u64>(token) * d.row_bytes;
    for (u32 begin = 0; begin < units; begin += 32u * kUnroll) {
        typename Number::Sum sum[kUnroll];
        bool first = add_biases<Number, kBytes, kUnroll>(d, token, begin, units, sum);
        add_copies<Number, kBytes, kUnroll, kBatch>(sum, first, copies, out, begin, units);
    }
}

// combined_weights[token][k] = the weight of the copy of choice k, bit for bit; +0 without one.
DEVICE void gather_weights(const CommParams& c, const CommShared& s, const CombineCommon& d,
                           u32 token, const Copy& copy) {
    if (lane_index() >= d.num_topk) return;
    u32 bits = 0;
    if (copy.rank != ~0u) bits = read_word_of_rank(c, s, copy.rank, kWordMetaOffset, copy.row);
    st_u32(d.combined_weights + static_cast<u64>(token) * d.num_topk + lane_index(), bits);
}

struct AddCopies {
    const CommParams& c;
    const CommShared& s;
    const CombineExpanded& d;

    DEVICE_METHOD u32 row_of_token(u64 token) const {
        return token < d.plain.num_tokens ? row_of_lane(d.plain, static_cast<u32>(token)) : ~0u;
    }

    template <class Number>
    DEVICE_METHOD void run() const {
        // Two steps ahead the tokens' received numbers are read, one step ahead the tables.
        u64 stride = item_stride();
        u32 row = row_of_token(first_item());
        Lookup lookup = look_up(c, s, d.plain, row);
        row = row_of_token(first_item() + stride);
        for (u32 token = first_item(); token < d.plain.num_tokens; token += item_stride()) {
            Copy copy = copy_found(lookup);
            lookup = look_up(c, s, d.plain, row);
            row = row_of_token(token + 2 * stride);
            f32 weight = 1.0f;
            if (d.weighted != 0u && copy.rank != ~0u) {
                weight = bits_to_f32(
                    read_word_of_rank(c, s, copy.rank, kWordWeightsOffset, copy.row));
            }
            if (d.plain.has_weights != 0u) gather_weights(c, s, d.plain, token, copy);
            u32 number = count_bits(warp_ballot(copy.rank != ~0u));
            PeerCopies copies = {c, s, d.plain, copy, weight, number, ~0u, 0u};
            if (d.plain.access_bytes == 16) {
                add_row<Number, 16>(d.plain, token, copies);
            } else {
                add_row<Number, Number::kBytes>(d.plain, token, copies);
            }
        }
    }
};

KERNEL combine_expanded(const GRID_CONSTANT CombineExpandedParams p) {
    CommShared& s = shared_memory<CommShared>();
    Snapshot snapshot = prefetch_state(p.comm);
    if (fills_header()) fill_expanded(p.comm, s, p.d);
    Verdict verdict = enter(p.comm, s, snapshot);
    if (verdict == kGo) verdict = open_combine(p.comm, s);
    if (verdict == kGo) with_number(p.d.plain.dtype, AddCopies{p.comm, s, p.d});
    finish(p.comm, s, p.d.plain, verdict);
}
