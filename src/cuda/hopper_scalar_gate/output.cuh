// Pass 2: the output of one chunk for a run of heads that share q and k,
//
//   o[t] = sum_i (w_i[t] q[t])^T S_i  +  sum_{s in chunk} P[t, s] v[s]
//
// where S_i are the nodes that the chunk reads (slots c, c & (c-1), ...) and
//   w_i[t] = scale * lambda[t, level of node i] * 2^(gap_i + a[t])
// their weights: gap_i is the log2 decay of the nodes between node i and the chunk, a[t] that of
// the chunk through t (pass 0); P see local_scores.cuh. Two consumer warpgroups own 64 rows each.
// They keep q in registers; weighted, it is the A operand of products that all add to one
// accumulator, so the tensor cores work on one product while the operands of the next are weighted.
// Other warpgroups write the next head's P to shared memory and feed tiles through a ring.
#pragma once

#include <cuda.h>

#include "cuda/hopper_scalar_gate/local_scores.cuh"
#include "cuda/hopper_scalar_gate/output_producer.cuh"
#include "cuda/hopper_scalar_gate/output_shape.cuh"
#include "cuda/hopper_scalar_gate/params.h"
#include "cuda/hopper_scalar_gate/store_rows.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/swizzle.cuh"

namespace fenwick::cuda::hopper {

// Consumer: one warpgroup.
template <typename Element, int kKeySize>
struct OutputConsumer {
  using Shape = OutputShape<kKeySize>;
  static constexpr int kSlabs = Shape::kSlabs;
  // A operands of four wgmma steps: 64 columns of weighted q.
  using Operand = std::uint32_t[4][4];

  std::uint32_t shared;
  OutputBarriers<kKeySize> barriers;
  LanePlace at;
  std::uint64_t first_tile;  // descriptor of stage 0
  RingPosition ring;         // next stage to wait for
  int used;                  // next stage to give back
  std::uint32_t q[4 * kSlabs][4];

  // Waits for the next stage; its number.
  __device__ __forceinline__ int WaitStage() {
    const int stage = ring.stage;
    ptx::BarrierWait(barriers.full + 8 * stage, ring.phase);
    ring.Advance(Shape::kStages);
    return stage;
  }
  __device__ __forceinline__ std::uint64_t Tile(int stage) const {
    return first_tile + static_cast<std::uint32_t>(stage * (Shape::kTileBytes / 16));
  }
  // Gives back the stage used longest ago.
  __device__ __forceinline__ void ReleaseStage() {
    ptx::BarrierArriveOnce(barriers.empty + 8 * used);
    if (++used == Shape::kStages) used = 0;
  }

  __device__ __forceinline__ void LoadQueries() {
    const int row = 64 * at.half + 16 * at.warp + MatrixRow(at.lane);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      const std::uint32_t tile = shared + WaitStage() * Shape::kTileBytes;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        ptx::LoadMatrix4(q[4 * slab + j], tile + SwizzledOffset(row, 2 * j + MatrixGroup(at.lane)));
      }
    }
    for (int i = 0; i < kSlabs; ++i) ring.Advance(Shape::kStages);  // k
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

  // Starts o += P V.
  __device__ __forceinline__ void StartLocal(float (&o)[32], std::uint32_t blocks,
                                             std::uint64_t v) {
    const std::uint64_t scores = TileDescriptor(blocks + at.half * Shape::kBlockBytes);
    ptx::PinRegisters(o);
    ptx::WgmmaFence();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      ptx::WgmmaShared<Element, false, true>(o, scores + j * kStepColumns16, v + j * kStepRows16,
                                             true);
    }
    ptx::WgmmaCommit();
    if (at.half == 1) {
      ptx::WgmmaFence();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        ptx::WgmmaShared<Element, false, true>(
            o, scores + Shape::kBlockBytes / 16 + j * kStepColumns16, v + (4 + j) * kStepRows16,
            true);
      }
      ptx::WgmmaCommit();
    }
  }

  // Weights of one node for this lane's two rows, each twice in a register.
  struct NodeWeights {
    std::uint32_t first, second;
  };
  // row: the node's weight of this lane's first row.
  static __device__ __forceinline__ NodeWeights LoadWeights(std::uint32_t row) {
    return {ptx::LoadSharedTwice16(row), ptx::LoadSharedTwice16(row + 16)};
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
    const std::uint32_t staging = shared + Shape::kOut + (4 * at.half + at.warp) * 2048;
    if (at.lane == 0) ptx::WaitStoresRead<0>();
    __syncwarp();
    StorePacked(staging, o, at.lane);
    ptx::FenceAsyncShared();
    __syncwarp();
    StoreRows(target, place, head, value_tile, 64 * at.half + 16 * at.warp, staging, at.lane);
  }

  __device__ __forceinline__ void Run(const CUtensorMap& o_map, const ForwardParams& p) {
    const RowsTarget target{
        &o_map,          p.o,          p.o_batch_stride, p.o_token_stride,
        p.o_head_stride, p.value_size, p.o_mapped,       p.layout.sequences != nullptr};
    ItemReader<kKeySize> items;
    RingPosition scores;
    while (true) {
      const int index = items.Next(shared, barriers);
      if (index < 0) break;
      RunItem(target, scores, p, OutputItem(p, index));
    }
    if (at.lane == 0) ptx::WaitStores<0>();
  }

  __device__ __forceinline__ void RunItem(const RowsTarget& target, RingPosition& scores,
                                          const ForwardParams& p, const OutputItem& item) {
    LoadQueries();
    const int first_head = p.head_begin + item.first_head;
    const int nodes = max(item.nodes, 1);
    std::uint32_t weights;  // of the next node to be prepared
    const auto open_head = [&] {
      ptx::BarrierWait(barriers.weights_full + 8 * scores.stage, scores.phase);
      weights = shared + Shape::kNodeWeights + scores.stage * Shape::kNodeWeightBytes + 2 * at.t0;
    };
    open_head();
    // The scores have been computed: all have read q. (k is given back by those who read it.)
    for (int i = 0; i < kSlabs; ++i) ReleaseStage();
    for (int i = 0; i < kSlabs; ++i) used = used + 1 == Shape::kStages ? 0 : used + 1;

    Operand a0, a1;  // of even and of odd slabs
    float o[32];
    std::uint32_t packed[16];
    NodeWeights w = LoadWeights(weights);
    WeightQueries(a0, 0, w);
    int head = 0, value_tile = 0;
    bool stored = true;
    const auto store_previous = [&] {  // under the first products of the next tile
      if (stored) return;
      const bool crossed = value_tile == 0;
      Store(target, item.place, packed, first_head + head - (crossed ? 1 : 0),
            (crossed ? p.value_tiles : value_tile) - 1);
      stored = true;
    };
    while (true) {
      ptx::PinRegisters(o);
      std::uint32_t node_weights = weights;
#pragma unroll 1
      for (int node = 0; node < nodes; ++node) {
        node_weights += kWeightPitch;
        const NodeWeights next = LoadWeights(node_weights);  // of no use after the last node
        if constexpr (kSlabs == 1) {
          Start(o, a0, Tile(WaitStage()), node > 0);
          store_previous();
          ptx::WgmmaWait<0>();
          ptx::PinRegisters(o);
          ReleaseStage();
          WeightQueries(a0, 0, next);
        } else {
          // One product is in flight all the time: a stage is given back in the next step.
#pragma unroll
          for (int part = 0; part < Shape::kNodeStages; ++part) {
            const std::uint64_t state = Tile(WaitStage());
            const bool first = node + part == 0;
            Start(o, a0, state, !first);
            ptx::WgmmaWait<1>();
            if (!first) ReleaseStage();
            WeightQueries(a1, (2 * part + 1) % kSlabs, w);
            Start(o, a1, state + 4 * kStepRows16, true);
            if (part == 0) store_previous();
            ptx::WgmmaWait<1>();
            if (part + 1 == Shape::kNodeStages) w = next;
            WeightQueries(a0, (2 * part + 2) % kSlabs, w);
          }
        }
      }

      const int v_stage = WaitStage();
      // Each warpgroup for itself: half 1 stores nothing where half 0 has a row to be zeroed.
      if (item.garbage_from < 64 * (at.half + 1)) {
        ZeroRows(shared + v_stage * Shape::kTileBytes, max(item.garbage_from, 64 * at.half),
                 64 * (at.half + 1), threadIdx.x % kWarpgroup, kWarpgroup);
        ptx::FenceAsyncShared();
        ptx::NamedBarrier(1 + at.half, kWarpgroup);
      }
      ptx::BarrierWait(barriers.scores_full + 8 * scores.stage, scores.phase);
      StartLocal(o, shared + Shape::kScores + scores.stage * Shape::kScoreBytes, Tile(v_stage));
      const int scores_used = scores.stage;
      const bool head_done = ++value_tile == p.value_tiles;
      if (head_done) {
        value_tile = 0;
        ++head;
        scores.Advance(Shape::kScoreStages);
        if (head < item.heads) open_head();
      }
      if (head < item.heads) {
        w = LoadWeights(weights);
        WeightQueries(a0, 0, w);
      }
      ptx::WgmmaWait<0>();
      ptx::PinRegisters(o);
      if (kSlabs > 1) ReleaseStage();  // of the last node
      ReleaseStage();
      if (head_done) ptx::BarrierArriveOnce(barriers.scores_empty + 8 * scores_used);
#pragma unroll
      for (int i = 0; i < 16; ++i) packed[i] = Element::Pack(o[2 * i], o[2 * i + 1]);
      stored = false;
      if (head == item.heads) break;
    }
    store_previous();
  }
};

// Grid x: as many blocks as run at once, or fewer; items are taken as blocks become free.
template <typename Element, int kKeySize>
__global__ void __launch_bounds__(OutputShape<kKeySize>::kThreads, 1)
    OutputKernel(const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map,
                 const __grid_constant__ CUtensorMap v_map,
                 const __grid_constant__ CUtensorMap o_map,
                 const __grid_constant__ CUtensorMap scales_map,
                 const __grid_constant__ ForwardParams p, int num_items) {
  using Shape = OutputShape<kKeySize>;
  ptx::AllowNextKernel();
  const std::uint32_t shared = FirstTile();
  const OutputBarriers<kKeySize> barriers(shared);
  if (threadIdx.x == 0) barriers.Init();
  __syncthreads();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int warpgroup = warp / 4;
  if (warpgroup == 2 + Shape::kScoreGroups) {
    ptx::LowerRegisters<Shape::kProducerRegisters>();
    if (warp % 4 == 0 && lane == 0) {
      OutputProducer<kKeySize>{shared, barriers, {}}.Run(q_map, k_map, v_map, p);
    } else if (warp % 4 == 1) {
      OutputHeads<kKeySize>{shared, barriers, lane, {}, {}}.Run(scales_map, p, num_items);
    }
  } else if (warpgroup >= 2) {
    ptx::LowerRegisters<Shape::kScoreRegisters>();
    RunScores<Element, kKeySize>(shared, barriers, p, warpgroup - 2, warp % 4, lane);
  } else {
    ptx::RaiseRegisters<Shape::kConsumerRegisters>();
    OutputConsumer<Element, kKeySize>{
        shared, barriers, LanePlace(warpgroup, warp % 4, lane), TileDescriptor(shared), {}, 0, {}}
        .Run(o_map, p);
  }
}

}  // namespace fenwick::cuda::hopper
