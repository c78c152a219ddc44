// Backward pass 2: what the queries of a segment contribute to R of the nodes outside it,
//   R_j^T += (w_j o dO)^T Q     [V, K]
// for each set bit j of the segment's index. Transposed, so that one warpgroup holds a whole value
// tile and three nodes at a time; the two warpgroups take two value tiles of heads that share q.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "cuda/hopper_scalar_gate/backward_params.h"
#include "cuda/hopper_scalar_gate/layout.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/swizzle.cuh"

namespace fenwick::cuda::hopper {

inline constexpr int kTileBytes = kChunk * kTileRowBytes;  // 128 rows of 64 elements: 16 KB

struct SegmentReadsShape {
  static constexpr int kNodes = 3;  // 64 accumulators each
  static constexpr int kStages = 3;
  static constexpr int kStageBytes = 4 * kTileBytes;            // q, two tiles of dO
  static constexpr int kWeightBytes = 2 * kNodes * kChunk * 2;  // of both value tiles
  static constexpr int kWeights = kStages * kStageBytes;
  static constexpr int kBarriers = kWeights + kStages * kWeightBytes;
  static constexpr int kSharedBytes = kBarriers + kStages * 16 + 1024;
  static constexpr int kThreads = 3 * kWarpgroup;
};

// Value tile `index` of a q/k group: its head within the pass, its tile, and whether it exists. The
// two of a block read the same key block of q.
struct TileOfGroup {
  int head, value_tile;
  bool exists;
};

__device__ __forceinline__ TileOfGroup PlaceOfTile(const ForwardParams& p, int group, int index) {
  const int heads = min(p.heads_per_group, p.num_heads);
  return {group * heads + index / p.value_tiles, index % p.value_tiles,
          index < heads * p.value_tiles};
}

// The sums of one warpgroup, over the chunks of the segment: kNodes nodes of one value tile.
template <typename Element, int kNodes>
__device__ __forceinline__ void SumReads(const BackwardParams& b, const SegmentPlace& place,
                                         const TileOfGroup& at, int key_block, int segment,
                                         int part, int count, std::uint32_t full,
                                         std::uint32_t empty, std::uint32_t shared) {
  using Shape = SegmentReadsShape;
  const ForwardParams& p = b.forward;
  const int first = place.first();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int matrix_row = ((lane >> 4) & 1) * 8 + (lane & 7);
  const std::uint32_t fragment =
      (2 + warpgroup) * kTileBytes + SwizzledOffset(matrix_row, 2 * warp + ((lane >> 3) & 1));
  float reads[kNodes][64];
#pragma unroll
  for (int j = 0; j < kNodes; ++j) {
#pragma unroll
    for (int n = 0; n < 64; ++n) reads[j][n] = 0;
  }
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int stage = i % Shape::kStages;
    const std::uint32_t tile = shared + stage * Shape::kStageBytes;
    ptx::BarrierWait(full + 8 * stage, (i / Shape::kStages) & 1);
    const int valid = place.length - (first + i) * kChunk;
    if (valid < kChunk && p.layout.sequences != nullptr) {
      ZeroTails(tile, 4, kChunk, valid, 2 * kWarpgroup);
    }
    const std::uint32_t weights = shared + Shape::kWeights + stage * Shape::kWeightBytes +
                                  warpgroup * Shape::kNodes * kChunk * 2 + 4 * (lane & 3);
    const std::uint64_t q = TileDescriptor(tile, kTileBytes);
    // Every fragment of dO is read once and weighted for each node.
    constexpr int kBatch = kNodes < 3 ? 4 : 1;  // beside 192 accumulators registers are short
#pragma unroll
    for (int batch = 0; batch < 8; batch += kBatch) {
      std::uint32_t d_o[kBatch][4];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        ptx::LoadMatrix4Transposed(d_o[k], tile + fragment + 16 * (batch + k) * kTileRowBytes);
      }
#pragma unroll
      for (int j = 0; j < kNodes; ++j) {
        std::uint32_t a[kBatch][4];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const std::uint32_t row = weights + j * kChunk * 2 + 32 * (batch + k);
          const std::uint32_t low = Element::FromBF16(ptx::LoadSharedU32(row));
          const std::uint32_t high = Element::FromBF16(ptx::LoadSharedU32(row + 16));
          a[k][0] = Element::Multiply(d_o[k][0], low);
          a[k][1] = Element::Multiply(d_o[k][1], low);
          a[k][2] = Element::Multiply(d_o[k][2], high);
          a[k][3] = Element::Multiply(d_o[k][3], high);
        }
        ptx::PinRegisters(reads[j]);
        ptx::WgmmaFence();
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          ptx::WgmmaRegisters<Element, true>(reads[j], a[k], q + (batch + k) * kStepRows16, true);
        }
        ptx::WgmmaCommit();
      }
      ptx::WgmmaWait<0>();
#pragma unroll
      for (int j = 0; j < kNodes; ++j) ptx::PinRegisters(reads[j]);
    }
    ptx::BarrierArriveOnce(empty + 8 * stage);
  }
  if (!at.exists) return;
  const std::size_t unit =
      (static_cast<std::size_t>(at.head) * p.layout.num_segments + segment) * b.state_tiles +
      at.value_tile * b.key_blocks + key_block;
  float* out = b.segment_reads +
               (unit * p.layout.segment_levels + Shape::kNodes * part) * kStateElements +
               (lane >> 2);
#pragma unroll
  for (int j = 0; j < kNodes; ++j) {
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int k = 8 * n + 2 * (lane & 3) + x;
        float* row = out + j * kStateElements + k * kTileColumns;
        row[((2 * warp) ^ (k & 7)) << 3] = reads[j][4 * n + x];
        row[((2 * warp + 1) ^ (k & 7)) << 3] = reads[j][4 * n + 2 + x];
      }
    }
  }
}

// Grid x: parts x key blocks x pairs of value tiles x q/k groups of the pass x segments.
template <typename Element>
__global__ void __launch_bounds__(SegmentReadsShape::kThreads, 1)
    SegmentReadsKernel(const __grid_constant__ CUtensorMap q_map,
                       const __grid_constant__ CUtensorMap do_map,
                       const __grid_constant__ BackwardParams b) {
  using Shape = SegmentReadsShape;
  const ForwardParams& p = b.forward;
  ptx::AllowNextKernel();
  const std::uint32_t shared = FirstTile();
  const std::uint32_t full = shared + Shape::kBarriers, empty = full + 8 * Shape::kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      ptx::BarrierInit(full + 8 * i, 1);
      ptx::BarrierInitWarps(empty + 8 * i, 8);
    }
    ptx::BarrierInitFence();
  }
  __syncthreads();
  ptx::WaitForPreviousKernel();
  const int heads_in_group = min(p.heads_per_group, p.num_heads);
  const int pairs = DivideUp(heads_in_group * p.value_tiles, 2);
  const int groups = p.num_heads / heads_in_group;
  int rest = blockIdx.x;
  const int key_block = rest % b.key_blocks;
  rest /= b.key_blocks;
  const int pair = rest % pairs;
  rest /= pairs;
  const int group = rest % groups;
  rest /= groups;
  const int segment = p.layout.num_segments - 1 - rest % p.layout.num_segments;
  const int part = rest / p.layout.num_segments;
  const SegmentPlace place = PlaceOfSegment(p.layout, segment);
  const int nodes = min(Shape::kNodes, __popc(place.index) - Shape::kNodes * part);
  if (nodes <= 0) return;
  const int first = place.first(), count = place.count();

  const int warp_in_block = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp_in_block >= 8) {
    ptx::LowerRegisters<24>();
    if (warp_in_block > 8 || lane > 0) return;
    const int q_group = (p.head_begin + group * heads_in_group) / p.heads_per_group;
    for (int i = 0; i < count; ++i) {
      const int stage = i % Shape::kStages;
      if (i >= Shape::kStages) {
        ptx::BarrierWait(empty + 8 * stage, ((i / Shape::kStages) & 1) ^ 1);
      }
      const std::uint32_t bar = full + 8 * stage, tile = shared + stage * Shape::kStageBytes;
      const std::uint32_t weights = shared + Shape::kWeights + stage * Shape::kWeightBytes;
      const int token = place.token + (first + i) * kChunk;
      const bool second = PlaceOfTile(p, group, 2 * pair + 1).exists;
      const int row_bytes = nodes * kChunk * 2;
      ptx::BarrierExpect(bar, 2 * kTileBytes + (second ? 2 : 1) * (kTileBytes + row_bytes));
      ptx::LoadTile(tile, &q_map, bar, key_block * kKeyBlock, q_group, token, place.batch);
      ptx::LoadTile(tile + kTileBytes, &q_map, bar, key_block * kKeyBlock + 64, q_group, token,
                    place.batch);
      for (int k = 0; k < (second ? 2 : 1); ++k) {
        const TileOfGroup at = PlaceOfTile(p, group, 2 * pair + k);
        ptx::LoadTile(tile + (2 + k) * kTileBytes, &do_map, bar, at.value_tile * kValueTile,
                      p.head_begin + at.head, token, place.batch);
        const std::size_t record =
            static_cast<std::size_t>(at.head) * p.layout.num_chunks + place.first_chunk + first + i;
        const int row = kLocalLevels + __popc(i) + Shape::kNodes * part;
        ptx::LoadBytes(weights + k * Shape::kNodes * kChunk * 2,
                       p.weights + (record * p.weight_rows + row) * kChunk, row_bytes, bar);
      }
    }
    return;
  }

  ptx::RaiseRegisters<240>();
  const TileOfGroup at = PlaceOfTile(p, group, 2 * pair + warp_in_block / 4);
  const auto sum_reads = [&](auto kNodes) {
    SumReads<Element, kNodes.value>(b, place, at, key_block, segment, part, count, full, empty,
                                    shared);
  };
  switch (nodes) {
    case 1: return sum_reads(std::integral_constant<int, 1>());
    case 2: return sum_reads(std::integral_constant<int, 2>());
    case 3: return sum_reads(std::integral_constant<int, 3>());
  }
}

}  // namespace fenwick::cuda::hopper
