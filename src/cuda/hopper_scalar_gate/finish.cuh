// Backward pass 7: gradients in the callers' layouts.
//
// dg[t] is the flow through token t: the sum of P[t', s] dP[t', s] over all s < t <= t'. Summing
//   flow(t + 1) = flow(t) - (read side of t) + (write side of t)
// over a whole sequence collects the rounding of every token (measured: up to 11 % in one head at
// T = 8K), so it runs inside one segment only, between the exact flows at its two ends
// (segment_walk.cuh); what it misses the second by is spread evenly. A token that resets the state
// has flow 0 and starts the sum anew.
#pragma once

#include "cuda/hopper_scalar_gate/backward_params.h"
#include "cuda/hopper_scalar_gate/weights.cuh"

namespace fenwick::cuda::hopper {

__device__ __forceinline__ void StoreAs(float* to, float x) { *to = x; }
__device__ __forceinline__ void StoreAs(__nv_bfloat16* to, float x) { *to = __float2bfloat16(x); }
__device__ __forceinline__ void StoreAs(__half* to, float x) { *to = __float2half(x); }

// Copies shared [128][ScalesPitch] to dlevel_scales of `heads` heads and `valid` tokens.
template <typename Scale>
__device__ __forceinline__ void StoreScaleGrads(const BackwardParams& b, const ChunkPlace& place,
                                                int first_head, int heads, const char* shared) {
  const int levels = b.forward.levels, pitch = ScalesPitch(levels);
  Scale* base = static_cast<Scale*>(b.dscales) + place.batch * b.dscales_batch_stride +
                place.token * b.dscales_token_stride +
                (b.forward.head_begin + first_head) * b.dscales_head_stride;
  const std::int64_t row_bytes = b.dscales_token_stride * static_cast<std::int64_t>(sizeof(Scale));
  const bool dense = b.dscales_head_stride == levels && heads == WeightHeads<Scale>() &&
                     row_bytes % 16 == 0 && reinterpret_cast<std::uintptr_t>(base) % 16 == 0;
  if (dense) {
    for (int i = threadIdx.x; i < place.valid * levels; i += kWeightThreads) {
      const int t = i / levels, group = i - t * levels;
      const auto* row = reinterpret_cast<const std::uint32_t*>(shared + t * pitch) + 4 * group;
      __stcs(reinterpret_cast<uint4*>(reinterpret_cast<char*>(base) + t * row_bytes + group * 16),
             make_uint4(row[0], row[1], row[2], row[3]));
    }
    return;
  }
  const int width = heads * levels;
  for (int i = threadIdx.x; i < place.valid * width; i += kWeightThreads) {
    const int t = i / width, column = i - t * width;
    const int head = column / levels, level = column - head * levels;
    base[t * b.dscales_token_stride + head * b.dscales_head_stride + level] =
        reinterpret_cast<const Scale*>(shared + t * pitch)[column];
  }
}

// dlevel_scales, and the change of the flow at every token. Grid x: chunks x ceil(heads /
// WeightHeads). A thread takes one token of every second head.
template <typename Scale>
__global__ void __launch_bounds__(kWeightThreads)
    ScaleGradsKernel(const __grid_constant__ BackwardParams b) {
  extern __shared__ __align__(16) char tile[];
  ptx::AllowNextKernel();
  ptx::WaitForPreviousKernel();
  const ForwardParams& p = b.forward;
  constexpr int kHeads = WeightHeads<Scale>();
  const int blocks_per_chunk = DivideUp(p.num_heads, kHeads);
  const int chunk = blockIdx.x / blocks_per_chunk;
  const int first_head = (blockIdx.x - chunk * blocks_per_chunk) * kHeads;
  const int heads = min(kHeads, p.num_heads - first_head);
  const ChunkPlace place = PlaceOfChunk(p.layout, chunk);
  const int pitch = ScalesPitch(p.levels);
  for (int i = threadIdx.x; i < kChunk * pitch / 4; i += kWeightThreads) {
    reinterpret_cast<std::uint32_t*>(tile)[i] = 0;
  }
  __syncthreads();
  const int t = threadIdx.x % kChunk;
  const int rows = kLocalLevels + __popc(place.index);
  for (int head = threadIdx.x / kChunk; head < heads; head += kWeightThreads / kChunk) {
    const std::size_t unit =
        (static_cast<std::size_t>(first_head + head) * p.layout.num_chunks + chunk) * p.value_tiles;
    Scale* out = reinterpret_cast<Scale*>(tile + t * pitch) + head * p.levels;
    float change = 0;
    for (int v = 0; v < p.value_tiles; ++v) {
      const float* local = b.local_flow + (unit + v) * 192;
      change += b.node_reads[(unit + v) * kChunk + t] + local[t];
      if (t >= 64) change += local[kChunk + t - 64];
    }
    float last = 0;  // of level L - 1, which may stand for several
    int rest = place.index;
    constexpr int kTogether = 12;  // loads in flight
#pragma unroll 1
    for (int first = 0; first < rows; first += kTogether) {
      float x[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) x[i] = 0;
#pragma unroll 1
      for (int v = 0; v < p.value_tiles; ++v) {
        const float* grads = b.scale_grads + ((unit + v) * p.weight_rows + first) * kChunk + t;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int row = first + i;
          const bool live = row == 0 || row >= kLocalLevels || ((t >> (row - 1)) & 1) != 0;
          if (row < rows && live) x[i] += __ldcs(grads + i * kChunk);
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int row = first + i;
        if (row >= rows) break;
        int level = row;
        if (row >= kLocalLevels) {
          level = kLogChunk + __ffs(rest);
          rest &= rest - 1;
        }
        if (level < p.levels - 1) {
          StoreAs(out + level, p.scale * x[i]);
        } else {
          last += x[i];
        }
      }
    }
    StoreAs(out + p.levels - 1, p.scale * last);
    b.flow_change[unit / p.value_tiles * kChunk + t] = t < place.valid ? change : 0.f;
  }
  __syncthreads();
  StoreScaleGrads<Scale>(b, place, first_head, heads, tile);
}

inline constexpr int kFlowHeads = 8;

// x -> keep * x + add: the flow across some tokens.
struct FlowStep {
  float keep, add;
};
__device__ __forceinline__ FlowStep Then(FlowStep first, FlowStep second) {
  return {first.keep * second.keep, second.keep * first.add + second.add};
}

// dg of one segment for eight heads, a warp each. Grid x: segments x ceil(heads / 8).
template <typename Unused = void>
__global__ void __launch_bounds__(32 * kFlowHeads)
    FlowKernel(const __grid_constant__ BackwardParams b) {
  __shared__ float gates[kChunk][kFlowHeads + 1];
  __shared__ float flows[kChunk][kFlowHeads + 1];
  ptx::AllowNextKernel();
  ptx::WaitForPreviousKernel();
  const ForwardParams& p = b.forward;
  const int blocks = DivideUp(p.num_heads, kFlowHeads);
  const int segment = blockIdx.x / blocks;
  const int first_head = (blockIdx.x - segment * blocks) * kFlowHeads;
  const int heads = min(kFlowHeads, p.num_heads - first_head);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SegmentPlace place = PlaceOfSegment(p.layout, segment);
  const int first = place.index << p.layout.log_segment;
  const int count = min(1 << p.layout.log_segment, place.num_chunks - first);
  const int length = min(place.length - first * kChunk, kChunk << p.layout.log_segment);
  const int head = first_head + min(warp, heads - 1);
  const float* change =
      b.flow_change +
      (static_cast<std::size_t>(head) * p.layout.num_chunks + place.first_chunk + first) * kChunk;

  const auto boundary_flow = [&](int offset) {
    const std::size_t unit =
        (static_cast<std::size_t>(head) * p.layout.num_segments + segment + offset) * p.value_tiles;
    float sum = 0;
    for (int i = lane; i < p.value_tiles * kFlowParts; i += 32)
      sum += b.segment_flow[unit * kFlowParts + i];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
  };
  const float begin = place.index > 0 ? boundary_flow(0) : 0.f;
  const float end = place.index + 1 < place.num_segments ? boundary_flow(1) : 0.f;

  float slope = 0;
#pragma unroll 1
  for (int writing = 0; writing < 2; ++writing) {
    FlowStep so_far{1, 0};
    // The next chunk's gates and changes are loaded while this one is summed.
    constexpr int kGatesPerThread = kChunk / 32;
    float next_gates[kGatesPerThread];
    float4 next_change;
    const auto load = [&](int c) {
      const int valid = min(kChunk, length - c * kChunk);
      const std::int64_t token = place.token + (first + c) * kChunk;
      const float* g = p.g + place.batch * p.g_batch_stride + token * p.g_token_stride +
                       p.head_begin + first_head;
#pragma unroll
      for (int k = 0; k < kGatesPerThread; ++k) {
        const int i = threadIdx.x + k * 32 * kFlowHeads, t = i / kFlowHeads, h = i % kFlowHeads;
        next_gates[k] = t < valid && h < heads ? g[t * p.g_token_stride + h] : 0.f;
      }
      next_change = reinterpret_cast<const float4*>(change + c * kChunk)[lane];
    };
    load(0);
#pragma unroll 1
    for (int c = 0; c < count; ++c) {
      const std::int64_t token = place.token + (first + c) * kChunk;
      const int valid = min(kChunk, length - c * kChunk);
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kGatesPerThread; ++k) {
        const int i = threadIdx.x + k * 32 * kFlowHeads;
        gates[i / kFlowHeads][i % kFlowHeads] = next_gates[k];
      }
      const float4 r = next_change;
      __syncthreads();
      if (c + 1 < count) load(c + 1);
      const float changes[4] = {r.x, r.y, r.z, r.w};
      constexpr float kReset = -126.0f / 1.4426950408889634f;  // its decay is flushed to zero
      FlowStep mine{1, 0}, steps[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool reset = gates[4 * lane + i][min(warp, heads - 1)] <= kReset;
        steps[i] = {reset ? 0.f : 1.f, -changes[i]};
        mine = Then(mine, steps[i]);
      }
      FlowStep through = mine;
#pragma unroll
      for (int step = 1; step < 32; step <<= 1) {
        const FlowStep before{__shfl_up_sync(~0u, through.keep, step),
                              __shfl_up_sync(~0u, through.add, step)};
        if (lane >= step) through = Then(before, through);
      }
      FlowStep before{__shfl_up_sync(~0u, through.keep, 1), __shfl_up_sync(~0u, through.add, 1)};
      if (lane == 0) before = {1, 0};
      before = Then(so_far, before);
      so_far =
          Then(so_far, {__shfl_sync(~0u, through.keep, 31), __shfl_sync(~0u, through.add, 31)});
      if (writing == 0) continue;
      float flow = before.keep * begin + before.add;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = 4 * lane + i;
        flow *= steps[i].keep;
        flows[t][warp] = steps[i].keep * (flow + slope * (c * kChunk + t));
        flow += steps[i].add;
      }
      __syncthreads();
      float* dg = b.dg + place.batch * b.dg_batch_stride + token * b.dg_token_stride +
                  p.head_begin + first_head;
      for (int i = threadIdx.x; i < valid * kFlowHeads; i += 32 * kFlowHeads) {
        const int t = i / kFlowHeads, h = i % kFlowHeads;
        if (h < heads) dg[t * b.dg_token_stride + h] = flows[t][h];
      }
    }
    if (so_far.keep != 0) slope = (end - begin - so_far.add) / static_cast<float>(length);
  }
}

// [B, T, H, V] with any strides to one with other strides; one thread an element.
struct CopyParams {
  const void* from = nullptr;
  void* to = nullptr;
  std::int64_t from_strides[4] = {}, to_strides[4] = {};
  std::int64_t elements = 0;
  int tokens = 0, heads = 0, width = 0;
};

inline constexpr int kCopyThreads = 256;

template <typename Element>
__global__ void __launch_bounds__(kCopyThreads) CopyKernel(const __grid_constant__ CopyParams p) {
  std::int64_t i = std::int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  if (i >= p.elements) return;
  const std::int64_t column = i % p.width;
  i /= p.width;
  const std::int64_t head = i % p.heads;
  i /= p.heads;
  const std::int64_t token = i % p.tokens, batch = i / p.tokens;
  const auto at = [&](const std::int64_t(&strides)[4]) {
    return batch * strides[0] + token * strides[1] + head * strides[2] + column * strides[3];
  };
  using Storage = typename Element::Storage;
  static_cast<Storage*>(p.to)[at(p.to_strides)] =
      static_cast<const Storage*>(p.from)[at(p.from_strides)];
}

// Sums partial results [parts][B, T, G, 128] into [B, T, G, K].
struct ReduceParams {
  const float* first = nullptr;   // `parts` of them
  const float* second = nullptr;  // null, or as many again
  int parts = 0;
  std::int64_t partial_stride = 0, rows = 0;  // rows = B * T * G
  int tokens = 0, groups = 0, key_size = 0;
  void* out = nullptr;
  std::int64_t batch_stride = 0, token_stride = 0, group_stride = 0;
};

inline constexpr int kReduceThreads = 256;

template <typename Element>
__global__ void __launch_bounds__(kReduceThreads)
    ReducePartialsKernel(const __grid_constant__ ReduceParams p) {
  ptx::AllowNextKernel();
  ptx::WaitForPreviousKernel();
  const std::int64_t i = std::int64_t{blockIdx.x} * kReduceThreads + threadIdx.x;
  const std::int64_t row = i / 32;
  const int column = static_cast<int>(i % 32) * 4;
  if (row >= p.rows || column >= p.key_size) return;
  float sum[4] = {};
  const auto add = [&](const float* partials) {
    for (int part = 0; part < p.parts; ++part) {
      const float4 x = __ldcs(reinterpret_cast<const float4*>(partials + part * p.partial_stride +
                                                              row * kBackwardKeySize + column));
      sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
    }
  };
  add(p.first);
  if (p.second != nullptr) add(p.second);
  const std::int64_t token = row / p.groups;
  auto* out = static_cast<typename Element::Storage*>(p.out) + token / p.tokens * p.batch_stride +
              token % p.tokens * p.token_stride + row % p.groups * p.group_stride + column;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (column + k < p.key_size) StoreAs(out + k, sum[k]);
  }
}

}  // namespace fenwick::cuda::hopper
