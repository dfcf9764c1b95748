// combine_bulk: combine with the bulk copy engine of SM 90 and later.
//
// A unit of work is one piece of one token's row. Each warp has two sets of slots, one slot a rank
// in each: while the pieces of one unit are being added, those of the next are on their way. The
// lane whose number is a rank's starts that rank's load, so that a unit costs one pass of address
// arithmetic, whatever the number of its sources. Pieces of few tokens spread over many warps.
// Rows and bases are multiples of 16 bytes.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "asm/bulk.cuh"
#include "combine/rows.cuh"
#include "comm/bulk_wait.cuh"

constexpr int kSets = 2;
constexpr int kLaneWords = (kCombinePieceBytes + 511) / 512;  // 16-byte words a lane adds

struct Shared {
    CommShared comm;
    u64 loaded[kNumWarps][kSets];
    alignas(128) u8 slot[kNumWarps][kSets][kNumRanks][kCombinePieceBytes];
};
static_assert(sizeof(Shared) <= kCombineBulkSharedBytes,
              "SHARED_HEAD in protocol/constants.py is small");

// ---- units ----

struct Unit {
    u32 token;  // >= num_tokens: no more work
    u32 piece;
    u32 row;    // this lane's row of the token
};

// Units are dealt to the warps of the grid in turn: unit number = token * pieces + piece.
struct UnitSteps {
    u32 pieces;       // a row
    u32 token_step;   // what one turn adds to a unit's token and piece
    u32 piece_step;
};

DEVICE UnitSteps unit_steps(const CombineCommon& d) {
    u32 pieces = (d.row_bytes + kCombinePieceBytes - 1) / kCombinePieceBytes;
    u32 warps = num_blocks() * kNumWarps;
    return {pieces, warps / pieces, warps % pieces};
}

DEVICE void find_row(const CombineCommon& d, Unit& unit) {
    unit.row = unit.token < d.num_tokens ? row_of_lane(d, unit.token) : ~0u;
}

DEVICE Unit first_unit(const CombineCommon& d, const UnitSteps& steps) {
    u32 number = warp_index() * num_blocks() + block_index();
    Unit unit = {number / steps.pieces, number % steps.pieces, ~0u};
    find_row(d, unit);
    return unit;
}

DEVICE Unit unit_after(const CombineCommon& d, const UnitSteps& steps, const Unit& unit) {
    Unit next = {unit.token + steps.token_step, unit.piece + steps.piece_step, ~0u};
    if (next.piece >= steps.pieces) {
        next.piece -= steps.pieces;
        ++next.token;
    }
    find_row(d, next);
    return next;
}

DEVICE u32 unit_bytes(const CombineCommon& d, const Unit& unit) {
    u32 rest = d.row_bytes - unit.piece * kCombinePieceBytes;
    return rest < kCombinePieceBytes ? rest : kCombinePieceBytes;
}

// Where a unit begins in arrays [T, H].
DEVICE u64 unit_offset(const CombineCommon& d, const Unit& unit) {
    return static_cast<u64>(unit.token) * d.row_bytes + unit.piece * kCombinePieceBytes;
}

// The piece of a token's row whose warp adds up the token's weights. Where a turn is a whole number
// of rows each warp stays at one piece; so that not the warps of one piece fetch all weights, they
// take turns.
DEVICE u32 weights_piece(const UnitSteps& steps, u32 token) {
    return steps.piece_step == 0u ? token / steps.token_step % steps.pieces : 0u;
}

// ---- loads ----

// Starts the loads of a unit: lane r the one from rank r; biases are called to L2, from where
// add_unit() reads them. All lanes call it.
template <bool kBias>
DEVICE void start_loads(const CommParams& c, const CombineCommon& d, Shared& s, const Unit& unit,
                        u32 set) {
    u32 warp = warp_index();
    u32 ranks = warp_ballot(unit.row != ~0u);
    if (ranks == 0u) return;
    u32 bytes = unit_bytes(d, unit);
    if (lane_index() == 0) {
        mbarrier_arrive_expect_bytes(&s.loaded[warp][set], bytes * count_bits(ranks));
    }
    warp_barrier();  // PLANT(warp_barrier_before_loads)
    if (unit.row != ~0u) {
        u32 rank = lane_index();
        bulk_load(s.slot[warp][set][rank],
                  rows_of_rank(c, s.comm, d, rank) + static_cast<u64>(unit.row) * d.row_bytes +
                      unit.piece * kCombinePieceBytes,
                  bytes, &s.loaded[warp][set]);
    }
    if (kBias && lane_index() == 0) {
        bulk_prefetch(d.bias[0] + unit_offset(d, unit), bytes);
        if (d.bias[1] != nullptr) bulk_prefetch(d.bias[1] + unit_offset(d, unit), bytes);
    }
}

// ---- sums ----

template <class Number>
struct PieceSum {
    typename Number::Sum word[kLaneWords];
};

// Adds one term to the sum, 16-byte word by word; `first` takes it as it is. Source: a functor
// from the number of a word to its value.
template <class Number, class Source>
DEVICE void add_term(PieceSum<Number>& sum, u32 words, bool first, const Source& source) {
    UNROLL
    for (int i = 0; i < kLaneWords; ++i) {
        u32 word = 32u * i + lane_index();
        if (word >= words) continue;
        Vec16 term = source.read(word);
        if (first) {
            sum.word[i] = Number::widen(term);
        } else {
            Number::add(sum.word[i], term);
        }
    }
}

// Words that were fetched before: lane l has the words 32 i + l.
struct FetchedSource {
    const Vec16* fetched;
    DEVICE_METHOD Vec16 read(u32 word) const { return fetched[word / 32u]; }
};
struct SlotSource {
    const u8* slot;
    DEVICE_METHOD Vec16 read(u32 word) const { return ld_shared_v4(slot + word * 16u); }
};

template <class Number>
DEVICE void store_sum(const CombineCommon& d, u64 offset, u32 words, bool empty,
                      const PieceSum<Number>& sum) {
    u8* out = d.out + offset;
    UNROLL
    for (int i = 0; i < kLaneWords; ++i) {
        u32 word = 32u * i + lane_index();
        if (word >= words) continue;
        Vec16 value = {{0, 0, 0, 0}};
        if (!empty) value = Number::narrow(sum.word[i]);
        write_local(out + word * 16u, value);
    }
}

// Adds up one unit: biases in order, then ranks in ascending order. Returns false when a load
// did not come.
template <class Number, bool kBias>
DEVICE bool add_unit(const CommParams& c, const CombineCommon& d, Shared& s, const Unit& unit,
                     u32 set, u32& phases) {
    u32 warp = warp_index();
    u32 words = unit_bytes(d, unit) / 16u;
    u64 offset = unit_offset(d, unit);
    PieceSum<Number> sum;
    bool first = true;
    if constexpr (kBias) {
        NO_UNROLL
        for (int bias = 0; bias < 2; ++bias) {
            if (d.bias[bias] == nullptr) continue;
            // All of a lane's words first, so that they come together.
            Vec16 fetched[kLaneWords];
            UNROLL
            for (int i = 0; i < kLaneWords; ++i) {
                u32 word = 32u * i + lane_index();
                if (word < words) fetched[i] = read_local(d.bias[bias] + offset + word * 16u);
            }
            add_term<Number>(sum, words, first, FetchedSource{fetched});
            first = false;
        }
    }
    u32 ranks = warp_ballot(unit.row != ~0u);
    if (ranks != 0u) {
        if (!wait_loaded(c, s.comm, &s.loaded[warp][set], phases >> set & 1u)) return false;
        phases ^= 1u << set;
        NO_UNROLL
        for (; ranks != 0u; ranks &= ranks - 1u) {
            add_term<Number>(sum, words, first, SlotSource{s.slot[warp][set][lowest_bit(ranks)]});
            first = false;
        }
        // The lanes' reads of these slots precede the engine's next writes to them: a proxy fence
        // in each lane that read, then the warp barrier before the lanes that start the loads.
        fence_proxy_async_shared();  // PLANT(proxy_fence_after_reads)
    }
    warp_barrier();  // PLANT(warp_barrier_after_reads)
    store_sum<Number>(d, offset, words, first, sum);
    return true;
}

// ---- one warp's work ----

// Where a warp begins. Made before the ranks have agreed: it only reads this rank's handle.
struct Start {
    UnitSteps steps;
    Unit first;
    Unit second;
};
DEVICE Start start_of(const CombineCommon& d) {
    Start start;
    start.steps = unit_steps(d);
    start.first = first_unit(d, start.steps);
    start.second = unit_after(d, start.steps, start.first);
    return start;
}

struct AddUnits {
    const CommParams& c;
    const CombineCommon& d;
    Shared& s;
    const Start& start;

    template <class Number>
    DEVICE_METHOD void run() const {
        if (d.bias[0] != nullptr) {
            units<Number, true>();
        } else {
            units<Number, false>();
        }
    }

    template <class Number, bool kBias>
    DEVICE_METHOD void units() const {
        // The peers wrote their rows with ordinary stores, which this block acquired with their
        // headers; this orders the engine's loads behind that.
        fence_proxy_async_global();  // PLANT(proxy_fence_before_loads)
        const UnitSteps& steps = start.steps;
        Unit unit = start.first;
        Unit next = start.second;
        start_loads<kBias>(c, d, s, unit, 0);
        start_loads<kBias>(c, d, s, next, 1);
        u32 phases = 0;
        for (u32 set = 0; unit.token < d.num_tokens; set ^= 1u) {
            // The row numbers of the unit after next arrive while this one is being added.
            Unit later = unit_after(d, steps, next);
            if (d.has_weights != 0u && unit.piece == weights_piece(steps, unit.token)) {
                combine_weights(c, s.comm, d, unit.token, unit.row);
            }
            if (!add_unit<Number, kBias>(c, d, s, unit, set, phases)) return;
            start_loads<kBias>(c, d, s, later, set);
            unit = next;
            next = later;
        }
    }
};

KERNEL combine_bulk(const GRID_CONSTANT CombineBulkParams p) {
    Shared& s = shared_memory<Shared>();
    Snapshot snapshot = prefetch_state(p.comm);
    Start start = start_of(p.d);
    if (lane_index() == 0) {
        for (int set = 0; set < kSets; ++set) mbarrier_init(&s.loaded[warp_index()][set], 1);
        fence_mbarrier_init();
    }
    if (fills_header()) fill_header(p.comm, s.comm, p.d);
    Verdict verdict = enter(p.comm, s.comm, snapshot);
    if (verdict == kGo) verdict = open_combine(p.comm, s.comm);
    if (verdict == kGo) with_number(p.d.dtype, AddUnits{p.comm, p.d, s, start});
    finish(p.comm, s.comm, p.d, verdict);
}
