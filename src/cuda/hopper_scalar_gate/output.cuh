// Pass 2: the output of one chunk for a run of heads that share q and k,
//
//   o[t] = sum_i (w_i[t] q[t])^T S_i  +  sum_{s in chunk} P[t, s] v[s]
//
// where S_i are the nodes that the chunk reads (slots c, c & (c-1), ...) and
//   w_i[t] = scale * lambda[t, level of node i] * 2^(gap_i + a[t])
// their weights: gap_i is the log2 decay of the nodes between node i and the chunk, a[t] that of
// the chunk through t (pass 0). q and the scores q k^T stay in registers; weighted, they are the A
// operands of products that all add to one accumulator, so the tensor cores work on one product
// while the operands of the next are weighted. Two consumer warpgroups own 64 rows each; a producer
// warp streams tiles through a ring, another one sums the gaps.
//
// Ring order: q, k; then for each head and value tile its nodes (at least one: without any, the
// empty slot 0 with weight 0) and V.
#pragma once

#include <cuda.h>

#include "cuda/hopper_scalar_gate/layout.cuh"
#include "cuda/hopper_scalar_gate/local_scores.cuh"
#include "cuda/hopper_scalar_gate/params.h"
#include "cuda/hopper_scalar_gate/store_rows.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/swizzle.cuh"

namespace fenwick::cuda::hopper {

inline constexpr int kOutputThreads = 3 * kWarpgroup;

// Shared memory of the output kernel, as byte offsets.
template <int kKeySize>
struct OutputShape {
  static constexpr int kSlabs = kKeySize / kTileColumns;     // 64-column tiles of q and k
  static constexpr int kSlabBytes = kChunk * kTileRowBytes;  // 16 KB, as a value tile
  static constexpr int kStateBytes = kKeySize * kTileRowBytes;
  // A stage holds one node, one value tile, or one or two slabs of q or k.
  static constexpr int kStageBytes = kStateBytes > kSlabBytes ? kStateBytes : kSlabBytes;
  static constexpr int kStages = (128 << 10) / kStageBytes;
  static constexpr int kSlabsPerStage = kStageBytes / kSlabBytes;
  static constexpr int kQueryStages = kSlabs / kSlabsPerStage;
  static constexpr int kHeadStages = 4;  // heads whose decays are in flight
  static constexpr int kHeadBytes = kDecayBytes + 4 * kMaxNodes;  // local_decay, gaps
  static constexpr int kOut = kStages * kStageBytes;              // 2 KB a warp, swizzled
  static constexpr int kScales = kOut + 8 * 2048;
  static constexpr int kHeads = kScales + kScalesBytes;
  static constexpr int kNodeOffsets = kHeads + kHeadStages * kHeadBytes;  // [kMaxNodes]
  static constexpr int kBarriers = kNodeOffsets + 4 * kMaxNodes;
  static constexpr int kNumBarriers = 2 * (kStages + kHeadStages + kMaxScalesStages);
  static constexpr int kSharedBytes = kBarriers + 8 * kNumBarriers + 1024;
  static_assert(kStages >= 2 * kQueryStages, "q and k pass through the ring");
  static_assert(kSharedBytes <= 232448, "shared memory of an SM");
};

// What all roles know about the block's work.
struct OutputBlock {
  ChunkPlace place;
  int first_head;  // within the head group
  int heads;
  int nodes;         // that the chunk reads
  int garbage_from;  // rows of the tiles from here on belong to another sequence
  std::size_t chunk;
};

// Pairs of barriers, full and empty, of the three rings: tiles, heads' decays, level scales.
template <int kKeySize>
struct OutputBarriers {
  using Shape = OutputShape<kKeySize>;
  std::uint32_t full, empty, head_full, head_empty, scales_full, scales_empty;
  __device__ __forceinline__ explicit OutputBarriers(std::uint32_t shared)
      : full(shared + Shape::kBarriers),
        empty(full + 8 * Shape::kStages),
        head_full(empty + 8 * Shape::kStages),
        head_empty(head_full + 8 * Shape::kHeadStages),
        scales_full(head_empty + 8 * Shape::kHeadStages),
        scales_empty(scales_full + 8 * kMaxScalesStages) {}

  __device__ __forceinline__ void Init() const {
    for (int i = 0; i < Shape::kStages; ++i) {
      ptx::BarrierInit(full + 8 * i, 1);
      ptx::BarrierInit(empty + 8 * i, 8);
    }
    for (int i = 0; i < Shape::kHeadStages; ++i) {
      ptx::BarrierInit(head_full + 8 * i, 2);  // decays by the copy engine, gaps by a warp
      ptx::BarrierInit(head_empty + 8 * i, 8);
    }
    for (int i = 0; i < kMaxScalesStages; ++i) {
      ptx::BarrierInit(scales_full + 8 * i, 1);
      ptx::BarrierInit(scales_empty + 8 * i, 8);
    }
    ptx::BarrierInitFence();
  }
};

// Where the level scales of the block's heads come from: tiles of scales_tile_heads heads, or rows
// of weights, one head a tile.
struct ScalesTiles {
  int heads;   // of a tile
  int bytes;   // of a stage
  int stages;  // in flight
  __device__ __forceinline__ explicit ScalesTiles(const ForwardParams& p) {
    const bool tiled = p.scales_tile_heads != 0;
    heads = tiled ? p.scales_tile_heads : 1;
    bytes = tiled ? heads * p.levels * 2 * kChunk : p.weight_rows * kWeightPitch;
    bytes = (bytes + 127) & ~127;
    stages = min(kMaxScalesStages, kScalesBytes / bytes);
  }
};

// Producer of the tiles: one thread.
template <int kKeySize>
struct OutputProducer {
  using Shape = OutputShape<kKeySize>;
  std::uint32_t shared;
  OutputBarriers<kKeySize> barriers;
  RingPosition ring, scales;

  // The next stage's barrier, once its previous contents are used up; sets `stage` to its address.
  __device__ __forceinline__ std::uint32_t Acquire(std::uint32_t& stage) {
    const std::uint32_t bar = barriers.full + 8 * ring.stage;
    ptx::BarrierWait(barriers.empty + 8 * ring.stage, ring.phase ^ 1);
    stage = shared + ring.stage * Shape::kStageBytes;
    ring.Advance(Shape::kStages);
    return bar;
  }

  __device__ __forceinline__ void LoadSlabs(const CUtensorMap& map, int group,
                                            const ChunkPlace& place) {
    for (int slab = 0; slab < Shape::kSlabs; slab += Shape::kSlabsPerStage) {
      std::uint32_t stage;
      const std::uint32_t bar = Acquire(stage);
      ptx::BarrierExpect(bar, Shape::kSlabsPerStage * Shape::kSlabBytes);
      for (int i = 0; i < Shape::kSlabsPerStage; ++i) {
        ptx::LoadTile(stage + i * Shape::kSlabBytes, &map, bar, 64 * (slab + i), group, place.token,
                      place.batch);
      }
    }
  }

  __device__ void Run(const CUtensorMap& q_map, const CUtensorMap& k_map, const CUtensorMap& v_map,
                      const CUtensorMap& scales_map, const ForwardParams& p,
                      const OutputBlock& block) {
    const int first_head = p.head_begin + block.first_head;
    const ChunkPlace& place = block.place;
    LoadSlabs(q_map, first_head / p.heads_per_group, place);
    LoadSlabs(k_map, first_head / p.heads_per_group, place);
    ptx::WaitForPreviousKernel();

    const ScalesTiles tiles(p);
    const std::size_t chunks = p.layout.num_chunks;
    const std::size_t slot_bytes = static_cast<std::size_t>(p.value_tiles) * Shape::kStateBytes;
    RingPosition decays;
    for (int head = 0; head < block.heads; ++head) {
      const std::size_t head_row = (block.first_head + head) * chunks;
      const std::size_t record = head_row + block.chunk;
      ptx::BarrierWait(barriers.head_empty + 8 * decays.stage, decays.phase ^ 1);
      const std::uint32_t head_full = barriers.head_full + 8 * decays.stage;
      ptx::BarrierExpect(head_full, kDecayBytes);
      ptx::LoadBytes(shared + Shape::kHeads + decays.stage * Shape::kHeadBytes,
                     p.local_decay + record * 2 * kChunk, kDecayBytes, head_full);
      decays.Advance(Shape::kHeadStages);
      if (head == 0 || (first_head + head) % tiles.heads == 0) {
        LoadScales(scales_map, p, tiles, block, first_head + head, record);
      }
      for (int value_tile = 0; value_tile < p.value_tiles; ++value_tile) {
        const char* states = static_cast<const char*>(p.node_states) +
                             (head_row + place.first_chunk) * slot_bytes +
                             value_tile * Shape::kStateBytes;
        std::uint32_t stage, bar;
        int end = place.index;
        do {
          bar = Acquire(stage);
          ptx::BarrierExpect(bar, Shape::kStateBytes);
          ptx::LoadBytes(stage, states + end * slot_bytes, Shape::kStateBytes, bar);
          end &= end - 1;
        } while (end != 0);
        bar = Acquire(stage);
        ptx::BarrierExpect(bar, Shape::kSlabBytes);
        ptx::LoadTile(stage, &v_map, bar, value_tile * kValueTile, first_head + head, place.token,
                      place.batch);
      }
    }
  }

  // head: of all heads; record: of its weights.
  __device__ __forceinline__ void LoadScales(const CUtensorMap& map, const ForwardParams& p,
                                             const ScalesTiles& tiles, const OutputBlock& block,
                                             int head, std::size_t record) {
    ptx::BarrierWait(barriers.scales_empty + 8 * scales.stage, scales.phase ^ 1);
    const std::uint32_t bar = barriers.scales_full + 8 * scales.stage;
    const std::uint32_t to = shared + Shape::kScales + scales.stage * tiles.bytes;
    scales.Advance(tiles.stages);
    if (p.scales_tile_heads != 0) {
      ptx::BarrierExpect(bar, tiles.heads * p.levels * 2 * kChunk);
      ptx::LoadTile(to, &map, bar, head / tiles.heads * tiles.heads * p.levels, 0,
                    block.place.token, block.place.batch);
    } else {
      const std::uint32_t bytes = (kLocalLevels + block.nodes) * kWeightPitch;
      ptx::BarrierExpect(bar, bytes);
      ptx::LoadBytes(to, p.weights + record * p.weight_rows * kChunk, bytes, bar);
    }
  }
};

// Sums the gaps of each head's nodes: one warp.
template <int kKeySize>
__device__ __forceinline__ void SumGaps(std::uint32_t shared,
                                        const OutputBarriers<kKeySize>& barriers,
                                        const ForwardParams& p, const OutputBlock& block,
                                        int lane) {
  using Shape = OutputShape<kKeySize>;
  ptx::WaitForPreviousKernel();
  int end = block.place.index;
  for (int i = 0; i < lane; ++i) end &= end - 1;  // this lane's node
  const float* decay = p.node_decay +
                       static_cast<std::size_t>(block.first_head) * p.layout.num_chunks +
                       block.place.first_chunk + end;
  RingPosition slot;
  for (int head = 0; head < block.heads; ++head) {
    // Rows of weights have the gaps in them.
    const float own = p.scales_tile_heads != 0 && end != 0 ? *decay : 0.f;
    decay += p.layout.num_chunks;
    float sum = own;
#pragma unroll
    for (int step = 1; step < kMaxNodes; step <<= 1) {
      const float before = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += before;
    }
    const float before = __shfl_up_sync(~0u, sum, 1);
    ptx::BarrierWait(barriers.head_empty + 8 * slot.stage, slot.phase ^ 1);
    if (lane < kMaxNodes) {
      ptx::StoreSharedF32(
          shared + Shape::kHeads + slot.stage * Shape::kHeadBytes + kDecayBytes + 4 * lane,
          lane == 0 ? 0.f : before);
    }
    __syncwarp();
    if (lane == 0) ptx::BarrierArrive(barriers.head_full + 8 * slot.stage);
    slot.Advance(Shape::kHeadStages);
  }
}

// Scores of the warpgroup's rows with the chunk's k.
template <typename Element, int kKeySize>
__device__ __forceinline__ void ComputeScores(LocalScores& scores, std::uint64_t q,
                                              std::uint32_t k_tile, const LanePlace& at) {
  float s[32];
#pragma unroll 1
  for (int own = 0; own < 2; ++own) {  // keys 0..63, then the warpgroup's own
    const std::uint64_t k = TileDescriptor(k_tile + own * at.warpgroup * 64 * kTileRowBytes);
    constexpr int kSlabStep = kChunk * kTileRowBytes / 16;
    ptx::WgmmaFence();
#pragma unroll
    for (int j = 0; j < kKeySize / 16; ++j) {
      const int step = (j / 4) * kSlabStep + (j % 4) * kStepColumns16;
      ptx::WgmmaShared<Element, false, false>(s, q + step, k + step, j > 0);
    }
    ptx::WgmmaCommit();
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(s);
    if (own == 0) {
#pragma unroll
      for (int i = 0; i < 16; ++i) scores.left[i] = Element::Pack(s[2 * i], s[2 * i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < 12; ++i) scores.below[i] = Element::Pack(s[2 * i], s[2 * i + 1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (at.warp == j) {
          scores.corner[0] = Element::Pack(s[8 * j], s[8 * j + 1]);
          scores.corner[1] = Element::Pack(s[8 * j + 2], s[8 * j + 3]);
          scores.corner[2] = Element::Pack(s[8 * j + 6], s[8 * j + 7]);
        }
      }
    }
  }
}

// Consumer: one warpgroup.
template <typename Element, int kKeySize>
struct OutputConsumer {
  using Shape = OutputShape<kKeySize>;
  static constexpr int kSlabs = Shape::kSlabs;
  // A operands of four wgmma steps: 64 columns of weighted q, or 64 keys of P.
  using Operand = std::uint32_t[4][4];

  std::uint32_t shared;
  OutputBarriers<kKeySize> barriers;
  LanePlace at;
  RingPosition ring;
  std::uint32_t q[4 * kSlabs][4];
  LocalScores scores;

  __device__ __forceinline__ std::uint32_t WaitStage() const {
    ptx::BarrierWait(barriers.full + 8 * ring.stage, ring.phase);
    return shared + ring.stage * Shape::kStageBytes;
  }
  // Gives back the stage that was waited for and moves on.
  __device__ __forceinline__ void ReleaseStage() {
    if (at.lane == 0) ptx::BarrierArrive(barriers.empty + 8 * ring.stage);
    ring.Advance(Shape::kStages);
  }

  // Reads q and k: the operands of everything that follows.
  __device__ __forceinline__ void LoadQueries() {
    for (int i = 0; i < 2 * Shape::kQueryStages; ++i) {
      ptx::BarrierWait(barriers.full + 8 * i, 0);
    }
    const int row = 64 * at.warpgroup + 16 * at.warp + MatrixRow(at.lane);
#pragma unroll
    for (int j = 0; j < 4 * kSlabs; ++j) {
      ptx::LoadMatrix4(q[j], shared + j / 4 * Shape::kSlabBytes +
                                 SwizzledOffset(row, 2 * (j % 4) + MatrixGroup(at.lane)));
    }
    ComputeScores<Element, kKeySize>(scores,
                                     TileDescriptor(shared + 64 * at.warpgroup * kTileRowBytes),
                                     shared + kSlabs * Shape::kSlabBytes, at);
    for (int i = 0; i < 2 * Shape::kQueryStages; ++i) ReleaseStage();
  }

  // Starts o (+)= a B, B being 64 rows of a tile.
  __device__ __forceinline__ void Start(float (&o)[32], Operand& a, std::uint64_t rows,
                                        bool accumulate) {
    ptx::PinRegisters(a);
    ptx::WgmmaFence();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      ptx::WgmmaRegisters<Element, true>(o, a[j], rows + j * kStepRows16, accumulate || j > 0);
    }
    ptx::WgmmaCommit();
  }

  // Weights of one node for this lane's two rows, each twice in a register.
  struct NodeWeights {
    std::uint32_t first, second;
  };
  struct Head {
    HeadWeights weights;
    float a_first, a_second;  // log2 decays through the lane's rows; 0 if the weights have them
  };
  __device__ __forceinline__ NodeWeights WeightsOfNode(const Head& head, int node,
                                                       int nodes) const {
    const float gap = ptx::LoadSharedF32(head.weights.decay + kDecayBytes + 4 * node);
    const std::uint32_t lambda = head.weights.scales +
                                 ptx::LoadSharedU32(shared + Shape::kNodeOffsets + 4 * node) +
                                 at.t0 * head.weights.token_stride;
    float first = ptx::LoadSharedBF16(lambda) * head.weights.scale;
    float second = ptx::LoadSharedBF16(lambda + 8 * head.weights.token_stride) * head.weights.scale;
    first *= ptx::Exp2(head.a_first + gap);
    second *= ptx::Exp2(head.a_second + gap);
    if (nodes == 0) first = second = 0;
    return {Element::Pack(first, first), Element::Pack(second, second)};
  }

  // 64 columns of q, weighted.
  __device__ __forceinline__ void WeightQueries(Operand& a, int slab, const NodeWeights& w) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      a[j][0] = Element::Multiply(q[4 * slab + j][0], w.first);
      a[j][1] = Element::Multiply(q[4 * slab + j][1], w.second);
      a[j][2] = Element::Multiply(q[4 * slab + j][2], w.first);
      a[j][3] = Element::Multiply(q[4 * slab + j][3], w.second);
    }
    ptx::PinRegisters(a);
  }

  // Stores the warp's 16 rows of o.
  __device__ __forceinline__ void Store(const RowsTarget& target, const ChunkPlace& place,
                                        const std::uint32_t (&o)[16], int head, int value_tile) {
    const std::uint32_t staging = shared + Shape::kOut + (4 * at.warpgroup + at.warp) * 2048;
    if (at.lane == 0) ptx::WaitStoresRead<0>();
    __syncwarp();
    StorePacked(staging, o, at.lane);
    ptx::FenceAsyncShared();
    __syncwarp();
    StoreRows(target, place, head, value_tile, 64 * at.warpgroup + 16 * at.warp, staging, at.lane);
  }

  __device__ __forceinline__ void Run(const CUtensorMap& o_map, const ForwardParams& p,
                                      const OutputBlock& block) {
    const RowsTarget target{
        &o_map,          p.o,          p.o_batch_stride, p.o_token_stride,
        p.o_head_stride, p.value_size, p.o_mapped,       p.layout.sequences != nullptr};
    LoadQueries();

    const bool tiled = p.scales_tile_heads != 0;
    const ScalesTiles tiles(p);
    const int first_head = p.head_begin + block.first_head;
    RingPosition decays, scales;
    Head head;
    head.weights.level_stride = tiled ? 2 : kWeightPitch;
    head.weights.token_stride = tiled ? 2 * tiles.heads * p.levels : 2;
    head.weights.last_level = tiled ? p.levels - 1 : kLocalLevels - 1;
    head.weights.scale = tiled ? p.scale : 1.f;
    const auto open_head = [&](int index) {
      ptx::BarrierWait(barriers.head_full + 8 * decays.stage, decays.phase);
      const int in_tile = (first_head + index) % tiles.heads;
      if (index == 0 || in_tile == 0) {
        ptx::BarrierWait(barriers.scales_full + 8 * scales.stage, scales.phase);
      }
      head.weights.decay = shared + Shape::kHeads + decays.stage * Shape::kHeadBytes;
      head.weights.scales =
          shared + Shape::kScales + scales.stage * tiles.bytes + in_tile * 2 * p.levels;
      head.a_first = tiled ? head.weights.Decay(at.t0) : 0.f;
      head.a_second = tiled ? head.weights.Decay(at.t0 + 8) : 0.f;
    };
    const auto close_head = [&](int index) {
      const bool tile_done =
          index + 1 == block.heads || (first_head + index + 1) % tiles.heads == 0;
      __syncwarp();
      if (at.lane == 0) {
        ptx::BarrierArrive(barriers.head_empty + 8 * decays.stage);
        if (tile_done) ptx::BarrierArrive(barriers.scales_empty + 8 * scales.stage);
      }
      decays.Advance(Shape::kHeadStages);
      if (tile_done) scales.Advance(tiles.stages);
    };

    // a0 takes even slabs and the keys 0..63, a1 odd slabs and the warpgroup's own keys.
    Operand a0, a1;
    float o[32];
    std::uint32_t packed[16];
    open_head(0);
    NodeWeights w = WeightsOfNode(head, 0, block.nodes);
    WeightQueries(a0, 0, w);
    int index = 0, value_tile = 0;
    bool stored = true;
    while (true) {
#pragma unroll 1
      for (int node = 0; node < max(block.nodes, 1); ++node) {
        const std::uint64_t state = TileDescriptor(WaitStage());
        ptx::PinRegisters(o);
        Start(o, a0, state, node > 0);
        if (!stored) {  // under the first product of the next tile
          const int before = value_tile == 0 ? index - 1 : index;
          Store(target, block.place, packed, first_head + before,
                value_tile == 0 ? p.value_tiles - 1 : value_tile - 1);
          stored = true;
        }
#pragma unroll
        for (int slab = 1; slab < kSlabs; ++slab) {
          if (slab >= 2) ptx::WgmmaWait<1>();
          Operand& a = slab % 2 == 0 ? a0 : a1;
          WeightQueries(a, slab, w);
          Start(o, a, state + slab * 4 * kStepRows16, true);
        }
        if (kSlabs > 1) ptx::WgmmaWait<1>();
        Operand& next = kSlabs > 1 ? a0 : a1;
        if (node + 1 < block.nodes) {
          w = WeightsOfNode(head, node + 1, block.nodes);
          WeightQueries(next, 0, w);
        } else if (at.warpgroup == 1) {
          WeightLeft<Element>(next, scores, head.weights, at);
          ptx::PinRegisters(next);
        }
        ptx::WgmmaWait<0>();
        ptx::PinRegisters(o);
        ReleaseStage();
        if (kSlabs == 1) {
          Copy(a0, a1);
          ptx::PinRegisters(a0);
        }
      }

      const std::uint32_t v_tile = WaitStage();
      if (block.garbage_from < kChunk) {
        ZeroRows(v_tile, block.garbage_from, 64 * (at.warpgroup + 1), threadIdx.x % kWarpgroup,
                 kWarpgroup);
        ptx::FenceAsyncShared();
        ptx::NamedBarrier(1 + at.warpgroup, kWarpgroup);
      }
      const std::uint64_t v = TileDescriptor(v_tile);
      if (at.warpgroup == 1) Start(o, a0, v, true);
      WeightOwn<Element>(a1, scores, head.weights, at);
      Start(o, a1, v + 4 * at.warpgroup * kStepRows16, true);
      bool more = true;
      if (++value_tile == p.value_tiles) {
        value_tile = 0;
        close_head(index);
        more = ++index < block.heads;
        if (more) open_head(index);
      }
      if (more) {
        w = WeightsOfNode(head, 0, block.nodes);
        ptx::WgmmaWait<1>();
        WeightQueries(a0, 0, w);
      }
      ptx::WgmmaWait<0>();
      ptx::PinRegisters(o);
      ReleaseStage();
#pragma unroll
      for (int i = 0; i < 16; ++i) packed[i] = Element::Pack(o[2 * i], o[2 * i + 1]);
      stored = false;
      if (!more) break;
    }
    Store(target, block.place, packed, first_head + block.heads - 1, p.value_tiles - 1);
    if (at.lane == 0) ptx::WaitStores<0>();
  }

  static __device__ __forceinline__ void Copy(Operand& to, const Operand& from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) to[i][j] = from[i][j];
    }
  }
};

template <typename Element, int kKeySize>
__global__ void __launch_bounds__(kOutputThreads, 1)
    OutputKernel(const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map,
                 const __grid_constant__ CUtensorMap v_map,
                 const __grid_constant__ CUtensorMap o_map,
                 const __grid_constant__ CUtensorMap scales_map,
                 const __grid_constant__ ForwardParams p) {
  using Shape = OutputShape<kKeySize>;
  ptx::AllowNextKernel();
  extern __shared__ char raw[];
  const std::uint32_t shared = (ptx::SharedAddress(raw) + 1023) & ~1023u;
  const OutputBarriers<kKeySize> barriers(shared);

  // Blocks of one chunk never mix q/k groups: heads are cut in runs within each group.
  OutputBlock block;
  block.chunk = blockIdx.x % p.layout.num_chunks;
  const int run = blockIdx.x / p.layout.num_chunks;
  const int heads_in_group = min(p.heads_per_group, p.num_heads);
  const int runs_per_group = DivideUp(heads_in_group, p.heads_per_block);
  const int first_in_group = run % runs_per_group * p.heads_per_block;
  block.first_head = run / runs_per_group * heads_in_group + first_in_group;
  block.heads = min(p.heads_per_block, heads_in_group - first_in_group);
  block.place = PlaceOfChunk(p.layout, static_cast<int>(block.chunk));
  block.nodes = __popc(block.place.index);
  block.garbage_from = p.layout.sequences == nullptr ? kChunk : block.place.valid;

  if (threadIdx.x == 0) barriers.Init();
  if (threadIdx.x < kMaxNodes) {  // where the scales of the nodes lie within their head's
    int rest = block.place.index;
    for (int i = 0; i < static_cast<int>(threadIdx.x); ++i) rest &= rest - 1;
    const int offset = p.scales_tile_heads == 0
                           ? (kLocalLevels + static_cast<int>(threadIdx.x)) * kWeightPitch
                           : 2 * min(kLogChunk + __ffs(rest), p.levels - 1);
    ptx::StoreSharedU32(shared + Shape::kNodeOffsets + 4 * threadIdx.x, offset);
  }
  __syncthreads();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp >= 8) {
    ptx::LowerRegisters<40>();
    if (warp == 8 && lane == 0) {
      OutputProducer<kKeySize>{shared, barriers, {}, {}}.Run(q_map, k_map, v_map, scales_map, p,
                                                             block);
    } else if (warp == 9) {
      SumGaps<kKeySize>(shared, barriers, p, block, lane);
    }
    return;
  }
  ptx::RaiseRegisters<232>();
  const int warpgroup = warp / 4;
  OutputConsumer<Element, kKeySize> consumer{shared, barriers};
  consumer.at = {warpgroup, warp % 4, lane,
                 lane >> 2, lane & 3, 64 * warpgroup + 16 * (warp % 4) + (lane >> 2)};
  consumer.Run(o_map, p, block);
}

}  // namespace fenwick::cuda::hopper
