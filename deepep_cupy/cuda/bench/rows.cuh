#pragma once
// What a ceiling kernel copies: rows in segments, one segment for each rank, and their order.
#include "asm/types.cuh"
#include "generated/prelude.cuh"

struct RowPosition {
    u32 segment;
    u32 row;
};

// Where the row lies that comes `number`-th. The stride has no factor in common with the number
// of rows, so that each comes once, and segments take turns in proportion to their rows.
DEVICE RowPosition position_of(const CeilingCopy& d, u32 number) {
    u32 row = static_cast<u32>(static_cast<u64>(number) * d.stride % d.num_rows);
    u32 segment = 0;
    while (row >= d.rows[segment]) {
        row -= d.rows[segment];
        ++segment;
    }
    return {segment, row};
}

// A piece of a row: what one warp moves at a time.
struct Piece {
    const u8* source;
    u8* target;
    u32 bytes;
};
DEVICE Piece piece_of(const CeilingCopy& d, u64 item, u32 pieces, u32 most) {
    RowPosition position = position_of(d, static_cast<u32>(item / pieces));
    u32 begin = static_cast<u32>(item % pieces) * most;
    u32 rest = d.row_bytes - begin;
    u64 offset = static_cast<u64>(position.row) * d.row_bytes + begin;
    return {d.source[position.segment] + offset, d.target[position.segment] + offset,
            rest < most ? rest : most};
}
