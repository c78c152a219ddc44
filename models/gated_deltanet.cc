#include "models/gated_deltanet.h"

namespace fenwick::models {

GatedDeltaNetMixerImpl::GatedDeltaNetMixerImpl(const ModelConfig& config) : config_(config) {
  const std::int64_t keys = config.Groups() * config.KeySize(), values = config.InnerSize();
  const std::int64_t heads = config.Heads(), levels = config.Levels();
  const auto linear = [&](const char* name, std::int64_t in, std::int64_t out) {
    return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
  };
  const auto convolution = [&](const char* name, std::int64_t channels) {
    return register_module(name,
                           ShortConvolution(channels, config.conv_kernel, config.use_conv_bias));
  };
  q_proj_ = linear("q_proj", config.hidden_size, keys);
  k_proj_ = linear("k_proj", config.hidden_size, keys);
  v_proj_ = linear("v_proj", config.hidden_size, values);
  a_proj_ = linear("a_proj", config.hidden_size, heads);
  b_proj_ = linear("b_proj", config.hidden_size, heads);
  A_log_ = register_parameter("A_log", InitialDecayLog(config));
  dt_bias_ = register_parameter("dt_bias", InitialTimeStepBias(config));
  if (levels > 0) {
    l_proj_ = linear("l_proj", config.hidden_size, heads * levels);
    L_ = register_parameter("L", torch::ones({heads, levels}));
  }
  q_conv1d_ = convolution("q_conv1d", keys);
  k_conv1d_ = convolution("k_conv1d", keys);
  v_conv1d_ = convolution("v_conv1d", values);
  g_proj_ = linear("g_proj", config.hidden_size, values);
  o_norm_ = register_module("o_norm", RmsNorm(config.ValueSize(), config.norm_eps));
  o_proj_ = linear("o_proj", values, config.hidden_size);
}

torch::Tensor GatedDeltaNetMixerImpl::forward(const torch::Tensor& x, const Sequences& sequences) {
  const std::int64_t groups = config_.Groups(), heads = config_.Heads();
  LayerState* state = sequences.state;
  const auto convolved = [&](torch::nn::Linear& projection, ShortConvolution& convolution,
                             int index, std::int64_t count) {
    return convolution
        ->forward(projection->forward(x), sequences, state ? &state->conv[index] : nullptr)
        .unflatten(-1, {count, -1});
  };
  RecurrenceInputs inputs;
  inputs.q = fenwick_torch::L2Norm(convolved(q_proj_, q_conv1d_, 0, groups));
  inputs.k = fenwick_torch::L2Norm(convolved(k_proj_, k_conv1d_, 1, groups));
  inputs.v = convolved(v_proj_, v_conv1d_, 2, heads);
  inputs.g = -A_log_.exp() * torch::softplus(a_proj_->forward(x) + dt_bias_);
  inputs.beta = torch::sigmoid(b_proj_->forward(x));
  if (config_.allow_neg_eigval) inputs.beta = 2 * inputs.beta;
  if (const std::int64_t levels = config_.Levels(); levels > 0) {
    inputs.level_scales = torch::softplus(L_ * l_proj_->forward(x).unflatten(-1, {heads, levels}))
                              .to(x.scalar_type());
    inputs.saturate = config_.saturate;
  }
  const torch::Tensor o = Recurrence(inputs, sequences);
  const torch::Tensor gate = g_proj_->forward(x).view_as(o);
  return o_proj_->forward(o_norm_->Gated(o, gate, /*norm_before_gate=*/true).flatten(-2));
}

LayerState GatedDeltaNetMixerImpl::NewState(std::int64_t sequences, std::int64_t rollback,
                                            const torch::TensorOptions& options) const {
  LayerState layer;
  for (const ShortConvolution& convolution : {q_conv1d_, k_conv1d_, v_conv1d_}) {
    layer.conv.push_back(convolution->NewHistory(sequences, rollback, options));
  }
  AddRecurrenceState(config_, sequences, options, layer);
  return layer;
}

}  // namespace fenwick::models
