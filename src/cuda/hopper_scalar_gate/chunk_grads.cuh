// Backward pass 4: D of every chunk. One block walks the chunks of a segment from the last to the
// first. A node of 2^(l + 1) chunks passes the gradient U at its end to its right half, whose
// queries read the left half; so the left half's end has the gradient
//   X_l = 2^(log2 decay of the right half) U + sum over the right half's chunks of (w_l o Q)^T dO
// ([K, V]), which is summed in registers on top of its first term. D of chunk i is X_l with l the
// lowest clear bit of i, as it stands; above the segment it comes from pass 3.
#pragma once

#include "cuda/hopper_scalar_gate/chunk_states.cuh"
#include "cuda/hopper_scalar_gate/segment_reads.cuh"

namespace fenwick::cuda::hopper {

struct ChunkGradsShape {
  static constexpr int kStages = 4;
  static constexpr int kStageBytes = 3 * kTileBytes;             // q, dO
  static constexpr int kAuxBytes = kMaxLogSegment * kChunk * 2;  // weight rows
  static constexpr int kOut = kStages * kStageBytes;             // 2 KB a warp
  static constexpr int kAux = kOut + 2 * 8192;
  static constexpr int kBarriers = kAux + kStages * kAuxBytes;
  static constexpr int kSharedBytes = kBarriers + kStages * 16 + 1024;
  static constexpr int kThreads = 3 * kWarpgroup;
};

// d += (w o Q)^T dO for this warpgroup's 64 rows of K, for one level or for two at once (second):
// the products of one run while the other's operands are weighted. `weights`: the first level's
// row; the second one's follows.
template <typename Element, bool kTwo>
__device__ __forceinline__ void AddReads(float (&first)[32], float (&second)[32],
                                         std::uint32_t fragment, std::uint32_t weights,
                                         std::uint64_t d_o) {
  constexpr int kBatch = 2;
  ptx::PinRegisters(first);
  if (kTwo) ptx::PinRegisters(second);
#pragma unroll
  for (int batch = 0; batch < 8; batch += kBatch) {
    std::uint32_t q[kBatch][4];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      ptx::LoadMatrix4Transposed(q[i], fragment + 16 * (batch + i) * kTileRowBytes);
    }
#pragma unroll
    for (int level = 0; level < (kTwo ? 2 : 1); ++level) {
      std::uint32_t a[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const std::uint32_t at = weights + level * kChunk * 2 + 32 * (batch + i);
        const std::uint32_t low = Element::FromBF16(ptx::LoadSharedU32(at));
        const std::uint32_t high = Element::FromBF16(ptx::LoadSharedU32(at + 16));
        a[i][0] = Element::Multiply(q[i][0], low);
        a[i][1] = Element::Multiply(q[i][1], low);
        a[i][2] = Element::Multiply(q[i][2], high);
        a[i][3] = Element::Multiply(q[i][3], high);
      }
      ptx::WgmmaFence();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        ptx::WgmmaRegisters<Element, true>(level == 0 ? first : second, a[i],
                                           d_o + (batch + i) * kStepRows16, true);
      }
      ptx::WgmmaCommit();
    }
  }
  ptx::WgmmaWait<0>();
  ptx::PinRegisters(first);
  if (kTwo) ptx::PinRegisters(second);
}

// Grid x: state tiles x heads x segments.
template <typename Element>
__global__ void __launch_bounds__(ChunkGradsShape::kThreads, 1)
    ChunkGradsKernel(const __grid_constant__ CUtensorMap q_map,
                     const __grid_constant__ CUtensorMap do_map,
                     const __grid_constant__ BackwardParams b) {
  using Shape = ChunkGradsShape;
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
  int rest = blockIdx.x;
  const int state_tile = rest % b.state_tiles;
  rest /= b.state_tiles;
  const int head = rest % p.num_heads, segment = rest / p.num_heads;
  const SegmentPlace place = PlaceOfSegment(p.layout, segment);
  const int first = place.first(), count = place.count();
  const std::size_t record =
      static_cast<std::size_t>(head) * p.layout.num_chunks + place.first_chunk + first;

  const int warp_in_block = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp_in_block >= 8) {
    ptx::LowerRegisters<24>();
    if (warp_in_block > 8 || lane > 0) return;
    const int group = (p.head_begin + head) / p.heads_per_group;
    const int value_tile = state_tile / b.key_blocks;
    const int key = state_tile % b.key_blocks * kKeyBlock;
    for (int step = 0; step + 1 < count; ++step) {  // the first chunk reads no node of the segment
      const int stage = step % Shape::kStages, i = count - 1 - step;
      if (step >= Shape::kStages) {
        ptx::BarrierWait(empty + 8 * stage, ((step / Shape::kStages) & 1) ^ 1);
      }
      const std::uint32_t bar = full + 8 * stage, tile = shared + stage * Shape::kStageBytes;
      const std::uint32_t aux = shared + Shape::kAux + stage * Shape::kAuxBytes;
      const int token = place.token + (first + i) * kChunk;
      const int row_bytes = __popc(i) * kChunk * 2;
      ptx::BarrierExpect(bar, 3 * kTileBytes + row_bytes);
      ptx::LoadTile(tile, &q_map, bar, key, group, token, place.batch);
      ptx::LoadTile(tile + kTileBytes, &q_map, bar, key + 64, group, token, place.batch);
      ptx::LoadTile(tile + 2 * kTileBytes, &do_map, bar, value_tile * kValueTile,
                    p.head_begin + head, token, place.batch);
      ptx::LoadBytes(aux, p.weights + ((record + i) * p.weight_rows + kLocalLevels) * kChunk,
                     row_bytes, bar);
    }
    return;
  }

  ptx::RaiseRegisters<240>();
  const int warpgroup = warp_in_block / 4, warp = warp_in_block % 4;
  const int matrix_row = ((lane >> 4) & 1) * 8 + (lane & 7);
  const std::uint32_t fragment =
      warpgroup * kTileBytes + SwizzledOffset(matrix_row, 2 * warp + ((lane >> 3) & 1));
  const std::uint32_t staging = shared + Shape::kOut + warp_in_block * 2048;
  const int row = 64 * warpgroup + 16 * warp;
  auto* out = static_cast<typename Element::Storage*>(b.chunk_grads) +
              (record * b.state_tiles + state_tile) * kStateElements + row * kTileColumns;

  // Log2 decay of the 2^l chunks that end with chunk `lane` of the segment.
  float decay[kMaxLogSegment];
  decay[0] = 0;
  if (lane < count) {
    decay[0] = *reinterpret_cast<const float*>(static_cast<const char*>(p.decay_to_end) +
                                               (record + lane) * kDecayToEndBytes + 2 * kChunk);
  }
#pragma unroll
  for (int l = 1; l < kMaxLogSegment; ++l) {
    decay[l] = decay[l - 1] + __shfl_up_sync(~0u, decay[l - 1], 1 << (l - 1));
  }
  float grads[kMaxLogSegment][32];  // X_l
  // Stores D of chunk i, and starts X of the levels below `levels` with it.
  const auto use = [&](const float(&d)[32], int i, int levels) {
    if (lane == 0) ptx::WaitStoresRead<0>();
    __syncwarp();
    StoreAccumulator<Element>(staging, d, lane);
#pragma unroll
    for (int l = 0; l < kMaxLogSegment; ++l) {
      if (l >= levels) continue;
      const float factor = ptx::Exp2(__shfl_sync(~0u, decay[l], i));
#pragma unroll
      for (int n = 0; n < 32; ++n) grads[l][n] = factor * d[n];
    }
    ptx::FenceAsyncShared();
    __syncwarp();
    if (lane == 0) {
      ptx::StoreBytes(out + static_cast<std::size_t>(i) * b.state_tiles * kStateElements, staging,
                      2048);
      ptx::CommitStores();
    }
  };
  {
    // Past the sequence's last segment there is no gradient, nor from a right half that is not
    // there.
    float d[32];
#pragma unroll
    for (int n = 0; n < 32; ++n) d[n] = 0;
    if (place.num_segments > 1) {
      const std::size_t unit =
          (static_cast<std::size_t>(head) * p.layout.num_segments + segment) * b.state_tiles +
          state_tile;
      const float* in = b.segment_grads + unit * kStateElements;
      const int r = row + (lane >> 2);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const auto x = *reinterpret_cast<const float2*>(in + AccumulatorOffset(r, n, lane));
        const auto y = *reinterpret_cast<const float2*>(in + AccumulatorOffset(r + 8, n, lane));
        d[4 * n] = x.x, d[4 * n + 1] = x.y;
        d[4 * n + 2] = y.x, d[4 * n + 3] = y.y;
      }
    }
    use(d, count - 1, kMaxLogSegment);
  }
#pragma unroll 1
  for (int step = 0; step + 1 < count; ++step) {
    const int stage = step % Shape::kStages, i = count - 1 - step;
    ptx::BarrierWait(full + 8 * stage, (step / Shape::kStages) & 1);
    const std::uint32_t tile = shared + stage * Shape::kStageBytes;
    const std::uint32_t aux = shared + Shape::kAux + stage * Shape::kAuxBytes + 4 * (lane & 3);
    const int valid = place.length - (first + i) * kChunk;
    if (valid < kChunk && p.layout.sequences != nullptr) {
      ZeroTails(tile, 3, kChunk, valid, 2 * kWarpgroup);
    }
    const std::uint64_t d_o = TileDescriptor(tile + 2 * kTileBytes);
#pragma unroll
    for (int l = 0; l < kMaxLogSegment; l += 2) {
      const std::uint32_t weights = aux + __popc(i & ((1 << l) - 1)) * kChunk * 2;
      switch ((i >> l) & 3) {
        case 1: AddReads<Element, false>(grads[l], grads[l], tile + fragment, weights, d_o); break;
        case 2:
          AddReads<Element, false>(grads[l + 1], grads[l + 1], tile + fragment, weights, d_o);
          break;
        case 3: AddReads<Element, true>(grads[l], grads[l + 1], tile + fragment, weights, d_o);
      }
    }
    ptx::BarrierArriveOnce(empty + 8 * stage);
    const int next = i - 1, clear = __ffs(~next) - 1;
#pragma unroll
    for (int l = 0; l < kMaxLogSegment; ++l) {
      if (l == clear) use(grads[l], next, l);
    }
  }
  if (lane == 0) ptx::WaitStores<0>();
}

}  // namespace fenwick::cuda::hopper
