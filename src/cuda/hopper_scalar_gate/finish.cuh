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
#include "cuda/hopper_scalar_gate/store_as.cuh"
#include "cuda/hopper_scalar_gate/weights.cuh"

namespace fenwick::cuda::hopper {

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
    int t = threadIdx.x / levels, group = threadIdx.x - t * levels;
    const int tokens = kWeightThreads / levels, groups = kWeightThreads - tokens * levels;
    while (t < place.valid) {
      const auto* row = reinterpret_cast<const std::uint32_t*>(shared + t * pitch) + 4 * group;
      __stcs(reinterpret_cast<uint4*>(reinterpret_cast<char*>(base) + t * row_bytes + group * 16),
             make_uint4(row[0], row[1], row[2], row[3]));
      t += tokens, group += groups;
      if (group >= levels) group -= levels, ++t;
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

__device__ __forceinline__ FlowStep Then(FlowStep first, FlowStep second) {
  return {first.keep * second.keep, second.keep * first.add + second.add};
}

// Across the tokens of all lanes up to and including this one's.
__device__ __forceinline__ FlowStep ThroughLanes(FlowStep mine, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const FlowStep before{__shfl_up_sync(~0u, mine.keep, step),
                          __shfl_up_sync(~0u, mine.add, step)};
    if (lane >= step) mine = Then(before, mine);
  }
  return mine;
}

// The steps of tokens 4 * lane .. + 3 of a chunk. `changes` and `decays`, a[t] of the chunk
// (params.h), are those of the tokens.
__device__ __forceinline__ void FlowSteps(FlowStep (&steps)[4], float4 changes, float4 a,
                                          int lane) {
  constexpr float kReset = -126.0f;  // a factor 2^-126 is flushed to zero
  float before = __shfl_up_sync(~0u, a.w, 1);
  if (lane == 0) before = 0;
  steps[0] = {a.x - before <= kReset ? 0.f : 1.f, -changes.x};
  steps[1] = {a.y - a.x <= kReset ? 0.f : 1.f, -changes.y};
  steps[2] = {a.z - a.y <= kReset ? 0.f : 1.f, -changes.z};
  steps[3] = {a.w - a.z <= kReset ? 0.f : 1.f, -changes.w};
}

__device__ __forceinline__ FlowStep ThroughLanes(const FlowStep (&steps)[4], int lane) {
  return ThroughLanes(Then(Then(steps[0], steps[1]), Then(steps[2], steps[3])), lane);
}

__device__ __forceinline__ float4 LocalDecays(const ForwardParams& p, std::size_t record,
                                              int lane) {
  return reinterpret_cast<const float4*>(p.local_decay + record * 2 * kChunk)[lane];
}

// dlevel_scales, and the change of the flow at every token and across the chunk. Warps take heads,
// a lane tokens 2 * lane, + 1 and 64 later. Grid x: chunks x ceil(heads / WeightHeads).
template <typename Scale>
__global__ void __launch_bounds__(kWeightThreads)
    ScaleGradsKernel(const __grid_constant__ BackwardParams b) {
  char* tile = reinterpret_cast<char*>(ptx::DynamicShared());
  ptx::AllowNextKernel();
  const ForwardParams& p = b.forward;
  constexpr int kHeads = WeightHeads<Scale>();
  constexpr int kWarpsPerHead = kWeightThreads / 32 / kHeads;
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
  ptx::WaitForPreviousKernel();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = warp / kWarpsPerHead, part = warp % kWarpsPerHead;
  const std::size_t record =
      static_cast<std::size_t>(first_head + head) * p.layout.num_chunks + chunk;
  if (head < heads && part == 0) {
    float4 change = make_float4(0, 0, 0, 0);
    const auto add = [&](const float* from) {
      const float4 x = __ldcs(reinterpret_cast<const float4*>(from));
      change.x += x.x, change.y += x.y, change.z += x.z, change.w += x.w;
    };
    for (int m = 0; m < b.state_tiles; ++m) {
      add(b.node_reads + (record * b.state_tiles + m) * kChunk + 4 * lane);
    }
    for (int v = 0; v < p.value_tiles; ++v) {
      const float* local = b.local_flow + (record * p.value_tiles + v) * 192;
      add(local + 4 * lane);
      if (lane >= 16) add(local + 64 + 4 * lane);
    }
    const int valid = place.valid - 4 * lane;
    if (valid < 1) change.x = 0;
    if (valid < 2) change.y = 0;
    if (valid < 3) change.z = 0;
    if (valid < 4) change.w = 0;
    reinterpret_cast<float4*>(b.flow_change + record * kChunk)[lane] = change;
    FlowStep steps[4];
    FlowSteps(steps, change, LocalDecays(p, record, lane), lane);
    const FlowStep through = ThroughLanes(steps, lane);
    if (lane == 31) b.chunk_flow[record] = through;
  }
  if (head < heads) {
    char* out[2][2];  // of the lane's tokens
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i / 2][i % 2] = tile + (64 * (i / 2) + 2 * lane + i % 2) * pitch +
                          head * p.levels * static_cast<int>(sizeof(Scale));
    }
    // A thread writes all rows of its tokens that share a level in turn (those from L - 1 on are
    // one).
    float2 sum[2] = {};
    int last_level = -1;
    const auto store = [&](int level, float2 x0, float2 x1) {
      if (level == last_level) {
        x0.x += sum[0].x, x0.y += sum[0].y, x1.x += sum[1].x, x1.y += sum[1].y;
      }
      sum[0] = x0, sum[1] = x1;
      last_level = level;
      StoreAs(reinterpret_cast<Scale*>(out[0][0]) + level, p.scale * x0.x);
      StoreAs(reinterpret_cast<Scale*>(out[0][1]) + level, p.scale * x0.y);
      StoreAs(reinterpret_cast<Scale*>(out[1][0]) + level, p.scale * x1.x);
      StoreAs(reinterpret_cast<Scale*>(out[1][1]) + level, p.scale * x1.y);
    };
    const int last = p.levels - 1;
    const auto* grads = reinterpret_cast<const std::uint32_t*>(
                            b.scale_grads + record * b.state_tiles * p.weight_rows * kChunk) +
                        lane;
    // Summed over every `step`th state tile.
    const auto load = [&](auto& x, int first_row, int rows, int step) {
      constexpr int kRows = sizeof(x) / sizeof(x[0]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) x[i][0] = x[i][1] = make_float2(0, 0);
      for (int m = 0; m < b.state_tiles; m += step) {
        const std::uint32_t* from = grads + (m * p.weight_rows + first_row) * (kChunk / 2);
        std::uint32_t y[kRows][2];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          y[i][0] = i < rows ? __ldcs(from + i * (kChunk / 2)) : 0;
          y[i][1] = i < rows ? __ldcs(from + i * (kChunk / 2) + 32) : 0;
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            x[i][half].x += BFloat16::Low(y[i][half]);
            x[i][half].y += BFloat16::High(y[i][half]);
          }
        }
      }
    };
    if (part == 0) {
      float2 x[kLocalLevels][2];
      load(x, 0, kLocalLevels, b.key_blocks);
#pragma unroll
      for (int row = 0; row < kLocalLevels; ++row) {
        // A level that the token does not have was not written.
        const int bit = row - 1;
        if (bit == 0) x[row][0].x = x[row][1].x = 0;
        if (bit > 0 && bit < 6 && ((lane >> (bit - 1)) & 1) == 0) {
          x[row][0] = x[row][1] = make_float2(0, 0);
        }
        if (bit == 6) x[row][0] = make_float2(0, 0);
        store(min(row, last), x[row][0], x[row][1]);
      }
    }
    // With several warps a head the last one takes the nodes, unless they share a level with local
    // rows.
    if (part == (last > kLogChunk ? kWarpsPerHead - 1 : 0)) {
      const int nodes = __popc(place.index);
      int rest = place.index;
      constexpr int kTogether = 4;
#pragma unroll 1
      for (int first = 0; first < nodes; first += kTogether) {
        float2 x[kTogether][2];
        load(x, kLocalLevels + first, nodes - first, 1);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (first + i >= nodes) break;
          store(min(kLogChunk + __ffs(rest), last), x[i][0], x[i][1]);
          rest &= rest - 1;
        }
      }
    }
  }
  __syncthreads();
  StoreScaleGrads<Scale>(b, place, first_head, heads, tile);
}

inline constexpr int kFlowHeads = 8;
inline constexpr int kFlowThreads = 32 * kFlowHeads;

// dg of one chunk for eight heads, a warp each, four tokens a lane. Grid x: chunks x ceil(heads /
// 8).
template <typename Unused = void>
__global__ void __launch_bounds__(kFlowThreads)
    FlowKernel(const __grid_constant__ BackwardParams b) {
  __shared__ float flows[kChunk][kFlowHeads + 1];
  ptx::AllowNextKernel();
  ptx::WaitForPreviousKernel();
  const ForwardParams& p = b.forward;
  const int blocks = DivideUp(p.num_heads, kFlowHeads);
  const int chunk = blockIdx.x / blocks;
  const int first_head = (blockIdx.x - chunk * blocks) * kFlowHeads;
  const int heads = min(kFlowHeads, p.num_heads - first_head);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = first_head + min(warp, heads - 1);
  const ChunkPlace place = PlaceOfChunk(p.layout, chunk);
  const std::size_t record = static_cast<std::size_t>(head) * p.layout.num_chunks + chunk;
  const float4 changes =
      __ldcs(reinterpret_cast<const float4*>(b.flow_change + record * kChunk) + lane);
  const float4 decays = LocalDecays(p, record, lane);

  // The chunk's segment: the flow at both ends, and the way through each of its chunks.
  const SegmentPlace sequence = PlaceOfSequence(p.layout, SequenceOfChunk(p.layout, chunk));
  const int log_segment = sequence.log_segment;
  const int segment = place.index >> log_segment, first = segment << log_segment;
  const int count = min(1 << log_segment, sequence.num_chunks - first);
  const int length = min(sequence.length - first * kChunk, kChunk << log_segment);
  const auto boundary_flow = [&](int boundary) {
    const std::size_t unit = (static_cast<std::size_t>(head) * p.layout.num_segments +
                              FirstSegment(p.layout, SequenceOfChunk(p.layout, chunk)) + boundary) *
                             b.state_tiles;
    float sum = 0;
    for (int i = lane; i < b.state_tiles * kFlowParts; i += 32) {
      sum += b.segment_flow[unit * kFlowParts + i];
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
  };
  const float begin = segment > 0 ? boundary_flow(segment) : 0.f;
  const float end = segment + 1 < sequence.num_segments ? boundary_flow(segment + 1) : 0.f;
  FlowStep through_chunks{1, 0};
  if (lane < count) through_chunks = b.chunk_flow[record - place.index + first + lane];
  through_chunks = ThroughLanes(through_chunks, lane);
  const auto through = [&](int chunks) {
    return FlowStep{__shfl_sync(~0u, through_chunks.keep, chunks - 1),
                    __shfl_sync(~0u, through_chunks.add, chunks - 1)};
  };
  const FlowStep all = through(count);
  const float slope = all.keep != 0 ? (end - begin - all.add) / static_cast<float>(length) : 0.f;
  const int before_chunk = place.index - first;
  FlowStep before{1, 0};
  if (before_chunk > 0) before = through(before_chunk);

  FlowStep steps[4];
  FlowSteps(steps, changes, decays, lane);
  const FlowStep through_lane = ThroughLanes(steps, lane);
  const FlowStep before_lane{__shfl_up_sync(~0u, through_lane.keep, 1),
                             __shfl_up_sync(~0u, through_lane.add, 1)};
  if (lane > 0) before = Then(before, before_lane);
  float flow = before.keep * begin + before.add;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int t = 4 * lane + i;
    flow *= steps[i].keep;
    flows[t][warp] = steps[i].keep * (flow + slope * (before_chunk * kChunk + t));
    flow += steps[i].add;
  }
  __syncthreads();
  float* dg = b.dg + place.batch * b.dg_batch_stride + place.token * b.dg_token_stride +
              p.head_begin + first_head;
  for (int i = threadIdx.x; i < place.valid * kFlowHeads; i += kFlowThreads) {
    const int t = i / kFlowHeads, h = i % kFlowHeads;
    if (h < heads) dg[t * b.dg_token_stride + h] = flows[t][h];
  }
}

// [B, T, H, V] of 16-bit elements with any strides to one with other strides; one thread an
// element.
struct CopyParams {
  const void* from = nullptr;
  void* to = nullptr;
  std::int64_t from_strides[4] = {}, to_strides[4] = {};
  std::int64_t elements = 0;
  int tokens = 0, heads = 0, width = 0;
};

inline constexpr int kCopyThreads = 256;

template <typename Unused = void>
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
  static_cast<unsigned short*>(p.to)[at(p.to_strides)] =
      static_cast<const unsigned short*>(p.from)[at(p.from_strides)];
}

}  // namespace fenwick::cuda::hopper
