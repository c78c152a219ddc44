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

// Steps across folds of the ring, several tokens at a time too, against one call of the reference:
// rows that allow wide accesses and rows that do not, keys of more than one strip of 128.
TEST_P(GeneralKernels, Steps) {
  struct Shape {
    DType dtype;
    std::int64_t K, V;
    bool saturate;
  };
  for (const auto& [dtype, K, V, saturate] :
       {Shape{DType::kFloat64, 10, 20, false}, Shape{DType::kFloat64, 8, 8, true},
        Shape{DType::kBFloat16, 10, 20, true}, Shape{DType::kBFloat16, 140, 36, false},
        Shape{DType::kFloat16, 20, 8, false}, Shape{DType::kFloat32, 260, 8, false}}) {
    ProblemSpec spec = Spec(GetParam(), dtype);
    spec.B = 2, spec.T = 100, spec.G = 1, spec.H = 2, spec.K = K, spec.V = V;
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

// Enough sequences for blocks of two and four tiles of columns: right, and bitwise what a sequence
// alone gives, whose blocks have one tile.
TEST_P(GeneralKernels, StepsOfManySequences) {
  for (const std::int64_t V : {40, 72}) {
    ProblemSpec spec = Spec(GetParam(), DType::kBFloat16);
    spec.B = 34, spec.T = 3, spec.G = 1, spec.H = 4, spec.V = V;
    spec.K = V == 72 ? 56 : 8;  // more rows of nodes than a thread reads at a time
    for (std::int64_t b = 0; b < spec.B; ++b) spec.state_tokens.push_back(64 + 37 * b % 265);
    spec.L = 10;
    const auto problem = support::RandomProblem(spec, NextSeed());
    SCOPED_TRACE(support::Describe(spec));
    const std::vector<std::int64_t> sizes = {1, 2};
    const reference::Result all = support::RunSteps(problem.arguments, sizes, spec.options);
    ExpectClose(support::Compare(problem, all, reference::Forward(problem.arguments)));
    for (const std::int64_t b : {0, 7, 33}) {
      const auto alone =
          support::RunSteps(support::SliceRow(problem.arguments, b), sizes, spec.options);
      EXPECT_EQ(alone.o.data, support::Slice(all.o, 0, b, b + 1).data) << "row " << b;
      EXPECT_EQ(alone.final_state.nodes.data,
                support::Slice(all.final_state.nodes, 0, b, b + 1).data)
          << "row " << b;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Transitions, GeneralKernels,
                         ::testing::Values(Transition::kScalarGate, Transition::kGatedDelta));

}  // namespace
}  // namespace fenwick
