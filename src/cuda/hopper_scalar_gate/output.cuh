// Pass 2: the output of one chunk for a run of heads that share q and k,
//
//   o[t] = sum_{s in chunk} P[t, s] v[s]  +  sum_i w_i[t] * (q[t]^T S_i)
//
// where S_i are the nodes that the chunk reads (slots c, c & (c-1), ...) and w_i their weights
// (weights.cuh). q k^T is computed once and kept in registers. Two consumer warpgroups own 64 rows
// each; a producer warp feeds them.
//
// Ring order, per head and value tile: (S_0, S_1), (V, S_2 if the count is odd), (S, S) ... with at
// least two nodes: missing ones read the empty slot 0 with weight 0. The product with a head's
// first two nodes runs under the weighting of its scores and the previous head's store.
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
#include "cuda/tile/swizzle.cuh"

namespace fenwick::cuda::hopper {

inline constexpr int kOutputThreads = 3 * kWarpgroup;

// Shared memory of the output kernel, as byte offsets.
template <int kKeySize>
struct OutputShape {
  static constexpr int kSlabs = kKeySize / kTileColumns;        // 64-column tiles of q and k
  static constexpr int kSlabBytes = kChunk * kTileRowBytes;     // 16 KB
  static constexpr int kStateBytes = kKeySize * kTileRowBytes;  // one node, one value tile
  static constexpr int kValueBytes = kChunk * kTileRowBytes;
  // A stage holds two nodes, or V and a node, or (the first) k.
  static constexpr int kStageBytes =
      kStateBytes + (kStateBytes > kValueBytes ? kStateBytes : kValueBytes);
  static constexpr int kStages = kKeySize == 256 ? 2 : 4;
  static constexpr int kHeadStages = kKeySize == 256 ? 2 : 4;  // weights of heads in flight
  static constexpr int kRing = kSlabs * kSlabBytes;            // after q
  static constexpr int kHeads = kRing + kStages * kStageBytes;
  static constexpr int kOut = kHeads + kHeadStages * kHeadBytes;  // 2 KB a warp
  static constexpr int kBarriers = kOut + 2 * 8192;
  static constexpr int kSharedBytes = kBarriers + (2 * kStages + 2 * kHeadStages + 1) * 8 + 1024;
  static_assert(kStageBytes >= kSlabs * kSlabBytes, "k passes through the ring");
  static_assert(kSharedBytes <= 232448, "shared memory of an SM");
};

// What both roles know about the block's work.
struct OutputBlock {
  ChunkPlace place;
  int first_head;  // within the head group
  int heads;
  int nodes;         // that the chunk reads
  int padded;        // nodes, at least 2
  int garbage_from;  // rows of the tiles from here on belong to another sequence
  std::size_t chunk;
};

template <int kKeySize>
struct OutputBarriers {
  using Shape = OutputShape<kKeySize>;
  std::uint32_t full, empty, query;
  std::uint32_t head_full, head_empty;  // of the heads' weights
  __device__ __forceinline__ explicit OutputBarriers(std::uint32_t shared)
      : full(shared + Shape::kBarriers),
        empty(full + 8 * Shape::kStages),
        query(empty + 8 * Shape::kStages),
        head_full(query + 8),
        head_empty(head_full + 8 * Shape::kHeadStages) {}
};

// Producer: one thread.
template <int kKeySize>
struct OutputProducer {
  using Shape = OutputShape<kKeySize>;
  std::uint32_t shared;
  OutputBarriers<kKeySize> barriers;
  int iteration = 0;

  // The next stage's barrier, once its previous contents are used up; sets `stage` to its address.
  __device__ __forceinline__ std::uint32_t Acquire(std::uint32_t& stage) {
    const int slot = iteration % Shape::kStages, round = iteration / Shape::kStages;
    if (round > 0) ptx::BarrierWait(barriers.empty + 8 * slot, (round & 1) ^ 1);
    ++iteration;
    stage = shared + Shape::kRing + slot * Shape::kStageBytes;
    return barriers.full + 8 * slot;
  }

  __device__ void Run(const CUtensorMap& q_map, const CUtensorMap& k_map, const CUtensorMap& v_map,
                      const ForwardParams& p, const OutputBlock& block) {
    const int group = (p.head_begin + block.first_head) / p.heads_per_group;
    const ChunkPlace& place = block.place;
    std::uint32_t stage;
    std::uint32_t bar = Acquire(stage);
    ptx::BarrierExpect(barriers.query, Shape::kSlabs * Shape::kSlabBytes);
    ptx::BarrierExpect(bar, Shape::kSlabs * Shape::kSlabBytes);
    for (int i = 0; i < Shape::kSlabs; ++i) {
      ptx::LoadTile(shared + i * Shape::kSlabBytes, &q_map, barriers.query, 64 * i, group,
                    place.token, place.batch);
      ptx::LoadTile(stage + i * Shape::kSlabBytes, &k_map, bar, 64 * i, group, place.token,
                    place.batch);
    }
    const std::size_t chunks = p.layout.num_chunks;
    const std::size_t slot_bytes = static_cast<std::size_t>(p.value_tiles) * Shape::kStateBytes;
    for (int head = 0; head < block.heads; ++head) {
      const std::size_t head_row = (block.first_head + head) * chunks;
      LoadHead(p, block.nodes, head, head_row + block.chunk);
      for (int value_tile = 0; value_tile < p.value_tiles; ++value_tile) {
        const char* states = static_cast<const char*>(p.node_states) +
                             (head_row + place.first_chunk) * slot_bytes +
                             value_tile * Shape::kStateBytes;
        int end = place.index;
        const auto load_node = [&](std::uint32_t to) {
          ptx::LoadBytes(to, states + end * slot_bytes, Shape::kStateBytes, bar);
          end &= end - 1;
        };
        bar = Acquire(stage);
        ptx::BarrierExpect(bar, 2 * Shape::kStateBytes);
        load_node(stage);
        load_node(stage + Shape::kStateBytes);
        bar = Acquire(stage);
        const bool odd = block.padded & 1;
        ptx::BarrierExpect(bar, Shape::kValueBytes + (odd ? Shape::kStateBytes : 0));
        ptx::LoadTile(stage, &v_map, bar, value_tile * kValueTile,
                      p.head_begin + block.first_head + head, place.token, place.batch);
        if (odd) load_node(stage + Shape::kValueBytes);
        for (int i = (block.padded - 2) / 2; i > 0; --i) {
          bar = Acquire(stage);
          ptx::BarrierExpect(bar, 2 * Shape::kStateBytes);
          load_node(stage);
          load_node(stage + Shape::kStateBytes);
        }
      }
    }
    // The consumers' loop runs ahead by one product and one V, whose results are not used.
    for (int i = 0; i < 2; ++i) ptx::BarrierArrive(Acquire(stage));
  }

  __device__ __forceinline__ void LoadHead(const ForwardParams& p, int nodes, int head,
                                           std::size_t record) {
    const int slot = head % Shape::kHeadStages, round = head / Shape::kHeadStages;
    if (round > 0) ptx::BarrierWait(barriers.head_empty + 8 * slot, (round & 1) ^ 1);
    const std::uint32_t bar = barriers.head_full + 8 * slot;
    const std::uint32_t to = shared + Shape::kHeads + slot * kHeadBytes;
    const std::uint32_t weight_bytes = (kLocalLevels + nodes) * kWeightPitch;
    ptx::BarrierExpect(bar, kDecayBytes + weight_bytes);
    ptx::LoadBytes(to, p.local_decay + record * 2 * kChunk, kDecayBytes, bar);
    ptx::LoadBytes(to + kDecayBytes, p.weights + record * p.weight_rows * kChunk, weight_bytes,
                   bar);
  }
};

// o += w * y for the two rows of this lane; y: 32 accumulators of `products` from kFirst.
template <int kFirst>
__device__ __forceinline__ void AddScaled(float (&o)[32], const float (&products)[64], float wa,
                                          float wb) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    o[4 * n] += wa * products[kFirst + 4 * n];
    o[4 * n + 1] += wa * products[kFirst + 4 * n + 1];
    o[4 * n + 2] += wb * products[kFirst + 4 * n + 2];
    o[4 * n + 3] += wb * products[kFirst + 4 * n + 3];
  }
}

// Scores of the warpgroup's rows with the chunk's k (in ring stage 0).
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
  std::uint32_t shared;
  OutputBarriers<kKeySize> barriers;
  LanePlace at;
  std::uint64_t q;    // descriptor of this warpgroup's rows
  int iteration = 0;  // ring stage next to be used
  // Reading position in the nodes of the current head.
  std::uint32_t weight;
  int nodes_left;

  __device__ __forceinline__ std::uint32_t WaitStage() {
    const int slot = iteration % Shape::kStages;
    ptx::BarrierWait(barriers.full + 8 * slot, (iteration / Shape::kStages) & 1);
    ++iteration;
    return shared + Shape::kRing + slot * Shape::kStageBytes;
  }
  __device__ __forceinline__ void ReleaseStage(int used) {
    if (at.lane == 0) ptx::BarrierArrive(barriers.empty + 8 * (used % Shape::kStages));
  }

  static constexpr int kSteps = kKeySize / 16;
  static __device__ __forceinline__ int QueryStep(int j) {
    return (j / 4) * (Shape::kSlabBytes / 16) + (j % 4) * kStepColumns16;
  }

  // Starts products = q (S S') with the two nodes of the next stage.
  __device__ __forceinline__ void StartPair(float (&products)[64]) {
    const std::uint64_t states = TileDescriptor(WaitStage(), Shape::kStateBytes);
    ptx::PinRegisters(products);
    ptx::WgmmaFence();
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      ptx::WgmmaShared<Element, false, true>(products, q + QueryStep(j), states + j * kStepRows16,
                                             j > 0);
    }
    ptx::WgmmaCommit();
  }

  // The same for one node, into the first half of `products`.
  __device__ __forceinline__ void StartSingle(float (&products)[64], std::uint32_t state) {
    const std::uint64_t states = TileDescriptor(state);
    ptx::PinRegisters(products);
    ptx::WgmmaFence();
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      ptx::WgmmaShared<Element, false, true>(reinterpret_cast<float(&)[32]>(products),
                                             q + QueryStep(j), states + j * kStepRows16, j > 0);
    }
    ptx::WgmmaCommit();
  }

  // Weights of the next node for this lane's two rows; 0 once all nodes are read.
  __device__ __forceinline__ float2 NextWeights() {
    // Loaded even where not used: selecting is cheaper than branching while wgmma runs.
    float2 w = make_float2(ptx::LoadSharedBF16(weight), ptx::LoadSharedBF16(weight + 16));
    w.x = nodes_left > 0 ? w.x : 0.f;
    w.y = nodes_left > 0 ? w.y : 0.f;
    --nodes_left;
    weight += kWeightPitch;
    return w;
  }

  // o = P V. V's rows from `valid` on are zeroed first.
  __device__ __forceinline__ void StartLocal(float (&o)[32], LocalWeights& weights,
                                             std::uint32_t v_tile, int valid) {
    if (valid < kChunk) {
      ZeroRows(v_tile, valid, 64 * (at.warpgroup + 1), threadIdx.x % kWarpgroup, kWarpgroup);
      ptx::FenceAsyncShared();
      ptx::NamedBarrier(1 + at.warpgroup, kWarpgroup);
    }
    const std::uint64_t v = TileDescriptor(v_tile);
    ptx::PinRegisters(o);
    ptx::PinRegisters(weights.own);
    ptx::PinRegisters(weights.left);
    ptx::WgmmaFence();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      ptx::WgmmaRegisters<Element, true>(o, weights.own[j],
                                         v + (4 * at.warpgroup + j) * kStepRows16, j > 0);
    }
    ptx::WgmmaCommit();
    if (at.warpgroup == 1) {
      ptx::WgmmaFence();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        ptx::WgmmaRegisters<Element, true>(o, weights.left[j], v + j * kStepRows16, true);
      }
      ptx::WgmmaCommit();
    }
  }

  // Stores the warp's 16 rows of o.
  __device__ __forceinline__ void Store(const RowsTarget& target, const ChunkPlace& place,
                                        const float (&o)[32], int head, int value_tile) {
    const std::uint32_t staging = shared + Shape::kOut + at.warpgroup * 8192 + at.warp * 2048;
    if (at.lane == 0) ptx::WaitStoresRead<0>();
    __syncwarp();
    StoreAccumulator<Element>(staging, o, at.lane);
    ptx::FenceAsyncShared();
    __syncwarp();
    StoreRows(target, place, head, value_tile, 64 * at.warpgroup + 16 * at.warp, staging, at.lane);
  }

  __device__ __forceinline__ void Run(const CUtensorMap& o_map, const ForwardParams& p,
                                      const OutputBlock& block) {
    const RowsTarget target{
        &o_map,          p.o,          p.o_batch_stride, p.o_token_stride,
        p.o_head_stride, p.value_size, p.o_mapped,       p.layout.sequences != nullptr};
    LocalScores scores;
    ptx::BarrierWait(barriers.query, 0);
    const std::uint32_t k_tile = WaitStage();
    ComputeScores<Element, kKeySize>(scores, q, k_tile, at);
    ReleaseStage(0);

    float products[64], o[32];
    int head = 0, value_tile = -1;
    while (true) {
      const bool started = value_tile >= 0;
      if (started) {
#pragma unroll 1
        for (int i = (block.padded - 2) / 2; i > 0; --i) {
          const int used = iteration;
          StartPair(products);
          const float2 w = NextWeights(), x = NextWeights();
          ptx::WgmmaWait<0>();
          ptx::PinRegisters(products);
          ReleaseStage(used);
          AddScaled<0>(o, products, w.x, w.y);
          AddScaled<32>(o, products, x.x, x.y);
          ptx::PinRegisters(o);
        }
        if (value_tile == p.value_tiles - 1) {
          __syncwarp();
          if (at.lane == 0) {
            ptx::BarrierArrive(barriers.head_empty + 8 * (head % Shape::kHeadStages));
          }
        }
      }
      const int used_pair = iteration;
      StartPair(products);
      if (started)
        Store(target, block.place, o, p.head_begin + block.first_head + head, value_tile);
      if (++value_tile == p.value_tiles) {
        value_tile = 0;
        ++head;
      }
      const int head_slot = head % Shape::kHeadStages;
      if (value_tile == 0 && head < block.heads) {
        ptx::BarrierWait(barriers.head_full + 8 * head_slot, (head / Shape::kHeadStages) & 1);
      }
      const std::uint32_t base = shared + Shape::kHeads + head_slot * kHeadBytes;
      LocalWeights weights;
      WeightScores<Element>(weights, scores, HeadWeights{base + kDecayBytes, base}, at);

      const int used_v = iteration;
      const std::uint32_t v_stage = WaitStage();
      StartLocal(o, weights, v_stage, block.garbage_from);
      weight = base + kDecayBytes + kLocalLevels * kWeightPitch + 2 * at.t0;
      nodes_left = block.nodes;
      {
        const float2 w = NextWeights(), x = NextWeights();
        ptx::WgmmaWait<0>();
        ptx::PinRegisters(o);
        ptx::PinRegisters(products);
        ReleaseStage(used_pair);
        AddScaled<0>(o, products, w.x, w.y);
        AddScaled<32>(o, products, x.x, x.y);
        ptx::PinRegisters(o);
      }
      if (block.padded & 1) {
        StartSingle(products, v_stage + Shape::kValueBytes);
        const float2 w = NextWeights();
        ptx::WgmmaWait<0>();
        ptx::PinRegisters(products);
        AddScaled<0>(o, products, w.x, w.y);
        ptx::PinRegisters(o);
      }
      ReleaseStage(used_v);
      if (head == block.heads) break;  // that round computed nothing: see the producer
    }
    if (at.lane == 0) ptx::WaitStores<0>();
  }
};

template <typename Element, int kKeySize>
__global__ void __launch_bounds__(kOutputThreads, 1)
    OutputKernel(const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map,
                 const __grid_constant__ CUtensorMap v_map,
                 const __grid_constant__ CUtensorMap o_map,
                 const __grid_constant__ ForwardParams p) {
  using Shape = OutputShape<kKeySize>;
  ptx::AllowNextKernel();
  extern __shared__ char raw[];
  const std::uint32_t shared = (ptx::SharedAddress(raw) + 1023) & ~1023u;
  const OutputBarriers<kKeySize> barriers(shared);
  if (threadIdx.x == 0) {
    ptx::BarrierInit(barriers.query, 1);
    for (int i = 0; i < Shape::kStages; ++i) {
      ptx::BarrierInit(barriers.full + 8 * i, 1);
      ptx::BarrierInit(barriers.empty + 8 * i, 8);
    }
    for (int i = 0; i < Shape::kHeadStages; ++i) {
      ptx::BarrierInit(barriers.head_full + 8 * i, 1);
      ptx::BarrierInit(barriers.head_empty + 8 * i, 8);
    }
    ptx::BarrierInitFence();
  }
  ptx::WaitForPreviousKernel();

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
  block.padded = max(block.nodes, 2);

  block.garbage_from = p.layout.sequences == nullptr ? kChunk : block.place.valid;

  __syncthreads();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp >= 8) {
    ptx::LowerRegisters<24>();
    if (warp == 8 && lane == 0) {
      OutputProducer<kKeySize>{shared, barriers}.Run(q_map, k_map, v_map, p, block);
    }
    return;
  }
  ptx::RaiseRegisters<240>();
  const int warpgroup = warp / 4;
  const LanePlace at{warpgroup, warp % 4, lane,
                     lane >> 2, lane & 3, 64 * warpgroup + 16 * (warp % 4) + (lane >> 2)};
  OutputConsumer<Element, kKeySize>{shared, barriers, at,
                                    TileDescriptor(shared + warpgroup * 64 * kTileRowBytes)}
      .Run(o_map, p, block);
}

}  // namespace fenwick::cuda::hopper
