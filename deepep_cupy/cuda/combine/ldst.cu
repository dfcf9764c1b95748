// combine: each rank fetches the rows its tokens have at the others and adds them up.
//
// This is the path of ordinary loads: every GPU from SM 80 on, and rows or bases that are no
// multiple of 16 bytes. One warp a token.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "combine/rows.cuh"

static_assert(sizeof(CommShared) <= kCombineSharedBytes,
              "SHARED_HEAD in protocol/constants.py is small");

constexpr int kMostSources = kNumRanks + 2;

// Adds up one token's row. kBytes: 16, or one element where rows are not aligned.
template <class Number, int kBytes>
DEVICE void add_row(const CommParams& c, const CommShared& s, const CombineCommon& d, u32 token,
                    u32 row, u32 sources) {
    // Loads in flight a lane: about 16, shared between the sources.
    constexpr int kUnroll = kBytes < 16 ? 1 : kMostSources <= 4 ? 4 : kMostSources <= 6 ? 2 : 1;
    const u8* address[kMostSources];
    UNROLL
    for (int source = 0; source < kMostSources; ++source) {
        address[source] = source_address(c, s, d, token, row, source);
    }
    u32 units = d.row_bytes / kBytes;
    u8* out = d.out + static_cast<u64>(token) * d.row_bytes;
    for (u32 begin = 0; begin < units; begin += 32u * kUnroll) {
        // All loads first, so that they overlap; then the sums, in order.
        Vec16 term[kMostSources][kUnroll];
        UNROLL
        for (int source = 0; source < kMostSources; ++source) {
            if ((sources >> source & 1u) == 0u) continue;
            UNROLL
            for (int i = 0; i < kUnroll; ++i) {
                u32 unit = begin + 32u * i + lane_index();
                if (unit >= units) continue;
                const u8* p = address[source] + static_cast<u64>(unit) * kBytes;
                term[source][i] =
                    source < 2 ? read_local_narrow<kBytes>(p) : read_peer_narrow<kBytes>(p);
            }
        }
        UNROLL
        for (int i = 0; i < kUnroll; ++i) {
            u32 unit = begin + 32u * i + lane_index();
            if (unit >= units) continue;
            typename Number::Sum sum = Number::widen(Vec16{{0, 0, 0, 0}});
            bool first = true;
            UNROLL
            for (int source = 0; source < kMostSources; ++source) {
                if ((sources >> source & 1u) == 0u) continue;
                if (first) {
                    sum = Number::widen(term[source][i]);
                } else {
                    Number::add(sum, term[source][i]);
                }
                first = false;
            }
            write_narrow<kBytes>(out + static_cast<u64>(unit) * kBytes, Number::narrow(sum));
        }
    }
}

struct AddTokens {
    const CommParams& c;
    const CommShared& s;
    const CombineCommon& d;

    template <class Number>
    DEVICE_METHOD void run() const {
        for (u32 token = first_item(); token < d.num_tokens; token += item_stride()) {
            u32 row = row_of_lane(d, token);
            u32 sources = sources_of_token(d, row);
            if (d.has_weights != 0u) combine_weights(c, s, d, token, row);
            if (d.access_bytes == 16) {
                add_row<Number, 16>(c, s, d, token, row, sources);
            } else {
                add_row<Number, Number::kBytes>(c, s, d, token, row, sources);
            }
        }
    }
};

KERNEL combine(const GRID_CONSTANT CombineParams p) {
    CommShared& s = shared_memory<CommShared>();
    Snapshot snapshot = prefetch_state(p.comm);
    if (fills_header()) fill_header(p.comm, s, p.d);
    Verdict verdict = enter(p.comm, s, snapshot);
    if (verdict == kGo) verdict = open_combine(p.comm, s);
    if (verdict == kGo) with_number(p.d.dtype, AddTokens{p.comm, s, p.d});
    finish(p.comm, s, p.d, verdict);
}
