#pragma once
// The simulated machine: ranks, blocks, threads, memory, copies, and what a run remembers.
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/device.h"
#include "engine/fiber.h"
#include "engine/trace.h"
#include "engine/view.h"

namespace sim {


using i64 = long long;

// ---- randomness: everything a run decides comes from here ----
class Random {
public:
    explicit Random(u64 seed = 0) : state_(seed) {}
    u64 next() {  // splitmix64
        u64 z = (state_ += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    u32 below(u32 n) { return static_cast<u32>((next() >> 32) * n >> 32); }
    bool chance(double p) { return static_cast<double>(next() >> 11) * 0x1p-53 < p; }

private:
    u64 state_;
};

// ---- memory ----

enum class Use : u8 { dead, control, input, output, scratch };
enum Strength : u8 { kNoWrite = 0, kWeakAccess = 1, kGpuScope = 2, kSysScope = 3 };

struct Mark {  // a past access, for the judgement of a later one
    Epoch epoch;
    u32 record = 0;
    u16 op = 0;
    u8 strength = kNoWrite;
    bool engine = false;  // by a bulk copy
    bool narrow = false;  // of less than a cell
};

struct Cell {  // of `granule` bytes
    Mark write;
    Mark read;
    Epoch old_write;
    u32 old_value = 0;
    u16 word = 0;   // the control word that lies here, 0: none
    u16 owner_op = 0;
    Use use = Use::dead;
    bool fresh = true;       // nobody has written it since it was handed out
    bool more_reads = false;
    bool watched = false;
};

struct Region {
    std::string name;
    u32 index = 0;
    int owner = -1;  // rank, -1: host memory
    std::vector<u8> bytes;
    std::vector<Cell> cells;
    std::unordered_map<u64, std::vector<Mark>> more_reads;  // cell -> further reads
};

// One write in the life of a control word.
struct Write {
    u64 value = 0;
    u64 high = 0;  // of a word of 16 bytes
    Mark mark;
    ViewRef for_gpu;  // what a reader of the same GPU, or of another one, acquires with it
    ViewRef for_sys;
    u64 slow_until = 0;
    u32 slow_ranks = 0;
};

struct Word {
    u32 id = 0;
    u32 region = 0;
    u64 offset = 0;
    u32 bytes = 0;
    u32 first = 0;  // absolute number of writes[0]
    std::vector<Write> writes;
    u32 newest() const { return first + static_cast<u32>(writes.size()) - 1; }
};

// ---- execution ----

enum class State : u8 { runnable, warp, block, spinning, copying, exited };

struct Block;
struct Launch;

struct Watch {
    u64 key;
    u32 version;
};
struct Pending {  // a message read with a relaxed load: acquired by a later fence
    u32 word;
    bool same_rank;
    ViewRef view;
};

struct Thread {
    Fiber fiber;
    Block* block = nullptr;
    u32 rank = 0;
    u32 index = 0;  // in the block
    State state = State::exited;
    Knowledge knowledge;
    ViewRef release_gpu;  // as of the last fence of that scope or wider
    ViewRef release_sys;
    std::vector<Pending> pending;
    ViewRef proxy;        // what the last fence.proxy.async put before this thread's bulk copies
    u32 store_reads = 0, store_writes = 0;  // dimensions of its bulk stores, 0: none yet
    u32 committed = 0;
    u32 wait_group = 0;
    bool wait_reads_only = false;
    u32 proxy_fences = 0;  // dimension
    u64 warp_value = 0;
    u32 warp_source = 0;
    u32 result = 0;
    std::vector<Watch> watches;
    bool turn_stale = false, turn_active = false;
    bool polls = false;  // its last step was poll_pause()
    Where where{};
    u32 last_record = 0;
};

struct Warp {
    Block* block = nullptr;
    u32 index = 0;
    u32 runnable = 0;  // lanes
    u32 arrived = 0;
    u32 exited = 0;
    WarpOp op = WarpOp::barrier;
    i64 slot = -1;     // in the list of runnable warps
    u64 priority = 0;
};

struct SharedMark {
    Mark mark;
    void* pc = nullptr;  // of a plain access
};
struct SharedCell {  // of 4 bytes
    SharedMark write;
    std::vector<SharedMark> reads;
    std::vector<SharedMark> atomics;  // earlier ones, not ordered before `write`
};

struct Mbarrier {
    Block* block = nullptr;
    u32 dim = 0;
    u32 arrivals = 0;
    u32 pending = 0;
    i64 bytes = 0;
    u32 phase = 0;
    ViewRef arrived, completed;
    bool fenced = false;
    Thread* maker = nullptr;
};

struct Block {
    Launch* launch = nullptr;
    u32 index = 0;
    bool started = false;
    u32 arrived = 0;
    u32 exited = 0;
    bool predicate = false;
    std::vector<Thread*> threads;
    std::vector<Warp> warps;
    std::vector<u8> shared_memory;
    u8* shared = nullptr;
    std::vector<SharedCell> shared_cells;
    std::unordered_map<void*, Mbarrier> mbarriers;
    u32 sm = 0;
    u64 last_acquire = 0;
    u64 skew = 0;
    u64 restless_until = 0;  // its waits do not count as blocked before this step
};

// ---- what the host does, in stream order ----

enum class Action : u8 { launch, write, read, mark };
struct Command {
    Action action;
    u16 op = 0;
    void (*enter)(const void*) = nullptr;
    u32 grid = 0, threads = 0, shared_bytes = 0;
    std::vector<u8> data;  // parameters, bytes written, bytes read
    u32 region = 0;
    u64 offset = 0, bytes = 0;
    u64 unless = ~0ull;    // a word that keeps a write from happening
    Use use = Use::dead;
    u16 owner_op = 0;
};

struct Launch {
    const Command* command = nullptr;
    u32 rank = 0;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<u32> waiting;  // blocks not started yet
    u32 exited = 0;
    ViewRef start;
    ViewRef end;
};

struct Rank {  // one stream; `gpu` is the rank whose memory, SMs and scope it has
    u32 gpu = 0;
    std::vector<Command> commands;
    std::size_t next_command = 0;
    std::unique_ptr<Launch> launch;
    Knowledge stream;
    u16 op = 0;           // of the newest command begun
    u32 first_dim = 0;    // of its threads
    std::vector<u32> clocks;  // of thread slots, kept between launches
    u64 not_before = 0;   // step at which its stream may go on
    bool frozen = false;
    u64 clock_offset = 0;
};

struct Event {  // something from outside, at a step
    u64 step;
    enum Kind : u8 { freeze, skew, store } kind;
    u32 rank;
    u32 block = 0;
    u64 amount = 0;
    u32 region = 0;
    u64 offset = 0;
    bool done = false;
};

struct Copy {
    bool is_store = false;
    Thread* thread = nullptr;
    Block* block = nullptr;
    u32 region = 0;
    u64 offset = 0;
    u8* shared = nullptr;
    u32 bytes = 0;
    Mbarrier* barrier = nullptr;
    u32 clock = 0;   // its group, or the phase it completes
    ViewRef view;    // what it is ordered after
    ViewRef proxy;
    bool has_read = false;
    std::vector<u8> data;
    Where where{};
};

struct L1Line {
    u64 fetched;
    u8 bytes[16];
};
struct Sm {
    u64 last_acquire = 0;
    std::unordered_map<u64, L1Line> lines;
};

// ---- how the run is made nasty; drawn from the seed, parts may be set from outside ----

enum class Loads : u8 { ptx, strict, hopper };
struct Profile {
    Loads loads = Loads::ptx;
    u32 policy = 0;          // 0 random, 1 strict priorities with change points, 2 bursts
    double switch_chance = 0.3;
    double stale_chance = 0.2;
    double slow_chance = 0.1;
    u32 slow_steps = 400;
    double copy_chance = 0.3;   // of progress with a copy at a scheduling point
    double start_chance = 0.2;  // of starting a block or a command
    double l1_misses = 0.1;     // of loads that find a stale line in L1
    double false_wait = 0.2;    // mbarrier.try_wait says no although the phase is complete
    u32 change_every = 300;     // steps between changes of priority
    u32 lanes = 0;              // 0 random, 1 lowest first, 2 highest first
    int starved_rank = -1, starved_block = -1, starved_warp = -1;
    u64 starved_until = 0;
    u32 stream_delay = 200;
    u32 blocks_per_sm = 1;
};

struct Options {
    u64 seed = 0;
    u32 granule_shift = 2;
    u32 slots = 64;              // blocks a rank can have resident
    u64 max_steps = 30000000;
    u64 stop_at = ~0ull;         // end the run here, to look at it
    u64 hang_after = 1000000000; // virtual ns without progress
    int loads = -1;              // -1: from the seed
    bool strict_control = true;  // races on control words count even in operations that fail
    u32 blocks_per_sm = 1;
    u32 num_sms = 0;             // not 0: blocks go round and round so many
    bool remote_loads = true;    // of memory of other ranks
    bool shared_rubbish = false; // shared memory that nobody has written may be read
    u32 max_blocks = 8;          // the largest grid of the run, for numbering threads
    u32 num_threads = 64;        // the largest block
};

struct Machine {
    Options options;
    Profile profile;
    Random random;
    Trace trace;
    std::vector<std::unique_ptr<Region>> regions;
    std::vector<Rank> ranks;
    std::vector<Event> events;
    std::vector<std::unique_ptr<Word>> words;  // [0] unused
    std::unordered_map<u64, std::vector<Thread*>> watchers;
    std::vector<std::unique_ptr<Copy>> copies;
    std::vector<Warp*> runnable_warps;
    std::vector<std::unique_ptr<Thread>> threads;  // reused
    std::vector<Thread*> free_threads;
    std::vector<u32> rank_of_dim, fence_of_dim;
    std::unordered_map<u64, Sm> sms;
    Thread* current = nullptr;
    u64 step = 0;
    u64 now = 1000000;       // virtual ns
    u64 idle_step = 1000;
    u64 last_progress = 0;   // in virtual ns
    i64 slice = 0;
    bool over = false;       // a fatal fault was found
    u32 granule = 4;

    u32 new_dim(u32 rank);
    u32 gpu_of(u32 rank) const { return ranks[rank].gpu; }
};

extern Machine m;

// ---- threads.cpp ----
void maybe_switch(Thread& t, Where where);
void suspend(Thread& t, State state);
void make_runnable(Thread& t);
void start_block(Launch& launch, u32 index);
void wake_watchers(u64 key);
void check_group_wait(Thread& t);

// ---- memory.cpp ----
struct Place {
    Region* region;
    u64 offset;
};
struct Actor {  // who accesses memory, and what that is ordered after
    const Knowledge* knowledge = nullptr;  // a thread or a host action; or, for a copy:
    const View* view = nullptr;
    const View* proxy = nullptr;
    Mark mark;
    u32 rank = 0;
    bool host = false;  // another kernel of the stream, of which nothing else is known

    bool knows(const Mark& other) const {
        if (knowledge) return knowledge->knows(other.epoch);
        const Epoch& e = other.epoch;
        return e.clock == 0 || view->clock_of(e.dim) >= e.clock;
    }
};
Place translate(const void* p, u32 bytes, u32 rank, Where where);
void read_bytes(const Actor& a, Place at, u32 bytes, u8* out);
void write_bytes(const Actor& a, Place at, u32 bytes, const u8* data);
void mark_range(Region& region, u64 offset, u64 bytes, Use use, u16 owner_op);
void host_store(u32 rank, Region& region, u64 offset, u32 value);
Actor actor_of(Thread& t, u8 strength, u32 record);
bool morally_strong(u32 rank_a, u8 strength_a, u32 rank_b, u8 strength_b);
void add_fault(const Fault& fault);
using Victims = std::vector<Victim>;
void race(const char* what, const Actor& a, const Mark& other, Place at, const Victims& victims);

// ---- shared.cpp ----
void shared_access(Block& block, const Actor& a, u64 offset, u32 bytes, bool writing, void* pc);
u64 shared_offset(Block& block, const void* p, u32 bytes, Where where);

// ---- bulk.cpp ----
void advance_copy(std::size_t index);
void check_copies_at_exit(Thread& t);
void check_loads_at_exit(const Block& block, u32 rank);

// ---- scheduler.cpp ----
void run_machine();

// ---- report.cpp ----
[[noreturn]] void fatal(const std::string& message);
std::string place_in_library(void* pc);  // "<library+0x12>", for addr2line
void report_hang(const std::string& why);
void set_trap();   // plain accesses to simulated addresses become faults of the run
void lift_trap();

}  // namespace sim
