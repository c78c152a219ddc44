// Identities of the operators, each computed here in a way of its own or by comparing two calls.
#include <cmath>
#include <numeric>

#include "property/property.h"

namespace fenwick {
namespace {

using reference::Arguments;
using reference::Tensor;
using support::Gate;
using support::ProblemSpec;
using testing::ExpectClose;
using testing::NextSeed;

FENWICK_PROPERTY_SUITE(IdentityTest);

// The linear parent: one state, no levels. S = exp(g) (I - beta k k^T) S + beta k v^T for the delta
// rule, S = exp(g) S + k v^T else; o = scale S^T q. One group for each head.
Tensor LinearParent(const Arguments& a) {
  const bool delta = a.transition == Transition::kGatedDelta;
  const std::int64_t H_per_G = a.v.size(2) / a.q.size(2), K = a.q.size(3), V = a.v.size(3);
  Tensor o(a.v.sizes);
  for (std::int64_t b = 0; b < a.v.size(0); ++b) {
    for (std::int64_t h = 0; h < a.v.size(2); ++h) {
      std::vector<double> S(K * V);
      for (std::int64_t t = 0; t < a.v.size(1); ++t) {
        const double decay = std::exp(a.g(b, t, h)), beta = delta ? a.beta(b, t, h) : 1.0;
        for (std::int64_t j = 0; j < V; ++j) {
          double seen = 0.0, out = 0.0;
          for (std::int64_t i = 0; i < K; ++i) seen += a.k(b, t, h / H_per_G, i) * S[i * V + j];
          for (std::int64_t i = 0; i < K; ++i) {
            const double k = a.k(b, t, h / H_per_G, i);
            double& s = S[i * V + j];
            s = decay * (delta ? s - beta * k * seen : s) + beta * k * a.v(b, t, h, j);
            out += s * a.q(b, t, h / H_per_G, i);
          }
          o(b, t, h, j) = a.scale * out;
        }
      }
    }
  }
  return o;
}

TEST_P(IdentityTest, UnitLevelScalesGiveTheLinearParent) {
  for (const Gate gate : {Gate::kMild, Gate::kZero, Gate::kReset}) {
    ProblemSpec spec = Spec();
    spec.B = 2;
    spec.T = 400;
    spec.G = 2;
    spec.H = 4;
    spec.gate = gate;
    spec.gate_everywhere = gate == Gate::kZero;
    support::Problem problem = support::RandomProblem(spec, NextSeed());
    std::fill(problem.arguments.level_scales.data.begin(),
              problem.arguments.level_scales.data.end(), 1.0);
    ExpectClose("o", support::RunForward(problem.arguments, spec.options).o,
                LinearParent(problem.arguments), support::Tolerance(spec.options, spec.T, false));
  }
}

TEST_P(IdentityTest, DeltaRuleWithoutWritesIsZero) {
  if (GetParam().transition != Transition::kGatedDelta) GTEST_SKIP() << "no beta";
  ProblemSpec spec = Spec();
  spec.T = 200;
  support::Problem problem = support::RandomProblem(spec, NextSeed());
  std::fill(problem.arguments.beta.data.begin(), problem.arguments.beta.data.end(), 0.0);
  for (const double x : support::RunForward(problem.arguments, spec.options).o.data) {
    ASSERT_EQ(x, 0.0);
  }
}

// K orthonormal keys, beta = 1, g = 0: asking with key i returns the last value written there, even
// after K of them were overwritten.
TEST_P(IdentityTest, OrthonormalKeysRecallExactly) {
  if (GetParam().transition != Transition::kGatedDelta)
    GTEST_SKIP() << "recall needs the delta rule";
  ProblemSpec spec = Spec();
  spec.K = 16;
  spec.T = 3 * spec.K;
  support::Problem problem = support::RandomProblem(spec, NextSeed());
  Arguments& a = problem.arguments;
  std::fill(a.beta.data.begin(), a.beta.data.end(), 1.0);
  std::fill(a.g.data.begin(), a.g.data.end(), 0.0);
  std::fill(a.level_scales.data.begin(), a.level_scales.data.end(), 1.0);
  for (std::int64_t t = 0; t < spec.T; ++t) {
    for (std::int64_t i = 0; i < spec.K; ++i) {
      a.k(0, t, 0, i) = i == t % spec.K;
      a.q(0, t, 0, i) = i == (t + 1) % spec.K;  // the oldest key
    }
  }
  const Tensor o = support::RunForward(a, spec.options).o;
  for (std::int64_t t = spec.K - 1; t < spec.T; ++t) {
    for (std::int64_t j = 0; j < spec.V; ++j) {
      ASSERT_NEAR(o(0, t, 0, j), a.v(0, t + 1 - spec.K, 0, j), 1e-6);
    }
  }
}

// Other tokens from `cut` on: no earlier output changes, bit for bit; and with no output gradient
// from `cut` on, neither does an earlier gradient, and later tokens get zero.
TEST_P(IdentityTest, Causality) {
  ProblemSpec spec = Spec();
  spec.T = 300;
  spec.H = 2;
  const support::Problem problem = support::RandomProblem(spec, NextSeed());
  const support::Problem other = support::RandomProblem(spec, NextSeed());
  for (const std::int64_t cut : {1, 63, 64, 65, 130, 256, 299}) {
    SCOPED_TRACE(cut);
    const auto splice = [&](const Tensor& before, const Tensor& after) {
      if (!before.given()) return Tensor();
      return support::Concatenate(
          {support::Slice(before, 1, 0, cut), support::Slice(after, 1, cut, spec.T)}, 1);
    };
    const Arguments &a = problem.arguments, &b = other.arguments;
    Arguments spliced = a;
    spliced.q = splice(a.q, b.q);
    spliced.k = splice(a.k, b.k);
    spliced.v = splice(a.v, b.v);
    spliced.g = splice(a.g, b.g);
    spliced.beta = splice(a.beta, b.beta);
    spliced.level_scales = splice(a.level_scales, b.level_scales);
    const auto head = [&](const Tensor& x) { return support::Slice(x, 1, 0, cut).data; };
    EXPECT_EQ(head(support::RunForward(spliced, spec.options).o),
              head(support::RunForward(a, spec.options).o));
    const Tensor d_o = splice(problem.d_o, Tensor(problem.d_o.sizes));
    const auto grad = support::RunBackward(a, d_o, {}, spec.options);
    const auto grad_spliced = support::RunBackward(spliced, d_o, {}, spec.options);
    for (const auto field : {&reference::Gradients::q, &reference::Gradients::k,
                             &reference::Gradients::v, &reference::Gradients::g,
                             &reference::Gradients::beta, &reference::Gradients::level_scales}) {
      if (!(grad.*field).given()) continue;
      ExpectClose("earlier gradients", support::Slice(grad_spliced.*field, 1, 0, cut),
                  support::Slice(grad.*field, 1, 0, cut), 1e-6);
      for (const double x : support::Slice(grad_spliced.*field, 1, cut, spec.T).data) {
        ASSERT_EQ(x, 0.0);
      }
    }
  }
}

TEST_P(IdentityTest, LinearInV) {
  ProblemSpec spec = Spec(DType::kFloat64);
  spec.T = 200;
  const support::Problem problem = support::RandomProblem(spec, NextSeed());
  const Tensor v2 = support::RandomProblem(spec, NextSeed()).arguments.v;
  Arguments a = problem.arguments;
  const Tensor o1 = support::RunForward(a, spec.options).o;
  a.v = v2;
  const Tensor o2 = support::RunForward(a, spec.options).o;
  Tensor expected = o1;
  for (std::size_t i = 0; i < expected.data.size(); ++i) {
    a.v.data[i] = 2.0 * problem.arguments.v.data[i] - 3.0 * v2.data[i];
    expected.data[i] = 2.0 * o1.data[i] - 3.0 * o2.data[i];
  }
  ExpectClose("o", support::RunForward(a, spec.options).o, expected, 1e-13);
}

Tensor Permuted(const Tensor& x, int axis, const std::vector<std::int64_t>& order) {
  if (!x.given()) return {};
  std::vector<Tensor> parts;
  for (const std::int64_t i : order) parts.push_back(support::Slice(x, axis, i, i + 1));
  return support::Concatenate(parts, axis);
}

TEST_P(IdentityTest, PermutingRowsAndHeadsPermutesTheOutput) {
  ProblemSpec spec = Spec();
  spec.B = 3;
  spec.T = 150;
  spec.G = spec.H = 4;
  const support::Problem problem = support::RandomProblem(spec, NextSeed());
  const Tensor o = support::RunForward(problem.arguments, spec.options).o;
  for (const int axis : {0, 2}) {
    std::vector<std::int64_t> order(axis == 0 ? spec.B : spec.H);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    Arguments a = problem.arguments;
    for (Tensor* x : {&a.q, &a.k, &a.v, &a.g, &a.beta, &a.level_scales}) {
      *x = Permuted(*x, axis, order);
    }
    EXPECT_EQ(support::RunForward(a, spec.options).o.data, Permuted(o, axis, order).data);
  }
}

// The kernels' own derivative against their own differences, in float64.
TEST_P(IdentityTest, GradientsMatchFiniteDifferences) {
  ProblemSpec spec = Spec(DType::kFloat64);
  spec.T = 150;
  spec.K = 4;
  spec.V = 3;
  support::Problem problem = support::RandomProblem(spec, NextSeed());
  Arguments& a = problem.arguments;
  const auto grad = support::RunBackward(a, problem.d_o, {}, spec.options);
  const auto loss = [&] {
    const Tensor o = support::RunForward(a, spec.options).o;
    return std::inner_product(o.data.begin(), o.data.end(), problem.d_o.data.begin(), 0.0);
  };
  const auto check = [&](const char* name, Tensor& x, const Tensor& dx) {
    for (int i = 0; x.given() && i < 5; ++i) {
      constexpr double kStep = 1e-5;
      const std::int64_t at = Uniform(0, static_cast<std::int64_t>(x.data.size()) - 1);
      const double value = x.data[at];
      x.data[at] = value + kStep;
      const double above = loss();
      x.data[at] = value - kStep;
      const double below = loss();
      x.data[at] = value;
      EXPECT_NEAR((above - below) / (2 * kStep), dx.data[at], 1e-6) << name;
    }
  };
  check("q", a.q, grad.q);
  check("k", a.k, grad.k);
  check("v", a.v, grad.v);
  check("g", a.g, grad.g);
  check("beta", a.beta, grad.beta);
  check("level_scales", a.level_scales, grad.level_scales);
}

}  // namespace
}  // namespace fenwick
