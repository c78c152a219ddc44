// Gated delta rule, backward: buffers, and what its files share. The adjoint of delta.cuh, in
// reverse order; dX stands for the gradient of X.
//
// Reads (delta_backward_tree.cu), from the oldest node to the newest, with lo = level_scales do:
//   dS_{e_i} += Q^_i^T lo        dPhi_{e_i} += Q^_i^T dQ^_{i+1}
//   dQ^_i = lo S_{e_i}^T + dQ^_{i+1} Phi_{e_i}^T
// Merges, from the top of the tree down, with p, r, l the parent, the right and the left child:
//   dS_l += Phi_r^T dS_p       dPhi_l += Phi_r^T dPhi_p
//   dS_r = dS_p                dPhi_r = dPhi_p Phi_l^T + dS_p S_l^T
// Chunks (delta_backward_chunk.cu), from dM, dX and dQ~:
//   dU = K~ dX      dW = -E^T dQ~ - K~ dM      dB = level_scales (do V^T)
//   dE = dB Tb^T - dQ~ W^T                     dTb = E^T dB + dW (exp(a) K)^T + dU V^T
//   dN = -Ti^T dTb Tb^T                        dK~ = U dX^T - W dM^T
//   dv = P^T do + Tb^T dU
//   dbeta[s] = sum_t Ti dTb[t,s] + sum_r dN N / beta [s,r]
//   dq = (dE D scale) K + scale exp(a) dQ~
//   dk = (dE D scale)^T Q + (F + F^T) K + exp(a) (Tb^T dW) + exp(A - a) dK~,   F = dN N / (k.k)
// dg[r] is the flow over r: of the pairs E dE + N dN with s < r <= t; of rows t >= r that use
// exp(a); of rows s < r that use exp(A - a); and exp(A) trace(dM) for all.
#pragma once

#include "cuda/general/delta.cuh"

namespace fenwick::cuda::general {

// Chunks whose reads of one node are summed by one block; longer runs are summed in two steps.
inline constexpr int kDeltaRunShift = 4;

template <typename T>
struct DeltaGradients {
  T* grads = nullptr;        // [chunks, heads, K, V] of the left nodes' states; at last dX
  Pyramid<T> phi;            // of the transitions; at level 0 dM
  T* partial = nullptr;      // [runs, heads, K, V + K] of one level's grads and phi
  T* initial = nullptr;      // [N, H, slots, K, V] of all heads: the caller's, or null
  T* query = nullptr;        // [chunks, heads, 2, 64, K] dQ^ of even and odd order
  T* final_query = nullptr;  // [N, heads, 2, K, K] the same of Z
  T* d_mix = nullptr;        // [chunks, heads, 64, 64] dB, then D dE scale
  T* d_solve = nullptr;      // [chunks, heads, 64, 64] dTb, then dTb Tb^T, then F, then F + F^T
  T* dw = nullptr;           // [chunks, heads, 64, K]
  T* du = nullptr;           // [chunks, heads, 64, V]
  T* row_flow = nullptr;     // [chunks, heads, 64] of pairs, over each row
  T* d_beta = nullptr;       // [chunks, heads, 64]
  T* start_flow = nullptr;   // [chunks, heads, K tiles, 64] of rows that use exp(a)
  T* end_flow = nullptr;     // [chunks, heads, K tiles, 64] of rows that use exp(A - a)

  __device__ T* Query(const Problem& problem, std::int64_t item, int order) const {
    return query + (item * 2 + order % 2) * kChunk * problem.K;
  }
  __device__ T* FinalQuery(const Problem& problem, const Span& span, int head, int order) const {
    return final_query +
           ((static_cast<std::int64_t>(span.sequence) * problem.heads + head) * 2 + order % 2) *
               problem.K * problem.K;
  }
  // Null where nobody wants it.
  __device__ T* State(const Problem& problem, const NodeAt& node) const {
    if (node.item < 0 && initial == nullptr) return nullptr;
    return node.Find(problem, grads, initial);
  }
};

// Where the gradients of the tokens go.
struct DeltaOutputs {
  TokenGradients q, k, v, g, beta;
  Rows level_scales;
};

// grads, phi, initial, and query of order 0.
template <typename Math>
void ComputeDeltaTreeGradients(const Problem& problem, const Plan& plan,
                               const DeltaStates<typename Math::Scalar>& states,
                               const FinalChain<typename Math::Scalar>& final_chain,
                               const DeltaGradients<typename Math::Scalar>& gradients,
                               const TokenRows& d_o, const TensorView& d_final_nodes,
                               cudaStream_t stream);
template <typename Math>
void ComputeDeltaChunkGradients(const Problem& problem, const Plan& plan,
                                const DeltaStates<typename Math::Scalar>& states,
                                const DeltaGradients<typename Math::Scalar>& gradients,
                                const TokenRows& d_o, const DeltaOutputs& out, cudaStream_t stream);

}  // namespace fenwick::cuda::general
