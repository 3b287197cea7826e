// What this machine can do at best: the rates that floors are counted with.
#pragma once

#include <cstddef>
#include <string_view>

namespace loadproof {

constexpr std::size_t kMinReadBytes = std::size_t{1} << 20;
constexpr std::size_t kMaxReadBytes = std::size_t{1} << 34;

// Bytes a second that `num_threads` threads together read from `bytes` of memory on large pages, each its own
// share of it: the best of several access patterns. Caches hold what they can, as they do for weights of
// that size. Throws std::invalid_argument for a size outside kMinReadBytes..kMaxReadBytes or a thread count
// outside 1..1024, std::bad_alloc where the memory is not there.
double read_bandwidth(int num_threads, std::size_t bytes);

// Floating-point operations a second (a multiply and an add are two) of the level's linear kernel on operands
// that stay in a core's caches, each thread its own: the best of several shapes. Throws
// std::invalid_argument for a level that this machine lacks or a thread count outside 1..1024.
double product_rate(std::string_view isa, int num_threads);

// The same for the level's product instruction alone, on registers: what no kernel can exceed. The portable
// level names no instruction; it counts what the compiler makes of plain multiply-adds.
double instruction_rate(std::string_view isa, int num_threads);

}  // namespace loadproof
