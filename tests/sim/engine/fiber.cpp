// Context switches: a dozen instructions on x86-64, ucontext elsewhere.
#include "engine/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace sim {
namespace {

constexpr std::uint64_t kCanary = 0x5ca1ab1e0ddba11ull;

// Stacks are mapped once and used again by later runs: pages that were never touched cost nothing.
class Stacks {
public:
    char* take(std::size_t index) {
        while (stacks_.size() <= index) {
            void* p = mmap(nullptr, Fiber::kStackBytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) std::abort();
            stacks_.push_back(static_cast<char*>(p));
        }
        return stacks_[index];
    }
    std::size_t next = 0;

private:
    std::vector<char*> stacks_;
} stacks;

}  // namespace

// A new run may use all stacks again.
void reset_stacks() { stacks.next = 0; }

bool Fiber::stack_is_intact() const {
    std::uint64_t word;
    std::memcpy(&word, stack_, sizeof word);
    return word == kCanary;
}

#if defined(__x86_64__)

extern "C" void sim_switch_stack(void** save, void* load);
extern "C" void sim_first_step();
asm(R"(
.text
.globl sim_switch_stack
.type sim_switch_stack, @function
sim_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.globl sim_first_step
.type sim_first_step, @function
sim_first_step:
    movq %r12, %rdi
    callq *%r13
    ud2
)");

static void* scheduler_stack;

void Fiber::start(void (*body)(void*), void* argument) {
    if (!stack_) stack_ = stacks.take(stacks.next++);
    std::memcpy(stack_, &kCanary, sizeof kCanary);
    void** top = reinterpret_cast<void**>(stack_ + kStackBytes - 64);
    // As sim_switch_stack leaves it: r15 r14 r13 r12 rbx rbp, then where to go.
    void* frame[7] = {nullptr, nullptr, reinterpret_cast<void*>(body), argument, nullptr, nullptr,
                      reinterpret_cast<void*>(&sim_first_step)};
    context_ = top - 7;
    std::memcpy(context_, frame, sizeof frame);
}
void Fiber::resume() { sim_switch_stack(&scheduler_stack, context_); }
void Fiber::suspend() { sim_switch_stack(&context_, scheduler_stack); }

std::vector<void*> Fiber::stack_trace(std::size_t most) const {
    std::vector<void*> found;
    if (!context_) return found;
    char* low = stack_;
    char* high = stack_ + kStackBytes;
    void** frame = static_cast<void***>(context_)[5];  // rbp as it was pushed
    while (found.size() < most) {
        char* here = reinterpret_cast<char*>(frame);
        if (here < low || here + 16 > high) break;
        found.push_back(frame[1]);
        frame = static_cast<void**>(frame[0]);
    }
    return found;
}

#else

static ucontext_t scheduler_context;

void Fiber::start(void (*body)(void*), void* argument) {
    if (!stack_) stack_ = stacks.take(stacks.next++);
    std::memcpy(stack_, &kCanary, sizeof kCanary);
    if (!context_) context_ = new ucontext_t;
    auto* context = static_cast<ucontext_t*>(context_);
    getcontext(context);
    context->uc_stack.ss_sp = stack_;
    context->uc_stack.ss_size = kStackBytes;
    context->uc_link = nullptr;
    auto p = reinterpret_cast<std::uintptr_t>(body);
    auto q = reinterpret_cast<std::uintptr_t>(argument);
    auto entry = +[](unsigned a, unsigned b, unsigned c, unsigned d) {
        auto function = static_cast<std::uintptr_t>(a) << 32 | b;
        auto value = static_cast<std::uintptr_t>(c) << 32 | d;
        reinterpret_cast<void (*)(void*)>(function)(reinterpret_cast<void*>(value));
    };
    makecontext(context, reinterpret_cast<void (*)()>(entry), 4, unsigned(p >> 32), unsigned(p),
                unsigned(q >> 32), unsigned(q));
}
void Fiber::resume() { swapcontext(&scheduler_context, static_cast<ucontext_t*>(context_)); }
void Fiber::suspend() { swapcontext(static_cast<ucontext_t*>(context_), &scheduler_context); }
std::vector<void*> Fiber::stack_trace(std::size_t) const { return {}; }

#endif

}  // namespace sim
