#include "cuda/general/call.h"
#include "cuda/launch.h"
#include "cuda/upload.h"

namespace fenwick::cuda::general {
namespace {

bool Quads(const TensorView& view, int width_axis) {
  if (view.size(width_axis) % 4 != 0) return false;
  if (reinterpret_cast<std::uintptr_t>(view.data) % (4 * ElementSize(view.dtype)) != 0) {
    return false;
  }
  for (int axis = 0; axis < width_axis; ++axis) {
    if (view.size(axis) > 1 && view.stride(axis) % 4 != 0) return false;
  }
  return true;
}

}  // namespace

Tables TakeTables(Arena& arena, const Plan& plan) {
  Tables tables;
  if (!plan.token_begin.empty()) {
    tables.token_begin = arena.Take<std::int64_t>(plan.N + 1);
    tables.chunk_begin = arena.Take<std::int64_t>(plan.N + 1);
  }
  return tables;
}

void UploadTables(const Plan& plan, const Tables& tables, cudaStream_t stream) {
  Upload(plan.token_begin, tables.token_begin, stream);
  Upload(plan.chunk_begin, tables.chunk_begin, stream);
}

Rows MakeRows(const TensorView& view) {
  Rows rows;
  if (!view.given()) return rows;
  rows.data = view.data;
  rows.dtype = view.dtype;
  rows.width = view.rank == 4 ? static_cast<int>(view.size(3)) : 1;
  rows.quads = view.rank == 4 && Quads(view, 3);
  rows.batch_stride = view.stride(0);
  rows.token_stride = view.stride(1);
  rows.head_stride = view.stride(2);
  return rows;
}

TokenGradients MakeGradients(const TensorView& call, const TensorView& ring,
                             const TensorView& d_final_ring, cudaStream_t stream) {
  if (ring.given()) {
    ZeroAsync(ring.data, ring.num_elements() * ElementSize(ring.dtype), stream);
  }
  TokenGradients gradients;
  gradients.out.call = MakeRows(call);
  gradients.out.ring = MakeRows(ring);
  gradients.d_final = MakeRows(d_final_ring);
  return gradients;
}

Problem MakeProblem(const Inputs& inputs, const Plan& plan, const Tables& tables) {
  const StateView& state = inputs.initial_state;
  Problem problem;
  problem.geometry.num_sequences = static_cast<int>(plan.N);
  problem.geometry.tokens = plan.tokens;
  problem.geometry.chunks_per_sequence = plan.chunks_per_sequence;
  problem.geometry.total_chunks = plan.total_chunks;
  problem.geometry.token_begin = tables.token_begin;
  problem.geometry.chunk_begin = tables.chunk_begin;
  problem.q.call = MakeRows(inputs.q);
  problem.k.call = MakeRows(inputs.k);
  problem.v.call = MakeRows(inputs.v);
  problem.g.call = MakeRows(inputs.g);
  problem.beta.call = MakeRows(inputs.beta);
  problem.level_scales.call = MakeRows(inputs.level_scales);
  if (state.given()) {
    problem.geometry.position = static_cast<const std::int64_t*>(state.position.data);
    problem.geometry.base = static_cast<const std::int64_t*>(state.base.data);
    problem.k.ring = MakeRows(state.k);
    problem.v.ring = MakeRows(state.v);
    problem.g.ring = MakeRows(state.g);
    problem.beta.ring = MakeRows(state.beta);
    problem.initial_nodes = plan.initial_slots > 0 ? state.nodes.data : nullptr;
    problem.initial_slots = plan.initial_slots;
  }
  problem.top_slot =
      inputs.level_policy == LevelPolicy::kSaturate ? TopSlot(static_cast<int>(plan.L)) : kNoTop;
  problem.K = static_cast<int>(plan.K);
  problem.V = static_cast<int>(plan.V);
  problem.L = static_cast<int>(plan.L);
  problem.H = static_cast<int>(plan.H);
  problem.heads_per_group = static_cast<int>(plan.heads_per_group());
  problem.scale = inputs.scale;
  SetPass(problem, 0, plan.G);
  return problem;
}

void SetPass(Problem& problem, std::int64_t group_begin, std::int64_t groups) {
  problem.group_begin = static_cast<int>(group_begin);
  problem.groups = static_cast<int>(groups);
  problem.head_begin = problem.group_begin * problem.heads_per_group;
  problem.heads = problem.groups * problem.heads_per_group;
}

}  // namespace fenwick::cuda::general
