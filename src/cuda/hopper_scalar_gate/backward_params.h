// Arrays of the backward between its passes. The forward's states, decays and weights are
// recomputed first (params.h). With S_e the node at slot e, a chunk c reads slots c, c & (c-1),
// ...;
//
//   R_e  gradient of S_e as read through its own level: sum over the chunks of its sibling
//   D_c  gradient of chunk c's state at its end: sum over the left nodes that hold c of their R,
//        decayed from their end to c's
//
// Keys are padded to K = 128; values are V / 64 tiles; R, D have the order of swizzled [K][64]
// tiles.
#pragma once

#include "cuda/hopper_scalar_gate/params.h"

namespace fenwick::cuda::hopper {

inline constexpr int kBackwardKeySize = 128;
inline constexpr int kStateElements = kBackwardKeySize * kValueTile;
inline constexpr int kFlowParts = kStateElements / 4 / 32;  // warps of the walk over one state

// dq or dk: sums over the heads of a q/k group. A pass's blocks take runs of heads; passes that
// hold different heads of the same group add up in `total`, one after the other, so that the order
// of every sum is fixed.
struct KeyGradient {
  float* partials = nullptr;       // [local_runs, B, T, P, 128]; null where local_runs is 1
  const float* addends = nullptr;  // [num_addends, B, T, P, 128]: the pass's other share
  int num_addends = 0;
  float* total = nullptr;  // [B, T, 128]; null where a pass holds whole groups
  void* out = nullptr;     // [B, T, G, K] E
  std::int64_t batch_stride = 0, token_stride = 0, group_stride = 0;
};

// x -> keep * x + add: the flow across some tokens.
struct FlowStep {
  float keep, add;
};

struct BackwardParams {
  ForwardParams forward;
  int tokens = 0;          // T
  int segment_levels = 0;  // levels of the longest tree over segments
  // Runs of heads within a q/k group and pass, of the node kernel and of the local kernel.
  int node_runs = 0, node_heads = 0;
  int local_runs = 0, local_heads = 0;
  // Of this pass: its first q/k group, how many it has (P), and whether it holds the first and the
  // last heads of its groups.
  int group_begin = 0, num_groups = 1;
  bool begins_groups = true, ends_groups = true;
  std::int64_t partial_stride = 0;  // elements of one [B, T, P, 128] partial sum
  KeyGradient dq, dk;
  int key_size = 0;  // K of dq and dk

  // For each segment and set bit j of its index: its queries' part of R of that node.
  float* segment_reads = nullptr;  // [F, S, V/64, segment_levels, K, 64]
  float* segment_grads = nullptr;  // [F, S, V/64, K, 64] D of the segment's last chunk
  // Flow through the segment's first token (see finish.cuh), a partial sum for each warp.
  float* segment_flow = nullptr;  // [F, S, V/64, kFlowParts]
  void* chunk_grads = nullptr;    // [F, N, V/64, K, 64] E: D
  // Gradients of the levels without the factor `scale`, rows as the weights.
  __nv_bfloat16* scale_grads = nullptr;  // [F, N, V/64, W, 128]
  float* node_reads = nullptr;           // [F, N, V/64, 128] sum over nodes of w (q . S do)
  // Inside the chunk: read side minus write side of each token; then the read side from keys 0..63
  // of tokens 64..127.
  float* local_flow = nullptr;  // [F, N, V/64, 192]
  // The flow's way through the tokens (finish.cuh).
  float* flow_change = nullptr;    // [F, N, 128]: flow(t) - flow(t + 1)
  FlowStep* chunk_flow = nullptr;  // [F, N]: across the chunk
  float* node_dq = nullptr;        // [node_runs, B, T, P, 128]

  void* dv = nullptr;  // [B, T, H, V] E
  bool dv_mapped = true;
  std::int64_t dv_batch_stride = 0, dv_token_stride = 0, dv_head_stride = 0;
  float* dg = nullptr;  // [B, T, H]
  std::int64_t dg_batch_stride = 0, dg_token_stride = 0;
  void* dscales = nullptr;  // [B, T, H, L]
  std::int64_t dscales_batch_stride = 0, dscales_token_stride = 0, dscales_head_stride = 0;
};

}  // namespace fenwick::cuda::hopper
