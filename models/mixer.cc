#include "models/mixer.h"

#include <cmath>
#include <string>

#include "fenwick/error.h"
#include "fenwick/host_state.h"
#include "models/linear_recurrence.h"

namespace fenwick::models {
namespace {

torch::Tensor LogLinear(const RecurrenceInputs& in, const Sequences& sequences) {
  const fenwick_torch::AttentionOptions options{.cu_seqlens = sequences.optional_cu_seqlens(),
                                                .saturate = in.saturate};
  const bool delta = in.beta.defined();
  if (sequences.state == nullptr) {
    return delta ? fenwick_torch::LogLinearGatedDeltaRule(in.q, in.k, in.v, in.g, in.beta,
                                                          in.level_scales, options)
                 : fenwick_torch::LogLinearAttention(in.q, in.k, in.v, in.g, in.level_scales,
                                                     options);
  }
  fenwick_torch::State& state = sequences.state->fenwick;
  if (sequences.step) {
    return delta ? fenwick_torch::LogLinearGatedDeltaRuleStep(in.q, in.k, in.v, in.g, in.beta,
                                                              in.level_scales, state, options)
                 : fenwick_torch::LogLinearAttentionStep(in.q, in.k, in.v, in.g, in.level_scales,
                                                         state, options);
  }
  const fenwick_torch::OutputAndState result =
      delta ? fenwick_torch::LogLinearGatedDeltaRuleWithState(in.q, in.k, in.v, in.g, in.beta,
                                                              in.level_scales, state, options)
            : fenwick_torch::LogLinearAttentionWithState(in.q, in.k, in.v, in.g, in.level_scales,
                                                         state, options);
  state = result.state;
  return result.o;
}

torch::Tensor Linear(const RecurrenceInputs& in, const Sequences& sequences) {
  const LinearInputs inputs{in.q, in.k, in.v, in.g, in.beta};
  if (sequences.state == nullptr) {
    return sequences.packed() ? LinearPacked(inputs, sequences.offsets)
                              : LinearChunked(inputs, {}).o;
  }
  torch::Tensor& state = sequences.state->recurrent;
  if (!sequences.packed()) {
    const LinearOutput result =
        sequences.step ? LinearRecurrent(inputs, state) : LinearChunked(inputs, state);
    state = result.state;
    return result.o;
  }
  std::vector<torch::Tensor> outputs, states;
  for (std::size_t n = 0; n + 1 < sequences.offsets.size(); ++n) {
    const std::int64_t begin = sequences.offsets[n];
    const std::int64_t tokens = sequences.offsets[n + 1] - begin;
    const auto part = [&](const torch::Tensor& x) {
      return x.defined() ? x.narrow(1, begin, tokens) : x;
    };
    const LinearOutput result = LinearChunked(
        {part(in.q), part(in.k), part(in.v), part(in.g), part(in.beta)}, state.narrow(0, n, 1));
    outputs.push_back(result.o);
    states.push_back(result.state);
  }
  state = torch::cat(states, 0);
  return torch::cat(outputs, 1);
}

DType FenwickType(torch::ScalarType type) {
  switch (type) {
    case torch::kFloat: return DType::kFloat32;
    case torch::kBFloat16: return DType::kBFloat16;
    case torch::kHalf: return DType::kFloat16;
    case torch::kDouble: return DType::kFloat64;
    default:
      throw Error(std::string("model: expected a floating type, got ") + c10::toString(type));
  }
}

}  // namespace

void Mixer::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  to(device, non_blocking);
  to(dtype, non_blocking);
}

void Mixer::to(torch::Dtype dtype, bool non_blocking) {
  for (const auto& child : children()) child->to(dtype, non_blocking);
  const torch::NoGradGuard no_grad;
  for (torch::Tensor& parameter : parameters(/*recurse=*/false)) {
    parameter.set_data(
        parameter.to(dtype == torch::kDouble ? torch::kDouble : torch::kFloat, non_blocking));
  }
}

ShortConvolutionImpl::ShortConvolutionImpl(std::int64_t channels, std::int64_t width,
                                           bool with_bias) {
  weight = register_parameter("weight", torch::zeros({channels, 1, width}));
  if (with_bias) bias = register_parameter("bias", torch::zeros({channels}));
}

torch::Tensor ShortConvolutionImpl::forward(const torch::Tensor& x, const Sequences& sequences,
                                            torch::Tensor* history) {
  const std::int64_t width = weight.size(2);
  const torch::Tensor taps = weight.squeeze(1);
  fenwick_torch::ConvOptions options{.bias = bias, .cu_seqlens = sequences.optional_cu_seqlens()};
  if (history == nullptr) return fenwick_torch::CausalConv1d(x, taps, options);
  const std::int64_t kept = history->size(2), rollback = kept - (width - 1);
  if (sequences.step && rollback == 0) {
    return fenwick_torch::CausalConv1dStep(x, taps, bias, *history);
  }
  options.initial_state = history->narrow(2, rollback, width - 1).contiguous();
  const torch::Tensor y = fenwick_torch::CausalConv1d(x, taps, options);
  options.initial_state = *history;
  *history = fenwick_torch::CausalConv1dFinalState(x, kept + 1, options);
  return y;
}

torch::Tensor ShortConvolutionImpl::NewHistory(std::int64_t sequences, std::int64_t rollback,
                                               const torch::TensorOptions& options) const {
  return torch::zeros({sequences, weight.size(0), rollback + weight.size(2) - 1}, options);
}

RmsNormImpl::RmsNormImpl(std::int64_t size, double eps, std::int64_t groups)
    : eps_(eps), groups_(groups) {
  weight = register_parameter("weight", torch::ones({size}));
}

torch::Tensor RmsNormImpl::forward(const torch::Tensor& x) {
  return Gated(x, {}, /*norm_before_gate=*/true);
}

torch::Tensor RmsNormImpl::Gated(const torch::Tensor& x, const torch::Tensor& gate,
                                 bool norm_before_gate) {
  if (groups_ == 1) {
    return fenwick_torch::GatedRmsNorm(x, gate, weight, eps_, norm_before_gate);
  }
  // The weight is a factor of the result in both orders.
  const auto split = [&](const torch::Tensor& all) {
    return all.defined() ? all.unflatten(-1, {groups_, -1}) : all;
  };
  return fenwick_torch::GatedRmsNorm(split(x), split(gate),
                                     torch::ones({x.size(-1) / groups_}, weight.options()), eps_,
                                     norm_before_gate)
             .flatten(-2) *
         weight;
}

torch::Tensor Recurrence(const RecurrenceInputs& inputs, const Sequences& sequences) {
  return inputs.level_scales.defined() ? LogLinear(inputs, sequences) : Linear(inputs, sequences);
}

void AddRecurrenceState(const ModelConfig& config, std::int64_t sequences,
                        const torch::TensorOptions& options, LayerState& layer) {
  const auto type = torch::typeMetaToScalarType(options.dtype());
  if (IsLogLinear(config.mixer)) {
    const StateSpec spec{.transition = IsGatedDelta(config.mixer) ? Transition::kGatedDelta
                                                                  : Transition::kScalarGate,
                         .num_sequences = sequences,
                         .groups = config.Groups(),
                         .heads = config.Heads(),
                         .key_size = config.KeySize(),
                         .value_size = config.ValueSize(),
                         .dtype = FenwickType(type),
                         .beta_dtype = FenwickType(type)};
    layer.fenwick = fenwick_torch::EmptyState(spec, options.device());
  } else {
    layer.recurrent =
        torch::zeros({sequences, config.Heads(), config.KeySize(), config.ValueSize()},
                     options.dtype(type == torch::kDouble ? torch::kDouble : torch::kFloat));
  }
}

torch::Tensor InitialTimeStepBias(const ModelConfig& config) {
  const double low = std::log(config.dt_min), high = std::log(config.dt_max);
  const torch::Tensor dt =
      (torch::rand({config.Heads()}) * (high - low) + low).exp().clamp_min(config.dt_init_floor);
  return dt + torch::log(-torch::expm1(-dt));
}

torch::Tensor InitialDecayLog(const ModelConfig& config) {
  const auto [low, high] = config.A_init_range;
  constexpr double kSmallest = 1e-4;  // a range from 0 must not give log(0)
  return (torch::rand({config.Heads()}) * (high - low) + low).clamp_min(kSmallest).log();
}

}  // namespace fenwick::models
