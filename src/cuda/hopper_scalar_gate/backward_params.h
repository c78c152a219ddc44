// Arrays of the backward between its passes. The forward's states, decays and weights are
// recomputed first (params.h). With S_e the node at slot e, a chunk c reads slots c, c & (c-1),
// ...;
//
//   R_e  gradient of S_e as read through its own level: sum over the chunks of its sibling
//   D_c  gradient of chunk c's state at its end: sum over the left nodes that hold c of their R,
//        decayed from their end to c's
//
// Keys are blocks of 128, padded (K / 128, one or two), values V / 64 tiles; a state is cut in
// M = V / 64 x K / 128 state tiles, key blocks inside value tiles. R, D have the order of swizzled
// [128][64] tiles.
#pragma once

#include "cuda/hopper_scalar_gate/params.h"

namespace fenwick::cuda::hopper {

inline constexpr int kKeyBlock = 128;
inline constexpr int kStateElements = kKeyBlock * kValueTile;
// Accumulators of a thread of each of the local kernel's three warpgroups.
inline constexpr int kUnfinished = 64 + 64 + 96;
inline constexpr int kFlowParts = kStateElements / 4 / 32;  // warps of the walk over one state

// How the heads of a q/k group are cut into runs, for a sequence of some chunks: as many as make
// `wanted` blocks, within bounds. A block takes a chunk and a run, and dq and dk are sums over
// runs. Nothing here depends on what else the call holds, and so no order of summation does.
struct RunRule {
  int group_heads = 1;  // H / G
  int wanted = 1;       // chunks x runs of one sequence
  int least = 1, most = 1;

  constexpr int Heads(int chunks) const {
    const int wanted_runs = wanted / chunks;
    const int runs = wanted_runs < least ? least : wanted_runs > most ? most : wanted_runs;
    return (group_heads + runs - 1) / runs;
  }
  constexpr int Runs(int chunks) const {
    const int heads = Heads(chunks);
    return (group_heads + heads - 1) / heads;
  }
};

// The runs of a launch: those that the pass holds heads of, in any sequence.
struct RunRange {
  RunRule rule;
  int heads = 0, runs = 0;  // of every sequence (divisions saved); 0: they are cut differently
  int begin = 0, count = 1;

  constexpr int Heads(int chunks) const { return heads > 0 ? heads : rule.Heads(chunks); }
  constexpr int Runs(int chunks) const { return heads > 0 ? runs : rule.Runs(chunks); }
};

// dq or dk: sums over the heads of a q/k group.
struct KeyGradient {
  float* partials = nullptr;       // [local runs, B, T, P, K], of sequences with several runs
  const float* addends = nullptr;  // [node runs, B, T, P, K]: the other share; null: none
  void* out = nullptr;             // [B, T, G, K] E
  std::int64_t batch_stride = 0, token_stride = 0, group_stride = 0;
};

// x -> keep * x + add: the flow across some tokens.
struct FlowStep {
  float keep, add;
};

struct BackwardParams {
  ForwardParams forward;
  int tokens = 0;  // T
  RunRange node_runs, local_runs;
  // Of this pass: its first q/k group and how many it has (P). A pass holds whole groups, or some
  // of the heads of one, from first_in_group on. A run that a pass ends within is left unfinished
  // in `node_dq` and `unfinished`, and the next pass goes on from there.
  int group_begin = 0, num_groups = 1, first_in_group = 0;
  std::int64_t partial_stride = 0;  // elements of one [B, T, P, K] partial sum
  KeyGradient dq, dk;
  int key_size = 0;  // K of dq and dk
  int key_blocks = 1, state_tiles = 1;

  // For each segment and set bit j of its index: its queries' part of R of that node.
  float* segment_reads = nullptr;  // [F, S, M, segment_levels, 128, 64]
  float* segment_grads = nullptr;  // [F, S, M, 128, 64] D of the segment's last chunk
  // Flow through the segment's first token (see finish.cuh), a partial sum for each warp.
  float* segment_flow = nullptr;  // [F, S, M, kFlowParts]
  void* chunk_grads = nullptr;    // [F, N, M, 128, 64] E: D
  // Gradients of the levels without the factor `scale`, rows as the weights; those of the local
  // levels with a value tile's first key block.
  __nv_bfloat16* scale_grads = nullptr;  // [F, N, M, W, 128]
  float* node_reads = nullptr;           // [F, N, M, 128] sum over nodes of w (q . S do)
  // Inside the chunk: read side minus write side of each token; then the read side from keys 0..63
  // of tokens 64..127.
  float* local_flow = nullptr;  // [F, N, V/64, 192]
  // The flow's way through the tokens (finish.cuh).
  float* flow_change = nullptr;    // [F, N, 128]: flow(t) - flow(t + 1)
  FlowStep* chunk_flow = nullptr;  // [F, N]: across the chunk
  float* node_dq = nullptr;        // [node runs, B, T, P, K]
  // The local kernel's accumulators, of even and of odd runs.
  float* unfinished = nullptr;    // [2, K/128, N, kUnfinished, 128]
  float* value_shares = nullptr;  // [F, N, V/64, 2, 32, 128] what the second key block gives to dv

  void* dv = nullptr;  // [B, T, H, V] E
  bool dv_mapped = true;
  std::int64_t dv_batch_stride = 0, dv_token_stride = 0, dv_head_stride = 0;
  float* dg = nullptr;  // [B, T, H]
  std::int64_t dg_batch_stride = 0, dg_token_stride = 0;
  void* dscales = nullptr;  // [B, T, H, L]
  std::int64_t dscales_batch_stride = 0, dscales_token_stride = 0, dscales_head_stride = 0;
};

}  // namespace fenwick::cuda::hopper
