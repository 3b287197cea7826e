// Sixteen float lanes, the one vector shape of every kernel, on three register widths.
//
// Reductions over a row are laid out in these sixteen lanes at every level, so that a kernel written once
// sums in the same order wherever it runs. Levels may differ from each other in the last bit (fused or
// separate multiply-add); within a level every function here is a pure function of its operands.
//
// Included once by each isa/<level>.cc, which defines LOADPROOF_NS (the level's namespace) and
// LOADPROOF_VEC (512, 256 or 0). Nothing here may call an inline library function: the linker keeps one
// copy of those for all levels, and it could be one compiled for a wider machine.
#pragma once

#include <cstddef>
#include <cstdint>

#if LOADPROOF_VEC > 0
#include <immintrin.h>
#endif

namespace loadproof::LOADPROOF_NS {
namespace {

using bf16 = std::uint16_t;

#if LOADPROOF_VEC == 512

struct F16 {
  __m512 v;
};
inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
// The first n lanes (0 < n < 16) from memory, `fill` in the others.
inline F16 load_first(const float* p, int n, float fill) {
  return {_mm512_mask_loadu_ps(_mm512_set1_ps(fill), first_lanes(n), p)};
}
inline void store_first(float* p, F16 a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 mul_add(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
// Lane by lane: a < b ? x : y.
inline F16 if_less(F16 a, F16 b, F16 x, F16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
inline unsigned equal_bits(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline unsigned less_bits(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
inline F16 round_even(F16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2**n for whole n in [-126, 127].
inline F16 scale_pow2(F16 a, F16 n) {
  const __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
  return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(e))};
}
// a * 2**n for whole n <= 0 where x is at least `least`, else 0. Lanes left out cost nothing, where an
// underflow would cost a hundred cycles.
inline F16 scale_down(F16 a, F16 n, F16 x, float least) {
  return {_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(least), _CMP_GE_OQ), a.v, n.v)};
}
inline F16 load_bf16(const bf16* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
// Round to nearest, ties to even. Finite input only: a NaN would need a branch that no value here takes.
#if LOADPROOF_DOT
inline void store_bf16(bf16* p, F16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v)));
}
#else
inline void store_bf16(bf16* p, F16 a) {
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7fff));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}
#endif
inline float sum(F16 a) {
  const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
inline float max_lane(F16 a) { return _mm512_reduce_max_ps(a.v); }

#elif LOADPROOF_VEC == 256

struct F16 {
  __m256 lo, hi;
};
inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline F16 load_first(const float* p, int n, float fill) {
  alignas(32) float t[16];
  for (int i = 0; i < 16; ++i) t[i] = i < n ? p[i] : fill;
  return load(t);
}
inline void store_first(float* p, F16 a, int n) {
  alignas(32) float t[16];
  store(t, a);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
inline F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 mul_add(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F16 if_less(F16 a, F16 b, F16 x, F16 y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline unsigned join_bits(__m256 lo, __m256 hi) {
  return static_cast<unsigned>(_mm256_movemask_ps(lo)) | static_cast<unsigned>(_mm256_movemask_ps(hi)) << 8;
}
inline unsigned equal_bits(F16 a, F16 b) {
  return join_bits(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ));
}
inline unsigned less_bits(F16 a, F16 b) {
  return join_bits(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ));
}
inline F16 round_even(F16 a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline __m256 pow2(__m256 n) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F16 scale_pow2(F16 a, F16 n) {
  return {_mm256_mul_ps(a.lo, pow2(n.lo)), _mm256_mul_ps(a.hi, pow2(n.hi))};
}
inline __m256 widen(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline F16 load_bf16(const bf16* p) {
  return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline __m256i round_bf16(__m256 a) {
  const __m256i u = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, odd), _mm256_set1_epi32(0x7fff)), 16);
}
inline void store_bf16(bf16* p, F16 a) {
  const __m256i packed = _mm256_packus_epi32(round_bf16(a.lo), round_bf16(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline float sum(F16 a) {
  const __m256 s = _mm256_add_ps(a.lo, a.hi);
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
inline float max_lane(F16 a) {
  const __m256 s = _mm256_max_ps(a.lo, a.hi);
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}

#else  // portable: plain loops that a compiler may or may not vectorise, the same values either way

struct F16 {
  float v[16];
};
template <class F>
inline F16 lanes(F f) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}
inline F16 zero() { return {}; }
inline F16 set1(float x) {
  return lanes([=](int) { return x; });
}
inline F16 load(const float* p) {
  return lanes([=](int i) { return p[i]; });
}
inline void store(float* p, F16 a) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
inline F16 load_first(const float* p, int n, float fill) {
  return lanes([=](int i) { return i < n ? p[i] : fill; });
}
inline void store_first(float* p, F16 a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}
inline F16 operator+(const F16& a, const F16& b) {
  return lanes([&](int i) { return a.v[i] + b.v[i]; });
}
inline F16 operator-(const F16& a, const F16& b) {
  return lanes([&](int i) { return a.v[i] - b.v[i]; });
}
inline F16 operator*(const F16& a, const F16& b) {
  return lanes([&](int i) { return a.v[i] * b.v[i]; });
}
inline F16 operator/(const F16& a, const F16& b) {
  return lanes([&](int i) { return a.v[i] / b.v[i]; });
}
inline F16 mul_add(const F16& a, const F16& b, const F16& c) {
  return lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline F16 max(const F16& a, const F16& b) {
  return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F16 min(const F16& a, const F16& b) {
  return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline F16 if_less(const F16& a, const F16& b, const F16& x, const F16& y) {
  return lanes([&](int i) { return a.v[i] < b.v[i] ? x.v[i] : y.v[i]; });
}
inline unsigned equal_bits(const F16& a, const F16& b) {
  unsigned bits = 0;
  for (int i = 0; i < 16; ++i) bits |= (a.v[i] == b.v[i] ? 1u : 0u) << i;
  return bits;
}
inline unsigned less_bits(const F16& a, const F16& b) {
  unsigned bits = 0;
  for (int i = 0; i < 16; ++i) bits |= (a.v[i] < b.v[i] ? 1u : 0u) << i;
  return bits;
}
inline F16 round_even(const F16& a) {  // |a| < 2**22: adding 1.5 * 2**23 leaves the nearest whole number
  return lanes([&](int i) { return (a.v[i] + 12582912.0f) - 12582912.0f; });
}
inline float float_of(std::uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
inline std::uint32_t bits_of(float f) {
  std::uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}
inline F16 scale_pow2(const F16& a, const F16& n) {
  return lanes([&](int i) {
    return a.v[i] * float_of(static_cast<std::uint32_t>(static_cast<int>(n.v[i]) + 127) << 23);
  });
}
inline F16 load_bf16(const bf16* p) {
  return lanes([=](int i) { return float_of(static_cast<std::uint32_t>(p[i]) << 16); });
}
inline void store_bf16(bf16* p, const F16& a) {
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t u = bits_of(a.v[i]);
    p[i] = static_cast<bf16>((u + ((u >> 16) & 1u) + 0x7fffu) >> 16);
  }
}
inline float sum(const F16& a) {
  float t[16];
  for (int i = 0; i < 16; ++i) t[i] = a.v[i];
  for (int w = 8; w > 0; w /= 2)
    for (int i = 0; i < w; ++i) t[i] = t[i] + t[i + w];
  return t[0];
}
inline float max_lane(const F16& a) {
  float m = a.v[0];
  for (int i = 1; i < 16; ++i) m = a.v[i] > m ? a.v[i] : m;
  return m;
}

#endif

constexpr float kInf = __builtin_inff();

// A size known to the compiler, passed as a value.
template <int V>
struct Int {
  static constexpr int value = V;
};

// Memory to ask for while a product runs, as much as its panels hold: chunks phase, phase + every, ... of it,
// so that products of the same panels with other rows ask for the others. Null for none.
struct Fetch {
  const bf16* from = nullptr;
  int every = 1, phase = 0;
};

// Lane i holds i.
inline F16 iota() {
  alignas(64) static constexpr float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(lanes);
}

// The first n lanes (0 < n <= 16) rounded to bf16.
inline void store_bf16_first(bf16* p, F16 a, int n) {
  if (n == 16) return store_bf16(p, a);
  alignas(32) bf16 t[16];
  store_bf16(t, a);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}

// e**x to about one unit in the last place for x <= 88; exactly 0 below -87 (minus infinity included).
// Range reduction x = n ln 2 + r with ln 2 in two parts (Cody and Waite), then the Taylor polynomial of
// degree 6 on |r| <= ln 2 / 2, whose remainder is below 2**-24.
inline F16 exp(F16 x) {
  const F16 low = set1(-87.0f);
  const F16 y = min(max(x, low), set1(88.0f));
  const F16 n = round_even(y * set1(1.44269504f));
  F16 r = mul_add(n, set1(-0.693359375f), y);
  r = mul_add(n, set1(2.12194440e-4f), r);
  F16 p = set1(1.0f / 720.0f);
  p = mul_add(p, r, set1(1.0f / 120.0f));
  p = mul_add(p, r, set1(1.0f / 24.0f));
  p = mul_add(p, r, set1(1.0f / 6.0f));
  p = mul_add(p, r, set1(0.5f));
  p = mul_add(p, r, set1(1.0f));
  p = mul_add(p, r, set1(1.0f));
  return if_less(x, low, zero(), scale_pow2(p, n));
}

#if LOADPROOF_VEC != 512
// a * 2**n for whole n <= 0 where x is at least `least`, else 0.
inline F16 scale_down(F16 a, F16 n, F16 x, float least) {
  return if_less(x, set1(least), zero(), scale_pow2(a, max(n, set1(least))));
}
#endif

// 2**x for x <= 0, for softmax: within 3e-6 of the true value, relatively; exactly 0 below -125, minus
// infinity included. Taylor polynomial of degree 5 on the fraction.
inline F16 exp2_below(F16 x) {
  constexpr float least = -125.0f;  // results stay normal
#if LOADPROOF_VEC == 512
  const F16 y = x;
#else
  const F16 y = max(x, set1(least));
#endif
  const F16 n = round_even(y);
  const F16 r = y - n;
  F16 p = set1(1.33335581e-3f);
  p = mul_add(p, r, set1(9.61812911e-3f));
  p = mul_add(p, r, set1(5.55041087e-2f));
  p = mul_add(p, r, set1(2.40226507e-1f));
  p = mul_add(p, r, set1(6.93147181e-1f));
  p = mul_add(p, r, set1(1.0f));
  return scale_down(p, n, x, least);
}

// tanh(x) = 1 - 2 / (e**2x + 1); the clamp loses nothing, since tanh(10) rounds to 1.
inline F16 tanh(F16 x) {
  const F16 y = min(max(x, set1(-10.0f)), set1(10.0f));
  return set1(1.0f) - set1(2.0f) / (exp(y + y) + set1(1.0f));
}

// Calls f(i, n) for each sixteen-lane piece of a row of `width`: n is 16 but for the tail.
template <class F>
inline void for_lanes(int width, F f) {
  int i = 0;
  for (; i + 16 <= width; i += 16) f(i, 16);
  if (i < width) f(i, width - i);
}

// n lanes of memory with `fill` beyond, and back.
inline F16 load_n(const float* p, int n, float fill = 0.0f) {
  return n == 16 ? load(p) : load_first(p, n, fill);
}
inline void store_n(float* p, F16 a, int n) {
  if (n == 16) return store(p, a);
  store_first(p, a, n);
}

}  // namespace
}  // namespace loadproof::LOADPROOF_NS
