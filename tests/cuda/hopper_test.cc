// The Hopper kernels of the scalar gate against the float64 reference on shapes that touch every
// branch: on the emulator (cuda_emulated_test), on a device (cuda_hopper_test).
#include "cuda/hopper.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "cuda/device.h"
#include "fake_call.h"
#include "support/problem.h"
#include "support/testing.h"

namespace fenwick {
namespace {

using support::Gate;
using support::Layout;
using support::ProblemSpec;
using testing::ExpectClose;
using testing::ExpectSame;
using testing::NextSeed;

struct Case {
  std::string name;
  std::function<void(ProblemSpec&)> set;
};

class HopperTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!DeviceAvailable(Device::kCUDA) || cuda::CurrentDevice().major != 9) {
      GTEST_SKIP() << "no Hopper device";
    }
  }
};
class HopperKernels : public HopperTest, public ::testing::WithParamInterface<Case> {};

// Nothing here may quietly run on the general kernels.
void ExpectFits(const ProblemSpec& spec) {
  testing::FakeCall call(spec.B, spec.T, spec.G, spec.H, spec.K, spec.V, spec.options.dtype);
  call.inputs.level_scales =
      TensorView(call.inputs.q.data, spec.options.scales_dtype, {spec.B, spec.T, spec.H, spec.L});
  call.gradients.level_scales = call.inputs.level_scales;
  const cuda::DeviceTraits& device = cuda::CurrentDevice();
  EXPECT_TRUE(cuda::hopper::ForwardFits(
      call.inputs, spec.options.final_state ? call.FinalState() : StateView(), device));
  EXPECT_TRUE(cuda::hopper::BackwardFits(call.inputs, {}, call.gradients, device));
}

ProblemSpec Spec() {
  ProblemSpec spec;
  spec.transition = Transition::kScalarGate;
  spec.options.device = Device::kCUDA;
  spec.options.dtype = spec.options.scales_dtype = DType::kBFloat16;
  return spec;
}

TEST_P(HopperKernels, AgreeWithTheReference) {
  ProblemSpec spec = Spec();
  spec.B = 1, spec.T = 300, spec.G = 1, spec.H = 2, spec.K = 128, spec.V = 64;
  GetParam().set(spec);
  const support::Problem problem = support::RandomProblem(spec, NextSeed());
  SCOPED_TRACE(support::Describe(problem.spec));
  ExpectFits(problem.spec);
  ExpectClose(support::CheckForward(problem));
  ExpectClose(support::CheckBackward(problem));
}

void SetTypes(ProblemSpec& spec, DType dtype, DType scales) {
  spec.options.dtype = dtype;
  spec.options.scales_dtype = scales;
}

const Case kCases[] = {
    {"Plain", [](ProblemSpec& s) { s.B = 2; }},
    {"NoFinalState", [](ProblemSpec& s) { s.options.final_state = false; }},
    {"OneToken", [](ProblemSpec& s) { s.B = 2, s.T = 1, s.G = s.H = 4; }},
    {"OneChunk", [](ProblemSpec& s) { s.T = 128; }},
    {"ManySegments", [](ProblemSpec& s) { s.T = 128 * 21 + 5, s.H = 1; }},
    {"LongSegments", [](ProblemSpec& s) { s.T = 128 * 17, s.H = 3, s.K = 64; }},
    {"ManyHeads", [](ProblemSpec& s) { s.T = 131, s.H = 34, s.K = 64, s.V = 72; }},
    {"Resets", [](ProblemSpec& s) { s.T = 700, s.gate = Gate::kReset; }},
    {"StrongDecay",
     [](ProblemSpec& s) { s.T = 700, s.gate = Gate::kHuge, s.gate_everywhere = true; }},
    {"NoDecay", [](ProblemSpec& s) { s.T = 700, s.gate = Gate::kZero, s.gate_everywhere = true; }},
    {"Key64", [](ProblemSpec& s) { s.T = 400, s.K = 64; }},
    {"Key32Value32", [](ProblemSpec& s) { s.T = 400, s.K = 32, s.V = 32; }},
    {"Key96Value104", [](ProblemSpec& s) { s.T = 400, s.K = 96, s.V = 104; }},
    {"Key256", [](ProblemSpec& s) { s.B = 2, s.T = 700, s.K = 256; }},
    {"Key200Value104", [](ProblemSpec& s) { s.T = 128 * 9 + 5, s.H = 1, s.K = 200, s.V = 104; }},
    {"Key256ManySegments", [](ProblemSpec& s) { s.T = 128 * 21 + 5, s.H = 1, s.K = 256; }},
    {"Key136Packed",
     [](ProblemSpec& s) {
       s.lengths = {1, 0, 127, 700, 64}, s.G = 2, s.H = 4, s.K = 136;
     }},
    {"Value128", [](ProblemSpec& s) { s.T = 600, s.V = 128; }},
    {"EachHeadItsKeys", [](ProblemSpec& s) { s.G = s.H = 3, s.L = 13; }},
    {"TwoGroupsManyLevels", [](ProblemSpec& s) { s.G = 2, s.H = 6, s.L = 33; }},
    {"LevelsInFloat32",
     [](ProblemSpec& s) { SetTypes(s, DType::kBFloat16, DType::kFloat32), s.H = 5; }},
    {"SaturatesInside", [](ProblemSpec& s) { s.T = 900, s.L = 3, s.saturate = true; }},
    {"SaturatesAbove", [](ProblemSpec& s) { s.T = 900, s.L = 9, s.saturate = true; }},
    {"Packed", [](ProblemSpec& s) { s.lengths = {1, 0, 127, 128, 129, 0, 700, 64, 3}; }},
    {"PackedKey64",
     [](ProblemSpec& s) {
       s.lengths = {300, 77, 1100}, s.K = 64;
     }},
    {"Float16", [](ProblemSpec& s) { SetTypes(s, DType::kFloat16, DType::kFloat16), s.T = 1100; }},
    {"Float16LevelsInFloat32",
     [](ProblemSpec& s) { SetTypes(s, DType::kFloat16, DType::kFloat32), s.T = 900, s.H = 3; }},
    {"Float16Packed",
     [](ProblemSpec& s) {
       SetTypes(s, DType::kFloat16, DType::kFloat16), s.lengths = {1, 0, 700, 64};
     }},
    {"Scale", [](ProblemSpec& s) { s.scale = 0.37; }},
    {"RowsApart", [](ProblemSpec& s) { s.options.layout = Layout::kPadded, s.V = 40; }},
};

INSTANTIATE_TEST_SUITE_P(Cases, HopperKernels, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

// Heads in several passes, through which sums over the heads of a group go on as if there was one.
// With one group its runs of heads, of which short sequences have more, begin and end inside
// passes.
TEST_F(HopperTest, BackwardInPasses) {
  for (const int G : {1, 2}) {
    ProblemSpec spec = Spec();
    spec.lengths = {300, 1, 577};
    spec.G = G, spec.H = 6, spec.K = G == 1 ? 64 : 160, spec.V = 64;
    const support::Problem problem = support::RandomProblem(spec, NextSeed());
    const auto run = [&] {
      return support::RunBackward(problem.arguments, problem.d_o, {}, spec.options);
    };
    const reference::Gradients whole = run();
    // Passes of 1 head; of 2, with one group (on the emulator's device); of 3, with two.
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{5800} << 10}) {
      cuda::hopper::AimWorkspaceAt(bytes);
      SCOPED_TRACE(bytes);
      ExpectSame(run(), whole);
    }
    cuda::hopper::AimWorkspaceAt(0);
    ExpectClose(support::CheckBackward(problem));
  }
}

// Rows of a batch, and packed sequences: lengths that are cut in segments and runs of heads in
// several ways (on the emulator's device).
TEST_F(HopperTest, ASequenceAloneIsBitwiseTheSame) {
  for (const bool packed : {false, true}) {
    ProblemSpec spec = Spec();
    spec.H = 2, spec.K = 64, spec.V = 64;
    if (packed) {
      spec.lengths = {128 * 18 + 3, 0, 128 * 5, 77};
    } else {
      spec.B = 3, spec.T = 128 * 9;
    }
    const support::Problem problem = support::RandomProblem(spec, NextSeed());
    const reference::Arguments& a = problem.arguments;
    const reference::Result all = support::RunForward(a, spec.options);
    const reference::Gradients all_grad = support::RunBackward(a, problem.d_o, {}, spec.options);
    const auto count = static_cast<std::int64_t>(packed ? spec.lengths.size() : spec.B);
    for (std::int64_t n = 0; n < count; ++n) {
      SCOPED_TRACE(n);
      const auto part = [&](const reference::Tensor& x) {
        return packed ? support::Slice(x, 1, a.cu_seqlens[n], a.cu_seqlens[n + 1])
                      : support::Slice(x, 0, n, n + 1);
      };
      const reference::Arguments alone =
          packed ? support::SliceTokens(a, a.cu_seqlens[n], a.cu_seqlens[n + 1])
                 : support::SliceRow(a, n);
      const reference::Result result = support::RunForward(alone, spec.options);
      EXPECT_EQ(result.o.data, part(all.o).data);
      const auto& nodes = result.final_state.nodes;
      EXPECT_EQ(nodes.data, support::Slice(support::SliceState(all.final_state, n, n + 1).nodes, 2,
                                           0, nodes.size(2))
                                .data);
      ExpectSame(support::RunBackward(alone, part(problem.d_o), {}, spec.options),
                 {.q = part(all_grad.q),
                  .k = part(all_grad.k),
                  .v = part(all_grad.v),
                  .g = part(all_grad.g),
                  .beta = {},
                  .level_scales = part(all_grad.level_scales),
                  .initial_state = {}});
    }
  }
}

TEST_F(HopperTest, BackwardRepeatsBitwise) {
  ProblemSpec spec = Spec();
  spec.T = 700, spec.H = 3, spec.K = 64, spec.V = 64;
  const support::Problem problem = support::RandomProblem(spec, NextSeed());
  const auto run = [&] {
    return support::RunBackward(problem.arguments, problem.d_o, {}, spec.options);
  };
  ExpectSame(run(), run());
}

// States that end anywhere in a chunk: with and without a node of half a chunk, with none at all.
TEST_F(HopperTest, FinalStates) {
  for (const std::int64_t T : {63, 64, 128, 129, 191, 192, 193, 256, 257, 320, 321, 1000}) {
    ProblemSpec spec = Spec();
    spec.B = 2, spec.T = T, spec.G = 1, spec.H = 2, spec.K = 72, spec.V = 72;
    spec.gate = T % 2 == 0 ? Gate::kReset : Gate::kMild;
    if (T > 320) {  // several nodes in the top slot, none of which has decayed
      spec.L = 9, spec.saturate = true;
      spec.gate = Gate::kTiny, spec.gate_everywhere = true;
    }
    spec.options.spare_slots = static_cast<int>(T % 3);
    const support::Problem problem = support::RandomProblem(spec, NextSeed());
    SCOPED_TRACE(support::Describe(problem.spec));
    ExpectFits(problem.spec);
    ExpectClose(support::CheckForward(problem));
  }
}

// Heads in passes of one, of a group, and of all.
TEST_F(HopperTest, FinalStatesInPasses) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    ProblemSpec spec = Spec();
    SetTypes(spec, dtype, dtype);
    spec.lengths = {0, 320, 1, 0, 577, 64 * 7 + 65, 0};
    spec.G = 2, spec.H = 6, spec.V = 24;
    spec.K = dtype == DType::kFloat16 ? 136 : 40;
    const support::Problem problem = support::RandomProblem(spec, NextSeed());
    SCOPED_TRACE(support::Describe(problem.spec));
    ExpectFits(problem.spec);
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{800} << 10, std::size_t{3} << 20}) {
      cuda::hopper::AimWorkspaceAt(bytes);
      ExpectClose(support::CheckForward(problem));
    }
    cuda::hopper::AimWorkspaceAt(0);
  }
}

// Decoding goes on from a final state, across two folds of the ring; nothing decays.
TEST_F(HopperTest, StepsAfterAPrefill) {
  for (const bool saturate : {false, true}) {
    ProblemSpec spec = Spec();
    spec.B = 2, spec.T = 620, spec.G = 1, spec.H = 2, spec.K = 64, spec.V = 40;
    spec.gate = Gate::kTiny, spec.gate_everywhere = true;
    if (saturate) spec.L = 9, spec.saturate = true;
    const std::int64_t prompt = 450;
    const support::Problem problem = support::RandomProblem(spec, NextSeed());
    SCOPED_TRACE(support::Describe(problem.spec));
    reference::Arguments rest = support::SliceTokens(problem.arguments, prompt, spec.T);
    rest.initial_state =
        support::RunForward(support::SliceTokens(problem.arguments, 0, prompt), spec.options)
            .final_state;
    const reference::Tensor whole = reference::Forward(problem.arguments).o;
    ExpectClose("o", support::RunSteps(rest, {1, 63, 64, 2, 40}, spec.options).o,
                support::Slice(whole, 1, prompt, spec.T),
                support::Tolerance(spec.options, spec.T, /*gradient=*/false));
  }
}

}  // namespace
}  // namespace fenwick
