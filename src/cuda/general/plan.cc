#include "cuda/general/plan.h"

#include <algorithm>
#include <bit>

namespace fenwick::cuda::general {

Plan MakePlan(const Inputs& inputs) {
  Plan plan;
  plan.N = inputs.num_sequences();
  plan.G = inputs.q.size(2);
  plan.K = inputs.q.size(3);
  plan.H = inputs.v.size(2);
  plan.V = inputs.v.size(3);
  plan.L = inputs.level_scales.size(3);

  const StateView& state = inputs.initial_state;
  const std::int64_t max_position = state.given() ? state.max_position : 0;
  const std::int64_t ring_tokens = std::min<std::int64_t>(max_position, kStateRing);
  const auto chunks_of = [&](std::int64_t tokens) {
    return (ring_tokens + tokens + kStateChunk - 1) / kStateChunk;
  };
  if (inputs.cu_seqlens.empty()) {
    plan.tokens = inputs.q.size(1);
    plan.chunks_per_sequence = chunks_of(plan.tokens);
    plan.total_chunks = plan.N * plan.chunks_per_sequence;
  } else {
    plan.token_begin.assign(inputs.cu_seqlens.begin(), inputs.cu_seqlens.end());
    plan.chunk_begin.push_back(0);
    for (std::int64_t n = 0; n < plan.N; ++n) {
      const std::int64_t tokens = plan.token_begin[n + 1] - plan.token_begin[n];
      plan.tokens = std::max(plan.tokens, tokens);
      plan.chunk_begin.push_back(plan.chunk_begin.back() + chunks_of(tokens));
    }
    plan.chunks_per_sequence = chunks_of(plan.tokens);
    plan.total_chunks = plan.chunk_begin.back();
  }
  const std::int64_t last = max_position + plan.tokens - 1;
  plan.node_bits = last > 0 ? std::bit_width(static_cast<std::uint64_t>(last / kStateChunk)) : 0;
  if (state.given()) plan.initial_slots = static_cast<int>(state.nodes.size(2));
  return plan;
}

std::int64_t GroupsPerPass(const Plan& plan,
                           const std::function<std::size_t(std::int64_t)>& bytes) {
  std::int64_t groups = plan.G;
  while (groups > 1 && bytes(groups) > kPassBytes) {
    const auto share = static_cast<std::int64_t>(
        groups * (static_cast<double>(kPassBytes) / static_cast<double>(bytes(groups))));
    groups = std::clamp<std::int64_t>(share, 1, groups - 1);
  }
  return groups;
}

}  // namespace fenwick::cuda::general
