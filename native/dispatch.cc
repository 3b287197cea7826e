// Which instruction-set levels this machine and build have.
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace loadproof {

// Defined by isa/<level>.cc.
namespace amx {
extern const Kernels kKernels;
}
namespace avx512_bf16 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace portable {
extern const Kernels kKernels;
}

namespace {

struct Features {
  bool avx2 = false, avx512 = false, avx512_bf16 = false, amx = false;
};

#if defined(__x86_64__)
// Register files that the system saves, by bit (Intel SDM volume 1, chapter 13).
bool saves(unsigned mask) {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & mask) == mask;
}

// Linux hands out tile registers on request only, for the whole process.
bool request_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Features detect() {
  Features f;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return f;
  const bool fma = (c & bit_FMA) != 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  const unsigned extra = d;
  const auto has = [](unsigned word, int at) { return (word >> at & 1u) != 0; };
  f.avx2 = fma && has(b, 5) && saves(0x6);
  f.avx512 = f.avx2 && has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31) && saves(0xe6);
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return f;
  f.avx512_bf16 = f.avx512 && has(a, 5);
  f.amx = f.avx512_bf16 && has(extra, 22) && has(extra, 24) && saves(0x60000) && request_tiles();
  return f;
}
#else
Features detect() { return {}; }
#endif

struct Levels {
  const Kernels* tables[6] = {};
  const char* names[6] = {};
  Levels() {
    [[maybe_unused]] const Features f = detect();
    int n = 0;
    const auto add = [&](const Kernels& k) {
      tables[n] = &k;
      names[n++] = k.name;
    };
#ifdef LOADPROOF_HAS_amx
    if (f.amx) add(amx::kKernels);
#endif
#ifdef LOADPROOF_HAS_avx512_bf16
    if (f.avx512_bf16) add(avx512_bf16::kKernels);
#endif
#ifdef LOADPROOF_HAS_avx512
    if (f.avx512) add(avx512::kKernels);
#endif
#ifdef LOADPROOF_HAS_avx2
    if (f.avx2) add(avx2::kKernels);
#endif
    add(portable::kKernels);
  }
};

const Levels& levels() {
  static const Levels found;
  return found;
}

}  // namespace

const char* const* available_levels() { return levels().names; }

const Kernels* kernels_for(std::string_view level) {
  for (const Kernels* k : levels().tables)
    if (k && level == k->name) return k;
  return nullptr;
}

std::size_t scratch_bytes(int head_padded, int group) {
  const auto rows = static_cast<std::size_t>((attention_tile_rows(group) + 31) / 32 * 32);
  const auto dp = static_cast<std::size_t>(head_padded);
  const std::size_t attention = rows * dp * (2 + 4 + 4) + rows * (kSplitKeys + 32) * (4 + 2) + rows * 4 * 4 +
                                kSplitKeys * dp * 2 + 10 * 64;
  const std::size_t linear = kRowTile * 4 * kLanes * sizeof(float);
  return (attention > linear ? attention : linear) + 4096;
}

}  // namespace loadproof
