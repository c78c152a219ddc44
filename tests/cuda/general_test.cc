// The general CUDA kernels against the float64 reference on small shapes that touch every branch:
// on the emulator (cuda_emulated_test), on a device and under compute-sanitizer
// (cuda_general_test).
#include <gtest/gtest.h>

#include "support/problem.h"
#include "support/testing.h"

namespace fenwick {
namespace {

using support::ProblemSpec;
using testing::ExpectClose;
using testing::NextSeed;

ProblemSpec Spec(Transition transition, DType dtype) {
  ProblemSpec spec;
  spec.transition = transition;
  spec.options.device = Device::kCUDA;
  spec.options.dtype = dtype;
  const DType wide = spec.options.wide_dtype();
  spec.options.beta_dtype = wide;
  spec.options.scales_dtype = wide;
  return spec;
}

class GeneralKernels : public ::testing::TestWithParam<Transition> {
 protected:
  void SetUp() override {
    if (!DeviceAvailable(Device::kCUDA)) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_P(GeneralKernels, ManyChunks) {
  for (const DType dtype : {DType::kFloat64, DType::kBFloat16}) {
    ProblemSpec spec = Spec(GetParam(), dtype);
    spec.T = dtype == DType::kFloat64 ? 64 * 33 + 5 : 64 * 4 + 5;
    spec.G = 1, spec.H = dtype == DType::kFloat64 ? 1 : 2, spec.K = 20, spec.V = 12;
    const auto problem = support::RandomProblem(spec, NextSeed());
    SCOPED_TRACE(support::Describe(spec));
    ExpectClose(support::CheckForward(problem));
    ExpectClose(support::CheckBackward(problem));
  }
}

TEST_P(GeneralKernels, RaggedPackedWithStates) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat16}) {
    ProblemSpec spec = Spec(GetParam(), dtype);
    spec.lengths = {0, 70, 1, 0, 200};
    spec.state_tokens = {300, 130, 64, 0, 500};
    spec.G = 1, spec.H = 1, spec.K = 70, spec.V = 66;
    spec.gate = support::Gate::kReset;
    spec.scale = 0.5, spec.d_final_state = true;
    const auto problem = support::RandomProblem(spec, NextSeed());
    SCOPED_TRACE(support::Describe(spec));
    ExpectClose(support::CheckForward(problem));
    ExpectClose(support::CheckBackward(problem));
  }
}

TEST_P(GeneralKernels, Saturates) {
  ProblemSpec spec = Spec(GetParam(), DType::kFloat64);
  spec.T = 300, spec.K = 8, spec.V = 8, spec.L = 9, spec.saturate = true;
  spec.state_tokens = {64 * 13 + 100}, spec.d_final_state = true;
  const auto problem = support::RandomProblem(spec, NextSeed());
  SCOPED_TRACE(support::Describe(spec));
  ExpectClose(support::CheckForward(problem));
  ExpectClose(support::CheckBackward(problem));
}

// Steps across folds of the ring, several tokens at a time too, against one call of the reference.
TEST_P(GeneralKernels, Steps) {
  for (const bool saturate : {false, true}) {
    for (const DType dtype : {DType::kFloat64, DType::kBFloat16}) {
      ProblemSpec spec = Spec(GetParam(), dtype);
      spec.B = 2, spec.T = 100, spec.G = 1, spec.H = 2, spec.K = 10, spec.V = 20;
      spec.state_tokens = {64 * 7 + 60, 64 * 3};
      spec.saturate = saturate;
      if (saturate) spec.L = 9;
      const auto problem = support::RandomProblem(spec, NextSeed());
      SCOPED_TRACE(support::Describe(spec));
      const reference::Result result =
          support::RunSteps(problem.arguments, {1, 1, 40, 57, 1}, spec.options);
      ExpectClose(support::Compare(problem, result, reference::Forward(problem.arguments)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Transitions, GeneralKernels,
                         ::testing::Values(Transition::kScalarGate, Transition::kGatedDelta));

}  // namespace
}  // namespace fenwick
