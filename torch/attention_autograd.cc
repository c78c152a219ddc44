// Autograd of log-linear attention and the log-linear gated delta rule: one Function for both, with
// and without states (an undefined beta means the scalar gate).
#include "dispatch.h"
#include "fenwick/fenwick.h"
#include "ops_autograd.h"

namespace fenwick_torch {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Tensors of a call in the order q, k, v, g, beta, level_scales; beta undefined or not.
using Operands = std::array<at::Tensor, 6>;
// k, v, g, beta, nodes: the differentiable parts of a state.
using StateParts = std::array<at::Tensor, 5>;

std::string OpName(const at::Tensor& beta, const char* suffix) {
  return std::string(beta.defined() ? "log_linear_gated_delta_rule" : "log_linear_attention") +
         suffix;
}

template <typename Tensors>
void AddAll(Call& call, const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) call.AddIfDefined(tensor);
}

void AddOptions(Call& call, const std::optional<at::Tensor>& cu_seqlens, double scale,
                bool saturate) {
  call.Add(cu_seqlens).Add(scale).Add(saturate);
}

// Puts an undefined tensor where the scalar gate has no beta.
variable_list WithBeta(variable_list tensors, bool has_beta, std::size_t index) {
  if (!has_beta) tensors.insert(tensors.begin() + index, at::Tensor());
  return tensors;
}

struct Attention : Function<Attention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& g,
                            const std::optional<at::Tensor>& maybe_beta,
                            const at::Tensor& level_scales, const AttentionOptions& options) {
    const at::Tensor beta = OrUndefined(maybe_beta);
    const Operands operands{q, k, v, g, beta, level_scales};
    context->save_for_backward({operands.begin(), operands.end()});
    context->saved_data["cu_seqlens"] = options.cu_seqlens;
    context->saved_data["scale"] = options.scale;
    context->saved_data["saturate"] = options.saturate;
    at::AutoDispatchBelowADInplaceOrView guard;
    Call call(OpName(beta, ""));
    AddAll(call, operands);
    AddOptions(call, options.cu_seqlens, options.scale, options.saturate);
    return call.Run()[0];
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list operands = context->get_saved_variables();
    const at::Tensor& beta = operands[4];
    Call call(OpName(beta, "_backward"));
    call.Add(gradients[0]);
    AddAll(call, operands);
    AddOptions(call, context->saved_data["cu_seqlens"].toOptional<at::Tensor>(),
               context->saved_data["scale"].toDouble(), context->saved_data["saturate"].toBool());
    variable_list results = WithBeta(call.Run(), beta.defined(), 4);
    results.emplace_back();
    return results;
  }
};

struct AttentionWithState : Function<AttentionWithState> {
  // Results: o, k, v, g, [beta,] nodes, position, base.
  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& g,
                               const std::optional<at::Tensor>& maybe_beta,
                               const at::Tensor& level_scales, const at::Tensor& state_k,
                               const at::Tensor& state_v, const at::Tensor& state_g,
                               const std::optional<at::Tensor>& maybe_state_beta,
                               const at::Tensor& state_nodes, const at::Tensor& position,
                               const at::Tensor& base, std::int64_t max_position,
                               std::int64_t num_slots, const AttentionOptions& options) {
    const at::Tensor beta = OrUndefined(maybe_beta);
    const at::Tensor state_beta = OrUndefined(maybe_state_beta);
    const variable_list tensors{q,       k,       v,       g,          beta,        level_scales,
                                state_k, state_v, state_g, state_beta, state_nodes, position,
                                base};
    context->save_for_backward(tensors);
    context->saved_data["max_position"] = max_position;
    context->saved_data["cu_seqlens"] = options.cu_seqlens;
    context->saved_data["scale"] = options.scale;
    context->saved_data["saturate"] = options.saturate;
    at::AutoDispatchBelowADInplaceOrView guard;
    Call call(OpName(beta, "_with_state"));
    AddAll(call, tensors);
    call.Add(max_position).Add(num_slots);
    AddOptions(call, options.cu_seqlens, options.scale, options.saturate);
    variable_list results = call.Run();
    context->mark_non_differentiable({results[results.size() - 2], results.back()});
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list tensors = context->get_saved_variables();
    const bool has_beta = tensors[4].defined();
    Call call(OpName(tensors[4], "_with_state_backward"));
    // All but the gradients of position and base.
    for (std::size_t i = 0; i + 2 < gradients.size(); ++i) call.Add(gradients[i]);
    AddAll(call, tensors);
    call.Add(context->saved_data["max_position"].toInt());
    AddOptions(call, context->saved_data["cu_seqlens"].toOptional<at::Tensor>(),
               context->saved_data["scale"].toDouble(), context->saved_data["saturate"].toBool());
    // d_operands (6), d_state (5), then position, base, max_position, num_slots, options.
    variable_list results = WithBeta(WithBeta(call.Run(), has_beta, 4), has_beta, 9);
    results.resize(results.size() + 5);
    return results;
  }
};

std::int64_t LongestSequence(const at::Tensor& q, const std::optional<at::Tensor>& cu_seqlens) {
  if (!cu_seqlens.has_value()) return q.size(1);
  return cu_seqlens->numel() < 2 ? 0 : cu_seqlens->diff().max().item().toLong();
}

// `slots`, bounded as saturation does, and no fewer than there are.
std::int64_t BoundedSlots(std::int64_t slots, int num_levels, std::int64_t existing) {
  if (num_levels > 0) slots = std::min<std::int64_t>(slots, fenwick::TopSlot(num_levels) + 1);
  return std::max(slots, existing);
}

OutputAndState RunWithState(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& g, const at::Tensor& beta,
                            const at::Tensor& level_scales, const State& state,
                            const AttentionOptions& options) {
  const std::int64_t max_position = state.max_position + LongestSequence(q, options.cu_seqlens);
  const int num_levels = options.saturate ? static_cast<int>(level_scales.size(-1)) : 0;
  variable_list results = AttentionWithState::apply(
      q, k, v, g, Maybe(beta), level_scales, state.k, state.v, state.g, Maybe(state.beta),
      state.nodes, state.position, state.base, state.max_position,
      BoundedSlots(fenwick::NumSlots(fenwick::NextBase(0, max_position)), num_levels,
                   state.nodes.size(2)),
      options);
  results = WithBeta(std::move(results), beta.defined(), 4);
  return {.o = results[0],
          .state = {.k = results[1],
                    .v = results[2],
                    .g = results[3],
                    .beta = results[4],
                    .nodes = results[5],
                    .position = results[6],
                    .base = results[7],
                    .max_position = max_position}};
}

at::Tensor RunStep(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& g, const at::Tensor& beta, const at::Tensor& level_scales,
                   State& state, const AttentionOptions& options) {
  TORCH_CHECK(!options.cu_seqlens.has_value(), "cu_seqlens: expected none in a decoding step");
  const at::NoGradGuard no_grad;
  const std::int64_t tokens = q.size(1);
  state.Reserve(tokens, options.saturate ? static_cast<int>(level_scales.size(-1)) : 0);
  Call call(OpName(beta, "_step"));
  AddAll(call, Operands{q, k, v, g, beta, level_scales});
  AddAll(call, StateParts{state.k, state.v, state.g, state.beta, state.nodes});
  call.Add(state.position).Add(state.base).Add(state.max_position);
  call.Add(options.scale).Add(options.saturate);
  at::Tensor o = call.Run()[0];
  for (const at::Tensor& part :
       {state.k, state.v, state.g, state.beta, state.nodes, state.position, state.base}) {
    MarkWritten(part);
  }
  state.max_position += tokens;
  return o;
}

// Applies f to every tensor of the state.
template <typename F>
State Map(const State& state, F&& f) {
  return {.k = f(state.k),
          .v = f(state.v),
          .g = f(state.g),
          .beta = state.beta.defined() ? f(state.beta) : at::Tensor(),
          .nodes = f(state.nodes),
          .position = f(state.position),
          .base = f(state.base),
          .max_position = state.max_position};
}

at::ScalarType ToScalarType(fenwick::DType dtype) {
  switch (dtype) {
    case fenwick::DType::kFloat32: return at::kFloat;
    case fenwick::DType::kBFloat16: return at::kBFloat16;
    case fenwick::DType::kFloat16: return at::kHalf;
    case fenwick::DType::kFloat64: return at::kDouble;
    case fenwick::DType::kInt64: return at::kLong;
  }
  TORCH_CHECK(false, "unknown fenwick::DType");
}

}  // namespace

std::int64_t State::Bytes() const {
  std::int64_t bytes = 0;
  Map(*this, [&](const at::Tensor& tensor) {
    bytes += static_cast<std::int64_t>(tensor.nbytes());
    return tensor;
  });
  return bytes;
}

State State::Clone() const {
  return Map(*this, [](const at::Tensor& tensor) { return tensor.clone(); });
}

State State::Select(const at::Tensor& indices) const {
  return Map(*this, [&](const at::Tensor& tensor) { return tensor.index_select(0, indices); });
}

void State::Reserve(std::int64_t tokens, int num_levels) {
  const std::int64_t existing = nodes.size(2);
  const std::int64_t end = max_position + tokens;
  // Only the CPU's steps keep the merged past.
  const int wanted =
      nodes.is_cpu() ? fenwick::NumStepSlots(0, end) : fenwick::NumSlots(fenwick::NextBase(0, end));
  const std::int64_t slots = BoundedSlots(wanted, num_levels, existing);
  // Pads axis 2 of [N, H, S, K, V] at its end with zeros.
  if (slots > existing) nodes = at::constant_pad_nd(nodes, {0, 0, 0, 0, 0, slots - existing});
}

State EmptyState(const fenwick::StateSpec& spec, at::Device device) {
  const auto options = at::TensorOptions().device(device).dtype(ToScalarType(spec.dtype));
  const auto wide = spec.dtype == fenwick::DType::kFloat64 ? options : options.dtype(at::kFloat);
  const std::int64_t n = spec.num_sequences, h = spec.heads, ring = fenwick::kStateRing;
  State state;
  state.k = at::zeros({n, ring, spec.groups, spec.key_size}, options);
  state.v = at::zeros({n, ring, h, spec.value_size}, options);
  state.g = at::zeros({n, ring, h}, wide);
  if (spec.transition == fenwick::Transition::kGatedDelta) {
    state.beta = at::zeros({n, ring, h}, options.dtype(ToScalarType(spec.beta_dtype)));
  }
  state.nodes = at::zeros({n, h, 0, spec.key_size, spec.value_size}, wide);
  state.position = at::zeros({n}, options.dtype(at::kLong));
  state.base = at::zeros({n}, options.dtype(at::kLong));
  return state;
}

at::Tensor LogLinearAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& g, const at::Tensor& level_scales,
                              const AttentionOptions& options) {
  return Attention::apply(q, k, v, g, std::nullopt, level_scales, options);
}

at::Tensor LogLinearGatedDeltaRule(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& g, const at::Tensor& beta,
                                   const at::Tensor& level_scales,
                                   const AttentionOptions& options) {
  return Attention::apply(q, k, v, g, Maybe(beta), level_scales, options);
}

OutputAndState LogLinearAttentionWithState(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const at::Tensor& g,
                                           const at::Tensor& level_scales, const State& state,
                                           const AttentionOptions& options) {
  return RunWithState(q, k, v, g, at::Tensor(), level_scales, state, options);
}

OutputAndState LogLinearGatedDeltaRuleWithState(const at::Tensor& q, const at::Tensor& k,
                                                const at::Tensor& v, const at::Tensor& g,
                                                const at::Tensor& beta,
                                                const at::Tensor& level_scales, const State& state,
                                                const AttentionOptions& options) {
  return RunWithState(q, k, v, g, beta, level_scales, state, options);
}

at::Tensor LogLinearAttentionStep(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const at::Tensor& g, const at::Tensor& level_scales, State& state,
                                  const AttentionOptions& options) {
  return RunStep(q, k, v, g, at::Tensor(), level_scales, state, options);
}

at::Tensor LogLinearGatedDeltaRuleStep(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const at::Tensor& g,
                                       const at::Tensor& beta, const at::Tensor& level_scales,
                                       State& state, const AttentionOptions& options) {
  return RunStep(q, k, v, g, beta, level_scales, state, options);
}

}  // namespace fenwick_torch
