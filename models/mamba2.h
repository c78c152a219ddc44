// Mamba-2 (Dao and Gu, arXiv 2405.21060) and its log-linear version (arXiv 2506.04761):
//
//   z, xBC, dt, dl = in_proj(u);   x, B, C = silu(conv1d(xBC))
//   dt = softplus(dt + dt_bias);   A = -exp(A_log);   lambda = softplus(L * dl)
//   y = recurrence(q = C, k = B, v = x dt, g = A dt, lambda) + D x
//   out_proj(norm(y silu(z))), the norm by group
//
// The linear parent has neither dl nor L.
#pragma once

#include <torch/torch.h>

#include "models/config.h"
#include "models/mixer.h"

namespace fenwick::models {

class Mamba2MixerImpl : public Mixer {
 public:
  explicit Mamba2MixerImpl(const ModelConfig& config);
  torch::Tensor forward(const torch::Tensor& x, const Sequences& sequences) override;
  LayerState NewState(std::int64_t sequences, std::int64_t rollback,
                      const torch::TensorOptions& options) const override;

 private:
  ModelConfig config_;
  torch::nn::Linear in_proj_{nullptr}, out_proj_{nullptr};
  ShortConvolution conv1d_{nullptr};
  RmsNorm norm_{nullptr};
  torch::Tensor dt_bias_, A_log_, D_;  // [H]
  torch::Tensor L_;                    // [H, L]; undefined for the linear parent
};
TORCH_MODULE(Mamba2Mixer);

}  // namespace fenwick::models
