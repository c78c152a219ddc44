// Autograd of the causal convolution and the norms.
#include "dispatch.h"
#include "ops_autograd.h"

namespace fenwick_torch {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Conv : Function<Conv> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias,
                            const std::optional<at::Tensor>& initial_state,
                            const std::optional<at::Tensor>& cu_seqlens, bool silu) {
    context->save_for_backward({x, weight, OrUndefined(bias), OrUndefined(initial_state)});
    context->saved_data["cu_seqlens"] = cu_seqlens;
    context->saved_data["silu"] = silu;
    at::AutoDispatchBelowADInplaceOrView guard;
    Call call("causal_conv1d");
    call.Add(x).Add(weight).Add(bias).Add(initial_state).Add(cu_seqlens).Add(silu);
    return call.Run()[0];
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    Call call("causal_conv1d_backward");
    call.Add(gradients[0]).Add(saved[0]).Add(saved[1]).AddOptional(saved[2]).AddOptional(saved[3]);
    call.Add(context->saved_data["cu_seqlens"]);
    call.Add(context->saved_data["silu"].toBool());
    variable_list results = call.Run();
    // The operator returns an empty tensor for what was not given.
    if (!saved[2].defined()) results[2] = at::Tensor();
    if (!saved[3].defined()) results[3] = at::Tensor();
    results.resize(6);
    return results;
  }
};

struct GatedNorm : Function<GatedNorm> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& gate, const at::Tensor& weight,
                            double eps, bool norm_before_gate) {
    context->save_for_backward({x, OrUndefined(gate), weight});
    context->saved_data["eps"] = eps;
    context->saved_data["norm_before_gate"] = norm_before_gate;
    at::AutoDispatchBelowADInplaceOrView guard;
    Call call("gated_rms_norm");
    call.Add(x).Add(gate).Add(weight).Add(eps).Add(norm_before_gate);
    return call.Run()[0];
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    Call call("gated_rms_norm_backward");
    call.Add(gradients[0]).Add(saved[0]).AddOptional(saved[1]).Add(saved[2]);
    call.Add(context->saved_data["eps"].toDouble());
    call.Add(context->saved_data["norm_before_gate"].toBool());
    variable_list results = call.Run();
    if (!saved[1].defined()) results[1] = at::Tensor();
    results.resize(5);
    return results;
  }
};

struct Norm : Function<Norm> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, double eps) {
    context->save_for_backward({x});
    context->saved_data["eps"] = eps;
    at::AutoDispatchBelowADInplaceOrView guard;
    return Call("l2_norm").Add(x).Add(eps).Run()[0];
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    Call call("l2_norm_backward");
    call.Add(gradients[0]).Add(saved[0]).Add(context->saved_data["eps"].toDouble());
    return {call.Run()[0], at::Tensor()};
  }
};

}  // namespace

at::Tensor CausalConv1d(const at::Tensor& x, const at::Tensor& weight, const ConvOptions& options) {
  return Conv::apply(x, weight, Maybe(options.bias), Maybe(options.initial_state),
                     options.cu_seqlens, options.silu);
}

at::Tensor CausalConv1dFinalState(const at::Tensor& x, std::int64_t width,
                                  const ConvOptions& options) {
  const std::int64_t keep = width - 1, channels = x.size(2);
  // One sequence's tokens [D, T] with its initial state [D, W-1] before them.
  const auto tail = [&](const at::Tensor& tokens, std::int64_t sequence) {
    const at::Tensor before = options.initial_state.defined()
                                  ? options.initial_state[sequence]
                                  : at::zeros({channels, keep}, x.options());
    return at::cat({before, tokens}, 1).narrow(1, tokens.size(1), keep);
  };
  std::vector<at::Tensor> states;
  if (options.cu_seqlens.has_value()) {
    const at::Tensor offsets = options.cu_seqlens->to(at::kCPU, at::kLong).contiguous();
    const auto* offset = offsets.const_data_ptr<std::int64_t>();
    for (std::int64_t n = 0; n + 1 < offsets.numel(); ++n) {
      states.push_back(tail(x[0].narrow(0, offset[n], offset[n + 1] - offset[n]).t(), n));
    }
  } else {
    for (std::int64_t n = 0; n < x.size(0); ++n) states.push_back(tail(x[n].t(), n));
  }
  return states.empty() ? at::zeros({0, channels, keep}, x.options()) : at::stack(states);
}

at::Tensor CausalConv1dStep(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            at::Tensor& state, bool silu) {
  const at::NoGradGuard no_grad;
  Call call("causal_conv1d_step");
  at::Tensor y = call.Add(x).Add(weight).AddOptional(bias).Add(state).Add(silu).Run()[0];
  MarkWritten(state);
  return y;
}

at::Tensor GatedRmsNorm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                        double eps, bool norm_before_gate) {
  return GatedNorm::apply(x, Maybe(gate), weight, eps, norm_before_gate);
}

at::Tensor L2Norm(const at::Tensor& x, double eps) { return Norm::apply(x, eps); }

}  // namespace fenwick_torch
