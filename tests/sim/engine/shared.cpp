// Shared memory: who touched which word, by wrappers, by bulk copies, and in plain C++. Kernel text
// is compiled with -fsanitize=thread for the sake of its hooks, which are defined here: every
// load and store of the text calls one.
#include <cstring>

#include "engine/machine.h"

namespace sim {
namespace {

constexpr u32 kWord = 4;  // bytes of a SharedCell

// A line of text, or where in a library the access stands (the report looks it up).
std::string tell_access(const SharedMark& access) {
    if (const Record* record = m.trace.find(access.mark.record)) return m.trace.tell(*record);
    return "plain access, source " + std::to_string(access.mark.epoch.dim) + " at " +
           place_in_library(access.pc);
}

void shared_fault(const char* what, const Actor& a, const SharedMark& mine, const SharedMark& other,
                  u64 offset) {
    std::string pair = place_in_library(mine.pc) + place_in_library(other.pc);
    if (const Record* record = m.trace.find(mine.mark.record)) {
        pair += std::string(record->where.file) + std::to_string(record->where.line);
    }
    add_fault({what, std::string(what) + ": byte " + std::to_string(offset) +
                   "\n  this access     " + tell_access(mine) + "\n  earlier access  " +
                   tell_access(other),
               {{static_cast<int>(a.rank), a.mark.op}}, pair});
}

// Has the thread of an ordinary access put it before later copies, with a
// fence.proxy.async.shared::cta of its own that this copy is ordered after?
bool fenced(const Actor& copy, const Mark& access) {
    u32 dim = m.fence_of_dim[access.epoch.dim];
    return dim != 0 && copy.view->clock_of(dim) >= access.epoch.clock;
}

void check(const Actor& a, const SharedMark& mine, const SharedMark& other, const char* unordered,
           u64 offset) {
    if (other.mark.epoch.clock == 0) return;
    if (!a.knows(other.mark)) {
        bool atomics = a.mark.strength >= kGpuScope && other.mark.strength >= kGpuScope;
        if (!atomics) shared_fault(unordered, a, mine, other, offset);
    } else if (a.mark.engine && !other.mark.engine && !fenced(a, other.mark)) {
        shared_fault("no proxy fence between an ordinary access to shared memory and a bulk copy",
                     a, mine, other, offset);
    }
}

void note_read(SharedCell& cell, const Actor& a, const SharedMark& mine) {
    for (SharedMark& read : cell.reads) {
        if (read.mark.epoch.dim == mine.mark.epoch.dim) {
            read = mine;
            return;
        }
    }
    if (cell.reads.size() >= 8) {  // forget what is ordered before this anyway
        std::erase_if(cell.reads, [&](const SharedMark& read) { return a.knows(read.mark); });
    }
    cell.reads.push_back(mine);
}

}  // namespace

void shared_access(Block& block, const Actor& a, u64 offset, u32 bytes, bool writing, void* pc) {
    SharedMark mine{a.mark, pc};
    for (u64 i = offset / kWord; i <= (offset + bytes - 1) / kWord; ++i) {
        SharedCell& cell = block.shared_cells[i];
        if (!writing && cell.write.mark.epoch.clock == 0 && !m.options.shared_rubbish) {
            shared_fault("read of shared memory that nobody has written", a, mine, mine, i * kWord);
            cell.write = mine;
        }
        check(a, mine, cell.write, writing ? "two writes to shared memory without order"
                                           : "read of shared memory not ordered after its write",
              i * kWord);
        for (const SharedMark& atomic : cell.atomics) {
            check(a, mine, atomic, "access to shared memory not ordered after an atomic", i * kWord);
        }
        if (!writing) {
            note_read(cell, a, mine);
            continue;
        }
        for (const SharedMark& read : cell.reads) {
            check(a, mine, read, "shared memory overwritten while it may still be read", i * kWord);
        }
        if (mine.mark.strength < kGpuScope) {
            cell.atomics.clear();
        } else if (cell.write.mark.epoch.clock != 0 && !a.knows(cell.write.mark)) {
            cell.atomics.push_back(cell.write);
        }
        cell.reads.clear();
        cell.write = mine;
    }
}

u64 shared_offset(Block& block, const void* p, u32 bytes, Where where) {
    i64 offset = static_cast<const u8*>(p) - block.shared;
    i64 size = block.launch->command->shared_bytes;
    u32 unit = bytes % 16 == 0 ? 16 : bytes;  // a wrapper's 4 or 8 bytes, or a bulk copy's many
    bool narrow = bytes == 4 || bytes == 8;
    if (offset < 0 || offset + bytes > size || offset % unit != 0 || !(unit == 16 || narrow)) {
        fatal(std::string("an address or size that shared memory does not have at ") + where.file +
              ":" + std::to_string(where.line));
    }
    return static_cast<u64>(offset);
}

// ---- wrappers ----

static u32 record_wrapper(Thread& t, Did did, u32 bytes, Where where) {
    return m.trace.add({m.step, 0, 0, where, 0, 0xffff, static_cast<u16>(bytes),
                        static_cast<u16>(t.block->index), static_cast<u16>(t.index),
                        static_cast<u8>(t.rank), did, Order::weak, Scope::cta, false});
}

void shared_load(void* out, const void* p, u32 bytes, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    u32 record = record_wrapper(t, Did::load, bytes, where);
    shared_access(*t.block, actor_of(t, kWeakAccess, record),
                  shared_offset(*t.block, p, bytes, where), bytes, false, nullptr);
    std::memcpy(out, p, bytes);
}

void shared_store(void* p, const void* data, u32 bytes, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    u32 record = record_wrapper(t, Did::store, bytes, where);
    shared_access(*t.block, actor_of(t, kWeakAccess, record),
                  shared_offset(*t.block, p, bytes, where), bytes, true, nullptr);
    std::memcpy(p, data, bytes);
}

u32 shared_rmw(u32* p, u32 value, int op, Where where) {
    Thread& t = *m.current;
    maybe_switch(t, where);
    u32 record = record_wrapper(t, Did::rmw, 4, where);
    u64 offset = static_cast<u64>(reinterpret_cast<u8*>(p) - t.block->shared);
    Actor a = actor_of(t, kGpuScope, record);
    if (t.block->shared_cells[offset / kWord].write.mark.epoch.clock == 0) {
        shared_access(*t.block, a, offset, 4, false, nullptr);  // says that it was not initialised
    }
    shared_access(*t.block, a, offset, 4, true, nullptr);
    u32 before = *p;
    if (op == 0) *p = before + value;
    if (op == 1) *p = before | value;
    if (op == 2) *p = std::min(before, value);
    return before;
}

// ---- plain C++ ----

static void plain(void* p, u64 bytes, bool writing, void* pc) {
    Thread* t = m.current;
    if (!t) return;
    u64 offset = static_cast<u64>(static_cast<u8*>(p) - t->block->shared);
    if (offset >= t->block->launch->command->shared_bytes) return;  // a local variable
    shared_access(*t->block, actor_of(*t, kWeakAccess, 0), offset, static_cast<u32>(bytes), writing,
                  pc);
}

}  // namespace sim

extern "C" {

#define SIM_HOOKS(bytes)                                                                          \
    void __tsan_read##bytes(void* p) { sim::plain(p, bytes, false, __builtin_return_address(0)); } \
    void __tsan_write##bytes(void* p) { sim::plain(p, bytes, true, __builtin_return_address(0)); } \
    void __tsan_unaligned_read##bytes(void* p) {                                                  \
        sim::plain(p, bytes, false, __builtin_return_address(0));                                 \
    }                                                                                             \
    void __tsan_unaligned_write##bytes(void* p) {                                                 \
        sim::plain(p, bytes, true, __builtin_return_address(0));                                  \
    }
SIM_HOOKS(1)
SIM_HOOKS(2)
SIM_HOOKS(4)
SIM_HOOKS(8)
SIM_HOOKS(16)
void __tsan_read_range(void* p, unsigned long bytes) {
    if (bytes) sim::plain(p, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long bytes) {
    if (bytes) sim::plain(p, bytes, true, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

}  // extern "C"
