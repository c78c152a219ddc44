// Pass 1: chunk states and the binary tree over the chunks of one segment.
//
//   state of a chunk:  S = sum_t 2^(a[last] - a[t]) k[t] v[t]^T            [K, V]
//   merge:             S(left right) = 2^(decay of right) S(left) + S(right)
//
// A left node that ends before chunk e is what queries of chunk e (and of its right siblings) read
// through one level: it is written once, to slot e (partition.h, ForEachLeftNode). One block: one
// head, value tile and segment, kWarpgroups x 64 rows of K. The tree is a binary counter: pending
// nodes stay in registers as fp32. A producer warp streams K, V and decays through a ring, from one
// segment on to the block's next.
#pragma once

#include <cuda.h>

#include "cuda/hopper_scalar_gate/layout.cuh"
#include "cuda/hopper_scalar_gate/params.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/swizzle.cuh"

namespace fenwick::cuda::hopper {

template <int kWarpgroups>
struct ChunkStatesShape {
  static constexpr int kRows = 64 * kWarpgroups;  // rows of K in one block
  static constexpr int kTileBytes = kChunk * kTileRowBytes;
  static constexpr int kStageBytes = (kWarpgroups + 1) * kTileBytes;
  // Enough bytes in flight for DRAM's latency; with one warpgroup two blocks share the SM.
  static constexpr int kStages = kWarpgroups == 2 ? 4 : 3;
  static constexpr int kBlocksPerSM = kWarpgroups == 2 ? 1 : 2;
  static constexpr int kThreads = kWarpgroup * (kWarpgroups + 1);
  static constexpr int kOut = kStages * kStageBytes;  // one 2 KB staging part a warp
  static constexpr int kDecays = kOut + kWarpgroups * 8192;
  static constexpr int kBarriers = kDecays + kStages * kDecayToEndBytes;
  static constexpr int kSharedBytes = kBarriers + kStages * 16 + 1024;
};

// Adds the decayed outer products of one chunk: d = (decay * K)^T V for this warpgroup's 64 rows.
template <typename Element>
__device__ __forceinline__ void ChunkState(float (&d)[32], std::uint32_t k_tile,
                                           std::uint32_t v_tile, std::uint32_t decays, int warp,
                                           int lane) {
  // K^T as A fragments: registers 0-1 are tokens 0-7 of the step, 2-3 tokens 8-15.
  const int row = ((lane >> 4) & 1) * 8 + (lane & 7);
  const std::uint32_t k_address = k_tile + SwizzledOffset(row, 2 * warp + ((lane >> 3) & 1));
  const int pair = lane & 3;
  const std::uint64_t v = TileDescriptor(v_tile);
  ptx::PinRegisters(d);
  std::uint32_t a[8][4];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    ptx::LoadMatrix4Transposed(a[j], k_address + j * 16 * kTileRowBytes);
    const std::uint32_t low = ptx::LoadSharedU32(decays + (16 * j + 2 * pair) * 2);
    const std::uint32_t high = ptx::LoadSharedU32(decays + (16 * j + 8 + 2 * pair) * 2);
    a[j][0] = Element::Multiply(a[j][0], low);
    a[j][1] = Element::Multiply(a[j][1], low);
    a[j][2] = Element::Multiply(a[j][2], high);
    a[j][3] = Element::Multiply(a[j][3], high);
  }
  ptx::WgmmaFence();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    ptx::WgmmaRegisters<Element, true>(d, a[j], v + j * kStepRows16, j > 0);
  }
  ptx::WgmmaCommit();
  ptx::WgmmaWait<0>();
  ptx::PinRegisters(d);
}

// Offset of accumulator pair n of this lane (row `row`, + 8 for the second pair) in a swizzled tile
// of 64-element rows, in elements.
__device__ __forceinline__ int AccumulatorOffset(int row, int n, int lane) {
  return row * kTileColumns + ((n ^ (row & 7)) << 3) + 2 * (lane & 3);
}

// What one block does at a time: one segment of one head, value tile and block of K rows.
// Neighbouring items share K: value tile fastest, then head, K block, segment.
template <int kWarpgroups>
struct SegmentItem {
  int value_tile, head, key_block, segment;
  SegmentPlace place;
  int first;           // chunk within the sequence
  int count;           // chunks
  std::size_t record;  // of the first chunk
  __device__ __forceinline__ SegmentItem(const ForwardParams& p, int item) {
    value_tile = item % p.value_tiles;
    item /= p.value_tiles;
    head = item % p.num_heads;
    item /= p.num_heads;
    const int key_blocks = p.key_size / ChunkStatesShape<kWarpgroups>::kRows;
    key_block = item % key_blocks;
    segment = item / key_blocks;
    place = PlaceOfSegment(p.layout, segment);
    first = place.first();
    count = place.count();
    record = static_cast<std::size_t>(head) * p.layout.num_chunks + place.first_chunk + first;
  }
};

// The producer thread: streams the chunks of all items of this block.
template <int kWarpgroups>
__device__ __forceinline__ void ProduceChunks(std::uint32_t shared, const CUtensorMap& k_map,
                                              const CUtensorMap& v_map, const ForwardParams& p,
                                              int items) {
  using Shape = ChunkStatesShape<kWarpgroups>;
  const std::uint32_t full = shared + Shape::kBarriers, empty = full + 8 * Shape::kStages;
  const auto load_tiles = [&](const SegmentItem<kWarpgroups>& item, int i, int stage) {
    const std::uint32_t bar = full + 8 * stage, tile = shared + stage * Shape::kStageBytes;
    const int token = item.place.token + (item.first + i) * kChunk;
    const int head = p.head_begin + item.head;
    ptx::BarrierExpect(bar, Shape::kStageBytes + kDecayToEndBytes);
#pragma unroll
    for (int w = 0; w < kWarpgroups; ++w) {
      ptx::LoadTile(tile + w * Shape::kTileBytes, &k_map, bar,
                    item.key_block * Shape::kRows + 64 * w, head / p.heads_per_group, token,
                    item.place.batch);
    }
    ptx::LoadTile(tile + kWarpgroups * Shape::kTileBytes, &v_map, bar, item.value_tile * kValueTile,
                  head, token, item.place.batch);
  };
  const auto load_decays = [&](const SegmentItem<kWarpgroups>& item, int i, int stage) {
    ptx::LoadBytes(shared + Shape::kDecays + stage * kDecayToEndBytes,
                   static_cast<const char*>(p.decay_to_end) + (item.record + i) * kDecayToEndBytes,
                   kDecayToEndBytes, full + 8 * stage);
  };
  SegmentItem<kWarpgroups> item(p, blockIdx.x);
  // All but the decays was there before the previous kernel started (launch_states.cuh).
  const int ahead = min(item.count, Shape::kStages);
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) load_tiles(item, i, i);
  ptx::WaitForPreviousKernel();
  ptx::AllowNextKernel();
  RingPosition ring;
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) {
    load_decays(item, i, ring.stage);
    ring.Advance(Shape::kStages);
  }
  int i = ahead;
  for (int index = blockIdx.x;;) {
#pragma unroll 1
    for (; i < item.count; ++i) {
      ptx::BarrierWait(empty + 8 * ring.stage, ring.phase ^ 1);
      load_tiles(item, i, ring.stage);
      load_decays(item, i, ring.stage);
      ring.Advance(Shape::kStages);
    }
    index += gridDim.x;
    if (index >= items) break;
    item = SegmentItem<kWarpgroups>(p, index);
    i = 0;
  }
}

// Grid x: as many blocks as run at once, or fewer; `items` in all.
template <typename Element, int kWarpgroups>
__global__ void __launch_bounds__(ChunkStatesShape<kWarpgroups>::kThreads,
                                  ChunkStatesShape<kWarpgroups>::kBlocksPerSM)
    ChunkStatesKernel(const __grid_constant__ CUtensorMap k_map,
                      const __grid_constant__ CUtensorMap v_map,
                      const __grid_constant__ ForwardParams p, int items) {
  using Shape = ChunkStatesShape<kWarpgroups>;
  const std::uint32_t shared = FirstTile();
  const std::uint32_t full = shared + Shape::kBarriers, empty = full + 8 * Shape::kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      ptx::BarrierInit(full + 8 * i, 1);
      ptx::BarrierInitWarps(empty + 8 * i, 4 * kWarpgroups);
    }
    ptx::BarrierInitFence();
  }
  __syncthreads();

  const int warp_in_block = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp_in_block >= 4 * kWarpgroups) {
    ptx::LowerRegisters<24>();
    if (warp_in_block == 4 * kWarpgroups && lane == 0) {
      ProduceChunks<kWarpgroups>(shared, k_map, v_map, p, items);
    }
    return;
  }

  ptx::RaiseRegisters<kWarpgroups == 2 ? 240 : 232>();
  const int warpgroup = warp_in_block / 4, warp = warp_in_block % 4;
  const std::uint32_t staging = shared + Shape::kOut + warp_in_block * 2048;
  const std::size_t tile_elements = static_cast<std::size_t>(p.key_size) * kValueTile;
  const std::size_t slot_stride = p.value_tiles * tile_elements;
  using Storage = typename Element::Storage;
  RingPosition ring;
#pragma unroll 1
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const SegmentItem<kWarpgroups> item(p, index);
    const int first_row = item.key_block * Shape::kRows + 64 * warpgroup + 16 * warp;
    auto* slot = static_cast<Storage*>(p.node_states) +
                 (item.record * p.value_tiles + item.value_tile) * tile_elements +
                 first_row * kTileColumns;
    const bool writes_decay = item.value_tile == 0 && first_row == 0 && lane == 0;
    if (item.first == 0) {  // slot 0 of the sequence: an empty node
      if (lane == 0) ptx::WaitStoresRead<0>();
      __syncwarp();
      ZeroRows(staging, 0, 16, lane, 32);
      ptx::FenceAsyncShared();
      __syncwarp();
      if (lane == 0) {
        ptx::StoreBytes(slot, staging, 2048);
        ptx::CommitStores();
      }
      if (writes_decay) p.node_decay[item.record] = 0;
    }

    float pending[kMaxLogSegment][32], pending_decay[kMaxLogSegment];
#pragma unroll 1
    for (int i = 0; i < item.count; ++i) {
      ptx::BarrierWait(full + 8 * ring.stage, ring.phase);
      const std::uint32_t tiles = shared + ring.stage * Shape::kStageBytes;
      const std::uint32_t k_tile = tiles + warpgroup * Shape::kTileBytes;
      const std::uint32_t v_tile = tiles + kWarpgroups * Shape::kTileBytes;
      const std::uint32_t decays = shared + Shape::kDecays + ring.stage * kDecayToEndBytes;
      const int valid = item.place.length - (item.first + i) * kChunk;
      if (valid < kChunk && p.layout.sequences != nullptr) {
        // What lies past a packed sequence may be anything, NaN included; past a tensor's end the
        // copy engine filled in zeros.
        ZeroTails(tiles, kWarpgroups + 1, kChunk, valid, kWarpgroups * kWarpgroup);
      }
      float decay = ptx::LoadSharedF32(decays + 2 * kChunk);
      float node[32];
      ChunkState<Element>(node, k_tile, v_tile, decays, warp, lane);
      ptx::BarrierArriveOnce(empty + 8 * ring.stage);
      ring.Advance(Shape::kStages);

      // A binary counter: the node takes in all pending ones that end where it begins.
      const int merges = __ffs(i + 1) - 1;
#pragma unroll
      for (int level = 0; level < kMaxLogSegment; ++level) {
        if (level < merges) {
          const float factor = ptx::Exp2(decay);
#pragma unroll
          for (int n = 0; n < 32; ++n) node[n] += factor * pending[level][n];
          decay += pending_decay[level];
        }
      }
#pragma unroll
      for (int level = 0; level < kMaxLogSegment; ++level) {
        if (level == merges) {
#pragma unroll
          for (int n = 0; n < 32; ++n) pending[level][n] = node[n];
          pending_decay[level] = decay;
        }
      }
      if (i + 1 < item.count) {
        if (lane == 0) ptx::WaitStoresRead<0>();
        __syncwarp();
        StoreAccumulator<Element>(staging, node, lane);
        ptx::FenceAsyncShared();
        __syncwarp();
        if (lane == 0) {
          ptx::StoreBytes(slot + (i + 1) * slot_stride, staging, 2048);
          ptx::CommitStores();
        }
        if (writes_decay) p.node_decay[item.record + i + 1] = decay;
      } else if (item.place.index + 1 < item.place.num_segments) {
        const std::size_t segment =
            static_cast<std::size_t>(item.head) * p.layout.num_segments + item.segment;
        float* out = p.segment_states + (segment * p.value_tiles + item.value_tile) * tile_elements;
        const int row = first_row + (lane >> 2);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          *reinterpret_cast<float2*>(out + AccumulatorOffset(row, n, lane)) =
              make_float2(node[4 * n], node[4 * n + 1]);
          *reinterpret_cast<float2*>(out + AccumulatorOffset(row + 8, n, lane)) =
              make_float2(node[4 * n + 2], node[4 * n + 3]);
        }
        if (writes_decay) p.segment_decay[segment] = decay;
      }
    }
  }
  if (lane == 0) ptx::WaitStores<0>();
}

}  // namespace fenwick::cuda::hopper
