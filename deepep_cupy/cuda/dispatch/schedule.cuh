#pragma once
// Which block looks at a token, and which warp moves it.
//
// Slots follow the order of tokens, so that a block looks at a contiguous share of them. Moving is
// dealt out on the way: a warp begins with a token of its block's share, whose row it fetches while
// the ranks still agree, and then draws tickets for the tokens that are left, of all shares in
// order. SMs do not get equal parts of a busy link: with fixed shares the fastest block of an H200
// was done after 150 us and the slowest after 200; with tickets all end together, at 172.
#include "comm/control.cuh"

struct Range {
    u32 first;
    u32 end;
};

// Tokens a block looks at.
DEVICE u32 share_of_block(u32 num_tokens) { return (num_tokens + num_blocks() - 1) / num_blocks(); }

DEVICE Range tokens_of_block(u32 num_tokens, u32 block) {
    u32 share = share_of_block(num_tokens);
    u32 first = block * share < num_tokens ? block * share : num_tokens;
    u32 end = first + share < num_tokens ? first + share : num_tokens;
    return {first, end};
}

constexpr u32 kNoToken = ~0u;

// One warp's tokens.
struct Deal {
    u32 num_tokens;
    u32 share;   // of a block
    u32 rest;    // of it, what is not some warp's first token
    u32 ticket;  // lane 0: for the token after the current one
};

// Each warp has a ticket to begin with; more are drawn, one ahead of need.
DEVICE Deal begin_deal(u32 num_tokens) {
    u32 share = share_of_block(num_tokens);
    u32 ticket = warp_index() * num_blocks() + block_index();
    return {num_tokens, share, share > kNumWarps ? share - kNumWarps : 0u, ticket};
}
DEVICE u32 draw_ticket(const CommParams& c) {
    // Relaxed: a number of its own for each warp is all that it means.
    u32 drawn = atom_add_relaxed_gpu_u32(control_u32(own_region(c), kControlTickets), 1u);
    return kNumWarps * num_blocks() + drawn;
}

// A token of this block's share; kNoToken where it has fewer tokens than warps.
DEVICE u32 first_token(const Deal& deal) {
    u32 token = block_index() * deal.share + warp_index();
    return warp_index() < deal.share && token < deal.num_tokens ? token : kNoToken;
}

// The next token of any share; kNoToken: there are no more. All lanes call it.
DEVICE u32 next_token(const CommParams& c, Deal& deal) {
    if (deal.rest == 0u) return kNoToken;
    u32 ticket = warp_shuffle(deal.ticket, 0);
    u32 block = ticket / deal.rest;
    if (block >= num_blocks()) return kNoToken;
    u32 token = block * deal.share + kNumWarps + ticket % deal.rest;
    if (token >= deal.num_tokens) return kNoToken;
    if (lane_index() == 0) deal.ticket = draw_ticket(c);
    return token;
}
