// Pure host code: the plan of a backward call.
#include <algorithm>
#include <bit>

#include "cuda/hopper_scalar_gate/backward_params.h"
#include "cuda/hopper_scalar_gate/plan.h"

namespace fenwick::cuda::hopper {
namespace {

// What a backward call may use beside its tensors.
constexpr std::size_t kWorkspaceTarget = std::size_t{4} << 30;

void PlaceHeads(BackwardPlan& plan, const Inputs& inputs, int heads, int multiprocessors) {
  ForwardPlan& forward = plan.forward;
  const int groups = static_cast<int>(inputs.q.size(2));
  const int heads_in_group = static_cast<int>(inputs.v.size(2)) / groups;
  const int together = std::min(heads, heads_in_group);
  forward.heads_per_pass = heads;
  forward.heads_per_block =
      ChooseHeadsPerBlock(together, heads / together, forward.layout.num_chunks,
                          forward.value_tiles, multiprocessors, kMaxBackwardTilesPerBlock);
  plan.runs_per_pass = (together + forward.heads_per_block - 1) / forward.heads_per_block;
  plan.runs = heads_in_group / together * plan.runs_per_pass;

  BackwardWorkspace& w = plan.workspace;
  w = {};
  w.forward = PlaceForwardWorkspace(forward, !inputs.cu_seqlens.empty(), heads);
  w.bytes = w.forward.bytes;
  const auto place = [&w](std::size_t& offset, std::size_t bytes) {
    offset = w.bytes;
    w.bytes += (bytes + 255) / 256 * 256;
  };
  const std::size_t tiles = static_cast<std::size_t>(heads) * forward.value_tiles;
  const std::size_t chunks = tiles * forward.layout.num_chunks;
  const std::size_t segments = tiles * forward.layout.num_segments;
  place(w.segment_reads, segments * plan.segment_levels * kStateElements * 4);
  place(w.segment_grads, segments * kStateElements * 4);
  place(w.segment_flow, segments * kFlowParts * 4);
  place(w.chunk_grads, chunks * kStateElements * 2);
  place(w.scale_grads, chunks * forward.weight_rows * kChunk * 4);
  place(w.node_reads, chunks * kChunk * 4);
  place(w.local_flow, chunks * 192 * 4);
  place(w.flow_change, static_cast<std::size_t>(heads) * forward.layout.num_chunks * kChunk * 4);
  const std::size_t partial = static_cast<std::size_t>(plan.runs) * inputs.q.size(0) *
                              inputs.q.size(1) * groups * kBackwardKeySize * 4;
  place(w.node_dq, partial);
  place(w.local_dq, partial);
  place(w.local_dk, partial);
}

}  // namespace

std::optional<BackwardPlan> MakeBackwardPlan(const Inputs& inputs,
                                             const StateGradView& d_final_state,
                                             const Gradients& gradients, int multiprocessors) {
  if (d_final_state.given() || gradients.initial_state.given()) return std::nullopt;
  // A gradient of v with gaps between its rows once got writes into the gaps (a property test on
  // the device); until that is understood, only dense ones run here.
  const TensorView& dv = gradients.v;
  if (dv.given() &&
      (dv.stride(3) != 1 || dv.stride(2) != dv.size(3) || dv.stride(1) != dv.size(2) * dv.size(3) ||
       dv.stride(0) != dv.size(1) * dv.stride(1))) {
    return std::nullopt;
  }
  for (const TensorView* view :
       {&gradients.q, &gradients.k, &gradients.v, &gradients.g, &gradients.level_scales}) {
    if (!view->given()) return std::nullopt;
  }
  if (inputs.q.dtype != DType::kBFloat16 || inputs.q.size(3) > kBackwardKeySize) {
    return std::nullopt;
  }
  const std::optional<ForwardPlan> forward = MakeForwardPlan(inputs, {}, multiprocessors);
  if (!forward.has_value()) return std::nullopt;
  BackwardPlan plan;
  plan.forward = *forward;
  plan.forward.key_size = kBackwardKeySize;
  plan.forward.scales_tile_heads = 0;  // these kernels read weights
  const int nodes = forward->weight_rows - kLocalLevels;
  plan.segment_levels = std::max(1, nodes - forward->layout.log_segment);
  const int groups = static_cast<int>(inputs.q.size(2));
  const int heads =
      ChooseHeadsPerPass(static_cast<int>(inputs.v.size(2)) / groups, groups, [&](int count) {
        PlaceHeads(plan, inputs, count, multiprocessors);
        return plan.workspace.bytes <= kWorkspaceTarget;
      });
  PlaceHeads(plan, inputs, heads, multiprocessors);
  return plan;
}

}  // namespace fenwick::cuda::hopper
