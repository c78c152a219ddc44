// The part of a chunk that stays inside it: scores q k^T of the lower triangle, kept as 16-bit A
// fragments, and for one head after another their weighting,
//   P[t, s] = scale * lambda[t, level(t, s)] * 2^(a[t] - a[s]) * (q[t] . k[s]),
// written to shared memory for the warpgroups that multiply P with V. A half of the chunk is 64
// query rows, a warp's part 16 of them, cut in blocks of 16 keys. All entries of a block below the
// diagonal share one level, and their decay factors through the end of the block's keys, so that
// both factors are at most 1. Blocks above the diagonal are zero.
#pragma once

#include "cuda/hopper_scalar_gate/config.h"
#include "cuda/hopper_scalar_gate/output_shape.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/element.cuh"

namespace fenwick::cuda::hopper {

// Scores of a warp's 16 rows. `left` exists in half 1 only (keys 0..63).
struct LocalScores {
  std::uint32_t left[16];   // 4 blocks
  std::uint32_t below[12];  // blocks 0..2 of the half's own 64 keys, those left of `corner`
  std::uint32_t corner[3];  // the warp's block on the diagonal, its upper right 8x8 left out
};

// Where a lane stands. Rows t0 and t0 + 8 of the chunk; columns 2 * pair, + 1, + 8, + 9 of a block.
struct LanePlace {
  int half, warp, lane;
  int row;   // lane / 4: row in the warp's 16
  int pair;  // lane % 4
  int t0;    // row in the chunk
  __device__ __forceinline__ LanePlace(int half, int warp, int lane)
      : half(half),
        warp(warp),
        lane(lane),
        row(lane >> 2),
        pair(lane & 3),
        t0(64 * half + 16 * warp + (lane >> 2)) {}
};

// Scores of a half's rows with the chunk's k: q, then k lie in the ring from stage `first` on.
template <typename Element, int kKeySize>
__device__ __forceinline__ void ComputeScores(LocalScores& scores, std::uint32_t shared, int first,
                                              const LanePlace& at) {
  using Shape = OutputShape<kKeySize>;
  const auto tile = [=](int i) {  // of the stage after `first`
    const int stage = first + i < Shape::kStages ? first + i : first + i - Shape::kStages;
    return shared + stage * Shape::kTileBytes;
  };
  float s[32];
#pragma unroll 1
  for (int own = 0; own < 2; ++own) {  // keys 0..63, then the half's own
    ptx::WgmmaFence();
#pragma unroll
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {
      const std::uint64_t q = TileDescriptor(tile(slab) + 64 * at.half * kTileRowBytes);
      const std::uint64_t k =
          TileDescriptor(tile(Shape::kSlabs + slab) + own * at.half * 64 * kTileRowBytes);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        ptx::WgmmaShared<Element, false, false>(s, q + j * kStepColumns16, k + j * kStepColumns16,
                                                slab + j > 0);
      }
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

// A 16x16 block wholly below the diagonal, keys s0 .. s0 + 15; la, lb: lambda of the two rows.
template <typename Element>
__device__ __forceinline__ void WeightBlock(std::uint32_t (&p)[4], const std::uint32_t* scores,
                                            const HeadReader& head, int s0, int pair, float a0,
                                            float a1, float la, float lb) {
  const float end = head.Decay(s0 + 15);
  const float ra = la * ptx::Exp2(a0 - end), rb = lb * ptx::Exp2(a1 - end);
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const float2 to_end = head.DecayToBlockEnd(s0 + 8 * u + 2 * pair);
    p[2 * u] = Element::Multiply(scores[2 * u], Element::Pack(ra * to_end.x, ra * to_end.y));
    p[2 * u + 1] =
        Element::Multiply(scores[2 * u + 1], Element::Pack(rb * to_end.x, rb * to_end.y));
  }
}

// The block on the diagonal: levels 0..4, the strictly upper entries zero.
template <typename Element>
__device__ __forceinline__ void WeightCorner(std::uint32_t (&p)[4],
                                             const std::uint32_t (&scores)[3],
                                             const HeadReader& head, const LanePlace& at, float a0,
                                             float a1) {
  const int c0 = 2 * at.pair, c1 = c0 + 1;
  const int level0 = 32 - __clz(at.row ^ c0), level1 = 32 - __clz(at.row ^ c1);
  const bool keep0 = c0 <= at.row, keep1 = c1 <= at.row;
  const int s0 = at.t0 - at.row + c0;
  const float2 low = ptx::LoadSharedF32x2(head.decay_address + 4 * s0);
  const float2 high = ptx::LoadSharedF32x2(head.decay_address + 4 * (s0 + 8));
  const int t1 = at.t0 + 8;
  const float across = head.Level(4, t1);
  const float a_l0 = head.Level(level0, at.t0), a_l1 = head.Level(level1, at.t0);
  const float b_l0 = head.Level(level0, t1), b_l1 = head.Level(level1, t1);
  using E = Element;
  using ptx::Exp2;
  p[0] = E::Pack(keep0 ? E::Low(scores[0]) * a_l0 * Exp2(a0 - low.x) : 0.f,
                 keep1 ? E::High(scores[0]) * a_l1 * Exp2(a0 - low.y) : 0.f);
  p[1] = E::Pack(E::Low(scores[1]) * across * Exp2(a1 - low.x),
                 E::High(scores[1]) * across * Exp2(a1 - low.y));
  p[2] = 0;
  p[3] = E::Pack(keep0 ? E::Low(scores[2]) * b_l0 * Exp2(a1 - high.x) : 0.f,
                 keep1 ? E::High(scores[2]) * b_l1 * Exp2(a1 - high.y) : 0.f);
}

// Writes the warp's part of P to `blocks`, swizzled [64][64] tiles: of half 0 its own keys; of half
// 1 keys 0..63, then its own. Blocks above the diagonal are left alone.
template <typename Element>
__device__ __forceinline__ void WeightScores(std::uint32_t blocks, const LocalScores& scores,
                                             const HeadReader& head, const LanePlace& at) {
  const std::uint32_t row = blocks + (16 * at.warp + MatrixRow(at.lane)) * kTileRowBytes;
  const int swizzle = at.lane & 7, group = MatrixGroup(at.lane);
  const auto store = [&](std::uint32_t tile, int block, const std::uint32_t(&p)[4]) {
    ptx::StoreMatrix4(tile + (((2 * block + group) ^ swizzle) << 4), p[0], p[1], p[2], p[3]);
  };
  const float a0 = head.Decay(at.t0), a1 = head.Decay(at.t0 + 8);
  std::uint32_t own = row;
  if (at.half == 1) {
    const float la = head.Level(7, at.t0), lb = head.Level(7, at.t0 + 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      std::uint32_t p[4];
      WeightBlock<Element>(p, scores.left + 4 * j, head, 16 * j, at.pair, a0, a1, la, lb);
      store(row, j, p);
    }
    own += 64 * kTileRowBytes;
  }
  {
    std::uint32_t p[4];
    WeightCorner<Element>(p, scores.corner, head, at, a0, a1);
    store(own, at.warp, p);
  }
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    if (j < at.warp) {
      const int level = (at.warp ^ j) >= 2 ? 6 : 5;
      std::uint32_t p[4];
      WeightBlock<Element>(p, scores.below + 4 * j, head, 64 * at.half + 16 * j, at.pair, a0, a1,
                           head.Level(level, at.t0), head.Level(level, at.t0 + 8));
      store(own, j, p);
    }
  }
}

// Writes the weights of the head's nodes (output.cuh) for the warp's rows: [node][128].
template <typename Element>
__device__ __forceinline__ void WeightNodes(std::uint32_t weights, const OutputItem& item,
                                            const HeadReader& head, const LanePlace& at) {
  int rest = item.place.index;
  for (int i = 0; i < at.pair; ++i) rest &= rest - 1;
#pragma unroll 1
  for (int node = at.pair; node < max(item.nodes, 1); node += 4) {
    const std::uint32_t lambda =
        head.scales_address + head.NodeOffset(node, rest) + at.t0 * head.token_stride;
    float first = ptx::LoadSharedBF16(lambda) * head.scale;
    float second = ptx::LoadSharedBF16(lambda + 8 * head.token_stride) * head.scale;
    if (head.tiles.tiled) {  // rows of weights have the decays in them
      const float gap = ptx::LoadSharedF32(head.decay_address + kDecayBytes + 4 * node);
      first *= ptx::Exp2(head.Decay(at.t0) + gap);
      second *= ptx::Exp2(head.Decay(at.t0 + 8) + gap);
    }
    if (item.nodes == 0) first = second = 0;  // the empty slot 0 stands in
    const std::uint32_t row = weights + node * kWeightPitch + 2 * at.t0;
    ptx::StoreSharedU16(row, Element::Pack(first, 0));
    ptx::StoreSharedU16(row + 16, Element::Pack(second, 0));
#pragma unroll
    for (int i = 0; i < 4; ++i) rest &= rest - 1;
  }
}

// One of the warpgroups that weight scores: `group` of kScoreGroups, each with one half of the
// chunk or both.
template <typename Element, int kKeySize>
__device__ __forceinline__ void RunScores(std::uint32_t shared,
                                          const OutputBarriers<kKeySize>& barriers,
                                          const ForwardParams& p, int group, int warp, int lane) {
  using Shape = OutputShape<kKeySize>;
  constexpr int kHalves = 2 / Shape::kScoreGroups;
  const auto place = [=](int i) { return LanePlace(kHalves == 2 ? i : group, warp, lane); };
  const auto blocks = [=](int stage, int half) {
    return shared + Shape::kScores + stage * Shape::kScoreBytes + half * Shape::kBlockBytes;
  };
#pragma unroll
  for (int i = 0; i < kHalves; ++i) {
    const int half = place(i).half;
    for (int stage = 0; stage < Shape::kScoreStages; ++stage) {
      ZeroRows(blocks(stage, half) + half * Shape::kBlockBytes, 16 * warp, 16 * warp + 16, lane,
               32);
    }
  }

  HeadReader head(p, barriers);
  ItemReader<kKeySize> items;
  RingPosition ring, tiles;
  while (true) {
    const int index = items.Next(shared, barriers);
    if (index < 0) return;
    const OutputItem item(p, index);
    const int first_tile = tiles.stage;
    for (int i = 0; i < 2 * Shape::kSlabs; ++i) {
      ptx::BarrierWait(barriers.full + 8 * tiles.stage, tiles.phase);
      tiles.Advance(Shape::kStages);
    }
    LocalScores scores[kHalves];
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      ComputeScores<Element, kKeySize>(scores[i], shared, first_tile, place(i));
    }
    // k is the consumers' to give back, as all tiles, but they do not read it; q they give back
    // once they see weights of this item.
    RingPosition keys{first_tile, 0};
    for (int i = 0; i < Shape::kSlabs; ++i) keys.Advance(Shape::kStages);
    for (int i = 0; i < Shape::kSlabs; ++i) {
      for (int j = 0; j < kHalves; ++j) {
        ptx::BarrierArriveOnce(barriers.empty + 8 * keys.stage);
      }
      keys.Advance(Shape::kStages);
    }
    // Stages up to the next item's q.
    const int used = item.heads * p.value_tiles * (max(item.nodes, 1) * Shape::kNodeStages + 1);
    tiles.phase ^= (tiles.stage + used) / Shape::kStages & 1;
    tiles.stage = (tiles.stage + used) % Shape::kStages;

    const int first_head = p.head_begin + item.first_head;
#pragma unroll 1
    for (int i = 0; i < item.heads; ++i) {
      head.Open(shared, barriers, p, first_head + i, i == 0);
      ptx::BarrierWait(barriers.scores_empty + 8 * ring.stage, ring.phase ^ 1);
#pragma unroll
      for (int j = 0; j < kHalves; ++j) {
        WeightNodes<Element>(shared + Shape::kNodeWeights + ring.stage * Shape::kNodeWeightBytes,
                             item, head, place(j));
      }
      ptx::BarrierArriveOnce(barriers.weights_full + 8 * ring.stage);
#pragma unroll
      for (int j = 0; j < kHalves; ++j) {
        WeightScores<Element>(blocks(ring.stage, place(j).half), scores[j], head, place(j));
      }
      ptx::FenceAsyncShared();
      head.Close(barriers, first_head + i, i + 1 == item.heads);
      ptx::BarrierArriveOnce(barriers.scores_full + 8 * ring.stage);
      ring.Advance(Shape::kScoreStages);
    }
  }
}

}  // namespace fenwick::cuda::hopper
