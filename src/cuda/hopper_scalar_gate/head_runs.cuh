// Runs of heads that share q and k: which heads a block of the node and local kernels takes, and
// where its sums over them, shares of dq and dk, go.
#pragma once

#include "cuda/hopper_scalar_gate/backward_params.h"
#include "cuda/hopper_scalar_gate/layout.cuh"
#include "cuda/hopper_scalar_gate/store_as.cuh"
#include "cuda/ptx/sync.cuh"

namespace fenwick::cuda::hopper {

// A run of heads of one q/k group, for one chunk.
struct HeadRun {
  ChunkPlace place;
  std::size_t chunk;
  int first_head, heads;  // within the pass
  int group;              // of q and k, within the pass
  int run;                // within the group
};

// Grid x: chunks x runs x q/k groups of the pass.
__device__ __forceinline__ HeadRun PlaceOfRun(const BackwardParams& b, int block, int runs,
                                              int heads_per_run) {
  const ForwardParams& p = b.forward;
  HeadRun r;
  r.chunk = p.layout.num_chunks - 1 - block % p.layout.num_chunks;
  const int rest = block / p.layout.num_chunks;
  const int heads_in_group = min(p.heads_per_group, p.num_heads);
  r.run = rest % runs;
  r.group = rest / runs;
  r.first_head = r.group * heads_in_group + r.run * heads_per_run;
  r.heads = min(heads_per_run, heads_in_group - r.run * heads_per_run);
  r.place = PlaceOfChunk(p.layout, static_cast<int>(r.chunk));
  return r;
}

// Token t of the chunk in a [B, T] axis.
__device__ __forceinline__ std::size_t TokenRow(const BackwardParams& b, const HeadRun& r, int t) {
  return static_cast<std::size_t>(r.place.batch) * b.tokens + r.place.token + t;
}

// Stores rows t0 and t0 + 8 of an accumulator of 64 columns into partial sums [runs, B, T, P, 128].
__device__ __forceinline__ void StorePartial(const BackwardParams& b, const HeadRun& r, float* out,
                                             const float (&d)[32], int t0, int column) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = t0 + 8 * half;
    if (t >= r.place.valid) continue;
    float* row = out + r.run * b.partial_stride +
                 (TokenRow(b, r, t) * b.num_groups + r.group) * kBackwardKeySize + column;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      *reinterpret_cast<float2*>(row + 8 * n) =
          make_float2(d[4 * n + 2 * half], d[4 * n + 2 * half + 1]);
    }
  }
}

// Columns column + step * n, + 1 of one row of dq or dk, summed over the pass's local runs: adds
// the pass's other share and the earlier passes, and stores the gradient, or the sum so far.
template <typename Element, int kPairs>
__device__ __forceinline__ void FinishRow(const BackwardParams& b, const KeyGradient& to,
                                          std::size_t token, int group, int column, int step,
                                          float2 (&x)[kPairs]) {
  const auto add = [&](const float* from) {
    float2 y[kPairs];
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      y[n] = __ldcs(reinterpret_cast<const float2*>(from + step * n));
    }
#pragma unroll
    for (int n = 0; n < kPairs; ++n) x[n].x += y[n].x, x[n].y += y[n].y;
  };
  const float* addend = to.addends + (token * b.num_groups + group) * kBackwardKeySize + column;
  for (int i = 0; i < to.num_addends; ++i) add(addend + i * b.partial_stride);
  float* total = to.total + token * kBackwardKeySize + column;
  if (!b.begins_groups) add(total);
  if (!b.ends_groups) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) *reinterpret_cast<float2*>(total + step * n) = x[n];
    return;
  }
  auto* out = static_cast<typename Element::Storage*>(to.out) + token / b.tokens * to.batch_stride +
              token % b.tokens * to.token_stride + (b.group_begin + group) * to.group_stride;
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const int k = column + step * n;
    if (k + 1 < b.key_size && reinterpret_cast<std::uintptr_t>(out + k) % 4 == 0) {
      *reinterpret_cast<std::uint32_t*>(out + k) = Element::Pack(x[n].x, x[n].y);
    } else {
      if (k < b.key_size) StoreAs(out + k, x[n].x);
      if (k + 1 < b.key_size) StoreAs(out + k + 1, x[n].y);
    }
  }
}

// Rows t0 and t0 + 8 of an accumulator of 64 columns: the local kernel's share of dq or dk.
template <typename Element>
__device__ __forceinline__ void StoreKeyGradient(const BackwardParams& b, const HeadRun& r,
                                                 const KeyGradient& to, const float (&d)[32],
                                                 int t0, int column) {
  if (b.local_runs > 1) return StorePartial(b, r, to.partials, d, t0, column);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int t = t0 + 8 * half;
    if (t >= r.place.valid) return;
    float2 x[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      x[n] =
          half == 0 ? make_float2(d[4 * n], d[4 * n + 1]) : make_float2(d[4 * n + 2], d[4 * n + 3]);
    }
    FinishRow<Element>(b, to, TokenRow(b, r, t), r.group, column, 8, x);
  }
}

inline constexpr int kReduceThreads = 256;

// dq and dk where the local kernel has several runs of heads. A thread takes four columns. Grid x:
// 2 x rows [B, T, P] x 128 / 4 / threads.
template <typename Element>
__global__ void __launch_bounds__(kReduceThreads)
    ReduceRunsKernel(const __grid_constant__ BackwardParams b) {
  ptx::AllowNextKernel();
  ptx::WaitForPreviousKernel();
  constexpr int kThreadsPerRow = kBackwardKeySize / 4;
  std::size_t row = (std::size_t{blockIdx.x} * kReduceThreads + threadIdx.x) / kThreadsPerRow;
  const std::size_t rows = static_cast<std::size_t>(b.partial_stride) / kBackwardKeySize;
  const KeyGradient& to = row < rows ? b.dq : b.dk;
  if (row >= rows) row -= rows;
  if (row >= rows) return;
  const int column = static_cast<int>(threadIdx.x % kThreadsPerRow) * 4;
  float2 x[2] = {};
  for (int run = 0; run < b.local_runs; ++run) {
    const float4 y = __ldcs(reinterpret_cast<const float4*>(to.partials + run * b.partial_stride +
                                                            row * kBackwardKeySize + column));
    x[0].x += y.x, x[0].y += y.y, x[1].x += y.z, x[1].y += y.w;
  }
  FinishRow<Element>(b, to, row / b.num_groups, static_cast<int>(row % b.num_groups), column, 2, x);
}

}  // namespace fenwick::cuda::hopper
