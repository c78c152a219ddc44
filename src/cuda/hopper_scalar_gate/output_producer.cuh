// The output kernel's feeders: a warp that takes items and streams their heads' decays and scales,
// and a thread that streams tiles.
//
// Ring order: q, k; then for each head and value tile its nodes (at least one: without any, the
// empty slot 0 with weight 0) and V.
#pragma once

#include <cuda.h>

#include "cuda/hopper_scalar_gate/output_shape.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/sync.cuh"

namespace fenwick::cuda::hopper {

// Hands an item on; negative: there is none. One thread. first_full: barriers of the ring's stages.
template <int kStages>
struct ItemWriter {
  std::uint32_t slots, first_full, first_empty;
  RingPosition ring;
  __device__ __forceinline__ void Write(int item) {
    ptx::BarrierWait(first_empty + 8 * ring.stage, ring.phase ^ 1);
    ptx::StoreSharedU32(slots + 4 * ring.stage, item);
    ptx::BarrierArrive(first_full + 8 * ring.stage);
    ring.Advance(kStages);
  }
};

// Takes items and streams what belongs to heads: decays, level scales, gaps between nodes. One
// warp. It runs ahead of the tiles, as what is made of them takes long, and hands the items to the
// producer of tiles.
template <int kKeySize>
struct OutputHeads {
  using Shape = OutputShape<kKeySize>;
  std::uint32_t shared;
  OutputBarriers<kKeySize> barriers;
  int lane;
  RingPosition decays, scales;

  __device__ __forceinline__ void Run(const CUtensorMap& scales_map, const ForwardParams& p,
                                      int num_items) {
    ItemWriter<Shape::kItemStages> taken{
        shared + Shape::kTaken, barriers.taken_full, barriers.taken_empty, {}};
    const ScalesTiles tiles(p, Shape::kScalesBytes);
    int index = blockIdx.x;
    if (lane == 0) taken.Write(index);
    ptx::WaitForPreviousKernel();
    while (index < num_items) {
      int next = 0;
      if (lane == 0) next = static_cast<int>(gridDim.x) + atomicAdd(p.items_taken, 1);
      LoadHeads(scales_map, p, tiles, OutputItem(p, index));
      index = __shfl_sync(~0u, next, 0);
      if (lane == 0) taken.Write(index < num_items ? index : -1);
    }
  }

  __device__ __forceinline__ void LoadHeads(const CUtensorMap& scales_map, const ForwardParams& p,
                                            const ScalesTiles& tiles, const OutputItem& item) {
    int end = item.place.index;  // of this lane's node
    for (int i = 0; i < lane; ++i) end &= end - 1;
    const std::size_t chunks = p.layout.num_chunks;
    const std::size_t head_row = item.first_head * chunks;
    const float* decay = p.node_decay + head_row + item.place.first_chunk + end;
    std::size_t record = head_row + item.chunk;
    const int first_head = p.head_begin + item.first_head;
#pragma unroll 1
    for (int head = 0; head < item.heads; ++head) {
      // Rows of weights have the gaps in them.
      float sum = tiles.tiled && end != 0 ? *decay : 0.f;
      const std::uint32_t to = shared + Shape::kHeads + decays.stage * Shape::kHeadBytes;
      const std::uint32_t full = barriers.head_full + 8 * decays.stage;
      ptx::BarrierWait(barriers.head_empty + 8 * decays.stage, decays.phase ^ 1);
      if (lane == 0) {
        ptx::BarrierExpect(full, kDecayBytes);
        ptx::LoadBytes(to, p.local_decay + record * 2 * kChunk, kDecayBytes, full);
      }
      if (head == 0 || tiles.Starts(first_head + head)) {
        LoadScales(scales_map, p, tiles, item, first_head + head, record);
      }
#pragma unroll
      for (int step = 1; step < kMaxNodes; step <<= 1) {
        const float before = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += before;
      }
      const float gap = __shfl_up_sync(~0u, sum, 1);
      if (lane < kMaxNodes) {
        ptx::StoreSharedF32(to + kDecayBytes + 4 * lane, lane == 0 ? 0.f : gap);
      }
      ptx::BarrierArriveOnce(full);
      decays.Advance(Shape::kHeadStages);
      decay += chunks;
      record += chunks;
    }
  }

  // head: of all heads; record: of its weights.
  __device__ __forceinline__ void LoadScales(const CUtensorMap& map, const ForwardParams& p,
                                             const ScalesTiles& tiles, const OutputItem& item,
                                             int head, std::size_t record) {
    ptx::BarrierWait(barriers.scales_empty + 8 * scales.stage, scales.phase ^ 1);
    if (lane == 0) {
      const std::uint32_t bar = barriers.scales_full + 8 * scales.stage;
      const std::uint32_t to = shared + Shape::kScales + scales.stage * tiles.bytes;
      if (tiles.tiled) {
        ptx::BarrierExpect(bar, 2 * kChunk * tiles.columns);
        ptx::LoadTile(to, &map, bar, tiles.Column(head, p.levels), 0, item.place.token,
                      item.place.batch);
      } else {
        const std::uint32_t bytes = (kLocalLevels + item.nodes) * kWeightPitch;
        ptx::BarrierExpect(bar, bytes);
        ptx::LoadBytes(to, p.weights + record * p.weight_rows * kChunk, bytes, bar);
      }
    }
    __syncwarp();
    scales.Advance(tiles.stages);
  }
};

// Streams tiles: one thread.
template <int kKeySize>
struct OutputProducer {
  using Shape = OutputShape<kKeySize>;
  std::uint32_t shared;
  OutputBarriers<kKeySize> barriers;
  RingPosition ring;

  // The next stage's barrier, once its previous contents are used up; sets `stage` to its address.
  __device__ __forceinline__ std::uint32_t Acquire(std::uint32_t& stage) {
    const std::uint32_t bar = barriers.full + 8 * ring.stage;
    ptx::BarrierWait(barriers.empty + 8 * ring.stage, ring.phase ^ 1);
    stage = shared + ring.stage * Shape::kTileBytes;
    ring.Advance(Shape::kStages);
    return bar;
  }

  __device__ __forceinline__ void LoadTile(const CUtensorMap& map, int column, int head,
                                           const ChunkPlace& place) {
    std::uint32_t stage;
    const std::uint32_t bar = Acquire(stage);
    ptx::BarrierExpect(bar, Shape::kTileBytes);
    ptx::LoadTile(stage, &map, bar, column, head, place.token, place.batch);
  }

  __device__ __forceinline__ void Run(const CUtensorMap& q_map, const CUtensorMap& k_map,
                                      const CUtensorMap& v_map, const ForwardParams& p) {
    ItemWriter<Shape::kItemStages> items{
        shared + Shape::kItems, barriers.item_full, barriers.item_empty, {}};
    RingPosition taken;
    bool waited = false;
    while (true) {
      ptx::BarrierWait(barriers.taken_full + 8 * taken.stage, taken.phase);
      const int index =
          static_cast<int>(ptx::LoadSharedU32(shared + Shape::kTaken + 4 * taken.stage));
      ptx::BarrierArrive(barriers.taken_empty + 8 * taken.stage);
      taken.Advance(Shape::kItemStages);
      if (index < 0) break;
      const OutputItem item(p, index);
      const int group = (p.head_begin + item.first_head) / p.heads_per_group;
#pragma unroll 1
      for (int i = 0; i < 2 * Shape::kSlabs; ++i) {
        const int slab = i % Shape::kSlabs;
        LoadTile(i < Shape::kSlabs ? q_map : k_map, 64 * slab, group, item.place);
      }
      // Only now, as q and k have their stages: whoever waits for them cannot mistake an earlier
      // use of these stages for this one.
      items.Write(index);
      if (!waited) ptx::WaitForPreviousKernel();
      waited = true;
      LoadHeads(v_map, p, item);
    }
    items.Write(-1);
  }

  __device__ __forceinline__ void LoadHeads(const CUtensorMap& v_map, const ForwardParams& p,
                                            const OutputItem& item) {
    constexpr std::size_t kStateBytes = Shape::kNodeStages * Shape::kNodePartBytes;
    const std::size_t slot_bytes = p.value_tiles * kStateBytes;
    const std::size_t head_bytes = p.layout.num_chunks * slot_bytes;
    const char* states = static_cast<const char*>(p.node_states) + item.first_head * head_bytes +
                         item.place.first_chunk * slot_bytes;
#pragma unroll 1
    for (int head = 0; head < item.heads; ++head) {
#pragma unroll 1
      for (int value_tile = 0; value_tile < p.value_tiles; ++value_tile) {
        int end = item.place.index;
#pragma unroll 1
        do {
          for (int part = 0; part < Shape::kNodeStages; ++part) {
            std::uint32_t stage;
            const std::uint32_t bar = Acquire(stage);
            ptx::BarrierExpect(bar, Shape::kNodePartBytes);
            ptx::LoadBytes(
                stage,
                states + end * slot_bytes + value_tile * kStateBytes + part * Shape::kNodePartBytes,
                Shape::kNodePartBytes, bar);
          }
          end &= end - 1;
        } while (end != 0);
        LoadTile(v_map, value_tile * kValueTile, p.head_begin + item.first_head + head, item.place);
      }
      states += head_bytes;
    }
  }
};

}  // namespace fenwick::cuda::hopper
