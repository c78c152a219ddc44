// How a call of the scalar-gate operator runs on Hopper: pure host code, testable without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "cuda/hopper_scalar_gate/backward_params.h"
#include "fenwick/ops.h"

namespace fenwick::cuda::hopper {

// Arrays of one call in the workspace, as byte offsets; every one a multiple of 256.
struct ForwardWorkspace {
  std::size_t sequences = 0, sequence_of_chunk = 0, sequence_of_segment = 0;
  std::size_t items_taken = 0, local_decay = 0, decay_to_end = 0, weights = 0, node_states = 0,
              node_decay = 0;
  std::size_t segment_states = 0, segment_decay = 0;
  std::size_t token_begin = 0, chunk_begin = 0;  // final states of packed sequences only
  std::size_t bytes = 0;
};

struct ForwardPlan {
  Layout layout;                  // without its table pointers
  int shortest = 0, longest = 0;  // chunks of a sequence that has any
  int key_size = 0;               // 64, 128 or 256
  int value_tiles = 0;
  int weight_rows = 0;
  int multiprocessors = 0;
  int heads_per_pass = 0;   // heads whose states are in the workspace at a time
  int heads_per_block = 0;  // of one item of the output kernel
  // Heads whose level scales lie in one tile that the output kernel can copy from the tensor; 0:
  // the weights are a pass of their own.
  int scales_tile_heads = 0;
  // Packed sequences, empty ones included, whose final states are asked for.
  std::int64_t packed_states = 0;
  ForwardWorkspace workspace;
};

// Where an array of `size` bytes lies behind those that end at `end`.
inline std::size_t Place(std::size_t& end, std::size_t size) {
  const std::size_t begin = end;
  end += (size + 255) / 256 * 256;
  return begin;
}

// Places the forward's arrays for `heads` heads in a pass.
ForwardWorkspace PlaceForwardWorkspace(const ForwardPlan& plan, bool packed, int heads);

// The most heads whose arrays fit: whole q/k groups, or an equal part of one; 1 if nothing fits.
int ChooseHeadsPerPass(int heads_in_group, int groups, const std::function<bool(int)>& fits);

// No plan: the shapes, types, strides or states are not what these kernels are built for.
std::optional<ForwardPlan> MakeForwardPlan(const Inputs& inputs, const StateView& final_state,
                                           int multiprocessors);

// Arrays of a backward call, after the forward's, as byte offsets.
struct BackwardWorkspace {
  ForwardWorkspace forward;
  std::size_t segment_reads = 0, segment_grads = 0, segment_flow = 0, chunk_grads = 0;
  std::size_t scale_grads = 0, node_reads = 0, local_flow = 0, flow_change = 0, chunk_flow = 0;
  std::size_t node_dq = 0, local_dq = 0, local_dk = 0, unfinished = 0, value_shares = 0;
  std::size_t bytes = 0;
};

struct BackwardPlan {
  ForwardPlan forward;  // with K padded to 128 or 256, and the backward's heads_per_pass
  RunRule node_runs, local_runs;
  int MostLocalRuns() const { return local_runs.Runs(forward.shortest); }
  BackwardWorkspace workspace;
};

// No plan: see MakeForwardPlan; besides, every gradient must be asked for.
std::optional<BackwardPlan> MakeBackwardPlan(const Inputs& inputs,
                                             const StateGradView& d_final_state,
                                             const Gradients& gradients, int multiprocessors);

// What AimWorkspaceAt (hopper.h) was told, or the standard target.
std::size_t WorkspaceTarget(std::size_t standard);

// The non-empty sequences of a packed batch.
std::vector<Sequence> MakeSequences(std::span<const std::int64_t> cu_seqlens, int segments_wanted);

}  // namespace fenwick::cuda::hopper
