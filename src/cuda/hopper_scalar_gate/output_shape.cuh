// What the roles of the output kernel share: shared memory, barriers, items of work.
#pragma once

#include "cuda/hopper_scalar_gate/layout.cuh"
#include "cuda/hopper_scalar_gate/params.h"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/swizzle.cuh"

namespace fenwick::cuda::hopper {

// Shared memory of the output kernel, as byte offsets, and its warpgroups.
template <int kKeySize>
struct OutputShape {
  // Warpgroups: two multiply, one or two (where registers suffice) weight scores, one feeds them.
  static constexpr int kScoreGroups = kKeySize == 256 ? 1 : 2;
  static constexpr int kThreads = kWarpgroup * (3 + kScoreGroups);
  static constexpr int kProducerRegisters = 32;
  static constexpr int kScoreRegisters = kKeySize == 256 ? 112 : 88;
  static constexpr int kConsumerRegisters = kKeySize == 256 ? 184 : 136;

  static constexpr int kSlabs = kKeySize / kTileColumns;     // 64-column tiles of q and k
  static constexpr int kTileBytes = kChunk * kTileRowBytes;  // 16 KB
  // A stage holds a slab of q or k, a value tile, or up to 128 rows of a node.
  static constexpr int kNodeStages = kKeySize == 256 ? 2 : 1;
  static constexpr int kNodePartBytes = kKeySize * kTileRowBytes / kNodeStages;
  static constexpr int kStages = kKeySize == 256 ? 8 : 7;
  static constexpr int kHeadStages = 4;  // heads whose decays are in flight
  static constexpr int kHeadBytes = kDecayBytes + 4 * kMaxNodes;  // local_decay, gaps
  static constexpr int kBlockBytes = 64 * kTileRowBytes;          // 64 x 64 of P
  // P of two heads: the diagonal block of warpgroup 0, then the left and the diagonal one of 1;
  // and the weights of their nodes, rows of 128 elements.
  static constexpr int kScoreStages = 2;
  static constexpr int kScoreBytes = 3 * kBlockBytes;
  static constexpr int kNodeWeightBytes = kMaxNodes * kWeightPitch;

  static constexpr int kScores = kStages * kTileBytes;
  static constexpr int kOut = kScores + kScoreStages * kScoreBytes;  // 2 KB a warp
  static constexpr int kNodeWeights = kOut + 8 * 2048;
  static constexpr int kScales = kNodeWeights + kScoreStages * kNodeWeightBytes;
  static constexpr int kScalesBytes = ScalesBytes(kKeySize);
  static constexpr int kHeads = kScales + kScalesBytes;
  static constexpr int kItemStages = 2;
  static constexpr int kTaken = kHeads + kHeadStages * kHeadBytes;  // [kItemStages]
  static constexpr int kItems = kTaken + 8;                         // [kItemStages]
  static constexpr int kBarriers = kItems + 8;
  static constexpr int kNumBarriers =
      2 * (kStages + kHeadStages + kMaxScalesStages + 2 * kItemStages) + 3 * kScoreStages;
  static constexpr int kSharedBytes = kBarriers + 8 * kNumBarriers + 1024;
  static_assert(kStages >= 2 * kSlabs, "q and k pass through the ring");
  static_assert(kSharedBytes <= 232448, "shared memory of an SM");
};

// One item of work: a chunk and a run of heads that share q and k.
struct OutputItem {
  ChunkPlace place;
  int chunk;
  int first_head;  // within the head group
  int heads;
  int nodes;         // that the chunk reads
  int garbage_from;  // rows of the tiles from here on belong to another sequence

  // Heads are cut in runs within each q/k group. Chunks with few nodes, the cheap ones, tend to
  // come last.
  __device__ __forceinline__ OutputItem(const ForwardParams& p, int item) {
    const int run = item / p.layout.num_chunks;
    chunk = p.layout.num_chunks - 1 - (item - run * p.layout.num_chunks);
    const int heads_in_group = min(p.heads_per_group, p.num_heads);
    const int runs_per_group = DivideUp(heads_in_group, p.heads_per_block);
    const int group = run / runs_per_group;
    const int first_in_group = (run - group * runs_per_group) * p.heads_per_block;
    first_head = group * heads_in_group + first_in_group;
    heads = min(p.heads_per_block, heads_in_group - first_in_group);
    place = PlaceOfChunk(p.layout, chunk);
    nodes = __popc(place.index);
    garbage_from = p.layout.sequences == nullptr ? kChunk : place.valid;
  }
};

// Pairs of barriers, full and empty, of the rings: tiles, heads' decays, level scales, and what the
// scores' warpgroups write: node weights first, then P.
template <int kKeySize>
struct OutputBarriers {
  using Shape = OutputShape<kKeySize>;
  std::uint32_t full, empty, head_full, head_empty, scales_full, scales_empty, weights_full,
      scores_full, scores_empty, taken_full, taken_empty, item_full, item_empty;
  __device__ __forceinline__ explicit OutputBarriers(std::uint32_t shared)
      : full(shared + Shape::kBarriers),
        empty(full + 8 * Shape::kStages),
        head_full(empty + 8 * Shape::kStages),
        head_empty(head_full + 8 * Shape::kHeadStages),
        scales_full(head_empty + 8 * Shape::kHeadStages),
        scales_empty(scales_full + 8 * kMaxScalesStages),
        weights_full(scales_empty + 8 * kMaxScalesStages),
        scores_full(weights_full + 8 * Shape::kScoreStages),
        scores_empty(scores_full + 8 * Shape::kScoreStages),
        taken_full(scores_empty + 8 * Shape::kScoreStages),
        taken_empty(taken_full + 8 * Shape::kItemStages),
        item_full(taken_empty + 8 * Shape::kItemStages),
        item_empty(item_full + 8 * Shape::kItemStages) {}

  __device__ __forceinline__ void Init() const {
    constexpr int kConsumers = 8, kScoreWarps = 4 * Shape::kScoreGroups;
    const auto init = [](std::uint32_t first, int count, int arrivals) {
      for (int i = 0; i < count; ++i) ptx::BarrierInit(first + 8 * i, arrivals);
    };
    const auto init_warps = [&](std::uint32_t first, int count, int warps) {
      init(first, count, warps * ptx::kWarpArrivals);
    };
    init(full, Shape::kStages, 1);
    init_warps(empty, Shape::kStages, kConsumers);
    init(head_full, Shape::kHeadStages,
         1 + ptx::kWarpArrivals);  // decays by the copy engine, gaps by a warp
    init_warps(head_empty, Shape::kHeadStages, kScoreWarps);
    init(scales_full, kMaxScalesStages, 1);
    init_warps(scales_empty, kMaxScalesStages, kScoreWarps);
    init_warps(weights_full, Shape::kScoreStages, kScoreWarps);
    init_warps(scores_full, Shape::kScoreStages, kScoreWarps);
    init_warps(scores_empty, Shape::kScoreStages, kConsumers);
    init(taken_full, Shape::kItemStages, 1);
    init(taken_empty, Shape::kItemStages, 1);
    init(item_full, Shape::kItemStages, 1);
    init_warps(item_empty, Shape::kItemStages, kConsumers + kScoreWarps);
    ptx::BarrierInitFence();
  }
};

// The items of a block one after another, as the producer of tiles hands them on.
template <int kKeySize>
struct ItemReader {
  using Shape = OutputShape<kKeySize>;
  RingPosition ring;
  // The next item, for a whole warp; negative: there is none.
  __device__ __forceinline__ int Next(std::uint32_t shared,
                                      const OutputBarriers<kKeySize>& barriers) {
    ptx::BarrierWait(barriers.item_full + 8 * ring.stage, ring.phase);
    const int item = static_cast<int>(ptx::LoadSharedU32(shared + Shape::kItems + 4 * ring.stage));
    ptx::BarrierArriveOnce(barriers.item_empty + 8 * ring.stage);
    ring.Advance(Shape::kItemStages);
    return __shfl_sync(~0u, item, 0);
  }
};

// Level scales in shared memory: tiles of scales_tile_heads heads (a power of 2) as they lie in the
// tensor, or one head's rows of weights (weights.cuh).
struct ScalesTiles {
  bool tiled;
  int heads;    // of a tile
  int columns;  // of a tile that is not rows of weights
  int bytes;    // of a stage
  int stages;   // in flight
  __device__ __forceinline__ ScalesTiles(const ForwardParams& p, int shared_bytes) {
    tiled = p.scales_tile_heads != 0;
    heads = tiled ? p.scales_tile_heads : 1;
    columns = p.scales_tile_columns;
    bytes = (kChunk * (tiled ? 2 * columns : 2 * p.weight_rows) + 127) & ~127;
    stages = min(kMaxScalesStages, shared_bytes / bytes);
  }
  __device__ __forceinline__ bool Starts(int head) const { return (head & (heads - 1)) == 0; }
  // First column of the tile that holds `head`.
  __device__ __forceinline__ int Column(int head, int levels) const {
    return ((head & ~(heads - 1)) * levels) & ~7;
  }
};

// Where a reader stands in the rings of a block's heads, and what it reads there.
struct HeadReader {
  ScalesTiles tiles;
  int level_stride, token_stride;  // bytes
  int last_level;                  // levels beyond it are read as it
  float scale;                     // what remains to be multiplied in
  RingPosition decays, scales;
  std::uint32_t decay_address, scales_address;

  template <int kKeySize>
  __device__ __forceinline__ HeadReader(const ForwardParams& p, const OutputBarriers<kKeySize>&)
      : tiles(p, OutputShape<kKeySize>::kScalesBytes) {
    level_stride = tiles.tiled ? 2 : kWeightPitch;
    token_stride = tiles.tiled ? 2 * tiles.columns : 2;
    last_level = tiles.tiled ? p.levels - 1 : kLocalLevels - 1;
    scale = tiles.tiled ? p.scale : 1.f;
  }

  // Where the level scales of a node lie within the head's: `rest` is the chunk's index without the
  // bits of newer nodes.
  __device__ __forceinline__ int NodeOffset(int node, int rest) const {
    return tiles.tiled ? 2 * min(kLogChunk + __ffs(rest), last_level)
                       : (kLocalLevels + node) * kWeightPitch;
  }

  // Waits for the head's data; first: of the item. head: of all heads.
  template <int kKeySize>
  __device__ __forceinline__ void Open(std::uint32_t shared,
                                       const OutputBarriers<kKeySize>& barriers,
                                       const ForwardParams& p, int head, bool first) {
    using Shape = OutputShape<kKeySize>;
    ptx::BarrierWait(barriers.head_full + 8 * decays.stage, decays.phase);
    if (first || tiles.Starts(head)) {
      ptx::BarrierWait(barriers.scales_full + 8 * scales.stage, scales.phase);
    }
    decay_address = shared + Shape::kHeads + decays.stage * Shape::kHeadBytes;
    scales_address = shared + Shape::kScales + scales.stage * tiles.bytes;
    if (tiles.tiled) scales_address += 2 * (head * p.levels - tiles.Column(head, p.levels));
  }

  // Gives it back: one arrival a warp.
  template <int kKeySize>
  __device__ __forceinline__ void Close(const OutputBarriers<kKeySize>& barriers, int head,
                                        bool last) {
    const bool tile_done = last || tiles.Starts(head + 1);
    ptx::BarrierArriveOnce(barriers.head_empty + 8 * decays.stage);
    if (tile_done) ptx::BarrierArriveOnce(barriers.scales_empty + 8 * scales.stage);
    decays.Advance(OutputShape<kKeySize>::kHeadStages);
    if (tile_done) scales.Advance(tiles.stages);
  }

  __device__ __forceinline__ float Level(int level, int t) const {
    return scale * ptx::LoadSharedBF16(scales_address + min(level, last_level) * level_stride +
                                       t * token_stride);
  }
  __device__ __forceinline__ float Decay(int t) const {
    return ptx::LoadSharedF32(decay_address + 4 * t);
  }
  // Decay factor from tokens s, s + 1 to the end of their block of 16.
  __device__ __forceinline__ float2 DecayToBlockEnd(int s) const {
    return ptx::LoadSharedF32x2(decay_address + 4 * (kChunk + s));
  }
};

}  // namespace fenwick::cuda::hopper
