// Bytes, and who may see them: ordinary data. Every access is checked against the last ones to the
// same bytes: two that conflict must be related in causality order, or be morally strong.
#include <cstring>

#include "engine/machine.h"

namespace sim {
namespace {

constexpr u64 kAddressBase = 0x100000000000ull;  // | observing rank << 40 | region << 32 | offset

u64 granules_end(Place at, u32 bytes) {
    return (at.offset + bytes - 1) >> m.options.granule_shift;
}

Place place_of(const Place& at, u64 cell) {
    return {at.region, cell << m.options.granule_shift};
}

bool strong_pair(const Actor& a, const Mark& other) {
    return morally_strong(a.rank, a.mark.strength, m.rank_of_dim[other.epoch.dim], other.strength);
}

Victims whose(const Mark& mark) {
    return {{static_cast<int>(m.rank_of_dim[mark.epoch.dim]), mark.op}};
}
Victims whose(const Actor& a) { return {{static_cast<int>(a.rank), a.mark.op}}; }

// Has the issuing thread put the earlier access before its copies (fence.proxy.async.global)?
// For copies that write, the end of the kernel that made an ordinary access counts as well.
bool proxy_ordered(const Actor& a, const Mark& other, bool writing) {
    if (a.knowledge || other.epoch.clock == 0) return true;
    if (a.proxy && a.proxy->clock_of(other.epoch.dim) >= other.epoch.clock) return true;
    return writing && other.op < m.ranks[m.rank_of_dim[other.epoch.dim]].op;
}

void note_read(const Actor& a, Place at, u64 index) {
    Cell& cell = at.region->cells[index];
    if (cell.read.epoch.clock == 0 || cell.read.epoch.dim == a.mark.epoch.dim ||
        a.knows(cell.read)) {
        cell.read = a.mark;
        return;
    }
    std::vector<Mark>& more = at.region->more_reads[index];
    if (!cell.more_reads) more.clear();
    cell.more_reads = true;
    for (Mark& mark : more) {
        if (mark.epoch.dim == a.mark.epoch.dim || a.knows(mark)) {
            mark = a.mark;
            return;
        }
    }
    more.push_back(a.mark);
}

void check_earlier_read(const Actor& a, const Mark& read, Place at) {
    if (!a.knows(read)) {
        if (!strong_pair(a, read)) race("overwritten while it may still be read", a, read, at, whose(read));
    } else if (!proxy_ordered(a, read, true)) {
        race("no proxy fence between an ordinary read and a bulk copy's write", a, read, at, whose(read));
    }
}

void check_use(const Actor& a, Place at, const Cell& cell, bool writing) {
    const char* wrong = nullptr;
    if (a.host) return;
    if (cell.use == Use::dead) wrong = "access outside of every live block";
    if (writing && cell.use == Use::input) wrong = "write to bytes that are only read now";
    if (writing && cell.use == Use::output) {
        if (cell.owner_op != a.mark.op) {
            wrong = "write by an operation that does not own the bytes";
        } else if (!cell.fresh && cell.write.op == a.mark.op &&
                   !(cell.write.narrow && a.mark.narrow)) {
            wrong = "second write of the same operation to an output byte";
        }
    }
    if (!wrong) return;
    Fault fault{"ownership", std::string(wrong) + ": " +
                m.trace.name_of(at.region->index, at.offset) + "\n" +
                m.trace.history(at.region->index, at.offset, m.granule, 8), {}, wrong};
    fault.victims.push_back({at.region->owner, cell.owner_op});
    if (cell.use == Use::dead) {
        int owner = at.region->owner;
        fault.victims = {{static_cast<int>(a.rank), a.mark.op}};
        fault.victims.push_back({owner, owner < 0 ? 0 : m.ranks[static_cast<u32>(owner)].op});
    }
    add_fault(fault);
}

}  // namespace

// Each kind of fault is told once for each place in the text; its victims add up.
void add_fault(const Fault& fault) {
    for (Fault& known : m.trace.faults) {
        if (known.kind != fault.kind || known.place != fault.place) continue;
        known.victims.insert(known.victims.end(), fault.victims.begin(), fault.victims.end());
        return;
    }
    m.trace.faults.push_back(fault);
}

u32 Machine::new_dim(u32 rank) {
    if (view_pool.num_dims >= kMaxDims) fatal("the simulator has no dimensions left (kMaxDims)");
    u32 dim = view_pool.num_dims++;
    rank_of_dim.resize(view_pool.num_dims, 0);
    fence_of_dim.resize(view_pool.num_dims, 0);
    rank_of_dim[dim] = rank;
    return dim;
}

bool morally_strong(u32 rank_a, u8 strength_a, u32 rank_b, u8 strength_b) {
    u8 least = m.gpu_of(rank_a) == m.gpu_of(rank_b) ? kGpuScope : kSysScope;
    return strength_a >= least && strength_b >= least;
}

Actor actor_of(Thread& t, u8 strength, u32 record) {
    Actor a;
    a.knowledge = &t.knowledge;
    a.mark = {t.knowledge.now(), record, t.block->launch->command->op, strength, false};
    a.rank = t.rank;
    return a;
}

Place translate(const void* p, u32 bytes, u32 rank, Where where) {
    u64 address = reinterpret_cast<u64>(p);
    u64 inside = address - kAddressBase;
    u64 observer = inside >> 40, region = inside >> 32 & 0xff, offset = inside & 0xffffffffu;
    std::string line = std::string(where.file) + ":" + std::to_string(where.line);
    if (address < kAddressBase || observer > 15) {
        fatal("not an address of global memory: " + std::to_string(address) + " at " + line);
    }
    if (observer != m.gpu_of(rank)) {
        fatal("rank " + std::to_string(rank) + " uses an address as mapped on rank " +
              std::to_string(observer) + " at " + line);
    }
    if (region >= m.regions.size() || offset + bytes > m.regions[region]->bytes.size()) {
        fatal("access outside of region " + std::to_string(region) + ", offset " +
              std::to_string(offset) + ", " + std::to_string(bytes) + " bytes at " + line);
    }
    if (bytes <= 16 && offset % bytes != 0) fatal("misaligned access at " + line);
    return {m.regions[region].get(), offset};
}

void race(const char* what, const Actor& a, const Mark& other, Place at, const Victims& victims) {
    const Record* mine = m.trace.find(a.mark.record);
    const Record* others = m.trace.find(other.record);
    Fault fault{what, "", victims, ""};
    // The words ranks talk with must be free of races even where an operation fails.
    bool is_control = at.region->cells[at.offset >> m.options.granule_shift].use == Use::control;
    if (is_control && m.options.strict_control) fault.victims = {{-1, 0}};
    for (const Record* record : {mine, others}) {
        if (record) fault.place += std::string(record->where.file) + std::to_string(record->where.line);
    }
    fault.text = std::string(what) + ": " + m.trace.name_of(at.region->index, at.offset);
    fault.text += "\n  this access     " + (mine ? m.trace.tell(*mine) : std::string("(unknown)"));
    fault.text += "\n  earlier access  " + (others ? m.trace.tell(*others) : "(long ago)");
    fault.text += "\n  the bytes' last operations:\n" +
                  m.trace.history(at.region->index, at.offset, m.granule, 10);
    add_fault(fault);
}

void read_bytes(const Actor& a, Place at, u32 bytes, u8* out) {
    Region& region = *at.region;
    u32 shift = m.options.granule_shift;
    std::memcpy(out, &region.bytes[at.offset], bytes);
    for (u64 i = at.offset >> shift; i <= granules_end(at, bytes); ++i) {
        Cell& cell = region.cells[i];
        if (cell.use == Use::dead) check_use(a, place_of(at, i), cell, false);
        if (cell.fresh) {
            const Record* reader = m.trace.find(a.mark.record);
            Fault fault{"unwritten", "read of bytes that nobody has written: " +
                        m.trace.name_of(region.index, i << shift) + "\n  this access     " +
                        (reader ? m.trace.tell(*reader) : "?"), whose(a), region.name};
            add_fault(fault);
            cell.fresh = false;
        }
        if (!a.knows(cell.write) && !strong_pair(a, cell.write)) {
            race("read without being ordered after the write", a, cell.write, place_of(at, i), whose(a));
            if (m.random.chance(0.5)) {  // it may well see what was there before
                u8 old[4];
                std::memcpy(old, &cell.old_value, 4);
                for (u32 k = 0; k < m.granule; ++k) {
                    u64 byte = (i << shift) + k;
                    if (byte >= at.offset && byte < at.offset + bytes) out[byte - at.offset] = old[k];
                }
            }
        } else if (!proxy_ordered(a, cell.write, false)) {
            race("no proxy fence between a write and a bulk copy's read", a, cell.write,
                 place_of(at, i), whose(a));
        }
        note_read(a, at, i);
    }
}

// Writes of less than a cell (the edges of a range): neighbours by other threads are no conflict.
static Actor narrowed(const Actor& a, Place at, u32 bytes) {
    Actor copy = a;
    copy.mark.narrow = at.offset % m.granule != 0 || bytes % m.granule != 0;
    return copy;
}

void write_bytes(const Actor& actor, Place at, u32 bytes, const u8* data) {
    Actor a = narrowed(actor, at, bytes);
    Region& region = *at.region;
    u32 shift = m.options.granule_shift;
    u32 weak_words[8];
    u32 num_weak_words = 0;
    for (u64 i = at.offset >> shift; i <= granules_end(at, bytes); ++i) {
        Cell& cell = region.cells[i];
        Place here = place_of(at, i);
        check_use(a, here, cell, true);
        if (!a.knows(cell.write)) {
            bool both_narrow = a.mark.narrow && cell.write.narrow;
            if (!both_narrow && !strong_pair(a, cell.write)) {
                race("two writes without order", a, cell.write, here,
                     {{region.owner, cell.write.op}, {region.owner, a.mark.op}});
            }
        } else if (!proxy_ordered(a, cell.write, true)) {
            race("no proxy fence between a write and a bulk copy's write", a, cell.write, here,
                 whose(a));
        }
        if (cell.read.epoch.clock != 0) check_earlier_read(a, cell.read, here);
        if (cell.more_reads) {
            for (const Mark& read : region.more_reads[i]) check_earlier_read(a, read, here);
            cell.more_reads = false;
        }
        cell.old_write = cell.write.epoch;
        std::memcpy(&cell.old_value, &region.bytes[i << shift], m.granule);
        cell.write = a.mark;
        cell.read = Mark{};
        cell.fresh = false;
        if (cell.watched) wake_watchers(static_cast<u64>(region.index) << 40 | i << shift);
        bool new_word = cell.word && (num_weak_words == 0 || weak_words[num_weak_words - 1] != cell.word);
        if (new_word && a.mark.strength == kWeakAccess && num_weak_words < 8) {
            weak_words[num_weak_words++] = cell.word;
        }
    }
    std::memcpy(&region.bytes[at.offset], data, bytes);
    for (u32 i = 0; i < num_weak_words; ++i) {  // an ordinary write to a control word
        Word& word = *m.words[weak_words[i]];
        Write write;
        std::memcpy(&write.value, &region.bytes[word.offset], std::min(word.bytes, 8u));
        if (word.bytes == 16) std::memcpy(&write.high, &region.bytes[word.offset + 8], 8);
        write.mark = a.mark;
        word.writes.push_back(write);
        if (a.knowledge) const_cast<Knowledge*>(a.knowledge)->raise_floor(word.id, word.newest());
    }
}

void mark_range(Region& region, u64 offset, u64 bytes, Use use, u16 owner_op) {
    u32 shift = m.options.granule_shift;
    for (u64 i = offset >> shift; i < (offset + bytes) >> shift; ++i) {
        Cell& cell = region.cells[i];
        if (use == Use::output) {
            cell.fresh = true;
            std::memset(&region.bytes[i << shift], 0xa5, m.granule);
        }
        cell.use = use;
        cell.owner_op = owner_op;
    }
}

}  // namespace sim
