#pragma once
// Dispatch, in the order in which a kernel runs it. Its first load of rows begins within exchange.
//
//   file           what a block does
//   scan.cuh       reads its tokens' choices: slot of a token = number of earlier tokens of the
//                  block for the same rank
//   exchange.cuh   adds up the counts of lower blocks, exchanges headers with all ranks and adds up
//                  the counts of lower ranks: row = rows of lower ranks and blocks + slot
//   counts.cuh     the last block, the reporter, sends and reports the counts per expert
//   move.cuh       takes tokens by schedule.cuh and sends their rows, by loads and stores (ldst.cu)
//                  or by the bulk copy engine (move_bulk.cuh for bulk.cu and cast_bulk.cu)
//   finish.cuh     closes the operation with all ranks; then statistics, or poison
//
// Once it is over, columns.cu brings received scales into column-major order, if they are wanted.
#include "dispatch/scan.cuh"
#include "dispatch/exchange.cuh"
#include "dispatch/move.cuh"
#include "dispatch/finish.cuh"
