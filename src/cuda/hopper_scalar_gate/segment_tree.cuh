// Pass 1b: the tree of chunk_states.cuh continued over segments: a binary counter again, each
// thread carrying four elements of one head's state through all segments of a sequence. The left
// node that ends before segment s is written to the slot of that segment's first chunk.
#pragma once

#include "cuda/hopper_scalar_gate/layout.cuh"
#include "cuda/hopper_scalar_gate/params.h"
#include "cuda/ptx/sync.cuh"
#include "cuda/tile/element.cuh"

namespace fenwick::cuda::hopper {

inline constexpr int kTreeThreads = 128;
inline constexpr int kTreePrefetch = 4;  // segments loaded ahead

// kLevels: levels that the tree over segments may have. Grid x: (elements of a head's state / 4 /
// threads) x heads x sequences.
template <typename Element, int kLevels>
__global__ void __launch_bounds__(kTreeThreads)
    SegmentTreeKernel(const __grid_constant__ ForwardParams p) {
  ptx::WaitForPreviousKernel();
  ptx::AllowNextKernel();
  const std::size_t state_elements =
      static_cast<std::size_t>(p.value_tiles) * p.key_size * kValueTile;
  const int blocks = static_cast<int>(state_elements / (4 * kTreeThreads));
  const int block = blockIdx.x % blocks, rest = blockIdx.x / blocks;
  const int head = rest % p.num_heads, n = rest / p.num_heads;
  const SegmentPlace place = PlaceOfSequence(p.layout, n);
  const int element = (block * kTreeThreads + threadIdx.x) * 4;
  const std::size_t segment =
      static_cast<std::size_t>(head) * p.layout.num_segments + FirstSegment(p.layout, n);
  const std::size_t chunk =
      static_cast<std::size_t>(head) * p.layout.num_chunks + place.first_chunk;
  const float* in = p.segment_states + segment * state_elements + element;
  const float* in_decay = p.segment_decay + segment;
  auto* out = static_cast<typename Element::Storage*>(p.node_states) + element;

  float4 pending[kLevels];
  float pending_decay[kLevels];
  const int count = place.num_segments - 1;
  for (int s0 = 0; s0 < count; s0 += kTreePrefetch) {
    float4 next[kTreePrefetch];
    float next_decay[kTreePrefetch];
#pragma unroll
    for (int i = 0; i < kTreePrefetch; ++i) {
      if (s0 + i < count) {
        next[i] = __ldcs(reinterpret_cast<const float4*>(in + (s0 + i) * state_elements));
        next_decay[i] = in_decay[s0 + i];
      }
    }
#pragma unroll
    for (int i = 0; i < kTreePrefetch; ++i) {
      const int s = s0 + i;
      if (s >= count) break;
      float4 node = next[i];
      float decay = next_decay[i];
      const int merges = __ffs(s + 1) - 1;
#pragma unroll
      for (int level = 0; level < kLevels; ++level) {
        if (level < merges) {
          const float factor = ptx::Exp2(decay);
          node.x += factor * pending[level].x;
          node.y += factor * pending[level].y;
          node.z += factor * pending[level].z;
          node.w += factor * pending[level].w;
          decay += pending_decay[level];
        }
      }
#pragma unroll
      for (int level = 0; level < kLevels; ++level) {
        if (level == merges) {
          pending[level] = node;
          pending_decay[level] = decay;
        }
      }
      const std::size_t slot = chunk + (static_cast<std::size_t>(s + 1) << place.log_segment);
      *reinterpret_cast<uint2*>(out + slot * state_elements) =
          make_uint2(Element::Pack(node.x, node.y), Element::Pack(node.z, node.w));
      if (element == 0) p.node_decay[slot] = decay;
    }
  }
}

}  // namespace fenwick::cuda::hopper
