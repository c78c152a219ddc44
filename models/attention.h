// Softmax attention with rotary positions (Su et al., arXiv 2104.09864) and grouped keys: the
// baseline that keeps every token.
#pragma once

#include <torch/torch.h>

#include "models/config.h"
#include "models/mixer.h"

namespace fenwick::models {

class AttentionMixerImpl : public Mixer {
 public:
  explicit AttentionMixerImpl(const ModelConfig& config);
  torch::Tensor forward(const torch::Tensor& x, const Sequences& sequences) override;
  LayerState NewState(std::int64_t sequences, std::int64_t rollback,
                      const torch::TensorOptions& options) const override;

 private:
  ModelConfig config_;
  torch::nn::Linear q_proj_{nullptr}, k_proj_{nullptr}, v_proj_{nullptr}, o_proj_{nullptr};
};
TORCH_MODULE(AttentionMixer);

}  // namespace fenwick::models
