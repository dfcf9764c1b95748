#pragma once
// What a litmus test's code may use; simulator/litmus.py writes the body behind this file.
#include "asm/types.cuh"
#include "generated/prelude.cuh"
#include "asm/bulk.cuh"
#include "asm/memory.cuh"
#include "asm/thread.cuh"

struct Shared {
    u64 loaded[2];
    alignas(128) u8 stage[256];
};

#define LITMUS_NAMES                                                     \
    u64 *x = p.x, *y = p.y, *f = p.f, *g = p.g, *h = p.h, *out = p.out;  \
    u8* rows = p.rows;                                                   \
    Shared& s = shared_memory<Shared>();                                 \
    u8* stage = s.stage;                                                 \
    u64* loaded = s.loaded;                                              \
    (void)x, (void)y, (void)f, (void)g, (void)h, (void)out, (void)rows;  \
    (void)stage, (void)loaded;

#define FIRST if (thread_index() == 0)
#define WAIT(condition) while (!(condition)) poll_pause()

KERNEL litmus(const GRID_CONSTANT LitmusParams p)
