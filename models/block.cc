#include "models/block.h"

#include "models/attention.h"
#include "models/gated_deltanet.h"
#include "models/mamba2.h"

namespace fenwick::models {

SwiGluImpl::SwiGluImpl(const ModelConfig& config) {
  const auto linear = [&](const char* name, std::int64_t in, std::int64_t out) {
    return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
  };
  gate_proj_ = linear("gate_proj", config.hidden_size, config.IntermediateSize());
  up_proj_ = linear("up_proj", config.hidden_size, config.IntermediateSize());
  down_proj_ = linear("down_proj", config.IntermediateSize(), config.hidden_size);
}

torch::Tensor SwiGluImpl::forward(const torch::Tensor& x) {
  return down_proj_->forward(torch::silu(gate_proj_->forward(x)) * up_proj_->forward(x));
}

std::shared_ptr<Mixer> MakeMixer(const ModelConfig& config) {
  if (IsMamba(config.mixer)) return std::make_shared<Mamba2MixerImpl>(config);
  if (IsGatedDelta(config.mixer)) return std::make_shared<GatedDeltaNetMixerImpl>(config);
  return std::make_shared<AttentionMixerImpl>(config);
}

BlockImpl::BlockImpl(const ModelConfig& config) {
  const bool mamba = IsMamba(config.mixer);
  const auto norm = [&](const char* name) {
    return register_module(name, RmsNorm(config.hidden_size, config.norm_eps));
  };
  mixer_norm_ = norm(mamba ? "mixer_norm" : "attn_norm");
  mixer_ = register_module(mamba ? "mixer" : "attn", MakeMixer(config));
  mlp_norm_ = norm("mlp_norm");
  mlp_ = register_module("mlp", SwiGlu(config));
}

torch::Tensor BlockImpl::forward(const torch::Tensor& x, const Sequences& sequences) {
  const torch::Tensor mixed = x + mixer_->forward(mixer_norm_->forward(x), sequences);
  return mixed + mlp_->forward(mlp_norm_->forward(mixed));
}

}  // namespace fenwick::models
