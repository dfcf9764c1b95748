#pragma once
// What the wrappers in asm/ call: the simulator as kernel text sees it. Kernel text is flattened
// into one string with this file in it, so no standard header is included here.
namespace sim {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// The line of kernel text that calls a wrapper; every wrapper takes one as its last argument.
struct Where {
    const char* file;
    int line;
    static constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};

enum class Order : u8 { weak, relaxed, acquire, release, acq_rel };
enum class Scope : u8 { none, cta, gpu, sys };
enum class Cache : u8 { allocate, no_allocate, read_only };  // read_only: nc, without allocation
enum class Rmw : u8 { add, bit_or, cas, max };
enum class WarpOp : u8 { barrier, ballot, shuffle };

// ---- who runs ----
u32 thread_index();
u32 block_index();
u32 num_blocks();
u32 num_threads();
u32 sm_index();
void* shared_base();

// ---- global memory ----
u64 load(const void* p, u32 bytes, Order order, Scope scope, Cache cache, Where where);
void load16(void* out, const void* p, Order order, Scope scope, Cache cache, Where where);
void store(void* p, u32 bytes, u64 value, Order order, Scope scope, Where where);
void store16(void* p, const void* data, Where where);
void load_word16(void* out, const void* p, Order order, Scope scope, Where where);
void store_word16(void* p, const void* data, Order order, Scope scope, Where where);
u64 read_modify_write(void* p, u32 bytes, Rmw op, u64 operand, u64 expected, Order order,
                      Scope scope, bool returns, Where where);
void fence(Scope scope, Where where);

// ---- barriers, exchanges, time ----
bool block_barrier(bool predicate, Where where);
u32 warp_meet(WarpOp op, u32 value, u32 source_lane, Where where);
u64 global_timer(Where where);
void poll_pause(Where where);
u32 shared_rmw(u32* p, u32 value, int op, Where where);  // op 0: add, 1: or, 2: min

// ---- the bulk copy engine ----
void shared_load(void* out, const void* p, u32 bytes, Where where);
void shared_store(void* p, const void* data, u32 bytes, Where where);
void mbarrier_init(void* barrier, u32 arrivals, Where where);
void fence_mbarrier_init(Where where);
void mbarrier_arrive_expect(void* barrier, u32 bytes, Where where);
bool mbarrier_try_wait(void* barrier, u32 parity, Where where);
void bulk_load(void* shared, const void* global, u32 bytes, void* barrier, Where where);
void bulk_store(void* global, const void* shared, u32 bytes, Where where);
void bulk_commit(Where where);
void bulk_wait(u32 pending, bool read_only, Where where);
void fence_proxy_shared(Where where);
void fence_proxy_global(Where where);

}  // namespace sim

// The default for a wrapper's last argument: evaluated where the wrapper is called.
#define SIM_HERE ::sim::Where::here()
