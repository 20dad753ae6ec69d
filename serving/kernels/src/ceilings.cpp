// What this machine can do at most: bytes read from memory, and fused multiply-adds. The bench relates speeds to them.
#include <omp.h>
#include <time.h>

#include <algorithm>

#include "kernels.h"
#include "vector.h"

namespace {

double now_s() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

constexpr int kRounds = 5;
constexpr int kStreams = 8;

}  // namespace

double pd_read_gb_s(const void* memory, int64_t num_bytes, int num_threads) {
  const auto* values = static_cast<const float*>(memory);
  const int64_t per_thread = num_bytes / 4 / num_threads / (kStreams * 16) * (kStreams * 16);
  double best = 0;
  volatile float seen = 0;
  for (int round = 0; round < kRounds; ++round) {
    const double start = now_s();
#pragma omp parallel num_threads(num_threads)
    {
      // Several streams at once, as the thin products read several panels.
      const float* from = values + per_thread * omp_get_thread_num();
      const int64_t stream = per_thread / kStreams;
      pd::Vec sums[kStreams];
      for (auto& sum : sums) sum = pd::zero();
      for (int64_t n = 0; n < stream; n += 16)
#pragma GCC unroll 8
        for (int s = 0; s < kStreams; ++s) {
          const float* at = from + s * stream + n;
          _mm_prefetch(reinterpret_cast<const char*>(at) + 2048, _MM_HINT_T0);
          sums[s] = _mm256_or_ps(sums[s], _mm256_or_ps(pd::load(at), pd::load(at + 8)));
        }
      for (auto& sum : sums) seen = seen + pd::sum_of_lanes(sum);
    }
    const double bytes = 4.0 * static_cast<double>(per_thread) * num_threads;
    best = std::max(best, bytes / (now_s() - start) * 1e-9);
  }
  return best;
}

double pd_peak_gflop_s(int num_threads) {
  constexpr int kChains = 12;
  constexpr int kSteps = 4'000'000;
  double best = 0;
  volatile float seen = 0;
  for (int round = 0; round < kRounds; ++round) {
    const double start = now_s();
#pragma omp parallel num_threads(num_threads)
    {
      pd::Vec sums[kChains];
      for (auto& sum : sums) sum = pd::splat(1.0f);
      const pd::Vec factor = pd::splat(0.999f), term = pd::splat(0.001f);
      for (int n = 0; n < kSteps; ++n)
#pragma GCC unroll 12
        for (int c = 0; c < kChains; ++c) sums[c] = pd::fma(sums[c], factor, term);
      for (auto& sum : sums) seen = seen + pd::sum_of_lanes(sum);
    }
    const double flop = 2.0 * pd::kLanes * kChains * kSteps * num_threads;
    best = std::max(best, flop / (now_s() - start) * 1e-9);
  }
  return best;
}
