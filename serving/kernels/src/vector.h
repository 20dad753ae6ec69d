// Eight float lanes, and the few operations on them whose order of rounding the kernels fix.
//
// Compiled with -ffp-contract=off: a multiply and an add become one operation only where `fma` says so. So an
// element's bits depend on the operations written here and on nothing that a compiler chooses.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pd {

constexpr int kLanes = 8;

using Vec = __m256;

inline Vec load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Vec value) { _mm256_storeu_ps(to, value); }
inline Vec broadcast(const float* from) { return _mm256_broadcast_ss(from); }
inline Vec splat(float value) { return _mm256_set1_ps(value); }
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

// Eight consecutive bfloat16 as float32.
inline Vec load_bfloat16(const uint16_t* from) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// To nearest, ties to even; a NaN stays one.
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_bfloat16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out;
  __builtin_memcpy(&out, &bits, sizeof out);
  return out;
}

// The sum of four vectors' lanes, each by the same tree: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
inline __m128 sums_of_lanes(Vec a, Vec b, Vec c, Vec d) {
  const Vec pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

inline float sum_of_lanes(Vec a) { return _mm_cvtss_f32(sums_of_lanes(a, a, a, a)); }

inline float max_of_lanes(Vec a) {
  alignas(32) float lanes[kLanes];
  store(lanes, a);
  float most = lanes[0];
  for (int n = 1; n < kLanes; ++n) most = lanes[n] > most ? lanes[n] : most;
  return most;
}

// e to the x, to about 1 unit in the last place; 0 below -87.3, at most e^88, NaN for NaN.
inline Vec exp(Vec x) {
  const Vec is_zero = _mm256_cmp_ps(x, splat(-87.3f), _CMP_LT_OQ);
  // The second operand passes where one is no number.
  x = _mm256_min_ps(splat(88.0f), _mm256_max_ps(splat(-87.3f), x));
  const Vec n = _mm256_round_ps(_mm256_mul_ps(x, splat(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Vec r = _mm256_fnmadd_ps(n, splat(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, splat(-2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = _mm256_add_ps(fma(p, _mm256_mul_ps(r, r), r), splat(1.0f));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(is_zero, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

}  // namespace pd
