// Runs of heads that share q and k: which heads a block of the node and local kernels takes, and
// where its sums over them, shares of dq and dk, go.
#pragma once

#include "cuda/hopper_scalar_gate/backward_params.h"
#include "cuda/hopper_scalar_gate/layout.cuh"
#include "cuda/hopper_scalar_gate/store_as.cuh"
#include "cuda/ptx/sync.cuh"

namespace fenwick::cuda::hopper {

// The heads of a run that the pass holds, for one chunk.
struct HeadRun {
  ChunkPlace place;
  std::size_t chunk;
  int first_head, heads;  // within the pass; none: not positive
  bool begins, ends;      // the run's first and last head are among them
  int group;              // of q and k, within the pass
  int run, runs;          // within the group; of the chunk's sequence
};

// Grid x: chunks x runs x q/k groups of the pass.
__device__ __forceinline__ HeadRun PlaceOfRun(const BackwardParams& b, int block,
                                              const RunRange& runs) {
  const ForwardParams& p = b.forward;
  HeadRun r;
  r.chunk = p.layout.num_chunks - 1 - block % p.layout.num_chunks;
  const int rest = block / p.layout.num_chunks;
  r.run = runs.begin + rest % runs.count;
  r.group = rest / runs.count;
  r.place = PlaceOfChunk(p.layout, static_cast<int>(r.chunk));
  r.runs = runs.Runs(r.place.num_chunks);
  const int heads_per_run = runs.Heads(r.place.num_chunks);
  // Within the group.
  const int begin = r.run * heads_per_run, end = min(begin + heads_per_run, p.heads_per_group);
  const int pass_end = b.first_in_group + min(p.heads_per_group, p.num_heads);
  const int first = max(begin, b.first_in_group);
  r.first_head = r.group * p.heads_per_group + first - b.first_in_group;
  r.heads = min(end, pass_end) - first;
  r.begins = begin >= b.first_in_group;
  r.ends = end <= pass_end;
  return r;
}

// Token t of the chunk in a [B, T] axis.
__device__ __forceinline__ std::size_t TokenRow(const BackwardParams& b, const ChunkPlace& place,
                                                int t) {
  return static_cast<std::size_t>(place.batch) * b.tokens + place.token + t;
}

// Row t of partial sums [runs, B, T, P, K].
__device__ __forceinline__ float* PartialRow(const BackwardParams& b, const HeadRun& r,
                                             float* partials, int t) {
  return partials + r.run * b.partial_stride +
         (TokenRow(b, r.place, t) * b.num_groups + r.group) * b.forward.key_size;
}

// Rows t0 and t0 + 8 of an accumulator of 64 columns, to partial sums.
__device__ __forceinline__ void StorePartial(const BackwardParams& b, const HeadRun& r, float* out,
                                             const float (&d)[32], int t0, int column) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = t0 + 8 * half;
    if (t >= r.place.valid) continue;
    float* row = PartialRow(b, r, out, t) + column;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      *reinterpret_cast<float2*>(row + 8 * n) =
          make_float2(d[4 * n + 2 * half], d[4 * n + 2 * half + 1]);
    }
  }
}

// The same accumulator as an earlier pass left it.
__device__ __forceinline__ void LoadPartial(const BackwardParams& b, const HeadRun& r, float* from,
                                            float (&d)[32], int t0, int column) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = t0 + 8 * half;
    if (t >= r.place.valid) continue;
    const float* row = PartialRow(b, r, from, t) + column;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 x = *reinterpret_cast<const float2*>(row + 8 * n);
      d[4 * n + 2 * half] = x.x;
      d[4 * n + 2 * half + 1] = x.y;
    }
  }
}

// Columns column + step * n, + 1 of dq or dk of the chunk's token t, summed over the local kernel's
// runs: adds the other share and stores the gradient.
template <typename Element, int kPairs>
__device__ __forceinline__ void FinishRow(const BackwardParams& b, const ChunkPlace& place,
                                          const KeyGradient& to, int t, int group, int column,
                                          int step, float2 (&x)[kPairs]) {
  if (to.addends != nullptr) {
    const float* addend =
        to.addends + (TokenRow(b, place, t) * b.num_groups + group) * b.forward.key_size + column;
    const int runs = b.node_runs.Runs(place.num_chunks);
    for (int run = 0; run < runs; ++run, addend += b.partial_stride) {
      float2 y[kPairs];
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        y[n] = __ldcs(reinterpret_cast<const float2*>(addend + step * n));
      }
#pragma unroll
      for (int n = 0; n < kPairs; ++n) x[n].x += y[n].x, x[n].y += y[n].y;
    }
  }
  auto* out = static_cast<typename Element::Storage*>(to.out) + place.batch * to.batch_stride +
              (place.token + t) * to.token_stride + (b.group_begin + group) * to.group_stride;
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
  if (r.runs > 1) return StorePartial(b, r, to.partials, d, t0, column);
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
    FinishRow<Element>(b, r.place, to, t, r.group, column, 8, x);
  }
}

inline constexpr int kReduceThreads = 256;
inline constexpr int kReduceRows = kReduceThreads / (kKeyBlock / 4);

// dq and dk of sequences that have several runs of the local kernel. A thread takes four columns.
// Grid x: blocks of rows of a chunk x 2 x key blocks x q/k groups of the pass x chunks.
template <typename Element>
__global__ void __launch_bounds__(kReduceThreads)
    ReduceRunsKernel(const __grid_constant__ BackwardParams b) {
  ptx::AllowNextKernel();
  ptx::WaitForPreviousKernel();
  const ForwardParams& p = b.forward;
  constexpr int kThreadsPerRow = kKeyBlock / 4, kBlocks = kChunk / kReduceRows;
  const int block = blockIdx.x % kBlocks;
  int rest = blockIdx.x / kBlocks;
  const KeyGradient& to = rest % 2 == 0 ? b.dq : b.dk;
  rest /= 2;
  const int key_block = rest % b.key_blocks;
  rest /= b.key_blocks;
  const int group = rest % b.num_groups;
  const ChunkPlace place = PlaceOfChunk(p.layout, rest / b.num_groups);
  const int runs = b.local_runs.Runs(place.num_chunks);
  const int t = block * kReduceRows + threadIdx.x / kThreadsPerRow;
  if (runs == 1 || t >= place.valid) return;
  const int column = key_block * kKeyBlock + static_cast<int>(threadIdx.x % kThreadsPerRow) * 4;
  const float* from =
      to.partials + (TokenRow(b, place, t) * b.num_groups + group) * p.key_size + column;
  float2 x[2] = {};
  for (int run = 0; run < runs; ++run, from += b.partial_stride) {
    const float4 y = __ldcs(reinterpret_cast<const float4*>(from));
    x[0].x += y.x, x[0].y += y.y, x[1].x += y.z, x[1].y += y.w;
  }
  FinishRow<Element>(b, place, to, t, group, column, 2, x);
}

}  // namespace fenwick::cuda::hopper
