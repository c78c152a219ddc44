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

struct BackwardParams {
  ForwardParams forward;
  int groups = 1;                   // G
  int tokens = 0;                   // T
  int batches = 0;                  // B
  int segment_levels = 0;           // levels of the longest tree over segments
  int runs_per_pass = 0;            // runs of heads_per_block heads within a q/k group, in one pass
  int run_begin = 0;                // of this pass, within the group
  std::int64_t partial_stride = 0;  // elements of one [B, T, G, 128] partial sum

  // For each segment and set bit j of its index: its queries' part of R of that node.
  float* segment_reads = nullptr;  // [F, S, V/64, segment_levels, K, 64]
  float* segment_grads = nullptr;  // [F, S, V/64, K, 64] D of the segment's last chunk
  // Flow through the segment's first token (see finish.cuh), a partial sum for each warp.
  float* segment_flow = nullptr;  // [F, S, V/64, kFlowParts]
  void* chunk_grads = nullptr;    // [F, N, V/64, K, 64] E: D
  float* scale_grads = nullptr;   // [F, N, V/64, W, 128] gradients of the levels, rows as weights
  float* node_reads = nullptr;    // [F, N, V/64, 128] sum over nodes of w (q . S do)
  // Inside the chunk: read side minus write side of each token; then the read side from keys 0..63
  // of tokens 64..127.
  float* local_flow = nullptr;   // [F, N, V/64, 192]
  float* flow_change = nullptr;  // [F, N, 128]: flow(t) - flow(t + 1)
  float* node_dq = nullptr;      // [runs, B, T, G, 128]
  float* local_dq = nullptr;     // [runs, B, T, G, 128]
  float* local_dk = nullptr;     // [runs, B, T, G, 128]

  void* dv = nullptr;  // [B, T, H, V] E
  bool dv_mapped = true;
  std::int64_t dv_batch_stride = 0, dv_token_stride = 0, dv_head_stride = 0;
  float* dg = nullptr;  // [B, T, H]
  std::int64_t dg_batch_stride = 0, dg_token_stride = 0;
  void* dscales = nullptr;  // [B, T, H, L]
  std::int64_t dscales_batch_stride = 0, dscales_token_stride = 0, dscales_head_stride = 0;
};

}  // namespace fenwick::cuda::hopper
