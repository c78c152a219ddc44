// The reference against the authors' own results, finite differences, and itself in pieces.
#include "reference/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "support/golden.h"
#include "support/problem.h"
#include "support/testing.h"

namespace fenwick {
namespace {

using reference::Arguments;
using reference::State;
using reference::Tensor;
using support::Gate;
using support::ProblemSpec;
using testing::ExpectClose;
using testing::NextSeed;

constexpr double kExact = 1e-12;  // two float64 computations of one thing

ProblemSpec Float64(Transition transition) {
  ProblemSpec spec;
  spec.transition = transition;
  spec.options.dtype = spec.options.beta_dtype = spec.options.scales_dtype = DType::kFloat64;
  return spec;
}

class ReferenceTest : public ::testing::TestWithParam<Transition> {};

INSTANTIATE_TEST_SUITE_P(Transitions, ReferenceTest,
                         ::testing::Values(Transition::kScalarGate, Transition::kGatedDelta),
                         [](const auto& info) {
                           return info.param == Transition::kScalarGate ? "ScalarGate"
                                                                        : "GatedDelta";
                         });

TEST(ReferenceGoldenTest, AgreesWithTheAuthorsReference) {
  const support::SafetensorsFile file(FENWICK_GOLDEN_DIR "/ops.safetensors");
  const auto cases = support::GoldenCases(file);
  ASSERT_EQ(cases.size(), 12u);
  for (const auto& c : cases) {
    SCOPED_TRACE(c.name);
    ExpectClose("o", reference::Forward(c.arguments).o, c.o, 3e-7);
    ExpectClose(reference::Backward(c.arguments, c.d_o), c.gradients, 3e-7);
  }
}

TEST(ReferenceParallelTest, EqualsTheRecurrentForm) {
  for (const bool saturate : {false, true}) {
    for (const Gate gate : {Gate::kMild, Gate::kZero, Gate::kReset}) {
      ProblemSpec spec = Float64(Transition::kScalarGate);
      spec.G = 2;
      spec.H = 4;
      spec.K = 5;
      spec.V = 3;
      spec.lengths = {0, 1, 70, 0, 130, 64};
      spec.gate = gate;
      spec.saturate = saturate;
      spec.L = saturate ? 4 : 0;
      spec.scale = 0.7;
      const auto problem = support::RandomProblem(spec, NextSeed());
      SCOPED_TRACE(support::Describe(problem.spec));
      ExpectClose("o", reference::ParallelForward(problem.arguments),
                  reference::Forward(problem.arguments).o, kExact);
    }
  }
}

// One call = two calls with the state carried, at every kind of split; saturated too.
TEST_P(ReferenceTest, SplitsOfACallAgree) {
  for (const int L : {0, 3, 8, 9}) {
    ProblemSpec spec = Float64(GetParam());
    spec.B = 2;
    spec.T = 1100;
    spec.H = 2;
    spec.K = 4;
    spec.V = 3;
    spec.L = L;
    spec.saturate = L > 0;
    const auto problem = support::RandomProblem(spec, NextSeed());
    SCOPED_TRACE(support::Describe(problem.spec));
    const auto whole = reference::Forward(problem.arguments);
    for (const std::int64_t split : {0, 1, 63, 64, 127, 128, 129, 192, 193, 256, 700, 1024, 1100}) {
      SCOPED_TRACE(split);
      const auto first = reference::Forward(support::SliceTokens(problem.arguments, 0, split));
      Arguments rest = support::SliceTokens(problem.arguments, split, spec.T);
      rest.initial_state = first.final_state;
      const auto second = reference::Forward(rest);
      ExpectClose("o", support::Concatenate({first.o, second.o}, 1), whole.o, kExact);
      EXPECT_EQ(second.final_state.position, whole.final_state.position);
      EXPECT_EQ(second.final_state.base, whole.final_state.base);
      ExpectClose("nodes", second.final_state.nodes, whole.final_state.nodes, kExact);
      ExpectClose("ring", second.final_state.k, whole.final_state.k, 0.0);
    }
  }
}

// d/dx of the loss sum(d_o o) + sum(d_final_state final_state), by central differences of a random
// direction in one tensor at a time.
TEST_P(ReferenceTest, GradientsMatchFiniteDifferences) {
  for (const int L : {0, 3, 9}) {
    ProblemSpec spec = Float64(GetParam());
    spec.G = 2;
    spec.H = 4;
    spec.K = 3;
    spec.V = 2;
    spec.lengths = {0, 5, 200, 130};
    spec.state_tokens = {150, 700, 64, 0};
    spec.L = L;
    spec.saturate = L > 0;
    spec.scale = 0.6;
    spec.d_final_state = true;
    auto problem = support::RandomProblem(spec, NextSeed());
    SCOPED_TRACE(support::Describe(problem.spec));
    Arguments& a = problem.arguments;
    const auto grad = reference::Backward(a, problem.d_o, problem.d_final_state);

    const auto loss = [&] {
      const auto result = reference::Forward(a);
      double sum = 0.0;
      const auto add = [&](const Tensor& d, const Tensor& x) {
        ASSERT_EQ(d.sizes, x.sizes);
        for (std::size_t i = 0; i < x.data.size(); ++i) sum += d.data[i] * x.data[i];
      };
      const State &d = problem.d_final_state, &state = result.final_state;
      add(problem.d_o, result.o);
      add(d.k, state.k);
      add(d.v, state.v);
      add(d.g, state.g);
      if (d.beta.given()) add(d.beta, state.beta);
      add(d.nodes, state.nodes);
      return sum;
    };
    std::mt19937_64 random(NextSeed());
    std::normal_distribution<double> normal;
    const auto check = [&](const char* name, Tensor& x, const Tensor& dx) {
      if (!x.given() || x.data.empty()) return;
      constexpr double kStep = 1e-5;
      const std::vector<double> at = x.data;
      std::vector<double> direction(at.size());
      double expected = 0.0;
      for (std::size_t i = 0; i < at.size(); ++i) {
        direction[i] = normal(random);
        expected += direction[i] * dx.data[i];
      }
      const auto loss_at = [&](double step) {
        for (std::size_t i = 0; i < at.size(); ++i) x.data[i] = at[i] + step * direction[i];
        return loss();
      };
      const double difference = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
      x.data = at;
      EXPECT_NEAR(difference, expected, 1e-6 * (std::fabs(expected) + 100.0)) << name;
    };
    check("q", a.q, grad.q);
    check("k", a.k, grad.k);
    check("v", a.v, grad.v);
    check("g", a.g, grad.g);
    check("beta", a.beta, grad.beta);
    check("level_scales", a.level_scales, grad.level_scales);
    check("state.k", a.initial_state.k, grad.initial_state.k);
    check("state.v", a.initial_state.v, grad.initial_state.v);
    check("state.g", a.initial_state.g, grad.initial_state.g);
    check("state.beta", a.initial_state.beta, grad.initial_state.beta);
    check("state.nodes", a.initial_state.nodes, grad.initial_state.nodes);
  }
}

// A reset forgets all older tokens exactly, and nothing becomes NaN.
TEST_P(ReferenceTest, ResetForgets) {
  ProblemSpec spec = Float64(GetParam());
  spec.T = 150;
  const auto problem = support::RandomProblem(spec, NextSeed());
  Arguments a = problem.arguments;
  constexpr std::int64_t kReset = 77;
  a.g(0, kReset, 0) = -INFINITY;
  Tensor d_o = problem.d_o;
  std::fill_n(d_o.data.begin(), kReset * spec.V, 0.0);
  const auto grad = reference::Backward(a, d_o);
  for (const Tensor* d : {&grad.q, &grad.k, &grad.v, &grad.g, &grad.level_scales}) {
    for (const double x : d->data) ASSERT_TRUE(std::isfinite(x));
  }
  for (std::int64_t i = 0; i < kReset * spec.V; ++i) ASSERT_EQ(grad.v.data[i], 0.0);
  for (std::int64_t t = 0; t <= kReset; ++t) ASSERT_EQ(grad.g(0, t, 0), 0.0);
}

}  // namespace
}  // namespace fenwick
