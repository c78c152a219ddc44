// Small models and the error measure that the tests of models/ share.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "models/language_model.h"

namespace fenwick::models {

inline constexpr MixerKind kAllMixers[] = {MixerKind::kLogLinearMamba2,
                                           MixerKind::kLogLinearGatedDeltaNet, MixerKind::kMamba2,
                                           MixerKind::kGatedDeltaNet, MixerKind::kAttention};

// ||a - b|| / ||b|| in float64.
inline double RelativeError(const torch::Tensor& a, const torch::Tensor& b) {
  const torch::Tensor reference = b.detach().to(torch::kDouble);
  const torch::Tensor difference = a.detach().to(torch::kDouble) - reference;
  return (difference.norm() / reference.norm().clamp_min(1e-300)).item<double>();
}

inline std::int64_t FreshSeed() {
  const std::int64_t seed = std::random_device{}() & 0x7fffffff;
  torch::manual_seed(seed);
  return seed;
}

// Two layers, two heads of each group where the mixer has groups; levels for 2,048 tokens.
inline ModelConfig SmallConfig(MixerKind kind) {
  ModelConfig config = ModelConfig::Defaults(kind);
  config.vocab_size = 61;
  config.hidden_size = 32;
  config.num_hidden_layers = 2;
  config.intermediate_size = 48;
  config.head_dim = 16;
  config.state_size = 8;
  config.expand = 2;
  config.n_groups = 2;
  config.num_heads = IsMamba(kind) || kind == MixerKind::kAttention ? 4 : 2;
  config.num_v_heads = IsGatedDelta(kind) ? 4 : 0;
  config.num_kv_heads = kind == MixerKind::kAttention ? 2 : 0;
  config.expand_v = 0.5;
  config.num_levels = 12;
  return config;
}

// With every parameter away from its initial value, so that no term is 0 or 1 by chance.
inline LanguageModel RandomModel(const ModelConfig& config,
                                 torch::ScalarType type = torch::kDouble) {
  LanguageModel model(config);
  const torch::NoGradGuard no_grad;
  for (auto& named : model->named_parameters()) {
    torch::Tensor& parameter = named.value();
    const bool decay = named.key().find("A_log") != std::string::npos;
    parameter.add_(torch::randn_like(parameter), decay ? 0.5 : parameter.dim() > 1 ? 0.2 : 0.1);
    if (decay) parameter.sub_(1.5);  // slow enough for old tokens to matter
  }
  model->to(type);
  return model;
}

inline torch::Tensor RandomTokens(std::int64_t batch, std::int64_t tokens,
                                  const ModelConfig& config) {
  return torch::randint(config.vocab_size, {batch, tokens}, torch::kLong);
}

class EveryMixer : public testing::TestWithParam<MixerKind> {
 protected:
  void SetUp() override {
    const std::int64_t seed = FreshSeed();
    RecordProperty("seed", std::to_string(seed));
    std::cout << "seed " << seed << "\n";
  }
};

inline std::string NameOfMixer(const testing::TestParamInfo<MixerKind>& info) {
  return MixerName(info.param);
}

}  // namespace fenwick::models
