#include "support/run.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace fenwick::support {
namespace {

using reference::Arguments;
using reference::State;
using reference::Tensor;

// Arguments on a device, as Inputs.
struct DeviceInputs {
  DeviceTensor q, k, v, g, beta, level_scales;
  DeviceState state;
  Inputs inputs;

  DeviceInputs(const Arguments& a, const RunOptions& options)
      : q(options.device, options.dtype, a.q, options.layout),
        k(options.device, options.dtype, a.k, options.layout),
        v(options.device, options.dtype, a.v, options.layout),
        g(options.device, options.wide_dtype(), a.g, options.layout),
        beta(options.device, options.beta_dtype, a.beta, options.layout),
        level_scales(options.device, options.scales_dtype, a.level_scales, options.layout) {
    inputs.transition = a.transition;
    inputs.q = q.view();
    inputs.k = k.view();
    inputs.v = v.view();
    inputs.g = g.view();
    inputs.beta = beta.view();
    inputs.level_scales = level_scales.view();
    inputs.cu_seqlens = a.cu_seqlens;
    inputs.scale = a.scale;
    inputs.level_policy = a.saturate ? LevelPolicy::kSaturate : LevelPolicy::kError;
    if (a.initial_state.given()) {
      state = DeviceState(a.initial_state, 0, options);
      const auto& position = a.initial_state.position;
      inputs.initial_state =
          state.View(position.empty() ? 0 : *std::max_element(position.begin(), position.end()));
    }
  }

  void CheckPoison() const {
    for (const auto& [name, tensor] : {std::pair{"q", &q},
                                       {"k", &k},
                                       {"v", &v},
                                       {"g", &g},
                                       {"beta", &beta},
                                       {"level_scales", &level_scales}}) {
      RequireIntact(name, *tensor);
    }
  }

  static void RequireIntact(const std::string& name, const DeviceTensor& tensor) {
    if (!tensor.PoisonIntact()) {
      throw Error(name + ": expected no write outside its elements, got one");
    }
  }
};

void FillWithNaN(State& state) {
  for (Tensor* x : {&state.k, &state.v, &state.g, &state.beta, &state.nodes}) {
    std::fill(x->data.begin(), x->data.end(), std::nan(""));
  }
}

std::int64_t Size(const std::vector<std::int64_t>& sizes, int begin, int end) {
  std::int64_t size = 1;
  for (int i = begin; i < end; ++i) size *= sizes[i];
  return size;
}

}  // namespace

Context ContextFor(const RunOptions& options, const Allocation& workspace) {
  return {.device = options.device,
          .workspace = workspace.data(),
          .workspace_bytes = workspace.bytes(),
          .num_threads = options.num_threads};
}

Allocation PoisonedWorkspace(std::size_t bytes, const RunOptions& options) {
  Allocation workspace(options.device, bytes);
  const std::vector<std::byte> poison(bytes, std::byte{0xff});
  if (bytes > 0) MemoryOf(options.device).CopyIn(workspace.data(), poison.data(), bytes);
  return workspace;
}

DeviceState::DeviceState(const State& values, std::int64_t min_slots, const RunOptions& options)
    : k_(options.device, options.dtype, values.k),
      v_(options.device, options.dtype, values.v),
      g_(options.device, options.wide_dtype(), values.g),
      beta_(options.device, options.beta_dtype, values.beta) {
  Tensor nodes = values.nodes;
  if (nodes.size(2) < min_slots) {
    std::vector<std::int64_t> more = nodes.sizes;
    more[2] = min_slots - nodes.size(2);
    nodes = Concatenate({nodes, Tensor(more)}, 2);
  }
  nodes_ = DeviceTensor(options.device, options.wide_dtype(), nodes);
  if (!values.position.empty()) {
    position_ = Int64Tensor(options.device, values.position);
    base_ = Int64Tensor(options.device, values.base);
  }
}

StateView DeviceState::View(std::int64_t max_position) const {
  return {.k = k_.view(),
          .v = v_.view(),
          .g = g_.view(),
          .beta = beta_.view(),
          .nodes = nodes_.view(),
          .position = position_.view(),
          .base = base_.view(),
          .max_position = max_position};
}

StateGradView DeviceState::GradView() const {
  return {
      .k = k_.view(), .v = v_.view(), .g = g_.view(), .beta = beta_.view(), .nodes = nodes_.view()};
}

State DeviceState::Values() const {
  State state{.k = k_.Values(),
              .v = v_.Values(),
              .g = g_.Values(),
              .beta = beta_.Values(),
              .nodes = nodes_.Values(),
              .position = {},
              .base = {}};
  if (!position_.view().given()) return state;
  state.position = Int64Values(position_);
  state.base = Int64Values(base_);
  for (Tensor* ring : {&state.k, &state.v, &state.g, &state.beta}) {
    if (!ring->given()) continue;
    const std::int64_t row = Size(ring->sizes, 2, static_cast<int>(ring->sizes.size()));
    for (std::int64_t n = 0; n < ring->size(0); ++n) {
      for (std::int64_t p = state.position[n]; p < state.base[n] + kStateRing; ++p) {
        std::fill_n(ring->data.begin() + (n * kStateRing + p % kStateRing) * row, row, 0.0);
      }
    }
  }
  return state;
}

State EmptyState(const Arguments& a) {
  const std::int64_t N = a.num_sequences(), G = a.q.size(2), K = a.q.size(3);
  const std::int64_t H = a.v.size(2), V = a.v.size(3);
  State state;
  state.k = Tensor({N, kStateRing, G, K});
  state.v = Tensor({N, kStateRing, H, V});
  state.g = Tensor({N, kStateRing, H});
  if (a.beta.given()) state.beta = Tensor({N, kStateRing, H});
  state.nodes = Tensor({N, H, 0, K, V});
  state.position.assign(N, 0);
  state.base.assign(N, 0);
  return state;
}

// As a call on a device needs them, which knows the largest position only.
std::int64_t FinalSlots(const Arguments& a) {
  std::int64_t position = 0, base = 0, tokens = 0;
  for (std::int64_t n = 0; n < a.num_sequences(); ++n) {
    tokens = std::max(tokens,
                      a.cu_seqlens.empty() ? a.q.size(1) : a.cu_seqlens[n + 1] - a.cu_seqlens[n]);
    if (!a.initial_state.given()) continue;
    position = std::max(position, a.initial_state.position[n]);
    base = std::max(base, a.initial_state.base[n]);
  }
  int slots = NumSlots(NextBase(base, position + tokens));
  if (a.saturate) slots = std::min(slots, TopSlot(static_cast<int>(a.level_scales.size(3))) + 1);
  return slots;
}

reference::Result RunForward(const Arguments& a, const RunOptions& options) {
  const DeviceInputs device(a, options);
  const DeviceTensor o(options.device, options.dtype, a.v.sizes, options.layout);
  DeviceState final_state;
  StateView final_view;
  if (options.final_state) {
    State poison = EmptyState(a);
    poison.nodes = Tensor({a.num_sequences(), a.v.size(2), FinalSlots(a) + options.spare_slots,
                           a.q.size(3), a.v.size(3)});
    FillWithNaN(poison);
    final_state = DeviceState(poison, 0, options);
    final_view = final_state.View(0);
  }
  const Allocation workspace =
      PoisonedWorkspace(ForwardWorkspaceBytes(device.inputs, final_view, options.device), options);
  Forward(device.inputs, o.view(), final_view, ContextFor(options, workspace));
  MemoryOf(options.device).Synchronize();
  device.CheckPoison();
  DeviceInputs::RequireIntact("o", o);
  return {.o = o.Values(), .final_state = options.final_state ? final_state.Values() : State()};
}

reference::Gradients RunBackward(const Arguments& a, const Tensor& d_o, const State& d_final_state,
                                 const RunOptions& options, unsigned wanted) {
  const DeviceInputs device(a, options);
  const DeviceTensor d_out(options.device, options.dtype, d_o, options.layout);
  DeviceState d_final;
  if (d_final_state.given()) d_final = DeviceState(d_final_state, FinalSlots(a), options);
  const auto gradient_of = [&](int bit, const Tensor& values, DType dtype) {
    return values.given() && (wanted >> bit & 1)
               ? DeviceTensor(options.device, dtype, values.sizes, options.layout)
               : DeviceTensor();
  };
  const DeviceTensor q = gradient_of(0, a.q, options.dtype);
  const DeviceTensor k = gradient_of(1, a.k, options.dtype);
  const DeviceTensor v = gradient_of(2, a.v, options.dtype);
  const DeviceTensor g = gradient_of(3, a.g, options.wide_dtype());
  const DeviceTensor beta = gradient_of(4, a.beta, options.beta_dtype);
  const DeviceTensor level_scales = gradient_of(5, a.level_scales, options.scales_dtype);
  const bool with_state = a.initial_state.given() && (wanted >> 6 & 1);
  DeviceState d_initial;
  if (with_state) {
    State poison = a.initial_state;
    FillWithNaN(poison);
    poison.position.clear();
    d_initial = DeviceState(poison, 0, options);
  }
  const Gradients gradients{.q = q.view(),
                            .k = k.view(),
                            .v = v.view(),
                            .g = g.view(),
                            .beta = beta.view(),
                            .level_scales = level_scales.view(),
                            .initial_state = d_initial.GradView()};
  const Allocation workspace = PoisonedWorkspace(
      BackwardWorkspaceBytes(device.inputs, d_final.GradView(), gradients, options.device),
      options);
  Backward(device.inputs, d_out.view(), d_final.GradView(), gradients,
           ContextFor(options, workspace));
  MemoryOf(options.device).Synchronize();
  device.CheckPoison();
  for (const auto& [name, tensor] : {std::pair{"gradients.q", &q},
                                     {"gradients.k", &k},
                                     {"gradients.v", &v},
                                     {"gradients.g", &g},
                                     {"gradients.beta", &beta},
                                     {"gradients.level_scales", &level_scales}}) {
    DeviceInputs::RequireIntact(name, *tensor);
  }
  return {.q = q.Values(),
          .k = k.Values(),
          .v = v.Values(),
          .g = g.Values(),
          .beta = beta.Values(),
          .level_scales = level_scales.Values(),
          .initial_state = with_state ? d_initial.Values() : State()};
}

reference::Result RunSteps(const Arguments& a, const std::vector<std::int64_t>& step_sizes,
                           const RunOptions& options) {
  const State initial = a.initial_state.given() ? a.initial_state : EmptyState(a);
  const DeviceState state(initial, FinalSlots(a) + options.spare_slots, options);
  std::int64_t max_position = *std::max_element(initial.position.begin(), initial.position.end());
  const Allocation no_workspace(options.device, 0);
  std::vector<Tensor> outputs;
  std::int64_t begin = 0;
  for (const std::int64_t size : step_sizes) {
    DeviceInputs device(SliceTokens(a, begin, begin + size), options);
    device.inputs.initial_state = state.View(max_position);
    const DeviceTensor o(options.device, options.dtype,
                         {a.v.size(0), size, a.v.size(2), a.v.size(3)}, options.layout);
    Step(device.inputs, o.view(), ContextFor(options, no_workspace));
    MemoryOf(options.device).Synchronize();
    device.CheckPoison();
    DeviceInputs::RequireIntact("o", o);
    outputs.push_back(o.Values());
    begin += size;
    max_position += size;
  }
  return {.o = Concatenate(outputs, 1), .final_state = state.Values()};
}

Tensor Slice(const Tensor& x, int axis, std::int64_t begin, std::int64_t end) {
  if (!x.given()) return {};
  std::vector<std::int64_t> sizes = x.sizes;
  sizes[axis] = end - begin;
  Tensor part(sizes);
  const std::int64_t inner = Size(x.sizes, axis + 1, static_cast<int>(x.sizes.size()));
  for (std::int64_t outer = 0; outer < Size(x.sizes, 0, axis); ++outer) {
    std::copy_n(x.data.begin() + (outer * x.size(axis) + begin) * inner, (end - begin) * inner,
                part.data.begin() + outer * (end - begin) * inner);
  }
  return part;
}

Tensor Concatenate(const std::vector<Tensor>& parts, int axis) {
  std::vector<std::int64_t> sizes = parts.front().sizes;
  sizes[axis] = 0;
  for (const Tensor& part : parts) sizes[axis] += part.size(axis);
  Tensor whole(sizes);
  const std::int64_t inner = Size(sizes, axis + 1, static_cast<int>(sizes.size()));
  std::int64_t begin = 0;
  for (const Tensor& part : parts) {
    const std::int64_t row = part.size(axis) * inner;
    for (std::int64_t outer = 0; outer < Size(sizes, 0, axis); ++outer) {
      std::copy_n(part.data.begin() + outer * row, row,
                  whole.data.begin() + outer * sizes[axis] * inner + begin);
    }
    begin += row;
  }
  return whole;
}

Arguments SliceTokens(const Arguments& a, std::int64_t begin, std::int64_t end) {
  return {.transition = a.transition,
          .q = Slice(a.q, 1, begin, end),
          .k = Slice(a.k, 1, begin, end),
          .v = Slice(a.v, 1, begin, end),
          .g = Slice(a.g, 1, begin, end),
          .beta = Slice(a.beta, 1, begin, end),
          .level_scales = Slice(a.level_scales, 1, begin, end),
          .cu_seqlens = {},
          .scale = a.scale,
          .saturate = a.saturate,
          .initial_state = {}};
}

Arguments SliceRow(const Arguments& a, std::int64_t b) {
  return {.transition = a.transition,
          .q = Slice(a.q, 0, b, b + 1),
          .k = Slice(a.k, 0, b, b + 1),
          .v = Slice(a.v, 0, b, b + 1),
          .g = Slice(a.g, 0, b, b + 1),
          .beta = Slice(a.beta, 0, b, b + 1),
          .level_scales = Slice(a.level_scales, 0, b, b + 1),
          .cu_seqlens = {},
          .scale = a.scale,
          .saturate = a.saturate,
          .initial_state = SliceState(a.initial_state, b, b + 1)};
}

State SliceState(const State& state, std::int64_t begin, std::int64_t end) {
  if (!state.given()) return {};
  State part{.k = Slice(state.k, 0, begin, end),
             .v = Slice(state.v, 0, begin, end),
             .g = Slice(state.g, 0, begin, end),
             .beta = Slice(state.beta, 0, begin, end),
             .nodes = Slice(state.nodes, 0, begin, end),
             .position = {},
             .base = {}};
  if (!state.position.empty()) {
    part.position = {state.position.begin() + begin, state.position.begin() + end};
    part.base = {state.base.begin() + begin, state.base.begin() + end};
  }
  return part;
}

}  // namespace fenwick::support
