// Control words: strong accesses. A word keeps its writes in coherence order; a reader may get any
// of them that is not older than what it is ordered after, until the newest becomes visible to it.
#include <cstring>

#include "engine/machine.h"

namespace sim {
namespace {

u8 strength_of(Scope scope) {
    if (scope == Scope::sys) return kSysScope;
    return scope == Scope::gpu ? kGpuScope : kWeakAccess;
}

u32 record_access(Thread& t, Did did, Place at, u32 bytes, u64 value, Order order, Scope scope,
                  Where where, bool stale = false) {
    const Record* last = m.trace.find(t.last_record);
    bool again = last && did == Did::load && last->did == did && last->offset == at.offset &&
                 last->region == at.region->index && last->value == value;
    if (again) return t.last_record;  // a poll that saw the same as before
    Record r{m.step, value, at.offset, where, 0, static_cast<u16>(at.region->index),
             static_cast<u16>(bytes), static_cast<u16>(t.block->index),
             static_cast<u16>(t.index), static_cast<u8>(t.rank), did, order, scope, stale};
    return t.last_record = m.trace.add(r);
}

u64 value_at(Place at, u32 bytes) {
    u64 value = 0;
    std::memcpy(&value, &at.region->bytes[at.offset], std::min(bytes, 8u));
    return value;
}
u64 high_at(Place at, u32 bytes) {
    return bytes == 16 ? value_at({at.region, at.offset + 8}, 8) : 0;
}

Cell& cell_at(Place at) { return at.region->cells[at.offset >> m.options.granule_shift]; }

Word* word_at(Place at, u32 bytes) {
    u16 id = cell_at(at).word;
    if (id == 0) return nullptr;
    Word& word = *m.words[id];
    if (word.offset != at.offset || word.bytes != bytes) {
        fatal("accesses of different sizes to " + m.trace.name_of(at.region->index, at.offset));
    }
    return &word;
}

Word& make_word(Place at, u32 bytes) {
    if (Word* word = word_at(at, bytes)) return *word;
    if (view_pool.num_words >= kMaxWords) fatal("the simulator has no words left (kMaxWords)");
    auto word = std::make_unique<Word>();
    word->id = view_pool.num_words++;
    word->region = at.region->index;
    word->offset = at.offset;
    word->bytes = bytes;
    Write first;
    first.value = value_at(at, bytes);
    first.high = high_at(at, bytes);
    first.mark = cell_at(at).write;
    word->writes.push_back(first);
    for (u32 i = 0; i < bytes; i += m.granule) {
        cell_at({at.region, at.offset + i}).word = static_cast<u16>(word->id);
    }
    m.words.resize(view_pool.num_words);
    m.words[word->id] = std::move(word);
    return *m.words[cell_at(at).word];
}

// Release patterns: what a reader acquires with this write.
void attach_messages(Thread& t, Write& write, Order order, Scope scope, const Write* before,
                     bool rmw) {
    write.for_gpu = t.release_gpu;
    write.for_sys = t.release_sys;
    if (order == Order::release || order == Order::acq_rel) {
        write.for_gpu = t.knowledge.snapshot();
        if (scope == Scope::sys) write.for_sys = write.for_gpu;
    }
    // A read-modify-write continues what it read; a store continues this thread's own release.
    if (before && (rmw || before->mark.epoch.dim == t.knowledge.dim)) {
        write.for_gpu = join(write.for_gpu, before->for_gpu);
        write.for_sys = join(write.for_sys, before->for_sys);
    }
}

void push_write(Word& word, Write write) {
    word.writes.push_back(std::move(write));
    if (word.writes.size() > 24) {
        word.writes.erase(word.writes.begin(), word.writes.begin() + 8);
        word.first += 8;
    }
}

void make_slow(Write& write) {
    if (!m.random.chance(m.profile.slow_chance)) return;
    write.slow_until = m.step + m.random.below(m.profile.slow_steps) + 1;
    write.slow_ranks = static_cast<u32>(m.random.next());
}

const ViewRef& message_for(const Write& write, u32 reader_rank) {
    bool same = m.gpu_of(m.rank_of_dim[write.mark.epoch.dim]) == m.gpu_of(reader_rank);
    return same ? write.for_gpu : write.for_sys;
}

Sm& sm_of(Thread& t) { return m.sms[static_cast<u64>(m.gpu_of(t.rank)) << 32 | t.block->sm]; }

void acquired(Thread& t) {
    t.block->last_acquire = m.step;
    sm_of(t).last_acquire = m.step;
}

void take_message(Thread& t, Word& word, const Write& write, Order order, Scope scope) {
    bool same = m.gpu_of(m.rank_of_dim[write.mark.epoch.dim]) == m.gpu_of(t.rank);
    bool acquires = (order == Order::acquire || order == Order::acq_rel) &&
                    (same || scope == Scope::sys);
    if (acquires) {
        for (const Pending& p : t.pending) {
            if (p.word == word.id) t.knowledge.join(p.view);
        }
    }
    if (order == Order::acquire || order == Order::acq_rel) acquired(t);
    if (!morally_strong(t.rank, strength_of(scope), m.rank_of_dim[write.mark.epoch.dim],
                        write.mark.strength)) {
        return;
    }
    const ViewRef& message = message_for(write, t.rank);
    if (!message) return;
    if (acquires || m.profile.loads != Loads::ptx) {
        t.knowledge.join(message);
        return;
    }
    for (const Pending& p : t.pending) {
        if (p.view == message) return;
    }
    t.pending.push_back({word.id, same, message});
}

struct Value {
    u64 low, high;
};

Value read_word(Thread& t, Word& word, Place at, Order order, Scope scope, Where where) {
    u32 floor = std::max(t.knowledge.floor_of(word.id), word.first);
    u32 chosen = word.newest();
    for (; chosen > floor; --chosen) {
        const Write& write = word.writes[chosen - word.first];
        bool slow = m.step < write.slow_until && (write.slow_ranks >> t.rank & 1);
        if (!slow && !m.random.chance(m.profile.stale_chance)) break;
    }
    const Write& write = word.writes[chosen - word.first];
    bool stale = chosen != word.newest();
    if (stale) t.turn_stale = true;
    u8 strength = strength_of(scope);
    // Of a word of 16 bytes the trace shows the half with the epoch.
    u64 shown = word.bytes == 16 ? write.high : write.value;
    u32 record = record_access(t, Did::load, at, word.bytes, shown, order, scope, where, stale);
    Actor a = actor_of(t, strength, record);
    u32 writer = m.rank_of_dim[write.mark.epoch.dim];
    if (!morally_strong(t.rank, strength, writer, write.mark.strength) && !a.knows(write.mark)) {
        race("read without being ordered after the write", a, write.mark, at,
             {{static_cast<int>(t.rank), a.mark.op}});
    }
    t.knowledge.raise_floor(word.id, chosen);
    Value value = {write.value, write.high};
    take_message(t, word, write, order, scope);
    return value;
}

void watch(Thread& t, Place at) {
    Cell& cell = cell_at(at);
    u64 key = static_cast<u64>(at.region->index) << 40 | at.offset;
    for (Watch& w : t.watches) {
        if (w.key == key) {
            w.version = cell.write.record;
            return;
        }
    }
    t.watches.push_back({key, cell.write.record});
}

// ---- L1: lines of 16 bytes that an SM has read ----

bool stale_in_l1(Thread& t, Place at, u32 bytes, u8* out) {
    Sm& sm = sm_of(t);
    auto found = sm.lines.find(static_cast<u64>(at.region->index) << 40 | at.offset >> 4);
    if (found == sm.lines.end()) return false;
    u64 limit = m.profile.loads == Loads::strict ? t.block->last_acquire : sm.last_acquire;
    if (found->second.fetched <= limit || m.random.chance(m.profile.l1_misses)) return false;
    std::memcpy(out, found->second.bytes + at.offset % 16, bytes);
    return true;
}

void fill_l1(Thread& t, Place at) {
    u64 line = at.offset & ~15ull;
    if (line + 16 > at.region->bytes.size()) return;
    Sm& sm = sm_of(t);
    L1Line& entry = sm.lines[static_cast<u64>(at.region->index) << 40 | line >> 4];
    entry.fetched = m.step;
    std::memcpy(entry.bytes, &at.region->bytes[line], 16);
}

void load_data(Thread& t, Place at, u32 bytes, u8* out, Order order, Scope scope, Cache cache,
               Where where) {
    u32 record = record_access(t, Did::load, at, bytes, 0, order, scope, where);
    bool cached = m.profile.loads != Loads::ptx && order == Order::weak && cache == Cache::allocate;
    u8 old[16];
    bool stale = cached && bytes <= 16 && stale_in_l1(t, at, bytes, old);
    read_bytes(actor_of(t, strength_of(scope), record), at, bytes, out);
    if (stale) {
        std::memcpy(out, old, bytes);
    } else if (cached) {
        fill_l1(t, at);
    }
    if (Record* r = &m.trace.ring[record % Trace::kSize]; r->number == record) {
        std::memcpy(&r->value, out, std::min(bytes, 8u));
        r->stale = stale;
    }
}

void drop_from_l1(Thread& t, Place at, u32 bytes) {
    if (m.profile.loads == Loads::ptx) return;
    Sm& sm = sm_of(t);
    for (u64 line = at.offset >> 4; line <= (at.offset + bytes - 1) >> 4; ++line) {
        sm.lines.erase(static_cast<u64>(at.region->index) << 40 | line);
    }
}

void store_word(Thread& t, Place at, u32 bytes, Value value, Order order, Scope scope,
                Where where) {
    Word& word = make_word(at, bytes);
    Write write;
    write.value = value.low;
    write.high = value.high;
    attach_messages(t, write, order, scope, &word.writes.back(), false);
    u64 shown = bytes == 16 ? value.high : value.low;
    u32 record = record_access(t, Did::store, at, bytes, shown, order, scope, where);
    Actor a = actor_of(t, strength_of(scope), record);
    write.mark = a.mark;
    make_slow(write);
    push_write(word, std::move(write));
    t.knowledge.raise_floor(word.id, word.newest());
    write_bytes(a, at, bytes, reinterpret_cast<u8*>(&value));
}

}  // namespace

u64 load(const void* p, u32 bytes, Order order, Scope scope, Cache cache, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    Place at = translate(p, bytes, t.rank, where);
    int owner = at.region->owner;
    if (!m.options.remote_loads && owner >= 0 && owner != static_cast<int>(m.gpu_of(t.rank))) {
        fatal("a load of another rank's " + m.trace.name_of(at.region->index, at.offset));
    }
    if (order != Order::weak) watch(t, at);
    if (order != Order::weak) {
        if (order == Order::acquire) acquired(t);
        if (bytes >= 4) {
            if (Word* word = word_at(at, bytes)) {
                if (cell_at(at).use == Use::dead) fatal("a strong load outside of live memory");
                return read_word(t, *word, at, order, scope, where).low;
            }
        }
    }
    u64 value = 0;
    load_data(t, at, bytes, reinterpret_cast<u8*>(&value), order, scope, cache, where);
    return value;
}

// A strong vector is as many words as it has elements, each as old as it likes.
void load16(void* out, const void* p, Order order, Scope scope, Cache cache, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    Place at = translate(p, 16, t.rank, where);
    bool words = false;
    for (u32 i = 0; i < 16; i += 4) words = words || cell_at({at.region, at.offset + i}).word;
    if (order == Order::weak || !words) {
        load_data(t, at, 16, static_cast<u8*>(out), order, scope, cache, where);
        return;
    }
    for (u32 i = 0; i < 4; ++i) {
        static_cast<u32*>(out)[i] = static_cast<u32>(
            load(static_cast<const u8*>(p) + 4 * i, 4, order, scope, cache, where));
    }
}

void load_word16(void* out, const void* p, Order order, Scope scope, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    Place at = translate(p, 16, t.rank, where);
    watch(t, at);
    if (Word* word = word_at(at, 16)) {
        if (cell_at(at).use == Use::dead) fatal("a strong load outside of live memory");
        Value value = read_word(t, *word, at, order, scope, where);
        std::memcpy(out, &value, 16);
        return;
    }
    load_data(t, at, 16, static_cast<u8*>(out), order, scope, Cache::allocate, where);
}

void store(void* p, u32 bytes, u64 value, Order order, Scope scope, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    t.turn_active = true;
    Place at = translate(p, bytes, t.rank, where);
    drop_from_l1(t, at, bytes);
    if (order == Order::weak) {
        u32 record = record_access(t, Did::store, at, bytes, value, order, scope, where);
        write_bytes(actor_of(t, kWeakAccess, record), at, bytes, reinterpret_cast<u8*>(&value));
        return;
    }
    store_word(t, at, bytes, {value, 0}, order, scope, where);
}

void store_word16(void* p, const void* data, Order order, Scope scope, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    t.turn_active = true;
    Place at = translate(p, 16, t.rank, where);
    drop_from_l1(t, at, 16);
    Value value;
    std::memcpy(&value, data, 16);
    store_word(t, at, 16, value, order, scope, where);
}

void store16(void* p, const void* data, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    t.turn_active = true;
    Place at = translate(p, 16, t.rank, where);
    drop_from_l1(t, at, 16);
    u64 value;
    std::memcpy(&value, data, 8);
    u32 record = record_access(t, Did::store, at, 16, value, Order::weak, Scope::none, where);
    write_bytes(actor_of(t, kWeakAccess, record), at, 16, static_cast<const u8*>(data));
}

u64 read_modify_write(void* p, u32 bytes, Rmw op, u64 operand, u64 expected, Order order,
                      Scope scope, bool returns, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    t.turn_active = true;
    Place at = translate(p, bytes, t.rank, where);
    if (at.region->owner != static_cast<int>(m.gpu_of(t.rank)) && scope != Scope::sys) {
        fatal("an atomic of gpu scope on memory of another rank: " + m.trace.name_of(at.region->index, at.offset));
    }
    Word& word = make_word(at, bytes);
    u64 before = word.writes.back().value;
    u64 after = op == Rmw::add ? before + operand : before | operand;
    bool writes = true;
    if (op == Rmw::cas) {
        writes = before == expected;
        after = operand;
    }
    if (op == Rmw::max) after = std::max(before, operand);
    if (bytes == 4) after &= 0xffffffffu;
    t.knowledge.raise_floor(word.id, word.newest());
    if (returns) {
        Write read = word.writes.back();
        take_message(t, word, read, order, scope);
    }
    u32 record = record_access(t, Did::rmw, at, bytes, writes ? after : before, order, scope, where);
    if (!writes) return before;
    Write write;
    write.value = after;
    attach_messages(t, write, order, scope, &word.writes.back(), true);
    Actor a = actor_of(t, strength_of(scope), record);
    write.mark = a.mark;
    make_slow(write);
    push_write(word, std::move(write));
    t.knowledge.raise_floor(word.id, word.newest());
    write_bytes(a, at, bytes, reinterpret_cast<u8*>(&after));
    return before;
}

void fence(Scope scope, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    std::vector<Pending> later;
    for (Pending& p : t.pending) {
        if (p.same_rank || scope == Scope::sys) {
            t.knowledge.join(p.view);
        } else {
            later.push_back(p);
        }
    }
    t.pending = later;
    acquired(t);
    t.release_gpu = t.knowledge.snapshot();
    if (scope == Scope::sys) t.release_sys = t.release_gpu;
    m.trace.add({m.step, 0, 0, where, 0, 0xffff, 0, static_cast<u16>(t.block->index),
                 static_cast<u16>(t.index), static_cast<u8>(t.rank), Did::fence, Order::acq_rel,
                 scope, false});
}

void host_store(u32 rank, Region& region, u64 offset, u32 value) {
    Place at{&region, offset};
    Word& word = make_word(at, 4);
    Rank& r = m.ranks[rank];
    u32 record = m.trace.add({m.step, value, offset, {"host", 0}, 0, static_cast<u16>(region.index),
                              4, 0xffff, 0, static_cast<u8>(rank), Did::host_store,
                              Order::relaxed, Scope::sys, false});
    Actor a;
    a.knowledge = &r.stream;
    a.host = true;
    a.mark = {r.stream.now(), record, r.op, kSysScope, false};
    a.rank = rank;
    Write write;
    write.value = value;
    write.mark = a.mark;
    push_write(word, std::move(write));
    write_bytes(a, at, 4, reinterpret_cast<u8*>(&value));
}

}  // namespace sim
