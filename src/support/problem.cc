#include "support/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "support/element.h"

namespace fenwick::support {
namespace {

using reference::Arguments;
using reference::State;
using reference::Tensor;

class Generator {
 public:
  Generator(const ProblemSpec& spec, std::uint64_t seed) : spec_(spec), random_(seed) {}

  double Normal() { return normal_(random_); }
  double Uniform() { return uniform_(random_); }

  Tensor NormalTensor(std::vector<std::int64_t> sizes, double deviation, DType dtype) {
    Tensor x(std::move(sizes));
    for (double& value : x.data) value = Rounded(dtype, deviation * Normal());
    return x;
  }

  // B rows of T tokens; L levels.
  Arguments Tokens(std::int64_t B, std::int64_t T, std::int64_t L) {
    const RunOptions& options = spec_.options;
    const std::int64_t H = spec_.H, K = spec_.K;
    Arguments a;
    a.transition = spec_.transition;
    a.scale = spec_.scale;
    a.saturate = spec_.saturate;
    a.q = NormalTensor({B, T, spec_.G, K}, 1.0 / std::sqrt(K), options.dtype);
    a.k = NormalTensor({B, T, spec_.G, K}, 1.0, options.dtype);
    a.v = NormalTensor({B, T, H, spec_.V}, 1.0, options.dtype);
    a.g = Tensor({B, T, H});
    for (double& g : a.g.data) g = Rounded(options.wide_dtype(), LogDecay());
    a.level_scales = Tensor({B, T, H, L});
    for (double& scale : a.level_scales.data) {
      scale = Uniform() < 0.05 ? 0.0 : Rounded(options.scales_dtype, 1.5 * Uniform());
    }
    if (spec_.transition == Transition::kGatedDelta) {
      a.beta = Tensor({B, T, H});
      for (double& beta : a.beta.data) beta = Rounded(options.beta_dtype, Uniform());
      NormaliseRows(a.k, options.dtype);
    }
    return a;
  }

 private:
  double LogDecay() {
    if (spec_.gate_everywhere || Uniform() < 1.0 / 16) {
      switch (spec_.gate) {
        case Gate::kMild: break;
        case Gate::kZero: return 0.0;
        case Gate::kTiny: return -1e-6;
        case Gate::kHuge: return -90.0;
        case Gate::kReset: return -std::numeric_limits<double>::infinity();
      }
    }
    return -std::exp(1.5 * Normal() - 3.0);
  }

  // The delta rule is stable for keys of norm at most 1.
  static void NormaliseRows(Tensor& x, DType dtype) {
    const std::int64_t K = x.size(3);
    for (std::size_t row = 0; row < x.data.size(); row += K) {
      double square = 0.0;
      for (std::int64_t i = 0; i < K; ++i) square += x.data[row + i] * x.data[row + i];
      for (std::int64_t i = 0; i < K; ++i) {
        x.data[row + i] = Rounded(dtype, x.data[row + i] / std::sqrt(square + 1e-6));
      }
    }
  }

  const ProblemSpec& spec_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  std::uniform_real_distribution<double> uniform_;
};

// States after spec.state_tokens[n] random tokens: packed, so that one call makes all.
State RandomState(const ProblemSpec& spec, Generator& generator) {
  std::int64_t total = 0;
  std::vector<std::int64_t> offsets = {0};
  for (const std::int64_t tokens : spec.state_tokens) offsets.push_back(total += tokens);
  const std::int64_t longest =
      *std::max_element(spec.state_tokens.begin(), spec.state_tokens.end());
  Arguments past = generator.Tokens(1, total, spec.saturate ? spec.L : NumLevels(longest));
  past.cu_seqlens = offsets;
  State state = reference::Forward(past).final_state;
  for (double& x : state.nodes.data) x = Rounded(spec.options.wide_dtype(), x);
  return state;
}

State RandomStateGradient(const Arguments& a, const RunOptions& options, Generator& generator) {
  State d = EmptyState(a);
  std::vector<std::int64_t> nodes = d.nodes.sizes;
  nodes[2] = FinalSlots(a) + options.spare_slots;
  d.k = generator.NormalTensor(d.k.sizes, 1.0, options.dtype);
  d.v = generator.NormalTensor(d.v.sizes, 1.0, options.dtype);
  d.g = generator.NormalTensor(d.g.sizes, 1.0, options.wide_dtype());
  if (d.beta.given()) d.beta = generator.NormalTensor(d.beta.sizes, 1.0, options.beta_dtype);
  d.nodes = generator.NormalTensor(nodes, 1.0, options.wide_dtype());
  d.position.clear();
  d.base.clear();
  return d;
}

// By the longest sequence from the largest position: what a call on a device checks.
std::int64_t TokensReached(const ProblemSpec& spec) {
  std::int64_t longest = spec.lengths.empty() ? spec.T : 0, position = 0;
  for (const std::int64_t length : spec.lengths) longest = std::max(longest, length);
  for (const std::int64_t tokens : spec.state_tokens) position = std::max(position, tokens);
  return position + longest;
}

// Zeros for slots that are not live, and slots added up to `slots`.
Tensor LiveNodes(const State& state, std::int64_t slots, const Arguments& a) {
  Tensor nodes = state.nodes;
  if (nodes.size(2) < slots) {
    std::vector<std::int64_t> more = nodes.sizes;
    more[2] = slots - nodes.size(2);
    nodes = Concatenate({nodes, Tensor(more)}, 2);
  }
  const std::int64_t size = nodes.size(3) * nodes.size(4);
  const std::int64_t top =
      a.saturate ? TopSlot(static_cast<int>(a.level_scales.size(3))) : nodes.size(2);
  for (std::int64_t n = 0; n < nodes.size(0); ++n) {
    const std::int64_t chunks = state.base[n] / kStateChunk;
    for (std::int64_t slot = 0; slot < nodes.size(2); ++slot) {
      const bool live = slot < top ? chunks >> slot & 1 : slot == top && chunks >> top != 0;
      if (live) continue;
      for (std::int64_t h = 0; h < nodes.size(1); ++h) {
        const std::int64_t at = ((n * nodes.size(1) + h) * nodes.size(2) + slot) * size;
        std::fill_n(nodes.data.begin() + at, size, 0.0);
      }
    }
  }
  return nodes;
}

}  // namespace

Problem RandomProblem(const ProblemSpec& given, std::uint64_t seed) {
  Problem problem{.spec = given, .arguments = {}, .d_o = {}, .d_final_state = {}};
  ProblemSpec& spec = problem.spec;
  std::vector<std::int64_t> cu_seqlens;
  if (!spec.lengths.empty()) {
    spec.B = 1;
    spec.T = 0;
    cu_seqlens = {0};
    for (const std::int64_t length : spec.lengths) cu_seqlens.push_back(spec.T += length);
  }
  if (spec.L == 0) spec.L = NumLevels(TokensReached(spec));
  Generator generator(spec, seed);
  Arguments& a = problem.arguments;
  a = generator.Tokens(spec.B, spec.T, spec.L);
  a.cu_seqlens = cu_seqlens;
  if (!spec.state_tokens.empty()) a.initial_state = RandomState(spec, generator);
  problem.d_o = generator.NormalTensor(a.v.sizes, 1.0, spec.options.dtype);
  if (spec.d_final_state) {
    problem.d_final_state = RandomStateGradient(a, spec.options, generator);
  }
  return problem;
}

std::string Describe(const ProblemSpec& spec) {
  const auto list = [](const char* name, const std::vector<std::int64_t>& values) {
    std::string text;
    for (const std::int64_t value : values)
      text += (text.empty() ? "" : ",") + std::to_string(value);
    return values.empty() ? "" : std::string(" ") + name + "=" + text;
  };
  static constexpr const char* kGates[] = {"mild", "0", "-1e-6", "-90", "-inf"};
  static constexpr const char* kLayouts[] = {"", " padded", " ragged"};
  const RunOptions& options = spec.options;
  std::string text =
      std::string(spec.transition == Transition::kScalarGate ? "scalar_gate" : "gated_delta") +
      " " + DeviceName(options.device) + " " + DTypeName(options.dtype) + " B" +
      std::to_string(spec.B) + " T" + std::to_string(spec.T) + " G" + std::to_string(spec.G) +
      " H" + std::to_string(spec.H) + " K" + std::to_string(spec.K) + " V" +
      std::to_string(spec.V) + " L" + std::to_string(spec.L) + list("lengths", spec.lengths) +
      list("state", spec.state_tokens) + " g=" + kGates[static_cast<int>(spec.gate)] +
      (spec.gate_everywhere ? " everywhere" : "") + kLayouts[static_cast<int>(options.layout)];
  if (spec.saturate) text += " saturate";
  if (spec.d_final_state) text += " d_final_state";
  return text;
}

namespace {

double Norm(const double* x, std::int64_t size) {
  double square = 0.0;
  for (std::int64_t i = 0; i < size; ++i) square += x[i] * x[i];
  return std::sqrt(square);
}

// What ||d_initial_state.nodes|| would be about if nothing decayed between the nodes and their
// readers. The delta rule's transitions can leave nearly nothing of it: 64 of them are a product of
// 64 projections, of norm exp(-64 / K) or so, and rounding in that product is relative to the first
// factor's norm, not to the last one's.
double UndecayedNodesNorm(const Problem& problem) {
  const Arguments& a = problem.arguments;
  const std::int64_t H = a.v.size(2), G = a.q.size(2), K = a.q.size(3), V = a.v.size(3),
                     L = a.level_scales.size(3);
  double square = 0.0;
  for (std::int64_t row = 0; row < a.v.size(0) * a.v.size(1); ++row) {
    for (std::int64_t h = 0; h < H; ++h) {
      const double scale = a.scale * Norm(&a.q.data[(row * G + h / (H / G)) * K], K) *
                           Norm(&problem.d_o.data[(row * H + h) * V], V) *
                           Norm(&a.level_scales.data[(row * H + h) * L], L);
      square += scale * scale;
    }
  }
  if (problem.d_final_state.given()) {
    const Tensor& nodes = problem.d_final_state.nodes;
    const double norm = Norm(nodes.data.data(), static_cast<std::int64_t>(nodes.data.size()));
    square += norm * norm;
  }
  return std::max(std::sqrt(square), kNormFloor);
}

}  // namespace

double RelativeError(const Tensor& out, const Tensor& ref, double norm_floor) {
  if (out.sizes != ref.sizes) return std::numeric_limits<double>::infinity();
  double difference = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < ref.data.size(); ++i) {
    difference += (out.data[i] - ref.data[i]) * (out.data[i] - ref.data[i]);
    norm += ref.data[i] * ref.data[i];
  }
  if (!std::isfinite(difference)) return std::numeric_limits<double>::infinity();
  return std::sqrt(difference) / std::max(std::sqrt(norm), norm_floor);
}

double Tolerance(const RunOptions& options, std::int64_t tokens, bool gradient) {
  switch (options.dtype) {
    case DType::kFloat64: return 1e-11;
    case DType::kFloat32: {
      const double log_tokens = std::max(1.0, std::log(static_cast<double>(tokens)));
      return options.device == Device::kCPU ? 2e-6 * std::sqrt(log_tokens) : 1e-4;
    }
    default: return gradient ? 1e-2 : 5e-3;
  }
}

std::vector<Comparison> Compare(const Problem& problem, const reference::Result& result,
                                const reference::Result& expected) {
  const Arguments& a = problem.arguments;
  const double tolerance =
      Tolerance(problem.spec.options, TokensReached(problem.spec), /*gradient=*/false);
  const State& state = result.final_state;
  const State& expected_state = expected.final_state;
  std::vector<Comparison> all = {{"o", RelativeError(result.o, expected.o), tolerance}};
  if (!problem.spec.options.final_state) return all;
  const bool counters =
      state.position == expected_state.position && state.base == expected_state.base;
  all.push_back({"final_state.position and base", counters ? 0.0 : 1.0, 0.0});
  if (!counters) return all;
  all.push_back({"final_state.k", RelativeError(state.k, expected_state.k), 0.0});
  all.push_back({"final_state.v", RelativeError(state.v, expected_state.v), 0.0});
  const auto ring_g = [](const Tensor& g) {  // -inf is a value like any other
    Tensor finite = g;
    for (double& x : finite.data) x = std::max(x, -1e30);
    return finite;
  };
  all.push_back({"final_state.g", RelativeError(ring_g(state.g), ring_g(expected_state.g)), 0.0});
  if (state.beta.given()) {
    all.push_back({"final_state.beta", RelativeError(state.beta, expected_state.beta), 0.0});
  }
  const std::int64_t slots = std::max(state.nodes.size(2), expected_state.nodes.size(2));
  const double node_tolerance =
      std::min(tolerance, Tolerance({}, TokensReached(problem.spec), false));
  all.push_back({"final_state.nodes",
                 RelativeError(LiveNodes(state, slots, a), LiveNodes(expected_state, slots, a)),
                 problem.spec.options.device == Device::kCPU ? node_tolerance : tolerance});
  return all;
}

std::vector<Comparison> Compare(const Problem& problem, const reference::Gradients& gradients,
                                const reference::Gradients& expected) {
  const double tolerance =
      Tolerance(problem.spec.options, TokensReached(problem.spec), /*gradient=*/true);
  std::vector<Comparison> all;
  const auto add = [&](const char* name, const Tensor& out, const Tensor& ref,
                       double norm_floor = kNormFloor) {
    if (ref.given()) all.push_back({name, RelativeError(out, ref, norm_floor), tolerance});
  };
  add("dq", gradients.q, expected.q);
  add("dk", gradients.k, expected.k);
  add("dv", gradients.v, expected.v);
  add("dg", gradients.g, expected.g);
  add("dbeta", gradients.beta, expected.beta);
  add("dlevel_scales", gradients.level_scales, expected.level_scales);
  add("d_initial_state.k", gradients.initial_state.k, expected.initial_state.k);
  add("d_initial_state.v", gradients.initial_state.v, expected.initial_state.v);
  add("d_initial_state.g", gradients.initial_state.g, expected.initial_state.g);
  add("d_initial_state.beta", gradients.initial_state.beta, expected.initial_state.beta);
  add("d_initial_state.nodes", gradients.initial_state.nodes, expected.initial_state.nodes,
      problem.spec.transition == Transition::kGatedDelta ? 0.1 * UndecayedNodesNorm(problem)
                                                         : kNormFloor);
  return all;
}

namespace {

// The problem with every number of its inputs off by a random part of itself, of deviation
// `relative`. Zeros, -inf and counters stay.
Problem Perturbed(Problem problem, double relative, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  const auto perturb = [&](Tensor& x) {
    for (double& value : x.data) value *= 1.0 + relative * normal(random);
  };
  const auto perturb_state = [&](State& state) {
    for (Tensor* x : {&state.nodes, &state.k, &state.v, &state.g, &state.beta}) perturb(*x);
  };
  Arguments& a = problem.arguments;
  for (Tensor* x : {&a.q, &a.k, &a.v, &a.g, &a.beta, &a.level_scales, &problem.d_o}) perturb(*x);
  perturb_state(a.initial_state);
  perturb_state(problem.d_final_state);
  return problem;
}

// Compares a result with what `reference` (Problem -> the same type) gives. Sums that cancel have
// no result that is good to any fixed tolerance: where a comparison fails, it is allowed twice what
// inputs off by a quarter of the tolerance would change in the reference.
template <typename Result, typename Reference>
std::vector<Comparison> CompareByCondition(const Problem& problem, const Result& result,
                                           Reference reference) {
  const Result expected = reference(problem);
  std::vector<Comparison> all = Compare(problem, result, expected);
  const bool gradient = std::is_same_v<Result, reference::Gradients>;
  const double relative =
      Tolerance(problem.spec.options, TokensReached(problem.spec), gradient) / 4.0;
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    if (std::all_of(all.begin(), all.end(), [](const Comparison& c) { return c.ok(); })) break;
    const std::vector<Comparison> changed =
        Compare(problem, reference(Perturbed(problem, relative, seed)), expected);
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (all[i].tolerance == 0.0 || !std::isfinite(changed[i].error)) continue;  // exact ones stay
      all[i].tolerance = std::max(all[i].tolerance, 2.0 * changed[i].error);
    }
  }
  return all;
}

}  // namespace

std::vector<Comparison> CheckForward(const Problem& problem) {
  const reference::Result result = RunForward(problem.arguments, problem.spec.options);
  std::vector<Comparison> all = CompareByCondition(
      problem, result, [](const Problem& p) { return reference::Forward(p.arguments); });
  const State& state = result.final_state;
  if (!state.given()) return all;
  all.push_back({"final_state.nodes, zero where not live",
                 RelativeError(state.nodes, LiveNodes(state, 0, problem.arguments)), 0.0});
  return all;
}

std::vector<Comparison> CheckBackward(const Problem& problem) {
  const reference::Gradients gradients =
      RunBackward(problem.arguments, problem.d_o, problem.d_final_state, problem.spec.options);
  return CompareByCondition(problem, gradients, [](const Problem& p) {
    return reference::Backward(p.arguments, p.d_o, p.d_final_state);
  });
}

}  // namespace fenwick::support
