// Backward pass 6: everything inside a chunk, and what its end state gives to k and v. For a run of
// heads that share q and k, with W = scale lambda decay, P = W o (q k^T), dP = dO V^T,
//   dv = P^T dO + 2^(a_end - a) (K D),     dS = sum over heads of W o dP,
//   dq = dS K,     dk = dS^T Q + sum over heads of 2^(a_end - a) V D^T,
//   d(scale lambda)[t, l] = sum over keys of level l of decay (q k^T) dP.
// The flow (finish.cuh) needs the read side, sum_s P[t, s] dP[t, s], and the write side,
// v[s] . dv[s]: both use the same 16-bit P, so that what stays inside the chunk cancels exactly.
//
// Three consumer warpgroups: 0 and 1 own the 64x64 blocks on the diagonal, 2 the block below it.
// P passes through shared memory, where dv reads it transposed. dk's four 64x64 quarters: 0 and 1
// hold the diagonal ones, 2 the other two.
//
// With two key blocks (K > 128) there is a launch for each. dS is the same in both. The second
// block's comes first, computes no scores, and leaves its K D, a share of dv; the first block's
// takes scores over all keys and does the rest.
#pragma once

#include <cuda.h>

#include "cuda/hopper_scalar_gate/config.h"
#include "cuda/hopper_scalar_gate/node_grads.cuh"
#include "cuda/hopper_scalar_gate/store_rows.cuh"

namespace fenwick::cuda::hopper {

struct LocalGradsShape {
  static constexpr int kHalf = kTileBytes / 2;  // a 64x64 tile
  static constexpr int kStages = 2;
  static constexpr int kKeys = 0;
  static constexpr int kP = kKeys + 2 * kTileBytes;  // q first, then P of 0, 1, and two of 2
  static constexpr int kCrossScores = kP + 2 * kTileBytes;
  static constexpr int kRing = kCrossScores + kHalf;
  static constexpr int kStageBytes = 3 * kTileBytes;  // dO, V, D
  static constexpr int kAux = kRing + kStages * kStageBytes;
  static constexpr int kAuxRows = kDecayBytes;  // after local_decay
  static constexpr int kAuxTotal = kAuxRows + kLocalLevels * kWeightPitch;
  static constexpr int kAuxBytes = kAuxTotal + 16;
  static constexpr int kP2 = (kAux + kStages * kAuxBytes + 1023) / 1024 * 1024;  // P of 0, 1 again
  static constexpr int kOut = kP2 + 2 * kHalf;
  static constexpr int kOwnScores = kOut + 2 * kHalf;
  static constexpr int kBarriers = kOwnScores + 2 * kHalf;
  static constexpr int kSharedBytes = kBarriers + (2 * kStages + 7) * 8 + 1024;
  static constexpr int kThreads = 4 * kWarpgroup;
  static_assert(kSharedBytes <= 232448, "shared memory of an SM");
};

enum class KeyBlock { kOnly, kFirst, kSecond };

// A 16x16 block below the diagonal: P, and what it adds to dS, to its level and to the flow.
struct RowSums {
  float a = 0, b = 0;  // of the lane's two rows
  __device__ __forceinline__ void Reduce() {
    a += __shfl_xor_sync(~0u, a, 1);
    b += __shfl_xor_sync(~0u, b, 1);
    a += __shfl_xor_sync(~0u, a, 2);
    b += __shfl_xor_sync(~0u, b, 2);
  }
};

template <typename Element>
__device__ __forceinline__ void BlockGrads(std::uint32_t (&p)[4], const std::uint32_t (&scores)[4],
                                           const float* dp, float* ds, std::uint32_t decay, int s0,
                                           int pair, float a0, float a1, float la, float lb,
                                           RowSums& level, RowSums& flow) {
  using E = Element;
  const float end = ptx::LoadSharedF32(decay + 4 * (s0 + 15));
  const float ra = ptx::Exp2(a0 - end), rb = ptx::Exp2(a1 - end);
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const float2 e = ptx::LoadSharedF32x2(decay + 4 * (kChunk + s0 + 8 * u + 2 * pair));
    const float d0 = ra * e.x, d1 = ra * e.y, d2 = rb * e.x, d3 = rb * e.y;
    const float x0 = dp[4 * u] * d0, x1 = dp[4 * u + 1] * d1;
    const float x2 = dp[4 * u + 2] * d2, x3 = dp[4 * u + 3] * d3;
    ds[4 * u] += la * x0;
    ds[4 * u + 1] += la * x1;
    ds[4 * u + 2] += lb * x2;
    ds[4 * u + 3] += lb * x3;
    level.a += E::Low(scores[2 * u]) * x0 + E::High(scores[2 * u]) * x1;
    level.b += E::Low(scores[2 * u + 1]) * x2 + E::High(scores[2 * u + 1]) * x3;
    p[2 * u] = E::Multiply(scores[2 * u], E::Pack(la * d0, la * d1));
    p[2 * u + 1] = E::Multiply(scores[2 * u + 1], E::Pack(lb * d2, lb * d3));
    flow.a += E::Low(p[2 * u]) * dp[4 * u] + E::High(p[2 * u]) * dp[4 * u + 1];
    flow.b += E::Low(p[2 * u + 1]) * dp[4 * u + 2] + E::High(p[2 * u + 1]) * dp[4 * u + 3];
  }
}

__device__ __forceinline__ void StoreBlock(std::uint32_t address, const std::uint32_t (&p)[4]) {
  ptx::StoreMatrix4(address, p[0], p[1], p[2], p[3]);
}

// d (+)= A B or A^T B over 64 in the reduction; A, B 64x64 tiles, B's rows along the reduction.
template <typename Element, bool kTransposeA>
__device__ __forceinline__ void Multiply64(float (&d)[32], std::uint64_t a, std::uint64_t b,
                                           bool accumulate) {
  ptx::PinRegisters(d);
  ptx::WgmmaFence();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    ptx::WgmmaShared<Element, kTransposeA, true>(
        d, a + j * (kTransposeA ? kStepRows16 : kStepColumns16), b + j * kStepRows16,
        j > 0 || accumulate);
  }
  ptx::WgmmaCommit();
  ptx::WgmmaWait<0>();
  ptx::PinRegisters(d);
}

// d += (decay V) D^T: V rows as fragments, 64 rows of D.
template <typename Element>
__device__ __forceinline__ void StartKeyGrads(float (&d)[32], std::uint32_t (&v)[4][4],
                                              std::uint32_t v_address, float ea, float eb,
                                              std::uint64_t grads) {
  const std::uint32_t pa = Element::Pack(ea, ea), pb = Element::Pack(eb, eb);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    ptx::LoadMatrix4(v[j], v_address ^ (32 * j));
    v[j][0] = Element::Multiply(v[j][0], pa);
    v[j][1] = Element::Multiply(v[j][1], pb);
    v[j][2] = Element::Multiply(v[j][2], pa);
    v[j][3] = Element::Multiply(v[j][3], pb);
  }
  ptx::PinRegisters(d);
  ptx::WgmmaFence();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    ptx::WgmmaRegisters<Element, false>(d, v[j], grads + j * kStepColumns16, true);
  }
  ptx::WgmmaCommit();
}

// Where this thread's accumulators wait for the next pass.
__device__ __forceinline__ float* UnfinishedOf(const BackwardParams& b, const HeadRun& r,
                                               int key_block, int warpgroup) {
  const std::size_t chunk = static_cast<std::size_t>((r.run & 1) * b.key_blocks + key_block) *
                                b.forward.layout.num_chunks +
                            r.chunk;
  return b.unfinished + (chunk * kUnfinished + 64 * warpgroup) * kWarpgroup +
         threadIdx.x % kWarpgroup;
}

template <int kCount>
__device__ __forceinline__ float* LeaveOne(float* to, const float (&x)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) to[n * kWarpgroup] = x[n];
  return to + kCount * kWarpgroup;
}
template <int... kCounts>
__device__ __forceinline__ void LeaveUnfinished(float* to, const float (&... x)[kCounts]) {
  ((to = LeaveOne(to, x)), ...);
}

template <int kCount>
__device__ __forceinline__ const float* LoadOne(const float* from, float (&x)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) x[n] = from[n * kWarpgroup];
  return from + kCount * kWarpgroup;
}
template <int... kCounts>
__device__ __forceinline__ void GoOnFrom(const float* from, float (&... x)[kCounts]) {
  ((from = LoadOne(from, x)), ...);
}

// Walks over the value tiles of a run of heads.
struct TileWalk {
  int value_tiles;
  std::size_t units_to_next_head;  // from a head's last value tile
  int head, value_tile = 0;        // head within the pass
  std::size_t unit;                // place in arrays [F, N, V/64, ...]

  __device__ __forceinline__ TileWalk(const ForwardParams& p, const HeadRun& run)
      : value_tiles(p.value_tiles),
        units_to_next_head((static_cast<std::size_t>(p.layout.num_chunks) - 1) * p.value_tiles + 1),
        head(run.first_head),
        unit((static_cast<std::size_t>(run.first_head) * p.layout.num_chunks + run.chunk) *
             p.value_tiles) {}
  __device__ __forceinline__ void Next() {
    if (++value_tile < value_tiles) {
      ++unit;
    } else {
      value_tile = 0;
      ++head;
      unit += units_to_next_head;
    }
  }
};

template <typename Element, KeyBlock kBlock>
__global__ void __launch_bounds__(LocalGradsShape::kThreads, 1)
    LocalGradsKernel(const __grid_constant__ CUtensorMap q_map,
                     const __grid_constant__ CUtensorMap k_map,
                     const __grid_constant__ CUtensorMap v_map,
                     const __grid_constant__ CUtensorMap do_map,
                     const __grid_constant__ CUtensorMap dv_map,
                     const __grid_constant__ BackwardParams b) {
  using Shape = LocalGradsShape;
  using E = Element;
  constexpr bool kSecond = kBlock == KeyBlock::kSecond;
  constexpr int kKeyBlocks = kBlock == KeyBlock::kOnly ? 1 : 2;
  constexpr int kKeyIndex = kSecond ? 1 : 0, kKey = kKeyIndex * kKeyBlock;
  const ForwardParams& p = b.forward;
  ptx::AllowNextKernel();
  const std::uint32_t shared = FirstTile();
  const std::uint32_t full = shared + Shape::kBarriers, empty = full + 8 * Shape::kStages;
  const std::uint32_t cross_full = empty + 8 * Shape::kStages, cross_empty = cross_full + 16;
  const std::uint32_t query = cross_empty + 16, upper_full = query + 8, upper_empty = query + 16;
  if (threadIdx.x == 0) {
    ptx::BarrierInit(query, 1);
    ptx::BarrierInit(upper_full, 1);
    ptx::BarrierInitWarps(upper_empty, 12);
    for (int i = 0; i < Shape::kStages; ++i) {
      ptx::BarrierInit(full + 8 * i, 1);
      ptx::BarrierInitWarps(empty + 8 * i, 12);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::BarrierInitWarps(cross_full + 8 * i, 4);
      ptx::BarrierInitWarps(cross_empty + 8 * i, 4);
    }
    ptx::BarrierInitFence();
  }
  __syncthreads();
  ptx::WaitForPreviousKernel();
  const HeadRun run = PlaceOfRun(b, blockIdx.x, b.local_runs);
  if (run.heads <= 0) return;
  const ChunkPlace& place = run.place;
  const int tiles = run.heads * p.value_tiles;
  const std::size_t chunks = p.layout.num_chunks;
  const bool packed = p.layout.sequences != nullptr;

  const int warp_in_block = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp_in_block >= 12) {
    ptx::LowerRegisters<24>();
    if (warp_in_block > 12 || lane > 0) return;
    const int group = b.group_begin + run.group;
    const auto load_key_block = [&](std::uint32_t to, const CUtensorMap& map, std::uint32_t bar,
                                    int key) {
      for (int i = 0; i < 2; ++i) {
        ptx::LoadTile(to + i * kTileBytes, &map, bar, key + 64 * i, group, place.token,
                      place.batch);
      }
    };
    ptx::BarrierExpect(query, (kSecond ? 2 : 4) * kTileBytes);
    load_key_block(shared + Shape::kKeys, k_map, query, kKey);
    if (!kSecond) load_key_block(shared + Shape::kP, q_map, query, kKey);
    if (kBlock == KeyBlock::kFirst) {  // the other keys, for the scores
      ptx::BarrierExpect(upper_full, 4 * kTileBytes);
      load_key_block(shared + Shape::kRing, k_map, upper_full, kKeyBlock);
      load_key_block(shared + Shape::kRing + 2 * kTileBytes, q_map, upper_full, kKeyBlock);
      ptx::BarrierWait(upper_empty, 0);
    }
    TileWalk walk(p, run);
    for (int tile = 0; tile <= tiles; ++tile, walk.Next()) {
      const int stage = tile % Shape::kStages, round = tile / Shape::kStages;
      if (round > 0) ptx::BarrierWait(empty + 8 * stage, (round & 1) ^ 1);
      const std::uint32_t bar = full + 8 * stage;
      const std::uint32_t to = shared + Shape::kRing + stage * Shape::kStageBytes;
      if (tile == tiles) {  // q once more, for dk
        ptx::BarrierExpect(bar, 2 * kTileBytes);
        load_key_block(to, q_map, bar, kKey);
        break;
      }
      const int head = walk.head, value_tile = walk.value_tile;
      const std::size_t record = head * chunks + run.chunk;
      const std::uint32_t aux = shared + Shape::kAux + stage * Shape::kAuxBytes;
      ptx::BarrierExpect(bar, 3 * kTileBytes + Shape::kAuxBytes);
      ptx::LoadTile(to, &do_map, bar, value_tile * kValueTile, p.head_begin + head, place.token,
                    place.batch);
      ptx::LoadTile(to + kTileBytes, &v_map, bar, value_tile * kValueTile, p.head_begin + head,
                    place.token, place.batch);
      ptx::LoadBytes(aux, p.local_decay + record * 2 * kChunk, kDecayBytes, bar);
      ptx::LoadBytes(aux + Shape::kAuxRows, p.weights + record * p.weight_rows * kChunk,
                     kLocalLevels * kWeightPitch, bar);
      ptx::LoadBytes(
          aux + Shape::kAuxTotal,
          static_cast<const char*>(p.decay_to_end) + record * kDecayToEndBytes + 2 * kChunk, 16,
          bar);
      ptx::LoadBytes(to + 2 * kTileBytes,
                     static_cast<const char*>(b.chunk_grads) +
                         (walk.unit * kKeyBlocks + kKeyIndex) * kTileBytes,
                     kTileBytes, bar);
    }
    return;
  }

  ptx::RaiseRegisters<160>();
  const int warpgroup = warp_in_block / 4, warp = warp_in_block % 4;
  const int row = lane >> 2, pair = lane & 3, thread = threadIdx.x % kWarpgroup;
  // Where this lane's rows lie in a 64x64 tile; its 16-column block j is at offset ^ (32 j).
  const std::uint32_t offset = SwizzledOffset(16 * warp + MatrixRow(lane), MatrixGroup(lane));
  const std::uint32_t keys = shared + Shape::kKeys;
  const std::uint32_t p0 = shared + Shape::kP, p1 = p0 + Shape::kHalf, cross = p0 + kTileBytes;
  // Of a packed sequence's last chunk; all warpgroups together, in the same order.
  const auto zero_tail = [&](std::uint32_t tile, int count) {
    if (place.valid < kChunk && packed) {
      ZeroTails(tile, count, kChunk, place.valid, 3 * kWarpgroup);
    }
  };
  float scores[32];
  const auto add_scores = [&](std::uint32_t q_tiles, std::uint32_t k_tiles, bool accumulate) {
    const std::uint64_t q = TileDescriptor(q_tiles + (warpgroup > 0 ? Shape::kHalf : 0));
    const std::uint64_t k = TileDescriptor(k_tiles + (warpgroup == 1 ? Shape::kHalf : 0));
    ptx::WgmmaFence();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int step = (j >> 2) * (kTileBytes / 16) + (j & 3) * kStepColumns16;
      ptx::WgmmaShared<E, false, false>(scores, q + step, k + step, accumulate || j > 0);
    }
    ptx::WgmmaCommit();
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(scores);
  };
  ptx::BarrierWait(query, 0);
  zero_tail(keys, kSecond ? 2 : 4);  // q lies behind k
  if (!kSecond) add_scores(p0, keys, false);
  if (kBlock == KeyBlock::kFirst) {
    const std::uint32_t upper = shared + Shape::kRing;
    ptx::BarrierWait(upper_full, 0);
    zero_tail(upper, 4);
    add_scores(upper + 2 * kTileBytes, upper, true);
    ptx::BarrierArriveOnce(upper_empty);
  }
  int stage = 0, parity = 0;
  const auto next_stage = [&] {
    if (++stage == Shape::kStages) stage = 0, parity ^= 1;
  };
  TileWalk walk(p, run);
  const std::uint64_t first_tile = TileDescriptor(shared);
  const auto descriptor = [&](std::uint32_t address) {
    return first_tile + (address - shared) / 16;
  };

  if (warpgroup < 2) {
    const int c0 = 2 * pair, c1 = c0 + 1;
    const int level0 = 32 - __clz(row ^ c0), level1 = 32 - __clz(row ^ c1);
    const bool keep0 = c0 <= row, keep1 = c1 <= row;
    const int t0 = 64 * warpgroup + 16 * warp + row, own = 64 * warpgroup;
    const std::uint32_t own_scores = shared + Shape::kOwnScores + warpgroup * Shape::kHalf;
    if (!kSecond) StoreAccumulator<E>(own_scores + warp * 2048, scores, lane);
    ptx::NamedBarrier(1, 3 * kWarpgroup);
    float ds_below[24], ds_corner[8], dk[32];
#pragma unroll
    for (int n = 0; n < 32; ++n) dk[n] = 0;
#pragma unroll
    for (int n = 0; n < 24; ++n) ds_below[n] = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) ds_corner[n] = 0;
    if (!run.begins) {
      GoOnFrom(UnfinishedOf(b, run, kKeyIndex, warpgroup), dk, ds_below, ds_corner);
    }
    const std::uint32_t staging = shared + Shape::kOut + warpgroup * Shape::kHalf + warp * 2048;
    const RowsTarget target{&dv_map,          b.dv,         b.dv_batch_stride, b.dv_token_stride,
                            b.dv_head_stride, p.value_size, b.dv_mapped,       packed};
    float dp[32];
    // dP of the tile in the current stage; after the last one, of what else is there, for nothing.
    const auto start_dp = [&](bool exists) {
      ptx::BarrierWait(full + 8 * stage, parity);
      const std::uint32_t d_o = shared + Shape::kRing + stage * Shape::kStageBytes;
      if (exists) zero_tail(d_o, 2);
      ptx::PinRegisters(dp);
      ptx::WgmmaFence();
      const std::uint64_t rows = descriptor(d_o + warpgroup * Shape::kHalf);
      const std::uint64_t columns = rows + kTileBytes / 16;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        ptx::WgmmaShared<E, false, false>(dp, rows + j * kStepColumns16,
                                          columns + j * kStepColumns16, j > 0);
      }
      ptx::WgmmaCommit();
    };
    start_dp(true);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const std::uint32_t d_o = shared + Shape::kRing + stage * Shape::kStageBytes;
      const std::uint32_t v = d_o + kTileBytes, grads = v + kTileBytes;
      const std::uint32_t aux = shared + Shape::kAux + stage * Shape::kAuxBytes;
      const std::uint32_t la = aux + Shape::kAuxRows + 2 * t0, lb = la + 16;
      const int buffer = tile & 1;
      const std::uint32_t my_p = p0 + warpgroup * Shape::kHalf + buffer * (Shape::kP2 - Shape::kP);
      const std::uint32_t my_v = v + warpgroup * Shape::kHalf + offset;
      const std::size_t unit = walk.unit;
      const float a0 = ptx::LoadSharedF32(aux + 4 * t0), a1 = ptx::LoadSharedF32(aux + 4 * t0 + 32);
      RowSums level4, level5, level6, flow;
      float y0, y1, y6, y7;
      {
        ptx::WgmmaWait<0>();
        ptx::PinRegisters(dp);
        float corner[8];
        const float a_l5 = ptx::LoadSharedBF16(la + 5 * kWeightPitch);
        const float b_l5 = ptx::LoadSharedBF16(lb + 5 * kWeightPitch);
        const float a_l6 = ptx::LoadSharedBF16(la + 6 * kWeightPitch);
        const float b_l6 = ptx::LoadSharedBF16(lb + 6 * kWeightPitch);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          std::uint32_t block[4] = {0, 0, 0, 0};
          if (j < 3 && j < warp) {
            std::uint32_t s[4] = {};
            if (!kSecond) ptx::LoadMatrix4(s, (own_scores + offset) ^ (32 * j));
            const bool far = (warp ^ j) >= 2;
            RowSums level;
            BlockGrads<E>(block, s, dp + 8 * j, ds_below + 8 * (j < 3 ? j : 0), aux, own + 16 * j,
                          pair, a0, a1, far ? a_l6 : a_l5, far ? b_l6 : b_l5, level, flow);
            if (far) {
              level6.a += level.a, level6.b += level.b;
            } else {
              level5.a += level.a, level5.b += level.b;
            }
          }
          if (j == warp) {
#pragma unroll
            for (int n = 0; n < 8; ++n) corner[n] = dp[8 * j + n];
          } else if (!kSecond) {
            StoreBlock((my_p + offset) ^ (32 * j), block);
          }
        }
        // 0: rows 0-7, low columns; 1: rows 8-15, low; 3: rows 8-15, high.
        std::uint32_t s[4] = {};
        if (!kSecond) ptx::LoadMatrix4(s, (own_scores + offset) ^ (32 * warp));
        const int s0 = own + 16 * warp + c0;
        const float2 low = ptx::LoadSharedF32x2(aux + 4 * s0);
        const float2 high = ptx::LoadSharedF32x2(aux + 4 * (s0 + 8));
        const float l4 = ptx::LoadSharedBF16(lb + 4 * kWeightPitch);
        const float la0 = ptx::LoadSharedBF16(la + level0 * kWeightPitch);
        const float la1 = ptx::LoadSharedBF16(la + level1 * kWeightPitch);
        const float lb0 = ptx::LoadSharedBF16(lb + level0 * kWeightPitch);
        const float lb1 = ptx::LoadSharedBF16(lb + level1 * kWeightPitch);
        using ptx::Exp2;
        const float e0 = keep0 ? Exp2(a0 - low.x) : 0.f, e1 = keep1 ? Exp2(a0 - low.y) : 0.f;
        const float e2 = Exp2(a1 - low.x), e3 = Exp2(a1 - low.y);
        const float e6 = keep0 ? Exp2(a1 - high.x) : 0.f, e7 = keep1 ? Exp2(a1 - high.y) : 0.f;
        const float x0 = corner[0] * e0, x1 = corner[1] * e1, x2 = corner[2] * e2;
        const float x3 = corner[3] * e3, x6 = corner[6] * e6, x7 = corner[7] * e7;
        ds_corner[0] += la0 * x0;
        ds_corner[1] += la1 * x1;
        ds_corner[2] += l4 * x2;
        ds_corner[3] += l4 * x3;
        ds_corner[6] += lb0 * x6;
        ds_corner[7] += lb1 * x7;
        const std::uint32_t block[4] = {E::Pack(E::Low(s[0]) * la0 * e0, E::High(s[0]) * la1 * e1),
                                        E::Pack(E::Low(s[1]) * l4 * e2, E::High(s[1]) * l4 * e3),
                                        0u,
                                        E::Pack(E::Low(s[3]) * lb0 * e6, E::High(s[3]) * lb1 * e7)};
        if (!kSecond) {
          StoreBlock((my_p + offset) ^ (32 * warp), block);
          ptx::FenceAsyncShared();
        }
        flow.a += E::Low(block[0]) * corner[0] + E::High(block[0]) * corner[1];
        flow.b += E::Low(block[1]) * corner[2] + E::High(block[1]) * corner[3] +
                  E::Low(block[3]) * corner[6] + E::High(block[3]) * corner[7];
        y0 = x0 * E::Low(s[0]);
        y1 = x1 * E::High(s[0]);
        y6 = x6 * E::Low(s[3]);
        y7 = x7 * E::High(s[3]);
        level4.b = x2 * E::Low(s[1]) + x3 * E::High(s[1]);
      }
      if (!kSecond) ptx::NamedBarrier(2 + warpgroup, kWarpgroup);
      const float total = ptx::LoadSharedF32(aux + Shape::kAuxTotal);
      const float ea = ptx::Exp2(total - a0), eb = ptx::Exp2(total - a1);
      float dv[32];
      {
        ptx::PinRegisters(dv);
        ptx::WgmmaFence();
        const std::uint64_t k = descriptor(keys + warpgroup * Shape::kHalf);
        const std::uint64_t d = descriptor(grads);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          ptx::WgmmaShared<E, false, true>(
              dv, k + (j >> 2) * (kTileBytes / 16) + (j & 3) * kStepColumns16, d + j * kStepRows16,
              j > 0);
        }
        ptx::WgmmaCommit();
      }
      {
        std::uint32_t fragments[4][4];
        StartKeyGrads<E>(dk, fragments, my_v, ea, eb, descriptor(grads + warpgroup * Shape::kHalf));
        if constexpr (!kSecond) {
          // Levels 0-3 of the diagonal block: each entry belongs to one lane or two.
          __nv_bfloat16* out = b.scale_grads + unit * kKeyBlocks * p.weight_rows * kChunk + t0;
          const int half = row >> 1;
          if (pair == half) {
            const bool odd = row & 1;
            StoreAs(out, odd ? y1 : y0);
            StoreAs(out + 8, odd ? y7 : y6);
            StoreAs(out + kChunk, odd ? y0 : 0.f);
            StoreAs(out + kChunk + 8, odd ? y6 : 0.f);
          }
          float xa = y0 + y1, xb = y6 + y7;
          if ((pair ^ half) == 1) {
            StoreAs(out + 2 * kChunk, xa);
            StoreAs(out + 2 * kChunk + 8, xb);
          }
          xa += __shfl_xor_sync(~0u, xa, 1);
          xb += __shfl_xor_sync(~0u, xb, 1);
          if ((pair ^ half) == 2) {
            StoreAs(out + 3 * kChunk, xa);
            StoreAs(out + 3 * kChunk + 8, xb);
          }
          level4.Reduce();
          level5.Reduce();
          level6.Reduce();
          if (pair == 3) {
            StoreAs(out + 4 * kChunk + 8, level4.b);
          } else if (pair < 2) {
            StoreAs(out + (5 + pair) * kChunk, pair ? level6.a : level5.a);
            StoreAs(out + (5 + pair) * kChunk + 8, pair ? level6.b : level5.b);
          }
        }
        ptx::WgmmaWait<0>();
        ptx::PinRegisters(dk);
      }
      ptx::PinRegisters(dv);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        dv[4 * n] *= ea;
        dv[4 * n + 1] *= ea;
        dv[4 * n + 2] *= eb;
        dv[4 * n + 3] *= eb;
      }
      if constexpr (!kSecond) {
        if (warpgroup == 0) ptx::BarrierWait(cross_full + 8 * buffer, (tile >> 1) & 1);
        ptx::PinRegisters(dv);
        ptx::WgmmaFence();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          ptx::WgmmaShared<E, true, true>(
              dv, descriptor(my_p) + j * kStepRows16,
              descriptor(d_o + warpgroup * Shape::kHalf) + j * kStepRows16, true);
        }
        ptx::WgmmaCommit();
        if (warpgroup == 0) {
          ptx::WgmmaFence();
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            ptx::WgmmaShared<E, true, true>(
                dv, descriptor(cross + buffer * Shape::kHalf) + j * kStepRows16,
                descriptor(d_o + Shape::kHalf) + j * kStepRows16, true);
          }
          ptx::WgmmaCommit();
        }
        ptx::WgmmaWait<0>();
        ptx::PinRegisters(dv);
      }
      [[maybe_unused]] float* share =
          b.value_shares + (unit * 2 + warpgroup) * 32 * kWarpgroup + thread;
      if (kBlock == KeyBlock::kFirst) {
#pragma unroll
        for (int n = 0; n < 32; ++n) dv[n] += __ldcs(share + n * kWarpgroup);
      }
      std::uint32_t value[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) ptx::LoadMatrix4(value[j], my_v ^ (32 * j));
      ptx::BarrierArriveOnce(empty + 8 * stage);
      if (warpgroup == 0 && !kSecond) ptx::BarrierArriveOnce(cross_empty + 8 * buffer);
      next_stage();
      start_dp(tile + 1 < tiles);
      if constexpr (kSecond) {
#pragma unroll
        for (int n = 0; n < 32; ++n) __stcs(share + n * kWarpgroup, dv[n]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            const int n = 4 * (2 * j + u);
            flow.a -= E::Low(value[j][2 * u]) * dv[n] + E::High(value[j][2 * u]) * dv[n + 1];
            flow.b -=
                E::Low(value[j][2 * u + 1]) * dv[n + 2] + E::High(value[j][2 * u + 1]) * dv[n + 3];
          }
        }
        flow.Reduce();
        float* local_flow = b.local_flow + unit * 192 + t0;
        if (pair == 0) local_flow[0] = flow.a;
        if (pair == 1) local_flow[8] = flow.b;
        if (lane == 0) ptx::WaitStoresRead<0>();
        __syncwarp();
        StoreAccumulator<E>(staging, dv, lane);
        ptx::FenceAsyncShared();
        __syncwarp();
        StoreRows(target, place, p.head_begin + walk.head, walk.value_tile, own + 16 * warp,
                  staging, lane);
      }
      walk.Next();
    }
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(dp);
    if (lane == 0) ptx::WaitStores<0>();
    __syncwarp();
    if (!run.ends) {
      LeaveUnfinished(UnfinishedOf(b, run, kKeyIndex, warpgroup), dk, ds_below, ds_corner);
      return;
    }
    ptx::NamedBarrier(1, 3 * kWarpgroup);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      std::uint32_t block[4] = {0, 0, 0, 0};
      if (j < 3 && j < warp) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int n = 8 * (j < 3 ? j : 0) + 2 * i;
          block[i] = E::Pack(ds_below[n], ds_below[n + 1]);
        }
      }
      if (j == warp) {
#pragma unroll
        for (int i = 0; i < 4; ++i) block[i] = E::Pack(ds_corner[2 * i], ds_corner[2 * i + 1]);
      }
      StoreBlock((p0 + warpgroup * Shape::kHalf + offset) ^ (32 * j), block);
    }
    ptx::FenceAsyncShared();
    ptx::NamedBarrier(1, 3 * kWarpgroup);
    ptx::BarrierWait(full + 8 * stage, parity);
    const std::uint32_t q = shared + Shape::kRing + stage * Shape::kStageBytes;
    zero_tail(q, 2);
    float x[32];
    const int out_row = 64 * warpgroup + 16 * warp + row;
    if (warpgroup == 0) {
      Multiply64<E, true>(dk, descriptor(p0), descriptor(q), true);
      Multiply64<E, true>(dk, descriptor(cross), descriptor(q + Shape::kHalf), true);
      StoreKeyGradient<E>(b, run, b.dk, dk, out_row, kKey + 2 * pair);
      Multiply64<E, false>(x, descriptor(p0), descriptor(keys), false);
      StoreKeyGradient<E>(b, run, b.dq, x, out_row, kKey + 2 * pair);
      Multiply64<E, false>(x, descriptor(p0), descriptor(keys + kTileBytes), false);
      StoreKeyGradient<E>(b, run, b.dq, x, out_row, kKey + 64 + 2 * pair);
    } else {
      Multiply64<E, true>(dk, descriptor(p1), descriptor(q + kTileBytes + Shape::kHalf), true);
      StoreKeyGradient<E>(b, run, b.dk, dk, out_row, kKey + 64 + 2 * pair);
      Multiply64<E, false>(x, descriptor(cross), descriptor(keys), false);
      Multiply64<E, false>(x, descriptor(p1), descriptor(keys + Shape::kHalf), true);
      StoreKeyGradient<E>(b, run, b.dq, x, out_row, kKey + 2 * pair);
    }
  } else {
    const int t0 = 64 + 16 * warp + row, s_row = 16 * warp + row;
    const std::uint32_t cross_scores = shared + Shape::kCrossScores;
    if (!kSecond) StoreAccumulator<E>(cross_scores + warp * 2048, scores, lane);
    ptx::NamedBarrier(1, 3 * kWarpgroup);
    float ds[32], dk_upper[32], dk_lower[32];
#pragma unroll
    for (int n = 0; n < 32; ++n) ds[n] = dk_upper[n] = dk_lower[n] = 0;
    if (!run.begins) {
      GoOnFrom(UnfinishedOf(b, run, kKeyIndex, warpgroup), ds, dk_upper, dk_lower);
    }
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      ptx::BarrierWait(full + 8 * stage, parity);
      const std::uint32_t d_o = shared + Shape::kRing + stage * Shape::kStageBytes;
      const std::uint32_t v = d_o + kTileBytes, grads = v + kTileBytes;
      const std::uint32_t aux = shared + Shape::kAux + stage * Shape::kAuxBytes;
      zero_tail(d_o, 2);
      const std::uint32_t la = aux + Shape::kAuxRows + 2 * t0 + 7 * kWeightPitch;
      const int buffer = tile & 1;
      const std::size_t unit = walk.unit;
      {
        float dp[32];
        const float a0 = ptx::LoadSharedF32(aux + 4 * t0);
        const float a1 = ptx::LoadSharedF32(aux + 4 * t0 + 32);
        ptx::PinRegisters(dp);
        ptx::WgmmaFence();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          ptx::WgmmaShared<E, false, false>(dp, descriptor(d_o + Shape::kHalf) + j * kStepColumns16,
                                            descriptor(v) + j * kStepColumns16, j > 0);
        }
        ptx::WgmmaCommit();
        if (tile >= 2 && !kSecond)
          ptx::BarrierWait(cross_empty + 8 * buffer, ((tile >> 1) & 1) ^ 1);
        const float a_l7 = ptx::LoadSharedBF16(la), b_l7 = ptx::LoadSharedBF16(la + 16);
        RowSums level7, flow;
        ptx::WgmmaWait<0>();
        ptx::PinRegisters(dp);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          std::uint32_t block[4], s[4] = {};
          if (!kSecond) ptx::LoadMatrix4(s, (cross_scores + offset) ^ (32 * j));
          BlockGrads<E>(block, s, dp + 8 * j, ds + 8 * j, aux, 16 * j, pair, a0, a1, a_l7, b_l7,
                        level7, flow);
          if (!kSecond) StoreBlock((cross + buffer * Shape::kHalf + offset) ^ (32 * j), block);
        }
        if constexpr (!kSecond) {
          ptx::FenceAsyncShared();
          ptx::BarrierArriveOnce(cross_full + 8 * buffer);
          level7.Reduce();
          flow.Reduce();
          __nv_bfloat16* out =
              b.scale_grads + (unit * kKeyBlocks * p.weight_rows + 7) * kChunk + t0;
          float* local_flow = b.local_flow + unit * 192 + kChunk + s_row;
          if (pair == 0) StoreAs(out, level7.a), local_flow[0] = flow.a;
          if (pair == 1) StoreAs(out + 8, level7.b), local_flow[8] = flow.b;
        }
      }
      const float total = ptx::LoadSharedF32(aux + Shape::kAuxTotal);
      {
        const float ea = ptx::Exp2(total - ptx::LoadSharedF32(aux + 4 * s_row));
        const float eb = ptx::Exp2(total - ptx::LoadSharedF32(aux + 4 * s_row + 32));
        std::uint32_t fragments[4][4];
        StartKeyGrads<E>(dk_upper, fragments, v + offset, ea, eb, descriptor(grads + Shape::kHalf));
        ptx::WgmmaWait<0>();
        ptx::PinRegisters(dk_upper);
      }
      {
        const float ea = ptx::Exp2(total - ptx::LoadSharedF32(aux + 4 * t0));
        const float eb = ptx::Exp2(total - ptx::LoadSharedF32(aux + 4 * t0 + 32));
        std::uint32_t fragments[4][4];
        StartKeyGrads<E>(dk_lower, fragments, v + Shape::kHalf + offset, ea, eb, descriptor(grads));
        ptx::WgmmaWait<0>();
        ptx::PinRegisters(dk_lower);
      }
      ptx::BarrierArriveOnce(empty + 8 * stage);
      walk.Next();
      next_stage();
    }
    if (!run.ends) {
      LeaveUnfinished(UnfinishedOf(b, run, kKeyIndex, warpgroup), ds, dk_upper, dk_lower);
      return;
    }
    ptx::NamedBarrier(1, 3 * kWarpgroup);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      std::uint32_t block[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) block[i] = E::Pack(ds[8 * j + 2 * i], ds[8 * j + 2 * i + 1]);
      StoreBlock((cross + offset) ^ (32 * j), block);
    }
    ptx::FenceAsyncShared();
    ptx::NamedBarrier(1, 3 * kWarpgroup);
    ptx::BarrierWait(full + 8 * stage, parity);
    const std::uint32_t q = shared + Shape::kRing + stage * Shape::kStageBytes;
    zero_tail(q, 2);
    const std::uint32_t q_right = q + kTileBytes, keys_right = keys + kTileBytes;
    float x[32];
    Multiply64<E, true>(dk_upper, descriptor(p0), descriptor(q_right), true);
    Multiply64<E, true>(dk_upper, descriptor(cross), descriptor(q_right + Shape::kHalf), true);
    StoreKeyGradient<E>(b, run, b.dk, dk_upper, s_row, kKey + 64 + 2 * pair);
    Multiply64<E, true>(dk_lower, descriptor(p1), descriptor(q + Shape::kHalf), true);
    StoreKeyGradient<E>(b, run, b.dk, dk_lower, t0, kKey + 2 * pair);
    Multiply64<E, false>(x, descriptor(cross), descriptor(keys_right), false);
    Multiply64<E, false>(x, descriptor(p1), descriptor(keys_right + Shape::kHalf), true);
    StoreKeyGradient<E>(b, run, b.dq, x, t0, kKey + 64 + 2 * pair);
  }
}

}  // namespace fenwick::cuda::hopper
