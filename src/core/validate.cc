// Validation of the arguments of ops.h; see validate.h.
#include "core/validate.h"

#include <cmath>
#include <string>
#include <utility>

#include "core/require.h"

namespace fenwick {
namespace {

struct Sizes {
  std::int64_t B, T, G, H, K, V, L, N;
};

Sizes SizesOf(const Inputs& inputs) {
  return {inputs.q.size(0),
          inputs.q.size(1),
          inputs.q.size(2),
          inputs.v.size(2),
          inputs.q.size(3),
          inputs.v.size(3),
          inputs.level_scales.size(3),
          inputs.num_sequences()};
}

std::int64_t SequenceLength(const Inputs& inputs, std::int64_t n) {
  return inputs.cu_seqlens.empty() ? inputs.q.size(1)
                                   : inputs.cu_seqlens[n + 1] - inputs.cu_seqlens[n];
}

const std::int64_t* Int64Data(const TensorView& view) {
  return static_cast<const std::int64_t*>(view.data);
}

// Position at which sequence n starts and its base: the values on the CPU, what max_position allows
// on a device whose memory the host cannot read.
std::pair<std::int64_t, std::int64_t> StartOf(const Inputs& inputs, std::int64_t n, Device device) {
  const StateView& state = inputs.initial_state;
  if (!state.given()) return {0, 0};
  if (device == Device::kCPU) return {Int64Data(state.position)[n], Int64Data(state.base)[n]};
  return {state.max_position, NextBase(0, state.max_position)};
}

void CheckTensors(const Inputs& inputs) {
  const auto check_enum = [](const char* name, int value) {
    if (value > 1) Fail(name, "one of its two values", std::to_string(value));
  };
  check_enum("transition", static_cast<int>(inputs.transition));
  check_enum("level_policy", static_cast<int>(inputs.level_policy));
  const TensorView& q = inputs.q;
  RequireShape("q", "[B, T, G, K]", q, {kAnySize, kAnySize, kAnySize, kAnySize});
  RequireFloating("q", q.dtype);
  const std::int64_t B = q.size(0), T = q.size(1), G = q.size(2), K = q.size(3);
  if (T > kMaxPosition) Fail("q", "at most 2^48 tokens", std::to_string(T));
  if (G < 1) Fail("q", "at least 1 group", std::to_string(G));
  if (K < 1 || K > kMaxHeadSize) Fail("q", "key size K in 1..512", std::to_string(K));
  RequireMemory("q", q);

  RequireShape("k", "[B, T, G, K]", inputs.k, {B, T, G, K});
  RequireDType("k", inputs.k, q.dtype);
  RequireMemory("k", inputs.k);

  const TensorView& v = inputs.v;
  RequireShape("v", "[B, T, H, V]", v, {B, T, kAnySize, kAnySize});
  RequireDType("v", v, q.dtype);
  const std::int64_t H = v.size(2), V = v.size(3);
  if (H < 1 || H % G != 0) {
    Fail("v", "a number of heads that is a multiple of the " + std::to_string(G) + " groups of q",
         std::to_string(H));
  }
  if (V < 1 || V > kMaxHeadSize) Fail("v", "value size V in 1..512", std::to_string(V));
  RequireMemory("v", v);

  RequireShape("g", "[B, T, H]", inputs.g, {B, T, H});
  RequireDType("g", inputs.g, WideType(inputs.q.dtype));
  RequireMemory("g", inputs.g);

  if (inputs.transition == Transition::kGatedDelta) {
    RequireShape("beta", "[B, T, H]", inputs.beta, {B, T, H});
    RequireStorageOrWide("beta", inputs.beta, inputs.q.dtype);
    RequireMemory("beta", inputs.beta);
  } else {
    RequireNotGiven("beta", inputs.beta, "with a scalar gate");
  }

  RequireShape("level_scales", "[B, T, H, L]", inputs.level_scales, {B, T, H, kAnySize});
  RequireStorageOrWide("level_scales", inputs.level_scales, inputs.q.dtype);
  RequireMemory("level_scales", inputs.level_scales);

  if (!std::isfinite(inputs.scale)) Fail("scale", "a finite number", std::to_string(inputs.scale));
}

// The differentiable tensors of a state or of its gradient; `slots` node slots, or kAnySize.
template <typename State>
void CheckStateTensors(const Inputs& inputs, const State& state, const std::string& name,
                       std::int64_t slots) {
  const Sizes s = SizesOf(inputs);
  const auto check = [&](const char* field, const char* axes, const TensorView& view, DType dtype,
                         std::initializer_list<std::int64_t> sizes) {
    RequireShape(name + "." + field, axes, view, sizes);
    RequireDType(name + "." + field, view, dtype);
    RequireContiguous(name + "." + field, view);
  };
  check("k", "[N, 128, G, K]", state.k, inputs.q.dtype, {s.N, kStateRing, s.G, s.K});
  check("v", "[N, 128, H, V]", state.v, inputs.q.dtype, {s.N, kStateRing, s.H, s.V});
  check("g", "[N, 128, H]", state.g, WideType(inputs.q.dtype), {s.N, kStateRing, s.H});
  if (inputs.transition == Transition::kGatedDelta) {
    check("beta", "[N, 128, H]", state.beta, inputs.beta.dtype, {s.N, kStateRing, s.H});
  } else {
    RequireNotGiven(name + ".beta", state.beta, "with a scalar gate");
  }
  check("nodes", "[N, H, S, K, V]", state.nodes, WideType(inputs.q.dtype),
        {s.N, s.H, slots, s.K, s.V});
}

void CheckState(const Inputs& inputs, const StateView& state, const std::string& name) {
  const std::int64_t N = inputs.num_sequences();
  for (const auto& [field, view] :
       {std::pair{".position", &state.position}, std::pair{".base", &state.base}}) {
    RequireShape(name + field, "[N]", *view, {N});
    RequireDType(name + field, *view, DType::kInt64);
    RequireContiguous(name + field, *view);
  }
  CheckStateTensors(inputs, state, name, kAnySize);
}

void RequireSlots(const std::string& name, const TensorView& nodes, const Inputs& inputs,
                  std::int64_t base) {
  int needed = NumSlots(base);
  if (inputs.level_policy == LevelPolicy::kSaturate) {
    needed = std::min(needed, TopSlot(static_cast<int>(inputs.level_scales.size(3))) + 1);
  }
  if (nodes.size(2) < needed) {
    Fail(name,
         "at least " + std::to_string(needed) + " slots for " + std::to_string(base) +
             " folded tokens",
         std::to_string(nodes.size(2)));
  }
}

void CheckInitialState(const Inputs& inputs, Device device) {
  const StateView& state = inputs.initial_state;
  const std::string name = "initial_state";
  if (!state.given()) {
    for (const TensorView* view :
         {&state.k, &state.v, &state.g, &state.beta, &state.nodes, &state.base}) {
      RequireNotGiven(name, *view, "without initial_state.position");
    }
    return;
  }
  CheckState(inputs, state, name);
  if (state.max_position < 0 || state.max_position > kMaxPosition) {
    Fail(name + ".max_position", "0..2^48", std::to_string(state.max_position));
  }
  for (std::int64_t n = 0; n < inputs.num_sequences(); ++n) {
    const auto [position, base] = StartOf(inputs, n, device);
    const std::string index = "[" + std::to_string(n) + "]";
    if (position < 0 || position > state.max_position) {
      Fail(name + ".position" + index, "0..max_position = " + std::to_string(state.max_position),
           std::to_string(position));
    }
    if (base < 0 || base % kStateChunk != 0 || base > position || position - base > kStateRing) {
      Fail(name + ".base" + index,
           "a multiple of 64 with 0 <= position - base <= 128 for position " +
               std::to_string(position),
           std::to_string(base));
    }
    RequireSlots(name + ".nodes", state.nodes, inputs, base);
  }
}

void CheckLevels(const Inputs& inputs, Device device) {
  const std::int64_t L = inputs.level_scales.size(3);
  std::int64_t reached = 0;
  for (std::int64_t n = 0; n < inputs.num_sequences(); ++n) {
    const std::int64_t length = SequenceLength(inputs, n);
    if (length > 0) reached = std::max(reached, StartOf(inputs, n, device).first + length);
  }
  if (reached > kMaxPosition) {
    Fail("initial_state.max_position", "at most 2^48 tokens in all", std::to_string(reached));
  }
  const bool saturate = inputs.level_policy == LevelPolicy::kSaturate;
  const int needed = saturate ? std::min(NumLevels(reached), 1) : NumLevels(reached);
  if (L < needed) {
    Fail("level_scales",
         "at least " + std::to_string(needed) + " level" + (needed == 1 ? "" : "s") + " for " +
             std::to_string(reached) + " token" + (reached == 1 ? "" : "s") +
             (saturate ? "" : " (or level_policy saturate)"),
         std::to_string(L));
  }
}

// Slots for the base that each sequence ends with.
void CheckFinalSlots(const std::string& name, const TensorView& nodes, const Inputs& inputs,
                     Device device) {
  for (std::int64_t n = 0; n < inputs.num_sequences(); ++n) {
    const auto [position, base] = StartOf(inputs, n, device);
    RequireSlots(name, nodes, inputs, NextBase(base, position + SequenceLength(inputs, n)));
  }
}

void RequireApart(const std::string& name, const TensorView& a, const std::string& other,
                  const TensorView& b) {
  if (a.num_elements() == 0 || b.num_elements() == 0) return;
  const auto begin = [](const TensorView& view) {
    return reinterpret_cast<std::uintptr_t>(view.data);
  };
  const auto end = [&](const TensorView& view) {
    return begin(view) + view.num_elements() * ElementSize(view.dtype);
  };
  if (begin(a) < end(b) && begin(b) < end(a)) {
    Fail(name, "memory apart from " + other, "an overlap");
  }
}

template <typename State>
std::array<std::pair<const char*, const TensorView*>, 5> Fields(const State& state) {
  return {{{".k", &state.k},
           {".v", &state.v},
           {".g", &state.g},
           {".beta", &state.beta},
           {".nodes", &state.nodes}}};
}

void RequireNoneGiven(const std::string& name, const StateGradView& grad) {
  for (const auto& [field, view] : Fields(grad)) {
    RequireNotGiven(name + field, *view, "without nodes");
  }
}

}  // namespace

void ValidateInputs(const Inputs& inputs, Device device) {
  CheckTensors(inputs);
  RequireSequences(inputs.cu_seqlens, inputs.q.size(0), inputs.q.size(1));
  CheckInitialState(inputs, device);
  CheckLevels(inputs, device);
}

void ValidateOutput(const Inputs& inputs, const TensorView& o, const char* name, bool written) {
  const Sizes s = SizesOf(inputs);
  RequireShape(name, "[B, T, H, V]", o, {s.B, s.T, s.H, s.V});
  RequireDType(name, o, inputs.q.dtype);
  RequireMemory(name, o);
  if (written) RequireDistinctElements(name, o);
}

void ValidateFinalState(const Inputs& inputs, const StateView& final_state, Device device) {
  const std::string name = "final_state";
  if (!final_state.given()) {
    for (const auto& [field, view] : Fields(final_state)) {
      RequireNotGiven(name + field, *view, "without final_state.position");
    }
    return;
  }
  CheckState(inputs, final_state, name);
  CheckFinalSlots(name + ".nodes", final_state.nodes, inputs, device);
  const StateView& initial = inputs.initial_state;
  const auto with_counters = [](const StateView& state) {
    auto fields = Fields(state);
    return std::array<std::pair<const char*, const TensorView*>, 7>{
        fields[0],
        fields[1],
        fields[2],
        fields[3],
        fields[4],
        std::pair{".position", &state.position},
        std::pair{".base", &state.base}};
  };
  if (!initial.given()) return;
  for (const auto& [field, view] : with_counters(final_state)) {
    for (const auto& [other_field, other] : with_counters(initial)) {
      RequireApart(name + field, *view, std::string("initial_state") + other_field, *other);
    }
  }
}

void ValidateFinalStateGrad(const Inputs& inputs, const StateGradView& d_final_state,
                            Device device) {
  const std::string name = "d_final_state";
  if (!d_final_state.given()) return RequireNoneGiven(name, d_final_state);
  CheckStateTensors(inputs, d_final_state, name, kAnySize);
  CheckFinalSlots(name + ".nodes", d_final_state.nodes, inputs, device);
}

void ValidateGradients(const Inputs& inputs, const Gradients& gradients) {
  const auto check = [](const std::string& name, const TensorView& grad, const TensorView& of) {
    if (!grad.given()) return;
    bool same = grad.rank == of.rank;
    for (int i = 0; same && i < of.rank; ++i) same = grad.size(i) == of.size(i);
    if (!same) Fail(name, "the shape " + ShapeText(of) + " of its input", ShapeText(grad));
    RequireDType(name, grad, of.dtype);
    RequireMemory(name, grad);
    RequireDistinctElements(name, grad);
  };
  check("gradients.q", gradients.q, inputs.q);
  check("gradients.k", gradients.k, inputs.k);
  check("gradients.v", gradients.v, inputs.v);
  check("gradients.g", gradients.g, inputs.g);
  if (inputs.transition == Transition::kGatedDelta) {
    check("gradients.beta", gradients.beta, inputs.beta);
  } else {
    RequireNotGiven("gradients.beta", gradients.beta, "with a scalar gate");
  }
  check("gradients.level_scales", gradients.level_scales, inputs.level_scales);

  const std::string name = "gradients.initial_state";
  if (!gradients.initial_state.given()) return RequireNoneGiven(name, gradients.initial_state);
  if (!inputs.initial_state.given()) {
    Fail(name, "none without an initial state", "gradients");
  }
  CheckStateTensors(inputs, gradients.initial_state, name, inputs.initial_state.nodes.size(2));
}

void ValidateStep(const Inputs& inputs, const TensorView& o, Device device) {
  ValidateInputs(inputs, device);
  ValidateOutput(inputs, o, "o", /*written=*/true);
  if (!inputs.cu_seqlens.empty()) {
    Fail("cu_seqlens", "none for a step", std::to_string(inputs.cu_seqlens.size()) + " offsets");
  }
  if (!inputs.initial_state.given()) Fail("initial_state", "a state for a step", "none");
  const std::int64_t tokens = inputs.q.size(1);
  if (tokens < 1 || tokens > kStateChunk) {
    Fail("q", "1..64 tokens for a step", std::to_string(tokens));
  }
  CheckFinalSlots("initial_state.nodes", inputs.initial_state.nodes, inputs, device);
}

}  // namespace fenwick
