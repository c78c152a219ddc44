// Every gradient of every backend against the float64 reference.
#include "property/property.h"
#include "support/golden.h"

namespace fenwick {
namespace {

using support::Gate;
using support::Layout;
using support::ProblemSpec;
using testing::ExpectClose;
using testing::NextSeed;

FENWICK_PROPERTY_SUITE(BackwardTest);

void Check(const ProblemSpec& spec) {
  const std::uint64_t seed = NextSeed();
  const support::Problem problem = support::RandomProblem(spec, seed);
  SCOPED_TRACE(support::Describe(problem.spec) + " seed " + std::to_string(seed));
  ExpectClose(support::CheckBackward(problem));
}

TEST_P(BackwardTest, RandomRaggedShapes) {
  for (int i = 0; i < 20; ++i) {
    ProblemSpec spec = RandomSpec(/*max_tokens=*/200);
    spec.d_final_state = Uniform(0, 1) == 1;
    Check(spec);
  }
}

TEST_P(BackwardTest, PoisonBeyondTheEndAndBetweenRows) {
  for (const std::int64_t T : {1, 63, 65, 70, 200}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      ProblemSpec spec = Spec(dtype);
      spec.B = 4;  // o of one token may happen to be small: several, with keys of their own
      spec.T = T;
      spec.G = spec.H = 2;
      spec.K = 20;
      spec.V = 12;
      spec.options.layout = dtype == DType::kFloat32 ? Layout::kRagged : Layout::kPadded;
      Check(spec);
    }
  }
}

TEST_P(BackwardTest, ExtremeGates) {
  for (const Gate gate : {Gate::kZero, Gate::kTiny, Gate::kHuge, Gate::kReset}) {
    for (const bool everywhere : {false, true}) {
      ProblemSpec spec = Spec();
      spec.T = 300;
      spec.H = 2;
      spec.gate = gate;
      spec.gate_everywhere = everywhere;
      spec.state_tokens = {200};
      spec.d_final_state = true;
      Check(spec);
    }
  }
}

// One token of each extreme gate at a place where chunks, segments and levels meet.
TEST_P(BackwardTest, ExtremeGateOnOneToken) {
  for (const double g : {0.0, -1e-6, -90.0, -HUGE_VAL}) {
    for (const std::int64_t token : {0, 1, 63, 64, 100, 127, 128, 256}) {
      ProblemSpec spec = Spec();
      spec.T = 260;
      spec.K = spec.V = 8;
      support::Problem problem = support::RandomProblem(spec, NextSeed());
      problem.arguments.g(0, token, 0) = static_cast<float>(g);
      SCOPED_TRACE("g " + std::to_string(g) + " on token " + std::to_string(token));
      ExpectClose(support::CheckBackward(problem));
    }
  }
}

TEST_P(BackwardTest, SaturatesAtFourTimesTheTrainedLength) {
  for (const int L : {1, 2, 7, 8, 9}) {
    ProblemSpec spec = Spec();
    spec.T = L < 8 ? 256 : 4 << (L - 1);
    spec.L = L;
    spec.saturate = true;
    spec.K = spec.V = 8;
    spec.d_final_state = true;
    Check(spec);
  }
}

TEST_P(BackwardTest, LongestHeads) {
  ProblemSpec spec = Spec();
  spec.T = 65;
  spec.K = 512;
  spec.V = 40;
  Check(spec);
  spec.K = 33;
  spec.V = 512;
  Check(spec);
}

// Worst head of several, not only their norm: sums over a long sequence must not drift.
TEST_P(BackwardTest, LongSequenceEveryHead) {
  ProblemSpec spec = Spec();
  spec.T = 2100;
  spec.H = 3;
  spec.K = spec.V = 8;
  spec.gate = Gate::kHuge;
  const support::Problem problem = support::RandomProblem(spec, NextSeed());
  const auto expected = reference::Backward(problem.arguments, problem.d_o);
  const auto grad = support::RunBackward(problem.arguments, problem.d_o, {}, spec.options);
  const double tolerance = support::Tolerance(spec.options, spec.T, true);
  for (std::int64_t h = 0; h < spec.H; ++h) {
    SCOPED_TRACE("head " + std::to_string(h));
    ExpectClose("dg", support::Slice(grad.g, 2, h, h + 1), support::Slice(expected.g, 2, h, h + 1),
                tolerance);
    ExpectClose("dv", support::Slice(grad.v, 2, h, h + 1), support::Slice(expected.v, 2, h, h + 1),
                tolerance);
  }
  ExpectClose(support::Compare(problem, grad, expected));
}

TEST_P(BackwardTest, LevelsThatAreNotReadGetZero) {
  ProblemSpec spec = Spec();
  spec.T = 100;
  spec.L = 12;
  const support::Problem problem = support::RandomProblem(spec, NextSeed());
  const auto grad = support::RunBackward(problem.arguments, problem.d_o, {}, spec.options);
  for (std::int64_t t = 0; t < spec.T; ++t) {
    for (std::int64_t l = 1; l < spec.L; ++l) {
      const bool is_read = t >> (l - 1) & 1;
      if (!is_read) {
        ASSERT_EQ(grad.level_scales(0, t, 0, l), 0.0);
      }
    }
  }
}

TEST_P(BackwardTest, AuthorsReference) {
  const support::SafetensorsFile file(FENWICK_GOLDEN_DIR "/ops.safetensors");
  int cases = 0;
  for (const auto& c : support::GoldenCases(file)) {
    if (c.arguments.transition != GetParam().transition) continue;
    SCOPED_TRACE(c.name);
    ExpectClose(support::RunBackward(c.arguments, c.d_o, {}, Spec(DType::kFloat64).options),
                c.gradients, 3e-7);
    ++cases;
  }
  EXPECT_EQ(cases, 6);
}

// A gradient that is not asked for is not computed, and the others do not change.
TEST_P(BackwardTest, AnySubsetOfGradients) {
  ProblemSpec spec = Spec();
  spec.T = 150;
  spec.H = 2;
  const support::Problem problem = support::RandomProblem(spec, NextSeed());
  const auto all = support::RunBackward(problem.arguments, problem.d_o, {}, spec.options);
  using Field = reference::Tensor reference::Gradients::*;
  const std::vector<Field> fields = {
      &reference::Gradients::q, &reference::Gradients::k,    &reference::Gradients::v,
      &reference::Gradients::g, &reference::Gradients::beta, &reference::Gradients::level_scales};
  for (unsigned wanted = 1; wanted < 64; wanted += 5) {
    const auto some =
        support::RunBackward(problem.arguments, problem.d_o, {}, spec.options, wanted);
    for (std::size_t i = 0; i < fields.size(); ++i) {
      if ((wanted >> i & 1) == 0 || !(all.*fields[i]).given()) continue;
      EXPECT_EQ((some.*fields[i]).data, (all.*fields[i]).data) << "wanted " << wanted;
    }
  }
}

}  // namespace
}  // namespace fenwick
