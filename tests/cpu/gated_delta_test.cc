// The CPU kernels of the gated delta rule against the float64 reference, the authors' results and
// themselves (threads, batch), on every instruction set.
#include <gtest/gtest.h>

#include <cstring>

#include "each_target.h"
#include "support/golden.h"
#include "support/testing.h"

namespace fenwick {
namespace {

using support::Gate;
using support::Layout;
using support::Problem;
using support::ProblemSpec;
using support::RunOptions;
using testing::ExpectClose;
using testing::NextSeed;

ProblemSpec Spec(DType dtype = DType::kFloat32) {
  ProblemSpec spec;
  spec.transition = Transition::kGatedDelta;
  spec.options.dtype = dtype;
  if (dtype == DType::kFloat64) spec.options.beta_dtype = spec.options.scales_dtype = dtype;
  spec.options.num_threads = 2;
  return spec;
}

void Check(const ProblemSpec& spec) {
  const Problem problem = support::RandomProblem(spec, NextSeed());
  SCOPED_TRACE(support::Describe(problem.spec));
  ExpectClose(support::CheckForward(problem));
  ExpectClose(support::CheckBackward(problem));
}

// Lengths around chunks (64) and segments (1024), odd sizes, groups, packing.
std::vector<ProblemSpec> Shapes(DType dtype) {
  std::vector<ProblemSpec> specs;
  for (const std::int64_t T : {1, 2, 63, 64, 65, 200}) {
    ProblemSpec spec = Spec(dtype);
    spec.B = 2;
    spec.T = T;
    spec.G = 2;
    spec.H = 4;
    spec.K = 20;
    spec.V = 9;
    spec.options.layout = Layout::kRagged;
    specs.push_back(spec);
  }
  ProblemSpec packed = Spec(dtype);
  packed.lengths = {0, 1, 70, 0, 130, 64, 1100, 3};
  packed.G = packed.H = 2;
  packed.K = 33;
  packed.V = 6;
  packed.scale = 0.7;
  packed.options.layout = Layout::kPadded;
  specs.push_back(packed);
  ProblemSpec wide = Spec(dtype);
  wide.T = 66;
  wide.K = 512;
  wide.V = 5;
  specs.push_back(wide);
  std::swap(wide.K, wide.V);
  specs.push_back(wide);
  ProblemSpec narrow = Spec(dtype);
  narrow.T = 130;
  narrow.H = 8;  // a state is one number: of a single one, near zero by chance, only noise is left
  narrow.K = 1;
  narrow.V = 1;
  specs.push_back(narrow);
  ProblemSpec long_row = Spec(dtype);
  long_row.T = 3400;
  long_row.K = 24;
  long_row.V = 3;
  specs.push_back(long_row);
  return specs;
}

// Calls that go on from a state in the middle of a chunk, a node or a segment, and leave one.
std::vector<ProblemSpec> States(DType dtype) {
  std::vector<ProblemSpec> specs;
  for (const std::int64_t T : {0, 1, 64, 150, 1200}) {
    ProblemSpec spec = Spec(dtype);
    spec.B = 3;
    spec.T = T;
    spec.H = T == 150 ? 2 : 1;
    spec.K = 20;
    spec.V = 6;
    spec.state_tokens = {0, 64 * 21 + 5, 2100};
    spec.d_final_state = true;
    spec.options.spare_slots = 2;
    specs.push_back(spec);
  }
  return specs;
}

// Fewer levels than the positions need: inside a chunk, a segment, and beyond.
std::vector<ProblemSpec> Saturated(DType dtype) {
  std::vector<ProblemSpec> specs;
  for (const std::int64_t L : {3, 8, 10, 13}) {
    ProblemSpec spec = Spec(dtype);
    spec.lengths = {1300, 2200};
    spec.state_tokens = {1500, 0};
    spec.K = 32;
    spec.V = 3;
    spec.L = L;
    spec.saturate = true;
    spec.d_final_state = true;
    specs.push_back(spec);
  }
  return specs;
}

std::vector<ProblemSpec> Gates(DType dtype) {
  std::vector<ProblemSpec> specs;
  for (const Gate gate : {Gate::kZero, Gate::kTiny, Gate::kHuge, Gate::kReset}) {
    for (const bool everywhere : {false, true}) {
      ProblemSpec spec = Spec(dtype);
      spec.T = 1400;
      spec.K = 12;
      spec.V = 7;
      spec.gate = gate;
      spec.gate_everywhere = everywhere;
      specs.push_back(spec);
    }
  }
  return specs;
}

class GatedDeltaTest : public ::testing::TestWithParam<DType> {};

INSTANTIATE_TEST_SUITE_P(Types, GatedDeltaTest,
                         ::testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16,
                                           DType::kFloat64),
                         [](const auto& info) { return DTypeName(info.param); });

TEST_P(GatedDeltaTest, Shapes) {
  for (const ProblemSpec& spec : Shapes(GetParam())) Check(spec);
}

TEST_P(GatedDeltaTest, States) {
  for (const ProblemSpec& spec : States(GetParam())) Check(spec);
}

// What the storage type does not touch.
TEST(GatedDeltaFloat32Test, Saturated) {
  for (const ProblemSpec& spec : Saturated(DType::kFloat32)) Check(spec);
}

TEST(GatedDeltaFloat32Test, Gates) {
  for (const ProblemSpec& spec : Gates(DType::kFloat32)) Check(spec);
}

TEST(GatedDeltaTargetsTest, EveryInstructionSet) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    ProblemSpec spec = Spec(dtype);
    spec.T = 1300;
    spec.H = 1;
    spec.K = 21;
    spec.V = 10;
    cpu::ForEachTarget([&](const char*) { Check(spec); });
  }
}

// More segments than one wave of the forward holds, lines going on from one wave to the next.
TEST(GatedDeltaWavesTest, LongSequence) {
  ProblemSpec spec = Spec(DType::kFloat32);
  spec.lengths = {1300, 17000, 3000};
  spec.K = 96;
  spec.V = 8;
  spec.state_tokens = {0, 3000, 1100};
  spec.d_final_state = true;
  spec.options.num_threads = 1;
  const Problem problem = support::RandomProblem(spec, NextSeed());
  ExpectClose(support::CheckForward(problem));
}

TEST(GatedDeltaGoldenTest, AgreesWithTheAuthorsReference) {
  const support::SafetensorsFile file(FENWICK_GOLDEN_DIR "/ops.safetensors");
  int checked = 0;
  for (const auto& c : support::GoldenCases(file)) {
    if (c.arguments.transition != Transition::kGatedDelta) continue;
    SCOPED_TRACE(c.name);
    const RunOptions options = Spec(DType::kFloat64).options;
    ExpectClose("o", support::RunForward(c.arguments, options).o, c.o, 3e-7);
    ExpectClose(support::RunBackward(c.arguments, c.d_o, {}, options), c.gradients, 3e-7);
    ++checked;
  }
  EXPECT_EQ(checked, 6);
}

// The bits of a row depend on neither the number of threads nor the rows beside it.
TEST(GatedDeltaBitsTest, ThreadsAndBatch) {
  ProblemSpec spec = Spec(DType::kFloat32);
  spec.B = 3;
  spec.T = 2300;
  spec.H = 2;
  spec.K = 16;
  spec.V = 40;
  spec.d_final_state = true;
  const Problem problem = support::RandomProblem(spec, NextSeed());
  RunOptions options = spec.options;
  const auto two = support::RunForward(problem.arguments, options);
  options.num_threads = 1;
  const auto one = support::RunForward(problem.arguments, options);
  EXPECT_EQ(one.o.data, two.o.data);
  EXPECT_EQ(one.final_state.nodes.data, two.final_state.nodes.data);
  const auto row = support::RunForward(support::SliceRow(problem.arguments, 1), options);
  EXPECT_EQ(row.o.data, support::Slice(two.o, 0, 1, 2).data);
  const auto d_one =
      support::RunBackward(problem.arguments, problem.d_o, problem.d_final_state, options);
  options.num_threads = 2;
  const auto d_two =
      support::RunBackward(problem.arguments, problem.d_o, problem.d_final_state, options);
  const auto d_row = support::RunBackward(
      support::SliceRow(problem.arguments, 1), support::Slice(problem.d_o, 0, 1, 2),
      support::SliceState(problem.d_final_state, 1, 2), options);
  for (const auto tensor : {&reference::Gradients::q, &reference::Gradients::k,
                            &reference::Gradients::v, &reference::Gradients::g,
                            &reference::Gradients::beta, &reference::Gradients::level_scales}) {
    EXPECT_EQ((d_one.*tensor).data, (d_two.*tensor).data);
    EXPECT_EQ((d_row.*tensor).data, support::Slice(d_two.*tensor, 0, 1, 2).data);
  }
}

}  // namespace
}  // namespace fenwick
