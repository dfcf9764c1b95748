// The functions Python calls (ctypes). One machine at a time; sim_new() begins a new run.
#include <dlfcn.h>

#include <cstring>

#include "engine/machine.h"

namespace sim {

ViewPool view_pool;
Machine m;

namespace {

std::string text_buffer;

void draw_profile() {
    Random& r = m.random;
    Profile p;
    const double switches[] = {0.02, 0.1, 0.3, 0.7};
    const double chances[] = {0.0, 0.1, 0.4, 0.8};
    const double copies[] = {0.01, 0.1, 0.4};
    const u32 slow[] = {50, 400, 4000};
    p.policy = r.below(3);
    p.switch_chance = switches[r.below(4)];
    p.stale_chance = chances[r.below(4)];
    p.slow_chance = chances[r.below(3)];
    p.slow_steps = slow[r.below(3)];
    p.copy_chance = copies[r.below(3)];
    p.start_chance = copies[r.below(3)];
    p.false_wait = r.chance(0.5) ? 0.0 : 0.3;
    p.change_every = 30 + r.below(600);
    p.lanes = r.below(4) < 2 ? 0 : 1 + r.below(2);
    p.stream_delay = r.chance(0.5) ? 0 : r.below(5000);
    if (r.chance(0.6)) {
        p.starved_rank = static_cast<int>(r.below(static_cast<u32>(m.ranks.size())));
        if (r.chance(0.5)) p.starved_block = static_cast<int>(r.below(m.options.max_blocks));
        if (r.chance(0.3)) p.starved_warp = static_cast<int>(r.below(m.options.num_threads / 32));
        p.starved_until = r.below(40000);
    }
    p.loads = static_cast<Loads>(m.options.loads < 0 ? 0 : m.options.loads);
    p.blocks_per_sm = m.options.blocks_per_sm;
    m.profile = p;
}

}  // namespace
}  // namespace sim

using namespace sim;

extern "C" {

void sim_new(u64 seed, u32 num_ranks, u32 granule_shift, u32 max_blocks, u32 num_threads) {
    view_pool.num_dims = 1;
    view_pool.num_words = 1;
    m.copies.clear();
    m.runnable_warps.clear();
    m.watchers.clear();
    m.ranks.clear();
    m.ranks.resize(num_ranks);
    m.free_threads.clear();
    m.threads.clear();
    m.words.clear();
    m.words.resize(1);
    m.events.clear();
    m.regions.clear();
    m.rank_of_dim.assign(1, 0);
    m.fence_of_dim.assign(1, 0);
    m.sms.clear();
    m.trace.clear();
    m.options = Options{};
    m.options.seed = seed;
    m.options.granule_shift = granule_shift;
    m.options.max_blocks = max_blocks;
    m.options.num_threads = num_threads;
    m.granule = 1u << granule_shift;
    m.random = Random(seed * 0x2545f4914f6cdd1dull + 1);
    m.step = 0;
    m.now = 1000000;
    m.idle_step = 1000;
    m.last_progress = m.now;
    m.over = false;
    m.current = nullptr;
    for (u32 r = 0; r < num_ranks; ++r) {
        Rank& rank = m.ranks[r];
        rank.gpu = r;
        u32 host = m.new_dim(r);
        rank.first_dim = view_pool.num_dims;
        rank.clocks.assign(max_blocks * num_threads, 0);
        for (u32 i = 0; i < max_blocks * num_threads; ++i) m.new_dim(r);
        rank.stream.start(ViewRef(), host, 1);
    }
    draw_profile();
    for (Rank& rank : m.ranks) {
        rank.not_before = m.profile.stream_delay ? m.random.below(m.profile.stream_delay) : 0;
        rank.clock_offset = m.random.next() >> 20;
    }
}

void sim_set_option(const char* name, double value) {
    std::string n = name;
    Profile& p = m.profile;
    if (n == "loads") p.loads = static_cast<Loads>(static_cast<int>(value));
    if (n == "blocks_per_sm") p.blocks_per_sm = static_cast<u32>(value);
    if (n == "num_sms") m.options.num_sms = static_cast<u32>(value);
    if (n == "remote_loads") m.options.remote_loads = value != 0;
    if (n == "shared_rubbish") m.options.shared_rubbish = value != 0;
    if (n == "start_at_once" && value != 0) {
        p.start_chance = 1;
        p.stream_delay = 0;
        for (Rank& rank : m.ranks) rank.not_before = 0;
    }
    if (n == "l1_misses") p.l1_misses = value;
    if (n == "slots") m.options.slots = static_cast<u32>(value);
    if (n == "stop_at") m.options.stop_at = static_cast<u64>(value);
    if (n == "max_steps") m.options.max_steps = static_cast<u64>(value);
    if (n == "hang_after") m.options.hang_after = static_cast<u64>(value);
    if (n == "strict_control") m.options.strict_control = value != 0;
    if (n == "stale_chance") p.stale_chance = value;
    if (n == "copy_chance") p.copy_chance = value;
}

u32 sim_add_region(const char* name, u64 bytes, int owner) {
    auto region = std::make_unique<Region>();
    region->name = name;
    region->index = static_cast<u32>(m.regions.size());
    region->owner = owner;
    region->bytes.assign(bytes, 0);
    region->cells.resize((bytes >> m.options.granule_shift) + 1);
    m.regions.push_back(std::move(region));
    return m.regions.back()->index;
}

u64 sim_address(u32 observer, u32 region, u64 offset) {
    return 0x100000000000ull + (static_cast<u64>(observer) << 40 | static_cast<u64>(region) << 32) +
           offset;
}

void sim_label(u32 region, u64 offset, u64 bytes, const char* name) {
    m.trace.labels.push_back({region, offset, bytes, name});
}

// Lets a rank be another stream of a GPU.
void sim_share_gpu(u32 rank, u32 gpu) { m.ranks[rank].gpu = gpu; }

// Bytes as they are before the run, known to everybody.
void sim_poke(u32 region, u64 offset, u64 bytes, const void* data, int use) {
    Region& r = *m.regions[region];
    mark_range(r, offset, bytes, static_cast<Use>(use), 0);
    std::memcpy(&r.bytes[offset], data, bytes);
    for (u64 i = offset >> m.options.granule_shift; i < (offset + bytes) >> m.options.granule_shift; ++i) {
        Cell& cell = r.cells[i];
        cell.fresh = cell.more_reads = false;
        cell.write = cell.read = Mark{};
        if (cell.word == 0) continue;
        Word& word = *m.words[cell.word];
        if (word.offset >> m.options.granule_shift != i) continue;
        word.first = word.newest() + 1;
        word.writes.assign(1, Write{});
        Write& first = word.writes[0];
        std::memcpy(&first.value, &r.bytes[word.offset], std::min(word.bytes, 8u));
        if (word.bytes == 16) std::memcpy(&first.high, &r.bytes[word.offset + 8], 8);
    }
}

// Where the host itself finds the bytes of a region, while nothing runs.
void* sim_bytes(u32 region) { return m.regions[region]->bytes.data(); }

void sim_peek(u32 region, u64 offset, u64 bytes, void* data) {
    std::memcpy(data, &m.regions[region]->bytes[offset], bytes);
}

void* sim_load_kernel(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        text_buffer = dlerror();
        return nullptr;
    }
    return dlsym(library, "sim_enter");
}

void sim_launch(u32 rank, u32 op, void* enter, u32 grid, u32 threads, u32 shared_bytes,
                const void* params, u64 param_bytes) {
    Command c;
    c.action = Action::launch;
    c.op = static_cast<u16>(op);
    c.enter = reinterpret_cast<void (*)(const void*)>(enter);
    c.grid = grid;
    c.threads = threads;
    c.shared_bytes = shared_bytes;
    c.data.assign(static_cast<const u8*>(params), static_cast<const u8*>(params) + param_bytes);
    m.ranks[rank].commands.push_back(std::move(c));
}

// A stand-in for another kernel of the same stream: it writes or reads bytes as a user would.
// `unless`: a 4-byte word, region << 32 | offset; a write is left out when it is not 0. ~0: none.
u32 sim_access(u32 rank, u32 op, u32 region, u64 offset, u64 bytes, const void* data, u64 unless) {
    Command c;
    c.action = data ? Action::write : Action::read;
    c.op = static_cast<u16>(op);
    c.region = region;
    c.offset = offset;
    c.bytes = bytes;
    c.unless = unless;
    if (data) c.data.assign(static_cast<const u8*>(data), static_cast<const u8*>(data) + bytes);
    m.ranks[rank].commands.push_back(std::move(c));
    return static_cast<u32>(m.ranks[rank].commands.size() - 1);
}

void sim_mark(u32 rank, u32 op, u32 region, u64 offset, u64 bytes, int use, u32 owner_op) {
    Command c;
    c.action = Action::mark;
    c.op = static_cast<u16>(op);
    c.region = region;
    c.offset = offset;
    c.bytes = bytes;
    c.use = static_cast<Use>(use);
    c.owner_op = static_cast<u16>(owner_op);
    m.ranks[rank].commands.push_back(std::move(c));
}

void sim_event(int kind, u64 step, u32 rank, u32 block, u64 amount, u32 region, u64 offset) {
    m.events.push_back({step, static_cast<Event::Kind>(kind), rank, block, amount, region, offset});
}

// Runs to the end; returns the number of faults. A run that follows another one begins when the
// host has seen that one's end: all of it is known to all streams.
u32 sim_run() {
    for (Rank& rank : m.ranks) {
        for (Rank& other : m.ranks) {
            if (m.step > 0 && &rank != &other) rank.stream.join(other.stream.snapshot());
        }
    }
    set_trap();
    try {
        run_machine();
    } catch (int) {  // fatal() outside of a thread; the fault is recorded
    }
    lift_trap();
    return static_cast<u32>(m.trace.faults.size());
}

u64 sim_steps() { return m.step; }
u64 sim_now() { return m.now; }

const char* sim_fault_kind(u32 i) { return m.trace.faults[i].kind.c_str(); }
const char* sim_fault_text(u32 i) { return m.trace.faults[i].text.c_str(); }
// The j-th operation whose success the fault spoils: rank << 16 | op, -1: any, -2: no more.
int sim_fault_victim(u32 i, u32 j) {
    auto& victims = m.trace.faults[i].victims;
    if (j >= victims.size()) return -2;
    return victims[j].rank < 0 ? -1 : victims[j].rank << 16 | victims[j].op;
}
// What a read command of a rank saw; 0 if it was not reached.
u64 sim_read_result(u32 rank, u32 command, void* data) {
    const Command& c = m.ranks[rank].commands[command];
    if (c.data.size() != c.bytes) return 0;
    std::memcpy(data, c.data.data(), c.bytes);
    return c.bytes;
}

const char* sim_history(u32 region, u64 offset, u64 bytes, u32 most) {
    text_buffer = m.trace.history(region, offset, bytes, most);
    return text_buffer.c_str();
}
const char* sim_last_of(u32 rank, u32 most) {
    text_buffer = m.trace.last_of(rank, most);
    return text_buffer.c_str();
}
const char* sim_profile() {
    const Profile& p = m.profile;
    text_buffer = "policy " + std::to_string(p.policy) + ", switch " + std::to_string(p.switch_chance) +
                  ", stale " + std::to_string(p.stale_chance) + ", slow " +
                  std::to_string(p.slow_chance) + "/" + std::to_string(p.slow_steps) + ", copies " +
                  std::to_string(p.copy_chance) + ", starved rank/block/warp " +
                  std::to_string(p.starved_rank) + "/" + std::to_string(p.starved_block) + "/" +
                  std::to_string(p.starved_warp) + " until step " + std::to_string(p.starved_until);
    return text_buffer.c_str();
}
const char* sim_error() { return text_buffer.c_str(); }

}  // extern "C"
