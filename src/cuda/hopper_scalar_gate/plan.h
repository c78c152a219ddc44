// How a call of the scalar-gate operator runs on Hopper: pure host code, testable without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cuda/hopper_scalar_gate/params.h"
#include "fenwick/ops.h"

namespace fenwick::cuda::hopper {

// Arrays of one call in the workspace, as byte offsets; every one a multiple of 256.
struct ForwardWorkspace {
  std::size_t sequences = 0, sequence_of_chunk = 0, sequence_of_segment = 0;
  std::size_t local_decay = 0, decay_to_end = 0, weights = 0, node_states = 0, node_decay = 0;
  std::size_t segment_states = 0, segment_decay = 0;
  std::size_t bytes = 0;
};

struct ForwardPlan {
  Layout layout;     // without its table pointers
  int key_size = 0;  // 64, 128 or 256
  int value_tiles = 0;
  int weight_rows = 0;
  int heads_per_pass = 0;   // heads whose states are in the workspace at a time
  int heads_per_block = 0;  // output kernel
  ForwardWorkspace workspace;
};

// No plan: the shapes, types, strides or states are not what these kernels are built for.
std::optional<ForwardPlan> MakeForwardPlan(const Inputs& inputs, const StateView& final_state,
                                           int multiprocessors);

// Tables of a packed batch, in host memory; empty where not packed.
struct PackedTables {
  std::vector<Sequence> sequences;  // non-empty ones
  std::vector<int> sequence_of_chunk, sequence_of_segment;
};
PackedTables MakePackedTables(std::span<const std::int64_t> cu_seqlens, int log_segment);

}  // namespace fenwick::cuda::hopper
