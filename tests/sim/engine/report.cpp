// Words for people: what happened to an address, where everybody waits, why a run was stopped.
#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>

#include <cstdio>
#include <map>

#include "engine/machine.h"

namespace sim {
namespace {

const char* name_of_did(Did did) {
    switch (did) {
        case Did::load: return "load";
        case Did::store: return "store";
        case Did::rmw: return "atomic";
        case Did::fence: return "fence";
        case Did::block_barrier: return "block barrier";
        case Did::warp: return "warp";
        case Did::timer: return "timer";
        case Did::proxy_fence: return "proxy fence";
        case Did::bulk_load: return "bulk load starts";
        case Did::bulk_store: return "bulk store starts";
        case Did::bulk_commit: return "bulk commit";
        case Did::bulk_wait: return "bulk wait ends, group";
        case Did::copy_read: return "bulk copy reads";
        case Did::copy_write: return "bulk copy writes";
        case Did::mbarrier_arrive: return "mbarrier arrive";
        case Did::mbarrier_wait: return "mbarrier wait ends, phase";
        case Did::host_write: return "earlier or later kernel writes";
        case Did::host_read: return "later kernel reads";
        case Did::launch: return "kernel starts, operation";
        case Did::finish: return "kernel ends, operation";
        case Did::freeze: return "the rank stops for ever";
        case Did::skew: return "the block's clock jumps by";
        case Did::host_store: return "a host thread stores";
        default: return "?";
    }
}

std::string suffix(Order order, Scope scope) {
    std::string text;
    if (order == Order::relaxed) text += ".relaxed";
    if (order == Order::acquire) text += ".acquire";
    if (order == Order::release) text += ".release";
    if (order == Order::acq_rel) text += ".acq_rel";
    if (scope == Scope::gpu) text += ".gpu";
    if (scope == Scope::sys) text += ".sys";
    return text;
}

std::string hex(u64 value) {
    char text[32];
    std::snprintf(text, sizeof text, "0x%llx", value);
    return text;
}

std::string line_of(Where where) {
    std::string file = where.file ? where.file : "?";
    std::size_t at = file.find("kernels/cuda/");
    if (at != std::string::npos) file = file.substr(at + 13);
    return where.line ? file + ":" + std::to_string(where.line) : file;
}

const char* name_of_state(State state) {
    switch (state) {
        case State::runnable: return "could run";
        case State::warp: return "waits for its warp";
        case State::block: return "waits at the block barrier";
        case State::spinning: return "polls";
        case State::copying: return "waits for its bulk copies";
        default: return "has exited";
    }
}

std::string threads_text(const std::vector<u32>& threads) {
    std::string text;
    for (std::size_t i = 0; i < threads.size();) {
        std::size_t j = i;
        while (j + 1 < threads.size() && threads[j + 1] == threads[j] + 1) ++j;
        if (!text.empty()) text += ",";
        text += std::to_string(threads[i]);
        if (j > i) text += "-" + std::to_string(threads[j]);
        i = j + 1;
    }
    return text;
}

std::string watched_words(const Thread& t) {
    std::string text;
    for (const Watch& w : t.watches) {
        if (w.key >> 63) {
            text += "\n        an mbarrier in phase " + std::to_string(w.version);
            continue;
        }
        u32 region = static_cast<u32>(w.key >> 40);
        u64 offset = w.key & 0xffffffffffull;
        u64 value = 0;
        std::memcpy(&value, &m.regions[region]->bytes[offset], 8);
        text += "\n        " + m.trace.name_of(region, offset) + " holds " + hex(value);
        text += "\n" + m.trace.history(region, offset, 8, 4);
    }
    return text;
}

std::string stack_text(const Thread& t) {
    std::string text = "\n        stack";
    for (void* address : t.fiber.stack_trace(12)) text += " " + place_in_library(address);
    return text;
}

std::string where_everybody_is() {
    std::string text;
    for (u32 r = 0; r < m.ranks.size(); ++r) {
        Rank& rank = m.ranks[r];
        text += "rank " + std::to_string(r);
        if (rank.frozen) text += " (stopped for ever)";
        if (!rank.launch) {
            bool done = rank.next_command == rank.commands.size();
            text += done ? ": all done\n" : ": between two commands\n";
            continue;
        }
        text += ": in operation " + std::to_string(rank.op) + "\n";
        for (auto& block : rank.launch->blocks) {
            if (!block->started) {
                text += "  block " + std::to_string(block->index) + ": not started\n";
                continue;
            }
            std::map<std::string, std::vector<u32>> groups;
            for (Thread* t : block->threads) {
                bool polls = t->polls && t->state == State::runnable;
                std::string what = name_of_state(polls ? State::spinning : t->state);
                if (t->state != State::exited) what += " at " + line_of(t->where);
                groups[what].push_back(t->index);
            }
            for (auto& [what, threads] : groups) {
                text += "  block " + std::to_string(block->index) + " threads " +
                        threads_text(threads) + ": " + what;
                Thread& t = *block->threads[threads.front()];
                if (t.state == State::spinning || t.state == State::runnable) text += watched_words(t);
                if (t.state != State::exited) text += stack_text(t);
                text += "\n";
            }
        }
    }
    return text;
}

}  // namespace

std::string place_in_library(void* pc) {
    Dl_info info{};
    if (!pc || !dladdr(pc, &info) || !info.dli_fname) return "";
    u64 offset = reinterpret_cast<u64>(pc) - reinterpret_cast<u64>(info.dli_fbase);
    return std::string("<") + info.dli_fname + "+" + hex(offset - 1) + ">";
}

std::string Trace::name_of(u32 region, u64 offset) const {
    for (const Label& label : labels) {
        if (label.region != region || offset < label.offset ||
            offset >= label.offset + label.bytes) {
            continue;
        }
        u64 inside = offset - label.offset;
        return label.name + (inside ? "+" + std::to_string(inside) : "");
    }
    return m.regions[region]->name + "+" + std::to_string(offset);
}

std::string Trace::tell(const Record& r) const {
    char who[64];
    if (r.block == 0xffff) {
        std::snprintf(who, sizeof who, "rank %u host", r.rank);
    } else {
        std::snprintf(who, sizeof who, "rank %u block %u thread %u", r.rank, r.block, r.thread);
    }
    std::string text = "step " + std::to_string(r.step) + "  " + who + ": " + name_of_did(r.did) +
                       suffix(r.order, r.scope);
    if (r.region != 0xffff) {
        text += " " + name_of(r.region, r.offset) + " [" + std::to_string(r.bytes) + "]";
    }
    text += " " + hex(r.value);
    if (r.stale) text += " (not the newest)";
    return text + "  at " + line_of(r.where);
}

std::string Trace::history(u32 region, u64 offset, u64 bytes, u32 most) const {
    std::vector<const Record*> found;
    u32 oldest = next > kSize ? next - kSize : 1;
    for (u32 number = next - 1; number >= oldest && found.size() < most; --number) {
        const Record& r = ring[number % kSize];
        if (r.region == region && r.offset < offset + bytes && offset < r.offset + r.bytes) {
            found.push_back(&r);
        }
    }
    std::string text;
    for (auto r = found.rbegin(); r != found.rend(); ++r) text += "          " + tell(**r) + "\n";
    return text;
}

std::string Trace::last_of(u32 rank, u32 most) const {
    std::vector<const Record*> found;
    u32 oldest = next > kSize ? next - kSize : 1;
    for (u32 number = next - 1; number >= oldest && found.size() < most; --number) {
        const Record& r = ring[number % kSize];
        bool quiet = r.did == Did::load || r.did == Did::block_barrier || r.did == Did::copy_read;
        if (r.rank == rank && !quiet) found.push_back(&r);
    }
    std::string text;
    for (auto r = found.rbegin(); r != found.rend(); ++r) text += "  " + tell(**r) + "\n";
    return text;
}

void Trace::clear() {
    next = 1;
    labels.clear();
    faults.clear();
    for (Record& record : ring) record.number = 0;
}

void fatal(const std::string& message) {
    std::string text = message;
    if (m.current) {
        Thread& t = *m.current;
        text += "\n  rank " + std::to_string(t.rank) + " block " + std::to_string(t.block->index) +
                " thread " + std::to_string(t.index) + " at " + line_of(t.where);
    }
    m.trace.faults.push_back({"fatal", text, {{-1, 0}}, ""});
    m.over = true;
    if (m.current) {
        for (;;) m.current->fiber.suspend();
    }
    throw 0;
}

// ---- kernel text that touches memory without a wrapper ----

namespace {

struct sigaction before_trap;
void* trapped_address;
void* trapped_at;

void landing() {
    std::string at = place_in_library(trapped_at);
    fatal("an access without a wrapper to " + hex(reinterpret_cast<u64>(trapped_address)) + " at " + at);
}

void trap(int, siginfo_t* info, void* context) {
    if (!m.current) {
        sigaction(SIGSEGV, &before_trap, nullptr);
        return;  // the engine's own mistake: let it crash
    }
    trapped_address = info->si_addr;
#if defined(__x86_64__)
    // Go on in landing(), on the fiber's own stack.
    greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    trapped_at = reinterpret_cast<void*>(registers[REG_RIP]);
    registers[REG_RSP] = ((registers[REG_RSP] - 1024) & ~15ll) - 8;
    registers[REG_RIP] = reinterpret_cast<greg_t>(&landing);
#else
    (void)context;
    sigaction(SIGSEGV, &before_trap, nullptr);
#endif
}

}  // namespace

void set_trap() {
    static char stack[64 * 1024];
    stack_t alternate{};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, nullptr);
    struct sigaction action{};
    action.sa_sigaction = trap;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &before_trap);
}
void lift_trap() { sigaction(SIGSEGV, &before_trap, nullptr); }

void report_hang(const std::string& why) {
    m.trace.faults.push_back({"hang", why + "\n" + where_everybody_is(), {{-1, 0}}, ""});
    m.over = true;
}

}  // namespace sim
