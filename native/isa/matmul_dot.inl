// Products on vector registers: C = A B for bf16 rows and packed panels, in float.
//
// Each output element adds its k pairs in ascending order into one accumulator, the same instructions
// whatever the tile it falls in: with a pair-dot instruction the pair's odd product is added before the even
// one, without it two multiply-adds do the even one first.

namespace loadproof::LOADPROOF_NS {
namespace {

#if LOADPROOF_DOT
inline F16 dot_pairs(F16 acc, const bf16* a_pair, const bf16* b) {
  int pair;
  __builtin_memcpy(&pair, a_pair, 4);
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)),
                           reinterpret_cast<__m512bh>(_mm512_loadu_si512(b)))};
}
struct Pairs {
  __m512i v;
};
inline Pairs load_pairs(const bf16* b) { return {_mm512_loadu_si512(b)}; }
inline F16 dot_pairs(F16 acc, const bf16* a_pair, const Pairs& b) {
  int pair;
  __builtin_memcpy(&pair, a_pair, 4);
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)),
                           reinterpret_cast<__m512bh>(b.v))};
}
#else
// Sixteen pairs widened to their even and odd members.
struct Pairs {
  F16 even, odd;
};
#if LOADPROOF_VEC == 512
inline Pairs load_pairs(const bf16* b) {
  const __m512i v = _mm512_loadu_si512(b);
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(v, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}};
}
#elif LOADPROOF_VEC == 256
inline Pairs load_pairs(const bf16* b) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 16));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(lo, high)), _mm256_castsi256_ps(_mm256_and_si256(hi, high))}};
}
#else
inline Pairs load_pairs(const bf16* b) {
  Pairs p;
  for (int i = 0; i < 16; ++i) {
    p.even.v[i] = float_of(static_cast<std::uint32_t>(b[2 * i]) << 16);
    p.odd.v[i] = float_of(static_cast<std::uint32_t>(b[2 * i + 1]) << 16);
  }
  return p;
}
#endif
inline F16 dot_pairs(F16 acc, const bf16* a_pair, const Pairs& b) {
  std::uint32_t pair;
  __builtin_memcpy(&pair, a_pair, 4);
  float even, odd;
  const std::uint32_t even_bits = pair << 16;
  const std::uint32_t odd_bits = pair & 0xffff0000u;
  __builtin_memcpy(&even, &even_bits, 4);
  __builtin_memcpy(&odd, &odd_bits, 4);
  return mul_add(set1(odd), b.odd, mul_add(set1(even), b.even, acc));
}
#endif

#if LOADPROOF_VEC == 512
constexpr int kTileRows = 6, kTilePanels = 4;  // 24 accumulators of 32 registers
#else
constexpr int kTileRows = 2, kTilePanels = 2;  // F16 takes two registers of 16, and pairs four more
#endif

// One register tile. chunk(kc) is the first panel's chunk of k rows 32 kc..; panels are panel_stride apart.
template <int M, int N, class ChunkOf>
inline void dot_tile(const bf16* a, int a_stride, int chunks, ChunkOf chunk, std::ptrdiff_t panel_stride,
                     float* c, int c_stride, Fetch fetch) {
  F16 acc[M][N];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) acc[i][j] = zero();
  for (int kc = 0; kc < chunks; ++kc) {
    const bf16* b = chunk(kc);
    const bool fetching = fetch.from && kc % fetch.every == fetch.phase;
    for (int p = 0; p < kChunk / 2; ++p) {
      for (int j = 0; j < N; ++j) {
        const bf16* at = b + j * panel_stride + p * 2 * kLanes;
        if (fetching) __builtin_prefetch(fetch.from + ((kc * (kChunk / 2) + p) * N + j) * 2 * kLanes, 0, 2);
        const Pairs pairs = load_pairs(at);
        for (int i = 0; i < M; ++i)
          acc[i][j] = dot_pairs(acc[i][j], a + i * a_stride + kc * kChunk + 2 * p, pairs);
      }
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) store(c + i * c_stride + j * kLanes, acc[i][j]);
}

template <int N, class ChunkOf>
inline void dot_rows(const bf16* a, int a_stride, int rows, int chunks, ChunkOf chunk,
                     std::ptrdiff_t panel_stride, float* c, int c_stride, Fetch fetch) {
  const auto tile = [&](auto m, int i) {
    dot_tile<decltype(m)::value, N>(a + i * a_stride, a_stride, chunks, chunk, panel_stride, c + i * c_stride,
                                    c_stride, i == 0 ? fetch : Fetch{});
  };
  int i = 0;
  for (; i + kTileRows <= rows; i += kTileRows) tile(Int<kTileRows>{}, i);
  switch (rows - i) {
    case 5:
      tile(Int<5>{}, i);
      break;
    case 4:
      tile(Int<4>{}, i);
      break;
    case 3:
      tile(Int<3>{}, i);
      break;
    case 2:
      tile(Int<2>{}, i);
      break;
    case 1:
      tile(Int<1>{}, i);
      break;
    default:
      break;
  }
}

// C [rows, panels * 16] = A [rows, chunks * 32] times `panels` panels. `rows` is any number; only they are
// read.
template <class ChunkOf>
inline void product(const bf16* a, int a_stride, int rows, int chunks, ChunkOf chunk,
                    std::ptrdiff_t panel_stride, int panels, float* c, int c_stride, Fetch fetch) {
  int j = 0;
  const auto strip = [&](auto n) {
    Fetch ahead = fetch;
    if (fetch.from) ahead.from += j * chunks * kChunk * kLanes;
    const auto from = [&, j](int kc) { return chunk(kc) + j * panel_stride; };
    dot_rows<decltype(n)::value>(a, a_stride, rows, chunks, from, panel_stride, c + j * kLanes, c_stride,
                                 ahead);
    j += decltype(n)::value;
  };
  while (panels - j >= kTilePanels) strip(Int<kTilePanels>{});
  if (kTilePanels > 2 && panels - j >= 2) strip(Int<2>{});
  if (panels - j >= 1) strip(Int<1>{});
}

inline void begin_thread() {}
inline void end_thread() {}

// Products here take the rows that there are.
struct FewRows {
  explicit FewRows(int) {}
};

}  // namespace
}  // namespace loadproof::LOADPROOF_NS
