// Gated DeltaNet (Yang, Kautz, Hatamizadeh, arXiv 2412.06464) and its log-linear version (arXiv
// 2506.04761):
//
//   q, k, v = silu(conv1d(proj(x))), q and k L2-normalised by head
//   beta = sigmoid(b_proj x);   g = -exp(A_log) softplus(a_proj x + dt_bias)
//   lambda = softplus(L * l_proj x)
//   o_proj(o_norm(recurrence(q, k, v, g, beta, lambda)) * silu(g_proj x))
//
// The linear parent has neither l_proj nor L.
#pragma once

#include <torch/torch.h>

#include "models/config.h"
#include "models/mixer.h"

namespace fenwick::models {

class GatedDeltaNetMixerImpl : public Mixer {
 public:
  explicit GatedDeltaNetMixerImpl(const ModelConfig& config);
  torch::Tensor forward(const torch::Tensor& x, const Sequences& sequences) override;
  LayerState NewState(std::int64_t sequences, std::int64_t rollback,
                      const torch::TensorOptions& options) const override;

 private:
  ModelConfig config_;
  torch::nn::Linear q_proj_{nullptr}, k_proj_{nullptr}, v_proj_{nullptr};  // to GK, GK, HV
  torch::nn::Linear a_proj_{nullptr}, b_proj_{nullptr};                    // to H
  torch::nn::Linear g_proj_{nullptr}, o_proj_{nullptr};                    // to HV, from HV
  torch::nn::Linear l_proj_{nullptr};  // to HL; null for the linear parent
  ShortConvolution q_conv1d_{nullptr}, k_conv1d_{nullptr}, v_conv1d_{nullptr};
  RmsNorm o_norm_{nullptr};        // [V]
  torch::Tensor dt_bias_, A_log_;  // [H]
  torch::Tensor L_;                // [H, L]; undefined for the linear parent
};
TORCH_MODULE(GatedDeltaNetMixer);

}  // namespace fenwick::models
