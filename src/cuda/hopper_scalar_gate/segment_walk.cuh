// Backward pass 3: a walk over the segments of a sequence from the last to the first, each thread
// carrying four elements of one state.
//
// R of the node at level l is summed while bit l of the segment's index is set (its readers), and
// is complete, and handed to the segments it holds, while the bit is clear:
//   D(segment end) = sum over clear l of 2^(decay to the node's end) R_l.
// The flow through the first token of a segment, that is the sum of P[t, s] dP[t, s] over all pairs
// s < first <= t, follows exactly from what is at hand: with S_l the live nodes (set l) and Z_l the
// live nodes below l merged at the segment's start,
//   flow = sum over set l of <S_l, R_l>
//        + sum over clear l of 2^(decay start to node end) <Z_l, R_l>.
#pragma once

#include "cuda/hopper_scalar_gate/backward_params.h"
#include "cuda/hopper_scalar_gate/layout.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/tile/element.cuh"

namespace fenwick::cuda::hopper {

inline constexpr int kWalkThreads = 128;
// A walk waits for one segment's loads after the other's: the fewer levels a thread keeps, the more
// walks an SM holds. Enough for T = 32K.
inline constexpr int kShortWalkLevels = 4;

__device__ __forceinline__ float Dot(float4 a, float4 b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

// kLevels: levels that the tree over segments may have. Grid x: (128 * 64 / 4 / threads) x state
// tiles x heads x sequences.
template <typename Element, int kLevels>
__global__ void __launch_bounds__(kWalkThreads)
    SegmentWalkKernel(const __grid_constant__ BackwardParams b) {
  ptx::AllowNextKernel();
  ptx::WaitForPreviousKernel();
  const ForwardParams& p = b.forward;
  constexpr int kBlocks = kStateElements / 4 / kWalkThreads;
  const int block = blockIdx.x % kBlocks;
  int rest = blockIdx.x / kBlocks;
  const int state_tile = rest % b.state_tiles;
  rest /= b.state_tiles;
  const int head = rest % p.num_heads, n = rest / p.num_heads;
  const SegmentPlace place = PlaceOfSequence(p.layout, n);
  if (place.num_segments < 2) return;
  const int element = (block * kWalkThreads + threadIdx.x) * 4;
  const std::size_t first_segment =
      static_cast<std::size_t>(head) * p.layout.num_segments + FirstSegment(p.layout, n);
  const std::size_t first_chunk =
      static_cast<std::size_t>(head) * p.layout.num_chunks + place.first_chunk;
  const auto* states = static_cast<const uint2*>(p.node_states);

  float4 reads[kLevels], state[kLevels];
  float decay[kLevels];   // of the live node
  float to_end[kLevels];  // from the segment's end to the end of the node that holds it
#pragma unroll
  for (int l = 0; l < kLevels; ++l) {
    reads[l] = state[l] = make_float4(0, 0, 0, 0);
    decay[l] = to_end[l] = 0;
  }
#pragma unroll 1
  for (int s = place.num_segments - 1; s >= 0; --s) {
    const std::size_t unit = (first_segment + s) * b.state_tiles + state_tile;
    // The last segment's decay is not known and never crossed.
    const float total = s + 1 < place.num_segments ? p.segment_decay[first_segment + s] : 0.f;
    const float* from = b.segment_reads + unit * p.layout.segment_levels * kStateElements + element;
    float4 x[kLevels];
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      if ((s >> l) & 1) {
        x[l] = __ldcs(reinterpret_cast<const float4*>(from));
        from += kStateElements;
        const bool begins = ((s + 1) & ((1 << l) - 1)) == 0;
        if (begins) reads[l] = make_float4(0, 0, 0, 0);
        if (begins || s == place.num_segments - 1) {
          const std::size_t slot =
              first_chunk + (static_cast<std::size_t>(s >> l << l) << place.log_segment);
          const uint2 x4 =
              states[((slot * b.state_tiles + state_tile) * kStateElements + element) / 4];
          state[l] = make_float4(Element::Low(x4.x), Element::High(x4.x), Element::Low(x4.y),
                                 Element::High(x4.y));
          decay[l] = p.node_decay[slot];
        }
      }
    }
    float4 grad = make_float4(0, 0, 0, 0), merged = make_float4(0, 0, 0, 0);
    float flow = 0, gap = 0;
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      if ((s >> l) & 1) {
        reads[l].x += x[l].x;
        reads[l].y += x[l].y;
        reads[l].z += x[l].z;
        reads[l].w += x[l].w;
        flow += Dot(state[l], reads[l]);
        const float factor = ptx::Exp2(gap);
        merged.x += factor * state[l].x;
        merged.y += factor * state[l].y;
        merged.z += factor * state[l].z;
        merged.w += factor * state[l].w;
        gap += decay[l];
        to_end[l] = 0;
      } else if ((1 << l) < place.num_segments) {
        const float factor = ptx::Exp2(to_end[l]);
        grad.x += factor * reads[l].x;
        grad.y += factor * reads[l].y;
        grad.z += factor * reads[l].z;
        grad.w += factor * reads[l].w;
        to_end[l] += total;
        flow += ptx::Exp2(to_end[l]) * Dot(merged, reads[l]);
      }
    }
    *reinterpret_cast<float4*>(b.segment_grads + unit * kStateElements + element) = grad;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) flow += __shfl_xor_sync(~0u, flow, step);
    if (threadIdx.x % 32 == 0) {
      b.segment_flow[unit * kFlowParts + (block * kWalkThreads + threadIdx.x) / 32] = flow;
    }
  }
}

}  // namespace fenwick::cuda::hopper
