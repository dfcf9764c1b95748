#pragma once
// What both combine paths share: the opening, where rows are, weights, the exit.
#include "common/access.cuh"
#include "common/grid_stride.cuh"
#include "common/numeric.cuh"
#include "common/poison.cuh"
#include "comm/header.cuh"
#include "comm/leave.cuh"

// ---- opening ----

// What this rank says of its combine. The thread that fills_header() calls it.
DEVICE void fill_header(const CommParams& c, CommShared& s, const CombineCommon& d) {
    u32 birth = ld_u32(d.birth);
    begin_header(c, s);
    s.mine[kWordDtype] = d.dtype;
    s.mine[kWordRowBytes] = d.row_bytes;
    s.mine[kWordNumTopk] = d.num_topk;
    s.mine[kWordWeights] = d.has_weights;
    s.mine[kWordLayout] = d.layout;
    set_birth(s, birth);
    s.mine[kWordRowsOffset] = d.rows_offset;
    s.mine[kWordMetaOffset] = d.weights_offset;
    s.mine[kWordNumRows] = d.num_rows;
}

// Tells the peers where this rank's rows are, and hears where theirs are. Earlier kernels of the
// stream wrote them, so they are ready when this kernel starts; the header's release says so.
DEVICE Verdict open_combine(const CommParams& c, CommShared& s) {
    if (block_index() == 0) send_header(c, s);
    return open_headers(c, s);
}

// ---- sources of a token: biases first, then ranks in ascending order ----

// Bit b < 2: bias b; bit 2 + r: the row at rank r.
DEVICE u32 sources_of_token(const CombineCommon& d, u32 row) {
    u32 ranks = warp_ballot(row != ~0u);
    u32 biases = (d.bias[0] != nullptr ? 1u : 0u) | (d.bias[1] != nullptr ? 2u : 0u);
    return biases | ranks << 2;
}

// The row of `token` at rank `lane`; lanes >= R: none.
DEVICE u32 row_of_lane(const CombineCommon& d, u32 token) {
    if (lane_index() >= kNumRanks) return ~0u;
    return read_local_u32(d.send_row + static_cast<u64>(token) * kNumRanks + lane_index());
}

DEVICE const u8* rows_of_rank(const CommParams& c, const CommShared& s, const CombineCommon& d,
                              u32 rank) {
    if (rank == c.rank) return d.x;
    return c.peer[rank] + static_cast<u64>(s.headers[rank][kWordRowsOffset]) * kOffsetUnit;
}

// Address of one source of a token; row: this lane's row_of_lane(). All lanes call it.
DEVICE const u8* source_address(const CommParams& c, const CommShared& s, const CombineCommon& d,
                                u32 token, u32 row, u32 source) {
    if (source < 2) return d.bias[source] + static_cast<u64>(token) * d.row_bytes;
    u32 rank = source - 2;
    u32 there = warp_shuffle(row, rank);
    return rows_of_rank(c, s, d, rank) + static_cast<u64>(there) * d.row_bytes;
}

// ---- weights ----

// combined_weights[token][k] = sum over the ranks that hold the token, ascending, in float32; in
// the expanded layout the one rank that owns choice k has its weight, the others have zeros, and
// the bits are gathered, so that -0 stays -0.
DEVICE void combine_weights(const CommParams& c, const CommShared& s, const CombineCommon& d,
                            u32 token, u32 row) {
    bool mine = lane_index() < d.num_topk;
    u32 bits[kNumRanks];
    UNROLL
    for (u32 rank = 0; rank < kNumRanks; ++rank) {
        u32 there = warp_shuffle(row, rank);
        bits[rank] = 0;
        if (there != ~0u && mine) {
            const u8* weights =
                c.peer[rank] + static_cast<u64>(s.headers[rank][kWordMetaOffset]) * kOffsetUnit;
            u64 entry = static_cast<u64>(there) * d.num_topk + lane_index();
            bits[rank] = read_peer_narrow<4>(weights + entry * 4u).word[0];
        }
    }
    f32 sum = 0.0f;
    u32 gathered = 0;
    bool first = true;
    UNROLL
    for (u32 rank = 0; rank < kNumRanks; ++rank) {
        if (warp_shuffle(row, rank) == ~0u) continue;
        f32 weight = bits_to_f32(bits[rank]);
        sum = first ? weight : sum + weight;
        gathered |= bits[rank];
        first = false;
    }
    if (mine) {
        u64 entry = static_cast<u64>(token) * d.num_topk + lane_index();
        bool expanded = (d.layout & kFlagExpanded) != 0u;
        st_u32(d.combined_weights + entry, expanded ? gathered : f32_to_bits(sum));
    }
}

// ---- exit ----

DEVICE void poison_combined(const CombineCommon& d, u32 share, u32 shares) {
    u64 tokens = d.num_tokens;
    fill_bytes(d.out, tokens * d.row_bytes, poison_byte(d.dtype), share, shares);
    fill_bytes(reinterpret_cast<u8*>(d.combined_weights), tokens * d.num_topk * 4u, 0xff, share,
               shares);
}

// Ends a combine, whatever happened. Each block's reads of the peers' rows are complete here:
// their values have been used. The arrivals in leave() tell the peers.
DEVICE void finish(const CommParams& c, CommShared& s, const CombineCommon& d, Verdict verdict) {
    // After an earlier failure no block has touched anything: all of them share the work.
    if (verdict == kPoisoned) poison_combined(d, block_index(), num_blocks());
    if (leave(c, s, verdict, true)) poison_combined(d, 0, 1);  // PLANT(combine_handshake)
}
