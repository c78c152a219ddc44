// The linear parents against a token-by-token recurrence written down here, and against the
// log-linear operators with all level weights 1.
#include "models/linear_recurrence.h"

#include <limits>

#include "model_testing.h"
#include "torch/ops_autograd.h"

namespace fenwick::models {
namespace {

// One head at a time, one token at a time, straight from the equations.
LinearOutput Naive(const LinearInputs& x, const torch::Tensor& initial) {
  const std::int64_t heads = x.v.size(2), ratio = heads / x.q.size(2);
  std::vector<torch::Tensor> batch_o, batch_s;
  for (std::int64_t b = 0; b < x.q.size(0); ++b) {
    std::vector<torch::Tensor> head_o, head_s;
    for (std::int64_t h = 0; h < heads; ++h) {
      torch::Tensor s = initial.defined() ? initial[b][h]
                                          : torch::zeros({x.q.size(3), x.v.size(3)}, x.v.options());
      std::vector<torch::Tensor> o;
      for (std::int64_t t = 0; t < x.q.size(1); ++t) {
        const torch::Tensor k = x.k[b][t][h / ratio], v = x.v[b][t][h];
        s = x.g[b][t][h].exp() * s;
        if (x.beta.defined()) {
          s = s + x.beta[b][t][h] * torch::outer(k, v - s.t().mv(k));
        } else {
          s = s + torch::outer(k, v);
        }
        o.push_back(s.t().mv(x.q[b][t][h / ratio]));
      }
      head_o.push_back(torch::stack(o));
      head_s.push_back(s);
    }
    batch_o.push_back(torch::stack(head_o, 1));
    batch_s.push_back(torch::stack(head_s));
  }
  return {torch::stack(batch_o), torch::stack(batch_s)};
}

LinearInputs Random(std::int64_t batch, std::int64_t tokens, bool delta) {
  const auto type = torch::kDouble;
  LinearInputs x;
  x.q = torch::randn({batch, tokens, 2, 5}, type);
  x.k = torch::nn::functional::normalize(torch::randn({batch, tokens, 2, 5}, type),
                                         torch::nn::functional::NormalizeFuncOptions().dim(-1));
  x.v = torch::randn({batch, tokens, 4, 3}, type);
  x.g = -0.1 * torch::rand({batch, tokens, 4}, type);
  if (delta) x.beta = torch::rand({batch, tokens, 4}, type);
  return x;
}

class LinearRecurrence : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override { std::cout << "seed " << FreshSeed() << "\n"; }
  bool delta() const { return GetParam(); }
};

TEST_P(LinearRecurrence, AllFormsAgree) {
  for (const std::int64_t tokens : {1, 2, 63, 64, 65, 130}) {
    const LinearInputs x = Random(2, tokens, delta());
    const torch::Tensor initial = torch::randn({2, 4, 5, 3}, torch::kDouble);
    for (const torch::Tensor& state : {torch::Tensor(), initial}) {
      const LinearOutput expected = Naive(x, state);
      for (const LinearOutput& result : {LinearChunked(x, state), LinearRecurrent(x, state)}) {
        EXPECT_LT(RelativeError(result.o, expected.o), 1e-12) << tokens;
        EXPECT_LT(RelativeError(result.state, expected.state), 1e-12) << tokens;
      }
    }
  }
}

TEST_P(LinearRecurrence, NoTokensLeaveTheStateAlone) {
  const torch::Tensor initial = torch::randn({2, 4, 5, 3}, torch::kDouble);
  const LinearOutput result = LinearChunked(Random(2, 0, delta()), initial);
  EXPECT_EQ(result.o.size(1), 0);
  EXPECT_TRUE(torch::equal(result.state, initial));
}

TEST_P(LinearRecurrence, ResetsAndStrongDecaysStayFinite) {
  for (const double gate : {0.0, -1e-6, -90.0, -std::numeric_limits<double>::infinity()}) {
    for (const bool everywhere : {false, true}) {
      LinearInputs x = Random(1, 100, delta());
      if (everywhere) {
        x.g.fill_(gate);
      } else {
        x.g.select(1, 70).fill_(gate);
      }
      for (torch::Tensor* input : {&x.q, &x.k, &x.v, &x.g}) input->requires_grad_();
      const LinearOutput expected = Naive(x, {}), result = LinearChunked(x, {});
      EXPECT_LT(RelativeError(result.o, expected.o), 1e-12) << gate;
      const torch::Tensor cotangent = torch::randn_like(result.o);
      const std::vector<torch::Tensor> inputs = {x.q, x.k, x.v, x.g};
      const auto gradient = torch::autograd::grad({result.o}, inputs, {cotangent});
      const auto reference = torch::autograd::grad({expected.o}, inputs, {cotangent});
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        EXPECT_TRUE(torch::isfinite(gradient[i]).all().item<bool>()) << gate << " input " << i;
        EXPECT_LT((gradient[i] - reference[i]).abs().max().item<double>(), 1e-10)
            << gate << " input " << i;
      }
    }
  }
}

TEST_P(LinearRecurrence, PackedIsSeparate) {
  const LinearInputs x = Random(1, 150, delta());
  const std::vector<std::int64_t> offsets = {0, 0, 40, 41, 41, 150, 150};
  const torch::Tensor packed = LinearPacked(x, offsets);
  for (std::size_t n = 0; n + 1 < offsets.size(); ++n) {
    const std::int64_t begin = offsets[n], tokens = offsets[n + 1] - begin;
    if (tokens == 0) continue;
    const auto part = [&](const torch::Tensor& all) {
      return all.defined() ? all.narrow(1, begin, tokens) : all;
    };
    const LinearInputs one{part(x.q), part(x.k), part(x.v), part(x.g), part(x.beta)};
    EXPECT_LT(RelativeError(part(packed), Naive(one, {}).o), 1e-12) << n;
  }
}

TEST_P(LinearRecurrence, IsTheLogLinearOperatorWithWeightsOfOne) {
  for (const std::int64_t tokens : {1, 65, 300}) {
    const LinearInputs x = Random(2, tokens, delta());
    const torch::Tensor ones = torch::ones({2, tokens, 4, 10}, torch::kDouble);
    const torch::Tensor log_linear =
        delta() ? fenwick_torch::LogLinearGatedDeltaRule(x.q, x.k, x.v, x.g, x.beta, ones)
                : fenwick_torch::LogLinearAttention(x.q, x.k, x.v, x.g, ones);
    EXPECT_LT(RelativeError(log_linear, LinearChunked(x, {}).o), 1e-11) << tokens;
  }
}

INSTANTIATE_TEST_SUITE_P(Parents, LinearRecurrence, testing::Bool(),
                         [](const auto& info) { return info.param ? "GatedDelta" : "ScalarGate"; });

}  // namespace
}  // namespace fenwick::models
