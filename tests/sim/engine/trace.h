#pragma once
// The last operations of a run, the names of addresses, and the faults found.
#include <string>
#include <vector>

#include "engine/device.h"

namespace sim {

enum class Did : u8 {
    nothing, load, store, rmw, fence, block_barrier, warp, timer, proxy_fence,
    bulk_load, bulk_store, bulk_commit, bulk_wait, copy_read, copy_write, mbarrier_arrive,
    mbarrier_wait, host_write, host_read, launch, finish, freeze, skew, host_store,
};

struct Record {
    u64 step;
    u64 value;
    u64 offset;
    Where where;
    u32 number;
    u16 region;      // 0xffff: no global memory
    u16 bytes;
    u16 block;
    u16 thread;
    u8 rank;
    Did did;
    Order order;
    Scope scope;
    bool stale;
};

struct Label {
    u32 region;
    u64 offset;
    u64 bytes;
    std::string name;
};

// An operation whose success a fault spoils: it is a failure only if that one was "ok". Rank -1:
// whatever happened.
struct Victim {
    int rank;
    int op;
};

struct Fault {
    std::string kind;
    std::string text;
    std::vector<Victim> victims;
    std::string place;  // the lines of text it is about
};

class Trace {
public:
    static constexpr u32 kSize = 1 << 16;
    std::vector<Record> ring{kSize};
    u32 next = 1;  // number of the next record; 0 is "none"
    std::vector<Label> labels;
    std::vector<Fault> faults;

    u32 add(Record record) {
        record.number = next;
        ring[next % kSize] = record;
        return next++;
    }
    const Record* find(u32 number) const {
        const Record& record = ring[number % kSize];
        return number != 0 && record.number == number ? &record : nullptr;
    }
    std::string name_of(u32 region, u64 offset) const;
    std::string tell(const Record& record) const;
    // The last operations that touched these bytes.
    std::string history(u32 region, u64 offset, u64 bytes, u32 most) const;
    // The last things a rank did, but for loads and barriers.
    std::string last_of(u32 rank, u32 most) const;
    void clear();
};

}  // namespace sim
