#include "models/mamba2.h"

namespace fenwick::models {

Mamba2MixerImpl::Mamba2MixerImpl(const ModelConfig& config) : config_(config) {
  const std::int64_t inner = config.InnerSize(), heads = config.Heads(), levels = config.Levels();
  const std::int64_t conv = inner + 2 * config.Groups() * config.KeySize();
  const auto linear = [&](std::int64_t in, std::int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(config.use_bias));
  };
  in_proj_ =
      register_module("in_proj", linear(config.hidden_size, inner + conv + heads + heads * levels));
  conv1d_ =
      register_module("conv1d", ShortConvolution(conv, config.conv_kernel, config.use_conv_bias));
  dt_bias_ = register_parameter("dt_bias", InitialTimeStepBias(config));
  A_log_ = register_parameter("A_log", InitialDecayLog(config));
  if (levels > 0) L_ = register_parameter("L", torch::ones({heads, levels}));
  D_ = register_parameter("D", torch::ones({heads}));
  norm_ = register_module("norm", RmsNorm(inner, config.norm_eps, config.Groups()));
  out_proj_ = register_module("out_proj", linear(inner, config.hidden_size));
}

torch::Tensor Mamba2MixerImpl::forward(const torch::Tensor& u, const Sequences& sequences) {
  const std::int64_t inner = config_.InnerSize(), heads = config_.Heads();
  const std::int64_t groups = config_.Groups(), keys = config_.KeySize();
  const std::int64_t levels = config_.Levels();
  const std::vector<torch::Tensor> parts = in_proj_->forward(u).split_with_sizes(
      {inner, inner + 2 * groups * keys, heads, heads * levels}, -1);
  LayerState* state = sequences.state;
  const std::vector<torch::Tensor> mixed =
      conv1d_->forward(parts[1], sequences, state ? &state->conv[0] : nullptr)
          .split_with_sizes({inner, groups * keys, groups * keys}, -1);
  const torch::Tensor x = mixed[0].unflatten(-1, {heads, config_.ValueSize()});
  const torch::Tensor dt = torch::softplus(parts[2] + dt_bias_);

  RecurrenceInputs inputs;
  inputs.q = mixed[2].unflatten(-1, {groups, keys});
  inputs.k = mixed[1].unflatten(-1, {groups, keys});
  inputs.v = (x * dt.unsqueeze(-1)).to(x.scalar_type());
  inputs.g = -A_log_.exp() * dt;
  if (levels > 0) {
    inputs.level_scales =
        torch::softplus(L_ * parts[3].unflatten(-1, {heads, levels})).to(x.scalar_type());
    inputs.saturate = config_.saturate;
  }
  const torch::Tensor y =
      (Recurrence(inputs, sequences) + D_.unsqueeze(-1) * x).to(x.scalar_type()).flatten(-2);
  return out_proj_->forward(norm_->Gated(y, parts[0], /*norm_before_gate=*/false));
}

LayerState Mamba2MixerImpl::NewState(std::int64_t sequences, std::int64_t rollback,
                                     const torch::TensorOptions& options) const {
  LayerState layer;
  layer.conv = {conv1d_->NewHistory(sequences, rollback, options)};
  AddRecurrenceState(config_, sequences, options, layer);
  return layer;
}

}  // namespace fenwick::models
