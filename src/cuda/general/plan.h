// What the host decides about a call before anything is launched: how its tokens fall into chunks,
// how high the tree over chunks can get, and how many heads run at a time. Pure host code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "fenwick/ops.h"

namespace fenwick::cuda::general {

// A pass runs as many groups of heads as fit into this much workspace (one group at least, whatever
// it takes). 2 GiB fills an H200 many times over at any shape that needs more than one pass.
inline constexpr std::size_t kPassBytes = std::size_t{2} << 30;

struct Plan {
  std::int64_t N = 0, G = 0, H = 0, K = 0, V = 0, L = 0;
  std::int64_t tokens = 0;               // T of a sequence; longest one where packed
  std::int64_t chunks_per_sequence = 0;  // upper bound, the longest one's where packed
  std::int64_t total_chunks = 0;
  std::vector<std::int64_t> token_begin, chunk_begin;  // [N + 1] packed sequences only
  // Bits that the index of a chunk of the call can have: a chunk reads at most this many nodes.
  int node_bits = 0;
  int initial_slots = 0;

  std::int64_t heads_per_group() const { return H / G; }
  // Merges of two nodes of 2^bit chunks happen for bit < merge_levels().
  int merge_levels() const { return node_bits > 0 ? node_bits - 1 : 0; }
};

Plan MakePlan(const Inputs& inputs);

// Groups to run at a time, where `bytes(groups)` is the workspace that many need.
std::int64_t GroupsPerPass(const Plan& plan, const std::function<std::size_t(std::int64_t)>& bytes);

}  // namespace fenwick::cuda::general
