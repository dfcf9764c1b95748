// The bulk copy engine: copies that happen some time after they were started, mbarriers, groups,
// and the shared memory that both the engine and ordinary accesses touch.
#include <cstring>

#include "engine/machine.h"

namespace sim {
namespace {

u32 record_copy(Thread& t, Did did, Place at, u32 bytes, u64 value, Where where) {
    return m.trace.add({m.step, value, at.offset, where, 0,
                        static_cast<u16>(at.region ? at.region->index : 0xffff),
                        static_cast<u16>(bytes), static_cast<u16>(t.block->index),
                        static_cast<u16>(t.index), static_cast<u8>(t.rank), did, Order::weak,
                        Scope::none, false});
}

Mbarrier& mbarrier_at(Thread& t, void* p, Where where) {
    auto found = t.block->mbarriers.find(p);
    if (found == t.block->mbarriers.end()) {
        fatal(std::string("an mbarrier that was not initialised at ") + where.file + ":" +
              std::to_string(where.line));
    }
    return found->second;
}

// ---- mbarriers ----

u64 watch_key(const void* p) { return reinterpret_cast<u64>(p) | 1ull << 63; }

void check_phase(void* p, Mbarrier& barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
    barrier.completed = barrier.arrived;
    wake_watchers(watch_key(p));
    m.last_progress = m.now;
    m.idle_step = 1000;
}

// ---- copies ----

Actor actor_of_copy(const Copy& copy, u32 dim, u32 record) {
    Actor a;
    a.view = copy.view.get();
    a.proxy = copy.proxy.get();
    a.rank = copy.thread->rank;
    a.mark = {{dim, copy.clock}, record, copy.block->launch->command->op, kWeakAccess, true};
    return a;
}

void read_source(Copy& copy) {
    Thread& t = *copy.thread;
    copy.data.resize(copy.bytes);
    Place at{m.regions[copy.region].get(), copy.offset};
    if (copy.is_store) {
        u32 record = record_copy(t, Did::copy_read, {nullptr, 0}, copy.bytes, copy.clock, copy.where);
        u64 offset = static_cast<u64>(copy.shared - copy.block->shared);
        shared_access(*copy.block, actor_of_copy(copy, t.store_reads, record), offset, copy.bytes,
                      false, nullptr);
        std::memcpy(copy.data.data(), copy.shared, copy.bytes);
    } else {
        u32 record = record_copy(t, Did::copy_read, at, copy.bytes, copy.clock, copy.where);
        read_bytes(actor_of_copy(copy, copy.barrier->dim, record), at, copy.bytes,
                   copy.data.data());
    }
    copy.has_read = true;
}

void write_target(Copy& copy) {
    Thread& t = *copy.thread;
    Place at{m.regions[copy.region].get(), copy.offset};
    if (copy.is_store) {
        u32 record = record_copy(t, Did::copy_write, at, copy.bytes, copy.clock, copy.where);
        write_bytes(actor_of_copy(copy, t.store_writes, record), at, copy.bytes, copy.data.data());
    } else {
        u32 record = record_copy(t, Did::copy_write, {nullptr, 0}, copy.bytes, copy.clock, copy.where);
        u64 offset = static_cast<u64>(copy.shared - copy.block->shared);
        shared_access(*copy.block, actor_of_copy(copy, copy.barrier->dim, record), offset,
                      copy.bytes, true, nullptr);
        std::memcpy(copy.shared, copy.data.data(), copy.bytes);
        copy.barrier->bytes -= copy.bytes;
        for (auto& [p, barrier] : copy.block->mbarriers) {
            if (&barrier == copy.barrier) check_phase(p, barrier);
        }
    }
}

bool group_is_done(const Thread& t) {
    for (const auto& copy : m.copies) {
        if (copy->thread != &t || !copy->is_store || copy->clock > t.wait_group) continue;
        if (!t.wait_reads_only || !copy->has_read) return false;
    }
    return true;
}

void start_copy(Thread& t, std::unique_ptr<Copy> copy, const void* global, void* shared, u32 bytes,
                Where where) {
    Place at = translate(global, 16, t.rank, where);
    if (bytes == 0 || bytes % 16 != 0 || at.offset + bytes > at.region->bytes.size()) {
        fatal(std::string("a bulk copy of a wrong size at ") + where.file + ":" +
              std::to_string(where.line));
    }
    shared_offset(*t.block, shared, bytes, where);
    copy->thread = &t;
    copy->block = t.block;
    copy->region = at.region->index;
    copy->offset = at.offset;
    copy->shared = static_cast<u8*>(shared);
    copy->bytes = bytes;
    copy->view = t.knowledge.snapshot();
    copy->proxy = t.proxy;
    copy->where = where;
    record_copy(t, copy->is_store ? Did::bulk_store : Did::bulk_load, at, bytes, copy->clock, where);
    m.copies.push_back(std::move(copy));
}

}  // namespace

void mbarrier_init(void* p, u32 arrivals, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    Mbarrier& barrier = t.block->mbarriers[p];
    barrier = Mbarrier{};
    barrier.block = t.block;
    barrier.dim = m.new_dim(t.rank);
    barrier.arrivals = barrier.pending = arrivals;
    barrier.maker = &t;
}

void fence_mbarrier_init(Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    for (auto& [p, barrier] : t.block->mbarriers) {
        if (barrier.maker == &t) barrier.fenced = true;
    }
}

void mbarrier_arrive_expect(void* p, u32 bytes, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    t.turn_active = true;
    Mbarrier& barrier = mbarrier_at(t, p, where);
    if (barrier.pending == 0) fatal("more arrivals at an mbarrier than it was made for");
    barrier.arrived = join(barrier.arrived, t.knowledge.snapshot());
    barrier.bytes += bytes;
    --barrier.pending;
    record_copy(t, Did::mbarrier_arrive, {nullptr, 0}, 0, bytes, where);
    check_phase(p, barrier);
}

bool mbarrier_try_wait(void* p, u32 parity, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    Mbarrier& barrier = mbarrier_at(t, p, where);
    if ((barrier.phase & 1) != (parity & 1)) {
        if (m.random.chance(m.profile.false_wait)) {
            t.turn_stale = true;
            return false;
        }
        t.knowledge.join(barrier.completed);
        t.knowledge.raise_clock(barrier.dim, barrier.phase);
        record_copy(t, Did::mbarrier_wait, {nullptr, 0}, 0, barrier.phase, where);
        return true;
    }
    t.watches.push_back({watch_key(p), barrier.phase});
    return false;
}

void bulk_load(void* shared, const void* global, u32 bytes, void* p, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    t.turn_active = true;
    Mbarrier& barrier = mbarrier_at(t, p, where);
    if (!barrier.fenced) fatal("a bulk load signals an mbarrier whose init was not fenced");
    auto copy = std::make_unique<Copy>();
    copy->barrier = &barrier;
    copy->clock = barrier.phase + 1;
    start_copy(t, std::move(copy), global, shared, bytes, where);
}

void bulk_store(void* global, const void* shared, u32 bytes, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    t.turn_active = true;
    if (t.store_reads == 0) {
        t.store_reads = m.new_dim(t.rank);
        t.store_writes = m.new_dim(t.rank);
    }
    auto copy = std::make_unique<Copy>();
    copy->is_store = true;
    copy->clock = t.committed + 1;
    start_copy(t, std::move(copy), global, const_cast<void*>(shared), bytes, where);
}

void bulk_commit(Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    ++t.committed;
    record_copy(t, Did::bulk_commit, {nullptr, 0}, 0, t.committed, where);
}

void bulk_wait(u32 pending, bool read_only, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    t.turn_active = true;
    if (t.committed <= pending) return;
    t.wait_group = t.committed - pending;
    t.wait_reads_only = read_only;
    if (!group_is_done(t)) suspend(t, State::copying);
    if (t.store_reads != 0) {
        t.knowledge.raise_clock(t.store_reads, t.wait_group);
        if (!read_only) t.knowledge.raise_clock(t.store_writes, t.wait_group);
    }
    record_copy(t, Did::bulk_wait, {nullptr, 0}, read_only ? 1 : 0, t.wait_group, where);
}

void fence_proxy_shared(Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    u32 dim = m.fence_of_dim[t.knowledge.dim];
    if (dim == 0) {
        dim = m.new_dim(t.rank);
        m.fence_of_dim[t.knowledge.dim] = dim;
    }
    t.knowledge.raise_clock(dim, t.knowledge.clock);
    t.knowledge.snapshot();  // later accesses are newer than the fence
    record_copy(t, Did::proxy_fence, {nullptr, 0}, 0, 0, where);
}

void fence_proxy_global(Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    t.proxy = t.knowledge.snapshot();
    record_copy(t, Did::proxy_fence, {nullptr, 0}, 0, 1, where);
}

void check_group_wait(Thread& t) {
    if (t.state == State::copying && group_is_done(t)) make_runnable(t);
}

// Lets one copy go on: it reads its source, or writes its target and is done.
void advance_copy(std::size_t index) {
    Copy& copy = *m.copies[index];
    Thread& t = *copy.thread;
    ++m.step;
    if (!copy.has_read) {
        read_source(copy);
        if (m.random.chance(0.5)) {
            check_group_wait(t);
            return;
        }
    }
    write_target(copy);
    if (index + 1 < m.copies.size()) std::swap(m.copies[index], m.copies.back());
    m.copies.pop_back();
    check_group_wait(t);
}

void check_copies_at_exit(Thread& t) {
    if (t.store_writes == 0) return;
    Mark last;
    last.epoch = {t.store_writes, t.committed};
    if (t.knowledge.knows(last.epoch)) return;
    add_fault({"unfinished copies",
        "rank " + std::to_string(t.rank) + " block " + std::to_string(t.block->index) + " thread " +
            std::to_string(t.index) + " exits before all of its bulk stores were waited for",
        {{static_cast<int>(t.rank), t.block->launch->command->op}}, ""});
}

void check_loads_at_exit(const Block& block, u32 rank) {
    for (const auto& [p, barrier] : block.mbarriers) {
        // Its last thread has ended: launch->end is what any of its threads knew.
        if (block.launch->end->clock_of(barrier.dim) >= barrier.phase) continue;
        add_fault({"unfinished copies",
            "rank " + std::to_string(rank) + " block " + std::to_string(block.index) +
                " exits before all of its bulk loads were waited for",
            {{static_cast<int>(rank), block.launch->command->op}}, ""});
    }
}

}  // namespace sim
