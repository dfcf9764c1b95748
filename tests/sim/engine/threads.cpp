// Threads, warps and blocks: who runs, who waits for whom.
#include <cstring>

#include "engine/machine.h"

namespace sim {
namespace {

Warp& warp_of(Thread& t) { return t.block->warps[t.index / 32]; }
u32 lane_bit(const Thread& t) { return 1u << (t.index % 32); }

void list_warp(Warp& warp) {
    if (warp.slot >= 0) return;
    warp.slot = static_cast<i64>(m.runnable_warps.size());
    m.runnable_warps.push_back(&warp);
}
void unlist_warp(Warp& warp) {
    Warp* last = m.runnable_warps.back();
    m.runnable_warps[static_cast<std::size_t>(warp.slot)] = last;
    last->slot = warp.slot;
    m.runnable_warps.pop_back();
    warp.slot = -1;
}

void note_progress() {
    m.last_progress = m.now;
    m.idle_step = 1000;
}

void record_sync(Thread& t, Did did, u64 value, Where where) {
    m.trace.add({m.step, value, 0, where, 0, 0xffff, 0, static_cast<u16>(t.block->index),
                 static_cast<u16>(t.index), static_cast<u8>(t.rank), did, Order::weak,
                 Scope::none, false});
}

// ---- block barriers ----

void finish_block_barrier(Block& block) {
    std::vector<Knowledge*> all;
    std::vector<Thread*> waiting;
    for (Thread* t : block.threads) {
        if (t->state == State::block) {
            all.push_back(&t->knowledge);
            waiting.push_back(t);
        }
    }
    Knowledge::meet(all);
    for (Thread* t : waiting) {
        t->result = block.predicate;
        make_runnable(*t);
    }
    block.arrived = 0;
    block.predicate = false;
    note_progress();
}

void check_block_barrier(Block& block) {
    if (block.arrived > 0 && block.arrived + block.exited == block.threads.size()) {
        finish_block_barrier(block);
    }
}

// ---- operations of a whole warp ----

void check_warp(Warp& warp) {
    u32 lanes = static_cast<u32>(std::min<std::size_t>(32, warp.block->threads.size() - warp.index * 32));
    u32 all = lanes == 32 ? ~0u : (1u << lanes) - 1;
    if (warp.arrived == 0) return;
    if (warp.arrived & warp.exited || (warp.exited && (warp.arrived | warp.exited) == all)) {
        fatal("a lane has exited while others of its warp wait for all 32");
    }
    if (warp.arrived != all) return;
    Thread** first = &warp.block->threads[warp.index * 32];
    u32 ballot = 0;
    for (u32 i = 0; i < lanes; ++i) ballot |= (first[i]->warp_value & 1 ? 1u : 0u) << i;
    std::vector<Knowledge*> knowledge;
    for (u32 i = 0; i < lanes; ++i) {
        Thread& t = *first[i];
        if (warp.op == WarpOp::ballot) t.result = ballot;
        if (warp.op == WarpOp::shuffle) {
            t.result = static_cast<u32>(first[t.warp_source % lanes]->warp_value);
        }
        knowledge.push_back(&t.knowledge);
    }
    // bar.warp.sync orders memory; votes and shuffles do not.
    if (warp.op == WarpOp::barrier) Knowledge::meet(knowledge);
    warp.arrived = 0;
    for (u32 i = 0; i < lanes; ++i) make_runnable(*first[i]);
    note_progress();
}

// ---- a thread's life ----

void end_thread(Thread& t) {
    check_copies_at_exit(t);
    Block& block = *t.block;
    Launch& launch = *block.launch;
    if (!t.fiber.stack_is_intact()) fatal("a fiber's stack overflowed");
    t.state = State::exited;
    ViewRef last = t.knowledge.snapshot();
    launch.end = join(launch.end, last);
    Rank& rank = m.ranks[t.rank];
    rank.clocks[t.knowledge.dim - rank.first_dim] = t.knowledge.clock;
    t.release_gpu = t.release_sys = t.proxy = ViewRef();
    t.pending.clear();
    ++block.exited;
    warp_of(t).exited |= lane_bit(t);
    if (block.exited == block.threads.size()) {
        for (auto& copy : m.copies) {
            if (copy->block == &block) fatal("a block ends with a bulk copy in flight");
        }
        check_loads_at_exit(block, t.rank);
        ++launch.exited;
    }
    note_progress();
    check_block_barrier(block);
    check_warp(warp_of(t));
}

void thread_body(void* argument) {
    Thread& t = *static_cast<Thread*>(argument);
    const Command& command = *t.block->launch->command;
    command.enter(command.data.data());
    end_thread(t);
    for (;;) suspend(t, State::exited);
}

Thread& new_thread() {
    if (m.free_threads.empty()) {
        m.threads.push_back(std::make_unique<Thread>());
        return *m.threads.back();
    }
    Thread& t = *m.free_threads.back();
    m.free_threads.pop_back();
    return t;
}

}  // namespace

void suspend(Thread& t, State state) {
    if (state != State::runnable) {
        t.state = state;
        Warp& warp = warp_of(t);
        warp.runnable &= ~lane_bit(t);
        if (warp.runnable == 0 && warp.slot >= 0) unlist_warp(warp);
    }
    t.fiber.suspend();
}

void make_runnable(Thread& t) {
    t.state = State::runnable;
    Warp& warp = warp_of(t);
    warp.runnable |= lane_bit(t);
    list_warp(warp);
}

void maybe_switch(Thread& t, Where where) {
    t.where = where;
    t.polls = false;
    ++m.step;
    if (--m.slice <= 0) suspend(t, State::runnable);
}

void start_block(Launch& launch, u32 index) {
    Block& block = *launch.blocks[index];
    const Command& command = *launch.command;
    Rank& rank = m.ranks[launch.rank];
    block.started = true;
    block.sm = m.options.num_sms ? index % m.options.num_sms : index / m.profile.blocks_per_sm;
    block.shared_memory.assign(command.shared_bytes + 256, 0);
    for (u8& byte : block.shared_memory) byte = static_cast<u8>(m.random.next());
    u64 base = reinterpret_cast<u64>(block.shared_memory.data());
    block.shared = block.shared_memory.data() + (128 - base % 128) % 128;
    block.shared_cells.assign(command.shared_bytes / 4 + 4, {});
    block.warps.resize((command.threads + 31) / 32);
    for (u32 w = 0; w < block.warps.size(); ++w) {
        block.warps[w].block = &block;
        block.warps[w].index = w;
        block.warps[w].priority = m.random.next();
    }
    for (u32 i = 0; i < command.threads; ++i) {
        Thread& t = new_thread();
        u32 slot = index * m.options.num_threads + i;
        t.block = &block;
        t.rank = launch.rank;
        t.index = i;
        t.where = {"(start)", 0};
        t.knowledge.start(launch.start, rank.first_dim + slot, rank.clocks[slot] + 1);
        t.proxy = launch.start;
        t.committed = t.store_reads = t.store_writes = t.proxy_fences = 0;
        t.watches.clear();
        t.turn_stale = t.turn_active = false;
        t.last_record = 0;
        block.threads.push_back(&t);
        t.fiber.start(thread_body, &t);
        make_runnable(t);
    }
}

u32 thread_index() { return m.current->index; }
u32 block_index() { return m.current->block->index; }
u32 num_blocks() { return m.current->block->launch->command->grid; }
u32 num_threads() { return m.current->block->launch->command->threads; }
u32 sm_index() { return m.current->block->sm; }
void* shared_base() { return m.current->block->shared; }

bool block_barrier(bool predicate, Where where) {
    Thread& t = *m.current;
    t.where = where;
    ++m.step;
    record_sync(t, Did::block_barrier, predicate, where);
    Block& block = *t.block;
    block.predicate |= predicate;
    ++block.arrived;
    t.state = State::block;
    if (block.arrived + block.exited == block.threads.size()) {
        finish_block_barrier(block);
        suspend(t, State::runnable);
    } else {
        suspend(t, State::block);
    }
    return t.result != 0;
}

u32 warp_meet(WarpOp op, u32 value, u32 source_lane, Where where) {
    Thread& t = *m.current;
    t.where = where;
    ++m.step;
    Warp& warp = warp_of(t);
    if (warp.arrived != 0 && warp.op != op) {
        fatal(std::string("lanes of one warp meet in different operations, one at ") + where.file +
              ":" + std::to_string(where.line));
    }
    warp.op = op;
    warp.arrived |= lane_bit(t);
    t.warp_value = value;
    t.warp_source = source_lane;
    t.state = State::warp;
    warp.runnable &= ~lane_bit(t);
    check_warp(warp);
    if (t.state == State::runnable) {
        suspend(t, State::runnable);
    } else {
        suspend(t, State::warp);
    }
    return t.result;
}

// ---- time and polling ----

u64 global_timer(Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    return m.now + m.ranks[m.gpu_of(t.rank)].clock_offset + t.block->skew;
}

void wake_watchers(u64 key) {
    auto found = m.watchers.find(key);
    if (found == m.watchers.end()) return;
    std::vector<Thread*> woken;
    woken.swap(found->second);
    for (Thread* t : woken) {
        if (t->state == State::spinning) make_runnable(*t);
    }
}

void poll_pause(Where where) {
    Thread& t = *m.current;
    t.where = where;
    t.polls = true;
    ++m.step;
    bool changed = t.turn_stale || t.turn_active || m.step < t.block->restless_until;
    for (const Watch& w : t.watches) {
        if (w.key >> 63) {  // an mbarrier: its phase
            auto found = t.block->mbarriers.find(reinterpret_cast<void*>(w.key << 1 >> 1));
            changed |= found == t.block->mbarriers.end() || found->second.phase != w.version;
        } else {
            Region& region = *m.regions[w.key >> 40];
            Cell& cell = region.cells[(w.key & 0xffffffffffull) >> m.options.granule_shift];
            changed |= cell.write.record != w.version;
        }
    }
    if (changed) {
        t.watches.clear();
        t.turn_stale = t.turn_active = false;
        suspend(t, State::runnable);
        return;
    }
    for (const Watch& w : t.watches) {
        std::vector<Thread*>& list = m.watchers[w.key];
        if (std::find(list.begin(), list.end(), &t) == list.end()) list.push_back(&t);
        if (!(w.key >> 63)) {
            Region& region = *m.regions[w.key >> 40];
            region.cells[(w.key & 0xffffffffffull) >> m.options.granule_shift].watched = true;
        }
    }
    suspend(t, State::spinning);
    t.watches.clear();
    t.turn_stale = t.turn_active = false;
}

}  // namespace sim
