// combine_bulk: combine with the bulk copy engine of SM 90 and later.
//
// A warp works through a list of pieces: for each token, for each piece of its row, for each
// source (biases, then ranks in order) one piece of at most kCombinePieceBytes. One lane keeps up
// to kCombineSlots loads of that list in flight, ahead of the lanes that add; a sum is stored when
// its last source has been added. Rows and bases are multiples of 16 bytes.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "asm/bulk.cuh"
#include "combine/rows.cuh"
#include "common/bulk_wait.cuh"

constexpr u32 kSlots = kCombineSlots;
constexpr int kLaneWords = (kCombinePieceBytes + 511) / 512;  // 16-byte words a lane adds

struct Shared {
    CommShared comm;
    u64 loaded[kNumWarps][kSlots];
    alignas(128) u8 slot[kNumWarps][kSlots][kCombinePieceBytes];
};
static_assert(sizeof(Shared) <= kCombineBulkSharedBytes,
              "SHARED_HEAD in plan/constants.py is small");

// ---- the list of pieces ----

// A place in the list. The loads run ahead with one cursor, the sums follow with another.
struct Cursor {
    u32 token;    // >= num_tokens: the end
    u32 row;      // this lane's row of the token
    u32 sources;  // of the token
    u32 offset;   // of the piece in its row
    u32 left;     // sources of this piece still to come, this one included
};

DEVICE void visit_token(const CombineCommon& d, Cursor& at, u32 token) {
    at.token = token;
    at.offset = 0;
    if (token >= d.num_tokens) return;
    at.row = row_of_lane(d, token);
    at.sources = sources_of_token(d, at.row);
    at.left = at.sources;
}

// To the next piece of the row, or the next token.
DEVICE void next_piece(const CombineCommon& d, Cursor& at) {
    at.offset += kCombinePieceBytes;
    at.left = at.sources;
    if (at.offset >= d.row_bytes) visit_token(d, at, at.token + token_stride());
}

// Skips tokens without sources: they have no loads.
DEVICE void skip_empty(const CombineCommon& d, Cursor& at) {
    while (at.token < d.num_tokens && at.sources == 0u) {
        visit_token(d, at, at.token + token_stride());
    }
}

DEVICE u32 piece_bytes(const CombineCommon& d, const Cursor& at) {
    u32 rest = d.row_bytes - at.offset;
    return rest < kCombinePieceBytes ? rest : kCombinePieceBytes;
}

// ---- loads ----

struct Loads {
    Cursor next;
    u32 started;
};

// Starts loads until `most` have been started in all or the list ends. All lanes call it.
DEVICE void start_loads(const CommParams& c, const CombineCommon& d, Shared& s, Loads& loads,
                        u32 most) {
    u32 warp = warp_index();
    Cursor& at = loads.next;
    while (loads.started < most && at.token < d.num_tokens) {
        u32 source = lowest_bit(at.left);
        const u8* from = source_address(c, s.comm, d, at.token, at.row, source) + at.offset;
        u32 slot = loads.started % kSlots;
        if (lane_index() == 0) {
            u32 bytes = piece_bytes(d, at);
            mbarrier_arrive_expect_bytes(&s.loaded[warp][slot], bytes);
            bulk_load(s.slot[warp][slot], from, bytes, &s.loaded[warp][slot]);
        }
        ++loads.started;
        at.left &= at.left - 1u;
        if (at.left == 0u) {
            next_piece(d, at);
            skip_empty(d, at);
        }
    }
}

// ---- sums ----

template <class Number>
struct PieceSum {
    typename Number::Sum word[kLaneWords];
};

template <class Number>
DEVICE void add_slot(PieceSum<Number>& sum, const u8* slot, u32 words, bool first) {
    UNROLL
    for (int i = 0; i < kLaneWords; ++i) {
        u32 word = 32u * i + lane_index();
        if (word >= words) continue;
        Vec16 term = ld_shared_v4(slot + word * 16u);
        if (first) {
            sum.word[i] = Number::widen(term);
        } else {
            Number::add(sum.word[i], term);
        }
    }
}

template <class Number>
DEVICE void store_sum(const CombineCommon& d, const Cursor& at, const PieceSum<Number>& sum) {
    u8* out = d.out + static_cast<u64>(at.token) * d.row_bytes + at.offset;
    u32 words = piece_bytes(d, at) / 16u;
    UNROLL
    for (int i = 0; i < kLaneWords; ++i) {
        u32 word = 32u * i + lane_index();
        if (word < words) write_local(out + word * 16u, Number::narrow(sum.word[i]));
    }
}

DEVICE void store_zeros(const CombineCommon& d, u32 token) {
    u8* out = d.out + static_cast<u64>(token) * d.row_bytes;
    for (u32 word = lane_index(); word < d.row_bytes / 16u; word += 32u) {
        write_local(out + word * 16u, Vec16{{0, 0, 0, 0}});
    }
}

// ---- one warp's work ----

template <class Number>
DEVICE void add_tokens(const CommParams& c, const CombineCommon& d, Shared& s) {
    u32 warp = warp_index();
    // The peers wrote their rows with ordinary stores, which this block acquired with their
    // headers; this orders the engine's loads behind that.
    fence_proxy_async_global();

    Loads loads;
    loads.started = 0;
    visit_token(d, loads.next, first_token());
    skip_empty(d, loads.next);
    start_loads(c, d, s, loads, kSlots);

    Cursor at;
    u32 taken = 0;
    PieceSum<Number> sum;
    for (visit_token(d, at, first_token()); at.token < d.num_tokens;) {
        if (at.offset == 0 && at.left == at.sources) {
            if (d.combined_weights != nullptr) combine_weights(c, s.comm, d, at.token, at.row);
            if (at.sources == 0u) {
                store_zeros(d, at.token);
                visit_token(d, at, at.token + token_stride());
                continue;
            }
        }
        u32 slot = taken % kSlots;
        if (!wait_loaded(c, s.comm, &s.loaded[warp][slot], taken / kSlots & 1u)) return;
        add_slot<Number>(sum, s.slot[warp][slot], piece_bytes(d, at) / 16u,
                         at.left == at.sources);
        ++taken;
        // The lanes' reads of the slot precede the engine's next write to it: a proxy fence in
        // each lane that read, then the warp barrier before the lane that starts the load.
        fence_proxy_async_shared();
        warp_barrier();
        start_loads(c, d, s, loads, taken + kSlots);

        at.left &= at.left - 1u;
        if (at.left == 0u) {
            store_sum<Number>(d, at, sum);
            next_piece(d, at);
        }
    }
}

struct AddTokens {
    const CommParams& c;
    const CombineCommon& d;
    Shared& s;

    template <class Number>
    DEVICE_METHOD void run() const {
        add_tokens<Number>(c, d, s);
    }
};

KERNEL combine_bulk(const GRID_CONSTANT CombineBulkParams p) {
    Shared& s = shared_memory<Shared>();
    if (lane_index() == 0) {
        for (u32 slot = 0; slot < kSlots; ++slot) mbarrier_init(&s.loaded[warp_index()][slot], 1);
        fence_mbarrier_init();
    }
    Verdict verdict = enter(p.comm, s.comm);
    if (verdict == kGo) verdict = open_combine(p.comm, s.comm, p.d);
    if (verdict == kGo) with_number(p.d.dtype, AddTokens{p.comm, p.d, s});
    finish(p.comm, s.comm, p.d, verdict);
}
