// One block: x = x + mixer(norm(x)); x = x + mlp(norm(x)).
#pragma once

#include <torch/torch.h>

#include <memory>

#include "models/config.h"
#include "models/mixer.h"

namespace fenwick::models {

// down_proj(silu(gate_proj x) * up_proj x).
class SwiGluImpl : public torch::nn::Module {
 public:
  explicit SwiGluImpl(const ModelConfig& config);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  torch::nn::Linear gate_proj_{nullptr}, up_proj_{nullptr}, down_proj_{nullptr};
};
TORCH_MODULE(SwiGlu);

std::shared_ptr<Mixer> MakeMixer(const ModelConfig& config);

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const ModelConfig& config);
  torch::Tensor forward(const torch::Tensor& x, const Sequences& sequences);
  const Mixer& mixer() const { return *mixer_; }

 private:
  RmsNorm mixer_norm_{nullptr}, mlp_norm_{nullptr};
  std::shared_ptr<Mixer> mixer_;
  SwiGlu mlp_{nullptr};
};
TORCH_MODULE(Block);

}  // namespace fenwick::models
