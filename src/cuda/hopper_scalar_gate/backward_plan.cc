// Pure host code: the plan of a backward call.
#include <algorithm>

#include "cuda/hopper.h"
#include "cuda/hopper_scalar_gate/backward_params.h"
#include "cuda/hopper_scalar_gate/plan.h"

namespace fenwick::cuda::hopper {
namespace {

// What a backward call may use beside its tensors: 4 GiB, or a quarter of what they hold where that
// is more (at T = 1M 4 GiB are enough for a few heads only).
constexpr std::size_t kLeastWorkspaceTarget = std::size_t{4} << 30;

std::size_t BackwardWorkspaceTarget(const Inputs& inputs) {
  std::size_t bytes = 0;  // inputs, output, and a gradient of each
  for (const TensorView* view :
       {&inputs.q, &inputs.k, &inputs.v, &inputs.v, &inputs.g, &inputs.level_scales}) {
    bytes += 2 * static_cast<std::size_t>(view->num_elements()) * ElementSize(view->dtype);
  }
  return WorkspaceTarget(std::max(kLeastWorkspaceTarget, bytes / 4));
}

RunRule MakeRunRule(int heads_in_group, int groups, int value_tiles, int multiprocessors,
                    int most_tiles) {
  const int most_heads = std::max(1, most_tiles / value_tiles);
  RunRule rule;
  rule.group_heads = heads_in_group;
  rule.wanted = std::max(1, multiprocessors / (2 * groups));
  rule.least = (heads_in_group + most_heads - 1) / most_heads;
  rule.most = std::max(rule.least, kMaxRuns);
  return rule;
}

void PlaceHeads(BackwardPlan& plan, const Inputs& inputs, int heads) {
  ForwardPlan& forward = plan.forward;
  const int groups = static_cast<int>(inputs.q.size(2));
  const int heads_in_group = static_cast<int>(inputs.v.size(2)) / groups;
  const int together = std::min(heads, heads_in_group);
  forward.heads_per_pass = heads;
  BackwardWorkspace& w = plan.workspace;
  w = {};
  w.forward = PlaceForwardWorkspace(forward, !inputs.cu_seqlens.empty(), heads);
  w.bytes = w.forward.bytes;
  const auto place = [&w](std::size_t& offset, std::size_t bytes) {
    offset = w.bytes;
    w.bytes += (bytes + 255) / 256 * 256;
  };
  const int key_blocks = forward.key_size / kKeyBlock;
  const std::size_t tiles = static_cast<std::size_t>(heads) * forward.value_tiles * key_blocks;
  const std::size_t chunks = tiles * forward.layout.num_chunks;
  const std::size_t segments = tiles * forward.layout.num_segments;
  place(w.segment_reads, segments * forward.layout.segment_levels * kStateElements * 4);
  place(w.segment_grads, segments * kStateElements * 4);
  place(w.segment_flow, segments * kFlowParts * 4);
  place(w.chunk_grads, chunks * kStateElements * 2);
  place(w.scale_grads, chunks * forward.weight_rows * kChunk * 2);
  place(w.node_reads, chunks * kChunk * 4);
  place(w.local_flow, chunks / key_blocks * 192 * 4);
  const std::size_t head_chunks = static_cast<std::size_t>(heads) * forward.layout.num_chunks;
  place(w.flow_change, head_chunks * kChunk * 4);
  place(w.chunk_flow, head_chunks * sizeof(FlowStep));
  const std::size_t total =
      static_cast<std::size_t>(inputs.q.size(0)) * inputs.q.size(1) * forward.key_size * 4;
  const std::size_t partial = total * (heads / together);
  const int local_runs = plan.MostLocalRuns();
  place(w.node_dq, plan.node_runs.Runs(forward.shortest) * partial);
  if (local_runs > 1) {
    place(w.local_dq, local_runs * partial);
    place(w.local_dk, local_runs * partial);
  }
  if (together < heads_in_group) {
    place(w.unfinished, std::min<std::size_t>(local_runs, 2) * key_blocks *
                            forward.layout.num_chunks * kUnfinished * kWarpgroup * 4);
  }
  if (key_blocks > 1) {
    place(w.value_shares, head_chunks * forward.value_tiles * kChunk * kValueTile * 4);
  }
}

}  // namespace

std::optional<BackwardPlan> MakeBackwardPlan(const Inputs& inputs,
                                             const StateGradView& d_final_state,
                                             const Gradients& gradients, int multiprocessors) {
  if (d_final_state.given() || gradients.initial_state.given()) return std::nullopt;
  for (const TensorView* view :
       {&gradients.q, &gradients.k, &gradients.v, &gradients.g, &gradients.level_scales}) {
    if (!view->given()) return std::nullopt;
  }
  const std::optional<ForwardPlan> forward = MakeForwardPlan(inputs, {}, multiprocessors);
  if (!forward.has_value()) return std::nullopt;
  BackwardPlan plan;
  plan.forward = *forward;
  plan.forward.key_size = std::max(forward->key_size, kKeyBlock);
  plan.forward.scales_tile_heads = 0;  // these kernels read weights
  const int groups = static_cast<int>(inputs.q.size(2));
  const int heads_in_group = static_cast<int>(inputs.v.size(2)) / groups;
  plan.node_runs = MakeRunRule(heads_in_group, groups, forward->value_tiles, multiprocessors,
                               kMaxNodeTilesPerBlock);
  plan.local_runs = MakeRunRule(heads_in_group, groups, forward->value_tiles, multiprocessors,
                                kMaxLocalTilesPerBlock);
  const std::size_t workspace_target = BackwardWorkspaceTarget(inputs);
  const int heads = ChooseHeadsPerPass(heads_in_group, groups, [&](int count) {
    PlaceHeads(plan, inputs, count);
    return plan.workspace.bytes <= workspace_target;
  });
  PlaceHeads(plan, inputs, heads);
  return plan;
}

}  // namespace fenwick::cuda::hopper
