// The fenwick operators as differentiable functions of ATen tensors, for models written in C++.
// Everything goes through the dispatcher (torch.ops.fenwick.*, libfenwick_torch.so), so the same
// call runs on every device that has kernels. Shapes, types and errors: fenwick/ops.h and
// fenwick/layers.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "fenwick/host_state.h"

namespace fenwick_torch {

struct AttentionOptions {
  std::optional<at::Tensor> cu_seqlens = {};  // [N + 1] int32 or int64, packed sequences (B = 1)
  double scale = 1.0;                         // multiplies q
  bool saturate = false;                      // the last level absorbs all that is older
};

// States of N sequences as tensors (layout: fenwick/state.h).
struct State {
  at::Tensor k, v, g;             // [N, ring, G, K] [N, ring, H, V] [N, ring, H]
  at::Tensor beta;                // [N, ring, H]; undefined for the scalar gate
  at::Tensor nodes;               // [N, H, S, K, V]
  at::Tensor position, base;      // [N] int64
  std::int64_t max_position = 0;  // upper bound of position

  bool defined() const { return position.defined(); }
  std::int64_t Bytes() const;
  State Clone() const;
  // A state whose sequence i is a copy of sequence indices[i].
  State Select(const at::Tensor& indices) const;
  // Adds node slots so that `tokens` more tokens fit; num_levels > 0 bounds them as saturation with
  // that many levels does. Call before LogLinear*Step; does nothing when there is room.
  void Reserve(std::int64_t tokens, int num_levels = 0);
};

// Empty states: every sequence at position 0.
State EmptyState(const fenwick::StateSpec& spec, at::Device device);

struct OutputAndState {
  at::Tensor o;  // [B, T, H, V]
  State state;   // after the last token of every sequence
};

// q, k [B, T, G, K]; v [B, T, H, V]; g, beta [B, T, H]; level_scales [B, T, H, L] -> [B, T, H, V].
at::Tensor LogLinearAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& g, const at::Tensor& level_scales,
                              const AttentionOptions& options = {});
at::Tensor LogLinearGatedDeltaRule(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& g, const at::Tensor& beta,
                                   const at::Tensor& level_scales,
                                   const AttentionOptions& options = {});

// The same from and to states; differentiable through both.
OutputAndState LogLinearAttentionWithState(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const at::Tensor& g,
                                           const at::Tensor& level_scales, const State& state,
                                           const AttentionOptions& options = {});
OutputAndState LogLinearGatedDeltaRuleWithState(const at::Tensor& q, const at::Tensor& k,
                                                const at::Tensor& v, const at::Tensor& g,
                                                const at::Tensor& beta,
                                                const at::Tensor& level_scales, const State& state,
                                                const AttentionOptions& options = {});

// Decoding: T new tokens, 1 <= T <= 64, for every sequence of `state`, which is updated in place
// (and grown where needed). No gradients, no cu_seqlens.
at::Tensor LogLinearAttentionStep(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const at::Tensor& g, const at::Tensor& level_scales, State& state,
                                  const AttentionOptions& options = {});
at::Tensor LogLinearGatedDeltaRuleStep(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const at::Tensor& g,
                                       const at::Tensor& beta, const at::Tensor& level_scales,
                                       State& state, const AttentionOptions& options = {});

struct ConvOptions {
  at::Tensor bias = {};                       // [D] or undefined
  at::Tensor initial_state = {};              // [N, D, W-1], oldest first; undefined: zeros
  std::optional<at::Tensor> cu_seqlens = {};  // [N + 1]
  bool silu = true;
};

// Causal depthwise convolution of x [B, T, D] with weight [D, W], then SiLU.
at::Tensor CausalConv1d(const at::Tensor& x, const at::Tensor& weight,
                        const ConvOptions& options = {});
// The state after x: the last W-1 tokens [N, D, W-1] of every sequence, older ones from the initial
// state. Differentiable.
at::Tensor CausalConv1dFinalState(const at::Tensor& x, std::int64_t width,
                                  const ConvOptions& options = {});
// Decoding: T >= 1 new tokens x [B, T, D]; state [B, D, W-1] is updated in place.
at::Tensor CausalConv1dStep(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            at::Tensor& state, bool silu = true);

// x, gate [..., D] (gate may be undefined), weight [D].
//   norm_before_gate: rms_norm(x) * weight * silu(gate);  else: rms_norm(x * silu(gate)) * weight
at::Tensor GatedRmsNorm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                        double eps, bool norm_before_gate);

// x / sqrt(sum(x^2) + eps) over the last axis.
at::Tensor L2Norm(const at::Tensor& x, double eps = 1e-6);

}  // namespace fenwick_torch
