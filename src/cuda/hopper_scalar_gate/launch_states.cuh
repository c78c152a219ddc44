// Launches of passes 0, 1 and 1b. Each kernel lets the next one start only after it has itself
// waited for the one before: when a kernel starts, all but its immediate predecessor have ended,
// and what does not depend on that one may be read, and written, before waiting.
#pragma once

#include <algorithm>

#include "cuda/hopper_scalar_gate/chunk_states.cuh"
#include "cuda/hopper_scalar_gate/decays.cuh"
#include "cuda/hopper_scalar_gate/kernels.h"
#include "cuda/hopper_scalar_gate/segment_tree.cuh"
#include "cuda/hopper_scalar_gate/weights.cuh"
#include "cuda/launch.h"

namespace fenwick::cuda::hopper {

template <typename Scale>
void LaunchWeights(const ForwardParams& p, cudaStream_t stream) {
  const std::int64_t blocks_per_chunk =
      (p.num_heads + WeightHeads<Scale>() - 1) / WeightHeads<Scale>();
  LaunchDependent("weights", WeightsKernel<Scale>, p.layout.num_chunks * blocks_per_chunk,
                  kWeightThreads, kChunk * ScalesPitch(p.levels), stream, p);
}

template <typename Element, int kWarpgroups>
void LaunchChunkStates(const ForwardParams& p, const ForwardMaps& maps, cudaStream_t stream) {
  using Shape = ChunkStatesShape<kWarpgroups>;
  const std::int64_t items = std::int64_t{p.layout.num_segments} * p.num_heads * p.value_tiles *
                             (p.key_size / Shape::kRows);
  const std::int64_t resident = std::int64_t{p.multiprocessors} * Shape::kBlocksPerSM;
  LaunchDependent("chunk states", ChunkStatesKernel<Element, kWarpgroups>,
                  std::min(items, resident), Shape::kThreads, Shape::kSharedBytes, stream, maps.k,
                  maps.v, p, static_cast<int>(items));
}

template <typename Element>
void LaunchStates(const ForwardParams& p, DType scales, const ForwardMaps& maps,
                  cudaStream_t stream) {
  const std::int64_t octets = (p.num_heads + kDecayHeads - 1) / kDecayHeads;
  LaunchDependent("decays", DecaysKernel<Element>, p.layout.num_chunks * octets, kDecayThreads, 0,
                  stream, p);
  if (p.key_size == 64) {
    LaunchChunkStates<Element, 1>(p, maps, stream);
  } else {
    LaunchChunkStates<Element, 2>(p, maps, stream);
  }
  if (p.layout.num_segments > p.layout.num_sequences) {  // otherwise there is no tree above
    const std::int64_t threads = std::int64_t{p.value_tiles} * p.key_size * kValueTile / 4;
    const std::int64_t blocks = threads / kTreeThreads * p.num_heads * p.layout.num_sequences;
    LaunchDependent("segment tree",
                    p.layout.segment_levels <= kFewSegmentLevels
                        ? SegmentTreeKernel<Element, kFewSegmentLevels>
                        : SegmentTreeKernel<Element, kMaxSegmentLevels>,
                    blocks, kTreeThreads, 0, stream, p);
  }
  if (p.scales_tile_heads != 0) return;
  if (scales == DType::kFloat32) {
    LaunchWeights<float>(p, stream);
  } else {
    LaunchWeights<typename Element::Storage>(p, stream);
  }
}

}  // namespace fenwick::cuda::hopper
