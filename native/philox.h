// Philox4x32-10: random words as a pure function of a key and a counter, with no state to lose
// (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).
#pragma once

#include <cstdint>

namespace loadproof {

struct PhiloxWords {
  std::uint32_t v[4];
};

// The block of the 128-bit counter whose low half is `position` under the 64-bit key `seed`. Static, so
// that each instruction-set level has its own copy.
static inline PhiloxWords philox(std::uint64_t seed, std::uint64_t position) {
  constexpr std::uint64_t kMultiply0 = 0xD2511F53u, kMultiply1 = 0xCD9E8D57u;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  std::uint32_t key0 = low(seed), key1 = high(seed);
  std::uint32_t c0 = low(position), c1 = high(position), c2 = 0, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = kMultiply0 * c0, p1 = kMultiply1 * c2;
    c0 = high(p1) ^ c1 ^ key0;
    c2 = high(p0) ^ c3 ^ key1;
    c1 = low(p1);
    c3 = low(p0);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace loadproof
