// Backward pass 5: what a chunk's reads of its nodes give to q and to the level scales. With
// Y_i = dO S_i^T, one product for each node and value tile,
//   dq += w_i o Y_i,     d(scale lambda)[t, level of node i] = 2^(gap_i + a[t]) q[t] . Y_i[t].
// q and the fragments of dO stay in registers; Y comes in two halves of 64 columns, one in flight
// while the other is used.
#pragma once

#include <cuda.h>

#include "cuda/hopper_scalar_gate/backward_params.h"
#include "cuda/hopper_scalar_gate/head_runs.cuh"
#include "cuda/hopper_scalar_gate/layout.cuh"
#include "cuda/hopper_scalar_gate/segment_reads.cuh"

namespace fenwick::cuda::hopper {

struct NodeGradsShape {
  static constexpr int kNodeStages = 6;
  static constexpr int kHeadStages = 4;
  static constexpr int kDecay = kTileBytes;  // after dO: a[128] floats, then the weight rows
  static constexpr int kRows = kDecay + kChunk * 4;
  static constexpr int kHeadBytes = 21 * 1024;
  static_assert(kRows + kMaxNodes * kChunk * 2 <= kHeadBytes);
  static constexpr int kHeads = 2 * kTileBytes;  // after q
  static constexpr int kNodes = kHeads + kHeadStages * kHeadBytes;
  static constexpr int kGaps = kNodes + kNodeStages * kTileBytes;  // [heads][kMaxNodes]
  static constexpr int kBarriers = kGaps + kMaxHeadsPerBlock * kMaxNodes * 4;
  static constexpr int kSharedBytes =
      kBarriers + (2 * kNodeStages + 2 * kHeadStages + 1) * 8 + 1024;
  static constexpr int kThreads = 3 * kWarpgroup;
};

// dq += w o y and the dot products q . y for the two rows of a lane, 64 columns.
template <typename Element>
__device__ __forceinline__ void UseProducts(const float (&y)[32], float (&dq)[32],
                                            const std::uint32_t (*q)[4], float wa, float wb,
                                            float (&dot)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int n = 4 * (2 * j + u);
      dot[0] += Element::Low(q[j][2 * u]) * y[n];
      dot[1] += Element::High(q[j][2 * u]) * y[n + 1];
      dot[2] += Element::Low(q[j][2 * u + 1]) * y[n + 2];
      dot[3] += Element::High(q[j][2 * u + 1]) * y[n + 3];
      dq[n] += wa * y[n];
      dq[n + 1] += wa * y[n + 1];
      dq[n + 2] += wb * y[n + 2];
      dq[n + 3] += wb * y[n + 3];
    }
  }
}

// Starts y = dO S^T for 64 rows of the node.
template <typename Element>
__device__ __forceinline__ void StartProducts(float (&y)[32], const std::uint32_t (&d_o)[4][4],
                                              std::uint64_t state) {
  ptx::PinRegisters(y);
  ptx::WgmmaFence();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    ptx::WgmmaRegisters<Element, false>(y, d_o[j], state + j * kStepColumns16, j > 0);
  }
  ptx::WgmmaCommit();
}

// Grid x: chunks x runs of heads x q/k groups of the pass x key blocks.
template <typename Element>
__global__ void __launch_bounds__(NodeGradsShape::kThreads, 1)
    NodeGradsKernel(const __grid_constant__ CUtensorMap q_map,
                    const __grid_constant__ CUtensorMap do_map,
                    const __grid_constant__ BackwardParams b) {
  using Shape = NodeGradsShape;
  const ForwardParams& p = b.forward;
  ptx::AllowNextKernel();
  const std::uint32_t shared = FirstTile();
  const std::uint32_t full = shared + Shape::kBarriers, empty = full + 8 * Shape::kNodeStages;
  const std::uint32_t head_full = empty + 8 * Shape::kNodeStages;
  const std::uint32_t head_empty = head_full + 8 * Shape::kHeadStages;
  const std::uint32_t query = head_empty + 8 * Shape::kHeadStages;
  if (threadIdx.x == 0) {
    ptx::BarrierInit(query, 1);
    for (int i = 0; i < Shape::kNodeStages; ++i) {
      ptx::BarrierInit(full + 8 * i, 1);
      ptx::BarrierInitWarps(empty + 8 * i, 8);
    }
    for (int i = 0; i < Shape::kHeadStages; ++i) {
      ptx::BarrierInit(head_full + 8 * i, 1);
      ptx::BarrierInitWarps(head_empty + 8 * i, 8);
    }
    ptx::BarrierInitFence();
  }
  ptx::WaitForPreviousKernel();
  const int blocks = gridDim.x / b.key_blocks;
  const int key_block = blockIdx.x / blocks, key = key_block * kKeyBlock;
  const HeadRun run = PlaceOfRun(b, blockIdx.x - key_block * blocks, b.node_runs);
  if (run.heads <= 0) return;
  const ChunkPlace& place = run.place;
  const int nodes = __popc(place.index), tiles = run.heads * p.value_tiles;
  const std::size_t chunks = p.layout.num_chunks;
  if (static_cast<int>(threadIdx.x) < run.heads) {
    const float* decay = p.node_decay + (run.first_head + threadIdx.x) * chunks + place.first_chunk;
    float node[kMaxNodes], gap = 0;
    int end = place.index;
#pragma unroll
    for (int i = 0; i < kMaxNodes; ++i) {
      node[i] = end != 0 ? decay[end] : 0;
      end &= end - 1;
    }
#pragma unroll
    for (int i = 0; i < kMaxNodes; ++i) {
      ptx::StoreSharedF32(shared + Shape::kGaps + (threadIdx.x * kMaxNodes + i) * 4, gap);
      gap += node[i];
    }
  }
  __syncthreads();

  const int warp_in_block = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp_in_block >= 8) {
    ptx::LowerRegisters<24>();
    if (warp_in_block > 8 || lane > 0 || nodes == 0) return;
    ptx::BarrierExpect(query, 2 * kTileBytes);
    for (int i = 0; i < 2; ++i) {
      ptx::LoadTile(shared + i * kTileBytes, &q_map, query, key + 64 * i, b.group_begin + run.group,
                    place.token, place.batch);
    }
    int iteration = 0;
    for (int tile = 0; tile < tiles; ++tile) {
      const int head = run.first_head + tile / p.value_tiles, value_tile = tile % p.value_tiles;
      const int slot = tile % Shape::kHeadStages, round = tile / Shape::kHeadStages;
      if (round > 0) ptx::BarrierWait(head_empty + 8 * slot, (round & 1) ^ 1);
      const std::uint32_t bar = head_full + 8 * slot;
      const std::uint32_t to = shared + Shape::kHeads + slot * Shape::kHeadBytes;
      const std::size_t record = head * chunks + run.chunk;
      const int row_bytes = nodes * kChunk * 2;
      ptx::BarrierExpect(bar, kTileBytes + kChunk * 4 + row_bytes);
      ptx::LoadTile(to, &do_map, bar, value_tile * kValueTile, p.head_begin + head, place.token,
                    place.batch);
      ptx::LoadBytes(to + Shape::kDecay, p.local_decay + record * 2 * kChunk, kChunk * 4, bar);
      ptx::LoadBytes(to + Shape::kRows,
                     p.weights + (record * p.weight_rows + kLocalLevels) * kChunk, row_bytes, bar);
      for (int end = place.index; end != 0; end &= end - 1, ++iteration) {
        const int stage = iteration % Shape::kNodeStages;
        if (iteration >= Shape::kNodeStages) {
          ptx::BarrierWait(empty + 8 * stage, ((iteration / Shape::kNodeStages) & 1) ^ 1);
        }
        ptx::BarrierExpect(full + 8 * stage, kTileBytes);
        const std::size_t node = (head * chunks + place.first_chunk + end) * b.state_tiles +
                                 value_tile * b.key_blocks + key_block;
        ptx::LoadBytes(shared + Shape::kNodes + stage * kTileBytes,
                       static_cast<const char*>(p.node_states) + node * kTileBytes, kTileBytes,
                       full + 8 * stage);
      }
    }
    return;
  }

  ptx::RaiseRegisters<240>();
  const int warpgroup = warp_in_block / 4, warp = warp_in_block % 4;
  const int pair = lane & 3, t0 = 64 * warpgroup + 16 * warp + (lane >> 2);
  const int matrix_row = 64 * warpgroup + 16 * warp + MatrixRow(lane);
  float dq0[32], dq1[32];
#pragma unroll
  for (int n = 0; n < 32; ++n) dq0[n] = dq1[n] = 0;
  if (!run.begins) {
    LoadPartial(b, run, b.node_dq, dq0, t0, key + 2 * pair);
    LoadPartial(b, run, b.node_dq, dq1, t0, key + 64 + 2 * pair);
  }
  if (nodes > 0) {
    std::uint32_t q[8][4], d_o[4][4];
    ptx::BarrierWait(query, 0);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      ptx::LoadMatrix4(q[j], shared + (j >> 2) * kTileBytes +
                                 SwizzledOffset(matrix_row, 2 * (j & 3) + MatrixGroup(lane)));
    }
    float y0[32], y1[32];
    const int total = tiles * nodes;
    const std::uint64_t first_state = TileDescriptor(shared + Shape::kNodes);
    std::uint64_t state = first_state;
    int stage = 0, parity = 0, slot = 0, head_parity = 0, tile = 0, i = 0;
    std::uint32_t head = shared + Shape::kHeads, gap = shared + Shape::kGaps;
    float a0, a1, reads0 = 0, reads1 = 0;
    // Of the current head and state tile.
    std::size_t unit = (run.first_head * chunks + run.chunk) * b.state_tiles + key_block;
    const auto load_head = [&] {
      ptx::BarrierWait(head_full + 8 * slot, head_parity);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        ptx::LoadMatrix4(d_o[j], head + SwizzledOffset(matrix_row, 2 * j + MatrixGroup(lane)));
      }
      a0 = ptx::LoadSharedF32(head + Shape::kDecay + 4 * t0);
      a1 = ptx::LoadSharedF32(head + Shape::kDecay + 4 * (t0 + 8));
    };
    load_head();
    ptx::BarrierWait(full, 0);
    StartProducts<Element>(y0, d_o, state);
#pragma unroll 1
    for (int k = 0; k < total; ++k) {
      const std::uint32_t weight = head + Shape::kRows + i * kChunk * 2 + 2 * t0;
      const float wa = ptx::LoadSharedBF16(weight), wb = ptx::LoadSharedBF16(weight + 16);
      const float g = ptx::LoadSharedF32(gap + 4 * i);
      float dot[4] = {};
      ptx::WgmmaWait<0>();
      ptx::PinRegisters(y0);
      StartProducts<Element>(y1, d_o, state + 64 * kTileRowBytes / 16);
      UseProducts<Element>(y0, dq0, q, wa, wb, dot);
      ptx::WgmmaWait<0>();
      ptx::PinRegisters(y1);
      ptx::BarrierArriveOnce(empty + 8 * stage);
      const float scale0 = ptx::Exp2(a0 + g), scale1 = ptx::Exp2(a1 + g);
      __nv_bfloat16* grads =
          b.scale_grads + (unit * p.weight_rows + kLocalLevels + i) * kChunk + t0;
      ++stage;
      state += kTileBytes / 16;
      if (stage == Shape::kNodeStages) stage = 0, parity ^= 1, state = first_state;
      const bool last = ++i == nodes;
      const std::size_t this_unit = unit;
      if (last) {
        ptx::BarrierArriveOnce(head_empty + 8 * slot);
        i = 0;
        ++tile;
        ++slot;
        head += Shape::kHeadBytes;
        if (slot == Shape::kHeadStages) slot = 0, head_parity ^= 1, head = shared + Shape::kHeads;
        if (tile % p.value_tiles == 0) {
          gap += kMaxNodes * 4;
          unit += (chunks - 1) * b.state_tiles;
        }
        unit += b.key_blocks;
        if (tile < tiles) load_head();
      }
      if (k + 1 < total) ptx::BarrierWait(full + 8 * stage, parity);
      StartProducts<Element>(y0, d_o, state);
      UseProducts<Element>(y1, dq1, q + 4, wa, wb, dot);
      float x = dot[0] + dot[1], z = dot[2] + dot[3];
      x += __shfl_xor_sync(~0u, x, 1);
      z += __shfl_xor_sync(~0u, z, 1);
      x += __shfl_xor_sync(~0u, x, 2);
      z += __shfl_xor_sync(~0u, z, 2);
      if (pair == 0) StoreAs(grads, x * scale0);
      if (pair == 1) StoreAs(grads + 8, z * scale1);
      reads0 += wa * x;
      reads1 += wb * z;
      if (last) {
        float* reads = b.node_reads + this_unit * kChunk + t0;
        if (pair == 0) reads[0] = reads0;
        if (pair == 1) reads[8] = reads1;
        reads0 = reads1 = 0;
      }
      ptx::PinRegisters(dq0);
      ptx::PinRegisters(dq1);
    }
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(y0);
  } else {
    for (int tile = 0; tile < tiles; ++tile) {
      const std::size_t unit =
          ((run.first_head + tile / p.value_tiles) * chunks + run.chunk) * b.state_tiles +
          tile % p.value_tiles * b.key_blocks + key_block;
      if (pair < 2) b.node_reads[unit * kChunk + t0 + 8 * pair] = 0;
    }
  }
  StorePartial(b, run, b.node_dq, dq0, t0, key + 2 * pair);
  StorePartial(b, run, b.node_dq, dq1, t0, key + 64 + 2 * pair);
}

}  // namespace fenwick::cuda::hopper
