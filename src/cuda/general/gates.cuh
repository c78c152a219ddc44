// Log decays.
//
// Inside a chunk: a[r] = g[0] + ... + g[r] in double, so that the decay from row s to row t,
// exp(a[t] - a[s]), is right to float32 however large the sums are; they run over 64 terms only.
// g is clamped to -1000 (exp(-1000) is 0 in double too), so that resets of -inf never meet.
// Across chunks: totals a[63] of chunks, and sums of them over aligned groups, are only ever added.
#pragma once

#include <cmath>

#include "cuda/general/geometry.cuh"

namespace fenwick::cuda::general {

inline constexpr double kLogZero = -1000.0;

// Fills sums[64] in shared memory. Rows that do not exist have g = 0. Ends synchronised; needs
// blocks of at least 64 threads, all of which call it.
__device__ inline void LoadGates(double* sums, const TokenRows& g, const ChunkAt& chunk, int head) {
  const int r = threadIdx.x;
  if (r < kChunk) {
    const double value = g.call.dtype == DType::kFloat64
                             ? LoadToken<double>(g, chunk.span, chunk.first_row() + r, head)
                             : LoadToken<float>(g, chunk.span, chunk.first_row() + r, head);
    sums[r] = value > kLogZero ? value : kLogZero;
  }
  __syncthreads();
  if (r < 32) {
    const double first = sums[2 * r], second = sums[2 * r + 1];
    double sum = first + second;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double below = __shfl_up_sync(0xffffffffu, sum, step);
      if (r >= step) sum += below;
    }
    sums[2 * r] = sum - second;
    sums[2 * r + 1] = sum;
  }
  __syncthreads();
}

template <typename T>
__device__ inline T Exp(double log) {
  if constexpr (sizeof(T) == 8) {
    return exp(log);
  } else {
    return expf(static_cast<float>(log));
  }
}

// exp(g[s+1] + ... + g[t]) for rows s <= t of the chunk.
template <typename T>
__device__ inline T Decay(const double* sums, int t, int s) {
  return Exp<T>(sums[t] - sums[s]);
}

}  // namespace fenwick::cuda::general
