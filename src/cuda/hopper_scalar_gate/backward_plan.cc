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
  const int key_blocks = forward.key_size / kKeyBlock;
  const std::size_t tiles = static_cast<std::size_t>(heads) * forward.value_tiles * key_blocks;
  const std::size_t chunks = tiles * forward.layout.num_chunks;
  const std::size_t segments = tiles * forward.layout.num_segments;
  w.segment_reads = Place(w.bytes, segments * forward.layout.segment_levels * kStateElements * 4);
  w.segment_grads = Place(w.bytes, segments * kStateElements * 4);
  w.segment_flow = Place(w.bytes, segments * kFlowParts * 4);
  w.chunk_grads = Place(w.bytes, chunks * kStateElements * 2);
  w.scale_grads = Place(w.bytes, chunks * forward.weight_rows * kChunk * 2);
  w.node_reads = Place(w.bytes, chunks * kChunk * 4);
  w.local_flow = Place(w.bytes, chunks / key_blocks * 192 * 4);
  const std::size_t head_chunks = static_cast<std::size_t>(heads) * forward.layout.num_chunks;
  w.flow_change = Place(w.bytes, head_chunks * kChunk * 4);
  w.chunk_flow = Place(w.bytes, head_chunks * sizeof(FlowStep));
  const std::size_t total =
      static_cast<std::size_t>(inputs.q.size(0)) * inputs.q.size(1) * forward.key_size * 4;
  const std::size_t partial = total * (heads / together);
  const int local_runs = plan.MostLocalRuns();
  w.node_dq = Place(w.bytes, plan.node_runs.Runs(forward.shortest) * partial);
  if (local_runs > 1) {
    w.local_dq = Place(w.bytes, local_runs * partial);
    w.local_dk = Place(w.bytes, local_runs * partial);
  }
  if (together < heads_in_group) {
    w.unfinished = Place(w.bytes, std::min<std::size_t>(local_runs, 2) * key_blocks *
                                      forward.layout.num_chunks * kUnfinished * kWarpgroup * 4);
  }
  if (key_blocks > 1) {
    w.value_shares = Place(w.bytes, head_chunks * forward.value_tiles * kChunk * kValueTile * 4);
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
