// Pass 0: for every chunk and head the running log2 decay a[t] = log2(e) * (g[first] + .. + g[t]),
// summed inside the chunk only, and the decay factors that later passes multiply with.
#pragma once

#include "cuda/hopper_scalar_gate/layout.cuh"
#include "cuda/hopper_scalar_gate/params.h"
#include "cuda/ptx/sync.cuh"
#include "cuda/tile/element.cuh"

namespace fenwick::cuda::hopper {

// A warp sums one head; eight neighbouring heads make whole 32-byte sectors of g.
inline constexpr int kDecayHeads = 8;
inline constexpr int kDecayThreads = 32 * kDecayHeads;

// Grid x: chunks x ceil(heads / kDecayHeads).
template <typename Element>
__global__ void __launch_bounds__(kDecayThreads)
    DecaysKernel(const __grid_constant__ ForwardParams p) {
  ptx::WaitForPreviousKernel();
  ptx::AllowNextKernel();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.items_taken = 0;
  __shared__ float gates[kChunk][kDecayHeads + 1];
  const int blocks_per_chunk = DivideUp(p.num_heads, kDecayHeads);
  const int chunk = blockIdx.x / blocks_per_chunk;
  const int first_head = (blockIdx.x - chunk * blocks_per_chunk) * kDecayHeads;
  const int heads = min(kDecayHeads, p.num_heads - first_head);
  const ChunkPlace place = PlaceOfChunk(p.layout, chunk);

  constexpr float kLog2E = 1.4426950408889634f;
  const float* g = p.g + place.batch * p.g_batch_stride + place.token * p.g_token_stride +
                   p.head_begin + first_head;
#pragma unroll
  for (int i = threadIdx.x; i < kChunk * kDecayHeads; i += kDecayThreads) {
    const int t = i / kDecayHeads, head = i % kDecayHeads;
    float x = 0;
    if (t < place.valid && head < heads) {
      x = fmaxf(g[t * p.g_token_stride + head] * kLog2E, kMinLog2Decay);
    }
    gates[t][head] = x;
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= heads) return;

  float a[4];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = sum += gates[lane * 4 + i][warp];
  float before = sum;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const float y = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += y;
  }
  const float total = __shfl_sync(~0u, before, 31);
  before -= sum;
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] += before;
  const float block_end = __shfl_sync(~0u, a[3], lane | 3);

  using ptx::Exp2;
  const std::size_t record =
      static_cast<std::size_t>(first_head + warp) * p.layout.num_chunks + chunk;
  float* local = p.local_decay + record * 2 * kChunk;
  reinterpret_cast<float4*>(local)[lane] = make_float4(a[0], a[1], a[2], a[3]);
  reinterpret_cast<float4*>(local + kChunk)[lane] =
      make_float4(Exp2(block_end - a[0]), Exp2(block_end - a[1]), Exp2(block_end - a[2]),
                  Exp2(block_end - a[3]));
  char* to_end = static_cast<char*>(p.decay_to_end) + record * kDecayToEndBytes;
  // Tokens past the end carry nothing into the state.
  float factor[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) factor[i] = lane * 4 + i < place.valid ? Exp2(total - a[i]) : 0.f;
  reinterpret_cast<uint2*>(to_end)[lane] =
      make_uint2(Element::Pack(factor[0], factor[1]), Element::Pack(factor[2], factor[3]));
  if (lane == 0) reinterpret_cast<float*>(to_end)[kChunk / 2] = total;
}

}  // namespace fenwick::cuda::hopper
