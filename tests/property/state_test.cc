// Prefill, steps, another prefill, and roll-back give what one call gives.
#include "fenwick/host_state.h"
#include "property/property.h"

namespace fenwick {
namespace {

using reference::Arguments;
using reference::Result;
using reference::Tensor;
using support::ProblemSpec;
using support::RunOptions;
using testing::ExpectClose;
using testing::NextSeed;

class StateTest : public testing::PropertyTest {
 protected:
  // Sizes of steps that sum to `tokens`.
  std::vector<std::int64_t> StepSizes(std::int64_t tokens, std::int64_t largest) {
    std::vector<std::int64_t> sizes;
    while (tokens > 0) {
      sizes.push_back(std::min(tokens, Uniform(1, largest)));
      tokens -= sizes.back();
    }
    return sizes;
  }

  static Arguments From(const Arguments& a, std::int64_t begin, std::int64_t end,
                        const reference::State& state) {
    Arguments rest = support::SliceTokens(a, begin, end);
    rest.initial_state = state;
    return rest;
  }
};

INSTANTIATE_TEST_SUITE_P(Targets, StateTest, ::testing::ValuesIn(testing::Targets()),
                         testing::TargetName);

TEST_P(StateTest, StepsAfterPrefillAtEverySplit) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    ProblemSpec spec = Spec(dtype);
    spec.B = 2;
    spec.T = 200;
    spec.H = 2;
    spec.K = spec.V = 8;
    const support::Problem problem = support::RandomProblem(spec, NextSeed());
    const Result whole = reference::Forward(problem.arguments);
    for (std::int64_t split = 0; split < spec.T; ++split) {
      SCOPED_TRACE(std::string(DTypeName(dtype)) + " split " + std::to_string(split));
      const Result prefill =
          support::RunForward(support::SliceTokens(problem.arguments, 0, split), spec.options);
      Result steps =
          support::RunSteps(From(problem.arguments, split, spec.T, prefill.final_state),
                            StepSizes(spec.T - split, split % 3 == 0 ? 64 : 5), spec.options);
      steps.o = support::Concatenate({prefill.o, steps.o}, 1);
      ExpectClose(support::Compare(problem, steps, whole));
    }
  }
}

TEST_P(StateTest, StepsAcrossEveryPowerOfTwoTo4096) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    ProblemSpec spec = Spec(dtype);
    spec.T = 4096 + 70;
    spec.K = spec.V = 8;
    const support::Problem problem = support::RandomProblem(spec, NextSeed());
    const Tensor whole = support::RunForward(problem.arguments, spec.options).o;
    const double tolerance = support::Tolerance(spec.options, spec.T, false);
    for (std::int64_t power = 1; power <= 4096; power *= 2) {
      SCOPED_TRACE(std::string(DTypeName(dtype)) + " across " + std::to_string(power));
      const std::int64_t begin = std::max<std::int64_t>(power - 67, 0);
      const std::int64_t end = power + 69;
      const Result prefill =
          support::RunForward(support::SliceTokens(problem.arguments, 0, begin), spec.options);
      const Result steps =
          support::RunSteps(From(problem.arguments, begin, end, prefill.final_state),
                            StepSizes(end - begin, 1), spec.options);
      ExpectClose("o", steps.o, support::Slice(whole, 1, begin, end), tolerance);
    }
  }
}

// From an empty state token by token, no prefill at all; and saturated.
TEST_P(StateTest, StepsOnly) {
  for (const int L : {0, 1, 3, 8, 9}) {
    ProblemSpec spec = Spec();
    spec.B = 2;
    spec.T = 1100;
    spec.G = 2;
    spec.H = 4;
    spec.K = 5;
    spec.V = 7;
    spec.L = L;
    spec.saturate = L > 0;
    const support::Problem problem = support::RandomProblem(spec, NextSeed());
    SCOPED_TRACE(support::Describe(problem.spec));
    const Result whole = reference::Forward(problem.arguments);
    ExpectClose(support::Compare(
        problem, support::RunSteps(problem.arguments, StepSizes(spec.T, 3), spec.options), whole));
  }
}

// Sequences of one batch at positions of their own, every storage type and layout.
TEST_P(StateTest, StepsFromPositionsOfTheirOwn) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    ProblemSpec spec = Spec(dtype);
    spec.B = 6;
    spec.T = 130;
    spec.H = 3;
    spec.K = 33;
    spec.V = 17;
    spec.state_tokens = {0, 1, 100, 128, 500, 1023};
    spec.options.beta_dtype = spec.options.scales_dtype = dtype;
    spec.options.layout = support::Layout::kRagged;
    spec.options.spare_slots = 1;
    spec.gate = support::Gate::kReset;
    const support::Problem problem = support::RandomProblem(spec, NextSeed());
    SCOPED_TRACE(support::Describe(problem.spec));
    ExpectClose(support::Compare(
        problem, support::RunSteps(problem.arguments, StepSizes(spec.T, 64), spec.options),
        reference::Forward(problem.arguments)));
  }
}

// Prefill, steps, prefill, steps ... with the state carried throughout.
TEST_P(StateTest, AnyMixtureOfCalls) {
  for (const int L : {0, 8, 9}) {
    ProblemSpec spec = Spec();
    spec.B = 2;
    spec.T = 1500;
    spec.H = 2;
    spec.K = spec.V = 8;
    spec.L = L;
    spec.saturate = L > 0;
    const support::Problem problem = support::RandomProblem(spec, NextSeed());
    SCOPED_TRACE(support::Describe(problem.spec));
    Result result{.o = {}, .final_state = support::EmptyState(problem.arguments)};
    std::vector<Tensor> outputs;
    for (std::int64_t begin = 0; begin < spec.T;) {
      const bool prefill = Uniform(0, 1) == 1;
      const std::int64_t end = std::min(spec.T, begin + Uniform(1, prefill ? 400 : 100));
      const Arguments part = From(problem.arguments, begin, end, result.final_state);
      result = prefill ? support::RunForward(part, spec.options)
                       : support::RunSteps(part, StepSizes(end - begin, 30), spec.options);
      outputs.push_back(result.o);
      begin = end;
    }
    result.o = support::Concatenate(outputs, 1);
    ExpectClose(support::Compare(problem, result, reference::Forward(problem.arguments)));
  }
}

// After t tokens exactly popcount merged states are live: over the folded chunks the nodes of the
// set bits, and no other is anything but zero.
TEST_P(StateTest, LiveNodesAreTheSetBits) {
  ProblemSpec spec = Spec();
  spec.lengths = {0, 1, 128, 129, 200, 500, 64 * 21, 1290};
  spec.K = spec.V = 4;
  const support::Problem problem = support::RandomProblem(spec, NextSeed());
  const auto state = support::RunForward(problem.arguments, spec.options).final_state;
  for (std::size_t n = 0; n < spec.lengths.size(); ++n) {
    const std::int64_t position = spec.lengths[n], chunks = state.base[n] / kStateChunk;
    EXPECT_EQ(state.position[n], position);
    EXPECT_EQ(state.base[n], NextBase(0, position));
    int live = 0;
    for (std::int64_t slot = 0; slot < state.nodes.size(2); ++slot) {
      double norm = 0.0;
      for (int i = 0; i < 16; ++i) norm += std::fabs(state.nodes(n, 0, slot, i / 4, i % 4));
      EXPECT_EQ(norm > 0.0, (chunks >> slot & 1) == 1) << "sequence " << n << " slot " << slot;
      live += norm > 0.0;
    }
    EXPECT_EQ(live, std::popcount(static_cast<std::uint64_t>(chunks)));
  }
}

// Just after a power of two: with a spare slot the merged past is kept from step to step, without
// one it is made again in each; the bits are the same.
TEST_P(StateTest, StepsDoNotDependOnRoomForTheMergedPast) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    for (const int L : {0, 9, 10}) {
      ProblemSpec spec = Spec(dtype);
      spec.B = 2;
      spec.T = 512 + 50;
      spec.H = 2;
      spec.K = 9;
      spec.V = 21;
      spec.L = L;
      spec.saturate = L > 0;
      const support::Problem problem = support::RandomProblem(spec, NextSeed());
      SCOPED_TRACE(support::Describe(problem.spec));
      const std::int64_t begin = 512 - 70;
      const Result prefill =
          support::RunForward(support::SliceTokens(problem.arguments, 0, begin), spec.options);
      const Arguments rest = From(problem.arguments, begin, spec.T, prefill.final_state);
      const std::vector<std::int64_t> sizes = StepSizes(spec.T - begin, 3);
      RunOptions options = spec.options;
      const Tensor made = support::RunSteps(rest, sizes, options).o;
      options.spare_slots = 1;
      const Result kept = support::RunSteps(rest, sizes, options);
      EXPECT_EQ(made.data, kept.o.data);
      const Tensor whole = reference::Forward(problem.arguments).o;
      ExpectClose("o", made, support::Slice(whole, 1, begin, spec.T),
                  support::Tolerance(spec.options, spec.T, false));
    }
  }
}

// Speculative decoding on the host: draft up to 64 tokens, take some back, go on.
TEST_P(StateTest, TruncateTakesBackDraftedTokens) {
  if (GetParam().device != Device::kCPU) GTEST_SKIP() << "HostState lives in host memory";
  ProblemSpec spec = Spec();
  spec.B = 2;
  spec.T = 900;
  spec.K = spec.V = 8;
  const support::Problem problem = support::RandomProblem(spec, NextSeed());
  const Arguments& a = problem.arguments;
  support::Problem draft = support::RandomProblem(spec, NextSeed());
  const Result whole = reference::Forward(a);

  HostState state({.transition = spec.transition,
                   .num_sequences = spec.B,
                   .groups = spec.G,
                   .heads = spec.H,
                   .key_size = spec.K,
                   .value_size = spec.V});
  const auto step = [&](const Arguments& tokens) {
    RunOptions options = spec.options;
    const support::DeviceTensor q(Device::kCPU, options.dtype, tokens.q),
        k(Device::kCPU, options.dtype, tokens.k), v(Device::kCPU, options.dtype, tokens.v),
        g(Device::kCPU, DType::kFloat32, tokens.g),
        beta(Device::kCPU, DType::kFloat32, tokens.beta),
        scales(Device::kCPU, DType::kFloat32, tokens.level_scales),
        o(Device::kCPU, options.dtype, tokens.v.sizes);
    state.Reserve(tokens.q.size(1));
    Inputs inputs{.transition = spec.transition,
                  .q = q.view(),
                  .k = k.view(),
                  .v = v.view(),
                  .g = g.view(),
                  .beta = beta.view(),
                  .level_scales = scales.view(),
                  .initial_state = state.View()};
    Step(inputs, o.view(), {});
    return o.Values();
  };

  std::vector<Tensor> outputs;
  for (std::int64_t begin = 0; begin < spec.T;) {
    const std::int64_t drafted = std::min<std::int64_t>(Uniform(1, 64), spec.T - begin);
    step(support::SliceTokens(draft.arguments, begin, begin + drafted));
    for (std::int64_t n = 0; n < spec.B; ++n) state.Truncate(n, drafted);
    const std::int64_t taken = Uniform(1, drafted);
    outputs.push_back(step(support::SliceTokens(a, begin, begin + taken)));
    begin += taken;
    // A fork goes its own way without touching the state it came from.
    const std::int64_t order[] = {1, 0};
    HostState fork = state.Select(order);
    if (fork.position(0) >= 1) fork.Truncate(0, 1);
    if (begin > 400 && begin < 600) state = HostState::Load(state.Save());
  }
  ExpectClose("o", support::Concatenate(outputs, 1), whole.o,
              support::Tolerance(spec.options, spec.T, false));
}

}  // namespace
}  // namespace fenwick
