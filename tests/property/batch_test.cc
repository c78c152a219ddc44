// A row's result does not depend on its company: batch, threads, packing.
#include "property/property.h"

namespace fenwick {
namespace {

using reference::Arguments;
using reference::Gradients;
using support::ProblemSpec;
using support::RunOptions;
using testing::ExpectClose;
using testing::ExpectSame;
using testing::kGradientFields;
using testing::NextSeed;

FENWICK_PROPERTY_SUITE(BatchTest);

// Values of row b of a batch.
Gradients RowOf(const Gradients& all, std::int64_t b) {
  Gradients row;
  for (const auto field : kGradientFields) row.*field = support::Slice(all.*field, 0, b, b + 1);
  row.initial_state = support::SliceState(all.initial_state, b, b + 1);
  return row;
}

TEST_P(BatchTest, ARowAloneIsBitwiseTheRowAmongSeven) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t T : {50, 200, 700}) {
      ProblemSpec spec = Spec(dtype);
      spec.B = 7;
      spec.T = T;
      spec.H = 2;
      if (T == 200) spec.state_tokens = {0, 3, 64, 130, 200, 300, 320};
      spec.L = 11;
      const support::Problem problem = support::RandomProblem(spec, NextSeed());
      SCOPED_TRACE(support::Describe(problem.spec));
      const Arguments& a = problem.arguments;
      const auto all = support::RunForward(a, spec.options);
      const Gradients all_grad = support::RunBackward(a, problem.d_o, {}, spec.options);
      reference::Result all_steps;
      if (T == 50) all_steps = support::RunSteps(a, {1, 7, 42}, spec.options);
      for (const std::int64_t b : {0, 3, 6}) {
        const Arguments row = support::SliceRow(a, b);
        ExpectSame("o", support::RunForward(row, spec.options).o,
                   support::Slice(all.o, 0, b, b + 1));
        if (all_steps.o.given()) {
          ExpectSame("o of steps", support::RunSteps(row, {1, 7, 42}, spec.options).o,
                     support::Slice(all_steps.o, 0, b, b + 1));
        }
        ExpectSame(
            support::RunBackward(row, support::Slice(problem.d_o, 0, b, b + 1), {}, spec.options),
            RowOf(all_grad, b));
      }
    }
  }
}

TEST_P(BatchTest, AnyNumberOfThreadsIsBitwiseTheSame) {
  if (GetParam().device != Device::kCPU) GTEST_SKIP() << "threads are the CPU's";
  for (const std::int64_t T : {100, 1500}) {
    ProblemSpec spec = Spec();
    spec.T = T;
    spec.H = 2;
    spec.state_tokens = {300};
    spec.d_final_state = true;
    const support::Problem problem = support::RandomProblem(spec, NextSeed());
    RunOptions one = spec.options;
    one.num_threads = 1;
    const auto expected = support::RunForward(problem.arguments, one);
    const Gradients expected_grad =
        support::RunBackward(problem.arguments, problem.d_o, problem.d_final_state, one);
    for (const int threads : {2, 3}) {
      RunOptions options = spec.options;
      options.num_threads = threads;
      const auto result = support::RunForward(problem.arguments, options);
      ExpectSame("o", result.o, expected.o);
      ExpectSame("nodes", result.final_state.nodes, expected.final_state.nodes);
      ExpectSame(
          support::RunBackward(problem.arguments, problem.d_o, problem.d_final_state, options),
          expected_grad);
    }
  }
}

// Packed sequences, empty ones among them, with and without states.
TEST_P(BatchTest, APackedSequenceIsBitwiseTheSequenceAlone) {
  for (const bool with_state : {false, true}) {
    ProblemSpec spec = Spec(with_state ? DType::kFloat32 : DType::kBFloat16);
    spec.G = 2;
    spec.H = 4;
    spec.lengths = {0, 100, 1, 0, 64, 300, 0};
    if (with_state) spec.state_tokens = {70, 0, 200, 0, 129, 64, 300};
    spec.L = 11;
    const support::Problem problem = support::RandomProblem(spec, NextSeed());
    SCOPED_TRACE(support::Describe(problem.spec));
    const Arguments& a = problem.arguments;
    const auto packed = support::RunForward(a, spec.options);
    const Gradients packed_grad = support::RunBackward(a, problem.d_o, {}, spec.options);
    for (std::size_t n = 0; n < spec.lengths.size(); ++n) {
      SCOPED_TRACE("sequence " + std::to_string(n));
      const std::int64_t begin = a.cu_seqlens[n], end = a.cu_seqlens[n + 1];
      Arguments alone = support::SliceTokens(a, begin, end);
      alone.initial_state =
          support::SliceState(a.initial_state, static_cast<std::int64_t>(n), n + 1);
      const auto result = support::RunForward(alone, spec.options);
      ExpectSame("o", support::Slice(packed.o, 1, begin, end), result.o);
      const auto state =
          support::SliceState(packed.final_state, static_cast<std::int64_t>(n), n + 1);
      EXPECT_EQ(state.position, result.final_state.position);
      EXPECT_EQ(state.base, result.final_state.base);
      ExpectSame("nodes", support::Slice(state.nodes, 2, 0, result.final_state.nodes.size(2)),
                 result.final_state.nodes);
      const auto grad =
          support::RunBackward(alone, support::Slice(problem.d_o, 1, begin, end), {}, spec.options);
      for (const auto field : kGradientFields) {
        if (!(grad.*field).given()) continue;
        ExpectSame("gradient", support::Slice(packed_grad.*field, 1, begin, end), grad.*field);
      }
    }
  }
}

}  // namespace
}  // namespace fenwick
