// torch.ops.fenwick.log_linear_attention* and .log_linear_gated_delta_rule*: schemas, and kernels
// that turn tensors into the core's views, allocate results and call fenwick::Forward, Backward or
// Step. No mathematics here; the equations are in include/fenwick/ops.h.
//
// Both operators share every line: the gated delta rule has `beta` after `g` and `state_beta` after
// `state_g`, which the templates read where kTransition says so.
#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "boxed.h"
#include "fenwick/fenwick.h"
#include "views.h"

namespace fenwick_torch {
namespace {

using fenwick::Gradients;
using fenwick::Inputs;
using fenwick::StateGradView;
using fenwick::StateView;
using fenwick::TensorView;
using fenwick::Transition;

// The differentiable inputs of an operator.
struct Operands {
  Tensor q, k, v, g;                // [B, T, G, K] [B, T, G, K] [B, T, H, V] [B, T, H]
  std::optional<Tensor> beta = {};  // [B, T, H]
  Tensor level_scales = {};         // [B, T, H, L]
};

// The tensors of states (fenwick/state.h) or, without position and base, of their gradients.
struct StateTensors {
  Tensor k, v, g;                                  // [N, ring, G, K] [N, ring, H, V] [N, ring, H]
  std::optional<Tensor> beta = {};                 // [N, ring, H]
  Tensor nodes = {};                               // [N, H, S, K, V]
  std::optional<Tensor> position = {}, base = {};  // [N]
};

struct Options {
  double scale = 1.0;
  fenwick::LevelPolicy level_policy = fenwick::LevelPolicy::kError;
};

constexpr bool HasBeta(Transition transition) { return transition == Transition::kGatedDelta; }

template <Transition kTransition>
Operands ReadOperands(Arguments& arguments) {
  Operands operands{.q = WithDenseLastAxis(arguments.Tensor()),
                    .k = WithDenseLastAxis(arguments.Tensor()),
                    .v = WithDenseLastAxis(arguments.Tensor()),
                    .g = WithDenseLastAxis(arguments.Tensor())};
  if (HasBeta(kTransition)) operands.beta = WithDenseLastAxis(arguments.Tensor());
  operands.level_scales = WithDenseLastAxis(arguments.Tensor());
  return operands;
}

enum class StateUse {
  kInput,     // read: copied where the layout is not the core's
  kGradient,  // read likewise; has no position and base
  kInPlace,   // updated
};

template <Transition kTransition>
StateTensors ReadState(Arguments& arguments, StateUse use) {
  const auto next = [&] {
    Tensor tensor = arguments.Tensor();
    return use == StateUse::kInPlace ? tensor : torch::stable::contiguous(tensor);
  };
  StateTensors state{.k = next(), .v = next(), .g = next()};
  if (HasBeta(kTransition)) state.beta = next();
  state.nodes = next();
  if (use != StateUse::kGradient) {
    state.position = next();
    state.base = next();
  }
  return state;
}

Options ReadOptions(Arguments& arguments) {
  Options options;
  options.scale = arguments.Next<double>();
  options.level_policy =
      arguments.Next<bool>() ? fenwick::LevelPolicy::kSaturate : fenwick::LevelPolicy::kError;
  return options;
}

Tensor EmptyLike(const Tensor& tensor) { return torch::stable::new_empty(tensor, tensor.sizes()); }

std::optional<Tensor> EmptyLike(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? std::optional(EmptyLike(*tensor)) : std::nullopt;
}

Operands EmptyLike(const Operands& operands) {
  return {.q = EmptyLike(operands.q),
          .k = EmptyLike(operands.k),
          .v = EmptyLike(operands.v),
          .g = EmptyLike(operands.g),
          .beta = EmptyLike(operands.beta),
          .level_scales = EmptyLike(operands.level_scales)};
}

// Results shaped like `state`, with `num_slots` node slots.
StateTensors EmptyLike(const StateTensors& state, std::int64_t num_slots) {
  if (state.nodes.dim() != 5) {
    throw fenwick::Error("state_nodes: expected 5 axes [N, H, S, K, V], got " +
                         std::to_string(state.nodes.dim()));
  }
  if (num_slots < 0) {
    throw fenwick::Error("num_slots: expected a number >= 0, got " + std::to_string(num_slots));
  }
  std::array<std::int64_t, 5> sizes;
  for (int axis = 0; axis < 5; ++axis) sizes[axis] = state.nodes.size(axis);
  sizes[2] = num_slots;
  return {.k = EmptyLike(state.k),
          .v = EmptyLike(state.v),
          .g = EmptyLike(state.g),
          .beta = EmptyLike(state.beta),
          .nodes = torch::stable::new_empty(state.nodes, sizes),
          .position = EmptyLike(state.position),
          .base = EmptyLike(state.base)};
}

TensorView ReadView(const Tensor& tensor, const char* name, const Tensor& reference) {
  CheckDevice(tensor, name, reference, "q");
  return fenwick_torch::ReadView(tensor, name);
}

Inputs MakeInputs(Transition transition, const Operands& operands, const Options& options,
                  std::span<const std::int64_t> offsets) {
  const Tensor& q = operands.q;
  Inputs inputs;
  inputs.transition = transition;
  inputs.q = ReadView(q, "q", q);
  inputs.k = ReadView(operands.k, "k", q);
  inputs.v = ReadView(operands.v, "v", q);
  inputs.g = ReadView(operands.g, "g", q);
  if (operands.beta.has_value()) inputs.beta = ReadView(*operands.beta, "beta", q);
  inputs.level_scales = ReadView(operands.level_scales, "level_scales", q);
  inputs.cu_seqlens = offsets;
  inputs.scale = options.scale;
  inputs.level_policy = options.level_policy;
  return inputs;
}

// Views of states; `write` for states that the call fills.
StateView MakeState(const StateTensors& state, std::int64_t max_position, const Tensor& q,
                    bool write) {
  const auto view = [&](const Tensor& tensor, const char* name) {
    CheckDevice(tensor, name, q, "q");
    return write ? WriteView(tensor, name) : fenwick_torch::ReadView(tensor, name);
  };
  StateView result;
  result.k = view(state.k, "state_k");
  result.v = view(state.v, "state_v");
  result.g = view(state.g, "state_g");
  if (state.beta.has_value()) result.beta = view(*state.beta, "state_beta");
  result.nodes = view(state.nodes, "state_nodes");
  result.position = view(*state.position, "state_position");
  result.base = view(*state.base, "state_base");
  result.max_position = max_position;
  return result;
}

// Reads where the tensors are arguments, writes where they are results.
StateGradView MakeStateGradient(const StateTensors& gradient, const Tensor& q, bool write) {
  const auto view = [&](const Tensor& tensor, const char* name) {
    CheckDevice(tensor, name, q, "q");
    return write ? WriteView(tensor, name) : fenwick_torch::ReadView(tensor, name);
  };
  StateGradView result;
  result.k = view(gradient.k, "d_state_k");
  result.v = view(gradient.v, "d_state_v");
  result.g = view(gradient.g, "d_state_g");
  if (gradient.beta.has_value()) result.beta = view(*gradient.beta, "d_state_beta");
  result.nodes = view(gradient.nodes, "d_state_nodes");
  return result;
}

Gradients MakeGradients(const Operands& gradients) {
  Gradients result;
  result.q = WriteView(gradients.q, "dq");
  result.k = WriteView(gradients.k, "dk");
  result.v = WriteView(gradients.v, "dv");
  result.g = WriteView(gradients.g, "dg");
  if (gradients.beta.has_value()) result.beta = WriteView(*gradients.beta, "dbeta");
  result.level_scales = WriteView(gradients.level_scales, "dlevel_scales");
  return result;
}

void AddOperands(const Operands& operands, Results& results) {
  results.Add(operands.q);
  results.Add(operands.k);
  results.Add(operands.v);
  results.Add(operands.g);
  results.Add(operands.beta);
  results.Add(operands.level_scales);
}

void AddState(const StateTensors& state, Results& results) {
  results.Add(state.k);
  results.Add(state.v);
  results.Add(state.g);
  results.Add(state.beta);
  results.Add(state.nodes);
  results.Add(state.position);
  results.Add(state.base);
}

template <Transition kTransition, bool kWithState>
void Forward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Operands operands = ReadOperands<kTransition>(arguments);
  StateTensors state;
  std::int64_t max_position = 0, num_slots = 0;
  if constexpr (kWithState) {
    state = ReadState<kTransition>(arguments, StateUse::kInput);
    max_position = arguments.Next<std::int64_t>();
    num_slots = arguments.Next<std::int64_t>();
  }
  const std::optional<Tensor> cu_seqlens = arguments.OptionalTensor();
  const Options options = ReadOptions(arguments);

  const std::vector<std::int64_t> offsets = HostOffsets(cu_seqlens);
  Inputs inputs = MakeInputs(kTransition, operands, options, offsets);
  StateTensors final_state;
  StateView final_view;
  if constexpr (kWithState) {
    inputs.initial_state = MakeState(state, max_position, operands.q, /*write=*/false);
    final_state = EmptyLike(state, num_slots);
    final_view = MakeState(final_state, 0, operands.q, /*write=*/true);
  }
  const Tensor o = EmptyLike(operands.v);
  CallContext context(operands.q);
  context.Reserve(fenwick::ForwardWorkspaceBytes(inputs, final_view, context.device()));
  fenwick::Forward(inputs, WriteView(o, "o"), final_view, context.get());

  Results results(stack);
  results.Add(o);
  if constexpr (kWithState) AddState(final_state, results);
}

template <Transition kTransition, bool kWithState>
void Backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor d_o = WithDenseLastAxis(arguments.Tensor());
  StateTensors d_final_state;
  if constexpr (kWithState) d_final_state = ReadState<kTransition>(arguments, StateUse::kGradient);
  const Operands operands = ReadOperands<kTransition>(arguments);
  StateTensors state;
  std::int64_t max_position = 0;
  if constexpr (kWithState) {
    state = ReadState<kTransition>(arguments, StateUse::kInput);
    max_position = arguments.Next<std::int64_t>();
  }
  const std::optional<Tensor> cu_seqlens = arguments.OptionalTensor();
  const Options options = ReadOptions(arguments);

  const std::vector<std::int64_t> offsets = HostOffsets(cu_seqlens);
  Inputs inputs = MakeInputs(kTransition, operands, options, offsets);
  const Operands d_operands = EmptyLike(operands);
  Gradients gradients = MakeGradients(d_operands);
  StateTensors d_state;
  StateGradView d_final_view;
  if constexpr (kWithState) {
    inputs.initial_state = MakeState(state, max_position, operands.q, /*write=*/false);
    d_final_view = MakeStateGradient(d_final_state, operands.q, /*write=*/false);
    d_state = {.k = EmptyLike(state.k),
               .v = EmptyLike(state.v),
               .g = EmptyLike(state.g),
               .beta = EmptyLike(state.beta),
               .nodes = EmptyLike(state.nodes)};
    gradients.initial_state = MakeStateGradient(d_state, operands.q, /*write=*/true);
  }
  CallContext context(operands.q);
  context.Reserve(
      fenwick::BackwardWorkspaceBytes(inputs, d_final_view, gradients, context.device()));
  fenwick::Backward(inputs, ReadView(d_o, "d_o", operands.q), d_final_view, gradients,
                    context.get());

  Results results(stack);
  AddOperands(d_operands, results);
  if constexpr (kWithState) {
    results.Add(d_state.k);
    results.Add(d_state.v);
    results.Add(d_state.g);
    results.Add(d_state.beta);
    results.Add(d_state.nodes);
  }
}

template <Transition kTransition>
void Step(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Operands operands = ReadOperands<kTransition>(arguments);
  const StateTensors state = ReadState<kTransition>(arguments, StateUse::kInPlace);
  const std::int64_t max_position = arguments.Next<std::int64_t>();
  const Options options = ReadOptions(arguments);

  Inputs inputs = MakeInputs(kTransition, operands, options, {});
  inputs.initial_state = MakeState(state, max_position, operands.q, /*write=*/true);
  const Tensor o = EmptyLike(operands.v);
  CallContext context(operands.q);
  fenwick::Step(inputs, WriteView(o, "o"), context.get());
  Results(stack).Add(o);
}

// The schemas of one operator. "{op}" is its name; "[...]" is there for the gated delta rule only.
constexpr const char* kSchemas[] = {
    "{op}(Tensor q, Tensor k, Tensor v, Tensor g, [Tensor beta, ]Tensor level_scales, "
    "Tensor? cu_seqlens=None, float scale=1.0, bool saturate=False) -> Tensor",

    "{op}_backward(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor g, [Tensor beta, ]"
    "Tensor level_scales, Tensor? cu_seqlens, float scale, bool saturate) -> "
    "(Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_g, [Tensor d_beta, ]Tensor d_level_scales)",

    "{op}_with_state(Tensor q, Tensor k, Tensor v, Tensor g, [Tensor beta, ]Tensor level_scales, "
    "Tensor state_k, Tensor state_v, Tensor state_g, [Tensor state_beta, ]Tensor state_nodes, "
    "Tensor state_position, Tensor state_base, SymInt max_position, SymInt num_slots, "
    "Tensor? cu_seqlens=None, float scale=1.0, bool saturate=False) -> "
    "(Tensor o, Tensor k, Tensor v, Tensor g, [Tensor beta, ]Tensor nodes, Tensor position, "
    "Tensor base)",

    "{op}_with_state_backward(Tensor d_o, Tensor d_state_k, Tensor d_state_v, Tensor d_state_g, "
    "[Tensor d_state_beta, ]Tensor d_state_nodes, Tensor q, Tensor k, Tensor v, Tensor g, "
    "[Tensor beta, ]Tensor level_scales, Tensor state_k, Tensor state_v, Tensor state_g, "
    "[Tensor state_beta, ]Tensor state_nodes, Tensor state_position, Tensor state_base, "
    "SymInt max_position, Tensor? cu_seqlens, float scale, bool saturate) -> "
    "(Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_g, [Tensor d_beta, ]Tensor d_level_scales, "
    "Tensor d_initial_k, Tensor d_initial_v, Tensor d_initial_g, [Tensor d_initial_beta, ]"
    "Tensor d_initial_nodes)",

    "{op}_step(Tensor q, Tensor k, Tensor v, Tensor g, [Tensor beta, ]Tensor level_scales, "
    "Tensor(a!) state_k, Tensor(b!) state_v, Tensor(c!) state_g, [Tensor(g!) state_beta, ]"
    "Tensor(d!) state_nodes, Tensor(e!) state_position, Tensor(f!) state_base, "
    "SymInt max_position, float scale=1.0, bool saturate=False) -> Tensor",
};

std::string Schema(const std::string& pattern, const std::string& op, bool has_beta) {
  std::string schema = op;
  bool skip = false;
  for (const char c : pattern.substr(pattern.find('}') + 1)) {
    if (c == '[') {
      skip = !has_beta;
    } else if (c == ']') {
      skip = false;
    } else if (!skip) {
      schema += c;
    }
  }
  return schema;
}

constexpr const char* kScalarGateName = "log_linear_attention";
constexpr const char* kGatedDeltaName = "log_linear_gated_delta_rule";

template <Transition kTransition>
void RegisterKernels(torch::stable::detail::StableLibrary& library) {
  const std::string op = HasBeta(kTransition) ? kGatedDeltaName : kScalarGateName;
  library.impl(op.c_str(), &Forward<kTransition, false>);
  library.impl((op + "_backward").c_str(), &Backward<kTransition, false>);
  library.impl((op + "_with_state").c_str(), &Forward<kTransition, true>);
  library.impl((op + "_with_state_backward").c_str(), &Backward<kTransition, true>);
  library.impl((op + "_step").c_str(), &Step<kTransition>);
}

}  // namespace
}  // namespace fenwick_torch

// Referenced by the C++ wrappers, so that linkers keep this library.
extern "C" __attribute__((visibility("default"))) int fenwick_torch_operators_loaded() { return 1; }

STABLE_TORCH_LIBRARY_FRAGMENT(fenwick, library) {
  using namespace fenwick_torch;
  for (const char* pattern : kSchemas) {
    library.def(Schema(pattern, kScalarGateName, false).c_str());
    library.def(Schema(pattern, kGatedDeltaName, true).c_str());
  }
}

STABLE_TORCH_LIBRARY_IMPL(fenwick, CPU, library) {
  fenwick_torch::RegisterKernels<fenwick::Transition::kScalarGate>(library);
  fenwick_torch::RegisterKernels<fenwick::Transition::kGatedDelta>(library);
}

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(fenwick, CUDA, library) {
  fenwick_torch::RegisterKernels<fenwick::Transition::kScalarGate>(library);
  fenwick_torch::RegisterKernels<fenwick::Transition::kGatedDelta>(library);
}
#endif
