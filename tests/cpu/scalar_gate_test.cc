// The scalar gate's CPU kernels on every instruction set against the float64 reference.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "each_target.h"
#include "support/golden.h"
#include "support/problem.h"
#include "support/testing.h"

namespace fenwick {
namespace {

using support::Gate;
using support::ProblemSpec;
using testing::ExpectClose;
using testing::NextSeed;

// Ragged shapes, every storage type, layouts, states, packing, gates.
std::vector<ProblemSpec> Specs() {
  std::vector<ProblemSpec> specs;
  const auto add = [&](auto&& change) {
    ProblemSpec spec;
    spec.B = 2;
    spec.T = 200;
    spec.G = 1;
    spec.H = 3;
    spec.K = 24;
    spec.V = 17;
    change(spec);
    specs.push_back(spec);
  };
  for (const int64_t T : {0, 1, 15, 16, 63, 64, 65, 70, 128, 129, 1500}) {
    add([&](ProblemSpec& s) { s.T = T; });
  }
  for (const DType dtype : {DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    for (const auto layout : {support::Layout::kPadded, support::Layout::kRagged}) {
      add([&](ProblemSpec& s) {
        s.options.dtype = dtype;
        if (dtype == DType::kFloat64) s.options.beta_dtype = s.options.scales_dtype = dtype;
        if (dtype == DType::kBFloat16) s.options.scales_dtype = dtype;
        s.options.layout = layout;
        s.T = 333;
      });
    }
  }
  for (const Gate gate : {Gate::kZero, Gate::kTiny, Gate::kHuge, Gate::kReset}) {
    for (const bool everywhere : {false, true}) {
      add([&](ProblemSpec& s) {
        s.gate = gate;
        s.gate_everywhere = everywhere;
        s.T = 400;
      });
    }
  }
  add([](ProblemSpec& s) { s.lengths = {0, 1, 70, 0, 130, 64, 300, 0}; });
  add([](ProblemSpec& s) {
    s.state_tokens = {0, 1, 63, 64, 70, 128, 130, 500, 1000};
    s.B = 9;
    s.G = 2;
    s.H = 4;
    s.scale = 0.3;
    s.d_final_state = true;
  });
  add([](ProblemSpec& s) {
    s.state_tokens = {129, 5, 250};
    s.lengths = {0, 0, 100};
    s.d_final_state = true;
    s.options.spare_slots = 2;
  });
  for (const int64_t L : {1, 3, 7, 8, 9, 10}) {
    add([&](ProblemSpec& s) {
      s.saturate = true;
      s.L = L;
      s.T = 1300;
      s.d_final_state = true;
    });
    add([&](ProblemSpec& s) {
      s.saturate = true;
      s.L = L;
      s.T = 500;
      s.state_tokens = {700, 1111};
      s.d_final_state = true;
      s.options.dtype = s.options.beta_dtype = s.options.scales_dtype = DType::kFloat64;
    });
  }
  add([](ProblemSpec& s) {
    s.B = s.H = 1;
    s.T = 300;
    s.K = 130;
    s.V = 300;
  });
  add([](ProblemSpec& s) { s.K = s.V = 1; });
  add([](ProblemSpec& s) {
    s.B = s.H = 1;
    s.T = 5000;
    s.L = 20;
    s.options.num_threads = 3;
  });
  return specs;
}

TEST(ScalarGate, ForwardAgreesWithTheReference) {
  for (const ProblemSpec& spec : Specs()) {
    const auto problem = support::RandomProblem(spec, NextSeed());
    SCOPED_TRACE(support::Describe(problem.spec));
    const auto expected = reference::Forward(problem.arguments);
    cpu::ForEachTarget([&](const char*) {
      const auto result = support::RunForward(problem.arguments, problem.spec.options);
      ExpectClose(support::Compare(problem, result, expected));
    });
  }
}

TEST(ScalarGate, BackwardAgreesWithTheReference) {
  for (const ProblemSpec& spec : Specs()) {
    const auto problem = support::RandomProblem(spec, NextSeed());
    SCOPED_TRACE(support::Describe(problem.spec));
    const auto expected =
        reference::Backward(problem.arguments, problem.d_o, problem.d_final_state);
    cpu::ForEachTarget([&](const char*) {
      const auto gradients = support::RunBackward(problem.arguments, problem.d_o,
                                                  problem.d_final_state, problem.spec.options);
      ExpectClose(support::Compare(problem, gradients, expected));
    });
  }
}

// Every size of step, folds in the middle of one, storage types and saturation; both transitions.
TEST(Step, AgreesWithTheReference) {
  for (const Transition transition : {Transition::kScalarGate, Transition::kGatedDelta}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
      for (const int L : {0, 3, 9}) {
        ProblemSpec spec;
        spec.transition = transition;
        spec.B = 3;
        spec.T = 330;
        spec.G = 1;
        spec.H = 2;
        spec.K = 40;
        spec.V = 19;
        spec.L = L;
        spec.saturate = L > 0;
        spec.state_tokens = {0, 129, 700};
        spec.options.dtype = dtype;
        if (dtype == DType::kFloat64) spec.options.beta_dtype = spec.options.scales_dtype = dtype;
        const auto problem = support::RandomProblem(spec, NextSeed());
        SCOPED_TRACE(support::Describe(problem.spec));
        const auto expected = reference::Forward(problem.arguments);
        cpu::ForEachTarget([&](const char*) {
          const auto result = support::RunSteps(
              problem.arguments, {1, 1, 64, 63, 60, 2, 1, 5, 64, 64, 5}, problem.spec.options);
          ExpectClose(support::Compare(problem, result, expected));
        });
      }
    }
  }
}

}  // namespace
}  // namespace fenwick
