#pragma once
// Dispatch, in the order in which a kernel runs it. Its first load of rows begins within exchange.
//
//   phase     what a block does                                                        file
//   scan      looks at its tokens' choices: slot of a token = number of earlier        scan.cuh
//             tokens of the block for the same rank
//   exchange  adds up the counts of lower blocks, exchanges headers with all ranks     exchange.cuh
//             and adds up the counts of lower ranks; the last block, the reporter,     counts.cuh
//             sends and reports the counts per expert
//   move      takes tokens by schedule.cuh; row = rows of lower ranks + rows of lower  move.cuh
//             blocks + slot; rows go by loads and stores (ldst.cu), or by the bulk     move_bulk.cuh
//             copy engine (bulk.cu as they are, cast_bulk.cu cast to FP8)
//   finish    closes the operation with all ranks; statistics, or poison               finish.cuh
//
// Once it is over, columns.cu brings received scales into column-major order, if they are wanted.
#include "dispatch/scan.cuh"
#include "dispatch/exchange.cuh"
#include "dispatch/move.cuh"
#include "dispatch/finish.cuh"
