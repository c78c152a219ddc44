// The small layers around the operators: causal depthwise convolution with SiLU,
// gated RMSNorm, L2 norm. As in ops.h every call validates (throws Error, nothing touched) and then
// runs on Context::device.
//
// Types: x, its outputs and gradients share float32, bfloat16, float16 or float64; weights and
// biases have that type or float32 (float64 with float64). Arithmetic is float32 (float64 for
// float64). Strides may be anything on all axes but the last.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fenwick/ops.h"
#include "fenwick/tensor_view.h"

namespace fenwick {

// Causal depthwise convolution over the tokens of each sequence:
//   z[t, d] = bias[d] + sum_w weight[d, w] * x[t - (W-1) + w, d];   y = silu(z) or z
// Tokens before the first come from the initial state, or are zero.
struct CausalConv {
  TensorView x;              // [B, T, D]
  TensorView weight;         // [D, W], 1 <= W <= kMaxConvWidth
  TensorView bias;           // [D]; not given: zero
  TensorView initial_state;  // [N, D, W-1], oldest token first, type of x; not given: zero
  // Packed sequences, host memory: see Inputs::cu_seqlens in ops.h.
  std::span<const std::int64_t> cu_seqlens;
  bool silu = true;

  std::int64_t num_sequences() const {
    return cu_seqlens.empty() ? x.size(0) : static_cast<std::int64_t>(cu_seqlens.size()) - 1;
  }
};

inline constexpr int kMaxConvWidth = 32;

struct CausalConvGradients {
  TensorView x, weight, bias, initial_state;  // as the inputs; a view not given is not computed
};

// y [B, T, D]. final_state [N, D, W-1], where given, receives the last W-1 tokens of every sequence
// (older ones from the initial state) and may be the initial state's own memory: a decoding step is
// this call with T new tokens.
void CausalConv1d(const CausalConv& inputs, const TensorView& y, const TensorView& final_state,
                  const Context& context);

// d_y [B, T, D]. z is recomputed.
void CausalConv1dBackward(const CausalConv& inputs, const TensorView& d_y,
                          const CausalConvGradients& gradients, const Context& context);

// RMSNorm over the last axis with a SiLU gate, rms_norm(u) = u / sqrt(mean(u^2) + eps):
//   norm_before_gate   y = rms_norm(x) * weight * silu(gate)      (Gated DeltaNet)
//   else               y = rms_norm(x * silu(gate)) * weight      (Mamba-2)
struct GatedNorm {
  TensorView x;       // [..., D]
  TensorView gate;    // [..., D], type of x; not given: no gate
  TensorView weight;  // [D]
  double eps = 1e-5;
  bool norm_before_gate = false;
};

struct GatedNormGradients {
  TensorView x = {}, gate = {}, weight = {};  // as the inputs; a view not given is not computed
};

// y [..., D].
void GatedRmsNorm(const GatedNorm& inputs, const TensorView& y, const Context& context);
// d_y [..., D].
void GatedRmsNormBackward(const GatedNorm& inputs, const TensorView& d_y,
                          const GatedNormGradients& gradients, const Context& context);

// y = x / sqrt(sum(x^2) + eps) over the last axis; x, y, d_y, d_x [..., D].
void L2Norm(const TensorView& x, double eps, const TensorView& y, const Context& context);
void L2NormBackward(const TensorView& x, double eps, const TensorView& d_y, const TensorView& d_x,
                    const Context& context);

// Workspace that the backward calls need (0 on the CPU is allowed); the other calls need none.
std::size_t CausalConv1dBackwardWorkspaceBytes(const CausalConv& inputs,
                                               const CausalConvGradients& gradients, Device device);
std::size_t GatedRmsNormBackwardWorkspaceBytes(const GatedNorm& inputs,
                                               const GatedNormGradients& gradients, Device device);

}  // namespace fenwick
