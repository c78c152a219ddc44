// The linear parents of the log-linear operators, in tensor operations that torch differentiates.
// There are no levels here: these are other algorithms than operator 1 and 2 with weights of 1, and
// the models that they are compared with.
//
//   scalar gate (Mamba-2, simple GLA)   S[t] = exp(g[t]) S[t-1] + k[t] v[t]^T
//   gated delta rule (Gated DeltaNet)   S[t] = exp(g[t]) (I - beta[t] k[t] k[t]^T) S[t-1]
//                                              + beta[t] k[t] v[t]^T
//   output                              o[t] = S[t]^T q[t]
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace fenwick::models {

struct LinearInputs {
  torch::Tensor q, k;  // [B, T, G, K]
  torch::Tensor v;     // [B, T, H, V]
  torch::Tensor g;     // [B, T, H] log decay, <= 0, -inf allowed
  torch::Tensor beta;  // [B, T, H]; undefined: scalar gate
};

struct LinearOutput {
  torch::Tensor o;      // [B, T, H, V], type of v
  torch::Tensor state;  // [B, H, K, V], float32 (float64 for float64 inputs)
};

// Chunk-wise: matrix products inside chunks of 64 tokens, a loop over the chunks. `state` may be
// undefined (zeros).
LinearOutput LinearChunked(const LinearInputs& inputs, const torch::Tensor& state);

// Token by token.
LinearOutput LinearRecurrent(const LinearInputs& inputs, const torch::Tensor& state);

// LinearChunked for sequences packed in one row (B = 1), all from empty states: offsets are the
// N + 1 ends. [1, T, H, V].
torch::Tensor LinearPacked(const LinearInputs& inputs, const std::vector<std::int64_t>& offsets);

}  // namespace fenwick::models
