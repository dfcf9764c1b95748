#pragma once
// The schedule of a dispatch: which block scans a token, and which warp moves its row.
//
// Scanning: each block has a contiguous share of the tokens, because slots follow their order.
//
// Moving: a warp begins with a token of its block's share, whose row it loads before the ranks
// have agreed. After that it draws tickets for the tokens that are left, of all shares in order.
// SMs do not get equal parts of a busy link: with fixed shares the fastest block of an H200 was
// done after 150 us and the slowest after 200; with tickets all end together, at 172.
#include "comm/control.cuh"

struct Range {
    u32 first;
    u32 end;
};

// Tokens that a block scans.
DEVICE u32 share_of_block(u32 num_tokens) { return (num_tokens + num_blocks() - 1) / num_blocks(); }

DEVICE Range tokens_of_block(u32 num_tokens, u32 block) {
    u32 share = share_of_block(num_tokens);
    u32 first = block * share < num_tokens ? block * share : num_tokens;
    u32 end = first + share < num_tokens ? first + share : num_tokens;
    return {first, end};
}

constexpr u32 kNoToken = ~0u;

// Where one warp is in its tokens.
struct Schedule {
    u32 num_tokens;
    u32 share;   // of a block
    u32 rest;    // of it, what is not some warp's first token
    u32 ticket;  // lane 0: for the token after the current one
};

// Each warp has a ticket to begin with; more are drawn, one ahead of need.
DEVICE Schedule begin_schedule(u32 num_tokens) {
    u32 share = share_of_block(num_tokens);
    u32 ticket = warp_index() * num_blocks() + block_index();
    return {num_tokens, share, share > kNumWarps ? share - kNumWarps : 0u, ticket};
}
DEVICE u32 draw_ticket(const CommParams& c) {
    // Relaxed: the number hands over no data; it only differs from everybody else's.
    u32 drawn = atom_add_relaxed_gpu_u32(control_u32(own_region(c), kControlTickets), 1u);
    return kNumWarps * num_blocks() + drawn;
}

// A token of this block's share; kNoToken where it has fewer tokens than warps.
DEVICE u32 first_token(const Schedule& schedule) {
    u32 token = block_index() * schedule.share + warp_index();
    return warp_index() < schedule.share && token < schedule.num_tokens ? token : kNoToken;
}

// The next token of any share; kNoToken: there are no more. All lanes call it.
DEVICE u32 next_token(const CommParams& c, Schedule& schedule) {
    if (schedule.rest == 0u) return kNoToken;
    u32 ticket = warp_shuffle(schedule.ticket, 0);
    u32 block = ticket / schedule.rest;
    if (block >= num_blocks()) return kNoToken;
    u32 token = block * schedule.share + kNumWarps + ticket % schedule.rest;
    if (token >= schedule.num_tokens) return kNoToken;
    if (lane_index() == 0) schedule.ticket = draw_ticket(c);
    return token;
}
