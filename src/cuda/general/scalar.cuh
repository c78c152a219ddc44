// Scalar gate: what forward and backward share. The transition of a run of chunks is one number,
// the exponential of its summed log decay.
//
//   leaf      X_c = sum_{s in c} exp(A_c - a[s]) k[s] v[s]^T      A_c = a[63] of chunk c
//   merge     S(bit + 1, end) = exp(A over the right child) S(bit, end - 2^bit) + S(bit, end)
//   read      o[t] += level_scales[t, l] exp(A over the gap + a[t]) S^T q[t]
#pragma once

#include "cuda/general/arena.h"
#include "cuda/general/call.h"
#include "cuda/general/problem.cuh"

namespace fenwick::cuda::general {

// One number or matrix per chunk and head of the pass, in this order.
template <typename T>
struct ScalarStates {
  T* leaf_total = nullptr;  // [chunks, heads] A_c
  T* node_total = nullptr;  // [chunks, heads] A over the chunks of left node `end` = chunk + 1
  T* states = nullptr;      // [chunks, heads, K, V] left nodes
};

template <typename T>
ScalarStates<T> TakeScalarStates(Arena& arena, const Plan& plan, std::int64_t heads) {
  const std::int64_t items = plan.total_chunks * heads;
  ScalarStates<T> buffers;
  buffers.leaf_total = arena.Take<T>(items);
  buffers.node_total = arena.Take<T>(items);
  buffers.states = arena.Take<T>(items * plan.K * plan.V);
  return buffers;
}

// Computes all three (scalar_states.cu).
template <typename Math>
void ComputeScalarStates(const Problem& problem, const Plan& plan,
                         const ScalarStates<typename Math::Scalar>& buffers, cudaStream_t stream);

// Log decay over the part of left node `node` that the call's chunks hold.
template <typename T>
__device__ inline double NodeTotal(const NodeAt& node, const T* node_total) {
  return node.item >= 0 ? static_cast<double>(node_total[node.item]) : 0.0;
}

// Log decay over the chunks of the call in [end - 2^bit, end), a right child: the left nodes inside
// it, and its last chunk.
template <typename T>
__device__ inline double RightTotal(const Problem& problem, const Span& span, int head, int bit,
                                    std::int64_t end, const ScalarStates<T>& buffers) {
  const std::int64_t first = span.first_chunk();
  double total = buffers.leaf_total[ItemOf(problem, span.chunk_begin + end - 1 - first, head)];
  for (int b = 0; b < bit; ++b) {
    const std::int64_t e = end - (std::int64_t{1} << b);
    if (e <= first) break;
    total += buffers.node_total[ItemOf(problem, span.chunk_begin + e - 1 - first, head)];
  }
  return total;
}

// f(bit, node, gap): the nodes that absolute chunk `chunk` reads, newest first, with the log decay
// from the end of the node to the start of the chunk.
template <typename T, typename F>
__device__ inline void ForEachRead(const Problem& problem, const Span& span, std::int64_t chunk,
                                   int head, const T* node_total, F&& f) {
  double gap = 0;
  ForEachLeftNode(static_cast<std::uint64_t>(chunk), [&](int bit, std::uint64_t end) {
    const NodeAt node(problem, span, head, bit, static_cast<std::int64_t>(end));
    if (node.exists()) f(bit, node, gap);
    gap += NodeTotal(node, node_total);
  });
}

// scale[t] = problem.scale level_scales[t, level of node] exp(gap + a[t]); synchronise before use.
template <typename T>
__device__ inline void LoadReadScale(const Problem& problem, const ChunkAt& chunk, int h, int bit,
                                     double gap, const double* sums, T* scale) {
  if (threadIdx.x >= kChunk) return;
  const int t = threadIdx.x;
  scale[t] = static_cast<T>(problem.scale) * Exp<T>(gap + sums[t]) *
             LoadToken<T>(problem.level_scales, chunk.span, chunk.first_row() + t, h,
                          NodeLevel(problem, bit));
}

}  // namespace fenwick::cuda::general
