// The C++ wrappers of torch/ops_autograd.h: gradients against torch's own functions or against the
// same call made in another way, with optional arguments given and not.
#include "torch/ops_autograd.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <iostream>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "fenwick/fenwick.h"

namespace fenwick_torch {
namespace {

// Fresh inputs in every run; the output of a failing one shows the seed.
class Seed : public ::testing::Environment {
  void SetUp() override {
    const std::uint64_t seed = std::random_device{}();
    std::cout << "seed " << seed << "\n";
    at::manual_seed(seed);
  }
};
[[maybe_unused]] const auto* const kSeed = ::testing::AddGlobalTestEnvironment(new Seed);

at::Tensor Leaf(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble).requires_grad_(); }

std::vector<at::Tensor> Gradients(const std::vector<at::Tensor>& outputs,
                                  const std::vector<at::Tensor>& inputs,
                                  const std::vector<at::Tensor>& d_outputs) {
  return torch::autograd::grad(outputs, inputs, d_outputs);
}

void ExpectClose(const std::vector<at::Tensor>& out, const std::vector<at::Tensor>& ref) {
  ASSERT_EQ(out.size(), ref.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    EXPECT_TRUE(at::allclose(out[i], ref[i], 1e-10, 1e-12)) << "tensor " << i;
  }
}

// A program and the operators that it loads use one copy of the core: one thread count, one pool.
TEST(OpsAutograd, ProgramsShareTheCoreOfTheOperators) {
  void* library = dlopen("libfenwick_torch.so", RTLD_NOW | RTLD_NOLOAD);
  ASSERT_NE(library, nullptr) << dlerror();
  const auto get_num_threads =
      reinterpret_cast<int (*)()>(dlsym(library, "_ZN7fenwick13GetNumThreadsEv"));
  ASSERT_NE(get_num_threads, nullptr) << dlerror();
  fenwick::SetNumThreads(7);
  EXPECT_EQ(get_num_threads(), 7);
  fenwick::SetNumThreads(0);
  dlclose(library);
}

TEST(OpsAutograd, CausalConvMatchesTorch) {
  const at::Tensor x = Leaf({2, 9, 5}), weight = Leaf({5, 4}), bias = Leaf({5});
  const at::Tensor state = Leaf({2, 5, 3});
  const at::Tensor d_y = at::randn({2, 9, 5}, at::kDouble);
  for (const bool optional : {true, false}) {
    std::vector<at::Tensor> inputs{x, weight};
    ConvOptions options;
    if (optional) {
      options = {.bias = bias, .initial_state = state};
      inputs.insert(inputs.end(), {bias, state});
    }
    const at::Tensor before = optional ? state : at::zeros({2, 5, 3}, at::kDouble);
    const at::Tensor padded = at::cat({before, x.transpose(1, 2)}, 2);
    constexpr std::int64_t stride[] = {1}, padding[] = {0};
    const std::optional<at::Tensor> maybe_bias =
        optional ? std::optional<at::Tensor>(bias) : std::nullopt;
    const at::Tensor expected =
        at::silu(at::conv1d(padded, weight.unsqueeze(1), maybe_bias, stride, padding, stride, 5))
            .transpose(1, 2);
    const at::Tensor y = CausalConv1d(x, weight, options);
    ExpectClose({y}, {expected});
    ExpectClose(Gradients({y}, inputs, {d_y}), Gradients({expected}, inputs, {d_y}));
    ExpectClose({CausalConv1dFinalState(x, 4, options)}, {padded.narrow(2, 9, 3)});
  }
}

TEST(OpsAutograd, CausalConvStepsContinueACall) {
  const at::Tensor x = at::randn({2, 9, 5}, at::kDouble), weight = at::randn({5, 4}, at::kDouble);
  const at::Tensor expected = CausalConv1d(x, weight);
  at::Tensor state = CausalConv1dFinalState(x.narrow(1, 0, 2), 4);
  for (int t = 2; t < 9; ++t) {
    const at::Tensor y = CausalConv1dStep(x.narrow(1, t, 1), weight, at::Tensor(), state);
    ExpectClose({y}, {expected.narrow(1, t, 1)});
  }
}

TEST(OpsAutograd, NormsMatchTorch) {
  const at::Tensor x = Leaf({3, 7, 6}), gate = Leaf({3, 7, 6}), weight = Leaf({6});
  const at::Tensor d_y = at::randn({3, 7, 6}, at::kDouble);
  const auto rms = [](const at::Tensor& u) {
    return u * (u.square().mean(-1, true) + 1e-5).rsqrt();
  };
  for (const bool norm_before_gate : {true, false}) {
    const at::Tensor expected =
        norm_before_gate ? rms(x) * weight * at::silu(gate) : rms(x * at::silu(gate)) * weight;
    const at::Tensor y = GatedRmsNorm(x, gate, weight, 1e-5, norm_before_gate);
    ExpectClose({y}, {expected});
    ExpectClose(Gradients({y}, {x, gate, weight}, {d_y}),
                Gradients({expected}, {x, gate, weight}, {d_y}));
  }
  const at::Tensor plain = GatedRmsNorm(x, at::Tensor(), weight, 1e-5, true);
  const at::Tensor plain_expected = rms(x) * weight;
  ExpectClose({plain}, {plain_expected});
  ExpectClose(Gradients({plain}, {x, weight}, {d_y}),
              Gradients({plain_expected}, {x, weight}, {d_y}));

  const at::Tensor unit = L2Norm(x);
  const at::Tensor unit_expected = x / (x.square().sum(-1, true) + 1e-6).sqrt();
  ExpectClose({unit}, {unit_expected});
  ExpectClose(Gradients({unit}, {x}, {d_y}), Gradients({unit_expected}, {x}, {d_y}));
}

class OpsAutogradAttention : public ::testing::TestWithParam<fenwick::Transition> {
 protected:
  static constexpr std::int64_t kTokens = 300;

  bool has_beta() const { return GetParam() == fenwick::Transition::kGatedDelta; }

  // q, k, v, g, [beta,] level_scales for two sequences.
  std::vector<at::Tensor> Inputs() const {
    const at::Tensor k = at::randn({2, kTokens, 1, 4}, at::kDouble);
    std::vector<at::Tensor> inputs{
        at::randn({2, kTokens, 1, 4}, at::kDouble), k / k.norm(2, {-1}, true),
        at::randn({2, kTokens, 2, 3}, at::kDouble), -at::rand({2, kTokens, 2}, at::kDouble)};
    if (has_beta()) inputs.push_back(at::rand({2, kTokens, 2}, at::kDouble));
    inputs.push_back(at::rand({2, kTokens, 2, fenwick::NumLevels(kTokens)}, at::kDouble));
    for (at::Tensor& tensor : inputs) tensor.requires_grad_();
    return inputs;
  }

  std::vector<at::Tensor> Slice(const std::vector<at::Tensor>& inputs, std::int64_t begin,
                                std::int64_t end) const {
    std::vector<at::Tensor> slices;
    for (const at::Tensor& tensor : inputs) slices.push_back(tensor.narrow(1, begin, end - begin));
    return slices;
  }

  at::Tensor Full(const std::vector<at::Tensor>& i) const {
    return has_beta() ? LogLinearGatedDeltaRule(i[0], i[1], i[2], i[3], i[4], i[5])
                      : LogLinearAttention(i[0], i[1], i[2], i[3], i[4]);
  }

  OutputAndState WithState(const std::vector<at::Tensor>& i, const State& state) const {
    return has_beta() ? LogLinearGatedDeltaRuleWithState(i[0], i[1], i[2], i[3], i[4], i[5], state)
                      : LogLinearAttentionWithState(i[0], i[1], i[2], i[3], i[4], state);
  }

  at::Tensor Step(const std::vector<at::Tensor>& i, State& state) const {
    return has_beta() ? LogLinearGatedDeltaRuleStep(i[0], i[1], i[2], i[3], i[4], i[5], state)
                      : LogLinearAttentionStep(i[0], i[1], i[2], i[3], i[4], state);
  }

  State Empty() const {
    return EmptyState({.transition = GetParam(),
                       .num_sequences = 2,
                       .groups = 1,
                       .heads = 2,
                       .key_size = 4,
                       .value_size = 3,
                       .dtype = fenwick::DType::kFloat64,
                       .beta_dtype = fenwick::DType::kFloat64},
                      at::kCPU);
  }
};

TEST_P(OpsAutogradAttention, CallsThatCarryAStateEqualOneCall) {
  const std::vector<at::Tensor> inputs = Inputs();
  const at::Tensor expected = Full(inputs);
  std::vector<at::Tensor> parts;
  State state = Empty();
  for (const auto& [begin, end] : {std::pair{0, 30}, {30, 230}, {230, 300}}) {
    OutputAndState result = WithState(Slice(inputs, begin, end), state);
    parts.push_back(result.o);
    state = result.state;
    EXPECT_EQ(state.max_position, end);
  }
  const at::Tensor o = at::cat(parts, 1);
  ExpectClose({o}, {expected});
  const at::Tensor d_o = at::randn_like(o);
  ExpectClose(Gradients({o}, inputs, {d_o}), Gradients({expected}, inputs, {d_o}));
}

TEST_P(OpsAutogradAttention, StepsGrowTheStateAndEqualOneCall) {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> inputs = Inputs();
  const at::Tensor expected = Full(inputs);
  State state = WithState(Slice(inputs, 0, 100), Empty()).state;
  const State kept = state.Clone();
  EXPECT_EQ(state.nodes.size(2), 0);
  for (std::int64_t t = 100; t < kTokens; t += 40) {
    ExpectClose({Step(Slice(inputs, t, t + 40), state)}, {expected.narrow(1, t, 40)});
  }
  EXPECT_EQ(state.nodes.size(2), fenwick::NumStepSlots(0, kTokens));
  EXPECT_GT(state.Bytes(), kept.Bytes());
  State swapped = kept.Select(at::tensor({1, 0}, at::kLong));
  std::vector<at::Tensor> rows = Slice(inputs, 100, 101);
  for (at::Tensor& row : rows) row = row.flip(0);
  ExpectClose({Step(rows, swapped)}, {expected.narrow(1, 100, 1).flip(0)});
}

TEST_P(OpsAutogradAttention, ABackwardPassNoticesThatAStepWroteItsState) {
  const std::vector<at::Tensor> inputs = Inputs();
  State state = WithState(Slice(Inputs(), 0, 100), Empty()).state.Clone();
  const at::Tensor o = WithState(Slice(inputs, 100, 130), state).o;
  Step(Slice(Inputs(), 130, 131), state);
  EXPECT_THROW(Gradients({o}, inputs, {at::ones_like(o)}), c10::Error);
}

INSTANTIATE_TEST_SUITE_P(Transitions, OpsAutogradAttention,
                         ::testing::Values(fenwick::Transition::kScalarGate,
                                           fenwick::Transition::kGatedDelta));

}  // namespace
}  // namespace fenwick_torch
