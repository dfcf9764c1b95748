#pragma once
// What a thread is ordered after, as numbers.
//
// Every source of accesses has a *dimension*: a thread, a rank's stream of host actions, the bulk
// stores of a thread (their reads and their writes apart), the loads of an mbarrier, the proxy
// fences of a thread. An access is an Epoch: (dimension, clock). A View holds one clock per
// dimension, and for each control word the oldest write that may still be read. Joining views is
// taking the maximum: causality order as the PTX memory model defines it.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "engine/device.h"

namespace sim {

struct Epoch {
    u32 dim = 0;
    u32 clock = 0;  // 0: before everything
};

constexpr u32 kMaxDims = 6144;
constexpr u32 kMaxWords = 12288;

struct View {
    u32 refs;
    u32 num_dims;
    u32 num_words;
    u32 clock[kMaxDims];
    u32 floor[kMaxWords];

    u32 clock_of(u32 dim) const { return dim < num_dims ? clock[dim] : 0; }
    u32 floor_of(u32 word) const { return word < num_words ? floor[word] : 0; }
};

// All views, reused; sizes grow while a run discovers dimensions and words.
class ViewPool {
public:
    u32 num_dims = 1;
    u32 num_words = 1;

    View* make() {
        View* view;
        if (free_.empty()) {
            view = static_cast<View*>(std::malloc(sizeof(View)));
        } else {
            view = free_.back();
            free_.pop_back();
        }
        view->refs = 0;
        view->num_dims = num_dims;
        view->num_words = num_words;
        return view;
    }
    void give_back(View* view) { free_.push_back(view); }

private:
    std::vector<View*> free_;
};

extern ViewPool view_pool;

class ViewRef {
public:
    ViewRef() = default;
    explicit ViewRef(View* view) : view_(view) { ++view->refs; }
    ViewRef(const ViewRef& other) : view_(other.view_) {
        if (view_) ++view_->refs;
    }
    ViewRef(ViewRef&& other) noexcept : view_(other.view_) { other.view_ = nullptr; }
    ViewRef& operator=(ViewRef other) noexcept {
        std::swap(view_, other.view_);
        return *this;
    }
    ~ViewRef() {
        if (view_ && --view_->refs == 0) view_pool.give_back(view_);
    }
    View* get() const { return view_; }
    View* operator->() const { return view_; }
    explicit operator bool() const { return view_ != nullptr; }
    bool operator==(const ViewRef& other) const { return view_ == other.view_; }

private:
    View* view_ = nullptr;
};

inline void raise(View* into, const View* other) {
    for (u32 i = 0; i < other->num_dims; ++i) {
        into->clock[i] = std::max(into->clock[i], other->clock[i]);
    }
    for (u32 i = 0; i < other->num_words; ++i) {
        into->floor[i] = std::max(into->floor[i], other->floor[i]);
    }
}

// A copy of `base` (or nothing), large enough for all dimensions there are.
inline ViewRef copy_of(const View* base) {
    View* view = view_pool.make();
    u32 dims = base ? base->num_dims : 0;
    u32 words = base ? base->num_words : 0;
    if (base) {
        std::memcpy(view->clock, base->clock, dims * sizeof(u32));
        std::memcpy(view->floor, base->floor, words * sizeof(u32));
    }
    std::memset(view->clock + dims, 0, (view->num_dims - dims) * sizeof(u32));
    std::memset(view->floor + words, 0, (view->num_words - words) * sizeof(u32));
    return ViewRef(view);
}

inline ViewRef join(const ViewRef& a, const ViewRef& b) {
    if (!a || a == b) return b;
    if (!b) return a;
    ViewRef both = copy_of(a.get());
    raise(both.get(), b.get());
    return both;
}

// What one thread knows: a shared view, a few later facts, and its own clock.
class Knowledge {
public:
    u32 dim = 0;
    u32 clock = 1;

    void start(ViewRef base, u32 own_dim, u32 own_clock) {
        base_ = std::move(base);
        num_facts_ = 0;
        dim = own_dim;
        clock = own_clock;
        num_seen_ = 0;
    }

    Epoch now() const { return {dim, clock}; }

    bool knows(Epoch e) const {
        if (e.clock == 0 || e.dim == dim) return true;
        if (base_ && base_->clock_of(e.dim) >= e.clock) return true;
        return fact(e.dim * 2) >= e.clock;
    }
    u32 clock_of(u32 other) const {
        if (other == dim) return clock;
        return std::max(base_ ? base_->clock_of(other) : 0, fact(other * 2));
    }
    u32 floor_of(u32 word) const {
        return std::max(base_ ? base_->floor_of(word) : 0, fact(word * 2 + 1));
    }
    void raise_clock(u32 other, u32 value) { learn(other * 2, value); }
    void raise_floor(u32 word, u32 value) { learn(word * 2 + 1, value); }

    // Everything known now, own accesses included; what this thread does next is newer.
    ViewRef snapshot() {
        settle();
        ++clock;
        return base_;
    }
    void join(const ViewRef& view) {
        if (!view || view == base_) return;
        for (u32 i = 0; i < num_seen_; ++i) {
            if (seen_[i] == view) return;
        }
        settle();
        raise(base_.get(), view.get());
        seen_[next_seen_++ % kSeen] = view;
        num_seen_ = std::min(num_seen_ + 1, kSeen);
    }
    // Threads of a barrier: all know what any of them knew.
    template <class Threads>
    static void meet(const Threads& threads) {
        ViewRef all = copy_of(nullptr);
        const View* last = nullptr;
        for (Knowledge* k : threads) {
            if (k->base_ && k->base_.get() != last) raise(all.get(), k->base_.get());
            last = k->base_.get();
            k->apply_facts(all.get());
            all->clock[k->dim] = std::max(all->clock[k->dim], k->clock);
        }
        for (Knowledge* k : threads) {
            k->base_ = all;
            k->num_facts_ = 0;
            ++k->clock;
        }
    }

private:
    static constexpr u32 kFacts = 16;
    static constexpr u32 kSeen = 4;
    struct Fact {
        u32 key;
        u32 value;
    };

    u32 fact(u32 key) const {
        for (u32 i = 0; i < num_facts_; ++i) {
            if (facts_[i].key == key) return facts_[i].value;
        }
        return 0;
    }
    void learn(u32 key, u32 value) {
        for (u32 i = 0; i < num_facts_; ++i) {
            if (facts_[i].key == key) {
                facts_[i].value = std::max(facts_[i].value, value);
                return;
            }
        }
        if (num_facts_ == kFacts) settle();
        facts_[num_facts_++] = {key, value};
    }
    void apply_facts(View* view) const {
        for (u32 i = 0; i < num_facts_; ++i) {
            u32 key = facts_[i].key;
            u32& place = key & 1 ? view->floor[key >> 1] : view->clock[key >> 1];
            place = std::max(place, facts_[i].value);
        }
    }
    // Puts the facts into a view of this thread's own.
    void settle() {
        bool is_own = base_ && base_->refs == 1 && base_->num_dims == view_pool.num_dims &&
                      base_->num_words == view_pool.num_words;
        if (!is_own) base_ = copy_of(base_.get());
        apply_facts(base_.get());
        base_->clock[dim] = std::max(base_->clock[dim], clock);
        num_facts_ = 0;
    }

    ViewRef base_;
    Fact facts_[kFacts];
    u32 num_facts_ = 0;
    ViewRef seen_[kSeen];
    u32 num_seen_ = 0;
    u32 next_seen_ = 0;
};

}  // namespace sim
