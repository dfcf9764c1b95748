#pragma once
// One CUDA thread's place to run: a stack and a saved stack pointer.
#include <cstddef>
#include <vector>

namespace sim {

class Fiber {
public:
    static constexpr std::size_t kStackBytes = 128 * 1024;

    void start(void (*body)(void*), void* argument);
    void resume();          // from the scheduler into the fiber
    void suspend();         // from the fiber back into the scheduler
    bool stack_is_intact() const;

    // Return addresses of a suspended fiber, innermost first.
    std::vector<void*> stack_trace(std::size_t most) const;

private:
    char* stack_ = nullptr;
    void* context_ = nullptr;
};

}  // namespace sim
