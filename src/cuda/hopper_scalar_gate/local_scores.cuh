// The part of a chunk that stays inside it: scores q k^T of the lower triangle, kept as 16-bit A
// fragments, and their weighting for one head,
//   P[t, s] = scale * lambda[t, level(t, s)] * 2^(a[t] - a[s]) * (q[t] . k[s]).
// A warpgroup owns 64 query rows, a warp 16 of them, cut in blocks of 16 keys. All entries of a
// block below the diagonal share one level, and their decay factors through the end of the block's
// keys, so that both factors are at most 1. Blocks above the diagonal are zero.
#pragma once

#include "cuda/hopper_scalar_gate/config.h"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/shared.cuh"

namespace fenwick::cuda::hopper {

// Scores of a warp's 16 rows. `left` exists in warpgroup 1 only (keys 0..63).
struct LocalScores {
  std::uint32_t left[16];   // 4 blocks
  std::uint32_t below[12];  // blocks 0..2 of the warpgroup's own 64 keys, those left of `corner`
  std::uint32_t corner[3];  // the warp's block on the diagonal, its upper right 8x8 left out
};

// Where a lane stands. Rows t0 and t0 + 8 of the chunk; columns 2 * pair, + 1, + 8, + 9 of a block.
struct LanePlace {
  int warpgroup, warp, lane;
  int row;   // lane / 4: row in the warp's 16
  int pair;  // lane % 4
  int t0;    // row in the chunk
};

inline constexpr int kWeightPitch = 2 * kChunk;     // bytes of a weight row
inline constexpr int kDecayBytes = 2 * kChunk * 4;  // local_decay of a head

// Level scales and local_decay of one head, in shared memory: either rows of 128 weights
// (weights.cuh), or a tile of level_scales as it is in memory.
struct HeadWeights {
  std::uint32_t scales;
  std::uint32_t decay;
  int level_stride, token_stride;  // bytes
  int last_level;                  // levels beyond it are read as it
  float scale;                     // what remains to be multiplied in
  __device__ __forceinline__ float Level(int level, int t) const {
    return scale *
           ptx::LoadSharedBF16(scales + min(level, last_level) * level_stride + t * token_stride);
  }
  __device__ __forceinline__ float Decay(int t) const { return ptx::LoadSharedF32(decay + 4 * t); }
};

// A 16x16 block wholly below the diagonal, keys s0 .. s0 + 15; la, lb: lambda of the two rows.
template <typename Element>
__device__ __forceinline__ void WeightBlock(std::uint32_t (&p)[4], const std::uint32_t* scores,
                                            const HeadWeights& head, int s0, int pair, float a0,
                                            float a1, float la, float lb) {
  const float end = head.Decay(s0 + 15);
  const float ra = la * ptx::Exp2(a0 - end), rb = lb * ptx::Exp2(a1 - end);
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const float2 to_end = ptx::LoadSharedF32x2(head.decay + 4 * (kChunk + s0 + 8 * u + 2 * pair));
    p[2 * u] = Element::Multiply(scores[2 * u], Element::Pack(ra * to_end.x, ra * to_end.y));
    p[2 * u + 1] =
        Element::Multiply(scores[2 * u + 1], Element::Pack(rb * to_end.x, rb * to_end.y));
  }
}

// The block on the diagonal: levels 0..4, the strictly upper entries zero.
template <typename Element>
__device__ __forceinline__ void WeightCorner(std::uint32_t (&p)[4],
                                             const std::uint32_t (&scores)[3],
                                             const HeadWeights& head, const LanePlace& at, float a0,
                                             float a1) {
  const int c0 = 2 * at.pair, c1 = c0 + 1;
  const int level0 = 32 - __clz(at.row ^ c0), level1 = 32 - __clz(at.row ^ c1);
  const bool keep0 = c0 <= at.row, keep1 = c1 <= at.row;
  const int s0 = 64 * at.warpgroup + 16 * at.warp + c0;
  const float2 low = ptx::LoadSharedF32x2(head.decay + 4 * s0);
  const float2 high = ptx::LoadSharedF32x2(head.decay + 4 * (s0 + 8));
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

// P of the warpgroup's own 64 keys, as A fragments [block of 16 keys][register].
template <typename Element>
__device__ __forceinline__ void WeightOwn(std::uint32_t (&p)[4][4], const LocalScores& scores,
                                          const HeadWeights& head, const LanePlace& at) {
  const float a0 = head.Decay(at.t0), a1 = head.Decay(at.t0 + 8);
  std::uint32_t corner[4];
  WeightCorner<Element>(corner, scores.corner, head, at, a0, a1);
  const float a_l5 = head.Level(5, at.t0), b_l5 = head.Level(5, at.t0 + 8);
  const float a_l6 = head.Level(6, at.t0), b_l6 = head.Level(6, at.t0 + 8);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j < 3 && j < at.warp) {
      const bool far = (at.warp ^ j) >= 2;
      WeightBlock<Element>(p[j], scores.below + 4 * (j < 3 ? j : 0), head,
                           64 * at.warpgroup + 16 * j, at.pair, a0, a1, far ? a_l6 : a_l5,
                           far ? b_l6 : b_l5);
    } else {
#pragma unroll
      for (int u = 0; u < 4; ++u) p[j][u] = j == at.warp ? corner[u] : 0;
    }
  }
}

// P of keys 0..63 in warpgroup 1.
template <typename Element>
__device__ __forceinline__ void WeightLeft(std::uint32_t (&p)[4][4], const LocalScores& scores,
                                           const HeadWeights& head, const LanePlace& at) {
  const float a0 = head.Decay(at.t0), a1 = head.Decay(at.t0 + 8);
  const float a_l7 = head.Level(7, at.t0), b_l7 = head.Level(7, at.t0 + 8);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    WeightBlock<Element>(p[j], scores.left + 4 * j, head, 16 * j, at.pair, a0, a1, a_l7, b_l7);
  }
}

}  // namespace fenwick::cuda::hopper
