// Every rule of ops.h, by the message of the error that breaks it: argument, expected, got.
#include "core/validate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "fenwick/ops.h"
#include "support/testing.h"

namespace fenwick {
namespace {

using testing::ErrorOf;

constexpr std::int64_t kB = 2, kT = 5, kG = 2, kH = 4, kK = 3, kV = 6, kL = 9;

// A state of N sequences in plain memory.
struct StateBuffers {
  std::vector<float> k, v, g, beta, nodes;
  std::vector<std::int64_t> position, base;

  StateBuffers(std::int64_t N, std::int64_t slots)
      : k(N * kStateRing * kG * kK),
        v(N * kStateRing * kH * kV),
        g(N * kStateRing * kH),
        beta(N * kStateRing * kH),
        nodes(N * kH * slots * kK * kV),
        position(N),
        base(N),
        N(N),
        slots(slots) {}

  StateView View() {
    StateView view;
    view.k = TensorView(k.data(), DType::kFloat32, {N, kStateRing, kG, kK});
    view.v = TensorView(v.data(), DType::kFloat32, {N, kStateRing, kH, kV});
    view.g = TensorView(g.data(), DType::kFloat32, {N, kStateRing, kH});
    view.beta = TensorView(beta.data(), DType::kFloat32, {N, kStateRing, kH});
    view.nodes = TensorView(nodes.data(), DType::kFloat32, {N, kH, slots, kK, kV});
    view.position = TensorView(position.data(), DType::kInt64, {N});
    view.base = TensorView(base.data(), DType::kInt64, {N});
    view.max_position = 1000;
    return view;
  }
  StateGradView GradView() {
    const StateView view = View();
    return {.k = view.k, .v = view.v, .g = view.g, .beta = view.beta, .nodes = view.nodes};
  }

  std::int64_t N, slots;
};

// A valid call of the gated delta rule that a test then breaks.
class ValidateTest : public ::testing::Test {
 protected:
  ValidateTest() : floats_(4096, 1.0f), state_(kB, 2), other_state_(kB, 2) {
    inputs_.transition = Transition::kGatedDelta;
    inputs_.q = View({kB, kT, kG, kK});
    inputs_.k = View({kB, kT, kG, kK});
    inputs_.v = View({kB, kT, kH, kV});
    inputs_.g = View({kB, kT, kH});
    inputs_.beta = View({kB, kT, kH});
    inputs_.level_scales = View({kB, kT, kH, kL});
    o_ = View({kB, kT, kH, kV});
  }

  TensorView View(std::initializer_list<std::int64_t> sizes, DType dtype = DType::kFloat32) {
    return TensorView(floats_.data(), dtype, sizes);
  }

  std::string InputsError() {
    return ErrorOf([&] { ValidateInputs(inputs_, Device::kCPU); });
  }
  std::string StepError() {
    return ErrorOf([&] { ValidateStep(inputs_, o_, Device::kCPU); });
  }
  std::string FinalStateError(const StateView& view) {
    return ErrorOf([&] { ValidateFinalState(inputs_, view, Device::kCPU); });
  }

  std::vector<float> floats_;
  StateBuffers state_, other_state_;
  Inputs inputs_;
  TensorView o_;
};

TEST_F(ValidateTest, AcceptsAValidCall) {
  EXPECT_EQ(InputsError(), "no error");
  inputs_.initial_state = state_.View();
  EXPECT_EQ(InputsError(), "no error");
  EXPECT_EQ(FinalStateError(other_state_.View()), "no error");
  EXPECT_EQ(StepError(), "no error");
}

TEST_F(ValidateTest, ValuesThatNoEnumeratorHas) {
  const Inputs good = inputs_;
  inputs_.q.dtype = inputs_.k.dtype = inputs_.v.dtype = static_cast<DType>(9);
  EXPECT_EQ(InputsError(), "q: expected float32, bfloat16, float16 or float64, got unknown");
  inputs_ = good;
  inputs_.transition = static_cast<Transition>(2);
  EXPECT_EQ(InputsError(), "transition: expected one of its two values, got 2");
  inputs_ = good;
  inputs_.level_policy = static_cast<LevelPolicy>(7);
  EXPECT_EQ(InputsError(), "level_policy: expected one of its two values, got 7");
}

TEST_F(ValidateTest, ViewsNameWhatCame) {
  EXPECT_EQ(ErrorOf([] {
              TensorView(nullptr, DType::kFloat32, {1, 1, 1, 1, 1, 1});
            }),
            "tensor view: expected at most 5 axes, got 6");
  EXPECT_EQ(ErrorOf([] {
              TensorView(nullptr, DType::kFloat32, {2, 3}, {3});
            }),
            "tensor view: expected 2 strides, one for each size, got 1");
}

TEST_F(ValidateTest, Shapes) {
  const Inputs good = inputs_;
  inputs_.q = {};
  EXPECT_EQ(InputsError(), "q: expected a tensor, got none");
  inputs_ = good;
  inputs_.q = View({kB, kT, kG});
  EXPECT_EQ(InputsError(), "q: expected shape [B, T, G, K] = [*, *, *, *], got [2, 5, 2]");
  inputs_ = good;
  inputs_.q.rank = 9;  // sizes has room for 5
  EXPECT_EQ(InputsError(), "q: expected at most 5 axes, got 9");
  inputs_ = good;
  inputs_.k = View({kB, kT + 1, kG, kK});
  EXPECT_EQ(InputsError(), "k: expected shape [B, T, G, K] = [2, 5, 2, 3], got [2, 6, 2, 3]");
  inputs_ = good;
  inputs_.v = View({kB, kT, 3, kV});
  EXPECT_EQ(InputsError(),
            "v: expected a number of heads that is a multiple of the 2 groups of q, got 3");
  inputs_.v = View({kB, kT, 0, kV});
  EXPECT_EQ(InputsError(),
            "v: expected a number of heads that is a multiple of the 2 groups of q, got 0");
  inputs_.v = View({kB, kT, kH, 0});
  EXPECT_EQ(InputsError(), "v: expected value size V in 1..512, got 0");
  inputs_ = good;
  inputs_.q = inputs_.k = View({1, 1, 1, 513});
  EXPECT_EQ(InputsError(), "q: expected key size K in 1..512, got 513");
  inputs_.q = inputs_.k = View({1, 1, 0, 8});
  EXPECT_EQ(InputsError(), "q: expected at least 1 group, got 0");
  inputs_ = good;
  inputs_.g = View({kB, kT, kG});
  EXPECT_EQ(InputsError(), "g: expected shape [B, T, H] = [2, 5, 4], got [2, 5, 2]");
  inputs_ = good;
  inputs_.beta = {};
  EXPECT_EQ(InputsError(), "beta: expected a tensor, got none");
  inputs_.transition = Transition::kScalarGate;
  EXPECT_EQ(InputsError(), "no error");
  inputs_.beta = good.beta;
  EXPECT_EQ(InputsError(), "beta: expected none with a scalar gate, got a tensor [2, 5, 4]");
}

TEST_F(ValidateTest, Types) {
  const Inputs good = inputs_;
  inputs_.q = View({kB, kT, kG, kK}, DType::kInt64);
  EXPECT_EQ(InputsError(), "q: expected float32, bfloat16, float16 or float64, got int64");
  inputs_ = good;
  inputs_.k.dtype = DType::kBFloat16;
  EXPECT_EQ(InputsError(), "k: expected float32, got bfloat16");
  inputs_.q.dtype = inputs_.v.dtype = DType::kBFloat16;
  EXPECT_EQ(InputsError(), "no error");
  inputs_.g.dtype = DType::kBFloat16;
  EXPECT_EQ(InputsError(), "g: expected float32, got bfloat16");
  inputs_.g = good.g;
  inputs_.level_scales.dtype = DType::kFloat16;
  EXPECT_EQ(InputsError(), "level_scales: expected bfloat16 or float32, got float16");
  inputs_.level_scales.dtype = DType::kBFloat16;
  inputs_.beta.dtype = DType::kBFloat16;
  EXPECT_EQ(InputsError(), "no error");
  inputs_ = good;
  for (TensorView* view : {&inputs_.q, &inputs_.k, &inputs_.v}) view->dtype = DType::kFloat64;
  EXPECT_EQ(InputsError(), "g: expected float64, got float32");
}

TEST_F(ValidateTest, MemoryAndScalars) {
  const Inputs good = inputs_;
  inputs_.v.strides[3] = 2;
  EXPECT_EQ(InputsError(), "v: expected stride 1 on the last axis, got 2");
  inputs_ = good;
  inputs_.g.data = nullptr;
  EXPECT_EQ(InputsError(), "g: expected data, got a null pointer");
  inputs_ = good;
  inputs_.k.strides = {0, 0, 0, 1};  // a broadcast input is fine
  EXPECT_EQ(InputsError(), "no error");
  inputs_.scale = std::numeric_limits<double>::infinity();
  EXPECT_EQ(InputsError(), "scale: expected a finite number, got inf");
  o_.strides[1] = 0;
  EXPECT_EQ(ErrorOf([&] { ValidateOutput(inputs_, o_, "o", true); }),
            "o: expected distinct elements (it is written), got stride 0 on axis 1");
  EXPECT_EQ(ErrorOf([&] { ValidateOutput(inputs_, o_, "d_o", false); }), "no error");
  o_ = View({kB, kT, kH, kV + 1});
  EXPECT_EQ(ErrorOf([&] { ValidateOutput(inputs_, o_, "o", true); }),
            "o: expected shape [B, T, H, V] = [2, 5, 4, 6], got [2, 5, 4, 7]");
}

TEST_F(ValidateTest, PackedSequences) {
  const std::vector<std::int64_t> good = {0, 0, 2, 5, 5}, first = {1, 5}, last = {0, 4},
                                  falls = {0, 4, 2, 5}, none = {0};
  inputs_.cu_seqlens = good;
  EXPECT_EQ(InputsError(), "cu_seqlens: expected none unless B = 1, got B = 2");
  for (TensorView* view :
       {&inputs_.q, &inputs_.k, &inputs_.v, &inputs_.g, &inputs_.beta, &inputs_.level_scales}) {
    view->sizes[0] = 1;
  }
  EXPECT_EQ(InputsError(), "no error");
  inputs_.cu_seqlens = first;
  EXPECT_EQ(InputsError(), "cu_seqlens[0]: expected 0, got 1");
  inputs_.cu_seqlens = last;
  EXPECT_EQ(InputsError(), "cu_seqlens[1]: expected T = 5, got 4");
  inputs_.cu_seqlens = falls;
  EXPECT_EQ(InputsError(), "cu_seqlens[2]: expected at least its predecessor 4, got 2");
  inputs_.cu_seqlens = none;
  EXPECT_EQ(InputsError(), "cu_seqlens[0]: expected T = 5, got 0");
}

TEST_F(ValidateTest, Levels) {
  inputs_.level_scales = View({kB, kT, kH, 3});
  EXPECT_EQ(InputsError(),
            "level_scales: expected at least 4 levels for 5 tokens (or level_policy saturate), "
            "got 3");
  inputs_.level_policy = LevelPolicy::kSaturate;
  EXPECT_EQ(InputsError(), "no error");
  inputs_.level_scales = View({kB, kT, kH, 0});
  EXPECT_EQ(InputsError(), "level_scales: expected at least 1 level for 5 tokens, got 0");
  inputs_.level_policy = LevelPolicy::kError;
  inputs_.level_scales = View({kB, kT, kH, kL});
  inputs_.initial_state = state_.View();
  state_.position[1] = 251;
  state_.base[1] = 128;
  EXPECT_EQ(InputsError(), "no error");
  state_.position[1] = 252;
  EXPECT_EQ(InputsError(),
            "level_scales: expected at least 10 levels for 257 tokens (or "
            "level_policy saturate), got 9");
  // The host cannot read positions on a GPU: max_position counts.
  state_.position[1] = 0;
  EXPECT_EQ(ErrorOf([&] { ValidateInputs(inputs_, Device::kCUDA); }),
            "initial_state.nodes: expected at least 4 slots for 896 folded tokens, got 2");
}

TEST_F(ValidateTest, InitialState) {
  inputs_.initial_state = state_.View();
  const StateView good = inputs_.initial_state;
  const auto error_with = [&](std::function<void(StateView&)> change) {
    inputs_.initial_state = good;
    change(inputs_.initial_state);
    return InputsError();
  };
  EXPECT_EQ(error_with([](StateView& s) { s.k.sizes[1] = 64; }),
            "initial_state.k: expected shape [N, 128, G, K] = [2, 128, 2, 3], got [2, 64, 2, 3]");
  EXPECT_EQ(error_with([](StateView& s) { s.nodes.sizes[4] = 5; }),
            "initial_state.nodes: expected shape [N, H, S, K, V] = [2, 4, *, 3, 6], got "
            "[2, 4, 2, 3, 5]");
  EXPECT_EQ(error_with([](StateView& s) { s.v.dtype = DType::kFloat16; }),
            "initial_state.v: expected float32, got float16");
  EXPECT_EQ(error_with([](StateView& s) { s.base.dtype = DType::kFloat32; }),
            "initial_state.base: expected int64, got float32");
  EXPECT_EQ(error_with([](StateView& s) { s.g.strides[1] = 8; }),
            "initial_state.g: expected a contiguous tensor, got stride 8 on axis 1 of shape "
            "[2, 128, 4]");
  EXPECT_EQ(error_with([](StateView& s) { s.beta = {}; }),
            "initial_state.beta: expected a tensor, got none");
  EXPECT_EQ(error_with([](StateView& s) { s.position = {}; }),
            "initial_state: expected none without initial_state.position, got a tensor "
            "[2, 128, 2, 3]");
  EXPECT_EQ(error_with([](StateView& s) { s.max_position = -1; }),
            "initial_state.max_position: expected 0..2^48, got -1");

  inputs_.initial_state = good;
  state_.position[1] = 1001;
  EXPECT_EQ(InputsError(), "initial_state.position[1]: expected 0..max_position = 1000, got 1001");
  state_.position[1] = 200;
  for (const std::int64_t base : {0, 100, 256, -64}) {
    state_.base[1] = base;
    EXPECT_EQ(InputsError(),
              "initial_state.base[1]: expected a multiple of 64 with 0 <= position - base <= 128 "
              "for position 200, got " +
                  std::to_string(base));
  }
  state_.base[1] = 128;
  EXPECT_EQ(InputsError(), "no error");
  StateBuffers small(kB, 1);
  small.position[1] = 200;
  small.base[1] = 128;
  inputs_.initial_state = small.View();
  EXPECT_EQ(InputsError(),
            "initial_state.nodes: expected at least 2 slots for 128 folded tokens, got 1");
}

TEST_F(ValidateTest, FinalState) {
  inputs_.initial_state = state_.View();
  StateView final_state = other_state_.View();
  final_state.v = inputs_.initial_state.v;
  EXPECT_EQ(FinalStateError(final_state),
            "final_state.v: expected memory apart from initial_state.v, got an overlap");
  final_state = other_state_.View();
  final_state.base.data = state_.base.data() + 1;
  EXPECT_EQ(FinalStateError(final_state),
            "final_state.base: expected memory apart from initial_state.base, got an overlap");
  final_state = other_state_.View();
  final_state.position = {};
  EXPECT_EQ(FinalStateError(final_state),
            "final_state.k: expected none without final_state.position, got a tensor "
            "[2, 128, 2, 3]");

  state_.position[0] = 252;
  state_.base[0] = 128;
  inputs_.level_policy = LevelPolicy::kSaturate;
  EXPECT_EQ(FinalStateError(other_state_.View()), "no error");
  StateBuffers small(kB, 1);
  EXPECT_EQ(FinalStateError(small.View()),
            "final_state.nodes: expected at least 2 slots for 192 folded tokens, got 1");
  inputs_.level_scales = View({kB, kT, kH, 8});
  EXPECT_EQ(FinalStateError(small.View()), "no error") << "one slot takes all that is older";
}

TEST_F(ValidateTest, Step) {
  EXPECT_EQ(StepError(), "initial_state: expected a state for a step, got none");
  inputs_.initial_state = state_.View();
  for (const std::int64_t T : {0, 65}) {
    std::vector<float> memory(65 * kB * kH * kL);
    for (TensorView* view : {&inputs_.q, &inputs_.k, &inputs_.v, &inputs_.g, &inputs_.beta,
                             &inputs_.level_scales, &o_}) {
      view->sizes[1] = T;
      view->data = memory.data();
    }
    EXPECT_EQ(StepError(), "q: expected 1..64 tokens for a step, got " + std::to_string(T));
  }
}

TEST_F(ValidateTest, StepNeedsSlotsForWhatItFolds) {
  StateBuffers small(kB, 0);
  inputs_.initial_state = small.View();
  small.position[0] = 123;
  EXPECT_EQ(StepError(), "no error");
  small.position[0] = 124;
  EXPECT_EQ(StepError(),
            "initial_state.nodes: expected at least 1 slots for 64 folded tokens, got 0");
}

TEST_F(ValidateTest, StepTakesNoPackedSequences) {
  inputs_.initial_state = state_.View();
  for (TensorView* view : {&inputs_.q, &inputs_.k, &inputs_.v, &inputs_.g, &inputs_.beta,
                           &inputs_.level_scales, &o_}) {
    view->sizes[0] = 1;
  }
  StateBuffers one(1, 2);
  inputs_.initial_state = one.View();
  const std::vector<std::int64_t> cu = {0, 5};
  inputs_.cu_seqlens = cu;
  EXPECT_EQ(StepError(), "cu_seqlens: expected none for a step, got 2 offsets");
}

TEST_F(ValidateTest, GradientViews) {
  const auto error = [&](const Gradients& gradients) {
    return ErrorOf([&] { ValidateGradients(inputs_, gradients); });
  };
  EXPECT_EQ(error({}), "no error");
  EXPECT_EQ(error({.v = inputs_.v}), "no error");
  EXPECT_EQ(error({.v = inputs_.q}),
            "gradients.v: expected the shape [2, 5, 4, 6] of its input, got [2, 5, 2, 3]");
  EXPECT_EQ(error({.g = View({kB, kT, kH}, DType::kBFloat16)}),
            "gradients.g: expected float32, got bfloat16");
  Gradients broadcast{.q = inputs_.q};
  broadcast.q.strides[0] = 0;
  EXPECT_EQ(error(broadcast),
            "gradients.q: expected distinct elements (it is written), got stride 0 on axis 0");
  EXPECT_EQ(error({.initial_state = state_.GradView()}),
            "gradients.initial_state: expected none without an initial state, got gradients");
  inputs_.initial_state = state_.View();
  EXPECT_EQ(error({.initial_state = other_state_.GradView()}), "no error");
  StateBuffers more(kB, 3);
  EXPECT_EQ(error({.initial_state = more.GradView()}),
            "gradients.initial_state.nodes: expected shape [N, H, S, K, V] = [2, 4, 2, 3, 6], got "
            "[2, 4, 3, 3, 6]");
  StateGradView partial = other_state_.GradView();
  partial.nodes = {};
  EXPECT_EQ(error({.initial_state = partial}),
            "gradients.initial_state.k: expected none without nodes, got a tensor "
            "[2, 128, 2, 3]");
  inputs_.transition = Transition::kScalarGate;
  EXPECT_EQ(error({.beta = inputs_.beta}),
            "gradients.beta: expected none with a scalar gate, got a tensor [2, 5, 4]");
}

TEST_F(ValidateTest, FinalStateGradient) {
  const auto error = [&](const StateGradView& view) {
    return ErrorOf([&] { ValidateFinalStateGrad(inputs_, view, Device::kCPU); });
  };
  EXPECT_EQ(error({}), "no error");
  StateBuffers none(kB, 0);
  EXPECT_EQ(error(none.GradView()), "no error");
  inputs_.initial_state = state_.View();
  state_.position[1] = 200;
  state_.base[1] = 128;
  EXPECT_EQ(error(none.GradView()),
            "d_final_state.nodes: expected at least 2 slots for 128 folded tokens, got 0");
  StateGradView wrong = other_state_.GradView();
  wrong.k.dtype = DType::kFloat64;
  EXPECT_EQ(error(wrong), "d_final_state.k: expected float32, got float64");
}

// The public functions: nothing is written on an error, and calls without tokens are fine.
TEST_F(ValidateTest, NoOutputIsTouchedOnAnError) {
  std::vector<float> out(kB * kT * kH * kV, 7.0f);
  const TensorView o(out.data(), DType::kFloat32, {kB, kT, kH, kV});
  inputs_.level_scales = View({kB, kT, kH, 3});
  EXPECT_THROW(Forward(inputs_, o, {}, {}), Error);
  inputs_.initial_state = state_.View();
  EXPECT_THROW(Step(inputs_, o, {}), Error);
  EXPECT_THROW(Backward(inputs_, o_, {}, {.v = o}, {}), Error);
  for (const float x : out) ASSERT_EQ(x, 7.0f);
  for (const std::int64_t position : state_.position) ASSERT_EQ(position, 0);
}

TEST_F(ValidateTest, CallsWithoutTokens) {
  for (const int axis : {0, 1}) {
    for (TensorView* view : {&inputs_.q, &inputs_.k, &inputs_.v, &inputs_.g, &inputs_.beta,
                             &inputs_.level_scales, &o_}) {
      view->data = nullptr;
      view->sizes[0] = kB;
      view->sizes[1] = kT;
      view->sizes[axis] = 0;
    }
    Forward(inputs_, o_, {}, {});
    Backward(inputs_, o_, {}, {.q = inputs_.q}, {});
    EXPECT_EQ(ForwardWorkspaceBytes(inputs_, {}, Device::kCPU), 0u);
  }
}

TEST(OpsTest, ThreadsAndDevices) {
  EXPECT_THROW(SetNumThreads(-1), Error);
  SetNumThreads(3);
  EXPECT_EQ(GetNumThreads(), 3);
  SetNumThreads(0);
  EXPECT_GE(GetNumThreads(), 1);
  EXPECT_TRUE(DeviceAvailable(Device::kCPU));
}

}  // namespace
}  // namespace fenwick
