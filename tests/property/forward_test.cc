// Forward of every backend against the float64 reference.
#include "property/property.h"
#include "support/golden.h"

namespace fenwick {
namespace {

using support::Gate;
using support::Layout;
using support::ProblemSpec;
using testing::ExpectClose;
using testing::NextSeed;

FENWICK_PROPERTY_SUITE(ForwardTest);

void Check(const ProblemSpec& spec) {
  const std::uint64_t seed = NextSeed();
  const support::Problem problem = support::RandomProblem(spec, seed);
  SCOPED_TRACE(support::Describe(problem.spec) + " seed " + std::to_string(seed));
  ExpectClose(support::CheckForward(problem));
}

TEST_P(ForwardTest, RandomRaggedShapes) {
  for (int i = 0; i < 30; ++i) Check(RandomSpec());
}

TEST_P(ForwardTest, PoisonBeyondTheEndAndBetweenRows) {
  for (const std::int64_t T : {1, 63, 65, 70, 200}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const Layout layout : {Layout::kPadded, Layout::kRagged}) {
        ProblemSpec spec = Spec(dtype);
        spec.B = 4;  // o of one token may happen to be small: several, with keys of their own
        spec.T = T;
        spec.G = spec.H = 2;
        spec.K = 20;
        spec.V = 12;
        spec.options.layout = layout;
        Check(spec);
      }
    }
  }
}

TEST_P(ForwardTest, ExtremeGates) {
  for (const Gate gate : {Gate::kZero, Gate::kTiny, Gate::kHuge, Gate::kReset}) {
    for (const bool everywhere : {false, true}) {
      ProblemSpec spec = Spec();
      spec.T = 300;
      spec.H = 2;
      spec.gate = gate;
      spec.gate_everywhere = everywhere;
      Check(spec);
    }
  }
}

TEST_P(ForwardTest, SaturatesAtFourTimesTheTrainedLength) {
  for (const int L : {1, 2, 7, 8, 9}) {
    ProblemSpec spec = Spec();
    spec.T = L < 8 ? 256 : 4 << (L - 1);
    spec.L = L;
    spec.saturate = true;
    spec.K = spec.V = 8;
    Check(spec);
  }
}

TEST_P(ForwardTest, LongestHeads) {
  ProblemSpec spec = Spec();
  spec.T = 65;
  spec.K = 512;
  spec.V = 100;
  Check(spec);
  spec.K = 33;
  spec.V = 512;
  Check(spec);
}

// Enough tokens for several segments of time, also from a state far into a sequence.
TEST_P(ForwardTest, LongSequence) {
  ProblemSpec spec = Spec();
  spec.T = 4100;
  spec.K = spec.V = 8;
  Check(spec);
  spec.T = 1000;
  spec.state_tokens = {2050};
  Check(spec);
}

TEST_P(ForwardTest, MoreLevelsThanNeededAreNotRead) {
  ProblemSpec spec = Spec();
  spec.T = 100;
  spec.H = 2;
  spec.L = 12;
  support::Problem problem = support::RandomProblem(spec, NextSeed());
  const auto expected = reference::Forward(problem.arguments);
  auto& scales = problem.arguments.level_scales;
  for (std::int64_t t = 0; t < spec.T; ++t) {
    for (std::int64_t h = 0; h < spec.H; ++h) {
      for (std::int64_t l = NumLevels(spec.T); l < spec.L; ++l) scales(0, t, h, l) = NAN;
    }
  }
  ExpectClose("o", support::RunForward(problem.arguments, spec.options).o, expected.o, 1e-5);
}

TEST_P(ForwardTest, AuthorsReference) {
  const support::SafetensorsFile file(FENWICK_GOLDEN_DIR "/ops.safetensors");
  int cases = 0;
  for (const auto& c : support::GoldenCases(file)) {
    if (c.arguments.transition != GetParam().transition) continue;
    SCOPED_TRACE(c.name);
    ExpectClose("o", support::RunForward(c.arguments, Spec(DType::kFloat64).options).o, c.o, 3e-7);
    ++cases;
  }
  EXPECT_EQ(cases, 6);
}

}  // namespace
}  // namespace fenwick
