#include "machine.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "matrix.h"
#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace loadproof {
namespace {

constexpr int kAttempts = 12;  // the best of them counts: noise only ever slows

double seconds_of(ThreadPool& pool, const std::function<void(int)>& work) {
  const auto start = std::chrono::steady_clock::now();
  pool.run(work);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double best_seconds(ThreadPool& pool, const std::function<void(int)>& work) {
  double best = seconds_of(pool, work);
  for (int i = 1; i < kAttempts; ++i) best = std::min(best, seconds_of(pool, work));
  return best;
}

void check_threads(int num_threads) {
  if (num_threads < 1 || num_threads > 1024)
    throw std::invalid_argument("num_threads must be from 1 to 1024");
}

const Kernels& find_kernels(std::string_view isa) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels)
    throw std::invalid_argument("this machine or build has no instruction-set level named " +
                                std::string(isa));
  return *kernels;
}

// Keeps a result that nothing else uses, so that the work for it is done.
template <class T>
void keep(const T& value) {
  __asm__ volatile("" : : "r,m"(value) : "memory");
}

// --- memory ---

constexpr std::size_t kLine = 64;
constexpr std::size_t kWords = kLine / sizeof(std::uint64_t);

// One word of every line of `streams` equal stretches read side by side: memory delivers lines, and with one
// load a line as many as possible are on their way at once. `ahead` bytes in front of each are prefetched.
std::uint64_t read_lines(const std::uint64_t* data, std::size_t lines, std::size_t streams,
                         std::size_t ahead) {
  const std::size_t stretch = lines / streams;
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < stretch; ++i)
    for (std::size_t s = 0; s < streams; ++s) {
      const std::uint64_t* line = data + (s * stretch + i) * kWords;
      if (ahead) __builtin_prefetch(line + ahead / sizeof(std::uint64_t), 0, 2);
      sum += *line;
    }
  return sum;
}

// --- products ---

struct Shape {
  int rows, k, columns;

  // An odd number of cache lines, so that the rows of a tile fall into different sets of the cache.
  int a_stride() const { return (k / kChunk | 1) * kChunk; }
  int out_stride() const { return (columns / kLanes | 1) * kLanes; }
};

// From a tile's worth to what a 2 MiB second-level cache holds, rows a multiple of kRowTile.
constexpr Shape kShapes[] = {
    {32, 512, 64}, {64, 1024, 128}, {128, 576, 256}, {256, 576, 512}, {256, 1536, 256}};

// A thread's own operands and result, touched first by that thread.
struct Operands {
  HugeBuffer a, b, c, scratch;
  LinearArgs args{};

  explicit Operands(const Shape& s)
      : a(product_bytes(s.rows + kRowTile, s.a_stride(), sizeof(bf16))),
        b(product_bytes(s.columns, s.k, sizeof(bf16))),
        c(product_bytes(s.rows + kRowTile, s.out_stride(), sizeof(float))),
        scratch(scratch_bytes(kChunk, 1)) {
    args.a = a.as<bf16>();
    args.a_stride = s.a_stride();
    args.weight = {b.as<bf16>(), s.columns, s.k};
    args.epilogue = Epilogue::kStore;
    args.out = c.as<float>();
    args.out_columns = s.columns;
    args.out_stride = s.out_stride();
  }

  // Values from 1 to 2 of every mantissa: constant operands would switch fewer gates than real ones.
  void fill() {
    for (HugeBuffer* buffer : {&a, &b})
      for (std::size_t i = 0; i < buffer->size() / sizeof(bf16); ++i)
        buffer->as<bf16>()[i] = static_cast<bf16>(0x3f80u | (i * 2654435761u >> 13 & 0x7fu));
  }

 private:
  static std::size_t product_bytes(int x, int y, std::size_t element) {
    return static_cast<std::size_t>(x) * static_cast<std::size_t>(y) * element;
  }
};

double shape_rate(const Kernels& kernels, ThreadPool& pool, const Shape& s) {
  std::vector<Operands> operands;
  for (int t = 0; t < pool.size(); ++t) operands.emplace_back(s);
  pool.run([&](int t) { operands[static_cast<std::size_t>(t)].fill(); });
  const double flops = 2.0 * s.rows * s.k * s.columns;
  int repeats = 1;
  const auto work = [&](int t) {
    Operands& mine = operands[static_cast<std::size_t>(t)];
    kernels.begin_thread();
    for (int i = 0; i < repeats; ++i)
      kernels.linear(mine.args, 0, s.rows, 0, s.columns / kLanes, {mine.scratch.as<std::byte>()});
    kernels.end_thread();
  };
  constexpr double kLongEnough = 1e-3;  // seconds: beside it, the start of a region is nothing
  repeats = 1 + static_cast<int>(kLongEnough / best_seconds(pool, work));
  return flops * repeats * pool.size() / best_seconds(pool, work);
}

// --- instructions ---

// Each loop runs `turns` turns and returns the operations of one turn; independent chains hide the latency.
using Loop = double (*)(std::int64_t turns);

double portable_loop(std::int64_t turns) {
  constexpr int kChains = 32;
  float acc[kChains] = {};
  float x = 1.0f, y = 0.5f;
  keep(x);
  keep(y);
  for (std::int64_t i = 0; i < turns; ++i)
    for (float& a : acc) a = a * y + x;
  for (const float& a : acc) keep(a);
  return 2.0 * kChains;
}

#if defined(LOADPROOF_HAS_avx2)
__attribute__((target("avx2,fma"))) double avx2_loop(std::int64_t turns) {
  constexpr int kChains = 12;
  const __m256 x = _mm256_set1_ps(0.5f);
  __m256 acc[kChains];
  for (__m256& a : acc) a = x;
  for (std::int64_t i = 0; i < turns; ++i)
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) acc[j] = _mm256_fmadd_ps(acc[j], x, x);
  for (const __m256& a : acc) keep(_mm256_cvtss_f32(a));
  return kChains * 8 * 2.0;
}
#endif

#if defined(LOADPROOF_HAS_avx512)
__attribute__((target("avx512f"))) double avx512_loop(std::int64_t turns) {
  constexpr int kChains = 24;
  const __m512 x = _mm512_set1_ps(0.5f);
  __m512 acc[kChains];
  for (__m512& a : acc) a = x;
  for (std::int64_t i = 0; i < turns; ++i)
#pragma GCC unroll 24
    for (int j = 0; j < kChains; ++j) acc[j] = _mm512_fmadd_ps(acc[j], x, x);
  for (const __m512& a : acc) keep(_mm512_cvtss_f32(a));
  return kChains * 16 * 2.0;
}
#endif

#if defined(LOADPROOF_HAS_avx512_bf16)
__attribute__((target("avx512f,avx512bf16"))) double avx512_bf16_loop(std::int64_t turns) {
  constexpr int kChains = 24;
  const __m512bh x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80));
  __m512 acc[kChains];
  for (__m512& a : acc) a = _mm512_setzero_ps();
  for (std::int64_t i = 0; i < turns; ++i)
#pragma GCC unroll 24
    for (int j = 0; j < kChains; ++j) acc[j] = _mm512_dpbf16_ps(acc[j], x, x);
  for (const __m512& a : acc) keep(_mm512_cvtss_f32(a));
  return kChains * 16 * 4.0;
}
#endif

#if defined(LOADPROOF_HAS_amx)
// Tiles are configured to 16 rows of 64 bytes by the level's begin_thread().
__attribute__((target("amx-tile,amx-bf16"))) double amx_loop(std::int64_t turns) {
  alignas(64) static constexpr std::uint16_t kZeros[16 * 32] = {};
  _tile_loadd(4, kZeros, 64);
  _tile_loadd(5, kZeros, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::int64_t i = 0; i < turns; ++i) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  return 4 * 16.0 * 16 * 32 * 2;
}
#endif

Loop loop_of(std::string_view isa) {
#if defined(LOADPROOF_HAS_amx)
  if (isa == "amx") return amx_loop;
#endif
#if defined(LOADPROOF_HAS_avx512_bf16)
  if (isa == "avx512_bf16") return avx512_bf16_loop;
#endif
#if defined(LOADPROOF_HAS_avx512)
  if (isa == "avx512") return avx512_loop;
#endif
#if defined(LOADPROOF_HAS_avx2)
  if (isa == "avx2") return avx2_loop;
#endif
  return portable_loop;
}

}  // namespace

double read_bandwidth(int num_threads, std::size_t bytes) {
  check_threads(num_threads);
  if (bytes < kMinReadBytes || bytes > kMaxReadBytes)
    throw std::invalid_argument("a bandwidth is measured over 1 MiB to 16 GiB");
  ThreadPool pool(num_threads);
  const auto threads = static_cast<std::size_t>(num_threads);
  const std::size_t lines = bytes / kLine / threads;  // of one thread
  const HugeBuffer buffer(bytes);
  const auto share = [&](int t) {
    return buffer.as<std::uint64_t>() + static_cast<std::size_t>(t) * lines * kWords;
  };
  // Untouched pages would all be the one page of zeros.
  pool.run([&](int t) { std::fill_n(share(t), lines * kWords, std::uint64_t{1}); });
  double best = 0.0;
  for (const std::size_t streams : {std::size_t{1}, std::size_t{4}, std::size_t{16}})
    for (const std::size_t ahead : {std::size_t{0}, std::size_t{1024}, std::size_t{8192}}) {
      const double seconds =
          best_seconds(pool, [&](int t) { keep(read_lines(share(t), lines, streams, ahead)); });
      const std::size_t read = lines / streams * streams * kLine * threads;
      best = std::max(best, static_cast<double>(read) / seconds);
    }
  return best;
}

double product_rate(std::string_view isa, int num_threads) {
  check_threads(num_threads);
  const Kernels& kernels = find_kernels(isa);
  ThreadPool pool(num_threads);
  double best = 0.0;
  for (const Shape& s : kShapes) best = std::max(best, shape_rate(kernels, pool, s));
  return best;
}

double instruction_rate(std::string_view isa, int num_threads) {
  check_threads(num_threads);
  const Kernels& kernels = find_kernels(isa);
  const Loop loop = loop_of(isa);
  ThreadPool pool(num_threads);
  constexpr std::int64_t kTurns = 40000;
  std::vector<double> operations(static_cast<std::size_t>(num_threads));
  const double seconds = best_seconds(pool, [&](int t) {
    kernels.begin_thread();
    operations[static_cast<std::size_t>(t)] = loop(kTurns) * static_cast<double>(kTurns);
    kernels.end_thread();
  });
  return operations[0] * num_threads / seconds;
}

void bind_machine(nanobind::module_& m) {
  namespace nb = nanobind;
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  m.def("read_bandwidth", &read_bandwidth, nb::arg("num_threads"), nb::arg("num_bytes"), Unlocked());
  const auto by_level = [&](const char* name, double (*rate)(std::string_view, int)) {
    m.def(
        name, [rate](const std::string& isa, int num_threads) { return rate(isa, num_threads); },
        nb::arg("isa"), nb::arg("num_threads"), Unlocked());
  };
  by_level("product_rate", &product_rate);
  by_level("instruction_rate", &instruction_rate);
}

}  // namespace loadproof
