// Pass 1c: the weights with which a chunk's queries read, for every chunk and head, rows of 128
// bfloat16:
//   local level l:   scale * lambda[t, l]
//   node i:          scale * lambda[t, level of node i] * 2^(gap_i + a[t])
// gap_i is the log2 decay of the nodes between node i and the chunk, a[t] that of the chunk through
// t (pass 0). Bit b of the chunk's index is read through level kLogChunk + 1 + b. All levels are
// capped at L - 1, which is LevelPolicy::kSaturate and never bites otherwise. Tokens past the end
// of the sequence and levels that a token does not have get weight 0. Later passes see neither the
// layout nor the type of level_scales.
#pragma once

#include "cuda/hopper_scalar_gate/layout.cuh"
#include "cuda/hopper_scalar_gate/params.h"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/tile/element.cuh"

namespace fenwick::cuda::hopper {

inline constexpr int kWeightThreads = 256;

// Heads of one block: 16 bytes of level scales for each level and token, so that a block's part of
// a token's row is a whole number of 16-byte groups for every L.
template <typename Scale>
__host__ __device__ constexpr int WeightHeads() {
  return 16 / static_cast<int>(sizeof(Scale));
}

// Bytes of a token's row in shared memory: odd in words, so that tokens land in different banks.
__host__ __device__ constexpr int ScalesPitch(int levels) { return 16 * levels + 4; }

// Copies level_scales of `heads` heads and `valid` tokens to shared [128][ScalesPitch].
template <typename Scale>
__device__ __forceinline__ void LoadScales(const ForwardParams& p, const ChunkPlace& place,
                                           int first_head, int heads, char* shared) {
  const int pitch = ScalesPitch(p.levels);
  const Scale* base = static_cast<const Scale*>(p.level_scales) +
                      place.batch * p.scales_batch_stride + place.token * p.scales_token_stride +
                      (p.head_begin + first_head) * p.scales_head_stride;
  const std::int64_t row_bytes = p.scales_token_stride * static_cast<std::int64_t>(sizeof(Scale));
  const bool dense = p.scales_head_stride == p.levels && heads == WeightHeads<Scale>() &&
                     row_bytes % 16 == 0 && reinterpret_cast<std::uintptr_t>(base) % 16 == 0;
  if (dense) {
    constexpr int kInFlight = 10;
    const int count = place.valid * p.levels;
#pragma unroll 1
    for (int first = threadIdx.x; first < count; first += kInFlight * kWeightThreads) {
      uint4 x[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int i = first + j * kWeightThreads, t = i / p.levels, group = i - t * p.levels;
        if (i < count) {
          x[j] = __ldcs(reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(base) +
                                                       t * row_bytes + group * 16));
        }
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int i = first + j * kWeightThreads, t = i / p.levels, group = i - t * p.levels;
        if (i < count) {
          auto* row = reinterpret_cast<std::uint32_t*>(shared + t * pitch) + 4 * group;
          row[0] = x[j].x, row[1] = x[j].y, row[2] = x[j].z, row[3] = x[j].w;
        }
      }
    }
    return;
  }
  const int width = heads * p.levels;
#pragma unroll 4
  for (int i = threadIdx.x; i < place.valid * width; i += kWeightThreads) {
    const int t = i / width, column = i - t * width;
    const int head = column / p.levels, level = column - head * p.levels;
    reinterpret_cast<Scale*>(shared + t * pitch)[column] =
        base[t * p.scales_token_stride + head * p.scales_head_stride + level];
  }
}

// Grid x: chunks x ceil(heads / WeightHeads).
template <typename Scale>
__global__ void __launch_bounds__(kWeightThreads)
    WeightsKernel(const __grid_constant__ ForwardParams p) {
  char* scales = reinterpret_cast<char*>(ptx::DynamicShared());
  __shared__ float gaps[8][kMaxNodes];
  __shared__ float decays[8][kChunk];  // a[t]
  __shared__ int row_levels[kLocalLevels + kMaxNodes];
  constexpr int kHeads = WeightHeads<Scale>();
  ptx::WaitForPreviousKernel();
  ptx::AllowNextKernel();

  const int blocks_per_chunk = DivideUp(p.num_heads, kHeads);
  const int chunk = blockIdx.x / blocks_per_chunk;
  const int first_head = (blockIdx.x - chunk * blocks_per_chunk) * kHeads;
  const int heads = min(kHeads, p.num_heads - first_head);
  const ChunkPlace place = PlaceOfChunk(p.layout, chunk);
  const std::size_t head_stride = p.layout.num_chunks;
  const std::size_t record = first_head * head_stride + chunk;  // of the first head

  for (int i = threadIdx.x; i < heads * kChunk; i += kWeightThreads) {
    const int head = i / kChunk, t = i % kChunk;
    decays[head][t] = p.local_decay[(record + head * head_stride) * 2 * kChunk + t];
  }
  LoadScales<Scale>(p, place, first_head, heads, scales);
  if (static_cast<int>(threadIdx.x) < heads) {
    const float* decay =
        p.node_decay + (first_head + threadIdx.x) * head_stride + place.first_chunk;
    float node[kMaxNodes], gap = 0;
    int end = place.index;
#pragma unroll
    for (int i = 0; i < kMaxNodes; ++i) {
      node[i] = end != 0 ? decay[end] : 0.f;
      end &= end - 1;
    }
#pragma unroll
    for (int i = 0; i < kMaxNodes; ++i) {
      gaps[threadIdx.x][i] = gap;
      gap += node[i];
    }
  }
  if (threadIdx.x == 32) {
    int rest = place.index;
    for (int row = 0; row < kLocalLevels + kMaxNodes; ++row) {
      row_levels[row] = min(row < kLocalLevels ? row : kLogChunk + __ffs(rest), p.levels - 1);
      if (row >= kLocalLevels) rest &= rest - 1;
    }
  }
  __syncthreads();

  // A warp writes one row of one head, two tokens a lane at a time.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = kLocalLevels + __popc(place.index);
  const int pitch = ScalesPitch(p.levels);
#pragma unroll 2
  for (int task = warp; task < heads * rows; task += kWeightThreads / 32) {
    const int head = task / rows, row = task - head * rows;
    const int column = head * p.levels + row_levels[row];
    const bool node = row >= kLocalLevels;
    const float gap = node ? gaps[head][row - kLocalLevels] : 0.f;
    auto* out = reinterpret_cast<std::uint32_t*>(
        p.weights + ((record + head * head_stride) * p.weight_rows + row) * kChunk);
#pragma unroll
    for (int pair = lane; pair < kChunk / 2; pair += 32) {
      float w[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = 2 * pair + i;
        const float x = ToFloat(reinterpret_cast<const Scale*>(scales + t * pitch)[column]);
        // A level that the token does not have may hold anything.
        const bool live = node || row == 0 || ((t >> (row - 1)) & 1) != 0;
        w[i] = live && t < place.valid ? p.scale * x : 0.f;
      }
      if (node) {
        const float2 a = reinterpret_cast<const float2*>(decays[head])[pair];
        w[0] *= ptx::Exp2(a.x + gap);
        w[1] *= ptx::Exp2(a.y + gap);
      }
      out[pair] = ptx::PackBF16(w[0], w[1]);
    }
  }
}

}  // namespace fenwick::cuda::hopper
