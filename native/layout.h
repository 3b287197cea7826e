// Sizes and strides that building and running a plan agree on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels.h"

namespace loadproof {

constexpr int kRowBlock = 320;       // most rows that a thread takes at once when there are many
constexpr int kRowsPerThread = 128;  // from this many a thread on, rows are divided instead of columns
constexpr int kScoreRows = 128;      // rows whose logits are there at once to be scored
constexpr int kShareUnit = 4;        // panels: a multiple of every level's group, and of a gate and its up
// Work that threads share is taken in pieces: a product's panels, and so many pieces of rows a thread. Small
// enough for threads to end together, and not so small that keys which rows have in common are read in vain.
constexpr int kPiecePanels = 8;
constexpr int kPieces = 8;

constexpr int ceil_div(int x, int by) { return (x + by - 1) / by; }
constexpr int round_up(int x, int to) { return ceil_div(x, to) * to; }
constexpr std::size_t size(int x) { return static_cast<std::size_t>(x); }

// The share of `count` items, in units of `unit`, that part `part` of `parts` takes: [begin, end).
inline std::pair<int, int> share(int count, int part, int parts, int unit) {
  const std::int64_t units = (count + unit - 1) / unit;
  const int begin = static_cast<int>(units * part / parts) * unit;
  const int end = static_cast<int>(units * (part + 1) / parts) * unit;
  return {std::min(begin, count), std::min(end, count)};
}

// Elements between rows of bf16 activations: whole chunks, and an odd number of cache lines, so that the rows
// of a tile fall into different sets.
constexpr int row_stride(int width) { return (round_up(width, kChunk) / kChunk | 1) * kChunk; }

constexpr int head_padded(int head_dim) { return round_up(head_dim, kChunk); }

}  // namespace loadproof
