// Plans and kernel selection: pure host code.
#include "cuda/general/plan.h"

#include <gtest/gtest.h>

#include <vector>

#include "cuda/select.h"

namespace fenwick::cuda {
namespace {

using general::GroupsPerPass;
using general::MakePlan;
using general::Plan;

struct Call {
  std::vector<std::int64_t> cu_seqlens;
  Inputs inputs;

  Call(std::int64_t B, std::int64_t T, std::int64_t G, std::int64_t H, std::int64_t K,
       std::int64_t V, std::int64_t L) {
    inputs.q = TensorView(nullptr, DType::kFloat32, {B, T, G, K});
    inputs.v = TensorView(nullptr, DType::kFloat32, {B, T, H, V});
    inputs.level_scales = TensorView(nullptr, DType::kFloat32, {B, T, H, L});
  }
};

TEST(Plan, CountsChunksOfEqualSequences) {
  const Call call(3, 130, 2, 4, 16, 8, 9);
  const Plan plan = MakePlan(call.inputs);
  EXPECT_EQ(plan.N, 3);
  EXPECT_EQ(plan.chunks_per_sequence, 3);
  EXPECT_EQ(plan.total_chunks, 9);
  EXPECT_EQ(plan.node_bits, 2);  // chunk 2 is 0b10
  EXPECT_EQ(plan.merge_levels(), 1);
}

TEST(Plan, OneChunkReadsNothing) {
  const Call call(1, 64, 1, 1, 16, 8, 7);
  EXPECT_EQ(MakePlan(call.inputs).node_bits, 0);
  EXPECT_EQ(MakePlan(call.inputs).merge_levels(), 0);
}

TEST(Plan, PacksSequencesWithEmptyOnes) {
  Call call(1, 200, 1, 1, 16, 8, 9);
  call.cu_seqlens = {0, 0, 65, 65, 200};
  call.inputs.cu_seqlens = call.cu_seqlens;
  const Plan plan = MakePlan(call.inputs);
  EXPECT_EQ(plan.chunk_begin, (std::vector<std::int64_t>{0, 0, 2, 2, 5}));
  EXPECT_EQ(plan.tokens, 135);
}

TEST(Plan, LeavesRoomForTheRing) {
  Call call(2, 1, 1, 1, 16, 8, 20);
  std::int64_t dummy = 0;
  call.inputs.initial_state.position = TensorView(&dummy, DType::kInt64, {2});
  call.inputs.initial_state.nodes = TensorView(&dummy, DType::kFloat32, {2, 1, 5, 16, 8});
  call.inputs.initial_state.max_position = 1000;
  const Plan plan = MakePlan(call.inputs);
  EXPECT_EQ(plan.chunks_per_sequence, 3);  // 128 ring tokens and one more
  EXPECT_EQ(plan.node_bits, 4);            // chunk 15
  EXPECT_EQ(plan.initial_slots, 5);
}

TEST(Plan, PassesFitTheWorkspace) {
  const Call call(1, 64, 24, 24, 16, 8, 7);
  const Plan plan = MakePlan(call.inputs);
  EXPECT_EQ(GroupsPerPass(plan, [](std::int64_t) { return std::size_t{1}; }), 24);
  EXPECT_EQ(GroupsPerPass(plan, [](std::int64_t) { return general::kPassBytes + 1; }), 1);
  const auto linear = [](std::int64_t groups) {
    return static_cast<std::size_t>(groups) * (general::kPassBytes / 5);
  };
  EXPECT_EQ(GroupsPerPass(plan, linear), 5);
}

TEST(Select, GeneralKernelsRunEverythingThatIsNotHopper) {
  const Call call(1, 64, 1, 1, 128, 64, 7);
  DeviceTraits ampere;
  ampere.major = 8;
  EXPECT_EQ(SelectForward(call.inputs, {}, ampere, KernelChoice::kHopper), Kernels::kGeneral);
  EXPECT_EQ(SelectBackward(call.inputs, {}, {}, ampere, KernelChoice::kAuto), Kernels::kGeneral);
  DeviceTraits hopper;
  hopper.major = 9;
  EXPECT_EQ(SelectForward(call.inputs, {}, hopper, KernelChoice::kGeneral), Kernels::kGeneral);
}

}  // namespace
}  // namespace fenwick::cuda
