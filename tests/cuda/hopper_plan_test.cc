// Plans of the scalar-gate kernels for Hopper: what they take, what they leave to the general
// kernels, and how they cut the work. Pure host code.
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "cuda/hopper.h"
#include "cuda/hopper_scalar_gate/plan.h"
#include "cuda/tile/mappable.h"
#include "fake_call.h"

namespace fenwick::cuda::hopper {
namespace {

constexpr int kMultiprocessors = 132;

struct Call : testing::FakeCall {
  using FakeCall::FakeCall;
  std::optional<ForwardPlan> Forward() const {
    return MakeForwardPlan(inputs, {}, kMultiprocessors);
  }
  std::optional<BackwardPlan> Backward() const {
    return MakeBackwardPlan(inputs, {}, gradients, kMultiprocessors);
  }
};

TEST(HopperPlan, PadsKeysAndCutsValues) {
  const auto plan = Call(2, 1000, 1, 8, 96, 104).Forward();
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->key_size, 128);
  EXPECT_EQ(plan->value_tiles, 2);
  EXPECT_EQ(plan->layout.chunks_per_sequence, 8);
  EXPECT_EQ(plan->layout.num_chunks, 16);
  EXPECT_EQ(plan->weight_rows, kLocalLevels + 3);  // chunk 7 reads three nodes
}

TEST(HopperPlan, LeavesTheRestToTheGeneralKernels) {
  EXPECT_FALSE(Call(1, 100, 1, 1, 64, 64, DType::kFloat32).Forward().has_value());
  EXPECT_FALSE(Call(1, 100, 1, 1, 320, 64).Forward().has_value());
  EXPECT_FALSE(Call(1, 100, 2, 2, 60, 64).Forward().has_value());  // rows of 120 bytes
  EXPECT_FALSE(Call(1, 100, 1, 1, 320, 64).Backward().has_value());
  EXPECT_FALSE(Call(1, 20000, 1, 1, 64, 64, DType::kFloat16).Backward().has_value());
  Call packed(1, 20000, 1, 1, 64, 64, DType::kFloat16);  // no sequence of it is too long
  packed.cu_seqlens = {0, 9000, 20000};
  packed.inputs.cu_seqlens = packed.cu_seqlens;
  EXPECT_TRUE(packed.Backward().has_value());

  Call misaligned(1, 100, 1, 1, 64, 64);
  misaligned.inputs.v.data = static_cast<char*>(misaligned.inputs.v.data) + 2;
  EXPECT_FALSE(misaligned.Forward().has_value());

  Call with_state(1, 100, 1, 1, 64, 64);
  std::int64_t position = 0;
  with_state.inputs.initial_state.position = TensorView(&position, DType::kInt64, {1});
  EXPECT_FALSE(with_state.Forward().has_value());

  Call without_dg(1, 100, 1, 1, 64, 64);
  without_dg.gradients.g = {};
  EXPECT_FALSE(without_dg.Backward().has_value());
}

TEST(HopperPlan, CopiesLevelScalesWhereTheirRowsAreAligned) {
  Call call(2, 1000, 1, 48, 128, 64);
  const auto tile_heads = [&call](DType dtype, std::int64_t L) {
    call.inputs.level_scales = TensorView(call.inputs.q.data, dtype, {2, 1000, 48, L});
    return call.Forward()->scales_tile_heads;
  };
  EXPECT_EQ(tile_heads(DType::kBFloat16, 18), 4);
  EXPECT_EQ(tile_heads(DType::kBFloat16, 15), 4);
  EXPECT_EQ(tile_heads(DType::kBFloat16, 33), 1);
  EXPECT_EQ(tile_heads(DType::kFloat32, 18), 0);
  EXPECT_EQ(tile_heads(DType::kBFloat16, 90), 0);  // too wide
  EXPECT_EQ(call.Backward()->forward.scales_tile_heads, 0);

  const std::int64_t T = 1000, H = 48, L = 18, row = H * L + 2;  // rows that are not aligned
  call.inputs.level_scales =
      TensorView(call.inputs.q.data, DType::kBFloat16, {2, T, H, L}, {T * row, row, L, 1});
  EXPECT_EQ(call.Forward()->scales_tile_heads, 0);
}

TEST(HopperPlan, LongCallsHaveItemsOfMoreHeads) {
  const auto heads = [](std::int64_t T) {
    return Call(2, T, 1, 48, 128, 64).Forward()->heads_per_block;
  };
  EXPECT_LT(heads(2048), heads(32768));
  EXPECT_EQ(heads(131072), kMaxTilesPerItem);
  EXPECT_EQ(Call(2, 8192, 16, 16, 128, 64).Forward()->heads_per_block, 1);
}

TEST(HopperPlan, PacksSequencesWithEmptyOnes) {
  Call call(1, 3000, 1, 4, 64, 64);
  call.cu_seqlens = {0, 0, 1, 129, 129, 3000};
  call.inputs.cu_seqlens = call.cu_seqlens;
  const auto plan = call.Forward();
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->layout.num_sequences, 3);
  EXPECT_EQ(plan->layout.num_chunks, 1 + 1 + 23);
  const std::vector<Sequence> sequences = MakeSequences(call.cu_seqlens, 6);
  ASSERT_EQ(sequences.size(), 3u);
  EXPECT_EQ(sequences[2].token, 129);
  EXPECT_EQ(sequences[2].length, 2871);
  EXPECT_EQ(sequences[2].first_chunk, 2);
  EXPECT_EQ(sequences[2].first_segment, 2);
}

TEST(HopperPlan, FinalStatesOfPackedSequencesTakeTables) {
  Call call(1, 3000, 1, 4, 64, 64);
  const auto plan = [&] {
    return MakeForwardPlan(call.inputs, call.FinalState(), kMultiprocessors).value();
  };
  EXPECT_EQ(plan().workspace.bytes, call.Forward()->workspace.bytes);
  call.cu_seqlens = {0, 0, 1, 129, 129, 3000};
  call.inputs.cu_seqlens = call.cu_seqlens;
  EXPECT_EQ(plan().packed_states, 5);
  EXPECT_EQ(plan().workspace.bytes, call.Forward()->workspace.bytes + 2 * 256);
}

TEST(HopperPlan, HeadsRunInWholeOrEqualPartsOfAGroup) {
  for (const auto& [G, H] :
       {std::pair{1, 48}, std::pair{16, 16}, std::pair{2, 30}, std::pair{1, 7}}) {
    const Call call(1, 1 << 20, G, H, 128, 64);
    const auto plan = call.Forward();
    ASSERT_TRUE(plan.has_value());
    const int heads_in_group = H / G, heads = plan->heads_per_pass;
    EXPECT_TRUE(heads % heads_in_group == 0 || heads_in_group % heads == 0) << G << " " << H;
    EXPECT_LE(plan->heads_per_block * plan->value_tiles, kMaxTilesPerItem);
  }
}

TEST(HopperPlan, WorkspaceOfALongCallStaysBelowFourGiB) {
  const Call call(2, 131072, 1, 48, 128, 64);
  const auto forward = call.Forward();
  const auto backward = call.Backward();
  ASSERT_TRUE(forward.has_value() && backward.has_value());
  EXPECT_LE(forward->workspace.bytes, std::size_t{4} << 30);
  EXPECT_LE(backward->workspace.bytes, std::size_t{4} << 30);
  EXPECT_EQ(backward->forward.heads_per_pass, 24);
}

// What a call of a million tokens takes beside its 30 GB of tensors does not grow with the number
// of passes.
TEST(HopperPlan, WorkspaceOfAMillionTokensStaysAQuarterOfTheTensors) {
  const Call call(1, 1 << 20, 1, 48, 128, 64);
  const auto plan = call.Backward();
  ASSERT_TRUE(plan.has_value());
  EXPECT_LT(plan->forward.heads_per_pass, 48);
  EXPECT_LE(plan->workspace.bytes, std::size_t{8} << 30);
}

// How a sequence is cut must not depend on what else a call holds: sums would be grouped otherwise.
TEST(HopperPlan, SegmentsAndRunsAreThoseOfTheSequenceAlone) {
  for (const std::int64_t T : {100, 700, 2048, 5000, 8191, 40000}) {
    const auto alone = Call(1, T, 1, 48, 128, 64).Backward().value();
    const auto many = Call(9, T, 1, 48, 128, 64).Backward().value();
    Call packed(1, T + 130000, 1, 48, 128, 64);
    packed.cu_seqlens = {0, 3, 3 + T, T + 130000};
    packed.inputs.cu_seqlens = packed.cu_seqlens;
    const auto together = packed.Backward().value();
    const int chunks = alone.forward.longest;
    for (const BackwardPlan& plan : {many, together}) {
      EXPECT_EQ(plan.forward.layout.segments_wanted, alone.forward.layout.segments_wanted);
      EXPECT_EQ(plan.node_runs.Runs(chunks), alone.node_runs.Runs(chunks));
      EXPECT_EQ(plan.local_runs.Runs(chunks), alone.local_runs.Runs(chunks));
    }
  }
}

TEST(HopperPlan, ShortSequencesAreCutFiner) {
  const auto plan = Call(2, 2048, 1, 48, 128, 64).Backward().value();
  EXPECT_EQ(plan.local_runs.Runs(16), 4);
  EXPECT_EQ(plan.local_runs.Runs(256), 1);
  EXPECT_EQ(plan.node_runs.Runs(256), 2);  // of at most 24 heads
  const int wanted = plan.forward.layout.segments_wanted;
  EXPECT_EQ(LogSegment(16, wanted), 2);
  EXPECT_EQ(LogSegment(32, wanted), 3);
  EXPECT_EQ(LogSegment(64, wanted), 4);
}

TEST(HopperPlan, AimsAtTheWorkspaceThatATestAsksFor) {
  const Call call(1, 4000, 3, 6, 64, 64);
  AimWorkspaceAt(1);
  EXPECT_EQ(call.Backward().value().forward.heads_per_pass, 1);
  EXPECT_EQ(call.Forward().value().heads_per_pass, 1);
  AimWorkspaceAt(0);
  EXPECT_EQ(call.Backward().value().forward.heads_per_pass, 6);
}

TEST(HopperPlan, StoresRowsOfWholeSixteenBytesByTheCopyEngine) {
  TensorView rows(reinterpret_cast<void*>(std::uintptr_t{1} << 20), DType::kBFloat16,
                  {2, 3, 4, 12});
  rows.strides[2] = 16, rows.strides[1] = 64, rows.strides[0] = 192;
  EXPECT_TRUE(CanMapTensor(rows));
  EXPECT_FALSE(CanMapStores(rows));
  rows.sizes[3] = 8;
  EXPECT_TRUE(CanMapStores(rows));
}

TEST(HopperPlan, ArraysDoNotOverlap) {
  AimWorkspaceAt(1);
  const auto plan = Call(1, 3000, 1, 6, 128, 64).Backward();
  AimWorkspaceAt(0);
  ASSERT_TRUE(plan.has_value());
  ASSERT_EQ(plan->forward.heads_per_pass, 1);
  ASSERT_GT(plan->MostLocalRuns(), 1);
  const BackwardWorkspace& w = plan->workspace;
  const std::size_t places[] = {w.forward.local_decay,
                                w.forward.decay_to_end,
                                w.forward.weights,
                                w.forward.node_states,
                                w.forward.node_decay,
                                w.forward.segment_states,
                                w.forward.segment_decay,
                                w.segment_reads,
                                w.segment_grads,
                                w.segment_flow,
                                w.chunk_grads,
                                w.scale_grads,
                                w.node_reads,
                                w.local_flow,
                                w.flow_change,
                                w.node_dq,
                                w.local_dq,
                                w.local_dk,
                                w.unfinished};
  for (std::size_t i = 0; i + 1 < std::size(places); ++i) {
    EXPECT_EQ(places[i] % 256, 0u);
    EXPECT_LT(places[i], places[i + 1]);
  }
  EXPECT_LT(w.unfinished, w.bytes);
}

}  // namespace
}  // namespace fenwick::cuda::hopper
