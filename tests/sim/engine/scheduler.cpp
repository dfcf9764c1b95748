// Who goes next. Everything that may happen is one of: a thread takes a step, a bulk copy goes on,
// a block or a host command starts, something happens from outside, or (if nothing else can)
// time passes.
#include <algorithm>
#include <cstring>

#include "engine/machine.h"

namespace sim {

void reset_stacks();

namespace {

bool is_starved(const Warp& warp) {
    const Profile& p = m.profile;
    if (m.step >= p.starved_until) return false;
    if (p.starved_rank >= 0 && static_cast<int>(warp.block->launch->rank) != p.starved_rank) return false;
    if (p.starved_block >= 0 && static_cast<int>(warp.block->index) != p.starved_block) return false;
    if (p.starved_warp >= 0 && static_cast<int>(warp.index) != p.starved_warp) return false;
    return p.starved_rank >= 0 || p.starved_block >= 0 || p.starved_warp >= 0;
}

bool may_run(const Warp& warp) {
    return !m.ranks[warp.block->launch->rank].frozen;
}

Warp* choose_warp() {
    Warp* best = nullptr;
    u32 n = static_cast<u32>(m.runnable_warps.size());
    if (n == 0) return nullptr;
    if (m.profile.policy != 1) {
        for (u32 tries = 0; tries < 4; ++tries) {
            Warp* warp = m.runnable_warps[m.random.below(n)];
            if (may_run(*warp) && !is_starved(*warp)) return warp;
        }
    }
    bool best_starved = true;
    for (Warp* warp : m.runnable_warps) {
        if (!may_run(*warp)) continue;
        bool starved = is_starved(*warp);
        bool better = !best || (best_starved && !starved) ||
                      (best_starved == starved && warp->priority > best->priority);
        if (better) {
            best = warp;
            best_starved = starved;
        }
    }
    return best;
}

u32 choose_lane(u32 lanes) {
    if (m.profile.lanes == 1) return static_cast<u32>(__builtin_ctz(lanes));
    if (m.profile.lanes == 2) return 31u - static_cast<u32>(__builtin_clz(lanes));
    for (u32 skip = m.random.below(static_cast<u32>(__builtin_popcount(lanes))); skip > 0; --skip) {
        lanes &= lanes - 1;
    }
    return static_cast<u32>(__builtin_ctz(lanes));
}

void run_warp(Warp& warp) {
    Thread& t = *warp.block->threads[warp.index * 32 + choose_lane(warp.runnable)];
    const Profile& p = m.profile;
    m.slice = 1;
    while (!m.random.chance(p.switch_chance) && m.slice < 64) ++m.slice;
    if (p.policy == 2) m.slice *= 8;
    m.current = &t;
    t.fiber.resume();
    m.current = nullptr;
    // Change points: whoever runs falls behind everybody else, or jumps ahead.
    if (p.policy == 1 && m.random.below(p.change_every) == 0) {
        warp.priority = m.random.chance(0.7) ? 0 : m.random.next();
    }
}

// ---- what the host does ----

u32 resident_blocks(const Rank& rank) {
    if (!rank.launch) return 0;
    u32 started = static_cast<u32>(rank.launch->blocks.size() - rank.launch->waiting.size());
    return started - rank.launch->exited;
}

void finish_launch(Rank& rank) {
    Launch& launch = *rank.launch;
    rank.stream.join(launch.end);
    for (auto& block : launch.blocks) {
        for (Thread* t : block->threads) m.free_threads.push_back(t);
    }
    m.trace.add({m.step, launch.command->op, 0, {"host", 0}, 0, 0xffff, 0, 0xffff, 0,
                 static_cast<u8>(launch.rank), Did::finish, Order::weak, Scope::none, false});
    rank.launch.reset();
    rank.not_before = m.step + m.random.below(m.profile.stream_delay + 1);
}

void host_access(Rank& rank, u32 number, Command& c) {
    Region& region = *m.regions[c.region];
    bool writes = c.action == Action::write;
    if (writes && c.unless != ~0ull) {
        u32 word;
        std::memcpy(&word, &m.regions[c.unless >> 32]->bytes[c.unless & 0xffffffff], 4);
        if (word != 0) return;
    }
    u32 record = m.trace.add({m.step, 0, c.offset, {"host", 0}, 0, static_cast<u16>(c.region),
                              static_cast<u16>(c.bytes), 0xffff, 0, static_cast<u8>(number),
                              writes ? Did::host_write : Did::host_read, Order::weak, Scope::none,
                              false});
    Actor a;
    a.knowledge = &rank.stream;
    a.host = true;
    a.rank = number;
    a.mark = {rank.stream.now(), record, c.op, kWeakAccess, false};
    Place at{&region, c.offset};
    if (writes) {
        write_bytes(a, at, static_cast<u32>(c.bytes), c.data.data());
    } else {
        c.data.resize(c.bytes);
        read_bytes(a, at, static_cast<u32>(c.bytes), c.data.data());
    }
    rank.stream.snapshot();
}

void start_command(Rank& rank, u32 number) {
    Command& c = rank.commands[rank.next_command++];
    rank.op = c.op;
    if (c.action == Action::mark) {
        mark_range(*m.regions[c.region], c.offset, c.bytes, c.use, c.owner_op);
        return;
    }
    if (c.action != Action::launch) {
        host_access(rank, number, c);
        return;
    }
    rank.launch = std::make_unique<Launch>();
    Launch& launch = *rank.launch;
    launch.command = &c;
    launch.rank = number;
    launch.start = rank.stream.snapshot();
    for (u32 i = 0; i < c.grid; ++i) {
        launch.blocks.push_back(std::make_unique<Block>());
        launch.blocks.back()->launch = &launch;
        launch.blocks.back()->index = i;
        launch.waiting.push_back(i);
    }
    for (auto& [key, sm] : m.sms) {  // a kernel starts with an empty L1
        if (key >> 32 == rank.gpu) sm.lines.clear();
    }
    m.trace.add({m.step, c.op, c.grid, {"host", 0}, 0, 0xffff, 0, 0xffff, 0,
                 static_cast<u8>(number), Did::launch, Order::weak, Scope::none, false});
}

// Starts something that waits to be started; false if there is nothing.
bool start_something(bool even_if_early) {
    u32 n = static_cast<u32>(m.ranks.size());
    u32 first = m.random.below(n);
    for (u32 i = 0; i < n; ++i) {
        u32 number = (first + i) % n;
        Rank& rank = m.ranks[number];
        if (rank.frozen) continue;
        if (rank.launch) {
            Launch& launch = *rank.launch;
            if (!launch.waiting.empty() && resident_blocks(rank) < m.options.slots) {
                std::size_t pick = m.random.below(static_cast<u32>(launch.waiting.size()));
                u32 index = launch.waiting[pick];
                launch.waiting.erase(launch.waiting.begin() + static_cast<i64>(pick));
                start_block(launch, index);
                return true;
            }
            if (launch.exited == launch.blocks.size()) {
                finish_launch(rank);
                return true;
            }
        } else if (rank.next_command < rank.commands.size()) {
            if (m.step < rank.not_before && !even_if_early) continue;
            start_command(rank, number);
            return true;
        }
    }
    return false;
}

// ---- what comes from outside ----

void make_restless(u32 rank, int block, u64 steps) {
    Launch* launch = m.ranks[rank].launch.get();
    if (!launch) return;
    for (auto& b : launch->blocks) {
        if (!b->started || (block >= 0 && static_cast<int>(b->index) != block)) continue;
        b->restless_until = m.step + steps;
        for (Thread* t : b->threads) {
            if (t->state == State::spinning) make_runnable(*t);
        }
    }
}

void happen(Event& e) {
    Rank& rank = m.ranks[e.rank];
    if (e.kind == Event::skew && (!rank.launch || e.block >= rank.launch->blocks.size() ||
                                  !rank.launch->blocks[e.block]->started)) {
        e.step = m.step + 50;
        e.done = rank.next_command == rank.commands.size() && !rank.launch;
        return;
    }
    e.done = true;
    Did did = e.kind == Event::freeze ? Did::freeze : Did::skew;
    if (e.kind == Event::freeze) rank.frozen = true;
    if (e.kind == Event::skew) {
        rank.launch->blocks[e.block]->skew += e.amount;
        make_restless(e.rank, static_cast<int>(e.block), 20000);
    }
    if (e.kind == Event::store) {
        host_store(e.rank, *m.regions[e.region], e.offset, static_cast<u32>(e.amount));
        for (u32 r = 0; r < m.ranks.size(); ++r) make_restless(r, -1, 20000);
        return;
    }
    m.trace.add({m.step, e.amount, 0, {"outside", 0}, 0, 0xffff, 0, static_cast<u16>(e.block), 0,
                 static_cast<u8>(e.rank), did, Order::weak, Scope::none, false});
}

void check_events(bool at_once) {
    for (Event& e : m.events) {
        if (!e.done && (m.step >= e.step || at_once)) {
            happen(e);
            at_once = false;
        }
    }
}

// ---- when nothing can run ----

bool advance_some_copy() {
    u32 n = static_cast<u32>(m.copies.size());
    if (n == 0) return false;
    u32 first = m.random.below(n);
    for (u32 i = 0; i < n; ++i) {
        u32 index = (first + i) % n;
        if (m.ranks[m.copies[index]->thread->rank].frozen) continue;
        advance_copy(index);
        return true;
    }
    return false;
}

bool all_done() {
    for (const Rank& rank : m.ranks) {
        if (!rank.frozen && (rank.launch || rank.next_command < rank.commands.size())) return false;
    }
    return true;
}

// Time passes: every spinning thread looks again.
bool pass_time() {
    bool somebody = false;
    m.now += m.idle_step;
    m.idle_step = std::min<u64>(m.idle_step * 2, m.options.hang_after / 64);
    for (auto& t : m.threads) {
        if (t->state == State::spinning && !m.ranks[t->rank].frozen) {
            make_runnable(*t);
            somebody = true;
        }
    }
    if (!somebody) report_hang("deadlock: no thread can run and none is polling");
    if (m.now - m.last_progress > m.options.hang_after) {
        report_hang("hang: " + std::to_string((m.now - m.last_progress) / 1000000) +
                    " virtual ms passed and nothing happened");
    }
    return somebody;
}

void take_step() {
    const Profile& p = m.profile;
    check_events(false);
    if (!m.copies.empty() && m.random.chance(p.copy_chance) && advance_some_copy()) return;
    if (m.random.chance(p.start_chance) && start_something(false)) return;
    if (Warp* warp = choose_warp()) {
        run_warp(*warp);
        return;
    }
    if (start_something(true) || advance_some_copy()) return;
    for (Event& e : m.events) {
        if (!e.done) {
            check_events(true);
            return;
        }
    }
    pass_time();
}

}  // namespace

void run_machine() {
    if (m.step == 0) reset_stacks();
    while (!m.over && !all_done() && m.step < m.options.stop_at) {
        take_step();
        if (m.step > m.options.max_steps) {
            report_hang("no end after " + std::to_string(m.step) + " steps");
        }
    }
}

}  // namespace sim
