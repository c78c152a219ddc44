// Scalar gate, backward: buffers, and what its files share.
//
// Along the tree (scalar_backward_states.cu), with S the left nodes' states recomputed:
//   R_e  = sum over readers t of node e of level_scales[t, l] exp(gap + a[t]) q[t] do[t]^T
//   down the tree, D(bit, end - 2^bit) += exp(A over the right child) D(bit + 1, end), starting
//   from R; at the leaves D_c is the gradient of chunk c's own state
// Inside the chunks (scalar_backward.cu), with P = dots x weights, dP = dO V^T:
//   dv[s] = sum_t P[t, s] do[t] + exp(A - a[s]) D_c^T k[s]
//   dk[s] = sum_t dS[t, s] q[t] + exp(A - a[s]) D_c v[s],            dS = dP x weights
//   dq[t] = sum_s dS[t, s] k[s] + sum_e level_scales exp(gap + a[t]) S_e do[t]
//   dlevel_scales[t, l] = sum of P dP / level_scales over level l; for nodes exp() q[t]^T S_e do[t]
// and dg[r] is the flow over r: the sum of output x gradient over all pairs s < r <= t, each part
// summed directly, never as a difference of running sums:
//   pairs inside the chunk; reads by t >= r; writes by s < r; and what passes over the whole chunk,
//   that is what leaves each node that the chunk reads and is used after the chunk: later reads of
//   the node, and the merge that carries it further.
#pragma once

#include "cuda/general/scalar.cuh"

namespace fenwick::cuda::general {

// Chunks whose reads of one node are summed by one block; longer runs are summed in two steps.
inline constexpr int kRunShift = 4;

template <typename T>
struct ScalarGradients {
  T* grads = nullptr;       // [chunks, heads, K, V] R, then D
  T* partial = nullptr;     // [runs of 2^kRunShift chunks, heads, K, V] of one level
  T* initial = nullptr;     // [N, H, slots, K, V] of all heads: the caller's, or null
  T* read_flow = nullptr;   // [chunks, heads, node_bits] read by the chunk through node `bit`
  T* final_flow = nullptr;  // [N, heads, node_bits] read by the final state
  T* merge_flow = nullptr;  // [chunks, heads] carried by the merge of left node end = chunk + 1
  T* initial_merge_flow = nullptr;  // [N, heads, node_bits] same, of initial nodes
  T* row_flow = nullptr;    // [chunks, heads, 64] over each row: pairs in the chunk, and reads
  T* write_flow = nullptr;  // [chunks, heads, 64] of each row, past the end of the chunk
  int node_bits = 0;

  __device__ T& ReadFlow(std::int64_t item, int bit) const {
    return read_flow[item * node_bits + bit];
  }
  __device__ T& MergeFlow(const Problem& problem, const Span& span, int head, int bit,
                          const NodeAt& node) const {
    return node.item >= 0 ? merge_flow[node.item]
                          : initial_merge_flow[FlowIndex(problem, span, head) + bit];
  }
  __device__ T& FinalFlow(const Problem& problem, const Span& span, int head, int bit) const {
    return final_flow[FlowIndex(problem, span, head) + bit];
  }
  __device__ std::int64_t FlowIndex(const Problem& problem, const Span& span, int head) const {
    return (static_cast<std::int64_t>(span.sequence) * problem.heads + head) * node_bits;
  }
};

// Computes grads, initial, final_flow and merge_flow from the states.
template <typename Math>
void ComputeScalarStateGradients(const Problem& problem, const Plan& plan,
                                 const ScalarStates<typename Math::Scalar>& states,
                                 const ScalarGradients<typename Math::Scalar>& gradients,
                                 const TokenRows& d_o, const TensorView& d_final_nodes,
                                 cudaStream_t stream);

// Where the gradients of the tokens go.
struct ScalarOutputs {
  TokenGradients q, k, v, g;
  Rows level_scales;
};

// Computes the gradients of the tokens from those of the states.
template <typename Math>
void ComputeScalarChunkGradients(const Problem& problem, const Plan& plan,
                                 const ScalarStates<typename Math::Scalar>& states,
                                 const ScalarGradients<typename Math::Scalar>& gradients,
                                 const TokenRows& d_o, const ScalarOutputs& out,
                                 cudaStream_t stream);

}  // namespace fenwick::cuda::general
